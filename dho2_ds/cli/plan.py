"""``dho2 plan``: what training with DHO2 will need of memory, network and time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from dho2_ds.cli._shared import AsJson, refuse

if TYPE_CHECKING:
    from dho2_ds.planner import Plan

Engine = Literal["ddp", "fsdp", "zero0", "zero1", "zero2", "zero3"]
Precision = Literal["float32", "bfloat16", "float16"]


def plan(
    parameters: Annotated[float | None, typer.Option(min=1, help="Size of the model, such as 7e9.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Folder with a Hugging Face config.json, instead of a size; needs transformers.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="DeepSpeed JSON with the DHO2 optimizer; options below override it.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Training ranks that share the state.")] = 1,
    engine: Annotated[
        Engine | None, typer.Option(help="Who shards the model; ddp also stands for one process.", show_default="ddp")
    ] = None,
    precision: Annotated[
        Precision | None, typer.Option(help="In which the model computes.", show_default="float32")
    ] = None,
    eigenvectors: Annotated[
        int | None, typer.Option("-k", "--eigenvectors", min=0, help="k.", show_default="8")
    ] = None,
    lanczos_steps: Annotated[
        int | None, typer.Option(min=2, help="Products per refresh.", show_default="max(2k+4, 2 ln n)")
    ] = None,
    eigenvector_dtype: Annotated[
        Literal["float32", "bfloat16"] | None, typer.Option(help="Storage of eigenvectors.", show_default="float32")
    ] = None,
    base: Annotated[
        Literal["adamw", "adam", "sgd", "soap"] | None, typer.Option(help="Base optimizer.", show_default="adamw")
    ] = None,
    mode: Annotated[
        Literal["inline", "spread", "dedicated"] | None,
        typer.Option(help="Where and when curvature is computed.", show_default="inline"),
    ] = None,
    curvature_ranks: Annotated[
        int | None, typer.Option(min=1, help="Mode dedicated: C, beside the training ranks.", show_default="1")
    ] = None,
    interval: Annotated[int | None, typer.Option(min=1, help="Steps between refreshes.", show_default="100")] = None,
    flops: Annotated[
        float | None,
        typer.Option(min=1, help="Operations per second of a rank; with --tokens gives seconds."),
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a micro-batch on one rank.")] = None,
    accumulation: Annotated[int | None, typer.Option(min=1, help="Micro-batches per step.", show_default="1")] = None,
    bandwidth: Annotated[
        float | None, typer.Option(min=1, help="Bytes per second that a rank sends; else traffic takes no time.")
    ] = None,
    as_json: Annotated[bool, AsJson] = False,
) -> None:
    """Bytes per rank, traffic and seconds of training with DHO2, before you rent the machines.

    Example: dho2 plan --parameters 7e9 --ranks 32 --engine zero3 --precision bfloat16 --flops 4e14 --tokens 8192
    """
    from dho2_ds import planner
    from dho2_ds.config import ConfigError, parse_config

    if (parameters is None) == (model is None):
        refuse("parameters, model: must be one of the two; give --parameters 7e9 or --model FOLDER")
    if (flops is None) != (tokens is None):
        refuse("flops, tokens: must be given together; seconds follow from both")
    if bandwidth is not None and flops is None:
        refuse("bandwidth: must come with --flops and --tokens; seconds follow from all three")
    found = _read(config) if config is not None else {}
    params: dict[str, Any] = dict(_object(_object(found, "optimizer"), "params"))
    curvature: dict[str, Any] = dict(params.get("curvature") or {})
    options = {
        "mode": mode,
        "ranks": curvature_ranks,
        "lanczos_steps": lanczos_steps,
        "eigenvector_dtype": eigenvector_dtype,
        "interval": interval,
    }
    curvature |= {key: value for key, value in options.items() if value is not None}
    overrides = {"base": base, "num_eigenvectors": eigenvectors}
    params |= {"curvature": curvature, **{key: value for key, value in overrides.items() if value is not None}}
    try:
        # Trainers fill "auto" in, except where it is ours.
        ours = ("lr",) if "lr_fraction" in params else ()
        settings = parse_config({key: value for key, value in params.items() if value != "auto" or key in ours})
    except ConfigError as error:
        refuse(str(error))
    if model is not None:
        shapes = _shapes(model)
    else:
        assert parameters is not None
        shapes = planner.square_shapes(int(parameters), settings.soap.max_block)
    result = planner.plan(
        shapes,
        settings,
        engine=engine or _engine(found),
        ranks=ranks,
        precision=precision or _precision(found),
        accumulation=accumulation or _integer(found.get("gradient_accumulation_steps"), 1),
        workload=planner.Workload(flops, tokens, bandwidth) if flops is not None and tokens is not None else None,
    )
    if settings.num_eigenvectors >= result.parameters:
        refuse(
            f"num_eigenvectors={settings.num_eigenvectors}: must be < {result.parameters}, the number of parameters; "
            "lower it"
        )
    if result.precision != "float32" and settings.curvature.hvp == "forward_difference":
        refuse("curvature.hvp='forward_difference': must not be used in 16 bits; use 'auto'")
    if as_json:
        typer.echo(json.dumps(_json(result), indent=2))
    else:
        _print(result, Console())


def _read(path: Path) -> dict[str, Any]:
    """A DeepSpeed JSON whose optimizer is ours."""
    try:
        found = json.loads(path.read_text())
        kind = str(found["optimizer"]["type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        refuse(f"config={path}: must be a DeepSpeed JSON with an optimizer block ({error}); see configs/")
    if kind.lower() != "dho2":
        refuse(f'config={path}: its optimizer.type={kind!r}: must be "DHO2"; change it or leave --config out')
    return dict(found)


def _engine(found: Mapping[str, Any]) -> Engine:
    stages: tuple[Engine, ...] = ("zero0", "zero1", "zero2", "zero3")
    stage = _integer(_object(found, "zero_optimization").get("stage"), 0)
    if stage not in range(len(stages)):
        refuse(f"zero_optimization.stage={stage}: must be 0, 1, 2 or 3; change it or give --engine")
    return stages[stage] if found else "ddp"


def _precision(found: Mapping[str, Any]) -> Precision:
    kinds: tuple[tuple[str, Precision], ...] = (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16"))
    return next((kind for key, kind in kinds if _object(found, key).get("enabled") is True), "float32")


def _object(found: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object of a DeepSpeed JSON, empty where there is none."""
    value = found.get(key)
    return value if isinstance(value, Mapping) else {}


