"""Training ranks and curvature ranks as two worlds of one launch, for the tests of mode ``dedicated``."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import dho2_ds
from dho2_ds.pipeline import meeting, worlds
from tests import engines, fsdp_engines
from tests.distributed import run_ranks, silence_shm_op

SETTINGS: dict[str, Any] = {
    **engines.SETTINGS,
    "curvature": {"mode": "dedicated", "warmup_steps": 5, "interval": 10, "lanczos_steps": 30, "timeout": 60},
}


class Left(BaseException):
    """A curvature rank has served and would end its process now; not an Exception, as the real end is none."""


def changed(settings: dict[str, Any], **curvature: Any) -> dict[str, Any]:
    found = copy.deepcopy(settings)
    found["curvature"] |= curvature
    return found


def inline(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings in mode ``inline``."""
    found = copy.deepcopy(settings)
    found["curvature"] = {
        k: v for k, v in found["curvature"].items() if k in ("warmup_steps", "interval", "lanczos_steps")
    }
    return found


def make(kind: str, rank: int, world: int, settings: dict[str, Any]) -> Any:
    if kind.startswith(("fsdp", "hsdp", "tp", "zero_redundancy")):
        return fsdp_engines.Run(kind, rank, world, settings)
    return engines.Run(kind, rank, world, settings)


def optimizer_of(run: Any) -> Any:
    return getattr(run, "inner", run.optimizer)


def end_training(optimizer: Any) -> None:
    """What happens when a training process ends."""
    bridge = optimizer._refresher.dedicated._bridge
    bridge.close()
    if bridge._rank == 0 and worlds.launch_store() is not None:  # where the next case of these processes will be
        worlds.launch_store().delete_key("door")


@contextlib.contextmanager
def leaving() -> Iterator[list[int]]:
    """On a curvature rank: what would end the process ends the block; yields the codes it would end with."""
    codes: list[int] = []

    def leave(code: int) -> None:
        raise Left(code)

    try:
        with mock.patch.object(worlds, "leave", leave):
            yield codes
    except Left as end:
        codes.append(int(end.args[0]))
        meeting._ended = False


def serve(kind: str, rank: int, world: int, settings: dict[str, Any]) -> int:
    """Build a run as a script does on a curvature rank; returns the code with which the process would end."""
    with leaving() as codes:
        make(kind, rank, world, settings).step()
        raise AssertionError("a curvature rank trained")
    return codes[0]


def side_by_side(
    rank: int, world: int, curvature_ranks: int, train: Callable[..., Any], cases: list[tuple[str, dict[str, Any]]]
) -> list[Any]:
    """Worker: every case (kind, settings) in turn. Training ranks return ``train(kind, rank, world, settings)``,
    curvature ranks the codes with which they would have ended."""
    silence_shm_op()
    role = dho2_ds.init_distributed(curvature_ranks=curvature_ranks, backend="gloo")
    if role == "curvature":
        mine = rank - (world - curvature_ranks)
        return [serve(kind, mine, curvature_ranks, settings) for kind, settings in cases]
    return [train(kind, rank, world - curvature_ranks, settings) for kind, settings in cases]


def run_both(
    training: int, curvature: int, train: Callable[..., Any], cases: list[tuple[str, dict[str, Any]]], timeout: float
) -> list[Any]:
    """Results of the training ranks, by rank, each a list by case; checks that curvature ranks ended with 0."""
    found = run_ranks(training + curvature, side_by_side, curvature, train, cases, timeout=timeout, init=False)
    assert all(code == 0 for codes in found[training:] for code in codes), found[training:]
    return found[:training]
