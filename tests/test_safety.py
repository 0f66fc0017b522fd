"""What must hold when something goes wrong: skipped and broken steps, refused refreshes, stale curvature.

And when nothing is asked for: with ``num_eigenvectors=0`` every engine trains bit for bit as with torch's optimizer.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import dho2_ds
from dho2_ds.base import BaseOptimizer
from dho2_ds.curvature import refresh as refreshing
from tests import engines
from tests.distributed import run_ranks, silence_shm_op
from tests.test_eigenpairs import dense
from tests.test_traps import Job, Net, batch, error, probe_loss

EARLY: dict[str, Any] = {"warmup_steps": 2, "interval": 10**6, "lanczos_steps": 30}
"""One refresh, before the third step: after one step of Adam bfloat16 is too coarse for the preconditioned Hessian."""
SETTINGS = {**engines.SETTINGS, "curvature": EARLY}


def inside(run: engines.Run) -> dict[str, Any]:
    """Bit-exact copy of everything that a step or a refresh of ours may change."""
    optimizer = run.optimizer
    basis = optimizer._space.basis
    stats = optimizer.curvature_stats()
    return {
        "weights": run.weights(),
        "base": [v.clone() for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)],
        "steps": stats["steps"],
        "basis": None if basis is None else [basis.vectors.clone(), basis.eigenvalues.clone()],
        "next": None if basis is None else (basis.next_eigenvalue, basis.born),
        "storage": None if optimizer._space.storage is None else optimizer._space.storage.clone(),
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups],
        "velocity": velocity(optimizer),
        "masters": masters(run),
    }


MASTERS = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
    "fp32_groups",
)


def masters(run: engines.Run) -> list[Tensor]:
    """Copies of the float32 weights that DeepSpeed keeps beside the model's: of ZeRO 1-2, 3, BF16_Optimizer, ZeRO 0."""
    held = [group for name in MASTERS for group in getattr(getattr(run.engine, "optimizer", None), name, [])]
    return [t.detach().clone() for group in held for t in (group if isinstance(group, list) else [group])]


def velocity(optimizer: Any) -> list[Tensor]:
    """All tensors of k scalars that the update rule keeps between steps."""
    owner = optimizer._space.update
    held = getattr(owner, "velocity", None) or getattr(owner, "_velocity", None)
    return [] if held is None else [v.clone() for v in vars(held).values() if isinstance(v, Tensor)]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


def changes(before: dict[str, Any], after: dict[str, Any], ignore: tuple[str, ...] = ()) -> list[str]:
    return [key for key in before if key not in ignore and not same(before[key], after[key])]


@contextmanager
def poisoned(run: engines.Run, rank: int = 0, value: float = float("nan")) -> Iterator[None]:
    """The first input of each micro-batch of ``rank`` is not finite."""
    honest = run.local

    def local(step: int, micro: int) -> tuple[Tensor, Tensor]:
        x, y = honest(step, micro)
        if run.rank == rank:
            x = x.clone()
            x[0, 0] = value
        return x, y

    with mock.patch.object(run, "local", local):
        yield


# -- steps that do not happen -------------------------------------------------------------------------------------


def skipped_step(kind: str, rank: int, world: int, rule: str) -> dict[str, Any]:
    """A step with a NaN input on rank 0 between two ordinary ones, against a run without it."""
    results: dict[str, Any] = {}
    ends = []
    for skipping in (False, True):
        run = engines.Run(kind, rank, world, {**SETTINGS, "rule": rule})
        run.train(3)
        if skipping:
            before = inside(run)
            with poisoned(run):
                run.step()
            run.step_count -= 1
            results["changes"] = changes(before, inside(run))
            results["skipped"] = run.engine.skipped_steps
            results["refreshes"] = run.optimizer.curvature_stats()["refreshes"]
        run.train(2)
        ends.append(inside(run))
    results["afterwards"] = changes(*ends)
    return results


