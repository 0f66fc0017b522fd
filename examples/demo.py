"""DHO2 against tuned AdamW on a deep autoencoder: the real launcher, 2 ranks, ZeRO-2, a CPU, under two minutes.

python examples/demo.py --output demo.png

AdamW (configs/demo_adamw.json) runs at four learning rates and its best run is the baseline; DHO2
(configs/demo_dho2.json) runs once. All start from the same weights and see the same batches and cosine schedule.
"""

from __future__ import annotations

import argparse
import copy
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

EXAMPLES = Path(__file__).resolve().parent
CONFIGS = EXAMPLES.parent / "configs"
LR_FACTORS = (0.25, 0.5, 1.0, 2.0)  # AdamW runs at these multiples of the learning rate in demo_adamw.json
EVALUATE_EVERY = 5  # steps between two losses over the whole training set, which the clock leaves out
GRADIENTS_PER_HVP = 2  # a central difference is two gradients; a double backward costs about as much
BASE_STATE = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
EVENT = "@event "  # marks a line of the training's output that is meant for this program


@dataclass(frozen=True)
class Point:
    """One evaluation of a training run; memory is bytes on rank 0."""

    run: str
    step: int
    loss: float
    seconds: float
    hvps: int
    refreshes: int
    basis_step: int
    eigenvalues: list[float]
    base_bytes: int
    basis_bytes: int
    transient_bytes: int

    @property
    def gradients(self) -> int:
        """Gradient evaluations so far, curvature included."""
        return self.step + GRADIENTS_PER_HVP * self.hvps


@dataclass
class Run:
    """One training: its DeepSpeed config and its curve."""

    name: str
    config: dict[str, Any]
    points: list[Point] = field(default_factory=list)

    @property
    def lr(self) -> float:
        return float(self.config["optimizer"]["params"]["lr"])

    @property
    def final(self) -> Point:
        return self.points[-1]

    def first_at(self, loss: float) -> Point | None:
        """The first evaluation at or below a loss."""
        return next((point for point in self.points if point.loss <= loss), None)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=500, help="optimizer steps of each run")
    parser.add_argument("--stage", type=int, choices=range(4), default=2, help="ZeRO stage")
    parser.add_argument("--batch-size", type=int, help="micro batch per rank (default: the configs')")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("demo.png"))
    parser.add_argument("--json", action="store_true", help="print every evaluation of every run as JSON, not a table")
    parser.add_argument("--plan", type=Path, help=argparse.SUPPRESS)  # set on the ranks: the runs to train
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def plan(args: argparse.Namespace) -> list[Run]:
    """AdamW at four learning rates, then DHO2."""
    runs = []
    adamw, dho2 = (json.loads((CONFIGS / name).read_text()) for name in ("demo_adamw.json", "demo_dho2.json"))
    for factor in LR_FACTORS:
        config = copy.deepcopy(adamw)
        config["optimizer"]["params"]["lr"] *= factor
        runs.append(Run("AdamW", config))
        runs[-1].name += f" lr {runs[-1].lr:.2g}"
    runs.append(Run("DHO2", dho2))
    for run in runs:
        run.config["zero_optimization"]["stage"] = args.stage
        run.config["scheduler"]["params"]["total_num_steps"] = args.steps
        if args.batch_size:
            run.config["train_micro_batch_size_per_gpu"] = args.batch_size
    return runs


