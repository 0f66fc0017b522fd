"""``dho2 spectrum``: leading eigenvalues and spectral density of the Hessian of any model, sharded or not."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dho2_ds.cli._shared import AsJson, logarithmic, progress, pyplot, refuse
from dho2_ds.settings import Products  # typer reads it at run time

if TYPE_CHECKING:
    from torch import nn

    from dho2_ds.curvature.density import Density
    from dho2_ds.spectra import Spectrum


def spectrum(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION",
            help="Function, also as path/to/file.py:function, that returns (model, loss_fn, data), or a dict of these.",
        ),
    ],
    k: Annotated[int, typer.Option("-k", min=1, help="Leading eigenvalues.")] = 8,
    lanczos_steps: Annotated[
        int | None, typer.Option(min=2, help="Products for the eigenvalues.", show_default="4k + 20")
    ] = None,
    probes: Annotated[int, typer.Option(min=0, help="Random vectors for the density; 0: no density.")] = 4,
    density_steps: Annotated[int, typer.Option(min=1, help="Products for each of them.")] = 80,
    seed: Annotated[int, typer.Option(min=0, help="Of the random vectors.")] = 0,
    batches: Annotated[int, typer.Option(min=1, help="Batches of each rank to average over.")] = 1,
    hvp: Annotated[Products, typer.Option(help="How Hessian-vector products are made.")] = "auto",
    output: Annotated[Path, typer.Option(help="Picture to write; the JSON goes beside it.")] = Path("spectrum.png"),
    as_json: Annotated[bool, AsJson] = False,
) -> None:
    """Leading eigenvalues and density of the Hessian of a model's loss; writes a picture and a JSON.

    The function's loss_fn(model, batch) returns the mean loss of one of the batches in data. The model may be a
    module, a DeepSpeed engine (any ZeRO stage), an FSDP root or DistributedDataParallel.

    On several ranks: torchrun --nproc_per_node 2 -m dho2_ds.cli spectrum MODULE:FUNCTION. The process group exists when
    the function is called; each rank has its own data; a model that is not sharded is wrapped into
    DistributedDataParallel.
    """
    import torch.distributed as dist

    import dho2_ds
    from dho2_ds.config import ConfigError
    from dho2_ds.spectra import NoSpectrum

    if lanczos_steps is not None and lanczos_steps < k + 2:
        refuse(f"lanczos_steps={lanczos_steps}: must be >= {k + 2} (k + 2); raise it or lower k")
    if output.suffix != ".png":
        refuse(f"output={output}: must be a picture's name that ends in .png; the JSON goes beside it")
    build = _function(source)
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and not dist.is_initialized():
        dist.init_process_group()
    parts = _parts(build(), source)
    model = _sharded(parts["model"], world)
    steps = lanczos_steps or 4 * k + 20
    common: dict[str, Any] = {"loss_fn": parts["loss_fn"], "batches": batches, "hvp": hvp}
    # An iterator would go on where the first call left off; both shall see the same batches.
    common["data"] = list(itertools.islice(parts["data"], batches))
    if len(common["data"]) < batches:
        refuse(f"batches={batches}: must be at most {len(common['data'])}, which is what data has; lower it")
    main = world == 1 or dist.get_rank() == 0
    density = None
    try:
        with _counted("eigenvalues", steps, shown=main) as between:
            found = dho2_ds.spectrum(model, k=k, lanczos_steps=steps, between=between, **common)
        if probes:
            with _counted("density", probes * density_steps, shown=main) as between:
                density = dho2_ds.spectral_density(
                    model, probes=probes, lanczos_steps=density_steps, seed=seed, between=between, **common
                )
    except ConfigError as error:
        refuse(str(error))
    except NoSpectrum as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    if main:
        _report(found, density, output, as_json)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _function(source: str) -> Callable[[], Any]:
    """Import what MODULE:FUNCTION names."""
    where, _, name = source.rpartition(":")
    if not where or not name:
        refuse(f"source={source}: must be MODULE:FUNCTION or path/to/file.py:function; name the function")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            assert spec is not None and spec.loader is not None
            sys.path.insert(0, str(Path(where).resolve().parent))  # as Python does for a script
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
        else:
            sys.path.insert(0, os.getcwd())
            module = importlib.import_module(where)
        found = getattr(module, name)
    except (FileNotFoundError, ModuleNotFoundError, AttributeError) as error:
        refuse(f"source={source}: must name a function that can be imported ({error}); check the path and the name")
    if not callable(found):
        refuse(f"source={source}: must name a function; {name} is {type(found).__name__}")
    return found  # type: ignore[no-any-return]


def _parts(returned: Any, source: str) -> dict[str, Any]:
    names = ("model", "loss_fn", "data")
    if isinstance(returned, Mapping) and set(names) <= set(returned):
        return dict(returned)
    if isinstance(returned, tuple) and len(returned) == len(names):
        return dict(zip(names, returned, strict=True))
    refuse(f"source={source}: must return (model, loss_fn, data) or a dict of these; it returned a {type(returned)}")


def _sharded(model: nn.Module, world: int) -> nn.Module:
    """The model as it is sharded, or replicated by DistributedDataParallel."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    from dho2_ds.hosts.detect import is_engine

    if world == 1 or is_engine(model) or any(hasattr(p, "device_mesh") for p in model.parameters()):
        return model
    if any(isinstance(m, (FullyShardedDataParallel, DistributedDataParallel)) for m in model.modules()):
        return model
    return DistributedDataParallel(model)


