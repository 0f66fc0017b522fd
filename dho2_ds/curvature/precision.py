"""Autocast belongs to the user's loss, not to our arithmetic.

A refresh runs in a hook of the training forward, which may stand inside ``torch.autocast``. There a matrix product of
Lanczos' would be made in 16 bits, and orthogonality lost.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from dho2_ds.hosts.base import Loss

_DEVICES = ("cpu", "cuda")


class Autocast:
    """The autocast regions that were active when this was made.

    Attributes:
        active: (device type, dtype) of each.
    """

    def __init__(self) -> None:
        self.active = [(d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d)]

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """The same regions again."""
        with contextlib.ExitStack() as stack:
            for device, dtype in self.active:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """No autocast."""
        with contextlib.ExitStack() as stack:
            for device, _ in self.active:
                stack.enter_context(torch.autocast(device, enabled=False))
            yield

    def losses(self, losses: Sequence[Loss], scale: float = 1.0) -> list[Loss]:
        """Losses that are evaluated under these regions, times ``scale``."""

        def under(loss: Loss) -> Loss:
            def evaluate(model: nn.Module) -> Tensor:
                with self.on():
                    value = loss(model)
                return value.float() * scale if scale != 1.0 and isinstance(value, Tensor) else value

            return evaluate

        return [under(loss) for loss in losses] if self.active or scale != 1.0 else list(losses)
