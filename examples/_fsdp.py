"""What the two FSDP2 examples share: start-up on CPU or CUDA, the loop, a checkpoint that any number of ranks loads."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _common import Place, library_text, progress_bar, report, shards
from char_gpt import CharGPT
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import dho2_ds

BLOCK = 32


def parse_args(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of this run")
    parser.add_argument("--batch-size", type=int, default=8, help="rows per rank")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--num-eigenvectors", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=20, metavar="STEPS", help="steps before the first refresh")
    parser.add_argument("--interval", type=int, default=20, metavar="STEPS", help="steps between refreshes")
    parser.add_argument(
        "--curvature-ranks", type=int, default=0, metavar="C", help="the last C processes compute curvature only"
    )
    parser.add_argument(
        "--swaps", nargs="+", metavar="SNAPSHOT:SWAP", help="repeat what an earlier run with --curvature-ranks reported"
    )
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16, reduce gradients in float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, metavar="DIR", help="write a checkpoint at the end")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="go on from a checkpoint; any number of ranks")
    return parser.parse_args()


def start(seed: int, curvature_ranks: int) -> Place:
    """Join torchrun's world: NCCL and one GPU a rank where there are GPUs, else gloo."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    role = dho2_ds.init_distributed(curvature_ranks=curvature_ranks)
    torch.manual_seed(seed)
    return Place(dist.get_rank(), dist.get_world_size(), torch.device("cuda" if cuda else "cpu"), role)


def train(mesh: DeviceMesh, args: argparse.Namespace, place: Place) -> None:
    """Train a character GPT sharded over ``mesh``, or serve those that do: a curvature rank ends in ``attach``."""
    rank, world, device, _ = place
    model = CharGPT(block=BLOCK, width=48, heads=4, layers=2).to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mesh": mesh, **({"mp_policy": policy} if args.bf16 else {})}
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)  # the root too: it takes what no block holds

    dedicated: dict[str, Any] = {}
    if args.curvature_ranks:
        dedicated = {"mode": "dedicated", "ranks": args.curvature_ranks}
        if args.swaps:
            dedicated["swaps"] = [[int(step) for step in pair.split(":")] for pair in args.swaps]
    optimizer = dho2_ds.DHO2(
        model.parameters(),
        lr=args.lr,
        weight_decay=0.01,
        num_eigenvectors=args.num_eigenvectors,
        curvature={"warmup_steps": args.warmup, "interval": args.interval, **dedicated},
    )
    dho2_ds.attach(model, optimizer)  # the model returns its loss, so nothing else is needed

    done = load(args.resume, model, optimizer) if args.resume else 0
    rows = library_text(block=BLOCK, limit=400_000).to(device)
    batches = shards(rows, args.batch_size, rank, world, args.seed)
    for _ in range(done):
        next(batches)
    with progress_bar(args.steps, place) as advance:
        for _ in range(args.steps):
            optimizer.zero_grad()
            loss = model(next(batches))
            loss.backward()
            optimizer.step()
            advance(loss.detach())
    if args.save:
        save(args.save, model, optimizer, done + args.steps)
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if place.speaks:
        report(mean.item() / world, optimizer)
    dist.barrier()
    dist.destroy_process_group()


def save(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Every rank writes its shard of weights, optimizer state and eigenbasis."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "step": torch.tensor(step)}, checkpoint_id=folder)


def load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Reads what this rank's shards need, whatever the number of ranks that wrote it; returns the step."""
    weights, state = get_state_dict(model, optimizer)
    saved: dict[str, Any] = {"model": weights, "optimizer": state, "step": torch.tensor(0)}
    dcp.load(saved, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    return int(saved["step"])
