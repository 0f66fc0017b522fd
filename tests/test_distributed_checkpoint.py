"""torch.distributed.checkpoint on every sharding: resume, other world sizes, other engines.

Exactness: on the same engine and world size every operation is the same, so losses and weights must be equal bit for
bit. On another one sums are taken in another order: float32 rounding, 6e-8 per operation, grows over 20 steps of this
job to about 1e-6; the tests allow 1e-5.
"""

from __future__ import annotations

import copy
import functools
import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

import dho2_ds.sharding.reduce
from dho2_ds.shards import flat_view
from tests import engines, fsdp_engines
from tests.distributed import WorkersFailed, run_ranks

PHASES = (3, 5, 8)
"""Before the first refresh, with it due, and with a basis of age 3; the next one falls due at 15."""
AFTER = 12
LONG: dict[str, Any] = {**engines.SETTINGS, "curvature": {**engines.SETTINGS["curvature"], "interval": 40}}
"""No refresh within 20 steps of the checkpoint."""


class Job(NamedTuple):
    """One run that saves (``name`` is new) or loads a checkpoint, then trains on."""

    kind: str
    name: str
    at: int
    settings: dict[str, Any]
    load: bool = False
    flat: bool = False
    after: int = AFTER
    one_group: bool = False
    middle: bool = False
    """Save after the first of two micro-batches of step ``at``."""


def worker(rank: int, world: int, folder: str, jobs: list[Job]) -> list[dict[str, Any]]:
    results = []
    for job in jobs:
        run = fsdp_engines.Run(job.kind, rank, world, job.settings, decay=0.0, one_group=job.one_group)
        path, options = Path(folder, job.name), StateDictOptions(flatten_optimizer_state_dict=job.flat)
        if job.load:
            load(run, path, options)
            run.step_count = job.at
        else:
            run.train(job.at)
            if job.middle:
                local = run.local
                run.local = functools.partial(saving_between, run, local, path, options, job.at)  # type: ignore[method-assign]
            else:
                save(run, path, options)
        losses = run.train(job.after)
        results.append({"losses": losses, "weights": run.weights(), "stats": run.inner.curvature_stats()})
    return results


def saving_between(run: Any, local: Any, path: Path, options: StateDictOptions, at: int, step: int, micro: int) -> Any:
    """Stands in for ``run.local``: saves before the second micro-batch of step ``at``."""
    if (step, micro) == (at, 1):
        save(run, path, options)
    return local(step, micro)


def save(run: Any, path: Path, options: StateDictOptions) -> None:
    weights, state = get_state_dict(run.module, run.optimizer, options=options)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(path))


def load(run: Any, path: Path, options: StateDictOptions) -> None:
    with torch.no_grad():
        for p in run.module.parameters():  # other initial weights, so that a load which does nothing shows
            p.mul_(0.5)
    weights, state = get_state_dict(run.module, run.optimizer, options=options)
    found: dict[str, Any] = {"model": weights, "optimizer": state}
    dcp.load(found, checkpoint_id=str(path))
    set_state_dict(
        run.module,
        run.optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
        options=options,
    )


def check(saved: dict[str, Any], found: dict[str, Any], exact: bool, what: object) -> None:
    want, got = saved["stats"], found["stats"]
    for key in ("steps", "refreshes", "rejected", "age"):
        assert got[key] == want[key], (what, key, got[key], want[key])
    if exact:
        assert found["losses"] == saved["losses"], what
        assert torch.equal(found["weights"], saved["weights"]), what
        assert got["eigenvalues"] == want["eigenvalues"] and got["hvps"] == want["hvps"], what
    else:
        differences = [abs(x - y) for x, y in zip(found["losses"], saved["losses"], strict=True)]
        assert max(differences) < 1e-5, (what, max(differences))


def resume_exactly(
    world: int,
    kinds: list[str],
    folder: Path,
    rules: list[dict[str, Any]],
    timeout: float,
    phases: tuple[int, ...] = PHASES,
) -> None:
    jobs = [
        Job(kind, f"{kind} {at} {i}".replace(":", "_"), at, rule, flat=at == 8 and not kind.startswith("fsdp1"))
        for kind in kinds
        for i, rule in enumerate(rules)
        for at in phases
    ]
    jobs += [Job(kind, f"{kind} middle".replace(":", "_"), 8, rules[0], middle=True) for kind in kinds]
    saved = run_ranks(world, worker, str(folder), jobs, timeout=timeout)[0]
    loading = [job._replace(load=True, middle=False) for job in jobs]
    found = run_ranks(world, worker, str(folder), loading, timeout=timeout)[0]
    for job, before, after in zip(jobs, saved, found, strict=True):
        # DDP lays its buckets out anew after its first backward, and a sum of three or more numbers depends on the
        # order: there AdamW itself resumes to rounding only.
        check(before, after, exact=job.kind != "ddp" or world == 2, what=(world, job.name))
    for kind in kinds:  # saving amid accumulation disturbs nothing
        by_name = dict(zip([job.name for job in jobs], saved, strict=True))
        name = kind.replace(":", "_")
        assert torch.equal(by_name[f"{name} middle"]["weights"], by_name[f"{name} 8 0"]["weights"])