def skipped_while_due(kind: str, rank: int, world: int) -> dict[str, Any]:
    """The NaN batch arrives exactly when a refresh is due, so it is the curvature batch too."""
    results: dict[str, Any] = {}
    run = engines.Run(kind, rank, world, {**SETTINGS, "curvature": {**EARLY, "warmup_steps": 2, "interval": 2}})
    run.train(4)
    results["due"] = run.optimizer.refresh_due
    before = inside(run)
    with poisoned(run):
        run.step()
    results["changes"] = changes(before, inside(run))
    stats = run.optimizer.curvature_stats()
    results["counts"] = stats["refreshes"], stats["rejected"], run.engine.skipped_steps
    results["losses"] = run.train(3)
    stats = run.optimizer.curvature_stats()
    results["later"] = stats["refreshes"], stats["rejected"], stats["steps"]
    return results


LAST = -1


def broken_step(kind: str, rank: int, world: int, break_at: int) -> dict[str, Any]:
    """The engine fails between the inner calls of one step, or in the last; the next must not see its gradients."""
    results: dict[str, Any] = {}
    ends = []
    for breaking in (False, True):
        run = engines.Run(kind, rank, world, SETTINGS)
        run.train(3)
        if breaking:
            wrapper = run.engine.optimizer
            honest = wrapper._optimizer_step
            visible = [(group, group["params"]) for group in run.optimizer.param_groups]

            def fail(index: int, honest: Any = honest) -> None:
                if index == break_at:
                    raise InterruptedError("broken off")
                honest(index)

            before = inside(run)
            run.step_count = 77  # another batch
            in_last = mock.patch.object(BaseOptimizer, "step", side_effect=InterruptedError("broken off"))
            between = mock.patch.object(wrapper, "_optimizer_step", fail)
            with in_last if break_at == LAST else between:
                try:
                    run.step()
                except InterruptedError:
                    results["broken"] = True
            # DeepSpeed narrows the groups for each inner call and does not put them back when it fails.
            run.optimizer.param_groups = [group for group, _ in visible]
            for group, params in visible:
                group["params"] = params
            run.step_count = 3
            results["changes"] = changes(before, inside(run))
            clean_engine(run.engine)
        run.train(2)
        ends.append(inside(run))
    results["afterwards"] = changes(*ends)
    return results


def clean_engine(engine: Any) -> None:
    """What a user who catches the error has to do: drop the engine's own leftovers of the step."""
    wrapper = engine.optimizer
    wrapper.zero_grad()
    if isinstance(wrapper.averaged_gradients, dict) and hasattr(wrapper, "all_grad_tensors"):
        for key in wrapper.averaged_gradients:
            wrapper.averaged_gradients[key] = None
            wrapper.all_grad_tensors[key] = None
        for master in wrapper.single_partition_of_fp32_groups:
            master.grad = None
    else:
        wrapper.averaged_gradients = {}
        for master in wrapper.fp32_partitioned_groups_flat:
            master.grad = None
    engine.micro_steps += 1


# -- refreshes that are refused -----------------------------------------------------------------------------------


class Spoiling:
    """A loss function that is not finite on one rank when told so."""

    def __init__(self, rank: int) -> None:
        self.rank, self.value = rank, 0.0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = model(*batch)
        return loss * self.value if self.value and self.rank == 1 else loss


def refused_refresh(kind: str, rank: int, world: int) -> dict[str, Any]:
    """NaN, then inf, on rank 1 only, between ordinary steps, against a run without those refreshes."""
    results: dict[str, Any] = {}
    ends = []
    for refusing in (False, True):
        run = engines.Run(kind, rank, world, SETTINGS)
        loss_fn = Spoiling(rank)
        dho2_ds.attach(run.module, run.optimizer, loss_fn=loss_fn, data=[run.local(50, 0)])
        run.train(3)
        for name, value in (("nan", float("nan")), ("inf", float("inf"))):
            if refusing:
                loss_fn.value = value
                before = inside(run)
                report = run.optimizer.refresh()
                loss_fn.value = 0.0
                stats = run.optimizer.curvature_stats()
                results[name] = report.accepted, changes(before, inside(run)), stats["refreshes"], stats["rejected"]
            run.train(1)
        ends.append(inside(run))
    results["afterwards"] = changes(*ends)
    skipped = getattr(run.engine, "skipped_steps", 0)
    results["accepted again"] = run.optimizer.refresh().accepted, skipped
    return results


