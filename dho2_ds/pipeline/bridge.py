"""A training rank's end of the bridge: its door, the present session, and the job under way.

Everything here runs on threads of its own. The training thread hands over a job, looks at its state, and takes the
result; it never waits for the network.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from torch import Tensor

from dho2_ds.monitor import logger
from dho2_ds.pipeline.batches import announce
from dho2_ds.pipeline.door import Door, Refused
from dho2_ds.pipeline.plan import layout_to_json
from dho2_ds.pipeline.session import BadResult, Job, Session
from dho2_ds.pipeline.wire import Link, LinkError, dtype_name, readable
from dho2_ds.sharding.layout import Layout

_INCOMPLETE = 60.0  # seconds after which a session to which not all curvature ranks came is forgotten
_LAST_TURN = 5.0  # seconds the bridge's thread has to end when training does; its links are closed by then


class State(Enum):
    """Of the job under way, as this rank sees it."""

    IDLE = "idle"
    FLYING = "flying"
    DONE = "done"
    BAD = "bad"  # a result came and must not be used
    LOST = "lost"  # the curvature side is gone


class Bridge:
    """Admits curvature ranks, and sends jobs to them and their results back.

    Args:
        rank, world: of this process among the training ranks.
        host, port: where to listen. token: the job's.
        timeout: seconds: of a transfer's progress, and of a whole job.
        doors: gives the addresses of all training ranks' doors, or None while they are not known.

    Attributes:
        address: of this rank's door. closed: whether training has ended.
        timings: ``(what, job, begin, end)`` in ``time.monotonic()`` seconds, latest last.
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
        # The lock guards what follows; it is never held while something is sent, received or waited for.
        self._lock = threading.Lock()
        self._layouts: dict[str, Layout] = {}
        self._fingerprint = ""
        self._session: Session | None = None
        self._ended: list[Session] = []
        self._job: Job | None = None
        self._new = False  # the job has not been sent yet
        self._state, self._reason = State.IDLE, ""
        self._settled = threading.Event()
        self.closed = False
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.timings: list[tuple[str, int, float, float]] = []
        self._door = Door(host, port, token, self._admit, timeout)
        self.address = self._door.address
        self._thread = threading.Thread(target=self._run, name="dho2 bridge", daemon=True)
        self._thread.start()

    # -- what the training thread calls ---------------------------------------------------------------------------

    def describe(self, layouts: Mapping[str, Layout], fingerprint: str) -> None:
        """Set what this rank holds; a session in which it held something else ends."""
        with self._lock:
            if (dict(layouts), fingerprint) == (self._layouts, self._fingerprint):
                return
            self._layouts, self._fingerprint = dict(layouts), fingerprint
        self.drop()

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
            self._job, self._new, self._state, self._reason = job, True, State.FLYING, ""
            self._settled.clear()
        self._wake()

    def take(self) -> tuple[Tensor | None, dict[str, Any]]:
        """The result of a job that is done: ((k, n_local) CPU rows or None, what :class:`Session` checked)."""
        with self._lock:
            job, self._job = self._job, None
            assert job is not None and self._state is State.DONE
            self._state = State.IDLE
        return job.vectors, job.results[0]

    def forget(self) -> None:
        """Leave a bad job behind."""
        with self._lock:
            self._job, self._new, self._state = None, False, State.IDLE

    def wait(self, seconds: float) -> None:
        """Wait until the job is no longer flying; for replays."""
        self._settled.wait(seconds)

    def drop(self) -> None:
        """End the session and forget the job, at once and without waiting."""
        with self._lock:
            session, self._session = self._session, None
            if session is not None:
                self._ended.append(session)
            self._job, self._new, self._state = None, False, State.IDLE
        if session is not None:
            session.abort()
        self._wake()

    def close(self) -> None:
        """Training has ended: tell the curvature ranks, and listen no more. May be called twice."""
        if not self.closed:
            self.closed = True
            self._door.close()
            with self._lock:
                session, self._session = self._session, None
            if session is not None:
                session.close("training ended")
            self._wake()
            if threading.current_thread() is not self._thread:  # it may be the one that collects garbage
                # A thread that is amid a tensor operation when the interpreter ends makes the process abort.
                self._thread.join(_LAST_TURN)
                if self._thread.is_alive():
                    logger.warning("the link to the curvature ranks has not ended %g s after training did", _LAST_TURN)

    # -- the door's threads ---------------------------------------------------------------------------------------

    def _admit(self, link: Link, meta: dict[str, Any]) -> tuple[dict[str, Any], Callable[[], None]]:
        from dho2_ds import __version__

        doors = self._doors()
        with self._lock:
            layouts, fingerprint = self._layouts, self._fingerprint
        if doors is None or not layouts:
            raise Refused("the training ranks are not ready yet", retry=True)
        if meta.get("version") != __version__:
            raise Refused(f"dho2_ds {meta.get('version')}: must be {__version__}, as on the training ranks; install it")
        if meta.get("fingerprint") != fingerprint:
            raise Refused(
                f"model={meta.get('fingerprint')}: must be {fingerprint} as in the training job, names too; start the "
                "same script with the same configuration"
            )
        if meta.get("asks"):  # rank 0 of a curvature job looks where to go
            return {"doors": doors}, link.close
        number, rank, size = int(meta["session"]), int(meta["rank"]), int(meta["size"])
        with self._lock:
            session = self._session
            if session is not None and session.number != number:
                if session.ready or time.monotonic() - session.began < _INCOMPLETE:
                    raise Refused("other curvature ranks are connected", retry=True)
                self._ended.append(session)
                session = None
            if self.closed or layouts is not self._layouts:
                raise Refused("the training side is changing", retry=True)
            if session is None:
                session = self._session = Session(number, size, layouts)
            if size != session.size or not 0 <= rank < size or not session.expect(rank):
                raise Refused(f"curvature rank {rank} of {size}: must be one that is not connected yet", retry=True)
        link.peer = f"curvature rank {rank}"

        def welcome() -> None:
            session.add(rank, link)
            self._wake()

        forms = {space: layout_to_json(layout) for space, layout in layouts.items()}
        return {"rank": self._rank, "world": self._world, "layouts": forms}, welcome

    # -- the bridge's thread --------------------------------------------------------------------------------------

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"x")
        except BlockingIOError:
            pass  # it will wake anyway

    def _run(self) -> None:
        while not self.closed:
            session = self._session
            try:
                self._turn(session)
            except Exception as error:  # a malformed message is as good as a lost link; nothing may end this thread
                known = isinstance(error, LinkError)
                self._lose(session, str(error) if known else f"{type(error).__name__}: {error}")

    def _turn(self, session: Session | None) -> None:
        """Do what is to be done now, or wait a second for something."""
        links = session.links if session is not None else []
        sources: list[Link | _Pipe] = [_Pipe(self._wake_read), *(link for _, link in links)]
        events = readable(sources, 1.0)
        try:
            os.read(self._wake_read, 4096)
        except BlockingIOError:
            pass  # nobody has woken us
        while self._ended:
            self._ended.pop().close()
        if session is None or session is not self._session:
            self._give_up_unsent()
            return
        for rank, link in links:
            if link in events:
                self._hear(session, rank, link)
        job = self._job
        if job is not None and self._state is State.FLYING:
            for _, link in links:
                link.until = job.began + self._timeout
            if self._new:
                self._send(session, job)
            if time.monotonic() > job.began + self._timeout:
                raise LinkError(f"no result within {self._timeout:g} s (curvature.timeout)")

    def _give_up_unsent(self) -> None:
        with self._lock:
            job = self._job if self._new and self._session is None else None
        if job is not None:
            self._settle(job, State.LOST, "the curvature ranks are gone")

    def _settle(self, job: Job, state: State, reason: str = "") -> None:
        """Say how a job has ended, unless it is no longer the one under way."""
        with self._lock:
            if self._job is job and self._state is State.FLYING:
                self._state, self._reason, self._new = state, reason, False
                self._settled.set()

    def _lose(self, session: Session | None, reason: str) -> None:
        with self._lock:
            if session is None or session is not self._session:
                return
            self._session = None
            self._ended.append(session)
            job = self._job
        session.abort()
        if job is not None:
            self._settle(job, State.LOST, reason)

    def _hear(self, session: Session, rank: int, link: Link) -> None:
        message = link.receive()
        job = self._job
        if "plan" in message:
            session.plan(rank, message["plan"])
            if session.ready and self._rank == 0:
                logger.info("%d curvature rank(s) connected", session.size)
        elif job is not None and not self._new and message.get("result") == job.number:
            began = time.monotonic()
            if session.take(rank, link, job, message):
                self._note("receive", job, began)
                self._judge(session, job)
        else:
            raise LinkError(f"{link.peer}: an unexpected message with {sorted(message)}")

    def _judge(self, session: Session, job: Job) -> None:
        try:
            session.verify(job)
        except BadResult as bad:
            self._settle(job, State.BAD, str(bad))
        else:
            self._settle(job, State.DONE)

    def _send(self, session: Session, job: Job) -> None:
        if not session.ready:
            raise LinkError("the curvature ranks are not connected")
        job.staged()
        began = time.monotonic()
        for rank, link in session.links:
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
        with self._lock:
            if self._job is job:
                self._new = False
        job.parts, job.batch = [], None  # the snapshot is no longer needed
        self._note("send", job, began)

    def _feeds(self, rank: int, size: int) -> bool:
        """Whether this rank's batches go to curvature rank ``rank``; every batch goes to one, every rank gets one."""
        return rank == self._rank % size if size <= self._world else self._rank == rank % self._world

    def _note(self, what: str, job: Job, began: float) -> None:
        self.timings.append((what, job.number, began, time.monotonic()))
        del self.timings[:-1000]


class _Pipe:
    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        return self._number
