"""Hessian-vector products of the preconditioned operator ``P^(1/2) H P^(1/2)`` on local vectors.

The finite-difference step follows one rule: the *change* of the preconditioned gradient is a fixed fraction tau of
the preconditioned gradient itself, ``eps = tau ||P^(1/2) g|| / ||A v||`` for a unit v. Rounding error is then about
``delta / tau`` and truncation about ``tau^2`` (forward differences: ``tau``) whatever the direction, where a fixed eps
is wrong by one to two orders of magnitude between the sharpest and a random direction. Measuring both norms in the
operator's own coordinates makes ||A v|| free: Lanczos knows it from its recurrence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dho2_ds.config import ConfigError
from dho2_ds.curvature.lanczos import CONVERGED, LanczosError, Process, Reduce

Accumulate = Callable[[Tensor | None, float, Tensor], None]
"""``accumulate(direction, eps, out)``: add the local share of the gradient at ``w + eps * direction`` (mean over all
ranks) to ``out``. ``direction`` None means at ``w``."""
Root = Callable[[Tensor], Tensor]
"""In-place ``x <- P^(1/2) x`` on a local vector; returns x."""

TAU = {torch.float64: 1e-4, torch.float32: 3e-3, torch.bfloat16: 2e-1, torch.float16: 5e-2}
"""Relative gradient change by the dtype the model computes in. Rounding error is delta/tau (delta about 3e-7 in
float32, 4e-3 in bfloat16), truncation tau^2 times a constant that depends on the third derivative: on a transformer
1e-2 was best in float32 (3e-5), early in the training of a small classifier it cost 3e-3 of lambda_1. 3e-3 costs 1e-4
by rounding and a tenth of that truncation, and errs on the safe side: truncation under-reads curvature, rounding does
not. bfloat16 has room only between 0.1 and 0.3 (3-6 %); float16 lies between."""

TAU_RANGE = {
    torch.float64: (1e-7, 1e-2),
    torch.float32: (1e-4, 1e-1),
    torch.bfloat16: (6e-2, 5e-1),
    torch.float16: (1e-2, 2e-1),
}
"""How far the self-check may move tau before the product is called unreliable."""

TAU_FORWARD = {torch.float64: 1e-7, torch.float32: 1e-3}
TAU_FORWARD_RANGE = {torch.float64: (1e-8, 1e-5), torch.float32: (1e-4, 2e-3)}
"""The same two for forward differences, whose truncation is of first order: 3e-3 cost 1.6 % of lambda_1 in a test, 1e-3
is a third of that and still costs 3e-4 by rounding. In 16 bits there is no room at all. The tau of a checkpoint
that took central differences lies outside, unless their self-check had lowered it, and is not taken over."""

GROWTH_FLOOR = 0.03
"""eps is never chosen for a product smaller than this fraction of the largest seen: in the flat bulk of the spectrum
only the error relative to lambda_1 matters, and an unbounded eps would leave the region where the model is smooth."""

FLOAT16_SCALE = 2.0**12
"""A curvature loss is multiplied by this before a float16 backward and its gradient divided by it: float16 has no
gradient below 6e-8, and powers of two round nothing. Training's own scaler starts at 2^16 and settles around 2^12 to
2^16."""

SELF_CHECK = 0.05
"""Largest relative disagreement of the leading Rayleigh quotient between eps and eps/3."""

NORM_FLOOR = 1e-2
"""||P^(1/2) g|| is never taken for less than this fraction of the largest seen: near a minimum it goes to zero, and
with it eps would fall below the rounding of the weights and of the batch's own gradients, which do not cancel."""

_CALIBRATED = 3.0
_CALIBRATIONS = 6


