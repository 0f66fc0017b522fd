"""Eigenvalues and spectral density of a small network's Hessian beside curvlinops', against the dense float64 Hessian.

pip install 'dho2-ds[bench-spectrum]'
python examples/benchmarks/spectrum.py

A digits classifier (2,410 parameters, or --width) after some steps of Adam, float32, one process. Leading eigenvalues:
`dho2_ds.spectrum` with both kinds of Hessian-vector product (HVP), and SciPy's eigsh on curvlinops' operator. Density:
`dho2_ds.spectral_density` and curvlinops' Lanczos, equal probes and nodes, smoothed alike. Errors of eigenvalues are
relative to the largest, distances of densities are integrals of |difference| (0 to 2).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from curvlinops import HessianLinearOperator
from curvlinops.papyan2020traces.spectrum import fast_lanczos
from rich.console import Console
from rich.table import Table
from scipy.sparse.linalg import LinearOperator, eigsh
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import dho2_ds
from dho2_ds.curvature.density import Density


def classifier(width: int, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The trained network and all its data."""
    torch.manual_seed(seed)
    x, y = load_digits(return_X_y=True)
    batch = torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y)
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    return model, batch


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def dense_eigenvalues(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """All eigenvalues, float64."""
    names, params = zip(*((name, p.detach().double()) for name, p in model.named_parameters()), strict=True)
    sizes = [p.numel() for p in params]

    def loss(flat: Tensor) -> Tensor:
        pieces = (piece.view_as(p) for piece, p in zip(flat.split(sizes), params, strict=True))
        output = torch.func.functional_call(model, dict(zip(names, pieces, strict=True)), (batch[0].double(),))
        return F.cross_entropy(output, batch[1])

    flat = torch.cat([p.reshape(-1) for p in params])
    hessian = torch.func.jacrev(torch.func.grad(loss), chunk_size=64)(flat)
    return torch.linalg.eigvalsh(hessian.detach())


class Counted:
    """curvlinops' operator, its products counted."""

    def __init__(self, operator: Any) -> None:
        self.operator, self.calls = operator, 0
        self.shape, self.dtype, self.device = operator.shape, operator.dtype, operator.device

    def __matmul__(self, vector: Tensor) -> Tensor:
        self.calls += 1
        return self.operator @ vector

    def eigenvalues(self, k: int) -> list[float]:
        def product(vector: Any) -> Any:
            return (self @ torch.as_tensor(vector, dtype=self.dtype).reshape(-1)).numpy()

        linear = LinearOperator(self.shape, matvec=product, dtype="float32")
        found = eigsh(linear, k=k, which="LM", return_eigenvectors=False, tol=1e-4)
        return sorted(found.tolist(), key=abs, reverse=True)

    def density(self, probes: int, steps: int) -> Density:
        runs = [fast_lanczos(self, steps) for _ in range(probes)]
        nodes, weights = [values.tolist() for values, _ in runs], [vectors[0].square().tolist() for _, vectors in runs]
        return Density(nodes, weights, self.shape[0], self.calls)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    result = call()
    return result, time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=32, help="hidden units")
    parser.add_argument("-k", type=int, default=8, help="leading eigenvalues")
    parser.add_argument("--lanczos-steps", type=int, default=40)
    parser.add_argument("--probes", type=int, default=4)
    parser.add_argument("--density-steps", type=int, default=80)
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, batch = classifier(args.width)
    exact = dense_eigenvalues(model, batch)
    leading = exact[exact.abs().argsort(descending=True)][: args.k]
    width = float(exact.max() - exact.min()) / 100
    points = torch.linspace(float(exact.min()) - 5 * width, float(exact.max()) + 5 * width, 2000, dtype=torch.float64)
    truth = torch.tensor(Density([exact.tolist()], [[1 / len(exact)] * len(exact)], len(exact), 0).curve(points, width))
    rows: list[dict[str, Any]] = []

    def top(name: str, values: list[float], hvps: int, seconds: float) -> None:
        error = float((torch.tensor(values, dtype=torch.float64) - leading).abs().max() / leading[0].abs())
        rows.append({"what": f"top {args.k}", "method": name, "HVPs": hvps, "error": error, "CPU s": seconds})

    def density(name: str, found: Density, hvps: int, seconds: float) -> None:
        distance = (torch.tensor(found.curve(points, width)) - truth).abs().sum() * (points[1] - points[0])
        trace = abs(found.trace / float(exact.sum()) - 1)
        row = {"what": "density", "method": name, "HVPs": hvps, "error": float(distance), "CPU s": seconds}
        rows.append({**row, "trace error": trace})

    for hvp in ("finite_difference", "exact"):
        common: dict[str, Any] = {"loss_fn": loss_fn, "data": [batch], "hvp": hvp}
        found, seconds = timed(
            lambda c=common: dho2_ds.spectrum(model, k=args.k, lanczos_steps=args.lanczos_steps, **c)
        )
        top(f"dho2_ds, {hvp}", found.eigenvalues, found.hvps, seconds)
        quadrature = {"probes": args.probes, "lanczos_steps": args.density_steps}
        found, seconds = timed(lambda c=common, q=quadrature: dho2_ds.spectral_density(model, **q, **c))
        density(f"dho2_ds, {hvp}", found, found.hvps, seconds)
    params = list(model.parameters())
    for measure in ("top", "density"):
        # Its own check of determinism would count as products.
        data, loss = [batch], nn.CrossEntropyLoss()
        counted = Counted(HessianLinearOperator(model, loss, params, data, check_deterministic=False))
        if measure == "top":
            found, seconds = timed(lambda c=counted: c.eigenvalues(args.k))
            top("curvlinops + eigsh", found, counted.calls, seconds)
        else:
            found, seconds = timed(lambda c=counted: c.density(args.probes, args.density_steps))
            density("curvlinops", found, counted.calls, seconds)
    table = Table(title=f"{len(exact):,} parameters; density from {args.probes} probes of {args.density_steps} nodes")
    for header in ("", "method", "HVPs", "error", "trace error", "CPU s"):
        table.add_column(header, justify="left" if header in ("", "method") else "right")
    for row in sorted(rows, key=lambda row: row["what"], reverse=True):
        trace = f"{row['trace error']:.1%}" if "trace error" in row else ""
        table.add_row(row["what"], row["method"], str(row["HVPs"]), f"{row['error']:.1e}", trace, f"{row['CPU s']:.2f}")
    Console(width=110).print(table)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
