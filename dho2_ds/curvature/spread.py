"""Mode ``spread``: a refresh at a frozen snapshot of the weights, one Hessian-vector product every few steps.

No training step waits for more than one product (two gradients), and the eigenpairs are those of the snapshot: the
engine's weights move on, so every evaluation is displaced by (snapshot - weights), which is one vector more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dho2_ds.curvature.eigenbasis import Eigenbasis
from dho2_ds.curvature.hvp import FiniteDifference, Root
from dho2_ds.curvature.precision import Autocast
from dho2_ds.curvature.refresh import Order, Outcome, refresh_process
from dho2_ds.hosts.base import Host, Loss, RandomState


class SpreadRefresh:
    """One refresh under way.

    Args:
        host, losses, order, hint, old: see :func:`dho2_ds.curvature.refresh.refresh`; the batch is kept till the end.
        root: P^(1/2) as it is now, whatever the base optimizer does meanwhile.
        finite_difference: step-size state kept between refreshes.
        every: steps from one product to the next.

    Attributes:
        next_step: the first step after which :meth:`turn` may be called.

    Memory beside the Lanczos vectors: the snapshot, what ``root`` holds, and in a product two vectors of n/P more.
    """

    def __init__(
        self,
        host: Host,
        losses: Sequence[Loss],
        root: Root,
        order: Order,
        finite_difference: FiniteDifference,
        *,
        every: int,
        hint: Tensor | None,
        old: Eigenbasis | None,
    ) -> None:
        self._host, self._every = host, every
        self._losses = Autocast().losses(losses, finite_difference.scale_for(host.scales_loss))
        self.next_step = order.born
        self._snapshot = host.weights(order.dtype, order.device)
        self._random = RandomState(host.module)
        self._process = refresh_process(host, self._accumulate, root, order, finite_difference, hint=hint, old=old)
        self._work: Callable[[], Tensor] | None = None
        self._shift: Tensor | None = None

    def turn(self, step: int) -> Outcome | None:
        """Make one product, at a step boundary. Collective.

        Returns:
            None while there is more to do, else what the refresh found.
        """
        with Autocast().off():
            return self._turn(step)

    def _turn(self, step: int) -> Outcome | None:
        try:
            if self._work is None:
                self._work = next(self._process)
            self._shift = self._host.weights(self._snapshot.dtype, self._snapshot.device).neg_().add_(self._snapshot)
            present = RandomState(self._host.module)
            self._random.restore()  # every product of the refresh is one function of the weights: same dropout
            try:
                with self._host.evaluation():
                    product = self._work()
            finally:
                present.restore()
                self._shift = None
            self._work = self._process.send(product)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
        self.next_step = step + self._every
        return None

    def _accumulate(self, direction: Tensor | None, eps: float, out: Tensor) -> None:
        assert self._shift is not None
        displacement = self._shift if direction is None else torch.add(self._shift, direction, alpha=eps)
        self._host.accumulate(self._losses, displacement, 1.0, out)
