"""What runs record of themselves, and the report that is made of it."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from typer.testing import CliRunner

import dho2_ds
from dho2_ds.cli import app
from dho2_ds.config import ConfigError
from dho2_ds.records import NoRecords, read_run
from tests import engines, fsdp_engines
from tests.distributed import run_ranks

STEPS, WARMUP, INTERVAL = 24, 5, 6
SETTINGS: dict[str, Any] = {
    **engines.SETTINGS,
    "curvature": {"warmup_steps": WARMUP, "interval": INTERVAL, "lanczos_steps": 20},
}
REFRESHES = [5, 11, 17, 23]
"""Steps after which the eigenbasis is computed."""


def has_tensorboard() -> bool:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: F401
    except ImportError:
        return False
    return True


def train(rank: int, world: int, folder: str, kind: str) -> dict[str, Any]:
    """A run that records itself in every way that its engine has; what truly happened, from the optimizer."""
    settings = {**SETTINGS, "log": f"{folder}/log/dho2.jsonl"}
    monitors = {"csv_monitor": {"enabled": True, "output_path": f"{folder}/csv", "job_name": "job"}}
    if has_tensorboard():
        monitors["tensorboard"] = {"enabled": True, "output_path": f"{folder}/tensorboard", "job_name": "job"}
    run: Any
    if kind == "fsdp2":
        run = fsdp_engines.Run(kind, rank, world, settings)
        run.engine = None
    else:
        run = engines.Run(kind, rank, world, settings, overrides=monitors)
    truth: dict[str, Any] = {"loss": [], "eigenvalues": {}, "order": []}
    if run.engine is not None:
        write = run.engine.monitor.write_events
        run.engine.monitor.write_events = lambda events: (truth["order"].extend(events), write(events))
    for step in range(STEPS):
        loss = run.step()
        truth["loss"].append(loss)
        run.optimizer.log(loss=torch.tensor(loss))
        if run.engine is not None:
            event = ("Train/Samples/train_loss", loss, run.engine.global_samples)
            run.engine.monitor.write_events([event])
        if step in REFRESHES:  # the refresh after step s is made before the next one
            truth["eigenvalues"][step] = run.optimizer.curvature_stats()["eigenvalues"]
    return truth | {"stats": run.optimizer.curvature_stats()}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Folder and truth of a run of two ranks with DeepSpeed's ZeRO-2."""
    folder = tmp_path_factory.mktemp("run")
    first, _ = run_ranks(2, train, str(folder), "zero2", timeout=170)
    return folder, first


def check(folder: Path, source: str, truth: dict[str, Any]) -> None:
    run = read_run(folder)
    assert (run.source, run.unit) == (source, "step")
    assert [x for x, _ in run.series["loss"]] == list(range(1, STEPS + 1))
    assert [y for _, y in run.series["loss"]] == pytest.approx(truth["loss"], rel=1e-6)
    assert len(run.eigenvalues) == SETTINGS["num_eigenvectors"]
    for index, points in enumerate(run.eigenvalues):
        assert [x for x, _ in points] == REFRESHES
        wanted = [truth["eigenvalues"][step][index] for step in REFRESHES]
        assert [y for _, y in points] == pytest.approx(wanted, rel=1e-6)
    assert [y for _, y in run.series["age"]] == [0.0] * len(REFRESHES)
    assert run.series["hvps"][-1][1] == truth["stats"]["hvps"] and run.series["rejected"][-1][1] == 0
    assert all(0 <= y <= 1 for _, y in run.series["captured_fraction"])


def test_records_of_json_lines_and_csv(recorded: tuple[Path, dict[str, Any]]) -> None:
    folder, truth = recorded
    check(folder / "log", "JSON lines", truth)
    check(folder / "csv", "CSV", truth)
    lines = (folder / "log" / "dho2.jsonl").read_text().splitlines()
    assert len(lines) == STEPS + len(REFRESHES)  # rank 0 alone writes
    assert sum("eigenvalues" in json.loads(line) for line in lines) == len(REFRESHES)


@pytest.mark.skipif(not has_tensorboard(), reason="tensorboard is not installed")
def test_records_of_tensorboard(recorded: tuple[Path, dict[str, Any]]) -> None:
    check(recorded[0] / "tensorboard", "TensorBoard", recorded[1])


