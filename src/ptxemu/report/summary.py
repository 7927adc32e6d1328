"""A report for people: tables of `rich` where it is installed, aligned text where it is not."""

from __future__ import annotations

import collections
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from ptxemu.report import Report

__all__ = ["Table", "show", "tables"]

_MOST = 12  # lines of the tables of instructions
_LONGEST = 60  # letters of a kernel's name, which compilers make long


@dataclass(frozen=True)
class Table:
    """Text columns come first, `numbers` columns of numbers last."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: int


def tables(report: Report) -> Iterator[Table]:
    """What there is to say about a launch, the empty left out."""
    for table in (_warps(report), _opcodes(report), _moved(report), _mmas(report)):
        if table.rows:
            yield table
    yield from _traffic(report)


def _warps(report: Report) -> Table:
    rows = []
    for name, opcodes in report.counters.get("instructions_by_warp", {}).items():
        most = ", ".join(f"{opcode} {count:,}" for opcode, count in list(opcodes.items())[:3])
        warp, _, role = name.partition(": ")
        rows.append((warp, role, most, f"{sum(opcodes.values()):,}"))
    return Table("Warps (by index in the CTA)", ("warp", "role", "most frequent", "instructions"), rows, 1)


def _opcodes(report: Report) -> Table:
    listed = collections.Counter(report.counters.get("instructions", {})).most_common(_MOST)
    return Table("Instructions", ("opcode", "times"), [(name, f"{count:,}") for name, count in listed], 1)


def _moved(report: Report) -> Table:
    rows = [(path, f"{count:,}") for path, count in sorted(report.counters.get("bytes", {}).items())]
    return Table("Bytes moved", ("path", "bytes"), rows, 1)


def _mmas(report: Report) -> Table:
    rows = [(shape, f"{count:,}") for shape, count in sorted(report.counters.get("mma", {}).items())]
    return Table("Tensor-core operations", ("kind and shape", "times"), rows, 1)


def _traffic(report: Report) -> Iterator[Table]:
    """The instructions that use each memory, those first that waste most."""
    for space, units in (("shared", "wavefronts"), ("global", "sectors")):
        listed = sorted((t for t in report.traffic if t.space == space), key=lambda t: (-t.excess, -t.units, t.line))
        rows = []
        for t in listed[:_MOST]:
            found = report.describe(t.line)
            where = f"{found['source']}, line {t.line}" if "source" in found else f"line {t.line}"
            rows.append((where, found["ptx"], f"{t.accesses:,}", f"{t.units:,}", f"{t.ideal:,}"))
        if rows:
            sums = report.counters[space]
            title = f"{space.capitalize()} memory: {sums[units]:,} {units}, {sums[f'ideal_{units}']:,} ideal"
            yield Table(title, ("where", "instruction", "times", units, "ideal"), rows, 3)


def show(report: Report, file: IO[str] | None) -> None:
    """Prints the report."""
    if importlib.util.find_spec("rich") is None:
        print(plain(report), file=file or sys.stdout)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(file=file, highlight=False)
    console.print(_head(report), style="bold", markup=False, soft_wrap=True)
    for finding in report.findings:
        console.print(str(finding), style="red", markup=False, soft_wrap=True)
    for table in tables(report):
        drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
        for place, column in enumerate(table.columns):
            number = place >= len(table.columns) - table.numbers
            drawn.add_column(column, justify="right" if number else "left", no_wrap=number)
        for row in table.rows:
            drawn.add_row(*(cell.replace("[", r"\[") for cell in row))
        console.print(drawn)


def plain(report: Report) -> str:
    """The report as text."""
    parts = [_head(report), *map(str, report.findings)]
    for table in tables(report):
        rows = [table.columns, *table.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
        first_number = len(table.columns) - table.numbers
        parts.append(f"\n{table.title}")
        for row in rows:
            cells = [
                cell.rjust(width) if i >= first_number else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            parts.append("  " + "  ".join(cells).rstrip())
    return "\n".join(parts)


def _head(report: Report) -> str:
    counters = report.counters
    found = f"{len(report.findings)} findings" if len(report.findings) != 1 else "1 finding"
    name = report.kernel if len(report.kernel) <= _LONGEST else f"{report.kernel[:_LONGEST]}..."
    return (
        f"{name}: {found}; {counters.get('warp_instructions', 0):,} warp instructions of "
        f"{counters.get('warps', 0):,} warps in {counters.get('ctas', 0):,} CTAs, "
        f"{counters.get('asynchronous_operations', 0):,} asynchronous operations, {counters.get('seconds', 0):.2f} s"
    )
