"""Pseudo-random vectors that are the same whatever the world size and the engine."""

from __future__ import annotations

import torch
from torch import Tensor

from dho2_ds.hosts.base import Host
from dho2_ds.hosts.fsdp import clean_name
from dho2_ds.shards import running_offsets

_STREAM = 1 << 40
"""Elements from the beginning of one probe to that of the next: more than a model has parameters."""


def rademacher(host: Host, dtype: torch.dtype, device: torch.device, *, probe: int = 0) -> Tensor:
    """(n_local,) local +-1 entries that depend on the number of the probe and the global element index only.

    Elements are counted over the parameters in an order that all engines agree on; padding is zero. A 64-bit mixing
    function of the index (the finaliser of splitmix64).
    """
    names = sorted(host.sizes, key=clean_name)  # which itself has them as the engine lists them
    vector = torch.zeros(host.layout.numel, dtype=dtype, device=device)
    begin = dict(zip(names, running_offsets(host.sizes[name] for name in names), strict=True))
    for segment in host.layout.segments:
        first = (probe * _STREAM + begin[segment.name] + segment.start + (1 << 63)) % (1 << 64) - (1 << 63)
        for low in range(0, segment.length, 1 << 20):
            length = min(1 << 20, segment.length - low)
            x = torch.arange(low, low + length, dtype=torch.int64, device=device).add_(first)  # wraps, as do products
            x = (x + 1) * -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
            x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
            x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685  # 0x94D049BB133111EB
            sign = ((x >> 63) & 1) * 2 - 1
            vector[segment.offset + low : segment.offset + low + length] = sign.to(dtype)
    return vector
