"""State dicts of the base ``soap`` by torch.distributed.checkpoint: every element, on any engine and world size.

Right after loading, every element of weights, state and eigenvectors is what was saved, whoever saved it: moving is
copying. Ten steps later losses and weights are still equal bit for bit on the same engine and world size; on another
one sums are taken in another order, which by then is 1e-6 of the loss, and the tests allow 1e-5.
"""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import dho2_ds
import dho2_ds.sharding.reduce
import dho2_ds.soap_state
from dho2_ds.config import ConfigError
from dho2_ds.sharding.redistribute import redistribute
from dho2_ds.shards import local_part
from tests import engines, fsdp_engines, test_costs
from tests.distributed import run_ranks
from tests.test_distributed_checkpoint import load, save
from tests.test_soap_engines import CURVED

PHASES = (1, 5, 8)
"""With factors only, with the first refresh due, and with a basis after two turns of SOAP's."""
AFTER = 10
CUT = {**CURVED, "soap": {"precondition_frequency": 4, "max_block": 7}}
"""Three of the four sides are cut, so that entries hold several blocks."""


class Job(NamedTuple):
    """Saves at step ``at`` (``name`` is new) or loads, then trains on."""

    kind: str
    name: str
    at: int
    load: bool = False
    flat: bool = False


def state(optimizer: Any) -> dict[str, Tensor]:
    """Every element this rank owns of base state and eigenvectors, by block."""
    base, space = optimizer._base, optimizer._space
    layout, buffer = base.state_layouts[base._host.reducer.rank], base.pack()
    found = {s.name: buffer[s.offset : s.offset + s.length].clone() for s in layout.segments}
    if space.basis is not None:
        for s in base._host.layout.segments:
            found[f"{s.name}/rows"] = space.basis.vectors[:, s.offset : s.offset + s.length].clone()
    return found


def worker(rank: int, world: int, folder: str, jobs: list[Job], one_group: bool = False) -> list[dict[str, Any]]:
    results = []
    for job in jobs:
        run = fsdp_engines.Run(job.kind, rank, world, CUT, decay=0.0, one_group=one_group)
        path, options = Path(folder, job.name), StateDictOptions(flatten_optimizer_state_dict=job.flat)
        if job.load:
            load(run, path, options)
            run.step_count = job.at
        else:
            run.train(job.at)
            save(run, path, options)
        before = {"state": state(run.inner), "weights": run.weights()}
        losses = run.train(AFTER)
        stats = run.inner.curvature_stats()
        after = {"losses": losses, "later": run.weights(), "eigenvalues": stats["eigenvalues"], "age": stats["age"]}
        results.append({**before, **after})
    return results


