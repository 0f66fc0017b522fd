"""The optimizers that are compared, each tuned on its own: over learning rates, and variants of what matters most.

All see the same initial weights, batches, schedule and budget, and no weight decay. DHO2 has the rates and variants of
its base, so no more trials than that. Sources: AdamW arXiv 1711.05101; Muon arXiv 2502.16982; SOAP 2409.11321;
Shampoo 1802.09568, 2002.09018; K-FAC 1503.05671 in the inverse-free form of 2312.05705; Sophia 2305.14342; AdaHessian
2006.00719; FOSI 2302.08484; DHO2 2505.00982.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _tasks import Task
from _trainers import (
    HutchinsonTrainer,
    HybridTrainer,
    KfacTrainer,
    LineSearchTrainer,
    MuonTrainer,
    Trainer,
)
from char_gpt import CharGPT
from pinn_burgers import Burgers
from torch import nn

from dho2_ds.learning_rate import START

Settings = dict[str, Any]
Build = Callable[[nn.Module, Task, Settings], Trainer]

ADAM_RATES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5)
MUON_RATES = (5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5)
SGD_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)
HESSIAN_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
FIRST_RATES = 6
"""Learning rates of a peer that are tried whatever they give; see :func:`_runs.missing`."""


@dataclass(frozen=True)
class Peer:
    """One way to train.

    `rates` are tried from the middle outwards. `variants` are merged into the settings, the first one is the usual one;
    `sized` gives settings that follow the budget in steps. `first_order` marks those whose results set the target,
    `ours` DHO2. `refuses(task, model)` is the reason why it cannot be used, or "".
    """

    name: str
    title: str
    build: Build
    rates: tuple[float, ...]
    variants: tuple[Settings, ...] = ({},)
    sized: Callable[[Task, int], Settings] = lambda task, steps: {}
    first_order: bool = False
    ours: bool = False
    refuses: Callable[[Task, nn.Module], str] = lambda task, model: ""

    def settings(self, task: Task, steps: int, lr: float, variant: Settings | None = None) -> Settings:
        """All that a run is built from, which is also what its key is made of."""
        return {"lr": lr, **self.sized(task, steps), **(self.variants[0] if variant is None else variant)}

    def outwards(self) -> list[float]:
        """The learning rates from the middle outwards."""
        middle = (len(self.rates) - 1) / 2
        return sorted(self.rates, key=lambda lr: abs(self.rates.index(lr) - middle))

    def grid(self, task: Task, steps: int) -> list[Settings]:
        """Everything that counts as a trial of this peer."""
        return [self.settings(task, steps, lr, variant) for variant in self.variants for lr in self.rates]


def _adamw(model: nn.Module, task: Task, settings: Settings) -> Trainer:
    return Trainer(model, [torch.optim.AdamW(model.parameters(), weight_decay=0.0, **settings)], task.clip)


def _sgd(model: nn.Module, task: Task, settings: Settings) -> Trainer:
    return Trainer(model, [torch.optim.SGD(model.parameters(), **settings)], task.clip)


def _hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Weights of two and more dimensions, without embeddings and the output layer."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return [p for p in model.parameters() if p.ndim >= 2 and id(p) not in embeddings][:-1]


def _muon(model: nn.Module, task: Task, settings: Settings) -> Trainer:
    return MuonTrainer(model, _hidden_matrices(model), clip=task.clip, **settings)


def _soap(model: nn.Module, task: Task, settings: Settings) -> Trainer:
    from pytorch_optimizer import SOAP

    return Trainer(model, [SOAP(model.parameters(), weight_decay=0.0, **settings)], task.clip)


def _shampoo(model: nn.Module, task: Task, settings: Settings) -> Trainer:
    from pytorch_optimizer import ScalableShampoo

    return Trainer(model, [ScalableShampoo(model.parameters(), **settings)], task.clip)


def _kfac(model: nn.Module, task: Task, settings: Settings) -> Trainer:
    sequence = isinstance(model, CharGPT)
    return KfacTrainer(model, settings, sequence=sequence, rest_lr=2e-3, clip=task.clip)


def _sophia(model: nn.Module, task: Task, settings: Settings) -> Trainer:
    from pytorch_optimizer import SophiaH

    optimizer = SophiaH(model.parameters(), **settings)
    return HutchinsonTrainer(model, optimizer, settings["update_period"], clip=task.clip)


def _adahessian(model: nn.Module, task: Task, settings: Settings) -> Trainer:
    from pytorch_optimizer import AdaHessian

    optimizer = AdaHessian(model.parameters(), **settings)
    return HutchinsonTrainer(model, optimizer, settings["update_period"], clip=task.clip)


def _lbfgs(model: nn.Module, task: Task, settings: Settings) -> Trainer:
    options: Settings = {"max_iter": 20, "line_search_fn": "strong_wolfe", "tolerance_grad": 0, "tolerance_change": 0}
    return LineSearchTrainer(model, [torch.optim.LBFGS(model.parameters(), **options, **settings)])


def _hybrid(model: nn.Module, task: Task, settings: Settings) -> Trainer:
    return HybridTrainer(model, settings, clip=task.clip)


def _auto(model: nn.Module, task: Task, settings: Settings) -> Trainer:
    return HybridTrainer(model, {**settings, "lr": "auto"}, clip=task.clip)


def _hvp(task: Task, otherwise: str = "forward_difference") -> str:
    return "exact" if task.exact else otherwise


def _fosi_defaults(task: Task, steps: int) -> Settings:
    """The defaults of FOSI's own library: k = 5, alpha = 0.1, T = 100, warm-up T, 4 k Lanczos steps, scale up to 3."""
    curvature = {"warmup_steps": 100, "interval": 100, "lanczos_steps": 20, "hvp": _hvp(task, "auto")}
    return {"rule": "fosi", "num_eigenvectors": 5, "newton_lr": 0.1, "max_lr_scale": 3.0, "curvature": curvature}


