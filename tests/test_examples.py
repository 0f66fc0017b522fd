"""The examples and configs as a user meets them: real launchers, real subprocesses, a few steps."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dho2_ds.config import CurvatureConfig, DHO2Config, SoapConfig, parse_config

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES, CONFIGS = ROOT / "examples", ROOT / "configs"
HOST_CONFIGS = sorted(path.name for path in CONFIGS.glob("zero*.json"))
STEPS = 6


ABORTED = "terminate called without an active exception"
"""What gloo's threads now and then end a process with that had ended well (pytorch pull request 179291)."""


def launch(command: list[str], folder: Path, timeout: float = 150.0) -> str:
    """Run a command, again if gloo aborted it at its end; a failure or a timeout fails with the output."""
    code, output = run(command, folder, timeout)
    if code != 0 and ABORTED in output:
        code, output = run(command, folder, timeout)
    assert code == 0, output
    return output


def run(command: list[str], folder: Path, timeout: float) -> tuple[int, str]:
    """Run a command in a session of its own: exit code and output."""
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "COLUMNS": "120",
    }
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            pytest.fail(f"still running after {timeout:.0f} s:\n{output}")
    return process.returncode, output


def deepspeed(script: str, *arguments: str, ranks: int = 2) -> list[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return ["deepspeed", "--num_gpus", str(ranks), "--master_port", str(port), str(EXAMPLES / script), *arguments]


def torchrun(script: str, *arguments: str, ranks: int = 2) -> list[str]:
    return ["torchrun", "--standalone", "--nproc_per_node", str(ranks), str(EXAMPLES / script), *arguments]


def mpirun(script: str, *arguments: str, ranks: int = 2) -> list[str]:
    """With ``env``, because Open MPI refuses root, as which containers run, and more processes than cores."""
    allowed = ["OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"]
    command = ["mpirun", "--oversubscribe", "-n", str(ranks), sys.executable, str(EXAMPLES / script)]
    return ["env", *allowed, *command, *arguments]


def quick_config(name: str, folder: Path) -> str:
    """A config as it is, except that curvature starts within the few steps of a test."""
    config = json.loads((CONFIGS / name).read_text())
    config["optimizer"]["params"]["num_eigenvectors"] = 2
    config["optimizer"]["params"]["curvature"].update(warmup_steps=2, interval=2)
    path = folder / name
    path.write_text(json.dumps(config))
    return str(path)


def example_arguments(name: str, folder: Path) -> list[str]:
    return ["--steps", str(STEPS), "--batch-size", "8", "--deepspeed_config", quick_config(name, folder)]


def reported(output: str) -> dict[str, str]:
    """The closing table of an example."""
    rows = [line.split("│")[1:3] for line in output.splitlines() if line.startswith("│")]
    return {name.strip(): value.strip() for name, value in rows}


def check_report(output: str) -> None:
    report = reported(output)
    assert float(report["final loss"]) > 0
    assert int(report["refreshes"]) + int(report["rejected"]) == 2  # due after steps 2 and 4
    assert int(report["hvps"]) > 0


def dedicated_arguments(folder: Path) -> list[str]:
    """A replay, for which training waits: a few steps would be over before any refresh has come back."""
    arguments = example_arguments("zero2_dedicated.json", folder)
    path = folder / "zero2_dedicated.json"
    config = json.loads(path.read_text())
    config["optimizer"]["params"]["curvature"].update(swaps=[[2, 3], [4, 6]], timeout=100)
    path.write_text(json.dumps(config))
    return arguments


def check_dedicated(output: str) -> None:
    report = reported(output)
    assert (report["refreshes"], report["swaps"], report["age"]) == ("2", "2->3 4->6", "2")
    assert all(float(value) != 0 for value in report["eigenvalues"].split())
    assert output.count("final loss") == 1  # a curvature rank prints no table
    assert "curvature rank 0: the session has ended" in output


@pytest.mark.parametrize("name", [*HOST_CONFIGS, "demo_dho2.json"])
def test_config_is_valid(name: str) -> None:
    config = json.loads((CONFIGS / name).read_text())
    assert config["optimizer"]["type"] == "DHO2"
    parse_config(config["optimizer"]["params"])


def test_readme_explains_every_config_and_key() -> None:
    text = (CONFIGS / "README.md").read_text()
    expected = [path.name for path in CONFIGS.glob("*.json")]
    expected += [*DHO2Config.model_fields, *CurvatureConfig.model_fields, *SoapConfig.model_fields]
    assert [name for name in expected if f"`{name}`" not in text] == []


def test_autoencoder_with_the_deepspeed_launcher(tmp_path: Path) -> None:
    check_report(launch(deepspeed("digits_autoencoder.py", *example_arguments("zero2.json", tmp_path)), tmp_path))


@pytest.mark.slow
def test_gpt_with_the_deepspeed_launcher(tmp_path: Path) -> None:
    check_report(launch(deepspeed("char_gpt.py", *example_arguments("zero3.json", tmp_path)), tmp_path))


def test_dedicated_with_the_deepspeed_launcher(tmp_path: Path) -> None:
    command = deepspeed("train_dedicated.py", *dedicated_arguments(tmp_path), ranks=3)
    output = launch(command, tmp_path)
    check_dedicated(output)
    assert output.count("exits successfully") == 3


@pytest.mark.slow
@pytest.mark.parametrize("host", [[], ["--ddp"]])
def test_dedicated_with_torchrun(host: list[str], tmp_path: Path) -> None:
    arguments = [*host, *dedicated_arguments(tmp_path)]
    check_dedicated(launch(torchrun("train_dedicated.py", *arguments, ranks=3), tmp_path))


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None,
    reason="mpirun and mpi4py are not installed; pip install 'dho2-ds[mpi]'",
)
def test_dedicated_with_mpirun(tmp_path: Path) -> None:
    check_dedicated(launch(mpirun("train_dedicated.py", *dedicated_arguments(tmp_path), ranks=3), tmp_path))


