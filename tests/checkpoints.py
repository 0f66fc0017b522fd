"""What the tests of DeepSpeed checkpoints share: snapshots of a run, element by element, and ways to resume it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dho2_ds.hosts.detect import make_host
from tests import engines
from tests.engines import Run

OTHER_SEED = 3  # initial weights that a resumed engine must not keep
ONE_REFRESH: dict[str, Any] = {
    **engines.SETTINGS,
    "curvature": {"warmup_steps": 5, "interval": 40, "lanczos_steps": 60},
}
TORCH_ADAMW: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": engines.SETTINGS["lr"], "torch_adam": True}}
}
LASTING = ("steps", "refreshes", "rejected", "hvps", "eigenvalues", "next_eigenvalue", "age")
"""The statistics that belong to training, not to the process."""

Pieces = dict[str, list[tuple[str, int, Tensor]]]
"""{entry: [(parameter, start, its elements from there on)]} of one rank."""


def pieces(run: Run) -> Pieces:
    """This rank's part of the float32 weights, the base state and the eigenvectors, by parameter and global index."""
    host = getattr(run.optimizer, "_host", None) or make_host(run.engine, run.optimizer.param_groups)
    found: Pieces = {}
    buffers: dict[str, list[Tensor]] = {"weight": [shard.param.detach() for shard in host.shards]}
    space = getattr(run.optimizer, "_space", None)
    if space is not None and space.basis is not None:
        for i, row in enumerate(space.basis.vectors):
            buffers[f"eigenvector_{i}"] = [row]
    plain = space is None or run.optimizer.config.num_eigenvectors == 0
    if plain and run.kind.startswith("zero0"):  # torch's own optimizer at stage 0: whole on every rank
        for name, param in run.model.named_parameters():
            for entry, value in run.optimizer.state[param].items():
                if value.dim():
                    found.setdefault(entry, []).append((name, 0, value.flatten().clone()))
    else:
        states = [run.optimizer.state[key] for key in host.keys()]
        for entry in [name for name, value in states[0].items() if isinstance(value, Tensor) and value.dim()]:
            buffers[entry] = [state[entry] for state in states]
    for entry, parts in buffers.items():
        flat = torch.cat([part.reshape(-1) for part in parts])
        assert flat.numel() == host.layout.numel, (run.kind, entry, flat.numel(), host.layout.numel)
        found[entry] = [(s.name, s.start, flat[s.offset : s.offset + s.length].clone()) for s in host.layout.segments]
    return found


def assemble(ranks: list[Pieces]) -> dict[str, Tensor]:
    """{entry: all its elements, parameter after parameter}; every element must come from some rank."""
    sizes = {name: p.numel() for name, p in engines.Classifier().named_parameters()}
    whole: dict[str, Tensor] = {}
    for entry in ranks[0]:
        parts = {name: torch.full((numel,), torch.nan) for name, numel in sizes.items()}
        for rank in ranks:
            for name, start, values in rank[entry]:
                parts[name][start : start + len(values)] = values
        whole[entry] = torch.cat(list(parts.values()))
        assert not whole[entry].isnan().any(), entry
    return whole


def snapshot(run: Run, losses: list[float]) -> dict[str, Any]:
    """Everything that has to be equal after a resume."""
    stats = run.optimizer.curvature_stats() if hasattr(run.optimizer, "curvature_stats") else {}
    return {
        "losses": losses,
        "weights": run.weights(),
        "stats": {key: stats[key] for key in LASTING if key in stats},
        "pieces": pieces(run),
    }


def assert_same(got: dict[str, Any], want: dict[str, Any], label: object) -> None:
    """Bit for bit; ``want`` may have more losses, of steps before the resume."""
    assert got["losses"] == want["losses"][-len(got["losses"]) :], label
    assert got["stats"] == want["stats"], label
    assert torch.equal(got["weights"], want["weights"]), label
    assert got["pieces"].keys() == want["pieces"].keys(), label
    for entry, parts in want["pieces"].items():
        for (name, start, values), (other, begin, expected) in zip(got["pieces"][entry], parts, strict=True):
            assert (name, start) == (other, begin) and torch.equal(values, expected), (label, entry, name)


def micro_step(run: Run, micro: int) -> float:
    """One micro-batch of the current step; the last one completes it. Returns this rank's loss."""
    loss = run.engine(*run.local(run.step_count, micro))
    run.engine.backward(loss)
    run.engine.step()
    if micro == engines.ACCUMULATION - 1:
        run.step_count += 1
    return float(loss)


def resume(
    kind: str,
    rank: int,
    world: int,
    settings: dict[str, Any],
    folder: str | Path,
    tag: str | None,
    at: int,
    **more: Any,
) -> Run:
    """A new engine with other weights that has loaded the checkpoint of step ``at``."""
    overrides = more.pop("overrides", None)
    run = Run(kind, rank, world, settings, OTHER_SEED, overrides)
    path, _ = run.engine.load_checkpoint(str(folder), tag=tag, **more)
    assert path is not None
    run.step_count = at
    return run


@contextlib.contextmanager
def warnings_of_package() -> Iterator[list[str]]:
    """The texts of warnings logged inside, on this rank."""
    texts: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    handler = Keep(logging.WARNING)
    log = logging.getLogger("dho2_ds")
    log.addHandler(handler)
    try:
        yield texts
    finally:
        log.removeHandler(handler)


def on_rank_0(rank: int, action: Callable[[], Any]) -> None:
    """Let one rank change files while the others wait."""
    dist.barrier()
    if rank == 0:
        action()
    dist.barrier()
