"""What one world of ranks, training's or the curvature ranks', needs: bytes per rank and traffic.

n parameters, P ranks, k eigenvectors, m Lanczos steps. A *share* is the longest local vector of a rank: n/P and
padding. Everything follows from shapes and settings; nothing is allocated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from dho2_ds.config import DHO2Config
from dho2_ds.curvature.refresh import gradients_of, lanczos_budget, working_vectors
from dho2_ds.sharding.blocks import assign, cut, owner_layouts
from dho2_ds.soap_base import state_layouts

Engine = Literal["ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"]
Precision = Literal["float32", "bfloat16", "float16"]
Shapes = Mapping[str, Sequence[int]]

FLOAT, DOUBLE = 4, 8  # bytes


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. Activations, gathered layers and communication buckets, which depend on the engine's own
    settings, are not in it.

    Attributes:
        weights: the model's and, where the engine keeps them, float32 masters. gradients: at their most, in a step.
        base_state: the base optimizer's. eigenbasis: in use; on a curvature rank the last one found.
        lanczos: while a refresh runs, the saved weights included. snapshot: of weights, P^(1/2) and start vector.
        staging: a new eigenbasis on its way in.
    """

    weights: int = 0
    gradients: int = 0
    base_state: int = 0
    eigenbasis: int = 0
    lanczos: int = 0
    snapshot: int = 0
    staging: int = 0

    @property
    def steady(self) -> int:
        """Between refreshes."""
        return self.weights + self.gradients + self.base_state + self.eigenbasis

    @property
    def peak(self) -> int:
        """During one."""
        return self.steady + self.lanczos + self.snapshot + self.staging


