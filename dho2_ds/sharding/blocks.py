"""Cutting parameters into matrix blocks, and giving each block to one rank: the owner layout.

A preconditioner of matrices needs whole ones, engines shard flat vectors. So every matrix (or each of its blocks, where
a side is long) lives whole on one rank. The cut depends on the shapes alone, never on the number of ranks: results do
not depend on the world size, and a checkpoint's blocks are those of any other world.

Pure Python: nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from dho2_ds.sharding.layout import Layout, Segment

TOLERANCE = 1.10
"""Largest share of a rank, relative to the mean, that counts as balanced."""

_WORK = 0.9
"""How much a share of the work counts beside a share of the memory: memory is promised, time is not."""


@dataclass(frozen=True)
class Block:
    """Rows ``[row, row + rows)``, columns ``[column, column + columns)`` of a parameter seen as a matrix.

    Attributes:
        name: unique; the parameter's own name when it is not cut.
        parameter: the parameter's name. width: number of columns of the whole matrix.
        left, right: whether this side is rotated; neither for vectors, which are 1 x n.
    """

    name: str
    parameter: str
    row: int
    rows: int
    column: int
    columns: int
    width: int
    left: bool
    right: bool

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def is_vector(self) -> bool:
        return not (self.left or self.right)

    @property
    def factors(self) -> int:
        """Elements of all matrices that belong to its rotated sides: a factor and an eigenbasis each."""
        return 2 * (self.left * self.rows**2 + self.right * self.columns**2)

    @property
    def work(self) -> int:
        """m^3 + n^3 + mn: decompositions and products, up to a constant."""
        return self.left * self.rows**3 + self.right * self.columns**3 + self.numel


def cut(shapes: Mapping[str, Sequence[int]], *, max_block: int, max_rotated: int) -> list[Block]:
    """All blocks of all parameters, in model order.

    A parameter of more than two dimensions is seen as (out, rest). Vectors and matrices with a side of one are not
    rotated.

    Args:
        shapes: {parameter: shape}. max_block: sides longer than this are cut into equal parts.
        max_rotated: sides longer than this (vocabularies) are not rotated.
    """
    blocks: list[Block] = []
    for parameter, shape in shapes.items():
        rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, prod(shape))
        left, right = 1 < rows <= max_rotated, 1 < columns <= max_rotated
        if min(rows, columns) <= 1 or not (left or right):
            rows, columns, left, right = 1, rows * columns, False, False
        high = _parts(rows, max_block)
        wide = _parts(columns, max_block**2 if rows == 1 else max_block)
        whole = len(high) == len(wide) == 1
        for row, height in high:
            for column, length in wide:
                where = f"[{row}:{row + height}, {column}:{column + length}]"
                name = parameter if whole else parameter + where
                blocks.append(Block(name, parameter, row, height, column, length, columns, left, right))
    return blocks


def _parts(side: int, limit: int) -> list[tuple[int, int]]:
    """(start, length) of the fewest parts of at most ``limit``, of equal length up to one; none of an empty side."""
    count = -(-side // limit)
    edges = [side * i // count for i in range(count + 1)] if count else [0]
    return [(low, high - low) for low, high in zip(edges, edges[1:], strict=False)]


def assign(blocks: Sequence[Block], world_size: int, vectors: int) -> list[int]:
    """Owner rank of each block: longest processing time first, under balanced memory.

    Each block goes to the rank where the fullest of three measures stays lowest: elements, bytes of state, work; big
    ones first.

    Args:
        vectors: vectors of a block's size that are kept beside its factors (moments, eigenvectors).
    """
    totals = [sum(column) or 1 for column in zip(*(_loads(b, vectors) for b in blocks), strict=True)]
    shares = [[load / total for load, total in zip(_loads(b, vectors), totals, strict=True)] for b in blocks]
    shares = [[elements, state, _WORK * work] for elements, state, work in shares]
    held = [[0.0, 0.0, 0.0] for _ in range(world_size)]
    owners = [0] * len(blocks)
    for index in sorted(range(len(blocks)), key=lambda i: (-max(shares[i]), i)):
        share = shares[index]

        def fullest(rank: int, share: list[float] = share) -> tuple[float, float, int]:
            after = [have + more for have, more in zip(held[rank], share, strict=True)]
            return max(after), sum(after), rank

        owner = min(range(world_size), key=fullest)
        owners[index] = owner
        held[owner] = [have + more for have, more in zip(held[owner], share, strict=True)]
    return owners


def _loads(block: Block, vectors: int) -> tuple[int, int, int]:
    return block.numel, vectors * block.numel + block.factors, block.work


def imbalance(blocks: Sequence[Block], owners: Sequence[int], world_size: int, vectors: int) -> tuple[float, float]:
    """The fullest rank over the mean: (memory, work); 1 is perfect. Memory is the worse of elements and state."""
    held = [[0, 0, 0] for _ in range(world_size)]
    for block, owner in zip(blocks, owners, strict=True):
        held[owner] = [have + more for have, more in zip(held[owner], _loads(block, vectors), strict=True)]
    worst = [max(column) * world_size / max(sum(column), 1) for column in zip(*held, strict=True)]
    return max(worst[:2]), worst[2]


def owner_layouts(blocks: Sequence[Block], owners: Sequence[int], world_size: int) -> list[Layout]:
    """One layout per rank, its segments whole blocks by name: matrices first, then vectors, each in model order."""
    layouts = []
    for rank in range(world_size):
        mine = [block for block, owner in zip(blocks, owners, strict=True) if owner == rank and block.numel]
        segments, offset = [], 0
        for block in sorted(mine, key=lambda block: block.is_vector):
            segments.append(Segment(block.name, 0, block.numel, offset))
            offset += block.numel
        layouts.append(Layout(tuple(segments), offset))
    return layouts
