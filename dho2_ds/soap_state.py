"""The state of the base ``soap`` in a state dict: cut into entries that are shaped like the parameters.

Factors and eigenbases have shapes of their own and lie whole on one rank, which no engine's state dict can say. What
every engine shows, shards and reshards is an entry shaped like its parameter, the same number for all parameters (FSDP1
takes nothing else). So the state of all blocks, one after the other, is one long vector, and it is written row by row
over all parameters: ``soap_0`` of every parameter holds its beginning. There are as many rows as the state has elements
per parameter, two moments and the factors; about six for square matrices.

The vector depends on names and shapes alone, so any engine and any number of ranks reads what another one wrote. The
way between owners' blocks and entries is the redistribution that moves everything else.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dho2_ds.checkpoint import SOAP
from dho2_ds.config import ConfigError
from dho2_ds.hosts.fsdp import clean_name
from dho2_ds.hosts.owner import OwnerHost
from dho2_ds.sharding.blocks import Block
from dho2_ds.sharding.layout import Layout, Segment
from dho2_ds.sharding.redistribute import redistribute
from dho2_ds.soap import state_shapes

SEEN = "seen"
_HEADER = 2  # elements before each block's state: gradients seen, and what block it is


def block_shapes(block: Block) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what a block keeps, its count of gradients first."""
    return {SEEN: (1,), **state_shapes(block)}


def signature(block: Block) -> float:
    """Which block of which parameter it is and how it is rotated: a positive integer that float32 holds exactly."""
    place = (block.row, block.rows, block.column, block.columns, block.width, block.left, block.right)
    return float(zlib.crc32(repr((clean_name(block.parameter), place)).encode()) % (1 << 24) or 1)


