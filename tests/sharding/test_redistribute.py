"""Redistribution: every element arrives where its name and index say, in one process and over gloo."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dho2_ds.sharding import (
    Layout,
    Segment,
    Transfer,
    apply_plan,
    concatenate,
    flat_slices,
    parameter_chunks,
    plan,
    redistribute,
    replicated,
)
from tests.distributed import run_ranks

KINDS = ("flat", "aligned", "chunks", "replicated", "two_groups", "last_rank")
SIZES = st.lists(st.integers(0, 13), max_size=6).map(lambda sizes: {f"p{i}": size for i, size in enumerate(sizes)})


def _layouts(kind: str, sizes: dict[str, int], world: int) -> list[Layout]:
    if kind == "flat":
        return flat_slices(sizes, world)
    if kind == "aligned":
        return flat_slices(sizes, world, alignment=4)
    if kind == "chunks":
        return parameter_chunks(sizes, world)
    if kind == "replicated":
        return replicated(sizes, world)
    if kind == "two_groups":  # Parameters in another order, as a decay / no-decay split gives.
        groups = [dict(list(sizes.items())[1::2]), dict(list(sizes.items())[::2])]
        parts = [flat_slices(groups[0], world, alignment=2), parameter_chunks(groups[1], world)]
        return [concatenate(pair) for pair in zip(*parts, strict=True)]
    return [Layout((), 0)] * (world - 1) + replicated(sizes, 1)


def _filled(layout: Layout, rows: int | None) -> Tensor:
    """A buffer in which every element is a function of its parameter's name, its index and its row; padding 0."""
    buffer = torch.zeros((rows or 1, layout.numel), dtype=torch.float64)
    for segment in layout.segments:
        index = torch.arange(segment.start, segment.start + segment.length)
        for row in range(rows or 1):
            values = 1.0 + 100 * index + 10_000 * int(segment.name[1:]) + 1_000_000 * row
            buffer[row, segment.offset : segment.offset + segment.length] = values
    return buffer if rows is not None else buffer[0]


def _buffers(layouts: Sequence[Layout], rows: int | None) -> list[Tensor]:
    return [_filled(layout, rows) for layout in layouts]


def _same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@settings(max_examples=300, deadline=None)
@given(
    SIZES,
    st.integers(1, 7),
    st.integers(1, 7),
    st.sampled_from(KINDS),
    st.sampled_from(KINDS),
    st.sampled_from([None, 1, 3]),
)
def test_any_layout_to_any_other_and_back(
    sizes: dict[str, int], world_a: int, world_b: int, kind_a: str, kind_b: str, rows: int | None
) -> None:
    a, b = _layouts(kind_a, sizes, world_a), _layouts(kind_b, sizes, world_b)
    moved = apply_plan(_buffers(a, rows), a, b)
    assert _same(moved, _buffers(b, rows))
    assert _same(apply_plan(moved, b, a), _buffers(a, rows))


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(1, 6), st.integers(1, 6), st.sampled_from(KINDS), st.sampled_from(KINDS))
def test_plan_fills_each_target_element_once_from_the_preferred_source(
    sizes: dict[str, int], world_a: int, world_b: int, kind_a: str, kind_b: str
) -> None:
    a, b = _layouts(kind_a, sizes, world_a), _layouts(kind_b, sizes, world_b)
    holders: dict[tuple[str, int], list[int]] = {}
    for rank, layout in enumerate(a):
        for s in layout.segments:
            for i in range(s.length):
                holders.setdefault((s.name, s.start + i), []).append(rank)
    chosen: dict[tuple[int, int], int] = {}
    transfers = plan(a, b)
    for item in transfers:
        for i in range(item.length):
            assert (item.target, item.target_offset + i) not in chosen
            chosen[item.target, item.target_offset + i] = item.source
    for rank, layout in enumerate(b):
        for s in layout.segments:
            for i in range(s.length):
                having = holders[s.name, s.start + i]
                assert chosen.pop((rank, s.offset + i)) == (rank if rank in having else min(having))
    assert not chosen  # Nothing is written into padding.
    for last, item in itertools.pairwise(transfers):  # Nothing is left to merge.
        joined = Transfer(last.source, last.target, last[2] + last.length, last[3] + last.length, item.length)
        assert item != joined


def test_partial_replicas_prefer_the_own_part_and_then_the_lowest_rank() -> None:
    source = [
        Layout((Segment("p0", 0, 6, 0),), 6),
        Layout((Segment("p0", 4, 6, 0),), 6),
        Layout((Segment("p0", 2, 3, 1),), 4),
    ]
    target = [Layout((), 0), Layout((), 0), Layout((Segment("p0", 0, 10, 0),), 10)]
    assert plan(source, target) == [
        Transfer(0, 2, 0, 0, 2),
        Transfer(0, 2, 5, 5, 1),
        Transfer(1, 2, 2, 6, 4),
        (2, 2, 1, 2, 3),
    ]


