"""What users see: log lines, statistics and DeepSpeed monitor events."""

from __future__ import annotations

import logging
from typing import Any

from dho2_ds.curvature.refresh import Refresh

logger = logging.getLogger("dho2_ds")
if not logger.handlers and not logging.getLogger().handlers:
    # Training scripts seldom configure logging; the one summary line must not be lost for that.
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("[dho2] %(message)s"))
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def human_bytes(count: float) -> str:
    """``1536`` -> ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


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


def write_events(engine: Any, step: int, stats: dict[str, Any], seconds: float) -> None:
    """Send ``Train/DHO2/*`` to DeepSpeed's monitors (TensorBoard, W&B, CSV) from rank 0, if any is on."""
    monitor = getattr(engine, "monitor", None)
    if monitor is None or not getattr(monitor, "enabled", False) or engine.global_rank != 0:
        return
    samples = engine.global_samples
    events: list[tuple[str, float, int]] = [
        (f"Train/DHO2/eigenvalue_{i}", value, samples) for i, value in enumerate(stats["eigenvalues"])
    ]
    for key in ("lr_scale", "captured_fraction", "age", "rejected", "hvps"):
        if stats[key] is not None:
            events.append((f"Train/DHO2/{key}", float(stats[key]), samples))
    events.append(("Train/DHO2/refresh_seconds", seconds, samples))
    monitor.write_events(events)
