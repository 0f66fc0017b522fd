"""Sharding: who owns which elements, sums over shards, and moving vectors between layouts."""

from .layout import Layout, Segment, check_cover, concatenate, flat_slices, parameter_chunks, replicated
from .redistribute import Transfer, apply_plan, plan, redistribute
from .reduce import Reducer

__all__ = [
    "Layout",
    "Reducer",
    "Segment",
    "Transfer",
    "apply_plan",
    "check_cover",
    "concatenate",
    "flat_slices",
    "parameter_chunks",
    "plan",
    "redistribute",
    "replicated",
]
