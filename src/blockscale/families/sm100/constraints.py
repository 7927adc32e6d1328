"""What the sm_100a kernel can be built as, and what it then can do."""

from __future__ import annotations

from blockscale.config import Config, Reason
from blockscale.kernels.parts.geometry import TILE_M, TMEM_COLUMNS, WIDTHS, Geometry
from blockscale.problem import NVFP4, Problem, Target

CODE_FIELDS: tuple[str, ...] = ("tile", "stages", "accumulators", "raster")
CALL_FIELDS: tuple[str, ...] = ("ctas", "persist_mb")

RASTERS = ("m", "n")
# Tile indices are 32-bit integers in a kernel, which adds the CTAs of a launch to them.
MOST_CTAS = 2**16 - 1
MOST_TILES = 2**31 - 2**16


def unsupported(problem: Problem, target: Target) -> Reason | None:
    """Why no configuration does `problem`, or None."""
    if problem.a != "nvfp4":
        return Reason("a", f"{problem.a}: the {target.backend} kernels multiply NVFP4 by NVFP4 alone; quantise a")
    if problem.bias:
        return Reason("bias", f"given: the {target.backend} kernels of this version add none")
    if problem.activation is not None:
        return Reason("activation", f"{problem.activation!r}: the {target.backend} kernels of this version apply none")
    if problem.out_dtype == NVFP4:
        return Reason("out", f"NVFP4: the {target.backend} kernels of this version write none")
    return None


def unbuildable(config: Config, target: Target) -> Reason | None:
    """Why there can be no such kernel, for any problem, or None."""
    rows, columns = config.tile
    if rows != TILE_M:
        return Reason("config.tile", f"{rows} rows, expected {TILE_M}")
    if columns not in WIDTHS:
        expected = f"a multiple of {WIDTHS.step} from {WIDTHS[0]} to {WIDTHS[-1]}"
        return Reason("config.tile", f"{columns} columns, expected {expected}")
    if config.accumulators not in (1, 2):
        return Reason("config.accumulators", f"{config.accumulators}, expected 1 or 2")
    if config.raster not in RASTERS:
        return Reason("config.raster", f"{config.raster!r}, expected one of {', '.join(map(repr, RASTERS))}")
    if config.ctas is not None and not 1 <= config.ctas <= MOST_CTAS:
        return Reason("config.ctas", f"{config.ctas}, expected None or 1 to {MOST_CTAS}")
    if config.persist_mb < 0:
        return Reason("config.persist_mb", f"{config.persist_mb}, expected at least 0")
    most = geometry(config, target).most_stages
    tiles = f"{config.accumulators} x {rows}x{columns}"
    if most < 1:
        memory = f"{target.smem:,} bytes of shared memory and {TMEM_COLUMNS} columns of tensor memory"
        return Reason("config.tile", f"{tiles} of sums and one stage of operands do not fit {memory} of {target.arch}")
    if config.stages is not None and not 1 <= config.stages <= most:
        return Reason("config.stages", f"{config.stages}, expected None or 1 to {most} beside {tiles} of sums")
    return None


def unfit(problem: Problem, target: Target, config: Config) -> Reason | None:
    """Why a kernel that can be built does not serve `problem`, or None."""
    if not geometry(config, target).can_tile(problem.n):
        return Reason("config.tile", f"{config.tile[1]} columns, no multiple of 32, have to cover all n = {problem.n}")
    if tile_count(problem, config) > MOST_TILES:
        tiles = f"{tile_count(problem, config)} tiles of {config.tile[0]}x{config.tile[1]}, at most {MOST_TILES}"
        return Reason("config.tile", tiles)
    return None


def geometry(config: Config, target: Target) -> Geometry:
    """The sizes of `config`'s tiles and stages on `target`; of use once `unbuildable` has passed."""
    return Geometry(config.tile[1], config.stages, config.accumulators, target.smem)


def tile_count(problem: Problem, config: Config) -> int:
    """Tiles of the result, of all matrices of the batch."""
    return problem.batch * -(-problem.m // config.tile[0]) * -(-problem.n // config.tile[1])
