"""One training step with an eigenbasis: the base step, the few reduced scalars, the rank-k term."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dho2_ds import rules
from dho2_ds.base import BaseOptimizer
from dho2_ds.curvature.eigenbasis import Eigenbasis
from dho2_ds.hosts.base import Host

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Rates:
    """Scalars of one step, the same on every rank.

    Attributes:
        lr: the largest lr of the param groups. lr_scale: s. alpha: length of the Newton step.
        newton: False leaves the motion inside the span to the base optimizer at its unscaled lr (``newton_lr=0``).
    """

    lr: float
    lr_scale: float
    alpha: float
    newton: bool


class AdaptiveUpdate:
    """Rule ``adaptive``: see :mod:`dho2_ds.rules`. One all-reduce of k + 1 scalars per step."""

    roots = 1
    """How often P^(1/2) enters the operator whose eigenpairs are used."""

    def step(self, host: Host, base: BaseOptimizer, groups: Groups, basis: Eigenbasis, rates: Rates) -> Tensor | None:
        """Move the weights; returns ``Q u`` and ``||u||^2``, (k + 1,), of the base optimizer's direction."""
        corrected = rates.newton or rates.lr_scale != 1.0
        base.step(groups, rates.lr_scale, put_off=corrected)
        if not corrected:
            return None  # the base optimizer moves everything as it would alone
        sums = host.reducer.sum_(rules.project(basis, base.chunks(groups, moving_only=True), host.dual, roots=1))
        c = sums[:-1]
        if rates.newton:
            a = rules.adaptive_coefficients(basis, c, lr=rates.lr, lr_scale=rates.lr_scale, alpha=rates.alpha)
        else:
            a = c * (rates.lr * (rates.lr_scale - 1.0))
        rules.add_rooted(basis, base.chunks(groups, moving_only=True), a)
        return sums

    def rebase(self, host: Host, old: Eigenbasis | None, new: Eigenbasis) -> None:
        """Nothing: the momentum inside the span is Q u, and u is the base optimizer's."""


class FosiUpdate:
    """Rule ``fosi``: see :mod:`dho2_ds.rules`. Two all-reduces per step, of k + 1 scalars each: the base optimizer's
    update of the complement gradient is known only after the first."""

    roots = 0

    def __init__(self, *, ema: bool) -> None:
        self.velocity: rules.FosiVelocity | None = None
        self._ema = ema

    def step(self, host: Host, base: BaseOptimizer, groups: Groups, basis: Eigenbasis, rates: Rates) -> Tensor | None:
        """Move the weights; returns ``Q g`` and ``||g||^2``, (k + 1,)."""
        momentum = float(groups[0]["betas"][0] if self._ema else groups[0]["momentum"])
        if self.velocity is None:
            self.velocity = rules.FosiVelocity(basis.k, basis.vectors.device)
        grads = [shard.param.grad for shard in host.shards]
        sums = host.reducer.sum_(rules.project_gradient(basis, host.shards, grads, host.dual))
        velocity = self.velocity.update(sums[:-1], momentum=momentum, ema=self._ema)
        try:
            # The base optimizer sees the complement gradient; the user's own gradient tensors are not written to.
            for shard, grad in zip(host.shards, grads, strict=True):
                shard.param.grad = None if grad is None else rules.complement(basis, shard, grad, sums[:-1])
            base.step(groups, rates.lr_scale)
            moved = host.reducer.sum_(rules.project(basis, base.chunks(groups, moving_only=True), host.dual, roots=2))
            a = rules.fosi_coefficients(
                basis, velocity, moved[:-1] * rates.lr, lr_scale=rates.lr_scale, alpha=rates.alpha
            )
            rules.add_plain(basis, base.chunks(groups, moving_only=True), a)
        finally:
            for shard, grad in zip(host.shards, grads, strict=True):
                shard.param.grad = grad
        return sums

    def rebase(self, host: Host, old: Eigenbasis | None, new: Eigenbasis) -> None:
        """Carry the velocity into a new basis. One all-reduce of k_new * k_old scalars."""
        if self.velocity is None or old is None:
            self.velocity = None
            return
        rows = torch.stack([new.vectors @ host.dual(row.to(new.vectors.dtype)) for row in old.vectors], dim=1)
        self.velocity.rotate(host.reducer.sum_(rows.double()))


def captured_fraction(sums: Tensor) -> float:
    """Share of a squared norm inside the span, of what :meth:`AdaptiveUpdate.step` returned."""
    inside, whole = sums[:-1].square().sum().item(), sums[-1].item()
    return inside / max(whole, sys.float_info.min)
