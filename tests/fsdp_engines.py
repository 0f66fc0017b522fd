"""The digits job of :mod:`tests.engines` on FSDP1, FSDP2, HSDP, tensor parallelism and ZeroRedundancyOptimizer.

Kinds are ``engine:variant+option``: engines ``ddp``, ``fsdp2``, ``hsdp``, ``tp``, ``fsdp1`` and ``zero_redundancy``;
options ``ac`` (activation checkpointing of the middle layer, non-reentrant), ``compile`` (of the middle layer;
``inductor``), ``attention`` (another model, :class:`Attention`) and ``double`` (float64).
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import dho2_ds
from tests import engines

FSDP1_STRATEGIES = {
    "orig": ShardingStrategy.FULL_SHARD,
    "flat": ShardingStrategy.FULL_SHARD,
    "grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "no_shard": ShardingStrategy.NO_SHARD,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
}


class Layers(nn.Module):
    """:class:`tests.engines.Classifier` with the same initial values, in modules that can be wrapped one by one."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        plain = engines.Classifier(seed)
        self.layers = nn.ModuleList([nn.Linear(w.shape[1], w.shape[0]) for w in plain.w])
        with torch.no_grad():
            for layer, w, b in zip(self.layers, plain.w, plain.b, strict=True):
                layer.weight.copy_(w)
                layer.bias.copy_(b)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x)
            x = torch.tanh(x) if index < 2 else x
        return F.cross_entropy(at_least_float(x), y)


class Attention(nn.Module):
    """The rows of a digit as a sequence of four, in a small pre-norm transformer with fused attention.

    Of the trajectory's obstacles it has all that engines treat apart: a frozen parameter, tied weights, a parameter
    without gradient, one element, sizes below the number of ranks.
    """

    def __init__(self, width: int = 6, heads: int = 2, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(4, width)
        self.position = nn.Parameter(torch.randn(4, width), requires_grad=False)
        self.layers = nn.ModuleList([nn.Identity(), Block(width, heads), nn.Identity()])
        self.first, self.second = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.second.weight = self.first.weight
        self.idle = nn.Parameter(torch.ones(3))
        self.gain = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layers[1](self.embed(x.view(-1, 4, 4)) + self.position)
        h = self.second(torch.tanh(self.first(h))).mean(dim=1)
        return F.cross_entropy(at_least_float(self.head(h)) * self.gain, y)


def at_least_float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


def full(tensor: Tensor) -> Tensor:
    """The whole tensor behind a DTensor (collective), or the tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def wrap(model: Any, engine: str, variant: str, options: set[str]) -> nn.Module:
    """Apply one kind of sharding to the model, layer by layer and as a whole; returns what is called."""
    world = dist.get_world_size()
    backend = "inductor" if "inductor" in options else "aot_eager"
    if engine == "tp":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        mesh = mesh["dp"]
    elif engine == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    if "ac" in options:
        model.layers[1] = checkpoint_wrapper(model.layers[1])
    if "compile" in options:
        model.layers[1].compile(backend=backend)
    if engine in ("fsdp2", "hsdp", "tp"):
        arguments: dict[str, Any] = {"mesh": mesh}
        if variant == "shard1":
            arguments["shard_placement_fn"] = lambda p: Shard(1) if p.dim() > 1 else Shard(0)
        if variant == "offload":
            arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if variant in ("bf16", "fp16"):
            low = torch.bfloat16 if variant == "bf16" else torch.float16
            arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        for layer in model.layers:
            if any(True for _ in layer.parameters()):
                fully_shard(layer, **arguments)
        return fully_shard(model, **arguments)
    strategy = FSDP1_STRATEGIES[variant]
    flags: dict[str, Any] = {
        "sharding_strategy": strategy,
        "use_orig_params": variant != "flat",
        "device_id": torch.device("cpu"),
    }
    if variant == "hybrid":
        flags["device_mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    model.layers[1] = FSDP(model.layers[1], **flags)
    return FSDP(model, **flags)


def wrapped(kind: str, model: nn.Module) -> tuple[nn.Module, str]:
    head, *options = kind.split("+")
    engine, _, variant = head.partition(":")
    if engine == "ddp":
        return nn.parallel.DistributedDataParallel(model), engine
    if engine == "zero_redundancy":
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True), engine
    return wrap(model, engine, variant or "orig", set(options)), engine


def groups(module: nn.Module, lr: float, decay: float) -> list[dict[str, Any]]:
    """Weights decay, biases do not; a flat parameter holds both, so it decays or does not as a whole."""
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    split = [[p for n, p in named if n.endswith("weight")], [p for n, p in named if not n.endswith("weight")]]
    return [{"params": part, "weight_decay": d, "lr": lr} for part, d in zip(split, (decay, 0.0), strict=True) if part]


class Run:
    """As :class:`tests.engines.Run`; ``decay=0`` makes flat parameters comparable."""

    def __init__(
        self,
        kind: str,
        rank: int,
        world: int,
        settings: dict[str, Any],
        decay: float = 0.05,
        one_group: bool = False,
    ) -> None:
        settings = copy.deepcopy(settings)
        self.kind, self.rank, self.world, self.step_count = kind, rank, world, 0
        self.data_ranks = world // 2 if kind.startswith("tp") else world
        self.data_rank = rank // 2 if kind.startswith("tp") else rank
        self.model = Attention() if "+attention" in kind else Layers()
        self.dtype = torch.float64 if "+double" in kind else torch.float32
        self.model.to(self.dtype)
        self.module, engine = wrapped(kind, self.model) if world > 1 else (self.model, "single")
        own = groups(self.module, settings["lr"], decay)
        if one_group:  # a flat parameter cannot be split into two
            assert decay == 0.0
            own = [{**own[0], "params": [p for p in self.module.parameters() if p.requires_grad]}]
        self.optimizer: Any
        if engine == "zero_redundancy":
            make = functools.partial(dho2_ds.DHO2, **{k: v for k, v in settings.items() if k != "lr"})
            self.optimizer = ZeroRedundancyOptimizer(own, make, lr=settings["lr"])
            self.inner = self.optimizer.optim
        else:
            self.optimizer = self.inner = dho2_ds.DHO2(own, **settings)
        dho2_ds.attach(self.module, self.optimizer)

    def local(self, step: int, micro: int) -> tuple[Tensor, Tensor]:
        x, y = engines.micro_batch(step, micro)
        share = len(x) // self.data_ranks
        part = slice(self.data_rank * share, (self.data_rank + 1) * share)
        return x[part].to(self.dtype), y[part]

    def clip(self) -> None:
        """Global norm over all parameters, every element counted once whatever the mesh."""
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        square = torch.stack([full(g).double().square().sum() for g in grads]).sum()
        if isinstance(self.module, FSDP) and "no_shard" not in self.kind:
            dist.all_reduce(square, group=self.module.process_group)  # FSDP's own method sums in float32
        norm = square.sqrt()
        for g in grads:
            g.mul_(1.0 / max(1.0, (float(norm) + 1e-6) / engines.CLIP))

    def step(self) -> float:
        total = torch.zeros((), dtype=torch.float64)
        self.optimizer.zero_grad()
        for micro in range(engines.ACCUMULATION):
            loss = self.module(*self.local(self.step_count, micro))
            total += loss.detach().double()
            (loss / engines.ACCUMULATION).backward()
        self.clip()
        self.optimizer.step()
        self.step_count += 1
        if self.world > 1:
            dist.all_reduce(total)
        return float(total) / self.world / engines.ACCUMULATION

    def train(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]

    def weights(self) -> Tensor:
        """(214,) float64 copy of all weights in the order of :class:`tests.engines.Classifier`: w, then b."""
        values = whole_weights(self.module)
        names = sorted(values, key=lambda n: (not n.endswith("weight"), n))
        return torch.cat([values[n].double().reshape(-1) for n in names])


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    """{clean name: whole tensor} on every rank."""
    from dho2_ds.hosts.fsdp import clean_name

    if any(isinstance(m, FSDP) for m in module.modules()):
        with FSDP.summon_full_params(module, writeback=False):
            return {clean_name(n): p.detach().clone() for n, p in module.named_parameters()}
    return {clean_name(n).removeprefix("module."): full(p.detach()).clone() for n, p in module.named_parameters()}


def train_worker(
    rank: int,
    world: int,
    kinds: list[str],
    settings: dict[str, Any],
    steps: int,
) -> dict[str, Any]:
    """As :func:`tests.engines.train_worker`. A flat parameter cannot treat biases apart, so there nothing decays."""
    results: dict[str, Any] = {}
    for kind in kinds:
        refused = settings.get("rule") == "fosi" and settings.get("base") == "sgd"  # a decay is not in FOSI's Hessian
        run = Run(kind, rank, world, settings, 0.0 if "flat" in kind or refused else 0.05)
        losses = run.train(steps)
        results[kind] = {"losses": losses, "weights": run.weights(), "stats": run.inner.curvature_stats()}
    return results
