"""What the optimizer asks of a training engine."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dho2_ds.curvature.hvp import Exact, Root
from dho2_ds.sharding.layout import Layout
from dho2_ds.sharding.reduce import Reducer
from dho2_ds.shards import Shard, flat_like, flat_view, local_vector

Loss = Callable[[nn.Module], Tensor]
"""``loss(model)``: the scalar training loss of one curvature batch, computed by calling ``model``."""


class Host(ABC):
    """One training engine, seen as shards of one flat vector.

    Attributes:
        name: for messages, e.g. ``"DeepSpeed ZeRO-2"``.
        module: the user's model, unwrapped.
        sizes: {parameter name: numel} of every parameter this optimizer trains, in model order, global.
        shapes: {parameter name: dimensions in the order in which its flattened elements lie}, global.
        group_of: {parameter name: index of its param group}.
        layouts: one :class:`Layout` per rank of the sharding group.
        reducer: sums over the sharding group.
        agreement: decisions that all ranks share, replicas of a shard included; by default the reducer.
        shards: this rank's dense local weights, ascending offsets.
    """

    name: str
    module: nn.Module
    sizes: dict[str, int]
    shapes: dict[str, tuple[int, ...]]
    group_of: dict[str, int]
    layouts: Sequence[Layout]
    reducer: Reducer
    shards: list[Shard]

    homes: Mapping[str, int] | None = None
    """{parameter: the rank whose optimizer steps on it}, where the engine itself gives whole parameters to ranks."""

    state_outside = False
    """True when the eigenbasis is checkpointed beside the optimizer's state dict (DeepSpeed), not in it."""

    @property
    def gathers(self) -> bool:
        """True when :meth:`expose` is a collective, because a state entry is wider than this rank's share."""
        return False

    scales_loss = False
    """True when the engine's own backward keeps float16 gradients in range."""

    @property
    def loss_scale(self) -> float | None:
        """The engine's present loss scale; None where it has none of its own. May be set."""
        return None

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        raise ValueError(f"loss_scale={value}: {self.name} has none of its own")

    exact_refusal: str | None = None
    """Why exact products cannot be had here; None when they can."""

    @property
    def layout(self) -> Layout:
        """This rank's layout."""
        return self.layouts[self.reducer.rank]

    @property
    def numel(self) -> int:
        """Parameters over all ranks, padding not counted."""
        return sum(self.sizes.values())

    @property
    def agreement(self) -> Reducer:
        """Where all ranks decide together."""
        return self.reducer

    def dual(self, x: Tensor, start: int = 0) -> Tensor:
        """``x``, local elements from ``start`` on, each divided by the number of ranks of the group that hold it.

        Then ``sum over ranks of dot(y, dual(x))`` is the global inner product also where some parameters are
        replicated inside the group (tensor-parallel norms). ``x`` itself, not a copy, where nothing is.
        """
        return x

    # -- state: what a state dict shows and takes -----------------------------------------------------------------

    def keys(self) -> list[Tensor]:
        """Per shard: the tensor of the param groups that it belongs to."""
        return [shard.param for shard in self.shards]

    def expose(self, parts: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Per-shard tensors as state entries: (key, tensor shaped like the key), views where possible.

        A collective on hosts whose keys are wider than a rank's share (DDP): every rank gets all entries, whole.

        Args:
            parts: one tensor per shard, of its numel, local.
        """
        return [(key, _shaped(flat_view(part), key)) for key, part in zip(self.keys(), parts, strict=True)]

    def expose_scalars(self, values: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """One 0-d tensor per shard as state entries; a collective where :meth:`expose` is one."""
        return list(zip(self.keys(), values, strict=True))

    def meet(self, what: str) -> None:  # noqa: B027  (most hosts have nothing to wait for)
        """Before a collective :meth:`expose`: make sure that every rank is there, instead of hanging.

        Raises:
            RuntimeError: another rank did not come within a minute.
        """

    def absorb(self, index: int, value: Tensor) -> Tensor:
        """This rank's part of a state entry of ``keys()[index]``, shaped like the shard; the reverse of ``expose``.

        Raises:
            ValueError: the entry has neither the key's nor the shard's shape.
        """
        shard = self.shards[index]
        if value.shape != shard.param.shape:
            raise ValueError(
                f"state of shape {tuple(value.shape)}: must be {tuple(shard.param.shape)}, this rank's share; load "
                "this rank's checkpoint"
            )
        return value

    def absorb_rows(
        self, found: Mapping[int, Mapping[int, Tensor]], count: int, dtype: torch.dtype
    ) -> dict[int, dict[int, Tensor]]:
        """This rank's parts of ``count`` loaded vectors; entries of another shape are left out. Collective where
        :meth:`expose` is.

        Args:
            found: {id of a key: {row: state entry}}. dtype: in which they are kept.

        Returns:
            {index of a shard: {row: its part, 1-D in storage order}}.
        """
        mine: dict[int, dict[int, Tensor]] = {}
        for index, key in enumerate(self.keys()):
            mine[index] = {}
            for row, value in found.get(id(key), {}).items():
                with contextlib.suppress(ValueError):
                    mine[index][row] = flat_like(self.absorb(index, value), self.shards[index].param)
        return mine

    def named_keys(self) -> dict[str, Tensor]:
        """{parameter name: its tensor in the param groups}, of all parameters; empty where ranks hold parts of them."""
        return {}

    def current(self, groups: list[dict[str, Any]]) -> bool:
        """False when the param groups hold other tensors than this host was built for, so it must be built anew."""
        return True

    # -- one training step --------------------------------------------------------------------------------------

    @abstractmethod
    def collect(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """Take in the gradients of one ``optimizer.step()`` call.

        Returns:
            All param groups, once every shard's ``param.grad`` of this training step is in place; None while the
            engine has more calls to make for the same step.
        """

    def without_gradient(self) -> set[str]:
        """Names of the parameters that this step leaves alone, the same on every rank; after :meth:`collect`."""
        return set()

    @abstractmethod
    def publish(self) -> None:
        """Make the updated local weights visible to the model (as far as the engine does not do it itself)."""

    def weights(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A copy of the rank's weights, in full precision where the engine has it: (n_local,) local, padding zero."""
        parts = (flat_view(shard.param.detach()) for shard in self.shards)
        return self.layout.zero_padding_(local_vector(self.shards, parts, self.layout.numel, dtype, device))

    @torch.no_grad()
    def put_weights(self, local: Tensor) -> None:
        """Replace the weights, everywhere; for curvature ranks, which do not train. Collective.

        Args:
            local: (n_local,) local values, as :meth:`weights` gives them.
        """
        for shard in self.shards:
            flat_view(shard.param.detach()).copy_(local[shard.offset : shard.offset + shard.numel])

    # -- one curvature refresh ----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def compute_dtype(self) -> torch.dtype:
        """The lowest precision in which the model computes; sets the finite-difference step."""

    @property
    def transient_bytes(self) -> int:
        """Bytes per rank that an evaluation holds for restoring the weights."""
        return sum(shard.param.numel() * shard.param.element_size() for shard in self.shards)

    @abstractmethod
    def evaluation(self) -> contextlib.AbstractContextManager[None]:
        """Everything between enter and exit leaves no trace: weights, ``.grad``, RNG state and module buffers come
        back bit-exactly, also when the loss raises."""

    @abstractmethod
    def accumulate(self, losses: Sequence[Loss], direction: Tensor | None, eps: float, out: Tensor) -> None:
        """Add the gradient at ``w + eps * direction`` to ``out``; inside :meth:`evaluation`.

        The gradient is the mean over ``losses`` and over all ranks, this rank's share, loss scale divided out,
        padding zero. ``direction`` and ``out``: (n_local,) local.
        """

    @abstractmethod
    def exact(self, losses: Sequence[Loss], root: Root) -> Exact:
        """An operator on a retained graph of ``losses``; inside :meth:`evaluation`."""


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    """A flat tensor in storage order as a view with the shape and strides of ``like``."""
    return flat.as_strided(like.shape, like.stride(), flat.storage_offset())


class RandomState:
    """The random number generators of the CPU and of a model's devices, as they are now."""

    def __init__(self, module: nn.Module) -> None:
        devices = {p.device for p in module.parameters() if p.device.type not in ("cpu", "meta")}
        self._cpu = torch.get_rng_state()
        self._others = [(device, torch.get_device_module(device).get_rng_state(device)) for device in devices]

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        for device, state in self._others:
            torch.get_device_module(device).set_rng_state(state, device)


class ModelState:
    """Snapshot of what a forward or backward pass changes besides weights: RNG, module buffers and ``.grad``.

    ``clone_grads``: the engine writes into the saved gradients' storage, so values are kept too.
    """

    def __init__(self, module: nn.Module, *, clone_grads: bool = False) -> None:
        self._params = [p for p in module.parameters() if p.requires_grad]
        self._grads = [p.grad for p in self._params]
        self._values = [g.clone() if clone_grads and g is not None else None for g in self._grads]
        self._buffers = list(module.buffers())
        self._saved_buffers = [b.clone() for b in self._buffers]
        self._random = RandomState(module)

    def rewind(self) -> None:
        """Back to the snapshot, so that every evaluation of a refresh is the same function of the weights.

        Also forgets autocast's cached low-precision weights: inside an active autocast region they would hide the
        perturbation.
        """
        self._random.restore()
        with torch.no_grad():
            for buffer, saved in zip(self._buffers, self._saved_buffers, strict=True):
                if not torch.equal(buffer, saved):
                    buffer.copy_(saved)
        torch.clear_autocast_cache()

    def clear_grads(self) -> None:
        for param in self._params:
            param.grad = None

    def restore(self) -> None:
        self.rewind()
        with torch.no_grad():
            for param, grad, value in zip(self._params, self._grads, self._values, strict=True):
                param.grad = grad
                if grad is not None and value is not None:
                    grad.copy_(value)


def scalar_loss(value: object, where: str = "loss_fn") -> Tensor:
    """Check that a loss is a differentiable scalar tensor.

    Raises:
        TypeError, ValueError: naming what was returned and what is needed.
    """
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{where} returned {type(value).__name__}: must be a scalar tensor; return the mean loss of the batch"
        )
    if value.numel() != 1:
        raise ValueError(
            f"{where} returned a tensor of shape {tuple(value.shape)}: must be a scalar; return the mean loss"
        )
    if not value.requires_grad:
        raise ValueError(
            f"{where} returned a loss without a graph: must depend on the parameters; do not detach it or use no_grad"
        )
    return value.reshape(())


def compute_dtype(params: Iterator[Tensor] | Sequence[Tensor]) -> torch.dtype:
    """Lowest precision among the parameters and an active autocast region."""
    dtypes = {p.dtype for p in params if p.is_floating_point()}
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            dtypes.add(torch.get_autocast_dtype(device))
    return min(dtypes, key=lambda dtype: (torch.finfo(dtype).bits, -torch.finfo(dtype).eps))
