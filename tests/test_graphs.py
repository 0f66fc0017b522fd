"""Losses whose graphs are not plain: activation checkpointing that recomputes in ``backward()``, and losses that call
the engine past the model they are given.

The first hides its part of the graph from ``torch.autograd.grad``; the second brings in hooks by which DeepSpeed
divides gradients by the accumulation steps. Either gives wrong eigenvalues that look right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dho2_ds
from dho2_ds.hosts import full
from tests.distributed import run_ranks
from tests.test_traps import CLASSES, FEATURES, Batch, Job, batch, changes, error, same

CLOSE = 1e-3
"""Finite differences of gradients that differ by nothing but the order of sums."""
SEED = 5
STEPS = 10
"""Of Lanczos: Ritz values need not have converged to be compared, as the start vector is the same."""


class Segments(nn.Module):
    """Two segments, each recomputed in the backward pass if ``way`` says so; a trainable layer before them, or none.

    Dropout and the statistics of BatchNorm show whether a forward that is made again draws the same numbers.
    """

    def __init__(self, way: str = "plain", before: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.before = way, before
        self.first = nn.Linear(FEATURES, FEATURES)
        self.one = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))
        self.two = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, CLASSES)
        self.stranger = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x) if self.before else x.clone().requires_grad_()
        h = self._run(lambda h: self.one(h) * self.stranger, h)
        return F.cross_entropy(self.head(self._run(self.two, h)), y)

    def _run(self, segment: Any, h: Tensor) -> Tensor:
        if self.way == "plain":
            return segment(h)
        if self.way == "deepspeed":
            import deepspeed

            return deepspeed.checkpointing.checkpoint(segment, h)
        return checkpoint(segment, h, use_reentrant=self.way == "reentrant")


def model_loss(model: Any, rows: Batch) -> Tensor:
    return model(*rows)


def eigenvalues(module: Any, rows: Batch, hvp: str = "finite_difference", loss_fn: Any = model_loss) -> Any:
    """The three largest by ``STEPS`` products, or the error as text."""
    torch.manual_seed(SEED)
    try:
        return dho2_ds.spectrum(module, loss_fn, [rows], k=3, lanczos_steps=STEPS, hvp=hvp).eigenvalues
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"


def check_refusal(message: Any) -> None:
    assert isinstance(message, str) and message.startswith("RuntimeError: curvature.hvp='exact'"), message
    assert "reentrant" in message and "use_reentrant=False" in message and "'finite_difference'" in message


def close(got: Any, want: Any, tolerance: float = CLOSE) -> None:
    assert isinstance(got, list) and isinstance(want, list), (got, want)
    assert error(got, want) < tolerance, (got, want)


# -- one process --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("hvp", ["finite_difference", "forward_difference"])
def test_checkpointing_does_not_change_the_curvature(hvp: str, before: bool) -> None:
    want = eigenvalues(Segments("plain", before), batch(9), hvp)
    for way in ("reentrant", "non-reentrant"):
        close(eigenvalues(Segments(way, before), batch(9), hvp), want)


@pytest.mark.parametrize("before", [False, True])
def test_exact_products_need_checkpoints_that_are_not_reentrant(before: bool) -> None:
    want = eigenvalues(Segments("plain", before), batch(9), "exact")
    close(eigenvalues(Segments("non-reentrant", before), batch(9), "exact"), want, 1e-5)
    job = Job("single", Segments("reentrant", before), curvature={"hvp": "exact", "warmup_steps": 10**6})
    job.step(batch(0))
    at_rest = job.trace()
    with pytest.raises(RuntimeError) as caught:
        job.optimizer.refresh()
    check_refusal(f"RuntimeError: {caught.value}")
    assert changes(at_rest, job.trace()) == []


def test_a_refresh_through_checkpoints_leaves_no_trace() -> None:
    """Mid-accumulation, with a hook on each parameter that would step an optimizer."""
    job = Job("single", Segments("reentrant"), model_loss, [batch(9)])
    job.step(batch(0))
    job.backward(batch(1))
    called: list[str] = []
    for name, p in job.model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    params, grads = list(job.model.parameters()), [p.grad for p in job.model.parameters()]
    at_rest = job.trace()
    report = job.optimizer.refresh()
    assert report.accepted, report.reason
    assert changes(at_rest, job.trace()) == []
    assert all(a is b for a, b in zip(params, job.model.parameters(), strict=True))
    assert all(p.grad is grad for p, grad in zip(params, grads, strict=True))
    assert called == []
    job.backward(batch(2))
    assert len(called) == len(params)  # the model trains its own parameters again


class Odd(nn.Module):
    """Parameters in unusual places: shared, a recurrent module's, changed by a hook, unused, one frozen."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.recurrent = nn.GRU(FEATURES, FEATURES, batch_first=True)
        self.pair = nn.ModuleList([nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES, bias=False)])
        self.pair[1].weight = self.pair[0].weight
        self.listed = nn.ParameterList([torch.randn(FEATURES), torch.ones(2)])
        self.frozen = nn.Parameter(torch.randn(FEATURES), requires_grad=False)
        self.pair[0].weight.register_hook(lambda grad: grad * torch.arange(FEATURES).unsqueeze(1))

    def forward(self, x: Tensor) -> Tensor:
        def body(h: Tensor) -> Tensor:
            h = self.recurrent(h.unsqueeze(1))[0].squeeze(1) * self.frozen
            return self.pair[1](torch.tanh(self.pair[0](h)) + self.listed[0])

        x = x.clone().requires_grad_()
        return body(x) if self.way == "plain" else checkpoint(body, x, use_reentrant=True)


