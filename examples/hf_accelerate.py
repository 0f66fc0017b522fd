"""Hugging Face Accelerate with DHO2: MiniLM learns to judge reviews, on DeepSpeed or on what else Accelerate has.

accelerate launch --num_processes 2 --use_deepspeed --deepspeed_config_file configs/hf_zero2.json \\
    examples/hf_accelerate.py
accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \\
    examples/hf_accelerate.py                              # Accelerate has FSDP on GPUs only
ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 examples/hf_accelerate.py      # DistributedDataParallel

Needs `pip install 'dho2-ds[deepspeed,hf]'`.
"""

from __future__ import annotations

import argparse

import torch
from _common import skip_shm_op
from _hf import minilm, reviews
from accelerate import Accelerator
from accelerate.utils import DistributedType, DummyOptim, InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader
from transformers import default_data_collator

import dho2_ds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=None, help="of the reviews; default: all 4,000")
    parser.add_argument("--length", type=int, default=64, help="tokens of a review")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--interval", type=int, default=50, help="steps from one refresh to the next")
    args = parser.parse_args()

    skip_shm_op()
    # Without a GPU and this, Accelerate takes each DeepSpeed process for the only one, and all get the same data.
    on_cpu = [] if torch.accelerator.is_available() else [InitProcessGroupKwargs(backend="gloo")]
    accelerator = Accelerator(kwargs_handlers=on_cpu)
    set_seed(0)
    model = minilm(args.layers)
    rows = reviews("train", args.rows, args.length)
    loader = DataLoader(rows, args.batch_size, shuffle=True, collate_fn=default_data_collator)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        optimizer = DummyOptim(model.parameters(), lr=args.lr, weight_decay=0.01)  # the JSON says which
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    else:
        curvature = {"warmup_steps": 10, "interval": args.interval}
        optimizer = dho2_ds.DHO2(model.parameters(), lr=args.lr, weight_decay=0.01, curvature=curvature)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        dho2_ds.attach(model, optimizer)

    model.train()
    step = 0
    while step < args.steps:
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.distributed_type != DistributedType.DEEPSPEED:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0 or step == args.steps:
                accelerator.print(f"step {step} loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
            if step == args.steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
