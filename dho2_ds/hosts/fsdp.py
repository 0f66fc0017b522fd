"""What FSDP1 and FSDP2 share: gradients by an ordinary forward and backward of the user's wrapped model."""

from __future__ import annotations

import contextlib
import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dho2_ds.config import ConfigError
from dho2_ds.curvature.hvp import Exact, Root
from dho2_ds.hosts.base import Host, Loss, ModelState, scalar_loss
from dho2_ds.sharding.reduce import Reducer
from dho2_ds.shards import flat_like, flat_view, put_displaced

_WRAPPERS = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.|_fsdp_wrapped_module\.|_flat_param\b\.?")


def clean_name(name: str) -> str:
    """A parameter's name without what activation checkpointing, torch.compile and FSDP1 put into it."""
    return _WRAPPERS.sub("", name)


class ShardedModelHost(Host):
    """A model whose own forward and backward gather weights and reduce-scatter gradients.

    Subclasses set ``sizes``, ``layouts``, ``reducer`` and ``shards`` in ``__init__``. Gradients arrive averaged over
    all data-parallel ranks. A loss that fails on some ranks only leaves the others waiting in FSDP's own collectives,
    until these time out.
    """

    exact_refusal = (
        "FSDP frees the gathered weights during backward, so its graph cannot be differentiated twice; set "
        "curvature.hvp to 'auto' or 'finite_difference', which need ordinary forward and backward passes only"
    )

    _reuses_grads = False
    """True when a backward writes into the storage of gradients that were taken away from the parameters."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self._everyone = Reducer(dist.group.WORLD)
        self._backup: list[Tensor] = []
        self._state: ModelState | None = None

    @property
    def agreement(self) -> Reducer:
        return self._everyone

    def collect(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for index, shard in enumerate(self.shards):
            grad = self._local_grad(index)
            shard.param.grad = None if grad is None else grad.to(shard.param)
        return groups

    def publish(self) -> None:
        """Drop the references: the model gathers from the very storage the shards view."""
        for shard in self.shards:
            shard.param.grad = None

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        self._refuse_window()
        self._reshard()
        self._state = ModelState(self.module, clone_grads=self._reuses_grads)
        # The first micro-batch of an accumulation window runs with synchronisation off; ours must be reduced.
        switches = [(owner, key, getattr(owner, key)) for owner, key in self._sync_switches()]
        try:
            self._state.clear_grads()
            self._backup = [shard.param.clone() for shard in self.shards]
            for owner, key, _ in switches:
                setattr(owner, key, True)
            yield
        except BaseException:
            self._recover()
            raise
        finally:
            if self._backup:  # empty if memory ran out before anything was changed
                self._write(None, 0.0)
            for owner, key, value in switches:
                setattr(owner, key, value)
            self._state.clear_grads()
            self._state.restore()
            self._state, self._backup = None, []

    def accumulate(self, losses: Sequence[Loss], direction: Tensor | None, eps: float, out: Tensor) -> None:
        assert self._state is not None
        self._write(direction, eps)
        self._state.rewind()
        for loss in losses:
            self._state.clear_grads()
            with torch.enable_grad():
                scalar_loss(loss(self.module)).backward()  # type: ignore[no-untyped-call]
            for index, shard in enumerate(self.shards):
                grad = self._local_grad(index)
                if grad is not None:
                    target = out[shard.offset : shard.offset + shard.numel]
                    target.add_(flat_like(grad, shard.param), alpha=1.0 / len(losses))
        self._state.clear_grads()
        self.layout.zero_padding_(out)

    def exact(self, losses: Sequence[Loss], root: Root) -> Exact:
        raise ConfigError(f"curvature.hvp='exact': must not be used here: {self.exact_refusal}")

    @torch.no_grad()
    def _write(self, direction: Tensor | None, eps: float) -> None:
        """Put ``w + eps * direction`` (None: the saved w) into the shards; the next forward gathers them."""
        self._reshard()
        for shard, saved in zip(self.shards, self._backup, strict=True):
            if direction is None:
                shard.param.copy_(saved)
                continue
            step = direction[shard.offset : shard.offset + shard.numel]
            put_displaced(flat_view(shard.param), flat_view(saved), step, eps)

    def _refuse_window(self) -> None:
        """Refuse when gradients are not reduced yet, or when a backward has side effects.

        Raises:
            RuntimeError: naming what to do.
        """
        if self._unreduced():
            raise RuntimeError(
                "curvature evaluation amid a no_sync (or set_requires_gradient_sync(False)) window: gradients are not "
                "reduced yet and would be mixed up with those of the evaluation; refresh before the window's first "
                "backward"
            )
        for name, param in self.module.named_parameters():
            if getattr(param, "_post_accumulate_grad_hooks", None):
                raise RuntimeError(
                    f"parameter {clean_name(name)!r} has a post-accumulate-grad hook, which every curvature evaluation "
                    "would trigger; remove it (an optimizer step in the backward pass cannot be combined with DHO2)"
                )

    @abstractmethod
    def _unreduced(self) -> bool:
        """True while gradients of this rank's own batch wait for their reduction."""

    @abstractmethod
    def _sync_switches(self) -> Iterator[tuple[Any, str]]:
        """Attributes (owner, name) that are True when a backward reduces its gradients."""

    @abstractmethod
    def _reshard(self) -> None:
        """Free gathered weights: a forward without backward leaves them, and they would hide changes of the shards."""

    def _recover(self) -> None:
        """Bring the wrapper back to rest after an exception within a forward or backward."""

    @abstractmethod
    def _local_grad(self, index: int) -> Tensor | None:
        """Reduced gradient of shard ``index``, shaped like it; None without one."""
