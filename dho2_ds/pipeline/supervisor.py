"""Keeps a curvature rank's failure away from the launcher, which would end training with it.

``deepspeed``, ``torchrun`` and ``mpirun`` end all processes when one fails. So a curvature rank's process becomes this
small program (no torch in it), which runs the script as its child, starts it again when it dies, and ends with 0 at
last. Run as a script: ``python supervisor.py COMMAND...``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time

CHANNEL = "DHO2_SUPERVISED"
"""In a supervised child: the descriptor of its end of the channel, and how many children there were before."""

OFF = "DHO2_SUPERVISE"
"""Set to ``0``: no supervision; a curvature rank that is killed ends the launch, one that fails is gone for good."""

REFUSED = 3
"""Exit code of a child that would not fare better another time."""

RESTARTS = 3
"""Failures in a row after which a child is not started again."""

_STEADY = 600.0  # seconds: a child that lived longer had not failed at what the one before failed at
_PAUSE = 2.0  # seconds before the next start: the other curvature ranks notice first

_channel: socket.socket | None = None


def supervise() -> None:
    """Become the supervisor and never return; in its child, and where there is nothing to supervise, return at once.

    Nothing of the process but its environment and its command line is kept, so call it before anything is connected.
    """
    global _channel
    if CHANNEL in os.environ:
        _channel = _channel or socket.socket(fileno=int(os.environ[CHANNEL].partition(":")[0]))
        threading.Thread(target=_follow, args=(_channel,), daemon=True).start()
        return
    by_launcher = multiprocessing.parent_process() is None and sys.argv[:1] not in ([], [""], ["-c"])
    if by_launcher and os.environ.get(OFF) != "0" and os.name == "posix":
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        script = getattr(sys.modules["__main__"], "__file__", None)  # absolute: the folder may have been changed
        command = [script if script and word == sys.argv[0] else word for word in sys.orig_argv]
        os.execv(sys.executable, [sys.executable, __file__, *command])


def remember(environment: dict[str, str]) -> None:
    """Let the next child start with these variables set."""
    if _channel is not None:
        _channel.sendall(json.dumps(environment).encode() + b"\n")


def supervised() -> bool:
    """True in a child of the supervisor."""
    return _channel is not None


def restarted() -> bool:
    """True in a child that follows one that died."""
    return not os.environ.get(CHANNEL, ":0").endswith(":0")


def _follow(channel: socket.socket) -> None:
    """End with the supervisor."""
    try:
        channel.recv(1)
    except OSError:
        pass
    os._exit(1)


class _Supervisor:
    """Runs one command until it ends with 0, will not do better, or is to stop."""

    def __init__(self, command: list[str]) -> None:
        self._command, self._environment = command, dict(os.environ)
        self._child: subprocess.Popen[bytes] | None = None
        self._stop = threading.Event()
        for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
            signal.signal(getattr(signal, name), self._forward)

    def _forward(self, number: int, _: object) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self._stop.set()
        if self._child is not None:
            self._child.send_signal(number)

    def run(self) -> None:
        rank = self._environment.get("RANK", self._environment.get("OMPI_COMM_WORLD_RANK", "?"))
        attempt = failures = 0
        while not self._stop.is_set():
            began = time.monotonic()
            code = self._once(attempt)
            if code in (0, REFUSED) or self._stop.is_set():
                return
            attempt, failures = attempt + 1, 1 if time.monotonic() - began > _STEADY else failures + 1
            last = failures > RESTARTS
            then = "training goes on without it" if last else "it is started again"
            print(f"[dho2] the curvature process of rank {rank} ended with code {code}; {then}", file=sys.stderr)
            if last:
                return
            self._stop.wait(_PAUSE)

    def _once(self, attempt: int) -> int:
        """The exit code of one child."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                number = theirs.fileno()
                environment = {**self._environment, CHANNEL: f"{number}:{attempt}"}
                self._child = subprocess.Popen(self._command, env=environment, pass_fds=[number])
            listener = threading.Thread(target=self._listen, args=(ours,), daemon=True)
            listener.start()
            code = self._child.wait()
            listener.join(1.0)  # what was said is there; children of the child may hold the channel open for longer
        return code

    def _listen(self, channel: socket.socket) -> None:
        said = b""
        try:
            while part := channel.recv(65536):
                said += part
                *lines, said = said.split(b"\n")
                for line in lines:
                    self._environment.update(json.loads(line))
        except (OSError, ValueError):
            pass  # half a word of a child that died


if __name__ == "__main__":
    _Supervisor(sys.argv[1:]).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
