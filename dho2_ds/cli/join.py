"""``dho2 join``: start curvature ranks for a training job that is running."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer


def join(
    context: typer.Context,
    run_file: Annotated[Path, typer.Argument(help="The training job's run file; its log says where it is.")],
) -> None:
    """Start curvature ranks for a running training job: `dho2 join run.json torchrun --nproc_per_node 2 train.py`."""
    try:
        found = json.loads(run_file.read_text())
        environment = {name: str(found[name]) for name in ("DHO2_JOIN", "DHO2_JOB_TOKEN")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        typer.echo(f"run_file={run_file}: must be the training job's run file ({error}); see its log", err=True)
        raise typer.Exit(2) from error
    if not context.args or shutil.which(context.args[0]) is None:
        command = " ".join(context.args) or "(nothing)"
        typer.echo(f"command={command}: must be the training script's own, e.g. torchrun train.py", err=True)
        raise typer.Exit(2)
    sys.stdout.flush()
    os.execvpe(context.args[0], context.args, {**os.environ, **environment})
