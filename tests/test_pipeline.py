"""Mode ``dedicated``: the same eigenpairs as inline, whatever the two worlds' sizes and engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.pipelines import SETTINGS, changed, end_training, inline, make, optimizer_of, run_both

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


@pytest.mark.timeout(200)
def test_same_eigenpairs_as_inline() -> None:
    for results in run_both(1, 1, compare, [("single", REPLAY)], timeout=150):
        for found in results:
            check(found)


VARIANTS: dict[str, dict[str, Any]] = {
    "soap": {"base": "soap", "soap": {"precondition_frequency": 2}},
    "sgd": {"base": "sgd", "lr": 0.05},
    "fosi": {"rule": "fosi", "base": "sgd", "lr": 0.05},
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


@pytest.mark.timeout(300)
def test_every_base_and_rule() -> None:
    """SOAP sends its state, in the owner layout; the others a vector, or nothing for P."""
    cases = [("ddp", {**REPLAY, **variant}) for variant in VARIANTS.values()]
    for results in run_both(2, 1, compare, cases, timeout=250):
        for found in results:
            check(found)
