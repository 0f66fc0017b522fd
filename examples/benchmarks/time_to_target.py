"""Steps, gradients and seconds that optimizers need to reach a target on real tasks, each peer tuned on its own.

python examples/benchmarks/time_to_target.py list
python examples/benchmarks/time_to_target.py run --task burgers --peer soap --lr 1e-2 --seeds 3
python examples/benchmarks/time_to_target.py sweep --task burgers --task mlp --minutes 30
python examples/benchmarks/time_to_target.py report

`run` makes (or makes again) the runs it names; `sweep` makes what is missing of the search until the time is out, and
goes on from there when called again; `report` writes tables and pictures. Records are JSON lines in `results/` beside
this file, one per run. Data comes from the registries' packages, see `examples/data.py`. A peer is tuned at seed 0 by
its final value; the best setting gets further seeds.

The target of a task is fixed by rule: the best value that a tuned first-order peer (AdamW, Muon, SGD) has at 70 % of
the budget, unless the task names one. Time excludes evaluations. Wall-clock on a machine with other work is noisy; the
processor's time for the process, recorded beside it, is steadier.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

sys.path.append(str(Path(__file__).resolve().parent.parent))  # for data.py and the models of the other examples

import typer  # noqa: E402
from _peers import PEERS  # noqa: E402
from _report import write_report  # noqa: E402
from _runs import RESULTS, Run, Store, execute, missing  # noqa: E402
from _tasks import TASKS  # noqa: E402
from data import DataError  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: E402
from rich.table import Table  # noqa: E402

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
console = Console(width=None if sys.stdout.isatty() else 160)
Item = TypeVar("Item")

TaskNames = Annotated[list[str] | None, typer.Option("--task", help="a task, may be repeated; default: all")]
PeerNames = Annotated[list[str] | None, typer.Option("--peer", help="a peer, may be repeated; default: all")]
Results = Annotated[Path, typer.Option(help="folder of the records")]
Steps = Annotated[int | None, typer.Option(min=1, help="budget in steps, instead of the task's own")]
Seeds = Annotated[int, typer.Option(min=1, help="how many seeds, from 0 on")]


def _pick(names: list[str] | None, known: dict[str, Item], kind: str) -> list[Item]:
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        raise typer.BadParameter(f"no such {kind}: {', '.join(unknown)}; there are: {', '.join(known)}")
    return [known[name] for name in names] if names else list(known.values())


def _settings(entries: list[str]) -> dict[str, Any]:
    """`key=value` pairs with values in JSON, dots reaching into objects: curvature.interval=50."""
    found: dict[str, Any] = {}
    for entry in entries:
        name, equals, text = entry.partition("=")
        if not equals:
            raise typer.BadParameter(f"{entry!r}: must be key=value")
        try:
            value = json.loads(text)
        except json.JSONDecodeError:
            value = text
        *parents, last = name.split(".")
        place = found
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return found


def _merge(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    nested = {k: _merge(settings.get(k, {}), v) for k, v in changes.items() if isinstance(v, dict)}
    return {**settings, **changes, **nested}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without DHO2's lines on its refreshes, which would tear the bar."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _make(runs: Iterable[Run], store: Store, deadline: float = float("inf")) -> int:
    """Make runs one after the other, with a bar each, until there are no more or the time is out."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}")
    count = 0
    with _quiet(), Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        for run in runs:
            if time.monotonic() > deadline:
                break
            name = f"{run.task} {run.peer} lr {run.settings['lr']:g} seed {run.seed}"
            task = bar.add_task(name, total=run.steps, loss="")
            try:
                record = execute(
                    run, lambda step, loss, task=task: bar.update(task, completed=step, loss=f"loss {loss:.4g}")
                )
            except (DataError, ValueError) as error:
                raise typer.BadParameter(str(error)) from error
            store.add(record)
            count += 1
            bar.remove_task(task)
            end = f"diverged, {record['diverged']}" if record["diverged"] else f"final {record['final']:.5g}"
            bar.console.print(
                f"{record['key']} {name}: {end}, {record['gradients']} gradients, {record['cpu_s']:.1f} s"
            )
    return count


@app.command("list")
def show() -> None:
    """The tasks and the peers."""
    tasks = Table("task", "what the curve holds", "steps", title="tasks")
    for task in TASKS.values():
        tasks.add_row(task.name, task.title, str(task.steps))
    peers = Table("peer", "", "learning rates", "variants", title="peers")
    for peer in PEERS.values():
        peers.add_row(
            peer.name, peer.title, " ".join(f"{lr:g}" for lr in peer.rates), " ".join(map(json.dumps, peer.variants))
        )
    console.print(tasks, peers)


@app.command()
def run(
    task: Annotated[list[str], typer.Option(help="a task, may be repeated")],
    peer: Annotated[list[str], typer.Option(help="a peer, may be repeated")],
    lr: Annotated[list[float] | None, typer.Option(help="learning rates; default: all of the peer's")] = None,
    setting: Annotated[list[str] | None, typer.Option("--set", help="key=value, on top of the usual variant")] = None,
    seeds: Seeds = 1,
    steps: Steps = None,
    results: Results = RESULTS,
) -> None:
    """Make the runs that are named, also those that are recorded already; the newest record counts."""
    runs = []
    for chosen in _pick(task, TASKS, "task"):
        for one in _pick(peer, PEERS, "peer"):
            budget = steps or chosen.steps
            for rate in lr or one.rates:
                settings = _merge(one.settings(chosen, budget, rate), _settings(setting or []))
                runs += [Run(chosen.name, one.name, settings, seed, budget) for seed in range(seeds)]
    _make(runs, Store(results))


@app.command()
def sweep(
    task: TaskNames = None,
    peer: PeerNames = None,
    minutes: Annotated[float, typer.Option(help="start no run after so many minutes")] = 30.0,
    seeds: Seeds = 3,
    trials: Annotated[int | None, typer.Option(min=1, help="only the first so many of each peer")] = None,
    steps: Steps = None,
    results: Results = RESULTS,
) -> None:
    """Make the runs that are missing: a search at seed 0, then further seeds of the best settings."""
    store = Store(results)
    runs = missing(_pick(task, TASKS, "task"), _pick(peer, PEERS, "peer"), store, steps, seeds, trials)
    count = _make(runs, store, time.monotonic() + 60 * minutes)
    console.print(f"{count} runs made, records in {results}", highlight=False, soft_wrap=True)


@app.command()
def report(
    task: TaskNames = None,
    steps: Steps = None,
    results: Results = RESULTS,
    output: Annotated[Path | None, typer.Option(help="folder of report.md and pictures; default: --results")] = None,
) -> None:
    """Print the tables of what is recorded, and write them and the pictures to files."""
    text, files = write_report(_pick(task, TASKS, "task"), Store(results), steps, output or results)
    print(text)
    console.print("wrote " + ", ".join(map(str, files)), highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app()