@pytest.mark.timeout(400)
def test_resume_on_two_ranks_is_bit_exact(tmp_path: Path) -> None:
    resume_exactly(2, ["ddp", "fsdp2", "fsdp1:orig"], tmp_path, [engines.SETTINGS], 180, phases=(5, 8))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_resume_is_bit_exact_everywhere(tmp_path: Path, world: int) -> None:
    kinds = ["ddp", "fsdp2", "fsdp1:orig", "fsdp1:flat", "fsdp2:bf16", "fsdp2:offload"]
    kinds += ["hsdp", "tp", "fsdp1:hybrid"] if world == 4 else []
    sgd = {**engines.SETTINGS, "base": "sgd", "momentum": 0.9, "lr": 5e-2}
    rules = [engines.SETTINGS, {**engines.SETTINGS, "rule": "fosi"}, sgd]
    resume_exactly(world, kinds, tmp_path, rules, 700)


Pairs = list[tuple[str, str]]
"""(kind that saved, kind that goes on)"""


def move(
    tmp_path: Path, source: tuple[int, list[str]], targets: list[tuple[int, Pairs]], timeout: float, one_group: bool
) -> None:
    """Save each kind on one world size, go on as the targets say."""
    world, kinds = source
    names = {kind: kind.replace(":", "_") for kind in kinds}
    jobs = [Job(kind, names[kind], 8, LONG, after=20, one_group=one_group) for kind in kinds]
    saved = dict(zip(kinds, run_ranks(world, worker, str(tmp_path), jobs, timeout=timeout)[0], strict=True))
    for size, pairs in targets:
        jobs = [Job(other, names[kind], 8, LONG, True, after=20, one_group=one_group) for kind, other in pairs]
        found = run_ranks(size, worker, str(tmp_path), jobs, timeout=timeout)[0]
        for (kind, other), after in zip(pairs, found, strict=True):
            check(saved[kind], after, exact=False, what=(world, kind, size, other))


@pytest.mark.timeout(400)
def test_other_world_sizes_and_engines(tmp_path: Path) -> None:
    """2 -> 4, 3 and 1; FSDP1, FSDP2 and DDP read each other's checkpoints."""
    ring = [("ddp", "fsdp2"), ("fsdp2", "fsdp1:orig"), ("fsdp1:orig", "ddp")]
    others = [(4, [("fsdp2", "hsdp")]), (3, [("fsdp1:orig", "fsdp2")]), (1, [("ddp", "ddp")])]
    move(tmp_path, (2, ["ddp", "fsdp2", "fsdp1:orig"]), [(2, ring), *others], 180, one_group=False)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_world_size_to_every_other(tmp_path: Path, world: int) -> None:
    kinds = ["ddp", "fsdp2", "fsdp1:orig", "fsdp1:flat"]
    four = ["hsdp", "tp", "fsdp1:hybrid"]
    saved = kinds + four if world == 4 else kinds
    targets = [
        (size, [(kind, other) for kind in saved for other in others])
        for size, others in ((2, kinds), (3, kinds), (4, kinds + four), (1, ["ddp"]))
    ]
    move(tmp_path, (world, saved), targets, 700, one_group=True)


# -- every element ----------------------------------------------------------------------------------------------------


def functions_of(w: Tensor) -> dict[str, Tensor]:
    return {"exp_avg": 3 * w + 1, "exp_avg_sq": w * w + 0.5} | {f"row {i}": torch.cos((i + 1) * w) for i in range(3)}


