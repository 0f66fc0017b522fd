"""Curvature on a process of its own: the last one launched computes eigenvectors while the others train a GPT.

deepspeed --num_gpus 3 examples/train_dedicated.py --deepspeed_config configs/zero2_dedicated.json
torchrun --nproc_per_node 3 examples/train_dedicated.py
mpirun -n 3 python examples/train_dedicated.py

The script is char_gpt.py with another default config. Two worlds are made of one launch by `"mode": "dedicated"` in it
and by `dho2_ds.init_distributed(config)`, which `start` calls; every example here runs with such a config.
"""

from __future__ import annotations

from _common import library_text, parse_args, read_config, start, train
from char_gpt import CharGPT

if __name__ == "__main__":
    args = parse_args(__doc__, batch_size=16, config="zero2_dedicated.json")
    place = start(args.seed, args.local_rank, read_config(args))
    train(CharGPT(block=64).to(place.device), library_text(block=64).to(place.device), args, place)
