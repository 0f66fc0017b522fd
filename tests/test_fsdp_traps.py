"""What a curvature refresh must not do on FSDP: the traps of :mod:`tests.test_traps` that sharded weights add.

All cases of one world run in one start; each result is checked by a test of its own.
"""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

import dho2_ds
from dho2_ds.config import ConfigError
from dho2_ds.spectra import spectrum
from tests import fsdp_engines
from tests.distributed import run_ranks
from tests.fsdp_engines import whole_weights, wrapped
from tests.test_traps import LATER, Net, Raising, batch, changes, doubled, error, main_loss, probe_loss, truth

KINDS = ["fsdp2", "fsdp1:orig", "fsdp1:grad_op", "fsdp1:flat"]


class Plain(Net):
    """:class:`tests.test_traps.Net` with units to wrap; ``flat`` leaves out what a flat parameter cannot hold apart."""

    def __init__(self, dropout: float = 0.3, norm: bool = True, flat: bool = False) -> None:
        super().__init__(dropout, norm)
        self.layers = nn.ModuleList([nn.Identity(), self.head, nn.Identity()])
        del self.head
        if flat:
            del self.frozen
            self.frozen = nn.Identity()

    @property
    def middle(self) -> nn.Module:
        return self.layers[1]

    def forward(self, x: Tensor, y: Tensor, part: str = "training") -> Tensor:
        x = x.to(self.gain.dtype)
        h = torch.tanh(self.frozen(self.second(torch.tanh(self.first(x)))))
        h = self.dropout(self.norm(h))
        logits = self.layers[1](h) * self.gain
        loss = nn.functional.cross_entropy(fsdp_engines.at_least_float(logits), y)
        loss = loss + 0.1 * self.stranger.square().mean()
        extra = self.aux if part == "training" else self.probe
        return loss + 0.1 * extra(h).square().mean() if part != "main" else loss


class Job:
    """One wrapped :class:`Plain` and its optimizer; parameters called ``stranger`` are somebody else's."""

    def __init__(
        self,
        kind: str,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        data: Any,
        dropout: float = 0.3,
        norm: bool = True,
        **settings: Any,
    ) -> None:
        chosen: dict[str, Any] = {"lr": 1e-2, "num_eigenvectors": 3, "curvature": LATER, **settings}
        chosen["curvature"] = {"lanczos_steps": 40, **chosen["curvature"]}
        self.kind = kind
        self.model = Plain(dropout, norm, "flat" in kind)
        self.module, _ = wrapped(kind, self.model)
        named = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        self.owned = [p for n, p in named if "stranger" not in n]
        self.optimizer = dho2_ds.DHO2(self.owned, **chosen)
        dho2_ds.attach(self.module, self.optimizer, loss_fn=loss_fn, data=data)

    def backward(self, rows: Any) -> None:
        self.module(*rows).backward()

    def step(self, rows: Any) -> None:
        self.backward(rows)
        self.optimizer.step()
        for p in self.owned:
            p.grad = None

    @torch.no_grad()
    def trace(self) -> dict[str, Any]:
        """Bit-exact copy of all that a refresh must not change."""
        params = list(self.module.parameters())
        return {
            "weights": [local(p).clone() for p in params],
            "grads": [None if p.grad is None else local(p.grad).clone() for p in params],
            "ids": [id(p.grad) for p in params],
            "buffers": [b.clone() for b in self.module.buffers()],
            "rng": torch.get_rng_state(),
            "base": [v.clone() for s in self.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)],
        }

    def end(self) -> dict[str, Any]:
        return {**whole_weights(self.module), "buffers": [b.clone() for b in self.module.buffers()]}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# -- cases: each returns a small result ----------------------------------------------------------------------------


def no_trace(kind: str, rank: int, world: int) -> dict[str, Any]:
    """A refresh with gradients in place, one that raises after a forward and one that raises at the start.

    Then training goes on: the end must be that of a run without any refresh.
    """
    result: dict[str, Any] = {}
    ends = []
    for refreshing in (False, True):
        loss_fn = Raising(rank)
        job = Job(kind, loss_fn, [batch(9, rank, world)], newton_lr=0.0, max_lr_scale=1.0)
        torch.manual_seed(11)
        for step in range(4):
            if refreshing and step in (1, 2, 3):
                job.backward(batch(50 + step, rank, world))  # the user's own gradients, reduced and waiting
                before = job.trace()
                if step > 1:
                    loss_fn.fail_in(3)
                try:
                    result[f"accepted {step}"] = job.optimizer.refresh().accepted
                except ZeroDivisionError:
                    result[f"accepted {step}"] = "raised"
                result[f"changes {step}"] = changes(before, job.trace())
            elif step:
                job.backward(batch(50 + step, rank, world))
            job.step(batch(step, rank, world))
        ends.append(job.end())
    result["different"] = changes(*ends)
    return result


