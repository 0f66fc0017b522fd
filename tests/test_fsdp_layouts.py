"""Which element is where: every local element of every FSDP sharding against a function of its global index."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from dho2_ds.hosts.base import Host
from dho2_ds.hosts.detect import make_host
from dho2_ds.sharding.layout import check_cover
from dho2_ds.sharding.placements import contiguous_runs, held_indices
from tests import fsdp_engines
from tests.distributed import run_ranks

PLACEMENTS: list[tuple[Any, ...]] = [
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Replicate(), Shard(0)),
    (Shard(2), Replicate()),
    (Shard(1), Shard(1)),
    (Replicate(), Replicate()),
]
SHAPES = [(8, 4, 4), (5, 3, 2), (1, 7, 3), (3, 1, 1)]


# -- arithmetic -------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_runs_are_the_product_of_the_held_indices(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    held = []
    for size in shape:
        low = data.draw(st.integers(0, size))
        held.append(torch.arange(low, data.draw(st.integers(low, size))))
    if data.draw(st.booleans()) and len(held[0]) > 2:
        held[0] = held[0][::2]
    elements = torch.arange(math.prod(shape)).view(shape)
    for dim, indices in enumerate(held):
        elements = elements.index_select(dim, indices)
    runs = list(contiguous_runs(shape, held))
    found = [start + i for start, length in runs for i in range(length)]
    assert found == elements.reshape(-1).tolist()
    assert all(start + length != after for (start, length), (after, _) in zip(runs, runs[1:], strict=False))


def test_a_shard_of_rows_is_one_run() -> None:
    assert list(contiguous_runs((6, 4), [torch.arange(2, 5), torch.arange(4)])) == [(8, 12)]


# -- real shards ------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Uneven sizes, sizes below the world's, a one-element, a frozen, a tied and a three-dimensional parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 7), nn.Linear(7, 2)])
        self.cube = nn.Parameter(torch.zeros(5, 2, 3))
        self.gain = nn.Parameter(torch.zeros(1))
        self.norm = nn.LayerNorm(3)
        self.twin = nn.Linear(3, 3, bias=False)
        self.other = nn.Linear(3, 3, bias=False)
        self.other.weight = self.twin.weight
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)


def even(model: nn.Module) -> nn.Module:
    """Sizes that a second dimension can be cut at 2 and 4 ranks."""
    assert isinstance(model, Mixed)
    model.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)])
    del model.cube, model.twin, model.other
    return model


def number(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Give every element of every trainable parameter its own number; {name: (first, numel)}."""
    table, first = {}, 0
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.copy_(torch.arange(first, first + p.numel()).view(p.shape))
                table[name] = (first, p.numel())
                first += p.numel()
    return table


def check_host(host: Host, table: dict[str, tuple[int, int]], rank: int) -> None:
    """Every local element carries the number that the layout gives it; layouts agree over ranks and cover all."""
    assert host.sizes == {name: numel for name, (_, numel) in table.items()}
    assert list(host.sizes) == list(table), f"{host.name}: not in model order"
    local = torch.full((host.layout.numel,), -1.0)
    for shard in host.shards:
        local[shard.offset : shard.offset + shard.numel] = shard.param.reshape(-1)
    wanted = torch.full((host.layout.numel,), 0.0)
    for s in host.layout.segments:
        wanted[s.offset : s.offset + s.length] = torch.arange(s.length) + table[s.name][0] + s.start
    host.layout.zero_padding_(local)
    assert torch.equal(local, wanted), (local, wanted)
    seen: list[Any] = [None] * host.reducer.world_size
    if host.reducer.world_size > 1:
        dist.all_gather_object(seen, host.layout, group=host.reducer.group)
        assert list(host.layouts) == seen
    # The norm of all numbers, each counted once, whatever is replicated.
    count = sum(host.sizes.values())
    square = host.reducer.sum_(torch.dot(local.double(), host.dual(local).double()).reshape(1))
    assert float(square) == sum(i * i for i in range(count))
    middle = host.layout.numel // 3
    assert torch.equal(host.dual(local)[middle:], host.dual(local[middle:].clone(), middle))
    parts = [local[shard.offset : shard.offset + shard.numel] for shard in host.shards]
    for (key, value), shard in zip(host.expose(parts), host.shards, strict=True):
        part = value.to_local() if isinstance(value, DTensor) else value
        assert torch.equal(part.reshape(-1), local[shard.offset : shard.offset + shard.numel])
        assert value.shape == key.shape
        if isinstance(value, DTensor):
            assert isinstance(key, DTensor)
            assert torch.equal(value.full_tensor(), key.full_tensor().detach())
    for index, (_, value) in enumerate(host.expose(parts)):
        assert torch.equal(host.absorb(index, value), host.shards[index].param)
        with pytest.raises(ValueError, match="must be"):
            host.absorb(index, torch.zeros(3, 3, 3))
    if host.dual(local) is local:  # nothing is held twice
        check_cover(host.layouts, host.sizes)


def build(kind: str, rank: int) -> tuple[Host, dict[str, tuple[int, int]]]:
    engine = kind.partition(":")[0]
    model: nn.Module = Mixed()
    if "shard1" in kind or engine == "tp" or "flat" in kind:
        model = even(Mixed())
    if "flat" in kind or engine == "fsdp1":
        del model.frozen  # a flat parameter is trained as a whole
    table = number(model)
    module, _ = fsdp_engines.wrapped(kind, model)
    params = list(module.parameters())
    half = len(params) // 2
    groups = [{"params": params[half:]}, {"params": params[:half]}]  # group order is not model order
    return make_host(module, groups), table


def layout_worker(rank: int, world: int, kinds: list[str]) -> dict[str, str]:
    for kind in kinds:
        host, table = build(kind, rank)
        if "flat" in kind:
            assert any(layout.padding() for layout in host.layouts) or world == 2
        check_host(host, table, rank)
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        for placements in PLACEMENTS:
            for shape in SHAPES:
                check_placement(shape, mesh, placements)
        check_placement((8, 4), mesh, (_StridedShard(0, split_factor=2), Shard(0)))
        check_placement((4, 8), mesh, (_StridedShard(1, split_factor=2), Shard(1)))
    return {}


def check_placement(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    local = distribute_tensor(numbers, mesh, placements).to_local().reshape(-1)
    held = held_indices(shape, mesh.shape, placements, mesh.get_coordinate())
    found = [start + i for start, length in contiguous_runs(shape, held) for i in range(length)]
    assert found == local.tolist(), (shape, placements)


KINDS = {
    2: ["fsdp2", "fsdp2:shard1", "fsdp1:orig", "fsdp1:flat", "fsdp1:no_shard"],
    3: ["fsdp2", "fsdp1:orig", "fsdp1:flat"],
    4: ["fsdp2", "hsdp", "tp", "fsdp1:hybrid"],
}


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)])
def test_every_element_is_where_the_layout_says(world: int) -> None:
    run_ranks(world, layout_worker, KINDS[world], timeout=170)
