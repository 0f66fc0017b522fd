"""One run, its record, and the file of records, which makes a sweep resumable.

A record is one JSON line in `<results>/<task>.jsonl`. Its key is a hash of everything that determines the run, so a run
that is there already is not made again, and a sweep can be done in pieces.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from _peers import FIRST_RATES, PEERS, Peer, Settings
from _tasks import REVISION, TASKS, Data, Task, schedule
from _trainers import Trainer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import dho2_ds

Record = dict[str, Any]
RESULTS = Path(__file__).resolve().parent / "results"
BLOWN_UP = 100.0  # times the value at the start: such a run is given up
PACKAGES = "torch", "dho2-ds", "pytorch-optimizer", "singd", "numpy"
COLUMNS = "step", "gradients", "cpu_s", "wall_s", "value"


@dataclass(frozen=True)
class Run:
    """What determines a run."""

    task: str
    peer: str
    settings: Settings
    seed: int
    steps: int

    @property
    def key(self) -> str:
        text = json.dumps({**vars(self), "revision": REVISION}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


class _Curve:
    """Evaluations of a run, and clocks that stand still meanwhile."""

    def __init__(self, task: Task, model: nn.Module, data: Data) -> None:
        self.points: dict[str, list[float]] = {name: [] for name in COLUMNS}
        self.cpu_s = self.wall_s = 0.0
        self._task, self._model, self._data = task, model, data

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.wall_s += time.perf_counter() - self._wall
        self.cpu_s += time.process_time() - self._cpu

    @torch.no_grad()
    def evaluate(self, step: int, trainer: Trainer) -> float:
        value = self._task.measure(self._model, self._data)
        if math.isfinite(value):
            row = step, trainer.gradients, round(self.cpu_s, 4), round(self.wall_s, 4), float(f"{value:.6g}")
            for name, number in zip(COLUMNS, row, strict=True):
                self.points[name].append(number)
        return value


def execute(run: Run, advance: Callable[[int, float], None] = lambda step, loss: None) -> Record:
    """Train once and return the record. `advance(step, loss)` is called after every step.

    Time is counted from the first step to the last without evaluations: `wall_s` as the clock on the wall has it, and
    `cpu_s`, the processor time of this process, which other work on the machine disturbs less.
    """
    task, peer, seed = TASKS[run.task], PEERS[run.peer], run.seed
    data = task.data()
    torch.manual_seed(seed)
    model = task.build()
    refusal = peer.refuses(task, model)
    if refusal:
        raise ValueError(f"peer {peer.name!r} cannot be used on task {task.name!r}: {refusal}")
    batches = task.batches(seed)
    trainer = peer.build(model, task, run.settings)
    every = math.ceil(run.steps / task.points)
    curve, state_bytes = _Curve(task, model, data), 0
    diverged, step, evaluated = None, 0, 0
    # Fused attention cannot be differentiated twice, which some peers need; all get the same kernel.
    with sdpa_kernel(SDPBackend.MATH):
        first = curve.evaluate(0, trainer)
        while step < run.steps and diverged is None:
            trainer.set_schedule(schedule(step, run.steps))
            batch = next(batches)
            curve.start()
            try:
                loss = trainer.step(batch)
            except torch.linalg.LinAlgError as error:  # a factorisation met what a diverging run made of its input
                diverged, loss = f"step {step}: {str(error).splitlines()[0][:120]}", math.nan
            curve.stop()
            step = trainer.gradients if trainer.counts_evaluations else step + 1
            advance(step, loss)
            if diverged is None and not math.isfinite(loss):
                diverged = f"step {step}: loss {loss}"
            if diverged is None and (step >= run.steps or step - evaluated >= every):
                evaluated = step
                state_bytes = max(state_bytes, trainer.state_bytes())
                value = curve.evaluate(step, trainer)
                if not math.isfinite(value) or value > BLOWN_UP * first:
                    diverged = f"step {step}: value {value:.3g}"
        metric = None
        if diverged is None and task.metric is not None:
            with torch.no_grad():
                metric = float(f"{task.metric(model, data):.6g}")
    return {
        "key": run.key,
        **vars(run),
        "diverged": diverged,
        "final": curve.points["value"][-1] if diverged is None else None,
        "metric": metric,
        "gradients": trainer.gradients,
        "hvps": trainer.hvps,
        "cpu_s": round(curve.cpu_s, 3),
        "wall_s": round(curve.wall_s, 3),
        "state_bytes": state_bytes,
        "parameters": sum(p.numel() for p in model.parameters()),
        "curve": curve.points,
        "versions": _versions(),
        "machine": _machine(),
    }


@cache
def _versions() -> dict[str, str]:
    """Releases, and a hash of this package's own source, which changes between releases."""
    assert dho2_ds.__file__ is not None
    folder = Path(dho2_ds.__file__).parent
    source = b"".join(path.read_bytes() for path in sorted(folder.rglob("*.py")))
    releases = {name: importlib.metadata.version(name) for name in PACKAGES}
    own = {"python": platform.python_version(), "dho2-ds source": hashlib.sha256(source).hexdigest()[:12]}
    return {**own, **releases}


