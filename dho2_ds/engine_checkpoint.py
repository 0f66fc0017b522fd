"""DeepSpeed's ``engine.save_checkpoint`` and ``engine.load_checkpoint`` carry the eigenbasis, with no further call.

The base ``soap`` has its state whole in the same form, by block, in ``<tag>/dho2_soap/``; what its converted universal
checkpoint says of Adam's state is zeros (:func:`dho2_ds.checkpoint.adam_placeholder`).

The optimizer's state in DeepSpeed's files stays exactly AdamW's, so ``ds_to_universal``, ``zero_to_fp32`` and a return
to AdamW work. The eigenvectors lie beside, in ``<tag>/dho2_eigenbasis/``: ``index.pt`` says which rank's file holds
which interval of which parameter, ``rank_<r>.pt`` holds that rank's rows. That form knows no ZeRO stage and no world
size: a loading rank reads the intervals it owns, also for a universal checkpoint, whose conversion leaves these files
where they are.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dho2_ds.checkpoint import Record
from dho2_ds.sharding.layout import Layout, Segment
from dho2_ds.sharding.redistribute import plan

FOLDER, SOAP_FOLDER = "dho2_eigenbasis", "dho2_soap"
_VERSION = 1


def install(engine_class: type) -> None:
    """Let an engine class save and load the eigenbasis too; a no-op for engines with another optimizer.

    The methods are wrapped on the class: a checkpoint is usually loaded before anything of ours has seen the engine.
    """
    if not hasattr(engine_class.save_checkpoint, "_dho2"):  # type: ignore[attr-defined]
        for name, wrap in (("save_checkpoint", _saving), ("load_checkpoint", _loading)):
            wrapped = wrap(getattr(engine_class, name))
            wrapped._dho2 = True  # type: ignore[attr-defined]
            setattr(engine_class, name, wrapped)


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_checkpoint(engine: Any, *args: Any, **kwargs: Any) -> Any:
        owner = _owner(engine)
        given = inspect.signature(original).bind(engine, *args, **kwargs).arguments
        if owner is None or not owner.attached or not given["save_dir"]:
            return original(engine, *args, **kwargs)
        tag = given.get("tag")
        folder = Path(given["save_dir"], f"global_step{engine.global_steps}" if tag is None else str(tag), FOLDER)
        owner.save_eigenbasis(functools.partial(write, folder))
        owner.save_base(functools.partial(write, folder.with_name(SOAP_FOLDER)))
        # At stage 0 DeepSpeed asks rank 0 alone for the state, which is sharded here as everywhere.
        owner.consolidate()
        try:
            return original(engine, *args, **kwargs)
        finally:
            owner.release()

    return save_checkpoint


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_checkpoint(engine: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(engine, *args, **kwargs)
        owner = _owner(engine)
        bound = inspect.signature(original).bind(engine, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if owner is None or result[0] is None or not given["load_optimizer_states"] or given["load_module_only"]:
            return result
        universal = engine.load_universal_checkpoint()
        if universal:
            owner.adopt()  # this loader writes into param groups and state itself
            if owner.config.base == "soap":
                _forget_placeholders(engine)
        if not owner.attached:
            from dho2_ds.attaching import attach  # built on the optimizer, which imports this module

            attach(engine)
        tag = given["tag"]
        if tag is None:
            tag = Path(given["load_dir"], "latest_universal" if universal else "latest").read_text().strip()
        owner.load_base(functools.partial(read, Path(given["load_dir"]), str(tag), SOAP_FOLDER, universal))
        owner.load_eigenbasis(functools.partial(read, Path(given["load_dir"]), str(tag), FOLDER, universal))
        return result

    return load_checkpoint


def _forget_placeholders(engine: Any) -> None:
    """The base ``soap`` has no state like Adam's; what the universal loader made of its placeholders is let go."""
    for param in engine.module.parameters():
        if getattr(param, "_hp_mapping", None) is not None:
            param._hp_mapping.optim_fragment = {}


def _owner(engine: Any) -> Any:
    """The engine's DHO2 optimizer if it has state of its own, else None."""
    optimizer: Any = getattr(engine, "basic_optimizer", None)
    return optimizer if hasattr(optimizer, "load_eigenbasis") and optimizer.uses_host else None


