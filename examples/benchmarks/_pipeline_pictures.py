"""Pictures of the pipeline benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from _pipeline_tables import KINDS, reached  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # noqa: E402

Record = dict[str, Any]
BLUE, RED, GREEN, AMBER, GREY = "#3b6ea8", "#d1495b", "#3a8f5c", "#d98e04", "0.6"
MODE_COLOURS = {"none": GREY, "busy": "0.8", "inline": RED, "spread": AMBER, "dedicated": BLUE}
STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}


def draw_timeline(record: Record, output: Path, leading: float = 6.0) -> None:
    """Both processes on one time axis, from a few steps before the first snapshot to a few after the last swap."""
    plt.rcParams.update(STYLE)
    steps, swaps = record["steps"], record["swaps"]
    jobs = [job for job in record["jobs"] if job.get("accepted")][: len(swaps)]
    if not jobs:
        raise RuntimeError("no swap happened, so there is nothing to draw; train more steps")
    zero = steps[max(0, int(swaps[0][0] - leading))][0]
    last = steps[min(len(steps) - 1, int(swaps[len(jobs) - 1][1] + leading))][1]

    def bars(axes: Axes, row: float, spans: list[tuple[float, float]], colour: Any, height: float = 0.62) -> None:
        shown = [(a - zero, b - a) for a, b in spans if b > zero and a < last]
        axes.broken_barh(shown, (row - height / 2, height), facecolors=colour, edgecolor="white", linewidth=0.4)

    figure, axes = plt.subplots(figsize=(13, 3.9), dpi=100, layout="constrained")
    rows = {"training steps": 3, "transfers\n(drawn wider)": 2, "Lanczos products": 1}
    flying = [any(born <= i < swap for born, swap in swaps) for i in range(len(steps))]
    for state, colour in ((False, "#b9cbe0"), (True, BLUE)):
        bars(axes, 3, [span for span, flies in zip(steps, flying, strict=True) if flies == state], colour)
    wide = (last - zero) / 300  # a transfer on one machine takes a fraction of a pixel
    for what, colour in (("send", GREEN), ("receive", AMBER)):
        spans = [(a, max(b, a + wide)) for name, _, a, b in record["transfers"] if name == what]
        bars(axes, 2, spans, colour)
    for job in jobs:
        edges = [job["refresh"][0], *job["products"], job["refresh"][1]]
        bars(axes, 1, list(zip(edges, edges[1:], strict=False)), "#7a5ba8")
    for (born, swap), _ in zip(swaps, jobs, strict=False):
        snapshot, swapped = steps[min(born, len(steps) - 1)][0] - zero, steps[swap - 1][1] - zero
        axes.axvline(snapshot, color=GREEN, lw=1.1, ls=":", zorder=0)
        axes.axvline(swapped, color=RED, lw=1.6, zorder=3)
        axes.text(swapped, 3.62, f"swap, step {swap}", color=RED, ha="center", va="bottom", fontsize=10)
        axes.text(snapshot, 0.42, f"snapshot, step {born}", color=GREEN, ha="left", va="top", fontsize=10)
    axes.set(xlim=(0, last - zero), ylim=(0.05, 3.62), xlabel="seconds")
    axes.set_yticks(list(rows.values()), list(rows))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.25)
    handles = [
        Patch(color=BLUE, label="step, refresh under way"),
        Patch(color="#b9cbe0", label="other step"),
        Patch(color=GREEN, label="snapshot sent"),
        Patch(color=AMBER, label="eigenvectors received"),
        Patch(color="#7a5ba8", label="product on the curvature rank"),
        Line2D([], [], color=RED, lw=1.6, label="new basis in use"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=10)
    axes.set_title("Training goes on while a curvature rank computes", pad=24)
    figure.savefig(output)
    plt.close(figure)


def draw_steps(record: Record, output: Path) -> None:
    """Distribution of step times by kind, own time beside the wall clock."""
    plt.rcParams.update(STYLE)
    kinds = {kind: mode for (mode, _), kind in KINDS.items()}
    rows: dict[str, list[Record]] = {kind: [] for kind in kinds}
    for row in record["rows"]:
        kind = KINDS.get((row["mode"], row["refresh"]))
        if kind is not None:
            rows[kind].append(row)
    figure, pair = plt.subplots(1, 2, figsize=(13, 4), dpi=100, layout="constrained", sharey=True)
    for axes, clock, title in zip(
        pair, ("own", "wall"), ("Own time: other programs left out", "Wall clock"), strict=True
    ):
        for place, (kind, mode) in enumerate(reversed(kinds.items())):
            values = [row[clock] * 1e3 for row in rows[kind]]
            if values:
                axes.boxplot(
                    [values], positions=[place], vert=False, widths=0.6, whis=(1, 99), showfliers=False,
                    patch_artist=True, boxprops={"facecolor": MODE_COLOURS[mode], "alpha": 0.75},
                    medianprops={"color": "black"},
                )  # fmt: skip
        axes.set_yticks(range(len(kinds)), list(reversed(kinds)))
        axes.set(xscale="log", xlabel="milliseconds per step (box: quartiles, whiskers: 1 and 99 %)", title=title)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(axis="x", alpha=0.25)
    figure.savefig(output)
    plt.close(figure)


def draw_target(record: Record, output: Path) -> None:
    """Loss over seconds and over steps, one line per seed."""
    plt.rcParams.update(STYLE)
    figure, pair = plt.subplots(1, 2, figsize=(13, 4.6), dpi=100, layout="constrained", sharey=True)
    colours = dict(zip(record["runs"], (GREY, RED, AMBER, BLUE, GREEN), strict=False))
    for axes, clock, label in zip(pair, ("own", "step"), ("own seconds", "optimizer step"), strict=True):
        for name, runs in record["runs"].items():
            for index, run in enumerate(runs):
                points = run["points"]
                line = {"color": colours[name], "lw": 1.4, "alpha": 0.85, "label": name if index == 0 else None}
                axes.plot([p[clock] for p in points], [p["loss"] for p in points], **line)
                hit = reached(points, record["goal"])
                if hit is not None:
                    axes.plot(hit[clock], hit["loss"], "o", color=colours[name], ms=5)
        axes.axhline(record["goal"], color="black", ls="--", lw=1, label="goal")
        axes.set(yscale="log", xlabel=label, ylim=(0.7 * record["goal"], 6 * record["goal"]))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.25)
    pair[0].set_ylabel("loss on the whole training set")
    pair[1].legend(frameon=False, fontsize=10)
    figure.savefig(output)
    plt.close(figure)
