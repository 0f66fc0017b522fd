"""A slow, obvious float64 reference of both update rules: one process, dense Hessian, a few hundred parameters.

Written from the equations alone and independent of the package, so that the two can be compared step for step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

Loss = Callable[[list[Tensor], Any], Tensor]


class Reference:
    """The hybrid optimizer on the flat vector w of all parameters.

    Args:
        loss: `loss(params, batch)`, the mean over the batch as a float64 scalar. It may ignore its first argument and
            close over the parameters.
        params: float64 leaf tensors, updated in place.
        groups: dicts with `params` (indices into `params`), `lr`, `weight_decay`. A caller may change `lr` in `groups`
            between steps, as a schedule does; the learning rates given here count as the initial ones.
        base: `adamw` (decoupled decay), `adam` (decay added to the gradient), `sgd` (likewise).
        rule: `adaptive` or `fosi`.
        betas, eps: of Adam and AdamW.
        momentum, nesterov: of SGD.
        k: eigenvectors kept; 0 is the plain base optimizer.
        newton_lr: alpha at the initial learning rate.
        max_lr_scale: upper bound of s. lr_fraction: s is instead what makes lr * s this share of the largest stable
            learning rate outside the eigenvectors; at most 10 times the s before at the first refresh, 1.25 times
            later, at least a quarter of it.
        warmup_steps, interval: a refresh is due after step t = max(1, warmup_steps) and every `interval` steps from
            there on, or after `first_interval` steps, twice as many, and so on, until it is `interval`.
        clip: largest global norm of the gradient, as DeepSpeed clips it.

    Coupled decay (`adam`, `sgd`) is the base optimizer's own: under rule `fosi` it is added to g2, as
    `torch.optim.SGD(weight_decay=...)` does when g2 is the gradient it is given.

    Attributes:
        steps: finished steps. refreshes: the values of `steps` at which a refresh was made.
        Q: `(k, n)` eigenvectors, None before the first refresh. eigenvalues: `(k,)`, by falling magnitude.
        next_eigenvalue: the magnitude of the one after, or of the last one if there is none.
        scale: s of the last refresh. velocity: `(k,)`, the coefficients of rule `fosi`.
    """

    def __init__(
        self,
        loss: Loss,
        params: Sequence[Tensor],
        groups: Sequence[dict[str, Any]],
        *,
        base: Literal["adamw", "adam", "sgd"] = "adamw",
        rule: Literal["adaptive", "fosi"] = "adaptive",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.0,
        nesterov: bool = False,
        k: int = 0,
        newton_lr: float = 0.1,
        max_lr_scale: float = 3.0,
        lr_fraction: float | None = None,
        warmup_steps: int = 1,
        interval: int = 1,
        first_interval: int | None = None,
        clip: float | None = None,
    ) -> None:
        self.loss, self.params = loss, [p.requires_grad_(True) for p in params]
        if any(p.dtype != torch.float64 for p in self.params):
            raise ValueError("params: must be float64")
        if sorted(i for group in groups for i in group["params"]) != list(range(len(self.params))):
            raise ValueError("groups: must name every parameter exactly once")
        self.groups = [dict(group) for group in groups]
        self.base, self.rule = base, rule
        self.beta1, self.beta2 = betas
        self.eps, self.momentum, self.nesterov = eps, momentum, nesterov
        self.k, self.newton_lr, self.max_lr_scale = k, newton_lr, max_lr_scale
        self.next_due, self.distance, self.interval = max(1, warmup_steps), first_interval or interval, interval
        self.clip, self.lr_fraction = clip, lr_fraction
        self.lr_ref_0 = max(group["lr"] for group in groups)
        if k and self.lr_ref_0 <= 0:
            raise ValueError("groups: the largest initial lr must be > 0")

        n = sum(p.numel() for p in self.params)
        self.exp_avg, self.exp_avg_sq, self.buf = (torch.zeros(n, dtype=torch.float64) for _ in range(3))
        # What the preconditioner divides: the m of the equations, of the last base update.
        self.direction = torch.zeros(n, dtype=torch.float64)
        self.steps = 0
        self.due = False
        self.refreshes: list[int] = []
        self.Q: Tensor | None = None
        self.eigenvalues = torch.zeros(0, dtype=torch.float64)
        self.next_eigenvalue = 0.0
        self.scale = 1.0
        self.velocity = torch.zeros(k, dtype=torch.float64)

    # Flat views of things

    def weights(self) -> Tensor:
        """`(n,)` copy of w."""
        return torch.cat([p.detach().reshape(-1) for p in self.params])

    def _write(self, w: Tensor) -> None:
        with torch.no_grad():
            for p, part in zip(self.params, w.split([p.numel() for p in self.params]), strict=True):
                p.copy_(part.view_as(p))

    def _per_element(self, key: str) -> Tensor:
        """`(n,)` vector of a group's setting."""
        values = {i: float(group[key]) for group in self.groups for i in group["params"]}
        return torch.cat([torch.full((p.numel(),), values[i], dtype=p.dtype) for i, p in enumerate(self.params)])

    def _lr(self) -> Tensor:
        return self._per_element("lr")

    def _lr_ref(self) -> float:
        return max(float(group["lr"]) for group in self.groups)

    # Derivatives

    def _flat_gradient(self, batch: Any, create_graph: bool = False) -> tuple[float, Tensor]:
        value = self.loss(self.params, batch)
        parts = torch.autograd.grad(value, self.params, create_graph=create_graph, allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(self.params, parts, strict=True)]
        return float(value.detach()), torch.cat([g.reshape(-1) for g in filled])

    def hessian(self, batch: Any) -> Tensor:
        """`(n, n)` dense Hessian at the current weights, row by row by double backward."""
        _, g = self._flat_gradient(batch, create_graph=True)
        rows = torch.zeros(g.numel(), g.numel(), dtype=torch.float64)
        for i in range(g.numel()):
            if g[i].requires_grad:
                parts = torch.autograd.grad(g[i], self.params, retain_graph=True, allow_unused=True)
                filled = [torch.zeros_like(p) if h is None else h for p, h in zip(self.params, parts, strict=True)]
                rows[i] = torch.cat([h.reshape(-1) for h in filled])
        return (rows + rows.T) / 2

    # Preconditioner

    def _denominator(self) -> Tensor:
        """sqrt(v_hat) + eps after the last base update."""
        v_hat = self.exp_avg_sq / (1 - self.beta2 ** max(self.steps, 1))
        return v_hat.sqrt() + self.eps

    def _root(self) -> Tensor:
        """r, with the ratios of the groups' learning rates folded in: r = sqrt(rho_g) (sqrt(v_hat) + eps)^(-1/2)."""
        lr_ref = self._lr_ref()
        rho = self._lr() / lr_ref if lr_ref > 0 else torch.zeros_like(self.buf)
        return rho.sqrt() if self.base == "sgd" else rho.sqrt() / self._denominator().sqrt()

    # Curvature

    def refresh(self, curvature_batch: Any) -> None:
        """New eigenpairs of the (for rule `adaptive`: preconditioned) Hessian at the current weights and state."""
        H = self.hessian(curvature_batch)
        if self.rule == "adaptive":
            r = self._root()
            H = r[:, None] * H * r[None, :]
        values, vectors = torch.linalg.eigh(H)
        order = values.abs().argsort(descending=True)
        Q, k = vectors.T[order[: self.k]], min(self.k, H.shape[0])
        if self.Q is not None:
            self.velocity = Q @ (self.Q.T @ self.velocity)
        else:
            self.velocity = torch.zeros(k, dtype=torch.float64)
        self.Q, self.eigenvalues = Q, values[order[:k]]
        self.next_eigenvalue = float(values[order[min(k, H.shape[0] - 1)]].abs())
        self.scale = self._scale()
        self.refreshes.append(self.steps)

    def _scale(self) -> float:
        first, last = float(self.eigenvalues[0].abs()), float(self.eigenvalues[-1].abs())
        if self.lr_fraction is not None:
            if self.base == "sgd":
                stable = 2 * (1 + self.momentum) / (1 + 2 * self.momentum * self.nesterov)
            else:
                stable = 2 * (1 + self.beta1) / (1 - self.beta1)
            wanted = self.lr_fraction * stable / max(self.next_eigenvalue, 1e-3 * first) / self.lr_ref_0
            return min(max(wanted, self.scale / 4, 1e-3), self.scale * (1.25 if self.refreshes else 10), 1e3)
        if self.rule == "fosi" and self.base != "sgd":
            return 1.0
        below = last if self.rule == "fosi" else self.next_eigenvalue
        return min(max(first / below, 1.0), self.max_lr_scale) if below > 0 else self.max_lr_scale

    # The step

    def step(self, batches: Sequence[Any]) -> float:
        """One optimizer step; a refresh that is due comes first, on the first micro-batch.

        Args:
            batches: one per gradient accumulation step, each the data of all ranks, which hold equally much.

        Returns:
            The loss before the step: the mean over the batches.
        """
        if self.due:
            self.refresh(batches[0])
            self.due = False
        found = [self._flat_gradient(batch) for batch in batches]
        loss = sum(value for value, _ in found) / len(found)
        g = torch.stack([gradient for _, gradient in found]).mean(dim=0)
        if self.clip is not None:
            g = g / max(1.0, (float(g.norm()) + 1e-6) / self.clip)

        w = self.weights()
        self.steps += 1
        if self.Q is None:
            w = self._decayed(w)
            w = w - self._lr() * self._base_direction(g, w)
        elif self.rule == "adaptive":
            w = self._adaptive(w, g)
        else:
            w = self._fosi(w, g)
        self._write(w)
        if self.k and self.steps == self.next_due:
            self.due = True
            self.next_due += self.distance
            self.distance = min(2 * self.distance, self.interval)
        return loss

    def _decayed(self, w: Tensor) -> Tensor:
        """Decoupled decay, always at the unscaled learning rate."""
        return w * (1 - self._lr() * self._per_element("weight_decay")) if self.base == "adamw" else w

    def _base_direction(self, g: Tensor, w: Tensor) -> Tensor:
        """Update the base optimizer's state with the gradient `g`; what it would move along, per unit of lr."""
        if self.base != "adamw":
            g = g + self._per_element("weight_decay") * w
        if self.base == "sgd":
            self.buf = self.momentum * self.buf + g
            self.direction = g + self.momentum * self.buf if self.nesterov else self.buf
            return self.direction
        self.exp_avg = self.beta1 * self.exp_avg + (1 - self.beta1) * g
        self.exp_avg_sq = self.beta2 * self.exp_avg_sq + (1 - self.beta2) * g * g
        self.direction = self.exp_avg / (1 - self.beta1**self.steps)
        return self.direction / self._denominator()

    def _alpha(self) -> float:
        return self.newton_lr * self._lr_ref() / self.lr_ref_0

    def _floored(self) -> Tensor:
        return self.eigenvalues.abs().clamp(min=self.next_eigenvalue)

    def _adaptive(self, w: Tensor, g: Tensor) -> Tensor:
        assert self.Q is not None
        w = self._decayed(w)
        step = -self._lr() * self.scale * self._base_direction(g, w)
        r = self._root()
        c = self.Q @ (r * self.direction)
        reach = torch.tensor(self._lr_ref() * self.scale, dtype=torch.float64)
        step = step + r * (self.Q.T @ ((reach - torch.minimum(self._alpha() / self._floored(), reach)) * c))
        return w + step

    def _fosi(self, w: Tensor, g: Tensor) -> Tensor:
        assert self.Q is not None
        Q = self.Q
        c = Q @ g
        if self.base == "sgd":
            self.velocity = self.momentum * self.velocity + c
        else:
            self.velocity = self.beta1 * self.velocity + (1 - self.beta1) * c
        w = self._decayed(w)
        d = self._lr() * self._base_direction(g - Q.T @ c, w)
        d = d - Q.T @ (Q @ d)
        return w - self.scale * d - self._alpha() * (Q.T @ (self.velocity / self._floored()))
