"""Public :func:`spectrum`: leading Hessian eigenvalues of a model as it is sharded now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dho2_ds.attaching import LossFunction, LossSource
from dho2_ds.curvature.hvp import FiniteDifference
from dho2_ds.curvature.refresh import Order, default_lanczos_steps, refresh
from dho2_ds.hosts.detect import make_host
from dho2_ds.shards import working_device, working_dtype


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
) -> Spectrum:
    """The k eigenvalues of largest magnitude of the Hessian of ``loss_fn`` over all trainable parameters.

    Args:
        model: a module in one process, ``DistributedDataParallel``, an FSDP root, or a DeepSpeed engine of any ZeRO
            stage at a gradient accumulation boundary. Left as it was: weights, gradients, buffers and RNG state.
        loss_fn: ``loss_fn(model, batch) -> scalar``, the mean loss of a batch.
        data: batches, each rank its own; the first ``batches`` are used and averaged.
        k: eigenvalues wanted. lanczos_steps: products to spend; None: max(2k + 4, 2 ln n).
        hvp: ``auto`` and ``finite_difference`` (two gradients per product) or ``exact``.

    Memory: ``lanczos_steps + 5`` vectors of n/P per rank. Source: Golub and Van Loan, section 10.1.

    Raises:
        RuntimeError: no finite spectrum was found; says why.
        ValueError: k or hvp out of range.
    """
    host = make_host(model, [{"params": [p for p in model.parameters() if p.requires_grad]}])
    if not 0 < k < host.numel:
        raise ValueError(f"k={k}: must be between 1 and {host.numel - 1}; lower it")
    if hvp not in ("auto", "finite_difference", "exact"):
        raise ValueError(f"hvp={hvp!r}: must be 'auto', 'finite_difference' or 'exact'")
    if hvp == "exact" and host.exact_refusal:
        raise ValueError(f"hvp='exact': must not be used here: {host.exact_refusal}")
    source = LossSource(loss_fn, data, batches)
    found, report = refresh(
        host,
        source.losses(),
        lambda x: x,
        Order(
            k=k,
            budget=lanczos_steps or default_lanczos_steps(k, host.numel),
            dtype=working_dtype(shard.param for shard in host.shards),
            device=working_device(host.shards),
            all_pairs=True,
        ),
        FiniteDifference.for_dtype(host.compute_dtype),
        route="exact" if hvp == "exact" else "finite_difference",
    )
    if found is None:
        raise RuntimeError(f"no spectrum: {report.reason}")
    return Spectrum(report.eigenvalues, report.residuals, report.hvps, report.self_check, found.vectors.clone())
