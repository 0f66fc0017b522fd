"""The files of an eigenbasis: written under any layout and world size, read under any other."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dho2_ds.checkpoint import Record
from dho2_ds.engine_checkpoint import FOLDER, read, write
from dho2_ds.sharding import Layout, flat_slices, parameter_chunks

SHARDINGS = {"flat": flat_slices, "chunks": parameter_chunks}
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(lambda ns: {f"p{i}": n for i, n in enumerate(ns)})
PLACE = st.tuples(st.sampled_from(sorted(SHARDINGS)), st.integers(1, 5))
RECORD = Record(kept=2, born=7, eigenvalues=[3.0, -1.5])


def rows(layout: Layout, names: list[str]) -> Tensor:
    """Two rows whose every element says which parameter and which element of it it is; padding zero."""
    local = torch.zeros(2, layout.numel, dtype=torch.float64)
    for segment in layout.segments:
        place = torch.arange(segment.start, segment.start + segment.length, dtype=torch.float64)
        value = 1000.0 * (names.index(segment.name) + 1) + place
        local[:, segment.offset : segment.offset + segment.length] = torch.stack([value, -value])
    return local


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, source=PLACE, target=PLACE)
def test_every_element_is_read_where_it_belongs(
    sizes: dict[str, int], source: tuple[str, int], target: tuple[str, int]
) -> None:
    names = list(sizes)
    before, after = (SHARDINGS[kind](sizes, world) for kind, world in (source, target))
    with tempfile.TemporaryDirectory() as folder:
        for rank, layout in enumerate(before):
            write(Path(folder, "tag", FOLDER), rank, before, sizes, RECORD, rows(layout, names))
        for layout in after:
            found = read(Path(folder), "tag", FOLDER, False, layout, sizes, RECORD)
            assert torch.equal(found, rows(layout, names))


def test_what_does_not_belong_together_is_refused_by_file(tmp_path: Path) -> None:
    sizes = {"a": 10, "b": 7}
    layouts = flat_slices(sizes, 2)
    for rank, layout in enumerate(layouts):
        write(tmp_path / "tag" / FOLDER, rank, layouts, sizes, RECORD, rows(layout, list(sizes)))
    chunks = parameter_chunks(sizes, 2)
    write(tmp_path / "tag" / FOLDER, 1, chunks, sizes, RECORD, rows(chunks[1], list(sizes)))  # a save that broke off
    with pytest.raises(ValueError, match=r"rank_00001.pt: must be of the same save as index.pt"):
        read(tmp_path, "tag", FOLDER, False, layouts[1], sizes, RECORD)
    with pytest.raises(ValueError, match=r"index.pt: must be of this model"):
        read(tmp_path, "tag", FOLDER, False, layouts[0], {"a": 10, "b": 8}, RECORD)
    other = Record(kept=2, born=9, eigenvalues=[3.0, -1.5])
    with pytest.raises(
        ValueError, match=r"index.pt: must belong to this checkpoint; it holds the eigenbasis of step 7"
    ):
        read(tmp_path, "tag", FOLDER, False, layouts[0], sizes, other)
