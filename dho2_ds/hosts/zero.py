"""DeepSpeed ZeRO 1, 2 (``DeepSpeedZeroOptimizer``) and the ``BF16_Optimizer``: flat float32 partitions per param group;
and stage 0, which replicates.

DeepSpeed's private attributes that carry the layout are read here and in ``zero3.py`` only.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dho2_ds.curvature.hvp import Exact, Root
from dho2_ds.hosts import full
from dho2_ds.hosts.base import Host, Loss, ModelState, compute_dtype, scalar_loss
from dho2_ds.hosts.replicated import ReplicatedHost
from dho2_ds.sharding.layout import Layout, Segment, concatenate
from dho2_ds.sharding.reduce import Reducer
from dho2_ds.shards import consecutive, running_offsets


@contextlib.contextmanager
def without_output_hooks(engine: Any) -> Iterator[None]:
    """Outputs of the engine, which a loss may call past the model it is given, are inside like those of its module.

    DeepSpeed (not the oldest releases) hooks onto their gradients, for its own backward: it divides them by the
    accumulation steps and prepares a reduction. A second derivative would be divided on some of its paths only.
    """
    silent = {"_backward_prologue": lambda *_: None, "_backward_prologue_per_tensor": lambda grad: grad}
    names = [name for name in silent if hasattr(engine, name)]
    own = {name: engine.__dict__[name] for name in names if name in engine.__dict__}
    try:
        engine.__dict__.update({name: silent[name] for name in names})
        yield
    finally:
        for name in names:
            engine.__dict__.pop(name, None)
        engine.__dict__.update(own)


class Zero0Host(ReplicatedHost):
    """Stage 0. The eigenbasis is checkpointed beside DeepSpeed's own files, in which only rank 0's state is kept."""

    state_outside = True

    def __init__(
        self,
        name: str,
        engine: Any,
        masters: Sequence[Sequence[Tensor]],
        weights: Sequence[Sequence[Tensor]],
        group: ProcessGroup | None,
    ) -> None:
        super().__init__(name, engine.module, masters, weights, group)
        self._engine = engine

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        with super().evaluation(), without_output_hooks(self._engine):
            yield


class PartitionedHost(Host):
    """What all ZeRO hosts share: collecting one step's calls, perturbing low-precision partitions, engine gradients.

    Subclasses set ``sizes``, ``layouts``, ``shards`` and ``_partitions`` (the low-precision flat partition of each
    shard) in ``__init__``.
    """

    state_outside = scales_loss = True
    _partitions: list[Tensor]

    def __init__(self, name: str, engine: Any) -> None:
        self.name, self.engine, self.module = name, engine, engine.module
        self.wrapper = engine.optimizer
        self.reducer = Reducer(self.wrapper.dp_process_group)
        self._names = {id(p): key for key, p in engine.module.named_parameters()}
        self._pending: dict[int, Tensor | None] = {}
        self._groups: dict[int, dict[str, Any]] = {}
        self._backup: list[Tensor] = []
        self._state: ModelState | None = None

    @property
    def offload(self) -> bool:
        """True when optimizer state and float32 gradients live on the CPU."""
        return bool(getattr(self.wrapper, "cpu_offload", False) or getattr(self.wrapper, "offload_optimizer", False))

    @property
    def compute_dtype(self) -> torch.dtype:
        enabled = getattr(self.engine, "torch_autocast_enabled", None)
        if enabled is not None and enabled():
            return compute_dtype([torch.empty(0, dtype=self.engine.torch_autocast_dtype()), *self._partitions])
        return compute_dtype(self._partitions)

    @property
    def transient_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in [*self._partitions, *self._accumulators()])

    def _accumulators(self) -> list[Tensor]:
        """Gradient buffers of this rank's share that the engine keeps from step to step."""
        if not self.offload:
            return []
        return [shard.param.grad for shard in self.shards if shard.param.grad is not None]

    def collect(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """DeepSpeed steps once per param group (ZeRO 1, 2) or sub-group (3) with only that one visible; the hybrid step
        is global. So calls before the last only remember their gradient. A shard that comes again before the set is
        complete means the earlier step broke off: its leftovers are dropped."""
        visible = {id(p): (p, group) for group in groups for p in group["params"]}
        for index, shard in enumerate(self.shards):
            if id(shard.param) in visible:
                if index in self._pending:
                    self._pending.clear()
                param, group = visible[id(shard.param)]
                self._pending[index] = param.grad
                self._groups[shard.group] = group
        if len(self._pending) < len(self.shards):
            return None
        for index, grad in self._pending.items():
            self.shards[index].param.grad = grad
            self._clear_padding(index, grad)
        if len(groups) > len(self._groups):
            return groups
        return [self._groups[index] for index in sorted(self._groups)]

    def _clear_padding(self, index: int, values: Tensor | None) -> None:
        """DeepSpeed leaves the padding of gradients and weights uninitialised; a NaN there would spread by sums."""
        if values is not None:
            for low, high in self._padding[index]:
                values[low:high].zero_()

    @cached_property
    def _padding(self) -> list[list[tuple[int, int]]]:
        """Per shard its padding intervals."""
        found: list[list[tuple[int, int]]] = []
        for shard in self.shards:
            cut = [
                (max(begin - shard.offset, 0), min(end - shard.offset, shard.numel))
                for begin, end in self.layout.padding()
            ]
            found.append([(low, high) for low, high in cut if low < high])
        return found

    def publish(self) -> None:
        """Refresh the low-precision copies of all shards but the last, which the engine copies itself right after."""
        for index in list(self._pending)[:-1]:
            self._publish(index)
            if not self.offload:
                self.shards[index].param.grad = None
        self._pending.clear()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        engine = self.engine
        managed_by_user = engine._is_gradient_accumulation_boundary is not None
        if not managed_by_user and engine.micro_steps % engine.gradient_accumulation_steps():
            raise RuntimeError(
                f"curvature evaluation at micro-step {engine.micro_steps}: must start at a gradient accumulation "
                "boundary; call it right after engine.step() of a whole batch"
            )
        self._state = ModelState(self.module)
        boundary = engine._is_gradient_accumulation_boundary
        # Older DeepSpeed releases add up the loss of every backward and send it to their monitors.
        losses: Any = getattr(engine, "losses", None)
        monitor: Any = getattr(engine, "monitor", None)
        monitored = getattr(monitor, "enabled", False)
        kept: list[tuple[Tensor, Tensor]] = []
        try:
            if monitored:
                monitor.enabled = False
            self._state.clear_grads()  # the engine's backward would add to the saved tensors in place
            self._before_weights_change()
            self._backup = [partition.detach().clone() for partition in self._partitions]
            # Persistent accumulators keep the last gradient of parameters that the next backward does not reach, and
            # the engine uses it: put back what training left there.
            kept = [(accumulator, accumulator.clone()) for accumulator in self._accumulators()]
            for accumulator, _ in kept:
                accumulator.zero_()
            yield
        finally:
            self._clear_engine()
            for accumulator, saved in kept:
                accumulator.copy_(saved)
            if self._backup:  # empty if memory ran out before anything was changed
                self._write(None, 0.0)
            engine._is_gradient_accumulation_boundary, engine.losses = boundary, losses
            if monitored:
                monitor.enabled = True
            self._state.restore()
            self._state, self._backup = None, []

    @property
    def loss_scale(self) -> float | None:
        return float(getattr(self.wrapper, "loss_scale", 1.0))

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if value != self.loss_scale:
            self.wrapper.loss_scale = value

    @torch.no_grad()
    def put_weights(self, local: Tensor) -> None:
        super().put_weights(local)
        self._before_weights_change()
        for index in range(len(self.shards)):
            self._publish(index)
        self._after_weights_change()

    def accumulate(self, losses: Sequence[Loss], direction: Tensor | None, eps: float, out: Tensor) -> None:
        assert self._state is not None
        self._write(direction, eps)
        self._state.rewind()
        weight = 1.0 / (len(losses) * (self.loss_scale or 1.0))
        for loss in losses:
            # A boundary backward makes the engine leave this rank's reduced share where its step would look for it,
            # within ZeRO's own gradient budget; scale_wrt_gas=False because one curvature batch is a whole mean. The
            # engine divides anyway when handed its own output tensor, hence the multiplication by one.
            self.engine.set_gradient_accumulation_boundary(True)
            with torch.enable_grad():
                value = scalar_loss(loss(self.engine))
                self.engine.backward(value * 1.0, scale_wrt_gas=False)
            self._read_gradient(out, weight)
            self._clear_engine()
        self.layout.zero_padding_(out)

    @torch.no_grad()
    def _write(self, direction: Tensor | None, eps: float) -> None:
        """Put ``master + eps * direction`` (None: the saved values) into the low-precision weights of all ranks."""
        self._before_weights_change()
        for shard, partition, saved in zip(self.shards, self._partitions, self._backup, strict=True):
            if direction is None:
                partition.copy_(saved)
                continue
            step = direction[shard.offset : shard.offset + shard.numel]
            if partition.dtype == step.dtype and partition.device == step.device:
                torch.add(shard.param.detach(), step, alpha=eps, out=partition)
            else:
                for start in range(0, shard.numel, full.BUCKET):
                    piece = slice(start, start + full.BUCKET)
                    partition[piece].copy_(torch.add(shard.param.detach()[piece], step[piece], alpha=eps))
        self._after_weights_change()

    def exact(self, losses: Sequence[Loss], root: Root) -> Exact:
        assert self._state is not None
        self._state.rewind()
        params = [p for p in self.module.parameters() if self._names[id(p)] in self.sizes]
        names = [self._names[id(p)] for p in params]
        with without_output_hooks(self.engine):
            return full.exact_operator(losses, self.module, params, names, self.sizes, self.layouts, self.reducer, root)

    @abstractmethod
    def _publish(self, index: int) -> None:
        """Copy shard ``index`` to its low-precision partition as the engine's own step would."""

    def _read_gradient(self, out: Tensor, weight: float) -> None:
        """Add ``weight`` times the reduced gradient partition that the engine holds to ``out``."""
        for index, shard in enumerate(self.shards):
            target = out[shard.offset : shard.offset + shard.numel]
            if self.offload:
                grad = shard.param.grad
                assert grad is not None
                target.add_(grad, alpha=weight)
                continue
            at = 0
            for piece in self.wrapper.averaged_gradients[index]:
                target[at : at + piece.numel()].add_(piece.reshape(-1), alpha=weight)
                at += piece.numel()

    @abstractmethod
    def _clear_engine(self) -> None:
        """Bring the engine's gradient accumulators back to their state right after a step."""

    def _before_weights_change(self) -> None:
        """Called before partitions are written."""

    @abstractmethod
    def _after_weights_change(self) -> None:
        """Make written partitions visible to the model on all ranks."""


class ZeroHost(PartitionedHost):
    """ZeRO 1 and 2, fp32 or bf16/fp16 with float32 masters, with or without CPU optimizer offload."""

    def __init__(self, engine: Any) -> None:
        wrapper = engine.optimizer
        super().__init__(f"DeepSpeed ZeRO-{2 if wrapper.partition_gradients else 1}", engine)
        rank = self.reducer.rank
        flat = wrapper.parallel_partitioned_bit16_groups
        self._build(wrapper.round_robin_bit16_groups, _offsets(wrapper), wrapper.single_partition_of_fp32_groups)
        self._partitions = [parts[rank] for parts in flat]

    def _build(self, ordered: Sequence[Sequence[Tensor]], offsets: Sequence[Sequence[int]], masters: list[Any]) -> None:
        self.sizes = {self._names[id(p)]: p.numel() for group in ordered for p in group}
        self.shapes = {self._names[id(p)]: tuple(p.shape) for group in ordered for p in group}
        self.group_of = {self._names[id(p)]: i for i, group in enumerate(ordered) for p in group}
        world = self.reducer.world_size
        self.layouts = [
            concatenate(
                [
                    flat_partition([self._names[id(p)] for p in group], at, self.sizes, master.numel(), rank)
                    for group, at, master in zip(ordered, offsets, masters, strict=True)
                ]
            )
            for rank in range(world)
        ]
        self.shards = consecutive(masters, range(len(masters)))

    def _publish(self, index: int) -> None:
        self._partitions[index].data.copy_(self.shards[index].param.data)

    def _clear_engine(self) -> None:
        wrapper = self.wrapper
        if self.offload:
            wrapper.reset_cpu_buffers()
            if hasattr(wrapper, "_offload_accumulated_param_ids"):
                wrapper._offload_accumulated_param_ids = set()
        else:
            if hasattr(wrapper, "_release_preflattened_grad_buffers"):
                wrapper._release_preflattened_grad_buffers()
            for index in range(len(self.shards)):
                wrapper.averaged_gradients[index] = None
                if hasattr(wrapper, "all_grad_tensors"):
                    wrapper.all_grad_tensors[index] = None
        wrapper.zero_grad(set_to_none=True)
        wrapper.micro_step_id = -1

    def _after_weights_change(self) -> None:
        _all_gather(self.wrapper, self.wrapper.bit16_groups_flat, self.wrapper.parallel_partitioned_bit16_groups)


class BF16Host(ZeroHost):
    """``BF16_Optimizer``: stage 1 in bf16 with float32 gradient accumulation; one call per step, all groups visible."""

    def __init__(self, engine: Any) -> None:
        wrapper = engine.optimizer
        PartitionedHost.__init__(self, "DeepSpeed BF16_Optimizer (ZeRO-1)", engine)
        groups = wrapper.bf16_groups
        offsets = [running_offsets(p.numel() for p in group) for group in groups]
        self._build(groups, offsets, wrapper.fp32_groups_flat_partition)
        self._partitions = [parts[self.reducer.rank] for parts in wrapper.bf16_partitioned_groups]

    def publish(self) -> None:
        """Nothing: the engine copies every partition after its one call."""
        self._pending.clear()

    def _read_gradient(self, out: Tensor, weight: float) -> None:
        for shard, grad in zip(self.shards, self.wrapper.fp32_groups_gradient_flat_partition, strict=True):
            out[shard.offset : shard.offset + shard.numel].add_(grad, alpha=weight)

    def _clear_engine(self) -> None:
        if hasattr(self.wrapper, "zero_grad"):
            self.wrapper.zero_grad()
        else:  # older DeepSpeed releases clear the two kinds of gradients one by one
            self.wrapper.clear_lp_grads()
            self.wrapper.clear_hp_grads()

    def _after_weights_change(self) -> None:
        _all_gather(self.wrapper, self.wrapper.bf16_groups_flat, self.wrapper.bf16_partitioned_groups)


def _all_gather(wrapper: Any, flat: list[Tensor], partitions: list[list[Tensor]]) -> None:
    """Gather every rank's low-precision partition into the flat weights, as the engine does after its step."""
    from deepspeed.runtime.utils import all_gather_dp_groups

    all_gather_dp_groups(
        groups_flat=flat,
        partitioned_param_groups=partitions,
        dp_process_group=wrapper.real_dp_process_group,
        start_alignment_factor=wrapper.nccl_start_alignment_factor,
        allgather_bucket_size=wrapper.allgather_bucket_size,
    )


def flat_partition(
    names: Sequence[str], offsets: Sequence[int], sizes: dict[str, int], partition_numel: int, rank: int
) -> Layout:
    """Layout of partition ``rank`` of a flat buffer in which parameter ``names[i]`` starts at ``offsets[i]``."""
    low, high = rank * partition_numel, (rank + 1) * partition_numel
    segments = []
    for name, at in zip(names, offsets, strict=True):
        start, stop = max(at, low), min(at + sizes[name], high)
        if start < stop:
            segments.append(Segment(name, start - at, stop - start, start - low))
    return Layout(tuple(segments), partition_numel)


def _offsets(wrapper: Any) -> list[list[int]]:
    """Start of each parameter in its group's flat buffer; older DeepSpeed releases pack without alignment gaps."""
    recorded: list[list[int]] | None = getattr(wrapper, "round_robin_bit16_offsets", None)
    if recorded is not None:
        return recorded
    return [running_offsets(p.numel() for p in group) for group in wrapper.round_robin_bit16_groups]
