"""`blockscale demo`: real weights through NVFP4, and what that costs."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from blockscale.cli.terminal import FAILED, REFUSED, AsJson, output, plain_table, print_json, progress, refusals
from blockscale.demo import emulation, job
from blockscale.demo import moe as experts
from blockscale.demo.emulation import EmulatedLayer
from blockscale.demo.layers import Layer, Skipped, WeightFile
from blockscale.demo.similarity import REQUIRED, Similarity
from blockscale.quantize import METHODS


def demo(
    weights: Annotated[
        Path | None,
        typer.Option(help="Quantise the 2-D tensors of this safetensors file instead.", show_default=False),
    ] = None,
    moe: Annotated[
        bool,
        typer.Option("--moe", help="Run a small layer of experts by the B200's grouped kernel, emulated, instead."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Quantise a real sentence encoder to NVFP4, run it, and compare its embeddings with fp32."""
    if moe:
        show_experts(as_json)
        return
    if weights is not None:
        show_file(weights, as_json)
        return
    with refusals(as_json):
        report = job.run(progress)
    if as_json:
        print_json(as_document(report))
    else:
        show(report)
    for miss in [*misses(report.runs), *broken(report.emulated)]:
        typer.echo(f"blockscale: {miss}", err=True)
    if not report.passed:
        raise typer.Exit(FAILED)


def misses(runs: Sequence[Similarity]) -> list[str]:
    """One message for each run that is not close enough to fp32."""
    return [
        f"{run.activations} with {run.method}: minimum {run.minimum:.4f}, mean {run.mean:.4f}; "
        f"required {REQUIRED[run.activations].minimum} and {REQUIRED[run.activations].mean}"
        for run in runs
        if not run.passed
    ]


def broken(emulated: EmulatedLayer | str) -> list[str]:
    """A message if the emulated kernel broke its contract or the emulator found something."""
    if isinstance(emulated, str) or emulated.passed:
        return []
    errors = ", ".join(f"{name} {error:.3g}" for name, error in emulated.errors.items())
    return [f"{emulated.layer} on {emulated.arch}: {emulated.findings} findings, errors in tolerances: {errors}"]


def as_document(report: job.Report) -> dict[str, Any]:
    return {
        "layers": [asdict(layer) for layer in report.layers],
        "sentences": [asdict(sentence) for sentence in report.sentences],
        "runs": [
            asdict(run)
            | {"minimum": run.minimum, "mean": run.mean, "passed": run.passed}
            | {"required": asdict(REQUIRED[run.activations])}
            for run in report.runs
        ],
        "emulated": {"left_out": report.emulated} if isinstance(report.emulated, str) else asdict(report.emulated),
        "seconds": report.seconds,
        "passed": report.passed,
    }


def show(report: job.Report) -> None:
    console = output()
    layers = [replace(layer, name=layer.name.removeprefix("encoder.")) for layer in report.layers]
    console.print(layer_table("all-MiniLM-L6-v2: its linear layers", layers), "")
    console.print(sentence_table(report), "")
    console.print(summary_table(report.runs), "")
    show_emulated(report.emulated)
    verdict = "every requirement met" if report.passed else "requirements missed"
    console.print(f"{len(report.layers)} layers, {len(report.sentences)} sentences, {report.seconds:.1f} s: {verdict}")


def show_emulated(emulated: EmulatedLayer | str) -> None:
    console = output()
    if isinstance(emulated, str):
        console.print(Text(f"No kernel was emulated: {emulated}"), "")
        return
    m, n, k = emulated.sizes
    table = plain_table(f"{emulated.layer} by the kernel for {emulated.arch}, on the software GPU", show_header=False)
    table.add_row("product", f"{m} x {n} x {k}, {emulated.config}")
    table.add_row("executed", f"{emulated.instructions:,} warp instructions, {emulated.findings} findings")
    for name, error in emulated.errors.items():
        table.add_row(f"largest error, {name}", f"{error:.3f} of what its contract allows")
    table.add_row("time", f"{emulated.seconds:.1f} s on this machine, compiling included; nothing follows for a GPU")
    console.print(table, "")


def show_experts(as_json: bool) -> None:
    """A layer of experts on the software GPU beside the CPU."""
    reason = emulation.why_not()
    if reason is not None:
        typer.echo(f"blockscale: nothing was emulated: {reason}", err=True)
        raise typer.Exit(REFUSED)
    with refusals(as_json), progress("compiling two kernels and running them", 1) as advance:
        layer = experts.emulate()
        advance()
    if as_json:
        print_json(asdict(layer) | {"passed": layer.passed})
    else:
        output().print(experts_table(layer), "")
    if not layer.passed:
        typer.echo(f"blockscale: {layer.findings} findings, or results out of bounds", err=True)
        raise typer.Exit(FAILED)