def plant_worker(rank: int, world: int, folder: str, kind: str) -> None:
    """State and eigenvectors that are functions of the weights, element by element."""
    run = fsdp_engines.Run(kind, rank, world, {**engines.SETTINGS, "num_eigenvectors": 3}, decay=0.0)
    run.train(1)
    host = run.inner._host
    rows = torch.zeros(3, host.layout.numel)
    for shard in host.shards:
        w = flat_view(shard.param.detach())
        planted = functions_of(w)
        for name in ("exp_avg", "exp_avg_sq"):
            flat_view(run.inner._base_state[shard.param][name]).copy_(planted[name])
        for i in range(3):
            rows[i, shard.offset : shard.offset + shard.numel] = planted[f"row {i}"]
    run.inner.set_eigenbasis(rows, [3.0, -2.0, 1.0], 0.5)
    save(run, Path(folder, "planted"), StateDictOptions())


def harvest_worker(rank: int, world: int, folder: str, kinds: list[str]) -> int:
    """Compares every element of this rank; returns how many there were."""
    seen = 0
    for kind in kinds:
        run = fsdp_engines.Run(kind, rank, world, {**engines.SETTINGS, "num_eigenvectors": 3}, decay=0.0)
        load(run, Path(folder, "planted"), StateDictOptions())
        basis = run.inner._space.basis
        assert basis.eigenvalues.tolist() == [3.0, -2.0, 1.0] and basis.next_eigenvalue == 0.5
        for shard in run.inner._host.shards:
            w = flat_view(shard.param.detach())
            for name, want in functions_of(w).items():
                if name.startswith("row"):
                    got = basis.vectors[int(name[4:]), shard.offset : shard.offset + shard.numel]
                else:
                    got = flat_view(run.inner._base_state[shard.param][name])
                # cos of a whole vector and of its parts may differ in the last bit
                torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7, msg=f"{kind} {name} rank {rank}")
                seen += got.numel()
    return seen


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("fsdp1:orig", marks=pytest.mark.slow)])
def test_every_element_arrives(tmp_path: Path, kind: str) -> None:
    run_ranks(2, plant_worker, str(tmp_path), kind, timeout=120)
    for world, kinds in ((3, ["fsdp2", "ddp"]), (4, ["hsdp"])):
        copies = 2 if kinds == ["hsdp"] else 1
        seen = sum(run_ranks(world, harvest_worker, str(tmp_path), kinds, timeout=120))
        assert seen == 214 * 5 * len(kinds) * copies


# -- exchange, rank 0 alone, consolidation, killed ---------------------------------------------------------------------


