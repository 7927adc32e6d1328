"""PTX chapter 'Integer Arithmetic Instructions': pairs of 16-bit integers, and products of parts of registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxemu.isa.engine import Value, lanes
from ptxemu.isa.lift import choose, whole

KINDS: dict[str, Any] = {"u16x2": np.uint16, "s16x2": np.int16}
PAIRS = "u16x2 s16x2"


def _each(function: Callable[..., Any], kind: str, *values: Value) -> Value:
    """A function of both halves of registers."""
    parts = [np.atleast_1d(np.asarray(v, np.uint32)).view(KINDS[kind]).reshape(-1, 2) for v in values]
    found = np.ascontiguousarray(function(*parts).astype(KINDS[kind])).view(np.uint32).reshape(-1)
    return int(found[0]) if whole(*values) else found


@lanes("add.type d, a, b", "b32", type=PAIRS)
def add_pair(a: Value, b: Value, *, type: str) -> Value:
    """PTX 'Integer Arithmetic Instructions: add'.  Of both halves, wrapping."""
    return _each(np.add, type, a, b)


@lanes("min.type d, a, b", "b32", type="u16x2")
@lanes("min{.relu}.type d, a, b", "b32", type="s16x2")
def min_pair(a: Value, b: Value, *, type: str, relu: bool = False) -> Value:
    """PTX 'Integer Arithmetic Instructions: min'.  Of both halves; with .relu at least 0."""
    return _each(lambda x, y: np.maximum(np.minimum(x, y), 0) if relu else np.minimum(x, y), type, a, b)


@lanes("max.type d, a, b", "b32", type="u16x2")
@lanes("max{.relu}.type d, a, b", "b32", type="s16x2")
def max_pair(a: Value, b: Value, *, type: str, relu: bool = False) -> Value:
    """PTX 'Integer Arithmetic Instructions: max'.  Of both halves; with .relu at least 0."""
    return _each(lambda x, y: np.maximum(np.maximum(x, y), 0) if relu else np.maximum(x, y), type, a, b)


@lanes("mul24.half.type d, a, b", half="lo hi", type="u32 s32")
def mul24(a: Value, b: Value, *, half: str, type: str) -> Value:
    """PTX 'Integer Arithmetic Instructions: mul24'.  Bits 0 to 31, or 16 to 47, of the product of 24-bit numbers."""
    product = _long(_low24(a, type)) * _low24(b, type)
    return product >> (16 if half == "hi" else 0)


@lanes("mad24.half.type d, a, b, c", half="lo hi", type="u32 s32")
def mad24(a: Value, b: Value, c: Value, *, half: str, type: str) -> Value:
    """PTX 'Integer Arithmetic Instructions: mad24'.  As mul24, plus c."""
    return mul24(a, b, half=half, type=type) + c


@lanes("dp2a.half.atype.btype d, a, b, c", {"d": "u32", "a": "u32", "b": "u32", "c": "u32"}, half="lo hi",
       atype="u32 s32", btype="u32 s32")  # fmt: skip
def dp2a(a: Value, b: Value, c: Value, *, half: str, atype: str, btype: str) -> Value:
    """PTX 'Integer Arithmetic Instructions: dp2a'.  c plus the products of a's halves and two bytes of b."""
    first = 0 if half == "lo" else 16
    total = _long(c)
    for i in range(2):
        total = total + _part(a, 16 * i, 16, atype) * _part(b, first + 8 * i, 8, btype)
    return total


def _part(value: Value, shift: int, bits: int, type: str) -> Value:
    """Bits of a register as a number."""
    found = _long(value) >> shift & (1 << bits) - 1
    return choose(found >> bits - 1 == 1, found - (1 << bits), found) if type[0] == "s" else found


def _low24(value: Value, type: str) -> Value:
    return _part(value, 0, 24, type)


def _long(value: Value) -> Value:
    return value if whole(value) else value.astype(np.int64)
