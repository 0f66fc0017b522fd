"""Sums over one process group, counted: the only collectives the optimizer step makes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

T = TypeVar("T")

MEETING = timedelta(seconds=60)
"""How long a rank waits for the others before a collective that only some ranks may have been asked for."""


def meet(group: ProcessGroup | None, what: str) -> None:
    """Wait until every rank of the group has come here, through the rendezvous store and without a collective.

    Raises:
        RuntimeError: a rank did not come within ``MEETING``; says which ranks to call ``what`` on.
    """
    store = dist.distributed_c10d._get_default_store()
    ranks = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    meeting = f"dho2/{what}/{'-'.join(map(str, ranks))}"
    _meetings[meeting] = _meetings.get(meeting, 0) + 1
    prefix = f"{meeting}/{_meetings[meeting]}"
    store.set(f"{prefix}/{dist.get_rank()}", "here")
    for rank in ranks:
        try:
            store.wait([f"{prefix}/{rank}"], MEETING)
        except (RuntimeError, dist.DistError) as error:
            store.delete_key(f"{prefix}/{dist.get_rank()}")  # the next attempt is the same meeting
            _meetings[meeting] -= 1
            raise RuntimeError(
                f"{what}: rank {rank} did not call it within {MEETING.seconds} s; it gathers state that is sharded "
                "over the ranks, so call it on every rank (and save the result on one)"
            ) from error


_meetings: dict[str, int] = {}


class Reducer:
    """All-reduces over one process group and counts them.

    Args:
        group: the group over which shards are summed, never over replicas; None means no communication at all.
        device: where the values of `agree` live when it gets no fingerprint; default the current CUDA device for NCCL,
            else CPU.

    Attributes:
        world_size: number of ranks summed over, 1 without a group.
        rank: this process's rank in the group, 0 without a group.
        calls: all-reduces issued so far; counted at world size 1 as well, so that one process can check the cost.
        elements: values they carried, **local**.
        passenger: a number of this rank that the next :meth:`sum_` sums along with its values; None: nothing.
        passed: the sum of the passengers after that, one float64 element; None: there was no sum since.

    Raises:
        ValueError: this process is not a member of `group`.
    """

    def __init__(self, group: ProcessGroup | None, device: torch.device | None = None) -> None:
        self.group = group
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        if self.world_size < 1 or self.rank < 0:
            raise ValueError("group: this process is not a member of it; pass a group it belongs to, or None")
        if device is None:
            nccl = group is not None and dist.get_backend(group) == "nccl"
            device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self.device = device
        self.calls = 0
        self.elements = 0
        self.passenger: float | None = None
        self.passed: Tensor | None = None

    def sum_(self, values: Tensor) -> Tensor:
        """Replace `values` by its sum over the group, in place.

        Args:
            values: any shape, same shape and dtype on every rank, **local** partial sums; float64 for accuracy is the
                caller's choice.

        Returns:
            `values` itself, now **global** and the same on every rank. Cost: one all-reduce; none if it is empty.
        """
        if values.numel() and self.passenger is not None:
            both = torch.cat([values.reshape(-1), values.new_full((1,), self.passenger)])
            self._all_reduce_(both, dist.ReduceOp.SUM)
            values.copy_(both[:-1].view(values.shape))
            self.passenger, self.passed = None, both[-1:]
        elif values.numel():
            self._all_reduce_(values, dist.ReduceOp.SUM)
        return values

    def agree(self, ok: bool, fingerprint: Tensor | None = None) -> bool:
        """Decide together: True iff every rank says ok and holds the same finite fingerprint, bit for bit.

        The answer is the same on every rank, so all of them take the same branch. Min and max of the fingerprint's bits
        come from one MIN over (bits, ~bits): ~ reverses the order of integers exactly, and unlike a MIN over floats it
        tells -0.0 from 0.0 and is not at the mercy of NaN.

        Args:
            ok: this rank's **local** verdict.
            fingerprint: values that must be equal on all ranks, any shape, the same number on every rank; compared as
                float64.

        Returns:
            The **global** verdict. Cost: one all-reduce of `1 + 2 * fingerprint.numel()` int64, and a host sync.
        """
        if fingerprint is None:
            bits = torch.empty(0, dtype=torch.int64, device=self.device)
        else:
            exact = fingerprint.detach().to(torch.float64).reshape(-1)
            ok = ok and bool(torch.isfinite(exact).all())
            bits = exact.contiguous().view(torch.int64)
        lowest = torch.cat([torch.tensor([int(ok)], device=bits.device), bits, ~bits])
        self._all_reduce_(lowest, dist.ReduceOp.MIN)
        low, high = lowest[1 : 1 + bits.numel()], ~lowest[1 + bits.numel() :]
        return bool(lowest[0] == 1) and torch.equal(low, high)

    def together(self, call: Callable[[], T], elsewhere: str) -> T:
        """Call on every rank, and raise on all if it raised on one: its error there, ``elsewhere`` on the others.

        Cost: one :meth:`agree` without a fingerprint.

        Raises:
            Exception: what ``call`` raised on this rank. RuntimeError: it raised on another.
        """
        result, error = None, None
        try:
            result = call()
        except Exception as caught:  # raised below, on every rank together
            error = caught
        if not self.agree(error is None):
            raise error or RuntimeError(elsewhere)
        return cast(T, result)

    def _all_reduce_(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        self.calls += 1
        self.elements += values.numel()
        if self.world_size == 1:
            return
        elsewhere = self.device.type == "cuda" and values.device.type != "cuda"  # NCCL, under CPU offload
        if values.is_contiguous() and not elsewhere:
            dist.all_reduce(values, op, group=self.group)
        else:  # Backends want contiguous memory; values are few, a copy is cheap.
            buffer = values.to(self.device if elsewhere else values.device, copy=True).contiguous()
            dist.all_reduce(buffer, op, group=self.group)
            values.copy_(buffer)
