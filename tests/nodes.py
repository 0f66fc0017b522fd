"""Several machines on one: each node has a network, a host name and processes of its own, and a cable to a switch.

A node is a set of Linux namespaces, held by a process that ends with this one, whatever happens; with it end all
processes of the node and its cable. Nothing of it is seen outside, so addresses may be the same in every run. The file
system is shared, as on a cluster, but for /dev/shm and /etc/hosts, which has a node's own name at loopback as Debian
and Ubuntu do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

_NAMESPACES = ["--net", "--uts", "--ipc", "--pid", "--mount"]


@dataclass(frozen=True)
class Node:
    """One machine. ``pid`` is of the process that holds its namespaces, ``switch`` of the switch's, as seen from
    outside; ``port`` is the switch's end of its cable, ``eth0`` its own."""

    name: str
    address: str
    pid: int
    switch: int
    port: str

    def command(self, *command: str) -> list[str]:
        """The command line that runs a command there."""
        return ["nsenter", *_NAMESPACES, "--target", str(self.pid), "--wd=.", *command]

    def run(self, *command: str) -> str:
        """Run a short command there and return what it prints."""
        return subprocess.run(self.command(*command), check=True, capture_output=True, text=True, timeout=30).stdout

    def start(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Start a command there, its output in a file; it ends with the node at the latest."""
        with log.open("wb") as output:
            return subprocess.Popen(
                self.command(*command), env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def traffic(self) -> int:
        """Bytes that went out and came in by the node's cable so far."""
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == "eth0":
                return int(numbers.split()[0]) + int(numbers.split()[8])
        raise AssertionError(f"{self.name} has no cable")


def why_not() -> str | None:
    """Why nodes cannot be made here; None if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)}: not found; they come with iproute2 and util-linux"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "ip", "link", "add", "type", "veth"], capture_output=True
    )
    return None if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.decode().strip()}"


@contextmanager
def network(count: int, folder: Path) -> Iterator[list[Node]]:
    """Nodes ``node0``, ``node1``, ... on one switch, which know each other by name."""
    names = [f"node{i}" for i in range(count)]
    addresses = [f"10.0.0.{i + 1}" for i in range(count)]
    known = {name: f"{address} {name}" for name, address in zip(names, addresses, strict=True)}
    with ExitStack() as stack:
        switch = stack.enter_context(_held("switch", known, folder))
        ip(switch, "link", "add", "bridge", "type", "bridge")
        ip(switch, "link", "set", "bridge", "up")
        nodes = []
        for i, (name, address) in enumerate(zip(names, addresses, strict=True)):
            node = Node(name, address, stack.enter_context(_held(name, known, folder)), switch, f"port{i}")
            ip(switch, *f"link add {node.port} type veth peer name eth0 netns {node.pid}".split())
            connect(node)
            nodes.append(node)
        yield nodes


def connect(node: Node) -> None:
    """Make both ends of its cable ready."""
    ip(node.switch, "link", "set", node.port, "master", "bridge", "up")
    ip(node.pid, "address", "add", f"{node.address}/24", "dev", "eth0")
    ip(node.pid, "link", "set", "eth0", "up")


def ip(pid: int, *arguments: str) -> None:
    """`ip` in the network of a process; process ids in its arguments are as seen from outside."""
    command = ["nsenter", "--net", "--target", str(pid), "ip", *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@contextmanager
def _held(name: str, known: Mapping[str, str], folder: Path) -> Iterator[int]:
    """Namespaces of a node: the process id of what holds them. It reads from us, and so ends when we do."""
    hosts = folder / f"hosts-{name}"
    others = [line for other, line in known.items() if other != name]
    hosts.write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {name}", *others, ""]))
    script = f"""
        hostname {name} && ip link set lo up
        mount -t tmpfs shm /dev/shm && mount --bind {hosts} /etc/hosts
        mount --bind /dev/null /etc/resolv.conf  # there is no name server to wait for
        echo ready; exec cat
    """
    command = ["unshare", *_NAMESPACES, "--mount-proc", "--fork", "--kill-child=KILL", "sh", "-ec", script]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0])
    finally:
        process.kill()
        process.wait(30)
