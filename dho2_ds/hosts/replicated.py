"""Hosts that replicate the weights: one process, DistributedDataParallel, DeepSpeed stage 0.

Everything of ours is sharded all the same, in the manner of ZeRO-1: each rank steps on its flat slice of the weights
(base state, eigenbasis and Lanczos vectors are n/P), then the slices are all-gathered straight into the weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dho2_ds.curvature.hvp import Exact, Root
from dho2_ds.hosts import full
from dho2_ds.hosts.base import Host, Loss, ModelState, compute_dtype
from dho2_ds.sharding.layout import flat_slices, replicated
from dho2_ds.sharding.redistribute import redistribute
from dho2_ds.sharding.reduce import Reducer, meet
from dho2_ds.shards import (
    Shard,
    flat_like,
    flat_view,
    identities,
    iter_params,
    local_vector,
    put_displaced,
    storage_shape,
)

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 renamed it and warns about the old name."""


class ReplicatedHost(Host):
    """Weights whole on every rank.

    Args:
        name: for messages.
        module: the model to evaluate curvature losses on (for DDP the wrapped module, so that DDP's hooks stay out).
        masters: per param group the tensors the optimizer updates.
        weights: per param group the module's parameters that belong to them; the same tensors, or low-precision
            copies (DeepSpeed stage 0 in bf16 keeps float32 masters and copies them back itself).
        group: the data-parallel group; None for one process.
    """

    _reentrant = False
    """True once activation checkpointing was seen that needs whole backward passes."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        masters: Sequence[Sequence[Tensor]],
        weights: Sequence[Sequence[Tensor]],
        group: ProcessGroup | None,
    ) -> None:
        self.name, self.module = name, module
        self.reducer = Reducer(group)
        self._for = identities(p for own in masters for p in own)
        named = {id(p): key for key, p in module.named_parameters()}
        self._masters: list[Tensor] = []
        self._weights: list[Tensor] = []
        owner: list[int] = []
        for index, (own, seen) in enumerate(zip(masters, weights, strict=True)):
            for master, weight in zip(own, seen, strict=True):
                if weight.requires_grad:
                    self._masters.append(master)
                    self._weights.append(weight)
                    owner.append(index)
        self._names = [named.get(id(w), f"parameter {i}") for i, w in enumerate(self._weights)]
        self.sizes = {n: w.numel() for n, w in zip(self._names, self._weights, strict=True)}
        self.shapes = {n: storage_shape(m) for n, m in zip(self._names, self._masters, strict=True)}
        self.group_of = dict(zip(self._names, owner, strict=True))
        self.layouts = flat_slices(self.sizes, self.reducer.world_size)
        self._index = {n: i for i, n in enumerate(self._names)}
        self.shards = []
        self._origin: list[tuple[int, int, int]] = []
        for segment in self.layout.segments:
            index = self._index[segment.name]
            whole = segment.length == self._masters[index].numel() and self.reducer.world_size == 1
            stop = segment.start + segment.length
            param = self._masters[index] if whole else flat_view(self._masters[index].detach())[segment.start : stop]
            self.shards.append(Shard(param, owner[index], segment.offset))
            self._origin.append((index, segment.start, stop))
        self._separate_masters = any(m is not w for m, w in zip(self._masters, self._weights, strict=True))
        self._backup: list[Tensor] = []
        self._state: ModelState | None = None

    def keys(self) -> list[Tensor]:
        return [self._masters[index] for index, _, _ in self._origin]

    def named_keys(self) -> dict[str, Tensor]:
        return dict(zip(self._names, self._masters, strict=True))

    @property
    def gathers(self) -> bool:
        return self.reducer.world_size > 1

    def expose(self, parts: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Whole entries on every rank: one all-to-all of n elements; transient and result n on each."""
        if self.reducer.world_size == 1:
            return super().expose(parts)
        dtype, device = self._common_dtype(parts), self._masters[0].device
        local = local_vector(self.shards, parts, self.layout.numel, dtype, device)
        whole = replicated(self.sizes, self.reducer.world_size)
        flat = redistribute(local, self.layouts, whole, self.reducer.group)
        pieces = torch.split(flat, [p.numel() for p in self._masters])
        return [
            (p, piece.as_strided(p.shape, p.stride(), piece.storage_offset()))
            for p, piece in zip(self._masters, pieces, strict=True)
        ]

    def expose_scalars(self, values: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        if self.reducer.world_size == 1:
            return super().expose_scalars(values)
        known = torch.zeros(len(self._masters), dtype=torch.float64, device=self.reducer.device)
        for (index, _, _), value in zip(self._origin, values, strict=True):
            known[index] = float(value)
        dist.all_reduce(known, dist.ReduceOp.MAX, group=self.reducer.group)
        return [(p, value.float()) for p, value in zip(self._masters, known.cpu(), strict=True)]

    def meet(self, what: str) -> None:
        if self.gathers:
            meet(self.reducer.group, what)

    def _common_dtype(self, parts: Sequence[Tensor]) -> torch.dtype:
        """The dtype of the ranks' parts, also on a rank that has none."""
        dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
        mine = dtypes.index(parts[0].dtype) + 1 if parts else 0
        code = torch.tensor(mine, device=self.reducer.device)
        dist.all_reduce(code, dist.ReduceOp.MAX, group=self.reducer.group)
        return dtypes[max(int(code), 1) - 1]

    def absorb(self, index: int, value: Tensor) -> Tensor:
        key, start, stop = self._origin[index]
        master = self._masters[key]
        if value.shape == self.shards[index].param.shape:
            return value
        if value.shape != master.shape:
            raise ValueError(
                f"state of shape {tuple(value.shape)}: must be {tuple(master.shape)} (whole) or "
                f"({stop - start},) (this rank's slice)"
            )
        return flat_like(value, master)[start:stop].clone()

    def current(self, groups: list[dict[str, Any]]) -> bool:
        return self._for == identities(iter_params(groups))

    @property
    def compute_dtype(self) -> torch.dtype:
        return compute_dtype(self._weights)

    def collect(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if self.reducer.world_size > 1:
            for shard, (index, start, stop) in zip(self.shards, self._origin, strict=True):
                grad = self._masters[index].grad
                shard.param.grad = None if grad is None else flat_like(grad, self._masters[index])[start:stop]
        return groups

    def without_gradient(self) -> set[str]:
        return {name for name, p in zip(self._names, self._masters, strict=True) if p.grad is None}

    def publish(self) -> None:
        if self.reducer.world_size > 1:
            for shard in self.shards:
                shard.param.grad = None
            self._gather(self._masters)

    @torch.no_grad()
    def put_weights(self, local: Tensor) -> None:
        super().put_weights(local)
        for i, shard in enumerate(self.shards):
            self._slice(self._weights, i).copy_(flat_view(shard.param.detach()))
        if self.reducer.world_size > 1:
            self._gather(self._weights)

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        self._state = ModelState(self.module)
        self._backup = [self._slice(self._weights, i).clone() for i in range(len(self.shards))]
        try:
            yield
        finally:
            self._write(None, 0.0)
            self._state.restore()
            self._state, self._backup = None, []

    def accumulate(self, losses: Sequence[Loss], direction: Tensor | None, eps: float, out: Tensor) -> None:
        assert self._state is not None
        self._write(direction, eps)
        self._state.rewind()
        error: Exception | None = None
        grads: list[Tensor | None] = []
        try:
            grads = self._gradients(losses)
        except Exception as caught:  # raised again, on every rank together, by the reduction
            error, grads = caught, [None] * len(self._weights)
        full.reduce_into(grads, self._weights, self._names, self.layout, self.reducer, out, error)

    def _gradients(self, losses: Sequence[Loss]) -> list[Tensor | None]:
        """Local gradients of the mean of ``losses`` at the present weights; one more forward if found reentrant."""
        assert self._state is not None
        if not self._reentrant:
            with contextlib.suppress(full.ReentrantCheckpoint):
                return full.mean_gradients(losses, self.module, self._weights)
            self._reentrant = True
            self._state.rewind()
        return full.accumulated_gradients(losses, self.module, self._weights)

    def exact(self, losses: Sequence[Loss], root: Root) -> Exact:
        assert self._state is not None
        self._state.rewind()
        return full.exact_operator(
            losses, self.module, self._weights, self._names, self.sizes, self.layouts, self.reducer, root
        )

    @torch.no_grad()
    def _write(self, direction: Tensor | None, eps: float) -> None:
        """Put ``w + eps * direction`` (None: the saved w) into the model on every rank."""
        for i, shard in enumerate(self.shards):
            target = self._slice(self._weights, i)
            if direction is None:
                target.copy_(self._backup[i])
                continue
            source = flat_view(shard.param.detach()) if self._separate_masters else self._backup[i]
            step = direction[shard.offset : shard.offset + shard.numel]
            put_displaced(target, source, step, eps)
        if self.reducer.world_size > 1:
            self._gather(self._weights)

    def _slice(self, tensors: Sequence[Tensor], i: int) -> Tensor:
        index, start, stop = self._origin[i]
        return flat_view(tensors[index].detach())[start:stop]

    @torch.no_grad()
    def _gather(self, tensors: Sequence[Tensor]) -> None:
        """All-gather every rank's slice into ``tensors`` on all ranks, bucket by bucket.

        Transient: one bucket of at most ``full.BUCKET`` elements (all ranks' parts together). Traffic: n elements.
        """
        world, rank = self.reducer.world_size, self.reducer.rank
        slice_numel = self.layouts[0].numel
        part = max(1, full.BUCKET // world)
        dtype = max((t.dtype for t in tensors), key=lambda d: torch.finfo(d).bits)
        for begin in range(0, slice_numel, part):
            length = min(part, slice_numel - begin)
            send = torch.zeros(length, dtype=dtype, device=tensors[0].device)
            for view, at in self._overlaps(tensors, rank, begin, length):
                send[at : at + view.numel()].copy_(view)
            received = torch.empty(world * length, dtype=dtype, device=send.device)
            _all_gather(received, send, group=self.reducer.group)
            for other in range(world):
                if other == rank:
                    continue
                for view, at in self._overlaps(tensors, other, begin, length):
                    offset = other * length + at
                    view.copy_(received[offset : offset + view.numel()])

    def _overlaps(self, tensors: Sequence[Tensor], rank: int, begin: int, length: int) -> Iterator[tuple[Tensor, int]]:
        """Views of the pieces of ``rank``'s slice in ``[begin, begin + length)`` and where they sit in it."""
        for segment in self.layouts[rank].segments:
            low = max(segment.offset, begin)
            high = min(segment.offset + segment.length, begin + length)
            if low < high:
                start = segment.start + low - segment.offset
                flat = flat_view(tensors[self._index[segment.name]].detach())
                yield flat[start : start + high - low], low - begin
