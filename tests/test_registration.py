"""``torch.optim.DHO2`` exists after ``import torch``, costs nothing, and can break nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch

import dho2_ds
from dho2_ds import _register

ROOT = Path(dho2_ds.__file__).resolve().parent.parent

needs_entry_point = pytest.mark.skipif(
    not any(point.value == "dho2_ds._register:register" for point in metadata.entry_points(group="torch.backends")),
    reason="the entry point is not installed here: pip install -e .",
)


def run(code: str, **environment: str) -> str:
    """What a fresh interpreter prints; a failure there is a failure here."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_entry_point
def test_importing_torch_registers_the_names_and_loads_nothing_else() -> None:
    code = """if True:
        import sys, torch
        assert callable(torch.optim.DHO2) and callable(torch.optim.dho2)
        heavy = ("pydantic", "deepspeed", "typer", "rich")
        ours = sorted(name for name in sys.modules if name.partition(".")[0] == "dho2_ds")
        print(ours, [name for name in heavy if name in sys.modules])
    """
    assert run(code) == "['dho2_ds', 'dho2_ds._register'] []"


@needs_entry_point
def test_autoload_can_be_switched_off_and_importing_the_package_still_registers() -> None:
    code = """if True:
        import torch
        before = hasattr(torch.optim, "DHO2")
        import dho2_ds
        print(before, callable(torch.optim.DHO2))
    """
    assert run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "False True"


def test_importing_the_package_first_registers_too() -> None:
    assert run("import dho2_ds, torch; print(torch.optim.DHO2.__module__)") == "dho2_ds._register"


@pytest.mark.parametrize("broken", ["dho2_ds.optimizer", "dho2_ds.config", "pydantic"])
def test_a_broken_installation_does_not_break_torch(broken: str) -> None:
    # None in sys.modules makes every import of that module fail.
    code = f"import sys; sys.modules[{broken!r}] = None; import torch; print(torch.ones(2).sum().item())"
    assert run(code) == "2.0"


def test_torch_missing_does_not_break_the_package() -> None:
    code = "import sys; sys.modules['torch'] = None; import dho2_ds; print(dho2_ds._register.last_error)"
    assert "torch" in run(code)


def test_register_never_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(types.ModuleType):
        def __setattr__(self, name: str, value: object) -> None:
            raise RuntimeError("read-only")

    broken = Broken("torch.optim")
    monkeypatch.setitem(sys.modules, "torch.optim", broken)
    monkeypatch.setattr(torch, "optim", broken)
    _register.register()
    assert _register.last_error == "RuntimeError: read-only"
    monkeypatch.undo()
    _register.register()
    assert _register.last_error is None


def test_a_name_that_something_else_holds_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.optim, "DHO2", torch.optim.SGD, raising=False)
    _register.register()
    assert getattr(torch.optim, "DHO2") is torch.optim.SGD  # noqa: B009  # the attribute is unknown to type checkers
    assert _register.last_error is not None and "belongs to" in _register.last_error
    monkeypatch.undo()
    _register.register()
    assert _register.last_error is None


def test_the_factory_passes_everything_to_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fake = types.ModuleType("dho2_ds.optimizer")
    setattr(fake, "DHO2", lambda *args, **kwargs: calls.append((args, kwargs)))  # noqa: B010
    monkeypatch.setitem(sys.modules, "dho2_ds.optimizer", fake)
    # As DeepSpeed calls it: by the name in the JSON, with the JSON's parameters.
    getattr(torch.optim, "DHO2")([1], lr=0.1, curvature={"interval": 5})  # noqa: B009
    assert calls == [(([1],), {"lr": 0.1, "curvature": {"interval": 5}})]


def test_public_names_are_lazy_and_listed() -> None:
    assert set(dho2_ds.__all__) <= set(dir(dho2_ds))
    assert dho2_ds.DHO2Config.__module__ == "dho2_ds.config"
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = dho2_ds.nonsense
    code = """if True:
        import sys, dho2_ds
        assert "pydantic" not in sys.modules
        dho2_ds.ConfigError
        assert "pydantic" in sys.modules
        print(dho2_ds.__version__)
    """
    assert run(code) == dho2_ds.__version__


@pytest.mark.parametrize("name", sorted(set(dho2_ds.__all__) - {"__version__"}))
def test_every_public_name_has_a_home(name: str) -> None:
    value = getattr(dho2_ds, name)
    assert not isinstance(value, types.ModuleType)
    assert value.__module__ == dho2_ds._HOMES[name]
