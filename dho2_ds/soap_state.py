"""The state of the base ``soap`` in a state dict: cut into entries that are shaped like the parameters.

Factors and eigenbases have shapes of their own and lie whole on one rank, which no engine's state dict can say. What
every engine shows, shards and reshards is an entry shaped like its parameter (FSDP1 takes nothing else). So a
parameter's state, its blocks one after the other as one long vector, is written into as many such entries as it fills:
``soap_0``, ``soap_1``, ... On m x n blocks these are about 2 + 2 (m/n + n/m), six for square ones.

The vector depends on the shapes alone, so any engine and any number of ranks reads what another one wrote, and the way
between owners' blocks and entries is the redistribution that moves everything else.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dho2_ds.config import ConfigError
from dho2_ds.hosts.base import shaped
from dho2_ds.hosts.owner import OwnerHost
from dho2_ds.sharding.blocks import Block
from dho2_ds.sharding.layout import Layout, Segment
from dho2_ds.sharding.redistribute import redistribute
from dho2_ds.soap import state_shapes

SEEN = "seen"
ENTRY = "soap_"
_HEADER = 2  # elements before each block's state: gradients seen, and what block it is


def block_shapes(block: Block) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what a block keeps, its count of gradients first."""
    return {SEEN: (1,), **state_shapes(block)}


def signature(block: Block) -> float:
    """Which part of a parameter a block is and how it is rotated, as a positive integer that float32 holds exactly."""
    place = (block.row, block.rows, block.column, block.columns, block.width, block.left, block.right)
    return float(zlib.crc32(repr(place).encode()) % (1 << 24) or 1)


