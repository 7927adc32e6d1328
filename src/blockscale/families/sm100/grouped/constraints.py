"""What the sm_100a kernel for grouped products can be built as, and what it then can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from blockscale.config import Config, Reason
from blockscale.families.sm100.constraints import HINTS, MOST_CTAS, MOST_TILES
from blockscale.formats.layouts import grouped_rows, round_up
from blockscale.kernels.parts.geometry import ATOM_ROWS, CTA_ROWS, ROWS, TMEM_COLUMNS
from blockscale.kernels.parts.group_geometry import MOST_GROUPS, WIDTHS, GroupGeometry
from blockscale.kernels.parts.group_order import GRANULE, ORDERS
from blockscale.kernels.parts.staging import most_held
from blockscale.problem import GATED, NVFP4, GroupedProblem, Problem, Target

CALL_FIELDS: tuple[str, ...] = ("ctas",)
CODE_FIELDS: tuple[str, ...] = (
    "tile",
    "stages",
    "accumulators",
    "swap",
    "order",
    "raster",
    "pdl",
    "split",
    "l2_a",
    "l2_b",
    "l2_scales",
    "read",
)
ALLOWED: dict[str, Sequence[Any]] = {
    "accumulators": (1, 2),
    "order": ORDERS,
    "raster": ("m", "n"),
    "split": (1, 2),
    "l2_a": HINTS,
    "l2_b": HINTS,
    "l2_scales": HINTS,
}
RANGES = {"read": range(GRANULE, 129, GRANULE), "ctas": range(1, MOST_CTAS + 1)}
MOST_SWAPPED = 64  # columns that a thread may read at a time where each goes to a row of its own: it has to be found
HALVES = 256  # columns of a tile whose halves, a gate's and those that it multiplies, are a whole atom of scales each
LARGEST_EXTENT = 2**31 - 1024  # of all rows: the kernel has 32-bit sizes


def unsupported(problem: Problem, target: Target) -> Reason | None:
    """Why no configuration does `problem`, or None."""
    assert isinstance(problem, GroupedProblem)
    if problem.a != NVFP4:
        return Reason("a", f"{problem.a}: the {target.backend} kernels multiply NVFP4 by NVFP4 alone; quantise a")
    if problem.groups > MOST_GROUPS:
        return Reason("b", f"{problem.groups} groups, at most {MOST_GROUPS} in a launch")
    rows = scale_rows(problem)
    if rows > LARGEST_EXTENT:
        return Reason(
            "a", f"{problem.groups} groups, {problem.m} rows: {rows} rows of scales, at most {LARGEST_EXTENT}"
        )
    if problem.activation in GATED and problem.columns % ATOM_ROWS:
        columns = f"{problem.columns} columns, expected a multiple of {ATOM_ROWS}: both halves of b begin with an atom"
        return Reason("b", f"{columns} of scales, beside {problem.activation!r}")
    return None


def scale_rows(problem: GroupedProblem) -> int:
    """Rows of the scales of `a`, whatever the sizes of groups; of a list those of its largest product."""
    if problem.form == "contiguous":
        return grouped_rows(problem.m, problem.groups)
    return round_up(problem.m, ATOM_ROWS) * (problem.groups if problem.form == "masked" else 1)


def unfit(problem: Problem, target: Target, config: Config) -> Reason | None:
    """Why there is no such kernel, or why it does not do `problem`; None where it does."""
    assert isinstance(problem, GroupedProblem)
    return next(_reasons(problem, target, config), None)


def _reasons(problem: GroupedProblem, target: Target, config: Config) -> Iterator[Reason]:
    """Each presumes that those before it do not hold."""
    yield from _values(config)
    yield from _epilogue(problem, config)
    geometry = geometry_of(problem, target, config)
    most = geometry.most_stages
    tiles = f"{config.accumulators} x {config.tile[0]}x{geometry.sum_columns}"
    if most < 1:
        memory = f"{target.smem:,} bytes of shared memory and {TMEM_COLUMNS} columns of tensor memory"
        yield Reason("config.tile", f"{tiles} of sums and one stage of operands do not fit {memory} of {target.arch}")
    elif config.stages is not None and not 1 <= config.stages <= most:
        yield Reason("config.stages", f"{config.stages}, expected None or 1 to {most} beside {tiles} of sums")
    if most_tiles(problem, config) > MOST_TILES:
        yield Reason("config.tile", f"up to {most_tiles(problem, config)} tiles, at most {MOST_TILES}")


def _values(config: Config) -> Iterator[Reason]:
    rows, columns = config.tile
    if rows not in ROWS:
        yield Reason("config.tile", f"{rows} rows, expected {ROWS[0]} or {ROWS[1]}")
    elif columns not in WIDTHS:
        yield Reason("config.tile", f"{columns} columns, expected one of {', '.join(map(str, WIDTHS))}")
    for name, allowed in ALLOWED.items():
        if getattr(config, name) not in allowed:
            expected = " or ".join(map(repr, allowed))
            yield Reason(f"config.{name}", f"{getattr(config, name)!r}, expected {expected}")
    for name, numbers in RANGES.items():
        value = getattr(config, name)
        if value is not None and value not in numbers:
            step = f"a multiple of {numbers.step} from " if numbers.step > 1 else ""
            none = "None or " if name == "ctas" else ""
            yield Reason(f"config.{name}", f"{value}, expected {none}{step}{numbers[0]} to {numbers[-1]}")


def _epilogue(problem: GroupedProblem, config: Config) -> Iterator[Reason]:
    gated, quantised = problem.activation in GATED, problem.out_dtype == NVFP4
    most = min(most_held(problem.activation), MOST_SWAPPED if config.swap else 128) // (2 if gated else 1)
    if config.read > most:
        beside = f"{problem.activation} and swap {config.swap}"
        yield Reason("config.read", f"{config.read}, at most {most} beside {beside}, which take registers")
    if gated and not config.swap and config.tile[1] != HALVES:
        columns = f"{config.tile[1]} columns, expected {HALVES} beside {problem.activation!r} without swap"
        yield Reason("config.tile", f"{columns}: a half of them is an atom of scales")
    if config.split > 1:
        if not config.swap or gated:
            beside = f"swap {config.swap} and {problem.activation}"
            yield Reason("config.split", f"{config.split}, expected 1 beside {beside}: parts meet with swap, ungated")
        elif config.read != Config.read:
            yield Reason("config.read", f"{config.read}, expected {Config.read} beside split {config.split}")
    if quantised:
        if config.swap:
            yield Reason("config.swap", "True, expected False for NVFP4 results: blocks run along the columns")
        if config.tile[1] % 64:
            yield Reason("config.tile", f"{config.tile[1]} columns, expected a multiple of 64 for NVFP4 results")
        if config.read != Config.read:
            given = f"{config.read}, expected {Config.read}"
            yield Reason("config.read", f"{given} for NVFP4 results, read block by block")


def geometry_of(problem: GroupedProblem, target: Target, config: Config) -> GroupGeometry:
    """The sizes of a tile and its stages; of use once `_values` has passed."""
    panels = 2 if problem.activation in GATED and config.swap else 1
    return GroupGeometry(
        config.tile, config.stages, config.accumulators, target.smem, panels=panels, split=config.split
    )


def tile_shape(problem: GroupedProblem, config: Config) -> tuple[int, int]:
    """(rows, columns) of the result that a tile is for; with swap (columns, rows)."""
    rows, columns = config.tile
    return rows, columns // 2 if problem.activation in GATED and not config.swap else columns


def most_tiles(problem: GroupedProblem, config: Config) -> int:
    """As many as there can be, whatever the sizes of groups."""
    down, across = tile_shape(problem, config)
    of_rows, of_columns = (across, down) if config.swap else (down, across)
    if problem.form != "contiguous":
        blocks = problem.groups * -(-problem.m // of_rows)
    else:
        groups = min(problem.groups, problem.m)
        blocks = groups + (problem.m - groups) // of_rows
    return blocks * -(-problem.columns // of_columns)


def most_ctas(problem: GroupedProblem, target: Target, config: Config) -> int:
    """CTAs of a launch: one a multiprocessor, or as many as `config` says, but no more than have a tile."""
    each = config.tile[0] // CTA_ROWS * config.split
    return min(most_tiles(problem, config) * each, config.ctas or target.sms)
