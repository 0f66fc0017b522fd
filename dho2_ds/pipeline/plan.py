"""What goes over which link: both sides' layouts, intersected."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from dho2_ds.config import DHO2Config
from dho2_ds.hosts.base import Host
from dho2_ds.monitor import chosen_route
from dho2_ds.pipeline.wire import Intervals, LinkError
from dho2_ds.sharding.layout import Layout, Segment
from dho2_ds.sharding.redistribute import plan_cached


def fingerprint(config: DHO2Config, host: Host) -> str:
    """Equal on two ranks that can work on the same eigenbasis: parameters, rule, base and kind of product. Readable, so
    that a refusal can show what differs; not a secret."""
    said: list[Any] = [sorted(host.sizes.items())]
    if config.base == "soap":
        said.append(config.soap.model_dump())
    route = chosen_route(config.curvature)[0]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    tensors = f"{len(host.sizes)} tensors of {host.numel} parameters ({digest[:16]})"
    return f"{tensors}, {config.rule} on {config.base}, products by {route}"


def layout_to_json(layout: Layout) -> dict[str, Any]:
    """A layout as JSON; see :func:`layout_from_json`."""
    return {"numel": layout.numel, "segments": [[s.name, s.start, s.length, s.offset] for s in layout.segments]}


def layout_from_json(form: Any) -> Layout:
    """The reverse of :func:`layout_to_json`.

    Raises:
        LinkError: it is not one.
    """
    try:
        segments = tuple(Segment(str(n), int(s), int(c), int(o)) for n, s, c, o in form["segments"])
        return Layout(segments, int(form["numel"]))
    except (KeyError, TypeError, ValueError) as error:
        raise LinkError(f"a malformed layout: {error}") from error


Routes = dict[tuple[int, int], tuple[Intervals, Intervals]]
"""{(source rank, target rank): (intervals in the source's buffer, the same elements in the target's)}"""


def routes(source: Sequence[Layout], target: Sequence[Layout]) -> Routes:
    """How a vector moves between two worlds. Elements that several source ranks hold come from the lowest.

    Args:
        source, target: one layout per rank of each world; target ranks may be replicas of each other.

    Raises:
        ValueError: a target element is held by no source.
    """
    # Rank 0 of one world is not rank 0 of the other: the target's ranks are numbered after the source's.
    apart = [Layout((), 0)] * len(source)
    found: Routes = {}
    for item in plan_cached(tuple(source), (*apart, *target)):
        there, here = found.setdefault((item.source, item.target - len(source)), ([], []))
        there.append((item.source_offset, item.length))
        here.append((item.target_offset, item.length))
    return found


def intervals_from_json(form: Any, numel: int) -> Intervals:
    """Check intervals that came over a link: inside a local vector of ``numel``, and not overlapping.

    Raises:
        LinkError: they are not.
    """
    try:
        found = [(int(start), int(length)) for start, length in form]
    except (TypeError, ValueError) as error:
        raise LinkError(f"malformed intervals: {error}") from error
    end = 0
    for start, length in sorted(found):
        if length < 1 or start < end or start + length > numel:
            raise LinkError(f"interval [{start}, {start + length}): must be inside [0, {numel}) and overlap no other")
        end = start + length
    return found


def covers(parts: Sequence[Intervals], layout: Layout) -> bool:
    """True if intervals, together, hold every element of a layout once and nothing else."""
    wanted = sorted((s.offset, s.length) for s in layout.segments)
    return _joined([i for part in parts for i in part]) == _joined(wanted)


def _joined(intervals: Intervals) -> Intervals:
    joined: Intervals = []
    for start, length in sorted(intervals):
        if joined and joined[-1][0] + joined[-1][1] == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined
