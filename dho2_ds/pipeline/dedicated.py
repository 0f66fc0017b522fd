"""Mode ``dedicated`` on the training side: when a job starts, and at which step its basis is swapped in.

A refresh that is due becomes a job when curvature ranks are connected on all training ranks and none is under way: a
snapshot is handed to the bridge, and training goes on. Whether the result has come to every rank rides along in the sum
that a step makes anyway; all ranks swap at the same step.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dho2_ds.base import BaseOptimizer
from dho2_ds.config import CurvatureConfig, DHO2Config
from dho2_ds.curvature.eigenbasis import Eigenbasis
from dho2_ds.curvature.precision import Autocast
from dho2_ds.curvature.refresh import Order, Outcome, Refresh
from dho2_ds.hosts.base import Host
from dho2_ds.monitor import is_main, logger
from dho2_ds.pipeline.batches import encode
from dho2_ds.pipeline.bridge import Bridge, State
from dho2_ds.pipeline.meeting import open_bridge
from dho2_ds.pipeline.payload import pack, spaces
from dho2_ds.pipeline.plan import fingerprint
from dho2_ds.pipeline.session import Job
from dho2_ds.pipeline.wire import dtype_name

RETRY = 10
"""Steps from one look for curvature ranks to the next, while a refresh is due and there are none."""

_BAD, _LOST = 2.0**20, -(2.0**40)  # more than there are ranks, so that one float64 sum counts all three
_FLAGS = {State.FLYING: 0.0, State.DONE: 1.0, State.BAD: 1.0 + _BAD, State.LOST: _LOST, State.IDLE: _LOST}
"""What a rank adds to the sum: all have settled when the sum, modulo ``_BAD``, is the number of ranks."""

_PAUSE = 0.05  # seconds between two looks in a replay


@dataclass
class _Flight:
    born: int
    bytes: int
    total: Tensor | None = None


class Dedicated:
    """The jobs of one optimizer.

    Args:
        config: the optimizer's settings.

    Attributes:
        lost: jobs and sessions that ended because the curvature side was gone. swaps: (step of the snapshot, step at
            which its basis was swapped in), all so far. saved: the operator's state after the last job.
    """

    def __init__(self, config: DHO2Config) -> None:
        self._config = config
        self._bridge: Bridge | None = None
        self._flight: _Flight | None = None
        self._next_try, self._complained = 0, False
        self._number = 0
        self.saved: tuple[float, float, float] | None = None
        self.lost = 0
        self.swaps: list[tuple[int, int]] = []

    @property
    def _settings(self) -> CurvatureConfig:
        return self._config.curvature

    @property
    def flying(self) -> bool:
        """True while a job is under way."""
        return self._flight is not None

    def stats(self) -> dict[str, Any]:
        """See :meth:`dho2_ds.DHO2.curvature_stats`."""
        return {
            "connected": self._bridge is not None and self._bridge.session != 0,
            "in_flight": self.flying,
            "lost": self.lost,
            "swaps": list(self.swaps),
        }

    @property
    def timings(self) -> list[tuple[str, int, float, float]]:
        """Of this rank's transfers; see :class:`Bridge`."""
        return list(self._bridge.timings) if self._bridge is not None else []

    def open(self, host: Host, base: BaseOptimizer) -> None:
        """Let curvature ranks in that hold what this host holds. A collective the first time."""
        if self._bridge is None:
            self._bridge = open_bridge(self._settings)
            weakref.finalize(self, self._bridge.close)  # at the latest when the process ends
        self.abandon()
        self._bridge.describe(spaces(host, base), fingerprint(self._config, host))

    def abandon(self) -> None:
        """What is under way is not wanted any more."""
        if self._flight is not None and self._bridge is not None:
            self._flight = None
            self._bridge.drop()

    # -- starting -------------------------------------------------------------------------------------------------

    def start(
        self,
        host: Host,
        base: BaseOptimizer,
        groups: list[dict[str, Any]],
        prepare: Callable[[], tuple[Order, Tensor, Any]],
        batches: Callable[[], list[Any] | None],
        in_use: int | None,
    ) -> bool:
        """Start a job at the present weights, if every training rank has its links. Collective.

        Args:
            prepare: gives the order, the start vector's hint and P^(1/2) (None: the identity).
            batches: this rank's micro-batches, None where the curvature ranks have data of their own.
            in_use: the step at which the basis in use was computed.
        """
        assert self._bridge is not None and self._flight is None
        tries = math.ceil(self._settings.timeout / _PAUSE) if self._replays else 1
        if not any(self._all_connected(host, pause=attempt > 0) for attempt in range(tries)):
            if self._replays:
                raise RuntimeError(f"no curvature ranks within curvature.timeout={self._settings.timeout} seconds")
            return False
        order, hint, root = prepare()
        tensors: list[Tensor] = []

        def encoded() -> tuple[list[Any], list[Tensor]] | None:
            found = batches()
            try:
                return None if found is None else ([encode(batch, tensors) for batch in found], tensors)
            except TypeError as error:
                raise RuntimeError(
                    f"curvature.mode='dedicated': the arguments of the model's forward hold {error}, which cannot be "
                    "sent to the curvature ranks; pass loss_fn=... and data=... to dho2_ds.attach"
                ) from error

        batch = host.agreement.together(encoded, "a batch cannot be sent; see another rank's error")
        parts = pack(host, base, groups, hint, rooted=root is not None, dtype=order.dtype, device=order.device)
        staged, ready = stage([part for _, _, part in parts])
        if batch is not None:
            copies, loaded = stage([t.clone() for t in tensors])  # training may write into its batch
            batch = (batch[0], copies)
        self._number += 1
        item = torch.finfo(order.dtype).bits // 8
        self._bridge.start(
            Job(
                number=self._number,
                order={
                    "order": {"k": order.k, "budget": order.budget, "growth_guess": order.growth_guess,
                              "born": order.born, "dtype": dtype_name(order.dtype)},
                    "groups": [_plain(group) for group in groups],
                    "autocast": [[d, dtype_name(t)] for d, t in Autocast().active],
                    "saved": self.saved,
                    "in_use": in_use,
                    "loss_scale": host.loss_scale,
                },
                parts=[(name, space, cpu) for (name, space, _), cpu in zip(parts, staged, strict=True)],
                staged=(lambda: (ready(), loaded())[0]) if batch is not None else ready,
                batch=batch,
                rows=order.k,
            )
        )  # fmt: skip
        held = sum(t.numel() * t.element_size() for _, _, t in parts) + order.k * host.layout.numel * item
        self._flight, self._complained = _Flight(order.born, held), False
        return True

    def _all_connected(self, host: Host, *, pause: bool) -> bool:
        """Whether every training rank has its links to the same curvature ranks. One all-reduce."""
        if pause:
            time.sleep(_PAUSE)
        assert self._bridge is not None
        session = self._bridge.session
        number = torch.tensor([float(session)], dtype=torch.float64, device=host.agreement.device)
        return host.agreement.agree(session != 0, number)

    def may_try(self, step: int) -> bool:
        """Whether to look for curvature ranks at this step; the same on all ranks."""
        return self._flight is None and step >= self._next_try

    def missed(self, step: int) -> None:
        """No curvature ranks: look again later, and say so once."""
        self._next_try = step + RETRY
        if not self._complained and is_main():
            logger.warning(
                "step %d: a refresh is due and no curvature ranks are connected; training goes on with what it has "
                "until some are",
                step,
            )
        self._complained = True

    # -- arriving -------------------------------------------------------------------------------------------------

    def before_step(self, host: Host) -> None:
        """Let this rank's state ride along in the step's own sum, if that is over all ranks."""
        if self._flight is not None and host.agreement is host.reducer and not self._replays:
            host.reducer.passenger = self._flag

    def after_step(self, host: Host, base: BaseOptimizer, step: int) -> Outcome | None:
        """At the end of training step ``step``: the outcome to install now, on all ranks alike.

        Without a passenger (no basis yet, replicas): one all-reduce of a scalar while a job is under way. The sum is
        read one step later, so that no accelerator is waited for.
        """
        flight, bridge = self._flight, self._bridge
        if flight is None or bridge is None:
            return None
        if self._replays:
            total: float | None = self._replayed(host, flight, step)
        else:
            previous, flight.total = flight.total, self._sum(host)
            total = None if previous is None else float(previous)
        if total is None or not _all_settled(total, host):
            return None
        self._flight = None
        if total < 0:
            self._lost(step)
            return None
        if total >= _BAD:
            reason = bridge.reason or "another rank's part of the result is bad; see its log"
            bridge.forget()
            return None, Refresh(False, reason)
        vectors, result = bridge.take()
        self.saved = result["saved"]
        report = replace(result["report"], transient_bytes=flight.bytes)  # ours, not a curvature rank's
        values = torch.zeros(self._config.num_eigenvectors + 2, dtype=torch.float64)
        values[: len(report.eigenvalues)] = torch.tensor(report.eigenvalues, dtype=torch.float64)
        values[-2], values[-1] = report.next_eigenvalue, float(report.accepted)
        if not host.agreement.agree(True, values.to(host.agreement.device)):
            return None, Refresh(False, "ranks disagree", hvps=report.hvps)
        self.swaps.append((flight.born, step))
        if vectors is None:
            return None, report
        vectors = vectors.to(base.device)
        return Eigenbasis(vectors, values[: vectors.shape[0]].clone(), report.next_eigenvalue, flight.born), report

    @property
    def _flag(self) -> float:
        assert self._bridge is not None
        return _FLAGS[self._bridge.state]

    def _sum(self, host: Host) -> Tensor:
        arrived = host.reducer.passed
        host.reducer.passenger, host.reducer.passed = None, None
        if arrived is not None:
            return arrived
        return host.agreement.sum_(torch.tensor([self._flag], dtype=torch.float64, device=host.agreement.device))

    @property
    def _replays(self) -> bool:
        return self._settings.swaps is not None

    def _replayed(self, host: Host, flight: _Flight, step: int) -> float | None:
        assert self._bridge is not None and self._settings.swaps is not None
        if [flight.born, step] not in [list(pair) for pair in self._settings.swaps]:
            return None
        self._bridge.wait(self._settings.timeout)
        total = float(self._sum(host))
        if not _all_settled(total, host):
            raise RuntimeError(f"step {step}: no basis to swap in within curvature.timeout={self._settings.timeout} s")
        return total

    def _lost(self, step: int) -> None:
        """A rank has lost its curvature ranks: all give the job up and wait for new ones."""
        assert self._bridge is not None
        reason = self._bridge.reason or "see another rank's log"
        self._bridge.drop()
        self.lost += 1
        self._next_try = step + RETRY
        if is_main():
            logger.warning(
                "step %d: the curvature ranks were lost (%s); training goes on with the basis it has until they are "
                "back",
                step,
                reason,
            )
        self._complained = True


def _all_settled(total: float, host: Host) -> bool:
    """Whether every rank knows how the job has ended, or one knows that it is lost."""
    return total < 0 or total % _BAD == host.agreement.world_size


def stage(tensors: list[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    """Copies on the CPU, and what to call before reading them.

    From CUDA they go through pinned memory on a stream of their own, so that training's stream does not wait; tensors
    that are on the CPU already are returned as they are.
    """
    device = next((t.device for t in tensors if t.device.type != "cpu"), None)
    if device is None:
        return tensors, lambda: None
    if device.type != "cuda":
        return [t.cpu() for t in tensors], lambda: None
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    copies = []
    with torch.cuda.stream(stream):
        for tensor in tensors:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            copies.append(copy.copy_(tensor, non_blocking=True))
            if tensor.is_cuda:
                tensor.record_stream(stream)
    return copies, stream.synchronize


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """What curvature needs of a param group: numbers only."""
    found: dict[str, Any] = {}
    for key in ("lr", "eps", "betas", "momentum", "weight_decay"):
        if key in group:
            value = group[key]
            found[key] = [float(v) for v in value] if isinstance(value, (list, tuple)) else float(value)
    return found
