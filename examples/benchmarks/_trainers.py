"""One training step of each kind of optimizer, and its cost: gradients, Hessian-vector products, bytes of state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dho2_ds

HVP_GRADIENTS = 2
"""A Hessian-vector product counts as two gradients: a central difference is that, a double backward costs as much. A
forward difference counts as one, and one more per refresh."""


class Trainer:
    """Steps of one or several torch optimizers that share a backward pass.

    `gradients` counts evaluations so far, Hessian-vector products (`hvps`) included. `counts_evaluations` is true where
    the budget is spent by evaluations, not by calls of `step`.
    """

    counts_evaluations = False

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], clip: float | None = None
    ) -> None:
        self.model, self.optimizers, self.clip = model, optimizers, clip
        self.params = [p for p in model.parameters() if p.requires_grad]
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
        self._evaluations = 0

    @property
    def hvps(self) -> int:
        return 0

    @property
    def gradients(self) -> int:
        return self._evaluations + HVP_GRADIENTS * self.hvps

    def set_schedule(self, factor: float) -> None:
        """Set every learning rate to `factor` times its peak."""
        for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = factor * peak

    def backward(self, batch: tuple[Tensor, ...]) -> float:
        """The loss of a batch; its gradients are left in `.grad`, clipped where the task says so."""
        self.model.zero_grad()
        loss: Tensor = self.model(*batch)
        loss.backward()
        self._evaluations += 1
        self.clip_gradients()
        return loss.item()

    def clip_gradients(self) -> None:
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.params, self.clip)

    def step(self, batch: tuple[Tensor, ...]) -> float:
        loss = self.backward(batch)
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_bytes(self) -> int:
        """Bytes of the tensors that the optimizers hold now, weights and gradients left out."""
        known = {t.data_ptr() for p in self.params for t in (p, p.grad) if t is not None}
        return sum(_tensor_bytes(optimizer.state, known) for optimizer in self.optimizers)


def _tensor_bytes(value: Any, known: set[int]) -> int:
    """Bytes of all tensors below a nest of containers and plain objects, each storage once."""
    if isinstance(value, Tensor):
        if value.data_ptr() in known:
            return 0
        known.add(value.data_ptr())
        return value.untyped_storage().nbytes()
    if isinstance(value, dict):
        return sum(_tensor_bytes(item, known) for item in value.values())
    if isinstance(value, list | tuple):
        return sum(_tensor_bytes(item, known) for item in value)
    return _tensor_bytes(vars(value), known) if hasattr(value, "__dict__") and not isinstance(value, type) else 0


class MuonTrainer(Trainer):
    """`torch.optim.Muon` on hidden matrices, AdamW on the rest.

    Muon takes matrices only, so the weight of a convolution is handed over as a view, one row per output channel.
    """

    def __init__(
        self, model: nn.Module, hidden: Iterable[nn.Parameter], lr: float, momentum: float, **shared: Any
    ) -> None:
        self._views = [(p, nn.Parameter(p.detach().view(len(p), -1))) for p in hidden]
        chosen = {id(p) for p, _ in self._views}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        matrices = [view for _, view in self._views]
        muon = torch.optim.Muon(matrices, lr, weight_decay=0.0, momentum=momentum, adjust_lr_fn="match_rms_adamw")
        super().__init__(model, [muon, torch.optim.AdamW(rest, lr, betas=(0.9, 0.95), weight_decay=0.0)], **shared)

    def backward(self, batch: tuple[Tensor, ...]) -> float:
        loss = super().backward(batch)
        for param, view in self._views:
            assert param.grad is not None
            view.grad = param.grad.view_as(view)
        return loss


class HutchinsonTrainer(Trainer):
    """Optimizers that take an estimate of the Hessian's diagonal, z * (H z) with random signs z, every `period` steps.

    The products are made here rather than inside the optimizer, so that they are counted and no graph is left behind.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, period: int, **shared: Any) -> None:
        super().__init__(model, [optimizer], **shared)
        self._period, self._hvps, self._step = period, 0, 0

    @property
    def hvps(self) -> int:
        return self._hvps

    def step(self, batch: tuple[Tensor, ...]) -> float:
        due = self._step % self._period == 0
        loss = self.model(*batch)
        gradients = torch.autograd.grad(loss, self.params, create_graph=due)
        diagonal = None
        if due:
            signs = [torch.randint_like(p, 2) * 2 - 1 for p in self.params]
            products = torch.autograd.grad(gradients, self.params, signs, materialize_grads=True)
            diagonal = [sign * product for sign, product in zip(signs, products, strict=True)]
            self._hvps += 1
        for param, gradient in zip(self.params, gradients, strict=True):
            param.grad = gradient.detach()
        self._evaluations += 1
        self._step += 1
        self.clip_gradients()
        optimizer: Any = self.optimizers[0]  # its step takes more than torch's
        optimizer.step(hessian=diagonal)
        return float(loss.item())


class LineSearchTrainer(Trainer):
    """L-BFGS: up to 20 iterations a call. Its line search picks the step size, so there is no schedule, and the budget
    is one of evaluations."""

    counts_evaluations = True

    def set_schedule(self, factor: float) -> None:
        pass

    def step(self, batch: tuple[Tensor, ...]) -> float:
        lbfgs: Any = self.optimizers[0]  # its closure returns a tensor
        return float(lbfgs.step(lambda: self._loss(batch)).item())

    @torch.enable_grad()
    def _loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        self.model.zero_grad()
        loss: Tensor = self.model(*batch)
        loss.backward()
        self._evaluations += 1
        return loss


class KfacTrainer(Trainer):
    """Inverse-free K-FAC on linear layers and convolutions, AdamW on the rest."""

    def __init__(
        self, model: nn.Module, settings: dict[str, Any], sequence: bool, rest_lr: float, **shared: Any
    ) -> None:
        from singd.optim.optimizer import SINGD

        average = "batch+sequence" if sequence else "batch"
        layers = [m for m in model.modules() if isinstance(m, SINGD.SUPPORTED_MODULES)]
        covered = [p for m in layers for p in m.parameters()]
        rest = [p for p in model.parameters() if all(p is not q for q in covered)]
        singd = SINGD(model, covered, kfac_like=True, alpha1=0.0, loss_average=average, **settings)
        others = [torch.optim.AdamW(rest, rest_lr, betas=(0.9, 0.95), weight_decay=0.0)] if rest else []
        super().__init__(model, [singd, *others], **shared)

    def state_bytes(self) -> int:
        singd: Any = self.optimizers[0]
        factors = [singd.Ks, singd.Cs, singd.H_Ks, singd.H_Cs]
        return super().state_bytes() + _tensor_bytes(factors, set())


class HybridTrainer(Trainer):
    """DHO2 and FOSI. The bytes are those of the base, the eigenbasis and the last refresh together: the peak."""

    def __init__(self, model: nn.Module, settings: dict[str, Any], **shared: Any) -> None:
        self.dho2 = dho2_ds.DHO2(model.parameters(), weight_decay=0.0, **settings)
        dho2_ds.attach(model, self.dho2)
        super().__init__(model, [self.dho2], **shared)

    @property
    def hvps(self) -> int:
        return int(self.dho2.curvature_stats()["hvps"])

    @property
    def gradients(self) -> int:
        if self.dho2.route != "forward_difference":
            return super().gradients
        stats = self.dho2.curvature_stats()
        return self._evaluations + self.hvps + int(stats["refreshes"] + stats["rejected"])

    def state_bytes(self) -> int:
        stats = self.dho2.curvature_stats()
        return int(stats["bytes_base"] + stats["bytes_basis"] + stats["bytes_transient"])
