"""``torch.distributed.optim.ZeroRedundancyOptimizer`` around DHO2: whole parameters, each stepped on by one owner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dho2_ds.config import ConfigError
from dho2_ds.hosts.base import Host
from dho2_ds.hosts.full import BUCKET
from dho2_ds.hosts.replicated import ReplicatedHost
from dho2_ds.sharding.layout import Layout
from dho2_ds.sharding.placements import Pieces
from dho2_ds.sharding.reduce import Reducer
from dho2_ds.shards import consecutive, flat_view, identities, iter_params, storage_shape


class ZeroRedundancyHost(ReplicatedHost):
    """The model is replicated (DDP); this rank's optimizer holds some of its parameters, whole, or none.

    Args:
        module: the model behind DDP.
        params: per param group the tensors of this rank's inner optimizer.
        group: the process group of the ZeroRedundancyOptimizer.

    Gradients come from autograd on the unwrapped module, averaged over the group. After the base step the wrapper
    itself broadcasts parameters; perturbed weights are broadcast here, from their owners, in buckets.

    Cost of construction: one all-gather of this rank's parameter names and their groups.
    """

    def __init__(self, module: nn.Module, params: Sequence[Sequence[Tensor]], group: ProcessGroup | None) -> None:
        # The base class cuts parameters into equal slices, so nothing of its constructor fits.
        self.name, self.module = "ZeroRedundancyOptimizer", module
        self.reducer = Reducer(group)
        self._for = identities(chain.from_iterable(params))
        names = {id(p): name for name, p in module.named_parameters()}
        own = [(p, index) for index, group_ in enumerate(params) for p in group_ if p.requires_grad]
        strangers = [p for p, _ in own if id(p) not in names]
        if strangers:
            raise ConfigError("model: must own the optimizer's parameters; attach the model it was built from")
        held: list[Any] = [None] * self.reducer.world_size
        dist.all_gather_object(held, {names[id(p)]: index for p, index in own}, group=group)
        by_name = dict(module.named_parameters())
        self.group_of = {name: index for part in held for name, index in part.items()}
        self.homes = {name: rank for rank, part in enumerate(held) for name in part}
        self.sizes = {name: p.numel() for name, p in by_name.items() if name in self.homes}
        self.shapes = {name: storage_shape(by_name[name]) for name in self.sizes}
        self._names = list(self.sizes)
        self._weights = self._masters = [by_name[name] for name in self._names]
        self._index = {name: i for i, name in enumerate(self._names)}
        self._held: list[list[str]] = [list(part) for part in held]
        self.layouts = [self._layout_of(part) for part in self._held]
        self.shards = consecutive([p for p, _ in own], [index for _, index in own])
        self._origin = [(self._index[names[id(p)]], 0, p.numel()) for p, _ in own]
        self._separate_masters = False
        self._backup: list[Tensor] = []
        self._state = None

    def _layout_of(self, part: Sequence[str]) -> Layout:
        pieces = Pieces()
        for name in part:
            pieces.add(name, [(0, self.sizes[name])])
        return pieces.layout

    def named_keys(self) -> dict[str, Tensor]:
        return Host.named_keys(self)

    @property
    def gathers(self) -> bool:
        """False: a rank's state entries are its own parameters', whole; the wrapper consolidates them."""
        return False

    def expose(self, parts: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        return Host.expose(self, parts)

    def expose_scalars(self, values: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        return Host.expose_scalars(self, values)

    def absorb(self, index: int, value: Tensor) -> Tensor:
        return Host.absorb(self, index, value)

    def current(self, groups: list[dict[str, Any]]) -> bool:
        return self._for == identities(iter_params(groups))

    def collect(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return groups

    def publish(self) -> None:
        """Nothing: the wrapper broadcasts every parameter from its owner right after the step."""

    @torch.no_grad()
    def _gather(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast every parameter from its owner, in buckets. Transient: one bucket. Traffic: n elements."""
        group = self.reducer.group
        for owner, part in enumerate(self._held):
            source = dist.get_global_rank(group, owner) if group is not None else owner
            for bucket in _buckets([flat_view(tensors[self._index[name]].detach()) for name in part]):
                packed = torch.cat(bucket)
                dist.broadcast(packed, source, group=group)
                if owner != self.reducer.rank:
                    for view, values in zip(bucket, torch.split(packed, [v.numel() for v in bucket]), strict=True):
                        view.copy_(values)


def _buckets(views: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, together at most ``BUCKET`` elements (a single larger one stays whole)."""
    bucket: list[Tensor] = []
    for view in views:
        full = sum(v.numel() for v in bucket) + view.numel() > BUCKET
        if bucket and (full or bucket[0].dtype != view.dtype):
            yield bucket
            bucket = []
        bucket.append(view)
    if bucket:
        yield bucket
