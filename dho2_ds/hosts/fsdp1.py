"""FSDP1 (``FullyShardedDataParallel``): flat parameters per wrapped module, shown whole or as 1-D views of a shard.

torch shows neither which elements a rank holds nor whether weights are gathered: the private attributes of
``FlatParameter`` and its handle that say so are read here only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._runtime_utils import _lazy_init

from dho2_ds.config import ConfigError
from dho2_ds.hosts.base import compute_dtype
from dho2_ds.hosts.fsdp import ShardedModelHost, clean_name
from dho2_ds.sharding.layout import Layout, Segment, concatenate
from dho2_ds.sharding.placements import LazyLayouts, Pieces
from dho2_ds.sharding.reduce import Reducer
from dho2_ds.shards import consecutive, identities, iter_params, running_offsets


@dataclass(frozen=True)
class _Unit:
    """One FSDP module's flat parameter: what it holds by name, where each starts, elements per rank."""

    handle: Any
    names: tuple[str, ...]
    numels: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    share: int

    @classmethod
    def of(cls, prefix: str, handle: Any, shards: int) -> _Unit:
        flat = handle.flat_param
        starts = running_offsets(flat._numels_with_padding)
        offsets = tuple(at for at, padding in zip(starts, flat._is_padding_mask, strict=True) if not padding)
        numels = tuple(
            n for n, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True) if not padding
        )
        names = tuple(clean_name(prefix + name) for name in flat._fqns)
        share = flat._sharded_size[0] if shards > 1 else sum(flat._numels_with_padding)
        return cls(handle, names, numels, tuple(tuple(shape) for shape in flat._shapes), offsets, share)

    def run(self, index: int, rank: int) -> tuple[int, int]:
        """(start, length) of what ``rank`` holds of parameter ``index``; length 0 for nothing."""
        at, low = self.offsets[index], rank * self.share
        start = max(at, low) - at
        return start, max(0, min(at + self.numels[index], low + self.share) - at - start)

    def layout(self, rank: int) -> Layout:
        """The whole local shard, padding left out of the segments."""
        segments = []
        for index, name in enumerate(self.names):
            start, length = self.run(index, rank)
            if length:
                segments.append(Segment(name, start, length, self.offsets[index] + start - rank * self.share))
        return Layout(tuple(segments), self.share)