class Needs:
    """What a rank of a world of ``ranks`` needs; see :func:`dho2_ds.planner.plan` for the arguments."""

    def __init__(self, shapes: Shapes, config: DHO2Config, engine: Engine, ranks: int, precision: Precision) -> None:
        self.shapes, self.config, self.engine, self.ranks, self.precision = shapes, config, engine, ranks, precision
        self.numel = sum(math.prod(shape) for shape in shapes.values())
        self.k = config.num_eigenvectors
        self.replicated = engine in ("ddp", "zero0")
        self.low = 2 if precision != "float32" else FLOAT
        self.kept = self.low if engine.startswith("zero") else FLOAT  # bytes of a weight of the model itself
        self.share = self._share()
        self.own, self.state = self.share, 0  # elements of a vector of ours, of SOAP's state
        if config.base == "soap":
            self._lay_out_soap()
        budget = lanczos_budget(config.curvature.lanczos_steps, self.k, self.numel)
        self.hvps = min(budget, self.numel) if self.k else 0
        self.evaluations = gradients_of(config.curvature.hvp, self.hvps) if self.k else 0  # of a refresh and a batch

    def _share(self) -> int:
        """ZeRO-3 cuts every parameter, FSDP every first dimension, the others their concatenation."""
        P = self.ranks
        if self.engine == "zero3":
            return sum(-(-math.prod(shape) // P) for shape in self.shapes.values())
        if self.engine == "fsdp":
            rows = ((shape[0], math.prod(shape[1:])) if shape else (1, 1) for shape in self.shapes.values())
            return sum(-(-count // P) * width for count, width in rows)
        return -(-self.numel // P)

    def _lay_out_soap(self) -> None:
        """The owner layout, whose fullest rank counts."""
        soap = self.config.soap
        blocks = cut(self.shapes, max_block=soap.max_block, max_rotated=soap.max_precondition_dim)
        owners = assign(blocks, self.ranks, vectors=3 + self.k)
        layouts = owner_layouts(blocks, owners, self.ranks)
        self.own = max(layout.numel for layout in layouts)
        self.state = max(layout.numel for layout in state_layouts(blocks, layouts))

    # -- bytes ----------------------------------------------------------------------------------------------------

    def memory(self, mode: str) -> Memory:
        """Bytes of a rank of this side, by what it does.

        Between steps: the k rows are kept in ``curvature.eigenvector_dtype``. In a refresh: m float32 Lanczos vectors
        (m - 1 of them with differences, whose check takes one product) and four more (the start or direction, the
        product, a copy of it, the hint; with forward differences the gradient), beside what the engine's evaluation
        saves. Mode ``spread``: the snapshot and a frozen P^(1/2) on top, and in a product the displacement twice. Mode
        ``dedicated``: weights, hint and P^(1/2) wait to be sent, k rows come in; a curvature rank receives the first
        and keeps the k rows of its last job.
        """
        vector = FLOAT * self.own
        row = (2 if self.config.curvature.eigenvector_dtype == "bfloat16" else FLOAT) * self.own
        gradients = self._gradients()
        resting = Memory(self._weights(), gradients, self._base_state(), self.k * row)
        if not self.k:
            return resting
        hvp = self.config.curvature.hvp
        steps = self.hvps if hvp == "exact" else self.hvps - 1
        lanczos = self._saved() + (working_vectors(hvp == "forward_difference") + max(steps, 1)) * vector
        rooted = self.config.rule == "adaptive"
        sent = 2 * vector + (FLOAT * self.state or vector if rooted else 0)
        if mode == "dedicated":
            return replace(resting, snapshot=sent, staging=self.k * row)
        if mode == "curvature rank":
            state = FLOAT * (self.state + self.own) if self.state else 0
            return replace(resting, base_state=state, lanczos=lanczos, snapshot=sent)
        if mode == "spread":
            frozen = vector + FLOAT * self.state // 2 if rooted else 0  # of SOAP's state one moment and the bases
            return replace(resting, lanczos=lanczos + 2 * vector, snapshot=vector + frozen)
        return replace(resting, lanczos=lanczos)

    def _weights(self) -> int:
        """DeepSpeed's stages 1 to 3 keep a float32 master of the share also in float32."""
        n, s = self.numel, self.share
        if self.engine == "zero0":
            return self.kept * n + (FLOAT * n if self.kept < FLOAT else 0)
        return {
            "ddp": FLOAT * n,
            "fsdp": FLOAT * s,
            "zero1": self.kept * n + FLOAT * s,
            "zero2": self.kept * n + FLOAT * s,
            "zero3": (self.kept + FLOAT) * s,
        }[self.engine]

    def _gradients(self) -> int:
        """Whole ones up to stage 1; below float32 a step makes float32 ones of what it updates."""
        whole = self.engine in ("ddp", "zero0", "zero1")
        updated = self.numel if self.engine == "zero0" else self.share
        return self.kept * (self.numel if whole else self.share) + (FLOAT * updated if self.kept < FLOAT else 0)

    def _base_state(self) -> int:
        """Two float32 moments, or one momentum buffer, of the share; of everything where torch's optimizer runs alone
        on replicated weights (k = 0). SOAP: moments, factors, eigenbases and the update, whole blocks per rank."""
        if self.config.base == "soap":
            return FLOAT * (self.state + self.own)
        kept = (1 if self.config.momentum else 0) if self.config.base == "sgd" else 2
        return FLOAT * kept * (self.numel if self.replicated and not self.k else self.share)

    def _saved(self) -> int:
        """What an evaluation saves to restore: the share of the weights; ZeRO-3's gradient buffer too. SOAP takes a
        direction and a gradient to the engine's layout and back."""
        saved = self.kept if self.engine in ("zero1", "zero2") else 2 * self.kept if self.engine == "zero3" else FLOAT
        return saved * self.share + (2 * FLOAT * self.share if self.state else 0)

    # -- traffic --------------------------------------------------------------------------------------------------

    @property
    def _f(self) -> float:
        return (self.ranks - 1) / self.ranks

    def engine_step_traffic(self, accumulation: int) -> int:
        """Replicated: one all-reduce of gradients. ZeRO-1, 2: a reduction (2: of every micro-batch) and a gather.
        ZeRO-3, FSDP: two gathers and a reduce-scatter of every micro-batch."""
        n, a = self.numel, accumulation
        passes = {"ddp": 2, "zero0": 2, "zero1": 2, "zero2": a + 1, "zero3": 3 * a, "fsdp": 3 * a}[self.engine]
        return round(passes * self._wire * n * self._f)

    @property
    def _wire(self) -> int:
        """Bytes of a weight or gradient on its way."""
        return self.low if self.engine == "fsdp" else self.kept

    def step_traffic(self) -> int:
        """An all-reduce of k + 1 float64 (rule ``fosi``: two). Replicated weights: a gather, for each rank steps on its
        slice. SOAP: gradients to the owners, updates back."""
        scalars = 2 * DOUBLE * (self.k + 1) * (2 if self.config.rule == "fosi" else 1) if self.k else 0
        soap = 2 * FLOAT * self.share if self.state else 0
        slices = FLOAT * self.numel if self.replicated and (self.k or self.state) else 0
        return round((scalars + soap + slices) * self._f)

    def refresh_traffic(self, batches: int) -> int:
        """Per gradient: the weights are published (a gather, but for ZeRO-3 and FSDP), the engine's own traffic, SOAP's
        two ways; an exact product gathers the direction instead. Per Lanczos step two all-reduces of j scalars."""
        n = self.numel
        own = (
            2 * FLOAT if self.replicated else self._wire if self.engine in ("zero1", "zero2") else 3 * self._wire
        ) * n
        soap = 2 * FLOAT * self.share if self.state else 0
        if self.config.curvature.hvp == "exact":
            products = self.hvps * (FLOAT * n + 2 * FLOAT * n + soap)
        else:
            published = self.kept * n if self.engine not in ("zero3", "fsdp") else 0
            products = self.evaluations * (published + batches * own + soap)
        return round((products + 2 * DOUBLE * self.hvps * (self.hvps + 3)) * self._f)
