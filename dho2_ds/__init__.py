"""A distributed hybrid-order optimizer for DeepSpeed and PyTorch.

Importing the package registers ``torch.optim.DHO2`` and nothing more: the public names below load their modules at
first use, because torch itself imports this package (see :mod:`dho2_ds._register`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dho2_ds._register import register

if TYPE_CHECKING:
    from dho2_ds.attaching import attach
    from dho2_ds.config import ConfigError, DHO2Config
    from dho2_ds.optimizer import DHO2
    from dho2_ds.pipeline.worlds import init_distributed
    from dho2_ds.settings import CurvatureConfig
    from dho2_ds.spectra import spectral_density, spectrum

__version__ = "0.1.0"

__all__ = [
    "DHO2",
    "ConfigError",
    "CurvatureConfig",
    "DHO2Config",
    "__version__",
    "attach",
    "init_distributed",
    "spectral_density",
    "spectrum",
]

_HOMES = {
    "DHO2": "dho2_ds.optimizer",
    "ConfigError": "dho2_ds.config",
    "CurvatureConfig": "dho2_ds.settings",
    "DHO2Config": "dho2_ds.config",
    "attach": "dho2_ds.attaching",
    "init_distributed": "dho2_ds.pipeline.worlds",
    "spectral_density": "dho2_ds.spectra",
    "spectrum": "dho2_ds.spectra",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module at first use (PEP 562)."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names too, loaded or not."""
    return sorted({*globals(), *__all__})


register()
