"""How a product is done (`Config`), and the one place that says whether it can be: `supports`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from blockscale.kernels.parts.geometry import TILE_M, TMEM_COLUMNS, WIDTHS, Geometry
from blockscale.problem import Problem, Target

RASTERS = ("m", "n")
# Sizes and tile indices are 32-bit integers in a kernel, which adds up to a tile, and the CTAs of a launch, to them.
LARGEST_EXTENT = 2**31 - 512
MOST_CTAS = 2**16 - 1
MOST_TILES = 2**31 - 2**16


@dataclass(frozen=True)
class Config:
    """Everything about a kernel that may be chosen. `CODE_FIELDS` decide its code; the others are arguments of a call.

    Attributes:
        tile: (rows, columns) of the result that a CTA computes at a time.
        stages: slots of the ring of operand tiles in shared memory; None means as many as fit shared and tensor memory.
        accumulators: tiles of sums in tensor memory; with 2 the epilogue of one tile overlaps the next.
        raster: the dimension along which consecutive tiles lie, "m" or "n".
        ctas: the most CTAs of a launch; each takes tiles in turn. None means one a multiprocessor.
        persist_mb: MiB of L2 that this configuration was measured with in `persisting_l2`; 0 for none.

    Raises:
        TypeError: a field of another type. Whether a kernel can be built is for `supports` to say.
    """

    tile: tuple[int, int] = (TILE_M, 128)
    stages: int | None = None
    accumulators: int = 1
    raster: str = "m"
    ctas: int | None = None
    persist_mb: int = 0

    def __post_init__(self) -> None:
        def is_integer(x: Any) -> bool:
            return isinstance(x, int) and not isinstance(x, bool)

        for name in ("stages", "accumulators", "ctas", "persist_mb"):
            value = getattr(self, name)
            if not (is_integer(value) or (value is None and name in ("stages", "ctas"))):
                raise TypeError(f"{name}: {value!r}, expected an integer")
        if not (isinstance(self.tile, tuple) and len(self.tile) == 2 and all(map(is_integer, self.tile))):
            raise TypeError(f"tile: {self.tile!r}, expected a tuple of two integers")
        if not isinstance(self.raster, str):
            raise TypeError(f"raster: {self.raster!r}, expected a string")

    def code(self) -> dict[str, Any]:
        """The fields that decide a kernel's code."""
        return {name: getattr(self, name) for name in CODE_FIELDS}

    def __str__(self) -> str:
        given = (f for f in fields(self) if f.name != "tile" and getattr(self, f.name) != f.default)
        return ", ".join([f"tile {self.tile[0]}x{self.tile[1]}", *(f"{f.name} {getattr(self, f.name)}" for f in given)])


CODE_FIELDS = ("tile", "stages", "accumulators", "raster")
# What heuristics choose from; `supports` allows every width that the tensor cores have.
CHOICES = tuple(Config((TILE_M, columns), accumulators=sums) for columns in (64, 128, 192, 256) for sums in (2, 1))


@dataclass(frozen=True)
class Reason:
    """Why something cannot be done: the argument or field at fault, and what is wrong with it."""

    argument: str
    message: str

    def __str__(self) -> str:
        return f"{self.argument}: {self.message}"


def supports(problem: Problem, target: Target, config: Config) -> Reason | None:
    """None if `target` can do `problem` by `config`; otherwise the first reason why not. Nothing else decides this."""
    return unsupported(problem, target) or _unbuildable(config, target) or _unfit(problem, target, config)


def unsupported(problem: Problem, target: Target) -> Reason | None:
    """Why no configuration of `target` does `problem`, or None."""
    if problem.a != "nvfp4" or problem.b != "nvfp4":
        return Reason("a", f"{problem.a}: the {target.backend} kernels multiply NVFP4 by NVFP4 alone; quantise a")
    if problem.bias:
        return Reason("bias", f"given: the {target.backend} kernels of this version add none")
    if problem.activation is not None:
        return Reason("activation", f"{problem.activation!r}: the {target.backend} kernels of this version apply none")
    for name in ("m", "n", "k", "batch"):
        if getattr(problem, name) > LARGEST_EXTENT:
            return Reason(name, f"{getattr(problem, name)}, at most {LARGEST_EXTENT}")
    return None


def _unbuildable(config: Config, target: Target) -> Reason | None:
    """Why there can be no such kernel, for any problem."""
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


def _unfit(problem: Problem, target: Target, config: Config) -> Reason | None:
    """Why a kernel that can be built does not serve this problem."""
    if not geometry(config, target).can_tile(problem.n):
        return Reason("config.tile", f"{config.tile[1]} columns, no multiple of 32, have to cover all n = {problem.n}")
    if tile_count(problem, config) > MOST_TILES:
        tiles = f"{tile_count(problem, config)} tiles of {config.tile[0]}x{config.tile[1]}, at most {MOST_TILES}"
        return Reason("config.tile", tiles)
    return None


def geometry(config: Config, target: Target) -> Geometry:
    """The sizes of `config`'s tiles and stages on `target`; of use once `supports` has passed."""
    return Geometry(config.tile[1], config.stages, config.accumulators, target.smem)


def tile_count(problem: Problem, config: Config) -> int:
    """Tiles of the result, of all matrices of the batch."""
    return problem.batch * -(-problem.m // config.tile[0]) * -(-problem.n // config.tile[1])


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Those of `CHOICES` that are supported."""
    return (config for config in CHOICES if supports(problem, target, config) is None)
