"""Hugging Face Trainer with DHO2: the DeepSpeed JSON names it, nothing else does. MiniLM learns to judge reviews.

deepspeed --num_gpus 2 examples/hf_trainer.py --deepspeed configs/hf_zero2.json --output_dir out --max_steps 100
deepspeed --num_gpus 2 examples/hf_trainer.py --deepspeed configs/hf_zero2.json --output_dir out --max_steps 150 \\
    --resume_from_checkpoint out/checkpoint-100

Every field of TrainingArguments is an option. Needs `pip install 'dho2-ds[deepspeed,hf]'`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from _common import skip_shm_op
from _hf import minilm, reviews
from transformers import EvalPrediction, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class Task:
    """Smaller ones are for trying things out."""

    layers: int = 6
    rows: int | None = None
    length: int = 64


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


if __name__ == "__main__":
    skip_shm_op()
    task, args = HfArgumentParser((Task, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    trainer = Trainer(
        model=minilm(task.layers),
        args=args,
        train_dataset=reviews("train", task.rows, task.length),
        eval_dataset=reviews("test", task.rows, task.length),
        compute_metrics=accuracy,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.log_metrics("eval", trainer.evaluate())
    torch.distributed.destroy_process_group()
