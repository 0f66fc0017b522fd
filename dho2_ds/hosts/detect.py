"""Which host a model or engine is, and what we refuse before training starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dho2_ds.config import ConfigError
from dho2_ds.hosts.base import Host
from dho2_ds.hosts.replicated import ReplicatedHost
from dho2_ds.hosts.zero import BF16Host, Zero0Host, ZeroHost
from dho2_ds.hosts.zero3 import Zero3Host
from dho2_ds.hosts.zero_redundancy import ZeroRedundancyHost


def is_engine(model: object) -> bool:
    """True for a DeepSpeed engine, without importing DeepSpeed."""
    return hasattr(model, "basic_optimizer") and hasattr(model, "zero_optimization_stage")


def make_host(model: nn.Module, groups: list[dict[str, Any]], optimizer: object = None) -> Host:
    """Build the adapter for what the training loop calls. A collective on FSDP and ZeroRedundancyOptimizer.

    Args:
        model: a DeepSpeed engine, an FSDP root, ``DistributedDataParallel``, or a plain module in one process.
        groups: the optimizer's param groups (not used under DeepSpeed).
        optimizer: what the training loop steps, possibly a wrapper such as ``ZeroRedundancyOptimizer``.

    Raises:
        ConfigError: the engine is set up in a way that is not supported; names the setting and the way out.
    """
    if is_engine(model):
        return _engine_host(model)
    params = [group["params"] for group in groups]
    sharded = _fsdp_host(model, params)
    if sharded is not None:
        return sharded
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if hasattr(optimizer, "consolidate_state_dict"):
        if getattr(optimizer, "_overlap_with_ddp", False):
            raise ConfigError("overlap_with_ddp=True: must be False; the hybrid step needs all gradients at once")
        return ZeroRedundancyHost(inner, params, optimizer.process_group)  # type: ignore[attr-defined]
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return ReplicatedHost("DistributedDataParallel", inner, params, params, model.process_group)
    known = {id(p) for p in model.parameters()}
    if not any(id(p) in known for group in params for p in group):
        raise ConfigError(
            "model: must own the optimizer's parameters; attach the model it was built from, or under DeepSpeed the "
            "engine itself, not its module"
        )
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ConfigError(
            f"model={type(model).__name__}: must be wrapped with {dist.get_world_size()} ranks; "
            "attach the FSDP or DistributedDataParallel module or the DeepSpeed engine"
        )
    return ReplicatedHost("one process", model, params, params, None)


def _fsdp_host(model: nn.Module, params: list[list[Tensor]]) -> Host | None:
    """The host of a model sharded by FSDP, else None. FSDP is imported only where the model's author did."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for m in model.modules() if fsdp is not None else ():
        if isinstance(m, fsdp.FSDPModule):  # type: ignore[union-attr]
            m.reshard()  # a forward without backward leaves gathered weights in the place of the DTensors
    tensor = sys.modules.get("torch.distributed.tensor")
    if tensor is not None and any(isinstance(p, tensor.DTensor) for p in model.parameters()):
        from dho2_ds.hosts.fsdp2 import FSDP2Host

        return FSDP2Host(model, params)
    if fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules()):
        from dho2_ds.hosts.fsdp1 import FSDP1Host

        return FSDP1Host(model, params)
    return None


def _engine_host(engine: Any) -> Host:
    problems = list(_unsupported(engine))
    if problems:
        raise ConfigError("\n".join(problems))
    wrapper = engine.optimizer
    kind = type(wrapper).__name__
    if kind == "DeepSpeedZeroOptimizer_Stage3":
        return Zero3Host(engine)
    if kind == "BF16_Optimizer":
        return BF16Host(engine)
    if kind == "DeepSpeedZeroOptimizer":
        return ZeroHost(engine)
    group = engine.data_parallel_group
    group = None if dist.get_world_size(group) == 1 else group
    inner = engine.basic_optimizer
    masters = [list(g["params"]) for g in inner.param_groups]
    if wrapper is inner:
        return Zero0Host("DeepSpeed ZeRO-0", engine, masters, masters, group)
    weights = getattr(wrapper, "fp16_groups", None)
    if weights is None:
        raise ConfigError(f"DeepSpeed wrapper {kind}: must be one of ZeRO 0-3 or BF16_Optimizer; set zero_optimization")
    return Zero0Host("DeepSpeed ZeRO-0, low precision", engine, masters, list(weights), group)


def _unsupported(engine: Any) -> Iterator[str]:
    """Engine settings under which our global step or our gradients would be wrong, one line each."""
    wrapper = engine.optimizer
    if type(engine).__name__ == "PipelineEngine":
        yield "pipeline parallelism: must be off; use ZeRO with a model that is not a PipelineModule"
    if getattr(engine, "has_moe_layers", False):
        yield "mixture of experts: must be off; expert parameters have reduction groups of their own"
    if getattr(wrapper, "zenflow", False):
        yield "zero_optimization.zenflow: must be off; remove it"
    if getattr(wrapper, "swap_optimizer", False) or getattr(wrapper, "params_in_nvme_and_cpu", False):
        yield "zero_optimization.offload_*.device='nvme': must be 'cpu' or 'none'; state is needed at every step"
    if getattr(wrapper, "partial_offload", 0.0) not in (0.0, 1.0) and getattr(wrapper, "offload_optimizer", False):
        yield f"zero_optimization.offload_optimizer.ratio={wrapper.partial_offload}: must be 1.0; remove it"
    if getattr(wrapper, "zero_hpz_partition_size", 1) not in (None, 1):
        yield "zero_optimization.zero_hpz_partition_size: must be 1; remove it"
    for key in ("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"):
        asked = getattr(engine, key, False)  # a method, where DeepSpeed asks its configuration
        if getattr(wrapper, key, False) or (asked() if callable(asked) else asked):
            yield f"zero_optimization.{key}: must be false; quantised collectives hide small perturbations"
    managed = getattr(engine, "managed_gradient_accumulation", None)
    if managed is not None and not managed():
        yield "managed_gradient_accumulation=false: must be true; remove it"
    if getattr(engine, "is_deepcompile_enabled", lambda: False)():
        yield "compile.deepcompile=true: must be false; remove it"
    for name in ("model_parallel_world_size", "mp_world_size"):
        size = getattr(engine, name, 1)
        size = size() if callable(size) else size
        if isinstance(size, int) and size > 1:
            yield f"tensor or model parallelism of size {size}: must be 1; use data parallelism"
            break
    sequence = getattr(engine, "sequence_parallel_size", 1)
    if isinstance(sequence, int) and sequence > 1:
        yield f"sequence parallelism of size {sequence}: must be 1; use data parallelism"
    master = getattr(wrapper, "master_weights_and_grads_dtype", torch.float32)
    if master != torch.float32:
        yield f"bf16.bf16_master_weights_and_grads: must be false (master weights are {master}); remove it"
