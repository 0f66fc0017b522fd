"""Tables and pictures of what is recorded."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib
from _peers import PEERS
from _rows import Row, rows_of, target_of
from _runs import Store, cost_of
from _summary import summary, table_line
from _tasks import Task
from _trainers import HVP_GRADIENTS

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)
from matplotlib.axes import Axes  # noqa: E402

HEADER = """\
| optimizer | lr | other settings | final: median | least to largest | steps to target | gradients | CPU s | wall s | run, CPU s | state, bytes per parameter | lr reaching it | trials | seeds |
|:--|--:|:--|--:|:--|--:|--:|--:|--:|--:|--:|:--|--:|--:|"""  # noqa: E501
END_HEADER = """\
| optimizer | steps | gradients | CPU s | wall s |
|:--|--:|--:|--:|--:|"""
SHOWN = "betas", "momentum", "history_size", "graft_type", "damping"
"""Settings that the variants of peers differ in."""
NOTES = f"""\
Per optimizer: its best setting at seed 0 by final value (`*`: at an end of its learning rates, so possibly better
beyond), then all seeds at that setting. Gradients count a Hessian-vector product as {HVP_GRADIENTS}, one by a forward
difference as 1. To the target: medians over the seeds that reach it, with least and largest. CPU s is the processor's
time for the process, wall s the clock's, both without evaluations; the machine had other work, so wall s is noisy.
State: the largest seen, in DHO2 and FOSI with the transient memory of a refresh. `lr reaching it`: the least and the
largest learning rate of seed 0, any variant, that reach the target.

