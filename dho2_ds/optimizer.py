"""The optimizer: torch's base step, the curvature correction, and the bookkeeping between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dho2_ds.base import STEP, BaseOptimizer, torch_optimizer
from dho2_ds.checkpoint import Record
from dho2_ds.checkpointed import CheckpointedOptimizer
from dho2_ds.config import ConfigError, check_group_options, parse_config
from dho2_ds.curvature.eigenbasis import Eigenbasis
from dho2_ds.curvature.hvp import FiniteDifference
from dho2_ds.curvature.refresh import Refresh
from dho2_ds.discovery import allow_under_deepspeed, watch_for_engine
from dho2_ds.eigenspace import Eigenspace
from dho2_ds.hosts.base import Host
from dho2_ds.hosts.owner import OwnerHost
from dho2_ds.hosts.replicated import ReplicatedHost
from dho2_ds.learning_rate import START
from dho2_ds.monitor import (
    append_line,
    chosen_route,
    is_main,
    logger,
    refresh_record,
    soap_line,
    summary_line,
    write_events,
)
from dho2_ds.pipeline.worker import Batches, Worker
from dho2_ds.pipeline.worlds import role
from dho2_ds.refresher import Moment, Refresher, Source
from dho2_ds.sharding.blocks import TOLERANCE
from dho2_ds.shards import iter_params
from dho2_ds.soap_base import SoapOptimizer
from dho2_ds.update import Rates, captured_fraction

_ADAM_KEYS, _SGD_KEYS = ("betas", "eps"), ("momentum", "nesterov")


class DHO2(CheckpointedOptimizer):
    """Hybrid first- and second-order optimizer (DHO2, arXiv 2505.00982; FOSI, arXiv 2302.08484), sharded.

    Keeps the k leading eigenvectors of the (preconditioned) Hessian over all parameters, takes a damped Newton step
    inside their span and lets the base optimizer move the rest, at a learning rate that may be larger.

    Args:
        params: parameters or param group dictionaries; groups may override lr, weight_decay, betas, eps, momentum,
            nesterov.
        lr: learning rate of the base optimizer; schedulers act on it as on any torch optimizer. ``"auto"``: curvature
            sets it; see :mod:`dho2_ds.learning_rate`.
        **settings: ``betas``, ``eps``, ``weight_decay``, ``momentum``, ``nesterov``, ``base``, ``rule``,
            ``num_eigenvectors``, ``newton_lr``, ``max_lr_scale``, ``lr_fraction``, ``fused``, ``log`` and the
            dictionaries ``curvature`` and ``soap``; see :class:`dho2_ds.DHO2Config` for each.

    State per rank, all local: the base optimizer's own (2n/P for Adam) and k n/P for the eigenbasis; during a refresh
    ``lanczos_steps + 5`` further vectors of n/P (one more with forward differences). Cost: the base step, two passes
    over the eigenbasis and one all-reduce of k + 1 scalars (``fosi``: two); a refresh is at most ``lanczos_steps``
    Hessian-vector products.

    With ``num_eigenvectors=0`` it is torch's base optimizer, bit for bit. Otherwise :func:`dho2_ds.attach` must name
    the model (under DeepSpeed with a model that returns its loss this happens by itself).

    Raises:
        ConfigError: naming every setting that is wrong, before training starts.
    """

    def __init__(self, params: Any, lr: float | str = 1e-3, **settings: Any) -> None:
        config = parse_config({"lr": lr, **settings})
        self.config = config
        extra = _SGD_KEYS if config.base == "sgd" else _ADAM_KEYS
        defaults = {key: getattr(config, key) for key in ("lr", "weight_decay", *extra)}
        if config.lr == "auto":
            defaults["lr"] = START
        if isinstance(lr, Tensor):
            defaults["lr"] = lr
        super().__init__(params, defaults)
        for index, group in enumerate(self.param_groups):
            overrides = {k: v for k, v in group.items() if k in defaults and v is not defaults[k]}
            check_group_options(overrides, config.base, config.rule, where=f"param group {index}")
        self._check_params()
        if role() == "curvature":
            self._check_curvature_rank()
        if config.rule == "fosi" and config.base != "sgd" and len({tuple(g["betas"]) for g in self.param_groups}) > 1:
            raise ConfigError("betas: must be equal in all param groups with rule='fosi'; its velocity is shared")

        self._host: Host | None = None
        self._hook: RemovableHandle | None = None
        self._source: Source | None = None
        self._rebuild: Callable[[], Host] | None = None
        self._base: BaseOptimizer | None = None
        self._base_state: dict[Any, Any] = defaultdict(dict)
        self._original = [id(p) for p in iter_params(self.param_groups)]
        self._momentum = config.base == "sgd" and any(g["momentum"] for g in self.param_groups)
        self._plain: torch.optim.Optimizer | None = None
        self._groups: list[dict[str, Any]] = self.param_groups
        self._step = 0
        self._relink = True
        self._space = Eigenspace(config)
        self._space.reference_lr = self._largest_lr(self.param_groups)
        self._refresher = Refresher(config, self._space)
        self._captured: Tensor | None = None
        self._lr_scale = 1.0
        self._stateful = False
        self._loaded: tuple[Record, dict[int, dict[int, Tensor]]] | None = None
        self._consolidated: dict[str, Any] | None = None
        self._soap_sum: list[float] = []
        self._announced = False
        allow_under_deepspeed(type(self))
        if self.uses_host:
            self._reserve_record()
            watch_for_engine(self)

    # -- public -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step. Under ZeRO the engine calls this once per param group or sub-group; the update happens at
        the last call.

        Args:
            closure: as in torch: called once, with gradients enabled, before the step.

        Returns:
            What ``closure`` returned; None without one.

        Cost: the base step, two passes over the local eigenbasis (k n/P numbers) and one all-reduce of k + 1 scalars
        (rule ``fosi``: two).

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
            it synchronises with the device. In mode ``dedicated`` also ``connected`` and ``in_flight`` (of a job),
            ``lost`` (jobs without a result because the curvature ranks were gone) and ``swaps`` (pairs: step of the
            snapshot, step at which its basis came into use).
        """
        basis, last = self._space.basis, self._refresher.last
        tensors = [v for s in self.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim() > 0]
        return {
            "steps": self._step,
            **self._refresher.totals,
            "eigenvalues": basis.eigenvalues.tolist() if basis is not None else [],
            "residuals": last.residuals if last is not None and last.accepted else [],
            "next_eigenvalue": basis.next_eigenvalue if basis is not None else None,
            "lr_scale": self._lr_scale,
            "age": self._space.age(self._step),
            "captured_fraction": captured_fraction(self._captured) if self._captured is not None else None,
            "bytes_basis": self._space.bytes,
            "bytes_transient": last.transient_bytes if last is not None else 0,
            "bytes_base": sum(t.numel() * t.element_size() for t in tensors) + self._bytes_soap,
            "route": self.route if self._host is not None else None,
            "self_check": last.self_check if last is not None else None,
            "tau": last.tau if last is not None else None,
            "last_refresh": None if last is None else ("accepted" if last.accepted else last.reason),
            **(self._refresher.dedicated.stats() if self._refresher.dedicated is not None else {}),
        }

    def log(self, **values: float | Tensor) -> None:
        """Append a line with the number of steps taken and these values, such as ``loss=loss``, to the file ``log``.

        Only the main rank writes, and reads the values (which synchronises with the device). ``dho2 report`` draws
        ``loss``.

        Args:
            **values: numbers or tensors of one element, this rank's.

        Raises:
            ConfigError: the setting ``log`` was not given.
        """
        if self.config.log is None:
            raise ConfigError("log=None: must be the path of a file to log to; set log='run/dho2.jsonl'")
        if is_main():
            append_line(
                self.config.log, {"step": self.steps, **{name: _float(value) for name, value in values.items()}}
            )

    def _tell(self, host: Host, report: Refresh) -> None:
        """Send a refresh to the engine's monitors, if it has any, and to the log."""
        # s as it is from the next step on, like the eigenvalues beside it.
        stats = {**self.curvature_stats(), "lr_scale": self._space.scale(self._step)}
        engine = getattr(host, "engine", None)
        if engine is not None:
            write_events(engine, stats, report.seconds)
        if self.config.log is not None:
            append_line(self.config.log, refresh_record(stats, report))

    def set_eigenbasis(self, eigenvectors: Tensor, eigenvalues: Sequence[float], next_eigenvalue: float = 0.0) -> None:
        """Install a given eigenbasis, as if a refresh had found it.

        Args:
            eigenvectors: (k, n_local) local rows, orthonormal over all ranks.
            eigenvalues: k values, the same on every rank.
            next_eigenvalue: magnitude of the largest eigenvalue outside the basis.

        Raises:
            ValueError: ``eigenvectors`` is not this rank's share in shape.
            RuntimeError: no model is attached, and there are several ranks or the parameters were replaced.
        """
        host = self._host or self._bind_default()
        if eigenvectors.shape != (len(eigenvalues), host.layout.numel):
            raise ValueError(
                f"eigenvectors of shape {tuple(eigenvectors.shape)}: must be ({len(eigenvalues)}, "
                f"{host.layout.numel}); pass this rank's columns"
            )
        values = torch.tensor(list(eigenvalues), dtype=torch.float64)
        self._space.install(host, Eigenbasis(eigenvectors, values, next_eigenvalue, self._step), self._groups)

    @property
    def route(self) -> str:
        """How Hessian-vector products are taken: ``finite_difference``, ``forward_difference`` or ``exact``."""
        return chosen_route(self.config.curvature)[0]

    @property
    def _bytes_soap(self) -> int:
        return self._base.bytes if isinstance(self._base, SoapOptimizer) else 0

    @property
    def steps(self) -> int:
        """Training steps taken."""
        if self.uses_host:
            return self._step
        # ZeRO calls the base optimizer alone once per group; Adam's own count says how many steps that were.
        counts = [int(state[STEP]) for state in self.state.values() if STEP in state]
        return max(counts, default=self._step)

    @property
    def attached(self) -> bool:
        """True once an engine or a model is known."""
        return self._host is not None

    @property
    def refreshing(self) -> bool:
        """True while a refresh evaluates the model: forwards seen meanwhile are its own."""
        return self._refresher.busy

    @property
    def refresh_due(self) -> bool:
        """True when the next training forward of the attached model will work on the curvature first."""
        return self._refresher.due

    # -- binding ------------------------------------------------------------------------------------------------

    def bind(
        self,
        host: Host,
        source: Source | None,
        rebuild: Callable[[], Host] | None = None,
    ) -> None:
        """Connect to an engine; :func:`dho2_ds.attach` calls it. Collective.

        Args:
            host: adapter of the engine, over the parameters in the param groups.
            source: of curvature losses; None: not known.
            rebuild: makes the host anew when the parameters in the param groups were replaced (Accelerate does that).

        Raises:
            ConfigError: a setting cannot work on this host.
        """
        if self.config.base == "soap":
            host = self._own(host)
        self._check_k(host.numel)
        self._refresher.afford(host.numel)
        if self.route == "exact" and host.exact_refusal is not None:
            raise ConfigError(f"curvature.hvp='exact': must not be used here: {host.exact_refusal}")
        if self.config.num_eigenvectors:
            FiniteDifference.for_dtype(host.compute_dtype, self.route)  # what it refuses is refused here
        if self._host is not None:
            self._leave(self._host, host)
        self._host, self._source, self._rebuild = host, source, rebuild
        fused = self._fused_for(host)
        self._base_state = defaultdict(dict)
        if isinstance(host, OwnerHost):
            self._base = SoapOptimizer(host, self.config.soap, fused=fused, before=self._base)
        else:
            self._base = BaseOptimizer(self.config.base, host.shards, fused=fused, state=self._base_state)
        self._relink = True
        if self.config.num_eigenvectors and self._refresher.dedicated is not None and role() == "training":
            self._refresher.dedicated.open(host, self._base)

    def _leave(self, old: Host, new: Host) -> None:
        """Take along from one host to the next what the next can use. Collective where layouts of gathered state
        differ, which all ranks see alike."""
        self._refresher.give_up()  # its snapshot is the old host's
        if old.sizes == new.sizes and list(old.layouts) == list(new.layouts):
            return
        self._space.drop()
        if old.gathers and self._stateful and not self._relink and not isinstance(self._base, SoapOptimizer):
            known = {id(p) for p in iter_params(self.param_groups)}
            for key, name, value in self._shard_entries(old):
                if id(key) in known:
                    self.state[key][name] = value  # whole; linking cuts the new slices

    def _current(self, host: Host) -> Host:
        """``host``, or what replaces it if parameters, their storage or what is trained has changed."""
        if self._rebuild is None or host.current(self.param_groups):
            return host
        self.bind(self._rebuild(), self._source, self._rebuild)
        assert self._host is not None
        return self._host

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
        """Own the forward hook of the attached model; the previous one is removed.

        Args:
            handle: of the new hook.
        """
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

    # -- stepping -----------------------------------------------------------------------------------------------

    def _plain_step(self) -> None:
        """torch's own optimizer on whatever params are visible now (ZeRO shows one group at a time)."""
        if self._plain is None:
            empty = [{"params": [torch.zeros(0)]}]
            self._plain = torch_optimizer(self.config.base, empty, self.param_groups[0], self.config.fused)
        self._plain.param_groups = [{**self._plain.defaults, **group} for group in self.param_groups]
        self._plain.state = self.state
        self._plain.step()
        self._step += 1

    def _hybrid_step(self, host: Host) -> None:
        host = self._current(host)
        if any(p.grad is not None and p.grad.is_sparse for p in iter_params(self.param_groups)):
            raise RuntimeError("a gradient is sparse: must be dense; build the embedding with sparse=False")
        groups = host.collect(self.param_groups)
        if self._relink or groups is not None:  # ZeRO reads the state after the first of its calls already
            self._link_state()
        if groups is None:
            return
        base = self._base
        assert base is not None
        if role() == "curvature":
            raise RuntimeError("a curvature rank does not train: call dho2_ds.attach(...) before the first step")
        self._groups = groups
        if not self._announced:
            self._announced = True
            self._announce(host)
        self._space.verify(host)
        basis = self._space.active(self._step)
        lr, trust = self._largest_lr(groups), self._space.trust(self._step)
        self._space.reference_lr = max(self._space.reference_lr, lr)
        self._lr_scale = self._space.scale(self._step)
        self._refresher.before_step(host)
        if basis is None:
            base.step(groups, self._lr_scale)
        else:
            newton = self.config.newton_lr > 0 or self.config.rule == "fosi"
            # The Newton step follows the schedule.
            alpha = self.config.newton_lr * (lr / self._space.reference_lr if lr else 0.0)
            rates = Rates(lr, self._lr_scale, trust * alpha, newton)
            captured = self._space.update.step(host, base, groups, basis, rates)
            self._captured = captured if captured is not None else self._captured
        host.publish()
        self._step += 1
        if self.config.num_eigenvectors:
            arrived = self._refresher.after_step(host, base, groups, self._step)
            if arrived is not None:
                self._tell(host, arrived)
            self._refresher.advance(self._step, has_source=self._source is not None)

    def _announce(self, host: Host) -> None:
        if is_main() and self.config.num_eigenvectors:
            logger.info(summary_line(self.config, host.name, host.reducer.world_size, host.numel, host.layout.numel))
        if is_main() and isinstance(host, OwnerHost):
            logger.info(soap_line(len(host.blocks), host.balance, self._bytes_soap, 4 * host.sent))

    def _largest_lr(self, groups: list[dict[str, Any]]) -> float:
        return max(float(group["lr"]) for group in groups)

    # -- refreshing ---------------------------------------------------------------------------------------------

    def refresh(self) -> Refresh:
        """Recompute the eigenbasis now, at the current weights, from the attached source. Collective.

        Costs at most ``curvature.lanczos_steps`` Hessian-vector products (two gradients each, one with forward
        differences).

        Returns:
            What was done. A rejected refresh leaves the previous basis in place.

        Raises:
            RuntimeError: no model is attached, or no batch is known to evaluate its loss on.
        """
        moment = self._moment()
        report = self._refresher.refresh(moment)
        self._tell(moment.host, report)
        return report

    def before_forward(self) -> None:
        """Do what curvature has to do before the next training forward; the hook of :func:`dho2_ds.attach` calls it.

        Mode ``inline``: the whole refresh when one is due. ``spread``: one product of it. Collective.
        """
        if self._refresher.due:
            moment, before = self._moment(), self._refresher.last
            self._refresher.turn(moment)
            if self._refresher.last is not before and self._refresher.last is not None:
                self._tell(moment.host, self._refresher.last)

    def _check_curvature_rank(self) -> None:
        """Refuse settings under which there are no curvature ranks, on one: it would train."""
        if self.config.curvature.mode != "dedicated" or not self.config.num_eigenvectors:
            raise ConfigError(
                f"curvature.mode={self.config.curvature.mode!r}, num_eigenvectors={self.config.num_eigenvectors}: must "
                "be 'dedicated' and > 0 on a curvature rank; use the training job's configuration"
            )

    def worker(self, batches: Batches, *, own_data: bool) -> Worker:
        """What serves the training ranks, on a curvature rank that is bound to its model.

        Args:
            batches: turns the arguments that a job brought (None: nothing) into losses.
            own_data: whether curvature ranks have data of their own, so that jobs bring none.

        Returns:
            The worker; serving is up to the caller.
        """
        assert self._host is not None and self._base is not None
        return Worker(self.config, self._host, self._base, batches, own_data=own_data)

    def _moment(self) -> Moment:
        if self._host is None or self._base is None or self._source is None:
            raise RuntimeError("no model attached; call dho2_ds.attach(...) first")
        self._current(self._host)
        self._link_state()
        self._space.verify(self._host)
        return Moment(self._host, self._base, self._groups, self._step, self._source)


def _float(value: Any) -> float:
    """A number, also of a tensor that requires a gradient."""
    return float(value.detach() if isinstance(value, Tensor) else value)
