"""Two worlds out of one launch: public :func:`init_distributed`.

The launcher's last C processes get a default process group of their own, the others theirs, so that DeepSpeed, DDP and
FSDP see ordinary worlds of T and of C ranks. A curvature job that was started by itself (``DHO2_JOIN=host:port``) is a
whole world of curvature ranks.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from dho2_ds.config import ConfigError, parse_config
from dho2_ds.pipeline import supervisor
from dho2_ds.pipeline.door import JOIN, TOKEN, is_loopback, new_token, own_host

Role = Literal["training", "curvature"]


@dataclass
class _World:
    role: Role
    store: Any  # of the launcher's whole world; None for a job by itself


_world: _World | None = None

_AGAIN = timedelta(minutes=3)
"""How long a curvature rank that was started again waits for the launcher's store and for its peers."""

_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", TOKEN)
"""What a curvature process that is started again needs to find the launch."""


def role() -> Role:
    """What this process is for."""
    if _world is not None:
        return _world.role
    return "curvature" if os.environ.get(JOIN) else "training"


def launch_store() -> Any:
    """The launcher's store, which both sides of one launch see; None without curvature ranks in it."""
    return _world.store if _world is not None else None


def init_distributed(
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    curvature_ranks: int | None = None,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> Role:
    """Initialise torch's default process group; with ``curvature.mode='dedicated'``, of this process's side.

    Call it first, instead of ``deepspeed.init_distributed()`` or ``torch.distributed.init_process_group()``: a process
    that is a curvature rank becomes a supervisor and runs the script from its beginning in a child. The environment is
    what ``deepspeed`` or ``torchrun`` set, else MPI's (with mpi4py), else one process; with ``DHO2_JOIN`` (see ``dho2
    join``) all processes of the launch are curvature ranks of the training job at that address. On return
    ``RANK``, ``WORLD_SIZE`` and ``torch.distributed`` speak of this side alone: T training ranks (the launcher's first)
    or C curvature ranks (its last). The script goes on unchanged on both; on a curvature rank :func:`dho2_ds.attach`
    (under DeepSpeed with a model that returns its loss: the first forward) serves until training ends and then ends
    the process.

    Args:
        config: a DeepSpeed configuration, path or dictionary, whose optimizer is DHO2.
        curvature_ranks: C, where there is no such configuration; the optimizer's ``curvature.ranks`` must be the same.
        backend: of the default group; default ``nccl`` with CUDA, else ``gloo``.
        timeout: of its collectives; default torch's.

    Returns:
        ``"training"`` or ``"curvature"``.

    Raises:
        ConfigError: C is not below the number of processes, or the configuration is wrong.
        RuntimeError: a default process group exists already.
    """
    global _world
    if dist.is_initialized():
        raise RuntimeError("a default process group exists: call dho2_ds.init_distributed(...) before anything else")
    if curvature_ranks is None:
        curvature_ranks = _ranks_in(config) if config is not None else 0
    if curvature_ranks and _launched_as_curvature_rank(curvature_ranks) and not os.environ.get(JOIN):
        supervisor.supervise()
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    _find_launcher()
    again = supervisor.restarted()
    if supervisor.supervised():
        sys.excepthook = _hopeless(sys.excepthook)
    try:
        store, rank, world = next(iter(rendezvous("env://", **({"timeout": _AGAIN} if again else options))))
    except (RuntimeError, dist.DistError):
        if again:
            leave(0)  # the launcher's store is gone, and with it training
        raise
    if os.environ.get(JOIN):
        _world = _World("curvature", None)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, **options)
        _fit_batches(0, config)
        return "curvature"
    if not 0 <= curvature_ranks < world:
        raise ConfigError(
            f"curvature.ranks={curvature_ranks}: must be below the number of processes, {world}; start T + "
            f"{curvature_ranks} processes for T training ranks"
        )
    training = world - curvature_ranks
    side: Role = "training" if rank < training else "curvature"
    # torchrun's store outlives a restart of all processes: each attempt has keys of its own.
    launch = PrefixStore(f"dho2/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    _world = _World(side, launch if curvature_ranks else None)
    if curvature_ranks:
        if rank == 0:
            atexit.register(_say_ended, launch)
        _share_token(_world.store, rank, world)
    mine, size, place = rank, training, "training"
    if side == "curvature":
        mine, size = rank - training, curvature_ranks
        supervisor.remember({name: os.environ[name] for name in _LAUNCH if name in os.environ})
        place = f"curvature/{_generation(_world.store, mine, size)}"
        if again:
            options["timeout"] = _AGAIN
    dist.init_process_group(backend, store=PrefixStore(place, launch), rank=mine, world_size=size, **options)
    os.environ.update(RANK=str(mine), WORLD_SIZE=str(size))
    if side == "curvature":
        _fit_batches(training, config)
    return side


def _ranks_in(config: str | os.PathLike[str] | Mapping[str, Any]) -> int:
    """``curvature.ranks`` of a DeepSpeed configuration; 0 if it asks for none."""
    if not isinstance(config, Mapping):
        config = json.loads(Path(config).read_text())
    optimizer = config.get("optimizer") or {} if isinstance(config, Mapping) else {}
    if str(optimizer.get("type", "")).lower() != "dho2":
        return 0
    params = optimizer.get("params") or {}
    curvature = parse_config({"curvature": params.get("curvature")}).curvature
    wanted = curvature.mode == "dedicated" and params.get("num_eigenvectors") != 0
    return curvature.ranks if wanted else 0


def _say_ended(store: Any) -> None:
    """At the end of training rank 0: ``torchrun``'s store outlives training, and so cannot tell curvature ranks."""
    try:
        store.set("ended", "yes")
    except (RuntimeError, dist.DistError):
        pass  # the launcher has closed it: that tells too


def _generation(store: Any, rank: int, size: int) -> int:
    """Number of starts of all curvature ranks together, agreed on by all: when one fails, all start again, and the
    process group of those that live now is a new one."""
    store.add(f"starts/{rank}", 1)
    deadline = time.monotonic() + _AGAIN.total_seconds()
    while True:
        if store.check(["ended"]):
            leave(0)
        starts = sum(store.add(f"starts/{other}", 0) for other in range(size))
        store.set(f"here/{starts}/{rank}", "yes")
        if store.check([f"here/{starts}/{other}" for other in range(size)]):
            return int(starts)
        if supervisor.restarted() and time.monotonic() > deadline:
            raise RuntimeError("the other curvature ranks did not start again")
        time.sleep(0.1)


def _hopeless(hook: Any) -> Any:
    """In a supervised process: settings that were refused will be refused again."""

    def excepthook(kind: type[BaseException], *rest: Any) -> None:
        hook(kind, *rest)
        if issubclass(kind, ConfigError):
            leave(supervisor.REFUSED)

    return excepthook


def _launched_as_curvature_rank(curvature_ranks: int) -> bool:
    """Whether the launcher's variables say so; known before anything is connected."""
    for rank, size in (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        if rank in os.environ and size in os.environ:
            world = int(os.environ[size])
            return curvature_ranks < world <= int(os.environ[rank]) + curvature_ranks
    return False


def _find_launcher() -> None:
    """Make sure that torch's environment variables are set: by ``deepspeed`` or ``torchrun``, else from MPI, else for a
    single process."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return
    if any(name in os.environ for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")):
        ours = "mpi4py.MPI" not in sys.modules
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise RuntimeError("started by MPI: mpi4py must be installed; pip install 'dho2-ds[mpi]'") from error
        world = MPI.COMM_WORLD
        local = world.Split_type(MPI.COMM_TYPE_SHARED)
        several, place, problem = local.Get_size() < world.Get_size(), ("", 0), ""
        if world.Get_rank() == 0:  # its address is the one that counts, and all fail with it
            try:
                place = _meeting_point(several=several)
            except RuntimeError as error:
                problem = str(error)
        (host, port), problem = world.bcast((place, problem), root=0)
        if problem:
            raise RuntimeError(problem)
        # Open MPI numbers the processes of a machine in another order than the world; DeepSpeed compares with it.
        local_rank = os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or str(local.Get_rank())
        os.environ.update(
            RANK=str(world.Get_rank()), WORLD_SIZE=str(world.Get_size()), LOCAL_RANK=local_rank,
            LOCAL_WORLD_SIZE=str(local.Get_size()), LOCAL_SIZE=str(local.Get_size()),
            MASTER_ADDR=host, MASTER_PORT=str(port),
        )  # fmt: skip
        if ours:
            # Its work is done. Left to the end, it would wait for all processes: one that fails would hang the others,
            # and mpirun takes a process that ends without it, as a curvature rank does, for a failed one.
            local.Free()
            MPI.Finalize()
        return
    host, port = _meeting_point(several=False)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR=host, MASTER_PORT=str(port))


def _meeting_point(*, several: bool) -> tuple[str, int]:
    """Where the first process serves the store; ``several``: machines."""
    with socket.create_server(("", 0)) as probe:
        port = int(probe.getsockname()[1])
    host = os.environ.get("MASTER_ADDR") or own_host(socket.gethostname() if several else None)
    if several and not os.environ.get("MASTER_ADDR") and is_loopback(host):
        raise RuntimeError(
            f"MASTER_ADDR: must be set, since {socket.gethostname()} is {host} to itself; "
            "name an address that the other machines reach, or the interface in GLOO_SOCKET_IFNAME"
        )
    return host, int(os.environ.get("MASTER_PORT", port))


def _share_token(store: Any, rank: int, world: int) -> None:
    """Give all processes of a launch one token. It lies in the launcher's store only until the last has read it."""
    if supervisor.restarted():
        return  # it is in the environment
    if rank == 0:  # a token that the user gave is not put into the store
        store.set("token", "given" if os.environ.get(TOKEN) else new_token())
    found = store.get("token").decode()
    if found != "given":
        os.environ[TOKEN] = found
    if store.add("token read", 1) == world:
        store.delete_key("token")
    if not os.environ.get(TOKEN):
        raise ConfigError(
            f"{TOKEN}: must be set for all processes or for none; it is set for rank 0 and not for {rank}"
        )


def _fit_batches(training: int, given: object) -> None:
    """Let DeepSpeed accept, on C curvature ranks, a configuration written for T training ranks: a curvature rank's
    micro-batch is a training rank's, and ``train_batch_size`` follows from it."""
    if given is None and "deepspeed" not in sys.modules:
        return
    try:
        from deepspeed.runtime.config import DeepSpeedConfig
    except ImportError:
        return
    original = DeepSpeedConfig._set_batch_related_parameters

    def fitted(self: Any) -> None:
        steps = self.gradient_accumulation_steps or 1
        if self.train_micro_batch_size_per_gpu is None and self.train_batch_size is not None and training:
            self.train_micro_batch_size_per_gpu = max(1, self.train_batch_size // (steps * training))
        if self.train_micro_batch_size_per_gpu is not None:
            self.train_batch_size = None
        original(self)

    DeepSpeedConfig._set_batch_related_parameters = fitted


def leave(code: int) -> NoReturn:
    """End a curvature process: without torch's and DeepSpeed's teardown, which may wait for peers that are gone.

    The code is 0 for an unsupervised rank of the training job's own launch, whatever happened: launchers end everything
    when one process fails, and training goes on without curvature.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if os.environ.get(JOIN) or supervisor.supervised() else 0)
