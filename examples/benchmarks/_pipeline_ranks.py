"""What one process of the pipeline benchmark does; `pipeline.py` starts it with a plan.

python _pipeline_ranks.py PLAN.json OUT

Every part of the benchmark is a function of the plan on a training rank; what it returns is written to OUT. A curvature
rank builds the same model and serves; what it did is written there by `_pipeline_probe`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CORE = "PIPELINE_CORE"
if os.environ.get(CORE):  # before torch starts threads, which inherit it
    os.sched_setaffinity(0, {int(os.environ[CORE])})

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # examples/

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from _common import digits, library_text, shards  # noqa: E402
from _pipeline_busy import BUSY, other_core  # noqa: E402
from _pipeline_probe import cores_of_threads, record_training, watch_curvature  # noqa: E402
from char_gpt import CharGPT  # noqa: E402
from digits_autoencoder import DigitsAutoencoder  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import dho2_ds  # noqa: E402

Plan = dict[str, Any]
EVENT = "@done "  # marks a line of progress: how many steps of the plan are done


class Run:
    """A model, its optimizer and its batches, in one curvature mode.

    On a curvature rank the constructor does not return: it serves until training ends.
    """

    def __init__(self, plan: Plan, mode: str) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(plan["seed"])
        model: nn.Module
        if plan["task"] == "autoencoder":
            model, data = DigitsAutoencoder(), digits()
        else:
            block, size = plan["block"], {key: plan[key] for key in ("width", "heads", "layers")}
            model, data = CharGPT(block=block, **size), library_text(block=block, limit=400_000)
        self.data, self.clip = data, plan.get("clip")
        self.batches = shards(data, plan["batch"], rank, world, plan["seed"])
        if plan.get("host") == "fsdp2":
            mesh = init_device_mesh("cpu", (world,))
            for block_module in model.blocks:
                fully_shard(block_module, mesh=mesh)
            fully_shard(model, mesh=mesh)
        elif world > 1:
            model = DistributedDataParallel(model)
        self.model = model
        settings = dict(plan["optimizer"])
        if mode == "adamw":
            keys = ("lr", "betas", "eps", "weight_decay")
            picked = {key: settings[key] for key in keys if key in settings}
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **picked, fused=True)
            return
        if mode == "none":
            settings["num_eigenvectors"] = 0
        else:
            settings["curvature"] = {**settings["curvature"], "mode": mode}
            if mode == "dedicated":
                settings["curvature"]["ranks"] = plan["curvature"]
        self.optimizer = dho2_ds.DHO2(model.parameters(), **settings)
        dho2_ds.attach(model, self.optimizer)

    def stats(self) -> dict[str, Any]:
        return self.optimizer.curvature_stats() if isinstance(self.optimizer, dho2_ds.DHO2) else {}

    def step(self) -> Tensor:
        """One ordinary training step."""
        self.optimizer.zero_grad()
        loss: Tensor = self.model(next(self.batches))
        loss.backward()
        if self.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.detach()


def done(steps: int) -> None:
    if dist.get_rank() == 0:
        print(f"{EVENT}{steps}", flush=True)


class Clock:
    """Time from its making on, as seen by this thread.

    ``wall``; ``process``, the CPU time of all threads (the bridge's too); ``own``, the wall clock less the time during
    which this thread could have run and its core was taken by other programs: what the wall would show on an idle
    machine. The bridge's CPU time counts in full, since it may have been what took the core.
    """

    def __init__(self) -> None:
        self._start = self._read()

    @staticmethod
    def _read() -> tuple[float, float, float, float]:
        # Linux: nanoseconds on the CPU, nanoseconds runnable and waiting for it, time slices.
        waited = int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
        return time.perf_counter(), time.process_time(), time.thread_time(), waited

    def read(self) -> dict[str, float]:
        wall, process, thread, waited = (b - a for a, b in zip(self._start, self._read(), strict=True))
        return {"wall": wall, "process": process, "own": wall - waited + max(0.0, process - thread)}


# -- (a) what a step costs while a refresh is under way -----------------------------------------------------------


def steps(plan: Plan) -> dict[str, Any]:
    """Times of single steps in every mode, which take turns block by block in one process.

    A step counts as one of a refresh when the refresh was due or under way before it or after it, so that taking the
    snapshot and swapping the basis in are part of it.
    """
    runs = {mode: Run(plan, "none" if mode == BUSY else mode) for mode in plan["modes"]}
    rows: list[dict[str, Any]] = []
    total, taken = plan["repeats"] * len(runs) * plan["block_steps"], 0
    for repeat in range(-1, plan["repeats"]):  # the first turn warms up
        order = list(runs)
        for mode in order if repeat % 2 else reversed(order):
            with other_core(Path(sys.argv[1]), busy=mode == BUSY):
                for index in range(4 * plan["block_steps"]):
                    flying = runs[mode].stats().get("in_flight", False)
                    if index >= plan["block_steps"] and not flying:
                        break
                    row = timed_step(runs[mode])
                    if repeat >= 0:
                        rows.append({"repeat": repeat, "mode": mode, **row})
            taken += plan["block_steps"]
            done(min(total, max(0, taken - len(runs) * plan["block_steps"])))
    numel = sum(p.numel() for p in runs["none"].model.parameters())
    found = {mode: run.stats() for mode, run in runs.items()}
    return {"rows": rows, "parameters": numel, "stats": found, "affinity": cores_of_threads()}


def timed_step(run: Run) -> dict[str, Any]:
    """Take a step; its times, and whether it has to do with a refresh."""
    before = run.stats()
    due = before.get("in_flight", False) or (isinstance(run.optimizer, dho2_ds.DHO2) and run.optimizer.refresh_due)
    clock = Clock()
    run.step()
    row = clock.read()
    after = run.stats()
    swapped = after.get("refreshes", 0) > before.get("refreshes", 0)
    return {**row, "refresh": bool(due or swapped or after.get("in_flight", False))}


# -- (b) time to a loss -------------------------------------------------------------------------------------------


def target(plan: Plan) -> dict[str, Any]:
    """One training run; the clock runs through evaluations too, in every mode alike."""
    run = Run(plan, plan["mode"])
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, cosine(plan["steps"], warmup=10))
    rank, world = dist.get_rank(), dist.get_world_size()
    points: list[dict[str, Any]] = []
    if world > 1:
        dist.barrier()
    if plan["mode"] == "dedicated":  # the clock starts when both worlds are there, as it does for the others
        wait_for_curvature(run)
    clock = Clock()
    for step in range(plan["steps"] + 1):
        if step % plan["evaluate_every"] == 0 or step == plan["steps"]:
            run.model.eval()
            with torch.no_grad():
                mine = run.data[rank::world]
                loss = run.model(mine).double() * len(mine)
            run.model.train()
            if world > 1:
                dist.all_reduce(loss)
            points.append({"step": step, "loss": loss.item() / len(run.data), **clock.read()})
            done(step)
        if step < plan["steps"]:
            run.step()
            scheduler.step()
    return {"points": points, "stats": run.stats()}


def wait_for_curvature(run: Run, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not run.stats()["connected"]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"no curvature rank within {seconds:.0f} s")
        time.sleep(0.05)


def cosine(total: int, warmup: int) -> Callable[[int], float]:
    """Linear warm-up from a tenth, then a cosine to a thousandth: the schedule of the demo's configs."""

    def factor(step: int) -> float:
        if step < warmup:
            return 0.1 + 0.9 * step / warmup
        phase = torch.tensor((step - warmup) / max(1, total - warmup) * torch.pi)
        return 0.001 + 0.999 * 0.5 * (1 + float(torch.cos(phase)))

    return factor


# -- (c) bytes ----------------------------------------------------------------------------------------------------


def memory(plan: Plan) -> dict[str, Any]:
    """Bytes of this rank's tensors after two swaps, so that the curvature side holds an old basis too."""
    sizes = record_training()
    run = Run(plan, "dedicated")
    wait_for_curvature(run)
    for step in range(plan["steps"]):
        run.step()
        done(step + 1)
        if len(run.stats()["swaps"]) >= 2:
            break
    stats = run.stats()
    if len(stats["swaps"]) < 2:
        raise RuntimeError(f"{len(stats['swaps'])} swaps in {plan['steps']} steps: 2 are needed")
    return {**sizes, "basis": stats["bytes_basis"], "base": stats["bytes_base"]}


# -- (d) a timeline -----------------------------------------------------------------------------------------------


def timeline(plan: Plan) -> dict[str, Any]:
    """When steps began and ended, and this rank's transfers; the clock is the machine's, the same in all processes."""
    run = Run(plan, "dedicated")
    wait_for_curvature(run)
    taken = []
    for step in range(plan["steps"]):
        before = time.monotonic()
        run.step()
        taken.append((before, time.monotonic()))
        done(step + 1)
    optimizer = run.optimizer
    assert isinstance(optimizer, dho2_ds.DHO2)
    transfers = optimizer._refresher.dedicated.timings  # type: ignore[union-attr]
    return {"steps": taken, "swaps": run.stats()["swaps"], "transfers": transfers}


PARTS: dict[str, Callable[[Plan], dict[str, Any]]] = {
    "steps": steps,
    "target": target,
    "memory": memory,
    "timeline": timeline,
}


def main(plan_path: str, out: str) -> None:
    plan: Plan = json.loads(Path(plan_path).read_text())
    role = dho2_ds.init_distributed(curvature_ranks=plan["curvature"], backend="gloo")
    rank = dist.get_rank()
    if role == "curvature":
        watch_curvature(Path(out, f"curvature-{rank}.jsonl"))
        Run(plan, "dedicated")  # serves, and ends the process
    found = PARTS[plan["part"]](plan)
    Path(out, f"training-{rank}.json").write_text(json.dumps(found))
    if dist.get_world_size() > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
