"""Helpers of the chapters for operands that may differ from lane to lane."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxemu.machine.lanes import LANES, WORD, lanes
from ptxemu.text.module import Address, Operand, Pair, Register, Vector

if TYPE_CHECKING:
    from ptxemu.machine.warp import Warp

__all__ = ["each", "each_lane", "per_lane", "registers_in"]


def each(w: Warp, m: int, *values: Any) -> Iterator[tuple[int, ...]]:
    """Groups of the lanes of `m` with the same operands, as (mask, value, ...) of plain ints, by their lowest lane."""
    if all(type(value) is int for value in values):
        yield (m, *values)
        return
    groups: dict[tuple[int, ...], int] = {}
    for lane in lanes(m):
        key = tuple(w.lane(value, lane) for value in values)
        groups[key] = groups.get(key, 0) | 1 << lane
    for key, mask in groups.items():
        yield (mask, *key)


def per_lane(parts: Iterable[tuple[int, int]], width: int) -> Any:
    """A register of `width` bits from (mask, value) pairs: an int when there is one pair, else an array (32,)."""
    listed = list(parts)
    if len(listed) == 1:
        return listed[0][1]
    register = np.zeros(LANES, WORD[width])
    for mask, value in listed:
        register[list(lanes(mask))] = value
    return register


def registers_in(operand: Operand | None) -> Iterator[Register]:
    """The registers that an operand names."""
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Vector):
        for item in operand.items:
            yield from registers_in(item)
    elif isinstance(operand, Address):
        for part in operand.parts:
            yield from registers_in(part)
    elif isinstance(operand, Pair):
        yield from registers_in(operand.first)
        yield from registers_in(operand.second)


def each_lane(function: Callable[..., Any]) -> Callable[..., None]:
    """Of a function that one thread issues, the function of a warp: once when the operands are uniform."""

    @functools.wraps(function)
    def issue(w: Any, m: int, *operands: Any) -> None:
        if any(_varies(operand) for operand in operands):
            for lane in lanes(m):
                function(w, 1 << lane, *(_of_lane(operand, lane) for operand in operands))
        else:
            function(w, m, *operands)

    return issue


def _varies(operand: Any) -> bool:
    if isinstance(operand, tuple):
        return any(_varies(item) for item in operand)
    return isinstance(operand, np.ndarray)


def _of_lane(operand: Any, lane: int) -> Any:
    if isinstance(operand, tuple):
        return tuple(_of_lane(item, lane) for item in operand)
    return int(operand[lane]) if isinstance(operand, np.ndarray) else operand
