"""Mode ``spread``: one product per step at a frozen snapshot, on every engine."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import dho2_ds
from dho2_ds.curvature.spread import SpreadRefresh
from tests import engines, fsdp_engines
from tests.distributed import run_ranks

SETTINGS: dict[str, Any] = {
    **engines.SETTINGS,
    "curvature": {"mode": "spread", "warmup_steps": 5, "interval": 60, "lanczos_steps": 30},
}


def inline(settings: dict[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(settings)
    changed["curvature"]["mode"] = "inline"
    changed["curvature"].pop("spread_every", None)
    return changed


def make(kind: str, rank: int, world: int, settings: dict[str, Any]) -> Any:
    if kind.startswith(("fsdp", "hsdp", "zero_redundancy")):
        return fsdp_engines.Run(kind, rank, world, settings)
    return engines.Run(kind, rank, world, settings)


def optimizer_of(run: Any) -> Any:
    return getattr(run, "inner", run.optimizer)


def worker(rank: int, world: int, kinds: list[str]) -> dict[str, Any]:
    """Per kind: eigenvalues and eigenvectors of the spread refresh and of an inline one at the same step and batch, the
    largest number of gradients in a step, and whether the weights moved as without curvature until the basis came."""
    results = {}
    for kind in kinds:
        run, reference = make(kind, rank, world, SETTINGS), make(kind, rank, world, inline(SETTINGS))
        optimizer, other = optimizer_of(run), optimizer_of(reference)
        reference.train(6)  # the inline refresh happens before the sixth step
        counted: list[int] = []
        host = optimizer._host if optimizer.attached else None
        steps = 0
        while optimizer.curvature_stats()["refreshes"] == 0 and steps < 60:
            host = optimizer._host
            if host is None:
                run.step()
            else:
                with mock.patch.object(type(host), "accumulate", autospec=True, side_effect=type(host).accumulate) as f:
                    run.step()
                counted.append(f.call_count)
            steps += 1
        ours, theirs = optimizer._space.basis, other._space.basis
        overlap = optimizer._host.reducer.sum_((ours.vectors @ theirs.vectors.T).double())
        results[kind] = {
            "spread": ours.eigenvalues.tolist(),
            "inline": theirs.eigenvalues.tolist(),
            "overlap": overlap.diagonal().abs().min().item(),
            "gradients": max(counted),
            "steps": steps,
            "hvps": optimizer.curvature_stats()["hvps"],
            "born": ours.born,
        }
    return results


def check(results: dict[str, Any]) -> None:
    for kind, found in results.items():
        want, got = torch.tensor(found["inline"]), torch.tensor(found["spread"])
        # The displacement is rounded once more than an inline perturbation: 1e-4 of the largest eigenvalue.
        assert (got - want).abs().max() < 3e-4 * want.abs().max(), (kind, got, want)
        assert found["overlap"] > 0.999, (kind, found)
        assert found["gradients"] <= 2, (kind, found)
        assert found["born"] == 5 and found["steps"] == 5 + found["hvps"], (kind, found)


@pytest.mark.timeout(200)
def test_same_eigenpairs_as_inline_at_the_snapshot() -> None:
    """On two ranks, while training moves on; no step takes more than two gradients beside its own."""
    for result in run_ranks(2, worker, ["ddp", "zero2", "zero3", "fsdp2"], timeout=150):
        check(result)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("world", [2, 4])
def test_same_eigenpairs_everywhere(world: int) -> None:
    kinds = ["zero0", "zero1", "zero3:sub_groups", "zero2:offload", "fsdp1:orig", "fsdp1:flat", "zero_redundancy"]
    for result in run_ranks(world, worker, kinds + (["hsdp"] if world == 4 else []), timeout=450):
        check(result)


def test_one_product_every_few_steps() -> None:
    settings = copy.deepcopy(SETTINGS)
    settings["curvature"] |= {"spread_every": 3, "lanczos_steps": 20}
    run = engines.Run("single", 0, 1, settings)
    made: list[int] = []
    original = SpreadRefresh.turn

    def turn(self: SpreadRefresh, step: int) -> Any:
        made.append(step)
        return original(self, step)

    with mock.patch.object(SpreadRefresh, "turn", turn):
        run.train(40)
    assert made == list(range(5, 40, 3))


def test_dropout_is_the_same_in_every_product_and_training_does_not_notice() -> None:
    """The refresh has random numbers of its own: with newton_lr 0 and scale 1 training is the base optimizer's."""

    def train(k: int) -> tuple[torch.Tensor, dict[str, Any]]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 1))
        x = torch.randn(32, 8)
        curvature = {"mode": "spread", "warmup_steps": 2, "interval": 50, "lanczos_steps": 40}
        optimizer = dho2_ds.DHO2(
            model.parameters(),
            lr=1e-2,
            num_eigenvectors=k,
            newton_lr=0.0,
            max_lr_scale=1.0,
            fused=False,
            curvature=curvature,
        )

        def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return (model(batch) - batch[:, :1].sin()).square().mean()

        dho2_ds.attach(model, optimizer, loss_fn=loss_fn, data=[x])
        for _ in range(48):
            optimizer.zero_grad()
            loss_fn(model, x).backward()
            optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), optimizer.curvature_stats()

    plain, _ = train(0)
    weights, stats = train(3)
    assert torch.equal(weights, plain)
    assert stats["refreshes"] == 1 and stats["self_check"] < 0.01


def test_a_failing_loss_ends_the_job_and_a_due_refresh_amid_one_is_left_out() -> None:
    settings = copy.deepcopy(SETTINGS)
    settings["curvature"] |= {"interval": 8, "lanczos_steps": None}
    run = engines.Run("single", 0, 1, settings)
    run.train(60)
    stats = run.optimizer.curvature_stats()
    assert 1 <= stats["refreshes"] <= 4 and stats["rejected"] == 0
    with mock.patch.object(type(run.optimizer._host), "accumulate", side_effect=ZeroDivisionError("bad batch")):
        with pytest.raises(ZeroDivisionError):
            run.train(20)
    run.train(40)
    assert run.optimizer.curvature_stats()["refreshes"] > stats["refreshes"]


def test_a_resumed_run_starts_its_job_again() -> None:
    run = engines.Run("single", 0, 1, SETTINGS)
    run.train(9)
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    other = engines.Run("single", 0, 1, SETTINGS, seed=3)
    other.model.load_state_dict(saved[0])
    other.optimizer.load_state_dict(saved[1])
    other.step_count = 9
    other.train(45)
    stats = other.optimizer.curvature_stats()
    assert stats["refreshes"] == 1 and other.optimizer._space.basis.born == 9


def test_a_job_that_is_no_longer_called_is_an_error() -> None:
    run = engines.Run("single", 0, 1, SETTINGS)
    run.train(8)
    run.model.eval()
    with pytest.raises(RuntimeError, match="no training forward of the attached model was seen"):
        run.train(3)
