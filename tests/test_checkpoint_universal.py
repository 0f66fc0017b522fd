"""Universal checkpoints: any world size continues, and every element of state and eigenbasis arrives where it belongs.

The converter carries weights and base state only. The eigenbasis stays in the folder of the checkpoint that was
converted; a loading engine finds it there.
"""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import ONE_REFRESH, assemble, pieces, resume, warnings_of_package
from tests.distributed import run_ranks
from tests.engines import Run

AT, MORE = 8, 20
UNIVERSAL = {"checkpoint": {"load_universal": True}}
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
"""Largest loss difference over the 20 steps: another world size sums in another order, which is float32 rounding, and
with bf16 gradients 2^-9 in each of them."""


def save_worker(rank: int, world: int, kinds: list[str], folder: str) -> dict[str, Any]:
    """Checkpoint ``z_source`` at step 8, with checkpoints of another run before and after it in the same folder."""
    found = {}
    for kind in kinds:
        place = f"{folder}/{kind}"
        other = Run(kind, rank, world, ONE_REFRESH, seed=7)
        other.train(6)
        other.engine.save_checkpoint(place, tag="a_decoy")
        other.engine.save_checkpoint(place, tag="universa")  # the longest prefix of the universal tag's name
        run = Run(kind, rank, world, ONE_REFRESH)
        run.train(AT)
        run.engine.save_checkpoint(place, tag="z_source")
        weights, state = run.weights(), pieces(run)
        merged = None
        if rank == 0 and not kind.endswith("bf16_accum"):  # DeepSpeed's function does not read BF16_Optimizer's files
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            merged = get_fp32_state_dict_from_zero_checkpoint(place, tag="z_source")
            merged = {name: torch.as_tensor(value).clone() for name, value in merged.items()}
        losses = run.train(MORE)
        found[kind] = {
            "weights": weights,
            "pieces": state,
            "merged": merged,
            "losses": losses,
            "eigenvalues": run.optimizer.curvature_stats()["eigenvalues"],
        }
    return found


def load_worker(rank: int, world: int, kinds: list[str], folder: str) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        with warnings_of_package() as texts:
            run = resume(kind, rank, world, ONE_REFRESH, f"{folder}/{kind}", None, AT, overrides=UNIVERSAL)
        state, weights = pieces(run), run.weights()
        losses = run.train(MORE)
        stats = run.optimizer.curvature_stats()
        found[kind] = {"pieces": state, "weights": weights, "losses": losses, "stats": stats, "warnings": texts}
    return found


def move_away(folder: Path, kind: str) -> Path:
    """The converted checkpoint, in a folder without the files that lie beside the original."""
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    for name in ("universal", "latest_universal"):
        shutil.move(folder / kind / name, elsewhere / name)
    return elsewhere


