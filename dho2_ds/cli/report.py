"""``dho2 report``: one picture and one page of a training run."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dho2_ds.cli._shared import AsJson, logarithmic, pyplot, refuse

if TYPE_CHECKING:
    from dho2_ds.records import Run, Series

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{{ name }}: DHO2 report</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
img { width: 100%; height: auto; }
.scroll { overflow-x: auto; }
</style>
<h1>{{ name }}</h1>
<table id="summary">
{% for key, value in summary %}<tr><td>{{ key }}</td><td>{{ value }}</td></tr>
{% endfor %}</table>
<img alt="Loss, eigenvalues, age of the basis, captured fraction and refresh seconds over {{ unit }}s"
 src="data:image/png;base64,{{ picture }}">
<h2>Last refreshes</h2>
<div class="scroll"><table id="refreshes">
<tr>{% for key in columns %}<th>{{ key }}</th>{% endfor %}</tr>
{% for row in rows %}<tr>{% for value in row %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
</html>
"""
SHOWN = 10
"""Refreshes in the page's table."""


def report(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN_DIR",
            help="Folder (or file) with JSON lines (setting log), or DeepSpeed's CSV or TensorBoard monitor.",
        ),
    ],
    output: Annotated[Path, typer.Option(help="Page to write; the picture goes beside it.")] = Path("report.html"),
    as_json: Annotated[bool, AsJson] = False,
) -> None:
    """Draw loss, eigenvalues, basis age, captured fraction and refresh cost of a run; writes a page and a picture.

    The loss is what you log: optimizer.log(loss=loss) with the setting log, or with DeepSpeed's monitors
    engine.monitor.write_events([("Train/Samples/train_loss", float(loss), engine.global_samples)]).
    """
    from dho2_ds.records import NoRecords, read_run

    if output.suffix not in (".html", ".htm") or output.is_dir():
        refuse(f"output={output}: must be a page's name, such as report.html; the picture goes beside it")
    if not run.exists():
        refuse(f"run={run}: must be a folder or a file; check the path")
    plt = pyplot()
    if plt is None:
        typer.echo("report: must have matplotlib to draw with; pip install 'dho2-ds[cli]'", err=True)
        raise typer.Exit(1)
    try:
        found = read_run(run)
    except NoRecords as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    output.parent.mkdir(parents=True, exist_ok=True)
    picture = output.with_suffix(".png")
    figure = draw(found, plt)
    figure.savefig(picture)
    plt.close(figure)
    summary = summarise(found)
    output.write_text(_page(run.resolve().name, found, summary, picture.read_bytes()))
    if as_json:
        finite = {k: [(x, y if math.isfinite(y) else None) for x, y in points] for k, points in found.series.items()}
        typer.echo(json.dumps({"summary": summary, "unit": found.unit, "series": finite}, indent=2))
        return
    for key, value in summary.items():
        typer.echo(f"{key}: {_number(value)}")
    typer.echo(f"wrote {output} and {picture}")


def summarise(run: Run) -> dict[str, Any]:
    """The run in a few numbers; what was not recorded is left out."""
    series = run.series
    seconds = [value for _, value in series.get("refresh_seconds", [])]
    last = {name: points[-1][1] for name, points in series.items() if points}
    rejected = int(last.get("rejected", 0))
    losses = [value for _, value in series.get("loss", []) if math.isfinite(value)]
    lost = [x for x, value in series.get("loss", []) if not math.isfinite(value)]
    found: dict[str, Any] = {
        "records": run.source,
        f"last {run.unit}": run.end,
        "loss, first": losses[0] if losses else None,
        "loss, last finite" if lost else "loss, last": losses[-1] if losses else None,
        f"loss not finite first at {run.unit}": lost[0] if lost else None,
        "refreshes": max(0, len(seconds) - rejected),
        "rejected": rejected,
        "Hessian-vector products": int(last["hvps"]) if "hvps" in last else None,
        "seconds in refreshes": sum(seconds),
        "largest eigenvalue": last.get("eigenvalue_0"),
        "lr scale": last.get("lr_scale"),
        "captured fraction": last.get("captured_fraction"),
    }
    return {key: value for key, value in found.items() if value is not None}


def draw(run: Run, plt: Any) -> Any:
    """Five panels over one axis."""
    figure, panels = plt.subplots(
        5, 1, figsize=(9, 12), sharex=True, layout="constrained", gridspec_kw={"height_ratios": [2, 2, 1, 1, 1]}
    )
    loss, eigenvalues, age, captured, cost = panels
    blue, red = "#3b6ea8", "#d1495b"
    _line(loss, run.series.get("loss", []), "loss", color=blue)
    values = run.eigenvalues
    for index, points in enumerate(values):
        color = plt.get_cmap("viridis")(0.9 * index / len(values))
        label = f"|λ{index + 1}|" if index in (0, len(values) - 1) else None
        magnitudes = [(x, abs(value)) for x, value in points]
        _line(eigenvalues, magnitudes, "|eigenvalue|", color=color, marker="o", ms=4, label=label)
    if values:
        eigenvalues.legend()
        logarithmic(eigenvalues)
    else:
        _line(eigenvalues, [], "|eigenvalue|")
    if run.series.get("loss") and not any(value <= 0 for _, value in run.series["loss"]):
        logarithmic(loss)
    _line(age, _ages(run), "basis age (steps)", color=blue)
    _line(captured, run.series.get("captured_fraction", []), "captured\nfraction", color=blue, marker="o", ms=4)
    _line(cost, run.series.get("refresh_seconds", []), "refresh\nseconds", color=red, marker="o", ms=4, ls="none")
    for axes in (captured, cost):
        axes.margins(y=0.15)
        axes.set_ylim(bottom=0)
    cost.set_xlabel(run.unit)
    figure.align_ylabels()
    return figure


def _line(axes: Any, points: Series, name: str, **style: Any) -> None:
    axes.set_ylabel(name)
    if points:
        axes.plot([x for x, _ in points], [y for _, y in points], **style)
        return
    axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", va="center", color="0.5")


def _ages(run: Run) -> Series:
    """A basis grows older by one each step, and a refresh makes it as young as it says."""
    points: Series = []
    for x, age in run.series.get("age", []):
        if points and run.unit == "step":
            before, old = points[-1]
            points.append((x, old + x - before))
        points.append((x, age))
    if points and run.unit == "step" and run.end > points[-1][0]:
        points.append((run.end, points[-1][1] + run.end - points[-1][0]))
    return points


def _page(name: str, run: Run, summary: dict[str, Any], picture: bytes) -> str:
    """The page, with everything in it."""
    import jinja2

    columns = ["refresh_seconds", "hvps", "eigenvalue_0", "lr_scale", "captured_fraction", "rejected"]
    columns = [column for column in columns if column in run.series]
    by_place = {column: dict(run.series[column]) for column in columns}
    places = [x for x, _ in run.series.get("refresh_seconds", [])][-SHOWN:]
    page: str = jinja2.Template(PAGE, autoescape=True).render(
        name=name,
        unit=run.unit,
        summary=[(key, _number(value)) for key, value in summary.items()],
        picture=base64.b64encode(picture).decode(),
        columns=[run.unit, *(column.replace("_", " ") for column in columns)],
        rows=[[f"{x:.0f}", *(_number(by_place[column].get(x, "")) for column in columns)] for x in places],
    )
    return page


def _number(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
