"""Does a slow network to the curvature node slow training down? Step times of mode `dedicated`, cable fast and slow.

sudo python examples/benchmarks/nodes.py             # Linux; needs Debian's vde2 and about four minutes

Two nodes on one machine (network namespaces, see tests/nodes.py): one trains a character GPT, the other computes its
curvature. In one run the cable between them is switched to and fro between what the machine can do and 50 ms each way
at 20 Mbit/s; steps of neighbouring phases are compared. "Own" time is the wall clock less the time in which
other programs, the curvature process among them, had the core (Linux counts it).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parents[2])]  # the other examples; the nodes

SLOW = {"delay_ms": 50.0, "megabits": 20.0}
SETTLE = 2.0  # seconds after a switch that count for neither phase
CURVATURE = {"mode": "dedicated", "ranks": 1, "warmup_steps": 20, "interval": 20, "lanczos_steps": 16, "timeout": 300}
STOP, STEPS = "stop", "steps.json"


def rank(folder: Path) -> None:
    """One process: trains until it is told to stop, or computes curvature."""
    from _common import library_text
    from char_gpt import CharGPT

    import dho2_ds

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    torch.set_num_threads(1)
    dho2_ds.init_distributed(curvature_ranks=1, backend="gloo")
    torch.manual_seed(0)
    model, text = CharGPT(block=64, width=128), library_text(block=64)
    optimizer = dho2_ds.DHO2(model.parameters(), lr=1e-3, curvature=CURVATURE)
    dho2_ds.attach(model, optimizer)
    steps = []
    while not (folder / STOP).exists():
        batch = text[torch.randint(len(text), (16,))]
        began, waited = time.monotonic(), waiting()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ended = time.monotonic()
        stats = optimizer.curvature_stats()
        own = ended - began - (waiting() - waited)
        steps.append([began, ended - began, own, bool(stats["in_flight"]), stats["refreshes"]])
    (folder / STEPS).write_text(json.dumps(steps))


def waiting() -> float:
    """Seconds in which this thread was ready to run and had no core."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def measure(seconds: float, pairs: int, folder: Path, console: Console) -> tuple[list[Any], list[tuple[float, bool]]]:
    """The training process's steps, and when the cable was switched to slow (True) or fast."""
    from _cable import adjustable

    from tests.nodes import network

    switched = []
    with network(2, folder) as nodes, adjustable(nodes[1], folder) as cable:
        processes = []
        for place, node in enumerate(nodes):
            environment = {
                **os.environ,
                **{"RANK": str(place), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
                **{"MASTER_ADDR": nodes[0].name, "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"},
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, str(HERE), "--rank", str(folder)]
            processes.append(node.start(command, environment, folder / f"{node.name}.log"))
        before = nodes[1].traffic()
        deadline = time.monotonic() + 120
        while nodes[1].traffic() - before < 40_000_000:  # two refreshes or so
            if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                logs = "\n".join((folder / f"{node.name}.log").read_text() for node in nodes)
                raise RuntimeError(f"no refreshes within two minutes\n{logs}")
            time.sleep(0.5)
        for number in range(2 * pairs):
            slow = number % 4 in (1, 2)  # fast slow slow fast: a drift of the machine favours neither
            cable.set(**SLOW) if slow else cable.set()
            switched.append((time.monotonic(), slow))
            console.print(f"phase {number + 1} of {2 * pairs}: {'slow' if slow else 'fast'}, {seconds:g} s")
            time.sleep(seconds)
        switched.append((time.monotonic(), False))
        cable.set()
        (folder / STOP).touch()
        processes[0].wait(60)
    return json.loads((folder / STEPS).read_text()), switched


def summary(steps: list[Any], switched: list[tuple[float, bool]]) -> list[dict[str, Any]]:
    """A row per phase."""
    rows = []
    for (begin, slow), (end, _) in zip(switched, switched[1:], strict=False):
        mine = [step for step in steps if begin + SETTLE < step[0] < end]
        rows.append(
            {
                "slow": slow,
                "steps": len(mine),
                "own_ms": 1e3 * median(step[2] for step in mine),
                "wall_ms": 1e3 * median(step[1] for step in mine),
                "under_way": sum(step[3] for step in mine) / len(mine),
                "refreshes": mine[-1][4] - mine[0][4],
            }
        )
    return rows


def main(
    seconds: Annotated[float, typer.Option(help="of a phase")] = 25.0,
    pairs: Annotated[int, typer.Option(help="of a fast and a slow phase")] = 4,
    output: Annotated[Path | None, typer.Option(help="JSON file for the rows")] = None,
    rank_in: Annotated[Path | None, typer.Option("--rank", hidden=True)] = None,
) -> None:
    """Measure, and print phases and ratios."""
    if rank_in is not None:
        rank(rank_in)
        return
    console = Console(width=110)
    with tempfile.TemporaryDirectory() as folder:
        rows = summary(*measure(seconds, pairs, Path(folder), console))
    table = Table("cable", "steps", "own ms", "wall ms", "refresh under way", "refreshes")
    for row in rows:
        cells = f"{row['own_ms']:.1f}", f"{row['wall_ms']:.1f}", f"{row['under_way']:.0%}", str(row["refreshes"])
        table.add_row("slow" if row["slow"] else "fast", str(row["steps"]), *cells)
    console.print(table)
    couples = [sorted(rows[i : i + 2], key=lambda row: row["slow"]) for i in range(0, len(rows), 2)]
    ratios = {key: sorted(slow[key] / fast[key] for fast, slow in couples) for key in ("own_ms", "wall_ms")}
    for key, found in ratios.items():
        console.print(f"{key}, slow / fast: median {median(found):.3f} ({found[0]:.3f} to {found[-1]:.3f})")
    if output is not None:
        output.write_text(json.dumps({"rows": rows, "ratios": ratios, "cores": len(os.sched_getaffinity(0))}, indent=1))


if __name__ == "__main__":
    typer.run(main)
