"""The base optimizer (torch's own AdamW, Adam or SGD on local shards) and the preconditioner it defines.

The update rules need three things of a base optimizer: that it steps, the direction m it just applied, and a
symmetric positive preconditioner P with its symmetric root. They see them through :class:`Chunk`, one interval of the
local buffer at a time, so a base whose P is not diagonal only has to offer other chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dho2_ds.shards import (
    Shard,
    Span,
    chunk_size,
    flat_like,
    flat_view,
    gather,
    scatter_add,
    spans,
    working_device,
    working_dtype,
)

STEP, EXP_AVG, EXP_AVG_SQ, MOMENTUM = "step", "exp_avg", "exp_avg_sq", "momentum_buffer"


class Chunk(Protocol):
    """One interval ``[start, stop)`` of the rank's local buffer. All tensors are (stop - start,), local."""

    start: int
    stop: int

    def direction(self) -> Tensor:
        """m: the base optimizer's last direction, so that its step was ``-lr P m`` (a fresh tensor)."""

    def remembered(self) -> Tensor:
        """What of m follows from the state alone, so that it is the same after a resume: gradients are gone then."""

    def root(self, x: Tensor) -> Tensor:
        """``P^(1/2) x`` (may work in place on x and return it)."""

    def rooted_direction(self) -> Tensor:
        """``P^(1/2) m``."""

    def add_to_weights(self, delta: Tensor) -> None:
        """``w += delta``."""

    def add_rooted(self, delta: Tensor) -> None:
        """``w += P^(1/2) delta``, and the base step if that was put off (may work in place on delta)."""


def joined(chunks: Sequence[Chunk], limit: int) -> Iterator[Chunk]:
    """Neighbours in the local buffer as one chunk of at most ``limit`` elements: one product with Q instead of many."""
    run: list[Chunk] = []
    for chunk in chunks:
        if run and (chunk.start != run[-1].stop or chunk.stop - run[0].start > limit):
            yield run[0] if len(run) == 1 else _JoinedChunk(run)
            run = []
        run.append(chunk)
    if run:
        yield run[0] if len(run) == 1 else _JoinedChunk(run)


class _JoinedChunk:
    def __init__(self, members: Sequence[Chunk]) -> None:
        self.start, self.stop = members[0].start, members[-1].stop
        self._members = members

    def direction(self) -> Tensor:
        return torch.cat([member.direction() for member in self._members])

    def remembered(self) -> Tensor:
        return torch.cat([member.remembered() for member in self._members])

    def rooted_direction(self) -> Tensor:
        return torch.cat([member.rooted_direction() for member in self._members])

    def root(self, x: Tensor) -> Tensor:
        return torch.cat([member.root(part) for member, part in self._with_parts(x)])

    def add_to_weights(self, delta: Tensor) -> None:
        for member, part in self._with_parts(delta):
            member.add_to_weights(part)

    def add_rooted(self, delta: Tensor) -> None:
        for member, part in self._with_parts(delta):
            member.add_rooted(part)

    def _with_parts(self, x: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
        for member in self._members:
            yield member, x[member.start - self.start : member.stop - self.start]


def torch_optimizer(
    kind: str, inner: list[dict[str, Any]], options: dict[str, Any], fused: bool | None
) -> torch.optim.Optimizer:
    """torch's own optimizer of this kind on ``inner`` groups, with the hyper-parameters of one group as defaults."""
    common: dict[str, Any] = {"lr": options["lr"], "weight_decay": options["weight_decay"], "fused": fused}
    if kind == "sgd":
        return torch.optim.SGD(inner, momentum=options["momentum"], nesterov=options["nesterov"], **common)
    cls = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    return cls(inner, betas=options["betas"], eps=options["eps"], **common)


def init_state(kind: str, param: Tensor, state: dict[str, Any], *, fused: bool | None, momentum: bool) -> None:
    """Create missing state as zeros with step 0: what torch creates at its first step, but before it, on every rank
    and also for parameters without a gradient yet. ``momentum``: whether any group of an SGD base has momentum."""
    if kind == "sgd":
        if momentum and state.get(MOMENTUM) is None:
            state[MOMENTUM] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return
    on_device = bool(fused) and param.device.type != "cpu"
    if STEP in state and on_device:  # a checkpoint's may lie on the CPU, where fused kernels cannot read it
        state[STEP] = state[STEP].to(param.device, torch.float32)
    if STEP not in state:
        state[STEP] = torch.zeros((), dtype=torch.float32, device=param.device if on_device else "cpu")
    for key in (EXP_AVG, EXP_AVG_SQ):
        if key not in state:
            state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)


