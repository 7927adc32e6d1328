"""PTX chapter 'Comparison and Selection Instructions': pairs of results and of halves, results that are floats
or packed; lop3 with a pair of results.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ptxemu.isa.compare import (
    COMBINE,
    FLOAT_CMP,
    FLOATS,
    INT_CMP,
    INTEGERS,
    set_,
    set_float,
    setp,
    setp_float,
    slct,
)
from ptxemu.isa.engine import Value, lanes, warp
from ptxemu.isa.lift import whole
from ptxemu.isa.logic import lop3
from ptxemu.isa.types import bits_of, compose
from ptxemu.machine.lanes import FULL, bools, pack
from ptxemu.machine.warp import Warp

BOOL = "and or xor"
PAIR = {"p": "pred", "q": "pred", "a": "type", "b": "type"}
PACKED = {"f16x2": "f16", "bf16x2": "bf16"}
ONE = {"f16x2": 0x3C00, "bf16x2": 0x3F80}


@functools.lru_cache(maxsize=256)
def _comparison(cmp: str, type: str, ftz: bool) -> tuple[Callable[..., int], Callable[..., int]]:
    """The comparison as functions of registers to a mask: of ints alone, and of any."""
    floats = type in FLOATS.split()
    function = (
        functools.partial(setp_float, cmp=cmp, type=type, ftz=ftz) if floats else functools.partial(setp, cmp=cmp)
    )
    operand = type, bits_of(type)
    return compose(function, (operand, operand), ("pred", 1), takes_ints=not floats)


def _holds(cmp: str, type: str, ftz: bool, a: Value, b: Value) -> int:
    """The lanes in which a cmp b."""
    scalar, vector = _comparison(cmp, type, ftz)
    return scalar(a, b) if whole(a, b) else vector(a, b)


@warp("setp.cmp.type p|q, a, b", PAIR, cmp=INT_CMP, type=INTEGERS)
@warp("setp.cmp{.ftz}.type p|q, a, b", PAIR, cmp=FLOAT_CMP, type=FLOATS)
def setp_both(w: Warp, m: int, a: Value, b: Value, *, cmp: str, type: str, ftz: bool = False) -> tuple[int, int]:
    """PTX 'Comparison and Selection Instructions: setp'.  p = a cmp b, and q = !p."""
    holds = _holds(cmp, type, ftz, a, b)
    return holds & FULL, ~holds & FULL


@warp("setp.cmp.bool.type p|q, a, b, c", PAIR | {"c": "pred"}, cmp=INT_CMP, bool=BOOL, type=INTEGERS)
@warp("setp.cmp.bool{.ftz}.type p|q, a, b, c", PAIR | {"c": "pred"}, cmp=FLOAT_CMP, bool=BOOL, type=FLOATS)
def setp_both_bool(
    w: Warp, m: int, a: Value, b: Value, c: int, *, cmp: str, type: str, bool: str, ftz: bool = False
) -> tuple[int, int]:
    """PTX 'Comparison and Selection Instructions: setp'.  p = (a cmp b) bool c, and q = !(a cmp b) bool c."""
    holds = _holds(cmp, type, ftz, a, b)
    return COMBINE[bool](holds, c) & FULL, COMBINE[bool](~holds, c) & FULL


def _halves(a: Value) -> tuple[Value, Value]:
    """The lower and the upper 16 bits."""
    if type(a) is int:
        return a & 0xFFFF, a >> 16
    return (a & np.uint32(0xFFFF)).astype(np.uint16), (a >> np.uint32(16)).astype(np.uint16)


def _packed(cmp: str, type: str, ftz: bool, a: Value, b: Value) -> list[int]:
    """The lanes in which the comparison holds for the lower and for the upper halves."""
    return [_holds(cmp, PACKED[type], ftz, x, y) for x, y in zip(_halves(a), _halves(b), strict=True)]


@warp("setp.cmp{.ftz}.type p|q, a, b", PAIR, cmp=FLOAT_CMP, type="f16x2 bf16x2")
def setp_packed(w: Warp, m: int, a: Value, b: Value, *, cmp: str, type: str, ftz: bool) -> tuple[int, int]:
    """PTX 'Half Precision Comparison Instructions: setp'.  p of the lower halves, q of the upper ones."""
    lower, upper = _packed(cmp, type, ftz, a, b)
    return lower & FULL, upper & FULL


@warp("setp.cmp.bool{.ftz}.type p|q, a, b, c", PAIR | {"c": "pred"}, cmp=FLOAT_CMP, bool=BOOL, type="f16x2 bf16x2")
def setp_packed_bool(
    w: Warp, m: int, a: Value, b: Value, c: int, *, cmp: str, type: str, bool: str, ftz: bool
) -> tuple[int, int]:
    """PTX 'Half Precision Comparison Instructions: setp'.  As above, each combined with c."""
    lower, upper = _packed(cmp, type, ftz, a, b)
    return COMBINE[bool](lower, c) & FULL, COMBINE[bool](upper, c) & FULL


@warp("set.cmp{.ftz}.dtype.type d, a, b", {"d": "b32", "a": "type", "b": "type"}, cmp=FLOAT_CMP,
      dtype="f16x2 bf16x2", type="f16x2 bf16x2")  # fmt: skip
def set_packed(w: Warp, m: int, a: Value, b: Value, *, cmp: str, dtype: str, type: str, ftz: bool) -> Value:
    """PTX 'Half Precision Comparison Instructions: set'.  1.0 in each half where the comparison holds, else 0."""
    lower, upper = (np.where(bools(mask & FULL), ONE[dtype], 0) for mask in _packed(cmp, type, ftz, a, b))
    return (lower | upper << 16).astype(np.uint32)


@lanes("set.cmp.f32.type d, a, b", {"d": "f32"}, cmp=INT_CMP, type=INTEGERS)
def set_one(a: Value, b: Value, *, cmp: str) -> Value:
    """PTX 'Comparison and Selection Instructions: set'.  1.0 where a cmp b, else 0."""
    return np.equal(set_(a, b, cmp=cmp), -1).astype(np.float32)


@lanes("set.cmp{.ftz}.f32.type d, a, b", {"d": "f32"}, cmp=FLOAT_CMP, type=FLOATS)
def set_one_float(a: Value, b: Value, *, cmp: str, type: str, ftz: bool) -> Value:
    """PTX 'Comparison and Selection Instructions: set'.  1.0 where a cmp b, else 0."""
    return np.equal(set_float(a, b, cmp=cmp, type=type, ftz=ftz), -1).astype(np.float32)


@lanes("slct.f32.s32 d, a, b, c", {"d": "b32", "a": "b32", "b": "b32", "c": "s32"})
@lanes("slct.f64.s32 d, a, b, c", {"d": "b64", "a": "b64", "b": "b64", "c": "s32"})
def slct_float(a: Value, b: Value, c: Value) -> Value:
    """PTX 'Comparison and Selection Instructions: slct'.  d = c >= 0 ? a : b."""
    found: Any = slct(a, b, c)
    return found


@warp("lop3.bool.b32 d|p, a, b, c, table, q", {**dict.fromkeys("dabc", "b32"), "table": "u32", "q": "pred"},
      bool="and or xor")  # fmt: skip
def lop3_predicate(
    w: Warp, m: int, a: Value, b: Value, c: Value, table: Value, q: int, *, bool: str
) -> tuple[Value, int]:
    """PTX 'Logic and Shift Instructions: lop3'.  And p = (d != 0) bool q."""
    found = lop3(a, b, c, table)
    found = found & 0xFFFFFFFF if whole(found) else found
    holds = (FULL if found else 0) if whole(found) else pack(found != 0)
    combined = {"and": holds & q, "or": holds | q, "xor": holds ^ q}[bool]
    return found, combined & FULL
