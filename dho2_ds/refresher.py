"""When the eigenbasis is recomputed and how: at once before a training forward, one product every few steps, or on
curvature ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dho2_ds.base import BaseOptimizer
from dho2_ds.checkpoint import Record
from dho2_ds.config import ConfigError, DHO2Config
from dho2_ds.curvature.hvp import FiniteDifference
from dho2_ds.curvature.refresh import Order, Outcome, Refresh, affordable_interval, lanczos_budget, refresh
from dho2_ds.curvature.schedule import Schedule
from dho2_ds.curvature.spread import SpreadRefresh
from dho2_ds.eigenspace import Eigenspace
from dho2_ds.hosts.base import Host, Loss
from dho2_ds.monitor import chosen_route, in_vain_line, is_main, logger, refresh_line
from dho2_ds.pipeline.dedicated import Dedicated

Groups = list[dict[str, Any]]

IN_VAIN = 3
"""Rejected refreshes in a row after which it is said what to change."""


class Source(Protocol):
    """Where curvature losses come from; :func:`dho2_ds.attach` makes it."""

    def losses(self) -> Sequence[Loss]:
        """This rank's losses of one refresh."""

    def arguments(self) -> list[Any] | None:
        """What curvature ranks need to evaluate this rank's losses; None: nothing, they have data of their own."""


@dataclass(frozen=True)
class Moment:
    """Where training stands when curvature is to be computed.

    Attributes:
        host, base: the engine and the base optimizer on its shards. groups: the current param groups.
        step: training steps taken. source: gives this rank's curvature losses.
    """

    host: Host
    base: BaseOptimizer
    groups: Groups
    step: int
    source: Source


