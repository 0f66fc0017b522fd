"""``dho2 doctor``: a check of the environment, which changes nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import dho2_ds
from dho2_ds import _register

STALE_LOCK_SECONDS = 15 * 60
"""An older lock of torch's extension builder is a killed build's: DeepSpeed's CPU extension needs 1-3 minutes."""

OLDEST = {"torch": (2, 6), "deepspeed": (0, 16)}
"""Oldest releases supported, as in the package's requirements."""


@dataclass(frozen=True)
class Check:
    """One finding of ``dho2 doctor``: ``fail`` is what would break a run, ``warn`` what limits one."""

    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""


def _package_check(package: str, absent: Literal["warn", "fail"], fix: str) -> Check:
    """Check that a package is there and not too old, without importing it."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return Check(package, absent, "not installed", fix)
    oldest = OLDEST.get(package, (0,))
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if release < oldest:
        return Check(package, "fail", version, f"upgrade to {'.'.join(map(str, oldest))} or newer")
    return Check(package, "ok", version)


def _torch_checks() -> Iterator[Check]:
    """Check torch itself: the accelerator and the communication backends."""
    import torch
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = f"{torch.accelerator.device_count()} x {accelerator.type}" if accelerator else "none, CPU is used"
    yield Check("accelerator", "ok", devices)
    if not dist.is_available():
        yield Check("torch.distributed", "fail", "not in this build of torch", "install a build with USE_DISTRIBUTED=1")
        return
    if dist.is_gloo_available():
        yield Check("gloo", "ok", "available")
    else:
        yield Check("gloo", "fail", "not in this build of torch", "install a build with gloo")
    needed = accelerator is not None and accelerator.type == "cuda"
    if dist.is_nccl_available() or not needed:
        yield Check("nccl", "ok", "available" if dist.is_nccl_available() else "absent, not needed without CUDA")
    else:
        yield Check("nccl", "fail", "not in this build of torch", "install a build with NCCL")


def _compiler_checks() -> Iterator[Check]:
    """Check what DeepSpeed's own extensions are compiled with, and for locks that a killed build left."""
    compiler = os.environ.get("CXX") or "c++"
    fix = "install a C++ compiler, or set CXX"
    path = shutil.which(shlex.split(compiler)[0])
    yield Check("C++ compiler", "ok", path) if path else Check("C++ compiler", "warn", f"no {compiler!r}", fix)
    for lock in _lock_files():
        minutes = (time.time() - lock.stat().st_mtime) / 60
        detail = f"{lock} is {minutes:.0f} min old: every run that needs this extension waits for it"
        stale = minutes * 60 > STALE_LOCK_SECONDS
        hint = "" if stale else "if nothing is being compiled now: "
        yield Check("extension lock", "fail" if stale else "warn", detail, f"{hint}rm {shlex.quote(str(lock))}")


def _lock_files() -> list[Path]:
    """Find the locks of torch's extension builder: <root>/<extension>/lock, by default below one folder per device."""
    configured = os.environ.get("TORCH_EXTENSIONS_DIR")
    if configured:
        return sorted(Path(configured).glob("*/lock"))
    from torch.utils.cpp_extension import get_default_build_root

    return sorted(Path(get_default_build_root()).glob("*/*/lock"))


def _registration_checks() -> Iterator[Check]:
    """Check that a DeepSpeed JSON may say ``"type": "DHO2"``."""
    import torch.optim

    if _register.last_error is None and _register.is_ours(getattr(torch.optim, "DHO2", None)):
        yield Check("JSON name DHO2", "ok", "registered")
    else:
        reason = _register.last_error or "not registered"
        yield Check("JSON name DHO2", "fail", reason, "pass a dho2_ds.DHO2 object to deepspeed.initialize")
    named = any(point.value.startswith("dho2_ds.") for point in metadata.entry_points(group="torch.backends"))
    by_hand = "write `import dho2_ds` in the training script"
    if not named:
        yield Check("entry point", "warn", "not found: the package is not installed", f"pip install it, or {by_hand}")
    elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        yield Check("entry point", "warn", "switched off by TORCH_DEVICE_BACKEND_AUTOLOAD", f"unset it, or {by_hand}")
    else:
        yield Check("entry point", "ok", "found: no import is needed")


def examine() -> list[Check]:
    """Look at the environment; changes nothing."""
    checks = [Check("dho2_ds", "ok", dho2_ds.__version__), Check("python", "ok", platform.python_version())]
    checks.append(_package_check("torch", "fail", "pip install torch"))
    checks.append(_package_check("deepspeed", "warn", "pip install 'dho2-ds[deepspeed]', unless you use DDP only"))
    checks.append(_package_check("mpi4py", "warn", "pip install 'dho2-ds[mpi]', needed to start with mpirun only"))
    if importlib.util.find_spec("torch") is not None:
        for group in (_torch_checks, _compiler_checks, _registration_checks):
            checks.extend(group())
    return checks


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check the environment; exit code 1 when something would break a run."""
    checks = examine()
    ok = all(check.status != "fail" for check in checks)
    if as_json:
        typer.echo(json.dumps({"ok": ok, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        _print(checks)
    raise typer.Exit(0 if ok else 1)


def _print(checks: list[Check]) -> None:
    """Draw the findings as a table, and below it the commands, which a narrow table would break."""
    colours = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table.grid(padding=(0, 2))
    for check in checks:
        table.add_row(Text(check.status, style=colours[check.status]), Text(check.name), Text(check.detail))
    console = Console()
    console.print(table)
    for check in checks:
        if check.fix:
            console.print(Text(f"{check.name}: {check.fix}", style=colours[check.status]), soft_wrap=True)
