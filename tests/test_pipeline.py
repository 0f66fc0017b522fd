"""Mode ``dedicated``: the same eigenpairs as inline, whatever the two worlds' sizes and engines."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dho2_ds
from dho2_ds.pipeline.wire import Intervals, Link, LinkError
from tests import engines
from tests.distributed import run_ranks
from tests.pipelines import SETTINGS, changed, end_training, inline, leaving, make, optimizer_of, run_both

REPLAY = changed(SETTINGS, swaps=[[5, 8]])


def compare(kind: str, rank: int, world: int, settings: dict[str, Any]) -> dict[str, Any]:
    """On a training rank: the basis that curvature ranks found at step 5 and that of an inline refresh there."""
    run, reference = make(kind, rank, world, settings), make(kind, rank, world, inline(settings))
    optimizer, other = optimizer_of(run), optimizer_of(reference)
    reference.train(6)  # the inline refresh happens before the sixth step
    run.train(7)
    assert optimizer.curvature_stats()["refreshes"] == 0
    run.train(1)
    ours, theirs = optimizer._space.basis, other._space.basis
    overlap = optimizer._host.reducer.sum_(ours.vectors @ optimizer._host.dual(theirs.vectors[0]).double().float())
    stats = optimizer.curvature_stats()
    end_training(optimizer)
    return {
        "dedicated": ours.eigenvalues.tolist(),
        "inline": theirs.eigenvalues.tolist(),
        "overlap": float(overlap[0].abs()),
        "born": ours.born,
        "stats": stats,
    }


def check(found: dict[str, Any]) -> None:
    want, got = torch.tensor(found["inline"]), torch.tensor(found["dedicated"])
    # As in mode spread: the displacement from the curvature ranks' own weights is rounded once more.
    assert (got - want).abs().max() < 3e-4 * want.abs().max(), (got, want)
    assert found["overlap"] > 0.999, found
    assert found["born"] == 5
    assert found["stats"]["swaps"] == [(5, 8)] and found["stats"]["lost"] == 0, found["stats"]


VARIANTS: dict[str, dict[str, Any]] = {
    "soap": {"base": "soap", "soap": {"precondition_frequency": 2}},
    "sgd": {"base": "sgd", "lr": 0.05},
    "fosi": {"rule": "fosi"},
}
WIDE = {
    (3, 1): ["ddp", "zero3"],  # FSDP needs two ranks a side here: on one, the job of these tests is not wrapped
    (3, 2): ["zero2", "fsdp1:flat", "zero3:sub_groups"],
    (2, 3): ["zero2:offload", "zero_redundancy", "fsdp2"],
    (4, 2): ["hsdp", "tp", "fsdp2"],
}
WORLDS = {(2, 1): ["ddp", "zero2", "zero3"], (1, 2): ["zero1", "zero3"], (2, 2): ["zero0", "fsdp2", "fsdp1:orig"]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "training,curvature",
    [pytest.param(2, 1, marks=pytest.mark.deepspeed), (2, 2), pytest.param(1, 2, marks=pytest.mark.slow)],
)
def test_every_engine(training: int, curvature: int) -> None:
    kinds = WORLDS[training, curvature]
    for results in run_both(training, curvature, compare, [(kind, REPLAY) for kind in kinds], timeout=250):
        for kind, found in zip(kinds, results, strict=True):
            print(kind, found)
            check(found)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("training,curvature", WIDE)
def test_every_engine_on_more_ranks(training: int, curvature: int) -> None:
    kinds = WIDE[training, curvature]
    for results in run_both(training, curvature, compare, [(kind, REPLAY) for kind in kinds], timeout=550):
        for found in results:
            check(found)


@pytest.mark.timeout(300)
def test_every_base_and_rule() -> None:
    """SOAP sends its state, in the owner layout; the others a vector, or nothing for P."""
    cases = [("ddp", {**REPLAY, **variant}) for variant in VARIANTS.values()]
    for results in run_both(2, 1, compare, cases, timeout=250):
        for found in results:
            check(found)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_every_base_and_rule_on_sharded_engines(kind: str) -> None:
    cases = [(kind, {**REPLAY, **variant}) for variant in VARIANTS.values()]
    for results in run_both(3, 2, compare, cases, timeout=350):
        for found in results:
            check(found)


recorded: dict[str, Any] = {}


def record_and_replay(kind: str, rank: int, world: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The first call lets swaps happen when they do, the second repeats them."""
    if recorded:
        settings = changed(settings, swaps=recorded["swaps"])
    run = make(kind, rank, world, settings)
    losses: list[float] = []
    swaps: list[tuple[int, int]] = []
    while len(swaps) < 2 or len(losses) < swaps[-1][1] + 5:
        losses.append(run.step())
        swaps = run.optimizer.curvature_stats()["swaps"]
        time.sleep(0.0 if recorded else 0.02)  # so that curvature has the time to take part
    end_training(run.optimizer)
    recorded["swaps"] = [list(pair) for pair in swaps]
    return {"losses": losses, "weights": run.weights(), "swaps": swaps}


