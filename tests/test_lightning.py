"""Lightning's Fabric and Trainer, on their own strategies; what they compute is what a loop around DDP computes.

Lightning refuses DeepSpeed without CUDA. All of its code but that check and the numbering of devices runs here, on CPU,
by :class:`OnCPU`; what it calls, and when, is its own. FSDP1 (``FSDPStrategy``) passes torch a CUDA index and is not
run: on its side only wrapping differs from ``tests/test_fsdp_*.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import dho2_ds
from tests.distributed import run_ranks, silence_shm_op

lightning = pytest.importorskip("lightning", reason="Lightning is not installed; pip install 'dho2-ds[lightning]'")

pytestmark = pytest.mark.slow

STEPS, BATCH, LR = 12, 32, 1e-2
SETTINGS: dict[str, Any] = {
    "num_eigenvectors": 2,
    "curvature": {"warmup_steps": 3, "interval": 5, "lanczos_steps": 20},
}
CONFIG = {"train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 0.0, "zero_optimization": {"stage": 2}}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Loss(Net):
    def forward(self, x: Tensor) -> Tensor:
        return loss_of(super().forward(x), x)


def loss_of(output: Tensor, x: Tensor) -> Tensor:
    return (output - x[:, :1].sin()).square().mean()


def rows(world: int) -> Tensor:
    return torch.randn(world * STEPS * BATCH, 8, generator=torch.Generator().manual_seed(1))


def batches(rank: int, world: int) -> Iterator[Tensor]:
    yield from rows(world)[rank::world].split(BATCH)


def shard(model: Any, mesh: Any) -> nn.Module:
    fully_shard(model.first, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def optimizer_of(model: nn.Module) -> dho2_ds.DHO2:
    return dho2_ds.DHO2(model.parameters(), lr=LR, **SETTINGS)


def on_cpu(strategy: type) -> type:
    """A DeepSpeed strategy that takes a CPU for a device."""
    properties = {
        "root_device": property(lambda self: torch.device("cpu", 0)),
        "setup_environment": lambda self: super(strategy, self).setup_environment(),
    }
    return type("OnCPU", (strategy,), properties)


def by_hand(rank: int, world: int) -> tuple[list[float], dict[str, Any]]:
    model = nn.parallel.DistributedDataParallel(Loss())
    optimizer = optimizer_of(model)
    dho2_ds.attach(model, optimizer)
    losses = []
    for x in batches(rank, world):
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, optimizer.curvature_stats()


def with_fabric(kind: str, rank: int, world: int) -> tuple[list[float], dict[str, Any]]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy

    if kind == "deepspeed":
        strategy = on_cpu(DeepSpeedStrategy)(process_group_backend="gloo", config=dict(CONFIG))
    elif kind == "fsdp2":
        strategy = ModelParallelStrategy(shard, data_parallel_size=world, tensor_parallel_size=1)
    else:
        strategy = DDPStrategy()
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    if kind == "deepspeed":
        net = Loss()
        model, optimizer = fabric.setup(net, optimizer_of(net))
    else:
        model = fabric.setup_module(Loss())
        optimizer = fabric.setup_optimizers(optimizer_of(model))
    dho2_ds.attach(model, optimizer)
    losses = []
    for x in batches(rank, world):
        loss = model(x)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses, dho2_ds.attaching.as_dho2(optimizer).curvature_stats()


class Module(lightning.LightningModule):
    """As users write them: the loss is in ``training_step``, and ``forward`` returns something else."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.net, self.losses = kind, Net(), []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return loss_of(self(batch[0]), batch[0])

    def on_train_batch_end(self, outputs: dict[str, Tensor], batch: list[Tensor], index: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_model(self) -> None:
        if self.kind == "fsdp2":
            shard(self.net, self.device_mesh)
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)

    def on_train_start(self) -> None:
        if self.kind == "fsdp2":  # here Lightning calls training_step itself, so forward's arguments are not enough
            data = [batch for batch in batches(self.global_rank, self.trainer.world_size)][3::5]
            dho2_ds.attach(self, self.trainer.optimizers[0], loss_fn=lambda model, x: loss_of(model(x), x), data=data)
        elif self.kind == "ddp":
            dho2_ds.attach(self.trainer.strategy.model, self.trainer.optimizers[0])


def with_trainer(kind: str, rank: int, world: int) -> tuple[list[float], dict[str, Any]]:
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy

    if kind == "deepspeed":
        config = {**CONFIG, "optimizer": {"type": "DHO2", "params": {"lr": LR, **SETTINGS}}}
        strategy = on_cpu(DeepSpeedStrategy)(process_group_backend="gloo", config=config)
    elif kind == "fsdp2":
        strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    else:
        strategy = DDPStrategy()
    off = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"
    settings: dict[str, Any] = {"accelerator": "cpu", "devices": world, "max_epochs": 1, **dict.fromkeys(off, False)}
    trainer = lightning.Trainer(strategy=strategy, **settings)
    module = Module(kind)
    trainer.fit(module, DataLoader(TensorDataset(rows(world)[rank::world]), batch_size=BATCH))
    engine = trainer.strategy.model
    optimizer = engine.basic_optimizer if kind == "deepspeed" else trainer.optimizers[0]
    return module.losses, dho2_ds.attaching.as_dho2(optimizer).curvature_stats()


def work(rank: int, world: int) -> dict[str, Any]:
    silence_shm_op()
    found = {"by hand": by_hand(rank, world)}
    # It compares devices with the GPUs that it sees.
    fabric, pytorch = (f"lightning.{part}.strategies.deepspeed._validate_device_index_selection" for part in
                       ("fabric", "pytorch"))  # fmt: skip
    with mock.patch(fabric), mock.patch(pytorch):
        for kind in ("ddp", "fsdp2", "deepspeed"):
            found[f"Fabric, {kind}"] = with_fabric(kind, rank, world)
            found[f"Trainer, {kind}"] = with_trainer(kind, rank, world)
    return found


@pytest.mark.timeout(300)
def test_lightning_trains_as_a_loop_by_hand() -> None:
    for found in run_ranks(2, work, timeout=280, env={"TORCHELASTIC_RUN_ID": "test"}):
        losses, stats = found.pop("by hand")
        assert stats["refreshes"] == 2 and losses[-1] < losses[0]
        for name, (others, other) in found.items():
            assert other["refreshes"] == 2, name
            torch.testing.assert_close(torch.tensor(others), torch.tensor(losses), rtol=1e-3, atol=1e-5, msg=name)
