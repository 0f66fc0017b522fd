"""What the pipeline benchmark's numbers say: summaries and markdown tables."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]
PLAIN, BETWEEN = "no curvature (k = 0)", "dedicated, between refreshes"
BUSY = "k = 0, another program on the other core"
FLIGHT = "dedicated, refresh under way"
KINDS = {  # (mode, in a refresh)
    ("none", False): PLAIN,
    ("busy", False): BUSY,
    ("dedicated", False): BETWEEN,
    ("dedicated", True): FLIGHT,
    ("spread", True): "spread, steps with a product",
    ("inline", True): "inline, the step with the refresh",
}
CLOCKS = ("own", "wall", "process")
MEANING = "Own: the wall clock less the time during which other programs had the core, bridge threads of ours counted."


def quantile(values: Sequence[float], fraction: float) -> float:
    """Linear between order statistics."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def spread_of(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def steps_summary(rows: list[Record]) -> Record:
    """Per kind of step: median and 99th percentile over all turns; ratios of medians within a turn, over the turns."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for row in rows:
        kind = KINDS.get((row["mode"], row["refresh"]))
        if kind is not None:
            groups[kind].append(row)
    medians = {
        kind: {
            repeat: {clock: statistics.median(r[clock] for r in found if r["repeat"] == repeat) for clock in CLOCKS}
            for repeat in {r["repeat"] for r in found}
        }
        for kind, found in groups.items()
    }

    def ratio(kind: str, base: str, clock: str) -> dict[str, float] | None:
        shared = medians[kind].keys() & medians.get(base, {}).keys()
        found = [medians[kind][turn][clock] / medians[base][turn][clock] for turn in sorted(shared)]
        return spread_of(found) if found else None

    def beyond_busy(clock: str) -> dict[str, float] | None:
        """In flight over between refreshes, divided by what any work on the other core does to a step."""
        if not {FLIGHT, BETWEEN, BUSY, PLAIN} <= medians.keys():
            return None
        turns = set.intersection(*(set(medians[kind]) for kind in (FLIGHT, BETWEEN, BUSY, PLAIN)))
        found = [
            medians[FLIGHT][t][clock] / medians[BETWEEN][t][clock] * medians[PLAIN][t][clock] / medians[BUSY][t][clock]
            for t in sorted(turns)
        ]
        return spread_of(found) if found else None

    summary: Record = {"kinds": {}, "modes": {}, "beyond busy": {clock: beyond_busy(clock) for clock in CLOCKS}}
    for kind in (kind for kind in KINDS.values() if kind in groups):
        summary["kinds"][kind] = {
            "steps": len(groups[kind]),
            **{clock: statistics.median(row[clock] for row in groups[kind]) for clock in CLOCKS},
            **{f"{clock} p99": quantile([row[clock] for row in groups[kind]], 0.99) for clock in CLOCKS},
            **{f"{clock} over plain": ratio(kind, PLAIN, clock) for clock in CLOCKS},
            **{f"{clock} over between": ratio(kind, BETWEEN, clock) for clock in CLOCKS},
        }
    for mode in dict.fromkeys(row["mode"] for row in rows):
        found = [row for row in rows if row["mode"] == mode]
        summary["modes"][mode] = {
            **{clock: statistics.fmean(row[clock] for row in found) for clock in CLOCKS},
            "p99": quantile([row["own"] for row in found], 0.99),
            "longest": max(row["own"] for row in found),
        }
    return summary


def machine_line(record: Record) -> str:
    load = " to ".join(f"{value:.1f}" for value in record["load_1min"])
    return (
        f"The machine was shared: {record['cores']} cores {record['busy']:.0%} busy, load {load} with 2 processes "
        f"of ours, {record['steal']:.1%} stolen."
    )


def _ratio(found: dict[str, float] | None) -> str:
    if found is None:
        return "-"
    return f"{found['median']:.3f} ({found['low']:.2f} to {found['high']:.2f})"


def steps_table(record: Record) -> str:
    """Milliseconds, and ratios with the range over the turns."""
    summary, plan = record["summary"], record["plan"]
    lines = [
        f"{record['parameters']:,} parameters, k = {plan['optimizer']['num_eigenvectors']}, {plan['repeats']} turns "
        f"of {plan['block_steps']} steps; milliseconds. Ratios: medians within a turn, then the median turn (range). "
        f"{MEANING} {machine_line(record)}",
        "",
        "| step | steps | own, median | own, 99 % | own / k = 0 | own / between | wall, median | wall / between |",
        "|:--|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for kind, found in summary["kinds"].items():
        cells = [kind, str(found["steps"]), f"{found['own'] * 1e3:.1f}", f"{found['own p99'] * 1e3:.1f}"]
        cells += [_ratio(found["own over plain"]), _ratio(found["own over between"])]
        cells += [f"{found['wall'] * 1e3:.1f}", _ratio(found["wall over between"])]
        lines.append(f"| {' | '.join(cells)} |")
    beyond = summary["beyond busy"]
    if beyond["own"] is not None:
        lines += [
            "",
            "A refresh under way over between refreshes, divided by what another program on the other core does to a "
            f"step without curvature: own {_ratio(beyond['own'])}, wall {_ratio(beyond['wall'])}. Cores of the "
            f"training process {record['affinity']}, of the curvature process {record['jobs'][0]['affinity']}.",
        ]
    lines += [
        "",
        "| mode, all steps | own, mean | own, 99 % | own, longest | CPU, mean | own / k = 0 | CPU / k = 0 |",
        "|:--|--:|--:|--:|--:|--:|--:|",
    ]
    plain = summary["modes"]["none"]
    for mode in plan["modes"]:
        found = summary["modes"][mode]
        cells = [mode] + [f"{found[key] * 1e3:.1f}" for key in ("own", "p99", "longest", "process")]
        cells += [f"{found[clock] / plain[clock]:.2f}" for clock in ("own", "process")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def reached(points: list[Record], goal: float) -> Record | None:
    """The first evaluation at or below the goal."""
    return next((point for point in points if point["loss"] <= goal), None)


def target_summary(record: Record) -> Record:
    """Per run: where each seed reached the goal; medians over the seeds that did."""
    summary: Record = {}
    for name, runs in record["runs"].items():
        hits = [reached(run["points"], record["goal"]) for run in runs]
        found = [hit for hit in hits if hit is not None]
        summary[name] = {
            "reached": len(found),
            "runs": len(hits),
            "final": statistics.median(run["points"][-1]["loss"] for run in runs),
            "swaps": [run["stats"].get("swaps") for run in runs],
            **{
                key: spread_of([hit[key] for hit in found]) if found else None
                for key in ("step", "own", "wall", "process")
            },
        }
    return summary


def target_table(record: Record) -> str:
    """Steps and seconds to the goal, by run."""
    lines = [
        f"Deep autoencoder on digits; goal: loss {record['goal']:.4f}, 5 % above where AdamW with the best of four "
        f"learning rates on these seeds ends after {record['steps']} steps. Median of {record['seeds']} seed(s) "
        f"(range). {MEANING} CPU: of the first training process. {machine_line(record)}",
        "",
        "| | cores | reached | steps | own seconds | wall seconds | CPU seconds | AdamW's own / this | final loss |",
        "|:--|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    base = record["summary"]["AdamW"]
    for name, found in record["summary"].items():
        two = "2" if "2 ranks" in name or "dedicated" in name else "1"
        cells = [name, two, f"{found['reached']} of {found['runs']}"]
        for key, form in (("step", ".0f"), ("own", ".1f"), ("wall", ".1f"), ("process", ".1f")):
            here = found[key]
            text = "-" if here is None else f"{here['median']:{form}} ({here['low']:{form}} to {here['high']:{form}})"
            cells.append(text)
        for key in ("own",):
            known = base[key] is not None and found[key] is not None
            cells.append(f"{base[key]['median'] / found[key]['median']:.2f}" if known else "-")
        cells.append(f"{found['final']:.4f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def memory_table(rows: list[Record]) -> str:
    """Bytes per rank (the largest), and times the number of ranks: the linear law says that the latter is constant."""
    columns = {
        "training": ["base", "basis", "snapshot", "receive"],
        "curvature": ["bytes received", "bytes lanczos", "bytes old basis"],
    }
    names = ["AdamW state", "eigenbasis", "snapshot", "received basis"]
    names += ["received snapshot", "Lanczos vectors", "old basis"]
    lines = [
        "Largest bytes on a rank, and times the ranks of its side (padding of FSDP2's shards included).",
        "",
        f"| training + curvature ranks | {' | '.join(names)} |",
        f"|:--|{'--:|' * len(names)}",
    ]
    for row in rows:
        cells = [f"{row['training']} + {row['curvature']}"]
        for side, keys in columns.items():
            for key in keys:
                most = max(rank[key] for rank in row[f"{side}_ranks"])
                cells.append(f"{most:,} (x {row[side]} = {most * row[side]:,})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
