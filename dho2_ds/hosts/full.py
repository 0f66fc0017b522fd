"""Autograd on whole parameters: for hosts whose model holds them all on every rank (DDP, one process, ZeRO 0-2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dho2_ds.curvature.hvp import Exact, Root
from dho2_ds.hosts.base import Loss, scalar_loss
from dho2_ds.sharding.layout import Layout, replicated
from dho2_ds.sharding.redistribute import redistribute
from dho2_ds.sharding.reduce import Reducer
from dho2_ds.shards import flat_like, flat_view, running_offsets

BUCKET = 1 << 21
"""Elements per collective bucket: 8 MB in float32, enough to reach the bandwidth of common links, and a bound on the
transient memory that any collective of ours holds beyond the rank's own share."""

_ELSEWHERE = "the curvature loss failed on another rank; see that rank's error"


def mean_gradients(
    losses: Sequence[Loss], model: nn.Module, params: Sequence[Tensor], *, create_graph: bool = False
) -> list[Tensor | None]:
    """Gradients of the mean of ``losses`` with respect to ``params``, local to this rank; ``.grad`` is not touched."""
    total: list[Tensor | None] = [None] * len(params)
    for loss in losses:
        with torch.enable_grad():
            value = scalar_loss(loss(model)) / len(losses)
            grads = torch.autograd.grad(value, params, allow_unused=True, create_graph=create_graph)
        for index, grad in enumerate(grads):
            if grad is not None:
                held = total[index]
                total[index] = grad if held is None else held + grad
    return total


def reduce_into(
    grads: list[Tensor | None],
    params: Sequence[Tensor],
    names: Sequence[str],
    layout: Layout,
    reducer: Reducer,
    out: Tensor,
    error: BaseException | None = None,
) -> None:
    """Average whole gradients over the ranks, bucket by bucket, and add this rank's segments to ``out``.

    ``grads`` is emptied as it goes, so that at no time more than the host's own gradients plus one bucket are held.
    A rank that failed before the reduction takes part with zeros and a flag, so that no rank is left waiting and all
    raise together.

    Raises:
        BaseException: ``error`` on the rank that had one, RuntimeError on the others.
    """
    segments = _by_name(layout)
    if reducer.world_size == 1:
        if error is not None:
            raise error
        for index, name in enumerate(names):
            grad = grads[index]
            grads[index] = None
            if grad is not None:
                flat = flat_like(grad, params[index])
                for start, length, offset in segments.get(name, ()):
                    out[offset : offset + length].add_(flat[start : start + length])
        return
    first, begin = True, 0
    while begin < len(names) or first:
        end, size = begin, 0
        while end < len(names) and (end == begin or size + params[end].numel() <= BUCKET):
            size += params[end].numel()
            end += 1
        bucket = torch.zeros(size + 1, dtype=out.dtype, device=params[0].device)
        bucket[0] = 1.0 if first and error is not None else 0.0
        at = 1
        for index in range(begin, end):
            grad, numel = grads[index], params[index].numel()
            grads[index] = None
            if grad is not None and error is None:
                bucket[at : at + numel].copy_(flat_like(grad, params[index]))
            at += numel
        dist.all_reduce(bucket, group=reducer.group)
        bucket.div_(reducer.world_size)
        if first and not float(bucket[0]) == 0.0:
            raise error or RuntimeError(_ELSEWHERE)
        at = 1
        for index in range(begin, end):
            for start, length, offset in segments.get(names[index], ()):
                out[offset : offset + length].add_(bucket[at + start : at + start + length])
            at += params[index].numel()
        first, begin = False, end


def exact_operator(
    losses: Sequence[Loss],
    model: nn.Module,
    params: Sequence[Tensor],
    names: Sequence[str],
    sizes: dict[str, int],
    layouts: Sequence[Layout],
    reducer: Reducer,
    root: Root,
) -> Exact:
    """Double backward: one retained gradient graph, one further backward pass per product.

    Memory: the graph of the loss and of its gradient, and one gradient-sized vector per rank for the direction (the
    double backward of a replicated model needs it whole; finite differences do not).

    Raises:
        RuntimeError: an operation of the model has no second derivative (fused attention, torch.compile, reentrant
            checkpointing); the message says what to set.
    """
    error: Exception | None = None
    grads: list[Tensor | None] = [None] * len(params)
    try:
        grads = mean_gradients(losses, model, params, create_graph=True)
    except RuntimeError as caught:
        error = _no_second_derivative(caught) if "derivative" in str(caught) or "double" in str(caught) else caught
    except Exception as caught:  # raised below, on every rank together
        error = caught
    if not reducer.agree(error is None):
        raise error if error is not None else RuntimeError(_ELSEWHERE)
    used = [index for index, grad in enumerate(grads) if grad is not None and grad.requires_grad]
    heads = [grad for grad in grads if grad is not None and grad.requires_grad]
    whole = replicated(sizes, len(layouts))
    order = dict(zip(sizes, running_offsets(sizes.values()), strict=True))

    def differentiate(direction: Tensor, out: Tensor) -> None:
        full = redistribute(direction, layouts, whole, reducer.group, rank=reducer.rank)
        vectors = []
        for index in used:
            param, at = params[index], order[names[index]]
            vector = torch.empty_like(param)
            flat_view(vector).copy_(full[at : at + param.numel()])
            vectors.append(vector)
        products: list[Tensor | None] = [None] * len(params)
        failure: RuntimeError | None = None
        if heads:
            try:
                products = list(
                    torch.autograd.grad(heads, params, grad_outputs=vectors, retain_graph=True, allow_unused=True)
                )
            except RuntimeError as caught:
                failure = _no_second_derivative(caught)
        reduce_into(products, params, names, layouts[reducer.rank], reducer, out, failure)

    return Exact(differentiate, root)


def _no_second_derivative(error: RuntimeError) -> RuntimeError:
    return RuntimeError(
        f"curvature.hvp='exact': the model cannot be differentiated twice ({error}); set curvature.hvp to "
        "'finite_difference', which needs first derivatives only"
    )


def _by_name(layout: Layout) -> dict[str, list[tuple[int, int, int]]]:
    table: dict[str, list[tuple[int, int, int]]] = {}
    for segment in layout.segments:
        table.setdefault(segment.name, []).append((segment.start, segment.length, segment.offset))
    return table
