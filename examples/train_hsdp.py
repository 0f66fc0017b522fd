"""HSDP: shards within a group of ranks (a node), replicas between groups; the same job as train_fsdp2.py.

Sums of the optimizer run within a group only: replicas take the same step from the same numbers.

torchrun --nproc_per_node 4 examples/train_hsdp.py --save checkpoint
torchrun --nproc_per_node 2 examples/train_fsdp2.py --resume checkpoint
"""

from __future__ import annotations

from _fsdp import parse_args, start, train
from torch.distributed.device_mesh import init_device_mesh

SHARDS = 2
"""Ranks that share one copy of the weights."""

if __name__ == "__main__":
    args = parse_args(__doc__)
    place = start(args.seed, args.curvature_ranks)
    if place.world % SHARDS:
        raise SystemExit(f"{place.role} ranks={place.world}: must be a multiple of {SHARDS}; start more or fewer")
    shape = (place.world // SHARDS, SHARDS)
    train(init_device_mesh(place.device.type, shape, mesh_dim_names=("replicate", "shard")), args, place)
