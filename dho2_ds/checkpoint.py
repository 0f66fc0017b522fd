"""What curvature adds to a torch optimizer's state dict, and how it is taken out again.

The base state is exactly torch's, so checkpoints of AdamW, Adam or SGD and of DHO2 can be exchanged. On top of it:

- with base ``soap``, whose state no other optimizer has, every parameter's state is ``soap_0`` ... (see
  :mod:`dho2_ds.soap_state`);
- every parameter's state gets ``eigenvector_0 .. eigenvector_{k-1}``, shaped like the parameter. That is the one form
  which torch.distributed.checkpoint reshards between DDP, FSDP1 and FSDP2 and over any two world sizes;
- param group 0 gets ``dho2_counters``, ``dho2_eigenvalues`` and ``dho2_velocity``, small float64 tensors, equal on all
  ranks.

The keys are there from the first step on, zero before the first refresh: torch.distributed.checkpoint loads only into
keys that a fresh optimizer has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from dho2_ds.base import EXP_AVG, EXP_AVG_SQ, MOMENTUM, STEP, torch_optimizer
from dho2_ds.config import ConfigError

COUNTERS, EIGENVALUES, VELOCITY, GROUPS = "dho2_counters", "dho2_eigenvalues", "dho2_velocity", "dho2_groups"
SOAP_SUM = "dho2_soap_sum"  # which files beside a DeepSpeed checkpoint hold its soap state
ROW, SOAP = "eigenvector_", "soap_"
_RULES, _BASES = ("adaptive", "fosi"), ("adamw", "adam", "sgd", "soap")
_UNSUPPORTED = {"amsgrad": False, "maximize": False, "dampening": 0}


@dataclass
class Record:
    """Everything about curvature that a bit-exact resume needs besides the eigenvectors; numbers only, in this order.

    Attributes:
        step: training steps taken. due_since: step at which a waiting refresh fell due, -1 when none waits.
        rule, base: indices, so that a basis of another operator is not taken for ours. kept: eigenvectors in use.
        next_eigenvalue, born: see :class:`dho2_ds.curvature.eigenbasis.Eigenbasis`. reference_lr, auto_scale: of
        :class:`dho2_ds.eigenspace.Eigenspace`. tau, gradient_norm, growth: the finite-difference operator (0: none
        yet). moving: 1 if ``velocity`` holds one. eigenvalues, velocity: ``kept`` numbers each.
    """

    version: float = 1
    step: float = 0
    due_since: float = -1
    rule: float = 0
    base: float = 0
    kept: float = 0
    next_eigenvalue: float = 0
    born: float = 0
    reference_lr: float = 0
    tau: float = 0
    gradient_norm: float = 0
    growth: float = 0
    auto_scale: float = 0
    moving: float = 0
    refreshes: float = 0
    rejected: float = 0
    hvps: float = 0
    eigenvalues: list[float] = field(default_factory=list)
    velocity: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, rule: str, base: str) -> Record:
        """An empty record that names the operator."""
        return cls(rule=_RULES.index(rule), base=_BASES.index(base))

    def pack(self, k: int) -> dict[str, Tensor]:
        """The group entries: sizes depend on k only, so that a fresh optimizer's keys and shapes fit any checkpoint."""
        numbers = [value for key, value in asdict(self).items() if key not in ("eigenvalues", "velocity")]
        return {
            COUNTERS: torch.tensor(numbers, dtype=torch.float64),
            EIGENVALUES: _padded(self.eigenvalues, k),
            VELOCITY: _padded(self.velocity, k),
        }

    @classmethod
    def take(cls, group: MutableMapping[str, Any]) -> Record | None:
        """Remove the entries from a param group; None if there are none or they are not ours."""
        counters, values, velocity = (group.pop(key, None) for key in (COUNTERS, EIGENVALUES, VELOCITY))
        names = [f.name for f in fields(cls) if f.name not in ("eigenvalues", "velocity")]
        if not isinstance(counters, Tensor) or counters.shape != (len(names),) or float(counters[0]) != 1:
            return None
        record = cls(**dict(zip(names, counters.tolist(), strict=True)))
        kept = int(record.kept)
        if not (isinstance(values, Tensor) and isinstance(velocity, Tensor) and 0 <= kept <= values.numel()):
            return None
        record.eigenvalues = values.tolist()[:kept]
        record.velocity = velocity.tolist()[:kept] if record.moving else []
        finite = all(math.isfinite(x) for x in [*record.eigenvalues, *record.velocity, *counters.tolist()])
        return record if finite else None


