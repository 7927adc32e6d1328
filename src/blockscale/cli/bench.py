"""`blockscale bench M N K`: weight-only products on this GPU, beside every rival at hand and what the GPU can do."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from blockscale.cli.terminal import FAILED, AsJson, output, plain_table, print_json, progress, refusals, say

Dtype = Literal["bf16", "fp16"]
Suite = Literal["table", "grid", "prefill"]
MINIMUM_ROUNDS = 5


def bench(
    m: Annotated[int | None, typer.Argument(help="Rows of the activation.", show_default=False)] = None,
    n: Annotated[int | None, typer.Argument(help="Rows of the weight.", show_default=False)] = None,
    k: Annotated[int | None, typer.Argument(help="Columns of both.", show_default=False)] = None,
    suite: Annotated[
        Suite | None,
        typer.Option(
            help="Instead of M N K: 30 products (table), 490 (grid), 35 of many rows (prefill).", show_default=False
        ),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of activations and results.")] = "bf16",
    rival: Annotated[
        list[str] | None, typer.Option(help="Only these rivals; may be repeated. All by default.", show_default=False)
    ] = None,
    ahead: Annotated[bool, typer.Option(help="Race ours with weights read ahead (Config.ahead) too.")] = True,
    every_config: Annotated[
        bool, typer.Option("--every-config", help="Race all configurations, not the library's choice alone.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=MINIMUM_ROUNDS, help="Timings of each candidate.")] = 21,
    record: Annotated[Path | None, typer.Option(help="Write a JSON record here.", show_default=False)] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a roofline plot here (SVG, PNG).", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time weight-only products, A (M, K) in bf16 or fp16 by an NVFP4 weight (N, K), from cold memory.

    Candidates take turns, each a CUDA graph; every result is compared with float64 before and after. Where a rival
    that reads NVFP4 is more than 3% faster, all are measured five times before it counts as lost. Rivals that are not
    installed are named; asked for by --rival, they are an error. Exit code 1: a result is wrong, or a product is lost.
    """
    from blockscale.bench.run import Asked
    from blockscale.bench.timing import Wrong

    try:
        with refusals(as_json):
            asked = Asked(
                _shapes(m, n, k, suite),
                _rivals(rival),
                dtype=dtype,
                ahead=ahead,
                every_config=every_config,
                rounds=rounds,
            )
            for option, path in (("--record", record), ("--plot", plot)):
                if path is not None:
                    _check_writable(option, path)
            document, lines, losses = _run(asked, record, plot)
    except Wrong as error:
        say(str(error))
        raise typer.Exit(FAILED) from error
    if as_json:
        print_json(document)
    else:
        _show(document, lines)
    if losses:
        say(f"behind a rival by more than 3%: {', '.join(losses)}")
        raise typer.Exit(FAILED)


def _shapes(m: int | None, n: int | None, k: int | None, suite: Suite | None) -> list[tuple[int, int, int]]:
    from blockscale.bench.run import SUITES

    given = [size for size in (m, n, k) if size is not None]
    if (len(given) == 3) == (suite is not None) or len(given) not in (0, 3):
        raise ValueError(f"M N K: {' '.join(map(str, given)) or 'none'}, expected three sizes, or else --suite")
    if suite is not None:
        return SUITES[suite]
    for name, size in zip("MNK", given, strict=True):
        if size < 1:
            raise ValueError(f"{name} = {size}, must be at least 1")
    return [(given[0], given[1], given[2])]


def _rivals(asked: list[str] | None) -> list[str]:
    from blockscale.bench.rivals import EXACT, RIVALS, missing

    unknown = [name for name in asked or () if name not in RIVALS]
    if unknown:
        raise ValueError(f"--rival: {unknown[0]!r}, expected {', '.join(map(repr, RIVALS))}")
    absent = missing(list(RIVALS) if asked is None else asked)
    if asked is not None and absent:
        name, reason = next(iter(absent.items()))
        raise ValueError(f"--rival: {name!r} cannot be measured: {reason}")
    for name, reason in absent.items():
        say(f"without {name}: {reason}" + "; no product can be lost to it" * (name in EXACT))
    return list(dict.fromkeys(RIVALS if asked is None else asked))


def _check_writable(option: str, path: Path) -> None:
    """That a file can be written there, before anything is measured; what is there stays as it is."""
    there = path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"{option}: {path} cannot be written: {error.strerror}") from error
    if not there:
        path.unlink()


def _run(asked: Any, record_at: Path | None, plot: Path | None) -> tuple[dict[str, Any], list[list[str]], list[str]]:
    """The record, a row a product for the table, and the products that are lost; files are written."""
    from blockscale.bench import ceilings, plots, record
    from blockscale.bench import run as running
    from blockscale.bench.rivals import EXACT

    if plot is not None:
        plots.check_matplotlib()
    device = _gpu()
    with progress("measuring", len(asked.shapes) + 2) as advance:
        measured = running.measure(asked, device, advance)
        limits = {"copy_gb_per_s": round(ceilings.copying(device, MINIMUM_ROUNDS), 1)}
        advance()
        speeds = ceilings.multiplying(device, MINIMUM_ROUNDS)
        limits |= {f"{name}_tflop_per_s": round(speed, 1) for name, speed in speeds.items()}
        advance()
    document = record.as_json(measured, limits, record.circumstances(device, asked.rounds))
    if record_at is not None:  # first, since a picture can be drawn again
        record_at.write_text(json.dumps(document, indent=1) + "\n")
    if plot is not None:
        plots.draw(document, plot)
    losses = [f"{one.m}x{one.n}x{one.k}" for one in measured if record.lost(one, EXACT[1:])]
    return document, [_row(one) for one in measured], losses


def _gpu() -> torch.device:
    """The current GPU.

    Raises:
        ValueError: there is none, or none that multiplies a 16-bit activation by an NVFP4 weight.
    """
    from blockscale import available_backends

    if not torch.cuda.is_available():
        raise ValueError("bench: needs an NVIDIA GPU, and torch sees none; `blockscale doctor` says why")
    device = torch.device("cuda", torch.cuda.current_device())
    reason = available_backends()["sm90"]
    if reason is not None:
        raise ValueError(f"bench: weight-only products are measured on Hopper: {reason}")
    return device


def _row(one: Any) -> list[str]:
    times = [f"{name} {one.median(name):.1f}" for name in one.us if name != "ours"]
    return [f"{one.m}", f"{one.n}", f"{one.k}", f"{one.median('ours'):.1f}", *times, f"{one.read_us:.1f}"]


def _show(document: dict[str, Any], rows: list[list[str]]) -> None:
    limits = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in document["ceilings"].items())
    table = plain_table(f"{document['gpu']}, us a product, medians; {limits}")
    others = max(len(row) for row in rows) - 5
    for name in ("M", "N", "K", "ours", *[""] * others, "reading alone"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    output().print(table)
