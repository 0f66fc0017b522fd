"""Checkpoints that are damaged, incomplete or interrupted: the base state is kept, the user is told, nothing hangs."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dho2_ds import engine_checkpoint
from tests import engines
from tests.checkpoints import assert_same, on_rank_0, resume, snapshot, warnings_of_package
from tests.distributed import WorkersFailed, run_ranks
from tests.engines import Run

SETTINGS = {**engines.SETTINGS, "curvature": {"warmup_steps": 3, "interval": 5, "lanczos_steps": 60}}
AT, END = 6, 10  # refreshes are due after steps 3 and 8
FOLDER = engine_checkpoint.FOLDER


def remove_index(folder: Path) -> None:
    (folder / "index.pt").unlink()


def truncate_rank(folder: Path) -> None:
    path = folder / "rank_00001.pt"
    path.write_bytes(path.read_bytes()[:-200])


def empty_index(folder: Path) -> None:
    (folder / "index.pt").write_bytes(b"")


def another_model(folder: Path) -> None:
    index = torch.load(folder / "index.pt")
    index["numels"][0] += 6
    torch.save(index, folder / "index.pt")


def another_layout(folder: Path) -> None:
    path = folder / "rank_00001.pt"
    content = torch.load(path)
    content["rows"] = content["rows"][:, :-1].clone()
    torch.save(content, path)


def another_version(folder: Path) -> None:
    index = torch.load(folder / "index.pt")
    torch.save({**index, "version": 99}, folder / "index.pt")


def an_older_save(folder: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(folder.parents[2] / "older" / FOLDER, folder)


def an_older_rank(folder: Path) -> None:
    shutil.copy(folder.parents[2] / "older" / FOLDER / "rank_00001.pt", folder)


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def not_a_number(folder: Path) -> None:
    path = folder / "rank_00001.pt"
    content = torch.load(path)
    content["rows"][0, 0] = torch.nan
    torch.save(content, path)


DAMAGE: dict[Callable[[Path], None], tuple[str | None, tuple[int, ...]]] = {
    remove_index: ("index.pt", (0, 1)),
    empty_index: ("index.pt", (0, 1)),
    another_model: ("index.pt", (0, 1)),
    another_version: ("index.pt", (0, 1)),
    an_older_save: ("index.pt", (0, 1)),
    truncate_rank: ("rank_00001.pt", (1,)),
    another_layout: ("rank_00001.pt", (1,)),
    an_older_rank: ("rank_00001.pt", (1,)),
    not_a_number: (None, (0,)),
    remove_folder: ("", (0, 1)),
}
"""{what happens to the folder of the eigenbasis: (what the warning names, the ranks that warn of it)}."""


def damage_worker(rank: int, world: int, kinds: list[str], folder: str) -> None:
    for kind in kinds:
        place = Path(folder, kind)
        older = Run(kind, rank, world, SETTINGS, seed=7)
        older.train(AT - 1)
        older.engine.save_checkpoint(str(place), tag="older")
        run = Run(kind, rank, world, SETTINGS)
        run.train(AT)
        run.engine.save_checkpoint(str(place), tag="good")
        dropped = resume(kind, rank, world, SETTINGS, place, "good", AT)
        dropped.optimizer._space.drop()
        want = snapshot(dropped, dropped.train(END - AT))
        assert want["stats"]["age"] == END - 8 and want["stats"]["refreshes"] == 2
        for damage, (name, ranks) in DAMAGE.items():
            copy = place / damage.__name__  # a folder of its own: other tags beside would be searched too
            on_rank_0(rank, lambda: shutil.copytree(place / "good", copy / "good"))  # noqa: B023
            on_rank_0(rank, lambda: damage(copy / "good" / FOLDER))  # noqa: B023
            with warnings_of_package() as texts:
                got = resume(kind, rank, world, SETTINGS, copy, "good", AT)
                result = snapshot(got, got.train(END - AT))
            assert_same(result, want, (kind, damage))
            expected = str(copy / "good" / FOLDER / name) if name is not None else "incomplete"
            if rank in ranks:
                assert any(expected in text for text in texts), (kind, damage, texts)
            if rank == 0:
                assert texts, (kind, damage)
        failing_write(run, rank, place)


def failing_write(run: Run, rank: int, place: Path) -> None:
    """One rank cannot write: all raise, training goes on, and the next save works."""
    save = engine_checkpoint._save
    for failing in (0, 1):

        def refuse(content: dict[str, Any], path: Path) -> None:
            raise OSError(28, "No space left on device", str(path))

        if rank == failing:
            engine_checkpoint._save = refuse
        try:
            with pytest.raises(OSError if rank == failing else RuntimeError, match="No space|another rank"):
                run.engine.save_checkpoint(str(place), tag="full disk")
        finally:
            engine_checkpoint._save = save
        assert not (place / "full disk" / "mp_rank_00_model_states.pt").exists()
        assert (place / "latest").read_text() != "full disk"
    run.train(1)
    run.engine.save_checkpoint(str(place), tag="space again")
    got = resume(run.kind, rank, run.world, SETTINGS, place, "space again", AT + 1)
    assert_same(snapshot(got, got.train(3)), snapshot(run, run.train(3)), "space again")


@pytest.mark.timeout(170)
def test_damage_is_reported_and_survived(tmp_path: Path) -> None:
    run_ranks(2, damage_worker, ["zero2"], str(tmp_path), timeout=160)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_damage_is_reported_and_survived_everywhere(tmp_path: Path) -> None:
    run_ranks(2, damage_worker, ["zero0", "zero1:bf16", "zero3:sub_groups"], str(tmp_path), timeout=580)


def killed_worker(rank: int, world: int, kind: str, where: str, folder: str) -> None:
    """Rank 1 dies in the second save: before its part of the eigenbasis is in place, or while DeepSpeed writes."""
    run = Run(kind, rank, world, SETTINGS)
    run.train(AT)
    run.engine.save_checkpoint(folder, tag="first")
    run.train(1)
    if rank == 1:

        def die(*args: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        if where == "eigenbasis":
            os.replace = die  # type: ignore[assignment]
        else:
            run.engine.checkpoint_engine.save = die
    with contextlib.suppress(RuntimeError):  # the other rank may see the broken connection first
        run.engine.save_checkpoint(folder, tag="second")
    time.sleep(100)


def survivor_worker(rank: int, world: int, kind: str, where: str, folder: str) -> None:
    run = Run(kind, rank, world, SETTINGS)
    losses = run.train(AT + 1)
    after_7 = snapshot(run, losses)
    want = snapshot(run, run.train(END - AT - 1))
    # Once our parts are in place DeepSpeed's rank 0 writes its own and `latest` without waiting for the other ranks.
    assert Path(folder, "latest").read_text() == "first" or where == "deepspeed"
    got = resume(kind, rank, world, SETTINGS, folder, "first", AT)
    got_losses = got.train(1)
    assert_same(snapshot(got, got_losses), after_7, "resumed")
    got.engine.save_checkpoint(folder, tag="second")  # over the remains
    assert_same(snapshot(got, got.train(END - AT - 1)), want, "resumed")
    last = resume(kind, rank, world, SETTINGS, folder, None, AT + 1)
    assert_same(snapshot(last, last.train(END - AT - 1)), want, "over the remains")


def kill_and_resume(kind: str, where: str, folder: str) -> None:
    with pytest.raises(WorkersFailed, match="1: -9"):
        run_ranks(2, killed_worker, kind, where, folder, timeout=100)
    written = Path(folder, "second", FOLDER, "rank_00001.pt").exists()
    assert written == (where != "eigenbasis")
    run_ranks(2, survivor_worker, kind, where, folder, timeout=100)


@pytest.mark.timeout(170)
def test_killed_while_saving(tmp_path: Path) -> None:
    kill_and_resume("zero1", "eigenbasis", str(tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "where"), [("zero2", "deepspeed"), ("zero3", "eigenbasis"), ("zero3", "deepspeed")])
def test_killed_while_saving_everywhere(kind: str, where: str, tmp_path: Path) -> None:
    kill_and_resume(kind, where, str(tmp_path))
