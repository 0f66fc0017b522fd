"""Stochastic Lanczos quadrature: the spectral density of the Hessian from a few short Lanczos runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dho2_ds.curvature.hvp import Accumulate, Exact, FiniteDifference
from dho2_ds.curvature.lanczos import Process, lanczos_process
from dho2_ds.curvature.probes import rademacher
from dho2_ds.hosts.base import Host


@dataclass(frozen=True)
class Density:
    """The distribution of the Hessian's n eigenvalues, estimated by probes of m nodes each; the same on every rank.

    ``phi(t) = 1/n sum_i delta(t - lambda_i)`` is estimated by the mean over probes of ``sum_j w_j delta(t - theta_j)``.
    A probe's first 2 m moments are those of its own random vector, exactly; over probes they scatter by
    ``sqrt(2 (||H||_F^2 / n - mean diagonal square) / (n probes))`` about the mean eigenvalue (Hutchinson).

    Attributes:
        nodes, weights: per probe the Ritz values, and their weights, which sum to 1.
        numel: n. hvps: Hessian-vector products spent.
    """

    nodes: list[list[float]]
    weights: list[list[float]]
    numel: int
    hvps: int

    def moments(self, power: int) -> list[float]:
        """Mean of ``lambda ** power`` over all eigenvalues, as each probe has it; their mean is the estimate."""
        pairs = zip(self.nodes, self.weights, strict=True)
        return [math.fsum(w * t**power for t, w in zip(nodes, weights, strict=True)) for nodes, weights in pairs]

    def moment(self, power: int) -> float:
        """Estimated mean of ``lambda ** power`` over all eigenvalues."""
        return math.fsum(self.moments(power)) / len(self.nodes)

    @property
    def trace(self) -> float:
        """Estimated sum of all eigenvalues."""
        return self.numel * self.moment(1)

    def curve(self, points: Sequence[float], width: float) -> list[float]:
        """The density smoothed by a Gaussian of standard deviation ``width``, at some points; its integral is 1."""
        t = torch.as_tensor(points, dtype=torch.float64)
        total = torch.zeros_like(t)
        for nodes, weights in zip(self.nodes, self.weights, strict=True):
            z = (t - torch.tensor(nodes, dtype=torch.float64)[:, None]) / width
            total += torch.tensor(weights, dtype=torch.float64) @ torch.exp(-0.5 * z.square())
        return list((total / (len(self.nodes) * width * math.sqrt(2 * math.pi))).tolist())


def density_process(
    host: Host,
    accumulate: Accumulate,
    finite_difference: FiniteDifference,
    *,
    probes: int,
    steps: int,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    exact: Exact | None = None,
) -> Process[Density]:
    """Gauss quadrature by Lanczos from random +-1 vectors: with ``T = S diag(theta) S'``, node theta_j has weight
    ``S_1j^2``.

    Args:
        probes: random vectors. steps: Lanczos steps from each. seed: other vectors.
        accumulate, finite_difference, exact: see :func:`dho2_ds.curvature.refresh.refresh_process`.

    Cost: ``probes * steps`` products (with differences a few more, to find the step size), ``steps + 3`` local vectors
    (one more with forward differences).

    Source: Golub and Meurant, Matrices, Moments and Quadrature, chapter 6; Ghorbani et al., arXiv 1901.10159.

    Raises:
        LanczosError: on every rank together, when a product is not finite.
    """
    finite = finite_difference.bind(accumulate, lambda x: x, host.reducer.sum_, host.dual)
    steps = min(steps, host.numel)
    nodes: list[list[float]] = []
    weights: list[list[float]] = []
    guess = 1.0
    for probe in range(probes):
        start = rademacher(host, dtype, device, probe=1 + seed * probes + probe)
        start.div_(math.sqrt(host.numel))
        first: Tensor | None = None
        if exact is None:
            first = yield from finite.calibrate(start, guess)
            guess = finite_difference.growth or 1.0
        ritz = yield from lanczos_process(
            exact or finite,
            host.reducer.sum_,
            start,
            steps,
            wanted=steps + 1,  # no early stop: a quadrature is as good as it has nodes
            first_product=first,
            dual=host.dual,
        )
        nodes.append(ritz.eigenvalues.tolist())
        weights.append(ritz.coefficients[0].square().tolist())
    return Density(nodes, weights, host.numel, (exact or finite_difference).hvps)
