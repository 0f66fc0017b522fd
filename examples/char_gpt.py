"""A small character GPT on the source text of Python's own standard library: real text, nothing to download.

deepspeed --num_gpus 2 examples/char_gpt.py --deepspeed_config configs/zero3_bf16.json
torchrun --nproc_per_node 2 examples/char_gpt.py --deepspeed_config configs/zero2.json
torchrun --nproc_per_node 2 examples/char_gpt.py --ddp
"""

from __future__ import annotations

import torch
from _common import library_text, parse_args, read_config, start, train
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention


class Block(nn.Module):
    """Pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    """GPT over the 128 ASCII codes. `forward` takes rows of block + 1 codes and returns the loss in nats."""

    def __init__(self, block: int, width: int = 64, heads: int = 4, layers: int = 2, codes: int = 128) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(codes, width), nn.Embedding(block, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, codes)

    def forward(self, text: Tensor) -> Tensor:
        inputs, targets = text[:, :-1], text[:, 1:]
        positions = torch.arange(inputs.shape[1], device=text.device)
        hidden = self.blocks(self.embed(inputs) + self.position(positions))
        return cross_entropy(self.head(self.norm(hidden)).float().flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    args = parse_args(__doc__, batch_size=16)
    place = start(args.seed, args.local_rank, read_config(args))
    train(CharGPT(block=64).to(place.device), library_text(block=64).to(place.device), args, place)
