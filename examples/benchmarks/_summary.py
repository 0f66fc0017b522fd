"""All tasks in two tables: final values, and what it took to reach each task's target."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from _peers import PEERS
from _rows import Row, target_of
from _runs import cost_of
from _tasks import TASKS

REACHED = "adamw", "muon", "soap", "dho2-soap", "dho2-one", "dho2-adamw"
"""Peers of the second table."""
Found = Mapping[str, list[Row]]
LEGEND = """\
Medians over the seeds; a star: one seed only. Bold: within 5 % of the task's best. In the second table: steps,
gradients and seconds of processor time to the target (medians over the seeds that reach it; `-`: at most half do), and
in brackets the seconds of a whole run.
"""


def summary(found: Found) -> str:
    """Both tables in markdown; see :data:`LEGEND`.

    Args:
        found: the rows of every task of which something is recorded.
    """
    return f"{LEGEND}\n{_finals(found)}\n{_to_targets(found)}"


def _finals(found: Found) -> str:
    lines = [table_line(["final value", *found]), _rule(len(found))]
    least = {task: min((r.final for r in rows if r.final is not None), default=None) for task, rows in found.items()}
    for peer in PEERS.values():
        cells = [peer.title]
        for task, rows in found.items():
            row = next((r for r in rows if r.peer is peer), None)
            if row is None:
                cells.append("")
            elif row.final is None:
                cells.append("diverged")
            else:
                best = least[task]
                strong = "**" if best is not None and row.final <= best + 0.05 * abs(best) else ""
                cells.append(f"{strong}{row.final:.4g}{strong}{_star(row)}")
        lines.append(table_line(cells))
    return "\n".join(lines) + "\n"


def _to_targets(found: Found) -> str:
    lines = [table_line(["to the target", "target", *(PEERS[name].title for name in REACHED)]), _rule(1 + len(REACHED))]
    for task, rows in found.items():
        target = target_of(TASKS[task], rows)
        if target is None:
            continue
        cells = [task, f"{target[0]:.4g}"]
        for name in REACHED:
            row = next((r for r in rows if r.peer.name == name and r.chosen), None)
            cells.append("" if row is None else _cost(row, target[0]))
        lines.append(table_line(cells))
    return "\n".join(lines) + "\n"


def _cost(row: Row, target: float) -> str:
    costs = [cost for r in row.chosen if (cost := cost_of(r, target))]
    whole = statistics.median(r["cpu_s"] for r in row.chosen)
    if 2 * len(costs) <= len(row.chosen):
        return f"- ({whole:.3g} s){_star(row)}"
    step, gradients, seconds = (
        statistics.median(cost[name] for cost in costs) for name in ("step", "gradients", "cpu_s")
    )
    return f"{step:.0f}, {gradients:.0f}, {seconds:.2g} s ({whole:.3g} s){_star(row)}"


def _star(row: Row) -> str:
    return "" if len(row.chosen) > 1 else " *"


def table_line(cells: list[str]) -> str:
    """A row of a table in markdown."""
    return f"| {' | '.join(cells)} |"


def _rule(numbers: int) -> str:
    return f"|:--|{'--:|' * numbers}"
