"""A run on sharded weights that is saved amid its refresh cycle and goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests import engines, fsdp_engines
from tests.distributed import run_ranks

SAVED, AFTER = 8, 4
"""A refresh after step 5: the checkpoint holds a basis of age 3."""


def save_worker(rank: int, world: int, folder: str, kinds: list[str]) -> dict[str, list[float]]:
    """Losses after the checkpoint of the run that was not interrupted."""
    losses = {}
    for kind in kinds:
        run = fsdp_engines.Run(kind, rank, world, engines.SETTINGS, decay=0.0)
        run.train(SAVED)
        weights, state = get_state_dict(run.module, run.optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(Path(folder, kind)))
        losses[kind] = run.train(AFTER)
    return losses


def load_worker(rank: int, world: int, folder: str, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """For each (kind that saved, kind that goes on) the losses and how old the basis was at the start."""
    results = {}
    for saved, kind in pairs:
        run = fsdp_engines.Run(kind, rank, world, engines.SETTINGS, decay=0.0)
        weights, state = get_state_dict(run.module, run.optimizer)
        found: dict[str, Any] = {"model": weights, "optimizer": state}
        dcp.load(found, checkpoint_id=str(Path(folder, saved)))
        set_state_dict(run.module, run.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        run.step_count = SAVED
        stats = run.inner.curvature_stats()
        results[saved, kind] = {"losses": run.train(AFTER), "age": stats["age"], "refreshes": stats["refreshes"]}
    return results


def both_worker(rank: int, world: int, folder: str, kinds: list[str], pairs: list[tuple[str, str]]) -> Any:
    """One start of a world for saving and loading."""
    return save_worker(rank, world, folder, kinds), load_worker(rank, world, folder, pairs)


def check(saved: dict[str, list[float]], results: dict[tuple[str, str], Any], exact: bool) -> None:
    for (before, kind), found in results.items():
        assert (found["age"], found["refreshes"]) == (SAVED - 5, 1), (before, kind, found)
        want, got = torch.tensor(saved[before]), torch.tensor(found["losses"])
        if exact and before == kind:
            assert torch.equal(got, want), (kind, got - want)
        assert (got - want).abs().max() < 1e-5 * want.max(), (before, kind, got - want)


@pytest.mark.timeout(400)
def test_two_ranks(tmp_path: Path) -> None:
    """Bit for bit on the same engine; the other engine reads the same checkpoint."""
    kinds = ["fsdp2", "fsdp1:orig"]
    pairs = [("fsdp2", "fsdp2"), ("fsdp1:orig", "fsdp1:orig"), ("fsdp1:orig", "fsdp2"), ("fsdp2", "fsdp1:orig")]
    saved, loaded = run_ranks(2, both_worker, str(tmp_path), kinds, pairs, timeout=380)[0]
    check(saved, loaded, exact=True)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_other_meshes(tmp_path: Path) -> None:
    """Saved on four ranks, read on two and three, also from and to tensor parallelism and replicas."""
    kinds = ["fsdp2", "hsdp", "tp"]
    saved = run_ranks(4, save_worker, str(tmp_path), kinds, timeout=280)[0]
    for world in (2, 3):
        pairs = [(kind, "fsdp2") for kind in kinds] + [("hsdp", "fsdp1:orig")]
        check(saved, run_ranks(world, load_worker, str(tmp_path), pairs, timeout=280)[0], exact=False)
    pairs = [(kind, kind) for kind in kinds] + [("fsdp2", "tp"), ("tp", "hsdp")]
    check(saved, run_ranks(4, load_worker, str(tmp_path), pairs, timeout=280)[0], exact=True)
