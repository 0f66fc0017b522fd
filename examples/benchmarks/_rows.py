"""What is recorded of each peer on a task, and the target that follows from it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from _peers import PEERS, Peer
from _runs import Record, at_fraction, best, trials
from _tasks import Task

TARGET_FRACTION = 0.7


@dataclass(frozen=True)
class Row:
    """A peer on a task: its trials at seed 0, and the runs of the best setting, one per seed."""

    peer: Peer
    tried: list[Record]
    chosen: list[Record]

    @property
    def final(self) -> float | None:
        finals = [r["final"] for r in self.chosen if r["final"] is not None]
        return statistics.median(finals) if finals else None


def rows_of(task: Task, records: list[Record], steps: int) -> list[Row]:
    """Every peer of which something is recorded."""
    rows = []
    for peer in PEERS.values():
        tried = trials(records, peer, task, steps)
        settings = best(records, peer, task, steps)
        chosen = sorted((r for r in tried if r["settings"] == settings), key=lambda r: r["seed"])
        first = [r for r in tried if r["seed"] == 0]
        if first:
            rows.append(Row(peer, first, chosen))
    return rows


def target_of(task: Task, rows: Iterable[Row]) -> tuple[float, str] | None:
    """The target, and where it comes from."""
    if task.target is not None:
        return task.target, "fixed beforehand"
    found = []
    for row in rows:
        values = [at_fraction(r, TARGET_FRACTION) for r in row.chosen] if row.peer.first_order else []
        reached = [value for value in values if value is not None]
        if reached:
            found.append((statistics.median(reached), row.peer.title))
    if not found:
        return None
    value, title = min(found)
    return value, f"{title} at {TARGET_FRACTION:.0%} of the budget, the best first-order result there"
