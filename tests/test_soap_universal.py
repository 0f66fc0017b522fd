"""Universal checkpoints of the base ``soap``: any world size continues, with every element of its state.

The converter carries weights only; it is given zeros where it looks for Adam's state. Soap's state and the eigenbasis
stay in the folder of the checkpoint that was converted, where a loading engine finds them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import ONE_REFRESH, resume, warnings_of_package
from tests.distributed import run_ranks
from tests.engines import Run
from tests.test_checkpoint_universal import AT, TOLERANCE, UNIVERSAL, convert, move_away
from tests.test_soap_checkpoint import merge, state

MORE = 12
SETTINGS: dict[str, Any] = {**ONE_REFRESH, "base": "soap", "soap": {"precondition_frequency": 3, "max_block": 7}}


def save_worker(rank: int, world: int, kinds: list[str], folder: str) -> list[dict[str, Any]]:
    """Checkpoint ``z_source`` at step 8, among those of another run at the same step in the same folder."""
    found = []
    for kind in kinds:
        other = Run(kind, rank, world, SETTINGS, seed=7)
        other.train(AT)
        other.engine.save_checkpoint(f"{folder}/{kind}", tag="a_decoy")
        other.engine.save_checkpoint(f"{folder}/{kind}", tag="universa")  # the longest prefix of the universal tag
        run = Run(kind, rank, world, SETTINGS)
        run.train(AT)
        run.engine.save_checkpoint(f"{folder}/{kind}", tag="z_source")
        found.append({"state": state(run.optimizer), "weights": run.weights()})
        found[-1] |= {"losses": run.train(MORE), "stats": run.optimizer.curvature_stats()}
    return found


def load_worker(rank: int, world: int, kinds: list[str], folder: str) -> list[dict[str, Any]]:
    found = []
    for kind in kinds:
        with warnings_of_package() as texts:
            run = resume(kind, rank, world, SETTINGS, f"{folder}/{kind}", None, AT, overrides=UNIVERSAL)
        found.append({"state": state(run.optimizer), "weights": run.weights(), "warnings": texts})
        assert not any(run.optimizer.state.values()), "placeholders are still held"
        found[-1] |= {"losses": run.train(MORE), "stats": run.optimizer.curvature_stats()}
    return found


def check(saved: list[list[dict[str, Any]]], loaded: list[list[dict[str, Any]]], kinds: list[str]) -> None:
    for kind, want, got in zip(kinds, merge(saved), merge(loaded), strict=True):
        label = f"{kind}, {len(saved)} -> {len(loaded)}"
        assert torch.equal(got["weights"], want["weights"]), label
        assert got["state"].keys() == want["state"].keys() and any(name.endswith("/rows") for name in want["state"])
        for name, value in want["state"].items():
            assert torch.equal(got["state"][name], value), (label, name)
        # nine blocks are not balanced over four ranks, which is said
        assert all("lower soap.max_block" in text for text in got["warnings"]), (label, got["warnings"])
        for key in ("steps", "refreshes", "age", "eigenvalues"):
            assert got["stats"][key] == want["stats"][key], (label, key)
        tolerance = TOLERANCE["bf16" if "bf16" in kind else "fp32"]
        assert max(abs(a - b) for a, b in zip(got["losses"], want["losses"], strict=True)) < tolerance, label


@pytest.mark.timeout(170)
def test_universal_checkpoint_of_soap_continues_on_one_rank(tmp_path: Path) -> None:
    kinds = ["zero2"]
    saved = run_ranks(2, save_worker, kinds, str(tmp_path), timeout=80)
    convert(tmp_path, kinds)
    check(saved, run_ranks(1, load_worker, kinds, str(tmp_path), timeout=80), kinds)


ALL = ["zero1", "zero2", "zero3", "zero3:sub_groups", "zero1:bf16", "zero1:bf16_accum", "zero3:bf16", "zero2:offload"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("source", "targets"), [(2, (4, 3, 2, 1)), (4, (2, 1))])
def test_universal_checkpoint_of_soap_continues_anywhere(source: int, targets: tuple[int, ...], tmp_path: Path) -> None:
    saved = run_ranks(source, save_worker, ALL, str(tmp_path), timeout=300)
    for first in range(0, len(ALL), 2):
        convert(tmp_path, ALL[first : first + 2])
    for world in targets:
        check(saved, run_ranks(world, load_worker, ALL, str(tmp_path), timeout=300), ALL)


def refused_worker(rank: int, world: int, kind: str, folder: str) -> str:
    try:
        resume(kind, rank, world, SETTINGS, folder, None, AT, overrides=UNIVERSAL)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_universal_checkpoint_without_its_soap_state_is_refused(kind: str, tmp_path: Path) -> None:
    """Going on with fresh factors would be another run, so the error says which folder to copy."""
    run_ranks(2, save_worker, [kind], str(tmp_path), timeout=120)
    convert(tmp_path, [kind])
    elsewhere = move_away(tmp_path, kind)
    messages = run_ranks(2, refused_worker, kind, str(elsewhere), timeout=120)
    assert all("copy the folder dho2_soap" in message or "another rank" in message for message in messages)
    assert any("copy the folder dho2_soap" in message for message in messages)
