"""By how much curvature scales the learning rate, and ``"lr": "auto"``, where curvature sets it.

A base optimizer with momentum is stable on a quadratic of curvature lambda while lr lambda stays below a number that
only its momentum decides; lambda is that of the (preconditioned) Hessian. Inside the eigenvectors' span the Newton step
takes over, so what limits lr is the largest eigenvalue outside, which every refresh estimates.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dho2_ds.curvature.eigenbasis import Eigenbasis

START = 1e-3
"""The learning rate of ``"auto"`` up to the first refresh, and the one that schedules see."""

FIRST_GROWTH, GROWTH, FALL = 10.0, 1.25, 4.0
"""Largest factors from one refresh to the next. A larger lr leads to flatter regions, which allow a larger lr again, so
growth without a bound runs away."""

RANGE = 1e3
"""The scale stays within [1 / RANGE, RANGE]."""

LEAST = 1e-3
"""lambda_(k+1) counts as at least this share of lambda_1: a span that holds nearly all says little of the rest."""


def stability_limit(base: str, groups: Iterable[Mapping[str, Any]]) -> float:
    """The largest stable lr times lambda; the least over the param groups.

    ``(2 + 2 beta_1) / (1 - beta_1)`` where m is an average (Adam, AdamW, SOAP; arXiv 2207.14484), ``2 (1 + beta)`` for
    heavy-ball and ``2 (1 + beta) / (1 + 2 beta)`` for Nesterov's form, both of which sum.
    """
    limits = []
    for group in groups:
        if base != "sgd":
            beta = float(group["betas"][0])
            limits.append(2 * (1 + beta) / (1 - beta))
        else:
            beta = float(group["momentum"])
            limits.append(2 * (1 + beta) / (1 + 2 * beta if group["nesterov"] else 1))
    return min(limits)


def next_scale(scale: float, basis: Eigenbasis, limit: float, lr: float, fraction: float) -> float:
    """The scale after a refresh: ``lr scale`` is to be ``fraction`` of ``limit / lambda_(k+1)``.

    Args:
        scale: the one before, 0 before the first refresh. lr: the largest one that schedules have given so far.
    """
    outside = max(basis.next_eigenvalue, LEAST * float(basis.eigenvalues.abs().max()))
    growth = GROWTH if scale else FIRST_GROWTH
    before = scale or 1.0
    wanted = fraction * limit / (lr * outside) if lr > 0 and outside > 0 else before
    return min(max(wanted, before / FALL, 1 / RANGE), before * growth, RANGE)
