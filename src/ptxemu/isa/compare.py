"""PTX chapter 'Comparison and Selection Instructions', with the half precision forms."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from ptxemu import numerics
from ptxemu.isa.engine import Value, lanes
from ptxemu.isa.lift import whole

INTEGERS = "b16 b32 b64 u16 u32 u64 s16 s32 s64"
FLOATS = "f16 bf16 f32 f64"
ORDERED: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "lo": operator.lt,
    "ls": operator.le,
    "hi": operator.gt,
    "hs": operator.ge,
}
COMBINE: dict[str, Callable[[Any, Any], Any]] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
INT_CMP = "eq ne lt le gt ge lo ls hi hs"
FLOAT_CMP = "eq ne lt le gt ge equ neu ltu leu gtu geu num nan"


def _number(a: Value, type: str, ftz: bool) -> Value:
    """An operand as numbers; bf16 arrives as bits."""
    if type == "bf16":
        return numerics.decode(numerics.BF16, a)
    return np.where(np.abs(a) < np.finfo(a.dtype).tiny, a.dtype.type(0), a) if ftz else a


def _compare_float(cmp: str, a: Value, b: Value, type: str, ftz: bool) -> Value:
    """The ordered comparisons are false with a NaN, those with a `u` true."""
    a, b = _number(a, type, ftz), _number(b, type, ftz)
    unordered = np.isnan(a) | np.isnan(b)
    if cmp == "nan":
        return unordered
    if cmp == "num":
        return ~unordered
    if len(cmp) == 3:
        return ORDERED[cmp[:2]](a, b) | unordered
    return ORDERED[cmp](a, b) & ~unordered


@lanes("setp.cmp.type p, a, b", {"p": "pred"}, ints=True, cmp=INT_CMP, type=INTEGERS)
def setp(a: Value, b: Value, *, cmp: str) -> Value:
    """PTX 'Comparison and Selection Instructions: setp'.  p = a cmp b."""
    return ORDERED[cmp](a, b)


@lanes("setp.cmp.bool.type p, a, b, c", {"p": "pred", "c": "pred"}, cmp=INT_CMP, bool="and or xor", type=INTEGERS)
def setp_bool(a: Value, b: Value, c: Value, *, cmp: str, bool: str) -> Value:
    """PTX 'Comparison and Selection Instructions: setp'.  p = (a cmp b) bool c."""
    return COMBINE[bool](ORDERED[cmp](a, b), c)


@lanes("setp.cmp{.ftz}.type p, a, b", {"p": "pred"}, cmp=FLOAT_CMP, type=FLOATS)
def setp_float(a: Value, b: Value, *, cmp: str, type: str, ftz: bool) -> Value:
    """PTX 'Comparison and Selection Instructions: setp'.  p = a cmp b of floats."""
    return _compare_float(cmp, a, b, type, ftz)


@lanes("setp.cmp.bool{.ftz}.type p, a, b, c", {"p": "pred", "c": "pred"}, cmp=FLOAT_CMP, bool="and or xor", type=FLOATS)
def setp_float_bool(a: Value, b: Value, c: Value, *, cmp: str, bool: str, type: str, ftz: bool) -> Value:
    """PTX 'Comparison and Selection Instructions: setp'.  p = (a cmp b) bool c of floats."""
    return COMBINE[bool](_compare_float(cmp, a, b, type, ftz), c)


@lanes("set.cmp.dtype.type d, a, b", {"d": "dtype"}, cmp=INT_CMP, dtype="u32 s32", type=INTEGERS)
def set_(a: Value, b: Value, *, cmp: str) -> Value:
    """PTX 'Comparison and Selection Instructions: set'.  All ones where a cmp b, else 0."""
    holds = ORDERED[cmp](a, b)
    return -int(holds) if isinstance(holds, bool) else -holds.astype(np.int32)


@lanes("set.cmp{.ftz}.dtype.type d, a, b", {"d": "dtype"}, cmp=FLOAT_CMP, dtype="u32 s32", type=FLOATS)
def set_float(a: Value, b: Value, *, cmp: str, type: str, ftz: bool) -> Value:
    """PTX 'Comparison and Selection Instructions: set'.  All ones where a cmp b, else 0."""
    return -_compare_float(cmp, a, b, type, ftz).astype(np.int32)


@lanes("selp.type d, a, b, c", {"c": "pred"}, type=INTEGERS)
@lanes("selp.f32 d, a, b, c", {"d": "b32", "a": "b32", "b": "b32", "c": "pred"})
@lanes("selp.f64 d, a, b, c", {"d": "b64", "a": "b64", "b": "b64", "c": "pred"})
def selp(a: Value, b: Value, c: Value) -> Value:
    """PTX 'Comparison and Selection Instructions: selp'.  d = c ? a : b."""
    if whole(a, b):
        return a if c else b
    return np.where(c, a, b)


@lanes("slct.type.s32 d, a, b, c", {"c": "s32"}, type="b16 b32 b64 u16 u32 u64 s16 s32 s64")
def slct(a: Value, b: Value, c: Value) -> Value:
    """PTX 'Comparison and Selection Instructions: slct'.  d = c >= 0 ? a : b."""
    if whole(a, b, c):
        return a if c >= 0 else b
    kind = next(x.dtype for x in (a, b) if not whole(x)) if not whole(a, b) else np.int64
    return np.where(np.greater_equal(c, 0), np.asarray(a, kind), np.asarray(b, kind))