# ---- on the ranks ----------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    """Train every run of the plan, one after the other; rank 0 prints one event an evaluation."""
    import torch
    import torch.distributed as dist
    from _common import digits, start

    rank, world, device, _ = start(args.seed, args.local_rank)
    data = digits().to(device)
    for run in json.loads(args.plan.read_text()):
        torch.manual_seed(args.seed)
        for point in train_one(args, run["config"], data, rank, world):
            if rank == 0:  # one write, so that lines of several processes do not mix
                sys.stdout.write(f"{EVENT}{json.dumps({'run': run['name'], **point})}\n")
                sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def train_one(
    args: argparse.Namespace, config: dict[str, Any], data: Any, rank: int, world: int
) -> Iterator[dict[str, Any]]:
    """The plain DeepSpeed loop; yields the fields of a `Point`."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from _common import shards
    from digits_autoencoder import DigitsAutoencoder

    model = DigitsAutoencoder().to(data.device)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    optimizer = engine.basic_optimizer
    batches = shards(data, engine.train_micro_batch_size_per_gpu(), rank, world, args.seed)
    seconds = 0.0
    for step in range(args.steps + 1):
        if step % EVALUATE_EVERY == 0 or step == args.steps:
            engine.eval()
            with torch.no_grad():
                total = engine(data[rank::world]).double() * len(data[rank::world])
            engine.train()
            dist.all_reduce(total)
            stats = optimizer.curvature_stats() if hasattr(optimizer, "curvature_stats") else {}
            state = [tensors.get(name) for tensors in optimizer.state.values() for name in BASE_STATE]
            yield {
                "step": step,
                "loss": total.item() / len(data),
                "seconds": seconds,
                "hvps": stats.get("hvps", 0),
                "refreshes": stats.get("refreshes", 0),
                "basis_step": step - (stats.get("age") or 0),
                "eigenvalues": list(stats.get("eigenvalues", [])),
                "base_bytes": sum(tensor.nbytes for tensor in state if isinstance(tensor, torch.Tensor)),
                "basis_bytes": stats.get("bytes_basis", 0),
                "transient_bytes": stats.get("bytes_transient", 0),
            }
        if step < args.steps:
            clock = time.perf_counter()
            loss = engine(next(batches))
            engine.backward(loss)
            engine.step()
            seconds += time.perf_counter() - clock


# ---- on the terminal -------------------------------------------------------------------------------------------------


def launch(args: argparse.Namespace, runs: list[Run], console: Console) -> None:
    """Start the ranks with the `deepspeed` launcher and follow them until they end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        path.write_text(json.dumps([{"name": run.name, "config": run.config} for run in runs]))
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(args.ranks)]
        command += ["--master_port", str(port), str(Path(__file__).resolve()), "--plan", str(path)]
        command += ["--steps", str(args.steps), "--seed", str(args.seed)]
        pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen(command, errors="replace", **pipe) as process:
            assert process.stdout is not None
            follow(process.stdout, args.steps, runs, console)
        if process.returncode != 0:
            raise SystemExit(process.returncode)


def follow(output: Iterator[str], steps: int, runs: list[Run], console: Console) -> None:
    """Draw the events of the ranks as progress bars; other output is shown only if the ranks did not finish."""
    by_name = {run.name: run for run in runs}
    log: deque[str] = deque(maxlen=60)
    columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.4f}"), console=console) as bar:
        tasks = {run.name: bar.add_task(run.name, total=steps, start=False, loss=float("nan")) for run in runs}
        for line in output:
            mark = line.find(EVENT)
            if mark < 0:
                log.append(line)
                continue
            point = Point(**json.loads(line[mark + len(EVENT) :]))
            if not by_name[point.run].points:
                bar.start_task(tasks[point.run])
            by_name[point.run].points.append(point)
            bar.update(tasks[point.run], completed=point.step, loss=point.loss)
    if any(not run.points or run.final.step < steps for run in runs):
        console.print("".join(log), markup=False, highlight=False)


def table(adamw: Run, dho2: Run, args: argparse.Namespace) -> Table:
    """The comparison in numbers."""
    target = adamw.final.loss
    reached = dho2.first_at(target)
    out = Table(title=f"Deep autoencoder, ZeRO-{args.stage}, {args.ranks} ranks", caption_justify="left")
    out.caption = (
        f"AdamW: best of {len(LR_FACTORS)} learning rates ({adamw.lr:.2g}); DHO2: {dho2.lr:.2g}. Loss: whole training "
        f"set. A Hessian-vector product (HVP) counts as {GRADIENTS_PER_HVP} gradients. Memory: rank 0."
    )
    for header in ("", "AdamW", "DHO2", "AdamW / DHO2"):
        out.add_column(header, justify="left" if not header else "right", no_wrap=True)

    def compare(name: str, left: float, right: float | None, form: str, missing: str = "not reached") -> None:
        ratio = f"{left / right:.2f}x" if right else ""
        out.add_row(name, format(left, form), missing if right is None else format(right, form), ratio)

    for fraction in (0.25, 0.5, 0.75, 1.0):
        step = round(args.steps * fraction)
        pair = [min(run.points, key=lambda point: abs(point.step - step)) for run in (adamw, dho2)]
        compare(f"loss at step {pair[0].step}", pair[0].loss, pair[1].loss, ".4f")
    out.add_section()
    first = adamw.first_at(target) or adamw.final
    compare(f"steps to loss {target:.4f}", first.step, reached.step if reached else None, ",")
    compare(f"seconds to loss {target:.4f}", first.seconds, reached.seconds if reached else None, ".2f")
    compare(f"gradients to loss {target:.4f}", first.gradients, reached.gradients if reached else None, ",")
    out.add_section()
    compare("gradients in total", adamw.final.gradients, dho2.final.gradients, ",")
    compare("seconds in total", adamw.final.seconds, dho2.final.seconds, ".2f")
    out.add_row("HVPs (refreshes)", "", f"{dho2.final.hvps:,} ({dho2.final.refreshes})", "")
    out.add_section()
    out.add_row("optimizer state, bytes", f"{adamw.final.base_bytes:,}", f"{dho2.final.base_bytes:,}", "")
    out.add_row("eigenbasis, bytes", "", f"{dho2.final.basis_bytes:,}", "")
    out.add_row("during a refresh, bytes", "", f"{dho2.final.transient_bytes:,}", "")
    return out