def merge(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The results of all ranks, their states together; under HSDP replicas have the same."""
    merged = []
    for parts in zip(*ranks, strict=True):
        whole: dict[str, Tensor] = {}
        for part in parts:
            for name, value in part["state"].items():
                assert name not in whole or torch.equal(whole[name], value), name
                whole[name] = value
        merged.append({**parts[0], "state": whole})
    return merged


def check(saved: dict[str, Any], found: dict[str, Any], exact: bool, what: object) -> None:
    assert torch.equal(found["weights"], saved["weights"]), what
    assert found["state"].keys() == saved["state"].keys(), what
    for name, value in saved["state"].items():
        assert torch.equal(found["state"][name], value), (what, name)
    assert found["age"] == saved["age"], what
    if exact:
        assert found["losses"] == saved["losses"] and found["eigenvalues"] == saved["eigenvalues"], what
        assert torch.equal(found["later"], saved["later"]), what
    else:
        assert max(abs(a - b) for a, b in zip(found["losses"], saved["losses"], strict=True)) < 1e-5, what


def name_of(kind: str, at: int) -> str:
    return f"{kind} {at}".replace(":", "_")


Two = tuple[str, dict[str, Any], list[dict[str, Any]], list[Job]]
"""Folder, what one process saved, the results of two ranks, and what these did in which order."""

MOVES = [("alone", "fsdp2"), ("fsdp2", "ddp"), ("ddp", "fsdp2"), ("ddp", "fsdp1:orig"), ("fsdp1:orig", "fsdp2")]
"""(what saved, what goes on)"""


def quick_worker(rank: int, world: int, folder: str, jobs: list[Job]) -> dict[str, Any]:
    return {
        "runs": worker(rank, world, folder, jobs),
        "entries": entries_worker(rank, world),
        "lonely": lonely_worker(rank, world),
        "consolidated": consolidated_worker(rank, world),
        "foreign": foreign_worker(rank, world, folder),
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Two:
    folder, last = str(tmp_path_factory.mktemp("checkpoints")), PHASES[-1]
    alone = worker(0, 1, folder, [Job("ddp", "alone", last)])[0]
    phases = {"fsdp2": PHASES, "fsdp1:orig": (last,), "ddp": (last,)}
    jobs = [
        Job(kind, name_of(kind, at), at, flat=kind == "fsdp2" and at == last) for kind in phases for at in phases[kind]
    ]
    jobs.append(Job("fsdp2+attention", "attention", last))  # frozen, tied, never used, one element
    jobs += [job._replace(load=True) for job in jobs]
    for source, kind in MOVES:
        name = source if source == "alone" else name_of(source, last)
        jobs.append(Job(kind, name, last, load=True, flat=source == "fsdp2"))  # as it was saved
    return folder, alone, run_ranks(2, quick_worker, folder, jobs, timeout=200), jobs


@pytest.mark.timeout(300)
def test_resume_and_moves_between_engines(two: Two) -> None:
    """FSDP2 at three phases, FSDP1 and DDP bit for bit; they and one process read each other's checkpoints."""
    _, alone, ranks, jobs = two
    results = merge([result["runs"] for result in ranks])
    kinds = {job.name: job.kind for job in jobs if not job.load} | {"alone": "alone"}
    saved = {job.name: found for job, found in zip(jobs, results, strict=True) if not job.load} | {"alone": alone}
    assert any(name.endswith("/rows") for name in alone["state"])
    loaded = [(job, found) for job, found in zip(jobs, results, strict=True) if job.load]
    assert len(loaded) == 6 + len(MOVES)
    for job, found in loaded:
        check(saved[job.name], found, exact=job.kind == kinds[job.name], what=job)


def test_one_process_goes_on_from_two_ranks(two: Two) -> None:
    folder, _, ranks, jobs = two
    last = PHASES[-1]
    index = next(i for i, job in enumerate(jobs) if job.name == name_of("fsdp2", last))
    saved = merge([result["runs"] for result in ranks])[index]
    found = worker(0, 1, folder, [Job("ddp", name_of("fsdp2", last), last, load=True, flat=True)])[0]
    check(saved, found, exact=False, what="2 -> 1")


def lonely_worker(rank: int, world: int) -> tuple[int, bool]:
    """One matrix on two ranks: this rank's blocks; does a whole state dict on rank 0 continue it bit for bit?"""

    def build() -> tuple[torch.nn.Module, dho2_ds.DHO2]:
        torch.manual_seed(0)
        module = fully_shard(torch.nn.Linear(5, 3, bias=False))
        curvature = {"warmup_steps": 3, "interval": 5}
        optimizer = dho2_ds.DHO2(module.parameters(), base="soap", lr=0.05, num_eigenvectors=2, curvature=curvature)
        dho2_ds.attach(module, optimizer, loss_fn=lambda m, batch: m(batch).square().mean(), data=[x])
        return module, optimizer

    def train(module: torch.nn.Module, optimizer: dho2_ds.DHO2, steps: int) -> Tensor:
        for _ in range(steps):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
        return fsdp_engines.full(module.weight.detach()).clone()

    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(1))
    (module, optimizer), (other, resumed) = build(), build()
    train(module, optimizer, 6)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, saved = copy.deepcopy(get_state_dict(module, optimizer, options=whole))
    straight = train(module, optimizer, 6)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, weights, options=spread)
    set_optimizer_state_dict(other, resumed, saved, options=spread)
    assert optimizer.curvature_stats()["refreshes"] == 2
    return len(optimizer._host.owned), torch.equal(train(other, resumed, 6), straight)


