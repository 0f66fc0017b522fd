"""Autograd on whole parameters: for hosts whose model holds them all on every rank (DDP, one process, ZeRO 0-2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

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


class ReentrantCheckpoint(RuntimeError):
    """Part of the graph comes into being in ``backward()`` only, where ``torch.autograd.grad`` does not see it."""


class CompiledGraph(RuntimeError):
    """Part of the graph is one compiled node, whose second derivative is zero or an error."""


def mean_gradients(
    losses: Sequence[Loss], model: nn.Module, params: Sequence[Tensor], *, create_graph: bool = False
) -> list[Tensor | None]:
    """Gradients of the mean of ``losses`` with respect to ``params``, local to this rank; ``.grad`` is not touched.

    Raises:
        ReentrantCheckpoint: before any gradient is made; :func:`accumulated_gradients` can do it.
        CompiledGraph: likewise, where ``create_graph`` would be in vain.
    """
    total: list[Tensor | None] = [None] * len(params)
    for loss in losses:
        with torch.enable_grad():
            value = scalar_loss(loss(model)) / len(losses)
            if _has_node(value, "checkpoint"):
                raise ReentrantCheckpoint("activation checkpointing is reentrant; with use_reentrant=False it can")
            if create_graph and _has_node(value, "compiledfunction"):
                raise CompiledGraph("it, or a part, is compiled; without torch.compile it can")
            grads = torch.autograd.grad(value, params, allow_unused=True, create_graph=create_graph)
        for index, grad in enumerate(grads):
            if grad is not None:
                held = total[index]
                total[index] = grad if held is None else held + grad
    return total


def accumulated_gradients(losses: Sequence[Loss], model: nn.Module, params: Sequence[Tensor]) -> list[Tensor | None]:
    """:func:`mean_gradients` by whole backward passes, which reentrant activation checkpointing needs.

    Every ``.grad`` is put back. Memory: the gradients of all trainable parameters of ``model``, also of those that are
    not in ``params``.
    """
    trainable = {id(p): p for p in (*model.parameters(), *params) if p.requires_grad}
    before = [(p, p.grad) for p in trainable.values()]
    try:
        for p, _ in before:
            p.grad = None
        with _stand_ins(model) as leaves:
            for loss in losses:
                with torch.enable_grad():
                    (scalar_loss(loss(model)) / len(losses)).backward()  # type: ignore[no-untyped-call]
        # A loss may reach a parameter past the module, too.
        found = [[t.grad for t in (leaves.get(id(p)), p) if t is not None and t.grad is not None] for p in params]
        return [sum(parts[1:], parts[0]) if parts else None for parts in found]
    finally:
        for p, grad in before:
            p.grad = grad


@contextlib.contextmanager
def _stand_ins(model: nn.Module) -> Iterator[dict[int, nn.Parameter]]:
    """Leaves over the parameters' memory, in the parameters' places, by the id of the trainable parameter each is for.

    What gathers there passes by whatever waits for the parameters' own ``.grad``: DDP, which counts (and with
    ``static_graph`` learns from) such events, and the user's post-accumulate hooks. Hooks that change a gradient come
    along. Recurrent modules keep their parameters: on a GPU they would lay out a new one's memory afresh.
    """
    places = [
        (module._parameters, name, p)
        for module in model.modules()
        if not isinstance(module, nn.RNNBase)
        for name, p in module._parameters.items()
        if p is not None and p.requires_grad
    ]
    leaves = {id(p): nn.Parameter(p.detach()) for _, _, p in places}
    try:
        for table, name, p in places:
            table[name] = leaves[id(p)]
        for p in {id(p): p for _, _, p in places}.values():
            for hook in (p._backward_hooks or {}).values():
                leaves[id(p)].register_hook(hook)  # type: ignore[no-untyped-call]
        yield leaves
    finally:
        for table, name, p in places:
            table[name] = p


def _has_node(loss: Tensor, name: str) -> bool:
    """Whether the name of a node of the graph contains ``name``, in lower case.

    Reentrant checkpoints of torch, DeepSpeed and others are autograd functions of their own, and so is what
    torch.compile makes; torch's non-reentrant checkpoints leave no such node. Cost: 1.5 microseconds per node of the
    graph, about 1 % of a GPT's backward on a CPU.
    """
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            if name in node.name().lower():
                return True
            seen.add(node)
            waiting.extend(following for following, _ in node.next_functions)
    return False


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
        known = isinstance(caught, ReentrantCheckpoint | CompiledGraph)
        once = known or "derivative" in str(caught) or "double" in str(caught)
        error = _no_second_derivative(caught) if once else caught
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