def disagreement(kind: str, rank: int, world: int) -> dict[str, Any]:
    """One rank finds another Ritz value, by a rounding error in the last place."""
    run = engines.Run(kind, rank, world, SETTINGS)
    run.train(3)
    honest = refreshing.lanczos_process

    def lanczos(*args: Any, **kwargs: Any) -> Any:
        ritz = yield from honest(*args, **kwargs)
        if rank == 1:
            ritz = dataclasses.replace(ritz, eigenvalues=ritz.eigenvalues * (1 + 1e-15))
        return ritz

    before = inside(run)
    with mock.patch.object(refreshing, "lanczos_process", lanczos):
        report = run.optimizer.refresh()
    stats = run.optimizer.curvature_stats()
    result = {"report": (report.accepted, report.reason), "changes": changes(before, inside(run))}
    result["counts"] = stats["refreshes"], stats["rejected"]
    result["losses"] = run.train(2)
    return result


def unconverged(kind: str, rank: int, world: int) -> dict[str, Any]:
    """A few products on an outlier, then on a flat spectrum, then on the outlier again."""
    flat, outlier = torch.linspace(-1, 1, 101).roll(51), 1e-3 * torch.ones(101)  # the outlier's place is 0 in the flat
    outlier[0] = 1.0
    model = Quadratic(outlier.clone())
    settings = {
        "lr": 1e-2,
        "base": "sgd",
        "rule": "fosi",
        "num_eigenvectors": 1,
        "curvature": {**EARLY, "warmup_steps": 10**6, "lanczos_steps": 4},
    }
    if kind == "ddp":
        optimizer = dho2_ds.DHO2(model.parameters(), **settings)
        module: Any = nn.parallel.DistributedDataParallel(model)
    else:
        module = engine_of(kind, model, settings, world)
        optimizer = module.basic_optimizer
    dho2_ds.attach(module, optimizer, loss_fn=lambda model, _: model(), data=[None])
    results: dict[str, Any] = {}
    for name, spectrum in (("first", outlier), ("flat", flat), ("again", outlier)):
        model.h.copy_(spectrum)
        before = copy.deepcopy(optimizer._space.basis)
        report = optimizer.refresh()
        kept = before is not None and same(vars(before), vars(optimizer._space.basis))
        results[name] = report.accepted, report.reason, kept
    stats = optimizer.curvature_stats()
    results["counts"] = stats["refreshes"], stats["rejected"]
    return results


def engine_of(kind: str, model: nn.Module, settings: dict[str, Any], world: int) -> Any:
    import deepspeed

    silence_shm_op()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    config = engines.deepspeed_config(int(kind[4:]), "fp32", settings, world)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


# -- refreshes amid other work ------------------------------------------------------------------------------------


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(*batch)
    return loss


def after_evaluation(kind: str, rank: int, world: int) -> dict[str, Any]:
    """A forward pass without a backward may leave ZeRO-3 with gathered weights."""
    run = engines.Run(kind, rank, world, {**SETTINGS, "rule": "fosi"})
    run.train(4)
    rows = run.local(99, 0)
    dho2_ds.attach(run.module, run.optimizer, loss_fn=loss_of, data=[rows])
    before = inside(run)  # it gathers, and releases, too
    run.engine.eval()
    with torch.no_grad():
        run.module(*rows)
    run.engine.train()
    found = run.optimizer.refresh().eigenvalues
    return {
        "error": error(found, dense(run.weights())[0][:4].tolist()),
        "changes": changes({key: before[key] for key in ("weights", "base", "masters")}, inside(run)),
    }


