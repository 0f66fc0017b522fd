"""One side of a job whose two sides are started separately: ``python -m tests.pipeline_job train|curve ...``.

The training side trains until a file named ``stop`` appears in its folder and keeps ``status.json`` there up to date.
The curvature side joins through the environment, and may have a fault built in.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import dho2_ds
from dho2_ds.pipeline import worker as worker_module
from dho2_ds.pipeline.wire import Intervals, Link
from tests.engines import SETTINGS, Run

TIMEOUT = 4.0
CURVATURE = {
    "mode": "dedicated", "ranks": 0, "timeout": TIMEOUT, "warmup_steps": 3, "interval": 10, "lanczos_steps": 12,
}  # fmt: skip


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train(folder: Path) -> None:
    """Train; one step takes at least 10 ms, so that a test can see what happens."""
    heard = Warnings()
    logging.getLogger("dho2_ds").addHandler(heard)
    dho2_ds.init_distributed()
    run = Run("single", 0, 1, {**SETTINGS, "curvature": CURVATURE})
    longest, deadline = 0.0, time.monotonic() + 300
    while not (folder / "stop").exists() and time.monotonic() < deadline:
        began = time.monotonic()
        loss = run.step()
        longest = max(longest, time.monotonic() - began)
        finite = bool(torch.isfinite(run.weights()).all())
        stats = run.optimizer.curvature_stats()
        status = {"loss": loss, "finite": finite, "longest": longest, "warnings": heard.texts, **stats}
        (folder / "status.partial").write_text(json.dumps(status))
        (folder / "status.partial").rename(folder / "status.json")
        time.sleep(0.01)


def die(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def build_in(fault: str) -> None:
    """Make the curvature side fail at one point of its first job."""
    if fault == "die_in_lanczos":
        products = iter(range(3))
        original = worker_module.Worker._still_wanted
        worker_module.Worker._still_wanted = (  # type: ignore[method-assign]
            lambda self: original(self) if next(products, None) is not None else die()
        )
    if fault == "die_receiving":
        Link.receive_parts = die  # type: ignore[method-assign]
    if fault == "die_sending":
        send = Link.send_parts

        def half(self: Link, rows: torch.Tensor, intervals: Intervals) -> None:
            send(self, rows, [(start, length // 2) for start, length in intervals])
            time.sleep(0.2)  # so that the half arrives
            die()

        Link.send_parts = half  # type: ignore[method-assign]
    if fault == "send_nan":
        parts = Link.send_parts

        def spoiled(self: Link, rows: torch.Tensor, intervals: Intervals) -> None:
            rows[0, -1] = float("nan")
            parts(self, rows, intervals)

        Link.send_parts = spoiled  # type: ignore[method-assign]


def curve(fault: str) -> None:
    """Serve the training side."""
    build_in(fault)
    dho2_ds.init_distributed()
    settings = {**SETTINGS, "curvature": CURVATURE}
    if fault == "other_model":
        settings["rule"] = "fosi"
    Run("single", 0, 1, settings)
    raise AssertionError("a curvature rank went on")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[2])) if sys.argv[1] == "train" else curve(sys.argv[2])