@pytest.mark.slow
def test_dedicated_on_fsdp2(tmp_path: Path) -> None:
    arguments = ["--steps", "6", "--num-eigenvectors", "2", "--curvature-ranks", "1", "--swaps", "2:3", "4:6"]
    check_dedicated(launch(torchrun("train_fsdp2.py", *arguments, ranks=3), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("script", ["digits_autoencoder.py", "char_gpt.py"])
def test_plain_ddp_with_torchrun(script: str, tmp_path: Path) -> None:
    check_report(launch(torchrun(script, "--ddp", *example_arguments("zero2.json", tmp_path)), tmp_path))


def fsdp_arguments(folder: Path, steps: int = 5) -> list[str]:
    return ["--steps", str(steps), "--warmup", "2", "--interval", "2", "--num-eigenvectors", "2", "--save", str(folder)]


def test_fsdp2_saves_and_resumes(tmp_path: Path) -> None:
    """Refreshes are due after steps 2 and 4, then 6: counters and eigenbasis come out of the checkpoint."""
    first, second = tmp_path / "first", tmp_path / "second"
    check_report(launch(torchrun("train_fsdp2.py", *fsdp_arguments(first)), tmp_path))
    report = reported(launch(torchrun("train_fsdp2.py", *fsdp_arguments(second, 2), "--resume", str(first)), tmp_path))
    assert (report["steps"], report["refreshes"]) == ("7", "3")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_hsdp_resumes_on_another_number_of_ranks(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    check_report(launch(torchrun("train_hsdp.py", *fsdp_arguments(first), ranks=4), tmp_path))
    command = torchrun("train_fsdp2.py", *fsdp_arguments(second, 2), "--resume", str(first), "--bf16", ranks=3)
    report = reported(launch(command, tmp_path))
    assert (report["steps"], report["refreshes"]) == ("7", "3")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HOST_CONFIGS if "dedicated" not in name])
def test_gpt_with_every_config(name: str, tmp_path: Path) -> None:
    check_report(launch(torchrun("char_gpt.py", *example_arguments(name, tmp_path)), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("host", [[], ["--ddp"]])
def test_adamw_in_place_of_dho2(host: list[str], tmp_path: Path) -> None:
    arguments = [*host, "--optimizer", "adamw", *example_arguments("zero2.json", tmp_path)]
    report = reported(launch(torchrun("digits_autoencoder.py", *arguments), tmp_path))
    assert float(report["final loss"]) > 0
    assert "hvps" not in report


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_demo(stage: int, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    options = ["--steps", "60", "--stage", str(stage), "--batch-size", "64", "--output", str(picture)]
    output = launch([sys.executable, str(EXAMPLES / "demo.py"), *options], tmp_path)
    for text in ("AdamW / DHO2", "loss at step 60", "gradients in total", "HVPs (refreshes)", "eigenbasis, bytes"):
        assert text in output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


@pytest.mark.slow
def test_demo_shows_the_output_of_ranks_that_fail(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--steps", "5", "--batch-size", "100000"]
    with pytest.raises(AssertionError, match="batch_size=100000"):
        launch(command, tmp_path)


@pytest.mark.slow
def test_step_cost(tmp_path: Path) -> None:
    record = tmp_path / "step_cost.json"
    script = EXAMPLES / "benchmarks" / "step_cost.py"
    output = launch([sys.executable, str(script), "--quick", "--json", str(record)], tmp_path)
    assert "DHO2 / AdamW" in output
    row, _ = json.loads(record.read_text())["rows"]
    assert row["dho2_bytes"] - row["adamw_bytes"] == row["n"] * (2 * row["k"] * 4 + 5 * 4)
    (soap,) = json.loads(record.read_text())["soap_rows"]
    assert "SOAP / AdamW" in output and soap["soap_s"] > 0
    assert all(0 < found["bytes_sent"] <= 2 * 4 * soap["n"] for found in soap["ranks"].values())


@pytest.mark.slow
def test_spectrum_benchmark(tmp_path: Path) -> None:
    pytest.importorskip("curvlinops", reason="curvlinops-for-pytorch is not installed")
    record, script = tmp_path / "rows.json", EXAMPLES / "benchmarks" / "spectrum.py"
    launch([sys.executable, str(script), "--width", "4", "--density-steps", "20", "--json", str(record)], tmp_path)
    rows = json.loads(record.read_text())
    assert {row["method"].split(",")[0] for row in rows} == {"dho2_ds", "curvlinops", "curvlinops + eigsh"}
    assert all(row["error"] < (1e-3 if row["what"].startswith("top") else 0.5) for row in rows), rows


def pipeline(part: str, folder: Path) -> dict[str, Any]:
    """One part of the pipeline benchmark, in small; what it wrote."""
    script = EXAMPLES / "benchmarks" / "pipeline.py"
    launch([sys.executable, str(script), part, "--quick", "--output", str(folder)], folder, timeout=280)
    assert (folder / f"{part}.md").read_text().strip()
    if part != "memory":
        assert (folder / f"{part}.png").read_bytes().startswith(b"\x89PNG")
    found: dict[str, Any] = json.loads((folder / f"{part}.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pipeline_steps(tmp_path: Path) -> None:
    record = pipeline("steps", tmp_path)
    assert {row["mode"] for row in record["rows"]} == {"none", "busy", "inline", "spread", "dedicated"}
    kinds = record["summary"]["kinds"]
    assert kinds["dedicated, refresh under way"]["steps"] > 0
    assert kinds["inline, the step with the refresh"]["own over plain"]["median"] > 5  # 16 products of 2 gradients


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pipeline_target(tmp_path: Path) -> None:
    record = pipeline("target", tmp_path)
    for name, runs in record["runs"].items():
        assert [run["points"][-1]["step"] for run in runs] == [60], name
    assert record["runs"]["DHO2 dedicated"][0]["stats"]["connected"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pipeline_memory(tmp_path: Path) -> None:
    """Twice the ranks, half the bytes: of everything that is ours and n-sized."""
    one, two = pipeline("memory", tmp_path)["rows"]
    for rank in [*one["training_ranks"], *two["training_ranks"]]:
        rank["receive"] /= rank["pairs"]
    for key in ("base", "basis", "snapshot", "receive"):
        whole = one["training_ranks"][0][key]
        assert all(0.49 * whole < rank[key] < 0.51 * whole for rank in two["training_ranks"]), key
    assert 0 < one["curvature_ranks"][0]["bytes received"] == two["curvature_ranks"][0]["bytes received"]
    assert all(row["curvature_ranks"][0]["bytes old basis"] > 0 for row in (one, two))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pipeline_timeline(tmp_path: Path) -> None:
    """Products of a job lie between the snapshot's step and the swap's, on the clock that both processes share."""
    record = pipeline("timeline", tmp_path)
    born, swapped = record["swaps"][0]
    job = record["jobs"][0]
    assert record["steps"][born - 1][1] < job["products"][0] < job["products"][-1] < record["steps"][swapped - 1][1]
    assert [what for what, number, *_ in record["transfers"] if number == 1] == ["send", "receive"]


@pytest.mark.slow
def test_pinn(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    results = tmp_path / "results.jsonl"
    options = ["--steps", "100", "--points", "128", "--output", str(picture), "--results", str(results)]
    command = [sys.executable, str(EXAMPLES / "pinn_burgers.py"), *options]
    launch([*command, "--runs", "Adam"], tmp_path)
    first = results.read_text()
    output = launch(command, tmp_path)
    for name in ("Adam", "SOAP", "DHO2 on Adam", "DHO2 on SOAP"):
        assert name in output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert results.read_text().startswith(first)  # its seconds say that this run was not repeated
    assert results.read_text().count("\n") == 4
