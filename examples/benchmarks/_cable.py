"""A cable whose speed and delay can be set while it is in use: Ethernet frames through `wirefilter` (Debian: vde2)."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.nodes import Node, connect, ip

TOOLS = "vde_switch", "wirefilter"
MEGABIT = 1_000_000 // 8


class Cable:
    """One that `adjustable` has laid."""

    def __init__(self, control: Path) -> None:
        self._control = control

    def set(self, *, delay_ms: float = 0.0, megabits: float = 0.0) -> None:
        """Delay and speed of both directions; 0: none, unlimited."""
        for command in (f"delay {delay_ms:g}", f"bandwidth {megabits * MEGABIT:g}"):
            with socket.socket(socket.AF_UNIX) as link:
                link.settimeout(10)
                link.connect(str(self._control))
                self._until(link, b"$ ")
                link.sendall(command.encode() + b"\n")
                answer = self._until(link, b"$ ")
            if b"1000 Success" not in answer:
                raise RuntimeError(f"wirefilter, {command}: {answer!r}")

    @staticmethod
    def _until(link: socket.socket, end: bytes) -> bytes:
        found = b""
        while not found.endswith(end):
            part = link.recv(4096)
            if not part:
                raise RuntimeError(f"wirefilter has hung up: {found!r}")
            found += part
        return found


@contextmanager
def adjustable(node: Node, folder: Path) -> Iterator[Cable]:
    """Take a node's cable away and lay one that can be adjusted."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(f"{', '.join(missing)}: not found; apt-get install vde2")
    ip(node.switch, "link", "delete", node.port)
    with ExitStack() as stack:

        def start(pid: int, *command: str) -> None:
            inside = ["nsenter", "--net", "--target", str(pid), *command]
            quiet = subprocess.DEVNULL
            process = subprocess.Popen(inside, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet)
            stack.callback(process.wait, 10)
            stack.callback(process.kill)

        ends = folder / "switch.end", folder / "node.end"
        start(node.switch, "vde_switch", "-sock", str(ends[0]), "-tap", node.port)
        start(node.pid, "vde_switch", "-sock", str(ends[1]), "-tap", "eth0")
        _wait_for(*(end / "ctl" for end in ends))
        control = folder / "wirefilter.control"
        start(node.pid, "wirefilter", "-v", f"{ends[0]}:{ends[1]}", "-M", str(control))
        _wait_for(control)
        connect(node)
        yield Cable(control)


def _wait_for(*paths: Path) -> None:
    deadline = time.monotonic() + 10
    while not all(path.exists() for path in paths):
        if time.monotonic() > deadline:
            raise RuntimeError(f"{paths}: did not appear within 10 s")
        time.sleep(0.05)