class FSDP1Host(ShardedModelHost):
    """Weights in flat parameters; ``use_orig_params`` True or False, every sharding strategy.

    Args:
        module: the outermost ``FullyShardedDataParallel``.
        params: per param group the optimizer's tensors; those without ``requires_grad`` are left out.

    Raises:
        ConfigError: a trainable parameter of the optimizer is not managed by FSDP, or units use different groups.
    """

    _reuses_grads = True

    def __init__(self, module: nn.Module, params: Sequence[Sequence[Tensor]]) -> None:
        super().__init__("FSDP1", module)
        self._for = identities(chain.from_iterable(params), storage=False)
        self._fsdp = [(name, m) for name, m in module.named_modules() if isinstance(m, FSDP)]
        for m in _outermost(module):
            _lazy_init(m, m)  # what the first forward does; it may move the shards (CPU offload), so before we look
        self._reshard()
        handles = [(name, m, m._handle) for name, m in self._fsdp if m._handle is not None]
        sharded = [handle.uses_sharded_strategy for _, _, handle in handles]
        groups = {id(m.process_group): m.process_group for _, m, _ in handles}
        if len(groups) != 1 or len(set(sharded)) != 1:
            raise ConfigError(
                "FullyShardedDataParallel units: must share one process group and one kind of sharding strategy; wrap "
                "them with the same process_group and sharding_strategy"
            )
        self.reducer = Reducer(next(iter(groups.values())) if sharded[0] else None)
        units = [_Unit.of(f"{name}." if name else "", h, self.reducer.world_size) for name, _, h in handles]
        flat = {id(unit.handle.flat_param): unit for unit in units}
        single: dict[int, tuple[_Unit, int | None]] = {
            id(p): (unit, index) for unit in units for index, p in enumerate(unit.handle.flat_param._params or ())
        }
        names = {id(p): clean_name(name) for name, p in module.named_parameters()}
        managed: list[tuple[Tensor, tuple[_Unit, int | None], int]] = []
        for group_index, group in enumerate(params):
            for p in group:
                if not p.requires_grad:
                    continue
                where = single.get(id(p)) or ((flat[id(p)], None) if id(p) in flat else None)
                if where is None:
                    raise ConfigError(
                        f"parameter {names.get(id(p), '(not of this model)')!r} of the optimizer: must be managed by "
                        "FSDP; wrap the root module too, leave it out of ignored_states, and build the optimizer from "
                        "the wrapped model's parameters"
                    )
                managed.append((p, where, group_index))
        self._held = [where for _, where, _ in managed]
        self.sizes = self._in_model_order(module)
        owned = [
            (unit.names[i], unit.shapes[i], group_index)
            for _, (unit, only), group_index in managed
            for i in (range(len(unit.names)) if only is None else [only])
        ]
        self.shapes = {name: shape for name, shape, _ in owned}
        self.group_of = {name: group_index for name, _, group_index in owned}
        self.layouts = LazyLayouts(self.reducer.world_size, self._layout_of)
        # As with torch's optimizers a parameter has no state on a rank that holds nothing of it. A rank that holds
        # nothing at all keeps one empty shard, which says where it computes and in which precision.
        mine = [entry for entry in managed if entry[0].numel()] or managed[:1]
        self._params = [p for p, _, _ in mine]
        self.shards = consecutive([p.detach() for p in self._params], [index for _, _, index in mine])
        if sum(shard.numel for shard in self.shards) != self.layout.numel:
            raise RuntimeError("FSDP1 shards do not add up to their layout; this torch release lays them out otherwise")
        self._storage = [(unit.handle.flat_param, unit.handle.flat_param._local_shard.data_ptr()) for unit in units]

    def _in_model_order(self, module: nn.Module) -> dict[str, int]:
        """{name: numel} of what the optimizer trains, in the order of the unwrapped model's parameters."""
        found: dict[int, list[tuple[int, str, int]]] = {}
        for unit, only in self._held:
            infos = unit.handle.flat_param._param_infos
            for index in range(len(unit.names)) if only is None else [only]:
                found.setdefault(id(infos[index].module), []).append((index, unit.names[index], unit.numels[index]))
        return {name: numel for m in module.modules() for _, name, numel in sorted(found.get(id(m), ()))}

    def _layout_of(self, rank: int) -> Layout:
        parts = []
        for unit, index in self._held:
            if index is None:
                parts.append(unit.layout(rank))
            else:
                pieces = Pieces()
                pieces.add(unit.names[index], [unit.run(index, rank)])
                parts.append(pieces.layout)
        return concatenate(parts)

    # -- state ----------------------------------------------------------------------------------------------------

    def keys(self) -> list[Tensor]:
        return list(self._params)

    def expose(self, parts: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Shaped like this rank's shards, as ``FSDP.optim_state_dict`` wants."""
        return [
            (p, part.view(shard.param.shape)) for shard, p, part in zip(self.shards, self._params, parts, strict=True)
        ]

    def current(self, groups: list[dict[str, Any]]) -> bool:
        if self._for != identities(iter_params(groups), storage=False):
            return False
        return all(flat._local_shard.data_ptr() == pointer for flat, pointer in self._storage)

    # -- evaluation -----------------------------------------------------------------------------------------------

    @property
    def compute_dtype(self) -> torch.dtype:
        low = [m.mixed_precision.param_dtype for _, m in self._fsdp]
        return compute_dtype([*self._params, *(torch.empty(0, dtype=dtype) for dtype in low if dtype is not None)])

    def _unreduced(self) -> bool:
        return any(
            p.grad is not None and p.grad.shape != shard.param.shape
            for p, shard in zip(self._params, self.shards, strict=True)
        )

    def _sync_switches(self) -> Iterator[tuple[Any, str]]:
        for _, m in self._fsdp:
            yield m, "_sync_gradients"

    def _reshard(self) -> None:
        """torch has no public call for this; the three steps are those of FSDP's own post-backward."""
        for _, m in self._fsdp:
            handle = m._handle
            if handle is None or not handle.uses_sharded_strategy:
                continue
            if not (handle.is_sharded(handle.flat_param) and handle.needs_unshard()):
                handle.reshard(True)
                handle.post_reshard()  # type: ignore[no-untyped-call]
                handle._prefetched = False

    def _recover(self) -> None:
        for _, m in self._fsdp:
            m.training_state = TrainingState.IDLE
            if m._handle is not None:
                m._handle._training_state = HandleTrainingState.IDLE

    def _local_grad(self, index: int) -> Tensor | None:
        grad, shard = self._params[index].grad, self.shards[index]
        if grad is not None and grad.shape != shard.param.shape:
            raise RuntimeError(
                f"gradient of shape {tuple(grad.shape)} for a shard of shape {tuple(shard.param.shape)}: must be "
                "reduced; run the last backward before the step outside no_sync()"
            )
        return grad


def _outermost(module: nn.Module) -> Iterator[FSDP]:
    """FSDP modules that no other FSDP module contains."""
    if isinstance(module, FSDP):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)
