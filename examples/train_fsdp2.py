"""FSDP2: a character GPT on the source text of Python's own standard library, weights and eigenbasis sharded alike.

torchrun --nproc_per_node 2 examples/train_fsdp2.py --save checkpoint
torchrun --nproc_per_node 3 examples/train_fsdp2.py --resume checkpoint
torchrun --nproc_per_node 3 examples/train_fsdp2.py --curvature-ranks 1
"""

from __future__ import annotations

from _fsdp import parse_args, start, train
from torch.distributed.device_mesh import init_device_mesh

if __name__ == "__main__":
    args = parse_args(__doc__)
    place = start(args.seed, args.curvature_ranks)
    train(init_device_mesh(place.device.type, (place.world,), mesh_dim_names=("shard",)), args, place)
