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
from typing import NoReturn

CHANNEL = "DHO2_SUPERVISED"
"""In a supervised child: the descriptor of its end of the channel."""

OFF = "DHO2_SUPERVISE"
"""Set to ``0``: no supervision; a curvature rank that dies ends the launch."""

REFUSED = 3
"""Exit code of a child that would not fare better another time."""

RESTARTS = 3
_PAUSE = 2.0  # seconds before the next start: the other curvature ranks notice first

_channel: socket.socket | None = None


def supervise() -> None:
    """Become the supervisor and never return; in its child, and where there is nothing to supervise, return at once.

    Nothing of the process but its environment and its command line is kept, so call it before anything is connected.
    """
    global _channel
    if CHANNEL in os.environ:
        _channel = _channel or socket.socket(fileno=int(os.environ[CHANNEL]))
        threading.Thread(target=_follow, args=(_channel,), daemon=True).start()
        return
    by_launcher = multiprocessing.parent_process() is None and sys.argv[:1] not in ([], [""], ["-c"])
    if by_launcher and os.environ.get(OFF) != "0" and os.name == "posix":
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.execv(sys.executable, [sys.executable, __file__, *sys.orig_argv])


def remember(environment: dict[str, str]) -> None:
    """Let the next child start with these variables set."""
    if _channel is not None:
        _channel.sendall(json.dumps(environment).encode() + b"\n")


def supervised() -> bool:
    """True in a child of the supervisor."""
    return _channel is not None


def _follow(channel: socket.socket) -> None:
    """End with the supervisor."""
    try:
        channel.recv(1)
    except OSError:
        pass
    os._exit(1)


def main(command: list[str]) -> NoReturn:
    """Run the command until it ends with 0 or will not do better."""
    environment = dict(os.environ)
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _: object) -> None:
        if child is not None:
            child.send_signal(number)

    for caught in (signal.SIGTERM, signal.SIGINT):
        signal.signal(caught, forward)
    rank = environment.get("RANK", environment.get("OMPI_COMM_WORLD_RANK", "?"))
    for attempt in range(RESTARTS + 1):
        ours, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            child = subprocess.Popen(command, env={**environment, CHANNEL: str(number)}, pass_fds=[number])
        learned, code = _wait(child, ours)
        environment.update(learned)
        ours.close()
        if code in (0, REFUSED) or -code in (signal.SIGTERM, signal.SIGINT):
            break
        last = attempt == RESTARTS
        print(
            f"[dho2] the curvature process of rank {rank} ended with code {code}; "
            + ("training goes on without it" if last else "it is started again"),
            file=sys.stderr,
            flush=True,
        )
        if not last:
            time.sleep(_PAUSE)
    sys.stdout.flush()
    os._exit(0)


def _wait(child: subprocess.Popen[bytes], channel: socket.socket) -> tuple[dict[str, str], int]:
    """What the child wants remembered, and its exit code."""
    said = b""
    while part := channel.recv(65536):  # until the child, and with it its end, is gone
        said += part
    learned: dict[str, str] = {}
    for line in said.splitlines():
        learned.update(json.loads(line))
    return learned, child.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
