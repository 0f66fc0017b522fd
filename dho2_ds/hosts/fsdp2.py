"""FSDP2 (``fully_shard``): parameters are DTensors; HSDP, tensor parallelism, offload and mixed precision included."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dho2_ds.config import ConfigError
from dho2_ds.hosts.base import compute_dtype
from dho2_ds.hosts.fsdp import ShardedModelHost, clean_name
from dho2_ds.sharding.layout import Layout
from dho2_ds.sharding.placements import LazyLayouts, Pieces, contiguous_runs, held_indices, sharded_dims
from dho2_ds.sharding.reduce import Reducer
from dho2_ds.shards import consecutive, identities, iter_params


class FSDP2Host(ShardedModelHost):
    """Weights as DTensors on one or more device meshes.

    Args:
        module: the root that the training loop calls, with ``fully_shard`` applied to it.
        params: per param group the optimizer's tensors; those without ``requires_grad`` are left out.

    The reducer sums over exactly the mesh dimensions on which every parameter is cut (HSDP: not over replicas). Where
    parameters differ in that (tensor parallelism: norms are whole on every rank of the tensor-parallel group), it sums
    over all ranks of the mesh and :meth:`dual` divides by the number of copies. Empty shards are kept, so that state
    has the same keys on every rank.

    Cost of construction: one all-gather of a few integers per mesh; a collective over all ranks.

    Raises:
        ConfigError: a trainable parameter of the optimizer is not a DTensor.
    """

    def __init__(self, module: nn.Module, params: Sequence[Sequence[Tensor]]) -> None:
        super().__init__("FSDP2", module)
        self._for = identities(chain.from_iterable(params), storage=False)
        names = {id(p): clean_name(name) for name, p in module.named_parameters()}
        pairs = [(p, i) for i, group in enumerate(params) for p in group if p.requires_grad]
        self._params: list[DTensor] = []
        for p, _ in pairs:
            if not isinstance(p, DTensor):
                raise ConfigError(
                    f"parameter {names.get(id(p), '(not of this model)')!r} of the optimizer: must be sharded like the "
                    "others; apply fully_shard to the root module too, before the optimizer is built"
                )
            self._params.append(p)
        self._names = [names.get(id(p), f"parameter {i}") for i, p in enumerate(self._params)]
        largest = max((p.device_mesh.size() for p in self._params), default=dist.get_world_size())
        if largest != dist.get_world_size():
            raise ConfigError(
                f"device mesh of {largest} ranks: must be all {dist.get_world_size()}; decisions are taken by all, "
                "so pipeline stages and models on other ranks are not supported"
            )
        known = dict(zip(self._names, (p.numel() for p in self._params), strict=True))
        self.sizes = {name: known[name] for name in names.values() if name in known} | known
        self.shapes = {name: tuple(p.shape) for name, p in zip(self._names, self._params, strict=True)}
        self.group_of = {name: index for name, (_, index) in zip(self._names, pairs, strict=True)}
        locals_ = [p.to_local().detach() for p in self._params]
        self.shards = consecutive(locals_, [index for _, index in pairs])
        self._pointers = [local.data_ptr() for local in locals_]
        self.reducer = Reducer(_group_of(self._params))
        replicas = dist.get_world_size() // self.reducer.world_size
        if replicas > 1:
            self.name = f"FSDP2 ({replicas} replicas)"
        self._coordinates = _gather_coordinates(self._params, self.reducer)
        self.layouts = LazyLayouts(self.reducer.world_size, self._layout_of)
        for p, local, name in zip(self._params, locals_, self._names, strict=True):
            expected = [len(held) for held in self._held(p, self.reducer.rank)]
            if expected != list(local.shape) or not local.is_contiguous():
                raise ConfigError(
                    f"parameter {name!r} with placements {p.placements}: must be a contiguous shard of shape "
                    f"{tuple(expected)}, is {tuple(local.shape)}; shard it with fully_shard or parallelize_module"
                )
        self._copies = [
            (shard.offset, shard.offset + shard.numel, copies)
            for shard, p in zip(self.shards, self._params, strict=True)
            if (copies := self._count_copies(p)) > 1 and shard.numel
        ]

    # -- layout ---------------------------------------------------------------------------------------------------

    def _held(self, param: DTensor, rank: int) -> list[Tensor]:
        mesh = param.device_mesh
        return held_indices(param.shape, mesh.shape, param.placements, self._coordinates[rank][_key(param)])

    def _layout_of(self, rank: int) -> Layout:
        pieces = Pieces()
        for name, param in zip(self._names, self._params, strict=True):
            pieces.add(name, contiguous_runs(param.shape, self._held(param, rank)))
        return pieces.layout

    def _count_copies(self, param: DTensor) -> int:
        """Ranks of the group that hold the same elements of ``param`` as this one."""
        cut = sharded_dims(param.placements)
        at = [tuple(coordinates[_key(param)][dim] for dim in cut) for coordinates in self._coordinates]
        return at.count(at[self.reducer.rank])

    def dual(self, x: Tensor, start: int = 0) -> Tensor:
        result = x
        for low, high, copies in self._copies:
            low, high = max(low - start, 0), min(high - start, len(x))
            if low < high:
                result = x.clone() if result is x else result
                result[low:high].div_(copies)
        return result

    def without_gradient(self) -> set[str]:
        return {name for name, p in zip(self._names, self._params, strict=True) if p.grad is None}

    # -- state ----------------------------------------------------------------------------------------------------

    def keys(self) -> list[Tensor]:
        return list(self._params)

    def expose(self, parts: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """DTensors placed like the parameters, views of ``parts``; no communication. Empty shards are included."""
        return [
            (p, _like(part.view(shard.param.shape), p))
            for shard, p, part in zip(self.shards, self._params, parts, strict=True)
        ]

    def absorb(self, index: int, value: Tensor) -> Tensor:
        """Takes a DTensor of the parameter's global shape (redistributed if placed otherwise) or a local tensor."""
        p, shard = self._params[index], self.shards[index]
        if isinstance(value, DTensor) and value.shape == p.shape:
            if value.device_mesh != p.device_mesh or value.placements != p.placements:
                value = value.redistribute(p.device_mesh, p.placements)
            return value.to_local()
        if not isinstance(value, DTensor) and value.shape == shard.param.shape:
            return value
        raise ValueError(
            f"state of {self._names[index]!r} of shape {tuple(value.shape)}: must be a DTensor of shape "
            f"{tuple(p.shape)} or this rank's share {tuple(shard.param.shape)}"
        )

    def current(self, groups: list[dict[str, Any]]) -> bool:
        if self._for != identities(iter_params(groups), storage=False):
            return False
        return self._pointers == [_local(p).data_ptr() for p in self._params]

    # -- evaluation -----------------------------------------------------------------------------------------------

    @property
    def compute_dtype(self) -> torch.dtype:
        policies = [getattr(state, "_mp_policy", None) for state in self._fsdp_states()]
        low = [policy.param_dtype for policy in policies if policy is not None and policy.param_dtype is not None]
        return compute_dtype([*self._params, *(torch.empty(0, dtype=dtype) for dtype in low)])

    def _fsdp_states(self) -> Iterator[Any]:
        """The states behind ``FSDPModule``. Private: torch shows neither the precision policy nor pending gradients."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                yield module._get_fsdp_state()

    def _fsdp_param_groups(self) -> Iterator[Any]:
        for state in self._fsdp_states():
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # older torch: at most one group per state
                groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
            yield from groups

    def _unreduced(self) -> bool:
        """A gradient waits in the gathered parameter, or beside it when reduced in another precision; under HSDP also
        in its group, reduced over the shards only."""
        return any(
            getattr(group, "_partial_reduce_output", None) is not None
            or any(
                getattr(p, "unsharded_accumulated_grad", None) is not None
                or getattr(getattr(p, "_unsharded_param", None), "grad", None) is not None
                for p in group.fsdp_params
            )
            for group in self._fsdp_param_groups()
        )

    def _sync_switches(self) -> Iterator[tuple[Any, str]]:
        for group in self._fsdp_param_groups():
            yield group, "reduce_grads"
            yield group, "all_reduce_grads"

    def _reshard(self) -> None:
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _recover(self) -> None:
        """torch >= 2.13 can reset a broken-off pass; older releases recover at the next complete one."""
        reset = getattr(self.module, "reset_iter_state", None)
        if reset is not None:
            reset()

    def _local_grad(self, index: int) -> Tensor | None:
        grad = self._params[index].grad
        return None if grad is None else _local(grad)


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    local: Tensor = tensor.to_local()
    return local.detach()


def _like(local: Tensor, param: DTensor) -> DTensor:
    """A local tensor as a DTensor placed like ``param``; shape and stride are needed where shards are uneven."""
    return DTensor.from_local(
        local,
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )


def _key(param: DTensor) -> tuple[Any, ...]:
    """What tells the meshes of a model apart, the same on every rank: on another rank, a submesh has other members."""
    mesh = param.device_mesh
    return tuple(mesh.shape), mesh.mesh_dim_names


def _group_of(params: Sequence[DTensor]) -> dist.ProcessGroup | None:
    """The group over which local parts are summed; None when nothing is cut."""
    kinds = {(p.device_mesh, sharded_dims(p.placements)) for p in params}
    if len(kinds) == 1:
        mesh, dims = kinds.pop()
        if not dims:
            return None
        if len(dims) == 1:
            return mesh.get_group(dims[0])
        if len(dims) < mesh.ndim and mesh.mesh_dim_names is not None:
            flat = mesh[tuple(mesh.mesh_dim_names[dim] for dim in dims)]._flatten()
            return flat.get_group()
    else:
        mesh = max((mesh for mesh, _ in kinds), key=lambda mesh: mesh.size())
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


def _gather_coordinates(params: Sequence[DTensor], reducer: Reducer) -> list[dict[tuple[Any, ...], tuple[int, ...]]]:
    """Per rank of the group its coordinate in each mesh."""
    own: dict[tuple[Any, ...], tuple[int, ...]] = {}
    for p in params:
        if _key(p) not in own:
            own[_key(p)] = tuple(p.device_mesh.get_coordinate() or ())
    if reducer.world_size == 1:
        return [own]
    found: list[Any] = [None] * reducer.world_size
    dist.all_gather_object(found, own, group=reducer.group)
    return found
