"""A training rank's end of the bridge: its door, the links of the present session, and the job under way.

Everything here runs on a thread of its own. The training thread hands over a job, looks at its state, and takes the
result; it never waits for the network.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from dho2_ds.monitor import logger
from dho2_ds.pipeline.batches import announce
from dho2_ds.pipeline.door import Door, Refused
from dho2_ds.pipeline.plan import covers, intervals_from_json, layout_to_json
from dho2_ds.pipeline.wire import Intervals, Link, LinkError, dtype_name, dtype_named, readable
from dho2_ds.sharding.layout import Layout

WEIGHTS = "weights"
"""The space of vectors that are laid out like the host's weights; a base may have another one for its state."""

_INCOMPLETE = 60.0  # seconds after which a session to which not all curvature ranks came is forgotten


class State(Enum):
    """Of the job under way, as this rank sees it."""

    IDLE = "idle"
    FLYING = "flying"
    DONE = "done"
    BAD = "bad"  # a result came and cannot be used
    LOST = "lost"  # the curvature side is gone


@dataclass
class Job:
    """One refresh, ordered.

    Attributes:
        number: counts up. order: JSON that goes to every curvature rank.
        parts: (name, space, CPU vector) to be redistributed; ready when ``staged`` has been called.
        batch: JSON form of this rank's micro-batches, and its tensors; None where curvature ranks have data.
        rows: most eigenvectors that may come back. dtype: in which.
    """

    number: int
    order: dict[str, Any]
    parts: list[tuple[str, str, Tensor]]
    staged: Callable[[], None]
    batch: tuple[list[Any], list[Tensor]] | None
    rows: int
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    vectors: Tensor | None = None
    began: float = field(default_factory=time.monotonic)