def write(
    folder: Path, rank: int, layouts: Sequence[Layout], sizes: Mapping[str, int], record: Record, rows: Tensor
) -> None:
    """One rank's part of the eigenbasis; rank 0 also writes the index. Each file appears whole or not at all.

    Args:
        folder: where; made if needed.
        rank: this rank in the sharding group. layouts: all ranks'. sizes: {parameter: numel}, global.
        record: what the optimizer's param groups say of the basis. rows: (k, n_local) local.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = {name: i for i, name in enumerate(sizes)}
    tables = [
        torch.tensor([[names[s.name], s.start, s.length, s.offset] for s in layout.segments], dtype=torch.int64)
        for layout in layouts
    ]
    # Files of an interrupted save over an older one of the same basis differ in this, if in anything.
    digest = hashlib.sha256(b"".join(table.numpy().tobytes() + b"|" for table in tables)).hexdigest()
    if rank == 0:
        index = {
            "version": _VERSION,
            "names": list(sizes),
            "numels": list(sizes.values()),
            "layouts": tables,
            "local_numels": [layout.numel for layout in layouts],
            "digest": digest,
            **_identity(record),
        }
        _save(index, folder / "index.pt")
    _save({"rows": rows.detach().cpu(), "digest": digest, **_identity(record)}, folder / f"rank_{rank:05d}.pt")


def read(
    load_dir: Path,
    tag: str,
    name: str,
    universal: bool,
    layout: Layout,
    sizes: Mapping[str, int],
    record: Record,
) -> Tensor:
    """The rows of one rank under any layout.

    Args:
        load_dir, tag: the checkpoint. name: of the folder in it. universal: also the other tags are searched.
        layout: of the loading rank. sizes: {parameter: numel} of its model. record: from the param groups.

    Returns:
        (k, n_local) local, on the CPU, in the dtype it was saved in.

    Raises:
        ValueError: missing, damaged, or of another model or moment; names the file.
    """
    folder = _find(load_dir, tag, name, universal, record)
    path = folder / "index.pt"
    index = _load(path, record)
    if dict(zip(index["names"], index["numels"], strict=True)) != dict(sizes):
        raise ValueError(f"{path}: must be of this model; its parameter names or sizes differ")
    names = index["names"]
    sources = [
        Layout(tuple(Segment(names[name], *rest) for name, *rest in table.tolist()), numel)
        for table, numel in zip(index["layouts"], index["local_numels"], strict=True)
    ]
    out: Tensor | None = None
    opened: dict[int, Tensor] = {}
    for item in plan(sources, [layout]):
        if item.source not in opened:
            path = folder / f"rank_{item.source:05d}.pt"
            content = _load(path, record)
            rows = content["rows"]
            if content["digest"] != index["digest"]:
                raise ValueError(f"{path}: must be of the same save as index.pt; that save was interrupted")
            if rows.dim() != 2 or rows.shape[1] != sources[item.source].numel or len(rows) < record.kept:
                raise ValueError(f"{path}: must hold {int(record.kept)} rows of {sources[item.source].numel} elements")
            opened = {item.source: rows}  # transfers are sorted by source
        rows = opened[item.source]
        if out is None:
            out = rows.new_zeros((len(rows), layout.numel))
        out[:, item.target_offset : item.target_offset + item.length] = rows[
            :, item.source_offset : item.source_offset + item.length
        ]
    return torch.zeros(int(record.kept), layout.numel) if out is None else out


def _find(load_dir: Path, tag: str, name: str, universal: bool, record: Record) -> Path:
    """The folder of the eigenbasis that belongs to ``record``: the tag's own, else (universal) another tag's."""
    own = load_dir / tag / name
    if own.exists() or not universal:
        return own
    siblings = sorted(load_dir.glob(f"*/{name}"), key=lambda f: not tag.startswith(f.parent.name))
    for folder in siblings:
        try:
            _load(folder / "index.pt", record)
        except ValueError:
            continue
        return folder
    raise ValueError(
        f"{own}: must exist; copy the folder {name} of the checkpoint it was converted or copied from into it"
    )


def _identity(record: Record) -> dict[str, Any]:
    return {"born": record.born, "eigenvalues": torch.tensor(record.eigenvalues, dtype=torch.float64)}


def _load(path: Path, record: Record) -> dict[str, Any]:
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        born, values = found["born"], found["eigenvalues"]
    except Exception as error:  # a damaged archive raises almost anything
        raise ValueError(f"{path}: must be a whole file of an eigenbasis ({type(error).__name__}: {error})") from error
    if found.get("version", _VERSION) != _VERSION:
        raise ValueError(f"{path}: version {found['version']}: must be {_VERSION}; load it with the release it is of")
    if born != record.born or values.tolist() != record.eigenvalues:
        raise ValueError(f"{path}: must belong to this checkpoint; it holds the eigenbasis of step {born:.0f}")
    return found  # type: ignore[no-any-return]


def _save(content: dict[str, Any], path: Path) -> None:
    partial = path.with_suffix(".partial")  # one writer per path, so a killed save's remains are overwritten
    torch.save(content, partial)
    os.replace(partial, path)
