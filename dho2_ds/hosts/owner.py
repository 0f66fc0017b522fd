"""The owner layout over any engine: whole blocks of matrices on one rank each, for a base that needs whole matrices.

Everything of ours (base state, eigenbasis, Lanczos vectors) lives in the owner layout. Gradients come from the engine's
shards and updates go back to them, one all-to-all of n/P elements per rank each way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from dho2_ds.curvature.hvp import Exact, Root
from dho2_ds.hosts.base import Host, Loss
from dho2_ds.sharding.blocks import assign, cut, imbalance, owner_layouts
from dho2_ds.sharding.reduce import Reducer, meet
from dho2_ds.sharding.route import Route, to_blocks
from dho2_ds.shards import Shard, flat_like, flat_view, local_vector, working_device, working_dtype


class OwnerHost(Host):
    """Another host seen as blocks.

    The shards are not weights but a zeroed **update** of them: the base step and the rank-k term add to it, and
    :meth:`publish` brings it to the engine's float32 shards, after decoupled weight decay at the unscaled lr.

    Args:
        inner: the engine's host.
        max_block, max_rotated: see :func:`dho2_ds.sharding.blocks.cut`.
        vectors: vectors of the size of the weights that are kept; see :func:`dho2_ds.sharding.blocks.assign`.

    Attributes:
        blocks: all blocks, in model order. owners: the rank of each.
        owned: this rank's blocks, one per shard.
        update: (n_local,) local buffer that the shards are views of.
        balance: the fullest rank over the mean, (memory, work).
        sent: elements that leave this rank in a step, both ways.
    """

    def __init__(self, inner: Host, *, max_block: int, max_rotated: int, vectors: int) -> None:
        self.inner, self.name, self.module = inner, inner.name, inner.module
        self.reducer, self.exact_refusal, self.state_outside = inner.reducer, inner.exact_refusal, inner.state_outside
        self.scales_loss = inner.scales_loss
        world, rank = self.reducer.world_size, self.reducer.rank
        self.blocks = cut(
            {name: inner.shapes[name] for name in inner.sizes}, max_block=max_block, max_rotated=max_rotated
        )
        homes = inner.homes
        if homes is None:
            self.owners = assign(self.blocks, world, vectors)
        else:  # where blocks are then is not ours to choose, but nothing has to be sent
            self.owners = [homes[block.parameter] for block in self.blocks]
        self.balance = imbalance(self.blocks, self.owners, world, vectors)
        self.sizes = {block.name: block.numel for block in self.blocks if block.numel}
        self.layouts = owner_layouts(self.blocks, self.owners, world)
        by_name = {block.name: block for block in self.blocks}
        self.owned = [by_name[segment.name] for segment in self.layout.segments]
        self.device, self.dtype = working_device(inner.shards), working_dtype(s.param for s in inner.shards)
        self.update = torch.zeros(self.layout.numel, dtype=self.dtype, device=self.device)
        self.shards = []
        for block, segment in zip(self.owned, self.layout.segments, strict=True):
            view = self.update[segment.offset : segment.offset + segment.length]
            view = view if block.is_vector else view.view(block.rows, block.columns)
            self.shards.append(Shard(view, inner.group_of[block.parameter], segment.offset))
        pieces = to_blocks(inner.layouts, self.blocks, self.owners, self.layouts)
        wire = self.reducer.device if self.reducer.device.type != self.device.type else None
        self._arrive = Route(pieces, rank, self.layout.numel, self.reducer.group, wire)
        back = [piece.reverse() for piece in pieces]
        self._leave = Route(back, rank, inner.layout.numel, self.reducer.group, wire)
        self.sent = self._arrive.sent + self._leave.sent
        self._groups: list[dict[str, Any]] = []

    @property
    def engine(self) -> Any:
        return getattr(self.inner, "engine", None)

    @property
    def agreement(self) -> Reducer:
        return self.inner.agreement

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.inner.compute_dtype

    @property
    def transient_bytes(self) -> int:
        """The engine's, and a direction and a gradient in its layout."""
        return self.inner.transient_bytes + 2 * self.inner.layout.numel * self.update.element_size()

    @property
    def loss_scale(self) -> float | None:
        return self.inner.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.inner.loss_scale = value

    # -- state --------------------------------------------------------------------------------------------------

    @property
    def gathers(self) -> bool:
        return self.inner.gathers

    def meet(self, what: str) -> None:
        """State entries are laid out like the engine's shards, so showing them moves what blocks hold."""
        if self.reducer.world_size > 1 and not self.state_outside:
            meet(self.reducer.group, what)
        else:
            self.inner.meet(what)

    def current(self, groups: list[dict[str, Any]]) -> bool:
        return self.inner.current(groups)

    def expose(self, parts: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        # in our dtype on ranks without a part too
        flat = self._leave(local_vector(self.shards, parts, self.layout.numel, self.dtype, self.device))
        return self.inner.expose([flat[s.offset : s.offset + s.numel] for s in self.inner.shards])

    def absorb_rows(
        self, found: Mapping[int, Mapping[int, Tensor]], count: int, dtype: torch.dtype
    ) -> dict[int, dict[int, Tensor]]:
        """What the engine's shards absorb, brought to the owners; NaN where an entry is missing on any rank."""
        shards = self.inner.shards
        missing = [torch.full((shard.numel,), torch.nan) for shard in shards]
        mine = self.inner.absorb_rows(found, count, dtype)
        rows: dict[int, dict[int, Tensor]] = {index: {} for index in range(len(self.shards))}
        for row in range(count):
            parts = (mine[index].get(row, blank) for index, blank in enumerate(missing))
            local = self._arrive(local_vector(shards, parts, self.inner.layout.numel, dtype, self.device))
            for index, shard in enumerate(self.shards):
                rows[index][row] = local[shard.offset : shard.offset + shard.numel]
        return rows

    # -- one training step --------------------------------------------------------------------------------------

    def collect(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        found = self.inner.collect(groups)
        if found is None:
            return None
        self._groups = found
        shards = self.inner.shards
        grads = (None if s.param.grad is None else flat_like(s.param.grad, s.param) for s in shards)
        arrived = self._arrive(local_vector(shards, grads, self.inner.layout.numel, self.dtype, self.device))
        absent = self.inner.without_gradient()
        for block, shard in zip(self.owned, self.shards, strict=True):
            part = arrived[shard.offset : shard.offset + shard.numel].view(shard.param.shape)
            shard.param.grad = None if block.parameter in absent else part
        return found

    def without_gradient(self) -> set[str]:
        absent = self.inner.without_gradient()
        return {block.name for block in self.blocks if block.parameter in absent}

    @torch.no_grad()
    def publish(self) -> None:
        update = self._leave(self.update)
        self.update.zero_()
        for shard in self.shards:
            shard.param.grad = None
        for shard in self.inner.shards:
            if shard.param.grad is None:
                continue
            group, weights = self._groups[shard.group], flat_view(shard.param.detach())
            decay = float(group["lr"]) * float(group["weight_decay"])
            if decay:
                weights.mul_(1.0 - decay)
            weights.add_(update[shard.offset : shard.offset + shard.numel])
        self.inner.publish()

    def weights(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._arrive(self.inner.weights(dtype, device))

    def put_weights(self, local: Tensor) -> None:
        self.inner.put_weights(self._leave(local))

    # -- one curvature refresh ----------------------------------------------------------------------------------

    def evaluation(self) -> AbstractContextManager[None]:
        return self.inner.evaluation()

    def accumulate(self, losses: Sequence[Loss], direction: Tensor | None, eps: float, out: Tensor) -> None:
        flat = torch.zeros(self.inner.layout.numel, dtype=out.dtype, device=out.device)
        self.inner.accumulate(losses, None if direction is None else self._leave(direction), eps, flat)
        out.add_(self._arrive(flat))

    def exact(self, losses: Sequence[Loss], root: Root) -> Exact:
        inner = self.inner.exact(losses, lambda x: x)

        def differentiate(direction: Tensor, out: Tensor) -> None:
            flat = torch.zeros(self.inner.layout.numel, dtype=out.dtype, device=out.device)
            inner.differentiate(self._leave(direction), flat)
            out.add_(self._arrive(flat))

        return Exact(differentiate, root)