@pytest.mark.parametrize("source", ["log", "csv", "tensorboard"])
def test_report(recorded: tuple[Path, dict[str, Any]], source: str, tmp_path: Path) -> None:
    folder, truth = recorded
    if not (folder / source).exists():
        pytest.skip("tensorboard is not installed")
    page = tmp_path / "out" / "r.html"
    result = CliRunner().invoke(app, ["report", str(folder / source), "--output", str(page), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["summary"]["refreshes"] == len(REFRESHES)
    assert found["summary"]["Hessian-vector products"] == truth["stats"]["hvps"]
    assert found["summary"]["loss, last"] == pytest.approx(truth["loss"][-1], rel=1e-6)
    text = page.read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", text)  # nothing outside the page
    assert text.count("<tr>") == len(found["summary"]) + 1 + len(REFRESHES)
    assert (imread(page.with_suffix(".png"))[..., :3].std(axis=-1) > 0.05).sum() > 1000  # coloured lines


def test_report_in_a_browser(recorded: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium to open the page with")
    page = tmp_path / "report.html"
    assert CliRunner().invoke(app, ["report", str(recorded[0] / "csv"), "--output", str(page)]).exit_code == 0
    browser = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000"]
    script = (
        "<script>document.title = [document.images[0].naturalWidth, document.querySelectorAll('#refreshes tr').length,"
    )
    script += " document.body.scrollWidth <= window.innerWidth].join(' ')</script>"
    probe = tmp_path / "probe.html"
    probe.write_text(page.read_text().replace("</html>", f"{script}</html>"))
    done = subprocess.run([*browser, "--dump-dom", probe.as_uri()], capture_output=True, text=True, timeout=90)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr
    width, rows, fits = title.group(1).split()
    assert int(width) > 500 and int(rows) == 1 + len(REFRESHES) and fits == "true"


def test_a_run_without_an_engine(tmp_path: Path) -> None:
    """DDP and FSDP have no monitors; the log is all there is."""
    truth = train(0, 1, str(tmp_path), "single")
    check(tmp_path, "JSON lines", truth)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_without_an_engine(kind: str, tmp_path: Path) -> None:
    first, _ = run_ranks(2, train, str(tmp_path), kind, timeout=170)
    check(tmp_path, "JSON lines", first)


def test_events_come_in_the_order_that_wandb_wants(recorded: tuple[Path, dict[str, Any]]) -> None:
    """W&B drops what comes with a smaller step than before. It is not run: DeepSpeed passes these on one by one."""
    order = recorded[1]["order"]
    samples = [step for _, _, step in order]
    assert samples == sorted(samples)
    ours = [name.removeprefix("Train/DHO2/") for name, _, _ in order if name.startswith("Train/DHO2/")]
    kinds = {"eigenvalue_0", "steps", "lr_scale", "age", "rejected", "hvps", "refresh_seconds"}
    assert all(ours.count(kind) == len(REFRESHES) for kind in kinds)


def test_later_records_count(tmp_path: Path) -> None:
    """Training that went on from an older checkpoint writes the same steps again."""
    (tmp_path / "Train_Samples_train_loss.csv").write_text("step,train_loss\n32,3.0\n64,2.0\nstep,train_loss\n64,1.5\n")
    run = read_run(tmp_path)
    assert run.unit == "sample" and run.series["loss"] == [(32.0, 3.0), (64.0, 1.5)]


def test_report_of_nothing(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 1 and "must hold records of a run" in result.output
    assert CliRunner().invoke(app, ["report", str(tmp_path / "none")]).exit_code == 2
    (tmp_path / "data.jsonl").write_text('{"text": "not ours"}\n')
    with pytest.raises(NoRecords, match="must hold records of a run"):
        read_run(tmp_path)
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2,\n')
    with pytest.raises(NoRecords, match="log.jsonl, line 2: must be a JSON object with a step"):
        read_run(tmp_path)


def test_report_of_several_runs(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "Train_Samples_train_loss.csv").write_text("step,train_loss\n32,3.0\n")
    with pytest.raises(NoRecords, match="several runs: must be one; name one of .*first, .*second"):
        read_run(tmp_path)
    assert read_run(tmp_path / "first").series["loss"] == [(32.0, 3.0)]


def test_a_cut_off_last_line_is_left_out_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    log = tmp_path / "dho2.jsonl"
    log.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert read_run(tmp_path).series["loss"] == [(1.0, 2.0)]
    log.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n')
    with pytest.raises(NoRecords, match="line 2"):
        read_run(tmp_path)


def test_a_loss_that_became_nan_is_told(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1.0 / step if step < 4 else None} for step in range(1, 7)]
    (tmp_path / "dho2.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--output", str(tmp_path / "r.html"), "--json"])
    assert result.exit_code == 0 and "NaN" not in result.stdout
    summary = json.loads(result.stdout)["summary"]
    assert summary["loss, last finite"] == pytest.approx(1 / 3) and summary["last step"] == 6
    assert summary["loss not finite first at step"] == 4
    for wrong in (str(tmp_path), str(tmp_path / "r.png"), str(tmp_path / "r.pdf")):
        assert CliRunner().invoke(app, ["report", str(tmp_path), "--output", wrong]).exit_code == 2


def test_a_record_of_a_refresh_has_the_scale_of_its_eigenvalues(tmp_path: Path) -> None:
    path = tmp_path / "dho2.jsonl"
    curvature = {"warmup_steps": 2, "interval": 100, "lanczos_steps": 20}
    run = engines.Run("single", 0, 1, {"lr": "auto", "num_eigenvectors": 2, "curvature": curvature, "log": str(path)})
    run.train(4)
    (record,) = (json.loads(line) for line in path.read_text().splitlines())
    assert record["step"] == 2 and record["lr_scale"] == run.optimizer.curvature_stats()["lr_scale"] > 1


def test_the_base_alone_logs_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "dho2.jsonl"
    for base, settings in (("adamw", {}), ("sgd", {"momentum": 0.9})):
        path.unlink(missing_ok=True)
        model = torch.nn.Linear(2, 1)
        optimizer = dho2_ds.DHO2(model.parameters(), base=base, num_eigenvectors=0, log=str(path), **settings)
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.log(loss=math.nan)
        assert [json.loads(line) for line in path.read_text().splitlines()] == [
            {"step": step, "loss": None} for step in (1, 2, 3)
        ]


def test_a_log_that_cannot_be_written_is_told_once_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(logging.getLogger("dho2_ds"), "propagate", True)
    optimizer = dho2_ds.DHO2([torch.nn.Parameter(torch.ones(2))], num_eigenvectors=0, log=str(tmp_path / "file/log"))
    for _ in range(2):
        optimizer.log(loss=1.0)
    assert [record.message for record in caplog.records if "cannot be written" in record.message] != []
    assert sum("cannot be written" in record.message for record in caplog.records) == 1


def test_logging_without_a_log() -> None:
    run = engines.Run("single", 0, 1, SETTINGS)
    with pytest.raises(ConfigError, match="log=None: must be the path"):
        run.optimizer.log(loss=1.0)
