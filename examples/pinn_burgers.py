"""A physics-informed network for Burgers' equation: an ill-conditioned loss on which the base optimizer matters.

python examples/pinn_burgers.py
python examples/pinn_burgers.py --steps 1500 --seeds 3 --output burgers.png

Trains the same network with Adam, SOAP, DHO2 on Adam and DHO2 on SOAP (full batch, cosine schedule), prints the final
losses and draws the curves. One process; a minute or two per run on one CPU core.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import dho2_ds

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  (after the backend is chosen)

VISCOSITY = 0.01 / math.pi
CURVATURE = {"warmup_steps": 75, "interval": 75, "lanczos_steps": 24, "hvp": "exact"}
"""Exact products: the flat directions of this loss are flatter by 1e6 than the steep ones, which float32 differences of
gradients do not resolve."""
HYBRID = {"num_eigenvectors": 16, "newton_lr": 0.3, "max_lr_scale": 3.0, "curvature": CURVATURE}
RUNS: dict[str, dict[str, Any]] = {
    "Adam": {"base": "adam", "num_eigenvectors": 0},
    "SOAP": {"base": "soap", "num_eigenvectors": 0},
    "DHO2 on Adam": {"base": "adam", **HYBRID},
    "DHO2 on SOAP": {"base": "soap", **HYBRID},
}
LEARNING_RATES = {"adam": 1e-2, "soap": 1e-2}


class Burgers(nn.Module):
    """u(t, x) as a tanh network of three hidden layers; ``forward`` returns the loss.

    u_t + u u_x = nu u_xx on [0, 1] x [-1, 1], u(0, x) = -sin(pi x), u(t, -1) = u(t, 1) = 0. The derivatives by t and x
    are carried through the layers along with the values, so one ordinary backward pass gives the gradient.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(m, n) for m, n in pairwise([2, width, width, width, 1]))

    def jet(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """u, u_t, u_x, u_xx at points (t, x)."""
        value = points
        dt, dx = torch.eye(2).to(points).unsqueeze(1).expand(2, len(points), 2)
        dxx = torch.zeros_like(points)
        for index, layer in enumerate(self.layers):
            value = layer(value)
            dt, dx, dxx = (d @ layer.weight.T for d in (dt, dx, dxx))
            if index + 1 < len(self.layers):
                value = torch.tanh(value)
                slope = 1 - value.square()
                dxx = slope * (dxx - 2 * value * dx.square())
                dt, dx = slope * dt, slope * dx
        return value, dt, dx, dxx

    def forward(self, inside: Tensor, initial: Tensor, edges: Tensor) -> Tensor:
        u, dt, dx, dxx = self.jet(inside)
        residual = dt + u * dx - VISCOSITY * dxx
        start = self.jet(initial)[0] + torch.sin(math.pi * initial[:, 1:])
        return residual.square().mean() + start.square().mean() + self.jet(edges)[0].square().mean()


def points(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scattered points (t, x) inside, and regular ones at t = 0 and at x = -1 and 1."""
    inside = torch.quasirandom.SobolEngine(2, scramble=True, seed=0).draw(count) * torch.tensor([1.0, 2.0])
    x, t = torch.linspace(-1, 1, 128), torch.linspace(0, 1, 64)
    edges = torch.cat([torch.stack([t, torch.full_like(t, side)], 1) for side in (-1.0, 1.0)])
    return inside - torch.tensor([0.0, 1.0]), torch.stack([torch.zeros_like(x), x], 1), edges


def train(name: str, seed: int, args: argparse.Namespace, advance: Any) -> list[float]:
    """The loss before every step, and after the last."""
    torch.manual_seed(seed)
    model, data, settings = Burgers(), points(args.points), RUNS[name]
    lr = args.lr or LEARNING_RATES[settings["base"]]
    optimizer = dho2_ds.DHO2(model.parameters(), lr=lr, weight_decay=0.0, **settings)
    dho2_ds.attach(model, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    losses = []
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss = model(*data)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        advance(losses[-1])
    with torch.no_grad():
        return [*losses, model(*data).item()]


def draw(curves: dict[str, list[list[float]]], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for color, (name, runs) in zip(("tab:gray", "tab:blue", "tab:orange", "tab:red"), curves.items(), strict=False):
        for index, losses in enumerate(runs):
            axis.semilogy(losses, color=color, linewidth=1.2, alpha=0.8, label=name if index == 0 else None)
    axis.set(xlabel="step", ylabel="loss", title="Burgers' equation, full batch, cosine schedule")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--points", type=int, default=1024, help="collocation points")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--lr", type=float, help="instead of each base optimizer's own")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME")
    parser.add_argument("--output", type=Path, default=Path("pinn_burgers.png"), help="picture of the loss curves")
    args = parser.parse_args()
    curves: dict[str, list[list[float]]] = {}
    table = Table("optimizer", "final loss (median)", "each seed", "seconds per run", title=f"{args.steps} steps")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.2e}"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=Console(width=100)) as bar:
        for name in args.runs:
            task = bar.add_task(name, total=args.steps * args.seeds, loss=math.nan)
            began = time.perf_counter()
            curves[name] = [
                train(name, seed, args, lambda loss, task=task: bar.update(task, advance=1, loss=loss))
                for seed in range(args.seeds)
            ]
            seconds = (time.perf_counter() - began) / args.seeds
            finals = [losses[-1] for losses in curves[name]]
            each = " ".join(f"{value:.1e}" for value in finals)
            table.add_row(name, f"{statistics.median(finals):.2e}", each, f"{seconds:.0f}")
    Console(width=100).print(table)
    draw(curves, args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
