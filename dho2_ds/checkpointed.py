"""The part of the optimizer that state dicts and checkpoints see: making state, showing it whole, taking it back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dho2_ds.base import STEP, BaseOptimizer, init_state
from dho2_ds.checkpoint import (
    COUNTERS,
    GROUPS,
    ROW,
    SOAP_SUM,
    Record,
    adam_placeholder,
    check_groups,
    normalise,
    reserve_rows,
    state_names,
    strip,
    take_rows,
    torch_group_keys,
)
from dho2_ds.config import DHO2Config
from dho2_ds.eigenspace import Eigenspace
from dho2_ds.hosts.base import Host
from dho2_ds.monitor import logger
from dho2_ds.refresher import Refresher
from dho2_ds.shards import iter_params, local_part
from dho2_ds.soap_base import SoapOptimizer


class CheckpointedOptimizer(torch.optim.Optimizer):
    """Base class of :class:`dho2_ds.DHO2`, which sets these attributes.

    Attributes:
        config: the settings. _host, _base: the engine and the base optimizer on its shards, None before they are known.
        _base_state: {shard tensor: base state}; the dictionaries are those in ``self.state``.
        _relink: state or shards were replaced: link them before the next use. _stateful: there is state to save.
        _loaded: the record and the eigenvectors of a checkpoint that wait for a host.
        _soap_sum: [sum over the state of the base ``soap``] when it was last saved or loaded in files of its own.
    """

    config: DHO2Config
    _host: Host | None
    _base: BaseOptimizer | None
    _base_state: dict[Any, Any]
    _space: Eigenspace
    _refresher: Refresher
    _groups: list[dict[str, Any]]
    _step: int
    _momentum: bool
    _relink: bool
    _stateful: bool
    _loaded: tuple[Record, dict[int, dict[int, Tensor]]] | None
    _consolidated: dict[str, Any] | None
    _captured: Tensor | None
    _soap_sum: list[float]

    @property
    def uses_host(self) -> bool:
        """False when torch's base optimizer does all there is to do, without knowing the model."""
        return self.config.num_eigenvectors > 0 or self.config.base == "soap"

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict of the base optimizer, plus the eigenbasis (see :mod:`dho2_ds.checkpoint`).

        Every entry is shaped like its parameter, so torch.save, FSDP's and torch.distributed.checkpoint's functions
        work as on torch's optimizers. Under ``DistributedDataParallel`` each rank owns a slice of the state: there
        this is a **collective** that gives every rank all of it ((k + 2) n numbers), so call it on every rank and save
        on one. With base ``soap`` it is a collective on every engine: one all-to-all of the state, which a rank then
        holds once more, 1/P of it on each of P ranks except under DDP. Under DeepSpeed use ``engine.save_checkpoint``,
        which keeps the eigenbasis in files beside.

        Returns:
            ``state`` by the parameters' positions and ``param_groups``, of which the first says of curvature what
            :meth:`record` does.

        Raises:
            RuntimeError: another rank did not call it within a minute.
        """
        if self._consolidated is not None:
            return self._consolidated
        if self._host is not None and self._stateful:
            self._link_state()
            self._host.meet("DHO2.state_dict()")
        packed: dict[str, Any] = super().state_dict()
        defaults = torch_group_keys(self.config.base, self.param_groups[0])
        packed["param_groups"] = [{**defaults, **group} for group in packed["param_groups"]]
        if not self.uses_host or not self._stateful:
            return packed
        if self._host is None or self._host.gathers or not self._host.state_outside:
            packed["state"] = self._visible_state()
        first = packed["param_groups"][0]
        place = next((local_part(p).device for p in iter_params(self.param_groups)), torch.device("cpu"))
        # torch wants all tensors of a full state dict on one device
        first.update({key: value.to(place) for key, value in self.record().items()})
        if self._host is not None and self._host.state_outside:
            # DeepSpeed's universal loader for ZeRO-3 gives every group the first one's hyper-parameters.
            first[GROUPS] = [{key: group[key] for key in self.defaults} for group in self.param_groups]
            if isinstance(self._base, SoapOptimizer):
                first[SOAP_SUM] = torch.tensor(self._soap_sum, dtype=torch.float64)
                params = enumerate(iter_params(self.param_groups))
                packed["state"] = {i: adam_placeholder(p.numel(), self._step) for i, p in params}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load base state as torch does, and the eigenbasis if there is one and it fits.

        A checkpoint of torch's AdamW (Adam, SGD: whatever ``base`` is) is continued with curvature from here on.
        Eigenvectors keep the precision they were saved in.

        Args:
            state_dict: what :meth:`state_dict` or torch's optimizer returned, on any engine and world size; entries
                whole or as the engine shards them.

        Raises:
            ConfigError: the checkpoint's optimizer is not like the base.
        """
        check_groups(state_dict["param_groups"], self.config.base, set(self.defaults) - {"nesterov"})
        super().load_state_dict(state_dict)
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [(p, group) for group in self.param_groups for p in group["params"]]
        rows: dict[int, dict[int, Tensor]] = {}
        for saved_id, (p, group) in zip(saved_ids, params, strict=True):
            if p in self.state:
                normalise(self.state[p], state_dict["state"].get(saved_id, {}), group)
                rows[id(p)] = take_rows(self.state[p])
        self.adopt(rows)

    # -- checkpoints --------------------------------------------------------------------------------------------

    def adopt(self, rows: dict[int, dict[int, Tensor]] | None = None) -> None:
        """Take over param groups and state that were just replaced from outside (a checkpoint was loaded).

        Args:
            rows: {id of a parameter: {row: eigenvector, shaped like the parameter's state}}; None: those in the state.
        """
        if rows is None:
            rows = {id(p): take_rows(mine) for p, mine in self.state.items()}
        had_curvature = COUNTERS in self.param_groups[0] or any(rows.values())
        record = Record.take(self.param_groups[0])
        hyper = self.param_groups[0].pop(GROUPS, None) or []
        self._soap_sum = self.param_groups[0].pop(SOAP_SUM, torch.empty(0)).tolist()
        for group, saved in zip(self.param_groups, hyper, strict=False):
            group.update(saved)
        for group in self.param_groups:
            strip(group, keep=set(self.defaults))
        self._groups = self.param_groups
        if not self.uses_host:
            return
        self._reserve_record()
        for mine in self.state.values():
            if isinstance(mine.get(STEP), Tensor):  # DeepSpeed's universal loader shares one between all sub-groups
                mine[STEP] = mine[STEP].clone()
        self._stateful = any(len(s) for s in self.state.values())
        self._relink = True
        self._space.resume(record)
        if record is None:  # the base optimizer's checkpoint, with its learning rates
            peaks = (float(group.get("initial_lr", group["lr"])) for group in self.param_groups)
            self._space.reference_lr = max(peaks)
        self._refresher.resume(record)
        self._step, self._loaded, self._captured = 0, None, None
        if record is not None:
            self._step = int(record.step)
            self._loaded = (record, rows)
        elif had_curvature:
            logger.warning(
                "the checkpoint's curvature entries (dho2_*) are missing or damaged: the base optimizer goes on alone "
                "until the next refresh, and the refresh schedule starts anew"
            )
        if self._base is not None:
            self._base.forget_steps()
        if self._host is not None and self._stateful:
            self._link_state()

    def save_eigenbasis(self, write: Callable[..., None]) -> None:
        """Keep this rank's rows of the eigenbasis; nothing to do without one. Collective.

        Args:
            write: called as ``write(rank, layouts, sizes, record, rows)``, rows local: (k, n_local).

        Raises:
            Exception: what ``write`` raised on this rank; RuntimeError if it raised on another.
        """
        host = self._host
        assert host is not None
        self._link_state()
        self._space.verify(host)
        if self._space.basis is not None:
            rows = self._space.basis.vectors
            self._together(lambda: write(host.reducer.rank, host.layouts, host.sizes, self._record(), rows))

    def save_base(self, write: Callable[..., None]) -> None:
        """Keep this rank's state of the base ``soap``; nothing to do for torch's. Collective.

        Args:
            write: as in :meth:`save_eigenbasis`, called with one local row.

        Raises:
            Exception: what ``write`` raised on this rank; RuntimeError if it raised on another.
        """
        base, host = self._base, self._host
        if isinstance(base, SoapOptimizer) and host is not None:
            state = base.pack()[None]
            self._soap_sum = host.reducer.sum_(state.double().sum().view(1)).tolist()
            record = self._soap_record()
            self._together(lambda: write(host.reducer.rank, base.state_layouts, base.state_sizes, record, state))

    def load_base(self, read: Callable[..., Tensor]) -> None:
        """Take the state of the base ``soap`` of the checkpoint just loaded. Collective.

        Args:
            read: called as ``read(layout, sizes, record)``; returns one local row, (1, n_state).

        Raises:
            ValueError: it is missing, damaged or of other blocks (RuntimeError on the other ranks): training on
                without it would be another run.
        """
        base, host = self._base, self._host
        if isinstance(base, SoapOptimizer) and host is not None and self._step:
            layout, record = base.state_layouts[host.reducer.rank], self._soap_record()
            self._together(lambda: base.buffer.copy_(read(layout, base.state_sizes, record)[0]))
            base.unpack()

    def _soap_record(self) -> Record:
        """By which the files of a save are told from another run's in the same folder."""
        return Record(kept=1, born=self._step, eigenvalues=self._soap_sum)

    def _together(self, call: Callable[[], object]) -> None:
        """Call, and raise on every rank if one of them raised."""
        assert self._host is not None
        elsewhere = "a checkpoint's part could not be saved or loaded on another rank; see there"
        self._host.agreement.together(call, elsewhere)

    def load_eigenbasis(self, read: Callable[..., Tensor]) -> None:
        """Take the basis of the checkpoint just loaded.

        Args:
            read: called as ``read(layout, sizes, record)``; returns this rank's rows, (k, n_local).

        If it cannot be read the reason is logged and training goes on without it; see :meth:`Eigenspace.verify`.
        """
        host = self._host
        assert host is not None
        self._link_state()
        if self._loaded is None or not self._loaded[0].kept:
            self._loaded = None
            return
        rows: dict[int, dict[int, Tensor]] = {}
        try:
            local = read(host.layout, host.sizes, self._loaded[0])
            rows = {
                i: dict(enumerate(local[:, shard.offset : shard.offset + shard.numel]))
                for i, shard in enumerate(host.shards)
            }
        except Exception as error:  # settled with the other ranks at the first use
            logger.warning("eigenbasis not loaded; training goes on first-order until the next refresh: %s", error)
        self._restore(rows)

    def _restore(self, rows: dict[int, dict[int, Tensor]]) -> None:
        """Install the rows that belong to the record just loaded: {index of a shard: {row: its part}}."""
        assert self._host is not None and self._base is not None and self._loaded is not None
        problem = self._space.restore(self._host, self._base, self._loaded[0], rows)
        self._loaded = None
        if problem and rows:
            logger.warning("the checkpoint's eigenbasis is not used: %s", problem)

    def _reserve_record(self) -> None:
        """Keep the record's keys in the first param group: torch's flattened state dicts load only into those. The
        values there mean nothing; ``state_dict`` puts in the present ones."""
        empty = Record.of(self.config.rule, self.config.base).pack(self.config.num_eigenvectors)
        self.param_groups[0].update(empty)

    def record(self) -> dict[str, Tensor]:
        """What the first param group of a state dict says of curvature; see :class:`dho2_ds.checkpoint.Record`.

        Returns:
            Small CPU tensors by key, the same on every rank, of sizes that depend on ``num_eigenvectors`` only.
        """
        return self._record().pack(self.config.num_eigenvectors)

    def _record(self) -> Record:
        record = Record.of(self.config.rule, self.config.base)
        record.step = self._step
        self._refresher.describe(record, self._step)
        self._space.describe(record)
        if self._loaded is not None:  # a basis that is not yet linked to a host
            for key in ("kept", "born", "next_eigenvalue", "moving", "eigenvalues", "velocity"):
                setattr(record, key, getattr(self._loaded[0], key))
        return record

    def _visible_state(self) -> dict[Any, dict[str, Any]]:
        """{index of a parameter: its state}, every entry whole as the engine's own optimizers have it."""
        host, base, k = self._host, self._base, self.config.num_eigenvectors
        index = {id(p): i for i, p in enumerate(iter_params(self.param_groups))}
        shown: dict[Any, dict[str, Any]] = defaultdict(dict)
        if host is None or base is None:  # no model yet: a fresh optimizer that a checkpoint is to be loaded into
            for p, mine in self.state.items():
                rows = self._loaded[1].get(id(p), {}) if self._loaded is not None else {}
                dtype = self._space.dtype(p.dtype)
                empty = {i: torch.zeros_like(p, dtype=dtype) for i in range(k) if i not in rows}
                shown[index[id(p)]] = {**mine, **{f"{ROW}{i}": v for i, v in {**rows, **empty}.items() if i < k}}
            return dict(shown)
        if isinstance(base, SoapOptimizer):
            for key, name, value in base.entries() if not host.state_outside else ():
                shown[index[id(key)]][name] = value
        else:
            for key, name, value in self._shard_entries(host):
                shown[index[id(key)]][name] = value
        if not host.state_outside:
            for key, name, value in self._space.entries(host, base):
                shown[index[id(key)]][name] = value
        return dict(shown)

    def _shard_entries(self, host: Host) -> Iterator[tuple[Tensor, str, Tensor]]:
        """The base state of torch's optimizers as (key, name, entry); see :meth:`Host.expose`."""
        states = [self._base_state[shard.param] for shard in host.shards]
        for name in state_names(self.config.base, self._momentum):
            for key, value in host.expose([state[name] for state in states]):
                yield key, name, value
        if self.config.base != "sgd":
            for key, value in host.expose_scalars([state[STEP] for state in states]):
                yield key, STEP, value

    def consolidate(self) -> None:
        """Keep a state dict for whoever asks on one rank only, until :meth:`release`. Collective."""
        host = self._host
        if host is not None and (host.gathers or (self.config.base == "soap" and not host.state_outside)):
            self._consolidated = self.state_dict()

    def release(self) -> None:
        """Undo :meth:`consolidate`."""
        self._consolidated = None

    # -- linking state to the engine's shards ----------------------------------------------------------------------

    def _is_initialising_step(self) -> bool:
        """A first step with all-zero gradients that only asks for state to be created; it is, and nothing else happens.

        DeepSpeed's low-precision stage 0 wrapper does this before any model is known, torch.distributed.checkpoint
        before it loads, with lr 0; taking it for a training step would decay weights and shift bias correction.
        """
        if self._step or self._stateful:
            return False
        host = self._host
        if host is not None and (host.state_outside or any(float(g["lr"]) for g in self.param_groups)):
            return False
        params = [p for p in iter_params(self.param_groups) if p.requires_grad]
        grads = [local_part(p.grad) for p in params if p.grad is not None]
        zero = not any(bool(grad.any()) for grad in grads)
        if host is not None:
            if not host.agreement.agree(zero):
                return False
            self._link_state()
        elif not grads or not zero:
            return False
        elif self.config.base != "soap":
            for p in params:
                init_state(self.config.base, p, self.state[p], fused=self.config.fused, momentum=self._momentum)
                reserve_rows(self.state[p], self.config.num_eigenvectors)
        self._stateful = True
        return True

    def _link_state(self) -> None:
        """Let the base optimizer work on the state dictionaries in ``self.state``.

        On replicated hosts a rank owns a slice of a parameter; state loaded for the whole parameter is cut here.
        """
        assert self._host is not None
        if isinstance(self._base, SoapOptimizer):
            self._link_soap(self._base, self._host)
        else:
            self._link_shards(self._host, self._host.keys())
        self._relink, self._stateful = False, True
        if self._loaded is not None and self._base is not None and not self._host.state_outside:
            record, found = self._loaded
            wanted = min(int(record.kept), self.config.num_eigenvectors)
            self._restore(self._host.absorb_rows(found, wanted, self._space.dtype(self._base.dtype)))

    def _link_soap(self, base: SoapOptimizer, host: Host) -> None:
        """The state lives in the base; ``self.state`` holds what was loaded until it is taken over, else only names."""
        if self._relink and host.state_outside:
            self.state.clear()  # placeholders
        elif self._relink:
            found = any(isinstance(value, Tensor) for mine in self.state.values() for value in mine.values())
            if not host.agreement.agree(not found):  # a rank may hold a part of no parameter, or have no parameter
                base.load(self.state)
            self.state.clear()
            self.state.update({p: {} for p in iter_params(self.param_groups)})
            for key, name in base.names():
                self.state[key][name] = None
                reserve_rows(self.state[key], self.config.num_eigenvectors)

    def _link_shards(self, host: Host, keys: list[Tensor]) -> None:
        if self._relink:
            owned = {id(key) for key in keys}
            for key in [key for key in self.state if id(key) not in owned]:
                self.state[key] = {}  # another rank's share; torch takes an optimizer without any key for a fresh one
        for index, (shard, key) in enumerate(zip(host.shards, keys, strict=True)):
            mine = self.state[key]
            if self._relink:
                for name, value in mine.items():
                    if isinstance(value, Tensor) and name != STEP:
                        value = host.absorb(index, value)
                        if value.stride() != shard.param.stride():  # torch's fused kernels go by storage order
                            value = torch.empty_like(shard.param, dtype=value.dtype).copy_(value)
                        mine[name] = value
            if self._relink or not mine:
                fused = self._fused_for(host)
                init_state(self.config.base, shard.param, mine, fused=fused, momentum=self._momentum)
            if not host.state_outside:
                reserve_rows(mine, self.config.num_eigenvectors)
            self._base_state[shard.param] = mine

    def _fused_for(self, host: Host) -> bool:
        if self.config.fused is not None:
            return self.config.fused
        return all(s.param.is_floating_point() and s.param.device.type in ("cpu", "cuda") for s in host.shards)
