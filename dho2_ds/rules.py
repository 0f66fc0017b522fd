"""The two update rules, as maths on the rank's chunks. Nothing here communicates.

``adaptive``: FOSI in the coordinates where the base optimizer is plain momentum. With u = P^(1/2) m, c = Q u and
(Q, lambda) the leading eigenpairs of P^(1/2) H P^(1/2),

    dw = -lr s P^(1/2) u + P^(1/2) Q^T [ (lr s - min(alpha / |lambda|, lr s)) c ].

The minimum is a trust region: no kept direction moves further than the base optimizer would take it, which matters
where |lambda| is small and the loss far from quadratic. The first term is the base optimizer's own step with its lr
multiplied by s; only the second is added here.

``fosi``: the paper's rule (arXiv 2302.08484), in the plain coordinates, for any base optimizer.

Cost of either: two passes over Q per step. Scratch: one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from dho2_ds.base import Chunk
from dho2_ds.curvature.eigenbasis import Eigenbasis
from dho2_ds.shards import Shard, chunk_size, flat_like, flat_view, working_dtype

Dual = Callable[[Tensor, int], Tensor]
"""``dual(x, start)``: x, local elements from ``start`` on, made ready for a sum over ranks; see ``Host.dual``."""


def project(basis: Eigenbasis, chunks: Iterable[Chunk], dual: Dual, *, roots: int) -> Tensor:
    """Local part of ``Q u`` and ``||u||^2`` for the base optimizer's direction.

    Args:
        basis: k local rows.
        chunks: the rank's chunks after the base step.
        dual: the host's.
        roots: 1 for ``adaptive`` (u = P^(1/2) m), 2 for ``fosi`` (u = P m, the base step without its lr).

    Returns:
        (k + 1,) float64 on the basis' device: k coefficients, then the squared norm. Sum it over the ranks.
    """
    rows = basis.vectors
    total = torch.zeros(basis.k + 1, dtype=torch.float64, device=rows.device)
    for chunk in chunks:
        u = chunk.rooted_direction()
        for _ in range(roots - 1):
            u = chunk.root(u)
        weighed = dual(u, chunk.start)
        total[:-1] += dot_rows(rows[:, chunk.start : chunk.stop], weighed)
        total[-1] += torch.dot(u, weighed)
    return total


def adaptive_coefficients(basis: Eigenbasis, c: Tensor, *, lr: float, lr_scale: float, alpha: float) -> Tensor:
    """``(lr s - min(alpha / |lambda|, lr s)) c``, (k,) float64 on the device of c."""
    return c * (lr * lr_scale - alpha / basis.magnitudes).clamp_min(0.0)


def add_rooted(basis: Eigenbasis, chunks: Iterable[Chunk], coefficients: Tensor) -> None:
    """``w += P^(1/2) Q^T a`` for a of shape (k,), and a base step that was put off."""
    for chunk in chunks:
        chunk.add_rooted(_combine(basis, chunk, coefficients))


def add_plain(basis: Eigenbasis, chunks: Iterable[Chunk], coefficients: Tensor) -> None:
    """``w += Q^T a`` for a of shape (k,)."""
    for chunk in chunks:
        chunk.add_to_weights(_combine(basis, chunk, coefficients))


class FosiVelocity:
    """FOSI's velocity, kept as k coefficients because it lives in span(Q).

    EMA for Adam and AdamW: ``vel = b vel + (1 - b) g1``; heavy-ball for SGD: ``vel = b vel + g1``; g1 = Q^T Q g.
    """

    def __init__(self, k: int, device: torch.device) -> None:
        self.coefficients = torch.zeros(k, dtype=torch.float64, device=device)

    def update(self, captured: Tensor, *, momentum: float, ema: bool) -> Tensor:
        """Advance by the captured gradient ``Q g`` (k,), reduced; returns the new coefficients."""
        self.coefficients.mul_(momentum).add_(captured, alpha=1.0 - momentum if ema else 1.0)
        return self.coefficients

    def rotate(self, overlap: Tensor) -> None:
        """Carry the velocity into a new basis: ``overlap = Q_new Q_old^T``, (k_new, k_old), reduced."""
        self.coefficients = overlap.to(self.coefficients) @ self.coefficients


def fosi_coefficients(
    basis: Eigenbasis, velocity: Tensor, captured_step: Tensor, *, lr_scale: float, alpha: float
) -> Tensor:
    """``s Q d - alpha (Q vel) / |lambda|``, (k,): what to add back after the base step ``-s d``.

    ``captured_step`` is ``Q d`` with d the unscaled base update of the complement gradient, lr included, so that
    ``-s d + Q^T(...)`` equals ``-s (d - Q^T Q d) - alpha Q^T((Q vel)/|lambda|)``.
    """
    return lr_scale * captured_step - alpha * velocity / basis.magnitudes


def _combine(basis: Eigenbasis, chunk: Chunk, coefficients: Tensor) -> Tensor:
    return combine_rows(basis.vectors[:, chunk.start : chunk.stop], coefficients, working_dtype([basis.vectors]))


def dot_rows(rows: Tensor, x: Tensor) -> Tensor:
    """``rows @ x``, (k,), in the precision of x.

    On a CPU a GEMV reads float32 rows at memory bandwidth, but converting a 16-bit block first costs several passes
    over memory; row by row the converted piece stays in cache.
    """
    if rows.dtype == x.dtype or rows.device.type != "cpu":
        return rows.to(x.dtype) @ x
    buffer = torch.empty_like(x)
    return torch.stack([torch.dot(buffer.copy_(row), x) for row in rows])


def combine_rows(rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """``rows^T weights``, (length,), in ``dtype``; 16-bit rows are converted one by one, as in :func:`dot_rows`."""
    if rows.dtype == dtype or rows.device.type != "cpu":
        return rows.to(dtype).T @ weights.to(dtype)
    scalars = weights.tolist()
    out = torch.mul(rows[0].to(dtype), scalars[0])
    for row, scalar in zip(rows[1:], scalars[1:], strict=True):
        out.add_(row, alpha=scalar)
    return out


def project_gradient(basis: Eigenbasis, shards: Sequence[Shard], grads: Sequence[Tensor | None], dual: Dual) -> Tensor:
    """Local part of ``Q g`` and ``||g||^2``, (k + 1,) float64; shards without a gradient count as zero."""
    total = torch.zeros(basis.k + 1, dtype=torch.float64, device=basis.vectors.device)
    dtype = working_dtype([basis.vectors])
    for shard, grad in zip(shards, grads, strict=True):
        if grad is None:
            continue
        flat = flat_like(grad, shard.param)
        for start in range(0, shard.numel, chunk_size(flat.device)):
            part = flat[start : start + chunk_size(flat.device)].to(dtype)
            at = shard.offset + start
            weighed = dual(part, at)
            total[:-1] += dot_rows(basis.vectors[:, at : at + part.numel()], weighed)
            total[-1] += torch.dot(part, weighed)
    return total


def complement(basis: Eigenbasis, shard: Shard, grad: Tensor, captured: Tensor) -> Tensor:
    """``g - Q^T (Q g)`` for one shard, shaped and laid out like the parameter; ``captured`` is the reduced ``Q g``."""
    result = torch.empty_like(shard.param, dtype=grad.dtype).copy_(grad)
    flat = flat_view(result)
    dtype = working_dtype([basis.vectors])
    for start in range(0, shard.numel, chunk_size(flat.device)):
        part = flat[start : start + chunk_size(flat.device)]
        at = shard.offset + start
        part.sub_(combine_rows(basis.vectors[:, at : at + part.numel()], captured, dtype))
    return result
