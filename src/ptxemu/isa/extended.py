"""PTX chapter 'Extended-Precision Integer Arithmetic Instructions'.

The parser makes the carry flag CC.CF a register: a second result of `.cc` forms, the last operand of addc, subc, madc.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxemu.isa.engine import Value, warp
from ptxemu.isa.types import bits_of, is_signed
from ptxemu.machine.lanes import FULL, LANES, WORD
from ptxemu.machine.warp import Warp

TYPES = "u32 s32 u64 s64"
TWO = {"a": "type", "b": "type"}
THREE = {**TWO, "c": "type"}


def _extended(
    w: Warp, m: int, type: str, total: Callable[..., int], operands: tuple[Value, ...], carry: int = 0
) -> tuple[Value, int]:
    """The low bits of `total(*operands, carry)` and the bit above them, lane by lane; operands are unsigned."""
    bits = bits_of(type)
    low = (1 << bits) - 1
    uniform = all(value.__class__ is int for value in operands) and carry & m in (0, m)
    if uniform:
        carry = int(carry & m != 0)
    results, out = [], 0
    for lane in range(1 if uniform else LANES):
        found = total(*(w.lane(value, lane) & low for value in operands), carry >> lane & 1)
        results.append(found & low)
        out |= (found >> bits & 1) << lane
    return (results[0], FULL if out else 0) if uniform else (np.array(results, WORD[bits]), out)


def _half(type: str, which: str) -> Callable[[int, int], int]:
    """The function that gives a half of a product, unsigned."""
    bits = bits_of(type)

    def number(x: int) -> int:
        return x - (1 << bits) if is_signed(type) and x >> (bits - 1) else x

    shift = bits if which == "hi" else 0
    return lambda a, b: number(a) * number(b) >> shift & (1 << bits) - 1


def _add(a: int, b: int, carry: int) -> int:
    return a + b + carry


def _subtract(a: int, b: int, borrow: int) -> int:
    return a - b - borrow


@warp("add.cc.type d|cf, a, b", TWO, type=TYPES)
def add_cc(w: Warp, m: int, a: Value, b: Value, *, type: str) -> tuple[Value, int]:
    """PTX 'Extended-Precision Arithmetic Instructions: add.cc'.  a + b, and its carry."""
    return _extended(w, m, type, _add, (a, b))


@warp("addc.type d, a, b, carry", TWO, type=TYPES)
def addc(w: Warp, m: int, a: Value, b: Value, carry: int, *, type: str) -> Value:
    """PTX 'Extended-Precision Arithmetic Instructions: addc'.  a + b + carry."""
    return _extended(w, m, type, _add, (a, b), carry)[0]


@warp("addc.cc.type d|cf, a, b, carry", TWO, type=TYPES)
def addc_cc(w: Warp, m: int, a: Value, b: Value, carry: int, *, type: str) -> tuple[Value, int]:
    """PTX 'Extended-Precision Arithmetic Instructions: addc'.  a + b + carry, and its carry."""
    return _extended(w, m, type, _add, (a, b), carry)


@warp("sub.cc.type d|cf, a, b", TWO, type=TYPES)
def sub_cc(w: Warp, m: int, a: Value, b: Value, *, type: str) -> tuple[Value, int]:
    """PTX 'Extended-Precision Arithmetic Instructions: sub.cc'.  a - b, and its borrow."""
    return _extended(w, m, type, _subtract, (a, b))


@warp("subc.type d, a, b, carry", TWO, type=TYPES)
def subc(w: Warp, m: int, a: Value, b: Value, carry: int, *, type: str) -> Value:
    """PTX 'Extended-Precision Arithmetic Instructions: subc'.  a - b - borrow."""
    return _extended(w, m, type, _subtract, (a, b), carry)[0]


@warp("subc.cc.type d|cf, a, b, carry", TWO, type=TYPES)
def subc_cc(w: Warp, m: int, a: Value, b: Value, carry: int, *, type: str) -> tuple[Value, int]:
    """PTX 'Extended-Precision Arithmetic Instructions: subc'.  a - b - borrow, and its borrow."""
    return _extended(w, m, type, _subtract, (a, b), carry)


def _mad(w: Warp, m: int, which: str, type: str, operands: Any, carry: int = 0) -> tuple[Value, int]:
    half = _half(type, which)
    return _extended(w, m, type, lambda a, b, c, cf: half(a, b) + c + cf, operands, carry)


@warp("mad.half.cc.type d|cf, a, b, c", THREE, half="lo hi", type=TYPES)
def mad_cc(w: Warp, m: int, a: Value, b: Value, c: Value, *, half: str, type: str) -> tuple[Value, int]:
    """PTX 'Extended-Precision Arithmetic Instructions: mad.cc'.  A half of a * b, plus c, and its carry."""
    return _mad(w, m, half, type, (a, b, c))


@warp("madc.half.type d, a, b, c, carry", THREE, half="lo hi", type=TYPES)
def madc(w: Warp, m: int, a: Value, b: Value, c: Value, carry: int, *, half: str, type: str) -> Value:
    """PTX 'Extended-Precision Arithmetic Instructions: madc'.  A half of a * b, plus c and the carry."""
    return _mad(w, m, half, type, (a, b, c), carry)[0]


@warp("madc.half.cc.type d|cf, a, b, c, carry", THREE, half="lo hi", type=TYPES)
def madc_cc(w: Warp, m: int, a: Value, b: Value, c: Value, carry: int, *, half: str, type: str) -> tuple[Value, int]:
    """PTX 'Extended-Precision Arithmetic Instructions: madc'.  A half of a * b, plus c and the carry, and its carry."""
    return _mad(w, m, half, type, (a, b, c), carry)