def plot(adamw: Run, others: list[Run], dho2: Run, output: Path) -> None:
    """Loss over steps beside the eigenvalues over time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True})
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), dpi=130, layout="constrained")
    blue, red = "#3b6ea8", "#d1495b"

    def curve(run: Run, **style: Any) -> None:
        left.plot([point.step for point in run.points], [point.loss for point in run.points], **style)

    for run in others:
        curve(run, color="0.75", lw=1.2, label="AdamW, other learning rates" if run is others[0] else None)
    curve(adamw, color=blue, lw=2.2, label=f"{adamw.name} (best of {len(LR_FACTORS)})")
    curve(dho2, color=red, lw=2.2, label="DHO2")
    target, reached = adamw.final.loss, dho2.first_at(adamw.final.loss)
    left.axhline(target, color=blue, ls="--", lw=1.2, label=f"AdamW's final loss, {target:.3g}")
    if reached is not None:
        left.plot(reached.step, reached.loss, "o", color=red, ms=9, mec="white", mew=1.5, zorder=5)
        text = f"step {reached.step} of {adamw.final.step}"
        arrow = {"arrowstyle": "-", "color": red, "shrinkB": 6}
        place = {
            "textcoords": "offset points",
            "ha": "center",
            "arrowprops": arrow,
            "bbox": {"fc": "white", "ec": "none", "pad": 2},
        }
        left.annotate(text, (reached.step, reached.loss), (18, 62), color=red, weight="bold", **place)
    left.set(xlabel="optimizer step", ylabel="training loss", title="Loss")
    left.legend(frameon=False, loc="upper right")

    refreshes = refreshed(dho2)
    count = max((len(point.eigenvalues) for point in refreshes), default=0)
    for index in range(count):
        found = [point for point in refreshes if index < len(point.eigenvalues)]
        right.plot(
            [point.basis_step for point in found],
            [abs(point.eigenvalues[index]) for point in found],
            "o-",
            color=plt.get_cmap("viridis")(0.9 * index / count),
            ms=4.5,
            lw=1.6,
            label=f"|λ{index + 1}|" if index in (0, count - 1) else None,
        )
    right.set(xlabel="optimizer step", ylabel="|eigenvalue|", xlim=left.get_xlim())
    right.set_title("Leading eigenvalues of the preconditioned Hessian")
    if refreshes:
        right.legend(frameon=False)
    for axes in (left, right):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.25)
    figure.savefig(output)


def refreshed(run: Run) -> list[Point]:
    """The evaluations right after a refresh of the eigenbasis."""
    before = [0, *(point.refreshes for point in run.points)]
    return [point for point, last in zip(run.points, before, strict=False) if point.refreshes > last]


def main() -> None:
    args = parse_args()
    if args.plan is not None:
        train(args)
        return
    # With --json stdout holds nothing else.
    console = Console(width=None if sys.stdout.isatty() else 110, stderr=args.json)
    runs = plan(args)
    launch(args, runs, console)
    *sweep, dho2 = runs
    adamw = min(sweep, key=lambda run: run.final.loss if run.final.loss == run.final.loss else float("inf"))
    if args.json:
        print(json.dumps({run.name: [asdict(point) for point in run.points] for run in runs}))
    else:
        console.print(table(adamw, dho2, args))
    plot(adamw, [run for run in sweep if run is not adamw], dho2, args.output)
    console.print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
