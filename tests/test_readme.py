"""The README's code is run and its JSON is validated."""

from __future__ import annotations

import json
import re
from pathlib import Path

from dho2_ds.config import parse_config

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


def test_json_blocks_are_valid_settings() -> None:
    assert blocks("json")
    for text in blocks("json"):
        optimizer = json.loads(text)["optimizer"]
        assert optimizer["type"] == "DHO2"
        parse_config(optimizer["params"])


def test_python_blocks_compile_and_marked_ones_run() -> None:
    for text in blocks("python"):
        compile(text, "README.md", "exec")
    scope: dict[str, object] = {}
    marked = re.findall(r"<!-- run -->\n```python\n(.*?)```", README, flags=re.S)
    assert len(marked) == README.count("<!-- run -->") == 2  # a marker without its block would be left out
    for text in marked:
        exec(text, scope)
    assert len(scope["found"].eigenvalues) == 4  # type: ignore[attr-defined]
