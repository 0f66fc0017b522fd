"""What the examples share: arguments, start-up, data, the two hosts (DeepSpeed engine, plain DDP), bar and report."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dho2_ds  # the import is what makes {"type": "DHO2"} a name DeepSpeed knows

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
TrainStep = Callable[[Iterator[Tensor]], Tensor]


class Place(NamedTuple):
    """Where this process stands: its rank among the processes with the same role, and which role that is."""

    rank: int
    world: int
    device: torch.device
    role: str  # "training", or "curvature" on ranks that only compute curvature

    @property
    def speaks(self) -> bool:
        """True on the one process that prints."""
        return self.rank == 0 and self.role == "training"


def parse_args(
    description: str | None, steps: int = 300, batch_size: int | None = None, config: str = "zero2.json"
) -> argparse.Namespace:
    """The command line of an example; `--local_rank` is what the `deepspeed` launcher adds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    parser.add_argument(
        "--batch-size", type=int, default=batch_size, help="micro batch per rank, instead of the config's"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--optimizer", choices=["dho2", "adamw"], default="dho2")
    parser.add_argument("--ddp", action="store_true", help="plain DDP; only the config's optimizer block is read")
    parser.add_argument("--deepspeed_config", type=Path, default=CONFIGS / config, metavar="JSON")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    return parser.parse_args()


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """The DeepSpeed JSON as a dict, with `--batch-size` and `--optimizer adamw` applied."""
    config: dict[str, Any] = json.loads(args.deepspeed_config.read_text())
    if args.batch_size:
        config["train_micro_batch_size_per_gpu"] = args.batch_size
    if args.optimizer == "adamw":
        adamw = {key: config["optimizer"]["params"][key] for key in ("lr", "betas", "eps", "weight_decay")}
        config["optimizer"] = {"type": "AdamW", "params": {**adamw, "torch_adam": True}}
    return config


def skip_shm_op() -> None:
    """On CPU, stop DeepSpeed from compiling its shared-memory all-reduce: minutes of work, a hang on a stale lock."""
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().device_name() == "cpu":
        backend = importlib.import_module("deepspeed.comm.torch")  # the attribute of that name is torch itself
        backend.build_shm_op = lambda: None  # type: ignore[attr-defined]


def start(seed: int, local_rank: int = 0, config: dict[str, Any] | None = None) -> Place:
    """Join the launcher's world (`deepspeed`, `torchrun` or `mpirun`); every rank continues with the same seed.

    A config with curvature mode `dedicated` makes two worlds of it; the script goes on unchanged in both.
    """
    from deepspeed.accelerator import get_accelerator  # here, because the FSDP examples do without

    skip_shm_op()
    role = dho2_ds.init_distributed(config)
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", local_rank))  # under mpirun it is known only now
    get_accelerator().set_device(local_rank)
    device = torch.device(get_accelerator().device_name(local_rank))
    if device.type == "cpu":
        here = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or world  # the other world's too
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(here)))
    torch.manual_seed(seed)
    return Place(rank, world, device, role)


def shards(data: Tensor, batch_size: int, rank: int, world: int, seed: int) -> Iterator[Tensor]:
    """Endless batches: each epoch is one permutation, equal on all ranks, of which a rank takes every world-th row."""
    per_rank = len(data) // world
    if batch_size > per_rank:
        raise ValueError(f"batch_size={batch_size}: must be at most the {per_rank} rows of a rank's shard.")
    generator = torch.Generator().manual_seed(seed)
    while True:
        mine = torch.randperm(len(data), generator=generator)[rank::world]
        for start_row in range(0, per_rank - batch_size + 1, batch_size):
            yield data[mine[start_row : start_row + batch_size].to(data.device)]


def digits() -> Tensor:
    """The 1,797 handwritten digits of scikit-learn, 8 x 8 pixels in [0, 1], one row each."""
    from sklearn.datasets import load_digits

    return torch.tensor(load_digits().data / 16.0, dtype=torch.float32)


def library_text(block: int, limit: int = 1_000_000) -> Tensor:
    """Rows of block + 1 ASCII codes from the source text of Python's own standard library: on every machine."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    raw = b"".join(file.read_bytes() for file in files)[:limit]
    codes = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long().clamp_(max=127)
    return codes[: len(codes) // (block + 1) * (block + 1)].view(-1, block + 1)


def deepspeed_host(model: nn.Module, config: dict[str, Any]) -> tuple[TrainStep, torch.optim.Optimizer]:
    """Train with a DeepSpeed engine. Nothing here knows DHO2: the JSON names it."""
    import deepspeed

    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def train_step(batches: Iterator[Tensor]) -> Tensor:
        for _ in range(engine.gradient_accumulation_steps()):
            loss: Tensor = engine(next(batches))
            engine.backward(loss)
            engine.step()
        return loss.detach()

    return train_step, engine.basic_optimizer


def ddp_host(model: nn.Module, config: dict[str, Any]) -> tuple[TrainStep, torch.optim.Optimizer]:
    """Train with plain DistributedDataParallel: build the optimizer as always, then one `attach`."""
    model = DistributedDataParallel(model)
    params = {key: value for key, value in config["optimizer"]["params"].items() if key != "torch_adam"}
    optimizer: torch.optim.Optimizer
    if config["optimizer"]["type"] == "AdamW":
        optimizer = torch.optim.AdamW(model.parameters(), **params)
    else:
        optimizer = dho2_ds.DHO2(model.parameters(), **params)
        dho2_ds.attach(model, optimizer=optimizer)

    def train_step(batches: Iterator[Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(next(batches))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train_step, optimizer


@contextmanager
def progress_bar(steps: int, place: Place) -> Iterator[Callable[[Tensor], None]]:
    """A bar on the process that prints; call what it yields with the loss after each step."""
    columns = (TextColumn("step"), BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.4f}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(width=100), disable=not place.speaks) as bar:
        task = bar.add_task("", total=steps, loss=float("nan"))
        yield lambda loss: bar.update(task, advance=1, loss=loss.item())


def train(model: nn.Module, data: Tensor, args: argparse.Namespace, place: Place) -> None:
    """The training loop of the examples, on either host. A curvature rank ends inside its first forward (DDP: in
    `attach`), when training has ended."""
    config = read_config(args)
    batches = shards(data, config["train_micro_batch_size_per_gpu"], place.rank, place.world, args.seed)
    train_step, optimizer = (ddp_host if args.ddp else deepspeed_host)(model, config)
    with progress_bar(args.steps, place) as advance:
        for _ in range(args.steps):
            loss = train_step(batches)
            advance(loss)
    dist.all_reduce(loss)
    if place.speaks:
        report(loss.item() / place.world, optimizer)
    dist.destroy_process_group()


def report(loss: float, optimizer: torch.optim.Optimizer) -> None:
    """Print the last loss (mean over ranks) and, for DHO2, what its curvature did and cost."""
    table = Table("quantity", "value", title=type(optimizer).__name__)
    table.add_row("final loss", f"{loss:.4f}")
    if isinstance(optimizer, dho2_ds.DHO2):
        for name, value in optimizer.curvature_stats().items():
            table.add_row(name, shown(value))
    Console(width=100).print(table)


def shown(value: object) -> str:
    """Numbers to three digits, pairs as `snapshot->swap`."""
    if isinstance(value, tuple):
        return "->".join(map(str, value))
    if isinstance(value, list):
        return " ".join(shown(entry) for entry in value) or "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
