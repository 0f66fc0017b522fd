"""Mode ``dedicated``: the same eigenpairs as inline, whatever the two worlds' sizes and engines."""

from __future__ import annotations

import time
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
    "fosi": {"rule": "fosi", "base": "sgd", "lr": 0.05},
}
WIDE = {
    (3, 1): ["ddp", "zero3"],  # FSDP needs two ranks a side here: on one, the job of these tests is not wrapped
    (3, 2): ["zero2", "fsdp1:flat", "zero3:sub_groups"],
    (2, 3): ["zero2:offload", "zero_redundancy", "fsdp2"],
    (4, 2): ["hsdp", "tp", "fsdp2"],
}
WORLDS = {(2, 1): ["ddp", "zero2", "zero3"], (1, 2): ["zero1", "zero3"], (2, 2): ["zero0", "fsdp2", "fsdp1:orig"]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("training,curvature", WORLDS)
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


def half_delivered(rank: int, world: int) -> Any:
    """Two training ranks; the first result reaches only one of them."""
    role = dho2_ds.init_distributed(curvature_ranks=1, backend="gloo")
    settings = changed(SETTINGS, warmup_steps=2)
    if role == "curvature":
        calls = iter(range(10**6))
        send = Link.send_parts

        def fail_once(self: Link, rows: torch.Tensor, intervals: Intervals) -> None:
            if next(calls) == 1:
                raise LinkError("broken for the test")
            send(self, rows, intervals)

        with mock.patch.object(Link, "send_parts", fail_once), leaving() as left:
            make("ddp", 0, 1, settings)
        return left[0]
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
