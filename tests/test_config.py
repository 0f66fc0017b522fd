"""Every rule of the settings: what is accepted, what is refused, and in which words."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dho2_ds.config import ConfigError, CurvatureConfig, DHO2Config, SoapConfig, check_group_options, parse_config


def refusal(**values: Any) -> list[str]:
    """The lines with which settings are refused."""
    with pytest.raises(ConfigError) as caught:
        parse_config(values)
    return str(caught.value).splitlines()


def test_defaults() -> None:
    config = parse_config({})
    assert config == DHO2Config()
    assert (config.lr, config.base, config.rule) == (1e-3, "adamw", "adaptive")
    assert (config.betas, config.eps, config.fused) == ((0.9, 0.999), 1e-8, None)
    assert (config.num_eigenvectors, config.newton_lr, config.max_lr_scale) == (8, 0.3, 1.0)
    assert config.curvature == CurvatureConfig(
        mode="inline",
        hvp="auto",
        lanczos_steps=None,
        warmup_steps=100,
        interval=100,
        batches=1,
        eigenvector_dtype="float32",
        max_age=None,
    )


@pytest.mark.parametrize(
    ("base", "decay", "momentum"), [("adamw", 0.01, 0.0), ("adam", 0.0, 0.0), ("sgd", 0.0, 0.9), ("soap", 0.01, 0.0)]
)
@pytest.mark.parametrize("nulls", [{}, {"weight_decay": None, "momentum": None, "betas": None, "curvature": None}])
def test_null_means_the_default_of_the_base(base: str, decay: float, momentum: float, nulls: dict[str, None]) -> None:
    config = parse_config({"base": base, **nulls})
    assert (config.weight_decay, config.momentum) == (decay, momentum)


def test_the_documented_json_is_accepted() -> None:
    curvature = {"mode": "inline", "hvp": "auto", "lanczos_steps": None, "warmup_steps": 100, "interval": 100}
    curvature |= {"batches": 1, "eigenvector_dtype": "float32", "max_age": None}
    params = {"lr": 3e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "base": "adamw"}
    params |= {"rule": "adaptive", "num_eigenvectors": 8, "newton_lr": 0.3, "max_lr_scale": 1.0}
    assert parse_config({**params, "curvature": curvature}).lr == 3e-3


@pytest.mark.parametrize("lr", [1, 1.0, np.float64(1), np.int64(1), torch.tensor(1.0), torch.tensor(1)])
def test_numbers_of_every_kind_become_floats(lr: Any) -> None:
    config = parse_config({"lr": lr, "betas": [0, lr * 0.5]})
    assert type(config.lr) is float and config.lr == 1.0
    assert config.betas == (0.0, 0.5)


def test_a_whole_float_counts_as_an_integer() -> None:
    config = parse_config({"num_eigenvectors": 4.0, "curvature": {"interval": np.int64(10)}})
    assert (type(config.num_eigenvectors), config.num_eigenvectors) == (int, 4)
    assert (type(config.curvature.interval), config.curvature.interval) == (int, 10)


BAD: list[tuple[str, list[Any]]] = [
    ("lr", [-1e-9, math.inf, math.nan, True, "1e-3", None, [1.0], torch.ones(2), 10**400]),
    ("base", ["shampoo", "AdamW", None, 1]),
    ("rule", ["newton", None]),
    ("betas", [0.9, [0.9], [0.9, 1.0], [-0.1, 0.9], [0.9, math.nan], [True, 0.9], [0.9, 0.9, 0.9], "ab"]),
    ("eps", [0, -1e-8, math.inf, True]),
    ("weight_decay", [-0.1, math.inf, True, "auto"]),
    ("num_eigenvectors", [-1, 1.5, True, False, "8", None, math.inf]),
    ("newton_lr", [-0.1, math.nan, True]),
    ("max_lr_scale", [0.99, math.inf, True]),
    ("lr_fraction", [0, 1.01, None, True]),
    ("fused", [1, "true"]),
    ("curvature", [5, "inline", []]),
    ("curvature.mode", ["elsewhere", "Spread", None]),
    ("curvature.spread_every", [0, -1, 1.5, True]),
    ("curvature.hvp", ["finite-difference", True]),
    ("curvature.lanczos_steps", [1, True, 20.5]),
    ("curvature.warmup_steps", [-1, None, True]),
    ("curvature.interval", [0, None, True, 0.5]),
    ("curvature.first_interval", [0, 0.5, True]),
    ("curvature.budget", [0, 1.01, -0.1, True]),
    ("curvature.batches", [0, True]),
    ("curvature.eigenvector_dtype", ["float16", None]),
    ("curvature.max_age", [0, True]),
    ("soap", [5, "soap", []]),
]
BAD_SOAP: list[tuple[str, list[Any]]] = [
    ("precondition_frequency", [0, 1.5, None, True]),
    ("shampoo_beta", [1.0, -0.1, True, "0.95"]),
    ("max_block", [1, 0, None, 2.5]),
    ("max_precondition_dim", [0, None, True]),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD for value in values])
def test_a_bad_value_is_one_line_with_name_value_and_way_out(name: str, value: Any) -> None:
    first, _, second = name.partition(".")
    (line,) = refusal(**{first: {second: value} if second else value})
    head, _, rest = line.partition(": must be ")
    assert head.startswith(f"{name}={str(repr(value))[:40]}")
    assert len(head) < 110
    must, _, do = rest.partition("; ")
    assert must and do


@pytest.mark.parametrize("value", [-0.1, 1.0, True, "0.9"])
def test_bad_momentum(value: Any) -> None:
    (line,) = refusal(base="sgd", momentum=value)
    assert line.startswith(f"momentum={value!r}: must be null or a number in [0, 1); ")


@pytest.mark.parametrize("value", [1, "false", None])
def test_bad_nesterov(value: Any) -> None:
    (line,) = refusal(base="sgd", nesterov=value)
    assert line.startswith(f"nesterov={value!r}: must be true or false; ")


def test_exact_wording() -> None:
    assert refusal(curvature={"interval": 0}) == [
        "curvature.interval=0: must be an integer >= 1; use num_eigenvectors=0 to train without curvature"
    ]
    assert refusal(curvature={"mode": "elsewhere"}) == [
        "curvature.mode='elsewhere': must be 'inline', 'spread' or 'dedicated'; "
        "use 'inline' for the whole refresh at once"
    ]
    assert refusal(base="shampoo") == [
        "base='shampoo': must be 'adamw', 'adam', 'sgd' or 'soap'; use 'adamw' if unsure"
    ]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD_SOAP for value in values])
def test_a_bad_value_of_soap_is_one_line(name: str, value: Any) -> None:
    (line,) = refusal(base="soap", soap={name: value})
    assert line.startswith(f"soap.{name}={value!r}: must be ") and "; " in line


def test_settings_of_soap() -> None:
    config = parse_config({"base": "soap"})
    assert (config.betas, config.weight_decay, config.momentum) == ((0.95, 0.95), 0.01, 0.0)
    assert config.soap == SoapConfig(
        precondition_frequency=10, shampoo_beta=None, max_block=2048, max_precondition_dim=10000
    )
    assert parse_config({"base": "soap", "betas": [0.9, 0.99]}).betas == (0.9, 0.99)
    assert refusal(soap={"max_block": 64})[0].startswith("soap=")
    (line,) = refusal(base="soap", precondition_frequncy=3)
    assert "did you mean 'soap.precondition_frequency'?" in line
    (line,) = refusal(base="soap", soap={"max_blocks": 3})
    assert "did you mean 'soap.max_block'?" in line and line.endswith(", ".join(SoapConfig.model_fields))


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"num_eigenvectors": 0}, "lr='auto': must be a number with num_eigenvectors=0; set one, or change"),
        ({"newton_lr": 0}, "lr='auto': must be a number with newton_lr=0.0; set one, or change"),
        ({"rule": "fosi", "weight_decay": 0}, "lr='auto': must be a number with rule='fosi'; set one, or change"),
        ({"max_lr_scale": 2}, "max_lr_scale: must be left out with lr='auto'"),
        (
            {"lr": 1e-3, "lr_fraction": 0.1},
            "lr_fraction=0.1: must be left out with lr=0.001; remove it or use lr='auto'",
        ),
    ],
)
def test_what_an_automatic_learning_rate_excludes(values: dict[str, Any], line: str) -> None:
    (told,) = refusal(**{"lr": "auto", **values})
    assert told.startswith(line)


def test_all_problems_are_told_at_once() -> None:
    lines = refusal(lr=-1, betas=[2, 2], frobnicate=1, curvature={"interval": 0, "batches": 0})
    assert [line.partition("=")[0] for line in lines] == [
        "lr",
        "betas",
        "curvature.interval",
        "curvature.batches",
        "frobnicate",
    ]


@pytest.mark.parametrize(
    ("values", "head", "guess"),
    [
        ({"momentun": 3}, "momentun=3", "did you mean 'momentum'?"),
        ({"LR": 3}, "LR=3", "did you mean 'lr'?"),
        ({"interval": 4}, "interval=4", "did you mean 'curvature.interval'?"),
        ({"curvature": {"intervl": 4}}, "curvature.intervl=4", "did you mean 'curvature.interval'?"),
        ({"curvature": {"newton_lr": 4}}, "curvature.newton_lr=4", "did you mean 'newton_lr'?"),
    ],
)
def test_unknown_keys_are_refused_with_a_guess(values: dict[str, Any], head: str, guess: str) -> None:
    (line,) = refusal(**values)
    assert line.startswith(f"{head}: must be a known setting; {guess} the settings here are: ")
    allowed = CurvatureConfig if head.startswith("curvature.") else DHO2Config
    assert line.endswith(", ".join(allowed.model_fields))


def test_an_unknown_key_unlike_any_other_gets_no_guess() -> None:
    (line,) = refusal(frobnicate=[1] * 100)
    assert "did you mean" not in line
    assert len(line.partition(":")[0]) < 100  # the value is cut


def test_keys_and_values_of_the_wrong_shape() -> None:
    with pytest.raises(ConfigError, match="1=2: must be a known setting"):
        parse_config({1: 2})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="params=3: must be an object of settings; "):
        parse_config(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("base", "name", "value"),
    [
        ("sgd", "betas", [0.9, 0.999]),
        ("sgd", "eps", 1e-8),
        ("adam", "momentum", 0.9),
        ("adamw", "momentum", 0.0),
        ("adam", "nesterov", True),
        ("adamw", "nesterov", False),
    ],
)
def test_a_setting_that_the_base_does_not_have_is_refused_when_given(base: str, name: str, value: Any) -> None:
    (line,) = refusal(base=base, **{name: value})
    assert line.startswith(f"{name}=")
    assert f"must be left out with base={base!r}; remove it or use base=" in line


def test_nesterov_needs_momentum() -> None:
    assert parse_config({"base": "sgd", "nesterov": True}).momentum == 0.9
    assert refusal(base="sgd", nesterov=True, momentum=0) == [
        "nesterov=True: must be false with momentum=0.0; remove it or set a momentum > 0"
    ]


def test_lanczos_needs_more_steps_than_eigenvectors() -> None:
    assert refusal(curvature={"lanczos_steps": 9}) == [
        "curvature.lanczos_steps=9: must be >= 10 (num_eigenvectors + 2); "
        "raise it, use null for the default, or lower num_eigenvectors"
    ]
    assert parse_config({"curvature": {"lanczos_steps": 10}}).curvature.lanczos_steps == 10
    assert parse_config({"num_eigenvectors": 0, "curvature": {"lanczos_steps": 2}}).num_eigenvectors == 0
    assert refusal(num_eigenvectors=1, curvature={"lanczos_steps": 2})


def test_what_the_fosi_rule_refuses() -> None:
    assert refusal(rule="fosi", base="sgd", nesterov=True) == [
        "nesterov=True: must be false with rule='fosi'; remove it or use rule='adaptive'"
    ]
    for base in ("adam", "sgd"):
        assert refusal(rule="fosi", base=base, weight_decay=0.1) == [
            f"weight_decay=0.1: must be 0 with rule='fosi' and base='{base}'; "
            "put the decay into the loss or use base='adamw'"
        ]
        assert parse_config({"rule": "fosi", "base": base, "weight_decay": 0}).weight_decay == 0
        assert parse_config({"rule": "adaptive", "base": base, "weight_decay": 0.1}).weight_decay == 0.1
    assert parse_config({"rule": "fosi", "weight_decay": 0.1}).weight_decay == 0.1


def test_contradictions_come_together() -> None:
    lines = refusal(base="sgd", betas=[0.9, 0.9], nesterov=True, momentum=0, curvature={"lanczos_steps": 3})
    assert [line.partition("=")[0] for line in lines] == ["betas", "nesterov", "curvature.lanczos_steps"]


def test_settings_are_frozen_and_checked_also_without_parse_config() -> None:
    config = DHO2Config()
    with pytest.raises(ValidationError):
        config.lr = 1.0
    with pytest.raises(ValidationError):
        config.curvature.interval = 1
    with pytest.raises(ValueError, match="must be left out"):
        DHO2Config(base="sgd", eps=1e-8)


@given(
    base=st.sampled_from(["adamw", "adam", "sgd"]),
    lr=st.floats(0, 1e6),
    k=st.integers(0, 100),
    steps=st.none() | st.integers(102, 500),
    decay=st.none() | st.floats(0, 1),
)
def test_round_trip(base: str, lr: float, k: int, steps: int | None, decay: float | None) -> None:
    values = {"base": base, "lr": lr, "num_eigenvectors": k, "weight_decay": decay}
    config = parse_config({**values, "curvature": {"lanczos_steps": steps}})
    assert parse_config(config.model_dump(exclude_unset=True)) == config


def test_every_setting_is_documented() -> None:
    for model in (DHO2Config, CurvatureConfig):
        for name, field in model.model_fields.items():
            assert field.description and field.description.endswith("."), name


def test_group_options() -> None:
    group = {"params": [], "lr": 1, "weight_decay": None, "betas": [0.5, 0.9], "name": "head", "param_names": []}
    assert check_group_options(group, "adamw") == {"lr": 1.0, "betas": (0.5, 0.9)}
    assert check_group_options({"params": []}, "sgd") == {}
    options = {"lr": 0.1, "momentum": 0.5, "nesterov": True, "weight_decay": 0.0}
    assert check_group_options(options, "sgd") == options


@pytest.mark.parametrize(
    ("group", "base", "rule", "message"),
    [
        ({"lr": -1}, "adamw", "adaptive", "param group: lr=-1: must be a finite number >= 0 or 'auto'; "),
        ({"eps": 1e-8}, "sgd", "adaptive", "param group: eps=1e-08: must be left out with base='sgd'; "),
        ({"momentum": 0.9}, "adam", "adaptive", "param group: momentum=0.9: must be left out with base='adam'; "),
        ({"nesterov": True, "momentum": 0.0}, "sgd", "adaptive", "param group: nesterov=True: must be false with mom"),
        ({"weight_decay": 0.1}, "sgd", "fosi", "param group: weight_decay=0.1: must be 0 with rule='fosi'"),
        ({"rule": "fosi"}, "sgd", "fosi", "param group: rule='fosi': must be the same for all param groups; "),
        ({"curvature": {}}, "adamw", "adaptive", "param group: curvature={}: must be the same for all param groups; "),
    ],
)
def test_bad_group_options(group: dict[str, Any], base: Any, rule: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_group_options(group, base, rule)
    assert str(caught.value).startswith(message)


def test_group_problems_are_told_together_and_under_the_groups_name() -> None:
    with pytest.raises(ConfigError) as caught:
        check_group_options({"lr": -1, "eps": 0, "num_eigenvectors": 3}, "adamw", where="param_groups[1]")
    names = [line.partition("=")[0] for line in str(caught.value).splitlines()]
    assert names == ["param_groups[1]: num_eigenvectors", "param_groups[1]: lr", "param_groups[1]: eps"]


def test_the_module_itself_does_not_import_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import dho2_ds.config as c; c.parse_config({'lr': 1})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
