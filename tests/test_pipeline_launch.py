"""Curvature ranks under a real launcher: they end with training, and their death does not end it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Launch:
    """``torchrun`` with a script; what it prints is collected."""

    def __init__(self, processes: int, *arguments: str) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes),
                   "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "tests.pipeline_script",
                   *arguments]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for name in ("DHO2_JOIN", "DHO2_JOB_TOKEN"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.text = ""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line

    def wait_for(self, pattern: str, start: int = 0, seconds: float = 120.0) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while (found := re.compile(pattern).search(self.text, start)) is None:
            assert time.monotonic() < deadline and self.process.poll() is None, self.text[-5000:]
            time.sleep(0.05)
        return found


@contextmanager
def launched(processes: int, *arguments: str) -> Iterator[Launch]:
    launch = Launch(processes, *arguments)
    try:
        yield launch
    finally:
        launch.process.terminate()
        launch.process.wait(30)


def kill_one_and_go_on(training: int, curvature: int) -> None:
    with launched(training + curvature, str(curvature), "1000000", "0.01") as launch:
        launch.wait_for(r"refreshes 2 lost 0")
        victim = launch.wait_for(rf"curvature rank {curvature - 1} of {curvature} is process (\d+)")
        os.kill(int(victim[1]), signal.SIGKILL)
        launch.wait_for(r"ended with code -9; it is started again")
        killed_at = len(launch.text)
        launch.wait_for(rf"{curvature} curvature rank\(s\) connected", killed_at)
        before = int(re.findall(r"refreshes (\d+)", launch.text)[-1])
        launch.wait_for(rf"refreshes {before + 2} lost \d", killed_at)
        assert launch.text.count("were lost") <= 1


@pytest.mark.timeout(300)
def test_a_killed_curvature_rank_is_replaced() -> None:
    kill_one_and_go_on(1, 1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_of_two_killed_curvature_ranks_is_replaced() -> None:
    kill_one_and_go_on(2, 2)


@pytest.mark.timeout(200)
def test_all_end_with_training() -> None:
    with launched(3, "1", "60", "0.0") as launch:  # perhaps before the curvature rank has come
        launch.process.wait(150)
        time.sleep(0.2)
        assert launch.process.returncode == 0, launch.text
        assert launch.text.count("training is over") == 2


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_all_end_when_training_raises() -> None:
    with launched(3, "1", "1000000", "0.01", "raise") as launch:
        launch.process.wait(150)
        assert launch.process.returncode == 1 and "training fails" in launch.text


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", ["leave", "hang"])
def test_all_end_when_training_leaves_or_curvature_hangs(how: str) -> None:
    """Training that ends by ``os._exit``, without a word; a loss that never returns on the curvature rank."""
    with launched(2, "1", "400", "0.02", how) as launch:
        launch.wait_for("connected")
        launch.process.wait(150)
        assert launch.process.returncode == 0 and "training is over" in launch.text