EARLY = {"warmup_steps": 10, "first_interval": 10}


def _tuned_curvature(task: Task, steps: int) -> Settings:
    """Sixteen eigenvectors; refreshes at first at doubling distances, then ten a run, not below 50 steps apart."""
    curvature = {**EARLY, "interval": max(50, steps // 10), "lanczos_steps": 24, "hvp": _hvp(task)}
    return {"num_eigenvectors": 16, "newton_lr": 0.3, "curvature": curvature}


def _one_setting(task: Task, steps: int) -> Settings:
    """The same for every task, whatever its length; products are exact where the task needs it."""
    return {"newton_lr": 0.3, "curvature": {**EARLY, "interval": 100, "lanczos_steps": 16, "hvp": _hvp(task)}}


def _only_full_batch(task: Task, model: nn.Module) -> str:
    return "" if task.batch is None else "needs the full batch"


def _only_with_hidden_matrices(task: Task, model: nn.Module) -> str:
    return "" if _hidden_matrices(model) else "the model has no hidden matrix"


def _only_with_layers_called_once(task: Task, model: nn.Module) -> str:
    if isinstance(model, Burgers):
        return "the loss has derivatives by the inputs, so its layers are not called as modules"
    return ""


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "adamw",
            "AdamW",
            _adamw,
            ADAM_RATES,
            ({"betas": [0.9, 0.999]}, {"betas": [0.9, 0.95]}),
            first_order=True,
        ),
        Peer(
            "muon",
            "Muon + AdamW",
            _muon,
            MUON_RATES,
            ({"momentum": 0.95}, {"momentum": 0.9}),
            first_order=True,
            refuses=_only_with_hidden_matrices,
        ),
        Peer(
            "soap",
            "SOAP",
            _soap,
            ADAM_RATES,
            ({"betas": [0.95, 0.95]}, {"betas": [0.9, 0.99]}),
        ),
        Peer(
            "dho2-soap",
            "DHO2 on SOAP",
            _hybrid,
            ADAM_RATES,
            ({"base": "soap"}, {"base": "soap", "betas": [0.9, 0.99]}),
            _tuned_curvature,
            ours=True,
        ),
        Peer("dho2-one", "DHO2 on SOAP, one setting", _hybrid, (2e-2,), ({"base": "soap"},), _one_setting, ours=True),
        Peer("dho2-auto", "DHO2 on SOAP, lr auto", _auto, (START,), ({"base": "soap"},), _one_setting, ours=True),
        Peer(
            "dho2-adamw",
            "DHO2 on AdamW",
            _hybrid,
            ADAM_RATES,
            ({"base": "adamw", "betas": [0.9, 0.95]}, {"base": "adamw", "betas": [0.9, 0.999]}),
            _tuned_curvature,
            ours=True,
        ),
        Peer("sgd", "SGD, momentum", _sgd, SGD_RATES, ({"momentum": 0.9}, {"momentum": 0.98}), first_order=True),
        Peer(
            "lbfgs",
            "L-BFGS",
            _lbfgs,
            (0.05, 0.1, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0),
            tuple({"history_size": history} for history in (20, 100)),
            refuses=_only_full_batch,
        ),
        Peer(
            "shampoo",
            "Shampoo",
            _shampoo,
            SGD_RATES,
            tuple({"preconditioning_compute_steps": 10, "graft_type": graft} for graft in (3, 1)),
        ),
        Peer(
            "kfac",
            "K-FAC, inverse-free",
            _kfac,
            SGD_RATES,
            tuple({"T": 5, "lr_cov": 0.05, "normalize_lr_cov": True, "damping": damping} for damping in (1e-3, 1e-2)),
            refuses=_only_with_layers_called_once,
        ),
        Peer("sophia", "Sophia-H", _sophia, HESSIAN_RATES, ({"update_period": 10},)),
        Peer("adahessian", "AdaHessian", _adahessian, HESSIAN_RATES, ({"update_period": 1},)),
        Peer("fosi-adam", "FOSI on Adam", _hybrid, ADAM_RATES, ({"base": "adam"},), _fosi_defaults),
        Peer("fosi-sgd", "FOSI on SGD", _hybrid, SGD_RATES, ({"base": "sgd", "momentum": 0.9},), _fosi_defaults),
    )
}
"""In the order in which a sweep takes them."""
