"""When a refresh is due."""

from __future__ import annotations

from collections.abc import Iterable


class Schedule:
    """After step ``max(1, warmup_steps)``, and from there on at distances that double from ``first_interval`` up to
    ``interval``.

    Args:
        warmup_steps, interval, first_interval: see :class:`dho2_ds.CurvatureConfig`.
        replay: after exactly these steps instead.

    Attributes:
        interval: may be changed before the first step.
        due_since: step at which the waiting refresh fell due, None when none is waiting.
    """

    def __init__(
        self, warmup_steps: int, interval: int, first_interval: int | None = None, replay: Iterable[int] | None = None
    ) -> None:
        self.first, self.interval, self._distance = max(1, warmup_steps), interval, first_interval
        self._replay = None if replay is None else frozenset(replay)
        self.due_since: int | None = None

    def advance(self, step: int, *, has_source: bool) -> None:
        """Note that ``step`` steps are done.

        Raises:
            RuntimeError: a refresh is due and cannot happen, because no loss is known or because the attached model
                was never called in training; going on would be a silent first-order run.
        """
        if self.due_since is not None and step > self.due_since:
            raise RuntimeError(
                f"a curvature refresh has been due since step {self.due_since}, but no training forward of the "
                "attached model was seen (it must be in train() mode with gradients enabled, and be called itself, "
                "not its inner module); attach the module that the training loop calls"
            )
        if not self._falls_due(step):
            return
        if not has_source:
            raise RuntimeError(
                f"step {step}: a curvature refresh is due and no loss is known; call "
                "dho2_ds.attach(model, optimizer) if the model returns its loss, else "
                "dho2_ds.attach(model, optimizer, loss_fn=..., data=...)"
            )
        self.due_since = step

    def _falls_due(self, step: int) -> bool:
        if self._replay is not None:
            return step in self._replay
        due, distance = self.first, self._distance or self.interval
        while due < step and distance < self.interval:
            due, distance = due + distance, 2 * distance
        return step >= due and (step - due) % self.interval == 0

    def done(self) -> None:
        """The waiting refresh has begun."""
        self.due_since = None
