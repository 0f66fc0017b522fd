"""The base ``soap`` in one process: against a plain float64 reference, against dense matrices, and its edge cases."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional as F

import dho2_ds
from dho2_ds.config import ConfigError
from dho2_ds.sharding.blocks import cut
from dho2_ds.soap import SoapMatrix, state_shapes
from tests import engines
from tests.soap_reference import SoapReference

STEPS = 50
SOAP: dict[str, Any] = {**engines.SETTINGS, "base": "soap"}
OPTIONS = {"betas": (0.95, 0.95), "eps": 1e-8}


def reference(steps: int = STEPS, *, decay: float = 0.05, **settings: Any) -> tuple[list[float], SoapReference]:
    """Losses of the reference on the job of :mod:`tests.engines`."""
    params = [p.detach().double() for p in engines.Classifier().parameters()]
    chosen = {key: SOAP[key] for key in ("newton_lr", "max_lr_scale")}
    chosen |= {key: SOAP["curvature"][key] for key in ("warmup_steps", "interval")}
    groups = [{"params": [0, 1, 2], "lr": 1e-2, "weight_decay": decay}]
    groups.append({"params": [3, 4, 5], "lr": 1e-2, "weight_decay": 0.0})
    model = SoapReference(engines.classifier_loss, params, groups, clip=engines.CLIP, **{**chosen, **settings})
    return [
        model.step([engines.micro_batch(step, m) for m in range(engines.ACCUMULATION)]) for step in range(steps)
    ], model


def difference(run: engines.Run, steps: int, expected: tuple[list[float], SoapReference]) -> tuple[float, float]:
    """Largest relative difference in loss over the steps, and that of the final weights."""
    losses, model = expected
    got = run.train(steps)
    worst = max(abs(a - b) / b for a, b in zip(got, losses, strict=True))
    return worst, float((run.weights() - model.weights()).norm() / model.weights().norm())


@pytest.mark.parametrize(
    "soap",
    [
        {},
        {"precondition_frequency": 1, "shampoo_beta": 0.9},
        {"max_precondition_dim": 8},  # 16 and 10 are longer: three sides are not rotated
    ],
)
def test_without_curvature_is_soap(soap: dict[str, Any]) -> None:
    names = {"precondition_frequency": "frequency", "max_precondition_dim": "max_rotated"}
    expected = reference(**{names.get(key, key): value for key, value in soap.items()})
    for kind, tolerance in (("single", 1e-4), ("single:double", 1e-10)):
        run = engines.Run(kind, 0, 1, {**SOAP, "num_eigenvectors": 0, "soap": soap})
        loss, weights = difference(run, STEPS, expected)
        assert loss < tolerance and weights < tolerance, (kind, loss, weights)
        assert run.optimizer.curvature_stats()["refreshes"] == 0


@pytest.mark.parametrize("rule", ["adaptive", "fosi"])
def test_with_curvature_matches_reference(rule: str) -> None:
    expected = reference(k=4, rule=rule)
    assert len(expected[1].refreshes) == 5
    for kind, tolerance in (("single", 1e-4), ("single:double", 1e-6)):
        run = engines.Run(kind, 0, 1, {**SOAP, "rule": rule})
        loss, weights = difference(run, STEPS, expected)
        assert loss < tolerance and weights < 10 * tolerance, (kind, loss, weights)
        assert run.optimizer.curvature_stats()["refreshes"] == 5


@pytest.mark.parametrize("hvp", ["finite_difference", "exact"])
def test_eigenpairs_of_the_preconditioned_hessian(hvp: str) -> None:
    """P^(1/2) H P^(1/2) with a dense H and a dense P^(1/2), after a step in which the eigenbases turned."""
    run = engines.Run("single:double", 0, 1, {**SOAP, "num_eigenvectors": 6, "curvature": {"warmup_steps": 10**6}})
    _, model = reference(13)
    run.train(13)
    batch = engines.micro_batch(99, 0)
    settings = {"warmup_steps": 10**6, "lanczos_steps": 120, "hvp": hvp}
    owner = run.optimizer
    object.__setattr__(owner.config, "curvature", type(owner.config.curvature)(**settings))
    dho2_ds.attach(run.module, owner, loss_fn=lambda m, b: m(*b), data=[batch])
    report = owner.refresh()
    values, vectors = torch.linalg.eigh(model.preconditioned_hessian(batch))
    order = values.abs().argsort(descending=True)[:6]
    found = torch.tensor(report.eigenvalues, dtype=torch.float64)
    assert ((found - values[order]) / values[order]).abs().max() < (1e-3 if hvp == "finite_difference" else 1e-5)
    basis = model_order(owner)
    for i, index in enumerate(order):
        if (values[order.roll(-1)] - values[index]).abs().min() > 0.02 * values.abs().max() or i == 0:
            assert float((basis[i] @ vectors[:, index]).abs()) > 0.999, i


def model_order(owner: dho2_ds.DHO2) -> Tensor:
    """(k, n) eigenvectors in the order of the parameters, from the state dict."""
    state = owner.state_dict()["state"]
    rows = [
        torch.cat([state[i][f"eigenvector_{row}"].reshape(-1) for i in sorted(state)])
        for row in range(owner.config.num_eigenvectors)
    ]
    return torch.stack(rows).double()


@pytest.mark.parametrize("shape", [(5, 5), (4, 9), (9, 4)])
def test_preconditioner_is_symmetric_and_positive_and_its_root_is_its_root(shape: tuple[int, int]) -> None:
    (block,) = cut({"w": shape}, max_block=100, max_rotated=100)
    matrix = SoapMatrix({key: torch.zeros(s, dtype=torch.float64) for key, s in state_shapes(block).items()})
    generator = torch.Generator().manual_seed(0)
    for _ in range(15):
        gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
        matrix.update(gradient, OPTIONS, shampoo_beta=0.95, frequency=4)
    units = torch.eye(block.numel, dtype=torch.float64).view(-1, *shape)
    P, root = (torch.stack([matrix.apply(e, OPTIONS, root=r).reshape(-1) for e in units]) for r in (False, True))
    assert torch.allclose(P, P.T, atol=1e-12) and torch.allclose(root @ root, P, rtol=1e-10, atol=1e-12)
    assert float(torch.linalg.eigvalsh(P).min()) > 0
    for basis in (matrix.state["left_basis"], matrix.state["right_basis"]):
        assert torch.allclose(basis.T @ basis, torch.eye(len(basis), dtype=torch.float64), atol=1e-12)


def train(model: nn.Module, loss: Callable[[nn.Module, int], Tensor], steps: int = 25, **settings: Any) -> list[float]:
    """Losses, with a refresh every eight steps."""
    chosen = {"warmup_steps": 6, "interval": 8, "lanczos_steps": 20}
    optimizer = dho2_ds.DHO2(
        model.parameters(), **{"lr": 1e-2, "num_eigenvectors": 3, "base": "soap", "curvature": chosen, **settings}
    )
    if optimizer.config.num_eigenvectors:
        dho2_ds.attach(model, optimizer, loss_fn=lambda m, step: loss(m, step), data=[0])
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        if optimizer.refresh_due:
            optimizer.refresh()
        value = loss(model, step)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    return losses


class Cut(nn.Module):
    """A 7-11-4 network whose weights are stored whole, or as the blocks into which sides longer than 5 are cut."""

    def __init__(self, pieces: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        whole = [torch.randn(11, 7, generator=generator), torch.randn(4, 11, generator=generator)]
        self.grid = [[w.tensor_split(n, 0) for w, n in ((whole[0], 3), (whole[1], 1))], [2, 3]]
        parts = [
            [[b.clone() for b in row.tensor_split(columns, 1)] for row in rows]
            for rows, columns in zip(*self.grid, strict=True)
        ]
        self.shape = [(len(rows), len(rows[0])) for rows in parts]
        flat = [b for rows in parts for row in rows for b in row] if pieces else whole
        self.weights = nn.ParameterList([w.clone() for w in flat])
        self.pieces = pieces

    def matrices(self) -> list[Tensor]:
        if not self.pieces:
            return list(self.weights)
        found, at = [], 0
        for rows, columns in self.shape:
            blocks = list(self.weights[at : at + rows * columns])
            at += rows * columns
            found.append(torch.cat([torch.cat(blocks[i * columns : (i + 1) * columns], 1) for i in range(rows)]))
        return found

    def forward(self, step: int) -> Tensor:
        x = torch.randn(32, 7, generator=torch.Generator().manual_seed(step % 5))
        first, second = self.matrices()
        return (torch.tanh(x @ first.T) @ second.T - x[:, :4]).square().mean()


def test_cut_matrices_are_their_blocks() -> None:
    """A side of 11 cut at 5 is 3, 4, 4 long: training is as if the blocks were parameters of their own."""
    edges = [
        (low, low + length)
        for low, length in [(b.row, b.rows) for b in cut({"w": (11, 1 + 1)}, max_block=5, max_rotated=99)]
    ]
    assert edges == [(0, 3), (3, 7), (7, 11)]
    soap = {"max_block": 5}
    whole = train(Cut(False), lambda m, step: m(step), soap=soap)
    pieces = train(ByBlocks(), lambda m, step: m(step), soap=soap)
    assert max(abs(a - b) / b for a, b in zip(whole, pieces, strict=True)) < 1e-4


class ByBlocks(Cut):
    """:class:`Cut` with exactly the blocks of ``cut`` as parameters."""

    def __init__(self) -> None:
        super().__init__(False)
        whole = [w.detach().clone() for w in self.weights]
        self.blocks = cut({"0": whole[0].shape, "1": whole[1].shape}, max_block=5, max_rotated=10000)
        self.weights = nn.ParameterList(
            [
                whole[int(b.parameter)][b.row : b.row + b.rows, b.column : b.column + b.columns].clone()
                for b in self.blocks
            ]
        )

    def matrices(self) -> list[Tensor]:
        found = [torch.zeros(11, 7), torch.zeros(4, 11)]
        for b, w in zip(self.blocks, self.weights, strict=True):
            i = int(b.parameter)
            pad = (b.column, found[i].shape[1] - b.column - b.columns, b.row, found[i].shape[0] - b.row - b.rows)
            found[i] = found[i] + F.pad(w, pad)
        return found


def test_rank_deficient_gradients_do_not_move_the_null_space() -> None:
    """Inputs of rank 2: in float32 the weights stay where they were on the other six dimensions, to rounding."""
    generator = torch.Generator().manual_seed(0)
    span = torch.linalg.qr(torch.randn(8, 8, generator=generator)).Q
    target = torch.randn(8, 5, generator=generator)
    torch.manual_seed(0)
    model = nn.Linear(8, 5, bias=False)
    before = model.weight.detach().clone()

    def loss(m: nn.Module, step: int) -> Tensor:
        noise = torch.Generator().manual_seed(step)
        x = torch.randn(64, 2, generator=noise) @ span[:, :2].T
        return (m(x) - x @ target - torch.randn(64, 5, generator=noise)).square().mean()

    losses = train(model, loss, steps=60, weight_decay=0.0, lr=0.03)
    moved = (model.weight.detach() - before) @ span
    assert losses[-1] < 0.6 * losses[0]
    assert moved[:, 2:].norm() < 0.1 * moved[:, :2].norm(), (moved[:, 2:].norm(), moved[:, :2].norm())


def test_zero_gradients_move_nothing_and_training_goes_on() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))
    optimizer = dho2_ds.DHO2(model.parameters(), base="soap", lr=0.03, num_eigenvectors=0, weight_decay=0.0)
    for step in range(60):
        loss = model(x).square().mean() * float(step >= 12)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 11:
            assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert 0 < loss.item() < 0.5 * F.linear(x, before["weight"]).square().mean().item()


class Odd(nn.Module):
    """1 x n, n x 1, 1 x 1, a scalar, a tied embedding, a convolution, and a matrix that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(13, 6)
        self.row, self.column = nn.Linear(6, 1, bias=False), nn.Linear(1, 6, bias=False)
        self.unit, self.scale = nn.Linear(1, 1), nn.Parameter(torch.tensor(0.5))
        self.convolution = nn.Conv2d(2, 3, 2)
        self.never = nn.Linear(5, 7)
        self.out = nn.Linear(6, 13, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, step: int) -> Tensor:
        tokens = torch.randint(13, (24,), generator=torch.Generator().manual_seed(step % 4))
        h = self.embedding(tokens)
        h = h + self.column(torch.tanh(self.unit(self.row(h)))) * self.scale
        h = h + self.convolution(h.view(24, 2, 1, 3).expand(24, 2, 3, 3)).mean((2, 3)).repeat(1, 2)
        return F.cross_entropy(self.out(h), (tokens + 1) % 13)


