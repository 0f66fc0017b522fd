"""HSDP: shards within a group of ranks (a node), replicas between groups; the same job as train_fsdp2.py.

Sums of the optimizer run within a group only: replicas take the same step from the same numbers.

torchrun --nproc_per_node 4 examples/train_hsdp.py --save checkpoint
torchrun --nproc_per_node 2 examples/train_fsdp2.py --resume checkpoint
"""

from __future__ import annotations

import torch.distributed as dist
from _fsdp import parse_args, start, train
from torch.distributed.device_mesh import init_device_mesh

SHARDS = 2
"""Ranks that share one copy of the weights."""

if __name__ == "__main__":
    args = parse_args(__doc__)
    device = start(args.seed)
    world = dist.get_world_size()
    if world % SHARDS:
        raise SystemExit(f"nproc_per_node={world}: must be a multiple of {SHARDS}, the ranks that share one copy")
    train(init_device_mesh(device, (world // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard")), args)
