"""What the sm_120a kernel can be built as, and what it then can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from blockscale.config import Config, Reason
from blockscale.kernels.parts.geometry import ATOM_ROWS, STEP_K
from blockscale.kernels.parts.warptile import MOST_SUMS, SPAN, TILE_COLUMNS, TILE_K, TILE_ROWS, WarpTile
from blockscale.problem import NVFP4, Problem, Target

CALL_FIELDS: tuple[str, ...] = ("ctas", "persist_mb")
CODE_FIELDS: tuple[str, ...] = (
    "tile",
    "chunk",
    "stages",
    "accumulators",
    "schedule",
    "raster",
    "group",
    "swap",
    "split",
    "pdl",
    "l2_a",
    "l2_b",
    "l2_scales",
)

HINTS = (None, "evict_first", "evict_last")
ALLOWED: dict[str, Sequence[Any]] = {
    "chunk": (None, *TILE_K),
    "accumulators": (1, 2),
    "schedule": ("static", "clc"),
    "split": (1, 2, 4, 8),
    "raster": ("m", "n"),
    "l2_a": HINTS,
    "l2_b": HINTS,
    "l2_scales": HINTS,
}
# Tile indices, times CTAs that share a tile, are 32-bit integers in a kernel, which adds the CTAs of a launch to them.
MOST_CTAS = 2**16 - 1
MOST_TILES = 2**31 - 2**16
RANGES = {"group": range(1, 2**10 + 1), "ctas": range(1, MOST_CTAS + 1), "persist_mb": range(2**31)}


def unsupported(problem: Problem, target: Target) -> Reason | None:
    """Why no configuration does `problem`, or None."""
    if problem.a != NVFP4:
        return Reason("a", f"{problem.a}: the {target.backend} kernels multiply NVFP4 by NVFP4 alone; quantise a")
    return None


def unfit(problem: Problem, target: Target, config: Config) -> Reason | None:
    """Why there is no such kernel, or why it does not do `problem`; None where it does."""
    return next(_reasons(problem, target, config), None)


def _reasons(problem: Problem, target: Target, config: Config) -> Iterator[Reason]:
    """Each presumes that those before it do not hold."""
    yield from _values(config)
    yield from _results(problem, config)
    yield from _room(target, config)
    yield from _tiles(problem, config)


def _values(config: Config) -> Iterator[Reason]:
    for size, allowed, what in zip(config.tile, (TILE_ROWS, TILE_COLUMNS), ("rows", "columns"), strict=True):
        if size not in allowed:
            yield Reason("config.tile", f"{size} {what}, expected one of {', '.join(map(str, allowed))}")
    for name, values in ALLOWED.items():
        value = getattr(config, name)
        if value not in values:
            yield Reason(f"config.{name}", f"{value!r}, expected {' or '.join(map(repr, values))}")
    for name, numbers in RANGES.items():
        value = getattr(config, name)
        if value is not None and value not in numbers:
            none = "None or " if name == "ctas" else ""
            yield Reason(f"config.{name}", f"{value}, expected {none}{numbers[0]} to {numbers[-1]}")
    if config.schedule == "clc" and config.ctas is not None:
        yield Reason("config.ctas", f"{config.ctas}, expected None: with schedule 'clc' there are as many as tiles")
    if config.split > 1 and config.schedule == "clc":
        yield Reason("config.split", f"{config.split}, expected 1: with schedule 'clc' a CTA asks for tiles of its own")
    if config.split > 1 and config.accumulators == 2:
        yield Reason("config.split", f"{config.split}, expected 1: with 2 accumulators groups of warps take turns")


def _room(target: Target, config: Config) -> Iterator[Reason]:
    sizes = geometry(config, target)
    tile = f"{config.tile[0]}x{config.tile[1]}"
    if config.split > target.sms:
        at_once = f"expected at most {target.sms}, a multiprocessor for each CTA of a cluster"
        yield Reason("config.split", f"{config.split}, {at_once}")
    if sizes.sums > MOST_SUMS:
        yield Reason(
            "config.accumulators",
            f"{config.accumulators}: {sizes.sums} sums a thread for tiles of {tile}, at most {MOST_SUMS}",
        )
    if sizes.most_stages < 1:
        memory = f"{target.smem:,} bytes of shared memory of {target.arch}"
        yield Reason("config.tile", f"one stage of {sizes.tile_k} elements of k for {tile} does not fit {memory}")
    elif config.stages is not None and not 1 <= config.stages <= sizes.most_stages:
        yield Reason("config.stages", f"{config.stages}, expected None or 1 to {sizes.most_stages} beside {tile}")


def _results(problem: Problem, config: Config) -> Iterator[Reason]:
    if problem.out_dtype != NVFP4:
        return
    if config.swap:
        yield Reason("config.swap", "True, expected False for NVFP4 results: blocks run along the columns")
    if config.tile[0] < ATOM_ROWS or config.tile[1] < STEP_K:
        least = f"{ATOM_ROWS}x{STEP_K} or more for NVFP4 results, which are padded to as much"
        yield Reason("config.tile", f"{config.tile[0]}x{config.tile[1]}, expected {least}")


def _tiles(problem: Problem, config: Config) -> Iterator[Reason]:
    name, columns = ("m", problem.m) if config.swap else ("n", problem.n)
    width = config.tile[1]
    if width < SPAN and columns > width:
        yield Reason("config.tile", f"{width} columns, fewer than {SPAN}, have to cover all {name} = {columns}")
    most = MOST_TILES // config.split
    if tile_count(problem, config) > most:
        shared = f" with split {config.split}" if config.split > 1 else ""
        tiles = f"{tile_count(problem, config)} tiles of {config.tile[0]}x{width}, at most {most}{shared}"
        yield Reason("config.tile", tiles)


def geometry(config: Config, target: Target) -> WarpTile:
    """The sizes of `config`'s tiles and stages on `target`; of use once `_values` has passed."""
    return WarpTile(
        config.tile, config.stages, config.accumulators, config.chunk or TILE_K[0], target.smem, config.split
    )


def tiles(problem: Problem, config: Config) -> tuple[int, int]:
    """How many tiles a matrix of the result is cut into, along the kernel's m and n."""
    m, n = (problem.n, problem.m) if config.swap else (problem.m, problem.n)
    return -(-m // config.tile[0]), -(-n // config.tile[1])


def tile_count(problem: Problem, config: Config) -> int:
    """Tiles of all matrices of the batch."""
    along_m, along_n = tiles(problem, config)
    return problem.batch * along_m * along_n
