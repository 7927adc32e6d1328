"""Counts for docs/ladder.md: every step of `blockscale.ladder` on the software GPU, and what follows by arithmetic.

    python tools/ladder.py             rewrites the tables of docs/ladder.md
    python tools/ladder.py --pictures  draws docs/pictures/ladder-v1.svg to -v6.svg too; needs matplotlib

Counts are those of a launch, divided by what it multiplied; how often a warp looked at a barrier in vain is left out,
so that they do not depend on the order in which the emulator lets things happen.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import blockscale as bs
from blockscale import ladder
from blockscale.families.sm100.constraints import cluster_count, cluster_shape, geometry
from blockscale.kernels.parts import order
from blockscale.problem import Problem, target_named

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "ladder.md"
B200 = target_named("b200")
M, N, K = 512, 256, 1536  # two pieces of 256 x 256, six k tiles each
SMS = 2  # so that a persistent kernel has a pair of CTAs for both pieces
PIECES, K_TILES = M * N // 256**2, K // 256
NAMES = tuple(f"V{i}" for i in range(1, 7))


@dataclass(frozen=True)
class Counts:
    """A step's counts, a piece of 256 x 256 of the result or a k tile of one (256 x 256 x 256)."""

    step: str
    stages: int
    in_flight: int  # bytes that a CTA's ring holds
    from_l2: int  # bytes that TMA reads for a k tile
    to_shared: int  # bytes that arrive in shared memory for a k tile
    products: int  # tensor-core instructions a k tile
    waits: int  # for operands, a k tile
    mma: float  # other instructions of the warps that issue them, a k tile
    epilogue: float  # instructions of the epilogue's warps, a piece
    reads: int  # waits for tensor memory, a tile of 128 x 256 and warp
    stores: int  # instructions that store to shared memory, a piece
    wavefronts: int  # of these
    ideal: int
    starts: float  # CTAs that begin, a piece


def measure(step: str, trace: Path | None = None) -> Counts:
    """Run one product of a step; `trace` is where its timeline is written to."""
    config = getattr(ladder, step)
    random = torch.Generator().manual_seed(0)
    a, b = (bs.quantize(torch.randn(rows, K, generator=random)) for rows in (M, N))
    with bs.emulated("sm_100a", schedule="fifo", sms=SMS) as gpu:
        y = bs.gemm(a, b, config=config)
    assert torch.isfinite(y).all()
    if trace is not None:
        gpu.report.trace(str(trace))
    counters, sizes = gpu.report.counters, geometry(config, B200)
    staged = [t for t in gpu.report.traffic if t.space == "shared" and _is_store(gpu.report.describe(t.line)["ptx"])]
    k_tiles = PIECES * K_TILES
    slots = k_tiles * 2 // sizes.ctas  # that were waited for
    products = sum(counters["mma"].values())
    return Counts(
        step,
        sizes.slots,
        sizes.slots * sizes.stage_bytes,
        counters["bytes"]["TMA load, global memory"] // k_tiles,
        counters["bytes"]["TMA load, shared memory"] // k_tiles,
        products // k_tiles,
        slots // k_tiles,
        (_instructions(counters, "MMA") - products) / k_tiles,
        _instructions(counters, "epilogue") / PIECES,
        _by_role(counters, "epilogue", "tcgen05.wait::ld") // (8 * PIECES),
        sum(t.accesses for t in staged) // PIECES,
        sum(t.units for t in staged) // PIECES,
        sum(t.ideal for t in staged) // PIECES,
        counters["ctas"] / PIECES,
    )


def _is_store(ptx: str) -> bool:
    return "stmatrix" in ptx or bool(re.search(r"\bst\.shared\S*\.(v2|v4)", ptx))


def _by_role(counters: dict[str, Any], role: str, opcode: str) -> int:
    warps = counters["instructions_by_warp"].items()
    return sum(opcodes.get(opcode, 0) for name, opcodes in warps if name.endswith(role))


