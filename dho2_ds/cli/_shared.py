"""What the commands share: how they end, and what they draw with."""

from __future__ import annotations

from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

AsJson = typer.Option("--json", help="Print JSON and nothing else.")


def refuse(message: str) -> NoReturn:
    """End with exit code 2: the command line is wrong."""
    typer.echo(message, err=True)
    raise typer.Exit(2)


def progress(**options: Any) -> Progress:
    """A bar on stderr, so that stdout can be redirected."""
    columns = (TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), **options)


def pyplot() -> Any:
    """matplotlib's pyplot, drawing to files, in one style; None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True})
    plt.rcParams.update({"axes.grid": True, "grid.alpha": 0.25, "figure.dpi": 130, "legend.frameon": False})
    return plt


def logarithmic(axes: Any) -> None:
    """A log scale of y with numbers at 1, 2 and 5, at more within a decade, not only at powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 10 * low else (1, 1.5, *range(2, 10))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
