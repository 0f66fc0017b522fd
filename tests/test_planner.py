"""The planner's arithmetic against what optimizers on real engines hold."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import dho2_ds
from dho2_ds.cli import app
from dho2_ds.config import parse_config
from dho2_ds.needs import Engine, Memory, Precision
from dho2_ds.planner import Plan, Workload, plan, square_shapes
from tests import engines
from tests.distributed import run_ranks, silence_shm_op
from tests.pipelines import SETTINGS, changed, end_training, make, optimizer_of, run_both
from tests.test_costs import STEPS, WIDTH, Deep, K, train_step

CURVATURE = {"warmup_steps": 10**6, "lanczos_steps": STEPS}
BASES: dict[str, dict[str, Any]] = {
    "adamw": {"curvature": {**CURVATURE, "eigenvector_dtype": "bfloat16"}},
    "sgd": {"base": "sgd", "rule": "fosi", "curvature": CURVATURE},
    "soap": {"base": "soap", "soap": {"max_block": 32}, "curvature": CURVATURE},
    "none": {"num_eigenvectors": 0},
}
ENGINES: dict[str, tuple[Engine, Precision]] = {
    "ddp": ("ddp", "float32"),
    "fsdp": ("fsdp", "float32"),
    "zero0": ("zero0", "float32"),
    "zero1": ("zero1", "float32"),
    "zero2": ("zero2", "float32"),
    "zero2 bf16": ("zero2", "bfloat16"),
    "zero3": ("zero3", "float32"),
    "zero3 bf16": ("zero3", "bfloat16"),
}


def settings_of(base: str, kind: str) -> dict[str, Any]:
    found = {"lr": 1e-3, "num_eigenvectors": K, **BASES[base]}
    if base == "soap" and ENGINES[kind][1] == "float32":  # which 16 bits do not survive
        found["curvature"] = {**CURVATURE, "hvp": "forward_difference"}
    return found


def build(kind: str, world: int, settings: dict[str, Any]) -> tuple[nn.Module, dho2_ds.DHO2]:
    engine, precision = ENGINES[kind]
    model = Deep()
    if engine.startswith("zero"):
        import deepspeed

        silence_shm_op()
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        zero: dict[str, Any] = {"stage": int(engine[4:]), "stage3_param_persistence_threshold": 0}
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": {"type": "DHO2", "params": settings},
            "zero_optimization": {**zero, "reduce_bucket_size": 5000, "allgather_bucket_size": 5000},
            "bf16": {"enabled": precision == "bfloat16"},
        }
        wrapped, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        return wrapped, wrapped.basic_optimizer
    module: nn.Module = model
    if engine == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer)
        module = fully_shard(model)
    elif world > 1:
        module = nn.parallel.DistributedDataParallel(model)
    optimizer = dho2_ds.DHO2(module.parameters(), **settings)
    dho2_ds.attach(module, optimizer)
    return module, optimizer


def weight_bytes(module: nn.Module, optimizer: dho2_ds.DHO2) -> int:
    """Bytes of the model's own tensors and of the tensors that are stepped on, each storage once."""
    host = getattr(optimizer._host, "inner", optimizer._host)
    stepped = [shard.param for shard in host.shards] if host is not None else []
    tensors = [getattr(p, "ds_tensor", p) for p in module.parameters()]
    storages = {}
    for t in [*tensors, *stepped]:
        storage = (t.to_local() if hasattr(t, "to_local") else t).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measured(kind: str, rank: int, world: int, base: str) -> dict[str, int]:
    module, optimizer = build(kind, world, settings_of(base, kind))
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))
    x = x.bfloat16() if "bf16" in kind else x
    for _ in range(3):  # SOAP's first step moves nothing
        train_step(module, optimizer, x)
    if base != "none":
        dho2_ds.attach(module, optimizer, loss_fn=lambda model, batch: model(batch), data=[x])
        for _ in range(2):  # the first calibrates for longer, at the expense of Lanczos steps
            optimizer.refresh()
    stats = optimizer.curvature_stats()
    found = {name: stats[f"bytes_{name}"] for name in ("base", "basis", "transient")}
    return {**found, "weights": weight_bytes(module, optimizer)}


def measured_worker(rank: int, world: int, cases: list[tuple[str, str]]) -> list[dict[str, int]]:
    return [measured(kind, rank, world, base) for kind, base in cases]


