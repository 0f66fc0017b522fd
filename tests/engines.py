"""One small real training job on every engine, for the tests that compare engines with each other and the reference.

Data: scikit-learn's handwritten digits, averaged to 4x4 pixels. Model: 16-6-6-10 tanh classifier, 214 parameters, two
param groups (weights decay, biases do not), small enough for a dense float64 Hessian.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import dho2_ds
from tests.distributed import silence_shm_op

MICRO_BATCH = 96  # over all ranks
ACCUMULATION = 2
CLIP = 1.0
SMALLER, FADE = 0.1, 0.97
"""Of a scheduled job: the biases' share of the weights' lr, and what every lr is multiplied by after each step."""
SETTINGS: dict[str, Any] = {
    "lr": 1e-2,
    "num_eigenvectors": 4,
    "newton_lr": 0.2,
    "max_lr_scale": 2.0,
    "curvature": {"warmup_steps": 5, "interval": 10, "lanczos_steps": 60},
}


@cache
def digits() -> tuple[Tensor, Tensor]:
    """1,792 digits as 16 float64 pixels in [0, 1], and their labels."""
    x, y = load_digits(return_X_y=True)
    pixels = torch.tensor(x[:1792] / 16.0).view(-1, 4, 2, 4, 2).mean(dim=(2, 4)).reshape(-1, 16)
    return pixels, torch.tensor(y[:1792])


def micro_batch(step: int, micro: int) -> tuple[Tensor, Tensor]:
    """The global micro-batch, the same whatever the world size."""
    x, y = digits()
    generator = torch.Generator().manual_seed(1000 * step + micro)
    rows = torch.randperm(len(x), generator=generator)[:MICRO_BATCH]
    return x[rows], y[rows]


class Classifier(nn.Module):
    """Returns its loss, as DeepSpeed users' models do."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        sizes = [(6, 16), (6, 6), (10, 6)]
        self.w = nn.ParameterList(
            [0.8 * torch.randn(s, generator=generator, dtype=torch.float64).float() for s in sizes]
        )
        self.b = nn.ParameterList(
            [0.3 * torch.randn(s[0], generator=generator, dtype=torch.float64).float() for s in sizes]
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return classifier_loss([*self.w, *self.b], (x.to(self.w[0].dtype), y))


def classifier_loss(params: list[Tensor], batch: Any) -> Tensor:
    """The loss as a function of the parameters: three weights, then three biases."""
    h, y = batch
    for i in range(3):
        h = F.linear(h, params[i], params[3 + i])
        h = torch.tanh(h) if i < 2 else h
    return F.cross_entropy(h, y)


def groups(model: Classifier, lr: float, decay: float = 0.05, scheduled: bool = False) -> list[dict[str, Any]]:
    own = {} if lr == "auto" else {"lr": lr}
    smaller = {"lr": lr * SMALLER} if scheduled else {}
    return [
        {"params": list(model.w), "weight_decay": decay, **own},
        {"params": list(model.b), "weight_decay": 0.0, **smaller},
    ]


def decay_of(settings: dict[str, Any]) -> float:
    """Rule ``fosi`` refuses a decay that is added to the gradient."""
    return 0.0 if settings.get("rule") == "fosi" and settings.get("base") in ("sgd", "adam") else 0.05


def fading(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: FADE**step)


def deepspeed_config(stage: int, variant: str, settings: dict[str, Any], world: int) -> dict[str, Any]:
    """JSON for one stage. Variants: fp32, bf16, bf16_accum (BF16_Optimizer), offload, sub_groups."""
    config: dict[str, Any] = {
        "train_batch_size": MICRO_BATCH * ACCUMULATION,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "steps_per_print": 10**9,
        "optimizer": {"type": "DHO2", "params": settings},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6},
    }
    zero = config["zero_optimization"]
    if variant.startswith("bf16"):
        config["bf16"] = {"enabled": True}
    if variant == "bf16_accum":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if variant == "offload":
        zero["offload_optimizer"] = {"device": "cpu"}
    if variant == "sub_groups":
        zero["sub_group_size"] = 60
    if variant == "persistence0":
        zero["stage3_param_persistence_threshold"] = 0
    if variant == "round_robin":
        zero["round_robin_gradients"] = True
    return config


