"""Shard layouts: which intervals of which parameters a rank owns and where they sit in its local flat buffer.

Pure Python: nothing here communicates. A list of layouts, one per rank, describes one sharding of a set of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements `[start, start + length)` of the flattened parameter `name`, at `local[offset : offset + length]`."""

    name: str
    start: int
    length: int
    offset: int


@dataclass(frozen=True)
class Layout:
    """One rank's share of a set of parameters, as intervals in one flat local buffer.

    Args:
        segments: the intervals this rank owns, kept sorted by local offset.
        numel: length of the **local** buffer, padding included.

    Raises:
        ValueError: a segment is empty, leaves the buffer, or overlaps another one in the buffer.
    """

    segments: tuple[Segment, ...]
    numel: int

    def __post_init__(self) -> None:
        if self.numel < 0:
            raise ValueError(f"numel={self.numel}: must be >= 0")
        ordered = tuple(sorted(self.segments, key=lambda segment: segment.offset))
        end = 0
        for segment in ordered:
            if segment.length < 1 or segment.start < 0:
                raise ValueError(f"{segment}: must have length >= 1 and start >= 0; leave empty segments out")
            if segment.offset < 0 or segment.offset + segment.length > self.numel:
                raise ValueError(f"{segment}: must lie inside the local buffer of {self.numel} elements")
            if segment.offset < end:
                raise ValueError(f"{segment}: overlaps the segment before it, which ends at local element {end}")
            end = segment.offset + segment.length
        object.__setattr__(self, "segments", ordered)

    @cached_property
    def _gaps(self) -> tuple[tuple[int, int], ...]:
        gaps, end = [], 0
        for segment in self.segments:
            if segment.offset > end:
                gaps.append((end, segment.offset))
            end = segment.offset + segment.length
        if end < self.numel:
            gaps.append((end, self.numel))
        return tuple(gaps)

    def padding(self) -> tuple[tuple[int, int], ...]:
        """Half-open **local** intervals that belong to no segment, in ascending order (computed once)."""
        return self._gaps

    def zero_padding_(self, local: Tensor) -> Tensor:
        """Set the padding of a local buffer to zero, in place; a no-op without padding.

        Args:
            local: `(..., numel)`, any dtype, **local**.

        Returns:
            `local` itself. Cost: one fill per padding interval.

        Raises:
            ValueError: the last dimension is not `numel`.
        """
        if local.shape[-1:] != (self.numel,):
            raise ValueError(f"local buffer of shape {tuple(local.shape)}: last dimension must be {self.numel}")
        for begin, end in self._gaps:
            local[..., begin:end].zero_()
        return local


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _check_sizes(sizes: Mapping[str, int], world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: must be >= 1")
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"parameter {name!r} of {size} elements: must be >= 0")


def _cut(sizes: Mapping[str, int], begin: int, end: int) -> Iterator[Segment]:
    """Segments of the slice `[begin, end)` of the concatenation of all parameters, offsets relative to `begin`."""
    position = 0
    for name, size in sizes.items():
        low, high = max(begin, position), min(end, position + size)
        if low < high:
            yield Segment(name, low - position, high - low, low - begin)
        position += size


def flat_slices(sizes: Mapping[str, int], world_size: int, *, alignment: int = 1) -> list[Layout]:
    """Equal contiguous slices of the concatenation of all parameters, in mapping order (ZeRO-1/2 style).

    Every rank gets `ceil(n / world_size)` local elements rounded up to `alignment`; all padding is at the end of the
    concatenation, so the last ranks may be padded or hold nothing.

    Args:
        sizes: **global** number of elements of each parameter.
        world_size: number of ranks.
        alignment: the slice length is a multiple of this.

    Raises:
        ValueError: `world_size` or `alignment` below 1, or a negative size.
    """
    _check_sizes(sizes, world_size)
    if alignment < 1:
        raise ValueError(f"alignment={alignment}: must be >= 1")
    share = _ceil_div(_ceil_div(sum(sizes.values()), world_size), alignment) * alignment
    return [Layout(tuple(_cut(sizes, rank * share, (rank + 1) * share)), share) for rank in range(world_size)]


def parameter_chunks(sizes: Mapping[str, int], world_size: int) -> list[Layout]:
    """Every parameter cut into `world_size` chunks, chunk r on rank r (ZeRO-3 and FSDP style).

    Each parameter takes `ceil(size / world_size)` local slots on every rank, one parameter after the other; a shorter
    or empty last chunk leaves padding in its slots.

    Args:
        sizes: **global** number of elements of each parameter.
        world_size: number of ranks.

    Raises:
        ValueError: `world_size` below 1, or a negative size.
    """
    _check_sizes(sizes, world_size)
    slots = {name: _ceil_div(size, world_size) for name, size in sizes.items()}
    layouts = []
    for rank in range(world_size):
        segments, offset = [], 0
        for name, size in sizes.items():
            start = rank * slots[name]
            length = min(slots[name], size - start)
            if length > 0:
                segments.append(Segment(name, start, length, offset))
            offset += slots[name]
        layouts.append(Layout(tuple(segments), offset))
    return layouts


def replicated(sizes: Mapping[str, int], world_size: int) -> list[Layout]:
    """Every rank holds every parameter, one after the other in mapping order.

    Args:
        sizes: **global** number of elements of each parameter.
        world_size: number of ranks.

    Raises:
        ValueError: `world_size` below 1, or a negative size.
    """
    _check_sizes(sizes, world_size)
    total = sum(sizes.values())
    whole = Layout(tuple(_cut(sizes, 0, total)), total)
    return [whole] * world_size


def check_cover(layouts: Sequence[Layout], sizes: Mapping[str, int]) -> None:
    """Check that the layouts of all ranks together hold every element exactly once.

    Args:
        layouts: one layout per rank.
        sizes: **global** number of elements of each parameter.

    Raises:
        ValueError: an element is held by no rank, by two, or does not exist; names the parameter and the interval.
    """
    held: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    for rank, layout in enumerate(layouts):
        for segment in layout.segments:
            if segment.name not in held:
                raise ValueError(f"rank {rank} holds {segment.name!r}, which is not a known parameter")
            held[segment.name].append((segment.start, segment.start + segment.length))
    for name, intervals in held.items():
        end = 0
        for start, stop in sorted(intervals):
            if start < end:
                raise ValueError(f"parameter {name!r}: elements [{start}, {min(stop, end)}) are held more than once")
            if start > end:
                raise ValueError(f"parameter {name!r}: elements [{end}, {start}) are held by no rank")
            end = stop
        if end < sizes[name]:
            raise ValueError(f"parameter {name!r}: elements [{end}, {sizes[name]}) are held by no rank")
        if end > sizes[name]:
            raise ValueError(f"parameter {name!r}: elements [{sizes[name]}, {end}) do not exist")


def concatenate(layouts: Sequence[Layout]) -> Layout:
    """The layout of one rank's buffers put one after the other, e.g. one buffer per ZeRO parameter group.

    Args:
        layouts: **local** layouts of the same rank, in buffer order.

    Returns:
        One layout whose `numel` is the sum of theirs.
    """
    segments, base = [], 0
    for layout in layouts:
        segments += [Segment(s.name, s.start, s.length, base + s.offset) for s in layout.segments]
        base += layout.numel
    return Layout(tuple(segments), base)
