"""What a training run has recorded of itself: the log's JSON lines, or DeepSpeed's CSV or TensorBoard monitor."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Series = list[tuple[float, float]]

_MONITOR = "Train_DHO2_"
_RENAMED = {"Train_Samples_train_loss": "loss", "Train_Samples_lr": "lr"}
_EIGENVALUE = "eigenvalue_"


class NoRecords(RuntimeError):
    """There is nothing to read; the message says what is looked for."""


@dataclass(frozen=True)
class Run:
    """The records of one run.

    Attributes:
        source: the kind of records. unit: what x counts.
        series: {name: (x, value) by rising x}: ``loss``, ``lr_scale``, ``captured_fraction``, ``age``, ``rejected``,
            ``hvps``, ``refresh_seconds``, ``eigenvalue_0`` ..., as far as they were recorded.
    """

    source: str
    unit: Literal["step", "sample"]
    series: dict[str, Series]

    @property
    def end(self) -> float:
        """The last x of any series."""
        return max((points[-1][0] for points in self.series.values() if points), default=0.0)

    @property
    def eigenvalues(self) -> list[Series]:
        """By falling magnitude."""
        names = [name for name in self.series if name.startswith(_EIGENVALUE)]
        return [self.series[name] for name in sorted(names, key=lambda name: int(name.removeprefix(_EIGENVALUE)))]


def read_run(path: Path) -> Run:
    """Read a run's records: a file, or of a folder (and those below) the first kind that is there of JSON lines, CSV
    and TensorBoard events.

    Of values recorded twice at one place (training went on from an older checkpoint) the later one counts.

    Raises:
        NoRecords: there are none, or those of several runs.
    """
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    lines = [file for file in files if file.suffix == ".jsonl" and _is_log(file)]
    tables = [file for file in files if file.suffix == ".csv" and file.stem.startswith("Train_")]
    events = [file for file in files if file.name.startswith("events.out.tfevents.")]
    if lines:
        _refuse_several(lines)
        return Run("JSON lines", "step", _collect(value for file in lines for value in _log_values(file)))
    if tables:
        _refuse_several([file.parent for file in tables])
        return _monitored("CSV", (value for file in tables for value in _csv_values(file)))
    if events:
        _refuse_several([file.parent for file in events])
        return _monitored("TensorBoard", (value for file in events for value in _tensorboard_values(file)))
    raise NoRecords(
        f"{path}: must hold records of a run: a *.jsonl file (setting log), DeepSpeed's CSV monitor (Train_*.csv) or "
        "TensorBoard events (events.out.tfevents.*); switch one of them on"
    )


def _is_log(file: Path) -> bool:
    """Whether it is ours: data sets are JSON lines too."""
    with file.open() as lines:
        try:
            return "step" in json.loads(lines.readline())
        except (ValueError, TypeError):
            return False


def _refuse_several(runs: list[Path]) -> None:
    if len(set(runs)) > 1:
        raise NoRecords(f"several runs: must be one; name one of {', '.join(sorted(map(str, set(runs))))}")


def _collect(values: Iterator[tuple[str, float, float]]) -> dict[str, Series]:
    found: dict[str, dict[float, float]] = {}
    for name, x, value in values:
        found.setdefault(name, {})[x] = value
    return {name: sorted(points.items()) for name, points in found.items()}


def _log_values(file: Path) -> Iterator[tuple[str, float, float]]:
    lines = file.read_text().splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            record: dict[str, Any] = json.loads(line)
            step = float(record.pop("step"))
        except (ValueError, KeyError, AttributeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                return  # being written, or cut off where a job was killed
            raise NoRecords(f"{file}, line {number}: must be a JSON object with a step; remove the line") from error
        for name, value in record.items():
            if name == "eigenvalues":
                yield from ((f"{_EIGENVALUE}{i}", step, float(entry)) for i, entry in enumerate(value))
            elif isinstance(value, (int, float)):
                yield name, step, float(value)
            elif name == "loss" and value is None:  # JSON has no NaN; the report must say that it was one
                yield name, step, math.nan


def _csv_values(file: Path) -> Iterator[tuple[str, float, float]]:
    with file.open(newline="") as lines:
        for row in csv.reader(lines):
            if row and row[0] != "step":  # a header comes again where training was resumed
                yield file.stem, float(row[0]), float(row[1])


def _tensorboard_values(file: Path) -> Iterator[tuple[str, float, float]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise NoRecords(f"{file}: must be read with tensorboard; pip install 'dho2-ds[cli]'") from error
    events = EventAccumulator(str(file), size_guidance={"scalars": 0})
    events.Reload()
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            yield tag.replace("/", "_"), float(event.step), float(event.value)


def _monitored(source: str, values: Iterator[tuple[str, float, float]]) -> Run:
    """DeepSpeed's monitors count samples. They become steps by what ``Train/DHO2/steps`` says, if batches are equal."""
    raw = _collect(values)
    series = {_RENAMED.get(name, name.removeprefix(_MONITOR)): points for name, points in raw.items()}
    samples, steps = series.pop("steps", [(0.0, 0.0)])[-1]
    if not samples or not steps:
        return Run(source, "sample", series)
    batch = samples / steps
    return Run(source, "step", {name: [(x / batch, y) for x, y in points] for name, points in series.items()})
