"""The multi-process harness itself: order of results, and that errors, deaths and hangs are failures."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import WorkersFailed, _raise_first_error, run_ranks


def _sum(rank: int, world_size: int, offset: int) -> dict[str, object]:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return {
        "rank": rank,
        "sum": int(total),
        "threads": torch.get_num_threads(),
        "env": {key: os.environ[key] for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "EXTRA")},
    }


def _fail_on_one(rank: int, world_size: int, folder: str) -> None:
    Path(folder, str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    if rank == 1:
        raise ValueError("no such curvature")
    dist.all_reduce(torch.ones(1))  # Fails as well, once rank 1 is gone; must not hide the first error.


def _hang_on_one(rank: int, world_size: int, folder: str) -> None:
    Path(folder, str(rank)).write_text(str(os.getpid()))
    if rank == 1:
        _sleep_for_ever()


def _sleep_for_ever() -> None:
    while True:
        time.sleep(60)


def _die(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(7)
    time.sleep(600)


def _own_init(rank: int, world_size: int) -> bool:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    return dist.get_rank() == rank and dist.get_world_size() == world_size


def _alive(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if Path("/proc", path.read_text()).exists()]


def test_results_come_ordered_by_rank() -> None:
    results = run_ranks(2, _sum, 10, env={"EXTRA": "yes"})
    assert [result["rank"] for result in results] == [0, 1]
    assert [result["sum"] for result in results] == [21, 21]
    assert [result["threads"] for result in results] == [1, 1]
    assert results[1]["env"] == {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "EXTRA": "yes"}


def test_exception_of_a_worker_is_raised_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such curvature") as caught:
        run_ranks(2, _fail_on_one, str(tmp_path))
    assert "rank 1" in str(caught.value.__cause__)
    assert "_fail_on_one" in str(caught.value.__cause__)
    assert _alive(tmp_path) == []


def test_earliest_exception_wins(tmp_path: Path) -> None:
    """Ranks that lose their peer fail too, and may be noticed first."""
    for rank, (when, error) in enumerate([(2.0, RuntimeError("lost peer")), (1.0, ValueError("the reason"))]):
        Path(tmp_path, f"{rank}.error").write_bytes(pickle.dumps((when, pickle.dumps(error), "traceback")))
    with pytest.raises(ValueError, match="the reason"):
        _raise_first_error(tmp_path, 3)


def test_hang_is_a_failure_that_shows_where(tmp_path: Path) -> None:
    with pytest.raises(WorkersFailed, match=r"ranks \[0, 1\] still running") as caught:
        run_ranks(2, _hang_on_one, str(tmp_path), timeout=8.0)
    assert "_sleep_for_ever" in str(caught.value)
    assert _alive(tmp_path) == []


def test_death_without_exception_is_a_failure() -> None:
    start = time.monotonic()
    with pytest.raises(WorkersFailed, match="{0: 7}"):
        run_ranks(2, _die, timeout=300.0)
    assert time.monotonic() - start < 200


def test_worker_may_initialise_by_itself_under_either_launcher() -> None:
    assert run_ranks(2, _own_init, init=False, launcher="torchrun") == [True, True]
    assert run_ranks(2, _own_init, init=False, launcher="deepspeed") == [True, True]
