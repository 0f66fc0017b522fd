"""Registration of the optimizer's name in ``torch.optim``, where DeepSpeed looks up ``optimizer.type`` of its JSON.

torch runs :func:`register` at the end of every ``import torch`` (entry-point group ``torch.backends``), also in
programs that never use this package. So this module imports nothing but the standard library, and a failure here must
not become a failure of ``import torch``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dho2_ds.optimizer import DHO2 as _DHO2

NAMES = ("DHO2", "dho2")
"""Attributes of ``torch.optim`` that build the optimizer. DeepSpeed compares the JSON's name case-exactly."""

last_error: str | None = None
"""Why the latest :func:`register` did not register, for ``dho2 doctor``; None when it did."""


def DHO2(params: Any, *args: Any, **kwargs: Any) -> _DHO2:
    """Build :class:`dho2_ds.DHO2`; a function, so that the class is imported at its first use only.

    Args:
        params: Parameters or group dictionaries, as for every torch optimizer.
        *args: Passed on.
        **kwargs: Passed on.

    Returns:
        The optimizer.
    """
    from dho2_ds.optimizer import DHO2 as optimizer_class

    return optimizer_class(params, *args, **kwargs)


def is_ours(candidate: object) -> bool:
    """Tell whether an attribute of ``torch.optim`` was put there by this package."""
    return getattr(candidate, "__module__", "").partition(".")[0] == __name__.partition(".")[0]


def register() -> None:
    """Set ``torch.optim.DHO2`` and ``torch.optim.dho2``; a name that something else holds is left alone.

    Never raises: what went wrong is kept in :data:`last_error`. Cost: two attribute assignments once torch is imported.
    """
    global last_error
    last_error = None
    try:
        import torch.optim

        for name in NAMES:
            holder = getattr(torch.optim, name, None)
            if holder is None or is_ours(holder):
                setattr(torch.optim, name, DHO2)
            else:
                last_error = f"torch.optim.{name} belongs to {getattr(holder, '__module__', holder)!r}"
    # Every exception, because torch turns one raised here into a failure of `import torch` in unrelated programs.
    except Exception as error:
        last_error = f"{type(error).__name__}: {error}"