def _integer(value: Any, default: int) -> int:
    """A number of a DeepSpeed JSON, where trainers may have left "auto"."""
    return value if isinstance(value, int) else default


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a Hugging Face model, tied ones once, without allocating any."""
    if not (folder / "config.json").is_file():
        refuse(f"model={folder}: must be a folder with a Hugging Face config.json; or give --parameters")
    try:
        import transformers
    except ImportError:
        refuse("model: must come with transformers, to count parameters; pip install transformers or give --parameters")
    import torch

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        names = config.architectures or []
        kind = getattr(transformers, names[0]) if names else None
        with torch.device("meta"):
            network = kind(config) if kind is not None else transformers.AutoModel.from_config(config)
    except (AttributeError, ValueError, OSError, ImportError) as error:
        refuse(f"model={folder}: must be an architecture that transformers knows ({error}); or give --parameters")
    return {name: tuple(p.shape) for name, p in network.named_parameters() if p.requires_grad}


def _json(plan: Plan) -> dict[str, Any]:
    """The plan, with the sums of its bytes."""
    found = asdict(plan)
    for side, memory in (("training", plan.training), ("curvature", plan.curvature)):
        if memory is not None:
            found[side] |= {"steady": memory.steady, "peak": memory.peak}
    return found


def _print(plan: Plan, console: Console) -> None:
    from dho2_ds.monitor import human_bytes

    sides = [("training rank", plan.training), ("curvature rank", plan.curvature)]
    present = [(f"per {name}", memory) for name, memory in sides if memory is not None]
    title = f"{plan.parameters:,} parameters, {plan.engine}, {plan.precision}, {plan.ranks} training rank(s)"
    if plan.curvature_ranks:
        title += f", {plan.curvature_ranks} curvature rank(s)"
    console.print(title, highlight=False, soft_wrap=True)
    table = Table()
    table.add_column("memory")
    for name, _ in present:
        table.add_column(name, justify="right")
    for field in fields(plan.training):
        values = [getattr(memory, field.name) for _, memory in present]
        if any(values):
            table.add_row(field.name.replace("_", " "), *map(human_bytes, values))
    table.add_section()
    table.add_row("between refreshes", *(human_bytes(memory.steady) for _, memory in present))
    table.add_row("during a refresh", *(human_bytes(memory.peak) for _, memory in present), style="bold")
    console.print(table)
    traffic, timing = plan.traffic, plan.timing
    lines = [
        "Activations, gathered layers and communication buckets come on top.",
        f"Sent per rank: {human_bytes(traffic.engine_step)} a step by the engine, {human_bytes(traffic.step)} by DHO2",
    ]
    if plan.hvps:
        bridge = f", {human_bytes(traffic.bridge)} over the bridge per training rank" if traffic.bridge else ""
        lines.append(f"Per refresh: {plan.hvps} products, {human_bytes(traffic.refresh)} sent per rank{bridge}")
    if timing is not None:
        lines.append(
            f"Seconds: {timing.step:.3g} a step, {timing.refresh:.3g} a refresh, {timing.interval:.3g} an interval"
        )
        if timing.curvature_ranks is None:
            lines.append(
                "Not even as many curvature ranks as training ranks end a refresh within the interval: raise it"
            )
        elif timing.curvature_ranks:
            lines.append(f"Curvature ranks with which a refresh ends within the interval: {timing.curvature_ranks}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