@pytest.mark.timeout(200)
def test_recorded_swaps_replay_to_the_same_trajectory() -> None:
    for first, second in run_both(2, 1, record_and_replay, [("zero2", SETTINGS)] * 2, timeout=150):
        assert first["swaps"] == second["swaps"] and len(first["swaps"]) >= 2, (first["swaps"], second["swaps"])
        assert first["losses"] == second["losses"]
        assert torch.equal(first["weights"], second["weights"])


def own_data(rank: int, world: int, curvature_ranks: int) -> Any:
    """One training rank that stands still, curvature ranks with a part of the digits each."""
    role = dho2_ds.init_distributed(curvature_ranks=curvature_ranks, backend="gloo")
    model = engines.Classifier().double()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = dho2_ds.DHO2(
        wrapped.parameters(), lr=0.0, base="sgd", num_eigenvectors=4,
        curvature={"mode": "dedicated", "ranks": curvature_ranks, "warmup_steps": 1, "interval": 100,
                   "lanczos_steps": 60, "swaps": [[1, 2]]},
    )  # fmt: skip
    x, y = engines.digits()
    part = slice(100 * rank, 100 * (rank + 1))
    with leaving() as left:
        dho2_ds.attach(wrapped, optimizer, loss_fn=lambda m, batch: m(*batch), data=[(x[part], y[part])])
    if role == "curvature":
        return left[0]
    for _ in range(3):
        optimizer.zero_grad()
        wrapped(x[:10], y[:10]).backward()
        optimizer.step()
    end_training(optimizer)
    return optimizer.curvature_stats()["eigenvalues"]


@pytest.mark.timeout(150)
def test_every_curvature_rank_brings_data_of_its_own() -> None:
    """The operator is the mean over the curvature ranks' batches (here ranks 1 and 2), as a dense Hessian says."""
    found, *codes = run_ranks(3, own_data, 2, timeout=120, init=False)
    assert codes == [0, 0]
    model = engines.Classifier().double()
    params = [*model.w, *model.b]
    x, y = engines.digits()

    def loss(*values: torch.Tensor) -> torch.Tensor:
        return engines.classifier_loss(list(values), (x[100:300], y[100:300]))

    blocks = torch.autograd.functional.hessian(loss, tuple(p.detach() for p in params))
    dense = torch.cat(
        [torch.cat([b.reshape(p.numel(), -1) for b in row], 1) for row, p in zip(blocks, params, strict=True)]
    )
    values = torch.linalg.eigvalsh(dense)
    want = values[values.abs().argsort(descending=True)][:4]
    assert torch.allclose(torch.tensor(found, dtype=torch.float64), want, rtol=1e-5), (found, want)


def serve_with_a_second_part(
    settings: dict[str, Any], changed_by: Callable[[torch.Tensor, Intervals], torch.Tensor]
) -> int:
    """Curvature rank: the second part that it sends, of the first result to the second training rank, is changed."""
    calls = iter(range(10**6))
    send = Link.send_parts

    def sent(self: Link, rows: torch.Tensor, intervals: Intervals) -> None:
        send(self, changed_by(rows, intervals) if next(calls) == 1 else rows, intervals)

    with mock.patch.object(Link, "send_parts", sent), leaving() as left:
        make("ddp", 0, 1, settings)
    return left[0]


def half_delivered(rank: int, world: int) -> Any:
    """Two training ranks; the first result reaches only one of them."""
    role = dho2_ds.init_distributed(curvature_ranks=1, backend="gloo")
    settings = changed(SETTINGS, warmup_steps=2)
    if role == "curvature":

        def broken(rows: torch.Tensor, intervals: Intervals) -> torch.Tensor:
            raise LinkError("broken for the test")

        return serve_with_a_second_part(settings, broken)
    run = make("ddp", rank, 2, settings)
    history = []
    while not history or history[-1]["refreshes"] < 2:
        run.step()
        history.append(run.optimizer.curvature_stats())
        time.sleep(0.01)
    end_training(run.optimizer)
    return [(s["refreshes"], s["lost"], s["swaps"], s["eigenvalues"]) for s in history], run.weights()


@pytest.mark.timeout(150)
def test_a_result_that_reaches_one_rank_only_is_used_by_none() -> None:
    (first, weights), (second, others), code = run_ranks(3, half_delivered, timeout=120, init=False)
    assert code == 0 and first == second and torch.equal(weights, others)
    assert first[-1][1] == 1 and all(lost == 1 for refreshes, lost, _, _ in first if refreshes)