def convert(folder: Path, kinds: list[str]) -> None:
    """All at once; each mostly imports."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    running = []
    for kind in kinds:
        where = ["--input_folder", str(folder / kind / "z_source"), "--output_folder", str(folder / kind / "universal")]
        running.append(
            subprocess.Popen(
                [*command, *where, *workers],
                env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for kind, process in zip(kinds, running, strict=True):
        try:
            output, _ = process.communicate(timeout=120)
        finally:
            process.kill()
        assert process.returncode == 0, (kind, output[-2000:])


def converts_sub_groups() -> bool:
    """Older releases' converter takes all of ZeRO-3's parameters to lie in the first sub-group, and stops."""
    from deepspeed.checkpoint import ds_to_universal

    return "enumerate(param_shapes)" in inspect.getsource(ds_to_universal.extract_zero_shards_stage3)


def check_merged(saved: list[dict[str, Any]], kinds: list[str]) -> None:
    """``zero_to_fp32`` gives the float32 weights."""
    for kind in kinds:
        want = assemble([result[kind]["pieces"] for result in saved])["weight"]
        merged = saved[0][kind]["merged"]
        if merged is None:
            continue
        names = [f"{letter}.{i}" for letter in "wb" for i in range(3)]
        assert torch.equal(torch.cat([merged[name].flatten() for name in names]), want), kind


def check_loaded(saved: list[dict[str, Any]], loaded: list[dict[str, Any]], kinds: list[str]) -> None:
    for kind in kinds:
        label = f"{kind}, {len(saved)} -> {len(loaded)}"
        want = assemble([result[kind]["pieces"] for result in saved])
        got = assemble([result[kind]["pieces"] for result in loaded])
        assert got.keys() == want.keys() and {"weight", "exp_avg", "exp_avg_sq", "eigenvector_3"} <= want.keys()
        for entry in want:
            assert torch.equal(got[entry], want[entry]), (label, entry)
        assert torch.equal(loaded[0][kind]["weights"], saved[0][kind]["weights"]), label
        stats = loaded[0][kind]["stats"]
        assert stats["eigenvalues"] == saved[0][kind]["eigenvalues"], label
        assert (stats["steps"], stats["refreshes"], stats["age"]) == (AT + MORE, 1, AT + MORE - 5), label
        assert all(not result[kind]["warnings"] for result in loaded), (label, loaded[0][kind]["warnings"])
        pairs = zip(loaded[0][kind]["losses"], saved[0][kind]["losses"], strict=True)
        tolerance = TOLERANCE["bf16" if "bf16" in kind else "fp32"]
        assert max(abs(a - b) for a, b in pairs) < tolerance, label


def moved_worker(rank: int, world: int, kind: str, folder: str) -> dict[str, Any]:
    settings = {**ONE_REFRESH, "curvature": {**ONE_REFRESH["curvature"], "interval": 6}}  # due after step 11
    with warnings_of_package() as texts:
        run = resume(kind, rank, world, settings, folder, None, AT, overrides=UNIVERSAL)
    entries = set(pieces(run))
    run.train(3)
    first_order = run.optimizer.curvature_stats()
    run.train(2)
    return {"warnings": texts, "entries": entries, "before": first_order, "after": run.optimizer.curvature_stats()}


@pytest.mark.deepspeed
@pytest.mark.timeout(170)
def test_universal_checkpoint_continues_on_one_rank(tmp_path: Path) -> None:
    kinds = ["zero1", "zero3:sub_groups"] if converts_sub_groups() else ["zero1"]
    saved = run_ranks(2, save_worker, kinds, str(tmp_path), timeout=80)
    check_merged(saved, kinds)
    convert(tmp_path, kinds)
    loaded = run_ranks(1, load_worker, kinds, str(tmp_path), timeout=80)
    check_loaded(saved, loaded, kinds)


ALL = ["zero1", "zero2", "zero3", "zero3:sub_groups", "zero1:bf16", "zero1:bf16_accum", "zero3:bf16", "zero3:offload"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("source", "targets"), [(2, (4, 3, 2, 1)), (4, (2, 1))])
def test_universal_checkpoint_continues_anywhere(source: int, targets: tuple[int, ...], tmp_path: Path) -> None:
    saved = run_ranks(source, save_worker, ALL, str(tmp_path), timeout=300)
    check_merged(saved, ALL)
    for first in range(0, len(ALL), 2):
        convert(tmp_path, ALL[first : first + 2])
    for world in targets:
        check_loaded(saved, run_ranks(world, load_worker, ALL, str(tmp_path), timeout=300), ALL)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_universal_checkpoint_without_its_eigenbasis(kind: str, tmp_path: Path) -> None:
    """Moved away from the folder of the eigenbasis: said so, first-order until the next refresh."""
    run_ranks(2, save_worker, [kind], str(tmp_path), timeout=120)
    convert(tmp_path, [kind])
    elsewhere = move_away(tmp_path, kind)
    for result in run_ranks(2, moved_worker, kind, str(elsewhere), timeout=120):
        assert any(str(elsewhere / "universal" / "dho2_eigenbasis") in text for text in result["warnings"])
        assert {"exp_avg", "exp_avg_sq"} <= result["entries"] and "eigenvector_0" not in result["entries"]
        assert result["before"]["age"] is None and result["before"]["lr_scale"] == 1.0
        assert result["after"]["age"] == 2 and result["after"]["last_refresh"] == "accepted"
