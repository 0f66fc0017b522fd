"""``python -m dho2_ds.cli``: the command for launchers that start a module."""

from dho2_ds.cli import app

app()
