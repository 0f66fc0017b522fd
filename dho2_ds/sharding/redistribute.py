"""Moving a sharded vector from one layout to another: interval intersection, then one all-to-all.

Snapshots to curvature ranks, eigenbases back, and resuming on another world size are all this operation.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .layout import Layout

_EMPTY = Layout((), 0)


class Transfer(NamedTuple):
    """`length` elements go from `source_offset` on rank `source` to `target_offset` on rank `target`."""

    source: int
    target: int
    source_offset: int
    target_offset: int
    length: int


class _Piece(NamedTuple):
    """Elements `[start, end)` of one parameter, found on `rank` at `offset`."""

    start: int
    end: int
    rank: int
    offset: int


def _lowest_rank_cover(pieces: list[_Piece]) -> list[_Piece]:
    """Disjoint sorted pieces holding the same elements, each element on the lowest rank that has it; O(N log N)."""
    pieces = sorted(pieces)
    boundaries = sorted({piece.start for piece in pieces} | {piece.end for piece in pieces})
    open_pieces: list[tuple[int, int, _Piece]] = []
    cover: list[_Piece] = []
    upcoming = 0
    for begin, end in zip(boundaries, boundaries[1:], strict=False):
        while upcoming < len(pieces) and pieces[upcoming].start <= begin:
            heapq.heappush(open_pieces, (pieces[upcoming].rank, upcoming, pieces[upcoming]))
            upcoming += 1
        while open_pieces and open_pieces[0][2].end <= begin:
            heapq.heappop(open_pieces)
        if not open_pieces:
            continue
        best = open_pieces[0][2]
        offset = best.offset + begin - best.start
        last = cover[-1] if cover else None
        if last and last.end == begin and last.rank == best.rank and last.offset + begin - last.start == offset:
            cover[-1] = last._replace(end=end)
        else:
            cover.append(_Piece(begin, end, best.rank, offset))
    return cover


class _Holders:
    """The disjoint pieces of one parameter, searchable by element."""

    def __init__(self, pieces: list[_Piece]) -> None:
        self._cover = _lowest_rank_cover(pieces)
        self._starts = [piece.start for piece in self._cover]

    def within(self, start: int, end: int) -> Iterator[_Piece]:
        """The pieces inside `[start, end)`, clipped to it, ascending."""
        index = max(bisect_right(self._starts, start) - 1, 0)
        while index < len(self._cover) and self._cover[index].start < end:
            piece = self._cover[index]
            low, high = max(piece.start, start), min(piece.end, end)
            if low < high:
                yield _Piece(low, high, piece.rank, piece.offset + low - piece.start)
            index += 1


def _pieces_by_name(ranks: Sequence[tuple[int, Layout]]) -> dict[str, _Holders]:
    found: dict[str, list[_Piece]] = defaultdict(list)
    for rank, layout in ranks:
        for segment in layout.segments:
            found[segment.name].append(_Piece(segment.start, segment.start + segment.length, rank, segment.offset))
    return {name: _Holders(pieces) for name, pieces in found.items()}


def plan(source: Sequence[Layout], target: Sequence[Layout]) -> list[Transfer]:
    """The transfers that turn buffers laid out as `source` into buffers laid out as `target`.

    Every target element comes from exactly one source: the target rank itself if it holds the element (no traffic),
    else the lowest rank that does. Transfers contiguous on both sides are merged. Cost: O(S log S) host work in the
    number of segments plus transfers; no communication, and the same result on every rank.

    Args:
        source: one layout per rank, **global** knowledge; ranks may hold the same element (replicas).
        target: one layout per rank; the two lists may differ in length.

    Returns:
        Transfers sorted by (source, target, source offset).

    Raises:
        ValueError: a target element is held by no source; names the parameter and the interval.
    """
    anywhere = _pieces_by_name(list(enumerate(source)))
    nowhere = _Holders([])
    transfers: list[Transfer] = []
    for rank, layout in enumerate(target):
        own = _pieces_by_name([(rank, source[rank])]) if rank < len(source) else {}
        for segment in layout.segments:
            shift = segment.offset - segment.start
            end = segment.start + segment.length
            found: list[_Piece] = []
            position = segment.start
            # What this rank already has, and between those pieces what others have.
            for piece in (*own.get(segment.name, nowhere).within(segment.start, end), _Piece(end, end, rank, 0)):
                found += anywhere.get(segment.name, nowhere).within(position, piece.start)
                if piece.start < piece.end:
                    found.append(piece)
                position = piece.end
            position = segment.start
            for piece in (*found, _Piece(end, end, rank, 0)):
                if piece.start > position:
                    raise ValueError(
                        f"parameter {segment.name!r}: elements [{position}, {piece.start}) are wanted by rank {rank} "
                        "and held by no source rank"
                    )
                position = piece.end
            transfers += [Transfer(p.rank, rank, p.offset, p.start + shift, p.end - p.start) for p in found]
    return _merge(sorted(transfers))


def _merge(transfers: list[Transfer]) -> list[Transfer]:
    merged: list[Transfer] = []
    for item in transfers:
        last = merged[-1] if merged else None
        if last and last[:2] == item[:2] and (last[2] + last.length, last[3] + last.length) == item[2:4]:
            merged[-1] = last._replace(length=last.length + item.length)
        else:
            merged.append(item)
    return merged


# The same few pairs of layouts recur at every refresh; planning walks every segment of every rank.
plan_cached = lru_cache(maxsize=16)(plan)


def _check_buffer(local: Tensor, layout: Layout, rank: int) -> None:
    if local.dim() not in (1, 2) or local.shape[-1] != layout.numel:
        raise ValueError(
            f"buffer of shape {tuple(local.shape)} on rank {rank}: must be ({layout.numel},) or (k, {layout.numel})"
        )


def _copy(buffer: Tensor, out: Tensor, item: Transfer) -> None:
    out[..., item.target_offset : item.target_offset + item.length] = buffer[
        ..., item.source_offset : item.source_offset + item.length
    ]


def redistribute(
    local: Tensor,
    source: Sequence[Layout],
    target: Sequence[Layout],
    group: ProcessGroup | None = None,
    *,
    rank: int | None = None,
) -> Tensor:
    """Move a sharded vector, or k of them, from one layout to another; a collective over `group`.

    Args:
        local: `(n_local,)` or `(k, n_local)` in the source layout, **local**; same dtype, k and device type on every
            rank, also on ranks that hold nothing: they pass `(0,)` or `(k, 0)`.
        source: layout of each group rank; group ranks beyond the list hold nothing.
        target: likewise.
        group: process group, default the default group; without `torch.distributed` the copy stays in this process.
        rank: this rank's index in the two lists; with a group it must be (and defaults to) the rank in the group.

    Returns:
        A new `(n_target,)` or `(k, n_target)` tensor, **local**, padding zero. Cost: one `all_to_all_single` with
        uneven splits; elements that stay on the rank are copied and not sent. Peak extra memory is what leaves plus
        what arrives.

    Raises:
        ValueError: a buffer or a layout list of the wrong length, or an element no source rank holds. The same layouts
            on all ranks raise on all ranks before anything is sent, a wrong buffer only where it is.
    """
    distributed = dist.is_available() and dist.is_initialized()
    world = dist.get_world_size(group) if distributed else max(len(source), len(target))
    me = dist.get_rank(group) if distributed else rank or 0
    if rank is not None and rank != me:
        raise ValueError(f"rank={rank}: must be this process's rank in the group, {me}")
    if max(len(source), len(target)) > world or not 0 <= me < world:
        raise ValueError(f"{len(source)} source and {len(target)} target layouts: the group has {world} ranks")
    before = source[me] if me < len(source) else _EMPTY
    after = target[me] if me < len(target) else _EMPTY
    _check_buffer(local, before, me)

    transfers = plan_cached(tuple(source), tuple(target))
    out = local.new_zeros((*local.shape[:-1], after.numel))
    outgoing: list[list[Transfer]] = [[] for _ in range(world)]
    incoming: list[list[Transfer]] = [[] for _ in range(world)]
    for item in transfers:
        if item.source == item.target == me:
            _copy(local, out, item)
        elif item.source == me:
            outgoing[item.target].append(item)
        elif item.target == me:
            incoming[item.source].append(item)
    if not distributed:
        if any(outgoing) or any(incoming):
            raise ValueError("layouts that move elements between ranks need torch.distributed to be initialised")
        return out
    if all(item.source == item.target for item in transfers):
        return out  # The plan is the same everywhere, so every rank leaves here together.

    rows = 1 if local.dim() == 1 else local.shape[0]
    send_counts = [rows * sum(item.length for item in items) for items in outgoing]
    receive_counts = [rows * sum(item.length for item in items) for items in incoming]
    parts = [
        local[..., item.source_offset : item.source_offset + item.length].reshape(-1)
        for items in outgoing
        for item in items
    ]
    message = torch.cat(parts) if parts else local.new_empty(0)
    received = local.new_empty(sum(receive_counts))
    dist.all_to_all_single(received, message, receive_counts, send_counts, group=group)
    position = 0
    for items in incoming:
        for item in items:
            block = out[..., item.target_offset : item.target_offset + item.length]
            block.copy_(received[position : position + rows * item.length].view(block.shape))
            position += rows * item.length
    return out


def apply_plan(buffers: Sequence[Tensor], source: Sequence[Layout], target: Sequence[Layout]) -> list[Tensor]:
    """`redistribute` for all ranks at once in one process, e.g. to reshard files.

    Args:
        buffers: one `(n_local,)` or `(k, n_local)` tensor per source rank, same dtype and k.
        source: one layout per source rank.
        target: one layout per target rank.

    Returns:
        One new tensor per target rank, padding zero. No communication.

    Raises:
        ValueError: no buffers, a buffer that does not fit its layout, or an element no source rank holds.
    """
    if len(buffers) != len(source) or not buffers:
        raise ValueError(f"{len(buffers)} buffers for {len(source)} source layouts: must be one each, at least one")
    for rank, (buffer, layout) in enumerate(zip(buffers, source, strict=True)):
        _check_buffer(buffer, layout, rank)
    out = [buffers[0].new_zeros((*buffers[0].shape[:-1], layout.numel)) for layout in target]
    for item in plan(source, target):
        _copy(buffers[item.source], out[item.target], item)
    return out