def test_gradients_of_parameters_in_unusual_places() -> None:
    """The same, whichever way they are made, also of a parameter that the loss reaches past the module."""
    found = []
    for way in ("plain", "reentrant"):
        model = Odd(way)
        beside = nn.Parameter(torch.ones(FEATURES))
        named = {**dict(model.named_parameters()), "beside": beside}
        params = [p for p in named.values() if p.requires_grad]
        for p in params:
            p.grad = torch.full_like(p, 7.0)
        held = [(p, p.grad) for p in params]

        def loss(m: nn.Module, seed: int, model: Odd = model, beside: Tensor = beside) -> Tensor:
            return (m(batch(seed)[0]) * beside).square().mean() + model.listed[0].square().sum() * seed

        losses = [lambda m, seed=seed, loss=loss: loss(m, seed) for seed in (1, 2)]
        if way == "plain":
            found.append(full.mean_gradients(losses, model, params))
        else:
            with pytest.raises(full.ReentrantCheckpoint):
                full.mean_gradients(losses, model, params)
            found.append(full.accumulated_gradients(losses, model, params))
        assert all(p.grad is grad and bool((grad == 7.0).all()) for p, grad in held)
        assert {name for name, p in named.items() if p is not dict(model.named_parameters()).get(name)} == {"beside"}
    assert sum(grad is None for grad in found[0]) == 1
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.allclose(a, b, rtol=1e-5, atol=1e-6)


# -- engines ------------------------------------------------------------------------------------------------------

WAYS = {"ddp": ["reentrant"], "zero0": ["reentrant", "deepspeed"], "zero1": ["reentrant"], "zero3": ["reentrant"]}
"""Kinds of reentrant checkpoints by engine; ZeRO-2 makes gradients as ZeRO-1 does."""
ENGINES = ["ddp", "zero0", "zero1", "zero2", "zero3"]


@contextlib.contextmanager
def switched(model: Segments, way: str, before: bool) -> Iterator[None]:
    kept = model.way, model.before
    model.way, model.before = way, before
    try:
        yield
    finally:
        model.way, model.before = kept


def ways(kind: str) -> list[str]:
    """Those of ``WAYS`` that run here: the oldest DeepSpeed releases' own checkpointing does not on a CPU."""
    if "deepspeed" in WAYS[kind]:
        import deepspeed

        try:
            deepspeed.checkpointing.checkpoint(torch.tanh, torch.ones(2, requires_grad=True)).sum().backward()
        except TypeError:
            return [way for way in WAYS[kind] if way != "deepspeed"]
    return WAYS[kind]


