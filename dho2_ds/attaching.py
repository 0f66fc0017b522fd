"""Public :func:`attach`: where the curvature loss comes from, and the hook that refreshes before a training forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dho2_ds.curvature.refresh import evaluating
from dho2_ds.discovery import allow_under_deepspeed
from dho2_ds.hosts.base import Host, Loss
from dho2_ds.hosts.detect import is_engine, make_host
from dho2_ds.optimizer import DHO2
from dho2_ds.pipeline.worker import serve
from dho2_ds.pipeline.worlds import role

LossFunction = Callable[[Any, Any], Tensor]
"""``loss_fn(model, batch) -> scalar``: the mean training loss of one batch, computed by calling ``model``."""

_SHARE = "num_items_in_batch"
"""Argument that Hugging Face's Trainer adds: with it a model returns its share of a whole step's loss, a sum divided by
the items of all ranks and micro-batches, and without it the mean, which is what curvature has to be of."""


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: LossFunction | None = None,
    data: Iterable[Any] | None = None,
) -> None:
    """Tell a :class:`dho2_ds.DHO2` optimizer which model it trains and how to evaluate its loss.

    Args:
        model: what the training loop calls: a DeepSpeed engine, an FSDP root (``fully_shard`` or
            ``FullyShardedDataParallel``), a ``DistributedDataParallel``, or a module.
        optimizer: the optimizer; may be left out for an engine, which knows it.
        loss_fn: ``loss_fn(model, batch) -> scalar``. Left out, the model must return its loss (a scalar, an output
            with ``.loss``, a mapping with ``"loss"``, or a tuple whose first item is the loss), and the arguments of
            the latest training forward are replayed.
        data: batches for ``loss_fn``, each rank its own; one per refresh and ``curvature.batches``. An iterable that
            can be iterated again (a DataLoader) starts over at its end; an iterator that runs out is an error. Left
            out with ``loss_fn`` given, the forward's own arguments are the batch (the sole argument, or the tuple).

    Under DeepSpeed with a model that returns its loss, this happens by itself at the first forward. Call it on every
    rank. Calling it again replaces model and loss. It computes nothing; in mode ``dedicated`` it does not return on a
    curvature rank, whose process ends when training does.

    Raises:
        ConfigError: the model or engine is not supported, naming the setting and the way out.
        TypeError: ``optimizer`` is missing or not a DHO2 optimizer; ``loss_fn`` is not callable, or ``data`` comes
            without it.
    """
    model = getattr(model, "_forward_module", model)  # what Lightning Fabric's wrapper calls
    if optimizer is None:
        if not is_engine(model):
            raise TypeError("optimizer=None: must be given unless model is a DeepSpeed engine; pass the DHO2 optimizer")
        optimizer = model.basic_optimizer  # type: ignore[assignment]
    owner = as_dho2(optimizer)
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn={loss_fn!r}: must be callable as loss_fn(model, batch)")
    if data is not None and loss_fn is None:
        raise TypeError("data: must come with loss_fn; pass loss_fn=lambda model, batch: ...")
    if not owner.uses_host:
        return
    source = LossSource(loss_fn, data, owner.config.curvature.batches)

    if is_engine(model):
        allow_under_deepspeed(type(owner))  # also where the optimizer was built before DeepSpeed was loaded

    def build() -> Host:
        return make_host(model, owner.param_groups, optimizer)

    owner.bind(build(), source, rebuild=build)
    if role() == "curvature":
        serve(owner.worker(source.losses_of, own_data=source.data is not None))
    if optimizer is not None and getattr(optimizer, "optim", None) is owner:
        _follow(optimizer, owner)
    if owner.config.num_eigenvectors:
        owner.hook(model.register_forward_pre_hook(_RefreshHook(owner, source), prepend=True, with_kwargs=True))


def _follow(wrapper: torch.optim.Optimizer, owner: DHO2) -> None:
    """Let a ZeroRedundancyOptimizer's own state dicts carry curvature.

    It collects the parameters' state from the inner optimizers, one rank after the other, but builds param groups
    itself, and on loading it writes into the inner optimizer without calling it.
    """
    consolidate = wrapper.consolidate_state_dict  # type: ignore[attr-defined]

    def consolidated(to: int = 0) -> None:
        owner.consolidate()
        try:
            consolidate(to)
        finally:
            owner.release()

    def saved(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"][0].update(owner.record())

    def loaded(_: torch.optim.Optimizer) -> None:
        for inner, outer in zip(owner.param_groups, wrapper.param_groups, strict=True):
            inner.update({key: value for key, value in outer.items() if key != "params"})
        owner.adopt()

    if not hasattr(wrapper, "_dho2_follows"):
        wrapper._dho2_follows = True  # type: ignore[attr-defined]
        wrapper.consolidate_state_dict = consolidated  # type: ignore[attr-defined]
        wrapper.register_state_dict_post_hook(saved)
        wrapper.register_load_state_dict_post_hook(loaded)
    if owner.steps == 0 and any(len(mine) for mine in owner.state.values()):
        owner.adopt()  # loaded before the model was attached


def as_dho2(optimizer: object) -> DHO2:
    """Look through DeepSpeed's, Accelerate's, Lightning's and ZeroRedundancyOptimizer's wrappers.

    Raises:
        TypeError: there is no DHO2 optimizer inside.
    """
    candidate: Any = optimizer
    for _ in range(4):
        inner = (getattr(candidate, name, None) for name in ("basic_optimizer", "optimizer", "optim"))
        found = next((one for one in inner if one is not None), None)
        if found is None:
            break
        candidate = found
    if isinstance(candidate, DHO2):  # asked of the innermost: Lightning's wrappers say that they are one
        return candidate
    raise TypeError(f"optimizer={type(optimizer).__name__}: must be a DHO2 optimizer; build dho2_ds.DHO2(...)")


class LossSource:
    """Supplies the losses of one refresh, from user data or from replayed forward arguments.

    Args:
        loss_fn, data: see :func:`attach`.
        batches: micro-batches per refresh.
    """

    def __init__(self, loss_fn: LossFunction | None, data: Iterable[Any] | None, batches: int) -> None:
        self.loss_fn, self.data, self.batches = loss_fn, data, batches
        self._recent: deque[tuple[tuple[Any, ...], dict[str, Any]]] = deque(maxlen=batches)
        self._again: Callable[[], None] = lambda: None
        self._iterator: Iterator[Any] | None = None

    def remember(self, args: tuple[Any, ...], kwargs: dict[str, Any], again: Callable[[], None]) -> None:
        """Note the arguments of a training forward (references, not copies; at most ``batches`` of them), and what is
        to be called before each replay."""
        self._again = again
        if self.data is None:
            self._recent.append((args, {name: value for name, value in kwargs.items() if name != _SHARE}))

    def losses(self) -> Sequence[Loss]:
        """The closures of one refresh; every one gives the same value whenever it is called at the same weights."""
        if self.data is not None:
            assert self.loss_fn is not None
            return [_loss_of_batch(self.loss_fn, self._next()) for _ in range(self.batches)]
        if not self._recent:
            raise RuntimeError(
                "no training forward was seen yet, so there is nothing to replay; "
                "pass loss_fn=... and data=... to dho2_ds.attach"
            )
        if self.loss_fn is None:
            return [_loss_of_output(args, kwargs, self._again) for args, kwargs in self._recent]
        return [_loss_of_batch(self.loss_fn, _as_batch(args, kwargs)) for args, kwargs in self._recent]

    def arguments(self) -> list[Any] | None:
        """What curvature ranks without data need of this rank: the latest forwards' arguments; None with ``data``."""
        return None if self.data is not None else [[list(args), kwargs] for args, kwargs in self._recent]

    def losses_of(self, arguments: list[Any] | None) -> Sequence[Loss]:
        """The losses of another rank's :meth:`arguments`."""
        if arguments is not None:
            self._recent.clear()
            self._recent.extend((tuple(args), kwargs) for args, kwargs in arguments)
        return self.losses()

    def _next(self) -> Any:
        assert self.data is not None
        for attempt in range(2):
            if self._iterator is None:
                self._iterator = iter(self.data)
            try:
                return next(self._iterator)
            except StopIteration:
                restartable = self._iterator is not self.data
                self._iterator = None
                if not restartable or attempt:
                    break
        raise RuntimeError(
            "data: ran out of batches; pass an iterable that can be iterated again, such as a DataLoader, "
            "or an endless iterator"
        )