def _padded(values: list[float], k: int) -> Tensor:
    padded = torch.zeros(k, dtype=torch.float64)
    padded[: len(values)] = torch.tensor(values, dtype=torch.float64)
    return padded


def state_names(base: str, momentum: bool) -> tuple[str, ...]:
    """Tensor entries of the base optimizer's state that are shaped like the parameter."""
    if base == "sgd":
        return (MOMENTUM,) if momentum else ()
    return (EXP_AVG, EXP_AVG_SQ)


def torch_group_keys(base: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All hyper-parameters a param group of torch's own optimizer has, so that it can load ours."""
    if base == "soap":
        return {}
    return dict(torch_optimizer(base, [{"params": [torch.zeros(0)]}], dict(options), None).defaults)


def check_groups(groups: list[dict[str, Any]], base: str, needed: set[str]) -> None:
    """Refuse hyper-parameters of a loaded checkpoint that our base optimizer does not have.

    Raises:
        ConfigError: a setting that would silently change meaning, or a missing one.
    """
    for index, group in enumerate(groups):
        for key, neutral in _UNSUPPORTED.items():
            if group.get(key, neutral) not in (neutral, None):
                raise ConfigError(
                    f"checkpoint, param group {index}: {key}={group[key]}: must be {neutral} to continue with DHO2; "
                    f"its base {base!r} does not have it"
                )
        if missing := sorted(needed - set(group)):
            raise ConfigError(
                f"checkpoint, param group {index}: {', '.join(missing)} missing: must be a checkpoint of an optimizer "
                f"like the base {base!r}; set base to what the checkpoint was written with"
            )


def strip(group: dict[str, Any], keep: set[str]) -> None:
    """Remove from a loaded param group what is not a hyper-parameter of ours: the entries of this module, and
    implementation flags (fused, foreach, ...) of the optimizer that wrote the checkpoint."""
    flags = ("foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay", "bias_correction")
    for key in (COUNTERS, EIGENVALUES, VELOCITY, GROUPS, SOAP_SUM, *flags, *_UNSUPPORTED):
        if key not in keep:
            group.pop(key, None)


def normalise(mine: dict[str, Any], saved: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Undo what torch's ``load_state_dict`` did to one parameter's entries of ours: it casts to the parameter's dtype.

    Other Adams keep their step count as an int, or in the param group.
    """
    for name, value in saved.items():
        if isinstance(name, str) and name.startswith((ROW, SOAP)) and isinstance(value, Tensor):
            mine[name] = value.to(device=mine[name].device)
    step = mine.get(STEP, group.get(STEP) if EXP_AVG in mine else None)
    if step is not None and not isinstance(step, Tensor):
        mine[STEP] = torch.tensor(float(step), dtype=torch.float32)


def reserve_rows(mine: dict[str, Any], k: int) -> None:
    """Keep the names of the eigenvector entries in a parameter's state: torch's flattened state dicts load only into
    names that are there. The rows themselves live elsewhere; ``state_dict`` puts them in."""
    for i in range(k):
        mine.setdefault(f"{ROW}{i}", None)


def take_rows(mine: dict[str, Any]) -> dict[int, Tensor]:
    """Remove the eigenvector entries from one parameter's state: {row: tensor}."""
    rows = {}
    for name in [n for n in mine if isinstance(n, str) and n.startswith(ROW)]:
        value = mine.pop(name)
        suffix = name.removeprefix(ROW)
        if suffix.isdigit() and isinstance(value, Tensor):
            rows[int(suffix)] = value
    return rows


def adam_placeholder(numel: int, step: int) -> dict[str, Tensor]:
    """Entries that DeepSpeed's universal converter insists on, or it leaves the weights out too: (numel,) zeros that
    take no memory, for a base that has no such state."""
    zeros = torch.zeros(1).expand(numel)
    return {STEP: torch.tensor(float(step)), EXP_AVG: zeros, EXP_AVG_SQ: zeros}
