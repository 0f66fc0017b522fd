"""The ``dho2`` command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dho2_ds import _register, cli
from dho2_ds.cli import demo, doctor, settings
from dho2_ds.config import DHO2Config

runner = CliRunner()


def findings(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code and checks by name of ``dho2 doctor --json``."""
    result = runner.invoke(cli.app, ["doctor", "--json", *arguments])
    report = json.loads(result.stdout)
    assert report["ok"] == (result.exit_code == 0)
    return result.exit_code, {check["name"]: check for check in report["checks"]}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment without the machine's own extension folder."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD", raising=False)
    monkeypatch.setenv("COLUMNS", "200")


def lock(tmp_path: Path, age_seconds: float) -> Path:
    """A lock of the extension builder."""
    path = tmp_path / "extensions" / "deepspeed_shm_comm" / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    os.utime(path, (time.time() - age_seconds,) * 2)
    return path


def test_doctor_on_a_sound_environment() -> None:
    code, checks = findings()
    assert code == 0
    assert checks["torch"]["detail"] == torch.__version__
    assert checks["gloo"]["status"] == checks["JSON name DHO2"]["status"] == "ok"
    assert {"deepspeed", "mpi4py", "accelerator", "nccl", "C++ compiler", "entry point"} <= set(checks)


def test_doctor_prints_a_table_and_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 0
    assert torch.__version__ in result.stdout
    assert "C++ compiler: install a C++ compiler, or set CXX" in result.stdout


def test_doctor_names_a_stale_lock_and_the_command_that_removes_it(tmp_path: Path) -> None:
    path = lock(tmp_path, 3600)
    code, checks = findings()
    assert code == 1
    assert checks["extension lock"]["status"] == "fail"
    assert checks["extension lock"]["fix"] == f"rm {path}"
    assert f"rm {path}" in runner.invoke(cli.app, ["doctor"]).stdout
    assert path.exists()  # it only tells


def test_doctor_does_not_condemn_a_lock_of_a_build_that_may_be_running(tmp_path: Path) -> None:
    path = lock(tmp_path, 5)
    code, checks = findings()
    assert code == 0
    assert checks["extension lock"]["status"] == "warn"
    assert checks["extension lock"]["fix"] == f"if nothing is being compiled now: rm {path}"


def test_doctor_finds_locks_in_torchs_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setattr("torch.utils.cpp_extension.get_default_build_root", lambda: str(tmp_path))
    path = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    assert doctor._lock_files() == [path]


def test_doctor_fails_when_the_name_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "DHO2", torch.optim.SGD, raising=False)
    monkeypatch.setattr(_register, "last_error", "torch.optim.DHO2 belongs to 'elsewhere'")
    code, checks = findings()
    assert code == 1
    assert checks["JSON name DHO2"]["detail"] == "torch.optim.DHO2 belongs to 'elsewhere'"


def test_doctor_on_the_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("dho2_ds", "dho2_ds._register:register", "torch.backends")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [point])
    assert findings()[1]["entry point"]["status"] == "ok"
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD" in findings()[1]["entry point"]["detail"]
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [])
    code, checks = findings()
    assert (code, checks["entry point"]["status"]) == (0, "warn")


