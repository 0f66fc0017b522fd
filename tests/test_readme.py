"""The code of README.md and configs/README.md runs, and every file, target, command, option and link in them exists."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import json
import os
import re
import runpy
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer
from typer.testing import CliRunner

import dho2_ds
from dho2_ds import cli
from dho2_ds.cli import settings
from dho2_ds.config import parse_config
from tests.readme_scripts import HEAD, JOBS
from tests.test_examples import ROOT, launch

MANUALS = ("README.md", "configs/README.md")
RUNNABLE, SHELL, SHOWN = ("python", "json"), ("sh", "console"), ("text", "")
THEIR_OWN = "train.py"  # a script of the reader's


class Block(NamedTuple):
    """A fenced block: its place, language, the job it names (``run=``), and why it is not run, if it is not."""

    file: str
    line: int
    language: str
    job: str
    text: str
    excuse: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def blocks(file: str, text: str) -> Iterator[Block]:
    pattern = r"(?:<!-- not run: (?P<excuse>[^\n]+) -->\n)?^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$"
    for match in re.finditer(pattern, text, flags=re.S | re.M):
        language, _, options = match["info"].partition(" ")
        job = options.removeprefix("run=")
        line = text[: match.start()].count("\n") + 1
        yield Block(file, line, language, job, match["text"], match["excuse"] or "")


BLOCKS = [block for file in MANUALS for block in blocks(file, (ROOT / file).read_text())]
IN_JOBS = [block for block in BLOCKS if block.job]


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert [str(b) for b in BLOCKS if b.language not in (*RUNNABLE, *SHELL, *SHOWN)] == []
    assert [str(b) for b in BLOCKS if b.job and b.job not in JOBS] == []
    assert {b.job for b in IN_JOBS} == set(JOBS)  # none that checks nothing
    assert sum(text.count("```") for text in map(Path.read_text, map(ROOT.joinpath, MANUALS))) == 2 * len(BLOCKS)


def test_few_blocks_are_not_run() -> None:
    """A marker says why; their number is written here, so that one more is a decision."""
    assert [str(b) for b in BLOCKS if b.excuse] == []
    assert sum((ROOT / file).read_text().count("<!-- not run") for file in MANUALS) == 0


def test_markers_belong_to_blocks() -> None:
    text = "<!-- not run: needs a GPU -->\n```python\n1 / 0\n```\n\n```json run=deepspeed\n{}\n```\n"
    first, second = blocks("a", text)
    assert (first.excuse, first.job, first.language, second.excuse, second.job) == (
        "needs a GPU", "", "python", "", "deepspeed",
    )  # fmt: skip


def test_python_blocks_without_a_job_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in BLOCKS:
            if block.language == "python" and not block.job and not block.excuse:
                exec(compile(block.text, str(block), "exec"), scope)
    assert len(scope["found"].eigenvalues) == 4 and scope["density"].trace != 0
    assert scope["optimizer"].curvature_stats()["refreshes"] == 2


def test_json_blocks_are_valid_settings() -> None:
    found = [json.loads(b.text) for b in BLOCKS if b.language == "json"]
    assert found
    for config in found:
        assert config["optimizer"]["type"] == "DHO2"
        parse_config(config["optimizer"]["params"])


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("block", IN_JOBS, ids=str)
def test_blocks_with_a_job_train_on_two_ranks(block: Block, tmp_path: Path) -> None:
    job = JOBS[block.job]
    missing = [name for name in job.packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)}: not installed; see the extras of pyproject.toml")
    if block.language == "json":
        (tmp_path / "block.json").write_text(block.text)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    python = block.text if block.language == "python" else ""
    script = tmp_path / "block.py"
    script.write_text("\n".join([HEAD, job.before, python, job.after]))
    if job.launcher == "deepspeed":
        command = ["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), str(script)]
    else:
        command = ["torchrun", "--standalone", "--nproc_per_node", "2", str(script)]
    assert launch(command, tmp_path, timeout=300).count("the block trained") == 2


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -- commands ---------------------------------------------------------------------------------------------------------

PROGRAMS = "make|python|pip|dho2|deepspeed|torchrun|mpirun|accelerate"


def command_lines(file: str, text: str) -> Iterator[tuple[str, list[str]]]:
    """(place, words) of every command: of shell blocks, of indented lines, and of code within the text."""
    for block in blocks(file, text):
        if block.language in SHELL:
            lines = block.text.replace("\\\n", " ").splitlines()
            if block.language == "console":  # `$ command` and what it prints
                lines = [line[2:] for line in lines if line.startswith("$ ")]
            yield from ((str(block), words) for line in lines if (words := shlex.split(line, comments=True)))
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    for line in re.findall(rf"^    (?:\$ )?((?:[A-Z_]+=\S+ )*(?:{PROGRAMS}) .*)$", prose, flags=re.M):
        yield f"{file}: {line}", shlex.split(line, comments=True)
    for span in re.findall(rf"`((?:{PROGRAMS}) [^`]+)`", prose):
        if not re.search(r"COMMAND|FILE|\.\.\.", span):
            yield f"{file}: {span}", shlex.split(span)


COMMANDS = [line for file in MANUALS for line in command_lines(file, (ROOT / file).read_text())]


def problems(words: list[str]) -> list[str]:
    """What is wrong with a command line: names that do not exist."""
    while re.fullmatch(r"[A-Z_0-9]+=.*", words[0]):
        words = words[1:]
    program, rest = words[0], words[1:]
    if program == "make":
        return make_problems(rest)
    if program == "pip":
        return [f"no extra {e}" for e in extras(" ".join(rest)) if e not in extras_of_the_project()]
    if program == "dho2":
        return dho2_problems(rest)
    if program == "python":
        return module_problems(rest[1:]) if rest[0] == "-m" else script_problems(rest)
    if program == "accelerate":
        rest = rest[1:]  # launch
    if program not in ("torchrun", "deepspeed", "mpirun", "accelerate"):
        return [f"unknown program {program}"]
    at = next((i for i, word in enumerate(rest) if word.endswith(".py") or word == "-m"), None)
    if at is None:
        return [] if not rest or rest[0].startswith("-") else [f"no script in {rest}"]
    known = launcher_options(program)
    found = [f"{program} has no {word}" for word in options(rest[:at]) if known is not None and word not in known]
    return found + (module_problems(rest[at + 1 :]) if rest[at] == "-m" else script_problems(rest[at:]))


def options(words: list[str]) -> list[str]:
    return [word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)]


def make_problems(words: list[str]) -> list[str]:
    """`make -n` knows targets, and prints the value of every variable that they use."""
    environment = {"PATH": os.environ["PATH"]}  # none of an outer make's variables
    options: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "env": environment}
    result = subprocess.run(["make", "-n", *words], **options)
    if result.returncode:
        return [result.stderr.strip()]
    names = [word.split("=")[0] for word in words if "=" in word]
    marked = [word.split("=")[0] + "=@" + word.split("=")[0] if "=" in word else word for word in words]
    printed = subprocess.run(["make", "-n", *marked], **options).stdout
    found = [f"make does not use {name}" for name in names if f"@{name}" not in printed]
    for line in result.stdout.splitlines():
        if match := re.search(r"bin/(?:python (examples/.*)|dho2 (.*))$", line):
            found += script_problems(shlex.split(match[1])) if match[1] else dho2_problems(shlex.split(match[2]))
    return found


def extras(text: str) -> list[str]:
    return [name for group in re.findall(r"dho2-ds\[([\w,-]+)\]", text) for name in group.split(",")]


def extras_of_the_project() -> list[str]:
    section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    return re.findall(r"^([\w-]+) = \[", section, flags=re.M)


def dho2_problems(words: list[str]) -> list[str]:
    commands = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
    if words[0] not in commands:
        return [f"dho2 has no command {words[0]}"]
    if words[0] == "join":
        return problems(words[2:]) if len(words) > 2 else []
    if words[0] == "demo":
        return script_problems(["examples/demo.py", *words[1:]])
    known = {option for parameter in commands[words[0]].params for option in parameter.opts}
    return [f"dho2 {words[0]} has no {option}" for option in options(words[1:]) if option not in known]


def module_problems(words: list[str]) -> list[str]:
    if words[0] == "dho2_ds.cli":
        return dho2_problems(words[1:])
    return [] if importlib.util.find_spec(words[0]) else [f"no module {words[0]}"]


def script_problems(words: list[str]) -> list[str]:
    if words[0] == THEIR_OWN:
        return []
    if not (ROOT / words[0]).is_file():
        return [f"no file {words[0]}"]
    found = [f"no file {word}" for word in words[1:] if word.startswith("configs/") and not (ROOT / word).is_file()]
    given = options(words[1:])
    known = script_options(words[0], words[1] if len(words) > 1 and not words[1].startswith("-") else "")
    return found + [f"{words[0]} has no {option}" for option in given if known is not None and option not in known]


@cache
def script_options(script: str, command: str) -> frozenset[str] | None:
    """The options in a script's `--help`; None where a package that it needs is not installed."""
    path = ROOT / script
    before, argv, folders = set(sys.modules), sys.argv, list(sys.path)
    output = io.StringIO()
    try:
        sys.argv = [script, *([command] if command else []), "--help"]
        sys.path.insert(0, str(path.parent))
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        assert not end.code, output.getvalue()
    except ModuleNotFoundError as error:
        if (path.parent / f"{error.name}.py").exists():
            raise
        return None
    finally:
        sys.argv, sys.path[:] = argv, folders
        for name in set(sys.modules) - before:
            if str(ROOT / "examples") in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]
    return frozenset(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", output.getvalue()))


@cache
def launcher_options(program: str) -> frozenset[str] | None:
    """None for launchers that are no part of what is always installed."""
    if program == "torchrun":
        from torch.distributed.run import get_args_parser

        return frozenset(get_args_parser()._option_string_actions)
    if program == "deepspeed":
        from deepspeed.launcher import runner

        output = io.StringIO()
        with contextlib.redirect_stdout(output), pytest.raises(SystemExit):
            runner.parse_args(["--help"])
        return frozenset(re.findall(r"--[\w-]+", output.getvalue()))
    return None


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def test_every_command_names_what_exists() -> None:
    assert len(COMMANDS) > 25
    assert [(place, found) for place, words in COMMANDS if (found := problems(words))] == []


@pytest.mark.parametrize(
    "line",
    [
        "make no-such-target",
        "make bench MINUTE=3",
        "make bench-sweep ARGS='--no-such-option 1'",
        "pip install 'dho2-ds[nothing]'",
        "dho2 nothing",
        "dho2 plan --no-such-option 3",
        "dho2 join run.json torchrun --no-such-option train.py",
        "python examples/no_such_file.py",
        "python examples/pinn_burgers.py --no-such-option 3",
        "DHO2=1 torchrun --no-such-option 2 train.py",
        "torchrun examples/train_fsdp2.py --no-such-option 2",
        "deepspeed --no-such-option 2 train.py",
        "deepspeed examples/char_gpt.py --deepspeed_config configs/no_such_file.json",
        "torchrun -m dho2_ds.cli spectrum a:b --no-such-option 1",
        "nohup train.py",
    ],
)
def test_the_check_of_commands_can_fail(line: str) -> None:
    assert problems(shlex.split(line))


def test_a_plan_is_what_the_command_prints() -> None:
    shown = [block.text.splitlines() for block in BLOCKS if block.text.startswith("$ dho2 plan ")]
    assert shown
    for command, *lines in shown:
        printed = CliRunner().invoke(cli.app, shlex.split(command)[2:]).stdout.splitlines()
        assert [line for line in lines if line not in printed] == []


@pytest.mark.parametrize("file", MANUALS)
def test_links_and_files_in_the_text_exist(file: str) -> None:
    text = (ROOT / file).read_text()
    here = (ROOT / file).parent
    for path, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", text):
        target = here / path if path else ROOT / file
        assert target.exists(), path
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", h).lower().replace(" ", "-") for h in headings}, anchor
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    assert re.findall(r"^>.*$", prose, flags=re.M) == []  # a line that begins with "> 2" is a quotation
    for path in re.findall(r"`((?:examples|configs|tests|dho2_ds)/[^`\s]*)`", text):
        assert list(ROOT.glob(path)), path


# -- settings and docstrings ------------------------------------------------------------------------------------------


def test_the_tables_of_settings_are_what_the_command_writes(tmp_path: Path) -> None:
    text = (ROOT / "configs/README.md").read_text()
    printed = CliRunner().invoke(cli.app, ["settings"]).stdout.strip()
    assert text == settings.replaced(text, printed), "stale: run `make docs`"
    copy = tmp_path / "README.md"
    copy.write_text(text.replace("| `newton_lr` |", "| `newton` |"))
    assert CliRunner().invoke(cli.app, ["settings", "--into", str(copy)]).exit_code == 0
    assert copy.read_text() == text


def test_defaults_in_the_readme_are_those_of_the_settings() -> None:
    found = json.loads(CliRunner().invoke(cli.app, ["settings", "--json"]).stdout)
    table = (ROOT / "README.md").read_text().split("| key | default | meaning |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", table, flags=re.M)
    assert len(rows) > 5
    for keys, defaults in rows:
        level = "params"
        for key, default in zip(re.findall(r"`([\w.]+)`", keys), defaults.split(", "), strict=True):
            level = key.split(".")[0] if "." in key else level
            value = found[level][key.split(".")[-1]]["default"]
            assert default.strip("`") == value or json.loads(default) == value, key


def public_callables() -> Iterator[tuple[str, Any]]:
    """Functions of the package's public names, and the public methods of its public classes."""
    for name in dho2_ds.__all__:
        value = getattr(dho2_ds, name)
        if inspect.isfunction(value):
            yield name, value
        if inspect.isclass(value):
            for home in value.__mro__:
                if home.__module__.startswith("dho2_ds"):
                    for key, member in vars(home).items():
                        if inspect.isfunction(member) and not key.startswith("_"):
                            yield f"{name}.{key}", member


def gaps(function: Any) -> list[str]:
    """Sections and arguments that the docstring should have and has not."""
    text, signature = inspect.getdoc(function) or "", inspect.signature(function)
    names = [name for name in signature.parameters if name != "self"]
    found = [name for name in names if not re.search(rf"\b{name}\b.*:", text)]
    if names and "Args:" not in text:
        found.append("Args:")
    if signature.return_annotation not in ("None", inspect.Signature.empty) and "Returns:" not in text:
        found.append("Returns:")
    if re.search(r"^\s+raise ", inspect.getsource(function), flags=re.M) and "Raises:" not in text:
        found.append("Raises:")
    return found


def test_public_docstrings_are_complete() -> None:
    assert {name: found for name, function in public_callables() if (found := gaps(function))} == {}
    values = [getattr(dho2_ds, name) for name in dho2_ds.__all__ if name != "__version__"]
    assert [value for value in values if not inspect.getdoc(value)] == []
    assert "Args:" in str(dho2_ds.DHO2.__doc__) and "Raises:" in str(dho2_ds.DHO2.__doc__)


def test_the_check_of_docstrings_can_fail() -> None:
    def bare(k: int) -> int:
        """Nothing of it."""
        if k:
            raise ValueError
        return k

    assert gaps(bare) == ["k", "Args:", "Returns:", "Raises:"]
