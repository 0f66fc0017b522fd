"""Lanczos iteration on a sharded symmetric operator.

Knows nothing of ``torch.distributed``: the caller gives ``matvec`` (local vector to local vector) and ``reduce``
(sum of a small tensor over the ranks). Everything n-sized here is the rank's share.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

Matvec = Callable[[Tensor, float | None], Tensor]
"""``matvec(v, growth)``: A v. ``growth`` is ||A v|| of the previous vector (None at first), which a finite-difference
operator uses to choose its step; others ignore it."""
Reduce = Callable[[Tensor], Tensor]

CONVERGED = 1e-4
"""Stop early when every wanted pair has residual <= CONVERGED * |theta|: the eigenvalue error is then about
residual^2 / gap, below the 3e-5 relative error of a float32 finite-difference product."""

_BREAKDOWN = {torch.float32: 3e-6, torch.float64: 1e-13}
"""beta below this fraction of the operator's largest seen growth is rounding noise: the Krylov space is invariant.
About 30 (float32) and 500 (float64) units of rounding, the size that CGS2 leaves behind."""


@dataclass(frozen=True)
class Ritz:
    """Ritz pairs of a Lanczos run, sorted by falling magnitude.

    Attributes:
        eigenvalues: (j,) float64 on CPU, the same on every rank.
        residuals: (j,) float64 on CPU, ``beta_m |s_mi|`` (Paige), a bound on ``|lambda - theta|``.
        coefficients: (j, j) float64 on CPU; column i combines the rows of ``basis`` to Ritz vector i.
        basis: (j, n_local) local rows of the Krylov basis, a view of the caller's buffer.
        hvps: products spent.
    """

    eigenvalues: Tensor
    residuals: Tensor
    coefficients: Tensor
    basis: Tensor
    hvps: int

    def vectors_(self, count: int, chunk: int = 1 << 18) -> Tensor:
        """Overwrite the first ``count`` rows of the basis with the leading Ritz vectors and return them.

        Returns:
            (count, n_local) local, float32 or float64. Works in column chunks, so no second basis is allocated.
            The basis is destroyed. No collectives.
        """
        mix = self.coefficients[:, :count].T.to(self.basis)
        for start in range(0, self.basis.shape[1], chunk):
            columns = self.basis[:, start : start + chunk]
            columns[:count].copy_(mix @ columns)
        return self.basis[:count]


class LanczosError(RuntimeError):
    """A product or an inner product was not finite; the refresh that asked for it must be rejected."""


Process = Generator[Callable[[], Tensor], Tensor, T]
"""A computation that hands out its expensive parts: it yields one product to be made after another, as a function
without arguments, is sent the result, and returns a T. So the caller decides when a product is made."""


def run(process: Process[T], between: Callable[[], None] = lambda: None) -> T:
    """Make every product as soon as it is asked for, and call ``between`` after each."""
    try:
        work = next(process)
        while True:
            product = [work()]
            between()
            work = process.send(product.pop())  # not held here while the next is made
    except StopIteration as end:
        result: T = end.value
        return result


def lanczos_process(
    matvec: Matvec,
    reduce: Reduce,
    start: Tensor,
    steps: int,
    *,
    wanted: int,
    first_product: Tensor | None = None,
    tolerance: float = CONVERGED,
    dual: Callable[[Tensor], Tensor] = lambda x: x,
) -> Process[Ritz]:
    """Lanczos with full reorthogonalisation by classical Gram-Schmidt twice.

    Args:
        matvec: the symmetric operator on local vectors.
        reduce: sum over ranks of a float64 tensor of at most ``steps + 1`` scalars.
        start: (n_local,) local, float32 or float64, any non-zero global vector; it is not modified.
        steps: largest number of products (``first_product`` counts as one).
        wanted: stop early once this many leading pairs have converged.
        first_product: A applied to the unit start vector, if the caller already has it; overwritten.
        tolerance: relative residual at which a pair counts as converged.
        dual: makes ``reduce(dot(x, dual(y)))`` the global inner product; needed where ranks hold copies of an element.

    Returns:
        The Ritz pairs; ``eigenvalues``, ``residuals`` and ``coefficients`` are identical on all ranks because they
        come from reduced scalars only.

    Cost: ``steps`` products, two all-reduces per step (j+1 and j+2 scalars) plus one for the start vector, and
    ``steps`` local vectors of memory.

    Raises:
        LanczosError: on every rank together, when a reduced scalar is not finite or the start vector is zero.

    Source: Golub & Van Loan section 10.1; "twice is enough" (Parlett, Kahan); residual bound of Paige.
    """
    dtype = start.dtype
    norm = math.sqrt(float(reduce(_dot(start, dual(start)))))
    if not math.isfinite(norm) or norm == 0.0:
        raise LanczosError(f"start vector has norm {norm}")
    basis = torch.empty((steps, start.numel()), dtype=dtype, device=start.device)
    torch.div(start, norm, out=basis[0])

    alphas: list[float] = []
    betas: list[float] = []
    growth: float | None = None
    largest = 0.0
    for j in range(steps):
        rows = basis[: j + 1]
        if first_product is not None:
            w, first_product = first_product, None
        else:
            w = yield functools.partial(matvec, basis[j], growth)
        first = reduce((rows @ dual(w)).double())
        w.addmv_(rows.T, first.to(dtype), alpha=-1)
        # The second pass brings ||w||^2 along; by Pythagoras it gives the norm after the second correction too,
        # which saves the third all-reduce of the textbook form.
        weighed = dual(w)
        second = reduce(torch.cat([(rows @ weighed).double(), _dot(w, weighed)]))
        del weighed
        w.addmv_(rows.T, second[:-1].to(dtype), alpha=-1)
        scalars = torch.stack([first[-1] + second[-2], second[-1] - second[:-1].square().sum()]).tolist()
        alpha, beta = scalars[0], math.sqrt(max(scalars[1], 0.0)) if math.isfinite(scalars[1]) else math.nan
        if not (math.isfinite(alpha) and math.isfinite(beta)):
            raise LanczosError(f"product {j + 1} is not finite")
        growth = math.sqrt((betas[-1] if betas else 0.0) ** 2 + alpha**2 + beta**2)
        largest = max(largest, growth)
        alphas.append(alpha)
        betas.append(beta)
        if beta <= _BREAKDOWN.get(dtype, 3e-6) * largest:
            betas[-1] = 0.0
            break
        if j + 1 == steps or (j + 1 >= wanted and _converged(alphas, betas, wanted, tolerance)):
            break
        torch.div(w, beta, out=basis[j + 1])
        del w  # before the next product is made

    count = len(alphas)
    theta, coefficients = _tridiagonal_eigh(alphas, betas)
    residuals = betas[-1] * coefficients[-1].abs()
    return Ritz(theta, residuals, coefficients, basis[:count], hvps=count)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.dot(a, b).double().reshape(1)


def _tridiagonal_eigh(alphas: list[float], betas: list[float]) -> tuple[Tensor, Tensor]:
    """Eigenpairs of the projected operator in float64, by falling magnitude."""
    projected = torch.diag(torch.tensor(alphas, dtype=torch.float64))
    off = torch.tensor(betas[: len(alphas) - 1], dtype=torch.float64)
    projected = projected + torch.diag(off, 1) + torch.diag(off, -1)
    theta, vectors = torch.linalg.eigh(projected)
    order = theta.abs().argsort(descending=True, stable=True)
    return theta[order], vectors[:, order]


def _converged(alphas: list[float], betas: list[float], wanted: int, tolerance: float) -> bool:
    theta, vectors = _tridiagonal_eigh(alphas, betas)
    residuals = betas[-1] * vectors[-1].abs()
    return bool((residuals[:wanted] <= tolerance * theta[:wanted].abs()).all())
