"""Which tiles a group of rows has, and in which order: pure arithmetic, for numbers of the compiler's, of Python's and
of numpy's alike.

The groups of a launch are matrices of `rows` x n, each cut into tiles of the kernel's m x n; the kernel's m is that of
the group, or with `swap` the columns of the result. Tiles are numbered group after group, in the order in which the
kernel's table (parts/groups.py) has them, and within a group along `raster` first.
"""

from __future__ import annotations

from typing import Any

from blockscale.kernels.parts.order import Minimum

ORDERS = ("given", "longest")  # of groups: as they come, or those of the most rows first
GRANULE = 16  # columns: widths of instructions are a multiple, those of a pair have to be (PTX: tcgen05.mma)

Sizes = tuple[Any, Any]


def counts(rows: Any, n: Any, tile: tuple[int, int], swap: bool) -> Sizes:
    """Tiles of a group of `rows` along the kernel's m and n."""
    down, across = (n, rows) if swap else (rows, n)
    return (down + (tile[0] - 1)) // tile[0], (across + (tile[1] - 1)) // tile[1]


def within(index: Any, tiles: Sizes, raster: str) -> Sizes:
    """(row, column) of the `index`-th tile of a group that has `tiles` along m and n."""
    if raster == "m":
        return index % tiles[0], index // tiles[0]
    return index // tiles[1], index % tiles[1]


def width(left: Any, columns: int, granule: int, least: Minimum) -> Any:
    """Columns that are multiplied of a tile of `columns` where so many are left of its group."""
    return least((left + (granule - 1)) // granule * granule, columns)
