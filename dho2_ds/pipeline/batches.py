"""Arguments of a training forward as JSON and tensors, for curvature ranks that have no data of their own."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dho2_ds.pipeline.wire import Link, LinkError, dtype_name, dtype_named

MAX_BYTES = 16 << 30  # of one announced tensor: a broken header must not make a rank allocate without bound


def encode(value: Any, tensors: list[Tensor]) -> Any:
    """A JSON form of nested lists, tuples, dictionaries, numbers, text, None and tensors; these go to ``tensors``.

    Raises:
        TypeError: something else is in it; it would have to be pickled, and what arrives by network never is.
    """
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized:
            raise TypeError(f"a tensor of layout {value.layout}")
        tensors.append(value.detach())
        return {
            "tensor": len(tensors) - 1,
            "on_cpu": value.device.type == "cpu",
            "requires_grad": value.requires_grad,
        }
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) in (dict, OrderedDict, defaultdict):  # others may have attributes that a model uses
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a dictionary with keys that are not text")
        return {"dict": {key: encode(item, tensors) for key, item in value.items()}}
    if type(value) in (list, tuple):
        return {type(value).__name__: [encode(item, tensors) for item in value]}
    raise TypeError(f"a {type(value).__name__}")


def decode(form: Any, tensors: Sequence[Tensor], device: torch.device) -> Any:
    """The reverse of :func:`encode`; every dictionary comes back as a ``dict``.

    Args:
        device: where tensors go that were on an accelerator.

    Raises:
        LinkError: it is not what :func:`encode` writes.
    """
    if not isinstance(form, dict):
        if form is None or isinstance(form, (bool, int, float, str)):
            return form
        raise LinkError(f"a batch holds {type(form).__name__}")
    if "tensor" in form:
        index = form["tensor"]
        if not isinstance(index, int) or not 0 <= index < len(tensors):
            raise LinkError(f"a batch refers to tensor {index!r} of {len(tensors)}")
        found = tensors[index] if form.get("on_cpu") else tensors[index].to(device)
        return found.requires_grad_(bool(form.get("requires_grad")))
    if "dict" in form:
        return {str(key): decode(item, tensors, device) for key, item in form["dict"].items()}
    for kind, make in (("tuple", tuple), ("list", list)):
        if kind in form:
            return make(decode(item, tensors, device) for item in form[kind])
    raise LinkError(f"a batch holds an object with keys {sorted(form)}")


def announce(tensors: Sequence[Tensor]) -> list[dict[str, Any]]:
    """What a message says of the tensors that follow it."""
    return [{"shape": list(t.shape), "dtype": dtype_name(t.dtype)} for t in tensors]


def receive_tensors(link: Link, announced: Any) -> list[Tensor]:
    """Read the tensors that :func:`announce` described.

    Raises:
        LinkError: the announcement is malformed, or the link fails.
    """
    found = []
    for entry in announced:
        shape, dtype = entry.get("shape"), dtype_named(entry.get("dtype"))
        if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
            raise LinkError(f"{link.peer}: a tensor of shape {shape!r}")
        size = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
        if size > MAX_BYTES:
            raise LinkError(f"{link.peer}: a tensor of {size} bytes: must be at most {MAX_BYTES}")
        tensor = torch.empty(shape, dtype=dtype)
        link.receive_tensor(tensor)
        found.append(tensor)
    return found
