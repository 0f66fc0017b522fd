"""Differences of gradients and Lanczos alone: closed-form functions in one process, without a model or an engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dho2_ds.curvature.hvp import GROWTH_FLOOR, NORM_FLOOR, SELF_CHECK, BoundFiniteDifference, Exact, FiniteDifference
from dho2_ds.curvature.lanczos import CONVERGED, LanczosError, Ritz, lanczos_process, run

N = 40
F32, F64 = torch.float32, torch.float64
VALUES = torch.cat([torch.tensor([5.0, -3.0, 2.0]), torch.linspace(1, -1, N - 3)]).to(F64)
VECTORS = torch.linalg.qr(torch.randn(N, N, dtype=F64, generator=torch.Generator().manual_seed(0)))[0]
H = (VECTORS * VALUES) @ VECTORS.T
ROOT = torch.linspace(0.5, 1.5, N, dtype=F64)  # P^(1/2), a diagonal
A = ROOT[:, None] * H * ROOT
NORM = float(torch.linalg.matrix_norm(A, 2))


def unit(dtype: torch.dtype, seed: int = 1) -> Tensor:
    v = torch.randn(N, dtype=F64, generator=torch.Generator().manual_seed(seed))
    return (v / v.norm()).to(dtype)


class Function:
    """The gradient ``b + H d + bend (exp(d) - 1 - d)`` at ``w + d``, in weights of size 1: at w the Hessian is H.

    ``slope``: norm of b. ``cancelling``: a constant added to the gradient and taken away again, which is its rounding.
    """

    def __init__(self, dtype: torch.dtype, slope: float = 1.0, bend: float = 0.0, cancelling: float = 0.0) -> None:
        self.w, self.b = N**0.5 * unit(dtype, 2), slope * unit(dtype, 3)
        self.bend, self.cancelling, self.steps = bend, cancelling, list[float]()

    def accumulate(self, direction: Tensor | None, eps: float, out: Tensor) -> None:
        self.steps.append(eps)
        d = torch.zeros_like(self.w) if direction is None else (self.w + eps * direction) - self.w
        gradient = self.b + H.to(d) @ d + self.bend * (d.exp() - 1 - d)
        out.add_((gradient + self.cancelling) - self.cancelling)

    def bind(self, state: FiniteDifference) -> BoundFiniteDifference:
        return state.bind(self.accumulate, lambda x: x.mul_(ROOT.to(x)), lambda x: x)


def error(product: Tensor, v: Tensor) -> float:
    """Relative to the largest eigenvalue, as the docstrings count it."""
    return float((product.to(F64) - A @ v.to(F64)).norm()) / NORM


# -- differences --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "dtype", "allowed"),
    [
        ("finite_difference", F32, 3e-7 / 3e-3),  # delta / tau; a quadratic has no truncation
        ("forward_difference", F32, 3e-7 / 1e-3),
        ("finite_difference", F64, 1e-15 / 1e-4),
        ("forward_difference", F64, 1e-15 / 1e-7),
    ],
)
def test_rounding_is_as_documented(route: str, dtype: torch.dtype, allowed: float) -> None:
    state, v = FiniteDifference.for_dtype(dtype, route), unit(dtype)
    operator = Function(dtype).bind(state)
    assert error(run(operator.calibrate(v, 1.0)), v) < allowed
    assert state.gradient_norm == pytest.approx(float((ROOT * unit(F64, 3)).norm()), rel=0.1)
    other = unit(dtype, 4)
    assert error(operator(other, state.growth), other) < allowed
    exact = Exact(lambda x, out: out.add_(H.to(x) @ x), lambda x: x.mul_(ROOT.to(x)))
    assert error(exact(v, None), v) < 1e-6 and exact.hvps == 1


@pytest.mark.parametrize(("route", "order"), [("finite_difference", 2), ("forward_difference", 1)])
def test_order_of_truncation(route: str, order: int) -> None:
    errors, v = [], unit(F64)
    for tau in (1e-2, 1e-2 / 3):
        state = FiniteDifference.for_dtype(F64, route)
        state.tau, state.gradient_norm, state.growth = tau, 1.0, 1.0
        errors.append(error(Function(F64, bend=30).bind(state)(v, None), v))
    assert errors[0] / errors[1] == pytest.approx(3**order, rel=0.02)


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("wrong", [1e-8, 1e-4, 1e4])
def test_calibration_from_a_wrong_guess(dtype: torch.dtype, wrong: float) -> None:
    """A step 1e8 times too long overflows first."""
    state, v, function = FiniteDifference.for_dtype(dtype), unit(dtype), Function(dtype, bend=1)
    state.gradient_norm = 1.0
    growth = float((A @ v.to(F64)).norm())
    product = run(function.bind(state).calibrate(v, wrong * growth))
    assert 1 / 3 <= function.steps[-2] * growth / state.gradient_norm / state.tau <= 3
    assert error(product, v) < (3e-4 if dtype == F32 else 1e-7)  # the step may be three times too short
    assert state.hvps == len(function.steps) / 2 <= 4


def test_no_step_is_finite() -> None:
    state = FiniteDifference.for_dtype(F32)
    with pytest.raises(LanczosError, match="no step size"):
        run(Function(F32, bend=math.inf).bind(state).calibrate(unit(F32), 1.0))


@pytest.mark.parametrize("slope", [0.0, 1e-12])
def test_the_floor_at_a_minimum(slope: float) -> None:
    """By the gradient alone eps would be the rounding of the weights, where products are noise or zero."""
    state, v, function = FiniteDifference.for_dtype(F32), unit(F32), Function(F32, slope=slope)
    state.gradient_norm = 1.0
    for refresh in range(3):
        product = run(function.bind(state).calibrate(v, state.growth or 1.0))
        assert state.gradient_norm == pytest.approx(3.0 ** -(refresh + 1))
        rounding = 2**-24 * float(function.w.norm())  # of w + eps v
        assert error(product, v) < rounding / function.steps[-2] < 2e-3


def test_calibration_ends_where_truncation_bends_the_change() -> None:
    """Dividing by the change alone would swing around the step that is wanted."""
    state, function = FiniteDifference.for_dtype(F32), Function(F32, slope=1e3, bend=1e3)
    run(function.bind(state).calibrate(torch.linalg.eigh(A)[1][:, -1].to(F32), NORM))
    assert state.hvps <= 4


def test_the_floor_keeps_a_share_of_the_largest() -> None:
    state = FiniteDifference.for_dtype(F32)
    for slope in (1.0, *[0.0] * 9):
        run(Function(F32, slope=slope).bind(state).calibrate(unit(F32), state.growth or 1.0))
    assert state.gradient_norm == pytest.approx(NORM_FLOOR * float((ROOT * unit(F64, 3)).norm()), rel=0.1)


def self_check(state: FiniteDifference, function: Function) -> float:
    """Of the leading pair, as differences find it."""
    v, operator = torch.linalg.eigh(A)[1][:, -1].to(function.w), function.bind(state)
    product = run(operator.calibrate(v, NORM))
    return run(operator.check(v, float(v @ product)))


def test_tau_falls_where_truncation_dominates() -> None:
    """By three until it is harmless; it falls with tau^2."""
    state, function = FiniteDifference.for_dtype(F32), Function(F32, slope=1e3, bend=300)
    found, taus = [], []
    for _ in range(4):
        found.append(self_check(state, function))
        taus.append(state.tau)
    assert taus == pytest.approx([1e-3, 1e-3 / 3, 1e-3 / 3, 1e-3 / 3])
    assert found[1] > SELF_CHECK > found[2] and found[1] / found[2] == pytest.approx(9, rel=0.2)


def test_tau_rises_at_its_lower_bound() -> None:
    """There it is rounding that the two steps disagree by."""
    state, function = FiniteDifference.for_dtype(F32), Function(F32, cancelling=3e3)
    state.tau = low = state.bounds[0]
    assert self_check(state, function) > SELF_CHECK
    assert state.tau == pytest.approx(3 * low)
    for _ in range(4):
        found = self_check(state, function)
    assert found <= SELF_CHECK and state.tau > 3 * low  # it goes on upwards


def test_tau_turns_round_where_lowering_it_made_it_worse() -> None:
    state, function = FiniteDifference.for_dtype(F32), Function(F32, cancelling=5e3)
    found = [(self_check(state, function), state.tau) for _ in range(2)]
    assert [tau for _, tau in found] == pytest.approx([1e-3, 3e-3]) and found[1][0] > 2 * found[0][0] > 2 * SELF_CHECK


def test_gradients_of_forward_differences() -> None:
    state, function, v = FiniteDifference.for_dtype(F32, "forward_difference"), Function(F32), unit(F32)
    for _ in range(2):  # the gradient at w is taken anew in every refresh
        operator, before = function.bind(state), len(function.steps)
        run(operator.calibrate(v, state.growth or float((A @ v.to(F64)).norm())))
        for _ in range(3):
            operator(v, state.growth)
        run(operator.check(v, 1.0))
        assert state.hvps == 5 and len(function.steps) - before == 6
    assert function.steps.count(0.0) == 2


def test_the_step_in_the_flat_bulk_is_bounded() -> None:
    state, function, v = FiniteDifference.for_dtype(F64), Function(F64), unit(F64)
    state.gradient_norm, operator = 1.0, function.bind(state)
    for growth, expected in ((100.0, 100.0), (50.0, 50.0), (1e-9, 100.0 * GROWTH_FLOOR)):
        operator(v, growth)
        assert function.steps[-2:] == pytest.approx([state.tau / expected, -state.tau / expected])


@pytest.mark.parametrize(("tau", "taken"), [(1e-4, True), (0.1, True), (0.9e-4, False), (0.2, False)])
def test_resume_takes_tau_within_bounds(tau: float, taken: bool) -> None:
    state = FiniteDifference.for_dtype(F32)
    before = (state.tau, 0.0, 0.0)
    state.resume(None)
    assert (state.tau, state.gradient_norm, state.growth) == before
    state.resume((tau, 2.0, 3.0))
    assert (state.tau, state.gradient_norm, state.growth) == ((tau, 2.0, 3.0) if taken else before)


# -- Lanczos ------------------------------------------------------------------------------------------------------


def lanczos(matrix: Tensor, start: Tensor, steps: int = N, wanted: int = N, **options: Any) -> Ritz:
    return run(lanczos_process(lambda v, _: matrix.to(v) @ v, lambda x: x, start, steps, wanted=wanted, **options))


@pytest.mark.parametrize(("dtype", "tolerance"), [(F32, 1e-6), (F64, 1e-13)])
def test_an_invariant_subspace(dtype: torch.dtype, tolerance: float) -> None:
    """Two eigenvectors make up the start: two products, then it stops by itself."""
    found = lanczos(H, (VECTORS[:, 1] - 2 * VECTORS[:, 5]).to(dtype))
    assert found.hvps == 2 and found.residuals.tolist() == [0.0, 0.0]
    assert found.eigenvalues.tolist() == pytest.approx(VALUES[[1, 5]].tolist(), abs=NORM * tolerance)
    overlaps = found.vectors_(2).to(F64) @ VECTORS[:, [1, 5]]
    assert (overlaps.abs() - torch.eye(2)).abs().max() < 10 * tolerance


def test_residuals_bound_the_errors() -> None:
    """Paige: ``beta_m |s_mi|`` is the norm of ``H y - theta y``; some eigenvalue is within it."""
    found = lanczos(H, unit(F64), steps=14)
    errors = (found.eigenvalues[:, None] - VALUES).abs().min(dim=1).values
    assert found.hvps == 14 and (errors <= found.residuals + 1e-12).all() and found.residuals.max() > 1e-2
    vectors = found.vectors_(14, chunk=7)
    assert (vectors @ vectors.T - torch.eye(14)).abs().max() < 1e-12
    basis = lanczos(H, unit(F32)).basis
    assert (basis @ basis.T - torch.eye(N)).abs().max() < 1e-6  # one pass of Gram-Schmidt would leave 4e-5
    true = (H @ vectors.T - vectors.T * found.eigenvalues).norm(dim=0)
    assert (true - found.residuals).abs().max() < 1e-12


@pytest.mark.parametrize("tolerance", [CONVERGED, 1e-2])
def test_it_stops_when_the_wanted_pairs_have_converged(tolerance: float) -> None:
    found = lanczos(H, unit(F64), wanted=2, tolerance=tolerance)
    before = lanczos(H, unit(F64), steps=found.hvps - 1)
    assert found.hvps < N / 2
    assert (found.residuals[:2] <= tolerance * found.eigenvalues[:2].abs()).all()
    assert (before.residuals[:2] > tolerance * before.eigenvalues[:2].abs()).any()  # and not later
    assert found.eigenvalues[:2].tolist() == pytest.approx([5.0, -3.0], rel=tolerance)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("at", [1, 3])
def test_a_product_that_is_not_finite(value: float, at: int) -> None:
    made: list[Tensor] = []

    def matvec(v: Tensor, growth: float | None) -> Tensor:
        made.append(H @ v)
        return made[-1] * value if len(made) == at else made[-1]

    with pytest.raises(LanczosError, match=f"product {at} is not finite"):
        run(lanczos_process(matvec, lambda x: x, unit(F64), 9, wanted=9))


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_a_start_vector_without_a_direction(value: float) -> None:
    with pytest.raises(LanczosError, match="start vector has norm"):
        lanczos(H, value * torch.ones(N))
