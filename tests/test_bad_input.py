"""What users get wrong, and what they are told: before training starts, or at the first refresh at the latest.

A message names the setting or argument and what is allowed instead. Silence would be a first-order run that looks like
a second-order one.
"""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import dho2_ds
from dho2_ds.config import ConfigError
from dho2_ds.hosts.detect import make_host
from tests import engines
from tests.distributed import run_ranks, silence_shm_op

NOW = {"warmup_steps": 1, "interval": 100, "lanczos_steps": 12}


def line_of(call: Callable[[], Any], error: type[BaseException] = ConfigError) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def small(**settings: Any) -> tuple[nn.Module, dho2_ds.DHO2]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    chosen = {"lr": 1e-2, "num_eigenvectors": 2, "curvature": NOW, **settings}
    return model, dho2_ds.DHO2(model.parameters(), **chosen)


def cross_entropy(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def rows(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Steps whose loss is computed outside of the model."""
    for step in range(steps):
        optimizer.zero_grad()
        cross_entropy(model, rows(step)).backward()
        optimizer.step()


# -- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lr", [-1.0, float("nan"), float("inf"), "fast", torch.tensor(-1.0), torch.tensor([1.0, 2.0])])
def test_bad_learning_rate(lr: Any) -> None:
    line = line_of(lambda: small(lr=lr))
    assert line.startswith("lr=") and "must be a finite number >= 0" in line


@pytest.mark.parametrize("lr", [-1.0, float("nan")])
def test_bad_learning_rate_of_a_group(lr: float) -> None:
    w = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    groups = [{"params": w[:1]}, {"params": w[1:], "lr": lr}]
    line = line_of(lambda: dho2_ds.DHO2(groups, num_eigenvectors=1))
    assert "param group 1" in line and "lr=" in line and "must be a finite number >= 0" in line


@pytest.mark.parametrize(
    ("settings", "guess"),
    [
        ({"num_eigenvector": 4}, "did you mean 'num_eigenvectors'?"),
        ({"intervall": 4}, "did you mean 'curvature.interval'?"),
        ({"curvature": {"warmup_step": 4}}, "did you mean 'curvature.warmup_steps'?"),
        ({"curvature": {"newton_lr": 0.1}}, "did you mean 'newton_lr'?"),
    ],
)
def test_unknown_settings(settings: dict[str, Any], guess: str) -> None:
    assert guess in line_of(lambda: small(**settings))


def test_all_problems_are_told_together() -> None:
    lines = line_of(lambda: small(lr=-1, momentun=0.9, curvature={"interval": 0})).splitlines()
    assert [line.split("=")[0] for line in lines] == ["lr", "curvature.interval", "momentun"] or len(lines) == 3


@pytest.mark.parametrize("k", [43, 44, 10**6])
def test_more_eigenvectors_than_parameters(k: int) -> None:
    line = line_of(lambda: small(num_eigenvectors=k, curvature={"warmup_steps": 1}))
    assert line.startswith(f"num_eigenvectors={k}") and "must be < 43, the number of trainable parameters" in line
    small(num_eigenvectors=42, curvature={"warmup_steps": 1})


def test_parameters_that_cannot_be_trained() -> None:
    def built(*params: Tensor) -> Callable[[], Any]:
        return lambda: dho2_ds.DHO2(params, num_eigenvectors=1)

    line = line_of(built(nn.Parameter(torch.ones(3, dtype=torch.complex64))))
    assert "complex64" in line and "must be real" in line
    line = line_of(built(nn.Parameter(torch.eye(3).to_sparse())))
    assert "sparse" in line and "must be dense" in line
    line = line_of(built(nn.Parameter(torch.ones(3), requires_grad=False)))
    assert "requires_grad=True" in line
    with pytest.raises(ValueError, match="empty parameter list"):
        built()()


def test_sparse_gradients() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = dho2_ds.DHO2(model.parameters(), num_eigenvectors=2)
    model(torch.tensor([1, 2])).sum().backward()
    line = line_of(optimizer.step, RuntimeError)
    assert "sparse" in line and "sparse=False" in line


@pytest.mark.parametrize(
    ("settings", "name", "allowed"),
    [
        ({"base": "sgd", "nesterov": True}, "nesterov", "rule='adaptive'"),
        ({"base": "sgd", "weight_decay": 0.1}, "weight_decay", "base='adamw'"),
        ({"base": "adam", "weight_decay": 0.1}, "weight_decay", "base='adamw'"),
    ],
)
def test_limits_of_the_fosi_rule(settings: dict[str, Any], name: str, allowed: str) -> None:
    line = line_of(lambda: small(rule="fosi", **settings))
    assert line.startswith(name) and "rule='fosi'" in line and allowed in line
    small(rule="adaptive", **settings)


def test_the_fosi_rule_shares_its_velocity() -> None:
    w = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    groups = [{"params": w[:1]}, {"params": w[1:], "betas": (0.5, 0.999)}]
    line = line_of(lambda: dho2_ds.DHO2(groups, num_eigenvectors=1, rule="fosi"))
    assert line.startswith("betas") and "must be equal in all param groups" in line
    dho2_ds.DHO2(groups, num_eigenvectors=1)


def test_too_few_lanczos_steps() -> None:
    line = line_of(lambda: small(num_eigenvectors=8, curvature={"lanczos_steps": 9}))
    assert line.startswith("curvature.lanczos_steps=9") and "must be >= 10" in line


# -- attaching ----------------------------------------------------------------------------------------------------


def test_attach_needs_a_dho2_optimizer() -> None:
    model, optimizer = small()
    line = line_of(lambda: dho2_ds.attach(model, torch.optim.AdamW(model.parameters())), TypeError)
    assert "AdamW" in line and "must be a DHO2 optimizer" in line
    line = line_of(lambda: dho2_ds.attach(model), TypeError)
    assert line.startswith("optimizer=None") and "DeepSpeed engine" in line
    line = line_of(lambda: dho2_ds.attach(model, optimizer, loss_fn=0.5), TypeError)  # type: ignore[arg-type]
    assert line.startswith("loss_fn=0.5") and "callable" in line
    line = line_of(lambda: dho2_ds.attach(model, optimizer, data=[rows()]), TypeError)
    assert line.startswith("data") and "loss_fn" in line


def test_attach_needs_the_model_of_the_optimizer() -> None:
    _, optimizer = small()
    line = line_of(lambda: dho2_ds.attach(nn.Linear(2, 2), optimizer))
    assert line.startswith("model") and "the optimizer's parameters" in line


def test_no_source_of_the_loss() -> None:
    """Never attached: an error when the first refresh is due, which says what to call."""
    model, optimizer = small(curvature={**NOW, "warmup_steps": 3})
    train(model, optimizer, 2)
    line = line_of(lambda: train(model, optimizer, 2), RuntimeError)
    assert "step 3" in line and "dho2_ds.attach(model, optimizer, loss_fn=..., data=...)" in line
    assert "no model attached" in line_of(optimizer.refresh, RuntimeError)


def test_a_model_that_does_not_return_its_loss() -> None:
    model, optimizer = small()
    dho2_ds.attach(model, optimizer)
    line = line_of(lambda: train(model, optimizer), RuntimeError)
    assert "returned a tensor of shape (8, 3), not its loss" in line and "dho2_ds.attach(" in line and "loss_fn" in line


class Returning(nn.Module):
    """Returns its loss in a chosen form."""

    def __init__(self, form: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.form = nn.Linear(4, 3), form

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.form(F.cross_entropy(self.net(x), y))


@pytest.mark.parametrize(
    ("form", "told"),
    [
        (lambda loss: {"logits": loss}, "dict"),
        (lambda loss: {"loss": None}, "dict"),
        (lambda loss: SimpleNamespace(loss=None), "SimpleNamespace"),
        (lambda loss: (loss.expand(3),), "shape (3,)"),
        (lambda loss: 0.5, "float"),
        (lambda loss: (), "tuple"),
        (lambda loss: loss.detach(), "without a graph"),
    ],
)
def test_outputs_without_a_loss(form: Callable[[Tensor], Any], told: str) -> None:
    model = Returning(form)
    optimizer = dho2_ds.DHO2(model.parameters(), num_eigenvectors=2, curvature=NOW)
    dho2_ds.attach(model, optimizer)
    model(*rows())
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises((RuntimeError, ValueError)) as caught:
        optimizer.refresh()
    assert told in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    "form",
    [lambda loss: loss, lambda loss: {"loss": loss}, lambda loss: SimpleNamespace(loss=loss), lambda loss: (loss, 1)],
)
def test_outputs_with_a_loss(form: Callable[[Tensor], Any]) -> None:
    model = Returning(form)
    optimizer = dho2_ds.DHO2(model.parameters(), num_eigenvectors=2, curvature=NOW)
    dho2_ds.attach(model, optimizer)
    model(*rows())
    assert optimizer.refresh().accepted


@pytest.mark.parametrize(
    ("loss_fn", "error", "told"),
    [
        (lambda model, batch: model(batch[0]), ValueError, "shape (8, 3): must be a scalar"),
        (lambda model, batch: float(cross_entropy(model, batch)), TypeError, "returned float: must be a scalar tensor"),
        (lambda model, batch: None, TypeError, "returned NoneType"),
        (lambda model, batch: cross_entropy(model, batch).detach(), ValueError, "without a graph"),
        (lambda model, batch: torch.no_grad()(cross_entropy)(model, batch), ValueError, "without a graph"),
    ],
)
def test_bad_loss_functions(loss_fn: Callable[..., Any], error: type[Exception], told: str) -> None:
    """Told at the first refresh, under the name of the argument; weights come back."""
    model, optimizer = small()
    dho2_ds.attach(model, optimizer, loss_fn=loss_fn, data=[rows(5)])
    train(model, optimizer, 1)
    before = [p.detach().clone() for p in model.parameters()]
    line = line_of(lambda: model(rows()[0]), error)
    assert line.startswith("loss_fn returned") and told in line
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_loss_that_does_not_depend_on_the_parameters() -> None:
    """It has a graph, but not of our parameters: there is no curvature, and the refresh says so."""
    model, optimizer = small()
    other = nn.Linear(4, 3)
    dho2_ds.attach(model, optimizer, loss_fn=lambda _, batch: cross_entropy(other, batch), data=[rows(5)])
    report = optimizer.refresh()
    assert not report.accepted and report.reason
    assert all(p.grad is None for p in other.parameters())


def test_data_that_runs_out() -> None:
    """A DataLoader starts over, an iterator cannot: it must not silently end the curvature."""
    model, optimizer = small(curvature={**NOW, "interval": 1})
    dho2_ds.attach(model, optimizer, loss_fn=cross_entropy, data=iter([rows(5), rows(6)]))
    train(model, optimizer, 3)
    line = line_of(lambda: train(model, optimizer, 1), RuntimeError)
    assert line.startswith("data: ran out of batches") and "DataLoader" in line

    model, optimizer = small(curvature={**NOW, "interval": 1})
    examples = [(x, y) for x, y in zip(*rows(5), strict=True)]
    dho2_ds.attach(model, optimizer, loss_fn=cross_entropy, data=DataLoader(examples, batch_size=4))
    train(model, optimizer, 6)
    assert optimizer.curvature_stats()["refreshes"] == 5

    model, optimizer = small()
    dho2_ds.attach(model, optimizer, loss_fn=cross_entropy, data=[])
    assert line_of(lambda: train(model, optimizer), RuntimeError).startswith("data: ran out of batches")


def test_only_an_inner_module_is_called() -> None:
    """The hook is on the outer module, which training goes around."""
    inner, optimizer = small()
    outer = nn.Sequential(inner)
    dho2_ds.attach(outer, optimizer, loss_fn=cross_entropy, data=[rows(5)])
    line = line_of(lambda: train(inner, optimizer, 4), RuntimeError)
    assert "no training forward of the attached model was seen" in line and "inner module" in line
    assert optimizer.curvature_stats()["steps"] <= 3


# -- exact products -----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Self-attention by the fused kernel, whose backward pass cannot be differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        q, k, v = self.qkv(x.view(2, 1, 4, 4)).chunk(3, dim=-1)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            h = F.scaled_dot_product_attention(q, k, v)
        return F.cross_entropy(self.head(h.reshape(8, 4)), y)


def test_forward_differences_in_bfloat16() -> None:
    """Refused when the model is attached, not at the first refresh."""
    model = nn.Linear(4, 1).bfloat16()
    optimizer = dho2_ds.DHO2(model.parameters(), num_eigenvectors=2, curvature={"hvp": "forward_difference"})
    line = line_of(lambda: dho2_ds.attach(model, optimizer), ValueError)
    assert "curvature.hvp='forward_difference': must not be used" in line and "bfloat16" in line and "'auto'" in line


def test_forward_differences_under_autocast() -> None:
    """Known at the first refresh only."""
    model, optimizer = small(curvature={**NOW, "hvp": "forward_difference"})
    dho2_ds.attach(model, optimizer, loss_fn=lambda model, x: model(x).square().mean(), data=[torch.ones(8, 4)])

    def go() -> None:
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.ones(8, 4)).square().mean()
            loss.backward()
            optimizer.step()

    assert "curvature.hvp='forward_difference': must not be used" in line_of(go)


def test_exact_products_through_fused_attention() -> None:
    model = Attention()
    optimizer = dho2_ds.DHO2(model.parameters(), num_eigenvectors=2, curvature={**NOW, "hvp": "exact"})
    dho2_ds.attach(model, optimizer)
    model(*rows())
    before = [p.detach().clone() for p in model.parameters()]
    line = line_of(optimizer.refresh, RuntimeError)
    assert "curvature.hvp='exact'" in line and "cannot be differentiated twice" in line and "finite_difference" in line
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert optimizer.curvature_stats()["route"] == "exact"

    other = Attention()
    optimizer = dho2_ds.DHO2(other.parameters(), num_eigenvectors=2, curvature={**NOW, "hvp": "auto"})
    dho2_ds.attach(other, optimizer)
    other(*rows())
    assert optimizer.refresh().accepted


@pytest.mark.slow
@pytest.mark.parametrize("whole", [False, True])
def test_exact_products_through_a_compiled_model(whole: bool) -> None:
    """Whatever the compiler: what torch.compile makes of a backward pass cannot be differentiated, and of a whole model
    the second derivative would be zero without a word."""
    model, optimizer = small(curvature={**NOW, "hvp": "exact"})
    if whole:
        model = torch.compile(model, backend="aot_eager")  # type: ignore[assignment]
    else:
        model[0] = torch.compile(model[0], backend="aot_eager")  # type: ignore[index,operator]
    dho2_ds.attach(model, optimizer, loss_fn=cross_entropy, data=[rows()])
    line = line_of(optimizer.refresh, RuntimeError)
    assert "curvature.hvp='exact'" in line and "cannot be differentiated twice" in line and "finite_difference" in line


# -- DeepSpeed features that are refused --------------------------------------------------------------------------


def engine_with(name: str = "DeepSpeedEngine", wrapper: str = "", **attributes: Any) -> Any:
    """What is looked at of an engine that cannot be built here, for want of a device or of ranks."""
    attributes = {"basic_optimizer": None, "zero_optimization_stage": lambda: 3, **attributes}
    return type(name, (SimpleNamespace,), {})(optimizer=SimpleNamespace(**{wrapper: True}), **attributes)


@pytest.mark.parametrize(
    ("engine", "told", "file", "text"),
    [
        (engine_with("PipelineEngine"), "pipeline parallelism: must be off", "pipe/engine.py", "class PipelineEngine("),
        (engine_with(has_moe_layers=True), "mixture of experts: must be off", "engine.py", "self.has_moe_layers = "),
        (engine_with(wrapper="swap_optimizer"), "'nvme': must be 'cpu'", "zero/stage3.py", "self.swap_optimizer = "),
        (engine_with(wrapper="params_in_nvme_and_cpu"), "'nvme'", "zero/stage3.py", "self.params_in_nvme_and_cpu = "),
        (
            engine_with(zero_quantized_weights=lambda: True),
            "zero_quantized_weights: must be false",
            "engine.py",
            "def zero_quantized_weights(",
        ),
        (
            engine_with(wrapper="zero_quantized_nontrainable_weights"),
            "zero_quantized_nontrainable_weights: must be false",
            "zero/stage3.py",
            "self.zero_quantized_nontrainable_weights = ",
        ),
        (engine_with(mp_world_size=2), "model parallelism of size 2", "engine.py", "self.mp_world_size = "),
        (engine_with(sequence_parallel_size=4), "parallelism of size 4", "engine.py", "self.sequence_parallel_size = "),
    ],
)
def test_engines_that_are_refused(engine: Any, told: str, file: str, text: str) -> None:
    line = line_of(lambda: make_host(engine, []))
    assert told in line and len(line.splitlines()) == 1
    found = importlib.util.find_spec("deepspeed")
    assert found is not None and found.origin is not None
    assert text in (Path(found.origin).parent / "runtime" / file).read_text()  # the name is DeepSpeed's


# -- several ranks ------------------------------------------------------------------------------------------------


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return "nothing was told"


def plain_module_worker(rank: int, world: int) -> str:
    model, optimizer = small()
    return told(lambda: dho2_ds.attach(model, optimizer, loss_fn=cross_entropy, data=[rows(5)]))


def never_attached(rank: int, world: int) -> str:
    model, optimizer = small()
    return told(lambda: train(nn.parallel.DistributedDataParallel(model), optimizer, 1))


def inner_of_ddp(rank: int, world: int) -> str:
    model, optimizer = small()
    ddp = nn.parallel.DistributedDataParallel(model)
    dho2_ds.attach(ddp, optimizer, loss_fn=cross_entropy, data=[rows(5)])
    return told(lambda: train(ddp.module, optimizer, 4))


def sparse_under_ddp(rank: int, world: int) -> str:
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = dho2_ds.DHO2(model.parameters(), num_eigenvectors=2)
    ddp = nn.parallel.DistributedDataParallel(model)
    dho2_ds.attach(ddp, optimizer, loss_fn=lambda model, batch: model(batch).sum(), data=[torch.tensor([1])])
    ddp(torch.tensor([1, 2])).sum().backward()
    return told(optimizer.step)


def exact_failing_on_one_rank(rank: int, world: int) -> str:
    """Exact products and a loss that fails on rank 1 only: both ranks raise."""
    model, optimizer = small(curvature={**NOW, "hvp": "exact"})
    group = dist.new_group(timeout=timedelta(seconds=8))  # so that a hang ends the case, not the world
    ddp = nn.parallel.DistributedDataParallel(model, process_group=group)

    def loss_fn(model: Any, batch: Any) -> Tensor:
        if rank == 1:
            raise ZeroDivisionError("the loss function failed")
        return cross_entropy(model, batch)

    dho2_ds.attach(ddp, optimizer, loss_fn=loss_fn, data=[rows(5)])
    return told(optimizer.refresh)


def initialised(stage: int, settings: dict[str, Any], world: int, **zero: Any) -> Any:
    import deepspeed

    silence_shm_op()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model = engines.Classifier()
    config = engines.deepspeed_config(stage, "fp32", settings, world)
    config["zero_optimization"] |= zero
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def wrong_key_in_json(rank: int, world: int) -> str:
    return told(lambda: initialised(2, {"lr": 1e-2, "num_eigenvector": 4}, world))


def wrong_value_in_json(rank: int, world: int) -> str:
    return told(lambda: initialised(1, {"lr": 1e-2, "curvature": {"hvp": "exakt"}}, world))


def exact_at_zero3(rank: int, world: int) -> str:
    """The engine attaches itself at its first forward, and that is when the setting is refused."""
    engine = initialised(3, {"lr": 1e-2, "num_eigenvectors": 2, "curvature": {**NOW, "hvp": "exact"}}, world)
    first = told(lambda: dho2_ds.attach(engine))
    x, y = engines.micro_batch(0, 0)
    second = told(lambda: engine(x.float(), y))
    return first if first == second else f"{first} / {second}"


def inner_of_engine(rank: int, world: int) -> str:
    """``engine.module`` is called instead of ``engine``; its backward is DeepSpeed's all the same."""
    engine = initialised(1, {"lr": 1e-2, "num_eigenvectors": 2, "curvature": NOW}, world)

    def go_around() -> None:
        for step in range(4):
            for micro in range(engines.ACCUMULATION):
                x, y = engines.micro_batch(step, micro)
                loss = engine.module(x.float(), y)
                engine.backward(loss)
                engine.step()

    return told(go_around)


def attach_inner_of_engine(rank: int, world: int) -> str:
    engine = initialised(1, {"lr": 1e-2, "num_eigenvectors": 2, "curvature": NOW}, world)
    return told(lambda: dho2_ds.attach(engine.module, engine.basic_optimizer))


def too_many(kind: str) -> Callable[[int, int], str]:
    """As many eigenvectors as parameters: known when the engine is built, or at the first step at the latest."""

    def case(rank: int, world: int) -> str:
        settings = {**engines.SETTINGS, "num_eigenvectors": 214, "curvature": {"warmup_steps": 10**6}}
        return told(lambda: engines.Run(kind, rank, world, settings).step())

    return case


def secondary_partition(rank: int, world: int) -> str:
    engine = initialised(3, {"num_eigenvectors": 2}, world, zero_hpz_partition_size=2)
    return told(lambda: dho2_ds.attach(engine))


CASES: dict[str, tuple[Callable[[int, int], str], list[str]]] = {
    "a plain module": (plain_module_worker, ["ConfigError: model=Sequential", "2 ranks", "DistributedDataParallel"]),
    "never attached": (never_attached, ["RuntimeError: 2 ranks and no model attached", "dho2_ds.attach("]),
    "the inside of DDP": (inner_of_ddp, ["RuntimeError", "no training forward of the attached model", "inner module"]),
    "sparse gradients": (sparse_under_ddp, ["RuntimeError", "gradient is sparse", "sparse=False"]),
    "a wrong key": (wrong_key_in_json, ["ConfigError: num_eigenvector=4", "did you mean 'num_eigenvectors'?"]),
    "a wrong value": (wrong_value_in_json, ["ConfigError: curvature.hvp='exakt'", "'forward_difference' or 'exact'"]),
    "exact at stage 3": (exact_at_zero3, ["ConfigError: curvature.hvp='exact'", "ZeRO-3", "use stage 0-2"]),
    "the inside of an engine": (inner_of_engine, ["RuntimeError", "dho2_ds.attach"]),
    "too many at stage 1": (too_many("zero1"), ["ConfigError: num_eigenvectors=214", "must be < 214"]),
    "too many at stage 3": (too_many("zero3"), ["ConfigError: num_eigenvectors=214", "must be < 214"]),
    "too many under DDP": (too_many("ddp"), ["ConfigError: num_eigenvectors=214", "must be < 214"]),
    "attached to the inside": (attach_inner_of_engine, ["ConfigError: model", "engine"]),
    "hpZ": (secondary_partition, ["ConfigError: zero_optimization.zero_hpz_partition_size: must be 1"]),
}


def worker(rank: int, world: int, names: list[str]) -> dict[str, str]:
    results = {}
    for name, case in [*((name, CASES[name][0]) for name in names), ("one rank", exact_failing_on_one_rank)]:
        try:
            results[name] = case(rank, world)
        except Exception:
            results[name] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def outcome() -> list[dict[str, str]]:
    return run_ranks(2, worker, list(CASES), timeout=170)


@pytest.mark.parametrize("name", list(CASES))
def test_what_is_told_on_every_rank(outcome: list[dict[str, str]], name: str) -> None:
    for result in outcome:
        assert all(part in result[name] for part in CASES[name][1]), result[name]


def test_exact_products_that_fail_on_one_rank(outcome: list[dict[str, str]]) -> None:
    """Rank 0 must not wait for rank 1, which has left."""
    first, second = (result["one rank"] for result in outcome)
    assert second == "ZeroDivisionError: the loss function failed"
    assert "failed on another rank" in first