def test_odd_shapes_tied_weights_and_unused_matrices() -> None:
    model = Odd()
    never = [p.detach().clone() for p in model.never.parameters()]
    losses = train(model, lambda m, step: m(step), steps=60)
    assert losses[-1] < 0.5 * losses[0]
    assert all(torch.equal(p, q) for p, q in zip(model.never.parameters(), never, strict=True))
    assert model.out.weight is model.embedding.weight


class Words(nn.Module):
    """An embedding of 40 words of which a step sees the first ten only, and from step 20 on also word 33."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.out = nn.Embedding(40, 6), nn.Linear(6, 5)

    def forward(self, step: int) -> Tensor:
        tokens = torch.randint(10, (24,), generator=torch.Generator().manual_seed(step % 4))
        if step >= 20:
            tokens[::3] = 33
        return F.cross_entropy(self.out(torch.tanh(self.embedding(tokens))), tokens % 5)


def test_blocks_of_words_that_never_come_stay_and_start_when_they_come() -> None:
    """Five blocks of eight rows: two are touched from the start, one from step 20 on, two never."""
    model = Words()
    before = model.embedding.weight.detach().clone()
    soap = {"max_block": 8}
    train(model, lambda m, step: m(step), steps=20, weight_decay=0.0, max_lr_scale=3.0, soap=soap)
    assert torch.equal(model.embedding.weight[16:], before[16:])
    losses = train(model, lambda m, step: m(step), steps=60, weight_decay=0.0, max_lr_scale=3.0, soap=soap)
    moved = (model.embedding.weight.detach() - before).norm(dim=1)
    assert not moved[16:32].any() and not moved[34:].any() and moved[33] > 0.1 and losses[-1] < 0.5 * losses[20]


class Permuted(nn.Module):
    """Two convolutions whose weights are stored as (out, height, width, in)."""

    def __init__(self, convolutions: nn.Sequential) -> None:
        super().__init__()
        self.inner = [convolutions[0], convolutions[2]]
        self.weights = nn.ParameterList(
            [c.weight.detach().permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format) for c in self.inner]
        )
        self.biases = nn.ParameterList([c.bias.detach().clone() for c in self.inner])

    def forward(self, x: Tensor) -> Tensor:
        first, second = (w.permute(0, 3, 1, 2) for w in self.weights)
        return F.conv2d(torch.tanh(F.conv2d(x, first, self.biases[0])), second, self.biases[1])


def test_channels_last_convolutions_are_matrices_in_storage_order() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3))
    x = torch.randn(8, 3, 8, 8)
    losses = [
        train(m, lambda m, _: (m(x) - x[:, :1, 2:-2, 2:-2]).square().mean(), num_eigenvectors=0)
        for m in (Permuted(model), model.to(memory_format=torch.channels_last))
    ]
    assert not model[0].weight.is_contiguous()
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0][-1] < 0.5 * losses[0][0]


@pytest.mark.parametrize("base", ["soap", "adamw"])
def test_channels_last_resumes_bit_exactly(base: str) -> None:
    """State and eigenvectors go back in storage order, from tensors of either memory format."""
    x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))

    def run(saved: Any, steps: int) -> tuple[list[float], nn.Module, dho2_ds.DHO2]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
        chosen = {"warmup_steps": 3, "interval": 100, "lanczos_steps": 12}
        optimizer = dho2_ds.DHO2(model.parameters(), base=base, lr=1e-2, num_eigenvectors=2, curvature=chosen)
        dho2_ds.attach(model, optimizer, loss_fn=lambda m, b: (m(b) - 1).square().mean(), data=[x])
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))  # loaded tensors are used, not copied
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model, optimizer

    straight, _, _ = run(None, 10)
    _, model, optimizer = run(None, 5)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert run(saved, 5)[0] == straight[5:]
    for mine in saved[1]["state"].values():
        for name, value in mine.items():
            mine[name] = value.contiguous()
    assert run(saved, 5)[0] == straight[5:]


@pytest.mark.parametrize("stop", [1, 12, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 7, 11, 20))])
def test_resume_is_bit_exact(stop: int) -> None:
    """At every phase: before the first step, with factors only, before and after a turn of the bases, with a basis."""
    straight = engines.Run("single", 0, 1, {**SOAP, "soap": {"max_block": 7}})
    straight.train(stop)
    saved, weights = copy.deepcopy((straight.optimizer.state_dict(), straight.model.state_dict()))
    losses = straight.train(15)
    resumed = engines.Run("single", 0, 1, {**SOAP, "soap": {"max_block": 7}}, seed=5)
    resumed.model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(saved)
    resumed.step_count = stop
    assert resumed.train(15) == losses
    assert torch.equal(resumed.weights(), straight.weights())


def test_resume_without_curvature_is_bit_exact() -> None:
    settings = {**SOAP, "num_eigenvectors": 0}
    straight = engines.Run("single", 0, 1, settings)
    straight.train(12)
    saved = copy.deepcopy((straight.optimizer.state_dict(), straight.model.state_dict()))
    resumed = engines.Run("single", 0, 1, settings, seed=5)
    resumed.model.load_state_dict(saved[1])
    resumed.optimizer.load_state_dict(saved[0])
    resumed.step_count = 12
    assert resumed.train(8) == straight.train(8)


@pytest.mark.parametrize("flat", [False, True])
def test_resume_by_torch_distributed_checkpoint(flat: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    straight = engines.Run("single", 0, 1, SOAP)
    straight.train(12)
    saved = copy.deepcopy(get_optimizer_state_dict(straight.model, straight.optimizer, options=options))
    resumed = engines.Run("single", 0, 1, SOAP, seed=5)
    resumed.model.load_state_dict(straight.model.state_dict())
    set_optimizer_state_dict(resumed.model, resumed.optimizer, saved, options=options)
    resumed.step_count = 12
    assert resumed.train(8) == straight.train(8)


def test_a_checkpoint_of_another_base_or_cut_is_refused() -> None:
    other = engines.Run("single", 0, 1, engines.SETTINGS)
    whole = engines.Run("single", 0, 1, SOAP)
    for run, settings in ((other, SOAP), (whole, {**SOAP, "soap": {"max_block": 7}})):
        run.train(2)
        fresh = engines.Run("single", 0, 1, settings)
        with pytest.raises(ConfigError, match="checkpoint: .* must be written with base 'soap' and the same soap"):
            fresh.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


def test_attaching_again_keeps_the_state() -> None:
    straight, again = (engines.Run("single", 0, 1, SOAP) for _ in range(2))
    straight.train(12)
    again.train(6)
    dho2_ds.attach(again.module, again.optimizer)
    again.train(6)
    assert torch.equal(straight.weights(), again.weights())


def test_the_first_refresh_waits_until_matrices_have_a_preconditioner() -> None:
    """After one step only vectors have moved: eigenpairs of their part alone would govern all of the next steps."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = dho2_ds.DHO2(
        model.parameters(), lr=1e-3, base="soap", num_eigenvectors=2, curvature={"warmup_steps": 0, "interval": 5}
    )
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    dho2_ds.attach(model, optimizer, loss_fn=lambda m, batch: m(batch).square().mean(), data=[x])
    due = []
    for _ in range(4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        due.append(optimizer.refresh_due)
    assert due == [False, True, False, False]
