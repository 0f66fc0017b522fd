"""Cost of one DHO2 step beside AdamW's, and beside the time that moving the bytes alone would take.

python examples/benchmarks/step_cost.py
python examples/benchmarks/step_cost.py --device cuda --json step_cost.json

One flat parameter of n values, its gradient and a synthetic eigenbasis; no model and no refresh. Both optimizers use
torch's fused AdamW kernel, so what DHO2 adds is the projection (pass 1 over Q) and the correction (pass 2 over Q).

A second table has the base soap on the matrices of a transformer: its time beside AdamW's (the mean over one period of
its eigenbases), and, computed from the layouts, what a rank sends per step and how even the ranks are.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

import dho2_ds
from dho2_ds.sharding import flat_slices
from dho2_ds.sharding.blocks import assign, cut, imbalance, owner_layouts
from dho2_ds.sharding.route import to_blocks

FLOAT = 4  # bytes of an fp32 value
ADAMW_ARRAYS = 7  # reads weight, gradient, exp_avg, exp_avg_sq; writes the weight and both moments
PASS_1_ARRAYS = 2  # reads exp_avg, exp_avg_sq
PASS_2_ARRAYS = 3  # reads exp_avg_sq; reads and writes the weight
BANDWIDTH_VALUES = 64_000_000  # 256 MB, more than caches hold
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--numel", type=float, nargs="+", default=[1e6, 1e7, 5e7], metavar="N")
    parser.add_argument("--k", type=int, nargs="+", default=[4, 8, 16], metavar="K")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=7, help="timed pairs of steps; their median is reported")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--json", type=Path, default=Path("step_cost.json"), help="file to write")
    parser.add_argument("--quick", action="store_true", help="one small case: checks the script, measures nothing")
    args = parser.parse_args()
    args.soap = [(4, 128, 16384), (2, 256, 16384)]
    if args.quick:
        args.numel, args.k, args.repeats, args.soap = [1e5], [4], 3, [(2, 32, 100)]
    return args


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, kernels included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def medians(works: list[Callable[[], object]], repeats: int, device: torch.device) -> list[float]:
    """Median seconds of each; they take turns and the order alternates, so that drift hits all of them alike."""
    for work in works * 2:
        timed(work, device)
    seconds: list[list[float]] = [[] for _ in works]
    for repeat in range(repeats):
        order = range(len(works)) if repeat % 2 == 0 else reversed(range(len(works)))
        for index in order:
            seconds[index].append(timed(works[index], device))
    return [statistics.median(values) for values in seconds]


def bandwidths(values: int, repeats: int, device: torch.device) -> dict[str, float]:
    """Bytes per second, read plus written, of `copy_` between two tensors and of an in-place `mul_`.

    On a CPU a copy also reads the lines that it overwrites, which an in-place update (as of AdamW) has read anyway.
    """
    source = torch.ones(values, device=device)
    target = torch.empty_like(source)
    copy, scale = medians([lambda: target.copy_(source), lambda: target.mul_(1.0)], repeats, device)
    return {"copy_": 2 * source.nbytes / copy, "mul_": 2 * source.nbytes / scale}


def orthonormal(k: int, n: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """k rows with disjoint supports: orthonormal at once for any n, and no cheaper to multiply with."""
    rows = torch.zeros(k, n, device=device)
    for index in range(k):
        rows[index, index::k] = 1 / len(range(index, n, k)) ** 0.5
    return rows.to(dtype)


def measure(n: int, k: int, dtype: str, args: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    """One row: both optimizers on equal parameters and gradients."""
    device = torch.device(args.device)
    params = [torch.nn.Parameter(torch.zeros(n, device=device)) for _ in range(2)]
    gradient = torch.randn(n, generator=torch.Generator(device).manual_seed(0), device=device)
    for param in params:
        param.grad = gradient
    adamw = torch.optim.AdamW(params[:1], lr=1e-4, fused=True)
    curvature = {"warmup_steps": 10**9, "eigenvector_dtype": dtype}
    dho2 = dho2_ds.DHO2(params[1:], lr=1e-4, fused=True, num_eigenvectors=k, curvature=curvature)
    dho2.set_eigenbasis(orthonormal(k, n, DTYPES[dtype], device), [float(k - i) for i in range(k)], 0.5)
    adamw_s, dho2_s = medians([adamw.step, dho2.step], args.repeats, device)

    adamw_bytes = ADAMW_ARRAYS * FLOAT * n
    basis_bytes = 2 * k * DTYPES[dtype].itemsize * n
    extra_bytes = basis_bytes + (PASS_1_ARRAYS + PASS_2_ARRAYS) * FLOAT * n
    return {
        "n": n,
        "k": k,
        "eigenvector_dtype": dtype,
        "adamw_s": adamw_s,
        "dho2_s": dho2_s,
        "adamw_bytes": adamw_bytes,
        "dho2_bytes": adamw_bytes + extra_bytes,
        "adamw_floor_s": adamw_bytes / bandwidth,
        "dho2_floor_s": (adamw_bytes + extra_bytes) / bandwidth,
        "correction_s": dho2_s - adamw_s,
        "correction_floor_s": extra_bytes / bandwidth,
    }


def transformer(layers: int, width: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """{name: shape} of a GPT."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (vocabulary, width)}
    for i in range(layers):
        shapes |= {f"{i}.qkv": (3 * width, width), f"{i}.out": (width, width), f"{i}.norm": (width,)}
        shapes |= {f"{i}.up": (4 * width, width), f"{i}.down": (width, 4 * width), f"{i}.bias": (4 * width,)}
    return shapes


