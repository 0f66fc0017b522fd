"""The tasks: a model, its data, a fixed budget of steps, and the quantity whose target is to be reached.

Sizes are fixed. One run of a first-order peer takes 0.1 to 1.5 minutes on one core; the title of a task says what the
curve of a run holds. A seed fixes initial weights and the order of batches, which are the same for all peers.

Schedule, for all tasks and peers: linear warm-up over 5 % of the steps, then a cosine down to zero. No weight decay
(where a penalty is wanted it is part of the loss), gradient clipping on the GPT only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import data as registry
import torch
from _models import (
    CONVECTION_SPEED,
    Autoencoder,
    Classifier,
    Convection,
    ConvNet,
    LeNet,
    TableClassifier,
    convection_points,
)
from char_gpt import CharGPT
from pinn_burgers import Burgers, points
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

Batch = tuple[Tensor, ...]
WARMUP_FRACTION = 0.05
CHUNK = 1024  # rows of an evaluation at once
REVISION = 1  # of the tasks; raise it when a change makes their recorded results incomparable


@dataclass(frozen=True)
class Data:
    """Tensors with one row per example, for training and for evaluation."""

    train: Batch
    evaluation: Batch


@dataclass(frozen=True)
class Task:
    """One task.

    `batch` None: every step sees all the data. `measure(model, data)` gives the value of the curve, lower is better.
    `metric(model, data)` is a further number of the end of a run. `target` replaces the target by rule. `exact`: the
    loss is too ill-conditioned for float32 differences of gradients, so Hessian-vector products are exact ones.
    `points` is how often a run is evaluated.
    """

    name: str
    title: str
    build: Callable[[], nn.Module]
    data: Callable[[], Data]
    batch: int | None
    steps: int
    measure: Callable[[nn.Module, Data], float]
    metric: Callable[[nn.Module, Data], float] | None = None
    metric_name: str = ""
    target: float | None = None
    exact: bool = False
    clip: float | None = None
    logarithmic: bool = False
    points: int = 50

    def batches(self, seed: int) -> Iterator[Batch]:
        """Endless batches, each epoch a permutation of its own."""
        train = self.data().train
        if self.batch is None:
            while True:
                yield train
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(train[0]), generator=generator)
            for start in range(0, len(order) - self.batch + 1, self.batch):
                rows = order[start : start + self.batch]
                yield tuple(tensor[rows] for tensor in train)


def schedule(step: int, steps: int) -> float:
    """The factor of the peak learning rate at a step: warm-up, then cosine."""
    warmup = max(1, round(WARMUP_FRACTION * steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def mean_loss(model: nn.Module, data: Data) -> float:
    """The loss over all evaluation rows."""
    rows, total = len(data.evaluation[0]), 0.0
    for start in range(0, rows, CHUNK):
        chunk = tuple(tensor[start : start + CHUNK] for tensor in data.evaluation)
        total += model(*chunk).item() * len(chunk[0])
    return total / rows


def training_loss(model: nn.Module, data: Data) -> float:
    """The loss over all training rows at once (full batch)."""
    return float(model(*data.train))


def error_rate(model: nn.Module, data: Data) -> float:
    assert isinstance(model, Classifier)
    return model.error_rate(*data.evaluation)


@cache
def _fashion(labels: bool) -> Data:
    """Evaluation: a part of the training images for the autoencoder (optimization is compared), else test images. The
    classifier's images are halved by averaging, which makes a run affordable.
    """
    arrays = registry.load("fashion-mnist")
    x_train, x_test = (torch.from_numpy(arrays[f"x_{part}"]).float() / 255 for part in ("train", "test"))
    if not labels:
        return Data((x_train.flatten(1),), (x_train[:4096].flatten(1),))
    y_train, y_test = (torch.from_numpy(arrays[f"y_{part}"]).long() for part in ("train", "test"))
    mean, deviation = x_train.mean(), x_train.std()
    x_train, x_test = (avg_pool2d((x - mean).unsqueeze(1) / deviation, 2) for x in (x_train, x_test))
    return Data((x_train, y_train), (x_test[:4096], y_test[:4096]))


@cache
def _cifar10() -> Data:
    arrays = registry.load("cifar10")
    x_train, x_test = (torch.from_numpy(arrays[f"x_{part}"]) for part in ("train", "test"))
    y_train, y_test = (torch.from_numpy(arrays[f"y_{part}"]).long() for part in ("train", "test"))
    x_test = x_test[:2000]
    scale = [0.247, 0.2435, 0.2616], [0.4914, 0.4822, 0.4465]  # deviations and means of the training set
    deviation, mean = (torch.tensor(values).view(1, 3, 1, 1) for values in scale)
    x_train, x_test = ((x.permute(0, 3, 1, 2) / 255 - mean) / deviation for x in (x_train, x_test))
    return Data((x_train.contiguous(), y_train), (x_test.contiguous(), y_test[:2000]))


@cache
def _shakespeare(block: int = 64, evaluated: int = 512) -> Data:
    """Rows of block + 1 characters; the last tenth of the text is held out, and rows spread over it are evaluated."""
    text = torch.from_numpy(registry.load("shakespeare")["text"]).long()
    _, codes = text.unique(return_inverse=True)
    rows = codes[: len(codes) // (block + 1) * (block + 1)].view(-1, block + 1)
    cut = len(rows) * 9 // 10
    held_out = rows[cut:]
    return Data((rows[:cut],), (held_out[:: len(held_out) // evaluated][:evaluated],))


@cache
def _digits() -> Data:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    everything = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    return Data(everything, everything)


@cache
def _breast_cancer() -> Data:
    from sklearn.datasets import load_breast_cancer

    x, y = load_breast_cancer(return_X_y=True)
    everything = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32), torch.tensor(y)
    return Data(everything, everything)


LOGISTIC_DECAY = 1e-4


@cache
def _float64_logistic() -> TableClassifier:
    """A model to evaluate in: the one that is trained may carry an optimizer's hooks."""
    with torch.random.fork_rng():
        return TableClassifier((30, 2), LOGISTIC_DECAY).double()


