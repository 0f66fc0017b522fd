"""The networks of the benchmark tasks. Each one's `forward` takes a batch and returns its mean loss.

Small on purpose: a run has to end within a minute or two on one core. No normalisation layers and no dropout, so that a
loss is a function of weights and batch alone.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from pinn_burgers import Burgers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d, relu

CONVECTION_SPEED = 30.0


class Autoencoder(nn.Module):
    """Deep tanh autoencoder with a linear code; squared error summed over the pixels, averaged over the batch."""

    def __init__(self, widths: tuple[int, ...] = (784, 128, 64, 32, 12)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise([*widths, *reversed(widths[:-1])]):
            layers += [nn.Linear(inputs, outputs), nn.Identity() if outputs == widths[-1] else nn.Tanh()]
        self.layers = nn.Sequential(*layers[:-1])  # the last layer is linear

    def forward(self, images: Tensor) -> Tensor:
        return (self.layers(images) - images).square().sum() / len(images)


class Classifier(nn.Module):
    """What the classifiers share: `logits` is theirs, the loss is cross entropy plus `decay` / 2 times |weights|^2."""

    decay = 0.0

    def logits(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = cross_entropy(self.logits(x), labels)
        if self.decay:
            loss = loss + self.decay / 2 * sum(p.square().sum() for p in self.parameters())
        return loss

    def error_rate(self, x: Tensor, labels: Tensor) -> float:
        return (self.logits(x).argmax(1) != labels).float().mean().item()


class LeNet(Classifier):
    """Two convolutions and three linear layers with the widths of LeNet-5, for images of 14 x 14."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 3, padding=1)
        self.head = nn.Sequential(nn.Linear(144, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))

    def logits(self, x: Tensor) -> Tensor:
        x = max_pool2d(relu(self.conv1(x)), 2)
        return self.head(max_pool2d(relu(self.conv2(x)), 2).flatten(1))


class ConvNet(Classifier):
    """Three convolutions of 3 x 3, each followed by a pooling, and two linear layers."""

    def __init__(self, channels: tuple[int, int, int] = (16, 32, 64)) -> None:
        super().__init__()
        sizes = [3, *channels]
        self.convolutions = nn.ModuleList(nn.Conv2d(m, n, 3, padding=1) for m, n in pairwise(sizes))
        self.head = nn.Sequential(nn.Linear(16 * channels[-1], 96), nn.ReLU(), nn.Linear(96, 10))

    def logits(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = max_pool2d(relu(convolution(x)), 2)
        return self.head(x.flatten(1))


class TableClassifier(Classifier):
    """A tanh network on the columns of a table; with no hidden layer it is logistic regression."""

    def __init__(self, widths: tuple[int, ...], decay: float) -> None:
        super().__init__()
        self.decay = decay
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.Tanh()]
        self.layers = nn.Sequential(*layers[:-1])

    def logits(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Convection(Burgers):
    """u_t + 30 u_x = 0 on [0, 1] x [0, 2 pi], u(0, x) = sin x, periodic in x: the solution is sin(x - 30 t).

    A known failure of physics-informed networks under first-order training (arXiv 2109.01050).
    """

    def forward(self, inside: Tensor, initial: Tensor, edges: Tensor) -> Tensor:
        _, dt, dx, _ = self.jet(inside)
        start = self.jet(initial)[0] - torch.sin(initial[:, 1:])
        left, right = self.jet(edges)[0].chunk(2)
        residual = (dt + CONVECTION_SPEED * dx).square().mean()
        return residual + start.square().mean() + (left - right).square().mean()


def convection_points(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scattered points (t, x) inside, and regular ones at t = 0 and at both edges."""
    inside = torch.quasirandom.SobolEngine(2, scramble=True, seed=0).draw(count) * torch.tensor([1.0, 2 * math.pi])
    x, t = torch.linspace(0, 2 * math.pi, 128), torch.linspace(0, 1, 64)
    edges = torch.cat([torch.stack([t, torch.full_like(t, side)], 1) for side in (0.0, 2 * math.pi)])
    return inside, torch.stack([torch.zeros_like(x), x], 1), edges
