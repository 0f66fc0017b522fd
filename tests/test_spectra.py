"""The public spectrum and spectral density against dense float64 Hessians, in one process and on sharded models."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import dho2_ds
from dho2_ds.cli import app
from dho2_ds.curvature.density import Density
from dho2_ds.curvature.probes import rademacher
from dho2_ds.hosts.detect import make_host
from tests import engines
from tests.distributed import run_ranks, silence_shm_op
from tests.fsdp_engines import Layers, wrap

K, PROBES, STEPS = 4, 3, 30
SPECTRUM: dict[str, Any] = {"k": K, "lanczos_steps": 28}
DENSITY: dict[str, Any] = {"probes": PROBES, "lanczos_steps": STEPS}


def loss_fn(model: Any, batch: Any) -> Tensor:
    return model(*batch)


def batch_of(rank: int, world: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x, y = engines.micro_batch(7, 0)
    share = len(x) // world
    return x[rank * share : (rank + 1) * share].to(dtype), y[rank * share : (rank + 1) * share]


@pytest.fixture(scope="module")
def dense() -> Tensor:
    """(n, n) Hessian of the whole batch, rows in the order of the parameters' names."""
    model = Layers().double()
    named = dict(sorted(model.named_parameters()))
    x, y = batch_of(0, 1, torch.float64)
    loss = model(x, y)
    grads = torch.autograd.grad(loss, list(named.values()), create_graph=True)
    rows = []
    for entry in torch.cat([g.reshape(-1) for g in grads]):
        row = torch.autograd.grad(entry, list(named.values()), retain_graph=True)
        rows.append(torch.cat([r.reshape(-1) for r in row]))
    return torch.stack(rows)


def compute(module: nn.Module, rank: int, world: int, hvp: str = "auto", **density: Any) -> tuple[list[float], Density]:
    batch = batch_of(rank, world)
    found = dho2_ds.spectrum(module, loss_fn, [batch], hvp=hvp, **SPECTRUM)
    return found.eigenvalues, dho2_ds.spectral_density(module, loss_fn, [batch], hvp=hvp, **{**DENSITY, **density})


def check(found: tuple[list[float], Density], dense: Tensor, tolerance: float) -> None:
    values, density = found
    exact = torch.linalg.eigvalsh(dense)
    leading = exact[exact.abs().argsort(descending=True)][:K]
    assert (torch.tensor(values, dtype=torch.float64) - leading).abs().max() <= tolerance * leading[0].abs()
    # A probe's moments are those of its own vector, whatever the scatter between probes.
    for probe, v in enumerate(probes()):
        for power, moment in ((1, v @ dense @ v), (2, (dense @ v).square().sum())):
            got = density.moments(power)[probe]
            assert abs(got - float(moment) / len(v)) <= tolerance * float(leading[0].abs()) ** power, (probe, power)
    assert density.numel == len(dense) and all(abs(sum(w) - 1) < 1e-9 for w in density.weights)


def probes(seed: int = 0) -> list[Tensor]:
    """The random vectors of a density, rows in the order of the parameters' names."""
    model = Layers().double()
    host = make_host(model, [{"params": [p for _, p in sorted(model.named_parameters())]}])
    first, where = 1 + seed * PROBES, torch.device("cpu")
    return [rademacher(host, torch.float64, where, probe=first + i) for i in range(PROBES)]


@pytest.mark.parametrize(("hvp", "tolerance"), [("auto", 1e-3), ("exact", 1e-5)])
def test_one_process_against_the_dense_hessian(dense: Tensor, hvp: str, tolerance: float) -> None:
    model = Layers()
    before = [p.detach().clone() for p in model.parameters()]
    found = compute(model, 0, 1, hvp)
    check(found, dense, tolerance)
    assert all(torch.equal(p, saved) for p, saved in zip(model.parameters(), before, strict=True))
    budget = PROBES * STEPS
    assert budget <= found[1].hvps <= budget + (6 if hvp == "auto" else 0)  # finding the step size takes some


