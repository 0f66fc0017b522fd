"""The optimizer's settings: validated as a whole, frozen, and independent of torch.

:func:`parse_config` is the entry for everything that a user wrote (a DeepSpeed JSON's ``optimizer.params`` or keyword
arguments): it reports all problems at once, one line each, as ``name=value: must be ...; do ...``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator

from dho2_ds.settings import (
    Bool,
    Count,
    CurvatureConfig,
    Finite,
    Fraction,
    NonNegative,
    Pair,
    Settings,
    SoapConfig,
    dedicated_contradictions,
    quote,
    setting,
    spread_contradictions,
)

__all__ = ["ConfigError", "CurvatureConfig", "DHO2Config", "SoapConfig", "check_group_options", "parse_config"]

Base = Literal["adamw", "adam", "sgd", "soap"]
Rule = Literal["adaptive", "fosi"]

DEFAULT_DECOUPLED_WEIGHT_DECAY = 0.01  # torch.optim.AdamW's own default, and SOAP's; Adam's and SGD's is 0
DEFAULT_BETAS, DEFAULT_SOAP_BETAS = (0.9, 0.999), (0.95, 0.95)
DEFAULT_SGD_MOMENTUM = 0.9  # the rules act on the momentum buffer, so unlike in torch.optim.SGD it is on by default

LANCZOS_MARGIN = 2
"""Lanczos steps needed beyond ``num_eigenvectors``: one for lambda_next, one for its residual."""

GROUP_KEYS = ("lr", "weight_decay", "betas", "eps", "momentum", "nesterov")
"""Settings that a param group may override; all others hold for the whole optimizer."""

_MOMENTS = ("adamw", "adam", "soap")
_ONLY_FOR = {"betas": _MOMENTS, "eps": _MOMENTS, "momentum": ("sgd",), "nesterov": ("sgd",), "soap": ("soap",)}
_DECOUPLED = ("adamw", "soap")
_NULL_IS_DEFAULT = ("betas", "weight_decay", "momentum", "curvature", "soap")


class ConfigError(ValueError):
    """Settings were refused; the message has one line per problem."""


class DHO2Config(Settings):
    """The optimizer's settings, as in ``optimizer.params`` of a DeepSpeed JSON.

    ``weight_decay`` and ``momentum`` read as numbers after validation, also where the user left them to the default.
    Settings survive a round trip by ``model_dump(exclude_unset=True)``.
    """

    lr: NonNegative | Literal["auto"] = setting(
        1e-3,
        "Learning rate of the base optimizer; schedules act on it as on any optimizer's. Outside the eigenvectors' "
        'span curvature multiplies it by up to `max_lr_scale`, 1 by default. `"auto"`: curvature sets it, starting '
        "from 1e-3, and a schedule acts on top; where Hugging Face's libraries read the JSON they put their own "
        "`learning_rate` in its place.",
        "a finite number >= 0 or 'auto'",
        "set the rate that you would give the base optimizer",
    )
    base: Base = setting(
        "adamw",
        "Base optimizer, which moves everything outside the eigenvectors' span: torch's own `adamw`, `adam` or "
        "`sgd`, or `soap`, Adam in the eigenbasis of Shampoo's factors (arXiv 2409.11321), which costs more per "
        "step.",
        "'adamw', 'adam', 'sgd' or 'soap'",
        "use 'adamw' if unsure",
    )
    rule: Rule = setting(
        "adaptive",
        "Update rule: `adaptive`, a Newton step in the base optimizer's own coordinates, by the preconditioned "
        "Hessian; `fosi`, the rule of arXiv 2302.08484, by the plain Hessian.",
        "'adaptive' or 'fosi'",
        "use 'adaptive' if unsure",
    )
    betas: Pair = setting(
        None,
        f"Decay rates of Adam's moments; not for `sgd`; null: {list(DEFAULT_BETAS)}, for `soap` "
        f"{list(DEFAULT_SOAP_BETAS)}.",
        "null or two numbers in [0, 1)",
        "write a list such as [0.9, 0.999]",
        validate_default=True,
    )
    eps: Annotated[Finite, Field(gt=0)] = setting(
        1e-8,
        "Added to the root of Adam's second moment; not for `sgd`.",
        "a finite number > 0",
        "use a small one such as 1e-8",
    )
    momentum: Fraction = setting(
        None,
        f"Momentum; `sgd` only; null: {DEFAULT_SGD_MOMENTUM}.",
        "null or a number in [0, 1)",
        f"use null for {DEFAULT_SGD_MOMENTUM}",
        validate_default=True,
    )
    nesterov: Bool = setting(
        False, "Nesterov's form of momentum; `sgd` with momentum only.", "true or false", "write it without quotes"
    )
    weight_decay: NonNegative = setting(
        None,
        "Weight decay, decoupled for `adamw` and `soap` and never enlarged by curvature; "
        f"null: {DEFAULT_DECOUPLED_WEIGHT_DECAY} for these two, 0 for the others.",
        "null or a finite number >= 0",
        "use 0 for no decay",
        validate_default=True,
    )
    num_eigenvectors: Count = setting(
        8,
        "Leading Hessian eigenvectors k to keep: k numbers per parameter, divided by the ranks. 0: the base optimizer "
        "alone, bit for bit.",
        "an integer >= 0",
        "use 0 for the base optimizer alone",
    )
    newton_lr: NonNegative = setting(
        0.3,
        "Fraction of the full Newton step taken inside the span; follows the schedule of `lr`. 0 leaves motion "
        "there to the base optimizer at its unscaled `lr`.",
        "a finite number >= 0",
        "use 0.3 if unsure, or num_eigenvectors=0 to train without the Newton step",
    )
    max_lr_scale: Annotated[Finite, Field(ge=1)] = setting(
        1.0,
        "Upper bound of the factor by which `lr` grows outside the span, the ratio of the largest eigenvalue to the "
        "first one outside. With 1 `lr` is what it is to the base optimizer alone, and a rate found for that fits.",
        "a finite number >= 1",
        "use 1 to leave lr as it is",
    )
    lr_fraction: Annotated[Finite, Field(gt=0, le=1)] = setting(
        0.25,
        'With `"lr": "auto"`: lr as a share of the largest stable one outside the span.',
        "a number in (0, 1]",
        "use 0.25 if unsure, a smaller one where training is unstable",
    )
    fused: Bool | None = setting(
        None,
        "Fused kernels of the base optimizer; null: as torch decides.",
        "null, true or false",
        "use null to let torch decide",
    )
    log: str | None = setting(
        None,
        "File to which the main rank appends a JSON line per refresh, and what `optimizer.log(loss=...)` is given, for "
        "`dho2 report`; null: none.",
        "null or a path",
        "write it as a text such as 'run/dho2.jsonl'",
    )
    curvature: CurvatureConfig = setting(
        CurvatureConfig(),
        "How and when the eigenvectors are computed, below.",
        "an object of settings",
        'write it as {"interval": 100}',
    )
    soap: SoapConfig = setting(
        SoapConfig(),
        "The preconditioner of the base `soap`, below.",
        "an object of settings",
        'write it as {"precondition_frequency": 10}',
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        """Let an explicit null count as not given, which matters for settings that the base does not have."""
        if not isinstance(values, Mapping):
            return values
        return {key: value for key, value in values.items() if value is not None or key not in _NULL_IS_DEFAULT}

    @field_validator("betas", "momentum", "weight_decay", mode="before")
    @classmethod
    def _base_default(cls, value: Any, info: ValidationInfo) -> Any:
        """Put the base's own default where none was given (``base`` is declared, so validated, first)."""
        if value is not None:
            return value
        base = info.data.get("base")
        if info.field_name == "betas":
            return DEFAULT_SOAP_BETAS if base == "soap" else DEFAULT_BETAS
        if info.field_name == "momentum":
            return DEFAULT_SGD_MOMENTUM if base == "sgd" else 0.0
        return DEFAULT_DECOUPLED_WEIGHT_DECAY if base in _DECOUPLED else 0.0

    @model_validator(mode="after")
    def _consistent(self) -> DHO2Config:
        """Refuse settings that contradict each other."""
        problems = list(_contradictions(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self


_NESTED: dict[str | int, type[Settings]] = {"curvature": CurvatureConfig, "soap": SoapConfig}
"""Settings that are objects of settings."""


def _contradictions(config: DHO2Config) -> Iterator[str]:
    """Yield one line per pair of settings that are valid alone but not together."""
    for name, bases in _ONLY_FOR.items():
        if name in config.model_fields_set and config.base not in bases:
            yield (
                f"{name}={quote(getattr(config, name))}: must be left out with base={config.base!r}; "
                f"remove it or use base={' or '.join(map(repr, bases))}"
            )
    if config.base == "sgd" and config.nesterov:
        if config.rule == "fosi":
            yield "nesterov=True: must be false with rule='fosi'; remove it or use rule='adaptive'"
        elif config.momentum == 0:
            yield "nesterov=True: must be false with momentum=0.0; remove it or set a momentum > 0"
    if config.rule == "fosi" and config.base not in _DECOUPLED and config.weight_decay > 0:
        # FOSI takes the Hessian of the loss that it is given: a decay added to the gradient elsewhere is not in it.
        yield (
            f"weight_decay={config.weight_decay!r}: must be 0 with rule='fosi' and base={config.base!r}; "
            "put the decay into the loss or use base='adamw'"
        )
    if config.lr == "auto":
        yield from _auto_contradictions(config)
    elif "lr_fraction" in config.model_fields_set:
        yield f"lr_fraction={config.lr_fraction!r}: must be left out with lr={config.lr!r}; remove it or use lr='auto'"
    yield from spread_contradictions(config.curvature)
    yield from dedicated_contradictions(config.curvature)
    steps, needed = config.curvature.lanczos_steps, config.num_eigenvectors + LANCZOS_MARGIN
    if steps is not None and 0 < config.num_eigenvectors and steps < needed:
        yield (
            f"curvature.lanczos_steps={steps}: must be >= {needed} (num_eigenvectors + {LANCZOS_MARGIN}); "
            "raise it, use null for the default, or lower num_eigenvectors"
        )


def _auto_contradictions(config: DHO2Config) -> Iterator[str]:
    for name, problem in (
        ("num_eigenvectors", config.num_eigenvectors == 0),
        ("newton_lr", config.newton_lr == 0),
        ("rule", config.rule == "fosi"),  # its plain Hessian does not limit a preconditioned step
    ):
        if problem:
            value = quote(getattr(config, name))
            yield f"lr='auto': must be a number with {name}={value}; set one, or change {name}"
    if "max_lr_scale" in config.model_fields_set:
        yield "max_lr_scale: must be left out with lr='auto', which bounds lr by lr_fraction; remove it"


def parse_config(values: Mapping[str, Any]) -> DHO2Config:
    """Validate settings as a user wrote them.

    Args:
        values: Keyword arguments or the ``optimizer.params`` of a DeepSpeed JSON.

    Returns:
        The frozen settings, defaults filled in.

    Raises:
        ConfigError: With one line per problem. Contradictions between settings are reported once each is valid alone.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"params={quote(values)}: must be an object of settings; write it as {{'lr': 0.001}}")
    try:
        return DHO2Config.model_validate(dict(values))
    except ValidationError as error:
        # `from None`: pydantic's own account says the same in another form.
        raise ConfigError("\n".join(_problems(error, values))) from None


def check_group_options(
    group: Mapping[str, Any], base: Base, rule: Rule = "adaptive", where: str = "param group"
) -> dict[str, Any]:
    """Validate the settings that a param group overrides (:data:`GROUP_KEYS`).

    Args:
        group: The group's dictionary. Keys that are no setting of ours (``params``, names, tags) are ignored.
        base: Base optimizer of the whole optimizer.
        rule: Update rule of the whole optimizer.
        where: The group's name in messages.

    Returns:
        The overridden settings, normalised; what the group leaves out or sets to null is absent.

    Raises:
        ConfigError: With one line per problem, each starting with ``where``.
    """
    fixed = [key for key in DHO2Config.model_fields if key not in GROUP_KEYS]
    problems = [
        f"{key}={quote(group[key])}: must be the same for all param groups; set it for the whole optimizer"
        for key in fixed
        if key in group
    ]
    given = {key: group[key] for key in GROUP_KEYS if group.get(key) is not None}
    options: dict[str, Any] = {}
    try:
        config = parse_config({**given, "base": base, "rule": rule})
        options = {key: getattr(config, key) for key in given}
        if options.get("lr") == "auto":
            problems.append("lr='auto': must be a number here; set 'auto' for the whole optimizer")
    except ConfigError as error:
        problems += str(error).splitlines()
    if problems:
        raise ConfigError("\n".join(f"{where}: {problem}" for problem in problems))
    return options


def _problems(error: ValidationError, values: Mapping[str, Any]) -> Iterator[str]:
    """Rewrite pydantic's account as our lines, one per setting."""
    told = set()
    for item in error.errors(include_url=False):
        if not item["loc"]:
            yield from str(item["ctx"]["error"]).splitlines()  # _contradictions has written these
            continue
        path = _path(item["loc"])
        if path in told:
            continue
        told.add(path)
        yield _problem(path, _look_up(values, item["loc"][: len(path)]))


def _path(loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """Cut a location down to the setting: what lies inside one (an element of a pair) is told as the whole."""
    depth = 2 if loc[0] in _NESTED else 1
    return tuple(str(part) for part in loc[:depth])


def _problem(path: tuple[str, ...], value: Any) -> str:
    """Write the line of one setting."""
    *parents, key = path
    model = _NESTED[parents[0]] if parents else DHO2Config
    head = f"{'.'.join(path)}={quote(value)}"
    field = model.model_fields.get(key)
    if field is None:
        allowed = ", ".join(model.model_fields)
        return f"{head}: must be a known setting; {_suggestion(path)}the settings here are: {allowed}"
    extra = field.json_schema_extra
    assert isinstance(extra, dict)  # setting() is the only way in which settings are declared
    return f"{head}: must be {extra['must']}; {extra['do']}"


def _suggestion(path: tuple[str, ...]) -> str:
    """Guess which setting an unknown one was meant to be, on its own level first."""
    levels: list[tuple[type[Settings], str]] = [(DHO2Config, ""), *((m, f"{key}.") for key, m in _NESTED.items())]
    prefix = "".join(f"{part}." for part in path[:-1])
    for model, qualifier in sorted(levels, key=lambda level: level[1] != prefix):
        close = difflib.get_close_matches(path[-1].lower(), model.model_fields, n=1, cutoff=0.7)
        if close:
            return f"did you mean '{qualifier}{close[0]}'? "
    return ""


def _look_up(values: Any, path: tuple[int | str, ...]) -> Any:
    """Find the value that the user wrote for a setting."""
    for part in path:
        values = values.get(part) if isinstance(values, Mapping) else getattr(values, str(part), None)
    return values
