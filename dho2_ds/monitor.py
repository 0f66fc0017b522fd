"""What users see: log lines, statistics and DeepSpeed monitor events."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dho2_ds.config import CurvatureConfig, DHO2Config
from dho2_ds.curvature.refresh import Refresh, affordable_interval, lanczos_budget, working_vectors

logger = logging.getLogger("dho2_ds")
if not logger.handlers and not logging.getLogger().handlers:
    # Training scripts seldom configure logging; the one summary line must not be lost for that.
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("[dho2] %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def is_main() -> bool:
    """True on the one rank that speaks for all."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def human_bytes(count: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def chosen_route(config: CurvatureConfig) -> tuple[str, str]:
    """The route of Hessian-vector products and the reason for it; decided once, never switched later."""
    if config.hvp == "auto":
        return "finite_difference", "auto: works at every stage with the memory of a training step"
    return config.hvp, "as configured"


def summary_line(config: DHO2Config, host: str, world_size: int, numel: int, local_numel: int) -> str:
    """The one line at the first step: what trains where, and what it will cost per rank.

    Args:
        host: engine name. world_size: ranks that share. numel: parameters, global. local_numel: this rank's share.
    """
    k = config.num_eigenvectors
    item = 2 if config.curvature.eigenvector_dtype == "bfloat16" else 4
    steps = lanczos_budget(config.curvature.lanczos_steps, k, numel)
    route, why = chosen_route(config.curvature)
    # On curvature ranks the Lanczos vectors are elsewhere: weights, P^(1/2) and start vector go there, k rows return.
    # Else one more than a refresh works with: the weights that are saved.
    vectors = (
        k + 3 if config.curvature.mode == "dedicated" else steps + 1 + working_vectors(route == "forward_difference")
    )
    return (
        f"DHO2 on {host}, {world_size} rank(s): {numel:,} parameters, k={k}, rule {config.rule} on {config.base}; "
        f"per rank {human_bytes(k * item * local_numel)} eigenbasis, {human_bytes(vectors * 4 * local_numel)} "
        f"during a refresh; HVPs by {route} ({why}); curvature {config.curvature.mode} "
        f"{_distances(config.curvature, k, numel)} from step {max(1, config.curvature.warmup_steps)}"
    )


def _distances(curvature: CurvatureConfig, k: int, numel: int) -> str:
    """How far apart refreshes are, and what says so."""
    interval = affordable_interval(curvature, k, numel)
    text = f"every {interval} steps"
    if interval > curvature.interval:
        text += f" (by budget {curvature.budget:g})"
    if curvature.first_interval is not None and curvature.first_interval < interval:
        text += f", at first {curvature.first_interval}, doubling,"
    return text


def soap_line(blocks: int, balance: tuple[float, float], state: int, sent: int) -> str:
    """The line at the first step with the base ``soap``; bytes are rank 0's."""
    return (
        f"soap: {blocks} blocks; fullest rank over the mean {balance[0]:.2f} in memory, {balance[1]:.2f} in work; "
        f"per rank {human_bytes(state)} state and {human_bytes(sent)} sent per step"
    )


def refresh_line(step: int, report: Refresh, lr_scale: float, age: int | None) -> str:
    """The INFO line of one refresh."""
    values = ", ".join(f"{value:.3g}" for value in report.eigenvalues[:4]) or "none"
    worst = max((r / abs(v) for r, v in zip(report.residuals, report.eigenvalues, strict=True) if v), default=0.0)
    text = (
        f"step {step}: refresh {'accepted' if report.accepted else 'REJECTED: ' + report.reason}; "
        f"{len(report.eigenvalues)} pairs [{values}], worst relative residual {worst:.1e}, {report.hvps} HVPs, "
        f"{report.seconds:.2f} s, lr scale {lr_scale:.2f}"
    )
    if report.self_check == report.self_check:
        text += f", step-size check {report.self_check:.1%} at tau {report.tau:.2g}"
    if age is not None:
        text += f", previous basis was {age} steps old"
    return text


def in_vain_line(step: int, count: int, age: int | None) -> str:
    """The WARNING after so many rejected refreshes in a row."""
    state = "there is no eigenbasis" if age is None else f"the eigenbasis is {age} steps old and ever less trusted"
    return (
        f"step {step}: {count} refreshes in a row were rejected, for the reasons above: {state}, and products buy "
        "nothing. Try curvature.hvp='exact' (kinks, as ReLU's, spoil differences), more curvature.lanczos_steps or "
        "curvature.batches; if refreshes go on to fail, num_eigenvectors=0 trains with the base alone at its cost"
    )


def refresh_record(stats: dict[str, Any], report: Refresh) -> dict[str, Any]:
    """What the log keeps of one refresh."""
    keys = ("rejected", "hvps", "eigenvalues", "next_eigenvalue", "lr_scale", "captured_fraction", "age")
    found = {"step": stats["steps"], "accepted": report.accepted, "reason": report.reason or None}
    return {**found, **{key: stats[key] for key in keys}, "refresh_seconds": report.seconds}


def append_line(path: str, record: dict[str, Any]) -> None:
    """Append one JSON line; on the main rank only. A failure is told once and stops nothing: others would wait."""
    if not is_main():
        return
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a") as file:
            file.write(json.dumps(finite) + "\n")
    except OSError as error:
        if path not in _unwritable:
            _unwritable.add(path)
            logger.warning("log=%s: cannot be written (%s); training goes on without it", path, error)


_unwritable: set[str] = set()


def write_events(engine: Any, stats: dict[str, Any], seconds: float) -> None:
    """Send ``Train/DHO2/*`` to DeepSpeed's monitors (TensorBoard, W&B, CSV) from rank 0, if any is on."""
    monitor = getattr(engine, "monitor", None)
    if monitor is None or not getattr(monitor, "enabled", False) or engine.global_rank != 0:
        return
    samples = engine.global_samples
    events: list[tuple[str, float, int]] = [
        (f"Train/DHO2/eigenvalue_{i}", value, samples) for i, value in enumerate(stats["eigenvalues"])
    ]
    for key in ("steps", "lr_scale", "captured_fraction", "age", "rejected", "hvps"):
        if stats[key] is not None:
            events.append((f"Train/DHO2/{key}", float(stats[key]), samples))
    events.append(("Train/DHO2/refresh_seconds", seconds, samples))
    monitor.write_events(events)
