"""Run a function on several local processes that form one gloo world: the base of all multi-process tests.

Workers are forked from a server that has imported torch, DeepSpeed and the like (five seconds of processor time),
nothing of ours. Starting an engine still costs a second, so a worker should loop over its cases and return a dict.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
PRELOADED = (
    "pytest",
    "sklearn.datasets",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "deepspeed",
)
BEFORE_IMPORTS = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
DUMP_GRACE = 1.0  # Seconds between the moment a hanging worker dumps its stacks and the moment it is killed.


class WorkerTraceback(Exception):
    """Cause of an exception raised again in the parent: the traceback text of the worker it comes from."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class WorkersFailed(RuntimeError):
    """A worker died without an exception to pass on, or did not end in time."""


def silence_shm_op() -> None:
    """Keep DeepSpeed from compiling its shared-memory op at start, which takes minutes; call it in the worker first."""
    import deepspeed  # noqa: F401  (loads the module below)

    # By name: the attribute `deepspeed.comm.torch` is torch itself, star-imported over the submodule.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


def run_ranks(
    world_size: int,
    worker: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    env: Mapping[str, str] | None = None,
    init: bool = True,
    launcher: Literal["torchrun", "deepspeed"] = "torchrun",
) -> list[Any]:
    """Call `worker(rank, world_size, *args)` on `world_size` new processes and return their results by rank.

    Args:
        world_size: number of processes.
        worker: a module-level function; arguments and results are pickled.
        timeout: seconds for everything, imports included; a worker still running then is a failure.
        env: environment variables over the ones set here (rendezvous, one thread, CPU, private extensions folder).
        init: initialise the default gloo group before the worker is called; False leaves it to the worker.
        launcher: who serves the store at MASTER_ADDR:MASTER_PORT. "torchrun": this process, race-free, and workers
            connect as clients as they do under torchrun. "deepspeed": rank 0, on a port that was free a moment ago.

    Raises:
        Exception: the first exception of a worker, with the worker's traceback as its cause; the others are killed.
        WorkersFailed: a worker died without one, or hung; names the ranks and shows the stacks of hanging ones.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, _served_port(launcher) as port:
        deadline = time.monotonic() + timeout
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(world_size),
            "LOCAL_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "TORCH_EXTENSIONS_DIR": str(Path(folder, "extensions")),
            "TORCHELASTIC_USE_AGENT_STORE": str(launcher == "torchrun"),
        }
        call = pickle.dumps((worker, args))
        server = _fork_server()
        processes: list[BaseProcess] = []
        try:
            for rank in range(world_size):
                variables = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})}
                process = server.Process(
                    target=_work, args=(rank, world_size, call, folder, deadline, init, variables), name=f"rank {rank}"
                )
                process.start()
                processes.append(process)
            _wait_for_all(processes, Path(folder), deadline)
            return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(world_size)]
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


@cache
def _fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    with mock.patch.dict(os.environ, BEFORE_IMPORTS):
        ensure_running()
    return context


@contextmanager
def _served_port(launcher: str) -> Iterator[int]:
    if launcher == "torchrun":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield store.port
        del store  # Kept alive until the workers are gone.
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        yield port


def _result(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"{rank}.result")


def _error(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"{rank}.error")


def _stacks(folder: str | Path, rank: int) -> Path:
    return Path(folder, f"{rank}.stacks")


def _wait_for_all(processes: list[BaseProcess], folder: Path, deadline: float) -> None:
    running = dict(enumerate(processes))
    while running:
        wait([process.sentinel for process in running.values()], max(deadline - time.monotonic(), 0.0))
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                del running[rank]
        _raise_first_error(folder, len(processes))
        dead = [rank for rank in range(len(processes)) if rank not in running and not _result(folder, rank).exists()]
        if dead:
            codes = {rank: processes[rank].exitcode for rank in dead}
            raise WorkersFailed(f"workers ended without a result; exit codes by rank: {codes}")
        if running and time.monotonic() >= deadline:
            time.sleep(DUMP_GRACE)
            dumps = [f"rank {rank}:\n{_read(_stacks(folder, rank))}" for rank in running]
            raise WorkersFailed(f"ranks {sorted(running)} still running at the timeout\n" + "\n".join(dumps))


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else "(not started)"


def _raise_first_error(folder: Path, world_size: int) -> None:
    """Raise the earliest recorded exception: later ones are mostly other ranks losing their peer."""
    records = [
        (*pickle.loads(_error(folder, rank).read_bytes()), rank)
        for rank in range(world_size)
        if _error(folder, rank).exists()
    ]
    if not records:
        return
    _, pickled, text, rank = min(records, key=lambda record: record[0])
    cause = WorkerTraceback(f"rank {rank}: {text}")
    try:
        error = pickle.loads(pickled) if pickled else None
    except Exception:  # An exception class may pickle and still not unpickle; its text is kept in the cause.
        error = None
    if not isinstance(error, BaseException):
        error = WorkersFailed(f"rank {rank} raised:\n{text}")
    raise error from cause


def _write(path: Path, content: bytes) -> None:
    """Write a file that is either absent or complete."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    partial.rename(path)


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _work(
    rank: int, world_size: int, call: bytes, folder: str, deadline: float, init: bool, variables: dict[str, str]
) -> None:
    """The child's main function; never returns, because interpreter and gloo teardown abort now and then."""
    os.environ.update(variables)
    threading.Thread(target=_follow_parent, daemon=True).start()
    with _stacks(folder, rank).open("w") as stacks:
        try:
            faulthandler.dump_traceback_later(max(deadline - time.monotonic(), 0.01), file=stacks)
            torch.set_num_threads(1)
            worker, args = pickle.loads(call)
            if init:
                dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
            result = pickle.dumps(worker(rank, world_size, *args))
            if dist.is_initialized():
                dist.barrier()  # A rank that leaves early breaks the connections of those still communicating.
            _write(_result(folder, rank), result)
        except BaseException as error:
            text = traceback.format_exc()
            try:
                pickled = pickle.dumps(error)
            except Exception:  # Not every exception pickles; the text goes to the parent in any case.
                pickled = b""
            _write(_error(folder, rank), pickle.dumps((time.monotonic(), pickled, text)))
            os._exit(1)
        os._exit(0)
