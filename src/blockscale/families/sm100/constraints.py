"""What the sm_100a kernel can be built as, and what it then can do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from blockscale.config import Config, Reason
from blockscale.kernels.parts.geometry import CTA_ROWS, MOST_CLUSTER, ROWS, SIDES, TMEM_COLUMNS, Geometry, widths
from blockscale.kernels.parts.staging import RELEASES, STORES, fragment, most_held, staging_bytes
from blockscale.problem import NVFP4, OUT_BYTES, Problem, Target

CALL_FIELDS: tuple[str, ...] = ("ctas", "persist_mb")
CODE_FIELDS: tuple[str, ...] = (
    "tile",
    "stages",
    "accumulators",
    "cluster",
    "fallback_cluster",
    "schedule",
    "raster",
    "group",
    "swap",
    "pdl",
    "prefetch",
    "l2_a",
    "l2_b",
    "l2_scales",
    "l2_out",
    "store",
    "read",
    "release",
    "store_slots",
)

HINTS = (None, "evict_first", "evict_last")
ALLOWED: dict[str, Sequence[Any]] = {
    "accumulators": (1, 2),
    "schedule": ("static", "clc"),
    "raster": ("m", "n"),
    "l2_a": HINTS,
    "l2_b": HINTS,
    "l2_scales": HINTS,
    "l2_out": HINTS,
    "store": STORES,
    "release": RELEASES,
    "store_slots": (1, 2),
}
# Tile indices are 32-bit integers in a kernel, which adds the CTAs of a launch to them.
MOST_CTAS = 2**16 - 1
MOST_TILES = 2**31 - 2**16
WIDEST_STORE = 32  # bytes; the only one that can be told what L2 is to do (PTX: st, .level::eviction_priority)
RANGES = {
    "group": range(1, 2**10 + 1),
    "prefetch": range(17),
    "read": range(8, 129, 8),
    "ctas": range(1, MOST_CTAS + 1),
    "persist_mb": range(2**31),
}


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
    yield from values(config, ALLOWED, RANGES)
    yield from cluster(config, SIDES, MOST_CLUSTER)
    yield from epilogue(problem, config)
    sizes = geometry(config, target, problem.out_dtype)
    yield from memory(target, config, sizes)
    yield from tiles(problem, config, sizes)


def values(
    config: Config, allowed_values: Mapping[str, Sequence[Any]], ranges: Mapping[str, range]
) -> Iterator[Reason]:
    """Fields whose value no configuration has, of those that the two tables name."""
    rows, columns = config.tile
    if rows not in ROWS:
        yield Reason("config.tile", f"{rows} rows, expected {ROWS[0]} or {ROWS[1]}")
    elif columns not in widths(rows):
        allowed = widths(rows)
        expected = f"a multiple of {allowed.step} from {allowed[0]} to {allowed[-1]}"
        yield Reason("config.tile", f"{columns} columns, expected {expected} beside {rows} rows")
    for name, known in allowed_values.items():
        value = getattr(config, name)
        if value not in known:
            yield Reason(f"config.{name}", f"{value!r}, expected {' or '.join(map(repr, known))}")
    for name, numbers in ranges.items():
        value = getattr(config, name)
        if value is not None and value not in numbers:
            step = f"a multiple of {numbers.step} from " if numbers.step > 1 else ""
            none = "None or " if name == "ctas" else ""
            yield Reason(f"config.{name}", f"{value}, expected {none}{step}{numbers[0]} to {numbers[-1]}")
    if config.schedule == "clc" and config.ctas is not None:
        yield Reason("config.ctas", f"{config.ctas}, expected None: with schedule 'clc' there are as many as tiles")


def cluster(config: Config, allowed_sides: Sequence[int], most: int) -> Iterator[Reason]:
    """Why a cluster cannot be."""
    pair = config.tile[0] > CTA_ROWS
    for name in ("cluster", "fallback_cluster"):
        shape = getattr(config, name)
        if shape is None:
            continue
        if any(side not in allowed_sides for side in shape) or shape[0] * shape[1] > most:
            sides = ", ".join(map(str, allowed_sides))
            yield Reason(f"config.{name}", f"{shape}, expected sides of {sides}, and {most} CTAs at most")
        elif pair and shape[0] % 2:
            yield Reason(
                f"config.{name}", f"{shape}, expected an even first side: 256 rows are those of a pair of CTAs"
            )
    whole, part = config.cluster, config.fallback_cluster
    if part is not None and (whole is None or whole[0] % part[0] or whole[1] % part[1]):
        yield Reason("config.fallback_cluster", f"{part}, expected sides that divide those of cluster, {whole}")
    if whole is not None and not Geometry(config.tile, cluster=whole).divides:
        yield Reason(
            "config.cluster",
            f"{whole}: {config.tile[1]} columns cannot be cut into as many pieces of whole 8 rows of b",
        )


def epilogue(problem: Problem, config: Config) -> Iterator[Reason]:
    """Why results cannot leave so."""
    quantised = problem.out_dtype == NVFP4
    most = most_held(problem.activation)
    if fragment(config.tile[1], config.read, problem.out_dtype) > most:
        yield Reason("config.read", f"{config.read}, at most {most} beside {problem.activation}, which takes registers")
    if config.store != "direct":
        if config.swap:
            yield Reason("config.swap", f"True, expected False beside store {config.store!r}")
        if quantised:
            yield Reason("config.store", f"{config.store!r}, expected 'direct' for NVFP4 results")
    if quantised:
        if config.swap:
            yield Reason("config.swap", "True, expected False for NVFP4 results: blocks run along the columns")
        if config.tile[1] % 32:
            yield Reason("config.tile", f"{config.tile[1]} columns, expected a multiple of 32 for NVFP4 results")
    yield from _without_effect(problem, config)


def _without_effect(problem: Problem, config: Config) -> Iterator[Reason]:
    """No field is set for nothing."""
    direct, quantised = config.store == "direct", problem.out_dtype == NVFP4
    if direct and config.store_slots != Config.store_slots:
        yield Reason("config.store_slots", f"{config.store_slots}, expected {Config.store_slots} beside store 'direct'")
    if quantised and config.read != Config.read:
        yield Reason("config.read", f"{config.read}, expected {Config.read} for NVFP4 results, read block by block")
    if config.l2_out is None:
        return
    given = f"{config.l2_out!r}, expected None"
    columns = fragment(config.tile[1], config.read, problem.out_dtype)
    if config.swap or quantised:
        what = "beside swap" if config.swap else "for NVFP4 results"
        yield Reason("config.l2_out", f"{given} {what}: the stores of these have no such hint")
    elif direct and columns * OUT_BYTES[problem.out_dtype] % WIDEST_STORE:
        stores = f"stores of {WIDEST_STORE} bytes, and {columns} columns at a time are no whole number of these"
        yield Reason("config.l2_out", f"{given} beside store 'direct': it goes with {stores}")


def memory(target: Target, config: Config, sizes: Geometry, fewest: int = 1) -> Iterator[Reason]:
    """Why tiles of these sizes do not fit; a kernel needs the `fewest` stages."""
    most = sizes.most_stages
    sums = f"{config.accumulators} x {config.tile[0]}x{config.tile[1]} of sums"
    if most < fewest:
        stages = "one stage" if fewest == 1 else f"{fewest} stages"
        room = f"{target.smem:,} bytes of shared memory and {TMEM_COLUMNS} columns of tensor memory of {target.arch}"
        yield Reason("config.tile", f"{sums} and {stages} of operands do not fit {room}")
    elif config.stages is not None and not fewest <= config.stages <= most:
        yield Reason("config.stages", f"{config.stages}, expected None or {fewest} to {most} beside {sums}")


def tiles(problem: Problem, config: Config, sizes: Geometry) -> Iterator[Reason]:
    """Why the result cannot be cut into such tiles."""
    name, columns = ("m", problem.m) if config.swap else ("n", problem.n)
    width = config.tile[1]
    if not sizes.can_tile(columns):
        if columns > width:
            yield Reason("config.tile", f"{width} columns, {sizes.ONCE}, have to cover all {name} = {columns}")
        once = f"{sizes.ONCE}, they make one tile alone"
        yield Reason("config.cluster", f"{config.cluster}, expected a second side of 1 beside {width} columns: {once}")
    if tile_count(problem, config) > MOST_TILES:
        tiles = f"{tile_count(problem, config)} tiles of {config.tile[0]}x{width}, at most {MOST_TILES}"
        yield Reason("config.tile", tiles)


def geometry(config: Config, target: Target, out_dtype: str = "bf16") -> Geometry:
    """The sizes of `config`'s tiles and stages on `target`; of use once `_values` and `_cluster` have passed."""
    staging = staging_bytes(config.store, config.store_slots, config.tile[1], config.read, out_dtype)
    return Geometry(config.tile, config.stages, config.accumulators, target.smem, staging, config.cluster)


def cluster_shape(config: Config) -> tuple[int, int]:
    """CTAs of a cluster along m and n."""
    return config.cluster or (config.tile[0] // CTA_ROWS, 1)


def cluster_count(problem: Problem, config: Config) -> tuple[int, int]:
    """How many clusters a matrix of the result is cut into, along the kernel's m and n."""
    width, height = cluster_shape(config)
    m, n = (problem.n, problem.m) if config.swap else (problem.m, problem.n)
    return -(-m // (CTA_ROWS * width)), -(-n // (config.tile[1] * height))


def tile_count(problem: Problem, config: Config) -> int:
    """Tiles of CTAs, 128 rows each, of all matrices of the batch; those that lie outside of a matrix count too."""
    width, height = cluster_shape(config)
    along_m, along_n = cluster_count(problem, config)
    return problem.batch * along_m * width * along_n * height
