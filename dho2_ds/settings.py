"""The groups of settings below the top level, and the types that all settings are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_LONGEST_VALUE = 80  # characters of a refused value that a message quotes


def _number(value: Any) -> Any:
    """Turn whatever behaves as a float (int, NumPy scalar, 0-d tensor) into one; neither booleans nor text do."""
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise ValueError("not a number")
    try:
        return float(value)
    except (TypeError, RuntimeError, OverflowError) as error:
        raise ValueError("not a single number") from error


def _integer(value: Any) -> Any:
    """Like :func:`_number`, for whole numbers; a JSON writer's ``100.0`` is one."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value  # not by way of a float, which would round it
    number = _number(value)
    if not number.is_integer():
        raise ValueError("not an integer")
    return int(number)


def _boolean(value: Any) -> Any:
    """Accept ``true`` and ``false`` only: 0, 1 and "no" are more often slips than meant."""
    if not isinstance(value, bool):
        raise ValueError("not a boolean")
    return value


def _pair(value: Any) -> Any:
    """Turn a list or tuple of two numbers into a tuple."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError("not a pair")
    return tuple(_number(item) for item in value)


Finite = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
NonNegative = Annotated[Finite, Field(ge=0)]
Fraction = Annotated[Finite, Field(ge=0, lt=1)]
Pair = Annotated[tuple[Fraction, Fraction], BeforeValidator(_pair)]
Count = Annotated[int, BeforeValidator(_integer), Field(ge=0)]
Positive = Annotated[int, BeforeValidator(_integer), Field(ge=1)]
Bool = Annotated[bool, BeforeValidator(_boolean)]


def setting(default: Any, description: str, must: str, do: str, **options: Any) -> Any:
    """Declare a setting: its default, its documentation and the two halves of its error message."""
    return Field(default, description=description, json_schema_extra={"must": must, "do": do}, **options)


class Settings(BaseModel):
    """What both levels share: immutable, and every key known."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Products = Literal["auto", "finite_difference", "forward_difference", "exact"]
"""Ways to take Hessian-vector products; see :class:`CurvatureConfig`."""


class CurvatureConfig(Settings):
    """The ``curvature`` object: how and when the eigenbasis is computed."""

    mode: Literal["inline", "spread", "dedicated"] = setting(
        "inline",
        "How a refresh is made: `inline`, at once between two steps; `spread`, one product per step at a snapshot "
        "of the weights (not with `exact`); `dedicated`, at a snapshot on ranks of its own while training goes on.",
        "'inline', 'spread' or 'dedicated'",
        "use 'inline' for the whole refresh at once",
    )
    ranks: Count = setting(
        1,
        "Mode `dedicated`: how many of the launched processes, the last ones, are curvature ranks; 0: none, they are "
        "started by themselves.",
        "an integer >= 0",
        "use 1 for the last process",
    )
    timeout: Annotated[Finite, Field(gt=0)] = setting(
        600.0,
        "Mode `dedicated`: seconds after which a transfer without progress, or a refresh without a result, counts as "
        "lost.",
        "a finite number > 0",
        "use several times the seconds that a refresh takes",
    )
    address: str | None = setting(
        None,
        "Mode `dedicated`: `host` or `host:port` at which the first training rank lets curvature ranks in; "
        "null: the interface towards MASTER_ADDR, else loopback, and a free port.",
        "null or a text such as '10.0.0.1:29700'",
        "use null unless curvature ranks are in another network",
    )
    swaps: tuple[tuple[Count, Count], ...] | None = setting(
        None,
        'Mode `dedicated`: repeat a run exactly: its `curvature_stats()["swaps"]`, pairs of a snapshot\'s step and the '
        "step at which its basis came into use; training waits for these.",
        "null or pairs of steps in rising order",
        "use null except to repeat a run",
    )
    spread_every: Positive = setting(
        1,
        "Mode `spread`: steps from one Hessian-vector product to the next.",
        "an integer >= 1",
        "use 1 for the shortest refresh",
    )
    hvp: Products = setting(
        "auto",
        "Hessian-vector products: central `finite_difference` (two ordinary gradients each; every stage, fused "
        "attention), `forward_difference` (one gradient each and one per refresh, so half the cost; not in 16 bits or "
        "TF32, nor with mode `spread`; one more vector of n/P), `exact` (double backward), or `auto`, which takes "
        "`finite_difference`. The log says which.",
        "'auto', 'finite_difference', 'forward_difference' or 'exact'",
        "use 'auto' to let the host decide",
    )
    lanczos_steps: Annotated[Positive, Field(ge=2)] | None = setting(
        None,
        "Lanczos steps of a refresh at most, one Hessian-vector product each, at least k + 2; null: max(2k + 4, 2 "
        "ln n). Fewer are cheaper and less accurate.",
        "null or an integer >= 2",
        "use null for the default",
    )
    warmup_steps: Count = setting(
        100,
        "Steps of the base optimizer before the first refresh (at least 1 is taken).",
        "an integer >= 0",
        "use 0 to start with curvature",
    )
    interval: Positive = setting(
        100,
        "Steps from one refresh to the next; a refresh costs about 2 `lanczos_steps` `batches` gradients, half of that "
        "with `forward_difference`.",
        "an integer >= 1",
        "use num_eigenvectors=0 to train without curvature",
    )
    first_interval: Positive | None = setting(
        None,
        "Steps from the first refresh to the second, doubled from each to the next until they are `interval`; null: "
        "`interval` from the start.",
        "null or an integer >= 1",
        "use warmup_steps to follow the fast changes of early training",
    )
    budget: Annotated[Finite, Field(gt=0, le=1)] | None = setting(
        None,
        "Largest share of a long run's gradients that refreshes may cost, a product counting as two (as one with "
        "`forward_difference`) and a step as one: `interval` becomes at least 2 `lanczos_steps` `batches` / `budget`.",
        "null or a number in (0, 1]",
        "use 0.1 for at most a tenth on top",
    )
    batches: Positive = setting(
        1,
        "Micro-batches per rank over which the Hessian of a refresh is averaged.",
        "an integer >= 1",
        "use 1 for the latest micro-batch alone",
    )
    eigenvector_dtype: Literal["float32", "bfloat16"] = setting(
        "float32",
        "Storage of the eigenvectors; `bfloat16` halves their memory.",
        "'float32' or 'bfloat16'",
        "use 'float32' unless memory is short",
    )
    max_age: Positive | None = setting(
        None,
        "Steps after which a basis that was not refreshed is dropped and the base optimizer goes on alone; null: "
        "never.",
        "null or an integer >= 1",
        "use null to keep a basis until the next one",
    )


