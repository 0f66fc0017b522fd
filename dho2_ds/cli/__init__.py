"""The ``dho2`` command. Each of its commands lies in a module of its own and loads what it needs when it runs."""

from __future__ import annotations

import typer

from dho2_ds.cli import demo, doctor, join, plan, report, settings, spectrum

app = typer.Typer(no_args_is_help=True, add_completion=False)

PASSES_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
"""For commands that end in another program's command line."""


@app.callback()
def main() -> None:
    """Plan, inspect and watch training with DHO2.

    Exit codes: 0 done, 1 it did not succeed or found a fault, 2 the command line is wrong.
    """


app.command()(plan.plan)
app.command()(spectrum.spectrum)
app.command()(report.report)
app.command()(settings.settings)
app.command()(doctor.doctor)
app.command(context_settings=PASSES_ON)(demo.demo)
app.command(context_settings=PASSES_ON)(join.join)