def experts_table(layer: experts.EmulatedExperts) -> Table:
    table = plain_table(
        f"A layer of experts by the grouped kernel for {layer.arch}, on the software GPU", show_header=False
    )
    table.add_row("rows of each expert", " ".join(map(str, layer.rows)))
    for name, config in zip(("rows x gate and up, SwiGLU", "x down"), layer.configs, strict=True):
        table.add_row(name, config)
    table.add_row(
        "executed", f"{layer.launches} launches, {layer.instructions:,} warp instructions, {layer.findings} findings"
    )
    table.add_row("NVFP4 between them", f"{100 * layer.same_bytes:.2f}% of its bytes are the CPU backend's")
    for name, error in layer.errors.items():
        table.add_row(f"largest error, {name}", f"{error:.3f} of what its contract allows")
    table.add_row("beside the CPU", f"{layer.difference:.2e} of the largest result at most")
    table.add_row("beside fp32", f"{layer.snr_db:.1f} dB, random weights and rows")
    table.add_row("time", f"{layer.seconds:.1f} s on this machine, compiling included; nothing follows for a GPU")
    return table


def layer_table(title: str, layers: Sequence[Layer]) -> Table:
    before, after = sum(layer.bytes_before for layer in layers), sum(layer.bytes_after for layer in layers)
    total = f"total, {before / after:.2f} times smaller" if after else "total"
    table = plain_table(f"{title} in NVFP4, with the SNR of each quantiser", show_footer=True)
    table.add_column("layer", total, overflow="fold", min_width=24)
    table.add_column("shape", justify="right", no_wrap=True)
    table.add_column("bytes", f"{before:,}", justify="right", no_wrap=True)
    table.add_column("in NVFP4", f"{after:,}", justify="right", no_wrap=True)
    for method in METHODS:
        table.add_column(f"{method.replace('_', ' ')} dB", justify="right", max_width=5)
    for layer in layers:
        snr = ["exact" if value is None else f"{value:.2f}" for value in layer.snr_db.values()]
        shape = f"{layer.shape[0]}x{layer.shape[1]}"
        table.add_row(Text(layer.name), shape, f"{layer.bytes_before:,}", f"{layer.bytes_after:,}", *snr)
    return table


def sentence_table(report: job.Report) -> Table:
    table = plain_table("Cosine similarity with the fp32 embedding", expand=True)
    table.add_column("sentence", overflow="ellipsis", no_wrap=True, ratio=1)
    table.add_column("tokens", justify="right")
    for run in report.runs:
        heading = f"{run.activations.replace('-', ' ')} {run.method.replace('_', ' ')}"
        table.add_column(heading, justify="right", width=8)
    for i, sentence in enumerate(report.sentences):
        table.add_row(Text(sentence.text), str(sentence.tokens), *(f"{run.cosines[i]:.4f}" for run in report.runs))
    return table


def summary_table(runs: Sequence[Similarity]) -> Table:
    table = plain_table("Against what is required")
    for heading in ("activations", "method"):
        table.add_column(heading)
    for heading in ("minimum", "required", "mean", "required", ""):
        table.add_column(heading, justify="right")
    for run in runs:
        required = REQUIRED[run.activations]
        numbers = (run.minimum, required.minimum, run.mean, required.mean)
        verdict = "[green]met[/]" if run.passed else "[red]missed[/]"
        table.add_row(run.activations, run.method.replace("_", " "), *(f"{x:.4f}" for x in numbers), verdict)
    return table


def show_file(path: Path, as_json: bool) -> None:
    """The layer table for every matrix of the user's file, and why the other tensors are not in it."""
    with refusals(as_json), WeightFile(path) as file, progress("quantising", len(file)) as advance:
        rows: list[Layer | Skipped] = []
        for row in file:
            rows.append(row)
            advance()
    layers = [row for row in rows if isinstance(row, Layer)]
    skipped = [row for row in rows if isinstance(row, Skipped)]
    if as_json:
        print_json({"layers": [asdict(row) for row in layers], "skipped": [asdict(row) for row in skipped]})
    else:
        console = output()
        if layers:
            console.print(layer_table(f"{path}: its matrices", layers), "")
        for row in skipped:
            console.print(Text(f"skipped {row.name}: {row.reason}"), soft_wrap=True)
    if not layers:
        typer.echo(f"blockscale: no tensor of {path} can be quantised", err=True)
        raise typer.Exit(REFUSED)
