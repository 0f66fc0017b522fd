"""A physics-informed network for Burgers' equation: an ill-conditioned loss on which the base optimizer matters.

python examples/pinn_burgers.py
python examples/pinn_burgers.py --seeds 5 --results burgers.jsonl --output burgers.png

Trains the same network with Adam, SOAP, DHO2 on Adam and DHO2 on SOAP (full batch, cosine schedule), prints the final
losses and draws the curves over steps and over seconds. One process, 8 to 30 seconds per run on one CPU core. With
--results every finished run is kept in a file, and a later call with the same settings does only the missing ones.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

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


class Trained(NamedTuple):
    losses: list[float]
    """Before every step, and after the last."""
    seconds: float


def train(name: str, seed: int, args: argparse.Namespace, advance: Any) -> Trained:
    torch.manual_seed(seed)
    model, data, settings = Burgers(), points(args.points), RUNS[name]
    lr = args.lr or LEARNING_RATES[settings["base"]]
    optimizer = dho2_ds.DHO2(model.parameters(), lr=lr, weight_decay=0.0, **settings)
    dho2_ds.attach(model, optimizer)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    losses, began = [], time.perf_counter()
    for _ in range(args.steps):
        optimizer.zero_grad()
        loss = model(*data)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        advance(losses[-1])
    seconds = time.perf_counter() - began
    with torch.no_grad():
        return Trained([*losses, model(*data).item()], seconds)


class Results:
    """Finished runs, one JSON line each, found again by everything that decides how they go."""

    def __init__(self, path: Path | None, args: argparse.Namespace) -> None:
        self.path, self.args = path, args
        self.known: dict[str, Trained] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self.known[self._key(**entry["run"])] = Trained(entry["losses"], entry["seconds"])

    @staticmethod
    def _key(**run: Any) -> str:
        return json.dumps(run, sort_keys=True)

    def get(self, name: str, seed: int, advance: Any) -> Trained:
        run = {"name": name, "seed": seed, "steps": self.args.steps, "points": self.args.points, "lr": self.args.lr}
        run["settings"] = RUNS[name]
        key = self._key(**run)
        if key not in self.known:
            found = train(name, seed, self.args, advance)
            self.known[key] = Trained([float(f"{loss:.4g}") for loss in found.losses], round(found.seconds, 2))
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps({"run": run, **self.known[key]._asdict()}) + "\n")
        return self.known[key]


def draw(results: dict[str, list[Trained]], path: Path) -> None:
    """Median over the seeds as a line, their range as a band; left over steps, right over the median's seconds."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    for color, (name, runs) in zip(("tab:gray", "tab:blue", "tab:orange", "tab:red"), results.items(), strict=False):
        by_step = [sorted(column) for column in zip(*(run.losses for run in runs), strict=True)]
        middle = [statistics.median(column) for column in by_step]
        per_step = statistics.median(run.seconds for run in runs) / (len(by_step) - 1)
        for axis, unit in zip(axes, (1.0, per_step), strict=True):
            at = [step * unit for step in range(len(by_step))]
            axis.semilogy(at, middle, color=color, linewidth=1.4, label=name)
            axis.fill_between(
                at, [c[0] for c in by_step], [c[-1] for c in by_step], color=color, alpha=0.2, linewidth=0
            )
            axis.grid(alpha=0.3)
    seeds = max(len(runs) for runs in results.values())
    axes[0].set(xlabel="step", ylabel="loss")
    axes[1].set(xlabel="seconds on one CPU core")
    axes[0].legend()
    figure.suptitle(f"Burgers' equation, full batch, cosine schedule: median and range of {seeds} seed(s)")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--points", type=int, default=1024, help="collocation points")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--lr", type=float, help="instead of each base optimizer's own")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS), metavar="NAME")
    parser.add_argument("--output", type=Path, default=Path("pinn_burgers.png"), help="picture of the loss curves")
    parser.add_argument("--results", type=Path, help="file of finished runs, to go on from")
    args = parser.parse_args()
    finished = Results(args.results, args)
    results: dict[str, list[Trained]] = {name: [] for name in args.runs}
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.2e}"),
    )
    with Progress(*columns, TimeElapsedColumn(), console=Console(width=100)) as bar:
        tasks = {name: bar.add_task(name, total=args.steps * args.seeds, loss=math.nan) for name in args.runs}
        for seed in range(args.seeds):  # the inner loop is over optimizers: what was stopped can still be compared
            for name, task in tasks.items():
                run = finished.get(name, seed, lambda loss, task=task: bar.update(task, advance=1, loss=loss))
                bar.update(task, completed=args.steps * (seed + 1), loss=run.losses[-1])
                results[name].append(run)
    table = Table("optimizer", "final loss (median)", "each seed", "seconds per run", title=f"{args.steps} steps")
    for name, runs in results.items():
        finals = [run.losses[-1] for run in runs]
        each = " ".join(f"{value:.1e}" for value in finals)
        seconds = statistics.median(run.seconds for run in runs)
        table.add_row(name, f"{statistics.median(finals):.2e}", each, f"{seconds:.0f}")
    Console(width=100).print(table)
    draw(results, args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
