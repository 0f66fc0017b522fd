"""The optimizer: torch's base step, the curvature correction, and the bookkeeping between them."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dho2_ds.base import STEP, BaseOptimizer, init_state, torch_optimizer
from dho2_ds.checkpoint import (
    COUNTERS,
    GROUPS,
    ROW,
    Record,
    check_groups,
    normalise,
    reserve_rows,
    state_names,
    strip,
    take_rows,
    torch_group_keys,
)
from dho2_ds.config import ConfigError, check_group_options, parse_config
from dho2_ds.curvature.eigenbasis import Eigenbasis
from dho2_ds.curvature.hvp import FiniteDifference
from dho2_ds.curvature.refresh import Order, Refresh, default_lanczos_steps, refresh
from dho2_ds.curvature.schedule import Schedule
from dho2_ds.discovery import allow_under_deepspeed, watch_for_engine
from dho2_ds.eigenspace import Eigenspace
from dho2_ds.hosts.base import Host, Loss
from dho2_ds.hosts.owner import OwnerHost
from dho2_ds.hosts.replicated import ReplicatedHost
from dho2_ds.monitor import chosen_route, is_main, logger, refresh_line, soap_line, summary_line, write_events
from dho2_ds.sharding.blocks import TOLERANCE
from dho2_ds.shards import iter_params, local_part
from dho2_ds.soap_base import SoapOptimizer
from dho2_ds.update import Rates

_ADAM_KEYS, _SGD_KEYS = ("betas", "eps"), ("momentum", "nesterov")


class DHO2(torch.optim.Optimizer):
    """Hybrid first- and second-order optimizer (DHO2, arXiv 2505.00982; FOSI, arXiv 2302.08484), sharded.

    Keeps the k leading eigenvectors of the (preconditioned) Hessian over all parameters, takes a damped Newton step
    inside their span and lets the base optimizer move the rest with a larger learning rate.

    Args:
        params: parameters or param group dictionaries; groups may override lr, weight_decay, betas, eps, momentum,
            nesterov.
        lr: learning rate of the base optimizer; schedulers act on it as on any torch optimizer.
        **settings: ``betas``, ``eps``, ``weight_decay``, ``momentum``, ``nesterov``, ``base``, ``rule``,
            ``num_eigenvectors``, ``newton_lr``, ``max_lr_scale``, ``fused`` and the dictionary ``curvature``; see
            :class:`dho2_ds.DHO2Config` for each.

    State per rank, all local: the base optimizer's own (2n/P for Adam) and k n/P for the eigenbasis; during a refresh
    ``lanczos_steps + 5`` further vectors of n/P. Cost: the base step, two passes over the eigenbasis and one
    all-reduce of k + 1 scalars (``fosi``: two); a refresh is at most ``lanczos_steps`` Hessian-vector products.

    With ``num_eigenvectors=0`` it is torch's base optimizer, bit for bit. Otherwise :func:`dho2_ds.attach` must name
    the model (under DeepSpeed with a model that returns its loss this happens by itself).

    Raises:
        ConfigError: naming every setting that is wrong, before training starts.
    """

    def __init__(self, params: Any, lr: float = 1e-3, **settings: Any) -> None:
        config = parse_config({"lr": lr, **settings})
        self.config = config
        extra = _SGD_KEYS if config.base == "sgd" else _ADAM_KEYS
        defaults = {key: getattr(config, key) for key in ("lr", "weight_decay", *extra)}
        if isinstance(lr, Tensor):
            defaults["lr"] = lr
        super().__init__(params, defaults)
        for index, group in enumerate(self.param_groups):
            overrides = {k: v for k, v in group.items() if k in defaults and v is not defaults[k]}
            check_group_options(overrides, config.base, config.rule, where=f"param group {index}")
        self._check_params()
        if config.rule == "fosi" and config.base != "sgd" and len({tuple(g["betas"]) for g in self.param_groups}) > 1:
            raise ConfigError("betas: must be equal in all param groups with rule='fosi'; its velocity is shared")

        self._host: Host | None = None
        self._hook: RemovableHandle | None = None
        self._source: Callable[[], Sequence[Loss]] | None = None
        self._rebuild: Callable[[], Host] | None = None
        self._base: BaseOptimizer | None = None
        self._base_state: dict[Any, Any] = defaultdict(dict)
        self._original = [id(p) for p in iter_params(self.param_groups)]
        self._reference_lr = max(float(g["lr"]) for g in self.param_groups)
        self._momentum = config.base == "sgd" and any(g["momentum"] for g in self.param_groups)
        self._plain: torch.optim.Optimizer | None = None
        self._groups: list[dict[str, Any]] = self.param_groups
        self._step = 0
        self._schedule = Schedule(config.curvature.warmup_steps, config.curvature.interval)
        self._relink = True
        self._space = Eigenspace(config)
        self._finite_difference: FiniteDifference | None = None
        self._captured: Tensor | None = None
        self._lr_scale = 1.0
        self._stateful = False
        self._loaded: tuple[Record, dict[int, dict[int, Tensor]]] | None = None
        self._difference_state: tuple[float, float, float] | None = None
        self._consolidated: dict[str, Any] | None = None
        self._totals = {"refreshes": 0, "rejected": 0, "hvps": 0}
        self._last: Refresh | None = None
        self._announced = False
        self.refreshing = False
        """True while a refresh evaluates the model: forwards seen meanwhile are its own."""
        allow_under_deepspeed(type(self))
        if self.uses_host:
            self._reserve_record()
            watch_for_engine(self)

    # -- public -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step. ``closure`` has torch's meaning: called once with gradients enabled, its value returned.

        Under ZeRO the engine calls this once per param group or sub-group; the update happens at the last call.

        Raises:
            RuntimeError: a refresh is due and the optimizer was not attached to a model.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.uses_host:
            self._plain_step()
        elif not self._is_initialising_step():
            self._hybrid_step(self._host or self._bind_default())
        return loss

    def curvature_stats(self) -> dict[str, Any]:
        """What curvature has done so far.

        Returns:
            ``steps``, ``refreshes`` (accepted), ``rejected``, ``hvps`` (all so far), ``eigenvalues`` and
            ``next_eigenvalue`` (of the basis in use), ``residuals`` (of the last refresh, empty if it was rejected),
            ``lr_scale`` (s), ``age`` (steps since the basis was computed, None without one), ``captured_fraction``
            (share of the squared norm of the base optimizer's last direction inside the span), ``bytes_basis``,
            ``bytes_transient`` (this rank's; the latter for the last refresh), ``bytes_base`` (base optimizer's state
            on this rank), ``route``, ``self_check``, ``tau``, ``last_refresh`` (why it was accepted or not). Reading
            it synchronises with the device.
        """
        basis, last = self._space.basis, self._last
        tensors = [v for s in self.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim() > 0]
        return {
            "steps": self._step,
            **self._totals,
            "eigenvalues": basis.eigenvalues.tolist() if basis is not None else [],
            "residuals": last.residuals if last is not None and last.accepted else [],
            "next_eigenvalue": basis.next_eigenvalue if basis is not None else None,
            "lr_scale": self._lr_scale,
            "age": self._space.age(self._step),
            "captured_fraction": float(self._captured) if self._captured is not None else None,
            "bytes_basis": self._space.bytes,
            "bytes_transient": last.transient_bytes if last is not None else 0,
            "bytes_base": sum(t.numel() * t.element_size() for t in tensors) + self._bytes_soap,
            "route": self.route if self._host is not None else None,
            "self_check": last.self_check if last is not None else None,
            "tau": last.tau if last is not None else None,
            "last_refresh": None if last is None else ("accepted" if last.accepted else last.reason),
        }

    def set_eigenbasis(self, eigenvectors: Tensor, eigenvalues: Sequence[float], next_eigenvalue: float = 0.0) -> None:
        """Install a given eigenbasis, as if a refresh had found it.

        Args:
            eigenvectors: (k, n_local) local rows, orthonormal over all ranks.
            eigenvalues: k values, the same on every rank.
            next_eigenvalue: magnitude of the largest eigenvalue outside the basis.
        """
        host = self._host or self._bind_default()
        if eigenvectors.shape != (len(eigenvalues), host.layout.numel):
            raise ValueError(
                f"eigenvectors of shape {tuple(eigenvectors.shape)}: must be ({len(eigenvalues)}, "
                f"{host.layout.numel}); pass this rank's columns"
            )
        values = torch.tensor(list(eigenvalues), dtype=torch.float64)
        self._space.install(host, Eigenbasis(eigenvectors, values, next_eigenvalue, self._step))

    @property
    def route(self) -> str:
        """The way Hessian-vector products are taken: ``finite_difference`` or ``exact``."""
        return chosen_route(self.config.curvature)[0]

    @property
    def uses_host(self) -> bool:
        """False when torch's base optimizer does all there is to do, without knowing the model."""
        return self.config.num_eigenvectors > 0 or self.config.base == "soap"

    @property
    def _bytes_soap(self) -> int:
        return self._base.bytes if isinstance(self._base, SoapOptimizer) else 0

    @property
    def steps(self) -> int:
        """Training steps taken."""
        return self._step

    @property
    def attached(self) -> bool:
        """True once an engine or a model is known."""
        return self._host is not None

    @property
    def refresh_due(self) -> bool:
        """True when the next training forward of the attached model will refresh the curvature first."""
        return self._schedule.due_since is not None

    def state_dict(self) -> dict[str, Any]:
        """torch's state dict of the base optimizer, plus the eigenbasis (see :mod:`dho2_ds.checkpoint`).

        Every entry is shaped like its parameter, so torch.save, FSDP's and torch.distributed.checkpoint's functions
        work as on torch's optimizers. Under ``DistributedDataParallel`` each rank owns a slice of the state: there
        this is a **collective** that gives every rank all of it ((k + 2) n numbers), so call it on every rank and save
        on one. Under DeepSpeed use ``engine.save_checkpoint``, which keeps the eigenbasis in files beside.

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
        first.update(self.record())
        if self._host is not None and self._host.state_outside:
            # DeepSpeed's universal loader for ZeRO-3 gives every group the first one's hyper-parameters.
            first[GROUPS] = [{key: group[key] for key in self.defaults} for group in self.param_groups]
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load base state as torch does, and the eigenbasis if there is one and it fits.

        A checkpoint of torch's AdamW (Adam, SGD: whatever ``base`` is) is continued with curvature from here on. State
        keeps the precision it was saved in.

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
        self._space.drop()
        self._schedule.due_since, self._step, self._finite_difference = None, 0, None
        if record is not None:
            self._step, self._reference_lr = int(record.step), record.reference_lr or self._reference_lr
            self._schedule.due_since = int(record.due_since) if record.due_since >= 0 else None
            self._totals = {key: int(getattr(record, key)) for key in self._totals}
            self._difference_state = (record.tau, record.gradient_norm, record.growth)
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
        """Let ``write(rank, layouts, sizes, record, rows)`` keep this rank's rows; nothing to do without a basis.

        Collective. Raises on every rank if one of them could not write.
        """
        host = self._host
        assert host is not None
        self._link_state()
        self._space.verify(host)
        if self._space.basis is not None:
            rows = self._space.basis.vectors
            self._together(lambda: write(host.reducer.rank, host.layouts, host.sizes, self._record(), rows))

    def save_base(self, write: Callable[..., None]) -> None:
        """Let ``write`` keep this rank's state of the base ``soap``; nothing to do for torch's. Collective."""
        base, host = self._base, self._host
        if isinstance(base, SoapOptimizer) and host is not None:
            record, state = Record(kept=1, born=self._step), base.pack()[None]
            self._together(lambda: write(host.reducer.rank, base.state_layouts, base.state_sizes, record, state))

    def load_base(self, read: Callable[..., Tensor]) -> None:
        """Take the state of the base ``soap`` of the checkpoint just loaded from ``read``. Collective.

        Raises:
            ValueError: it is missing, damaged or of other blocks (RuntimeError on the other ranks): training on
                without it would be another run.
        """
        base, host = self._base, self._host
        if isinstance(base, SoapOptimizer) and host is not None and self._step:
            layout, record = base.state_layouts[host.reducer.rank], Record(kept=1, born=self._step)
            self._together(lambda: base.buffer.copy_(read(layout, base.state_sizes, record)[0]))
            base.unpack()

    def _together(self, call: Callable[[], object]) -> None:
        """Call, and raise on every rank if one of them raised."""
        assert self._host is not None
        error: Exception | None = None
        try:
            call()
        except Exception as caught:  # raised below, on every rank together
            error = caught
        if not self._host.agreement.agree(error is None):
            raise error or RuntimeError("a checkpoint's part could not be saved or loaded on another rank; see there")

    def load_eigenbasis(self, read: Callable[..., Tensor]) -> None:
        """Take the basis of the checkpoint just loaded from ``read(layout, sizes, record)``, this rank's rows.

        If it cannot be read the reason is logged and training goes on without it; see :meth:`Eigenspace.verify`.
        """
        host = self._host
        assert host is not None
        self._link_state()
        if self._loaded is None or not self._loaded[0].kept:
            return
        rows: dict[int, dict[int, Tensor]] = {}
        try:
            local = read(host.layout, host.sizes, self._loaded[0])
            rows = {
                i: dict(enumerate(local[:, shard.offset : shard.offset + shard.numel]))
                for i, shard in enumerate(host.shards)
            }
        except ValueError as error:
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
        """What the first param group of a state dict says of curvature; see :class:`dho2_ds.checkpoint.Record`."""
        return self._record().pack(self.config.num_eigenvectors)

    def _record(self) -> Record:
        due, fd = self._schedule.due_since, self._finite_difference
        record = Record.of(self.config.rule, self.config.base)
        record.step, record.due_since = self._step, -1 if due is None else due
        record.reference_lr = self._reference_lr
        for key, total in self._totals.items():
            setattr(record, key, total)
        if fd is not None:
            record.tau, record.gradient_norm, record.growth = fd.tau, fd.gradient_norm, fd.growth
        elif self._difference_state is not None:
            record.tau, record.gradient_norm, record.growth = self._difference_state
        self._space.describe(record)
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
            states = [self._base_state[shard.param] for shard in host.shards]
            for name in state_names(self.config.base, self._momentum):
                for key, value in host.expose([state[name] for state in states]):
                    shown[index[id(key)]][name] = value
            if self.config.base != "sgd":
                for key, value in host.expose_scalars([state[STEP] for state in states]):
                    shown[index[id(key)]][STEP] = value
        if not host.state_outside:
            for key, name, value in self._space.entries(host, base):
                shown[index[id(key)]][name] = value
        return dict(shown)

    def consolidate(self) -> None:
        """Keep a state dict for whoever asks on one rank only, until :meth:`release`. Collective."""
        if self._host is not None and self._host.gathers:
            self._consolidated = self.state_dict()

    def release(self) -> None:
        """Undo :meth:`consolidate`."""
        self._consolidated = None

    # -- binding ------------------------------------------------------------------------------------------------

    def bind(
        self,
        host: Host,
        source: Callable[[], Sequence[Loss]] | None,
        rebuild: Callable[[], Host] | None = None,
    ) -> None:
        """Connect to an engine and a source of curvature losses (None: not known); :func:`dho2_ds.attach` calls it.

        ``rebuild`` makes the host anew when the parameters in the param groups were replaced (Accelerate does that).

        Raises:
            ConfigError: a setting cannot work on this host.
        """
        if self.config.base == "soap":
            host = self._own(host)
        self._check_k(host.numel)
        if self.route == "exact" and host.exact_refusal is not None:
            raise ConfigError(f"curvature.hvp='exact': must not be used here: {host.exact_refusal}")
        if self._host is not None and self._host.layout != host.layout:
            self._space.drop()
        self._host, self._source, self._rebuild = host, source, rebuild
        fused = self._fused_for(host)
        self._base_state = defaultdict(dict)
        if isinstance(host, OwnerHost):
            self._base = SoapOptimizer(host, self.config.soap, fused=fused, before=self._base)
        else:
            self._base = BaseOptimizer(self.config.base, host.shards, fused=fused, state=self._base_state)
        self._relink = True

    def _own(self, inner: Host) -> Host:
        """The engine's host in the owner layout."""
        soap, kept = self.config.soap, 3  # two moments and the update
        host = OwnerHost(
            inner,
            max_block=soap.max_block,
            max_rotated=soap.max_precondition_dim,
            vectors=kept + self.config.num_eigenvectors,
        )
        if host.balance[0] > TOLERANCE and is_main():
            logger.warning(
                "soap: the fullest rank has %.2f times the mean memory of %d blocks; lower soap.max_block from %d",
                host.balance[0],
                len(host.blocks),
                soap.max_block,
            )
        return host

    def hook(self, handle: RemovableHandle) -> None:
        """Own the forward hook of the attached model; the previous one is removed."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = handle

    def _bind_default(self) -> Host:
        if [id(p) for p in iter_params(self.param_groups)] != self._original:
            raise RuntimeError(
                "the parameters were replaced after the optimizer was built and no engine was found; call "
                "dho2_ds.attach(engine) after deepspeed.initialize(...)"
            )
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise RuntimeError(
                f"{dist.get_world_size()} ranks and no model attached; call "
                "dho2_ds.attach(model, optimizer, loss_fn=..., data=...) before the first step"
            )
        groups = [group["params"] for group in self.param_groups]
        host = ReplicatedHost("one process", nn.Module(), groups, groups, None)
        self.bind(host, source=None)
        assert self._host is not None
        return self._host

    def _fused_for(self, host: Host) -> bool:
        if self.config.fused is not None:
            return self.config.fused
        return all(s.param.is_floating_point() and s.param.device.type in ("cpu", "cuda") for s in host.shards)

    def _check_params(self) -> None:
        trainable = [p for p in iter_params(self.param_groups) if p.requires_grad]
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if not trainable and not several:
            raise ConfigError("params: must hold a parameter with requires_grad=True; unfreeze one")
        for p in trainable:
            if p.is_complex():
                raise ConfigError(f"params: a parameter has dtype {p.dtype}: must be real; use torch.view_as_real")
            if p.is_sparse or p.layout != torch.strided:
                raise ConfigError(f"params: a parameter has layout {p.layout}: must be dense; call .to_dense()")
        if not several:  # else a rank may see a part, or none, of the parameters; `bind` knows them all
            self._check_k(sum(int(getattr(p, "ds_numel", p.numel())) for p in trainable))

    def _check_k(self, numel: int) -> None:
        if self.config.num_eigenvectors >= max(numel, 1):
            raise ConfigError(
                f"num_eigenvectors={self.config.num_eigenvectors}: must be < {numel}, the number of trainable "
                "parameters; lower it"
            )

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
        keys = self._host.keys()
        if isinstance(self._base, SoapOptimizer):
            self._link_soap(self._base, self._host)
        else:
            self._link_shards(self._host, keys)
        self._relink, self._stateful = False, True
        if self._loaded is not None and self._base is not None and not self._host.state_outside:
            found = self._loaded[1]
            self._restore({i: self._absorb_rows(i, found.get(id(key), {})) for i, key in enumerate(keys)})

    def _absorb_rows(self, index: int, rows: dict[int, Tensor]) -> dict[int, Tensor]:
        """This rank's part of loaded eigenvectors; those of another shape are left out."""
        assert self._host is not None
        mine = {}
        for i, row in rows.items():
            with contextlib.suppress(ValueError):
                mine[i] = self._host.absorb(index, row)
        return mine

    def _link_soap(self, base: SoapOptimizer, host: Host) -> None:
        """The state lives in the base; ``self.state`` holds what was loaded until it is taken over, else only names."""
        if self._relink and not host.state_outside:
            if any(isinstance(value, Tensor) for mine in self.state.values() for value in mine.values()):
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
                    if isinstance(value, Tensor) and value.dim():
                        mine[name] = host.absorb(index, value)
            if self._relink or not mine:
                fused = self._fused_for(host)
                init_state(self.config.base, shard.param, mine, fused=fused, momentum=self._momentum)
            if not host.state_outside:
                reserve_rows(mine, self.config.num_eigenvectors)
            self._base_state[shard.param] = mine

    # -- stepping -----------------------------------------------------------------------------------------------

    def _plain_step(self) -> None:
        """torch's own optimizer on whatever params are visible now (ZeRO shows one group at a time)."""
        if self._plain is None:
            empty = [{"params": [torch.zeros(0)]}]
            self._plain = torch_optimizer(self.config.base, empty, self.param_groups[0], self.config.fused)
        self._plain.param_groups = [{**self._plain.defaults, **group} for group in self.param_groups]
        self._plain.state = self.state
        self._plain.step()

    def _hybrid_step(self, host: Host) -> None:
        if self._rebuild is not None and not host.current(self.param_groups):
            self.bind(self._rebuild(), self._source, self._rebuild)
            host = self._host or host
        if any(p.grad is not None and p.grad.is_sparse for p in iter_params(self.param_groups)):
            raise RuntimeError("a gradient is sparse: must be dense; build the embedding with sparse=False")
        groups = host.collect(self.param_groups)
        if self._relink or groups is not None:  # ZeRO reads the state after the first of its calls already
            self._link_state()
        if groups is None:
            return
        base = self._base
        assert base is not None
        self._groups = groups
        if not self._announced:
            self._announced = True
            self._announce(host)
        self._space.verify(host)
        basis = self._space.active(self._step)
        self._lr_scale = 1.0 if basis is None else self._space.lr_scale
        if basis is None:
            base.step(groups, 1.0)
        else:
            newton = self.config.newton_lr > 0 or self.config.rule == "fosi"
            rates = Rates(self._largest_lr(groups), self._lr_scale, self._alpha(groups), newton)
            captured = self._space.update.step(host, base, groups, basis, rates)
            self._captured = captured if captured is not None else self._captured
        host.publish()
        self._step += 1
        if self.config.num_eigenvectors:
            self._schedule.advance(self._step, has_source=self._source is not None)

    def _announce(self, host: Host) -> None:
        if is_main() and self.config.num_eigenvectors:
            logger.info(summary_line(self.config, host.name, host.reducer.world_size, host.numel, host.layout.numel))
        if is_main() and isinstance(host, OwnerHost):
            logger.info(soap_line(len(host.blocks), host.balance, self._bytes_soap, 4 * host.sent))

    def _largest_lr(self, groups: list[dict[str, Any]]) -> float:
        return max(float(group["lr"]) for group in groups)

    def _alpha(self, groups: list[dict[str, Any]]) -> float:
        """newton_lr times lr_t / lr_0: the Newton step follows the schedule."""
        lr = self._largest_lr(groups)
        if self._reference_lr == 0.0:
            self._reference_lr = lr
        return self.config.newton_lr * (lr / self._reference_lr if self._reference_lr else 1.0)

    # -- refreshing ---------------------------------------------------------------------------------------------

    def refresh(self) -> Refresh:
        """Recompute the eigenbasis now, at the current weights, from the attached source. Collective.

        Called by the hook that :func:`dho2_ds.attach` installs when a refresh is due. Costs at most
        ``curvature.lanczos_steps`` Hessian-vector products (two gradients each).

        Returns:
            What was done. A rejected refresh leaves the previous basis in place.
        """
        host, base, source = self._host, self._base, self._source
        if host is None or base is None or source is None:
            raise RuntimeError("no model attached; call dho2_ds.attach(...) first")
        self.refreshing = True
        try:
            report, age = self._refresh(host, base, source)
        finally:
            self.refreshing = False
        self._schedule.done()
        self._totals["refreshes" if report.accepted else "rejected"] += 1
        self._totals["hvps"] += report.hvps
        self._last = report
        self._tell(host, report, age)
        return report

    def _refresh(
        self, host: Host, base: BaseOptimizer, source: Callable[[], Sequence[Loss]]
    ) -> tuple[Refresh, int | None]:
        """The report, and the age of the basis that was there before."""
        self._link_state()
        self._space.verify(host)
        old, age = self._space.basis, self._space.age(self._step)
        if self._finite_difference is None:
            self._finite_difference = FiniteDifference.for_dtype(host.compute_dtype)
            self._finite_difference.resume(self._difference_state)
        groups, k = self._groups, self.config.num_eigenvectors
        rooted = self._space.update.roots > 0
        lr = self._largest_lr(groups)
        with torch.no_grad():
            hint = torch.zeros(host.layout.numel, dtype=base.dtype, device=base.device)
            for chunk in base.chunks(groups):
                direction = chunk.remembered()
                hint[chunk.start : chunk.stop] = chunk.root(direction) if rooted else direction
            found, report = refresh(
                host,
                source(),
                (lambda x: base.root_(groups, x)) if rooted else (lambda x: x),
                Order(
                    k=k,
                    budget=self.config.curvature.lanczos_steps or default_lanczos_steps(k, host.numel),
                    dtype=base.dtype,
                    device=base.device,
                    born=self._step,
                    growth_guess=float(old.eigenvalues.abs().max()) if old is not None else 2.0 / (lr or 1),
                ),
                self._finite_difference,
                route=self.route,
                hint=hint,
                old=old,
            )
            del hint
            if found is not None:
                self._space.install(host, found)
        return report, age

    # -- telling ------------------------------------------------------------------------------------------------

    def _tell(self, host: Host, report: Refresh, age: int | None) -> None:
        scale = self._lr_scale if self._space.basis is None else self._space.lr_scale
        if is_main():
            line = refresh_line(self._step, report, scale, age)
            logger.info(line) if report.accepted else logger.warning(line)
        engine = getattr(host, "engine", None)
        if engine is not None:
            write_events(engine, self.curvature_stats(), report.seconds)
