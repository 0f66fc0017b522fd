"""DeepSpeed ZeRO-3: parameters partitioned one by one, float32 masters in flat sub-groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dho2_ds.curvature.hvp import Exact, Root
from dho2_ds.hosts.base import Loss
from dho2_ds.hosts.zero import PartitionedHost
from dho2_ds.sharding.layout import Layout, Segment, concatenate
from dho2_ds.shards import consecutive


class Zero3Host(PartitionedHost):
    """ZeRO-3 with any ``sub_group_size``, with or without CPU optimizer offload."""

    exact_refusal = (
        "ZeRO-3 frees the weights that a second backward pass would need; "
        "set curvature.hvp to 'finite_difference' or 'auto', or use stage 0-2"
    )

    def __init__(self, engine: Any) -> None:
        super().__init__("DeepSpeed ZeRO-3", engine)
        wrapper = self.wrapper
        groups: Sequence[Sequence[Any]] = wrapper.fp16_groups
        self.sizes = {self._names[id(p)]: int(p.ds_numel) for group in groups for p in group}
        self.shapes = {self._names[id(p)]: tuple(p.ds_shape) for group in groups for p in group}
        owners = [int(wrapper.sub_group_to_group_id[i]) for i in range(len(groups))]
        self.group_of = {self._names[id(p)]: i for i, group in zip(owners, groups, strict=True) for p in group}
        self.layouts = [
            concatenate([self._sub_group_layout(group, rank) for group in groups])
            for rank in range(self.reducer.world_size)
        ]
        masters = wrapper.fp32_partitioned_groups_flat
        self.shards = consecutive(masters, owners)
        self._partitions = list(wrapper.fp16_partitioned_groups_flat)
        for index, master in enumerate(masters):
            self._clear_padding(index, master.data)
            self._clear_padding(index, self._partitions[index].data)

    def _sub_group_layout(self, params: Sequence[Any], rank: int) -> Layout:
        """Each parameter takes ``partition_numel`` slots on every rank; the last ranks' slots may be padding."""
        segments, at = [], 0
        for param in params:
            name, slots = self._names[id(param)], int(param.partition_numel())
            start = rank * slots
            length = min(max(self.sizes[name] - start, 0), slots)
            if length:
                segments.append(Segment(name, start, length, at))
            at += slots
        return Layout(tuple(segments), at)

    def _accumulators(self) -> list[Tensor]:
        buffer = getattr(self.wrapper, "grad_partitions_flat_buffer", None)
        return super()._accumulators() + ([buffer] if buffer is not None else [])

    def exact(self, losses: Sequence[Loss], root: Root) -> Exact:
        raise RuntimeError(f"curvature.hvp='exact': {self.exact_refusal}")

    def _publish(self, index: int) -> None:
        self.wrapper._reassign_or_swap_out_partitioned_parameters(index)

    def _clear_engine(self) -> None:
        wrapper = self.wrapper
        if self.offload:
            wrapper.reset_cpu_buffers()
        else:
            wrapper.averaged_gradients = {}
        wrapper.zero_grad(set_to_none=True)

    def _before_weights_change(self) -> None:
        self.wrapper._partition_all_parameters()

    def _after_weights_change(self) -> None:
        """Gathered copies are stale now: small parameters that ZeRO-3 keeps resident are gathered again."""
        persistent = self.wrapper.persistent_parameters
        if persistent and persistent[0].device.type == "cpu":
            # One by one: of several at once, older DeepSpeed releases wait for the last only, and gloo's are unordered.
            for param in persistent:
                param.all_gather([param])
        elif persistent:
            persistent[0].all_gather(persistent)
        self.wrapper.invalidate_secondary_tensor()