def pending(kind: str, rank: int, world: int) -> dict[str, Any]:
    """Gradients of a first micro-batch, reduced or not, wait while a refresh is made; against a run without it."""
    results: dict[str, Any] = {}
    ends = []
    for with_refresh in (False, True):
        rows = [batch(seed, rank, world) for seed in range(6)]
        job = Job(kind, Net(0.3), probe_loss, [batch(9, rank, world)], accumulation=2, newton_lr=0.0, max_lr_scale=1.0)
        calls = []

        def hook(state, bucket, calls=calls):  # torch does not understand postponed annotations
            calls.append(bucket.index())
            reduced = torch.distributed.all_reduce(bucket.buffer().div_(world), async_op=True)
            return reduced.get_future().then(lambda future: future.value()[0])

        job.module.register_comm_hook(None, hook)
        torch.manual_seed(3)
        job.step(*rows[:2])
        for name, context, micro in (("reduced", nullcontext, rows[2:4]), ("no_sync", job.module.no_sync, rows[4:])):
            with context():
                job.backward(micro[0])
            if with_refresh:
                before, earlier = job.trace(), len(calls)
                accepted = job.optimizer.refresh().accepted
                results[name] = accepted, changes(before, job.trace()), len(calls) - earlier
            job.backward(micro[1])
            job.update()
        results["calls"] = len(calls)
        ends.append(job.full_weights())
    results["same"] = same(*ends)
    return results


# -- CPU offload --------------------------------------------------------------------------------------------------


def offloaded(kind: str, rank: int, world: int) -> dict[str, Any]:
    """Seven steps, a refresh inside and one by hand, with the optimizer on the CPU and without."""
    results: dict[str, Any] = {}
    losses, ends = [], []
    for variant in ("", ":offload"):
        run = engines.Run(kind + variant, rank, world, SETTINGS)
        first = run.train(3)
        dho2_ds.attach(run.module, run.optimizer, loss_fn=loss_of, data=[run.local(50, 0)])
        before = {"weights": run.weights(), "masters": masters(run)}
        accepted = run.optimizer.refresh().accepted
        results[variant] = accepted, changes(before, {"weights": run.weights(), "masters": masters(run)})
        results["offload" + variant] = run.optimizer._host.offload
        losses.append(torch.tensor(first + run.train(4)))
        ends.append(run.weights())
    results["loss"] = float(((losses[1] - losses[0]) / losses[0]).abs().max())
    results["weights"] = float((ends[1] - ends[0]).norm() / ends[0].norm())
    return results


# -- without curvature --------------------------------------------------------------------------------------------

BASES: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-7},
    "adam": {"lr": 1e-2, "weight_decay": 0.0},
    "sgd": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
}
TORCH = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


class ClientRun(engines.Run):
    """The same job with torch's own optimizer, given to DeepSpeed as the client's."""

    def __init__(self, kind: str, rank: int, world: int, base: str) -> None:
        self.kind, self.rank, self.world = kind, rank, world
        self.model = engines.Classifier()
        self.step_count, self.engine, self.scheduler = 0, None, None
        options = BASES[base]
        self.optimizer = TORCH[base](engines.groups(self.model, options["lr"]), **options)
        engine, _, variant = kind.partition(":")
        if engine.startswith("zero"):
            import deepspeed

            silence_shm_op()
            deepspeed.init_distributed(dist_backend="gloo", verbose=False)
            config = engines.deepspeed_config(int(engine[4:]), variant or "fp32", {}, world)
            del config["optimizer"]
            config["zero_allow_untested_optimizer"] = True
            config["zero_force_ds_cpu_optimizer"] = False  # under offload
            self.engine, _, _, _ = deepspeed.initialize(model=self.model, optimizer=self.optimizer, config=config)
            self.module = self.engine
        else:
            self.module = nn.parallel.DistributedDataParallel(self.model) if engine == "ddp" else self.model


def zero_run(kind: str, rank: int, world: int, base: str) -> engines.Run:
    settings = {**BASES[base], "base": base, "num_eigenvectors": 0}
    return engines.Run(kind, rank, world, copy.deepcopy(settings))