class Run:
    """One engine around one model; ``train`` steps it and records losses.

    ``overrides`` replaces entries of the DeepSpeed configuration. ``scheduled``: groups of different lr, which fade.
    """

    def __init__(
        self,
        kind: str,
        rank: int,
        world: int,
        settings: dict[str, Any],
        seed: int = 0,
        overrides: dict[str, Any] | None = None,
        scheduled: bool = False,
    ) -> None:
        self.kind, self.rank, self.world = kind, rank, world
        settings = copy.deepcopy(settings)
        self.model = Classifier(seed)
        given = groups(self.model, settings["lr"], decay_of(settings), scheduled)
        self.step_count = 0
        engine, _, variant = kind.partition(":")
        self.engine: Any = None
        self.scheduler: Any = None
        if engine.startswith("zero"):
            import deepspeed

            silence_shm_op()
            deepspeed.init_distributed(dist_backend="gloo", verbose=False)
            config = {**deepspeed_config(int(engine[4:]), variant or "fp32", settings, world), **(overrides or {})}
            self.engine, _, _, _ = deepspeed.initialize(
                model=self.model,
                model_parameters=given,
                config=config,
                lr_scheduler=fading if scheduled else None,  # the engine steps it
            )
            self.optimizer = self.engine.basic_optimizer
            self.module: nn.Module = self.engine
        else:
            if variant == "double":
                self.model.double()
            self.optimizer = dho2_ds.DHO2(given, **settings)
            self.scheduler = fading(self.optimizer) if scheduled else None
            self.module = nn.parallel.DistributedDataParallel(self.model) if engine == "ddp" else self.model
            dho2_ds.attach(self.module, self.optimizer)

    def local(self, step: int, micro: int) -> tuple[Tensor, Tensor]:
        x, y = micro_batch(step, micro)
        share = len(x) // self.world
        part = slice(self.rank * share, (self.rank + 1) * share)
        if self.kind.endswith("double"):
            return x[part], y[part]
        return x[part].float(), y[part]

    def step(self) -> float:
        """One optimizer step of ACCUMULATION micro-batches; returns the mean loss over all ranks before it."""
        total = torch.zeros((), dtype=torch.float64)
        if self.engine is None:
            self.optimizer.zero_grad()
        for micro in range(ACCUMULATION):
            loss = self.module(*self.local(self.step_count, micro))
            total += loss.detach().double()
            if self.engine is not None:
                self.engine.backward(loss)
                self.engine.step()
            else:
                (loss / ACCUMULATION).backward()
        if self.engine is None:
            norm = torch.cat([p.grad.reshape(-1) for p in self.model.parameters()]).norm()
            for p in self.model.parameters():
                p.grad.mul_(1.0 / max(1.0, (float(norm) + 1e-6) / CLIP))
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        self.step_count += 1
        if self.world > 1:
            dist.all_reduce(total)
        return float(total) / self.world / ACCUMULATION

    def train(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]

    def weights(self) -> Tensor:
        """(214,) float64 copy of all weights in model order (w, then b)."""
        params = list(self.model.parameters())
        if self.kind.startswith("zero3"):
            import deepspeed

            with deepspeed.zero.GatheredParameters(params):
                return torch.cat([p.detach().double().reshape(-1).clone() for p in params])
        return torch.cat([p.detach().double().reshape(-1).clone() for p in params])


def train_worker(
    rank: int, world: int, kinds: list[str], settings: dict[str, Any], steps: int, scheduled: bool = False
) -> dict[str, Any]:
    """Losses, weights and statistics of each kind of engine, trained one after the other in one world."""
    results: dict[str, Any] = {}
    for kind in kinds:
        run = Run(kind, rank, world, settings, scheduled=scheduled)
        losses = run.train(steps)
        results[kind] = {"losses": losses, "weights": run.weights(), "stats": run.optimizer.curvature_stats()}
    return results
