"""The eigenbasis in use: its storage, the update rule that acts on it, when it is too old, and restoring it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dho2_ds.base import BaseOptimizer
from dho2_ds.checkpoint import ROW, Record
from dho2_ds.config import DHO2Config
from dho2_ds.curvature.eigenbasis import Eigenbasis
from dho2_ds.hosts.base import Host
from dho2_ds.learning_rate import next_scale, stability_limit
from dho2_ds.monitor import is_main, logger
from dho2_ds.rules import FosiVelocity
from dho2_ds.update import AdaptiveUpdate, FosiUpdate


class Eigenspace:
    """k rows of n/P per rank, allocated once; a new basis is copied into them.

    Args:
        config: the optimizer's settings.

    Attributes:
        basis: the basis in use, a view of ``storage``; None before the first accepted refresh.
        reference_lr: the largest lr that steps have had so far. interval: steps between refreshes.
        storage: (k, n_local) local rows in ``curvature.eigenvector_dtype``, zero where nothing was found.
        update: the rule, with what it keeps from step to step.
    """

    def __init__(self, config: DHO2Config) -> None:
        self._config = config
        self.basis: Eigenbasis | None = None
        self.storage: Tensor | None = None
        self.update: AdaptiveUpdate | FosiUpdate = self._new_update()
        self._expired = False
        self._unverified = False
        self._auto = 0.0  # the scale of "lr": "auto", 0 before the first refresh
        self.reference_lr = 0.0
        self.interval = config.curvature.interval

    def _new_update(self) -> AdaptiveUpdate | FosiUpdate:
        config = self._config
        return AdaptiveUpdate() if config.rule == "adaptive" else FosiUpdate(ema=config.base != "sgd")

    @property
    def bytes(self) -> int:
        return 0 if self.storage is None else self.storage.numel() * self.storage.element_size()

    @property
    def lr_scale(self) -> float:
        """s of the basis; 1 without one. With ``"lr": "auto"`` that of the last refresh, whatever became of it."""
        config = self._config
        if config.lr == "auto":
            return self._auto or 1.0
        return 1.0 if self.basis is None else self.basis.lr_scale(config.rule, config.base, config.max_lr_scale)

    def scale(self, step: int) -> float:
        """s at ``step``: as far as the basis is trusted, from there on it nears 1.

        With ``"auto"`` an s below 1 stays, whatever the trust: 1 would be a larger lr than curvature allows.
        """
        if self._config.lr == "auto" and (self.lr_scale < 1.0 or self.basis is None):
            return min(self.lr_scale, 1.0)
        if self._config.lr != "auto" and self._too_old(step):
            return 1.0
        return 1.0 + self.trust(step) * (self.lr_scale - 1.0)

    def age(self, step: int) -> int | None:
        """Steps since the basis was computed, None without one."""
        return step - self.basis.born if self.basis is not None else None

    def trust(self, step: int) -> float:
        """How far a basis of this age is believed: by it the Newton step and the growth of lr are multiplied.

        1 up to twice the refresh interval (a basis is used for one interval, and computing the next may take another),
        then 2 interval / age: it falls when refreshes fail or the curvature ranks cannot keep up.
        """
        age = self.age(step)
        return min(1.0, 2 * self.interval / age) if age else 1.0

    def _too_old(self, step: int) -> bool:
        limit, age = self._config.curvature.max_age, self.age(step)
        return age is not None and limit is not None and age >= limit

    def active(self, step: int) -> Eigenbasis | None:
        """The basis to use at ``step``, or None before the first and after ``max_age``."""
        if not self._too_old(step):
            self._expired = False
            return self.basis
        if not self._expired and is_main():
            logger.warning(
                "step %d: the eigenbasis is older than curvature.max_age=%d steps; the base optimizer goes on alone "
                "until the next accepted refresh",
                step,
                self._config.curvature.max_age,
            )
        self._expired = True
        return None

    def install(self, host: Host, found: Eigenbasis, groups: Sequence[Mapping[str, Any]]) -> None:
        """Copy a new basis into the persistent rows; carry the rule's velocity over into it, and let ``"lr": "auto"``
        follow it."""
        self.update.rebase(host, self.basis, found)
        storage = self.allocate(host, found.vectors.dtype, found.vectors.device, found.k)
        storage[: found.k].copy_(found.vectors)
        self.basis = Eigenbasis(storage[: found.k], found.eigenvalues, found.next_eigenvalue, found.born)
        self._unverified = False
        if self._config.lr == "auto":
            limit = stability_limit(self._config.base, groups)
            self._auto = next_scale(self._auto, found, limit, self.reference_lr, self._config.lr_fraction)

    def allocate(self, host: Host, dtype: torch.dtype, device: torch.device, rows: int = 0) -> Tensor:
        """The storage for bases found in ``dtype``, made of zeros if there is none that fits."""
        shape = (max(self._config.num_eigenvectors, rows), host.layout.numel)
        if self.storage is None or self.storage.shape != shape:
            self.storage = torch.zeros(shape, dtype=self.dtype(dtype), device=device)
        return self.storage

    def dtype(self, found: torch.dtype) -> torch.dtype:
        """In which a basis computed in ``found`` is kept."""
        kept: torch.dtype = getattr(torch, self._config.curvature.eigenvector_dtype)
        return torch.float64 if found == torch.float64 and kept == torch.float32 else kept

    # -- checkpoints --------------------------------------------------------------------------------------------

    def resume(self, record: Record | None) -> None:
        """Go on from a record, or from nothing; the basis comes later, by :meth:`restore`."""
        self.drop()
        self._auto = record.auto_scale if record is not None else 0.0
        if record is not None:
            self.reference_lr = record.reference_lr or self.reference_lr

    def drop(self) -> None:
        """Forget the basis and what the rule kept for it."""
        self.basis, self.update, self._unverified = None, self._new_update(), False

    def describe(self, record: Record) -> None:
        """Fill in the basis' part of a record."""
        record.reference_lr, record.auto_scale = self.reference_lr, self._auto
        if self.basis is None:
            return
        record.kept, record.born = self.basis.k, self.basis.born
        record.next_eigenvalue = self.basis.next_eigenvalue
        record.eigenvalues = self.basis.eigenvalues.tolist()
        if isinstance(self.update, FosiUpdate) and self.update.velocity is not None:
            record.moving, record.velocity = 1, self.update.velocity.coefficients.tolist()

    def entries(self, host: Host, base: BaseOptimizer) -> list[tuple[Tensor, str, Tensor]]:
        """All k rows as state entries (key, name, tensor), zero where there is no basis; see :meth:`Host.expose`."""
        storage = self.allocate(host, base.dtype, base.device)
        kept = self.basis.k if self.basis is not None else 0
        storage[kept:].zero_()
        found = []
        for i in range(self._config.num_eigenvectors):
            parts = [storage[i, shard.offset : shard.offset + shard.numel] for shard in host.shards]
            found += [(key, f"{ROW}{i}", value) for key, value in host.expose(parts)]
        return found

    def restore(self, host: Host, base: BaseOptimizer, record: Record, rows: Mapping[int, Mapping[int, Tensor]]) -> str:
        """Take a basis out of a checkpoint. Not a collective; :meth:`verify` settles it with the other ranks.

        Args:
            record: what the checkpoint says of it. A checkpoint with more eigenvectors than ``num_eigenvectors`` gives
                its leading ones.
            rows: {shard index: {row: (any shape of the shard) local tensor}}.

        Returns:
            What is wrong with it, empty if nothing.
        """
        self.drop()
        wanted = min(int(record.kept), self._config.num_eigenvectors)
        if not wanted:
            return ""
        self._unverified = True  # on every rank, whatever this rank has found
        ours = Record.of(self._config.rule, self._config.base)
        if (record.rule, record.base) != (ours.rule, ours.base):
            return "it was computed for another rule or base"
        storage = self.allocate(host, base.dtype, base.device)
        for index, shard in enumerate(host.shards):
            for i in range(wanted):
                row = rows.get(index, {}).get(i)
                if row is None or row.numel() != shard.numel:
                    return f"eigenvector {i} of shard {index} is missing or has another shape"
                storage[i, shard.offset : shard.offset + shard.numel].copy_(row.reshape(-1))
        outside = [record.next_eigenvalue, *(abs(v) for v in record.eigenvalues[wanted:])]
        values = torch.tensor(record.eigenvalues[:wanted], dtype=torch.float64)
        self.basis = Eigenbasis(storage[:wanted], values, max(outside), int(record.born))
        if isinstance(self.update, FosiUpdate) and record.moving:
            self.update.velocity = FosiVelocity(wanted, storage.device)
            self.update.velocity.coefficients.copy_(torch.tensor(record.velocity[:wanted], dtype=torch.float64))
        return ""

    def verify(self, host: Host) -> None:
        """Before a restored basis is used for the first time: all ranks have it whole, or none uses it.

        One all-reduce, only after a checkpoint with a basis was loaded.
        """
        if not self._unverified:
            return
        self._unverified = False
        values = self.basis.eigenvalues if self.basis is not None else torch.zeros(self._config.num_eigenvectors)
        whole = self.basis is not None and bool(torch.isfinite(self.basis.vectors).all())
        filled = torch.zeros(self._config.num_eigenvectors, dtype=torch.float64)
        filled[: len(values)] = values
        if not host.agreement.agree(whole, filled.to(host.agreement.device)):
            self.drop()
            if is_main():
                logger.warning(
                    "the checkpoint's eigenbasis is incomplete or not the same on all ranks: it is not used; the base "
                    "optimizer goes on alone until the next refresh"
                )