def without_curvature(kind: str, rank: int, world: int, base: str, steps: int = 10) -> dict[str, Any]:
    ours, theirs = zero_run(kind, rank, world, base), ClientRun(kind, rank, world, base)
    losses = ours.train(steps), theirs.train(steps)
    return {
        "losses": losses[0] == losses[1],
        "weights": same(ours.weights(), theirs.weights()),
        "masters": (len(masters(ours)), same(masters(ours), masters(theirs))),
        "moved": float(
            (ours.weights() - torch.cat([p.detach().reshape(-1) for p in engines.Classifier().parameters()])).norm()
        ),
    }


# -- the distributed cases, in one world ---------------------------------------------------------------------------

Cases = list[tuple[str, Any, list[tuple[Any, ...]]]]

CASES: Cases = [
    ("skipped", skipped_step, [("zero1", "fosi"), ("zero2:bf16", "adaptive"), ("zero3", "adaptive")]),
    ("due", skipped_while_due, [("zero3",)]),
    ("broken", broken_step, [("zero1", 1), ("zero1", LAST)]),
    ("refused", refused_refresh, [("ddp",), ("zero3",)]),
    ("disagreement", disagreement, [("zero2",)]),
    ("unconverged", unconverged, [("ddp",), ("zero3",)]),
    ("evaluation", after_evaluation, [("zero3",)]),
    ("pending", pending, [("ddp",)]),
    ("offload", offloaded, [("zero2",), ("zero3",)]),
    (
        "without",
        without_curvature,
        [("ddp", "adamw"), *[(f"zero{stage}", "adamw") for stage in range(4)], ("zero3", "sgd"), ("zero2:bf16", "sgd")],
    ),
]
SLOW_CASES: Cases = [
    (
        "skipped",
        skipped_step,
        [(kind, "fosi") for kind in ("zero0:bf16", "zero1:bf16", "zero1:bf16_accum", "zero2", "zero3:bf16")]
        + [(f"zero{stage}:offload", "adaptive") for stage in (1, 2, 3)],
    ),
    ("due", skipped_while_due, [("zero1",), ("zero2:bf16",)]),
    ("broken", broken_step, [("zero2", 1), ("zero3:sub_groups", 2), ("zero3:sub_groups", LAST)]),
    (
        "refused",
        refused_refresh,
        [("zero0",), ("zero1",), ("zero2",), *[(f"zero{stage}:offload",) for stage in (1, 2, 3)]],
    ),
    ("disagreement", disagreement, [("ddp",), ("zero3",)]),
    ("evaluation", after_evaluation, [("zero1",), ("zero3:persistence0",)]),
    ("pending", pending, [("ddp:bucket_view",)]),
    (
        "without",
        without_curvature,
        [(kind, base) for kind in ("ddp", "zero0", "zero1", "zero2") for base in ("adam", "sgd")]
        + [("zero3", "adam"), *[(f"zero{stage}:bf16", "adamw") for stage in range(4)], ("zero1:bf16_accum", "adamw")]
        + [
            (kind, base) for kind in ("zero3:sub_groups", "zero2:offload", "zero3:offload") for base in ("adamw", "sgd")
        ],
    ),
]


def worker(rank: int, world: int, slow: bool) -> dict[str, Any]:
    """One result per case; an error that all ranks share is a result too, so that it fails its own test only."""
    results: dict[str, Any] = {}
    for name, function, arguments in SLOW_CASES if slow else CASES:
        for chosen in arguments:
            kind, *rest = chosen
            try:
                results[label(name, chosen)] = function(kind, rank, world, *rest)
            except Exception:
                results[label(name, chosen)] = traceback.format_exc()
    return results


def label(name: str, chosen: tuple[Any, ...]) -> str:
    return " ".join([name, *map(str, chosen)])


def of_kind(name: str) -> list[Any]:
    """The cases of one test, the slow ones marked."""
    marks = (pytest.mark.slow, pytest.mark.timeout(600))
    fast = [label(n, chosen) for n, _, all_chosen in CASES for chosen in all_chosen if n == name]
    slow = [label(n, chosen) for n, _, all_chosen in SLOW_CASES for chosen in all_chosen if n == name]
    return [*fast, *[pytest.param(x, marks=marks) for x in slow]]


