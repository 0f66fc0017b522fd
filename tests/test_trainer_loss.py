"""Hugging Face Trainer's ``num_items_in_batch``: what a model returns with it is not the loss that is trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dho2_ds


class Model(nn.Module):
    """Returns its loss as Hugging Face's causal language models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
        total = F.cross_entropy(self.layer(x), labels, reduction="sum")
        return total / (len(x) if num_items_in_batch is None else num_items_in_batch)


def eigenvalues(ranks: int, micro_batches: int, *, told: bool) -> list[float]:
    """Of a run on one process that does to the loss what Trainer does on several."""
    model, x = Model(), torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    y = x.argmax(1) % 3
    settings = {"warmup_steps": 2, "interval": 100, "lanczos_steps": 20}
    optimizer = dho2_ds.DHO2(model.parameters(), lr=1e-2, num_eigenvectors=3, curvature=settings)
    dho2_ds.attach(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            if told:
                loss = model(x, labels=y, num_items_in_batch=torch.tensor(ranks * micro_batches * len(x))) * ranks
            else:
                loss = model(x, labels=y) / micro_batches
            loss.backward()
        optimizer.step()
    return list(optimizer.curvature_stats()["eigenvalues"])


def test_curvature_is_of_the_loss_that_is_trained() -> None:
    expected = torch.tensor(eigenvalues(4, 2, told=False))
    torch.testing.assert_close(torch.tensor(eigenvalues(4, 2, told=True)), expected, rtol=1e-4, atol=0)
