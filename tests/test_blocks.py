"""Cutting into blocks, giving them to ranks, and the way between flat shards and blocks, against plain slicing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dho2_ds.sharding import flat_slices, parameter_chunks, replicated
from dho2_ds.sharding.blocks import TOLERANCE, Block, assign, cut, imbalance, owner_layouts
from dho2_ds.sharding.layout import Layout, check_cover
from dho2_ds.sharding.route import Piece, to_blocks

Shapes = dict[str, tuple[int, ...]]
shapes_of_models = st.lists(
    st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple) | st.just((0, 3)), min_size=1, max_size=6
).map(lambda shapes: {f"p{i}": shape for i, shape in enumerate(shapes)})


def numels(shapes: Shapes) -> dict[str, int]:
    return {name: torch.Size(shape).numel() for name, shape in shapes.items()}


def carry(pieces: list[Piece], buffers: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """All ranks' pieces element by element."""
    out = [torch.zeros(length) for length in lengths]
    for p in pieces:
        for row in range(p.rows):
            for i in range(p.length):
                target = out[p.target]
                at = p.target_offset + row * p.target_stride + i
                assert target[at] == 0, "written twice"
                target[at] = buffers[p.source][p.source_offset + row * p.source_stride + i]
    return out


def fill(layouts: list[Layout], values: dict[str, Tensor]) -> list[Tensor]:
    buffers = [torch.zeros(layout.numel) for layout in layouts]
    for buffer, layout in zip(buffers, layouts, strict=True):
        for s in layout.segments:
            buffer[s.offset : s.offset + s.length] = values[s.name].reshape(-1)[s.start : s.start + s.length]
    return buffers


def block_of(value: Tensor, block: Block) -> Tensor:
    matrix = value.reshape(-1, block.width)
    return matrix[block.row : block.row + block.rows, block.column : block.column + block.columns]


@settings(max_examples=120, deadline=None)
@given(shapes_of_models, st.integers(1, 5), st.integers(1, 5), st.integers(2, 8))
def test_every_element_is_in_one_block_on_one_rank(
    shapes: Shapes, world: int, max_block: int, max_rotated: int
) -> None:
    blocks = cut(shapes, max_block=max_block, max_rotated=max_rotated)
    counts = {name: torch.zeros(size) for name, size in numels(shapes).items()}
    for block in blocks:
        block_of(counts[block.parameter], block).add_(1)
        if not block.is_vector:
            assert max(block.rows, block.columns) <= max_block
            assert min(shapes[block.parameter][0], block.width) > 1
        assert not (block.left and shapes[block.parameter][0] > max_rotated)
        assert not (block.right and block.width > max_rotated)
    assert all(bool((count == 1).all()) for count in counts.values())
    assert len({block.name for block in blocks}) == len(blocks)
    owners = assign(blocks, world, 12)
    assert set(owners) <= set(range(world))
    check_cover(owner_layouts(blocks, owners, world), {block.name: block.numel for block in blocks})
    if max_block > 9:
        assert len(blocks) == len(shapes)


@settings(max_examples=120, deadline=None)
@given(shapes_of_models, st.integers(1, 4), st.integers(1, 4), st.integers(2, 9), st.integers(0, 2))
def test_way_to_blocks_and_back(shapes: Shapes, world: int, max_block: int, max_rotated: int, style: int) -> None:
    sizes = numels(shapes)
    flat = [flat_slices(sizes, world, alignment=2), parameter_chunks(sizes, world), replicated(sizes, 1)][style]
    world = len(flat)
    blocks = cut(shapes, max_block=max_block, max_rotated=max_rotated)
    owners = assign(blocks, world, 3)
    owned = owner_layouts(blocks, owners, world)
    begin, values = 1.0, {}
    for name, size in sizes.items():
        values[name] = torch.arange(begin, begin + size)
        begin += size
    pieces = to_blocks(flat, blocks, owners, owned)
    there = carry(pieces, fill(flat, values), [layout.numel for layout in owned])
    for got, want in zip(
        there, fill(owned, {b.name: block_of(values[b.parameter], b) for b in blocks if b.numel}), strict=True
    ):
        assert torch.equal(got, want)
    back = carry([p.reverse() for p in pieces], there, [layout.numel for layout in flat])
    for got, want in zip(back, fill(flat, values), strict=True):
        assert torch.equal(got, want)


def transformer(layers: int, width: int, vocabulary: int) -> Shapes:
    shapes: Shapes = {"embedding": (vocabulary, width), "positions": (1024, width)}
    for i in range(layers):
        shapes |= {f"{i}.norm": (width,), f"{i}.qkv": (3 * width, width), f"{i}.out": (width, width)}
        shapes |= {f"{i}.up": (4 * width, width), f"{i}.down": (width, 4 * width), f"{i}.bias": (4 * width,)}
    return shapes


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("sizes", [(12, 768, 50257), (24, 1024, 50257), (48, 1600, 50257), (8, 512, 32000)])
def test_real_models_are_balanced(sizes: tuple[int, int, int], world: int) -> None:
    blocks = cut(transformer(*sizes), max_block=2048, max_rotated=10000)
    memory, work = imbalance(blocks, assign(blocks, world, 12), world, 12)
    assert memory <= TOLERANCE and work <= 1.15, (memory, work)


def test_giant_embedding_beside_small_layers() -> None:
    """The vocabulary side is not rotated and is cut, so that no rank has the whole embedding."""
    shapes: Shapes = {"embedding": (60000, 64), **{f"layer{i}": (64, 64) for i in range(4)}, "bias": (64,)}
    blocks = cut(shapes, max_block=2048, max_rotated=10000)
    rows = [block for block in blocks if block.parameter == "embedding"]
    assert len(rows) == 30 and all(block.right and not block.left for block in rows)
    assert imbalance(blocks, assign(blocks, 4, 12), 4, 12)[0] <= TOLERANCE


def test_convolutions_are_out_by_rest() -> None:
    (block,) = cut({"conv": (8, 3, 5, 5)}, max_block=2048, max_rotated=10000)
    assert (block.rows, block.columns, block.left, block.right) == (8, 75, True, True)


@pytest.mark.parametrize("shape", [(7,), (1, 7), (7, 1), (1, 1), (), (20, 30)])
def test_vectors_and_unrotated_matrices_are_vectors(shape: tuple[int, ...]) -> None:
    (block,) = cut({"p": shape}, max_block=100, max_rotated=16)
    assert block.is_vector and (block.rows, block.columns) == (1, torch.Size(shape).numel())
