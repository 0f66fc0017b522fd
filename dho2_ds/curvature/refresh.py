"""One curvature refresh: start vector, Lanczos, checks, and the decision that all ranks take together."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from dho2_ds.config import CurvatureConfig
from dho2_ds.curvature.eigenbasis import Eigenbasis
from dho2_ds.curvature.hvp import Accumulate, Exact, FiniteDifference, Root
from dho2_ds.curvature.lanczos import CONVERGED, LanczosError, Process, Reduce, Ritz, lanczos_process, run
from dho2_ds.curvature.precision import Autocast
from dho2_ds.curvature.probes import rademacher
from dho2_ds.hosts.base import Host, Loss

T = TypeVar("T")

UNCONVERGED = 0.3
"""Drop a Ritz pair whose residual exceeds this fraction of |theta|: sin(angle) <= residual / gap (Davis-Kahan)."""

UNRELIABLE = 0.3
"""Reject a refresh whose leading Rayleigh quotient changes by more than this between eps and eps/3."""

ORTHONORMAL = 1e-2
"""Largest entry of |Q Q^T - I| that is accepted."""

_PROBE_WEIGHT = 0.1
"""Share of the pseudo-random probe in the start vector: enough that no eigenvector is orthogonal to it by structure."""


@dataclass(frozen=True)
class Refresh:
    """What one refresh did. Identical on all ranks except ``seconds``."""

    accepted: bool
    reason: str
    eigenvalues: list[float] = field(default_factory=list)
    residuals: list[float] = field(default_factory=list)
    next_eigenvalue: float = 0.0
    hvps: int = 0
    seconds: float = 0.0
    self_check: float = math.nan
    tau: float = math.nan
    transient_bytes: int = 0


def lanczos_budget(given: int | None, k: int, numel: int) -> int:
    """Products of a refresh: ``lanczos_steps`` as given, or max(2k + 4, ceil(2 ln n)).

    2k products capture 97-99 % of the leading eigenvalues' mass, and about c log n are needed before outliers are
    visible at all (Garza-Vargas and Kulkarni 2020).
    """
    return given or max(2 * k + 4, math.ceil(2 * math.log(max(numel, 2))))


def gradients_of(hvp: str, products: int) -> int:
    """Gradients that a refresh of so many products costs; a double backward counts as two, which it costs at least."""
    return products + 1 if hvp == "forward_difference" else 2 * products


def working_vectors(one_sided: bool) -> int:
    """Vectors of n/P that a refresh holds beside Lanczos': start or direction, product, one root copy, the hint; with
    forward differences the gradient at w."""
    return 5 if one_sided else 4


def affordable_interval(curvature: CurvatureConfig, k: int, numel: int) -> int:
    """Steps between refreshes: ``curvature.interval``, or more where ``curvature.budget`` asks for more."""
    if curvature.budget is None:
        return curvature.interval
    steps = lanczos_budget(curvature.lanczos_steps, k, numel)
    gradients = gradients_of(curvature.hvp, steps) * curvature.batches
    return max(curvature.interval, math.ceil(gradients / curvature.budget))


def start_vector(
    host: Host, hint: Tensor | None, old: Eigenbasis | None, reduce: Reduce, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Layout-independent start: unit(gradient) + unit(sum |lambda_i| q_i of the old basis) + a small probe.

    Args:
        hint: (n_local,) local gradient-like vector (the base optimizer's preconditioned momentum), or None; reused.
        old: previous eigenbasis.

    Returns:
        (n_local,) local. One all-reduce of two scalars.
    """
    start = rademacher(host, dtype, device)
    start.mul_(_PROBE_WEIGHT / math.sqrt(max(host.numel, 1)))
    parts: list[Tensor] = [hint.to(dtype)] if hint is not None else []
    if old is not None:
        weights = old.eigenvalues.abs() / old.eigenvalues.abs().max()
        rows = old.vectors
        total = torch.zeros_like(start)
        for row, weight in zip(rows, weights.tolist(), strict=True):
            total.add_(row.to(dtype), alpha=weight)
        parts.append(total)
    if parts:
        squares = reduce(torch.stack([torch.dot(p, host.dual(p)).double() for p in parts]))
        for part, square in zip(parts, squares.tolist(), strict=True):
            if square > 0 and math.isfinite(square):
                start.add_(part, alpha=1.0 / math.sqrt(square))
    return start


