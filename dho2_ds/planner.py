"""Public :func:`plan`: bytes, traffic and seconds of training with DHO2, before any machine is rented.

n parameters, P training ranks, C curvature ranks, m Lanczos steps. The arithmetic of bytes and traffic is in
:class:`dho2_ds.needs.Needs`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dho2_ds.config import DHO2Config
from dho2_ds.curvature.refresh import affordable_interval
from dho2_ds.needs import Engine, Memory, Needs, Precision, Shapes

GRADIENT_FLOPS = 6
"""Of a dense model per parameter and token: 2 forward, 4 backward (Kaplan et al., arXiv 2001.08361, section 2.1)."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that the busiest rank sends, collectives as rings: f = (P-1)/P of the data for a gather or a
    reduce-scatter, 2 f for an all-reduce.

    Attributes:
        engine_step: the engine's own, per optimizer step. step: what DHO2 adds to it. refresh: all products of one.
        bridge: mode ``dedicated``, per refresh between a training rank and the curvature ranks, both ways.
    """

    engine_step: int
    step: int
    refresh: int
    bridge: int = 0


@dataclass(frozen=True)
class Workload:
    """How much a rank computes, and how fast.

    Attributes:
        flops: floating-point operations per second of a rank, as reached. tokens: of a micro-batch on one rank.
        bandwidth: bytes per second that a rank sends; None: traffic takes no time.
    """

    flops: float
    tokens: int
    bandwidth: float | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds; communication is added to computation, nothing overlaps.

    Attributes:
        step: a training step. refresh: of computing one eigenbasis, on the ranks that do it. interval: from one to the
            next, by ``curvature.interval`` and ``budget``. curvature_ranks: the fewest on which a refresh ends within
            the interval in mode ``dedicated``; None: not even as many as training ranks suffice.
    """

    step: float
    refresh: float
    interval: float
    curvature_ranks: int | None


@dataclass(frozen=True)
class Plan:
    """What :func:`plan` found. ``hvps``: products per refresh, at most. ``curvature``: of a curvature rank."""

    parameters: int
    engine: Engine
    precision: Precision
    ranks: int
    curvature_ranks: int
    mode: str
    hvps: int
    training: Memory
    curvature: Memory | None
    traffic: Traffic
    timing: Timing | None


def square_shapes(parameters: int, side: int = 2048) -> dict[str, tuple[int, ...]]:
    """Shapes of a model of which only the size is known: square matrices (which matter to base ``soap`` alone)."""
    side = min(side, math.isqrt(parameters))
    whole, rest = divmod(parameters, side * side)
    shapes: dict[str, tuple[int, ...]] = {f"matrix {i}": (side, side) for i in range(whole)}
    return shapes | ({"rest": (rest,)} if rest else {})


def plan(
    shapes: Shapes,
    config: DHO2Config,
    *,
    engine: Engine,
    ranks: int,
    precision: Precision = "float32",
    accumulation: int = 1,
    workload: Workload | None = None,
) -> Plan:
    """Bytes per rank, traffic per rank and seconds.

    Args:
        shapes: {parameter: shape} of all trained parameters; :func:`square_shapes` for a model known by its size only.
        config: the settings; in mode ``dedicated`` with ``curvature.ranks`` (0 counts as 1) beside ``ranks``.
        engine: ``ddp`` (or one process), ``fsdp`` (1 or 2, fully sharded) or ``zero0`` to ``zero3``.
        ranks: training ranks that share the state; of HSDP and tensor parallelism the ranks of one replica.
        precision: in which the model computes. Below float32 DeepSpeed keeps the model in it and float32 masters
            beside; FSDP keeps float32 shards and gathers in it; DDP is autocast, whose weights stay float32.
        accumulation: micro-batches per step. workload: None leaves ``timing`` out.
    """
    mode = config.curvature.mode if config.num_eigenvectors else "inline"
    training = Needs(shapes, config, engine, ranks, precision)
    dedicated = mode == "dedicated"
    helpers = max(config.curvature.ranks, 1) if dedicated else 0
    curvature = Needs(shapes, config, engine, helpers, precision) if dedicated else None
    worker = curvature or training
    memory = training.memory(mode)
    return Plan(
        parameters=training.numel,
        engine=engine,
        precision=precision,
        ranks=ranks,
        curvature_ranks=helpers,
        mode=mode,
        hvps=training.hvps,
        training=memory,
        curvature=curvature.memory("curvature rank") if curvature is not None else None,
        traffic=Traffic(
            training.engine_step_traffic(accumulation),
            training.step_traffic(),
            worker.refresh_traffic(_batches(config, ranks, helpers)),
            memory.snapshot + memory.staging if dedicated else 0,
        ),
        timing=_timing(training, workload, accumulation, helpers) if workload is not None else None,
    )


def _batches(config: DHO2Config, ranks: int, helpers: int) -> int:
    """Micro-batches that a rank evaluates per gradient: its own, or its part of those of all training ranks."""
    return config.curvature.batches * (-(-ranks // helpers) if helpers else 1)


def _timing(training: Needs, workload: Workload, accumulation: int, helpers: int) -> Timing:
    """A gradient of one micro-batch is 6 n operations per token; a refresh is two for each product and batch (forward
    differences: one).

    C curvature ranks evaluate the micro-batches of all P training ranks: ceil(P/C) each, so a refresh takes
    2 m ceil(P/C) or (m + 1) ceil(P/C) gradients, and snapshot and basis cross the bridge over min(P, C) ranks' links.
    """
    config, one = training.config, GRADIENT_FLOPS * training.numel * workload.tokens / workload.flops

    def sent(count: float) -> float:
        return count / workload.bandwidth if workload.bandwidth else 0.0

    traffic = training.engine_step_traffic(accumulation) + training.step_traffic()
    step = accumulation * one + sent(traffic)
    interval = affordable_interval(config.curvature, training.k, training.numel) * step

    def refresh(helpers: int) -> float:
        side = training
        if helpers:
            side = Needs(training.shapes, config, training.engine, helpers, training.precision)
        batches = _batches(config, training.ranks, helpers)
        seconds = training.evaluations * batches * one + sent(side.refresh_traffic(batches))
        if helpers:
            crossing = training.memory("dedicated")
            seconds += sent((crossing.snapshot + crossing.staging) * training.ranks / min(training.ranks, helpers))
        return seconds

    # More ranks do not help between two divisors: ceil(P/C) is the same, and the traffic more.
    worth_trying = sorted({-(-training.ranks // share) for share in range(1, training.ranks + 1)})
    enough = next((count for count in worth_trying if refresh(count) <= interval), None) if training.k else 0
    return Timing(step, refresh(helpers), interval, enough)
