"""SOAP on one matrix (arXiv 2409.11321): Adam in the eigenbasis of Shampoo's factors. Tensor maths, nothing else.

With factors L = E[G G^T], R = E[G^T G] and their eigenbases Q_L, Q_R, the second moment v is kept of the rotated
gradient Q_L^T G Q_R and the momentum m of G itself. A step is ``-lr P m`` with the symmetric positive

    P x = Q_L [ p * (Q_L^T x Q_R) ] Q_R^T,    p = 1 / (sigma + eps + (tau sigma_max)^2 / sigma),  sigma = sqrt(v_hat),

whose symmetric root has sqrt(p) in the place of p. Neither depends on the signs of the eigenvectors, and vectors of
P^(1/2) H P^(1/2) live in the coordinates of x: they need no remapping when the bases turn.

Three things keep rounding errors out of the steps, so that engines and world sizes agree. Gradients often have a null
space (a softmax layer's rows sum to zero, a pixel is always black): there the rotated gradient is rounding noise, which
dividing by its own root mean square would enlarge to the size of a step; the term with tau, the resolution of float32,
stops that and changes entries of relative size 1e-4 by 1e-4. The first gradients of a matrix often have a low rank, so
that the basis of their null space would be arbitrary: it is that of a falling diagonal (:data:`NULL`), and stays until
there is something to turn it by (:data:`SHIFT`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dho2_ds.sharding.blocks import Block

EXP_AVG, EXP_AVG_SQ = "exp_avg", "exp_avg_sq"
LEFT, LEFT_BASIS, RIGHT, RIGHT_BASIS = "left", "left_basis", "right", "right_basis"

RESOLUTION = 1e-6
"""tau: smaller entries of a rotated gradient, relative to the largest, are rounding noise in float32 (6e-8 per
operation, sums over a batch)."""

NULL = 1e-4
"""Eigenvalues of the first factor below this, relative to the largest, belong to what is treated as its null space. A
gradient with float32 rounding errors has eigenvalues of 1e-7 and less there; eigenvectors of eigenvalues above it are
accurate to 1e-3."""

SHIFT = 1e-6
"""Added to a factor when its basis is turned, relative to its largest eigenvalue. Eigenvectors do not change, and where
the factor is zero to rounding the basis stays as it is, where a QR decomposition of noise would choose a new one."""

_TINY = 1e-30


def state_shapes(block: Block) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a block's state."""
    m, n = block.rows, block.columns
    if block.is_vector:
        return {EXP_AVG: (n,), EXP_AVG_SQ: (n,)}
    sides = {LEFT: m, LEFT_BASIS: m} if block.left else {}
    sides |= {RIGHT: n, RIGHT_BASIS: n} if block.right else {}
    return {EXP_AVG: (m, n), EXP_AVG_SQ: (m, n), **{name: (side, side) for name, side in sides.items()}}


