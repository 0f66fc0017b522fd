"""What happens to training when curvature ranks die, stall or lie, and to curvature ranks when training is gone.

One training process for all; curvature processes come and go.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import dho2_ds
from dho2_ds.pipeline.door import Refused, knock
from dho2_ds.pipeline.plan import fingerprint
from dho2_ds.pipeline.wire import Link
from tests import engines
from tests.pipeline_job import TIMEOUT

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
PATIENCE = 60.0

pytestmark = pytest.mark.timeout(150)


class Training:
    """A training process, and what it says of itself."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_file = folder, folder / "run.json"
        environment = {**ENVIRONMENT, "DHO2_RUN_FILE": str(self.run_file)}
        for name in ("DHO2_JOIN", "DHO2_JOB_TOKEN", "RANK", "WORLD_SIZE"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline_job", "train", str(folder)], env=environment
        )
        self.wait_for(lambda s: s["steps"] > 5)

    @property
    def status(self) -> dict[str, Any]:
        path = self.folder / "status.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"steps": 0}
        return found

    def wait_for(self, happened: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while not happened(status := self.status):
            assert self.process.poll() is None, "training has ended"
            assert time.monotonic() < deadline, f"it did not happen within {PATIENCE} s: {status}"
            time.sleep(0.02)
        return status

    @property
    def fingerprint(self) -> str:
        """What a curvature rank with the right model says of it."""
        run = engines.Run("single", 0, 1, {**engines.SETTINGS, "curvature": {}})
        return fingerprint(run.optimizer.config, run.optimizer._host)

    @contextlib.contextmanager
    def curvature(self, fault: str = "none", **environment: str) -> Iterator[subprocess.Popen[str]]:
        """A curvature process, killed at the end."""
        joining = {**ENVIRONMENT, **json.loads(self.run_file.read_text()), **environment}
        command = [sys.executable, "-m", "tests.pipeline_job", "curve", fault]
        process = subprocess.Popen(command, env=joining, stderr=subprocess.PIPE, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.communicate()
            if self.process.poll() is None:  # let training notice, and say so
                at = self.wait_for(lambda s: not s.get("connected"))
                self.wait_for(lambda s: s["steps"] > at["steps"] + 25)

    def check(self, before: dict[str, Any], *, lost: int, warnings: int) -> None:
        """Training has gone on as it should have: finite, never waiting, one warning for one event."""
        now = self.wait_for(lambda s: s["steps"] > before["steps"] + 20)
        assert now["finite"] and now["longest"] < TIMEOUT / 2, now
        assert now["lost"] - before["lost"] == lost, (before, now)
        new = now["warnings"][len(before["warnings"]) :]
        assert len(new) == warnings, new


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    found = Training(tmp_path_factory.mktemp("training"))
    yield found
    found.process.kill()
    found.process.wait()


def gone(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=PATIENCE)
    return process.returncode


@pytest.mark.parametrize("fault", ["die_in_lanczos", "die_receiving", "die_sending"])
def test_killed_during_a_job(training: Training, fault: str) -> None:
    before = training.status
    with training.curvature(fault) as process:
        assert gone(process) == -signal.SIGKILL
        training.wait_for(lambda s: s["lost"] == before["lost"] + 1)
    training.check(before, lost=1, warnings=1)


def test_serves_and_is_killed_when_idle(training: Training) -> None:
    before = training.status
    with training.curvature() as process:
        training.wait_for(lambda s: s["refreshes"] >= before["refreshes"] + 2)
        at_work = training.wait_for(lambda s: s["connected"] and not s["in_flight"])
        process.kill()
        training.wait_for(lambda s: not s["connected"])
    now = training.wait_for(lambda s: s["steps"] > at_work["steps"] + 30)
    assert now["lost"] - before["lost"] <= 1  # it may have got its next job meanwhile
    training.check(at_work, lost=now["lost"] - at_work["lost"], warnings=1)


def test_stalls_and_comes_back(training: Training) -> None:
    before = training.status
    with training.curvature() as process:
        training.wait_for(lambda s: s["refreshes"] > before["refreshes"])
        process.send_signal(signal.SIGSTOP)
        stalled = training.wait_for(lambda s: s["lost"] == before["lost"] + 1)
        training.check(before, lost=1, warnings=1)
        process.send_signal(signal.SIGCONT)
        training.wait_for(lambda s: s["refreshes"] > stalled["refreshes"])
        assert process.poll() is None


def test_sends_nan(training: Training) -> None:
    before = training.status
    with training.curvature("send_nan"):
        now = training.wait_for(lambda s: s["rejected"] >= before["rejected"] + 1)
    assert "not finite" in now["last_refresh"]
    assert now["refreshes"] == before["refreshes"] and now["eigenvalues"] == before["eigenvalues"]
    assert now["finite"]


def test_refused_with_a_reason(training: Training) -> None:
    before = training.status
    with training.curvature("other_model") as process:
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3 and "must be 6 tensors of 214 parameters" in errors, errors
    training.check(before, lost=0, warnings=0)


def asks(training: Training, token: str | None = None, **meta: str) -> dict[str, Any]:
    """Knock at the training job's door as rank 0 of a curvature job does, and go away."""
    found = json.loads(training.run_file.read_text())
    mine = {"version": dho2_ds.__version__, "fingerprint": training.fingerprint, "asks": True, **meta}
    link, answer = knock(found["DHO2_JOIN"], token or found["DHO2_JOB_TOKEN"], mine, 5.0, "training")
    link.close()
    return answer


@pytest.mark.parametrize(
    "wrong,reason",
    [
        ({"token": "0" * 64}, "must be the job's token"),
        ({"token": "é"}, "must be the job's token"),
        ({"version": "0.0.0"}, "dho2_ds 0.0.0: must be"),
        ({"fingerprint": "another"}, "model=another: must be"),
    ],
)
def test_nobody_else_gets_in(training: Training, wrong: dict[str, str], reason: str) -> None:
    before = training.status
    assert asks(training)["admitted"]
    with pytest.raises(Refused, match=reason):
        asks(training, **wrong)  # type: ignore[arg-type]
    training.check(before, lost=0, warnings=0)


def test_a_false_door_is_found_out(training: Training) -> None:
    """Whoever listens at the address without knowing the token gets no rank to work for it."""
    with socket.create_server(("127.0.0.1", 0)) as false:

        def answer() -> None:
            link = Link(false.accept()[0], 5.0, "joiner")
            link.send({"protocol": 1, "nonce": "n"})
            link.receive()
            link.send({"admitted": True, "proof": "guessed", "doors": []})

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(Refused, match="does not know the job's token"):
            knock(f"127.0.0.1:{false.getsockname()[1]}", "secret", {}, 5.0, "training")


def test_strangers_and_noise_at_the_door(training: Training) -> None:
    """Port scans, broken messages and pickles change nothing; a rank is let in while strangers hold connections."""
    before = training.status
    host, port = json.loads(training.run_file.read_text())["DHO2_JOIN"].rsplit(":", 1)
    held = [socket.create_connection((host, int(port))) for _ in range(4)]
    for noise in (b"", b"GET / HTTP/1.0\r\n\r\n", b"\xff" * 9000, b"\x00\x00\x00\x02{]", b"\x80\x04\x95."):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(noise)
    assert asks(training)["admitted"]
    for stranger in held:
        stranger.close()
    training.check(before, lost=0, warnings=0)


def test_the_token_is_for_its_owner(training: Training) -> None:
    assert stat.S_IMODE(training.run_file.stat().st_mode) == 0o600
    content = json.loads(training.run_file.read_text())
    assert set(content) == {"DHO2_JOIN", "DHO2_JOB_TOKEN"} and len(content["DHO2_JOB_TOKEN"]) == 64


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {**ENVIRONMENT, "DHO2_JOIN": f"127.0.0.1:{port}", "DHO2_JOB_TOKEN": "x"}
    command = [sys.executable, "-m", "tests.pipeline_job", "curve", "none"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1 and "no training job answers" in done.stderr, done.stderr


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_curvature_ends_when_training(training: Training, tmp_path: Path, how: str) -> None:
    own = Training(tmp_path)
    try:
        with own.curvature() as process:
            own.wait_for(lambda s: s["refreshes"] >= 1)
            if how == "ends":
                (tmp_path / "stop").touch()
                assert own.process.wait(PATIENCE) == 0
            else:
                own.process.kill()
            assert gone(process) == 0
    finally:
        own.process.kill()
        own.process.wait()
