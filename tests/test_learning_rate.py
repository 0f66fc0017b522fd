"""The learning rate from curvature, and the distances between refreshes."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import dho2_ds
from dho2_ds.config import CurvatureConfig
from dho2_ds.curvature.eigenbasis import Eigenbasis
from dho2_ds.curvature.refresh import affordable_interval
from dho2_ds.curvature.schedule import Schedule
from dho2_ds.learning_rate import RANGE, next_scale, stability_limit
from tests import engines

F64 = torch.float64


def basis(leading: float, outside: float) -> Eigenbasis:
    return Eigenbasis(torch.eye(1, 2), torch.tensor([leading], dtype=F64), outside, 0)


def spectral_radius(companion: list[list[float]]) -> float:
    return float(torch.linalg.eigvals(torch.tensor(companion, dtype=F64)).abs().max())


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.95])
def test_the_limit_is_where_a_quadratic_becomes_unstable(beta: float) -> None:
    """The (weight, momentum) map of one curvature has spectral radius 1 at the limit, less below, more above."""

    def average(x: float) -> list[list[float]]:  # m' = beta m + (1 - beta) w; w' = w - x m'
        return [[1 - x * (1 - beta), -x * beta], [1 - beta, beta]]

    def heavy_ball(x: float) -> list[list[float]]:  # m' = beta m + w; w' = w - x m'
        return [[1 - x, -x * beta], [1, beta]]

    def nesterov(x: float) -> list[list[float]]:  # w' = w - x (w + beta m')
        return [[1 - x * (1 + beta), -x * beta * beta], [1, beta]]

    sgd = {"momentum": beta, "nesterov": False}
    for base, group, step in (
        ("adamw", {"betas": (beta, 0.999)}, average),
        ("soap", {"betas": (beta, 0.95)}, average),
        ("sgd", sgd, heavy_ball),
        ("sgd", {**sgd, "nesterov": True}, nesterov),
    ):
        limit = stability_limit(base, [group])
        assert spectral_radius(step(0.999 * limit)) < 1 < spectral_radius(step(1.001 * limit)), (base, group)


def test_the_group_with_the_least_limit_counts() -> None:
    assert stability_limit("adamw", [{"betas": (0.9, 0.999)}, {"betas": (0.5, 0.999)}]) == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("before", "wanted", "scale"),
    [(0.0, 5.0, 5.0), (0.0, 50.0, 10.0), (0.0, 0.1, 0.25), (2.0, 2.2, 2.2), (2.0, 9.0, 2.5), (2.0, 0.1, 0.5)],
)
def test_the_scale_moves_to_what_is_wanted_within_bounds(before: float, wanted: float, scale: float) -> None:
    """At most 10 times at the first refresh, 1.25 times later; at least a quarter."""
    fraction, limit, lr = 0.25, 38.0, 1e-3
    outside = fraction * limit / (lr * wanted)
    assert next_scale(before, basis(2 * outside, outside), limit, lr, fraction) == pytest.approx(scale)


def test_a_span_that_holds_nearly_everything_does_not_set_lr_free() -> None:
    assert next_scale(900.0, basis(1e3, 0.0), 38.0, 1e-3, 0.25) == next_scale(900.0, basis(1e3, 1.0), 38.0, 1e-3, 0.25)
    assert next_scale(900.0, basis(1e-9, 0.0), 38.0, 1e-3, 0.25) == RANGE


def test_schedules_see_the_start_and_a_resume_goes_on_with_the_scale() -> None:
    settings: dict[str, Any] = {"lr": "auto", "num_eigenvectors": 2}
    settings["curvature"] = {"warmup_steps": 2, "interval": 2, "lanczos_steps": 20}
    run = engines.Run("single", 0, 1, settings)
    assert run.optimizer.param_groups[0]["lr"] == 1e-3
    run.train(5)
    scale = run.optimizer.curvature_stats()["lr_scale"]
    assert scale > 1 and run.optimizer.param_groups[0]["lr"] == 1e-3
    again = engines.Run("single", 0, 1, settings)
    again.model.load_state_dict(run.model.state_dict())
    again.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    again.step_count = run.step_count
    assert again.train(4) == run.train(4)
    assert again.optimizer.curvature_stats()["lr_scale"] == run.optimizer.curvature_stats()["lr_scale"] != scale


def due(schedule: Schedule, steps: int) -> list[int]:
    found = []
    for step in range(1, steps + 1):
        schedule.advance(step, has_source=True)
        if schedule.due_since is not None:
            found.append(schedule.due_since)
            schedule.done()
    return found


@pytest.mark.parametrize(
    ("warmup", "interval", "first", "expected"),
    [
        (10, 100, 10, [10, 20, 40, 80, 160, 260, 360]),
        (0, 50, 20, [1, 21, 61, 111, 161, 211, 261, 311, 361]),
        (100, 100, None, [100, 200, 300]),
        (5, 100, 300, [5, 105, 205, 305]),
    ],
)
def test_distances_double_up_to_the_interval(
    warmup: int, interval: int, first: int | None, expected: list[int]
) -> None:
    assert due(Schedule(warmup, interval, first), 390) == expected


def test_a_budget_sets_the_interval() -> None:
    assert affordable_interval(CurvatureConfig(interval=50), 8, 1000) == 50
    assert affordable_interval(CurvatureConfig(interval=50, budget=0.1, lanczos_steps=16), 8, 1000) == 320
    assert affordable_interval(CurvatureConfig(interval=500, budget=0.1, lanczos_steps=16), 8, 1000) == 500
    assert affordable_interval(CurvatureConfig(budget=0.5, batches=3), 8, 10**6) == math.ceil(2 * 28 * 3 / 0.5)
    cheap = CurvatureConfig(interval=50, budget=0.1, lanczos_steps=16, hvp="forward_difference")
    assert affordable_interval(cheap, 8, 1000) == 170  # one gradient each, and one at w


def test_a_long_run_keeps_to_its_budget() -> None:
    """Counted, not computed: a product is two gradients; the early refreshes come on top."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    model.forward = lambda x, layer=model.forward: layer(x).square().mean()  # type: ignore[method-assign, misc]
    curvature = {"warmup_steps": 2, "budget": 0.2, "lanczos_steps": 5, "interval": 1}
    optimizer = dho2_ds.DHO2(model.parameters(), num_eigenvectors=2, weight_decay=0.0, curvature=curvature)
    dho2_ds.attach(model, optimizer)
    for _ in range(502):
        optimizer.zero_grad()
        model(torch.randn(8, 6)).backward()
        optimizer.step()
    stats = optimizer.curvature_stats()
    assert stats["refreshes"] == 10 and 2 * stats["hvps"] <= 0.2 * 502