class SoapMatrix:
    """The preconditioner and the momentum of one block.

    Args:
        state: tensors as in :func:`state_shapes`, zero at the start; updated in place.

    Attributes:
        seen: gradients seen. The first makes the factors and moves nothing: in its own eigenbasis a gradient is
            diagonal and the rest of it rounding noise, which Adam would enlarge to the size of a step.

    Cost of a step: eight products of a side's matrix with an m x n one; every ``frequency`` steps a QR decomposition
    of each side, and an eigendecomposition once.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = state
        self.seen = 0
        self._waiting: tuple[Tensor, Tensor, float] | None = None
        self._sides = [pair for pair in ((LEFT, LEFT_BASIS), (RIGHT, RIGHT_BASIS)) if pair[0] in state]

    def frozen(self) -> SoapMatrix:
        """A copy of what :meth:`apply` needs, which later updates do not reach."""
        needed = (EXP_AVG_SQ, LEFT_BASIS, RIGHT_BASIS)
        copy = SoapMatrix({name: value.clone() for name, value in self.state.items() if name in needed})
        copy.seen = self.seen
        return copy

    @property
    def moved(self) -> bool:
        """Whether there is a second moment; before it P is not defined."""
        return self.seen > 1

    def update(self, grad: Tensor, options: Mapping[str, Any], *, shampoo_beta: float, frequency: int) -> None:
        """Take in one gradient, (m, n).

        The bases are those of the gradients before this one; P stays as it is from here to the next call.
        """
        beta1, beta2 = options["betas"]
        if self.seen == 0:
            self._accumulate(grad, shampoo_beta)
            self._decompose()
        else:
            if self.seen > 1 and (self.seen - 1) % frequency == 0:
                self._turn()
            self.state[EXP_AVG].lerp_(grad, 1.0 - beta1)
            rotated = self._rotate(grad)
            self.state[EXP_AVG_SQ].mul_(beta2).addcmul_(rotated, rotated, value=1.0 - beta2)
            self._accumulate(grad, shampoo_beta)
        self.seen += 1

    def direction(self, options: Mapping[str, Any]) -> Tensor:
        """m_hat, (m, n), a fresh tensor; zero before the first move."""
        bias = 1.0 - options["betas"][0] ** (self.seen - 1) if self.moved else 1.0
        return self.state[EXP_AVG] / bias

    def apply(self, x: Tensor, options: Mapping[str, Any], *, root: bool) -> Tensor:
        """``P x``, or ``P^(1/2) x``, for x of shape (m, n); zero before the first move. Four products."""
        if not self.moved:
            return torch.zeros_like(x)
        p = self._eigenvalues(options)
        return self._rotate(self._rotate(x).mul_(p.sqrt_() if root else p), back=True)

    def put_off(self, options: Mapping[str, Any], lr: float) -> None:
        """Leave the step ``-lr P m`` to :meth:`finish`; until then two matrices of the size of m are held."""
        root = self._eigenvalues(options).sqrt_()
        self._waiting = root, self._rotate(self.direction(options)).mul_(root), lr

    def rooted_direction(self, options: Mapping[str, Any]) -> Tensor:
        """``P^(1/2) m``, (m, n). Four products; two while a step waits."""
        if self._waiting is None:
            return self.apply(self.direction(options), options, root=True)
        return self._rotate(self._waiting[1], back=True)

    def finish(self, x: Tensor, options: Mapping[str, Any]) -> Tensor:
        """``P^(1/2) x - lr P m`` with the step that waits, (m, n); without one ``P^(1/2) x``. Four products."""
        if self._waiting is None:
            return self.apply(x, options, root=True)
        (root, rooted, lr), self._waiting = self._waiting, None
        return self._rotate(self._rotate(x).add_(rooted, alpha=-lr).mul_(root), back=True)

    def _eigenvalues(self, options: Mapping[str, Any]) -> Tensor:
        """Of P in the eigenbases, (m, n), a fresh tensor."""
        sigma = (self.state[EXP_AVG_SQ] / (1.0 - options["betas"][1] ** (self.seen - 1))).sqrt_()
        noise = (sigma.max() * RESOLUTION).square_().add_(_TINY)
        p: Tensor = sigma.div_((sigma + options["eps"]).mul_(sigma).add_(noise))  # 0 where sigma is 0
        return p

    def _rotate(self, x: Tensor, back: bool = False) -> Tensor:
        left, right = self.state.get(LEFT_BASIS), self.state.get(RIGHT_BASIS)
        if left is not None:
            x = (left if back else left.T) @ x
        if right is not None:
            x = x @ (right.T if back else right)
        return x

    def _accumulate(self, grad: Tensor, beta: float) -> None:
        if LEFT in self.state:
            self.state[LEFT].addmm_(grad, grad.T, beta=beta, alpha=1.0 - beta)
        if RIGHT in self.state:
            self.state[RIGHT].addmm_(grad.T, grad, beta=beta, alpha=1.0 - beta)

    def _decompose(self) -> None:
        """Eigenbases of the factors, leading eigenvectors first; in float64, this once."""
        for name, basis in self._sides:
            values, vectors = torch.linalg.eigh(self.state[name].double())
            null = vectors[:, values <= NULL * values[-1]]
            if null.numel():
                ramp = torch.linspace(1.0, 0.0, len(values), dtype=values.dtype, device=values.device)
                null = null @ torch.linalg.eigh(null.T @ (ramp[:, None] * null)).eigenvectors
            self.state[basis].copy_(torch.cat([null, vectors[:, null.shape[1] :]], dim=1).flip(1))

    def _turn(self) -> None:
        """One step of orthogonal iteration: columns by falling Rayleigh quotient (v follows), a product, then QR."""
        v = self.state[EXP_AVG_SQ]
        for factor, basis in self._sides:
            vectors = self.state[basis]
            products = self.state[factor] @ vectors
            quotients = (vectors * products).sum(0)
            order = quotients.argsort(descending=True, stable=True)
            v.copy_(v.index_select(0 if factor == LEFT else 1, order))
            products.addcmul_(vectors, quotients.max(), value=SHIFT)
            vectors.copy_(torch.linalg.qr(products.index_select(1, order)).Q)
