"""Moving vectors between an engine's flat shards and whole blocks: rectangles against intervals, one all-to-all.

A block that is narrower than its matrix lies in a flat shard as one run per row. A run per row would make as many
transfers as a model has rows; a rectangle makes one, copied by strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dho2_ds.sharding.blocks import Block
from dho2_ds.sharding.layout import Layout, Segment


@dataclass(frozen=True)
class Piece:
    """``rows`` runs of ``length`` elements from rank ``source`` to rank ``target``; where each side's first run starts
    and how far apart its runs are."""

    source: int
    target: int
    rows: int
    length: int
    source_offset: int
    source_stride: int
    target_offset: int
    target_stride: int

    @property
    def numel(self) -> int:
        return self.rows * self.length

    def reverse(self) -> Piece:
        """The same elements the other way."""
        return Piece(
            self.target,
            self.source,
            self.rows,
            self.length,
            self.target_offset,
            self.target_stride,
            self.source_offset,
            self.source_stride,
        )


def to_blocks(
    flat: Sequence[Layout], blocks: Sequence[Block], owners: Sequence[int], owned: Sequence[Layout]
) -> list[Piece]:
    """The pieces that bring flat shards into the owner layout, in the same order on every rank.

    Args:
        flat: one layout per rank, of parameters. owned: one per rank, of blocks.
        owners: the owner of each block.

    Cost: segments times the blocks of their parameter; no communication.
    """
    places = {segment.name: segment.offset for layout in owned for segment in layout.segments}
    of: dict[str, list[tuple[Block, int]]] = {}
    for block, owner in zip(blocks, owners, strict=True):
        if block.numel:
            of.setdefault(block.parameter, []).append((block, owner))
    pieces: list[Piece] = []
    for rank, layout in enumerate(flat):
        for segment in layout.segments:
            for block, owner in of.get(segment.name, ()):
                pieces += _intersection(segment, rank, block, owner, places[block.name])
    return pieces


def _intersection(segment: Segment, rank: int, block: Block, owner: int, place: int) -> Iterator[Piece]:
    """What an interval of the flat matrix and a block share: at most a first run, a rectangle and a last run."""
    width, begin, end = block.width, segment.start, segment.start + segment.length
    first, last = begin // width, (end - 1) // width  # rows that the interval touches
    if block.columns == width:  # whole rows are one run
        low, high = max(begin, block.row * width), min(end, (block.row + block.rows) * width)
        groups = [(low, 1, high - low)] if low < high else []
    else:
        groups = []
        inner = (first + (begin % width > 0), last + (end % width == 0))  # rows that it holds whole
        for top, bottom in ((first, min(inner[0], last + 1)), inner, (max(inner[1], inner[0]), last + 1)):
            low, high = max(top, block.row), min(bottom, block.row + block.rows)
            if low >= high:
                continue
            start = max(low * width + block.column, begin)
            stop = min((high - 1) * width + block.column + block.columns, end) - (high - low - 1) * width
            if start < stop:
                groups.append((start, high - low, stop - start))
    for start, rows, length in groups:
        row, column = divmod(start, width)
        at = place + (row - block.row) * block.columns + column - block.column
        yield Piece(rank, owner, rows, length, segment.offset + start - begin, width, at, block.columns)


class Route:
    """One rank's part of a set of pieces, ready to run: a collective over the group.

    Args:
        pieces: all ranks' pieces, in the same order on every rank.
        rank: this rank. numel: length of its result.
        group: None for one process.
        wire: device that messages travel on; None: where the vectors are.

    Attributes:
        sent: elements that leave this rank at each call.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        rank: int,
        numel: int,
        group: ProcessGroup | None,
        wire: torch.device | None = None,
    ) -> None:
        self._group, self._numel, self._wire = group, numel, wire
        self._kept = [p for p in pieces if p.source == p.target == rank]
        self._moves = any(p.source != p.target for p in pieces)  # the same on every rank
        world = dist.get_world_size(group) if group is not None else 1
        leaving: list[list[Piece]] = [[] for _ in range(world)]
        arriving: list[list[Piece]] = [[] for _ in range(world)]
        for p in pieces:
            if p.source == p.target:
                continue
            if p.source == rank:
                leaving[p.target].append(p)
            elif p.target == rank:
                arriving[p.source].append(p)
        self._send_counts, self._receive_counts = (
            [sum(p.numel for p in part) for part in x] for x in (leaving, arriving)
        )
        self._leaving, self._arriving = ([p for part in x for p in part] for x in (leaving, arriving))
        self.sent = sum(self._send_counts)

    def __call__(self, local: Tensor) -> Tensor:
        """``local``: (n_source,) on this rank, contiguous. Returns (n_target,), new, zero where nothing arrives.

        One ``all_to_all_single``; what stays on the rank is copied. Transient: what leaves and what arrives.
        """
        out = local.new_zeros(self._numel)
        for p in self._kept:
            _runs(out, p, p.target_offset, p.target_stride).copy_(_runs(local, p, p.source_offset, p.source_stride))
        if not self._moves:
            return out
        parts = [_runs(local, p, p.source_offset, p.source_stride).reshape(-1) for p in self._leaving]
        message = torch.cat(parts) if parts else local.new_empty(0)
        if self._wire is not None:
            message = message.to(self._wire)
        received = message.new_empty(sum(self._receive_counts))
        dist.all_to_all_single(received, message, self._receive_counts, self._send_counts, group=self._group)
        at = 0
        for p in self._arriving:
            part = received[at : at + p.numel].view(p.rows, p.length)
            _runs(out, p, p.target_offset, p.target_stride).copy_(part)
            at += p.numel
        return out


def _runs(buffer: Tensor, piece: Piece, offset: int, stride: int) -> Tensor:
    return buffer.as_strided((piece.rows, piece.length), (stride, 1), buffer.storage_offset() + offset)