def _as_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs and not args:
        return kwargs
    return args[0] if len(args) == 1 and not kwargs else (*args, kwargs) if kwargs else args


def _loss_of_batch(loss_fn: LossFunction, batch: Any) -> Loss:
    return lambda model: loss_fn(model, batch)


def _loss_of_output(args: tuple[Any, ...], kwargs: dict[str, Any], again: Callable[[], None]) -> Loss:
    def loss(model: nn.Module) -> Tensor:
        again()
        output = model(*args, **kwargs)
        found: Any = output
        if isinstance(output, Mapping):
            found = output.get("loss")
        elif hasattr(output, "loss"):
            found = output.loss
        elif isinstance(output, (tuple, list)) and output:
            found = output[0]
        if not isinstance(found, Tensor) or found.numel() != 1:
            shape = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(output).__name__
            raise RuntimeError(
                f"the model's forward returned {shape}, not its loss; call "
                "dho2_ds.attach(model_or_engine, loss_fn=lambda model, batch: ..., data=batches) so that the curvature "
                "of the loss can be computed"
            )
        return found

    return loss


def _same_forward(module: nn.Module) -> Callable[[], None]:
    """A function that makes the next call of a wrapper do what the present one does.

    Lightning's Trainer has ``training_step`` run in the place of the inner module's ``forward``, for one call only.
    """
    parts: list[Any] = [module, getattr(module, "module", None)]
    patched = [(part, part.__dict__["forward"]) for part in parts if "forward" in getattr(part, "__dict__", {})]

    def again() -> None:
        for part, forward in patched:
            part.forward = forward

    return again


class _RefreshHook:
    """Forward pre-hook of the outermost module: refresh when due, before the first training forward after the step.

    At that point gradients are clean, the micro-step is zero, and the forward's own arguments are a fresh batch.
    """

    def __init__(self, optimizer: DHO2, source: LossSource) -> None:
        self._optimizer, self._source = optimizer, source

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._optimizer.refreshing or evaluating() or not module.training or not torch.is_grad_enabled():
            return
        again = _same_forward(module)
        self._source.remember(args, kwargs, again)
        self._optimizer.before_forward()
        again()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copied or pickled model (weight averaging, saving whole modules) leaves the optimizer behind."""
        return _no_hook, ()


def _no_refresh(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hook of a copied model: nothing trains it."""


def _no_hook() -> Callable[..., None]:
    return _no_refresh