class SoapEntries:
    """Between the owners' buffers and state entries.

    Args:
        host: the owner layout over the engine whose state dict it is.
        layouts: one per rank, of the owners' buffers: segments ``block/name``. The element after each count must hold
            the block's :func:`signature`.

    Attributes:
        rows: number of entries of each parameter.
    """

    def __init__(self, host: OwnerHost, layouts: Sequence[Layout]) -> None:
        self._host, self._inner, self._layouts = host, host.inner, layouts
        order = sorted(self._inner.sizes, key=clean_name)  # engines list parameters in different orders
        self._places: dict[str, int] = {}  # of each parameter in a row
        self._width = 0
        for name in order:
            self._places[name] = self._width
            self._width += self._inner.sizes[name]
        self._starts: dict[str, int] = {}  # of each block in the vector
        self._length = 0
        for block in sorted(host.blocks, key=lambda block: self._places[block.parameter]):
            if block.numel:
                self._starts[block.name] = self._length
                self._length += _HEADER + sum(torch.Size(shape).numel() for shape in state_shapes(block).values())
        self.rows = -(-self._length // max(self._width, 1))

    @cached_property
    def _owned(self) -> list[Layout]:
        """Owners' buffers as intervals of the vector, for every rank."""
        blocks = {block.name: block for block in self._host.blocks}
        result = []
        for layout in self._layouts:
            places = {segment.name: segment.offset for segment in layout.segments}
            segments = []
            for name in (key.removesuffix(f"/{SEEN}") for key in places if key.endswith(f"/{SEEN}")):
                segments.append(Segment("", self._starts[name], _HEADER, places[f"{name}/{SEEN}"]))
                at = self._starts[name] + _HEADER
                for key, shape in state_shapes(blocks[name]).items():
                    size = torch.Size(shape).numel()
                    segments.append(Segment("", at, size, places[f"{name}/{key}"]))
                    at += size
            result.append(Layout(tuple(segments), layout.numel))
        return result

    @cached_property
    def _shown(self) -> list[Layout]:
        """Entries as intervals of the vector, for every rank: rows of the engine's local layout, one after another."""
        result = []
        for layout in (self._inner.layouts[rank] for rank in range(self._host.reducer.world_size)):
            segments = []
            for row in range(self.rows):
                for s in layout.segments:
                    start = row * self._width + self._places[s.name] + s.start
                    length = min(s.length, self._length - start)  # the last row is not full
                    if length > 0:
                        segments.append(Segment("", start, length, row * layout.numel + s.offset))
            result.append(Layout(tuple(segments), self.rows * layout.numel))
        return result

    def names(self) -> Iterator[tuple[Tensor, str]]:
        """(key, name) of all entries that a state dict of this rank has."""
        for key in self._inner.named_keys().values() or self._inner.keys():
            for row in range(self.rows):
                yield key, f"{SOAP}{row}"

    def show(self, buffer: Tensor) -> Iterator[tuple[Tensor, str, Tensor]]:
        """All entries as (key, name, tensor shaped like the key); see :meth:`Host.expose`.

        Args:
            buffer: this rank's state, local.

        A collective: one all-to-all of the state. Holds the state once more, 1/P of it on each of P ranks; where
        entries are whole on every rank (DDP) these hold all of it.
        """
        local = self._redistribute(buffer, self._owned, self._shown).view(self.rows, self._inner.layout.numel)
        for row in range(self.rows):
            parts = [local[row, shard.offset : shard.offset + shard.numel] for shard in self._inner.shards]
            for key, value in self._inner.expose(parts):
                yield key, f"{SOAP}{row}", value

    def take(self, state: Mapping[Any, Mapping[str, Any]]) -> Tensor:
        """This rank's buffer out of what :meth:`show` gave, on this engine or another. Collective.

        Args:
            state: {key: {name: entry}}.

        Raises:
            ConfigError: it is not of this base, or not of these blocks (RuntimeError on ranks that see nothing wrong).
        """
        together = self._host.agreement.together
        elsewhere = "a checkpoint's soap state could not be loaded on another rank; see there"
        local = together(lambda: self._absorb(state), elsewhere)
        buffer = self._redistribute(local, self._shown, self._owned)
        together(lambda: self._check(buffer), elsewhere)
        return buffer

    def _absorb(self, state: Mapping[Any, Mapping[str, Any]]) -> Tensor:
        host, numel = self._host, self._inner.layout.numel
        local = torch.zeros(self.rows, numel, dtype=host.dtype, device=host.device)
        found = {id(key): {row: mine.get(f"{SOAP}{row}") for row in range(self.rows)} for key, mine in state.items()}
        present = {
            key: {row: value for row, value in rows.items() if isinstance(value, Tensor)} for key, rows in found.items()
        }
        for index, rows in self._inner.absorb_rows(present, self.rows, host.dtype).items():
            shard = self._inner.shards[index]
            if len(rows) < self.rows:
                names = {s.name for s in self._inner.layout.segments if 0 <= s.offset - shard.offset < shard.numel}
                raise _foreign(", ".join(sorted(names)) or "a parameter")
            for row, value in rows.items():
                local[row, shard.offset : shard.offset + shard.numel].copy_(value)
        return local.view(-1)

    def _check(self, buffer: Tensor) -> None:
        places = {s.name: s.offset for s in self._layouts[self._host.reducer.rank].segments}
        for block in self._host.owned:
            if float(buffer[places[f"{block.name}/{SEEN}"] + 1]) != signature(block):
                raise _foreign(block.name)

    def _redistribute(self, local: Tensor, source: Sequence[Layout], target: Sequence[Layout]) -> Tensor:
        reducer = self._host.reducer
        return redistribute(local, source, target, reducer.group, rank=reducer.rank)


def _foreign(where: str) -> ConfigError:
    return ConfigError(
        f"checkpoint: the soap state of {where} is missing or of another parameter or block; must be written with base "
        "'soap' and the same soap.max_block and soap.max_precondition_dim, for the same trained parameters by name "
        "(which are known once a model is attached)"
    )
