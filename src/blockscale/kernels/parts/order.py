"""The order of tiles: pure integer arithmetic, for numbers of the compiler's, of Python's and of numpy's alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Minimum = Callable[[Any, Any], Any]
Select = Callable[[Any, Any, Any], Any]  # (condition, value where it holds, value where it does not)


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
    width, _ = shape
    inner, outer = blocks if raster == "m" else blocks[::-1]
    return _of_block(x, y, shape, raster, place(x // width, inner, outer, group, least))


def owned_tile(
    x: Any,
    y: Any,
    blocks: tuple[Any, Any],
    batch: Any,
    slots: Any,
    shape: tuple[int, int],
    raster: str,
    least: Minimum,
    select: Select,
) -> tuple[Any, Any, Any]:
    """As `tile`, where each of `slots` persistent clusters keeps to lines along `raster`, see `owned`."""
    width, _ = shape
    inner, outer = blocks if raster == "m" else blocks[::-1]
    return _of_block(x, y, shape, raster, owned(x // width, slots, inner, outer, batch, least, select))


def _of_block(x: Any, y: Any, shape: tuple[int, int], raster: str, block: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """The tile of one CTA of a block."""
    width, height = shape
    first, second, matrix = block
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


def owned(
    index: Any, slots: Any, inner: Any, outer: Any, batch: Any, least: Minimum, select: Select
) -> tuple[Any, Any, Any]:
    """As `place`, for persistent clusters that keep to lines along inner, and so to rows of one operand.

    Of `slots` clusters, number s computes the blocks with the indices s, s + slots, ... Each walks a line of its own
    from end to end, all in step, then the line that comes so many lines later. Where in the end fewer lines are left
    than there are slots, these lines' ends go to the slots that have none, so that all compute equally many blocks,
    but for one.

    Args:
        index: 0 to batch * inner * outer - 1. slots: at most as many as there are blocks.
    """
    slot, turn = index % slots, index // slots
    first, step = turn // inner * slots, turn % inner  # where the lines that are walked begin, how far they are walked
    lines = least(outer * batch - first, slots)  # those that have a slot of their own
    even, more = lines * inner // slots, lines * inner % slots  # blocks a slot, and how many slots have one more
    end = step * (slots - lines) + slot - lines + least(more, lines)  # ends are taken across, then on along inner
    own = slot < lines
    line = first + select(own, slot, end % lines)
    return select(own, step, even + end // lines), line % outer, line // outer