Outcome = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """The results by rank of a case; all fast cases run in one world, and all slow ones in another, at first use."""
    worlds: dict[bool, list[dict[str, Any]]] = {}

    def of(name: str) -> list[dict[str, Any]]:
        slow = name not in [label(n, chosen) for n, _, all_chosen in CASES for chosen in all_chosen]
        if slow not in worlds:
            worlds[slow] = run_ranks(2, worker, slow, timeout=580 if slow else 170)
        for result in worlds[slow]:
            assert not isinstance(result[name], str), result[name]
        return [result[name] for result in worlds[slow]]

    return of


@pytest.mark.parametrize("name", of_kind("skipped"))
def test_a_skipped_step_leaves_no_trace(outcome: Outcome, name: str) -> None:
    """A NaN gradient: the engine never calls the inner step, under two param groups; the next step is as if nothing."""
    for result in outcome(name):
        assert result["refreshes"] == 1  # there was a basis to spoil
        assert result["skipped"] == 1
        assert result["changes"] == []
        assert result["afterwards"] == []


@pytest.mark.parametrize("name", of_kind("due"))
def test_a_batch_that_is_not_finite_while_a_refresh_is_due(outcome: Outcome, name: str) -> None:
    """It spoils the refresh and the step together: both are refused, and both come back later."""
    for result in outcome(name):
        assert result["due"]
        assert result["changes"] == []
        assert result["counts"] == (1, 1, 1)
        assert all(loss < 3 for loss in result["losses"])
        assert result["later"] == (2, 1, 7)


@pytest.mark.parametrize("name", of_kind("broken"))
def test_a_broken_step_does_not_mix_with_the_next(outcome: Outcome, name: str) -> None:
    for result in outcome(name):
        assert result["broken"]
        assert result["changes"] == []
        assert result["afterwards"] == []


@pytest.mark.parametrize("name", of_kind("refused"))
def test_a_loss_that_is_not_finite_on_one_rank_is_refused_on_all(outcome: Outcome, name: str) -> None:
    for result in outcome(name):
        assert result["nan"] == (False, [], 1, 1)
        assert result["inf"] == (False, [], 1, 2)
        assert result["afterwards"] == []
        assert result["accepted again"] == (True, 0)


@pytest.mark.parametrize("name", of_kind("disagreement"))
def test_ranks_that_disagree_refuse_together(outcome: Outcome, name: str) -> None:
    first, second = outcome(name)
    for result in (first, second):
        assert result["report"] == (False, "ranks disagree")
        assert result["changes"] == []
        assert result["counts"] == (1, 1)
    assert first["losses"] == second["losses"]


@pytest.mark.parametrize("name", of_kind("unconverged"))
def test_a_refresh_without_a_converged_pair_is_refused_on_all_ranks(outcome: Outcome, name: str) -> None:
    for result in outcome(name):
        assert result["first"] == result["again"] == (True, "", False)
        accepted, reason, kept = result["flat"]
        assert not accepted and "no Ritz pair converged" in reason and kept
        assert result["counts"] == (2, 1)


@pytest.mark.parametrize("name", of_kind("evaluation"))
def test_a_refresh_after_a_forward_pass_alone(outcome: Outcome, name: str) -> None:
    for result in outcome(name):
        assert result["error"] < 1e-3  # of finite differences in float32, as in test_eigenpairs.py
        assert result["changes"] == []


@pytest.mark.parametrize("name", of_kind("pending"))
def test_pending_gradients_and_a_communication_hook(outcome: Outcome, name: str) -> None:
    """A refresh goes around the hook, which may compress, and what has been accumulated stays bit for bit."""
    for result in outcome(name):
        assert result["reduced"] == result["no_sync"] == (True, [], 0)
        assert result["calls"] > 0
        assert result["same"]


@pytest.mark.parametrize("name", of_kind("offload"))
def test_offload_trains_as_without(outcome: Outcome, name: str) -> None:
    """The two differ in the order of float32 sums only, as engines do (test_trajectories.py)."""
    for result in outcome(name):
        assert result[""] == result[":offload"] == (True, [])
        assert (result["offload"], result["offload:offload"]) == (False, True)
        assert result["loss"] < 1e-5 and result["weights"] < 1e-4


