"""The links of a training rank to all ranks of one curvature job, and the job that goes over them."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from dho2_ds.curvature.refresh import Refresh
from dho2_ds.pipeline.plan import covers, intervals_from_json
from dho2_ds.pipeline.wire import Intervals, Link, LinkError, dtype_named
from dho2_ds.sharding.layout import Layout

WEIGHTS = "weights"
"""The space of vectors that are laid out like the host's weights; a base may have another one for its state."""

_KEPT_IN = (torch.float32, torch.float64, torch.bfloat16)


_PACE = 3.0
"""Where the process has one core only, transfers take a quarter of it: a step is then longer by a little for some time,
not by the whole transfer once."""


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class BadResult(ValueError):
    """A result came that must not be used; the link is good."""


@dataclass
class Job:
    """One refresh, ordered.

    Attributes:
        number: counts up. order: JSON that goes to every curvature rank.
        parts: (name, space, CPU vector) to be redistributed; ready when ``staged`` has been called.
        batch: JSON form of this rank's micro-batches, and its tensors; None where curvature ranks have data.
        rows: most eigenvectors that may come back.
        results: by curvature rank, checked. vectors: (k, n_local) rows as they come in.
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
    """The links, and which elements go over each.

    Args:
        number: chosen by the curvature job. size: its ranks. layouts: this rank's, by space.
    """

    def __init__(self, number: int, size: int, layouts: Mapping[str, Layout]) -> None:
        self.number, self.size, self.layouts = number, size, dict(layouts)
        self.send: dict[int, dict[str, Intervals]] = {}
        self.receive: dict[int, Intervals] = {}
        self.ready = False
        self.began = time.monotonic()
        self._lock = threading.Lock()
        self._links: dict[int, Link] = {}
        self._expected: set[int] = set()
        self._over = False

    @property
    def links(self) -> list[tuple[int, Link]]:
        """(curvature rank, link) of all that have come, ascending."""
        with self._lock:
            return sorted(self._links.items())

    def expect(self, rank: int) -> bool:
        """Reserve the place of a curvature rank; False if it is taken."""
        with self._lock:
            free = rank not in self._expected
            self._expected.add(rank)
            return free

    def add(self, rank: int, link: Link) -> None:
        """Take a link; it is closed at once if the session is over."""
        with self._lock:
            over = self._over
            link.pace = _PACE if _cores() < 2 else 0.0
            if not over:
                self._links[rank] = link
        if over:
            link.close()

    def abort(self) -> None:
        """End all links at once, also amid a transfer; from any thread, without waiting."""
        with self._lock:
            self._over = True
        for _, link in self.links:
            link.shutdown()

    def close(self, last_word: str | None = None) -> None:
        """End all links and free them; ``last_word`` is for whoever listens within a second."""
        with self._lock:
            self._over = True
        for _, link in self.links:
            if last_word is not None:
                try:
                    link.set_timeout(1.0)
                    link.send({"closed": last_word})
                except (LinkError, OSError):
                    pass  # it is gone already
            link.close()

    def plan(self, rank: int, plan: Mapping[str, Any]) -> None:
        """Take a curvature rank's word on which elements it wants and will return.

        Raises:
            LinkError: they are not this rank's, or do not add up.
        """
        self.send[rank] = {
            space: intervals_from_json(plan["send"].get(space, []), layout.numel)
            for space, layout in self.layouts.items()
        }
        self.receive[rank] = intervals_from_json(plan["receive"], self.layouts[WEIGHTS].numel)
        if len(self.receive) == self.size:
            if not covers(list(self.receive.values()), self.layouts[WEIGHTS]):
                raise LinkError("the curvature ranks' plans do not cover this rank's shard")
            self.ready = True

    def take(self, rank: int, link: Link, job: Job, message: Mapping[str, Any]) -> bool:
        """Read one curvature rank's part of a result; True when all parts are there.

        Raises:
            LinkError: the message is malformed, so what follows it cannot be read either.
        """
        try:
            found = _checked(message, job)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise LinkError(f"{link.peer}: a malformed result: {error}") from error
        if found["dtype"] is not None:
            shape = (found["kept"], self.layouts[WEIGHTS].numel)
            if job.vectors is None:
                job.vectors = torch.zeros(shape, dtype=found["dtype"])
            if job.vectors.shape != shape or job.vectors.dtype != found["dtype"]:
                raise LinkError(f"{link.peer}: eigenvectors unlike the other curvature ranks'")
            link.receive_parts(job.vectors, self.receive[rank])
        job.results[rank] = found
        return len(job.results) == self.size

    def verify(self, job: Job) -> None:
        """Whether a whole result may be used.

        Raises:
            BadResult: saying why not.
        """
        if job.vectors is not None and not bool(torch.isfinite(job.vectors).all()):
            raise BadResult("the eigenvectors sent are not finite")
        first, *others = (_verdict(result["report"]) for result in job.results.values())
        if any(other != first for other in others):
            raise BadResult("the curvature ranks sent different results")


def _checked(message: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """A result's description with types as they should be: ``report``, ``kept``, ``dtype``, ``born``, ``saved``."""
    given = message["report"]
    report = Refresh(**{f.name: given[f.name] for f in fields(Refresh)})
    numbers = [*report.eigenvalues, *report.residuals, report.next_eigenvalue, report.hvps, report.seconds]
    saved = tuple(float(value) for value in message["saved"])
    if not all(isinstance(number, (int, float)) for number in numbers) or len(saved) != 3:
        raise ValueError("not numbers")
    if not isinstance(report.accepted, bool) or not isinstance(report.reason, str):
        raise ValueError("no verdict")
    kept = len(report.eigenvalues) if report.accepted else 0
    if report.accepted:
        sizes = [abs(value) for value in report.eigenvalues]
        if not 0 < kept <= job.rows or message["kept"] != kept or len(report.residuals) != kept:
            raise ValueError(f"{kept} eigenvalues: must be 1 to {job.rows}, with as many vectors and residuals")
        if not all(math.isfinite(size) and size > 0 for size in sizes) or sizes != sorted(sizes, reverse=True):
            raise ValueError("eigenvalues must be finite, not zero, and by falling magnitude")
    if not (math.isfinite(report.next_eigenvalue) and report.next_eigenvalue >= 0):
        raise ValueError("next_eigenvalue must be finite and >= 0")
    if message["born"] != job.order["order"]["born"]:
        raise ValueError(f"born={message['born']}: must be {job.order['order']['born']}, as ordered")
    dtype = dtype_named(message["dtype"]) if report.accepted else None
    if dtype is not None and dtype not in _KEPT_IN:
        raise ValueError(f"dtype={dtype}: must be one of {_KEPT_IN}")
    return {"report": report, "kept": kept, "dtype": dtype, "saved": saved}


def _verdict(report: Refresh) -> Sequence[Any]:
    return [report.accepted, report.reason, report.eigenvalues, report.next_eigenvalue]