@dataclass
class FiniteDifference:
    """Differences of ordinary gradients, central ones unless ``one_sided``: two gradients per product, on every host.

    State that lives from one refresh to the next: ``tau`` (moved by the self-check) and ``gradient_norm``, the last
    ||P^(1/2) g||, whose third is a floor for the next so that eps stays meaningful near a minimum; and so is
    ``NORM_FLOOR`` of the largest.
    """

    tau: float
    bounds: tuple[float, float]
    tolerance: float = CONVERGED
    gradient_norm: float = 0.0
    growth: float = 0.0
    hvps: int = 0
    self_check: float = field(default=math.nan)
    largest_norm: float = 0.0
    failed: tuple[float, float] | None = None
    """The self-check that failed last, and by what factor tau was moved then."""
    one_sided: bool = False
    """Forward differences ``(g(w + eps v) - g(w)) / eps``: one gradient each and one per refresh."""
    loss_scale: float = 1.0
    """What the losses behind ``accumulate`` are multiplied by; products and gradients are divided by it."""

    @classmethod
    def for_dtype(cls, dtype: torch.dtype, route: str = "finite_difference") -> FiniteDifference:
        """The operator state for a model that computes in ``dtype``.

        Raises:
            ConfigError: forward differences in a precision that they do not survive.
        """
        one_sided = route == "forward_difference"
        if one_sided and torch.finfo(dtype).bits < 32:
            raise ConfigError(
                "curvature.hvp='forward_difference': must not be used with a model that computes in "
                f"{str(dtype).removeprefix('torch.')}, whose rounding it does not survive; use 'auto'"
            )
        # In 16 bits products carry an error of per cents: iterating to a smaller residual would fit noise.
        tolerance = CONVERGED if torch.finfo(dtype).bits >= 32 else 1e-2
        scale = FLOAT16_SCALE if dtype == torch.float16 else 1.0
        tau, bounds = (TAU_FORWARD, TAU_FORWARD_RANGE) if one_sided else (TAU, TAU_RANGE)
        return cls(tau=tau[dtype], bounds=bounds[dtype], tolerance=tolerance, one_sided=one_sided, loss_scale=scale)

    def scale_for(self, engine_scales: bool) -> float:
        """The loss scale to use on an engine that has one of its own, or not."""
        self.loss_scale = 1.0 if engine_scales else self.loss_scale
        return self.loss_scale

    def resume(self, saved: tuple[float, float, float] | None) -> None:
        """Go on from a checkpoint's ``(tau, gradient_norm, growth)``, if it computed in a comparable precision."""
        if saved is not None and self.bounds[0] <= saved[0] <= self.bounds[1]:
            self.tau, self.gradient_norm, self.growth = saved

    def bind(
        self, accumulate: Accumulate, root: Root, reduce: Reduce, dual: Callable[[Tensor], Tensor] = lambda x: x
    ) -> BoundFiniteDifference:
        """An operator for one refresh; ``dual`` as in :func:`dho2_ds.curvature.lanczos.lanczos_process`."""
        self.hvps = 0
        self.self_check = math.nan
        return BoundFiniteDifference(self, accumulate, root, reduce, dual)


