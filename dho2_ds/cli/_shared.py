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