def inner_failure(kind: str, rank: int, world: int) -> dict[str, Any]:
    """The model itself fails in the middle of its forward; afterwards a refresh and a training step work."""
    job = Job(kind, probe_loss, [batch(9, rank, world)])
    job.step(batch(0, rank, world))
    calls = [0]

    def fail(module: nn.Module, args: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise ZeroDivisionError("inside the model")

    before = job.trace()
    handle = job.model.middle.register_forward_pre_hook(fail)
    try:
        job.optimizer.refresh()
        message = "none"
    except ZeroDivisionError as caught:
        message = str(caught)
    handle.remove()
    changed = changes(before, job.trace())
    accepted = job.optimizer.refresh().accepted
    job.step(batch(1, rank, world))
    return {"message": message, "changes": changed, "accepted": accepted}


def curvature(kind: str, rank: int, world: int, before: str = "") -> float:
    """Error of the eigenvalues against the dense float64 Hessian of the global batch.

    ``before``: what the user does right before the refresh; ``forward`` and ``no_grad`` leave FSDP's root gathered.
    """
    job = Job(kind, main_loss, [batch(9, rank, world)], dropout=0.0, norm=False, rule="fosi")
    for step in range(2):
        job.step(batch(step, rank, world))
    if before:
        with torch.no_grad() if before == "no_grad" else contextlib.nullcontext():
            job.module(*batch(3, rank, world))
    if before == "scaler":
        return scaled(job, rank, world)
    report = job.optimizer.refresh()
    assert report.accepted, report.reason
    return error_of(job)


def error_of(job: Job) -> float:
    weights = whole_weights(job.module)
    plain = Plain(0.0, False, "flat" in job.kind)
    listed = [weights[name] for name, _ in plain.named_parameters()]
    want = truth(plain, listed, lambda m: main_loss(m, doubled(batch(9))))
    return error(job.optimizer.curvature_stats()["eigenvalues"], want)


def scaled(job: Job, rank: int, world: int) -> float:
    """With float16 autocast and a GradScaler around training; the refresh comes inside the forward."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    job.optimizer._refresher._schedule.due_since = job.optimizer.steps
    with torch.autocast("cpu", torch.float16):
        loss = job.module(*batch(3, rank, world))
    found = error_of(job)
    scaler.scale(loss).backward()
    scaler.step(job.optimizer)
    scaler.update()
    assert job.optimizer.steps == 3
    return found


def small_gradients(kind: str, rank: int, world: int) -> float:
    """Relative error of lambda_1 in float16 of a loss 1e-5 times as large, whose gradients vanish below 6e-8."""
    tiny = 1e-5
    rows = batch(9, rank, world)
    values = []
    for compute, factor in (("fsdp2:fp16", tiny), ("fsdp2", 1.0)):
        job = Job(
            compute, lambda m, r, f=factor: main_loss(m, r) * f, [rows], dropout=0.0, norm=False, rule="fosi"
        )  # fmt: skip
        job.optimizer.refresh()
        values.append(job.optimizer.curvature_stats()["eigenvalues"][:1] or [0.0])
    return abs(values[0][0] / tiny - values[1][0]) / values[1][0]


def no_sync(module: nn.Module) -> contextlib.AbstractContextManager[Any]:
    if isinstance(module, FSDP):
        return module.no_sync()
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(False)
    stack = contextlib.ExitStack()
    stack.callback(module.set_requires_gradient_sync, True)
    return stack


def accumulation(kind: str, rank: int, world: int) -> dict[str, Any]:
    """A refresh amid a no_sync window is refused; one before the window's first backward is as good as any."""
    result: dict[str, Any] = {}
    ends = []
    for refreshing in (False, True):
        job = Job(kind, main_loss, [batch(9, rank, world)], dropout=0.0, norm=False, newton_lr=0.0, max_lr_scale=1.0)
        job.step(batch(0, rank, world))
        with no_sync(job.module):
            if refreshing:
                job.optimizer._refresher._schedule.due_since = job.optimizer.steps
            job.backward(batch(1, rank, world))  # the refresh is in its forward
            if refreshing:
                result["refreshes"] = job.optimizer.curvature_stats()["refreshes"]
                try:
                    job.optimizer.refresh()
                    result["message"] = "none"
                except RuntimeError as caught:
                    result["message"] = str(caught)
        job.step(batch(2, rank, world))
        ends.append(job.end())
    result["different"] = changes(*ends)
    return result


def hooks(kind: str, rank: int, world: int) -> str:
    job = Job(kind, main_loss, [batch(9, rank, world)])
    job.owned[0].register_post_accumulate_grad_hook(lambda p: None)
    try:
        job.optimizer.refresh()
    except RuntimeError as caught:
        return str(caught)
    return "none"


def collectives(kind: str, rank: int, world: int) -> list[int]:
    """All-reduces and scalars of one training step with an eigenbasis of three rows."""
    job = Job(kind, main_loss, [batch(9, rank, world)])
    job.step(batch(0, rank, world))
    job.optimizer.refresh()
    reducer = job.optimizer._host.reducer
    before = reducer.calls, reducer.elements
    job.step(batch(1, rank, world))
    return [reducer.calls - before[0], reducer.elements - before[1]]


def swapped(kind: str, rank: int, world: int) -> dict[str, Any]:
    """The optimizer is built and attached on other parameters, then the groups are given the real ones (Accelerate)."""
    job = Job(kind, main_loss, [batch(9, rank, world)])
    first = job.optimizer._host
    job.step(batch(0, rank, world))
    kept = job.optimizer._host is first
    other = Job(kind, main_loss, [batch(9, rank, world)])
    job.optimizer.param_groups[0]["params"] = other.owned
    dho2_ds.attach(other.module, job.optimizer, loss_fn=main_loss, data=[batch(9, rank, world)])
    job.optimizer.param_groups[0]["params"] = list(reversed(other.owned))
    second = job.optimizer._host
    other.backward(batch(1, rank, world))
    before = other.end()
    job.optimizer.step()
    return {
        "kept": kept,
        "rebuilt": job.optimizer._host is not second,
        "moved": changes(before, other.end()),
        "accepted": job.optimizer.refresh().accepted,
    }


def refusals(rank: int, world: int) -> dict[str, str]:
    """Set-ups that cannot work, each with its message."""
    found: dict[str, str] = {}

    def attempt(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
            found[name] = "none"
        except (ConfigError, RuntimeError) as caught:
            found[name] = f"{type(caught).__name__}: {caught}"

    def root_left_out() -> None:
        model = Plain()
        fully_shard(model.middle)
        dho2_ds.attach(model, dho2_ds.DHO2(model.parameters(), num_eigenvectors=2))

    def inner_only() -> None:
        model = Plain()
        model.layers[1] = FSDP(model.layers[1], use_orig_params=True, device_id=torch.device("cpu"))
        dho2_ds.attach(model, dho2_ds.DHO2(model.parameters(), num_eigenvectors=2))

    def exact(kind: str) -> None:
        Job(kind, main_loss, [batch(9, rank, world)], curvature={"hvp": "exact"})

    def too_many() -> None:
        Job("fsdp2", main_loss, [batch(9, rank, world)], num_eigenvectors=1000, curvature={"lanczos_steps": None})

    def overlap() -> None:
        model = nn.parallel.DistributedDataParallel(Plain(), find_unused_parameters=True)
        make = functools.partial(dho2_ds.DHO2, num_eigenvectors=2)
        wrapper = ZeroRedundancyOptimizer(model.parameters(), make, lr=1e-2)
        wrapper._overlap_with_ddp = True
        dho2_ds.attach(model, wrapper)

    attempt("fsdp2 root", root_left_out)
    attempt("fsdp1 root", inner_only)
    attempt("exact fsdp2", lambda: exact("fsdp2"))
    attempt("exact fsdp1", lambda: exact("fsdp1:orig"))
    attempt("too many", too_many)
    attempt("overlap", overlap)
    return found


def owners(rank: int, world: int) -> dict[str, Any]:
    """ZeroRedundancyOptimizer over a model with one parameter: all ranks but one own nothing."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(6, 4, bias=False))
    make = functools.partial(dho2_ds.DHO2, num_eigenvectors=3, curvature={"warmup_steps": 1, "interval": 2})
    wrapper = ZeroRedundancyOptimizer(model.parameters(), make, lr=1e-2)

    def loss_fn(m: nn.Module, rows: Any) -> Tensor:
        return nn.functional.cross_entropy(m(rows[0]), rows[1])

    dho2_ds.attach(model, wrapper, loss_fn=loss_fn)
    for step in range(5):
        wrapper.zero_grad()
        rows = batch(step, rank, world)
        nn.functional.cross_entropy(model(rows[0]), rows[1]).backward()
        wrapper.step()
        if step == 0:
            dho2_ds.attach(model, wrapper, loss_fn=loss_fn, data=[rows])
    stats = wrapper.optim.curvature_stats()
    seen: list[Any] = [None] * world
    dist.all_gather_object(seen, model.module.weight.detach())
    return {"refreshes": stats["refreshes"], "equal": all(torch.equal(seen[0], w) for w in seen)}


def eigenvalues_by_spectrum(kind: str, rank: int, world: int) -> float:
    """The public :func:`dho2_ds.spectrum` on a sharded model."""
    model = Plain(0.0, False, "flat" in kind)
    module, _ = wrapped(kind, model)
    found = spectrum(module, main_loss, [batch(9, rank, world)], k=3, lanczos_steps=40)
    plain = Plain(0.0, False, "flat" in kind).double()
    params = [p for p in plain.parameters() if p.requires_grad]
    flat = torch.autograd.grad(main_loss(plain, doubled(batch(9))), params, create_graph=True, allow_unused=True)
    g = torch.cat([(torch.zeros_like(p) if v is None else v).reshape(-1) for p, v in zip(params, flat, strict=True)])
    rows = []
    for value in g:
        if not value.requires_grad:
            rows.append(torch.zeros_like(g).detach())
            continue
        parts = torch.autograd.grad(value, params, retain_graph=True, allow_unused=True)
        filled = [torch.zeros_like(p) if v is None else v for p, v in zip(params, parts, strict=True)]
        rows.append(torch.cat([v.reshape(-1) for v in filled]))
    values = torch.linalg.eigvalsh(torch.stack(rows))
    return error(found.eigenvalues, values[values.abs().argsort(descending=True)[:3]].tolist())


CASES: list[tuple[str, Callable[..., Any], list[str]]] = [
    ("no trace", no_trace, [*KINDS, "fsdp1:no_shard"]),
    ("inner failure", inner_failure, ["fsdp2", "fsdp1:orig", "fsdp1:flat"]),
    ("curvature", curvature, [*KINDS, "fsdp2:offload"]),
    ("after forward", functools.partial(curvature, before="forward"), KINDS),
    ("after no_grad", functools.partial(curvature, before="no_grad"), KINDS),
    ("scaler", functools.partial(curvature, before="scaler"), ["fsdp2"]),
    ("small", small_gradients, ["fsdp2:fp16"]),
    ("accumulation", accumulation, [*KINDS, "fsdp2:bf16"]),
    ("hooks", hooks, ["fsdp2"]),
    ("collectives", collectives, ["fsdp2", "fsdp1:orig"]),
    ("swapped", swapped, ["fsdp2", "fsdp1:orig"]),
    ("spectrum", eigenvalues_by_spectrum, ["fsdp2", "fsdp1:flat"]),
]


def worker(rank: int, world: int, cases: list[str]) -> dict[str, Any]:
    """One result per case; an error that all ranks share is a result too, so that it fails its own test only."""
    results: dict[str, Any] = {}
    for name, function, kinds in CASES:
        if name in cases:
            for kind in kinds:
                try:
                    results[name, kind] = function(kind, rank, world)
                except Exception:
                    results[name, kind] = traceback.format_exc()
    results["refusals"], results["owners"] = refusals(rank, world), owners(rank, world)
    return results


@pytest.fixture(scope="module")
def outcome() -> list[dict[str, Any]]:
    return run_ranks(2, worker, [name for name, _, _ in CASES], timeout=170)


def of(result: dict[str, Any], name: str, kind: str) -> Any:
    found = result[name, kind]
    assert not isinstance(found, str) or name == "hooks", found
    return found


def kinds_of(case: str) -> list[str]:
    return next(kinds for name, _, kinds in CASES if name == case)


@pytest.mark.parametrize("kind", kinds_of("no trace"))
def test_a_refresh_leaves_no_trace(outcome: list[dict[str, Any]], kind: str) -> None:
    """Weights, every gradient and its identity, buffers, RNG, base state; also when the loss raises after a forward."""
    for result in outcome:
        found = of(result, "no trace", kind)
        assert [found[f"accepted {step}"] for step in (1, 2, 3)] == [True, "raised", "raised"]
        assert found["changes 1"] == found["changes 2"] == found["changes 3"] == []
        assert found["different"] == []


@pytest.mark.parametrize("kind", kinds_of("inner failure"))
def test_a_failure_inside_the_model_is_survived(outcome: list[dict[str, Any]], kind: str) -> None:
    for result in outcome:
        assert of(result, "inner failure", kind) == {"message": "inside the model", "changes": [], "accepted": True}


@pytest.mark.parametrize("before", ["curvature", "after forward", "after no_grad"])
@pytest.mark.parametrize("kind", KINDS)
def test_eigenvalues_are_those_of_the_loss(outcome: list[dict[str, Any]], kind: str, before: str) -> None:
    """Also after a forward without backward, which leaves gathered weights that would hide every perturbation."""
    assert of(outcome[0], before, kind) < 1e-4


def test_eigenvalues_with_offload(outcome: list[dict[str, Any]]) -> None:
    assert of(outcome[0], "curvature", "fsdp2:offload") < 1e-4


def test_float16_autocast_and_a_grad_scaler_do_not_change_eigenvalues(outcome: list[dict[str, Any]]) -> None:
    """float16 rounds to 2^-11 and tau is 5e-2: 1 % of the leading eigenvalue; the scaler's factor does not enter."""
    assert of(outcome[0], "scaler", "fsdp2") < 1e-2


def test_small_gradients_survive_float16(outcome: list[dict[str, Any]]) -> None:
    assert of(outcome[0], "small", "fsdp2:fp16") < 2e-2


@pytest.mark.parametrize("kind", kinds_of("accumulation"))
def test_a_refresh_amid_a_no_sync_window_is_refused(outcome: list[dict[str, Any]], kind: str) -> None:
    """At the window's first forward it is not: there the evaluation's own gradients are reduced all the same."""
    for result in outcome:
        found = of(result, "accumulation", kind)
        assert found["refreshes"] == 1
        assert "no_sync" in found["message"] and "before the window's first backward" in found["message"]
        assert found["different"] == []


def test_post_accumulate_hooks_are_refused(outcome: list[dict[str, Any]]) -> None:
    assert "'gain' has a post-accumulate-grad hook" in of(outcome[0], "hooks", "fsdp2")


@pytest.mark.parametrize("kind", kinds_of("collectives"))
def test_a_step_makes_one_all_reduce(outcome: list[dict[str, Any]], kind: str) -> None:
    """Of k + 1 scalars, with k = 3."""
    for result in outcome:
        assert of(result, "collectives", kind) == [1, 4]


@pytest.mark.parametrize("kind", kinds_of("swapped"))
def test_replaced_parameters_rebuild_the_host(outcome: list[dict[str, Any]], kind: str) -> None:
    for result in outcome:
        found = of(result, "swapped", kind)
        assert found["kept"] and found["rebuilt"] and found["accepted"]
        assert "layers.1.weight" in found["moved"]


@pytest.mark.parametrize("kind", kinds_of("spectrum"))
def test_spectrum_of_a_sharded_model(outcome: list[dict[str, Any]], kind: str) -> None:
    assert of(outcome[0], "spectrum", kind) < 1e-4


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        ("fsdp2 root", "apply fully_shard to the root module too"),
        ("fsdp1 root", "wrap the root module too"),
        ("exact fsdp2", "set curvature.hvp to 'auto' or 'finite_difference'"),
        ("exact fsdp1", "set curvature.hvp to 'auto' or 'finite_difference'"),
        ("too many", "num_eigenvectors=1000: must be < "),
        ("overlap", "overlap_with_ddp=True: must be False"),
    ],
)
def test_what_cannot_work_is_refused(outcome: list[dict[str, Any]], setup: str, words: str) -> None:
    for result in outcome:
        assert result["refusals"][setup].startswith("ConfigError: ") and words in result["refusals"][setup]


def test_ranks_that_own_nothing(outcome: list[dict[str, Any]]) -> None:
    for result in outcome:
        assert result["owners"] == {"refreshes": 2, "equal": True}


def hsdp_worker(rank: int, world: int) -> dict[str, Any]:
    """Partly reduced gradients wait in HSDP's group, not in the parameters."""
    job = Job("hsdp", main_loss, [batch(9, rank, world)], dropout=0.0, norm=False)
    job.step(batch(0, rank, world))
    collective = collectives("hsdp", rank, world)
    job.module.set_requires_all_reduce(False)
    job.backward(batch(1, rank, world))
    try:
        job.optimizer.refresh()
        message = "none"
    except RuntimeError as caught:
        message = str(caught)
    return {
        "message": message,
        "collectives": collective,
        "error": curvature("hsdp", rank, world),
        "after": curvature("hsdp", rank, world, "no_grad"),
    }


@pytest.mark.slow
def test_hsdp() -> None:
    for result in run_ranks(4, hsdp_worker, timeout=170):
        assert "no_sync" in result["message"]
        assert result["collectives"] == [1, 4]
        assert result["error"] < 1e-4 and result["after"] < 1e-4