class Session:
    """The links to all ranks of one curvature job."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.size = number, size
        self.links: dict[int, Link] = {}
        self.send: dict[int, dict[str, Intervals]] = {}
        self.receive: dict[int, Intervals] = {}
        self.ready = False
        self.began = time.monotonic()

    def close(self, reason: str, within: float | None = None) -> None:
        """Tell every curvature rank why, as far as it listens (``within`` seconds), and end the links."""
        for link in self.links.values():
            try:
                if within is not None:
                    link.set_timeout(within)
                link.send({"closed": reason})
            except (LinkError, OSError):
                pass  # it knows already
            link.close()


class Bridge:
    """Admits curvature ranks, and sends jobs to them and their results back.

    Args:
        rank, world: of this process among the training ranks.
        host, port: where to listen. token: the job's.
        timeout: seconds: of a transfer's progress, and of a whole job.
        doors: gives the addresses of all training ranks' doors, or None while they are not known.

    Attributes:
        address: of this rank's door. timings: ``(what, job, begin, end)`` in ``time.monotonic()`` seconds, latest last.
    """

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        host: str,
        port: int,
        token: str,
        timeout: float,
        doors: Callable[[], list[str] | None],
    ) -> None:
        self._rank, self._world, self._timeout, self._doors = rank, world, timeout, doors
        self._lock = threading.Lock()
        self._layouts: dict[str, Layout] = {}
        self._fingerprint = ""
        self._session: Session | None = None
        self._ended: list[tuple[Session, str]] = []
        self._job: Job | None = None
        self._new: Job | None = None
        self._state, self._reason = State.IDLE, ""
        self._changed = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closed = False
        self.timings: list[tuple[str, int, float, float]] = []
        self._door = Door(host, port, token, self._admit, timeout)
        self.address = self._door.address
        threading.Thread(target=self._run, name="dho2 bridge", daemon=True).start()

    # -- what the training thread calls ---------------------------------------------------------------------------

    def describe(self, layouts: Mapping[str, Layout], fingerprint: str) -> None:
        """Set what this rank holds; a session with another layout ends."""
        if (dict(layouts), fingerprint) != (self._layouts, self._fingerprint):
            self.drop("the training side changed its layout")
            self._layouts, self._fingerprint = dict(layouts), fingerprint

    @property
    def session(self) -> int:
        """Number of the session all of whose links of this rank are ready; 0 without one."""
        session = self._session
        return session.number if session is not None and session.ready else 0

    @property
    def state(self) -> State:
        """Of the job that was started last."""
        return self._state

    @property
    def reason(self) -> str:
        """Why the job is bad or lost."""
        return self._reason

    def start(self, job: Job) -> None:
        """Hand over a job; returns at once."""
        with self._lock:
            self._new, self._state, self._reason = job, State.FLYING, ""
            self._changed.clear()
        self._wake()

    def take(self) -> tuple[Tensor | None, dict[str, Any]]:
        """The result of a job that is done: ((k, n_local) CPU rows or None, the report)."""
        job = self._job
        assert job is not None and self._state is State.DONE
        self._job, self._state = None, State.IDLE
        return job.vectors, job.results[0]

    def forget(self) -> None:
        """Leave a bad or lost job behind."""
        self._job, self._new, self._state = None, None, State.IDLE

    def wait(self, seconds: float) -> State:
        """Wait until the job is no longer flying; for replays and tests."""
        self._changed.wait(seconds)
        return self._state

    def drop(self, reason: str) -> None:
        """End the session and forget the job. Does not wait: the links are closed on the bridge's thread."""
        with self._lock:
            if self._session is not None:
                self._ended.append((self._session, reason))
            self._session = None
            self.forget()
        self._wake()

    def close(self) -> None:
        """Training has ended: tell the curvature ranks, and listen no more. May be called twice."""
        if not self._closed:
            self._closed = True
            self._door.close()
            with self._lock:
                session, self._session = self._session, None
            if session is not None:
                session.close("training ended", within=1.0)
            self._wake()

    # -- the door's thread ----------------------------------------------------------------------------------------

    def _admit(self, link: Link, meta: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
        doors = self._doors()
        if doors is None or not self._layouts:
            raise Refused("the training ranks are not ready yet", retry=True)
        if meta.get("version") != _version():
            raise Refused(f"dho2_ds {meta.get('version')}: must be {_version()}, as on the training ranks; install it")
        if meta.get("fingerprint") != self._fingerprint:
            raise Refused(
                f"model={meta.get('fingerprint')}: must be {self._fingerprint} as in the training job, names and order "
                "too; start the same script with the same configuration"
            )
        if meta.get("asks"):  # rank 0 of a curvature job looks where to go
            return {"doors": doors}, link.close
        number, rank, size = int(meta["session"]), int(meta["rank"]), int(meta["size"])
        with self._lock:
            session = self._session
            if session is not None and session.number != number:
                if session.ready or time.monotonic() - session.began < _INCOMPLETE:
                    raise Refused("other curvature ranks are connected", retry=True)
                self._ended.append((session, "not all curvature ranks came"))
                session = None
            if session is None:
                session = self._session = Session(number, size)
            if not (size == session.size and 0 <= rank < size) or rank in session.links:
                raise Refused(f"curvature rank {rank} of {size}: must be one that is not connected yet")
        layouts = {space: layout_to_json(layout) for space, layout in self._layouts.items()}
        link.peer = f"curvature rank {rank}"

        def welcome() -> None:
            session.links[rank] = link
            self._wake()

        return {"rank": self._rank, "world": self._world, "layouts": layouts}, welcome

    # -- the bridge's thread --------------------------------------------------------------------------------------

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            pass  # it will wake anyway

    def _run(self) -> None:
        while not self._closed:
            session = self._session
            try:
                links: list[Link | _Pipe] = list(session.links.values()) if session is not None else []
                events = readable([_Pipe(self._wake_read), *links], 1.0)
                self._drain()
                while self._ended:
                    ended, reason = self._ended.pop()
                    ended.close(reason)
                if session is None or session is not self._session:
                    self._fail_new()
                    continue
                for source in events:
                    if isinstance(source, Link):
                        self._hear(session, source)
                self._dispatch(session)
                if self._state is State.FLYING and self._job and time.monotonic() - self._job.began > self._timeout:
                    raise LinkError(f"no result within {self._timeout:.0f} s (curvature.timeout)")
            except LinkError as error:
                self._lose(session, str(error))
            except Exception as error:  # a malformed message: as good as a lost link
                self._lose(session, f"{type(error).__name__}: {error}")

    def _drain(self) -> None:
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            pass

    def _fail_new(self) -> None:
        with self._lock:
            if self._new is not None:
                self._new = None
                self._settle(State.LOST, self._reason or "the curvature ranks are gone")

    def _settle(self, state: State, reason: str = "") -> None:
        self._state, self._reason = state, reason
        self._changed.set()

    def _lose(self, session: Session | None, reason: str) -> None:
        with self._lock:
            if session is not self._session or session is None:
                return
            self._session = None
            if self._state is State.FLYING:
                self._settle(State.LOST, reason)
            self._reason, self._new = reason, None
        session.close(f"another link failed: {reason}")

    def _hear(self, session: Session, link: Link) -> None:
        rank = next(r for r, other in session.links.items() if other is link)
        message = link.receive()
        if "plan" in message:
            self._plan(session, rank, message["plan"])
        elif "result" in message and self._job is not None and message["result"] == self._job.number:
            self._result(session, rank, link, self._job, message)
        else:
            raise LinkError(f"{link.peer}: an unexpected message with {sorted(message)}")

    def _plan(self, session: Session, rank: int, plan: dict[str, Any]) -> None:
        session.send[rank] = {
            space: intervals_from_json(plan["send"].get(space, []), layout.numel)
            for space, layout in self._layouts.items()
        }
        session.receive[rank] = intervals_from_json(plan["receive"], self._layouts[WEIGHTS].numel)
        if len(session.receive) == session.size:
            if not covers(list(session.receive.values()), self._layouts[WEIGHTS]):
                raise LinkError("the curvature ranks' plans do not cover this rank's shard")
            session.ready = True
            if self._rank == 0:
                logger.info("%d curvature rank(s) connected", session.size)

    def _dispatch(self, session: Session) -> None:
        with self._lock:
            if self._new is None:
                return
            if not session.ready:
                raise LinkError("the curvature ranks are not connected")
            job, self._new = self._new, None
            self._job = job
        job.staged()
        began = time.monotonic()
        for rank, link in sorted(session.links.items()):
            forms, tensors = job.batch if job.batch is not None and self._feeds(rank, session.size) else ([], [])
            link.send(
                {
                    "job": job.number,
                    **job.order,
                    "parts": [[name, space, dtype_name(part.dtype)] for name, space, part in job.parts],
                    "batch": None if job.batch is None else {"forms": forms, "tensors": announce(tensors)},
                }
            )
            for _, space, part in job.parts:
                link.send_parts(part, session.send[rank].get(space, []))
            for tensor in tensors:
                link.send_tensor(tensor)
        job.parts, job.batch = [], None  # the snapshot is no longer needed
        self._note("send", job, began)

    def _feeds(self, rank: int, size: int) -> bool:
        """Whether this rank's batches go to curvature rank ``rank``; every batch goes to one, every rank gets one."""
        return rank == self._rank % size if size <= self._world else self._rank == rank % self._world

    def _result(self, session: Session, rank: int, link: Link, job: Job, message: dict[str, Any]) -> None:
        began = time.monotonic()
        k = int(message["kept"])
        if message["accepted"]:
            if not 0 < k <= job.rows:
                raise LinkError(f"{link.peer}: {k} eigenvectors: must be 1 to {job.rows}")
            if job.vectors is None:
                dtype = dtype_named(message["dtype"])
                job.vectors = torch.zeros(k, self._layouts[WEIGHTS].numel, dtype=dtype)
            if job.vectors.shape[0] != k:
                raise LinkError(f"{link.peer}: {k} eigenvectors: must be as many as the other ranks'")
            link.receive_parts(job.vectors, session.receive[rank])
        job.results[rank] = message
        if len(job.results) < session.size:
            return
        self._note("receive", job, began)
        finite = job.vectors is None or bool(torch.isfinite(job.vectors).all())
        same = all(_verdict(result) == _verdict(job.results[0]) for result in job.results.values())
        if finite and same:
            self._settle(State.DONE)
        else:
            self._settle(State.BAD, "curvature ranks disagree" if finite else "the eigenvectors sent are not finite")

    def _note(self, what: str, job: Job, began: float) -> None:
        self.timings.append((what, job.number, began, time.monotonic()))
        del self.timings[:-1000]


class _Pipe:
    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        return self._number


def _verdict(result: dict[str, Any]) -> Sequence[Any]:
    return [result["accepted"], result["kept"], result["report"]["eigenvalues"], result["report"]["next_eigenvalue"]]


def _version() -> str:
    from dho2_ds import __version__

    return __version__
