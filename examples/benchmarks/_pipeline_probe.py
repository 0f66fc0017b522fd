"""Hooks into both sides of the bridge that note real tensors' bytes, and when curvature ranks do what.

They wrap functions of `dho2_ds.pipeline` in the benchmark's processes only.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from dho2_ds.pipeline import bridge, worker


def held(tensor: Tensor | None) -> int:
    """Bytes that a tensor keeps alive: of its whole storage, of which it may be a view."""
    return 0 if tensor is None else tensor.untyped_storage().nbytes()


def cores_of_threads() -> list[int]:
    """On which cores the threads of this process may run."""
    return sorted({core for thread in os.listdir("/proc/self/task") for core in os.sched_getaffinity(int(thread))})


def record_training() -> dict[str, int]:
    """Note the bytes of the latest snapshot (weights, hint, P^(1/2)), as handed to the bridge, and of the latest result
    as received. Returns a dictionary that fills."""
    sizes: dict[str, int] = {}
    start, take = bridge.Bridge.start, bridge.Bridge.take

    def started(self: Any, job: Any) -> None:
        for name, _, part in job.parts:
            sizes[f"snapshot {name}"] = held(part)
        sizes["snapshot"] = sum(held(part) for _, _, part in job.parts)
        sizes["batch"] = sum(held(tensor) for tensor in job.batch[1]) if job.batch is not None else 0
        start(self, job)

    def taken(self: Any) -> Any:
        vectors, report = take(self)
        sizes["receive"] = held(vectors)
        sizes["pairs"] = 0 if vectors is None else len(vectors)  # those that did not converge are not sent
        return vectors, report

    bridge.Bridge.start, bridge.Bridge.take = started, taken  # type: ignore[method-assign]
    return sizes


def watch_curvature(path: Path) -> None:
    """Write one JSON line per job: when weights were received, products made and results sent (`time.monotonic`, which
    is one clock for all processes of a machine), and the bytes of this rank's vectors."""
    job: dict[str, Any] = {}
    refresh = worker.refresh
    hear, order = worker.Worker._hear, worker.Worker._job

    def heard(self: Any, link: Any, rank: int, received: dict[str, Tensor]) -> Any:
        job.setdefault("receive", [time.monotonic(), 0.0])
        found = hear(self, link, rank, received)
        job["receive"][1] = time.monotonic()
        job["bytes received"] = sum(held(part) for part in received.values())
        job["bytes weights"] = held(received.get("weights"))
        return found

    def refreshed(*args: Any, **named: Any) -> Any:
        between = named["between"]
        products: list[float] = []

        def noted() -> None:
            products.append(time.monotonic())
            between()

        began = time.monotonic()
        found, report = refresh(*args, **{**named, "between": noted})
        job.update(
            refresh=[began, time.monotonic()],
            products=products,
            accepted=report.accepted,
            **{"bytes lanczos": held(None if found is None else found.vectors)},
            **{"bytes old basis": held(None if named["old"] is None else named["old"].vectors)},
        )
        return found, report

    def ordered(self: Any) -> None:
        job.clear()
        order(self)
        job["send"] = [job["refresh"][1], time.monotonic()]
        job["affinity"] = cores_of_threads()
        with path.open("a") as file:
            file.write(json.dumps(job) + "\n")

    worker.refresh = refreshed  # type: ignore[assignment]
    worker.Worker._hear, worker.Worker._job = heard, ordered  # type: ignore[method-assign]