@dataclass(frozen=True)
class Order:
    """What is asked of a refresh.

    Attributes:
        k: wanted pairs. budget: largest number of Hessian-vector products, checks included.
        dtype, device: of the local vectors. born: step number to record.
        growth_guess: expected size of the largest eigenvalue, for the first step size.
        all_pairs: keep unconverged pairs too (for inspecting a spectrum).
    """

    k: int
    budget: int
    dtype: torch.dtype
    device: torch.device
    born: int = 0
    growth_guess: float = 1.0
    all_pairs: bool = False


Outcome = tuple[Eigenbasis | None, Refresh]


def refresh(
    host: Host,
    losses: Sequence[Loss],
    root: Root,
    order: Order,
    finite_difference: FiniteDifference,
    *,
    route: str = "finite_difference",
    hint: Tensor | None = None,
    old: Eigenbasis | None = None,
    between: Callable[[], None] = lambda: None,
) -> Outcome:
    """Compute new leading eigenpairs of ``P^(1/2) H P^(1/2)`` at the current weights, all at once.

    Args:
        host: the engine; everything it does is undone when this returns or raises.
        losses: this rank's curvature batch (or batches).
        root: in-place P^(1/2); the identity for plain-Hessian rules.
        finite_difference: step-size state kept between refreshes.
        route: ``exact``, or a way of taking differences.
        hint, old: see :func:`start_vector`.
        between: called after every product.

    Returns:
        See :func:`refresh_process`.
    """

    def make(accumulate: Accumulate, exact: Exact | None) -> Process[Outcome]:
        return refresh_process(host, accumulate, root, order, finite_difference, exact=exact, hint=hint, old=old)

    return evaluate(host, losses, root, finite_difference, make, route=route, between=between)


_depth = 0


def evaluating() -> bool:
    """Whether a forward seen now is one of :func:`evaluate`, a spectrum's too, and not training's."""
    return _depth > 0


@contextlib.contextmanager
def _evaluating() -> Iterator[None]:
    global _depth
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


def evaluate(
    host: Host,
    losses: Sequence[Loss],
    root: Root,
    finite_difference: FiniteDifference,
    make: Callable[[Accumulate, Exact | None], Process[T]],
    *,
    route: str,
    between: Callable[[], None],
) -> T:
    """Run a process of products at the current weights, all at once; see :func:`refresh` for the arguments.

    Args:
        make: ``make(accumulate, exact)``: the process; ``exact`` is None on every other route.
    """
    autocast = Autocast()
    losses = autocast.losses(losses, finite_difference.scale_for(host.scales_loss) if route != "exact" else 1.0)
    with torch.no_grad(), _evaluating(), autocast.off(), host.evaluation():
        exact = host.exact(losses, root) if route == "exact" else None

        def accumulate(direction: Tensor | None, eps: float, out: Tensor) -> None:
            host.accumulate(losses, direction, eps, out)

        return run(make(accumulate, exact), between)