@pytest.mark.parametrize(
    ("package", "version", "status", "code"),
    [("deepspeed", None, "warn", 0), ("deepspeed", "0.15.4", "fail", 1), ("deepspeed", "0.16.0+local", "ok", 0)]
    + [("torch", None, "fail", 1), ("torch", "2.5.1", "fail", 1), ("torch", "2.10.0a0+git1", "ok", 0)],
)
def test_doctor_on_versions(
    package: str, version: str | None, status: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = metadata.version

    def fake(name: str) -> str:
        if name != package:
            return real(name)
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(metadata, "version", fake)
    found_code, checks = findings()
    assert (found_code, checks[package]["status"]) == (code, status)


def test_doctor_on_missing_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_gloo_available", lambda: False)
    assert findings()[0] == 1
    monkeypatch.setattr("torch.distributed.is_available", lambda: False)
    code, checks = findings()
    assert (code, checks["torch.distributed"]["status"]) == (1, "fail")


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ``dho2 demo`` would have become, instead of becoming it."""
    calls: list[Any] = []
    (tmp_path / "demo.py").touch()
    monkeypatch.setattr(demo, "_examples", lambda: tmp_path)
    monkeypatch.setattr(os, "execve", lambda *arguments: calls.append(arguments))
    return calls


def test_demo_passes_its_options_on(executed: list[Any], tmp_path: Path) -> None:
    options = ["--ranks", "3", "--steps", "7", "--stage", "1", "--output", "x.png", "--seed", "5"]
    assert runner.invoke(cli.app, ["demo", *options]).exit_code == 0
    ((program, command, environment),) = executed
    assert program == command[0] == sys.executable
    assert command[1] == str(tmp_path / "demo.py")
    given = dict(zip(command[2::2], command[3::2], strict=True))
    assert given == {"--ranks": "3", "--steps": "7", "--stage": "1", "--output": "x.png", "--seed": "5"}
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)


def test_demo_defaults(executed: list[Any], tmp_path: Path) -> None:
    assert runner.invoke(cli.app, ["demo"]).exit_code == 0
    assert runner.invoke(cli.app, ["demo", "--json"]).exit_code == 0
    for _, command, _ in executed:
        assert command[2:8] == ["--ranks", "2", "--stage", "2", "--output", "demo.png"]
    assert [command[8:] for _, command, _ in executed] == [[], ["--json"]]


@pytest.mark.parametrize("options", [["--ranks", "0"], ["--stage", "4"], ["--steps", "0"], ["--steps", "x"]])
def test_demo_refuses_nonsense(options: list[str], executed: list[Any]) -> None:
    assert runner.invoke(cli.app, ["demo", *options]).exit_code == 2
    assert executed == []


def test_demo_without_a_checkout_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_examples", lambda: tmp_path)
    result = runner.invoke(cli.app, ["demo"])
    assert result.exit_code == 2
    assert "must exist, which it does in a checkout only; clone the repository" in result.output


def test_demo_really_replaces_the_process(tmp_path: Path) -> None:
    (tmp_path / "demo.py").write_text("import sys; print(sys.argv[1:]); sys.exit(3)")
    code = f"""if True:
        import pathlib, sys
        from dho2_ds import cli
        cli.demo._examples = lambda: pathlib.Path({str(tmp_path)!r})
        cli.app(["demo", "--ranks", "1"])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    assert done.stdout.strip() == "['--ranks', '1', '--stage', '2', '--output', 'demo.png']"


def test_join_runs_a_command_with_the_jobs_address_and_token(tmp_path: Path) -> None:
    run_file = tmp_path / "run.json"
    run_file.write_text(json.dumps({"DHO2_JOIN": "10.0.0.1:5", "DHO2_JOB_TOKEN": "secret"}))
    script = "import os, sys; print(os.environ['DHO2_JOIN'], os.environ['DHO2_JOB_TOKEN'], *sys.argv[1:])"
    dho2 = [sys.executable, "-c", "from dho2_ds.cli import app; app()"]
    command = [*dho2, "join", str(run_file), sys.executable, "-c", script, "--x", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["10.0.0.1:5", "secret", "--x", "1"], done.stderr


@pytest.mark.parametrize("content,command", [("{", ["true"]), ("{}", ["true"]), (None, ["true"]), ("[]", [])])
def test_join_refuses_what_is_not_a_run_file(tmp_path: Path, content: str | None, command: list[str]) -> None:
    run_file = tmp_path / "run.json"
    if content is not None:
        run_file.write_text(content)
    result = runner.invoke(cli.app, ["join", str(run_file), *command])
    assert result.exit_code == 2 and "run_file=" in result.output


def test_join_needs_a_command(tmp_path: Path) -> None:
    run_file = tmp_path / "run.json"
    run_file.write_text(json.dumps({"DHO2_JOIN": "10.0.0.1:5", "DHO2_JOB_TOKEN": "secret"}))
    for command in ([], ["no-such-program"]):
        result = runner.invoke(cli.app, ["join", str(run_file), *command])
        assert result.exit_code == 2 and "command=" in result.output


def test_settings_prints_tables_and_json_of_the_same() -> None:
    tables = runner.invoke(cli.app, ["settings"]).stdout
    found = json.loads(runner.invoke(cli.app, ["settings", "--json"]).stdout)
    assert list(found) == ["params", "curvature", "soap"]
    assert found["params"]["newton_lr"]["default"] == DHO2Config().newton_lr
    assert found["params"]["curvature"]["default"] == {}
    for level in found.values():
        for key, about in level.items():
            row = next(line for line in tables.splitlines() if line.startswith(f"| `{key}` |"))
            assert about["allowed"] in row and about["meaning"] in row


@pytest.mark.parametrize(
    "text", [None, "no markers", f"{settings.END}\n{settings.BEGIN}", settings.BEGIN * 2 + settings.END]
)
def test_settings_refuses_a_file_without_its_markers(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    if text is not None:
        path.write_text(text)
    result = runner.invoke(cli.app, ["settings", "--into", str(path)])
    assert result.exit_code == 2
    assert f"into={path}: must be" in result.stderr
    assert (path.read_text() if path.exists() else None) == text


def test_settings_takes_one_output() -> None:
    result = runner.invoke(cli.app, ["settings", "--json", "--into", "README.md"])
    assert (result.exit_code, result.stdout) == (2, "")