def test_a_rank_without_a_block_resumes(two: Two) -> None:
    assert sorted(result["lonely"] for result in two[2]) == [(0, True), (1, True)]


def entries_worker(rank: int, world: int) -> dict[str, int]:
    """Bytes of a state dict of a deep network under FSDP2: local parts, and of the state itself."""
    module = test_costs.Deep()
    if world > 1:
        for layer in module.layers:
            fully_shard(layer)
        fully_shard(module)
    optimizer = dho2_ds.DHO2(module.parameters(), base="soap", lr=1e-3, num_eigenvectors=2)
    dho2_ds.attach(module, optimizer)
    for _ in range(2):
        module(torch.randn(8, test_costs.WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    made: list[int] = []

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        result = redistribute(*args, **kwargs)
        made.append(result.numel())
        return result

    with mock.patch.object(dho2_ds.soap_state, "redistribute", spy):
        found = optimizer.state_dict()["state"]
    parts = [local_part(value) for mine in found.values() for value in mine.values()]
    return {
        "shown": sum(part.numel() * part.element_size() for part in parts),
        "held": optimizer.curvature_stats()["bytes_base"],
        "longest": max(made),
    }


def test_state_dict_is_sharded(two: Two) -> None:
    """On FSDP2 a rank shows its share, and no vector made on the way is longer than its share of the state."""
    alone = entries_worker(0, 1)
    for result in two[2]:
        assert 2 * result["entries"]["held"] <= 1.10 * alone["held"]
        assert 2 * result["entries"]["shown"] <= 1.10 * alone["shown"]
        assert 2 * result["entries"]["longest"] <= 1.10 * alone["longest"]


def consolidated_worker(rank: int, world: int) -> dict[str, Any]:
    """ZeroRedundancyOptimizer: losses beside DDP's, and a resume from its consolidated state dict."""
    plain = fsdp_engines.Run("ddp", rank, world, CURVED, decay=0.0).train(16)
    run = fsdp_engines.Run("zero_redundancy", rank, world, CURVED, decay=0.0)
    losses = run.train(8)
    run.optimizer.consolidate_state_dict(to=0)
    box = [run.optimizer.state_dict() if rank == 0 else None, run.module.state_dict() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    box = copy.deepcopy(box)  # rank 0 holds the live tensors
    losses += run.train(8)
    other = fsdp_engines.Run("zero_redundancy", rank, world, CURVED, decay=0.0)
    other.module.load_state_dict(box[1])
    other.optimizer.load_state_dict(box[0])
    other.step_count = 8
    again = other.train(8)
    return {"ddp": plain, "losses": losses, "again": again, "sent": run.inner._host.sent, "held": state(run.inner)}


def test_zero_redundancy_optimizer(two: Two) -> None:
    """Blocks stay with the ranks that own the parameters, so a step sends nothing of ours."""
    results = [result["consolidated"] for result in two[2]]
    for found in results:
        assert found["again"] == found["losses"][8:] and found["sent"] == 0
        assert found["losses"] == pytest.approx(found["ddp"], rel=1e-5)
    assert not results[0]["held"].keys() & results[1]["held"].keys() and all(r["held"] for r in results)


def foreign_worker(rank: int, world: int, folder: str) -> list[str]:
    """Messages for a checkpoint of AdamW, one of another cut, and a state dict asked for on one rank only."""
    messages = []
    for name, settings in (("adamw", engines.SETTINGS), ("whole", {**CURVED, "soap": {}})):
        other = fsdp_engines.Run("fsdp2", rank, world, settings, decay=0.0)
        other.train(2)
        run = fsdp_engines.Run("fsdp2", rank, world, CUT, decay=0.0)
        try:
            run.optimizer.load_state_dict(other.optimizer.state_dict())
            messages.append(f"{name} accepted")
        except (ConfigError, RuntimeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
    other.train(1)
    message = ""
    if rank == 0:
        with mock.patch.object(dho2_ds.sharding.reduce, "MEETING", timedelta(seconds=2)):
            try:
                other.optimizer.state_dict()
            except RuntimeError as error:
                message = str(error)
    dist.barrier()
    return [*messages, message]


def test_foreign_checkpoints_are_refused_on_all_ranks(
    two: Two,
) -> None:
    for result in two[2]:
        for message in result["foreign"][:2]:
            assert (
                "must be written with base 'soap' and the same soap.max_block" in message or "another rank" in message
            )
    assert any("ConfigError" in message for result in two[2] for message in result["foreign"][:2])
    assert "rank 1 did not call it within 2 s" in two[2][0]["foreign"][2]


def test_low_precision_parameters_keep_float32_state() -> None:
    """torch casts loaded state to the parameters' dtype; factors in bfloat16 would be another run."""

    def run(state: Any, weights: Any, steps: int) -> tuple[Tensor, Any, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 4).bfloat16()
        optimizer = dho2_ds.DHO2(model.parameters(), base="soap", lr=0.05, num_eigenvectors=0)
        if state is not None:
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
        x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1)).bfloat16()
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return model.weight.detach().clone(), copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())

    straight, _, _ = run(None, None, 9)
    _, saved, weights = run(None, None, 5)
    assert saved["state"][0]["soap_0"].dtype == torch.float32
    assert torch.equal(run(saved, weights, 4)[0], straight)


# -- everything with everything ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_engine_resumes_at_every_phase(tmp_path: Path, world: int) -> None:
    kinds = ["ddp", "fsdp2", "fsdp2:bf16", "fsdp2:offload", "fsdp1:orig", "fsdp1:flat"]
    kinds += ["fsdp2:shard1"] if world == 2 else []  # torch cuts dimension 1 evenly only
    kinds += ["hsdp", "tp", "fsdp1:hybrid"] if world == 4 else []
    jobs = [Job(kind, name_of(kind, at), at) for kind in kinds for at in PHASES]
    again = [job._replace(load=True) for job in jobs]
    results = merge(run_ranks(world, worker, str(tmp_path), jobs + again, True, timeout=1100))
    for job, saved, found in zip(again, results, results[len(jobs) :], strict=False):
        # DDP on more ranks: see the README
        check(saved, found, exact=world == 2 or job.kind != "ddp", what=job)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 4])
def test_every_engine_and_world_size_to_every_other(tmp_path: Path, world: int) -> None:
    kinds, last = ["ddp", "fsdp2", "fsdp1:orig", "fsdp1:flat"], PHASES[-1]
    four = ["hsdp", "tp", "fsdp1:hybrid"]
    sources = kinds + four if world == 4 else kinds
    jobs = [Job(kind, name_of(kind, last), last) for kind in sources]
    saved = merge(run_ranks(world, worker, str(tmp_path), jobs, True, timeout=600))
    for size, others in ((1, ["ddp"]), (2, kinds), (3, ["fsdp2", "fsdp1:flat"]), (4, four)):
        loads = [Job(kind, job.name, last, load=True) for job in jobs for kind in others]
        results = merge(run_ranks(size, worker, str(tmp_path), loads, True, timeout=600))
        want = [result for result in saved for _ in others]
        for job, before, after in zip(loads, want, results, strict=True):
            check(before, after, exact=False, what=(world, size, job))