SOAP_K, SOAP_PERIOD, SOAP_BLOCK, SOAP_LONGEST = 8, 10, 2048, 10000
SOAP_RANKS = (2, 4, 8)


def measure_soap(size: tuple[int, int, int], args: argparse.Namespace) -> dict[str, Any]:
    """One row: AdamW, SOAP and DHO2 on SOAP on equal matrices; traffic and balance over several ranks."""
    device, shapes = torch.device(args.device), transformer(*size)
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    n = sum(sizes.values())
    sets = [[torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes.values()] for _ in range(3)]
    for params in sets:
        for index, param in enumerate(params):
            generator = torch.Generator(device).manual_seed(index)
            param.grad = torch.randn(param.shape, generator=generator, device=device)
    settings = {"lr": 1e-4, "base": "soap", "curvature": {"warmup_steps": 10**9}}
    adamw = torch.optim.AdamW(sets[0], lr=1e-4, fused=True)
    soap = dho2_ds.DHO2(sets[1], num_eigenvectors=0, **settings)
    dho2 = dho2_ds.DHO2(sets[2], num_eigenvectors=SOAP_K, **settings)
    dho2.set_eigenbasis(orthonormal(SOAP_K, n, torch.float32, device), [float(SOAP_K - i) for i in range(SOAP_K)], 0.5)

    def period(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        return lambda: [optimizer.step() for _ in range(SOAP_PERIOD)]

    repeats = max(2, args.repeats // 2)
    adamw_s, soap_s, dho2_s = (
        s / SOAP_PERIOD for s in medians([period(o) for o in (adamw, soap, dho2)], repeats, device)
    )
    ranks = {}
    blocks = cut(shapes, max_block=SOAP_BLOCK, max_rotated=SOAP_LONGEST)
    for world in SOAP_RANKS:
        owners = assign(blocks, world, 3 + SOAP_K)
        pieces = to_blocks(flat_slices(sizes, world), blocks, owners, owner_layouts(blocks, owners, world))
        sent = [
            sum(p.numel for p in pieces if p.source != p.target and rank in (p.source, p.target))
            for rank in range(world)
        ]
        memory, work = imbalance(blocks, owners, world, 3 + SOAP_K)
        ranks[world] = {"bytes_sent": FLOAT * max(sent), "memory_balance": memory, "work_balance": work}
    name = "x".join(map(str, size))
    return {"model": name, "n": n, "adamw_s": adamw_s, "soap_s": soap_s, "dho2_s": dho2_s, "k": SOAP_K, "ranks": ranks}


SOAP_HEADER = """
| layers x width x vocabulary | n | AdamW | SOAP | DHO2 on SOAP | SOAP / AdamW | DHO2 / SOAP | ranks | sent per rank, MB | of 2 n / P | memory balance | work balance |
|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"""  # noqa: E501


def soap_markdown(row: dict[str, Any]) -> str:
    """One line per number of ranks."""
    times = [f"{row[key] * 1e3:.1f}" for key in ("adamw_s", "soap_s", "dho2_s")]
    ratios = [f"{row['soap_s'] / row['adamw_s']:.1f}", f"{row['dho2_s'] / row['soap_s']:.2f}"]
    lines = []
    for world, found in row["ranks"].items():
        share = found["bytes_sent"] / (2 * FLOAT * row["n"] / world)
        cells = [row["model"], f"{row['n']:.1e}", *times, *ratios, str(world), f"{found['bytes_sent'] / 1e6:.1f}"]
        cells += [f"{share:.2f}", f"{found['memory_balance']:.2f}", f"{found['work_balance']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


HEADER = """\
| n | k | Q | AdamW | floor | DHO2 | floor | DHO2 / AdamW | DHO2 / floor | correction / floor |
|--:|--:|:--|--:|--:|--:|--:|--:|--:|--:|"""


def markdown(row: dict[str, Any]) -> str:
    """One line of the table; times in milliseconds."""
    times = [f"{row[key] * 1e3:.2f}" for key in ("adamw_s", "adamw_floor_s", "dho2_s", "dho2_floor_s")]
    pairs = ("dho2_s", "adamw_s"), ("dho2_s", "dho2_floor_s"), ("correction_s", "correction_floor_s")
    ratios = [f"{row[over] / row[under]:.2f}" for over, under in pairs]
    cells = [f"{row['n']:.0e}", str(row["k"]), row["eigenvector_dtype"], *times, *ratios]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    measured = bandwidths(1_000_000 if args.quick else BANDWIDTH_VALUES, args.repeats, device)
    bandwidth = max(measured.values())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    cases = [(int(n), k, dtype) for n in args.numel for k in args.k for dtype in args.dtype]
    speeds = ", ".join(f"{kernel} {value / 1e9:.1f} GB/s" for kernel, value in measured.items())
    print(f"{name}, torch {torch.__version__}, {speeds}; milliseconds per step, floors at the faster of the two\n")
    print(HEADER)
    rows = []
    for n, k, dtype in track(cases, "measuring", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        rows.append(measure(n, k, dtype, args, bandwidth))
        print(markdown(rows[-1]), flush=True)
    print(SOAP_HEADER)
    soap_rows = []
    for size in track(args.soap, "measuring", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        soap_rows.append(measure_soap(size, args))
        print(soap_markdown(soap_rows[-1]), flush=True)
    record = {
        "device": name,
        "platform": platform.platform(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "bytes_per_s": measured,
        "rows": rows,
        "soap_rows": soap_rows,
    }
    args.json.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\nwrote {args.json}")


if __name__ == "__main__":
    main()