def _instructions(counters: dict[str, Any], role: str) -> int:
    """Of the warps of a role, without those of waiting: looks at barriers, and the branches after them."""
    warps = counters["instructions_by_warp"].items()
    return sum(
        count
        for name, opcodes in warps
        if name.endswith(role)
        for opcode, count in opcodes.items()
        if opcode not in ("mbarrier.try_wait", "bra")
    )


def footprint(step: str, size: int) -> tuple[int, float]:
    """(rows of operands that the tiles in flight touch, MiB that these are), for size cubed on a whole GPU."""
    config, problem = getattr(ladder, step), Problem(size, size, size)
    width, height = cluster_shape(config)
    m, n = cluster_count(problem, config)
    rows, columns = set(), set()
    for block in range(min(B200.sms // (width * height), m * n)):
        row, column, _ = order.tile(block * width, 0, (m, n), (width, height), config.raster, config.group, min)
        rows.add(row // width)
        columns.add(column // height)
    touched = len(rows) * 128 * width + len(columns) * config.tile[1] * height
    return touched, touched * size * 9 / 16 / 2**20


def table(measured: list[Counts]) -> str:
    """The document's table of counts."""
    lines = [f"| | {' | '.join(c.step for c in measured)} |", "|---|" + "---:|" * len(measured)]
    for text, name in (
        ("stages of operands in shared memory", "stages"),
        ("bytes of operands that a CTA can have in flight", "in_flight"),
        ("bytes read from L2 a k tile", "from_l2"),
        ("bytes arriving in shared memory a k tile", "to_shared"),
        ("tensor-core instructions a k tile", "products"),
        ("waits for operands a k tile", "waits"),
        ("other instructions of the MMA warps a k tile", "mma"),
        ("CTAs that start, a piece", "starts"),
        ("waits for tensor memory, a warp and 256 columns", "reads"),
        ("instructions of the epilogue's warps, a piece", "epilogue"),
        ("stores to shared memory, a piece", "stores"),
        ("shared wavefronts of these", "wavefronts"),
        ("as few as there could be", "ideal"),
    ):
        values = (getattr(c, name) for c in measured)
        lines.append(
            f"| {text} | {' | '.join(f'{value:,.4g}' if value < 10 else f'{value:,.0f}' for value in values)} |"
        )
    return "\n".join(lines)


def l2_table() -> str:
    lines = ["| | V4 | V5 |", "|---|---:|---:|"]
    for size in (8192, 16384):
        (rows, mib), (rows5, mib5) = footprint("V4", size), footprint("V5", size)
        lines.append(f"| rows of operands touched by the tiles in flight, {size} cubed | {rows:,} | {rows5:,} |")
        lines.append(
            f"| MiB of codes and scales that these are, of {B200.l2 / 2**20:.0f} in L2 | {mib:.0f} | {mib5:.0f} |"
        )
    return "\n".join(lines)


def filled(document: str, name: str, content: str) -> str:
    """The document with what stands between the marks of `name` replaced."""
    marks = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = document.partition(marks[0])
    _, found, after = rest.partition(marks[1])
    if not found:
        raise ValueError(f"{DOCUMENT}: no marks for {name!r}")
    return f"{before}{marks[0]}{content}\n{marks[1]}{after}"


def told(document: str, measured: list[Counts]) -> str:
    """The document with its tables as measured."""
    return filled(filled(document, "counts", table(measured)), "L2", l2_table())


def draw(step: str, trace: Path) -> None:
    spec = importlib.util.spec_from_file_location("timeline", ROOT / "tools" / "timeline.py")
    assert spec is not None
    assert spec.loader is not None
    timeline = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(timeline)
    events = json.loads(trace.read_text())["traceEvents"]
    with timeline.mpl.rc_context(timeline.STYLE):
        timeline.draw(events, ROOT / "docs" / "pictures" / f"ladder-{step.lower()}.svg")


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        measured = []
        for step in NAMES:
            trace = Path(directory) / f"{step}.json"
            measured.append(measure(step, trace))
            if "--pictures" in sys.argv[1:]:
                draw(step, trace)
    DOCUMENT.write_text(told(DOCUMENT.read_text(), measured))
    print(table(measured))


if __name__ == "__main__":
    main()