def swaps_by_themselves(kind: str, rank: int, world: int, settings: dict[str, Any]) -> dict[str, Any]:
    """No replay: readiness rides along in the steps' own sums, where there are any. Until the third swap."""
    run = make(kind, rank, world, settings)
    optimizer = optimizer_of(run)
    while len(optimizer.curvature_stats().get("swaps", [])) < 3:
        run.step()
        time.sleep(0.005)
    stats = optimizer.curvature_stats()
    end_training(optimizer)
    return {"swaps": stats["swaps"], "lost": stats["lost"], "weights": run.weights()}


def check_alike(results: list[Any]) -> None:
    """All training ranks have swapped at the same steps and have the same weights."""
    for first, *others in zip(*results, strict=True):
        assert len(first["swaps"]) == 3 and first["lost"] == 0
        for other in others:
            assert other["swaps"] == first["swaps"] and torch.equal(other["weights"], first["weights"])


@pytest.mark.timeout(200)
def test_all_ranks_swap_at_the_same_step() -> None:
    """Adaptive (one sum per step), FOSI (two), and steps without a correction (none)."""
    plain = {"newton_lr": 0.0, "max_lr_scale": 1.0}
    cases = [("ddp", {**changed(SETTINGS, warmup_steps=2, interval=3), **v}) for v in ({}, VARIANTS["fosi"], plain)]
    check_alike(run_both(2, 1, swaps_by_themselves, cases, timeout=150))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_replicas_swap_at_the_same_step() -> None:
    """HSDP: a step's sum is over one replica's shards only, so readiness takes a sum of its own."""
    settings = changed(SETTINGS, warmup_steps=2, interval=3)
    cases = [("hsdp", settings), ("tp", settings), ("fsdp2", {**settings, **VARIANTS["soap"]})]
    check_alike(run_both(4, 2, swaps_by_themselves, cases, timeout=350))


def interrupted(kind: str, rank: int, world: int, settings: dict[str, Any]) -> Any:
    """With a job under way: the model is attached anew, a checkpoint is loaded, a refresh is made at once."""
    run = make(kind, rank, world, settings)
    optimizer = run.optimizer

    def until(reached: Any, limit: int = 5000) -> None:
        for _ in range(limit):
            run.step()
            if reached(optimizer.curvature_stats()):
                return
            time.sleep(0.005)
        raise AssertionError(optimizer.curvature_stats())

    def act(what: str) -> None:
        if what == "attach":
            dho2_ds.attach(run.module, optimizer)
        elif what == "load":
            optimizer.load_state_dict(optimizer.state_dict())
        else:
            assert optimizer.refresh().accepted

    for what in ("attach", "load", "refresh"):
        run.step()
        optimizer._refresher._wanted = True
        until(lambda stats: stats["in_flight"])
        act(what)
        assert not optimizer.curvature_stats()["in_flight"]
        before = len(optimizer.curvature_stats()["swaps"])
        optimizer._refresher._wanted = True
        until(lambda stats, before=before: len(stats["swaps"]) > before)
    stats = optimizer.curvature_stats()
    end_training(optimizer)
    return {"swaps": stats["swaps"][:3], "lost": stats["lost"], "weights": run.weights()}


@pytest.mark.timeout(200)
def test_what_training_does_with_a_job_under_way() -> None:
    """It is given up on all ranks, its result is never used, and the next one is."""
    results = run_both(2, 1, interrupted, [("ddp", changed(SETTINGS, warmup_steps=2, interval=100))], timeout=150)
    check_alike(results)


def half_spoiled(rank: int, world: int) -> Any:
    """Two training ranks; in the first result the second one's part is not finite."""
    role = dho2_ds.init_distributed(curvature_ranks=1, backend="gloo")
    settings = changed(SETTINGS, warmup_steps=2)
    if role == "curvature":

        def spoiled(rows: torch.Tensor, intervals: Intervals) -> torch.Tensor:
            rows = rows.clone()
            rows[0, intervals[-1][0]] = float("nan")
            time.sleep(0.1)  # the first rank has its part long before
            return rows

        return serve_with_a_second_part(settings, spoiled)
    run = make("ddp", rank, 2, settings)
    while run.optimizer.curvature_stats()["refreshes"] < 2:
        run.step()
        time.sleep(0.005)
    stats = run.optimizer.curvature_stats()
    end_training(run.optimizer)
    return [stats[key] for key in ("refreshes", "rejected", "lost", "swaps", "eigenvalues")]


@pytest.mark.timeout(150)
def test_a_result_that_is_bad_on_one_rank_is_rejected_by_all() -> None:
    first, second, code = run_ranks(3, half_spoiled, timeout=120, init=False)
    assert code == 0 and first == second and first[:3] == [2, 1, 0]


def test_a_second_dedicated_optimizer_is_refused() -> None:
    settings = changed(SETTINGS, ranks=0)
    first = make("single", 0, 1, settings)
    with pytest.raises(dho2_ds.ConfigError, match="must be used by one optimizer of a process"):
        make("single", 0, 1, settings)
    end_training(first.optimizer)
    end_training(make("single", 0, 1, settings).optimizer)
