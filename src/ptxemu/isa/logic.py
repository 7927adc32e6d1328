"""PTX chapter 'Logic and Shift Instructions'."""

from __future__ import annotations

import numpy as np

from ptxemu.isa.engine import Value, lanes
from ptxemu.isa.lift import choose, whole

BITS = "pred b16 b32 b64"


@lanes("and.type d, a, b", ints=True, type=BITS)
def and_(a: Value, b: Value) -> Value:
    """PTX 'Logic and Shift Instructions: and'."""
    return a & b


@lanes("or.type d, a, b", ints=True, type=BITS)
def or_(a: Value, b: Value) -> Value:
    """PTX 'Logic and Shift Instructions: or'."""
    return a | b


@lanes("xor.type d, a, b", ints=True, type=BITS)
def xor(a: Value, b: Value) -> Value:
    """PTX 'Logic and Shift Instructions: xor'."""
    return a ^ b


@lanes("not.type d, a", type=BITS)
def not_(a: Value) -> Value:
    """PTX 'Logic and Shift Instructions: not'."""
    return ~a


@lanes("cnot.type d, a", type="b16 b32 b64")
def cnot(a: Value) -> Value:
    """PTX 'Logic and Shift Instructions: cnot'.  1 where a is 0, else 0."""
    return int(not a) if whole(a) else np.equal(a, 0)


@lanes("lop3.b32 d, a, b, c, table", "b32", ints=True)
def lop3(a: Value, b: Value, c: Value, table: Value) -> Value:
    """PTX 'Logic and Shift Instructions: lop3'.  Bit 4a + 2b + c of the table, bit by bit."""
    a, b, c = (x & 0xFFFFFFFF if whole(x) else x for x in (a, b, c))
    result = a & 0 | b & 0 | c & 0
    for row in range(8):
        if table >> row & 1:
            # An exclusive or, since ~ would make a negative int of a uniform value.
            ones = [0 if row >> bit & 1 else 0xFFFFFFFF for bit in (2, 1, 0)]
            result = result | (a ^ ones[0]) & (b ^ ones[1]) & (c ^ ones[2])
    return result


@lanes("shf.way.mode.b32 d, a, b, c", "b32", way="l r", mode="clamp wrap")
def shf(a: Value, b: Value, c: Value, *, way: str, mode: str) -> Value:
    """PTX 'Logic and Shift Instructions: shf'.  b:a shifted; the high word of a left shift, else the low."""
    a, b, c = (x if whole(x) else x.astype(np.uint64) for x in (a, b, c))
    count = c & 31 if mode == "wrap" else choose(c > 32, 32, c)
    both = b << 32 | a
    return both << count >> 32 if way == "l" else both >> count


@lanes("shl.type d, a, b", {"b": "u32"}, ints=True, type="b16 b32 b64")
def shl(a: Value, b: Value, *, type: str) -> Value:
    """PTX 'Logic and Shift Instructions: shl'.  Counts beyond the width give 0."""
    bits = int(type[1:])
    if type_is_int(b):
        return a << b if b < bits else a & 0
    count = np.minimum(b, bits - 1)
    shifted = np.left_shift(_of(a, bits), count.astype(_WORD[bits]))
    return np.where(b < bits, shifted, shifted & 0)


@lanes("shr.type d, a, b", {"b": "u32"}, ints=True, type="b16 b32 b64 u16 u32 u64 s16 s32 s64")
def shr(a: Value, b: Value, *, type: str) -> Value:
    """PTX 'Logic and Shift Instructions: shr'.  Fills with the sign of signed types."""
    bits = int(type[1:])
    if type_is_int(b):
        if b < bits:
            return a >> b
        return a >> (bits - 1) if type[0] == "s" else a & 0
    if type[0] == "s":
        count = np.minimum(b, bits - 1)
        return np.right_shift(_of(a, bits, signed=True), count.astype(_SIGNED[bits]))
    shifted = np.right_shift(_of(a, bits), np.minimum(b, bits - 1).astype(_WORD[bits]))
    return np.where(b < bits, shifted, shifted & 0)


_WORD = {16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {16: np.int16, 32: np.int32, 64: np.int64}


def type_is_int(value: Value) -> bool:
    return type(value) is int


def _of(a: Value, bits: int, signed: bool = False) -> Value:
    """An operand as numpy takes it in a shift by an array: an int gets the instruction's type."""
    return (_SIGNED if signed else _WORD)[bits](a) if type(a) is int else a
