"""PTX chapter 'Integer Arithmetic Instructions'."""

from __future__ import annotations

import numpy as np

from ptxemu.isa.engine import Value, lanes
from ptxemu.isa.lift import choose, lifted, whole

INT16_32_64 = "u16 u32 u64 s16 s32 s64"
WIDE = {"u16": 32, "s16": 32, "u32": 64, "s32": 64}


@lanes("add.type d, a, b", ints=True, type=INT16_32_64)
def add(a: Value, b: Value) -> Value:
    """PTX 'Integer Arithmetic Instructions: add'.  d = a + b, wrapping."""
    return a + b


@lanes("add.sat.s32 d, a, b", "s32")
def add_sat(a: Value, b: Value) -> Value:
    """PTX 'Integer Arithmetic Instructions: add'.  d = a + b, limited to the range of s32."""
    return _clamp(_long(a) + b)


@lanes("sub.type d, a, b", ints=True, type=INT16_32_64)
def sub(a: Value, b: Value) -> Value:
    """PTX 'Integer Arithmetic Instructions: sub'.  d = a - b, wrapping."""
    return a - b


@lanes("sub.sat.s32 d, a, b", "s32")
def sub_sat(a: Value, b: Value) -> Value:
    """PTX 'Integer Arithmetic Instructions: sub'.  d = a - b, limited to the range of s32."""
    return _clamp(_long(a) - b)


@lanes("mul.lo.type d, a, b", ints=True, type=INT16_32_64)
def mul_lo(a: Value, b: Value) -> Value:
    """PTX 'Integer Arithmetic Instructions: mul'.  The low half of the product."""
    return a * b


@lanes("mul.hi.type d, a, b", type=INT16_32_64)
def mul_hi(a: Value, b: Value, *, type: str) -> Value:
    """PTX 'Integer Arithmetic Instructions: mul'.  The high half of the product."""
    bits = int(type[1:])
    if bits == 64:
        return _mul_hi_64(a, b)
    return _long(a) * b >> bits


_mul_hi_64 = lifted(lambda a, b: a * b >> 64)


@lanes("mul.wide.u16 d, a, b", {"d": "u32", "a": "u16", "b": "u16"})
@lanes("mul.wide.u32 d, a, b", {"d": "u64", "a": "u32", "b": "u32"})
@lanes("mul.wide.s16 d, a, b", {"d": "s32", "a": "s16", "b": "s16"})
@lanes("mul.wide.s32 d, a, b", {"d": "s64", "a": "s32", "b": "s32"})
def mul_wide(a: Value, b: Value) -> Value:
    """PTX 'Integer Arithmetic Instructions: mul'.  The whole product, in twice the width."""
    return _long(a) * b


@lanes("mad.lo.type d, a, b, c", type=INT16_32_64)
def mad_lo(a: Value, b: Value, c: Value) -> Value:
    """PTX 'Integer Arithmetic Instructions: mad'.  The low half of a * b, plus c."""
    return a * b + c


@lanes("mad.hi.type d, a, b, c", type=INT16_32_64)
def mad_hi(a: Value, b: Value, c: Value, *, type: str) -> Value:
    """PTX 'Integer Arithmetic Instructions: mad'.  The high half of a * b, plus c."""
    if type[1:] == "64":
        return _mad_hi_64(a, b, c)
    return mul_hi(a, b, type=type) + c


_mad_hi_64 = lifted(lambda a, b, c: (a * b >> 64) + c)


@lanes("mad.wide.u16 d, a, b, c", {"d": "u32", "a": "u16", "b": "u16", "c": "u32"})
@lanes("mad.wide.u32 d, a, b, c", {"d": "u64", "a": "u32", "b": "u32", "c": "u64"})
@lanes("mad.wide.s16 d, a, b, c", {"d": "s32", "a": "s16", "b": "s16", "c": "s32"})
@lanes("mad.wide.s32 d, a, b, c", {"d": "s64", "a": "s32", "b": "s32", "c": "s64"})
def mad_wide(a: Value, b: Value, c: Value) -> Value:
    """PTX 'Integer Arithmetic Instructions: mad'.  The whole product, in twice the width, plus c."""
    return _long(a) * b + c


