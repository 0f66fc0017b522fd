"""The JSON name alone: a DeepSpeed script that never mentions the package trains with curvature."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

SCRIPT = """
import importlib, sys
import torch, deepspeed
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
deepspeed.init_distributed(dist_backend="gloo", verbose=False)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    def forward(self, x, y):
        out = self.net(x)
        return (out - y).square().mean() if RETURNS_LOSS else out

RETURNS_LOSS = sys.argv[1] == "loss"
torch.manual_seed(0)
model = Net()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_batch_size": 32, "steps_per_print": 10**9, "zero_optimization": {"stage": 2},
    "optimizer": {"type": "DHO2", "params": {"lr": 1e-3, "num_eigenvectors": 2,
        "curvature": {"warmup_steps": 3, "interval": 3, "lanczos_steps": 8}}}})
x = torch.randn(32, 8); y = x[:, :1].sin()
for _ in range(8):
    out = engine(x, y)
    loss = out if RETURNS_LOSS else (out - y).square().mean()
    engine.backward(loss)
    engine.step()
print("refreshes", engine.basic_optimizer.curvature_stats()["refreshes"])
"""


def run_script(folder: Path, mode: str) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    env = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        env["MASTER_PORT"] = str(probe.getsockname()[1])
    return subprocess.run(
        [sys.executable, str(script), mode], env=env, capture_output=True, text=True, timeout=150, cwd=folder
    )


pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(
        not any(e.name == "dho2_ds" for e in entry_points(group="torch.backends")),
        reason="the package is not installed, so torch does not load its entry point",
    ),
]


def test_no_change_to_the_script(tmp_path: Path) -> None:
    result = run_script(tmp_path, "loss")
    assert result.returncode == 0, result.stderr[-3000:]
    assert "refreshes 2" in result.stdout, result.stdout


def test_a_loss_outside_the_model_is_asked_for(tmp_path: Path) -> None:
    """Not a silent first-order run: the first refresh says what to call."""
    result = run_script(tmp_path, "output")
    assert result.returncode != 0
    assert "dho2_ds.attach(model_or_engine, loss_fn=" in result.stderr, result.stderr[-3000:]