@cache
def _logistic_optimum() -> float:
    """The least loss, in float64."""
    model, (x, y) = _float64_logistic(), _breast_cancer().train
    options = {"tolerance_grad": 1e-13, "tolerance_change": 0.0, "max_iter": 5000, "max_eval": 10000}
    solver = torch.optim.LBFGS(model.parameters(), history_size=60, line_search_fn="strong_wolfe", **options)

    def closure() -> Tensor:
        solver.zero_grad()
        loss: Tensor = model(x.double(), y)
        loss.backward()
        return loss

    with torch.enable_grad():
        solver.step(closure)
        return closure().item()


def _gap(model: nn.Module, data: Data) -> float:
    """Loss above the least possible one, in float64."""
    optimum, (x, y) = _logistic_optimum(), data.train
    twin = _float64_logistic()
    twin.load_state_dict(model.state_dict())
    return float(twin(x.double(), y).item()) - optimum


@cache
def _burgers() -> Data:
    return Data(points(1024), ())


@cache
def _convection() -> Data:
    return Data(convection_points(1024), ())


def _convection_error(model: nn.Module, data: Data) -> float:
    """Relative error in the mean square sense, on scattered points."""
    assert isinstance(model, Convection)
    inside = data.train[0]
    exact = torch.sin(inside[:, 1:] - CONVECTION_SPEED * inside[:, :1])
    return float((model.jet(inside)[0] - exact).norm() / exact.norm())


def _gpt(codes: int = 84) -> CharGPT:
    return CharGPT(block=64, width=64, heads=4, layers=2, codes=codes)


TASKS = {
    task.name: task
    for task in (
        Task(
            "autoencoder",
            "deep autoencoder on Fashion-MNIST, batch 1024: squared error per image on 4,096 training images",
            Autoencoder,
            lambda: _fashion(labels=False),
            batch=1024,
            steps=600,
            measure=mean_loss,
        ),
        Task(
            "lenet",
            "LeNet on Fashion-MNIST at 14 x 14 pixels, batch 4096: cross entropy on 4,096 test images",
            LeNet,
            lambda: _fashion(labels=True),
            batch=4096,
            steps=200,
            measure=mean_loss,
            metric=error_rate,
            metric_name="test error",
        ),
        Task(
            "cifar10",
            "CNN on CIFAR-10, batch 128: error rate on 2,000 test images",
            ConvNet,
            _cifar10,
            batch=128,
            steps=800,
            measure=error_rate,
            target=0.35,
        ),
        Task(
            "gpt",
            "character GPT on Shakespeare, 16 x 64 characters: held-out nats per character",
            _gpt,
            _shakespeare,
            batch=16,
            steps=800,
            measure=mean_loss,
            clip=1.0,
        ),
        Task(
            "gpt192",
            "character GPT on Shakespeare, 192 x 64 characters: held-out nats per character",
            _gpt,
            _shakespeare,
            batch=192,
            steps=150,
            measure=mean_loss,
            clip=1.0,
        ),
        Task(
            "burgers",
            "physics-informed network, Burgers' equation, full batch: loss",
            Burgers,
            _burgers,
            batch=None,
            steps=1500,
            measure=training_loss,
            exact=True,
            logarithmic=True,
            points=99,
        ),
        Task(
            "convection",
            "physics-informed network, convection equation, full batch: loss",
            Convection,
            _convection,
            batch=None,
            steps=1500,
            measure=training_loss,
            metric=_convection_error,
            metric_name="relative error",
            exact=True,
            logarithmic=True,
            points=99,
        ),
        Task(
            "mlp",
            "tanh network on scikit-learn's digits (1,797 x 64), batch 256: penalised cross entropy on all rows",
            lambda: TableClassifier((64, 64, 32, 10), decay=1e-4),
            _digits,
            batch=256,
            steps=1000,
            measure=mean_loss,
            metric=error_rate,
            metric_name="error",
        ),
        Task(
            "logistic",
            "logistic regression on scikit-learn's breast cancer table (569 x 30), full batch: loss above the optimum",
            lambda: TableClassifier((30, 2), LOGISTIC_DECAY),
            _breast_cancer,
            batch=None,
            steps=500,
            measure=_gap,
            logarithmic=True,
            points=99,
        ),
    )
}