class Refresher:
    """Keeps the schedule, carries refreshes out, and installs what they find.

    Args:
        config: the optimizer's settings. space: where accepted bases go.

    Attributes:
        totals: accepted and rejected refreshes, and products, so far. last: the latest report.
        busy: True while the model is evaluated: forwards seen meanwhile are the refresh's own.
        dedicated: the jobs on curvature ranks, in that mode.
    """

    def __init__(self, config: DHO2Config, space: Eigenspace) -> None:
        self._config, self._space = config, space
        settings = config.curvature
        replay = None if settings.swaps is None else (born for born, _ in settings.swaps)
        # SOAP's first gradient makes its bases and moves no matrix: before the second it has no preconditioner there.
        warmup = max(settings.warmup_steps, 2) if config.base == "soap" else settings.warmup_steps
        self._schedule = Schedule(warmup, settings.interval, settings.first_interval, replay)
        self.dedicated = Dedicated(config) if settings.mode == "dedicated" else None
        self._wanted = False  # a job for curvature ranks, as soon as there are any that are free
        self._finite_difference: FiniteDifference | None = None
        self._saved: tuple[float, float, float] | None = None
        self._job: SpreadRefresh | None = None
        self.totals = {"refreshes": 0, "rejected": 0, "hvps": 0}
        self._in_vain = 0
        self.last: Refresh | None = None
        self.busy = False

    def afford(self, numel: int) -> None:
        """Set the interval for a model of this size, by ``curvature.budget``."""
        interval = affordable_interval(self._config.curvature, self._config.num_eigenvectors, numel)
        oldest = self._config.curvature.max_age
        if self._config.curvature.budget is not None and oldest is not None and interval >= oldest:
            raise ConfigError(
                f"curvature.max_age={oldest}: must be > {interval}, the interval by curvature.budget; raise one of them"
            )
        self._schedule.interval = self._space.interval = interval

    @property
    def due(self) -> bool:
        """True when the next training forward will do some of a refresh's work first."""
        return self._schedule.due_since is not None or self._job is not None or self._wanted

    def advance(self, step: int, *, has_source: bool) -> None:
        """Note that ``step`` steps are done; see :meth:`Schedule.advance`. A refresh that falls due while one is under
        way is left out."""
        if self._job is not None and step > self._job.next_step:
            self._schedule.due_since = self._job.next_step  # no forward came: the schedule's error says what to do
        self._schedule.advance(step, has_source=has_source)
        if self._job is not None:
            self._schedule.done()

    def turn(self, moment: Moment) -> None:
        """What is to be done before the training forward after ``moment.step`` steps. Collective."""
        if self._config.curvature.mode == "inline":
            if self.due:
                self.refresh(moment)
            return
        if self.dedicated is not None:
            self._order(moment, self.dedicated)
            return
        if self._job is None and self._schedule.due_since is not None:
            losses = self._losses(moment)
            order, hint, root = self._prepare(moment)
            self._job = SpreadRefresh(
                moment.host,
                losses,
                moment.base.frozen_root(moment.groups, moment.host.layout.numel) if root is not None else (lambda x: x),
                order,
                self._difference(moment.host),
                every=self._config.curvature.spread_every,
                hint=hint,
                old=self._space.basis,
            )
            self._schedule.done()
        if self._job is not None and moment.step >= self._job.next_step:
            job, self._job = self._job, None  # an error ends the job
            outcome = self._evaluate(lambda: job.turn(moment.step))
            if outcome is None:
                self._job = job
            else:
                self._finish(moment.host, moment.groups, moment.step, outcome)

    def _order(self, moment: Moment, dedicated: Dedicated) -> None:
        """Start the job that is due, if curvature ranks are there and free."""
        self._wanted = self._wanted or self._schedule.due_since is not None
        self._schedule.done()
        if not self._wanted or not dedicated.may_try(moment.step):
            return
        started = dedicated.start(
            moment.host,
            moment.base,
            moment.groups,
            lambda: self._prepare(moment),
            moment.source.arguments,
            self._space.basis.born if self._space.basis is not None else None,
        )
        self._wanted = not started
        if not started:
            dedicated.missed(moment.step)

    def before_step(self, host: Host) -> None:
        """Before the base step of every training step."""
        if self.dedicated is not None:
            self.dedicated.before_step(host)

    def after_step(self, host: Host, base: BaseOptimizer, groups: Groups, step: int) -> Refresh | None:
        """After the ``step``-th training step: install what has come from the curvature ranks. Collective."""
        outcome = self.dedicated.after_step(host, base, step) if self.dedicated is not None else None
        return None if outcome is None else self._finish(host, groups, step, outcome)

    def refresh(self, moment: Moment) -> Refresh:
        """Recompute the eigenbasis now, at the current weights; a job under way is given up. Collective."""
        self._job = None
        if self.dedicated is not None:
            self.dedicated.abandon()
        losses = self._losses(moment)
        order, hint, root = self._prepare(moment)
        outcome = self._evaluate(
            lambda: refresh(
                moment.host,
                losses,
                root if root is not None else (lambda x: x),
                order,
                self._difference(moment.host),
                route=chosen_route(self._config.curvature)[0],
                hint=hint,
                old=self._space.basis,
            )
        )
        self._schedule.done()
        return self._finish(moment.host, moment.groups, moment.step, outcome)

    def _losses(self, moment: Moment) -> Sequence[Loss]:
        """This rank's losses; raises on every rank if one of them has none. One all-reduce."""
        elsewhere = "no curvature batch on another rank; see that rank's error"
        return moment.host.agreement.together(moment.source.losses, elsewhere)

    def _evaluate(self, work: Callable[[], Any]) -> Any:
        self.busy = True
        try:
            with torch.no_grad():
                return work()
        finally:
            self.busy = False

    def _difference(self, host: Host) -> FiniteDifference:
        if self._finite_difference is None:
            self._finite_difference = FiniteDifference.for_dtype(
                host.compute_dtype, chosen_route(self._config.curvature)[0]
            )
            self._finite_difference.resume(self._saved)
        return self._finite_difference

    @torch.no_grad()
    def _prepare(self, moment: Moment) -> tuple[Order, Tensor, Callable[[Tensor], Tensor] | None]:
        """The order, the start vector's hint and P^(1/2) (None: the identity)."""
        host, base, groups = moment.host, moment.base, moment.groups
        self._difference(host)  # what it refuses under autocast is refused on the training ranks too
        old, k = self._space.basis, self._config.num_eigenvectors
        rooted = self._space.update.roots > 0
        lr = max(float(group["lr"]) for group in groups)
        hint = torch.zeros(host.layout.numel, dtype=base.dtype, device=base.device)
        for chunk in base.chunks(groups):
            direction = chunk.remembered()
            hint[chunk.start : chunk.stop] = chunk.root(direction) if rooted else direction
        order = Order(
            k=k,
            budget=lanczos_budget(self._config.curvature.lanczos_steps, k, host.numel),
            dtype=base.dtype,
            device=base.device,
            born=moment.step,
            growth_guess=float(old.eigenvalues.abs().max()) if old is not None else 2.0 / (lr or 1),
        )
        return order, hint, (lambda x: base.root_(groups, x)) if rooted else None

    def _finish(self, host: Host, groups: Groups, step: int, outcome: Outcome) -> Refresh:
        found, report = outcome
        age = self._space.age(step)
        if found is not None:
            self._space.install(host, found, groups)
        self.totals["refreshes" if report.accepted else "rejected"] += 1
        self.totals["hvps"] += report.hvps
        self.last = report
        if is_main():
            line = refresh_line(step, report, self._space.lr_scale, age)
            logger.info(line) if report.accepted else logger.warning(line)
        self._in_vain = 0 if report.accepted else self._in_vain + 1
        if self._in_vain == IN_VAIN and is_main():
            logger.warning(in_vain_line(step, IN_VAIN, age))
        return report

    # -- checkpoints --------------------------------------------------------------------------------------------

    def describe(self, record: Record, step: int) -> None:
        """Fill in the schedule's and the operator's part of a record. A job under way is not saved: it starts again
        after a resume."""
        due, fd = self._schedule.due_since, self._finite_difference
        flying = self._job is not None or self._wanted or (self.dedicated is not None and self.dedicated.flying)
        record.due_since = step if flying else -1 if due is None else due
        for key, total in self.totals.items():
            setattr(record, key, total)
        if fd is not None:
            record.tau, record.gradient_norm, record.growth = fd.tau, fd.gradient_norm, fd.growth
        elif self.dedicated is not None and self.dedicated.saved is not None:
            record.tau, record.gradient_norm, record.growth = self.dedicated.saved
        elif self._saved is not None:
            record.tau, record.gradient_norm, record.growth = self._saved

    def resume(self, record: Record | None) -> None:
        """Go on from a record, or from nothing."""
        self._job, self._finite_difference, self._schedule.due_since = None, None, None
        self._wanted = False
        self._saved, self.last, self.totals = None, None, dict.fromkeys(self.totals, 0)
        if record is not None:
            self._schedule.due_since = int(record.due_since) if record.due_since >= 0 else None
            self.totals = {key: int(getattr(record, key)) for key in self.totals}
            self._saved = (record.tau, record.gradient_norm, record.growth)
        if self.dedicated is not None:
            self.dedicated.abandon()
            self.dedicated.saved = self._saved

    def give_up(self) -> None:
        """The engine's layout changed under a job: drop it; the next one falls due in its time."""
        self._job = None