class SoapEntries:
    """Between the owners' buffers and state entries.

    Args:
        host: the owner layout over the engine whose state dict it is.
        layouts: one per rank, of the owners' buffers: segments ``block/name``. The element after each count must hold
            the block's :func:`signature`.

    Attributes:
        counts: {parameter: number of its entries}.
    """

    def __init__(self, host: OwnerHost, layouts: Sequence[Layout]) -> None:
        self._host, self._inner, self._layouts = host, host.inner, layouts
        self._starts: dict[str, int] = {}  # of each block in its parameter's vector
        self._lengths: dict[str, int] = dict.fromkeys(self._inner.sizes, 0)
        for block in host.blocks:
            if block.numel:
                self._starts[block.name] = self._lengths[block.parameter]
                size = sum(torch.Size(shape).numel() for shape in state_shapes(block).values())
                self._lengths[block.parameter] += _HEADER + size
        self.counts = {name: -(-self._lengths[name] // max(n, 1)) for name, n in self._inner.sizes.items()}
        names = self._inner.shard_names()
        self._shard_counts = [max((self.counts[name] for name in held), default=0) for held in names]

    # -- layouts: computed when a state dict is first asked for ---------------------------------------------------

    @cached_property
    def _owned(self) -> list[Layout]:
        """Owners' buffers as intervals of the parameters' vectors."""
        blocks = {block.name: block for block in self._host.blocks}
        result = []
        for layout in self._layouts:
            places = {segment.name: segment.offset for segment in layout.segments}
            segments = []
            for name in [s.name.removesuffix(f"/{SEEN}") for s in layout.segments if s.name.endswith(f"/{SEEN}")]:
                block, at = blocks[name], self._starts[name]
                segments.append(Segment(block.parameter, at, _HEADER, places[f"{name}/{SEEN}"]))
                at += _HEADER
                for key, shape in state_shapes(block).items():
                    size = torch.Size(shape).numel()
                    segments.append(Segment(block.parameter, at, size, places[f"{name}/{key}"]))
                    at += size
            result.append(Layout(tuple(segments), layout.numel))
        return result

    def _rows(self, layout: Layout) -> Layout:
        """What entries laid out as ``layout`` hold of the vectors: row after row of each segment."""
        segments, offset = [], 0
        for segment in layout.segments:
            name, numel = segment.name, self._inner.sizes[segment.name]
            for row in range(self.counts[name]):
                start = row * numel + segment.start
                length = min(segment.length, self._lengths[name] - start)  # the last entry is not full
                if length > 0:
                    segments.append(Segment(name, start, length, offset))
                offset += segment.length
        return Layout(tuple(segments), offset)

    @cached_property
    def _shown(self) -> list[Layout]:
        """Every rank's entries, as :meth:`_rows` lays them out."""
        return [self._rows(self._inner.layouts[rank]) for rank in range(self._host.reducer.world_size)]

    def _pieces(self) -> Iterator[tuple[int, int, int, int, int]]:
        """This rank's entries in its local buffer: (shard, row, start in the shard, length, offset)."""
        shards, offset = list(enumerate(self._inner.shards)), 0
        for segment in self._inner.layout.segments:
            while segment.offset >= shards[0][1].offset + shards[0][1].numel:
                shards.pop(0)
            index, shard = shards[0]
            for row in range(self.counts[segment.name]):
                yield index, row, segment.offset - shard.offset, segment.length, offset
                offset += segment.length

    # -- showing --------------------------------------------------------------------------------------------------

    def names(self) -> Iterator[tuple[Tensor, str]]:
        """(key, name) of all entries that this rank shows."""
        named = self._inner.named_keys()
        if named:
            pairs = [(key, self.counts[name]) for name, key in named.items()]
        else:
            pairs = list(zip(self._inner.keys(), self._shard_counts, strict=True))
        for key, count in pairs:
            for row in range(count):
                yield key, f"{ENTRY}{row}"

    def show(self, buffer: Tensor) -> Iterator[tuple[Tensor, str, Tensor]]:
        """All entries as (key, name, tensor shaped like the key). A collective: one all-to-all of the state.

        Args:
            buffer: this rank's state, local.

        Holds 1/P of the state twice more per rank; all of it once where entries are whole on every rank (DDP).
        """
        if self._inner.gathers:
            yield from self._show_whole(buffer)
            return
        local = self._redistribute(buffer, self._owned, self._shown)
        shards = self._inner.shards
        parts = [
            [local.new_zeros(shard.numel) for _ in range(count)]
            for shard, count in zip(shards, self._shard_counts, strict=True)
        ]
        for index, row, start, length, offset in self._pieces():
            parts[index][row][start : start + length].copy_(local[offset : offset + length])
        blank = local.new_zeros(max((shard.numel for shard in shards), default=0))
        for row in range(max(self._shard_counts, default=0)):
            rows = [part[row] if row < len(part) else blank[: s.numel] for part, s in zip(parts, shards, strict=True)]
            for (key, value), count in zip(self._inner.expose(rows), self._shard_counts, strict=True):
                if row < count:
                    yield key, f"{ENTRY}{row}", value

    def _show_whole(self, buffer: Tensor) -> Iterator[tuple[Tensor, str, Tensor]]:
        segments = [Segment(name, 0, n, 0) for name, n in self._inner.sizes.items() if n]
        at, places = 0, {}
        whole = []
        for segment in segments:
            whole.append(Segment(segment.name, 0, self._lengths[segment.name], at))
            places[segment.name] = at
            at += self.counts[segment.name] * segment.length
        flat = self._redistribute(buffer, self._owned, [Layout(tuple(whole), at)] * self._host.reducer.world_size)
        keys = self._inner.named_keys()
        for name, place in places.items():
            numel = self._inner.sizes[name]
            for row in range(self.counts[name]):
                start = place + row * numel
                yield keys[name], f"{ENTRY}{row}", shaped(flat[start : start + numel], keys[name])

    # -- taking ---------------------------------------------------------------------------------------------------

    def take(self, state: Mapping[Any, Mapping[str, Any]]) -> Tensor:
        """This rank's state buffer out of what :meth:`show` gave, on this engine or another. Collective.

        Args:
            state: {key: {name: entry}}; parameters without any entry start anew.

        Raises:
            ConfigError: it is not of this base or of other blocks (RuntimeError on ranks that hold none of these).
        """
        together = self._host.agreement.together
        elsewhere = "a checkpoint's soap state could not be loaded on another rank; see there"
        local = together(lambda: self._local(state), elsewhere)
        buffer = self._redistribute(local, self._shown, self._owned)
        together(lambda: self._check(buffer), elsewhere)
        return buffer

    def _local(self, state: Mapping[Any, Mapping[str, Any]]) -> Tensor:
        layout = self._shown[self._host.reducer.rank]
        local = torch.zeros(layout.numel, dtype=self._host.dtype, device=self._host.device)
        absorbed: dict[int, list[Tensor]] = {}
        for index, (key, count) in enumerate(zip(self._inner.keys(), self._shard_counts, strict=True)):
            mine = {name: value for name, value in state.get(key, {}).items() if isinstance(value, Tensor)}
            if not mine:
                continue
            try:
                absorbed[index] = [self._inner.absorb(index, mine[f"{ENTRY}{row}"]).reshape(-1) for row in range(count)]
            except (KeyError, ValueError) as error:
                raise _foreign(", ".join(self._inner.shard_names()[index])) from error
        for index, row, start, length, offset in self._pieces():
            if index in absorbed:
                local[offset : offset + length].copy_(absorbed[index][row][start : start + length])
        return local

    def _check(self, buffer: Tensor) -> None:
        places = {s.name: s.offset for s in self._layouts[self._host.reducer.rank].segments}
        for block in self._host.owned:
            place = places[f"{block.name}/{SEEN}"]
            seen, found = buffer[place : place + _HEADER].tolist()
            if found != signature(block) and (found or seen):
                raise _foreign(block.name)

    def _redistribute(self, local: Tensor, source: Sequence[Layout], target: Sequence[Layout]) -> Tensor:
        reducer = self._host.reducer
        return redistribute(local, source, target, reducer.group, rank=reducer.rank)


def _foreign(where: str) -> ConfigError:
    return ConfigError(
        f"checkpoint: the soap state of {where} is missing or of other blocks; must be written with base 'soap' and "
        "the same soap.max_block and soap.max_precondition_dim"
    )
