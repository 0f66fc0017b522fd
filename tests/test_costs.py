"""What a step and a refresh cost: gradients, all-reduces and bytes per rank are counted, never timed."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dho2_ds
from dho2_ds.curvature.refresh import gradients_of
from dho2_ds.hosts import full
from tests.distributed import run_ranks, silence_shm_op

LAYERS, WIDTH = 12, 64
BUCKET = 8192
"""Elements per collective bucket in these tests, so that buckets are small beside a rank's share of 50,000 weights."""
K, STEPS = 4, 12


class Deep(nn.Module):
    """49,920 parameters in layers much smaller than a quarter of the whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = h + torch.tanh(layer(h)) / len(self.layers)
        return (h - x.flip(1)).square().mean()


def build(kind: str, rank: int, world: int, **settings: Any) -> tuple[nn.Module, dho2_ds.DHO2]:
    settings = {
        "lr": 1e-3,
        "num_eigenvectors": K,
        "curvature": {"warmup_steps": 10**6, "lanczos_steps": STEPS},
        **settings,
    }
    model = Deep()
    if not kind.startswith("zero"):
        optimizer = dho2_ds.DHO2(model.parameters(), **settings)
        module: nn.Module = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
        dho2_ds.attach(module, optimizer)
        return module, optimizer
    import deepspeed

    silence_shm_op()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 8,
            "steps_per_print": 10**9,
            "optimizer": {"type": "DHO2", "params": settings},
            "zero_optimization": {
                "stage": int(kind[4:]),
                "reduce_bucket_size": 5000,
                "allgather_bucket_size": 5000,
                "stage3_param_persistence_threshold": 0,
            },
        },
    )
    return engine, engine.basic_optimizer


def train_step(module: nn.Module, optimizer: dho2_ds.DHO2, x: Tensor) -> None:
    loss = module(x)
    if hasattr(module, "backward"):
        module.backward(loss)
        module.step()
    else:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@contextlib.contextmanager
def only_new_objects() -> Iterator[None]:
    """Leaves what exists out of the garbage collector's lists, which makes :func:`live_bytes` fast."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def live_bytes() -> int:
    """Bytes of the tensors made within :func:`only_new_objects` that are alive in this process, each storage once."""
    found = []
    for _ in range(2):  # a thread of gloo's may hold what it has sent for a moment longer: the least of two looks
        gc.collect()
        seen: dict[int, int] = {}
        for thing in gc.get_objects():
            if type(thing) in (Tensor, nn.Parameter) and thing.device.type == "cpu" and thing.layout == torch.strided:
                storage = thing.untyped_storage()
                seen[storage.data_ptr()] = storage.nbytes()
        found.append(sum(seen.values()))
        del thing, storage
        time.sleep(0.02)
    return min(found)


class Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that is made, and how many rows of this rank's share: eigenbases.

    Matrices as wide as the share (``local``) with at least K rows count as such, which are more than a vector of all n
    elements has as long as there are fewer than K ranks.
    """

    def __init__(self, local: int) -> None:
        super().__init__()
        self.elements, self.rows = 0, 0
        self.paused = False
        self._local = local

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for out in tree_leaves(result):
            if not isinstance(out, Tensor) or self.paused:
                continue
            if out.untyped_storage().data_ptr() in given:  # no new memory: a view, or in place
                continue
            if out.dim() == 2 and out.shape[0] >= K and out.shape[1] == self._local:
                self.rows += out.shape[0]
            else:
                self.elements = max(self.elements, out.numel())
        return result


class Probe:
    """A loss that looks at the memory of the refresh around it, at its last Lanczos products."""

    def __init__(self, largest: Largest) -> None:
        self.calls, self.bytes, self._largest = 0, 0, largest

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2 * STEPS - 2:
            self.bytes = live_bytes()
        self._largest.paused = True  # ZeRO-3 gathers weights as it likes
        try:
            return model(x)
        finally:
            self._largest.paused = False


def watched_step(
    module: nn.Module, optimizer: dho2_ds.DHO2, x: Tensor, plant: Callable[[], Any] = lambda: None
) -> Largest:
    """What ``optimizer.step()`` makes, whoever calls it; how engines flatten and publish is not ours. ``plant`` is
    called inside of it."""
    largest, real = Largest(optimizer._host.layout.numel), optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        with largest:
            plant()
            return real(*args, **kwargs)

    with mock.patch.object(optimizer, "step", step):
        train_step(module, optimizer, x)
    return largest


def held(kind: str, rank: int, world: int, **settings: Any) -> dict[str, Any]:
    """Bytes this rank holds of ours, in steady state and in the middle of Lanczos, and the largest tensors made."""
    with mock.patch.object(full, "BUCKET", BUCKET), only_new_objects():
        module, optimizer = build(kind, rank, world, **settings)
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))
        built = live_bytes()
        for _ in range(2 if settings else 1):  # the first step of SOAP moves nothing
            train_step(module, optimizer, x)
        n, local = optimizer._host.numel, optimizer._host.layout.numel
        largest = Largest(local)
        probe = Probe(largest)
        dho2_ds.attach(module, optimizer, loss_fn=probe, data=[x])
        before = live_bytes()
        with contextlib.ExitStack() as stack:
            if hasattr(module, "backward"):
                backward = module.backward

                def host_backward(*args: Any, **kwargs: Any) -> Any:
                    largest.paused = True  # how the engine reduces its own gradients is not ours
                    try:
                        return backward(*args, **kwargs)
                    finally:
                        largest.paused = False

                stack.enter_context(mock.patch.object(module, "backward", host_backward))
            stack.enter_context(largest)
            report = optimizer.refresh()
        assert report.accepted, report.reason
        step = watched_step(module, optimizer, x)
        plants = [lambda: torch.zeros(n), lambda: torch.zeros(n // WIDTH, WIDTH)]
        planted = [watched_step(module, optimizer, x, plant).elements for plant in plants]
        optimizer.zero_grad()
        stats = optimizer.curvature_stats()
        return {
            "n": n,
            "local": local,
            "live": live_bytes() - built,  # what bind() makes, SOAP's state, may be older
            "steady": stats["bytes_basis"] + stats["bytes_base"],
            "transient": probe.bytes - before,
            "reported": stats["bytes_transient"],
            "elements": max(largest.elements, step.elements),
            "rows": largest.rows,
            "rows_of_step": step.rows,
            "planted": planted,
            "calls": probe.calls,
        }


def held_worker(rank: int, world: int, kinds: list[str]) -> dict[str, Any]:
    return {kind: held(kind, rank, world) for kind in kinds}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_memory_falls_linearly(world: int) -> None:
    """Bytes of everything of ours, times the ranks, is the one-process figure plus padding and one bucket."""
    alone = held("single", 0, 1)
    kinds = ["ddp", "zero0", "zero1", "zero2", "zero3"]
    # One collective bucket, the random generator's state (5,056 bytes) and scalars. A vector of n/P more on every rank
    # would be `vector` in all.
    slack = 4 * (BUCKET + 2048)
    vector = 4 * alone["n"]
    assert world * slack < vector
    # AdamW's two moments and the basis; README's lanczos_steps + 5.
    assert alone["live"] <= (2 + K) * vector + slack and alone["transient"] <= (STEPS + 5) * vector + slack, alone
    for ranks in run_ranks(world, held_worker, kinds, timeout=380):
        for kind in kinds:
            got = ranks[kind]
            padding = 4 * (2 * K + STEPS + 8) * (world * got["local"] - got["n"])
            assert got["live"] * world <= alone["live"] + padding + world * slack, (kind, got, alone)
            assert abs(got["steady"] - got["live"]) <= slack, (kind, got)
            # ZeRO-3 alone holds one vector more: grad_partitions_flat_buffer, in which the engine accumulates this
            # rank's gradient from step to step, and which a refresh therefore saves.
            extra = vector if kind == "zero3" else 0
            assert got["transient"] * world <= alone["transient"] + padding + world * slack + extra, (kind, got, alone)
            assert got["reported"] >= 0.8 * got["transient"], (kind, got)
            # No tensor of ours is larger than the rank's share; 5000 is the engine's own bucket.
            share = max(got["local"], 5000, BUCKET + 1)
            assert got["elements"] <= share, (kind, got)
            # Bases: Lanczos', k rows to keep, and k rows while they are mixed out of Lanczos'; none in a step.
            assert got["rows"] <= STEPS + 2 * K and got["rows_of_step"] == 0, (kind, got)
            # What would break that is seen inside a step of this engine, one-dimensional or not.
            assert min(got["planted"]) >= got["n"] > share, (kind, got)


def test_largest_tells_vectors_from_bases() -> None:
    n, local = 640, 320
    for make in (lambda: torch.zeros(n), lambda: torch.zeros(n // 8, 8), lambda: torch.zeros(2, local)):
        with Largest(local) as largest:
            make()
        assert (largest.elements, largest.rows) == (n, 0)
    basis, vectors = torch.zeros(STEPS, local), [torch.zeros(local) for _ in range(2)]
    with Largest(local) as largest:
        basis.view(-1).mul_(2.0)
    assert (largest.elements, largest.rows) == (0, 0)
    with Largest(local) as largest:
        basis[:K] + 1.0
        torch._foreach_add(vectors, 1.0)
    assert (largest.elements, largest.rows) == (local, K)


@contextlib.contextmanager
def counted_all_reduces() -> Iterator[list[int]]:
    sizes: list[int] = []
    real = dist.all_reduce

    def spy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", spy):
        yield sizes


def collectives_worker(rank: int, world: int, kinds: list[str]) -> dict[Any, Any]:
    """Per engine and rule: elements of the all-reduces that our step makes, calls it counts, those of a refresh."""
    results: dict[Any, Any] = {}
    for kind in kinds:
        for rule in ("adaptive", "fosi"):
            with mock.patch(f"{__name__}.LAYERS", 2):  # how many does not matter here
                module, optimizer = build(kind, rank, world, rule=rule)
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))
            train_step(module, optimizer, x)
            dho2_ds.attach(module, optimizer, loss_fn=lambda model, batch: model(batch), data=[x])
            reducer, calls = optimizer._host.reducer, [optimizer._host.reducer.calls]
            report = optimizer.refresh()
            assert report.accepted, report.reason
            calls.append(reducer.calls)
            train_step(module, optimizer, x)
            calls.append(reducer.calls)
            step, sizes = optimizer.step, []

            def spied(*args: Any, step: Any = step, sizes: list[int] = sizes, **kwargs: Any) -> None:
                with counted_all_reduces() as found:
                    step(*args, **kwargs)
                sizes += found

            with mock.patch.object(optimizer, "step", spied):
                train_step(module, optimizer, x)
            results[kind, rule] = (sizes, calls[2] - calls[1], calls[1] - calls[0], report.hvps)
    return results


def test_all_reduces_of_a_step_and_a_refresh() -> None:
    """One all-reduce of k + 1 scalars per step; two under ``fosi``, whose base update is known only after the first."""
    kinds = ["ddp", "zero0", "zero1", "zero2", "zero3"]
    for ranks in run_ranks(2, collectives_worker, kinds):
        assert len(ranks) == 2 * len(kinds)
        for (kind, rule), (sizes, step, refresh, hvps) in ranks.items():
            wanted = [K + 1] * (1 if rule == "adaptive" else 2)
            assert sizes == wanted and step == len(wanted), (kind, rule, sizes, step)
            # Two per Lanczos step and a handful, as in one process below.
            assert 0 < hvps <= STEPS and 2 * hvps < refresh <= 2 * hvps + 8, (kind, rule, refresh, hvps)


@pytest.mark.parametrize("hvp", ["finite_difference", "forward_difference", "exact"])
def test_products_and_all_reduces_of_a_refresh(hvp: str) -> None:
    module, optimizer = build("single", 0, 1, curvature={"warmup_steps": 10**6, "lanczos_steps": STEPS, "hvp": hvp})
    calls = []
    x = torch.randn(8, WIDTH)
    train_step(module, optimizer, x)

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        calls.append(1)
        return model(batch)

    dho2_ds.attach(module, optimizer, loss_fn=loss_fn, data=[x])
    for _ in range(2):
        calls.clear()
        reducer = optimizer._host.reducer
        before = reducer.calls
        report = optimizer.refresh()
        assert report.accepted, report.reason
        assert 0 < report.hvps <= STEPS
        # A graph of the gradient serves all exact products; otherwise a call is a gradient.
        assert len(calls) == (1 if hvp == "exact" else gradients_of(hvp, report.hvps))
        # Two per Lanczos step, then: start vector (2), calibration, self-check, Gram matrix, decision.
        assert reducer.calls - before <= 2 * report.hvps + 8
