"""What a step and a refresh cost: gradients, all-reduces and bytes per rank are counted, never timed."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
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
            h = h + torch.tanh(layer(h)) / LAYERS
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


def live_bytes() -> int:
    """Bytes of all tensors alive in this process, each storage once."""
    gc.collect()
    seen: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.device.type == "cpu" and thing.layout == torch.strided:
            storage = thing.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())


class Longest(TorchDispatchMode):
    """Remembers the longest vector (last dimension) that any operation allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for out in result if isinstance(result, (tuple, list)) else [result]:
            if not isinstance(out, Tensor) or not out.dim() or self.paused:
                continue
            if out.untyped_storage().data_ptr() not in given:  # new memory, neither a view nor in place
                self.length = max(self.length, out.shape[-1])
        return result


class Probe:
    """A loss that looks at the memory of the refresh around it, at its last Lanczos products."""

    def __init__(self, longest: Longest) -> None:
        self.calls, self.bytes, self._longest = 0, 0, longest

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2 * STEPS - 2:
            self.bytes = live_bytes()
        self._longest.paused = True  # ZeRO-3 gathers weights as it likes
        try:
            return model(x)
        finally:
            self._longest.paused = False


def held(kind: str, rank: int, world: int, **settings: Any) -> dict[str, Any]:
    """Bytes this rank holds of ours, in steady state and in the middle of Lanczos, and the longest vector made."""
    with mock.patch.object(full, "BUCKET", BUCKET):
        module, optimizer = build(kind, rank, world, **settings)
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))
        for _ in range(2 if settings else 1):  # the first step of SOAP moves nothing
            train_step(module, optimizer, x)
        longest = Longest()
        probe = Probe(longest)
        dho2_ds.attach(module, optimizer, loss_fn=probe, data=[x])
        before = live_bytes()
        if hasattr(module, "backward"):
            backward = module.backward

            def host_backward(*args: Any, **kwargs: Any) -> Any:
                longest.paused = True  # how the engine reduces its own gradients is not ours
                try:
                    return backward(*args, **kwargs)
                finally:
                    longest.paused = False

            module.backward = host_backward
        with longest:
            report = optimizer.refresh()
        assert report.accepted, report.reason
        loss = module(x)
        if hasattr(module, "backward"):
            module.backward(loss)
            module.step()
        else:  # the engines' own steps flatten gradients as they like; this one is all ours
            loss.backward()
            with longest:
                optimizer.step()
        stats = optimizer.curvature_stats()
        return {
            "n": optimizer._host.numel,
            "local": optimizer._host.layout.numel,
            "steady": stats["bytes_basis"] + stats["bytes_base"],
            "transient": probe.bytes - before,
            "reported": stats["bytes_transient"],
            "longest": longest.length,
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
    for ranks in run_ranks(world, held_worker, kinds, timeout=380):
        for kind in kinds:
            got = ranks[kind]
            padding = 4 * (2 * K + STEPS + 8) * (world * got["local"] - got["n"])
            assert got["steady"] * world <= 1.02 * alone["steady"] + padding, (kind, got, alone)
            slack = 4 * world * (BUCKET + 4096)  # one collective bucket and small scalars and batches
            # ZeRO-3 and BF16 keep a gradient accumulator of their own, which a refresh saves: one vector more.
            extra = 4 * got["n"] if kind == "zero3" else 0
            assert got["transient"] * world <= 1.02 * alone["transient"] + padding + slack + extra, (kind, got, alone)
            assert got["reported"] >= 0.8 * got["transient"], (kind, got)
            # No vector of ours is longer than the rank's share; 5000 is the engine's own bucket.
            assert got["longest"] <= max(got["local"], 5000, BUCKET + 1) * 1.02, (kind, got)


@contextlib.contextmanager
def counted_all_reduces() -> Iterator[list[int]]:
    sizes: list[int] = []
    real = dist.all_reduce

    def spy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    with mock.patch.object(dist, "all_reduce", spy):
        yield sizes


def collectives_worker(rank: int, world: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for rule in ("adaptive", "fosi"):
        module, optimizer = build("ddp", rank, world, rule=rule)
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))
        train_step(module, optimizer, x)
        optimizer.refresh()
        train_step(module, optimizer, x)
        module(x).backward()
        with counted_all_reduces() as sizes:
            optimizer.step()
        results[rule] = list(sizes)
    return results


def test_all_reduces_of_a_step() -> None:
    """One all-reduce of k + 1 scalars per step; two under ``fosi``, whose base update is known only after the first."""
    found = run_ranks(2, collectives_worker)[0]
    assert found["adaptive"] == [K + 1]
    assert found["fosi"] == [K + 1, K + 1]


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
