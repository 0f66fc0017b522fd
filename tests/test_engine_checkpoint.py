"""``engine.save_checkpoint`` and ``load_checkpoint``: a resumed run is the uninterrupted one, bit for bit.

Refreshes fall due after steps 3 and 8. A fresh engine starts from other weights, so that nothing it has of its own can
pass for something it loaded.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import dho2_ds
from tests import engines
from tests.checkpoints import (
    OTHER_SEED,
    assert_same,
    micro_step,
    pieces,
    resume,
    snapshot,
    warnings_of_package,
)
from tests.distributed import run_ranks
from tests.engines import Run
from tests.test_trajectories import RULES

END = 10
SETTINGS: dict[str, Any] = {
    **engines.SETTINGS,
    "curvature": {"warmup_steps": 3, "interval": 5, "lanczos_steps": 60},
}
PHASES = {2: "warm-up", 3: "first refresh due", 4: "just refreshed", 6: "mid-cycle", 8: "second refresh due"}
KINDS = [
    "zero0",
    "zero1",
    "zero2",
    "zero3",
    "zero3:sub_groups",
    "zero0:bf16",
    "zero1:bf16",
    "zero1:bf16_accum",
    "zero3:bf16",
    "zero2:offload",
    "zero3:offload",
]


def resume_worker(
    rank: int, world: int, kinds: list[str], settings: dict[str, Any], phases: list[int], halves: list[int], folder: str
) -> None:
    """Train without saving, then saving at each phase and in the middle of the accumulation of the steps ``halves``
    too, then from each of the checkpoints; all must end in the same state."""
    for kind in kinds:
        plain = Run(kind, rank, world, settings)
        want = snapshot(plain, plain.train(END))
        assert want["stats"]["refreshes"] == 2, (kind, want["stats"])
        saving = Run(kind, rank, world, settings)
        losses: list[float] = []
        for step in range(END):
            if step in phases:
                saving.engine.save_checkpoint(f"{folder}/{kind}")
            if step in halves:
                micro_step(saving, 0)
                saving.engine.save_checkpoint(f"{folder}/{kind}", tag=f"half{step}")
                micro_step(saving, 1)
                losses.append(want["losses"][step])  # its losses are local; the final weights show any difference
            else:
                losses += saving.train(1)
        assert_same(snapshot(saving, losses), want, (kind, "disturbed by saving"))
        for tag, at in [(f"global_step{at}", at) for at in phases] + [(f"half{at}", at) for at in halves]:
            with warnings_of_package() as texts:
                run = resume(kind, rank, world, settings, f"{folder}/{kind}", tag, at)
                assert_same(snapshot(run, run.train(END - at)), want, (kind, tag))
            assert not texts, (kind, tag, texts)


@pytest.mark.deepspeed
@pytest.mark.timeout(170)
def test_resume_is_bit_exact(tmp_path: Path) -> None:
    """Half-accumulated gradients are not in a DeepSpeed checkpoint: the window is replayed from its first batch."""
    kinds = ["zero0", "zero2", "zero3:sub_groups"]
    run_ranks(2, resume_worker, kinds, SETTINGS, [3, 6], [3], str(tmp_path), timeout=160)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rule", ["adaptive-adamw", "fosi-adamw", "adaptive-sgd", "fosi-sgd"])
def test_resume_is_bit_exact_everywhere(rule: str, tmp_path: Path) -> None:
    kinds = KINDS if rule == "adaptive-adamw" else ["zero0", "zero1", "zero3:sub_groups", "zero0:bf16", "zero2:offload"]
    settings = {**SETTINGS, **RULES[rule]}
    run_ranks(2, resume_worker, kinds, settings, list(PHASES), [3, 6], str(tmp_path), timeout=880)


def constant_loss(rank: int, world: int) -> dict[str, Any]:
    """A user's own source: always the same batch, so that it has no position to be saved."""
    x, y = engines.micro_batch(777, 0)
    share = slice(rank * len(x) // world, (rank + 1) * len(x) // world)
    return {"loss_fn": lambda model, batch: model(*batch), "data": [(x[share].float(), y[share])]}


def order_worker(rank: int, world: int, kinds: list[str], folder: str) -> None:
    """Loading before, between and after other calls."""
    for kind in kinds:
        place = f"{folder}/{kind}"
        plain = Run(kind, rank, world, SETTINGS)
        dho2_ds.attach(plain.engine, **constant_loss(rank, world))
        plain.engine.save_checkpoint(place, tag="attached, no step")
        losses = plain.train(5)
        plain.engine.save_checkpoint(place, tag="same")
        assert "eigenvector_3" in pieces(plain)
        losses += plain.train(1)
        plain.engine.save_checkpoint(place, tag="same")
        plain.engine.save_checkpoint(place, tag="same")
        losses += plain.train(4)
        want = snapshot(plain, losses)

        # The user's own source, given before and after loading; the tag named and taken from `latest`.
        for before in (True, False):
            run = Run(kind, rank, world, SETTINGS, OTHER_SEED)
            if before:
                dho2_ds.attach(run.engine, **constant_loss(rank, world))
            run.engine.load_checkpoint(place, tag="same" if before else None)
            if not before:
                dho2_ds.attach(run.engine, **constant_loss(rank, world))
            run.step_count = 6
            assert_same(snapshot(run, run.train(4)), want, (kind, "attach", before))

        # A checkpoint of an engine that has not stepped, with and without a model known.
        run = resume(kind, rank, world, SETTINGS, place, "attached, no step", 0)
        dho2_ds.attach(run.engine, **constant_loss(rank, world))
        assert_same(snapshot(run, run.train(END)), want, (kind, "attached, no step"))
        untouched = Run(kind, rank, world, SETTINGS)
        untouched.engine.save_checkpoint(place, tag="no step")
        want_untouched = snapshot(untouched, untouched.train(5))
        run = resume(kind, rank, world, SETTINGS, place, "no step", 0)
        assert_same(snapshot(run, run.train(5)), want_untouched, (kind, "no step"))

        # Other settings: fewer eigenvectors take the leading ones, more wait for the refresh, another rule for it too.
        for change, kept in (({"num_eigenvectors": 2}, 2), ({"num_eigenvectors": 5}, 4), ({"rule": "fosi"}, 0)):
            with warnings_of_package() as texts:
                run = resume(kind, rank, world, {**SETTINGS, **change}, place, "same", 6)
                run.train(1)
            assert len(run.optimizer.curvature_stats()["eigenvalues"]) == kept, (kind, change)
            assert any("another rule" in text for text in texts) == (kept == 0), (kind, change, texts)
            run.train(2)
            stats = run.optimizer.curvature_stats()
            assert len(stats["eigenvalues"]) == run.optimizer.config.num_eigenvectors, (kind, change)
            assert stats["age"] == 1 and all(map(math.isfinite, stats["eigenvalues"])), (kind, change)

        # Weights only: a fresh optimizer, which refreshes when its own warm-up ends.
        for option in ({"load_module_only": True}, {"load_optimizer_states": False}):
            if kind.startswith("zero3"):  # DeepSpeed loads no weights at all with load_module_only alone
                option = {**option, "load_optimizer_states": False}
            plain.engine.save_checkpoint(place, tag="weights only")
            run = resume(kind, rank, world, SETTINGS, place, "weights only", 0, **option)
            assert torch.equal(run.weights(), plain.weights()), (kind, option)
            assert run.optimizer.steps == 0
            run.train(4)
            assert run.optimizer.curvature_stats()["refreshes"] == 1, (kind, option)
            assert run.optimizer.steps == 4

        # Going back to an earlier checkpoint in the running engine (ZeRO-3 wants a pristine one).
        if not kind.startswith("zero3"):
            plain.engine.load_checkpoint(place, tag="same")
            plain.step_count = 6
            assert_same(snapshot(plain, plain.train(4)), want, (kind, "gone back"))


@pytest.mark.deepspeed
@pytest.mark.timeout(170)
def test_any_order_of_calls(tmp_path: Path) -> None:
    run_ranks(2, order_worker, ["zero1"], str(tmp_path), timeout=160)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_any_order_of_calls_everywhere(tmp_path: Path) -> None:
    run_ranks(
        2,
        order_worker,
        ["zero0", "zero0:bf16", "zero2", "zero3", "zero3:sub_groups", "zero1:bf16_accum"],
        str(tmp_path),
        timeout=580,
    )