def test_a_basis_older_than_its_budgeted_interval_is_refused() -> None:
    model = torch.nn.Linear(6, 1)
    curvature = {"budget": 0.1, "lanczos_steps": 5, "max_age": 100}
    optimizer = dho2_ds.DHO2(model.parameters(), num_eigenvectors=2, curvature=curvature)
    with pytest.raises(dho2_ds.ConfigError, match="curvature.max_age=100: must be > 100, the interval by"):
        dho2_ds.attach(model, optimizer)


def test_a_budget_may_make_room_for_spread_products() -> None:
    curvature = {"mode": "spread", "lanczos_steps": 20, "interval": 1, "budget": 0.1}
    assert dho2_ds.DHO2Config(curvature=curvature).curvature.budget == 0.1
    with pytest.raises(ValueError, match="curvature.first_interval=5: must be >= 20"):
        dho2_ds.DHO2Config(curvature={**curvature, "first_interval": 5})


def test_an_automatic_rate_nears_its_start_when_refreshes_fail() -> None:
    """It must neither stay where curvature of long ago put it nor fall to zero."""
    settings: dict[str, Any] = {"lr": "auto", "num_eigenvectors": 2}
    settings["curvature"] = {"warmup_steps": 2, "interval": 2, "lanczos_steps": 20}
    run = engines.Run("single", 0, 1, settings)
    run.train(5)
    space = run.optimizer._space
    scale, born = space.lr_scale, space.basis.born
    assert scale > 1 and space.scale(born + 4) == scale
    assert space.scale(born + 40) == pytest.approx(1 + 0.1 * (scale - 1))
    space._auto = 0.5
    assert space.scale(born + 40) == 0.5
    space.drop()
    assert space.scale(born + 40) == 0.5
    space._auto = scale
    assert space.scale(born + 40) == 1.0


def test_a_checkpoint_of_the_base_brings_its_learning_rate() -> None:
    model = torch.nn.Linear(6, 3)
    plain = torch.optim.AdamW(model.parameters(), lr=5e-5)
    optimizer = dho2_ds.DHO2(model.parameters(), lr="auto", num_eigenvectors=2)
    dho2_ds.attach(model, optimizer)
    model(torch.ones(1, 6)).sum().backward()
    plain.step()
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer._space.reference_lr == 5e-5
