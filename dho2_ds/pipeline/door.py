"""Who may join: the job's token, the handshake on every connection, and the listener of a training rank.

Both sides prove that they know the token without sending it (HMAC-SHA256 over fresh random numbers of both), before
anything else is read. What follows is neither encrypted nor signed: the network of a training job is trusted as it is
for its collectives, but nobody who merely reaches the port gets in.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dho2_ds.config import ConfigError
from dho2_ds.monitor import logger
from dho2_ds.pipeline.wire import Link

TOKEN, JOIN = "DHO2_JOB_TOKEN", "DHO2_JOIN"
PROTOCOL = 1
SHAKE_TIMEOUT = 10.0
_GREETING = 4096  # bytes of JSON that a stranger may send
_GUESTS = 16  # handshakes at once
_SIOCGIFADDR = 0x8915  # of Linux, which the `socket` module has no name for: address of an interface


class Refused(RuntimeError):
    """The training job does not admit this curvature rank; the message says why.

    ``retry``: it may at another time.
    """

    def __init__(self, reason: str, *, retry: bool = False) -> None:
        super().__init__(reason)
        self.retry = retry


def new_token() -> str:
    """256 random bits as text."""
    return secrets.token_hex(32)


def _proof(token: str, role: str, first: str, second: str, meta: str) -> str:
    text = json.dumps([role, PROTOCOL, first, second, meta])
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def _knows(message: dict[str, Any], expected: str) -> bool:
    return hmac.compare_digest(str(message.get("proof", "")).encode("utf-8", "replace"), expected.encode())


def knock(address: str, token: str, meta: dict[str, Any], timeout: float, peer: str) -> tuple[Link, dict[str, Any]]:
    """Connect to a training rank's door and be admitted.

    Args:
        address: ``host:port``. meta: what the joiner says of itself, covered by its proof. timeout: of the link.

    Returns:
        The link, and what the training rank says in return.

    Raises:
        Refused: with the reason. OSError: nobody listens there, or it is not a door of a training job.
    """
    link = Link(socket.create_connection(split_address(address), SHAKE_TIMEOUT), SHAKE_TIMEOUT, peer)
    try:
        theirs = str(link.receive(_GREETING).get("nonce"))
        nonce, said = secrets.token_hex(16), json.dumps(meta, sort_keys=True)
        link.send({"protocol": PROTOCOL, "nonce": nonce, "meta": said,
                   "proof": _proof(token, "join", theirs, nonce, said)})  # fmt: skip
        verdict = link.receive(_GREETING)
        if not verdict.get("admitted"):
            raise Refused(str(verdict.get("reason")), retry=bool(verdict.get("retry")))
        if not _knows(verdict, _proof(token, "admit", nonce, theirs, "")):
            raise Refused(f"{address} does not know the job's token; check the address")
        answer = link.receive()
    except BaseException:
        link.close()
        raise
    link.set_timeout(timeout)
    return link, answer


Admit = Callable[[Link, dict[str, Any]], tuple[dict[str, Any], Callable[[], None]]]
"""``admit(link, meta)`` for a link whose owner has proved the token: what is answered, and what to call after that. Or
it raises :class:`Refused`."""


class Door:
    """Listens on a training rank; every connection is greeted on a thread of its own, for a few seconds at most.

    Args:
        host, port: where to listen; port 0: one that is free. token: the job's. admit: see :data:`Admit`.
        timeout: of admitted links.

    Attributes:
        address: ``host:port`` to be reached at.
    """

    def __init__(self, host: str, port: int, token: str, admit: Admit, timeout: float) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=64)
        name = f"[{host}]" if ":" in host else host
        self.address = f"{name}:{self._listener.getsockname()[1]}"
        self._token, self._admit, self._timeout = token, admit, timeout
        self._guests = threading.Semaphore(_GUESTS)
        threading.Thread(target=self._listen, name="dho2 door", daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
        except OSError:
            pass
        self._listener.close()

    def _listen(self) -> None:
        while self._listener.fileno() != -1:
            self._guests.acquire()  # a full door lets others wait in the backlog: handshakes are short
            try:
                connection, origin = self._listener.accept()
                threading.Thread(target=self._greet, args=(connection, str(origin[0])), daemon=True).start()
            except (OSError, RuntimeError):  # closed, or out of descriptors or threads for the moment
                self._guests.release()
                time.sleep(0.1)

    def _greet(self, connection: socket.socket, origin: str) -> None:
        try:
            link = Link(connection, SHAKE_TIMEOUT, origin)
            link.until = time.monotonic() + SHAKE_TIMEOUT  # a stranger may send one byte at a time
            if not self._shake(link, origin):
                link.close()
        except Exception as error:  # a port scan, a joiner that gave up, or a stranger's nonsense: nothing to us
            logger.debug("a connection from %s was closed: %s", origin, error)
            connection.close()
        finally:
            self._guests.release()

    def _shake(self, link: Link, origin: str) -> bool:
        nonce = secrets.token_hex(16)
        link.send({"protocol": PROTOCOL, "nonce": nonce})
        hello = link.receive(_GREETING)
        theirs, said = str(hello.get("nonce")), str(hello.get("meta"))
        try:
            if hello.get("protocol") != PROTOCOL:
                raise Refused(f"protocol={hello.get('protocol')}: must be {PROTOCOL}; use the same version of dho2_ds")
            if not _knows(hello, _proof(self._token, "join", nonce, theirs, said)):
                raise Refused(f"{TOKEN}: must be the job's token; take it from the training job's run file")
            answer, welcome = self._admit(link, json.loads(said))
        except Refused as refusal:
            if not refusal.retry:
                logger.info("a curvature rank from %s was refused: %s", origin, refusal)
            link.send({"admitted": False, "reason": str(refusal), "retry": refusal.retry})
            return False
        link.send({"admitted": True, "proof": _proof(self._token, "admit", theirs, nonce, "")})
        link.until = None
        link.set_timeout(self._timeout)
        link.send({"admitted": True, **answer})
        welcome()
        return True


def write_run_file(address: str, token: str) -> Path:
    """Leave address and token where only this user can read them: ``$DHO2_RUN_FILE``, by default
    ``dho2-<uid>/run-<pid>.json`` in the folder for temporary files (a new folder if that one is not ours)."""
    chosen = os.environ.get("DHO2_RUN_FILE")
    if chosen:
        path = Path(chosen)
    else:
        folder = Path(tempfile.gettempdir(), f"dho2-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
            folder = Path(tempfile.mkdtemp(prefix="dho2-"))
        path = folder / f"run-{os.getpid()}.json"
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump({JOIN: address, TOKEN: token}, file, indent=1)
    return path


def split_address(address: str) -> tuple[str, int]:
    """``host``, ``host:port`` or ``[IPv6]:port`` as (host, port); port 0 where none is given.

    Raises:
        ConfigError: it is not one, or a wildcard, at which nobody can be reached.
    """
    host, colon, port = address.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        host, port = address, "0"
    host = host.strip("[]")
    if not port.isdigit() or int(port) > 65535 or host in ("", "0.0.0.0", "::"):
        raise ConfigError(f"address={address!r}: must be host or host:port, the host one of this machine's; name it")
    return host, int(port)


def own_host(towards: str | None) -> str:
    """The address of this machine's interface towards a host (the rendezvous'); loopback without one.

    Where that host is this machine, its name is often at loopback, which no other machine can reach. Then it is the
    address of the interface that ``GLOO_SOCKET_IFNAME`` or ``NCCL_SOCKET_IFNAME`` names, if one does.
    """
    if not towards:
        return "127.0.0.1"
    family, kind, _, _, where = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing
        found = str(probe.getsockname()[0])
    return _of_interface() or found if is_loopback(found) else found


def is_loopback(address: str) -> bool:
    """Whether only this machine itself reaches an address."""
    return ipaddress.ip_address(address).is_loopback


def _of_interface() -> str | None:
    """The IPv4 address of the interface that the collectives were told to use."""
    named = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME", "")
    name = named.split(",")[0].lstrip("=")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:  # there is none of that name: a prefix, say, as NCCL allows
            return None
    return socket.inet_ntoa(answer[20:24])
