"""Messages between a training rank and a curvature rank: JSON, then raw tensor bytes. Never pickle.

One message is a 4-byte length, a JSON object, and the bytes that the object announces. Whoever receives checks shapes
and dtypes in the object before it reads a byte of a tensor, and reads it straight into memory of its own.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

Intervals = list[tuple[int, int]]
"""(local offset, length) pairs: the part of a rank's vector that goes over one link, in the order in which it goes."""

MAX_HEADER = 256 << 20  # bytes of JSON of an admitted peer: layouts of very many parameters
_LENGTH = struct.Struct("!I")
_SLICE = 4 << 20  # bytes: the timeout is for progress, not for the whole message
_SMALL_SLICE = 128 << 10  # bytes: some 0.1 ms of a core


T = TypeVar("T", bound="HasFileno")


class LinkError(ConnectionError):
    """The other side is gone, silent for too long, or does not keep to the protocol."""


class Link:
    """One connection, blocking, with a timeout for progress.

    Attributes:
        pace: seconds of rest per second of a core's time, for a thread that has to share training's only core.
        until: ``time.monotonic()`` after which a message that is still coming or going counts as lost; None: never.

    Args:
        sock: connected; owned from now on. timeout: seconds without progress after which the peer counts as gone.
        peer: for messages, e.g. ``"curvature rank 1"``.
    """

    def __init__(self, sock: socket.socket, timeout: float, peer: str) -> None:
        self._socket, self.peer = sock, peer
        self.until: float | None = None
        self.pace = 0.0
        sock.settimeout(timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a peer whose machine is gone sends no end
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def fileno(self) -> int:
        """For ``select``; -1 once closed."""
        return self._socket.fileno()

    def set_timeout(self, seconds: float) -> None:
        """Change how long the peer may make no progress."""
        self._socket.settimeout(seconds)

    def shutdown(self) -> None:
        """End the connection without waiting; the peer, and a thread of ours amid a transfer, see it at once."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was not connected any more

    def close(self) -> None:
        """End the connection and free it. May be called twice."""
        self.shutdown()
        self._socket.close()

    def send(self, message: dict[str, Any]) -> None:
        """Send one JSON object.

        Raises:
            LinkError: the peer is gone or does not take it.
        """
        content = json.dumps(message, separators=(",", ":")).encode()
        self._send(memoryview(_LENGTH.pack(len(content)) + content))

    def receive(self, limit: int = MAX_HEADER) -> dict[str, Any]:
        """The next JSON object, of at most ``limit`` bytes.

        Raises:
            LinkError: there is none.
        """
        length = bytearray(_LENGTH.size)
        self._receive(memoryview(length))
        (size,) = _LENGTH.unpack(length)
        if size > limit:
            raise LinkError(f"{self.peer}: a message of {size} bytes: must be at most {limit}")
        content = bytearray(size)
        self._receive(memoryview(content))
        try:
            message = json.loads(content)
        except ValueError as error:
            raise LinkError(f"{self.peer}: a message is not JSON") from error
        if not isinstance(message, dict):
            raise LinkError(f"{self.peer}: a message is not a JSON object")
        return message

    def send_parts(self, rows: Tensor, intervals: Intervals) -> None:
        """Send some columns of ``rows``, (n,) or (k, n) local on the CPU: interval by interval, row by row."""
        for start, length in intervals:
            for row in rows.view(-1, rows.shape[-1]):
                self._send(_bytes(row[start : start + length]))

    def receive_parts(self, rows: Tensor, intervals: Intervals) -> None:
        """The reverse of :meth:`send_parts`, straight into ``rows``."""
        for start, length in intervals:
            for row in rows.view(-1, rows.shape[-1]):
                self._receive(_bytes(row[start : start + length]))

    def send_tensor(self, tensor: Tensor) -> None:
        """Send the bytes of a CPU tensor of any shape."""
        self._send(_bytes(tensor.contiguous()))

    def receive_tensor(self, tensor: Tensor) -> None:
        """Fill a contiguous CPU tensor."""
        self._receive(_bytes(tensor))

    @property
    def _slice(self) -> int:
        return _SLICE if not self.pace else _SMALL_SLICE

    def _rest(self, began: float) -> None:
        if self.pace:
            time.sleep(self.pace * (time.thread_time() - began))

    def _send(self, view: memoryview) -> None:
        try:
            for start in range(0, len(view), self._slice):
                self._in_time()
                began = time.thread_time()
                self._socket.sendall(view[start : start + self._slice])
                self._rest(began)
        except OSError as error:
            raise LinkError(f"{self.peer}: {error or type(error).__name__}") from error

    def _in_time(self) -> None:
        if self.until is not None and time.monotonic() > self.until:
            raise LinkError(f"{self.peer}: too slow")

    def _receive(self, view: memoryview) -> None:
        got = 0
        while got < len(view):
            self._in_time()
            began = time.thread_time()
            try:
                count = self._socket.recv_into(view[got : got + self._slice])
            except OSError as error:
                raise LinkError(f"{self.peer}: {error or type(error).__name__}") from error
            if not count:
                raise LinkError(f"{self.peer}: it closed the connection")
            got += count
            if len(view) > _SMALL_SLICE:
                self._rest(began)


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    content: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def readable(sources: Sequence[T], seconds: float | None) -> list[T]:
    """Those of several open links or sockets on which something has arrived, after at most ``seconds``.

    Raises:
        LinkError: one of them is closed.
    """
    poll = select.poll()  # not select(), which knows no descriptor above 1023
    by_number = {source.fileno(): source for source in sources}
    if -1 in by_number:
        raise LinkError("a link was closed")
    for number in by_number:
        poll.register(number, select.POLLIN)
    events = poll.poll(None if seconds is None else seconds * 1e3)
    return [by_number[number] for number, _ in events]


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: Any) -> torch.dtype:
    """The reverse of :func:`dtype_name`.

    Raises:
        LinkError: there is no such dtype.
    """
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise LinkError(f"a message names the dtype {name!r}, which torch does not have")
    return found
