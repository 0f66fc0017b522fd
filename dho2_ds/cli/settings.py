"""``dho2 settings``: every setting, from the same metadata that checks it and words its error messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dho2_ds.cli._shared import AsJson, refuse

if TYPE_CHECKING:
    from dho2_ds.settings import Settings

BEGIN = "<!-- settings: written by `dho2 settings --into FILE`; do not edit by hand -->"
END = "<!-- end of settings -->"


def settings(
    into: Annotated[
        Path | None,
        typer.Option(help="Write the tables between the settings markers of this file, instead of printing them."),
    ] = None,
    as_json: Annotated[bool, AsJson] = False,
) -> None:
    """Every setting of the optimizer, its default, what is allowed and what it means, as Markdown tables or as JSON."""
    if as_json:
        if into is not None:
            refuse("into, json: must not be given together; redirect the output of --json")
        found = {name: {key: about(key, model) for key in model.model_fields} for name, model in levels()}
        typer.echo(json.dumps(found, indent=2))
    elif into is None:
        typer.echo(tables())
    else:
        try:
            into.write_text(replaced(into.read_text("utf-8"), tables()), "utf-8")
        except (OSError, ValueError) as error:  # ValueError: also what is no text
            refuse(f"into={into}: must be a file with the lines {BEGIN!r} and {END!r} ({error}); add them")


def levels() -> list[tuple[str, type[Settings]]]:
    """The objects of settings by the name under which a JSON has them, the outermost first."""
    from dho2_ds.config import CurvatureConfig, DHO2Config, SoapConfig

    return [("params", DHO2Config), ("curvature", CurvatureConfig), ("soap", SoapConfig)]


def about(key: str, model: type[Settings]) -> dict[str, Any]:
    """Default, what is allowed and meaning of a setting; an object of settings counts as empty by default."""
    field = model.model_fields[key]
    extra = field.json_schema_extra
    assert isinstance(extra, dict)  # setting() is the only way in which settings are declared
    default = {} if hasattr(field.default, "model_dump") else field.default
    return {"default": default, "allowed": extra["must"], "meaning": field.description}


def tables() -> str:
    """The settings as Markdown, a table per object of settings."""
    return "\n\n".join(_table(name, model) for name, model in levels())


def _table(name: str, model: type[Settings]) -> str:
    rows = [f"| key of `{name}` | default | allowed | meaning |", "|---|---|---|---|"]
    for key in model.model_fields:
        found = about(key, model)
        cells = (f"`{key}`", f"`{json.dumps(found['default'])}`", found["allowed"], found["meaning"])
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(rows)


def replaced(text: str, content: str) -> str:
    """``text`` with what stands between its markers replaced.

    Raises:
        ValueError: there is not exactly one pair of markers.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError("there is not exactly one pair of them")
    return f"{text[: text.index(BEGIN)]}{BEGIN}\n{content}\n{text[text.index(END) :]}"
