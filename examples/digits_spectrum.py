"""A model for `dho2 spectrum`: a tanh classifier of scikit-learn's handwritten digits, at its initial weights.

dho2 spectrum examples/digits_spectrum.py:build
"""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean loss of a batch."""
    x, y = batch
    return cross_entropy(model(x), y)


def build() -> tuple[nn.Module, Any, list[tuple[Tensor, Tensor]]]:
    """What the command asks for: model, loss_fn and an iterable of batches."""
    torch.manual_seed(0)
    x, y = load_digits(return_X_y=True)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    return model, loss_fn, [(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))]
