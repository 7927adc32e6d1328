"""`blockscale inspect`, `convert` and `quantize`: checkpoints from the shell."""

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from blockscale.checkpoints import EXCLUDED, LayerReport, load_checkpoint, quantize_checkpoint, save_checkpoint
from blockscale.checkpoints.inspection import Inspection, LayerFacts, inspect_checkpoint
from blockscale.cli.terminal import FAILED, AsJson, output, plain_table, print_json, progress, refusals, say, shown

Convention = Literal["modelopt", "compressed-tensors", "blockscale"]
Method = Literal["rtn", "four_over_six", "mse"]
ScaleLayout = Annotated[
    Literal["linear", "128x4"], typer.Option(help="How the file has its block scales; files do not say it.")
]
FirstNibble = Annotated[Literal["low", "high"], typer.Option(help="Which half of a byte holds the even column.")]
ShardGB = Annotated[float, typer.Option(min=1e-6, help="Start a new file beyond so many gigabytes.")]


def steps(description: str) -> Callable[[int], AbstractContextManager[Callable[[], None]]]:
    return lambda total: progress(description, total)


@contextmanager
def notes() -> Iterator[None]:
    """Warnings as lines on standard error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        say(f"note: {warning.message}")


def inspect(
    path: Annotated[Path, typer.Argument(help="A safetensors file, or a directory with a checkpoint.")],
    scale_layout: ScaleLayout = "linear",
    first_nibble: FirstNibble = "low",
    as_json: AsJson = False,
) -> None:
    """Show every NVFP4 layer of a checkpoint, its scales, and what is wrong with it."""
    with refusals(as_json):
        found = inspect_checkpoint(
            path, scale_layout=scale_layout, first_nibble=first_nibble, progress=steps("reading layers")
        )
    if as_json:
        print_json(asdict(found) | {"sound": found.sound})
    else:
        show_inspection(found)
    if not found.sound:
        say("the checkpoint cannot be loaded as it is")
        raise typer.Exit(FAILED)


def convert(
    source: Annotated[Path, typer.Argument(help="A safetensors file, or a directory with a checkpoint.")],
    target: Annotated[Path, typer.Argument(help="A file if it ends in .safetensors, otherwise a directory.")],
    to: Annotated[Convention, typer.Option(help="The convention to write.")],
    scale_layout: ScaleLayout = "linear",
    first_nibble: FirstNibble = "low",
    shard_gb: ShardGB = 5.0,
    as_json: AsJson = False,
) -> None:
    """Rewrite a checkpoint in another convention; codes and block scales stay as they are."""
    with refusals(as_json), notes():
        checkpoint = load_checkpoint(source, scale_layout=scale_layout, first_nibble=first_nibble)
        bar = steps(f"writing {target.name}")
        save_checkpoint(checkpoint, target, to=to, shard_bytes=int(shard_gb * 1e9), progress=bar)
    weights, others = len(checkpoint.layers), len(checkpoint.plain)
    if as_json:
        print_json({"target": os.fspath(target), "to": to, "weights": weights, "other_tensors": others})
    else:
        output().print(shown(f"{target}: {weights} NVFP4 weights, {others} other tensors, {to}"))


def quantize(
    source: Annotated[Path, typer.Argument(help="A directory with an fp32, bf16 or fp16 model in safetensors.")],
    target: Annotated[Path, typer.Argument(help="The directory to write.")],
    method: Annotated[Method, typer.Option(help="How block scales are chosen.")] = "rtn",
    exclude: Annotated[
        list[str] | None,
        typer.Option(help=f"Layers to leave, as shell wildcards; repeat as needed. Default: {', '.join(EXCLUDED)}."),
    ] = None,
    to: Annotated[Convention, typer.Option(help="The convention to write.")] = "compressed-tensors",
    shard_gb: ShardGB = 5.0,
    as_json: AsJson = False,
) -> None:
    """Quantise the linear layers of a model to NVFP4, and report what each of them loses."""
    with refusals(as_json), notes():
        reports = quantize_checkpoint(
            source,
            target,
            method=method,
            exclude=EXCLUDED if exclude is None else exclude,
            to=to,
            shard_bytes=int(shard_gb * 1e9),
            progress=steps(f"quantising {source.name}"),
        )
    done = [report for report in reports if report.reason is None]
    if as_json:
        rows = [{**asdict(report), "lossless": report.snr_db == math.inf} for report in reports]
        print_json({"target": os.fspath(target), "to": to, "method": method, "quantised": len(done), "layers": rows})
    else:
        show_reports(f"{target}: {len(done)} of {len(reports)} linear layers in NVFP4, {method}, {to}", reports)


def show_inspection(found: Inspection) -> None:
    console = output()
    configured = f"configured by {found.configured}" if found.configured else "no quantisation configuration"
    table = plain_table(f"{found.path}: {found.files} file{'s' * (found.files > 1)}, {configured}")
    for heading in ("layer", "shape", "format", "block scales", "global scale", "activations"):
        table.add_column(heading, overflow="fold")
    for layer in found.layers:
        table.add_row(*(shown(cell) for cell in layer_row(layer)))
    console.print(table)
    kinds: dict[str, int] = {}
    for tensor in found.tensors:
        kinds[tensor.dtype] = kinds.get(tensor.dtype, 0) + 1
    others = ", ".join(f"{count} {dtype}" for dtype, count in sorted(kinds.items()))
    console.print(shown(f"{len(found.layers)} NVFP4 weights; other tensors: {others or 'none'}"))
    for problem in found.problems:
        kind = "broken" if problem.fatal else "note"
        console.print(shown(f"{kind}: {problem.name}: {problem.text}" if problem.name else f"{kind}: {problem.text}"))


def layer_row(layer: LayerFacts) -> tuple[str, ...]:
    shape = " x ".join(map(str, layer.shape))
    parts = f" ({layer.parts} parts)" if layer.parts > 1 else ""
    ranges = (span(layer.block_scales), span(layer.global_scale) + parts)
    inputs = layer.activations + (f" {span(layer.input_scale)}" if layer.input_scale else "")
    return layer.name, shape, layer.format, *ranges, inputs


def span(values: tuple[float, float] | None) -> str:
    if values is None:
        return "-"
    low, high = values
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"


def show_reports(title: str, reports: list[LayerReport]) -> None:
    table = plain_table(title)
    table.add_column("layer", overflow="fold")
    table.add_column("shape")
    table.add_column("SNR, dB", justify="right")
    for report in reports:
        table.add_row(shown(report.name), " x ".join(map(str, report.shape)), shown(snr_cell(report)))
    output().print(table)


def snr_cell(report: LayerReport) -> str:
    return report.reason or f"{report.snr_db:.2f}"
