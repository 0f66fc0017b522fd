"""A curvature rank: finds the training job, and computes what it orders until it ends."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from dho2_ds.base import BaseOptimizer
from dho2_ds.config import DHO2Config
from dho2_ds.curvature.eigenbasis import Eigenbasis
from dho2_ds.curvature.hvp import FiniteDifference
from dho2_ds.curvature.refresh import Order, refresh
from dho2_ds.hosts.base import Host, Loss
from dho2_ds.monitor import chosen_route, logger
from dho2_ds.pipeline import meeting, worlds
from dho2_ds.pipeline.batches import decode, receive_tensors
from dho2_ds.pipeline.door import Refused
from dho2_ds.pipeline.joining import Joined, Joiner
from dho2_ds.pipeline.payload import spaces, unpack_root
from dho2_ds.pipeline.plan import fingerprint
from dho2_ds.pipeline.supervisor import REFUSED
from dho2_ds.pipeline.wire import Link, LinkError, dtype_name, dtype_named, readable

_POLL = 1.0  # seconds between two looks at whether a job is still wanted

T = TypeVar("T")

Batches = Callable[[list[Any] | None], Sequence[Loss]]
"""This rank's curvature losses of one job, from the training ranks' batches or (None) from data of its own."""


class Abandoned(RuntimeError):
    """Nobody waits for the job any more."""


class Worker:
    """Serves one training job.

    Args:
        config: the optimizer's settings. host, base: the model, sharded over the curvature ranks.
        batches: see :data:`Batches`. own_data: whether it gives losses without the training ranks' batches.
    """

    def __init__(
        self, config: DHO2Config, host: Host, base: BaseOptimizer, batches: Batches, *, own_data: bool
    ) -> None:
        self._config, self._host, self._base, self._batches, self._own_data = config, host, base, batches, own_data
        self._rank, self._size = meeting.place()
        self._spaces = spaces(host, base)
        self._joiner = Joiner(
            host, self._spaces, fingerprint(config, host), rank=self._rank, size=self._size,
            timeout=config.curvature.timeout,
        )  # fmt: skip
        self._session = Joined([], {}, [])
        self._old: Eigenbasis | None = None
        self._working = threading.Event()
        threading.Thread(target=self._watch, name="dho2 watch", daemon=True).start()

    def run(self) -> None:
        """Serve until training has ended; join again when a session is lost.

        Raises:
            Refused: the training job does not admit this rank. RuntimeError: it was never found.
        """
        while (joined := self._joiner.join()) is not None:
            self._session = joined
            try:
                while True:
                    self._job()
            except Abandoned as reason:
                logger.info("curvature rank %d: the session has ended: %s", self._rank, reason)
            finally:
                self._leave_session()

    def _watch(self) -> None:
        """End the process when a job that training has given up hangs in the user's code for ``curvature.timeout``."""
        unwanted = 0.0
        while True:
            time.sleep(_POLL)
            try:
                given_up = self._working.is_set() and bool(readable(self._session.links, 0))
            except LinkError:
                given_up = self._working.is_set()
            unwanted = unwanted + _POLL if given_up else 0.0
            if unwanted > self._config.curvature.timeout:
                logger.error("curvature rank %d: the loss does not return; this process ends", self._rank)
                worlds.leave(1)

    def _leave_session(self) -> None:
        """Close the links, so that the training side ends the other curvature ranks' too; listen for a last word."""
        for link in self._session.links:
            try:
                link.set_timeout(1.0)
                while readable([link], 0):
                    if link.receive().get("closed") == "training ended":
                        meeting.training_has_ended()
            except (LinkError, OSError):
                pass  # no last word from this one
            link.close()
        self._session = Joined([], {}, [])

    def _together(self, call: Callable[[], T]) -> T:
        """Do something with the links on every curvature rank; if it fails on one, all leave the session. One
        all-reduce, which every rank comes to: one that fails closes its links, and so the waiting of the others ends.

        Raises:
            Abandoned: on every rank.
        """
        result: T | None = None
        problem = ""
        try:
            result = call()
        except (LinkError, OSError) as error:
            problem = str(error)
            self._leave_session()
        if not self._host.agreement.agree(not problem):
            raise Abandoned(problem or "another curvature rank's link failed")
        return cast(T, result)

    # -- one job --------------------------------------------------------------------------------------------------

    def _job(self) -> None:
        orders, batches, received = self._together(self._receive_job)
        order = orders[0]
        autocast = [(str(device), dtype_named(dtype)) for device, dtype in order["autocast"]]
        asked = Order(**{**order["order"], "dtype": dtype_named(order["order"]["dtype"]), "device": self._base.device})
        root = unpack_root(self._base, [*self._groups(order["groups"])], received)
        self._host.put_weights(received.pop("weights"))
        if not self._host.module.training:
            self._host.module.train()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for device, dtype in autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            route = chosen_route(self._config.curvature)[0]
            operator = FiniteDifference.for_dtype(self._host.compute_dtype, route)
            operator.resume(None if order["saved"] is None else tuple(order["saved"]))
            if order["loss_scale"] is not None:
                self._host.loss_scale = order["loss_scale"]
            if self._old is not None and self._old.born != order["in_use"]:
                self._old = None  # training has rejected it, or goes on from a checkpoint
            losses = self._losses([] if self._own_data else batches)
            stack.callback(self._working.clear)
            self._working.set()
            found, report = refresh(
                self._host,
                losses,
                root,
                asked,
                operator,
                hint=received["hint"],
                old=self._old,
                route=route,
                between=self._still_wanted,
            )
        kept: Tensor | None = None
        if found is not None:
            dtype = torch.float64 if asked.dtype == torch.float64 else getattr(torch, self._eigenvector_dtype)
            kept = found.vectors.to(dtype, copy=True)
            self._old = Eigenbasis(kept, found.eigenvalues, found.next_eigenvalue, found.born)
            kept = kept.cpu()
        message = {
            "result": order["job"],
            "kept": 0 if kept is None else kept.shape[0],
            "dtype": None if kept is None else dtype_name(kept.dtype),
            "born": asked.born,
            "saved": (operator.tau, operator.gradient_norm, operator.growth),
            "report": asdict(report),
        }

        def send() -> None:
            for link, intervals in zip(self._session.links, self._session.send, strict=True):
                link.send(message)
                if kept is not None:
                    link.send_parts(kept, intervals)

        self._together(send)

    @property
    def _eigenvector_dtype(self) -> str:
        return self._config.curvature.eigenvector_dtype

    def _groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{**group, **({"betas": tuple(group["betas"])} if "betas" in group else {})} for group in groups]

    def _receive_job(self) -> tuple[list[dict[str, Any]], list[Any], dict[str, Tensor]]:
        """The next order: one message from every training rank, and this rank's share of the vectors."""
        links = self._session.links
        waiting = list(links)
        orders: dict[int, dict[str, Any]] = {}
        batches: dict[int, Any] = {}
        received: dict[str, Tensor] = {}
        while waiting:
            for link in readable(waiting, None):
                waiting.remove(link)
                rank = links.index(link)
                orders[rank], batches[rank] = self._hear(link, rank, received)
        if len({order["job"] for order in orders.values()}) != 1:
            raise LinkError("the training ranks ordered different jobs")
        ordered = [orders[rank] for rank in range(len(links))]
        device = self._base.device
        return ordered, [batches[rank] for rank in range(len(links))], {
            name: part.to(device) for name, part in received.items()
        }  # fmt: skip

    def _hear(self, link: Link, rank: int, received: dict[str, Tensor]) -> tuple[dict[str, Any], Any]:
        message = link.receive()
        if "closed" in message:
            if message["closed"] == "training ended":
                meeting.training_has_ended()
            raise LinkError(str(message["closed"]))
        if "job" not in message:
            raise LinkError(f"{link.peer}: an unexpected message with {sorted(message)}")
        for name, space, dtype in message["parts"]:
            layout = self._spaces[space]
            if name not in received:
                received[name] = torch.zeros(layout.numel, dtype=dtype_named(dtype))
            link.receive_parts(received[name], self._session.receive[space][rank])
        batch = message["batch"]
        if (batch is None) != self._own_data:
            raise Refused("data: must be given to attach on the training ranks and on the curvature ranks alike")
        if batch is None:
            return message, None
        tensors = receive_tensors(link, batch["tensors"])
        return message, [decode(form, tensors, self._device) for form in batch["forms"]]

    @property
    def _device(self) -> torch.device:
        """Where the model computes: with CPU offload not where its shards are."""
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator if accelerator is not None else torch.device("cpu")

    def _losses(self, batches: list[Any]) -> list[Loss]:
        """This rank's losses, weighted: their mean over the curvature ranks is the mean over the training ranks.

        As many on every rank, some with weight 0 where they do not divide: engines communicate in every evaluation.
        One all-reduce.
        """
        training = len(batches)
        found: list[tuple[Loss, float]] = []

        def add(losses: Sequence[Loss], share: float) -> None:
            found.extend((loss, share / len(losses)) for loss in losses)

        def collect() -> None:
            if self._own_data:
                add(self._batches(None), 1.0 / self._size)
            for rank, own in enumerate(batches):
                copies = 1 if self._size <= training else len(range(rank, self._size, training))
                add(self._batches(own) if own else [], 1.0 / (training * copies))

        agreement = self._host.agreement
        agreement.together(collect, "no curvature batch on another rank; see that rank's error")
        counts = torch.zeros(self._size, dtype=torch.float64, device=agreement.device)
        counts[self._rank] = len(found)
        most = int(agreement.sum_(counts).max())
        found += [(found[0][0], 0.0)] * (most - len(found))
        return [_times(loss, weight * most * self._size) for loss, weight in found]

    def _still_wanted(self) -> None:
        """Between two products: go on only if all training ranks still wait. One all-reduce."""
        # A training rank says nothing during a job, except that it gives up.
        try:
            wanted = not readable(self._session.links, 0)
        except LinkError:
            wanted = False
        if not self._host.agreement.agree(wanted):
            raise Abandoned("the training ranks do not wait for this refresh any more")


def _times(loss: Loss, weight: float) -> Loss:
    return loss if math.isclose(weight, 1.0, rel_tol=1e-12) else (lambda model: loss(model) * weight)


def serve(worker: Worker) -> None:
    """Run a worker and end the process: with 0 when training has ended, however it did, else with another code."""
    code = 0
    try:
        worker.run()
    except Refused as refusal:
        code = REFUSED
        logger.error("this curvature rank was refused: %s", refusal)
    except Exception as error:
        code = 1
        logger.error(
            "curvature rank: %s: %s", type(error).__name__, error, exc_info=not isinstance(error, RuntimeError)
        )
    worlds.leave(code)
