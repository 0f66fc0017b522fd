"""What happens to a bound optimizer when its parameters, their storage or what is trained changes under it."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import dho2_ds
import dho2_ds.sharding.reduce
from tests import engines, fsdp_engines
from tests.distributed import run_ranks
from tests.engines import SETTINGS, Run


def moved_storage(rank: int, world: int, kind: str) -> tuple[bool, float, float]:
    """Weights are rewritten into new storage between two steps; the run must go on as if they had not been."""
    runs = [fsdp_engines.Run(kind, rank, world, SETTINGS, decay=0.0) for _ in range(2)]
    for run in runs:
        run.train(7)
    moved = runs[0]
    if kind == "ddp":
        vector_to_parameters(parameters_to_vector(moved.model.parameters()), moved.model.parameters())
    else:
        moved.module._apply(lambda t: t.clone())
    before = moved.weights()
    losses = [run.train(10) for run in runs]
    stats = moved.inner.curvature_stats()
    assert (stats["refreshes"], stats["rejected"]) == (2, 0), stats
    difference = max(abs(a - b) for a, b in zip(*losses, strict=True))
    return torch.equal(before, moved.weights()), difference, float((moved.weights() - runs[1].weights()).abs().max())


@pytest.mark.timeout(200)
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_storage_may_move(kind: str) -> None:
    for stood_still, losses, weights in run_ranks(2, moved_storage, kind, timeout=150):
        assert not stood_still
        assert losses < 1e-5 and weights < 1e-3


def test_storage_may_move_in_one_process() -> None:
    run, reference = Run("single", 0, 1, SETTINGS), Run("single", 0, 1, SETTINGS)
    run.train(7), reference.train(7)
    vector_to_parameters(parameters_to_vector(run.model.parameters()), run.model.parameters())
    assert run.train(10) == reference.train(10)


def unfreezing(rank: int, world: int) -> dict[str, Any]:
    """A parameter that is frozen at first trains later, and the others' state comes along into the new slices."""
    run = engines.Run("ddp" if world > 1 else "single", rank, world, SETTINGS)
    frozen = run.model.w[1]
    frozen.requires_grad_(False)
    if world > 1:
        run.module = nn.parallel.DistributedDataParallel(run.model)
    dho2_ds.attach(run.module, run.optimizer)
    for p in run.model.parameters():
        p.grad = torch.full_like(p, 1e-3) if p.requires_grad else None
    run.optimizer.step()
    before = frozen.detach().clone()
    first = run.optimizer.state_dict()["state"][0]["exp_avg"].clone()
    frozen.requires_grad_(True)
    for p in run.model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    run.optimizer.step()
    state = run.optimizer.state_dict()["state"]
    return {
        "moved": float((frozen - before).abs().min()),
        "carried": float((state[0]["exp_avg"] - (0.9 * first + 0.1 * 1e-3)).abs().max()),
        "steps": (float(state[0]["step"]), float(state[1]["step"])),
    }


@pytest.mark.timeout(100)
def test_a_parameter_may_be_unfrozen() -> None:
    for found in [unfreezing(0, 1), *run_ranks(2, unfreezing, timeout=90)]:
        assert found["moved"] > 1e-4 and found["carried"] < 1e-9 and found["steps"] == (2.0, 1.0), found


# -- checkpoints before the model is known ----------------------------------------------------------------------------


def test_a_state_dict_goes_through_an_unattached_optimizer_unharmed() -> None:
    """Accelerate's prepare() loads and saves once before anything is attached."""
    run = Run("single", 0, 1, SETTINGS)
    run.train(8)
    state = copy.deepcopy(run.optimizer.state_dict())
    losses = run.train(12)
    other = Run("single", 0, 1, SETTINGS)
    fresh = dho2_ds.DHO2(engines.groups(other.model, SETTINGS["lr"]), **copy.deepcopy(SETTINGS))
    fresh.load_state_dict(state)
    fresh.load_state_dict(copy.deepcopy(fresh.state_dict()))
    again = Run("single", 0, 1, SETTINGS)
    again.train(8)
    other.model.load_state_dict(again.model.state_dict())
    dho2_ds.attach(other.model, fresh)
    other.optimizer, other.step_count = fresh, 8
    assert other.train(12) == losses


def test_the_last_checkpoint_loaded_counts() -> None:
    run = Run("single", 0, 1, SETTINGS)
    run.train(8)
    fresh = dho2_ds.DHO2(engines.groups(run.model, 1e-2), **copy.deepcopy(SETTINGS))
    fresh.load_state_dict(run.optimizer.state_dict())
    plain = torch.optim.AdamW(engines.groups(run.model, 1e-2))
    run.model(*run.local(0, 0)).backward()
    plain.step()
    fresh.load_state_dict(plain.state_dict())
    dho2_ds.attach(run.model, fresh)
    fresh.step()
    stats = fresh.curvature_stats()
    assert stats["eigenvalues"] == [] and stats["refreshes"] == 0 and stats["steps"] == 1


class WithScalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return (self.gain * self.linear(x)).square().mean()


def scalar_parameter(rank: int, world: int) -> bool:
    """A 0-d parameter's state is loaded into a slice of one element."""
    for settings in ({"fused": False}, {"base": "sgd", "momentum": 0.9}):
        torch.manual_seed(0)
        losses = []
        model = nn.parallel.DistributedDataParallel(WithScalar())
        optimizer = dho2_ds.DHO2(model.parameters(), lr=1e-2, num_eigenvectors=2, **settings)
        dho2_ds.attach(model, optimizer)
        for step in range(6):
            if step == 3:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = dho2_ds.DHO2(model.parameters(), lr=1e-2, num_eigenvectors=2, **settings)
                dho2_ds.attach(model, optimizer)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4) * (step + 1))
            loss.backward()
            losses.append(float(loss))
            optimizer.step()
    return bool(torch.isfinite(torch.tensor(losses)).all())


@pytest.mark.timeout(100)
def test_a_scalar_parameter_is_loaded() -> None:
    assert run_ranks(2, scalar_parameter, timeout=90) == [True, True]


def late_meeting(rank: int, world: int) -> str:
    """Rank 0 alone in vain, then both."""
    dho2_ds.sharding.reduce.MEETING = timedelta(seconds=2)
    message = ""
    if rank == 0:
        try:
            dho2_ds.sharding.reduce.meet(None, "saving")
        except RuntimeError as error:
            message = str(error)
    dist.barrier()
    dho2_ds.sharding.reduce.meet(None, "saving")
    return message


@pytest.mark.timeout(60)
def test_a_failed_meeting_can_be_repeated() -> None:
    assert "rank 1 did not call it within 2 s" in run_ranks(2, late_meeting, timeout=50)[0]


def uneven_data(rank: int, world: int) -> str:
    """One rank's data runs out."""
    run = engines.Run("ddp", rank, world, SETTINGS)
    batches = [run.local(0, 0)] * (1 if rank else 5)
    dho2_ds.attach(run.module, run.optimizer, loss_fn=lambda model, batch: model(*batch), data=iter(batches))
    try:
        run.train(17)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.timeout(100)
def test_data_that_runs_out_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_ranks(2, uneven_data, timeout=90)
    assert "no curvature batch on another rank" in first and "ran out of batches" in second
