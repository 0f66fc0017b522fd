"""The base ``soap``: SOAP on the matrices that a rank owns, torch's Adam on its vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dho2_ds.base import STEP, BaseOptimizer, Chunk, init_state, joined
from dho2_ds.config import SoapConfig
from dho2_ds.hosts.owner import OwnerHost
from dho2_ds.sharding.blocks import Block
from dho2_ds.sharding.layout import Layout, Segment
from dho2_ds.shards import Shard, chunk_size
from dho2_ds.soap import SoapMatrix
from dho2_ds.soap_state import SEEN, SoapEntries, block_shapes, signature

_ALIGNMENT = 16  # elements: matrices start at multiples of 64 bytes


def state_layouts(blocks: Sequence[Block], owners: Sequence[Layout]) -> list[Layout]:
    """Where each rank's state of its blocks lies in its flat buffer, segments ``block/name``.

    Args:
        blocks: all blocks. owners: per rank the layout of the blocks that it owns.
    """
    by_name = {block.name: block for block in blocks}
    layouts = []
    for owned in owners:
        segments, offset = [], 0
        for segment in owned.segments:
            for name, shape in block_shapes(by_name[segment.name]).items():
                size = torch.Size(shape).numel()
                segments.append(Segment(f"{segment.name}/{name}", 0, size, offset))
                offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        layouts.append(Layout(tuple(segments), offset))
    return layouts


class SoapOptimizer(BaseOptimizer):
    """Steps on the blocks of an :class:`OwnerHost` and exposes ``P`` block by block.

    All of a rank's state is one flat buffer, laid out by block and name: what moves it to another world size, or into
    a file, is the redistribution that moves everything else.

    Args:
        host: blocks and shards.
        options: the ``soap`` settings.
        fused: torch's flag for the vectors' Adam.
        before: the optimizer bound before this one, whose state is taken over.

    Attributes:
        state_sizes: {block/name: elements}, global. state_layouts: one per rank. buffer: this rank's state.

    Raises:
        RuntimeError: ``before`` has taken steps on other blocks.
    """

    def __init__(
        self, host: OwnerHost, options: SoapConfig, *, fused: bool | None, before: BaseOptimizer | None = None
    ) -> None:
        pairs = list(zip(host.owned, host.shards, strict=True))
        vectors: dict[Any, Any] = {shard.param: {} for block, shard in pairs if block.is_vector}
        super().__init__("adam", [s for block, s in pairs if block.is_vector], fused=fused, state=vectors)
        self.device, self.dtype = host.device, host.dtype
        self._options, self._host = options, host
        self.state_sizes = {
            f"{block.name}/{name}": int(torch.Size(shape).numel())
            for block in host.blocks
            if block.numel
            for name, shape in block_shapes(block).items()
        }
        self.state_layouts = state_layouts(host.blocks, host.layouts)
        rank = host.reducer.rank
        self.buffer = torch.zeros(self.state_layouts[rank].numel, dtype=self.dtype, device=self.device)
        places = {segment.name: segment for segment in self.state_layouts[rank].segments}
        self._seen: list[Tensor] = []
        self._matrices: list[tuple[Shard, SoapMatrix]] = []
        for block, shard in pairs:
            views = {}
            for name, shape in block_shapes(block).items():
                place = places[f"{block.name}/{name}"]
                views[name] = self.buffer[place.offset : place.offset + place.length].view(shape)
            self._seen.append(views.pop(SEEN))
            if block.is_vector:
                vectors[shard.param].update(views)
                init_state("adam", shard.param, vectors[shard.param], fused=fused, momentum=False)
            else:
                self._matrices.append((shard, SoapMatrix(views)))
        if isinstance(before, SoapOptimizer):
            self._take_over(before)

    def _take_over(self, before: SoapOptimizer) -> None:
        same = [[(s.offset, s.length) for s in layout.segments] for layout in self.state_layouts]
        if same == [[(s.offset, s.length) for s in layout.segments] for layout in before.state_layouts]:
            before.pack()
            self.buffer.copy_(before.buffer)
            self.unpack()
        elif any(before._counts()):
            raise RuntimeError("the model's parameters changed after steps were taken; build a new optimizer")

    # -- stepping -----------------------------------------------------------------------------------------------

    def step(self, groups: Sequence[dict[str, Any]], lr_scale: float, *, put_off: bool = False) -> None:
        """One step with every lr multiplied by ``lr_scale``, added to the host's update; decay is the host's.

        Putting it off saves four of eight matrix products per matrix that the rank-k term would cost on top.
        """
        super().step([{**group, "weight_decay": 0.0} for group in groups], lr_scale)
        for shard, matrix in self._matrices:
            if shard.param.grad is None:
                continue
            group = groups[shard.group]
            beta = self._options.shampoo_beta
            matrix.update(
                shard.param.grad,
                group,
                shampoo_beta=float(group["betas"][1]) if beta is None else beta,
                frequency=self._options.precondition_frequency,
            )
            if not matrix.moved:
                continue
            lr = float(group["lr"]) * lr_scale
            if put_off:
                matrix.put_off(group, lr)
            else:
                shard.param.sub_(matrix.apply(matrix.direction(group), group, root=False), alpha=lr)

    def chunks(self, groups: Sequence[dict[str, Any]], *, moving_only: bool = False) -> Iterator[Chunk]:
        """Matrices, then vectors; small neighbours as one chunk."""
        vectors = super().chunks(groups, moving_only=moving_only)
        yield from joined([*self._matrix_chunks(groups, moving_only=moving_only), *vectors], chunk_size(self.device))

    def _matrix_chunks(self, groups: Sequence[dict[str, Any]], *, moving_only: bool = False) -> Iterator[_MatrixChunk]:
        largest = max((float(group["lr"]) for group in groups), default=0.0)
        for shard, matrix in self._matrices:
            if not moving_only or shard.param.grad is not None:
                group = groups[shard.group]
                rho = float(group["lr"]) / largest if largest > 0 else 1.0
                yield _MatrixChunk(shard, matrix, group, rho)

    def frozen_root(self, groups: Sequence[dict[str, Any]], numel: int) -> Callable[[Tensor], Tensor]:
        diagonal = torch.ones(numel, dtype=self.dtype, device=self.device)
        for chunk in super().chunks(groups):
            part = diagonal[chunk.start : chunk.stop]
            part.copy_(chunk.root(part))
        matrices = [chunk.frozen() for chunk in self._matrix_chunks(groups)]

        def root(x: Tensor) -> Tensor:
            x.mul_(diagonal)
            for chunk in matrices:
                part = x[chunk.start : chunk.stop]
                part.copy_(chunk.root(part))
            return x

        return root

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """Of the state, and of the update that goes to the engine's shards."""
        return (self.buffer.numel() + self._host.update.numel()) * self.buffer.element_size()

    def _counts(self) -> list[int]:
        return [m.seen for _, m in self._matrices] + [int(self.state[s.param][STEP]) for s in self.shards]

    def pack(self) -> Tensor:
        """The buffer, with the counts of steps written into it, and beside them what blocks they are of."""
        for place, count, block in zip(self._seen, self._counts(), self._host.owned, strict=True):
            place.fill_(float(count))
            self.buffer[place.storage_offset() + 1] = signature(block)
        return self.buffer

    def unpack(self) -> None:
        """Read the counts out of the buffer: it was written from outside."""
        counts = [int(count) for count in torch.cat(self._seen).tolist()] if self._seen else []
        for (_, matrix), count in zip(self._matrices, counts, strict=False):
            matrix.seen = count
        for shard, count in zip(self.shards, counts[len(self._matrices) :], strict=True):
            self.state[shard.param][STEP].fill_(float(count))
        self.forget_steps()

    @cached_property
    def _entries(self) -> SoapEntries:
        return SoapEntries(self._host, self.state_layouts)

    def entries(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        """The state as (key, name, entry shaped like the key); see :meth:`SoapEntries.show`. Collective."""
        return self._entries.show(self.pack())

    def names(self) -> Iterator[tuple[Tensor, str]]:
        """(key, name) of all entries."""
        return self._entries.names()

    def load(self, state: Mapping[Any, Mapping[str, Any]]) -> None:
        """Take this rank's blocks out of what :meth:`entries` gave, on any engine and world size. Collective.

        Raises:
            ConfigError, RuntimeError: see :meth:`SoapEntries.take`.
        """
        self.buffer.copy_(self._entries.take(state))
        self.unpack()


class _MatrixChunk:
    def __init__(self, shard: Shard, matrix: SoapMatrix, options: dict[str, Any], rho: float) -> None:
        self.start, self.stop = shard.offset, shard.offset + shard.numel
        self._shard, self._matrix, self._options, self._rho = shard, matrix, options, rho

    def frozen(self) -> _MatrixChunk:
        """As it is now, whatever steps follow."""
        return _MatrixChunk(self._shard, self._matrix.frozen(), dict(self._options), self._rho)

    def direction(self) -> Tensor:
        return self._matrix.direction(self._options).view(-1)

    def remembered(self) -> Tensor:
        return self.direction()

    def rooted_direction(self) -> Tensor:
        return self._scaled(self._matrix.rooted_direction(self._options).view(-1))

    def root(self, x: Tensor) -> Tensor:
        applied = self._matrix.apply(x.view(self._shard.param.shape), self._options, root=True).view(-1)
        return self._scaled(applied)

    def add_to_weights(self, delta: Tensor) -> None:
        self._shard.param.add_(delta.view(self._shard.param.shape))

    def add_rooted(self, delta: Tensor) -> None:
        moved = self._matrix.finish(self._scaled(delta).view(self._shard.param.shape), self._options)
        self._shard.param.add_(moved)

    def _scaled(self, x: Tensor) -> Tensor:
        return x * self._rho**0.5 if self._rho != 1.0 else x  # not in place: x may be what a step waits with
