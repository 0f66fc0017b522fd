"""A whole training script with curvature ranks, for the tests that start it with a launcher."""

import atexit
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dho2_ds

if __name__ == "__main__":
    curvature, steps, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    role = dho2_ds.init_distributed(curvature_ranks=curvature)
    print(f"{role} rank {dist.get_rank()} of {dist.get_world_size()} is process {os.getpid()}", flush=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    )
    x = torch.randn(64, 8)
    y = x[:, :1].sin()
    settings = {
        "mode": "dedicated",
        "ranks": curvature,
        "timeout": 2 if "hang" in sys.argv else 20,
        "warmup_steps": 5,
        "interval": 10,
    }
    optimizer = dho2_ds.DHO2(model.parameters(), lr=3e-3, num_eigenvectors=4, curvature=settings)

    def loss_fn(called: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if role == "curvature" and "hang" in sys.argv:
            time.sleep(1e6)
        return (called(batch[0]) - batch[1]).square().mean()

    dho2_ds.attach(model, optimizer, loss_fn=loss_fn, data=[(x, y)])
    for step in range(steps):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        time.sleep(pause)
        stats = optimizer.curvature_stats()
        if dist.get_rank() == 0 and stats["in_flight"] is False:
            print(f"refreshes {stats['refreshes']} lost {stats['lost']} step {step}", flush=True)
        if "raise" in sys.argv and stats["refreshes"]:
            raise RuntimeError("training fails")
    print("training is over", flush=True)
    if "leave" not in sys.argv:
        atexit._run_exitfuncs()  # what an interpreter does first when it ends; gloo's teardown after it aborts at times
    os._exit(0)
