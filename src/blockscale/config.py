"""How a product is done: `Config`. Whether it can be done so is for `families.supports` to say."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Config:
    """Everything about a kernel that may be chosen. A GPU family has some of the fields; the others stay as they are.

    Attributes:
        tile: (rows, columns) of the result that a CTA computes at a time.
        stages: slots of the ring of operand tiles in shared memory, None means as many as fit shared and tensor memory;
            on Hopper units of 16 x 128 weights that a warp has in flight.
        accumulators: tiles of sums in tensor memory; with 2 the epilogue of one tile overlaps the next.
        raster: the dimension along which consecutive tiles lie, "m" or "n".
        ctas: the most CTAs of a launch; each takes tiles in turn. None means one a multiprocessor.
        k_warps: warps of a CTA that share rows of a weight and split k among them; their sums are added in order.
        chunk: k of the activations that a CTA has in shared memory at a time.
        persist_mb: MiB of L2 that this configuration was measured with in `persisting_l2`; 0 for none.

    Raises:
        TypeError: a field of another type. Whether a kernel can be built is for `supports` to say.
    """

    tile: tuple[int, int] = (128, 128)
    stages: int | None = None
    accumulators: int = 1
    raster: str = "m"
    ctas: int | None = None
    k_warps: int = 1
    chunk: int | None = None
    persist_mb: int = 0

    def __post_init__(self) -> None:
        def is_integer(x: Any) -> bool:
            return isinstance(x, int) and not isinstance(x, bool)

        for name in ("stages", "accumulators", "ctas", "k_warps", "chunk", "persist_mb"):
            value = getattr(self, name)
            if not (is_integer(value) or (value is None and name in ("stages", "ctas", "chunk"))):
                raise TypeError(f"{name}: {value!r}, expected an integer")
        if not (isinstance(self.tile, tuple) and len(self.tile) == 2 and all(map(is_integer, self.tile))):
            raise TypeError(f"tile: {self.tile!r}, expected a tuple of two integers")
        if not isinstance(self.raster, str):
            raise TypeError(f"raster: {self.raster!r}, expected a string")

    def __str__(self) -> str:
        given = (f for f in fields(self) if f.name != "tile" and getattr(self, f.name) != f.default)
        return ", ".join([f"tile {self.tile[0]}x{self.tile[1]}", *(f"{f.name} {getattr(self, f.name)}" for f in given)])


@dataclass(frozen=True)
class Reason:
    """Why something cannot be done: the argument or field at fault, and what is wrong with it."""

    argument: str
    message: str

    def __str__(self) -> str:
        return f"{self.argument}: {self.message}"


@dataclass(frozen=True)
class Choice:
    """A configuration and, in the order in which they were applied, the reasons for it."""

    config: Config
    reasons: tuple[str, ...]
