"""What the orders of B300's presets read from memory, by a model of L2: the table of docs/sm103.md.

    python tools/l2_model.py          rewrites the table

The model: all clusters in flight do their blocks in step, 768 of k at a time. What they ask for is in L2, or is read
from memory and takes the place of what was asked for longest ago. L2 has no sets and no lines, only bytes: it holds
pieces of (rows of a block) x (768 of k), codes and scales. What a configuration asks to keep has a part of its own, as
large as `persist_mb`, and leaves it oldest first, to the rest. What it loads as "evict_first" leaves before all else.
Results pass through the rest, or not at all where they are told to leave first. A GPU has sets, two halves, and no two
clusters in step: figures are for comparing orders, not for predicting a GPU.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from blockscale.config import Config
from blockscale.families.sm103.constraints import cluster_count, cluster_shape
from blockscale.families.sm103.presets import PRESETS
from blockscale.kernels.parts.geometry import CTA_ROWS
from blockscale.kernels.parts.order import owned, place
from blockscale.problem import OUT_BYTES, Problem, Target, target_named

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "sm103.md"
B300 = target_named("b300")
STEP = 768  # of k
PLAIN = Config((256, 256), mma_k=96, accumulators=2)  # pairs, line after line along m, no hints
MIB = 2**20


class Cache:
    """Pieces by when they were asked for last; the oldest goes first."""

    def __init__(self, size: int) -> None:
        self.size, self.used = size, 0
        self.pieces: OrderedDict[int, int] = OrderedDict()  # bytes of each, oldest first

    def take(self, piece: int) -> bool:
        """Whether it was there; it no longer is."""
        found = self.pieces.pop(piece, None)
        self.used -= found or 0
        return found is not None

    def put(self, piece: int, size: int, first: bool = False) -> list[tuple[int, int]]:
        """Adds a piece, as the oldest if `first`; what has to leave for it."""
        self.pieces[piece] = size
        self.used += size
        if first:
            self.pieces.move_to_end(piece, last=False)
        gone = []
        while self.used > self.size:
            out = self.pieces.popitem(last=False)
            self.used -= out[1]
            gone.append(out)
        return gone


@dataclass
class L2:
    """A part for what is to be kept, and the rest."""

    kept: Cache
    rest: Cache
    read: int = 0  # bytes from memory

    def ask(self, piece: int, size: int, hint: str | None) -> None:
        if not (self.kept.take(piece) or self.rest.take(piece)):
            self.read += size
        if hint == "evict_last" and self.kept.size:
            for old, its in self.kept.put(piece, size):
                self.rest.put(old, its)
        else:
            self.rest.put(piece, size, first=hint == "evict_first")


def blocks(problem: Problem, config: Config, target: Target) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each round, rows and columns of the blocks that are done in it."""
    width, height = cluster_shape(config)
    down, across = cluster_count(problem, config)
    slots = min(target.sms // (width * height), down * across)
    index = np.arange(down * across)
    inner, outer = (down, across) if config.raster == "m" else (across, down)
    if config.ownership == "lines":
        first, second, _ = owned(index, slots, inner, outer, 1, np.minimum, np.where)
    else:
        first, second, _ = place(index, inner, outer, config.group, np.minimum)
    rows, columns = (first, second) if config.raster == "m" else (second, first)
    for start in range(0, len(index), slots):
        yield rows[start : start + slots], columns[start : start + slots]


def memory_read(problem: Problem, config: Config, target: Target, l2: int) -> int:
    """Bytes of operands that come from memory, with `l2` bytes of L2."""
    width, height = cluster_shape(config)
    steps = -(-problem.k // STEP)
    row = problem.k * 9 / 16 / steps  # bytes of a step
    a, b = round(CTA_ROWS * width * row), round(config.tile[1] * height * row)
    out = CTA_ROWS * width * config.tile[1] * height * OUT_BYTES[problem.out_dtype]
    down, across = cluster_count(problem, config)
    first_b, first_out = down * steps, (down + across) * steps
    kept = config.persist_mb * MIB * l2 // target.l2
    cache = L2(Cache(kept), Cache(l2 - kept))
    for rows, columns in blocks(problem, config, target):
        retired = dict.fromkeys(rows.tolist(), True)
        for m, n in zip(rows.tolist(), columns.tolist(), strict=True):
            retired[m] &= (n + 1) * height > across * height - config.drop
        wanted = dict.fromkeys(columns.tolist())
        for step in range(steps):
            for m, over in retired.items():
                cache.ask(m * steps + step, a, "evict_first" if over and config.drop else config.l2_a)
            for n in wanted:
                cache.ask(first_b + n * steps + step, b, config.l2_b)
        if config.l2_out != "evict_first":
            for m, n in zip(rows.tolist(), columns.tolist(), strict=True):
                cache.rest.put(first_out + m * across + n, out)
    return cache.read


def operands(problem: Problem) -> int:
    """Bytes of a and b, which are read once at least."""
    return (problem.m + problem.n) * problem.k * 9 // 16


def brought(problem: Problem, config: Config) -> int:
    """Bytes that TMA reads from L2: multicast brings what several CTAs of a cluster need once."""
    width, height = cluster_shape(config)
    down, across = cluster_count(problem, config)
    rows = CTA_ROWS * width + config.tile[1] * height
    return down * across * rows * problem.k * 9 // 16


def orders(size: tuple[int, int, int]) -> dict[str, Config]:
    """What is compared for a size: its preset after orders that keep to nothing."""
    config = PRESETS[size].config
    named = {"pairs, line after line": PLAIN}
    named[f"{_name(config)}, line after line"] = replace(PLAIN, cluster=config.cluster)
    if size == (32768, 32768, 32768):
        named["8x2, bands of 4, 64 MiB set aside"] = replace(config, cluster=(8, 2), persist_mb=64)
    does = "lines" if config.ownership == "lines" else f"bands of {config.group}"
    aside = f", {config.persist_mb} MiB set aside" * bool(config.persist_mb)
    return named | {f"**preset**: {_name(config)}, {does}{aside}": config}


def _name(config: Config) -> str:
    return "x".join(map(str, config.cluster or ()))


def table(sizes: tuple[tuple[int, int, int], ...] = tuple(sorted(PRESETS))) -> str:
    """The document's, in MiB."""
    lines = [
        "| size | order | from L2 | from memory | with half of L2 | each operand once |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for size in sizes:
        problem = Problem(*size)
        for order, config in orders(size).items():
            read = [memory_read(problem, config, B300, l2) for l2 in (B300.l2, B300.l2 // 2)]
            numbers = (f"{x / MIB:,.0f}" for x in (brought(problem, config), *read, operands(problem)))
            lines.append(f"| {size[0]} | {order} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def main() -> None:
    spec = importlib.util.spec_from_file_location("ladder", ROOT / "tools" / "ladder.py")
    assert spec is not None
    assert spec.loader is not None
    ladder = importlib.util.module_from_spec(spec)
    sys.modules["ladder"] = ladder
    spec.loader.exec_module(ladder)
    text = table()
    DOCUMENT.write_text(ladder.filled(DOCUMENT.read_text(), "L2", text))
    print(text)


if __name__ == "__main__":
    main()
