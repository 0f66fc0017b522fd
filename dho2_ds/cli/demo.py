"""``dho2 demo``: train the example of a checkout and draw the result."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import dho2_ds


def _examples() -> Path:
    """Return where a checkout (an editable installation) has its examples."""
    return Path(dho2_ds.__file__).resolve().parent.parent / "examples"


def demo(
    context: typer.Context,
    ranks: Annotated[int, typer.Option(min=1, help="Processes to train on.")] = 2,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps; the example's own number if absent.")
    ] = None,
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 2,
    output: Annotated[Path, typer.Option(help="Picture to write.")] = Path("demo.png"),
    as_json: Annotated[bool, typer.Option("--json", help="Print every evaluation as JSON instead of a table.")] = False,
) -> None:
    """Train the example of a checkout under DeepSpeed and draw the result. Further options go to the example."""
    script = _examples() / "demo.py"
    if not script.is_file():
        typer.echo(
            f"demo={script}: must exist, which it does in a checkout only; "
            "clone the repository and run `make demo` there, or `pip install -e .` and this command",
            err=True,
        )
        raise typer.Exit(2)
    command = [sys.executable, str(script), "--ranks", str(ranks), "--stage", str(stage), "--output", str(output)]
    if steps is not None:
        command += ["--steps", str(steps)]
    if as_json:
        command.append("--json")
    # `deepspeed` and `ninja` lie beside this interpreter, whose folder need not be on PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    sys.stdout.flush()
    os.execve(sys.executable, command + context.args, {**os.environ, "PATH": path})