def exchange_worker(rank: int, world: int, folder: str) -> dict[str, float]:
    """AdamW's distributed checkpoint continued with DHO2, and ours with AdamW."""
    options = StateDictOptions()
    run = fsdp_engines.Run("fsdp2", rank, world, engines.SETTINGS, decay=0.0)
    theirs = torch.optim.AdamW(run.module.parameters(), lr=1e-2, weight_decay=0.0)
    ours, run.optimizer = run.optimizer, theirs
    groups = ours.param_groups
    theirs.param_groups.clear()
    for group in groups:
        theirs.add_param_group({"params": group["params"], "weight_decay": 0.0})
    run.train(4)
    save(run, Path(folder, "adamw"), options)
    moments = [theirs.state[p]["exp_avg"].to_local().clone() for group in groups for p in group["params"]]
    fresh = fsdp_engines.Run("fsdp2", rank, world, engines.SETTINGS, decay=0.0)
    weights, state = get_state_dict(fresh.module, fresh.optimizer, options=options)
    found: dict[str, Any] = {"model": weights, "optimizer": state}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(found, checkpoint_id=str(Path(folder, "adamw")), planner=planner)
    set_state_dict(fresh.module, fresh.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    held = [s["exp_avg"] for s in fresh.inner._base_state.values()]
    first = max(float((a - b).abs().max()) for a, b in zip(held, moments, strict=True))
    fresh.step_count = 4
    fresh.train(8)
    save(fresh, Path(folder, "dho2"), options)
    moments = [s["exp_avg"].clone() for s in fresh.inner._base_state.values()]
    load(run, Path(folder, "dho2"), options)
    back = [theirs.state[p]["exp_avg"].to_local() for group in groups for p in group["params"]]
    second = max(float((a - b).abs().max()) for a, b in zip(back, moments, strict=True))
    run.train(2)
    return {"to": first, "back": second, "refreshes": fresh.inner.curvature_stats()["refreshes"]}


@pytest.mark.timeout(200)
def test_exchange_with_adamw(tmp_path: Path) -> None:
    """AdamW's checkpoint has no eigenvectors, so a partial load must be allowed; ours has all that AdamW asks for."""
    for found in run_ranks(2, exchange_worker, str(tmp_path), timeout=150):
        assert found == {"to": 0.0, "back": 0.0, "refreshes": 1}


def alone_worker(rank: int, world: int) -> str:
    run = fsdp_engines.Run("ddp", rank, world, engines.SETTINGS, decay=0.0)
    run.train(2)
    together = run.optimizer.state_dict()
    assert together["state"][0]["exp_avg"].shape == (6, 16)
    message = ""
    if rank == 0:
        from datetime import timedelta

        dho2_ds.sharding.reduce.MEETING = timedelta(seconds=2)
        try:
            run.optimizer.state_dict()
        except RuntimeError as error:
            message = str(error)
    dist.barrier()
    return message


@pytest.mark.timeout(120)
def test_state_dict_on_one_rank_alone_is_an_error_not_a_hang() -> None:
    """Under DDP it gathers, so it must be called everywhere; torch.save on rank 0 only is then right."""
    message = run_ranks(2, alone_worker, timeout=90)[0]
    assert "rank 1 did not call it within 2 s" in message and "call it on every rank" in message


def consolidated_worker(rank: int, world: int) -> tuple[bool, int]:
    """ZeroRedundancyOptimizer's own way: consolidate on rank 0, load everywhere."""
    run = fsdp_engines.Run("zero_redundancy", rank, world, engines.SETTINGS, decay=0.0)
    run.train(8)
    run.optimizer.consolidate_state_dict(to=0)
    box = [run.optimizer.state_dict() if rank == 0 else None, run.module.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    box = copy.deepcopy(box)  # rank 0 holds the live tensors
    losses = run.train(AFTER)
    other = fsdp_engines.Run("zero_redundancy", rank, world, engines.SETTINGS, decay=0.0)
    other.module.load_state_dict(box[1])
    other.optimizer.load_state_dict(box[0])
    other.step_count = 8
    again = other.train(AFTER)
    return again == losses, other.inner.curvature_stats()["refreshes"]


@pytest.mark.timeout(150)
def test_zero_redundancy_resumes_from_a_consolidated_state_dict() -> None:
    assert run_ranks(2, consolidated_worker, timeout=120) == [(True, 2), (True, 2)]


def killed_worker(rank: int, world: int, folder: str) -> None:
    run = fsdp_engines.Run("fsdp2", rank, world, LONG, decay=0.0)
    run.train(8)
    save(run, Path(folder, "whole"), StateDictOptions())
    run.train(2)
    if rank == 1:
        original = os.replace
        torch.save = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        os.replace = lambda *a, **k: (os.kill(os.getpid(), signal.SIGKILL), original(*a, **k))  # type: ignore[assignment,return-value]
    save(run, Path(folder, "broken"), StateDictOptions())


@pytest.mark.slow
@pytest.mark.timeout(250)
def test_killed_while_saving(tmp_path: Path) -> None:
    """The checkpoint before stays loadable, and the broken one is not mistaken for a whole one."""
    with pytest.raises((WorkersFailed, RuntimeError)):
        run_ranks(2, killed_worker, str(tmp_path), timeout=60)
    assert not Path(tmp_path, "broken", ".metadata").exists()
    reference = run_ranks(2, worker, str(tmp_path), [Job("fsdp2", "again", 8, LONG, after=4)], timeout=90)[0][0]
    jobs = [Job("fsdp2", "whole", 8, LONG, load=True, after=4)]
    check(reference, run_ranks(2, worker, str(tmp_path), jobs, timeout=90)[0][0], exact=True, what="killed")


def full_worker(rank: int, world: int, kinds: list[str]) -> list[tuple[bool, int]]:
    """Whole tensors on rank 0, broadcast on loading: one file for everything."""
    results = []
    for kind in kinds:
        run = fsdp_engines.Run(kind, rank, world, engines.SETTINGS, decay=0.0)
        run.train(8)
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, state = copy.deepcopy(get_state_dict(run.module, run.optimizer, options=whole))
        losses = run.train(AFTER)
        other = fsdp_engines.Run(kind, rank, world, engines.SETTINGS, decay=0.0)
        spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other.module, weights, options=spread)
        set_optimizer_state_dict(other.module, other.optimizer, state, options=spread)
        other.step_count = 8
        results.append((other.train(AFTER) == losses, other.inner.curvature_stats()["refreshes"]))
    return results


@pytest.mark.timeout(150)
def test_full_state_dict_broadcast_from_rank_0() -> None:
    assert run_ranks(2, full_worker, ["fsdp2"], timeout=120) == [[(True, 2)], [(True, 2)]]
