"""The base ``soap`` trains as well as the SOAP of a public package: two tasks, three seeds, overlapping spreads.

Loss of ours / the package's, mean (lowest to highest) of six seeds: classifier 0.929 (0.909 to 0.965) / 0.930 (0.890 to
0.957), autoencoder 1.588 (1.558 to 1.633) / 1.620 (1.569 to 1.657). With the three seeds of this test the spreads on
the autoencoder do not overlap: ours is lower. What the two do is the same but for three things, tried one by one:

- the basis of the first gradient's null space (pixels that are always black, a small batch): ours is that of a falling
  diagonal (``NULL``), the package's what LAPACK makes of rounding errors. Without ours: 1.615 (1.591 to 1.626), and
  within the spread also at three seeds; the package with it: 1.604 (1.570 to 1.635). This is most of it.
- the package skips the first step for biases too, decays weights after the step instead of before, and adds eps before
  bias correction: rounding beside the spread.
- the floor under small entries (``RESOLUTION``) and ``SHIFT``: 0.005 and less on average.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import dho2_ds
import dho2_ds.soap

SETTINGS: dict[str, Any] = {"betas": (0.95, 0.95), "weight_decay": 0.01, "precondition_frequency": 10}
STEPS = 300


def network(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def reconstruct(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - x).square().sum(1).mean()


TASKS: dict[str, tuple[list[int], Callable[..., Tensor]]] = {
    "classifier": ([64, 48, 32, 10], classify),
    "autoencoder": ([64, 48, 8, 48, 64], reconstruct),
}


def ours(params: Any, lr: float) -> torch.optim.Optimizer:
    options = {key: value for key, value in SETTINGS.items() if key != "precondition_frequency"}
    soap = {"precondition_frequency": SETTINGS["precondition_frequency"]}
    return dho2_ds.DHO2(params, lr=lr, base="soap", num_eigenvectors=0, soap=soap, **options)


def theirs(params: Any, lr: float) -> torch.optim.Optimizer:
    package = pytest.importorskip("pytorch_optimizer")
    return package.SOAP(params, lr=lr, **SETTINGS)


def final_loss(make: Callable[[Any, float], torch.optim.Optimizer], task: str, seed: int) -> float:
    """Mean loss of the last 30 mini-batches."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16.0, dtype=torch.float32), torch.tensor(labels)
    torch.manual_seed(seed)
    widths, loss_of = TASKS[task]
    model = network(widths)
    optimizer = make(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for _ in range(STEPS):
        rows = torch.randint(len(x), (128,))
        optimizer.zero_grad()
        loss = loss_of(model, x[rows], y[rows])
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return sum(losses[-30:]) / 30


def overlap(a: list[float], b: list[float]) -> bool:
    return min(a) <= max(b) and min(b) <= max(a)


@pytest.mark.slow
@pytest.mark.parametrize("task", list(TASKS))
def test_trains_as_well_as_a_public_package(task: str) -> None:
    """Not worse, by mean and spread; and the same, by spread, once the null space is treated as there."""
    pytest.importorskip("pytorch_optimizer")
    mine, other = ([final_loss(make, task, seed) for seed in range(3)] for make in (ours, theirs))
    with mock.patch.object(dho2_ds.soap, "NULL", 0.0):
        alike = [final_loss(ours, task, seed) for seed in range(3)]
    print(f"{task}: ours {mine}, with a null space as in pytorch_optimizer {alike}, pytorch_optimizer {other}")
    assert sum(mine) <= 1.02 * sum(other) and min(mine) <= max(other), (mine, other)
    assert overlap(alike, other), (alike, other)
    assert sum(mine) == pytest.approx(sum(other), rel=0.06), (mine, other)  # no other method that is merely better
