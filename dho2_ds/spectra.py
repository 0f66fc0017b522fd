"""Public :func:`spectrum` and :func:`spectral_density`: the Hessian's eigenvalues of a model as it is sharded now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from dho2_ds.attaching import LossFunction, LossSource
from dho2_ds.config import ConfigError
from dho2_ds.curvature.density import Density, density_process
from dho2_ds.curvature.hvp import FiniteDifference
from dho2_ds.curvature.lanczos import LanczosError
from dho2_ds.curvature.refresh import Order, evaluate, lanczos_budget, refresh
from dho2_ds.hosts.base import Host, Loss
from dho2_ds.hosts.detect import make_host
from dho2_ds.settings import Products
from dho2_ds.shards import working_device, working_dtype

DENSITY_STEPS, PROBES = 80, 4
"""80 nodes resolve outliers from the bulk, and 4 probes do for large models (Ghorbani et al., arXiv 1901.10159: 90 and
10; the scatter between probes falls with the number of parameters)."""


class NoSpectrum(RuntimeError):
    """Products are not finite, or there is nothing to find."""


@dataclass(frozen=True)
class Spectrum:
    """Leading Ritz pairs of the Hessian of the mean loss.

    Attributes:
        eigenvalues: by falling magnitude, the same on every rank. residuals: a bound on each one's error.
        hvps: Hessian-vector products spent. self_check: relative change of the first between two step sizes (nan for
        exact products). eigenvectors: (k, n_local) local rows in the order of ``layout``, this rank's share.
    """

    eigenvalues: list[float]
    residuals: list[float]
    hvps: int
    self_check: float
    eigenvectors: torch.Tensor


def spectrum(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Iterable[Any],
    *,
    k: int = 8,
    batches: int = 1,
    lanczos_steps: int | None = None,
    hvp: str = "auto",
    between: Callable[[], None] = lambda: None,
) -> Spectrum:
    """The k eigenvalues of largest magnitude of the Hessian of ``loss_fn`` over all trainable parameters.

    Args:
        model: a module in one process, ``DistributedDataParallel``, an FSDP root, or a DeepSpeed engine of any ZeRO
            stage at a gradient accumulation boundary. Left as it was: weights, gradients, buffers and RNG state.
        loss_fn: ``loss_fn(model, batch) -> scalar``, the mean loss of a batch.
        data: batches, each rank its own.
        batches: how many of them are used, the first ones, and averaged.
        k: eigenvalues wanted.
        lanczos_steps: products to spend at most; None: max(2k + 4, 2 ln n).
        hvp: ``auto`` and ``finite_difference`` (two gradients per product), ``forward_difference`` (one, and one for
            all; float32 and more) or ``exact``.
        between: called after every product, for progress.

    Returns:
        Eigenvalues with a bound on each one's error, the same on every rank, and this rank's part of the eigenvectors.

    Cost: ``lanczos_steps`` products with two small all-reduces each; ``lanczos_steps + 5`` vectors of n/P per rank
    (forward differences: one more).
    Collective. Source: Golub and Van Loan, section 10.1.

    Raises:
        NoSpectrum: no finite spectrum was found; says why.
        ConfigError: k or hvp out of range, or the model is not supported.
    """
    host, losses = _prepare(model, loss_fn, data, batches, hvp)
    if not 0 < k < host.numel:
        raise ConfigError(f"k={k}: must be between 1 and {host.numel - 1}; lower it")
    found, report = refresh(
        host,
        losses,
        lambda x: x,
        Order(
            k=k,
            budget=lanczos_budget(lanczos_steps, k, host.numel),
            dtype=working_dtype(shard.param for shard in host.shards),
            device=working_device(host.shards),
            all_pairs=True,
        ),
        FiniteDifference.for_dtype(host.compute_dtype, hvp),
        route=hvp,
        between=between,
    )
    if found is None:
        raise NoSpectrum(f"no spectrum: {report.reason}")
    return Spectrum(report.eigenvalues, report.residuals, report.hvps, report.self_check, found.vectors.clone())


def spectral_density(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Iterable[Any],
    *,
    probes: int = PROBES,
    lanczos_steps: int = DENSITY_STEPS,
    seed: int = 0,
    batches: int = 1,
    hvp: str = "auto",
    between: Callable[[], None] = lambda: None,
) -> Density:
    """The density of all eigenvalues of the Hessian of ``loss_fn``, by stochastic Lanczos quadrature.

    The random vectors depend on the parameters' names and sizes and on ``seed`` only, so every engine and number of
    ranks gives the same density, for the same data in all.

    Args:
        model, loss_fn, data, batches, hvp, between: see :func:`spectrum`.
        probes: random vectors.
        lanczos_steps: nodes of each.
        seed: other random vectors.

    Returns:
        Nodes and weights per probe, the same on every rank, from which moments, trace and curve follow.

    Cost: ``probes * lanczos_steps`` products with two small all-reduces each; ``lanczos_steps + 3`` vectors of n/P per
    rank (forward differences: one more). Collective. Source: Ghorbani et al., arXiv 1901.10159.

    Raises:
        NoSpectrum: a product was not finite.
        ConfigError: probes, lanczos_steps or hvp out of range, or the model is not supported.
    """
    if probes < 1 or lanczos_steps < 1:
        raise ConfigError(f"probes={probes}, lanczos_steps={lanczos_steps}: must be >= 1; raise them")
    host, losses = _prepare(model, loss_fn, data, batches, hvp)
    difference = FiniteDifference.for_dtype(host.compute_dtype, hvp)
    try:
        return evaluate(
            host,
            losses,
            lambda x: x,
            difference,
            lambda accumulate, exact: density_process(
                host,
                accumulate,
                difference,
                probes=probes,
                steps=lanczos_steps,
                seed=seed,
                dtype=working_dtype(shard.param for shard in host.shards),
                device=working_device(host.shards),
                exact=exact,
            ),
            route=hvp,
            between=between,
        )
    except LanczosError as error:
        raise NoSpectrum(f"no density: {error}") from error


def _prepare(
    model: nn.Module, loss_fn: LossFunction, data: Iterable[Any], batches: int, hvp: str
) -> tuple[Host, Sequence[Loss]]:
    """The engine over all trainable parameters, and this rank's losses."""
    host = make_host(model, [{"params": [p for p in model.parameters() if p.requires_grad]}])
    if hvp not in get_args(Products):
        raise ConfigError(f"hvp={hvp!r}: must be one of {', '.join(map(repr, get_args(Products)))}")
    if hvp == "exact" and host.exact_refusal:
        raise ConfigError(f"hvp='exact': must not be used here: {host.exact_refusal}")
    source = LossSource(loss_fn, data, batches)
    return host, host.agreement.together(source.losses, "no batch on another rank; see that rank's error")