class BoundFiniteDifference:
    """The operator of one refresh; ``matvec`` for :func:`dho2_ds.curvature.lanczos.lanczos_process`."""

    def __init__(
        self,
        state: FiniteDifference,
        accumulate: Accumulate,
        root: Root,
        reduce: Reduce,
        dual: Callable[[Tensor], Tensor],
    ) -> None:
        self.state, self._accumulate, self._root, self._reduce, self._dual = state, accumulate, root, reduce, dual
        self._largest = 0.0
        self._here: Tensor | None = None  # the gradient at w, local, if it is needed

    def __call__(self, v: Tensor, growth: float | None) -> Tensor:
        """A v for a unit local vector v. Costs two gradients, or one, and no collective of its own."""
        if growth is not None:
            self.state.growth = growth
            self._largest = max(self._largest, growth)
        expected = max(self.state.growth, GROWTH_FLOOR * self._largest)
        return self._product(v, self.state.tau * self.state.gradient_norm / expected)

    def calibrate(self, v: Tensor, guess: float) -> Process[Tensor]:
        """A v at a step that is known to be right, for the first vector of a refresh.

        Args:
            v: (n_local,) unit vector, local.
            guess: expected ||A v||; only its order of magnitude matters.

        Returns:
            (n_local,) local product. Cost: usually one product (more on the first refresh, when ``guess`` is poor)
            and one all-reduce of two scalars per try.

        Raises:
            LanczosError: on every rank together, when no finite product is found.
        """
        state = self.state
        state.largest_norm = max(state.largest_norm, state.gradient_norm)
        floor = max(state.gradient_norm / 3, NORM_FLOOR * state.largest_norm)
        too_long: set[bool] = set()
        eps = state.tau * max(state.gradient_norm, 1e-12) / guess if state.gradient_norm else 1e-3
        for _ in range(_CALIBRATIONS):
            partial: list[Tensor] = []
            product = yield functools.partial(self._product, v, eps, partial)
            grown, gradient = self._reduce(torch.cat([self._square(product), *partial])).sqrt().tolist()
            if not (math.isfinite(grown) and math.isfinite(gradient)):
                eps /= 1e3
                continue
            state.gradient_norm = max(gradient, floor)
            state.growth = self._largest = grown
            if grown == 0.0 or state.gradient_norm == 0.0:
                return product
            change = eps * grown / state.gradient_norm / state.tau
            if 1 / _CALIBRATED <= change <= _CALIBRATED:
                return product
            too_long.add(change > 1.0)
            # Where truncation makes the change another power of eps, dividing by it would overshoot again and again.
            eps /= min(max(change, 1e-4), 1e4) ** (0.5 if len(too_long) == 2 else 1.0)
        raise LanczosError("no step size gives a finite, consistent Hessian-vector product at the current weights")

    def check(self, v: Tensor, theta: float) -> Process[float]:
        """Relative disagreement of ``v' A v`` at eps/3 with ``theta`` found at eps; moves tau when it is too large.

        Costs one product and one all-reduce of one scalar.
        """
        state = self.state
        step = state.tau * state.gradient_norm / max(abs(theta), 1e-300) / 3
        product = yield functools.partial(self._product, v, step)
        quotient = float(self._reduce(torch.dot(v, self._dual(product)).double().reshape(1)))
        state.self_check = abs(quotient - theta) / max(abs(theta), abs(quotient), 1e-300)
        if state.self_check <= SELF_CHECK:
            state.failed = None
        else:
            # Truncation falls with tau^2 (one-sided: tau) and rounding grows with 1/tau. So lower tau first, and turn
            # round where that made it much worse (rounding scatters) or there is no room.
            before, factor = state.failed or (math.inf, 1 / 3)
            low, high = state.bounds
            if state.self_check > 2 * before or not low <= state.tau * factor <= high:
                factor = 1 / factor
            state.failed = state.self_check, factor
            state.tau = min(max(state.tau * factor, low), high)
        return state.self_check

    def _product(self, v: Tensor, eps: float, gradient_square: list[Tensor] | None = None) -> Tensor:
        self.state.hvps += 1
        direction = self._root(v.clone())
        out = torch.zeros_like(v)
        if self.state.one_sided and self._here is None:
            self._here = torch.zeros_like(v)
            self._accumulate(None, 0.0, self._here)
        self._accumulate(direction, eps, out)
        if gradient_square is not None:
            near = out if self._here is None else self._here
            gradient_square.append(self._square(self._root(near / self.state.loss_scale)))
        if self._here is not None:
            return self._root(out.sub_(self._here).mul_(1.0 / (eps * self.state.loss_scale)))
        out.neg_()
        self._accumulate(direction, -eps, out)
        return self._root(out.mul_(-0.5 / (eps * self.state.loss_scale)))

    def _square(self, x: Tensor) -> Tensor:
        return torch.dot(x, self._dual(x)).double().reshape(1)


@dataclass
class Exact:
    """Double backward on one retained graph: no step size, no truncation; needs every operation twice differentiable.

    ``differentiate(direction, out)`` adds the local share of ``H direction`` to ``out``; the host builds it.
    """

    differentiate: Callable[[Tensor, Tensor], None]
    root: Root
    hvps: int = 0

    def __call__(self, v: Tensor, growth: float | None) -> Tensor:
        """A v for a local vector v. Costs one backward pass through the retained gradient graph."""
        self.hvps += 1
        out = torch.zeros_like(v)
        self.differentiate(self.root(v.clone()), out)
        return self.root(out)
