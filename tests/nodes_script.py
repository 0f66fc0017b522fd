"""A whole training script, for the tests that start it on several nodes: DeepSpeed's engine or FSDP2, two layers.

python nodes_script.py CONFIG.json OUTPUT.json {deepspeed,fsdp2} STEPS
"""

import argparse
import importlib
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dho2_ds


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(torch.tanh(self.first(x))) - x[:, :1].sin()).square().mean()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("host", choices=["deepspeed", "fsdp2"])
    parser.add_argument("steps", type=int)
    parser.add_argument("--local_rank")  # which the `deepspeed` launcher adds
    args = parser.parse_args()
    config = json.loads(args.config.read_text())
    settings = config["optimizer"]["params"]
    if args.host == "deepspeed":
        import deepspeed

        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # minutes of compilation
    if settings["curvature"].get("mode") == "dedicated":
        dho2_ds.init_distributed(config)
    elif args.host == "deepspeed":
        deepspeed.init_distributed("gloo", verbose=False)
    else:
        dist.init_process_group("gloo")

    model = Model()
    if args.host == "deepspeed":
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        optimizer = engine.basic_optimizer
    else:
        from torch.distributed.fsdp import fully_shard

        engine = fully_shard(model)
        optimizer = dho2_ds.DHO2(engine.parameters(), **settings)
        dho2_ds.attach(engine, optimizer)

    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in range(args.steps):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(step))[rank::world]
        loss = engine(x)
        if args.host == "deepspeed":
            engine.backward(loss)
            engine.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world)
    if rank == 0:
        stats = optimizer.curvature_stats()
        args.output.write_text(json.dumps({"losses": losses, "refreshes": stats["refreshes"], "world": world}))
    dist.destroy_process_group()