class BaseOptimizer:
    """Runs torch's optimizer on shards and exposes its diagonal preconditioner.

    ``P = diag(rho_g / (sqrt(v_hat) + eps))`` for Adam and AdamW, ``rho_g`` for SGD, where ``rho_g = lr_g / lr_ref``
    folds param groups of different lr into the preconditioner (lr_ref: the largest lr). Without it the rank-k term
    would not cancel the base step inside the span when groups differ.

    Args:
        kind: ``adamw`` | ``adam`` | ``sgd``.
        shards: local shards, ascending offsets.
        fused: torch's ``fused`` flag.
        state: the dictionary that holds the per-shard state (an optimizer's ``state``), keyed by ``shard.param``.
    """

    def __init__(self, kind: str, shards: Sequence[Shard], *, fused: bool | None, state: dict[Any, Any]) -> None:
        self.kind, self.shards, self.state = kind, list(shards), state
        self.device = working_device(shards)
        self.dtype = working_dtype(shard.param for shard in shards)
        self.spans = spans(self.shards, chunk_size(self.device))
        self._steps: dict[int, int] = {}
        self._fused = fused
        self._lr_scale = 1.0
        self._weights = [flat_view(shard.param.detach()) for shard in self.shards]
        self._torch: torch.optim.Optimizer | None = None

    def step(self, groups: Sequence[dict[str, Any]], lr_scale: float, *, put_off: bool = False) -> None:
        """One step of torch's optimizer with every lr multiplied by ``lr_scale``.

        ``put_off`` lets a base leave the weights alone until :meth:`Chunk.add_rooted`, which follows for every chunk,
        if it can share work with that. A diagonal P has none to share.

        Decoupled weight decay stays at the unscaled lr (torch decays by ``lr * weight_decay``, so the decay is divided
        by the scale). Gradients are read from ``shard.param.grad``; shards without one are left alone.
        """
        optimizer = self._torch or self._build(groups)
        optimizer.state = self.state  # type: ignore[assignment]
        for inner, outer in zip(optimizer.param_groups, groups, strict=True):
            for key, value in outer.items():
                if key in inner and key != "params":
                    inner[key] = value
            inner["lr"] = outer["lr"] * lr_scale if lr_scale != 1.0 else outer["lr"]
            if self.kind == "adamw" and lr_scale != 1.0:
                inner["weight_decay"] = outer["weight_decay"] / lr_scale
        optimizer.step()
        for index, shard in enumerate(self.shards):
            if index in self._steps and shard.param.grad is not None:
                self._steps[index] += 1
        self._lr_scale = lr_scale

    def _build(self, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        inner = [{"params": [s.param for s in self.shards if s.group == i]} for i in range(len(groups))]
        self._torch = torch_optimizer(self.kind, inner, groups[0], self._fused)
        return self._torch

    def forget_steps(self) -> None:
        """Read step counts anew: the state was replaced from outside (a checkpoint was loaded)."""
        self._steps.clear()

    def step_count(self, index: int) -> int:
        """Steps shard ``index`` has taken. On an accelerator read once, then counted here: no sync per step."""
        step = self.state[self.shards[index].param][STEP]
        if step.device.type == "cpu":
            return int(step)
        if index not in self._steps:
            self._steps[index] = int(step)
        return self._steps[index]

    def chunks(self, groups: Sequence[dict[str, Any]], *, moving_only: bool = False) -> Iterator[Chunk]:
        """Chunks of the local buffer in ascending order.

        Args:
            groups: the current param groups (lr, betas, eps).
            moving_only: leave out spans none of whose shards has a gradient; a shard without one beside others counts
                with direction 0.
        """
        largest = max((float(group["lr"]) for group in groups), default=0.0)
        rho = [float(group["lr"]) / largest if largest > 0 else 1.0 for group in groups]
        adam = self.kind != "sgd"
        tensors = self._flat_state(EXP_AVG, EXP_AVG_SQ) if adam else self._flat_state(MOMENTUM)
        for span in self.spans:
            has_grad = [not moving_only or self.shards[index].param.grad is not None for index, _, _ in span.pieces]
            if not any(has_grad):
                continue
            if adam:
                yield _AdamChunk(self, span, groups[span.group], rho[span.group], tensors, has_grad)
            else:
                yield _SgdChunk(self, span, groups[span.group], rho[span.group], tensors, has_grad)

    def root_(self, groups: Sequence[dict[str, Any]], x: Tensor) -> Tensor:
        """In-place ``x <- P^(1/2) x`` on a local vector (n_local,)."""
        for chunk in self.chunks(groups):
            part = x[chunk.start : chunk.stop]
            part.copy_(chunk.root(part))
        return x

    def frozen_root(self, groups: Sequence[dict[str, Any]], numel: int) -> Callable[[Tensor], Tensor]:
        """``root_`` as it is now, whatever steps follow, for vectors of ``numel``. Holds one such vector."""
        diagonal = self.root_(groups, torch.ones(numel, dtype=self.dtype, device=self.device))
        return lambda x: x.mul_(diagonal)

    def _flat_state(self, *keys: str) -> list[list[Tensor]]:
        result: list[list[Tensor]] = []
        for key in keys:
            column: list[Tensor] = []
            for shard in self.shards:
                value = self.state[shard.param].get(key)
                column.append(self._weights[0][:0] if value is None else flat_like(value, shard.param))
            result.append(column)
        return result


class _DiagonalChunk:
    def __init__(
        self,
        base: BaseOptimizer,
        span: Span,
        group: dict[str, Any],
        rho: float,
        tensors: list[list[Tensor]],
        has_grad: list[bool],
    ) -> None:
        self.start, self.stop = span.start, span.stop
        self._base, self._span, self._options, self._rho = base, span, group, rho
        self._tensors, self._has_grad = tensors, has_grad

    def direction(self) -> Tensor:
        raise NotImplementedError

    def root(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def rooted_direction(self) -> Tensor:
        return self.root(self.direction())

    def add_to_weights(self, delta: Tensor) -> None:
        scatter_add(self._base._weights, self._span, delta)

    def add_rooted(self, delta: Tensor) -> None:
        self.add_to_weights(self.root(delta))

    def _per_piece(self, values: Sequence[float], x: Tensor) -> Tensor:
        """A fresh tensor in working precision: each piece of a span times its own number."""
        if len(set(values)) == 1:
            return torch.mul(x.to(self._base.dtype), values[0])
        out, offset = x.to(self._base.dtype, copy=True), 0
        for value, (_, _, length) in zip(values, self._span.pieces, strict=True):
            out[offset : offset + length].mul_(value)
            offset += length
        return out


class _AdamChunk(_DiagonalChunk):
    def _powers(self, beta: float) -> list[float]:
        steps = [self._base.step_count(index) for index, _, _ in self._span.pieces]
        return [1.0 / (1.0 - beta**step) if step else 0.0 for step in steps]

    def _inverse_root(self) -> Tensor:
        """r = sqrt(rho) (sqrt(v_hat) + eps)^(-1/2)."""
        v = gather(self._tensors[1], self._span)
        r = self._per_piece(self._powers(self._options["betas"][1]), v).sqrt_().add_(self._options["eps"]).rsqrt_()
        return r.mul_(self._rho**0.5) if self._rho != 1.0 else r

    def direction(self) -> Tensor:
        scale = self._powers(self._options["betas"][0])
        scale = [s if moved else 0.0 for s, moved in zip(scale, self._has_grad, strict=True)]
        return self._per_piece(scale, gather(self._tensors[0], self._span))

    def remembered(self) -> Tensor:
        return self.direction()

    def root(self, x: Tensor) -> Tensor:
        return self._inverse_root().mul_(x)


class _SgdChunk(_DiagonalChunk):
    def direction(self) -> Tensor:
        """What torch's SGD applied: buf, or ``g + momentum buf`` (nesterov), or g; g includes coupled weight decay.

        torch does not keep the decayed gradient. With ``w_new = w_old - lr d`` and ``d = g + decay w_old + rest`` it
        follows that ``d = (g + decay w_new + rest) / (1 - decay lr)``.
        """
        momentum, nesterov = self._options["momentum"], self._options["nesterov"]
        moved = [1.0 if has else 0.0 for has in self._has_grad]
        if momentum and not nesterov:
            return self._per_piece(moved, gather(self._tensors[0], self._span))
        d = torch.zeros(self.stop - self.start, dtype=self._base.dtype, device=self._base.device)
        offset = 0
        for index, start, length in self._span.pieces:
            param = self._base.shards[index].param
            if param.grad is not None:
                d[offset : offset + length] = flat_like(param.grad.detach(), param)[start : start + length]
            offset += length
        if nesterov:
            d.add_(gather(self._tensors[0], self._span), alpha=momentum)
        decay = float(self._options["weight_decay"])
        if decay:
            d.add_(gather(self._base._weights, self._span), alpha=decay)
            d.div_(1.0 - decay * float(self._options["lr"]) * self._base._lr_scale)
        return self._per_piece(moved, d)

    def remembered(self) -> Tensor:
        if self._options["momentum"]:
            return gather(self._tensors[0], self._span).to(self._base.dtype, copy=True)
        return torch.zeros(self.stop - self.start, dtype=self._base.dtype, device=self._base.device)

    def root(self, x: Tensor) -> Tensor:
        return x * self._rho**0.5 if self._rho != 1.0 else x