class SoapConfig(Settings):
    """The ``soap`` object: the preconditioner of the base ``soap``."""

    precondition_frequency: Positive = setting(
        10, "Steps from one QR update of the eigenbases to the next.", "an integer >= 1", "use 10 if unsure"
    )
    shampoo_beta: Fraction | None = setting(
        None,
        "Decay rate of the factors G G^T and G^T G; null: the second of `betas`.",
        "null or a number in [0, 1)",
        "use null for the second of betas",
    )
    max_block: Annotated[Positive, Field(ge=2)] = setting(
        2048,
        "Longer sides of a matrix are cut into equal parts; each block has a preconditioner of its own and lives "
        "whole on one rank. Memory: four numbers per element and 2 (m^2 + n^2) per m x n block.",
        "an integer >= 2",
        "use 2048 if unsure, a smaller one if blocks do not balance over the ranks",
    )
    max_precondition_dim: Positive = setting(
        10000,
        "Longer sides of a matrix (vocabularies) are not rotated: Adam along them.",
        "an integer >= 1",
        "use 10000 if unsure",
    )


_DEDICATED_ONLY = ("ranks", "timeout", "address", "swaps")


def dedicated_contradictions(curvature: CurvatureConfig) -> Iterator[str]:
    if curvature.mode != "dedicated":
        for name in _DEDICATED_ONLY:
            if name in curvature.model_fields_set and getattr(curvature, name) is not None:
                yield (
                    f"curvature.{name}: must be left out with mode={curvature.mode!r}; remove it or use "
                    "mode='dedicated'"
                )
        return
    steps = [step for pair in curvature.swaps or () for step in pair]
    if steps != sorted(steps):
        yield f"curvature.swaps={quote(curvature.swaps)}: must be in rising order, one job at a time; sort it"


def spread_contradictions(curvature: CurvatureConfig) -> Iterator[str]:
    if curvature.mode != "spread":
        if "spread_every" in curvature.model_fields_set:
            yield (
                f"curvature.spread_every: must be left out with mode={curvature.mode!r}; remove it or use mode='spread'"
            )
        return
    if curvature.hvp == "exact":
        yield "curvature.mode='spread': must be 'inline' with hvp='exact'; its graph cannot outlive a step"
    if curvature.hvp == "forward_difference":
        yield (
            "curvature.mode='spread': must be 'inline' with hvp='forward_difference'; what moves between steps beside "
            "the weights, such as buffers, would count as curvature"
        )
    needed = (curvature.lanczos_steps or 0) * curvature.spread_every
    for name in ("interval", "first_interval"):
        value = getattr(curvature, name)
        if value is None or value >= needed or (name == "interval" and curvature.budget is not None):
            continue
        yield (
            f"curvature.{name}={value}: must be >= {needed} (lanczos_steps * spread_every) with "
            "mode='spread'; raise it, or lower lanczos_steps or spread_every"
        )


def quote(value: Any) -> str:
    """Show a value in a message, on one line and not at full length."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."
