"""What of the training side's state a refresh needs: weights, start vector, and the preconditioner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dho2_ds.base import BaseOptimizer
from dho2_ds.hosts.base import Host
from dho2_ds.pipeline.session import WEIGHTS
from dho2_ds.sharding.layout import Layout
from dho2_ds.soap_base import SoapOptimizer

STATE = "state"

Part = tuple[str, str, Tensor]
"""(name, space, local vector)"""


def spaces(host: Host, base: BaseOptimizer) -> dict[str, Layout]:
    """The layouts, of this rank, in which :func:`pack` has vectors."""
    found = {WEIGHTS: host.layout}
    if isinstance(base, SoapOptimizer):
        found[STATE] = base.state_layouts[host.reducer.rank]
    return found


def pack(
    host: Host,
    base: BaseOptimizer,
    groups: Sequence[dict[str, Any]],
    hint: Tensor,
    *,
    rooted: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Part]:
    """Copies of this rank's share, which training may go on without.

    Diagonal bases send P^(1/2) as a vector, SOAP its state, of which P^(1/2) is made block by block. n/P elements each.
    """
    parts = [("weights", WEIGHTS, host.weights(dtype, device)), ("hint", WEIGHTS, hint)]
    if rooted and isinstance(base, SoapOptimizer):
        parts.append(("state", STATE, base.pack().clone()))
    elif rooted:
        ones = torch.ones(host.layout.numel, dtype=dtype, device=device)
        parts.append(("root", WEIGHTS, base.root_(groups, ones)))
    return parts


def unpack_root(
    base: BaseOptimizer, groups: Sequence[dict[str, Any]], received: Mapping[str, Tensor]
) -> Callable[[Tensor], Tensor]:
    """P^(1/2) on a curvature rank, in place on local vectors."""
    if "root" in received:
        diagonal = received["root"]
        return lambda x: x.mul_(diagonal)
    if "state" in received:
        assert isinstance(base, SoapOptimizer)
        base.buffer.copy_(received["state"])
        base.unpack()
        return lambda x: base.root_(groups, x)
    return lambda x: x