def planned(kind: str, ranks: int, base: str) -> Plan:
    engine, precision = ENGINES[kind]
    shapes = {name: tuple(p.shape) for name, p in Deep().named_parameters()}
    return plan(shapes, parse_config(settings_of(base, kind)), engine=engine, ranks=ranks, precision=precision)


def compare(found: dict[str, int], kind: str, ranks: int, base: str) -> None:
    memory = planned(kind, ranks, base).training
    expected = {"base": memory.base_state, "basis": memory.eigenbasis, "transient": memory.lanczos}
    for name, value in {**expected, "weights": memory.weights}.items():
        assert math.isclose(value, found[name], rel_tol=0.01), (kind, base, name, value, found[name])


@pytest.mark.parametrize("base", BASES)
def test_bytes_in_one_process(base: str) -> None:
    compare(measured("ddp", 0, 1, base), "ddp", 1, base)


def check_on_two_ranks(cases: list[tuple[str, str]]) -> None:
    ranks = run_ranks(2, measured_worker, cases, timeout=300)
    for index, (kind, base) in enumerate(cases):
        fullest = {name: max(found[index][name] for found in ranks) for name in ranks[0][index]}
        compare(fullest, kind, 2, base)


def test_bytes_on_two_ranks() -> None:
    check_on_two_ranks([("ddp", "adamw"), ("fsdp", "adamw"), ("zero2 bf16", "soap"), ("zero3", "sgd")])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_bytes_of_every_base_on_every_engine() -> None:
    check_on_two_ranks([(kind, base) for kind in ENGINES for base in BASES if base != "none"])


def dedicated_stats(kind: str, rank: int, world: int, settings: dict[str, Any]) -> dict[str, Any]:
    run = make(kind, rank, world, settings)
    run.train(8)  # a job of step 5 is swapped in at step 8
    stats = optimizer_of(run).curvature_stats()
    end_training(optimizer_of(run))
    return stats


@pytest.mark.slow
def test_bytes_of_a_snapshot_on_its_way_to_curvature_ranks() -> None:
    settings = changed(SETTINGS, swaps=[[5, 8]])
    ((stats,),) = run_both(1, 1, dedicated_stats, [("zero2", settings)], timeout=150)
    model = engines.Classifier()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    memory = plan(shapes, parse_config(settings), engine="zero2", ranks=1).training
    assert math.isclose(memory.snapshot + memory.staging, stats["bytes_transient"], rel_tol=0.02)


LLM = {"lr": 1e-3, "curvature": {"interval": 200, "mode": "dedicated", "ranks": 1}}


def test_as_many_curvature_ranks_as_a_refresh_needs() -> None:
    shapes, workload = square_shapes(10**9), Workload(flops=1e14, tokens=4096, bandwidth=1e10)

    def timing(count: int) -> Any:
        config = parse_config({**LLM, "curvature": {**LLM["curvature"], "ranks": count}})
        found = plan(shapes, config, engine="fsdp", ranks=16, precision="bfloat16", workload=workload).timing
        assert found is not None
        return found

    wanted = timing(1).curvature_ranks
    assert wanted is not None and 1 < wanted < 16
    assert timing(wanted).refresh <= timing(wanted).interval < timing(wanted - 1).refresh
    config = parse_config({**LLM, "curvature": {**LLM["curvature"], "interval": 1}})
    hurried = plan(shapes, config, engine="fsdp", ranks=16, workload=workload)
    assert hurried.timing is not None and hurried.timing.curvature_ranks is None


def test_seconds_of_an_inline_refresh() -> None:
    """42 products of two gradients, each three times a forward pass of 2 n operations a token."""
    config = parse_config({"lr": 1e-3, "curvature": {"lanczos_steps": 42}})
    workload = Workload(flops=1e14, tokens=1000)
    found = plan(square_shapes(10**9), config, engine="ddp", ranks=1, workload=workload)
    assert found.timing is not None
    assert math.isclose(found.timing.refresh, 42 * 2 * 3 * 2 * 1e9 * 1000 / 1e14)
    assert found.traffic.refresh == found.traffic.step == found.traffic.engine_step == 0  # one rank sends nothing


def test_shares_shrink_with_the_ranks() -> None:
    config = parse_config({"lr": 1e-3, "base": "soap"})
    one, eight = (plan(square_shapes(10**9), config, engine="zero3", ranks=ranks).training for ranks in (1, 8))
    assert one.peak / 8 <= eight.peak <= 1.02 * one.peak / 8


def run_plan(*arguments: str) -> tuple[int, Any]:
    """Exit code and JSON (what was printed instead, after an error) of ``dho2 plan``."""
    result = CliRunner().invoke(app, ["plan", "--json", *arguments])
    return result.exit_code, json.loads(result.stdout) if result.exit_code == 0 else result.output


def test_command_takes_a_deepspeed_config(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    params = {"lr": "auto", "base": "sgd", "num_eigenvectors": 5, "curvature": {"mode": "spread"}}
    config = {
        "optimizer": {"type": "DHO2", "params": params},
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
    }
    path.write_text(json.dumps({**config, "gradient_accumulation_steps": "auto"}))
    code, found = run_plan("--parameters", "1e6", "--config", str(path), "--ranks", "4")
    assert code == 0
    assert (found["engine"], found["precision"], found["mode"]) == ("zero3", "bfloat16", "spread")
    assert found["training"]["eigenbasis"] == 5 * 4 * 250_000
    assert found["training"]["base_state"] == 4 * 250_000
    assert found["training"]["peak"] == sum(found["training"][key] for key in Memory.__dataclass_fields__)
    code, found = run_plan(
        "--parameters", "1e6", "--config", str(path), "-k", "2", "--engine", "ddp", "--base", "adamw"
    )
    assert (found["engine"], found["training"]["eigenbasis"]) == ("ddp", 2 * 4 * 10**6)


def test_command_takes_an_automatic_learning_rate_a_budget_and_nulls(tmp_path: Path) -> None:
    """The interval in seconds is that of the budget: 2 * 20 / 0.01 steps of one gradient."""
    params = {"lr": "auto", "lr_fraction": 0.1, "curvature": {"budget": 0.01, "lanczos_steps": 20}}
    path = tmp_path / "ds.json"
    config = {"optimizer": {"type": "DHO2", "params": params}, "bf16": "auto", "zero_optimization": None}
    path.write_text(json.dumps(config))
    code, found = run_plan("--parameters", "1e6", "--config", str(path), "--flops", "1e12", "--tokens", "1000")
    assert code == 0 and found["engine"] == "zero0"
    assert found["timing"]["interval"] == pytest.approx(4000 * found["timing"]["step"])


def test_command_prints_a_table() -> None:
    arguments = [
        "plan",
        "--parameters",
        "7e9",
        "--ranks",
        "32",
        "--mode",
        "dedicated",
        "--flops",
        "4e14",
        "--tokens",
        "8192",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert "7,000,000,000 parameters, ddp, float32, 32 training rank(s), 1 curvature rank(s)" in result.stdout
    assert "Curvature ranks with which a refresh ends within the interval: 32" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "parameters, model: must be one of the two"),
        (["--parameters", "100", "-k", "100"], "num_eigenvectors=100: must be < 100"),
        (["--parameters", "1e6", "--flops", "1e12"], "flops, tokens: must be given together"),
        (["--parameters", "1e6", "--mode", "inline", "--curvature-ranks", "2"], "curvature.ranks: must be left out"),
        (
            ["--parameters", "1e6", "--config", "/nonexistent.json"],
            "config=/nonexistent.json: must be a DeepSpeed JSON",
        ),
        (["--model", "/nonexistent"], "model=/nonexistent: must be a folder with a Hugging Face config.json"),
    ],
)
def test_command_refuses(arguments: list[str], message: str) -> None:
    code, output = run_plan(*arguments)
    assert code == 2 and message in output


def test_command_refuses_another_optimizer(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"optimizer": {"type": "Adam"}}')
    code, output = run_plan("--parameters", "1e6", "--config", str(path))
    assert code == 2 and "optimizer.type='Adam': must be \"DHO2\"" in output


def test_command_counts_a_hugging_face_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=100, n_positions=16)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    tied = transformers.GPT2LMHeadModel(config)  # the head is the embedding
    code, found = run_plan("--model", str(tmp_path))
    assert code == 0, found
    assert found["parameters"] == sum(p.numel() for p in tied.parameters())
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    code, output = run_plan("--model", str(tmp_path))
    assert code == 2 and "must be an architecture that transformers knows" in output


def test_command_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, output = run_plan("--model", str(tmp_path))
    assert code == 2 and "pip install transformers or give --parameters" in output