def measure(kind: str, rank: int, world: int) -> dict[Any, Any]:
    """Eigenvalues on one engine at one point, by all graphs; then a training step."""
    job = Job(kind, Segments(), model_loss, [batch(9, rank, world)], accumulation=2)
    rows = batch(9, rank, world)
    job.step(batch(0, rank, world), batch(1, rank, world))
    torch.manual_seed(SEED)
    at_rest = job.trace()
    found: dict[Any, Any] = {}
    for before in (False, True) if kind in WAYS else ():
        for way in ("plain", *ways(kind)):
            with switched(job.model, way, before):
                found["finite_difference", way, before] = eigenvalues(job.module, rows)
        with switched(job.model, "reentrant", before):
            found["exact", "reentrant", before] = eigenvalues(job.module, rows, "exact")
    if kind.startswith("zero"):
        found["finite_difference"] = eigenvalues(job.module, rows)
        found["exact"] = eigenvalues(job.module, rows, "exact")
        for hvp in ("finite_difference", "exact"):
            found[hvp, "closure"] = eigenvalues(job.module, rows, hvp, lambda _, rows: job.engine(*rows))
        found["silent"] = [name for name in vars(job.engine) if name.startswith("_backward_prologue")]
    found["changes"] = changes(at_rest, job.trace())
    job.step(batch(2, rank, world), batch(3, rank, world))
    found["moved"] = not same(at_rest["weights"], job.trace()["weights"])
    return found


def static_graph(rank: int, world: int) -> tuple[bool, Any]:
    """Whether training ends the same with a spectrum before its first step, under DDP that learns from that step."""
    ends, found = [], None
    for looked in (False, True):
        model = Segments("reentrant")
        module = nn.parallel.DistributedDataParallel(model, static_graph=True)
        if looked:
            found = eigenvalues(module, batch(9, rank, world))
        torch.manual_seed(3)
        for step in range(3):
            model.zero_grad()
            module(*batch(step, rank, world)).backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(p.grad, alpha=0.1)
        ends.append([p.detach().clone() for p in model.parameters()])
    return same(*ends), found


def worker(rank: int, world: int) -> dict[str, Any]:
    return {"static graph": static_graph(rank, world), **{kind: measure(kind, rank, world) for kind in ENGINES}}


@pytest.fixture(scope="module")
def outcome() -> list[dict[str, Any]]:
    return run_ranks(2, worker, timeout=170)


@pytest.mark.deepspeed
@pytest.mark.parametrize("kind", WAYS)
def test_reentrant_checkpointing_on_engines(outcome: list[dict[str, Any]], kind: str) -> None:
    for result in outcome:
        found = result[kind]
        for before in (False, True):
            plain = found["finite_difference", "plain", before]
            for way in WAYS[kind]:
                close(found.get(("finite_difference", way, before), plain), plain)
            if kind != "zero3":
                check_refusal(found["exact", "reentrant", before])


@pytest.mark.deepspeed
@pytest.mark.parametrize("kind", [kind for kind in ENGINES if kind != "ddp"])
def test_a_loss_may_call_the_engine(outcome: list[dict[str, Any]], kind: str) -> None:
    """Past the model it is given, with two accumulation steps."""
    for result in outcome:
        found = result[kind]
        close(found["finite_difference", "closure"], found["finite_difference"])
        if kind != "zero3":
            close(found["exact", "closure"], found["exact"], 1e-5)
            close(found["exact"][:1], found["finite_difference"][:1])
        else:
            assert "exact" in found["exact", "closure"] and "ZeRO-3" in found["exact", "closure"]
        assert found["silent"] == []


@pytest.mark.deepspeed
@pytest.mark.parametrize("kind", ENGINES)
def test_engines_do_not_notice_such_graphs(outcome: list[dict[str, Any]], kind: str) -> None:
    for result in outcome:
        assert result[kind]["changes"] == []
        assert result[kind]["moved"]


def test_a_static_graph_is_learned_from_training_alone(outcome: list[dict[str, Any]]) -> None:
    for result in outcome:
        unchanged, found = result["static graph"]
        assert isinstance(found, list), found
        assert unchanged
