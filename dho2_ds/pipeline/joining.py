"""How curvature ranks find the training ranks and open a session with all of them, together."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dho2_ds.hosts.base import Host
from dho2_ds.monitor import logger
from dho2_ds.pipeline import meeting
from dho2_ds.pipeline.door import Refused, knock
from dho2_ds.pipeline.plan import layout_from_json, routes
from dho2_ds.pipeline.session import WEIGHTS
from dho2_ds.pipeline.wire import Intervals, Link
from dho2_ds.sharding.layout import Layout

_POLL = 1.0  # seconds between two looks at whether the training job is there
_REFUSING, _SILENT = 5.0, 60.0
"""Seconds after which a door where nobody listens, or that does not answer, means that training is gone."""


@dataclass(frozen=True)
class Joined:
    """A session, as a curvature rank sees it; lists are by training rank.

    Attributes:
        links: to every training rank.
        receive: by space, the places in this rank's vector of what comes from each training rank.
        send: the elements of this rank's eigenvectors that go to each training rank.
    """

    links: list[Link]
    receive: dict[str, list[Intervals]]
    send: list[Intervals]


class Joiner:
    """Opens sessions, one after another. Collective over the curvature ranks, at construction too.

    Args:
        host: the model on the curvature ranks. spaces: this rank's layouts. fingerprint: of the model.
        rank, size: of this process among the curvature ranks. timeout: ``curvature.timeout``.
    """

    def __init__(
        self, host: Host, spaces: Mapping[str, Layout], fingerprint: str, *, rank: int, size: int, timeout: float
    ) -> None:
        from dho2_ds import __version__

        self._agreement, self._spaces, self._rank, self._size = host.agreement, dict(spaces), rank, size
        self._timeout = timeout
        self._about = {"version": __version__, "fingerprint": fingerprint}
        shards = torch.zeros(size, dtype=torch.float64, device=self._agreement.device)
        shards[rank] = host.reducer.rank
        # Of all curvature ranks, replicas included.
        self._layouts = [host.layouts[int(shard)] for shard in self._agreement.sum_(shards).tolist()]
        self._before = False
        self._silent_since, self._problem = 0.0, ""

    def join(self) -> Joined | None:
        """Wait for a session with all training ranks; None when training is gone.

        Raises:
            Refused: the training job does not admit this one. RuntimeError: it was never found.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            found = meeting.broadcast(self._look() if self._rank == 0 else {}, self._agreement.device)
            if found.get("gone"):
                if not self._before and meeting.joined_from_outside():
                    raise RuntimeError(f"no training job answers at {meeting.address_to_join()}; check the address")
                return None
            if "refused" in found:
                raise Refused(str(found["refused"]))
            if "doors" in found:
                joined = self._connect(found["doors"], int(found["session"]))
                if joined is not None:
                    self._before = True
                    return joined
            if time.monotonic() > deadline and not self._before and self._rank == 0:
                logger.warning("curvature ranks are still waiting for the training ranks: %s", found.get("wait"))
                deadline = math.inf
            time.sleep(_POLL if "wait" in found else 0.1)

    def _look(self) -> dict[str, Any]:
        """What rank 0 finds at the training side's first door."""
        address = None
        try:
            address = meeting.address_to_join()
            if address is None:
                return {"wait": "they have not opened their doors"}
            link, answer = knock(address, meeting.token(), {**self._about, "asks": True}, 10.0, "training rank 0")
            link.close()
            self._silent_since = 0.0
            return {"doors": answer["doors"], "session": secrets.randbits(52) + 1}
        except Refused as refusal:
            return {"wait" if refusal.retry else "refused": str(refusal)}
        except meeting.TrainingGone:
            return {"gone": True}
        except OSError as error:
            now = time.monotonic()
            self._silent_since = self._silent_since or now
            patience = _REFUSING if isinstance(error, ConnectionRefusedError) else _SILENT
            gone = now > self._silent_since + patience
            if gone and not self._before:
                logger.warning(
                    "training rank 0 has ended, or cannot be reached at %s from here (%s); in the latter case set "
                    "curvature.address, or name the interface in GLOO_SOCKET_IFNAME",
                    address,
                    error,
                )
            return {"gone": True} if gone else {"wait": f"their door does not answer: {error}"}

    def _connect(self, doors: Sequence[str], session: int) -> Joined | None:
        """Links to all training ranks, if every curvature rank gets its own. One all-reduce."""
        links: list[Link] = []
        joined, problem = None, ""
        try:
            forms = []
            for rank, door in enumerate(doors):
                meta = {**self._about, "session": session, "rank": self._rank, "size": self._size}
                link, answer = knock(door, meeting.token(), meta, self._timeout, f"training rank {rank}")
                links.append(link)
                forms.append({space: layout_from_json(form) for space, form in answer["layouts"].items()})
            joined = self._plan(links, forms)
        except (OSError, Refused, ValueError, KeyError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
        if self._agreement.agree(not problem):
            return joined
        for link in links:
            link.close()
        if problem and problem != self._problem:
            logger.info("curvature rank %d could not join: %s", self._rank, problem)
        self._problem = problem
        return None

    def _plan(self, links: list[Link], theirs: list[dict[str, Layout]]) -> Joined:
        """Work out which elements come from and go to which training rank, and tell them."""
        count = len(links)
        ask: dict[str, list[Intervals]] = {}
        receive: dict[str, list[Intervals]] = {}
        for space, layout in self._spaces.items():
            found = routes([one[space] for one in theirs], [layout])
            pairs = [found.get((rank, 0), ([], [])) for rank in range(count)]
            ask[space], receive[space] = [there for there, _ in pairs], [here for _, here in pairs]
        found = routes(self._layouts, [one[WEIGHTS] for one in theirs])
        pairs = [found.get((self._rank, rank), ([], [])) for rank in range(count)]
        for rank, link in enumerate(links):
            wanted = {space: there[rank] for space, there in ask.items()}
            link.send({"plan": {"send": wanted, "receive": pairs[rank][1]}})
        return Joined(links, receive, [here for here, _ in pairs])
