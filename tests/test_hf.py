"""Hugging Face's Trainer and Accelerate: the examples as users start them, and Accelerate's FSDP2.

Accelerate has FSDP for GPUs only: on CPU it takes ranks for plain data parallelism. What it does about FSDP2 runs here
on CPU all the same, once it has been told that this is the kind of run.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dho2_ds
from tests.distributed import run_ranks
from tests.test_examples import CONFIGS, EXAMPLES, launch, torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate", "pandas")),
        reason="transformers and accelerate are not installed; pip install 'dho2-ds[hf]'",
    ),
]

STEPS = ["--steps", "12", "--lr", "1e-3"]
TASK = ["--layers", "1", "--rows", "64", "--length", "16"]


def quick_config(folder: Path) -> str:
    config = json.loads((CONFIGS / "hf_zero2.json").read_text())
    params = config["optimizer"]["params"]
    params["num_eigenvectors"] = 2
    params["curvature"] = {"warmup_steps": 3, "interval": 4, "lanczos_steps": 8}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def train(folder: Path, *more: str) -> dict[int, float]:
    """Losses by step of eight steps with Trainer, with a checkpoint after the fifth."""
    options = ["--deepspeed", quick_config(folder), "--output_dir", str(folder), "--max_steps", "8"]
    options += ["--save_steps", "5", "--logging_steps", "1", "--learning_rate", "1e-3", "--eval_strategy", "no"]
    options += ["--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "4", "--use_cpu"]
    output = launch(torchrun("hf_trainer.py", *TASK, *options, "--report_to", "none", *more), folder, timeout=300)
    assert "step 7: refresh accepted" in output and "eval_accuracy" in output, output
    history = json.loads((folder / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history}


def test_trainer_resumes_as_if_it_had_gone_on(tmp_path: Path) -> None:
    """Refreshes after steps 3 and 7: one before the checkpoint and one after it."""
    from safetensors.torch import load_file

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for folder in (whole, resumed):
        folder.mkdir()
    losses = train(whole)
    assert train(resumed, "--resume_from_checkpoint", str(whole / "checkpoint-5")) == losses
    expected, found = (load_file(folder / "checkpoint-8" / "model.safetensors") for folder in (whole, resumed))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_accelerate_on_deepspeed(tmp_path: Path) -> None:
    """Both ranks print, if Accelerate does not know of them."""
    options = ["--use_deepspeed", "--deepspeed_config_file", quick_config(tmp_path)]
    command = ["accelerate", "launch", "--num_processes", "2", *options, str(EXAMPLES / "hf_accelerate.py")]
    output = launch([*command, *TASK, *STEPS], tmp_path, timeout=300)
    assert "DHO2 on DeepSpeed ZeRO-2, 2 rank(s)" in output and "refresh accepted" in output
    assert output.count("step 12 loss") == 1


def test_accelerate_on_ddp(tmp_path: Path) -> None:
    command = torchrun("hf_accelerate.py", *TASK, *STEPS)
    output = launch(["env", "ACCELERATE_USE_CPU=true", *command], tmp_path, timeout=300)
    assert "DHO2 on DistributedDataParallel, 2 rank(s)" in output and "refresh accepted" in output
    assert output.count("step 12 loss") == 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(torch.tanh(self.first(x))) - x[:, :1].sin()).square().mean()


def steps(kind: str, rank: int, count: int) -> tuple[list[float], dict[str, Any]]:
    """Losses and statistics of a run as Accelerate prepares it."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True)
    if kind == "fsdp2":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100, cpu_ram_efficient_loading=False
        )
        AcceleratorState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
        assert accelerator.is_fsdp2
    curvature = {"warmup_steps": 3, "interval": 5, "lanczos_steps": 20}
    model: Any = Model()
    optimizer: Any = dho2_ds.DHO2(model.parameters(), lr=1e-2, num_eigenvectors=2, curvature=curvature)
    model, optimizer = accelerator.prepare(model, optimizer)
    dho2_ds.attach(model, optimizer)
    losses = []
    for step in range(count):
        loss = model(torch.randn(32, 8, generator=torch.Generator().manual_seed(2 * step + rank)))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dho2_ds.attaching.as_dho2(optimizer).curvature_stats()


def both(rank: int, world: int) -> dict[str, Any]:
    return {kind: steps(kind, rank, 12) for kind in ("ddp", "fsdp2")}


def test_accelerate_fsdp2_trains_as_ddp() -> None:
    for found in run_ranks(2, both, timeout=200):
        (losses, _), (sharded, stats) = found["ddp"], found["fsdp2"]
        assert stats["refreshes"] == 2 and losses[-1] < losses[0]
        torch.testing.assert_close(torch.tensor(sharded), torch.tensor(losses), rtol=1e-3, atol=1e-5)
