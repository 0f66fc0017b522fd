"""Starts the processes of the pipeline benchmark, each on a core of its own, and follows them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Plan = dict[str, Any]
RANKS = Path(__file__).with_name("_pipeline_ranks.py")
CORE, NEXT_CORE = "PIPELINE_CORE", "PIPELINE_NEXT_CORE"  # read by _pipeline_ranks and _pipeline_busy
EVENT = "@done "  # as in _pipeline_ranks, which is not imported here: it pins itself
TIMEOUT = 1500.0  # seconds of one launch
GRACE = 60.0  # seconds that the other processes have when the first one has ended


class Machine:
    """How busy the machine was from here to `report`, our own processes included."""

    def __init__(self) -> None:
        self._load, self._ticks, self._began = os.getloadavg()[0], self._read(), time.time()

    def report(self) -> dict[str, Any]:
        before, after = self._ticks, self._read()
        spent = [b - a for a, b in zip(before, after, strict=True)]
        total = sum(spent) or 1
        return {
            "cores": len(os.sched_getaffinity(0)),
            "load_1min": [self._load, os.getloadavg()[0]],
            "busy": 1 - (spent[3] + spent[4]) / total,  # neither idle nor waiting for a disk
            "steal": spent[7] / total,
            "seconds": time.time() - self._began,
            "torch": torch.__version__,
        }

    @staticmethod
    def _read() -> list[int]:
        with open("/proc/stat") as file:
            return [int(tick) for tick in file.readline().split()[1:9]]


def launch(
    plan: Plan, training: int, curvature: int, console: Console, name: str, total: int
) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """Run a plan on ``training + curvature`` processes.

    Returns:
        What each training rank returned, and the jobs that each curvature rank noted.
    """
    plan = {**plan, "training": training, "curvature": curvature}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cores, world = sorted(os.sched_getaffinity(0)), training + curvature
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        path.write_text(json.dumps(plan))
        processes = []
        for rank in range(world):
            environment = {
                **os.environ,
                **{
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(world),
                },
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
                CORE: str(cores[rank % len(cores)]),
                NEXT_CORE: str(cores[(rank + 1) % len(cores)]),
            }
            log = Path(folder, f"log-{rank}").open("w")
            command = [sys.executable, str(RANKS), str(path), folder]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
            log.close()
        try:
            _follow(processes, Path(folder), console, name, total)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found = [json.loads(Path(folder, f"training-{rank}.json").read_text()) for rank in range(training)]
        notes = [Path(folder, f"curvature-{rank}.jsonl") for rank in range(curvature)]
        return found, [
            [json.loads(line) for line in note.read_text().splitlines()] if note.exists() else [] for note in notes
        ]


def _follow(processes: list[subprocess.Popen[bytes]], folder: Path, console: Console, name: str, total: int) -> None:
    """Draw rank 0's progress until all have ended; raises with the output of one that failed."""
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    deadline = time.monotonic() + TIMEOUT
    with Progress(*columns, console=console) as bar, (folder / "log-0").open(errors="replace") as log:
        task = bar.add_task(name, total=total)
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
            if failed or time.monotonic() > deadline:
                break
            if any(process.poll() == 0 for process in processes):
                deadline = min(deadline, time.monotonic() + GRACE)
            for line in log.readlines():
                if line.startswith(EVENT):
                    bar.update(task, completed=int(line.split()[1]))
            time.sleep(0.2)  # looking costs the pinned processes time
        codes = [process.poll() for process in processes]
        if any(codes):
            rank = next(rank for rank, code in enumerate(codes) if code)
            tail = "".join((folder / f"log-{rank}").read_text(errors="replace").splitlines(True)[-40:])
            raise RuntimeError(f"{name}: process {rank} ended with {codes[rank]}:\n{tail}")
        if None in codes:
            raise RuntimeError(f"{name}: process {codes.index(None)} did not end within {TIMEOUT:.0f} s")
        bar.update(task, completed=total)
