"""Under DeepSpeed a run of torch's AdamW continues with DHO2, and one of DHO2 with torch's AdamW."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import engines
from tests.checkpoints import OTHER_SEED, TORCH_ADAMW, assert_same, pieces, resume, snapshot
from tests.distributed import run_ranks
from tests.engines import Run

PLAIN = {**engines.SETTINGS, "num_eigenvectors": 0}
CURVED = {**engines.SETTINGS, "curvature": {"warmup_steps": 3, "interval": 5, "lanczos_steps": 60}}
ADAM = ("weight", "exp_avg", "exp_avg_sq")


def by_place(parts: list[tuple[str, int, torch.Tensor]], whole: list[tuple[str, int, torch.Tensor]]) -> bool:
    """True if ``parts`` are the same elements as in ``whole``, which may hold more."""
    held = {name: (start, values) for name, start, values in whole}
    for name, start, values in parts:
        begin, found = held[name]
        if not torch.equal(found[start - begin : start - begin + len(values)], values):
            return False
    return bool(parts)


def exchange_worker(rank: int, world: int, kinds: list[str], folder: str) -> None:
    for kind in kinds:
        place = f"{folder}/{kind}"
        adamw = Run(kind, rank, world, engines.SETTINGS, overrides=TORCH_ADAMW)
        assert type(adamw.optimizer) is torch.optim.AdamW
        adamw.train(4)
        adamw.engine.save_checkpoint(place, tag="adamw")
        at_4 = pieces(adamw)
        want = snapshot(adamw, adamw.train(3))

        # AdamW -> DHO2 without eigenvectors: the same run, bit for bit; and back again.
        plain = resume(kind, rank, world, PLAIN, place, "adamw", 4)
        got = snapshot(plain, plain.train(3))
        assert got["losses"] == want["losses"] and torch.equal(got["weights"], want["weights"]), (kind, "plain")
        plain.engine.save_checkpoint(place, tag="plain")
        again = resume(kind, rank, world, engines.SETTINGS, place, "plain", 7, overrides=TORCH_ADAMW)
        assert_same(snapshot(again, again.train(3)), snapshot(adamw, adamw.train(3)), (kind, "and back"))

        # AdamW -> DHO2: the state arrives; first-order steps are AdamW's up to rounding; refreshes come.
        curved = resume(kind, rank, world, CURVED, place, "adamw", 4)
        loaded = pieces(curved)
        assert all(by_place(loaded[entry], at_4[entry]) for entry in ADAM), (kind, "adamw -> dho2")
        first = curved.train(3)
        assert max(abs(a - b) for a, b in zip(first, want["losses"], strict=True)) < 1e-6, (kind, first)
        curved.train(7)
        stats = curved.optimizer.curvature_stats()
        assert (stats["refreshes"], stats["rejected"], stats["age"]) == (2, 0, 2), (kind, stats)

        # DHO2 -> AdamW: the state arrives; it goes on as DHO2 does when its basis is dropped.
        curved.engine.save_checkpoint(place, tag="dho2")
        back = Run(kind, rank, world, engines.SETTINGS, OTHER_SEED, TORCH_ADAMW)
        back.engine.load_checkpoint(place, tag="dho2")
        back.step_count = curved.step_count
        have, source = pieces(back), pieces(curved)
        assert all(by_place(source[entry], have[entry]) for entry in ADAM), (kind, "dho2 -> adamw")
        assert {float(state["step"]) for state in back.optimizer.state.values()} == {14.0}, kind
        ahead = back.train(2)
        plain = resume(kind, rank, world, PLAIN, place, "dho2", 14)
        assert plain.train(2) == ahead, kind
        curved.optimizer._space.drop()
        assert max(abs(a - b) for a, b in zip(curved.train(2), ahead, strict=True)) < 1e-6, kind


@pytest.mark.timeout(170)
def test_torch_adamw_and_dho2_continue_each_other(tmp_path: Path) -> None:
    run_ranks(2, exchange_worker, ["zero1"], str(tmp_path), timeout=160)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torch_adamw_and_dho2_continue_each_other_everywhere(tmp_path: Path) -> None:
    kinds = ["zero0", "zero2", "zero3", "zero3:sub_groups", "zero2:round_robin", "zero3:persistence0"]
    run_ranks(2, exchange_worker, kinds, str(tmp_path), timeout=380)
