"""SOAP and both update rules on SOAP, slow and plain: float64, one process, dense Hessian and dense P^(1/2).

Written from the equations and independent of the package.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.reference import Loss, Reference


class SoapTensor:
    """SOAP's state for one parameter that is not cut into blocks; vectors are Adam."""

    def __init__(
        self, shape: torch.Size, *, frequency: int, shampoo_beta: float, rotated: tuple[bool, bool] = (True, True)
    ):
        rows, columns = (shape[0], shape[1:].numel()) if len(shape) > 1 else (1, shape.numel())
        self.matrix = min(rows, columns) > 1
        self.shape = (rows, columns)
        self.frequency, self.shampoo_beta = frequency, shampoo_beta
        self.m, self.v = (torch.zeros(rows, columns, dtype=torch.float64) for _ in range(2))
        self.rotated = [on and self.matrix for on in rotated]
        self.factors = [torch.zeros(side, side, dtype=torch.float64) for side in self.shape]
        self.bases = [torch.eye(side, dtype=torch.float64) for side in self.shape]
        self.gradients = 0

    @property
    def steps(self) -> int:
        """Steps taken: the first gradient of a matrix only makes the factors."""
        return max(self.gradients - 1, 0) if self.matrix else self.gradients

    def update(self, gradient: Tensor, betas: tuple[float, float]) -> None:
        g = gradient.view(self.shape)
        if self.matrix and self.gradients == 0:
            self._accumulate(g)
            for side in (0, 1):
                if self.rotated[side]:
                    n = self.shape[side]
                    values, vectors = torch.linalg.eigh(self.factors[side])
                    values, vectors = values.flip(0), vectors.flip(1)
                    rank = int((values > 1e-4 * values[0]).sum())
                    diagonal = torch.diag(torch.linspace(1, 0, n, dtype=torch.float64))
                    if rank < n:
                        null = vectors[:, rank:]
                        null = null @ torch.linalg.eigh(null.T @ diagonal @ null).eigenvectors.flip(1)
                        vectors = torch.cat([vectors[:, :rank], null], dim=1)
                    self.bases[side] = vectors
        else:
            if self.steps and self.steps % self.frequency == 0:
                self._power_step()
            rotated = self.bases[0].T @ g @ self.bases[1]
            self.m = betas[0] * self.m + (1 - betas[0]) * g
            self.v = betas[1] * self.v + (1 - betas[1]) * rotated**2
            self._accumulate(g)
        self.gradients += 1

    def _accumulate(self, g: Tensor) -> None:
        b = self.shampoo_beta
        self.factors = [b * f + (1 - b) * gg for f, gg in zip(self.factors, (g @ g.T, g.T @ g), strict=True)]

    def _power_step(self) -> None:
        for side in (0, 1):
            if self.rotated[side]:
                product = self.factors[side] @ self.bases[side]
                quotients = torch.diag(self.bases[side].T @ product)
                order = quotients.argsort(descending=True)
                self.v = self.v.index_select(side, order)
                shifted = product + 1e-6 * quotients.max() * self.bases[side]
                self.bases[side] = torch.linalg.qr(shifted[:, order])[0]

    def direction(self, beta1: float) -> Tensor:
        """m_hat, flat."""
        return (self.m / (1 - beta1**self.steps) if self.steps else self.m).reshape(-1)

    def apply(self, x: Tensor, beta2: float, eps: float, power: float) -> Tensor:
        """P^power x for a flat x; zero where nothing has moved yet."""
        if self.steps == 0:
            return torch.zeros_like(x)
        sigma = (self.v / (1 - beta2**self.steps)).sqrt()
        p = 1 / (sigma + eps)
        if self.matrix:
            p = 1 / (sigma + eps + (1e-6 * sigma.max()) ** 2 / sigma)
            p[sigma == 0] = 0.0
        rotated = self.bases[0].T @ x.view(self.shape) @ self.bases[1]
        return (self.bases[0] @ (p**power * rotated) @ self.bases[1].T).reshape(-1)


class SoapReference(Reference):
    """:class:`tests.reference.Reference` with SOAP in the place of AdamW; decay is decoupled, as AdamW's."""

    def __init__(
        self,
        loss: Loss,
        params: list[Tensor],
        groups: list[dict[str, Any]],
        *,
        betas: tuple[float, float] = (0.95, 0.95),
        frequency: int = 10,
        shampoo_beta: float = 0.95,
        max_rotated: int = 10**9,
        **settings: Any,
    ) -> None:
        super().__init__(loss, params, groups, base="adamw", betas=betas, **settings)
        self.tensors = [
            SoapTensor(
                p.shape,
                frequency=frequency,
                shampoo_beta=shampoo_beta,
                rotated=(p.shape[0] <= max_rotated, p.shape[1:].numel() <= max_rotated),
            )
            for p in params
        ]

    def _apply(self, x: Tensor, power: float) -> Tensor:
        parts = x.split([p.numel() for p in self.params])
        applied = [t.apply(part, self.beta2, self.eps, power) for t, part in zip(self.tensors, parts, strict=True)]
        return torch.cat(applied)

    def _base_direction(self, g: Tensor, w: Tensor) -> Tensor:
        for t, part in zip(self.tensors, g.split([p.numel() for p in self.params]), strict=True):
            t.update(part, (self.beta1, self.beta2))
        self.direction = torch.cat([t.direction(self.beta1) for t in self.tensors])
        return self._apply(self.direction, 1.0)

    def root(self, x: Tensor) -> Tensor:
        """P^(1/2) x, with the ratios of the groups' learning rates folded in; they are equal within a parameter."""
        rho = self._lr() / self._lr_ref() if self._lr_ref() > 0 else torch.zeros_like(self.buf)
        return rho.sqrt() * self._apply(x, 0.5)

    def preconditioned_hessian(self, batch: Any) -> Tensor:
        """(n, n) P^(1/2) H P^(1/2), with the dense root."""
        root = torch.stack([self.root(unit) for unit in torch.eye(self.buf.numel(), dtype=torch.float64)], dim=1)
        return root @ self.hessian(batch) @ root.T

    def refresh(self, curvature_batch: Any) -> None:
        H = self.preconditioned_hessian(curvature_batch) if self.rule == "adaptive" else self.hessian(curvature_batch)
        values, vectors = torch.linalg.eigh((H + H.T) / 2)
        order = values.abs().argsort(descending=True)
        k = min(self.k, H.shape[0])
        Q = vectors.T[order[:k]]
        self.velocity = Q @ (self.Q.T @ self.velocity) if self.Q is not None else torch.zeros(k, dtype=torch.float64)
        self.Q, self.eigenvalues = Q, values[order[:k]]
        self.next_eigenvalue = float(values[order[min(k, H.shape[0] - 1)]].abs())
        self.scale = self._scale()
        self.refreshes.append(self.steps)

    def _adaptive(self, w: Tensor, g: Tensor) -> Tensor:
        assert self.Q is not None
        w = self._decayed(w)
        step = -self._lr() * self.scale * self._base_direction(g, w)
        c = self.Q @ self.root(self.direction)
        reach = torch.tensor(self._lr_ref() * self.scale, dtype=torch.float64)
        a = (reach - torch.minimum(self._alpha() / self._floored(), reach)) * c
        return w + step + self.root(self.Q.T @ a)
