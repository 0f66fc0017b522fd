"""What the README's code blocks take as given, and the loops that show that they train: a job per name.

A block ``python run=NAME`` or ``json run=NAME`` becomes a script: the common head, the job's ``before``, the block as
it stands, the job's ``after``. A JSON block is the file ``block.json`` instead. Every script has to see a refresh
accepted under the block's own settings, so it trains for longer than the default ``warmup_steps``.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

HEAD = f"""
import json, os, sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from torch import nn
import dho2_ds
from tests.distributed import silence_shm_op

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return self.blocks(x)


class LossNet(Net):  # returns its loss
    def forward(self, x):
        return (super().forward(x) - x[:, :1].sin()).square().mean()


def report(optimizer, steps=102):
    stats = optimizer.curvature_stats()
    assert (stats["steps"], stats["refreshes"], stats["rejected"]) == (steps, 1, 0), stats
    print("the block trained", flush=True)
"""

LOOP = """
def train(model, optimizer, batch):
    for _ in range(102):
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
"""


@dataclass(frozen=True)
class Job:
    """How a block is run: the launcher, the packages beyond DeepSpeed, and the code around the block."""

    launcher: str
    before: str
    after: str
    packages: tuple[str, ...] = ()


JOBS = {
    "deepspeed": Job(
        "deepspeed",
        """
import deepspeed
silence_shm_op()
deepspeed.init_distributed("gloo")
config = json.load(open("block.json"))
if "train_batch_size" not in config:
    config["train_micro_batch_size_per_gpu"] = 32
model = LossNet()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
""",
        """
for _ in range(102):
    engine.backward(engine(torch.randn(32, 8)))
    engine.step()
report(engine.basic_optimizer)
""",
    ),
    "engine": Job(
        "deepspeed",
        """
import deepspeed
silence_shm_op()
deepspeed.init_distributed("gloo")
x = torch.randn(32, 8)
criterion, loader = nn.MSELoss(), [{"x": x, "y": x[:, :1].sin()}]
config = {"train_micro_batch_size_per_gpu": 32, "optimizer": {"type": "DHO2", "params": {}}}
model = Net()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
""",
        """
for _ in range(102):
    engine.backward(criterion(engine(x), x[:, :1].sin()))
    engine.step()
report(engine.basic_optimizer)
""",
    ),
    "fsdp2": Job(
        "torchrun",
        LOOP
        + """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
mesh, model = init_device_mesh("cpu", (2,)), LossNet()
""",
        """
train(model, optimizer, torch.randn(32, 8))
report(optimizer)
dist.barrier()
os._exit(0)  # gloo's teardown aborts now and then
""",
    ),
    "trainer": Job(
        "deepspeed",
        """
import functools
import transformers
from transformers import Trainer
silence_shm_op()
TrainingArguments = functools.partial(  # a CPU, few steps, no files: the options of a machine, not of the optimizer
    transformers.TrainingArguments, use_cpu=True, max_steps=12, save_strategy="no", report_to="none"
)


class Model(LossNet):
    def forward(self, x):
        return {"loss": super().forward(x)}


model, rows = Model(), [{"x": row} for row in torch.randn(512, 8)]
""",
        """
report(trainer.model_wrapped.basic_optimizer, steps=12)  # warmup_steps is 10 in the block's file
""",
        ("transformers", "accelerate"),
    ),
    "fabric": Job(
        "torchrun",
        """
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
model = LossNet()
""",
        """
for _ in range(102):
    optimizer.zero_grad()
    fabric.backward(model(torch.randn(32, 8)))
    optimizer.step()
report(dho2_ds.attaching.as_dho2(optimizer))
fabric.barrier()
os._exit(0)  # gloo's teardown aborts now and then
""",
        ("lightning",),
    ),
    "lightning": Job(
        "torchrun",
        "import lightning\n",
        """
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = LossNet()

    def training_step(self, batch, index):
        return self.net(batch)

    def configure_optimizers(self):
        return dho2_ds.DHO2(self.parameters(), lr=1e-3)


Module.on_train_start = on_train_start
options = dict(accelerator="cpu", devices=2, strategy="ddp", max_steps=102, max_epochs=-1)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = lightning.Trainer(**options, **quiet)
trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(512, 8), batch_size=32))
report(dho2_ds.attaching.as_dho2(trainer.optimizers[0]))
trainer.strategy.barrier()
os._exit(0)  # gloo's teardown aborts now and then
""",
        ("lightning",),
    ),
}