def refresh_process(
    host: Host,
    accumulate: Accumulate,
    root: Root,
    order: Order,
    finite_difference: FiniteDifference,
    *,
    exact: Exact | None = None,
    hint: Tensor | None = None,
    old: Eigenbasis | None = None,
) -> Process[Outcome]:
    """A refresh that hands out its Hessian-vector products; each is to be made inside ``host.evaluation()``.

    Args:
        accumulate: see :data:`dho2_ds.curvature.hvp.Accumulate`. exact: an operator to use instead.
        root, order, finite_difference, hint, old: see :func:`refresh`.

    Returns:
        (eigenbasis, report); the first is None when the refresh was rejected. The decision, the eigenvalues and the
        counts are the same on every rank. The eigenvectors are (a view of) the Lanczos buffer in ``order.dtype``:
        copy what is to be kept.

    Cost: at most ``order.budget`` products; two all-reduces per Lanczos step and a handful per refresh.
    """
    began = time.perf_counter()
    reduce, numel, k = host.reducer.sum_, host.layout.numel, order.k
    item = torch.finfo(order.dtype).bits // 8
    vectors = working_vectors(exact is None and finite_difference.one_sided)
    transient = host.transient_bytes + vectors * numel * item
    finite = finite_difference.bind(accumulate, root, reduce, host.dual)
    spent = exact if exact is not None else finite_difference
    try:
        start = start_vector(host, hint, old, reduce, order.dtype, order.device)
        hint = None
        first: list[Tensor] = []  # handed over, not held here as well
        if exact is None:
            norm = math.sqrt(float(reduce(torch.dot(start, host.dual(start)).double().reshape(1))))
            start.div_(norm)
            first.append((yield from finite.calibrate(start, order.growth_guess)))
        # Calibration's last product is Lanczos' first; one more is kept back for the self-check.
        steps = order.budget if exact is not None else order.budget - finite_difference.hvps
        steps = max(1, min(steps, host.numel))
        transient += steps * numel * item
        ritz = yield from lanczos_process(
            exact or finite,
            reduce,
            start,
            steps,
            wanted=min(k + 1, host.numel),
            first_product=first.pop() if first else None,
            tolerance=CONVERGED if exact is not None else finite_difference.tolerance,
            dual=host.dual,
        )
        del start
        kept = _select(ritz, k, order.all_pairs)
        leading = ritz.vectors_(kept[-1] + 1 if kept else 1)
        reason = "" if kept else "no Ritz pair converged; raise curvature.lanczos_steps"
        if exact is None and kept and float(ritz.eigenvalues[0]) != 0.0:
            disagreement = yield from finite.check(leading[0], float(ritz.eigenvalues[0]))
            if not disagreement <= UNRELIABLE and not order.all_pairs:
                reason = f"finite differences disagree by {disagreement:.0%} between two step sizes"
        if kept:
            if len(kept) < len(leading):  # a gap: an unconverged pair lies between kept ones
                leading = leading[kept]
            gram = reduce(torch.stack([leading @ host.dual(row) for row in leading]).double())
            error = float((gram - torch.eye(len(kept), dtype=gram.dtype, device=gram.device)).abs().max())
            if not error <= ORTHONORMAL:
                reason = reason or f"eigenvectors are not orthonormal (error {error:.1e})"
    except LanczosError as problem:
        ritz, kept, reason = None, [], str(problem)
    values = ritz.eigenvalues if ritz is not None else torch.zeros(0, dtype=torch.float64)
    fingerprint = torch.zeros(order.budget + 1, dtype=torch.float64)  # as long on all ranks, whatever they found
    fingerprint[: len(values)] = values
    agreed = host.agreement.agree(not reason, fingerprint.to(host.agreement.device))
    if not agreed and not reason:
        reason = "ranks disagree"
    report = Refresh(
        accepted=agreed,
        reason=reason,
        eigenvalues=values[kept].tolist(),
        residuals=ritz.residuals[kept].tolist() if ritz is not None else [],
        next_eigenvalue=_next(values, kept),
        hvps=spent.hvps,
        self_check=finite_difference.self_check,
        tau=finite_difference.tau if exact is None else math.nan,
        transient_bytes=transient,
        seconds=time.perf_counter() - began,
    )
    if not agreed or ritz is None:
        return None, report
    return Eigenbasis(leading, values[kept].clone(), report.next_eigenvalue, order.born), report


def _select(ritz: Ritz, k: int, all_pairs: bool) -> list[int]:
    """Indices of the pairs to keep: the k largest by magnitude, less unconverged or zero ones."""
    kept = []
    for index in range(min(k, ritz.hvps)):
        value = abs(float(ritz.eigenvalues[index]))
        if all_pairs or (value > 0 and float(ritz.residuals[index]) <= UNCONVERGED * value):
            kept.append(index)
    return kept


def _next(values: Tensor, kept: list[int]) -> float:
    """Largest magnitude that was not kept."""
    rest = [abs(float(v)) for i, v in enumerate(values) if i not in set(kept)]
    return max(rest, default=0.0)
