"""The rank's local weights as one virtual flat buffer: shards, and the chunks in which the update walks over them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shard:
    """One dense tensor of local weights that the base optimizer steps on.

    Attributes:
        param: any shape; a parameter, a flat ZeRO partition, or a 1-D view of a replicated parameter.
        group: index of its param group.
        offset: where it starts in the local flat buffer.
    """

    param: Tensor
    group: int
    offset: int

    @property
    def numel(self) -> int:
        return self.param.numel()


def flat_view(tensor: Tensor) -> Tensor:
    """1-D view of a dense tensor in storage order (channels_last and other permuted layouts included).

    Raises:
        ValueError: the tensor has holes or overlaps, so no flat view of it exists.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    strides = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    expected = 1
    for stride, size in strides:
        if size != 1 and stride != expected:
            raise ValueError(
                f"parameter of shape {tuple(tensor.shape)} and stride {tensor.stride()}: must be dense in memory; "
                "call .contiguous() on it before building the optimizer"
            )
        expected *= size
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def storage_shape(tensor: Tensor) -> tuple[int, ...]:
    """Dimensions in storage order, outermost first: the shape of which :func:`flat_view` is the flattening."""
    if tensor.is_contiguous():
        return tuple(tensor.shape)
    strides = tensor.stride()
    return tuple(tensor.shape[i] for i in sorted(range(tensor.dim()), key=lambda i: -strides[i]))


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, detached; any other tensor itself. Without importing torch.distributed.tensor."""
    to_local = getattr(tensor.detach(), "to_local", None)
    return to_local() if to_local is not None else tensor


def flat_like(tensor: Tensor, reference: Tensor) -> Tensor:
    """``tensor`` as 1-D in the storage order of ``reference`` (a view when their strides agree, else a copy)."""
    if tensor.stride() == reference.stride():
        return flat_view(tensor)
    return flat_view(torch.empty_like(reference, dtype=tensor.dtype).copy_(tensor))


@dataclass(frozen=True)
class Span:
    """A run of the local buffer worked on at once: pieces of one param group, together ``stop - start`` long."""

    start: int
    stop: int
    group: int
    pieces: tuple[tuple[int, int, int], ...]
    """(shard index, start in that shard, length)"""


def chunk_size(device: torch.device) -> int:
    """Elements per span: small enough that float32 scratch stays in a CPU core's cache, large on an accelerator."""
    return 1 << 18 if device.type == "cpu" else 1 << 24


def spans(shards: Sequence[Shard], limit: int) -> list[Span]:
    """Cut shards into spans of at most ``limit`` elements; small neighbours of one param group share a span.

    Merging matters for models with hundreds of small tensors: one GEMV per span instead of one per tensor.
    """
    result: list[Span] = []
    pieces: list[tuple[int, int, int]] = []
    begin = end = 0
    group = -1

    def flush() -> None:
        nonlocal pieces
        if pieces:
            result.append(Span(begin, end, group, tuple(pieces)))
        pieces = []

    for index, shard in enumerate(shards):
        for start in range(0, shard.numel, limit):
            length = min(limit, shard.numel - start)
            at = shard.offset + start
            if not pieces or shard.group != group or at != end or end - begin + length > limit:
                flush()
                begin, group = at, shard.group
            pieces.append((index, start, length))
            end = at + length
    flush()
    return result


def gather(tensors: Sequence[Tensor], span: Span) -> Tensor:
    """(stop - start,) values of one span from per-shard flat tensors; a view when the span lies in one shard."""
    parts = [tensors[index][start : start + length] for index, start, length in span.pieces]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def scatter_add(tensors: Sequence[Tensor], span: Span, values: Tensor) -> None:
    """Add a span's values to per-shard flat tensors in place, in their own dtype."""
    offset = 0
    for index, start, length in span.pieces:
        tensors[index][start : start + length].add_(values[offset : offset + length])
        offset += length


def local_vector(
    shards: Sequence[Shard], parts: Iterable[Tensor | None], numel: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """(numel,) local vector of per-shard tensors, each in its shard's storage order; zero for None and in padding."""
    local = torch.zeros(numel, dtype=dtype, device=device)
    for shard, part in zip(shards, parts, strict=True):
        if part is not None:
            local[shard.offset : shard.offset + shard.numel].copy_(part.reshape(-1))
    return local


def put_displaced(target: Tensor, base: Tensor, step: Tensor, eps: float) -> None:
    """``target <- base + eps step`` on flat tensors, summed in the precision of ``step``; without a temporary where
    the target has it too."""
    if target.dtype == step.dtype:
        torch.add(base, step, alpha=eps, out=target)
    else:
        target.copy_(torch.add(base.to(step.dtype), step, alpha=eps))


def consecutive(params: Sequence[Tensor], groups: Sequence[int]) -> list[Shard]:
    """Shards laid one after the other in the local flat buffer; ``groups[i]`` is the param group of ``params[i]``."""
    offsets = running_offsets([param.numel() for param in params])
    return [Shard(p, group, offset) for p, group, offset in zip(params, groups, offsets, strict=True)]


def running_offsets(numels: Iterable[int]) -> list[int]:
    """Where each of several tensors starts when they are laid one after the other."""
    return [0, *accumulate(numels)][:-1]


def identities(params: Iterable[Tensor], *, storage: bool = True) -> list[tuple[int, bool, int]]:
    """What must stay as it is for shards of these parameters to stay right: the objects, whether they are trained and,
    with ``storage``, where their values lie (``module.to`` and ``vector_to_parameters`` change that alone)."""
    return [(id(p), p.requires_grad, p.data_ptr() if storage else 0) for p in params]


def working_dtype(tensors: Iterable[Tensor]) -> torch.dtype:
    """Precision of our arithmetic: float64 if any tensor has it, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def working_device(shards: Sequence[Shard]) -> torch.device:
    """Where the rank's local vectors live: beside its weights."""
    return shards[0].param.device if shards else torch.device("cpu")


def iter_params(groups: Sequence[dict[str, object]]) -> Iterator[Tensor]:
    """Every tensor of torch-style param groups, in order."""
    for group in groups:
        params = group["params"]
        assert isinstance(params, list)
        yield from params