def test_a_spectrum_amid_training_starts_no_refresh_that_is_due() -> None:
    """It would run at the weights that the spectrum has displaced."""
    model, batch = Layers(), batch_of(0, 1)
    optimizer = dho2_ds.DHO2(model.parameters(), num_eigenvectors=2, curvature={"warmup_steps": 1, "interval": 100})
    dho2_ds.attach(model, optimizer)
    loss_fn(model, batch).backward()
    optimizer.step()
    dho2_ds.spectrum(model, loss_fn, [batch], **SPECTRUM)
    assert optimizer.refresh_due and optimizer.curvature_stats()["refreshes"] == 0
    loss_fn(model, batch)
    assert not optimizer.refresh_due and optimizer.curvature_stats()["refreshes"] == 1


def test_moments_are_within_the_scatter_of_the_probes(dense: Tensor) -> None:
    """Trace and Frobenius norm: an estimate is within four standard errors (Hutchinson) of the truth."""
    _, density = compute(Layers(), 0, 1, "exact", probes=40, lanczos_steps=5)
    for power in (1, 2):
        matrix = torch.linalg.matrix_power(dense, power)
        variance = 2 * (matrix.square().sum() - matrix.diagonal().square().sum())
        error = math.sqrt(float(variance) / 40)
        assert abs(len(dense) * density.moment(power) - float(matrix.trace())) < 4 * error
        assert error < 0.5 * abs(float(matrix.trace()))  # else the bound says nothing
    assert density.trace == len(dense) * density.moment(1)


def test_the_smoothed_density_is_that_of_the_exact_eigenvalues(dense: Tensor) -> None:
    exact = torch.linalg.eigvalsh(dense)
    _, density = compute(Layers(), 0, 1, "exact", probes=24)
    width = 0.02 * float(exact.abs().max())
    points = torch.linspace(float(exact.min()) - 5 * width, float(exact.max()) + 5 * width, 2000, dtype=torch.float64)
    wanted = torch.tensor(
        Density([exact.tolist()], [[1 / len(exact)] * len(exact)], len(exact), 0).curve(points, width)
    )
    got = torch.tensor(density.curve(points.tolist(), width))
    step = float(points[1] - points[0])
    assert abs(float(got.sum()) * step - 1) < 1e-3
    distance = float((got - wanted).abs().sum()) * step  # 0 to 2
    shifted = float((got - wanted.roll(round(width / step))).abs().sum()) * step
    assert distance < 0.1 < shifted, (distance, shifted)


def test_any_seed_will_do() -> None:
    """A date as a seed: the counter passes 2^63 and goes on from -2^63."""
    model = torch.nn.Linear(3, 1)
    batch = torch.ones(4, 3)
    found = dho2_ds.spectral_density(
        model, lambda m, x: m(x).square().mean(), [batch], probes=2, lanczos_steps=3, seed=20261130
    )
    assert all(math.isfinite(value) for probe in found.nodes for value in probe)


def test_probes_are_signs_and_differ() -> None:
    found = torch.stack([*probes(), *probes(1)])
    assert torch.equal(found.abs(), torch.ones_like(found))
    gram = found @ found.T / found.shape[1] - torch.eye(2 * PROBES)
    assert float(gram.abs().max()) < 5 / math.sqrt(found.shape[1])


def sharded(kind: str) -> nn.Module:
    model = Layers()
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind.startswith("zero"):
        import deepspeed

        silence_shm_op()
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        config = engines.deepspeed_config(int(kind[4:]), "persistence0", {"lr": 1e-3}, 2)
        # Two param groups in another order than the model's: the probes must not depend on it.
        named = sorted(model.named_parameters(), reverse=True)
        groups = [{"params": [p for n, p in named if part in n], "lr": 1e-3} for part in ("bias", "weight")]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
        return engine
    return wrap(model, kind, "orig", set())


def sharded_worker(rank: int, world: int, kinds: list[str]) -> dict[str, Any]:
    # Few nodes: a probe's first two moments are exact from two nodes on.
    return {kind: compute(sharded(kind), rank, world, lanczos_steps=4) for kind in kinds}


def check_sharded(kinds: list[str], dense: Tensor) -> None:
    first, second = run_ranks(2, sharded_worker, kinds, timeout=170)
    for kind in kinds:
        check(first[kind], dense, 1e-3)
        assert first[kind] == second[kind]  # every rank has the same