@pytest.mark.parametrize("name", of_kind("without"))
def test_without_eigenvectors_engines_train_as_with_torchs_optimizer(outcome: Outcome, name: str) -> None:
    """Ten steps, two param groups, accumulation 2, clipping: losses and weights bit for bit."""
    for result in outcome(name):
        assert result["losses"] and result["weights"]
        count, alike = result["masters"]
        assert alike and (count > 0) == (name.split()[1] not in ("ddp", "zero0"))
        assert result["moved"] > 0.1


# -- one process ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", list(BASES))
@pytest.mark.parametrize("fused", [None, True, False])
def test_without_eigenvectors_it_is_torchs_optimizer(base: str, fused: bool | None) -> None:
    """No model needs to be attached; the state is torch's own, so it can be carried over."""
    ours, theirs = engines.Classifier(), engines.Classifier()
    options = {**BASES[base], "fused": fused}
    a = dho2_ds.DHO2(engines.groups(ours, options["lr"]), base=base, num_eigenvectors=0, **options)
    b = TORCH[base](engines.groups(theirs, options["lr"]), **options)
    for step in range(10):
        for model, optimizer in ((ours, a), (theirs, b)):
            optimizer.zero_grad()
            model(*engines.micro_batch(step, 0)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert same([p.detach() for p in ours.parameters()], [p.detach() for p in theirs.parameters()])
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.state[p].keys() == b.state[q].keys()
        assert all(same(a.state[p][key], b.state[q][key]) for key in a.state[p])


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Lines of the package's log, wherever they go."""
    handler, log = Records(), logging.getLogger("dho2_ds")
    log.addHandler(handler)
    try:
        yield handler.lines
    finally:
        log.removeHandler(handler)


@pytest.mark.parametrize(
    ("base", "rule"), [("adamw", "adaptive"), ("adamw", "fosi"), ("sgd", "adaptive"), ("sgd", "fosi")]
)
def test_an_old_basis_is_dropped(base: str, rule: str) -> None:
    """After ``max_age`` steps without an accepted refresh the steps are the base optimizer's, bit for bit."""
    options = {"lr": 0.05, "momentum": 0.9} if base == "sgd" else {"lr": 1e-2}
    decay = 0.0 if base == "sgd" else 0.05
    settings = {
        **SETTINGS,
        **options,
        "base": base,
        "rule": rule,
        "curvature": {**EARLY, "warmup_steps": 1, "max_age": 3},
    }
    model = engines.Classifier()
    optimizer = dho2_ds.DHO2(engines.groups(model, options["lr"], decay), **settings)
    dho2_ds.attach(model, optimizer)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(*engines.micro_batch(step, 0)).backward()
            optimizer.step()

    def twin() -> tuple[nn.Module, torch.optim.Optimizer]:
        """A copy trained by torch's optimizer from here on."""
        other = engines.Classifier()
        other.load_state_dict(model.state_dict())
        fresh = TORCH[base](engines.groups(other, options["lr"], decay), fused=True, **options)
        state = {p: optimizer.state[q] for p, q in zip(other.parameters(), model.parameters(), strict=True)}
        for p, values in state.items():
            fresh.state[p] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}
        return other, fresh

    with recorded() as lines:
        train(model, optimizer, range(2))  # the refresh is at the second step's forward, basis born at step 1
        other, fresh = twin()
        for last in (model, optimizer), (other, fresh):
            train(*last, range(2, 4))  # steps 3 and 4 still have a basis
        assert not same(*[[p.detach() for p in m.parameters()] for m in (model, other)])
        other, fresh = twin()
        for last in (model, optimizer), (other, fresh):
            train(*last, range(4, 10))
        assert same(*[[p.detach() for p in m.parameters()] for m in (model, other)])
        assert optimizer.curvature_stats()["lr_scale"] == 1.0
        warnings = [line for line in lines if "max_age=3" in line]
        assert len(warnings) == 1
        assert optimizer.refresh().accepted
        train(model, optimizer, range(10, 11))
        train(other, fresh, range(10, 11))
        assert not same(*[[p.detach() for p in m.parameters()] for m in (model, other)])