@lanes("div.type d, a, b", type=INT16_32_64)
def div(a: Value, b: Value) -> Value:
    """PTX 'Integer Arithmetic Instructions: div'.  The quotient, toward zero; all ones when b is 0 (unspecified)."""
    if whole(a, b):
        return (abs(a) // abs(b)) * (-1 if (a < 0) != (b < 0) else 1) if b else -1
    safe = np.where(np.equal(b, 0), np.ones_like(b), b)
    return np.where(np.equal(b, 0), ~np.zeros_like(a), (a - np.fmod(a, safe)) // safe)


@lanes("rem.type d, a, b", type=INT16_32_64)
def rem(a: Value, b: Value) -> Value:
    """PTX 'Integer Arithmetic Instructions: rem'.  The remainder, with a's sign; all ones when b is 0 (unspecified)."""
    if whole(a, b):
        return abs(a) % abs(b) * (-1 if a < 0 else 1) if b else -1
    return np.where(np.equal(b, 0), ~np.zeros_like(a), np.fmod(a, np.where(np.equal(b, 0), np.ones_like(b), b)))


@lanes("abs.type d, a", type="s16 s32 s64")
def abs_(a: Value) -> Value:
    """PTX 'Integer Arithmetic Instructions: abs'."""
    return abs(a)


@lanes("neg.type d, a", type="s16 s32 s64")
def neg(a: Value) -> Value:
    """PTX 'Integer Arithmetic Instructions: neg'."""
    return -a


@lanes("min.type d, a, b", type=INT16_32_64)
@lanes("min{.relu}.type d, a, b", type="s32")
def min_(a: Value, b: Value, *, relu: bool = False) -> Value:
    """PTX 'Integer Arithmetic Instructions: min'.  With .relu at least 0."""
    least = choose(a < b, a, b)
    return choose(least < 0, 0, least) if relu else least


@lanes("max.type d, a, b", type=INT16_32_64)
@lanes("max{.relu}.type d, a, b", type="s32")
def max_(a: Value, b: Value, *, relu: bool = False) -> Value:
    """PTX 'Integer Arithmetic Instructions: max'.  With .relu at least 0."""
    most = choose(a > b, a, b)
    return choose(most < 0, 0, most) if relu else most


@lanes("sad.type d, a, b, c", type=INT16_32_64)
def sad(a: Value, b: Value, c: Value) -> Value:
    """PTX 'Integer Arithmetic Instructions: sad'.  d = c + |a - b|."""
    return c + choose(a < b, b - a, a - b)


@lanes("popc.type d, a", {"d": "u32"}, type="b32 b64")
def popc(a: Value) -> Value:
    """PTX 'Integer Arithmetic Instructions: popc'.  The number of one bits."""
    return _popc(a)


_popc = lifted(lambda a: a.bit_count())


@lanes("clz.type d, a", {"d": "u32"}, type="b32 b64")
def clz(a: Value, *, type: str) -> Value:
    """PTX 'Integer Arithmetic Instructions: clz'.  The number of leading zeros."""
    return _clz(a, bits=int(type[1:]))


_clz = lifted(lambda a, bits: bits - a.bit_length())


@lanes("bfind{.shiftamt}.type d, a", {"d": "u32"}, type="u32 u64 s32 s64")
def bfind(a: Value, *, type: str, shiftamt: bool) -> Value:
    """PTX 'Integer Arithmetic Instructions: bfind'.  The position of the highest bit that is not a sign bit; -1: none.

    With .shiftamt the amount that shifts it to the top.
    """
    return _bfind(a, bits=int(type[1:]), shift=shiftamt)


@lifted
def _bfind(a: int, *, bits: int, shift: bool) -> int:
    place = (~a if a < 0 else a).bit_length() - 1
    return bits - 1 - place if shift and place >= 0 else place


@lanes("fns.b32 d, mask, base, offset", {"d": "b32", "mask": "b32", "base": "b32", "offset": "s32"})
def fns(mask: Value, base: Value, offset: Value) -> Value:
    """PTX 'Integer Arithmetic Instructions: fns'.  The offset-th set bit from base on; all ones when there is none."""
    return _fns(mask, base, offset)


@lifted
def _fns(mask: int, base: int, offset: int) -> int:
    if base > 31:
        return -1
    if offset == 0:
        return base if mask >> base & 1 else -1
    places = range(base, 32) if offset > 0 else range(base, -1, -1)
    found = [place for place in places if mask >> place & 1]
    return found[abs(offset) - 1] if len(found) >= abs(offset) else -1


@lanes("brev.type d, a", type="b32 b64")
def brev(a: Value, *, type: str) -> Value:
    """PTX 'Integer Arithmetic Instructions: brev'.  The bits in reverse."""
    return _brev(a, bits=int(type[1:]))


_brev = lifted(lambda a, bits: int(f"{a:0{bits}b}"[::-1], 2))


def _field(operand: int, bits: int) -> int:
    """A position or length: its low byte, or for 64 bits at most 255 (see errata)."""
    return operand & 0xFF if bits == 32 else min(operand, 0xFF)


@lanes("bfe.type d, a, b, c", {"b": "u32", "c": "u32"}, type="u32 u64 s32 s64")
def bfe(a: Value, b: Value, c: Value, *, type: str) -> Value:
    """PTX 'Integer Arithmetic Instructions: bfe'.  c bits from bit b on, zero- or sign-extended."""
    return _bfe(a, b, c, bits=int(type[1:]), signed=type[0] == "s")


@lifted
def _bfe(a: int, b: int, c: int, *, bits: int, signed: bool) -> int:
    position, length = _field(b, bits), _field(c, bits)
    field = (a & (1 << bits) - 1) >> position & (1 << length) - 1
    if not signed or not length:
        return field
    sign_at = min(position + length - 1, bits - 1)
    kept = max(min(length, bits - position), 0)
    return field | (-1 << kept) if a >> sign_at & 1 else field


@lanes("bfi.type d, a, b, c, e", {"c": "u32", "e": "u32"}, type="b32 b64")
def bfi(a: Value, b: Value, c: Value, e: Value, *, type: str) -> Value:
    """PTX 'Integer Arithmetic Instructions: bfi'.  b with the e low bits of a at bit c."""
    return _bfi(a, b, c, e, bits=int(type[1:]))


@lifted
def _bfi(a: int, b: int, c: int, e: int, *, bits: int) -> int:
    position = _field(c, bits)
    field = ((1 << _field(e, bits)) - 1) << position & (1 << bits) - 1
    return b & ~field | a << position & field


@lanes("szext.mode.type d, a, b", {"b": "u32"}, mode="clamp wrap", type="u32 s32")
def szext(a: Value, b: Value, *, mode: str, type: str) -> Value:
    """PTX 'Integer Arithmetic Instructions: szext'.  The low b bits of a, extended."""
    return _szext(a, b, wrap=mode == "wrap", signed=type[0] == "s")


@lifted
def _szext(a: int, b: int, *, wrap: bool, signed: bool) -> int:
    width = b & 31 if wrap else min(b, 32)
    field = a & (1 << width) - 1
    return field - (1 << width) if signed and width and field >> (width - 1) else field


@lanes("bmsk.mode.b32 d, a, b", {"d": "b32", "a": "u32", "b": "u32"}, mode="clamp wrap")
def bmsk(a: Value, b: Value, *, mode: str) -> Value:
    """PTX 'Integer Arithmetic Instructions: bmsk'.  b ones from bit a on."""
    return _bmsk(a, b, wrap=mode == "wrap")


@lifted
def _bmsk(a: int, b: int, *, wrap: bool) -> int:
    start, width = (a & 31, b & 31) if wrap else (min(a, 32), min(b, 32))
    return ((1 << width) - 1) << start & 0xFFFFFFFF


@lanes(
    "dp4a.atype.btype d, a, b, c", {"a": "b32", "b": "b32", "c": "s32", "d": "s32"}, atype="u32 s32", btype="u32 s32"
)
def dp4a(a: Value, b: Value, c: Value, *, atype: str, btype: str) -> Value:
    """PTX 'Integer Arithmetic Instructions: dp4a'.  c plus the dot product of four bytes."""
    return _dot(a, b, c, signs=(atype[0] == "s", btype[0] == "s"))


@lifted
def _dot(a: int, b: int, c: int, *, signs: tuple[bool, bool]) -> int:
    left, right = (
        [byte - 256 if signed and byte > 127 else byte for byte in (word & 0xFFFFFFFF).to_bytes(4, "little")]
        for word, signed in zip((a, b), signs, strict=True)
    )
    return c + sum(x * y for x, y in zip(left, right, strict=True))


def _long(a: Value) -> Value:
    """The value in twice the bits, to hold a product."""
    if type(a) is int:
        return a
    wide = {"u": {2: np.uint32, 4: np.uint64, 8: np.uint64}, "i": {2: np.int32, 4: np.int64, 8: np.int64}}
    return a.astype(wide[a.dtype.kind][a.dtype.itemsize])


def _clamp(a: Value) -> Value:
    low, high = -(1 << 31), (1 << 31) - 1
    return min(max(a, low), high) if type(a) is int else np.clip(a, low, high)