def test_two_ranks_find_the_same(dense: Tensor) -> None:
    check_sharded(["ddp", "zero3", "fsdp2"], dense)


@pytest.mark.slow
def test_two_ranks_find_the_same_on_every_engine(dense: Tensor) -> None:
    check_sharded(["zero0", "zero1", "zero2", "fsdp1"], dense)


@pytest.mark.parametrize("wrong", [{"probes": 0}, {"lanczos_steps": 0}, {"hvp": "fast"}])
def test_density_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        compute(Layers(), 0, 1, **{"hvp": "auto", **wrong})


def test_density_of_a_loss_that_is_not_finite() -> None:
    with pytest.raises(RuntimeError, match="no density: "):
        dho2_ds.spectral_density(Layers(), lambda m, b: m(*b) * math.nan, [batch_of(0, 1)], probes=1, lanczos_steps=3)


JOB = """
import dho2_ds
from tests.test_spectra import Layers, batch_of, loss_fn

def build():
    import os
    return Layers(), loss_fn, iter([batch_of(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))])

def as_dict():
    return dict(zip(("model", "loss_fn", "data"), build()))

def nothing():
    return None

def infinite():
    model, loss, data = build()
    return model, lambda m, b: loss(m, b) * float("nan"), data

number = 3
"""
QUICK = ["-k", str(K), "--lanczos-steps", "28", "--probes", str(PROBES), "--density-steps", "4"]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's file, in the current folder."""
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command adds the user's folder
    monkeypatch.delitem(sys.modules, "job", raising=False)
    return tmp_path / "job.py"


def as_found(text: str) -> tuple[list[float], Density]:
    found = json.loads(text)
    inner = found["density"]
    return found["eigenvalues"], Density(inner["nodes"], inner["weights"], inner["parameters"], inner["hvps"])


def test_command_writes_a_picture_and_a_json(job: Path, dense: Tensor) -> None:
    from matplotlib.image import imread

    result = CliRunner().invoke(app, ["spectrum", "job.py:build", "--output", "out/s.png", "--json", *QUICK])
    assert result.exit_code == 0, result.output
    written = (job.parent / "out" / "s.json").read_text()
    assert json.loads(written) == json.loads(result.stdout)
    check(as_found(written), dense, 1e-3)
    picture = imread(job.parent / "out" / "s.png")[..., :3]
    assert float((picture.std(axis=-1) > 0.05).sum()) > 100  # coloured marks on black and white


def test_command_takes_a_module_and_a_dict(job: Path) -> None:
    result = CliRunner().invoke(app, ["spectrum", "job:as_dict", "-k", "2", "--probes", "0"])
    assert result.exit_code == 0, result.output
    assert "wrote spectrum.png" in result.stdout and "density" not in json.loads(Path("spectrum.json").read_text())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["job.py"], 2, "source=job.py: must be MODULE:FUNCTION"),
        (["job.py:none"], 2, "source=job.py:none: must name a function that can be imported"),
        (["no_such.py:build"], 2, "source=no_such.py:build: must name a function that can be imported"),
        (["job.py:number"], 2, "must name a function; number is int"),
        (["job.py:nothing"], 2, "must return (model, loss_fn, data) or a dict of these"),
        (["job.py:build", "-k", "100000"], 2, "k=100000: must be between 1 and 213"),
        (["job.py:build", "--batches", "2"], 2, "batches=2: must be at most 1"),
        (["job.py:build", "-k", "8", "--lanczos-steps", "9"], 2, "lanczos_steps=9: must be >= 10 (k + 2)"),
        (["job.py:build", "--output", "x.foo"], 2, "output=x.foo: must be a picture's name"),
        (["job.py:infinite", "-k", "2"], 1, "no spectrum: "),
    ],
)
def test_command_refuses(job: Path, arguments: list[str], code: int, message: str) -> None:
    result = CliRunner().invoke(app, ["spectrum", *arguments])
    assert result.exit_code == code and message in result.output.replace("\n", " "), result.output


@pytest.mark.slow
def test_command_under_torchrun(job: Path, dense: Tensor) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "dho2_ds.cli", "spectrum", "job.py:build", "--json", *QUICK]
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stderr
    check(as_found(done.stdout), dense, 1e-3)