class Quadratic(nn.Module):
    """1/2 w' diag(h) w."""

    def __init__(self, h: Tensor) -> None:
        super().__init__()
        self.register_buffer("h", h)
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, len(h)))

    def forward(self) -> Tensor:
        return 0.5 * (self.h * self.w.square()).sum()


def few_steps(spread: Tensor, k: int = 4) -> tuple[dho2_ds.DHO2, Any, Quadratic]:
    model = Quadratic(spread)
    curvature = {**EARLY, "warmup_steps": 10**6, "lanczos_steps": k + 2}
    optimizer = dho2_ds.DHO2(
        model.parameters(), lr=1e-2, base="sgd", num_eigenvectors=k, rule="fosi", curvature=curvature
    )
    dho2_ds.attach(model, optimizer)
    model()
    return optimizer, optimizer.refresh(), model


def test_unconverged_pairs_are_dropped() -> None:
    """A flat spectrum and the fewest Lanczos steps allowed: what is kept is converged, the rest sets a limit."""
    spread = torch.linspace(-1, 1, 400)
    optimizer, report, model = few_steps(spread)
    assert report.accepted, report.reason
    assert 1 <= len(report.eigenvalues) < 4
    for value, residual in zip(report.eigenvalues, report.residuals, strict=True):
        assert residual <= 0.3 * abs(value)
    assert report.next_eigenvalue > 0
    for _ in range(5):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    vectors = optimizer._space.basis.vectors
    assert (vectors @ vectors.T - torch.eye(len(vectors))).abs().max() < 1e-4


def test_a_refresh_without_a_converged_pair_is_refused() -> None:
    """An old basis is not given up for nothing."""
    spread = torch.linspace(1, 2, 50)
    optimizer, report, _ = few_steps(spread)
    assert report.accepted
    before = [
        optimizer._space.basis.vectors.clone(),
        optimizer._space.basis.eigenvalues.clone(),
        optimizer._space.basis.born,
    ]
    with mock.patch.object(refreshing, "UNCONVERGED", -1.0):
        report = optimizer.refresh()
    assert not report.accepted and "no Ritz pair converged" in report.reason and "lanczos_steps" in report.reason
    assert same(
        before, [optimizer._space.basis.vectors, optimizer._space.basis.eigenvalues, optimizer._space.basis.born]
    )
    stats = optimizer.curvature_stats()
    assert stats["rejected"] == 1 and "no Ritz pair" in stats["last_refresh"]


def test_refreshes_in_vain_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    run = engines.Run("single", 0, 1, SETTINGS)
    dho2_ds.attach(run.module, run.optimizer)
    run.train(3)
    told = []
    with caplog.at_level("WARNING", logger="dho2_ds"):
        for spoilt in (True, True, False, True, True, True, True):
            with mock.patch.object(refreshing, "UNCONVERGED", -1.0 if spoilt else 0.3):
                assert run.optimizer.refresh().accepted != spoilt
            told.append(sum("in a row were rejected" in message for message in caplog.messages))
    assert told == [0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_not_finite_is_refused(value: float) -> None:
    """Also as the very first refresh: then there is no basis, and training is the base optimizer's."""
    run = engines.Run("single", 0, 1, SETTINGS)
    spoiling = [value]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return model(*batch) * (spoiling[0] or 1.0)

    dho2_ds.attach(run.module, run.optimizer, loss_fn=loss_fn, data=[run.local(50, 0)])
    run.train(3)
    stats = run.optimizer.curvature_stats()
    assert (stats["refreshes"], stats["rejected"], stats["eigenvalues"], stats["lr_scale"]) == (0, 1, [], 1.0)
    plain = engines.Run("single", 0, 1, {**SETTINGS, "curvature": {**EARLY, "warmup_steps": 10**6}})
    plain.train(3)
    assert torch.equal(run.weights(), plain.weights())
    spoiling[0] = 0.0
    assert run.optimizer.refresh().accepted
