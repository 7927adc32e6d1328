"""The order of tiles: pure integer arithmetic, for numbers of the compiler's, of Python's and of numpy's alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Minimum = Callable[[Any, Any], Any]


def tile(
    x: Any, y: Any, blocks: tuple[Any, Any], shape: tuple[int, int], raster: str, group: int, least: Minimum
) -> tuple[Any, Any, Any]:
    """(row, column, matrix) of the tile of the CTA at (x, y) of a grid of count * width by height CTAs.

    The tiles of a batch of matrices are cut into `count` blocks of width x height, the `shape` of a cluster; block i is
    that of the CTAs from x = i * width on. Blocks are numbered along `raster` first, see `place`.

    Args:
        blocks: of a matrix, along m and n. shape: tiles of a block along m and n. raster: "m" or "n".
        group, least: as for `place`.
    """
    width, height = shape
    inner, outer = blocks if raster == "m" else blocks[::-1]
    first, second, matrix = place(x // width, inner, outer, group, least)
    m, n = (first, second) if raster == "m" else (second, first)
    return m * width + x % width, n * height + y % height, matrix


def place(index: Any, inner: Any, outer: Any, group: int, least: Minimum) -> tuple[Any, Any, Any]:
    """(place along inner, place along outer, matrix) of the `index`-th block of a batch of matrices of inner x outer.

    A matrix is walked in bands of `group` along outer, the last one perhaps narrower, and a band across first, then on
    along inner. With a group of 1 a band is a line along inner. The nearer to a square the blocks in flight are, the
    fewer rows of operands they touch, which L2 has to hold.

    Args:
        index: 0 to batch * inner * outer - 1. group: at least 1. least: the minimum of two numbers.
    """
    matrix, rest = index // (inner * outer), index % (inner * outer)
    if group == 1:
        return rest % inner, rest // inner, matrix
    whole = least(outer, group)  # so that a band has no more blocks than the matrix, whose number fits an integer
    band, rest = rest // (inner * whole), rest % (inner * whole)
    width = least(outer - band * whole, whole)
    return rest // width, band * whole + rest % width, matrix
