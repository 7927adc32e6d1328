"""The command line: `python -m ptxemu run | exec | isa`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ptxemu.device import CHECKS, Device
from ptxemu.errors import Error, LaunchError
from ptxemu.isa import CHAPTERS
from ptxemu.isa.engine import Form, forms
from ptxemu.machine.chip import CHIPS
from ptxemu.machine.queue import SCHEDULES
from ptxemu.report import Report

__all__ = ["main"]

ARGUMENT = (
    "an argument, in the parameters' order: an integer (5, 0x10), a number (1.5), an array of zeros (float32:256, "
    "uint8:4x32), or a file (x.npy), which gets the result"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status: 0, or 1 after an error, which goes to stderr, or a report with findings."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.command(options) or 0
        sys.stdout.flush()
    except Error as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        if error.report is not None and options.command is not _print_table:
            _report(options, [error.report])
        return 1
    except BrokenPipeError:  # whoever reads has seen enough; the interpreter would flush once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m ptxemu", description="A software GPU that executes PTX.")
    commands = parser.add_subparsers(required=True, metavar="run | exec | isa")

    run = commands.add_parser("run", help="run a CuTe DSL program, its kernels on the software GPU")
    _add_device(run)
    run.add_argument("script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    run.set_defaults(command=_run)

    execute = commands.add_parser("exec", help="launch a kernel of a PTX file")
    _add_device(execute)
    execute.add_argument("file")
    execute.add_argument("--kernel", help="its name, if the file has several")
    for name, default in (("grid", (1,)), ("block", (32,)), ("cluster", None)):
        execute.add_argument(f"--{name}", type=_shape, default=default, metavar="X[,Y[,Z]]")
    execute.add_argument("--shared", type=int, default=0, metavar="BYTES", help="dynamic shared memory")
    execute.add_argument("--arg", action="append", default=[], dest="args", metavar="VALUE", help=ARGUMENT)
    execute.set_defaults(command=_execute)

    table = commands.add_parser("isa", help="print the instruction table, in Markdown")
    table.add_argument("chapters", nargs="*", metavar="chapter", help=f"of {', '.join(CHAPTERS)}; all by default")
    table.set_defaults(command=_print_table)
    return parser


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", choices=tuple(CHIPS), default="sm_100a")
    parser.add_argument("--schedule", choices=SCHEDULES, default="lazy", help="when asynchronous operations complete")
    parser.add_argument("--seed", type=int, default=0, help="of every order that nothing promises")
    parser.add_argument("--checks", choices=CHECKS, default="all")
    parser.add_argument("--sms", type=int, help="CTAs that run at a time; by default the chip's multiprocessors")
    parser.add_argument("--processes", type=int, default=1, help="that share the clusters of a launch")
    parser.add_argument("--summary", action="store_true", help="print findings and counters of each launch")
    parser.add_argument("--json", action="store_true", help="print findings and counters as JSON, a list of launches")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a timeline for Perfetto (FILE, FILE-2, ...)")


def _device(options: argparse.Namespace) -> Device:
    """The device; where a report is asked for, findings are in it and do not stop the program."""
    on_finding = "collect" if options.summary or options.json or options.trace else "raise"
    given = {name: getattr(options, name) for name in ("schedule", "seed", "checks", "sms", "processes")}
    return Device(options.target, on_finding=on_finding, **given)


def _report(options: argparse.Namespace, reports: Sequence[Report]) -> int:
    """Prints and writes what was asked for; the exit status."""
    for number, report in enumerate(reports, 1):
        if options.trace:
            path: Path = options.trace
            report.trace(path if number == 1 else path.with_stem(f"{path.stem}-{number}"))
        if options.summary:
            report.summary()
    if options.json:
        print("[" + ",\n".join(report.json() for report in reports) + "]")
    return 1 if any(report.findings for report in reports) else 0


def _run(options: argparse.Namespace) -> int:
    from ptxemu.host.run import run  # builds a C library, which the other commands do not need

    return _report(options, run(options.script, options.arguments, _device(options)))


def _execute(options: argparse.Namespace) -> int:
    try:
        ptx = Path(options.file).read_text()
    except OSError as error:
        raise LaunchError(f"{options.file}: {error.strerror}") from None
    values = [_argument(text) for text in options.args]
    report = _device(options).launch(
        ptx,
        options.kernel,
        grid=options.grid,
        block=options.block,
        cluster=options.cluster,
        shared=options.shared,
        args=values,
    )
    asked = options.summary or options.json
    if not asked:
        _show(report)
    for text, value in zip(options.args, values, strict=True):
        if isinstance(value, np.ndarray):
            if not asked:
                print(f"{text} =\n{value}")
            if text.endswith(".npy"):
                np.save(text, value)
    return _report(options, [report])


def _show(report: Report) -> None:
    for name, value in report.counters.items():
        if isinstance(value, int | float):
            print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
    for finding in report.findings:
        print(finding)


def _shape(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) > 3 or not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: one to three numbers, X[,Y[,Z]]")
    return tuple(map(int, parts))


def _argument(text: str) -> Any:
    """A launch argument from its notation on the command line."""
    if text.endswith(".npy"):
        try:
            return np.load(text)
        except (OSError, ValueError) as error:
            raise LaunchError(f"--arg {text}: {error}") from None
    kind, colon, shape = text.partition(":")
    try:
        if colon:
            return np.zeros([int(part) for part in shape.split("x")], kind)
        return float(text) if any(mark in text for mark in ".e") and not text.startswith("0x") else int(text, 0)
    except (TypeError, ValueError):
        raise LaunchError(f"--arg {text}: {ARGUMENT}") from None


def _print_table(options: argparse.Namespace) -> None:
    if unknown := [chapter for chapter in options.chapters if chapter not in CHAPTERS]:
        raise LaunchError(f"chapters {unknown}: there are {', '.join(CHAPTERS)}")
    for chapter in options.chapters or CHAPTERS:
        module = importlib.import_module(f"ptxemu.isa.{chapter}")
        print(f"## {chapter}\n\n{(module.__doc__ or '').strip()}\n")
        for form in forms():
            if form.function.__module__ == module.__name__:
                print(_entry(form))
        print()


def _entry(form: Form) -> str:
    """One form: its syntax, the values of its choices, and what it does."""
    listed = "; ".join(
        f"`.{name}` = {', '.join(f'`.{value}`' for value in values)}" for name, values in form.choices.items()
    )
    return f"- `{form.syntax}`\n  {form.summary}" + (f"\n  {listed}" if listed else "")


if __name__ == "__main__":
    sys.exit(main())