def test_pieces_of_two_ranks_at_matching_offsets_stay_two() -> None:
    """Rank 1 holds the next elements at the offset where rank 0 would: one after the other, but not one buffer."""
    source = [Layout((Segment("p0", 0, 3, 0),), 6), Layout((Segment("p0", 3, 3, 3),), 6)]
    target = [Layout((), 0), Layout((), 0), *replicated({"p0": 6}, 1)]
    assert plan(source, target) == [(0, 2, 0, 0, 3), (1, 2, 3, 3, 3)]
    assert _same(apply_plan(_buffers(source, None), source, target), _buffers(target, None))


def test_plan_merges_over_parameters() -> None:
    sizes = {f"p{i}": 7 for i in range(100)}
    assert plan(flat_slices(sizes, 1), flat_slices(sizes, 2)) == [(0, 0, 0, 0, 350), (0, 1, 350, 0, 350)]


def test_many_replicas_do_not_multiply_the_transfers() -> None:
    sizes = {f"p{i}": 1000 + i for i in range(300)}
    target = parameter_chunks(sizes, 64)
    assert len(plan(replicated(sizes, 64), target)) <= sum(len(layout.segments) for layout in target)


def test_missing_element_is_named() -> None:
    source = [Layout((Segment("p0", 0, 3, 0),), 3), Layout((Segment("p0", 5, 3, 0),), 3)]
    with pytest.raises(ValueError, match=r"'p0': elements \[3, 5\) are wanted by rank 0"):
        plan(source, flat_slices({"p0": 8}, 1))
    with pytest.raises(ValueError, match=r"'p1': elements \[0, 2\)"):
        plan(source, [Layout((Segment("p1", 0, 2, 0),), 2)])


def test_bad_buffers_are_refused() -> None:
    layouts = flat_slices({"p0": 8}, 2)
    with pytest.raises(ValueError, match="must be one each"):
        apply_plan([torch.zeros(4)], layouts, layouts)
    with pytest.raises(ValueError, match=r"rank 1: must be \(4,\)"):
        apply_plan([torch.zeros(4), torch.zeros(3)], layouts, layouts)
    with pytest.raises(ValueError, match="must be"):
        redistribute(torch.zeros(3), layouts[:1], layouts[:1])


def test_single_process_copy_needs_no_group() -> None:
    sizes = {"p0": 5, "p1": 0, "p2": 3}
    a, b = _layouts("two_groups", sizes, 1), _layouts("aligned", sizes, 1)
    assert torch.equal(redistribute(_filled(a[0], 2), a, b), _filled(b[0], 2))
    two = flat_slices(sizes, 2)
    with pytest.raises(ValueError, match="torch.distributed"):
        redistribute(_filled(a[0], None), a, two)


CASES = list(
    itertools.product(
        [{"p0": 7, "p1": 1, "p2": 0, "p3": 12}, {"p0": 1}, {}],
        [("flat", 3, "chunks", 2), ("chunks", 2, "two_groups", 3), ("replicated", 3, "aligned", 3)]
        + [("flat", 3, "last_rank", 3), ("last_rank", 3, "chunks", 3), ("flat", 1, "replicated", 3)],
        [None, 3],
        [torch.float64, torch.bfloat16],
    )
)


def _redistribute_cases(rank: int, world_size: int) -> dict[int, bool]:
    import torch.distributed as dist

    group = dist.new_group([2, 1, 0])  # A group of its own, as the bridge between two worlds is one.
    results = {}
    for number, (sizes, (kind_a, world_a, kind_b, world_b), rows, dtype) in enumerate(CASES):
        a, b = _layouts(kind_a, sizes, world_a), _layouts(kind_b, sizes, world_b)
        empty = Layout((), 0)
        before = _filled(a[rank] if rank < world_a else empty, rows).to(dtype)
        after = _filled(b[rank] if rank < world_b else empty, rows).to(dtype)
        there = redistribute(before, a, b, group if number % 2 else None)
        back = redistribute(there, b, a, group, rank=dist.get_rank(group))
        results[number] = torch.equal(there, after) and torch.equal(back, before) and there.dtype == dtype
    try:
        redistribute(torch.zeros(0), [empty] * 4, [empty], group)
    except ValueError as error:
        results[-1] = "3 ranks" in str(error)
    sent: list[int] = []
    exchange = dist.all_to_all_single
    dist.all_to_all_single = lambda out, message, *rest, **named: (  # type: ignore[assignment]
        sent.append(message.numel()),
        exchange(out, message, *rest, **named),
    )
    flat, chunks = flat_slices({"p0": 12}, 3), parameter_chunks({"p0": 9, "p1": 3}, 3)
    redistribute(_filled(flat[rank], 2), flat, flat)
    results[-2] = sent == []  # Nothing moves, so nothing is called.
    both = flat_slices({"p0": 9, "p1": 3}, 3)
    redistribute(_filled(both[rank], 5), both, chunks)
    kept = sum(item.length for item in plan(both, chunks) if item.source == item.target == rank)
    results[-3] = sent == [5 * (4 - kept)]  # One message, all rows, without what stays.
    return results


def test_over_gloo_every_case_arrives_and_returns() -> None:
    for results in run_ranks(3, _redistribute_cases):
        assert len(results) == len(CASES) + 3
        assert [number for number, ok in results.items() if not ok] == []
