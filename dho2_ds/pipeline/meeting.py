"""How the two sides find each other: the training ranks' doors, the job's token, and who says that it has ended."""

from __future__ import annotations

import atexit
import json
import os
import weakref
from typing import Any

import torch
import torch.distributed as dist

from dho2_ds.config import ConfigError, CurvatureConfig
from dho2_ds.monitor import logger
from dho2_ds.pipeline import worlds
from dho2_ds.pipeline.bridge import Bridge
from dho2_ds.pipeline.door import JOIN, TOKEN, new_token, own_host, split_address, write_run_file

_ended = False  # the training side has said so
_present: weakref.ref[Bridge] | None = None  # this process' bridge


class TrainingGone(ConnectionError):
    """The training side has ended."""


# -- the training side ------------------------------------------------------------------------------------------


def open_bridge(settings: CurvatureConfig) -> Bridge:
    """Open this training rank's door, and say where and with which token one enters. Collective.

    Raises:
        ConfigError: curvature ranks were asked for and :func:`init_distributed` was not called.
    """
    global _present
    before = _present() if _present is not None else None
    if before is not None and not before.closed:
        raise ConfigError(
            "curvature.mode='dedicated': must be used by one optimizer of a process; use mode='inline' or 'spread' for "
            "the others"
        )
    store = worlds.launch_store()
    if settings.ranks and store is None:
        raise ConfigError(
            f"curvature.ranks={settings.ranks}: must be split off before the process group is made; call "
            "dho2_ds.init_distributed(config) first, or set it to 0 and start curvature ranks with DHO2_JOIN"
        )
    rank, world = place()
    device = group_device()
    shared = os.environ.get(TOKEN) or new_token()
    shared = str(broadcast({"token": shared}, device)["token"])
    doors: list[str] = []
    bridge: Bridge | None = None
    problem = ""
    try:
        bridge = _open(settings, rank, world, shared, doors)
    except OSError as error:
        problem = f"training rank {rank} cannot listen for curvature ranks: {error}"
    told = [broadcast({"at": bridge.address if bridge else "", "problem": problem}, device, r) for r in range(world)]
    for other in told:
        if other["problem"]:
            raise ConfigError(f"curvature.address={settings.address!r}: {other['problem']}; choose another")
    assert bridge is not None
    _present = weakref.ref(bridge)
    doors += [str(other["at"]) for other in told]
    if rank == 0:
        try:
            run_file = write_run_file(bridge.address, shared)
            atexit.register(run_file.unlink, missing_ok=True)
            path = str(run_file)
        except OSError as error:  # who wants to join from outside needs it, nobody else
            path = f"not written: {error}"
        logger.info("curvature ranks may join at %s; run file with the token: %s", bridge.address, path)
        if store is not None:
            store.set("door", bridge.address)
    return bridge


def _open(settings: CurvatureConfig, rank: int, world: int, shared: str, doors: list[str]) -> Bridge:
    """Listen at the configured address, rank 0 at its port; a rank on another machine listens at its own."""
    own = own_host(os.environ.get("MASTER_ADDR") if grouped() else None)
    host, port = split_address(settings.address) if settings.address else (own, 0)

    def at(host: str, port: int) -> Bridge:
        return Bridge(
            rank=rank, world=world, host=host, port=port, token=shared, timeout=settings.timeout,
            doors=lambda: doors or None,
        )  # fmt: skip

    if rank == 0:
        return at(host, port)
    try:
        return at(host, 0)
    except OSError:
        return at(own, 0)


# -- the curvature side -----------------------------------------------------------------------------------------


def joined_from_outside() -> bool:
    """True in a curvature job that was started by itself."""
    return bool(os.environ.get(JOIN))


def token() -> str:
    """The job's token.

    Raises:
        ConfigError: it is not known.
    """
    found = os.environ.get(TOKEN)
    if not found:
        raise ConfigError(f"{TOKEN}: must be set with {JOIN}; take it from the training job's run file")
    return found


def address_to_join() -> str | None:
    """Where the first training rank's door is, None while it is not open.

    Raises:
        TrainingGone: the launcher's store is gone, and with it training.
    """
    if _ended:
        raise TrainingGone("training has ended")
    if joined_from_outside():
        return os.environ[JOIN]
    store = worlds.launch_store()
    assert store is not None
    try:
        if store.check(["ended"]):
            raise TrainingGone("training has ended")
        return str(store.get("door").decode()) if store.check(["door"]) else None
    except (RuntimeError, dist.DistError) as error:
        raise TrainingGone(str(error)) from error


def training_has_ended() -> None:
    """Note that the training side has said so."""
    global _ended
    _ended = True


# -- small collectives ------------------------------------------------------------------------------------------


def grouped() -> bool:
    """Whether this process is in a default group."""
    return dist.is_available() and dist.is_initialized()


def place() -> tuple[int, int]:
    """This process's rank in the default group, and the group's size; (0, 1) without one."""
    return (dist.get_rank(), dist.get_world_size()) if grouped() else (0, 1)


def group_device() -> torch.device:
    """Where the default group's tensors live."""
    if grouped() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def broadcast(message: dict[str, Any], device: torch.device, source: int = 0) -> dict[str, Any]:
    """One rank's JSON object, on every rank of the default group. Two broadcasts."""
    rank, world = place()
    if world == 1:
        return message
    content = json.dumps(message).encode()
    size = torch.tensor([len(content)], device=device)
    dist.broadcast(size, source)
    data = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if rank == source:
        data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(data, source)
    found = json.loads(bytes(data.cpu().tolist()))
    assert isinstance(found, dict)
    return found