@contextlib.contextmanager
def _counted(what: str, total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar that advances by one per product."""
    with progress(disable=not shown) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
        bar.update(task, completed=bar.tasks[0].completed, total=bar.tasks[0].completed)


def _report(found: Spectrum, density: Density | None, output: Path, as_json: bool) -> None:
    """Write the picture and the JSON, and print."""
    result: dict[str, Any] = {
        "eigenvalues": found.eigenvalues,
        "residuals": found.residuals,
        "hvps": found.hvps,
        "self_check": found.self_check if found.self_check == found.self_check else None,
    }
    if density is not None:
        mean, square = density.moment(1), density.moment(2)
        result["density"] = {
            "parameters": density.numel,
            "trace": density.trace,
            "mean": mean,
            "second_moment": square,
            "hvps": density.hvps,
            "nodes": density.nodes,
            "weights": density.weights,
        }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    drawn = _draw(found, density, output)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
        return
    console = Console()
    table = Table("", "eigenvalue", "residual")
    for index, (value, residual) in enumerate(zip(found.eigenvalues, found.residuals, strict=True), start=1):
        table.add_row(str(index), f"{value:.6g}", f"{residual:.1e}")
    console.print(table)
    if density is not None:
        console.print(f"trace {density.trace:.6g}, mean {mean:.4g}, second moment {square:.4g}", highlight=False)
    products = found.hvps + (density.hvps if density is not None else 0)
    console.print(f"{products} Hessian-vector products; wrote {output.with_suffix('.json')}", highlight=False)
    console.print(f"wrote {output}" if drawn else "no picture: pip install 'dho2-ds[cli]'", highlight=False)


def _draw(found: Spectrum, density: Density | None, output: Path) -> bool:
    """Eigenvalues beside the density, both on a log scale; False without matplotlib."""
    plt = pyplot()
    if plt is None:
        return False
    columns = 1 if density is None else 2
    figure, axes = plt.subplots(1, columns, figsize=(6.5 * columns, 4.8), layout="constrained", squeeze=False)
    left, blue, red = axes[0, 0], "#3b6ea8", "#d1495b"
    for sign, color, label in ((1, blue, "positive"), (-1, red, "negative")):
        pairs = enumerate(zip(found.eigenvalues, found.residuals, strict=True), start=1)
        chosen = [(i, abs(value), residual) for i, (value, residual) in pairs if sign * value > 0]
        if chosen:
            index, size, error = zip(*chosen, strict=True)
            left.errorbar(index, size, error, fmt="o", color=color, capsize=3, label=label)
    left.set(xlabel="index", ylabel="|eigenvalue|", title="Leading eigenvalues of the Hessian")
    logarithmic(left)
    left.xaxis.get_major_locator().set_params(integer=True)
    if min(found.eigenvalues) < 0:
        left.legend()
    if density is not None:
        right = axes[0, 1]
        low, high = min(map(min, density.nodes)), max(map(max, density.nodes))
        width = max(high - low, 1e-300) / 150
        points = [low - 5 * width + i * (high - low + 10 * width) / 1500 for i in range(1501)]
        right.plot(points, density.curve(points, width), color=blue)
        alone = 1 / (density.numel * width * 2.5)  # the peak of one eigenvalue among n
        right.vlines(found.eigenvalues, alone / 30, alone / 10, color=red, lw=1.2, label="leading eigenvalues")
        right.set(yscale="log", ylim=(alone / 30, None), xlabel="eigenvalue", ylabel="density")
        right.set_title(f"Spectral density, {len(density.nodes)} probes of {max(map(len, density.nodes))} nodes")
        right.legend()
    figure.savefig(output)
    plt.close(figure)
    return True
