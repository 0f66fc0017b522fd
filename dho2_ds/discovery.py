"""Working under DeepSpeed without a line in the user's script: being allowed, and finding the engine."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from dho2_ds import engine_checkpoint

if TYPE_CHECKING:
    from dho2_ds.optimizer import DHO2


def allow_under_deepspeed(cls: type) -> None:
    """Add the class to DeepSpeed's list of optimizers known to work under ZeRO, if DeepSpeed is loaded, and let its
    engines checkpoint the eigenbasis."""
    utils = sys.modules.get("deepspeed.runtime.zero.utils")
    supported = getattr(utils, "ZERO_SUPPORTED_OPTIMIZERS", None)
    if isinstance(supported, list) and cls not in supported:
        supported.append(cls)
    engine = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", None)
    if isinstance(engine, type):
        engine_checkpoint.install(engine)


def watch_for_engine(optimizer: DHO2) -> None:
    """Find the DeepSpeed engine that was built around ``optimizer`` at its first forward, and attach to it.

    A global forward pre-hook is the one public place where the engine passes by; it removes itself at the first match,
    when the optimizer is attached otherwise, has taken a step without an engine, or is gone.
    """
    reference = weakref.ref(optimizer)

    def hook(module: nn.Module, args: Any) -> None:
        owner = reference()
        if owner is None or owner.attached or owner.steps:
            handle.remove()
        elif module.__dict__.get("basic_optimizer") is owner:
            handle.remove()
            # Imported here because attaching is built on the optimizer, which calls this function.
            from dho2_ds.attaching import attach

            attach(module)

    handle = nn.modules.module.register_module_forward_pre_hook(hook)
