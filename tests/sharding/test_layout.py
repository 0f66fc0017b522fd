"""Layouts: every element held exactly once, padding where it should be, bad layouts refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dho2_ds.sharding import Layout, Segment, check_cover, concatenate, flat_slices, parameter_chunks, replicated

SIZES = st.lists(st.integers(0, 13), max_size=6).map(lambda sizes: {f"p{i}": size for i, size in enumerate(sizes)})
WORLDS = st.integers(1, 9)


def _count(layouts: list[Layout], sizes: dict[str, int]) -> dict[str, list[int]]:
    """How often each element is held, one element at a time."""
    held = {name: [0] * size for name, size in sizes.items()}
    for layout in layouts:
        for segment in layout.segments:
            for i in range(segment.start, segment.start + segment.length):
                held[segment.name][i] += 1
    return held


@settings(max_examples=200, deadline=None)
@given(SIZES, WORLDS, st.integers(1, 4))
def test_flat_slices_are_equal_aligned_and_cover_once(sizes: dict[str, int], world: int, alignment: int) -> None:
    layouts = flat_slices(sizes, world, alignment=alignment)
    total = sum(sizes.values())
    (share,) = {layout.numel for layout in layouts}
    assert len(layouts) == world
    assert share % alignment == 0 and share * world >= total
    assert share - alignment < -(-total // world) <= share  # The shortest aligned slice that holds everything.
    assert _count(layouts, sizes) == {name: [1] * size for name, size in sizes.items()}
    check_cover(layouts, sizes)
    # Position in the concatenation is rank * share + offset, so all padding is at the end.
    position = 0
    for rank, layout in enumerate(layouts):
        for segment in layout.segments:
            assert rank * share + segment.offset == position
            position += segment.length


@settings(max_examples=200, deadline=None)
@given(SIZES, WORLDS)
def test_parameter_chunks_take_equal_slots_and_cover_once(sizes: dict[str, int], world: int) -> None:
    layouts = parameter_chunks(sizes, world)
    assert len(layouts) == world
    assert _count(layouts, sizes) == {name: [1] * size for name, size in sizes.items()}
    check_cover(layouts, sizes)
    first_slot, slot = {}, 0
    for name, size in sizes.items():
        first_slot[name] = slot
        slot += -(-size // world)
    for rank, layout in enumerate(layouts):
        assert layout.numel == slot
        for segment in layout.segments:
            assert segment.offset == first_slot[segment.name]
            assert segment.start == rank * -(-sizes[segment.name] // world)


@settings(max_examples=50, deadline=None)
@given(SIZES, WORLDS)
def test_replicated_holds_everything_on_every_rank(sizes: dict[str, int], world: int) -> None:
    layouts = replicated(sizes, world)
    assert len(layouts) == world
    for layout in layouts:
        check_cover([layout], sizes)
        assert layout.numel == sum(sizes.values()) and layout.padding() == ()


@settings(max_examples=200, deadline=None)
@given(SIZES, SIZES, WORLDS, st.sampled_from([flat_slices, parameter_chunks]))
def test_padding_is_what_no_segment_holds_and_is_zeroed(
    first: dict[str, int], second: dict[str, int], world: int, kind: object
) -> None:
    second = {f"q{name}": size for name, size in second.items()}
    groups = [kind(first, world), flat_slices(second, world, alignment=3)]  # type: ignore[operator]
    layouts = [concatenate(parts) for parts in zip(*groups, strict=True)]
    check_cover(layouts, {**first, **second})
    for rank, layout in enumerate(layouts):
        assert layout.numel == sum(part[rank].numel for part in groups)
        held = torch.zeros(layout.numel, dtype=torch.bool)
        for segment in layout.segments:
            held[segment.offset : segment.offset + segment.length] = True
        padded = torch.zeros_like(held)
        for begin, end in layout.padding():
            assert begin < end
            padded[begin:end] = True
        assert torch.equal(padded, ~held)
        for buffer in (torch.ones(layout.numel), torch.ones(2, layout.numel)):
            assert layout.zero_padding_(buffer) is buffer
            assert torch.equal(buffer, held.expand(buffer.shape).to(buffer.dtype))


def test_segments_are_kept_sorted_by_offset() -> None:
    a, b = Segment("a", 0, 2, 3), Segment("b", 0, 3, 0)
    assert Layout((a, b), 5).segments == (b, a)
    assert Layout((a, b), 5) == Layout((b, a), 5)
    assert hash(Layout((a, b), 5)) == hash(Layout((b, a), 5))


@pytest.mark.parametrize(
    ("segments", "numel", "message"),
    [
        ((Segment("a", 0, 3, 0), Segment("b", 0, 2, 2)), 5, "overlaps"),
        ((Segment("a", 0, 3, 3),), 5, "inside the local buffer"),
        ((Segment("a", 0, 3, -1),), 5, "inside the local buffer"),
        ((Segment("a", 0, 0, 0),), 5, "length >= 1"),
        ((Segment("a", -1, 2, 0),), 5, "start >= 0"),
        ((), -1, "numel=-1"),
    ],
)
def test_bad_layout_is_refused(segments: tuple[Segment, ...], numel: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(segments, numel)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([(0, 4), (6, 4)], r"'a': elements \[4, 6\) are held by no rank"),
        ([(0, 6), (5, 5)], r"'a': elements \[5, 6\) are held more than once"),
        ([(0, 9)], r"'a': elements \[9, 10\) are held by no rank"),
        ([(0, 12)], r"'a': elements \[10, 12\) do not exist"),
        ([(0, 10), (3, 2)], r"'a': elements \[3, 5\) are held more than once"),
        ([], r"'a': elements \[0, 10\) are held by no rank"),
    ],
)
def test_bad_cover_names_parameter_and_interval(pieces: list[tuple[int, int]], message: str) -> None:
    layouts = [Layout((Segment("a", start, length, 0),), length) for start, length in pieces]
    with pytest.raises(ValueError, match=message):
        check_cover(layouts, {"a": 10})


def test_unknown_parameter_in_cover_is_named() -> None:
    with pytest.raises(ValueError, match="rank 0 holds 'b'"):
        check_cover([Layout((Segment("b", 0, 1, 0),), 1)], {"a": 0})


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="world_size=0"):
        flat_slices({"a": 3}, 0)
    with pytest.raises(ValueError, match="alignment=0"):
        flat_slices({"a": 3}, 2, alignment=0)
    with pytest.raises(ValueError, match="'a' of -1 elements"):
        parameter_chunks({"a": -1}, 2)
    with pytest.raises(ValueError, match="last dimension must be 4"):
        flat_slices({"a": 7}, 2)[1].zero_padding_(torch.ones(3))