def _machine() -> dict[str, Any]:
    """The processor, and how busy it was: what times are worth."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
    }


class Store:
    """The records of one folder."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder

    def records(self, task: str) -> list[Record]:
        """The newest record of each key. A line may be cut off, where a sweep was killed; it is left out."""
        path = self._path(task)
        found: dict[str, Record] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            found[record["key"]] = record
        return list(found.values())

    def keys(self, task: str) -> set[str]:
        return {record["key"] for record in self.records(task)}

    def add(self, record: Record) -> None:
        path = self._path(record["task"])
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            cut_off = file.read(1) not in (b"", b"\n")
            file.write(b"\n" * cut_off + json.dumps(record, allow_nan=False).encode() + b"\n")

    def _path(self, task: str) -> Path:
        return self.folder / f"{task}.jsonl"


def missing(
    tasks: list[Task], peers: list[Peer], store: Store, steps: int | None, seeds: int, first: int | None = None
) -> Iterator[Run]:
    """Runs that are not recorded, in a sensible order; the caller records each before it asks for the next.

    First each peer's usual variant: the middle `FIRST_RATES` of its learning rates, and on beyond an end while the best
    is there. Then every other variant at the best of these and its neighbours, then further seeds of the best setting.
    `first` keeps to the first so many trials of each peer.
    """
    for stage in range(seeds + 1):  # learning rates, variants, seeds 1, 2...
        for task in tasks:
            budget = steps or task.steps
            for peer in (peer for peer in peers if applies(task, peer)):
                for settings in _wanted(task, peer, budget, store, stage, first):
                    run = Run(task.name, peer.name, settings, max(0, stage - 1), budget)
                    if run.key not in store.keys(task.name):
                        yield run


def applies(task: Task, peer: Peer) -> bool:
    return not peer.refuses(task, task.build())


def _wanted(task: Task, peer: Peer, steps: int, store: Store, stage: int, first: int | None) -> Iterator[Settings]:
    """The settings that a stage asks for; what is recorded meanwhile decides how it goes on."""
    usual, *others = peer.variants
    if stage > 1:
        chosen = best(store.records(task.name), peer, task, steps)
        yield from [chosen] if chosen else []
    elif stage == 1:
        if first is None:
            near = _around(peer, _best_rate(task, peer, steps, store))
            yield from (peer.settings(task, steps, lr, variant) for variant in others for lr in near)
    else:
        middle = peer.outwards()[: first or FIRST_RATES]
        yield from (peer.settings(task, steps, lr, usual) for lr in middle)
        while first is None:
            tried = {r["settings"]["lr"] for r in _usual(task, peer, steps, store)}
            beyond = [lr for lr in _around(peer, _best_rate(task, peer, steps, store)) if lr not in tried]
            if not beyond:
                return
            yield from (peer.settings(task, steps, lr, usual) for lr in beyond)


def _usual(task: Task, peer: Peer, steps: int, store: Store) -> list[Record]:
    """What is recorded of a peer's usual variant at seed 0."""
    found = trials(store.records(task.name), peer, task, steps)
    return [r for r in found if r["seed"] == 0 and r["settings"] == peer.settings(task, steps, r["settings"]["lr"])]


def _best_rate(task: Task, peer: Peer, steps: int, store: Store) -> float | None:
    ended = [r for r in _usual(task, peer, steps, store) if r["final"] is not None]
    return min(ended, key=lambda r: r["final"])["settings"]["lr"] if ended else None


def _around(peer: Peer, lr: float | None) -> list[float]:
    """A learning rate and its neighbours; where all have diverged, the least one."""
    index = 0 if lr is None else peer.rates.index(lr)
    return list(peer.rates[max(0, index - 1) : index + 2])


def trials(records: list[Record], peer: Peer, task: Task, steps: int) -> list[Record]:
    """What is recorded of a peer; runs with other settings do not count as tuning."""
    grid = peer.grid(task, steps)
    return [r for r in records if r["peer"] == peer.name and r["steps"] == steps and r["settings"] in grid]


def best(records: list[Record], peer: Peer, task: Task, steps: int) -> Settings | None:
    """The settings of the least final value at seed 0."""
    ended = [r for r in trials(records, peer, task, steps) if r["seed"] == 0 and r["final"] is not None]
    return min(ended, key=lambda r: r["final"])["settings"] if ended else None


def at_fraction(record: Record, fraction: float) -> float | None:
    """The value of the curve at a fraction of the budget, interpolated between evaluations."""
    steps, values = record["curve"]["step"], record["curve"]["value"]
    return _interpolate(fraction * record["steps"], steps, values)


def _interpolate(x: float, xs: list[float], ys: list[float]) -> float | None:
    for left in range(len(xs) - 1):
        if xs[left] <= x <= xs[left + 1]:
            share = (x - xs[left]) / (xs[left + 1] - xs[left])
            return ys[left] + share * (ys[left + 1] - ys[left])
    return None


def cost_of(record: Record, target: float) -> dict[str, float] | None:
    """Steps, gradients and seconds at the first evaluation at or below the target; None where it was not reached."""
    curve = record["curve"]
    for index, value in enumerate(curve["value"]):
        if value <= target:
            return {name: curve[name][index] for name in COLUMNS}
    return None