A row again: `python examples/benchmarks/time_to_target.py run --task burgers --peer soap --lr 2e-2 --seeds 3`, with
`--set 'betas=[0.9, 0.99]'` for what differs from the peer's usual variant (`list` shows names and variants).
"""


def _spread(values: list[float], form: str) -> str:
    if not values:
        return "-"
    middle = format(statistics.median(values), form)
    return middle if len(values) == 1 else f"{middle} ({format(min(values), form)} to {format(max(values), form)})"


def _spreads(costs: list[dict[str, float]], runs: int) -> list[str]:
    """Steps, gradients and both times, over the runs that got there."""
    cells = [
        _spread([cost[name] for cost in costs], form)
        for name, form in (("step", ",.0f"), ("gradients", ",.0f"), ("cpu_s", ".1f"), ("wall_s", ".1f"))
    ]
    if costs and len(costs) < runs:
        cells[0] += f", {runs - len(costs)} missed"
    return cells


def _line(row: Row, target: float | None) -> str:
    peer, chosen = row.peer, row.chosen
    if not chosen:
        cells = [peer.title, "all diverged", *["-"] * 10, str(len(row.tried)), "0"]
        return table_line(cells)
    settings = chosen[0]["settings"]
    edge = len(peer.rates) > 1 and settings["lr"] in (peer.rates[0], peer.rates[-1])
    other = ", ".join(f"{name} {settings[name]}" for name in SHOWN if name in settings and len(peer.variants) > 1)
    finals = [r["final"] for r in chosen if r["final"] is not None]
    costs = [cost for r in chosen if target is not None and (cost := cost_of(r, target))]
    reaching = sorted(r["settings"]["lr"] for r in row.tried if target is not None and cost_of(r, target))
    spreads = _spreads(costs, len(chosen))
    cells = [
        peer.title,
        f"{settings['lr']:g}{'*' if edge else ''}",
        other or "-",
        _number(row.final),
        f"{_number(min(finals))} to {_number(max(finals))}" if finals else "-",
        *spreads,
        f"{statistics.median(r['cpu_s'] for r in chosen):.1f}",
        f"{max(r['state_bytes'] / r['parameters'] for r in chosen):.0f}",
        f"{reaching[0]:g} to {reaching[-1]:g}" if reaching else "-",
        str(len(row.tried)),
        str(len(chosen)),
    ]
    return table_line(cells)


def _number(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.4g}"


def table_of(task: Task, rows: list[Row], steps: int) -> str:
    """One task in markdown, the best final value first."""
    target = target_of(task, rows)
    stated = f"Target {target[0]:.4g} ({target[1]})." if target else "No target yet: no first-order run is recorded."
    ordered = sorted(rows, key=lambda row: (row.final is None, row.final or 0.0))
    lines = [_line(row, target[0] if target else None) for row in ordered]
    first = f"### {task.name}\n\n{task.title}; {steps} steps. {stated}\n\n{HEADER}\n" + "\n".join(lines) + "\n"
    return first + _table_of_peers_end(ordered)


def _table_of_peers_end(ordered: list[Row]) -> str:
    """The costs of what the best peer other than DHO2 has at its end, a harder target than the one by rule."""
    peers = [row for row in ordered if not row.peer.ours and row.final is not None]
    if not peers:
        return ""
    value = peers[0].final
    assert value is not None
    found = [(row, [cost for r in row.chosen if (cost := cost_of(r, value))]) for row in ordered]
    lines = [table_line([row.peer.title, *_spreads(costs, len(row.chosen))]) for row, costs in found if costs]
    return f"\nTo {value:.4g}, the final value of {peers[0].peer.title}:\n\n{END_HEADER}\n" + "\n".join(lines) + "\n"


def _draw_curves(axes: Axes, rows: list[Row], x: str, colors: dict[str, Any]) -> None:
    for row in rows:
        if row.chosen:
            middle = sorted(row.chosen, key=lambda r: (r["final"] is None, r["final"] or 0.0))[
                (len(row.chosen) - 1) // 2
            ]
            curve = middle["curve"]
            axes.plot(curve[x], curve["value"], color=colors[row.peer.name], lw=1.4, label=row.peer.title)


def _draw_rates(axes: Axes, rows: list[Row], colors: dict[str, Any]) -> None:
    """Final value over learning rate, the best of the variants; crosses on the upper edge: diverged."""
    for row in rows:
        finals: dict[float, float] = {}
        for record in row.tried:
            lr, final = record["settings"]["lr"], record["final"]
            if final is not None:
                finals[lr] = min(final, finals.get(lr, final))
        color = colors[row.peer.name]
        axes.plot(sorted(finals), [finals[lr] for lr in sorted(finals)], "o-", color=color, lw=1.2, ms=3.5)
        lost = {r["settings"]["lr"] for r in row.tried} - set(finals)
        axes.plot(sorted(lost), [0.98] * len(lost), "x", color=color, transform=axes.get_xaxis_transform(), ms=5)


def draw(task: Task, rows: list[Row], path: Path) -> None:
    """Curves over gradients and over processor time, and final values over learning rates."""
    palette = plt.get_cmap("tab20")
    order = [*range(0, 20, 2), *range(1, 20, 2)]  # strong colours first, pale ones for the later peers
    colors = {name: palette(order[index]) for index, name in enumerate(PEERS)}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.6), layout="constrained", sharey=True)
    _draw_curves(left, rows, "gradients", colors)
    _draw_curves(middle, rows, "cpu_s", colors)
    _draw_rates(right, rows, colors)
    target = target_of(task, rows)
    for axes in (left, middle, right):
        if target:
            axes.axhline(target[0], color="black", lw=0.8, ls=":")
        axes.grid(alpha=0.3)
    left.set_yscale("log")
    right.set_xscale("log")
    _zoom(left, rows)
    left.set(xlabel="gradients (a Hessian-vector product is two)", ylabel=task.title.split(": ")[-1])
    middle.set(xlabel="processor time, s")
    right.set(xlabel="learning rate", title="final value")
    left.set_title(f"{task.name}: each optimizer's best setting")
    figure.legend(*left.get_legend_handles_labels(), loc="outside right upper", fontsize="small", frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _zoom(axes: Axes, rows: list[Row]) -> None:
    """Cut the picture at the value of the start, above which diverging runs lie."""
    curves = [r["curve"]["value"] for row in rows for r in row.chosen]
    if curves:
        least = min(value for values in curves for value in values if value > 0)
        axes.set_ylim(0.9 * least, 1.1 * max(values[0] for values in curves))


def write_report(tasks: list[Task], store: Store, steps: int | None, folder: Path) -> tuple[str, list[Path]]:
    """Write report.md and one picture per task with records. Returns the text and the files."""
    folder.mkdir(parents=True, exist_ok=True)
    parts, files, found = [], [], {}
    for task in tasks:
        budget = steps or task.steps
        rows = rows_of(task, store.records(task.name), budget)
        if not rows:
            continue
        found[task.name] = rows
        parts.append(table_of(task, rows, budget))
        files.append(folder / f"{task.name}.png")
        draw(task, rows, files[-1])
    text = (
        "\n".join([NOTES, summary(found), *parts])
        if found
        else "Nothing is recorded for these tasks and this budget yet.\n"
    )
    (folder / "report.md").write_text(text)
    return text, [folder / "report.md", *files]
