"""From DTensor placements to the elements a rank holds: pure arithmetic on shapes and coordinates, no communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from dho2_ds.sharding.layout import Layout, Segment

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


def sharded_dims(placements: Sequence[Placement]) -> tuple[int, ...]:
    """Mesh dimensions over which a tensor is cut: every placement that does not replicate.

    ``is_replicate`` and not ``is_shard``, which is False for ``_StridedShard`` (FSDP2 with tensor parallelism).
    """
    return tuple(dim for dim, placement in enumerate(placements) if not placement.is_replicate())


def held_indices(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> list[Tensor]:
    """Per tensor dimension the **global** indices held at one mesh coordinate; the shard is their product.

    A plain ``Shard`` cuts what the mesh dimensions to its left have left over. A ``_StridedShard`` stands for a cut
    made after those to its right (FSDP2 cuts the tensor-parallel shard), so they come first and it from right to left.

    Returns:
        One ascending 1-D int64 tensor per dimension. Cost: the sum of the shape, not its product.

    Raises:
        ValueError: a placement is neither a replica nor a shard of a dimension.
    """
    held = [torch.arange(size) for size in shape]
    cuts = sharded_dims(placements)
    strided = [dim for dim in cuts if hasattr(placements[dim], "split_factor")]
    plain = [dim for dim in cuts if dim not in strided]
    for mesh_dim in plain + strided[::-1]:
        dim = getattr(placements[mesh_dim], "dim", None)
        if dim is None:
            raise ValueError(
                f"placement {placements[mesh_dim]}: must be Replicate or Shard; a parameter is not partial"
            )
        size = -(-len(held[dim]) // mesh_shape[mesh_dim])  # torch.chunk's: the last ones may be shorter or empty
        held[dim] = held[dim][coordinate[mesh_dim] * size : (coordinate[mesh_dim] + 1) * size]
    return held


def contiguous_runs(shape: Sequence[int], held: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """(start, length) of each run of consecutive **global** flat elements, in the local row-major order.

    One run for a shard of dimension 0; one per row for a shard of dimension 1.
    """
    if not all(len(indices) for indices in held):
        return
    inner = len(shape)  # dimensions from here on are held whole, so they only lengthen a run
    while inner and len(held[inner - 1]) == shape[inner - 1]:
        inner -= 1
    block = math.prod(shape[inner:])
    starts = torch.zeros(1, dtype=torch.int64)
    for dim in range(inner):
        stride = math.prod(shape[dim + 1 :])
        starts = (starts[:, None] + held[dim][None, :] * stride).reshape(-1)
    breaks = (starts.diff() != block).nonzero().reshape(-1) + 1
    first = [0, *breaks.tolist()]
    last = [*breaks.tolist(), len(starts)]
    for begin, end in zip(first, last, strict=True):
        yield int(starts[begin]), (end - begin) * block


class LazyLayouts(Sequence[Layout]):
    """Layouts of all ranks, each computed when first asked for: training needs a rank's own only.

    Args:
        count: number of ranks.
        build: ``build(rank)``.
    """

    def __init__(self, count: int, build: Callable[[int], Layout]) -> None:
        self._build, self._known = build, dict[int, Layout]()
        self._count = count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, rank: int) -> Layout: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[Layout]: ...
    def __getitem__(self, rank: int | slice) -> Layout | Sequence[Layout]:
        if isinstance(rank, slice):
            return [self[r] for r in range(*rank.indices(self._count))]
        if not 0 <= rank < self._count:
            raise IndexError(rank)
        if rank not in self._known:
            self._known[rank] = self._build(rank)
        return self._known[rank]


class Pieces:
    """Lays runs of parameters one after the other in a local buffer."""

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._end = 0

    def add(self, name: str, runs: Iterator[tuple[int, int]] | Sequence[tuple[int, int]]) -> None:
        for start, length in runs:
            if length:
                self._segments.append(Segment(name, start, length, self._end))
                self._end += length

    @cached_property
    def layout(self) -> Layout:
        return Layout(tuple(self._segments), self._end)
