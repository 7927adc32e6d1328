"""The order of tiles: pure integer arithmetic, for numbers of the compiler's, of Python's and of numpy's alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def place(index: Any, inner: Any, outer: Any, group: int, least: Callable[[Any, Any], Any]) -> tuple[Any, Any, Any]:
    """(place along inner, place along outer, matrix) of the `index`-th tile of a batch of matrices of inner x outer.

    A matrix is walked in bands of `group` along outer, the last one perhaps narrower, and a band across first, then on
    along inner. With a group of 1 a band is a line along inner. A group is what L2 holds at a time: of as many tiles
    in flight, the fewer rows of operands they touch the nearer they are to a square.

    Args:
        index: 0 to batch * inner * outer - 1. group: at least 1. least: the minimum of two numbers.
    """
    matrix, rest = index // (inner * outer), index % (inner * outer)
    band, rest = rest // (inner * group), rest % (inner * group)
    if group == 1:
        return rest, band, matrix
    width = least(outer - band * group, group)
    return rest // width, band * group + rest % width, matrix
