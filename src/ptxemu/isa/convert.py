"""PTX 'cvt'."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptxemu import numerics
from ptxemu.isa.engine import Value, lanes
from ptxemu.isa.lift import whole
from ptxemu.isa.types import bits_of, is_signed
from ptxemu.machine.lanes import WORD

INTEGERS = "u8 u16 u32 u64 s8 s16 s32 s64"
FLOATS = "f16 bf16 f32 f64"
PACKED8 = "e4m3x2 e5m2x2 e2m3x2 e3m2x2"
_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _value(a: Value, kind: str) -> Value:
    """A float operand as doubles, exactly."""
    return numerics.decode(numerics.BF16, a) if kind == "bf16" else a.astype(np.float64)


def _code(values: Value, kind: str, rnd: str | None = "rn", satfinite: bool = False, relu: bool = False) -> Value:
    """Doubles as the bits of a float type."""
    if kind == "f64":
        return values.view(np.uint64)
    code = numerics.encode(numerics.FORMATS[kind], values, rnd or "rn", satfinite, relu)
    return code.astype(np.uint16) if bits_of(kind) == 16 else code


def _limits(kind: str) -> tuple[int, int]:
    bits = bits_of(kind)
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if is_signed(kind) else (0, (1 << bits) - 1)


@lanes("cvt{.sat}.dtype.atype d, a", {"d": "dtype", "a": "atype"}, dtype=INTEGERS, atype=INTEGERS)
def integer(a: Value, *, sat: bool, dtype: str) -> Value:
    """PTX 'cvt'.  Between integers: extends, cuts off, or saturates."""
    if not sat:
        return a
    low, high = _limits(dtype)
    if whole(a):
        return min(max(a, low), high)
    least, most = np.iinfo(a.dtype).min, np.iinfo(a.dtype).max
    return np.clip(a, max(low, least), min(high, most))


@lanes(
    "cvt.irnd{.ftz}{.sat}.dtype.atype d, a",
    {"d": "dtype", "a": "atype"},
    irnd="rni rzi rmi rpi",
    dtype=INTEGERS,
    atype=FLOATS,
)
def to_integer(a: Value, *, irnd: str, dtype: str, atype: str) -> Value:
    """PTX 'cvt'.  Float to integer: always saturates; NaN gives 0, or the top bit where f64 or 64 bits take part."""
    values = _INTEGRAL[irnd](_value(a, atype))
    low, high = _limits(dtype)
    word: Any = np.int64 if is_signed(dtype) else np.uint64
    inside = np.isfinite(values) & (values >= low) & (values < float(high + 1))
    result = np.where(inside, values, 0).astype(word)
    result = np.where(values >= float(high + 1), word(high), result)
    if atype == "f64" or bits_of(dtype) == 64:
        result = np.where(np.isnan(values), np.uint64(1 << bits_of(dtype) - 1).astype(word), result)
    return np.where(values < low, word(low), result)


@lanes(
    "cvt.rnd{.ftz}{.sat}.dtype.atype d, a",
    {"d": "dtype", "a": "atype"},
    rnd="rn rz rm rp",
    dtype=FLOATS,
    atype=INTEGERS,
)
def from_integer(a: Value, *, rnd: str, sat: bool, dtype: str, atype: str) -> Value:
    """PTX 'cvt'.  Integer to float."""
    if bits_of(atype) == 64 and dtype == "f32" and rnd == "rn":
        result = a.astype(np.float32)  # in one rounding, which a double between would not be
        return np.clip(result, 0, 1) if sat else result
    values = a.astype(np.float64)
    if bits_of(atype) == 64 and dtype == "f64" and rnd != "rn":
        values = _directed(values, a, rnd)
    if rnd == "rn" and dtype in ("f16", "f32") and not sat and bits_of(atype) < 64:
        return values.astype(np.float16 if dtype == "f16" else np.float32)
    if bits_of(atype) == 64 and dtype != "f64":
        exact = values.astype(object) == a.astype(object)
        values = np.where(exact.astype(np.bool_), values, _sticky(values, a))
    return _code(np.clip(values, 0, 1) if sat else values, dtype, rnd)


def _directed(values: Value, a: Value, rnd: str) -> Value:
    """Doubles nearest to integers of 64 bits, moved to the neighbour where the rounding asks for the other side."""
    floats, exact = values.astype(object), a.astype(object)  # Python compares an int with a float exactly
    below, above = (floats < exact).astype(np.bool_), (floats > exact).astype(np.bool_)
    down = above & (values > 0) if rnd == "rz" else above & (rnd == "rm")
    up = below & (values < 0) if rnd == "rz" else below & (rnd == "rp")
    return np.where(down, np.nextafter(values, -np.inf), np.where(up, np.nextafter(values, np.inf), values))


def _sticky(values: Value, a: Value) -> Value:
    """Doubles near integers of 64 bits, made odd where they are inexact, so that the next rounding is right."""
    bits = values.view(np.int64)
    below = values.astype(object) < a.astype(object)
    odd = np.where(below.astype(np.bool_) == (values > 0), bits + 1, bits - 1)
    return np.where(bits & 1 == 1, bits, odd).view(np.float64)


@lanes(
    "cvt{.irnd}{.ftz}{.sat}.dtype.atype d, a",
    {"d": "dtype", "a": "atype"},
    irnd="rni rzi rmi rpi",
    dtype=FLOATS,
    atype=FLOATS,
)
@lanes(
    "cvt.rnd{.ftz}{.sat}.dtype.atype d, a", {"d": "dtype", "a": "atype"}, rnd="rn rz rm rp", dtype=FLOATS, atype=FLOATS
)
@lanes("cvt.rnd{.relu}{.satfinite}.dtype.f32 d, a", {"d": "dtype", "a": "f32"}, rnd="rn rz", dtype="f16 bf16")
@lanes("cvt.rnd{.satfinite}{.relu}.tf32.f32 d, a", {"d": "tf32", "a": "f32"}, rnd="rn rz rna")
def to_float(
    a: Value,
    *,
    rnd: str | None = None,
    irnd: str | None = None,
    ftz: bool = False,
    sat: bool = False,
    relu: bool = False,
    satfinite: bool = False,
    dtype: str = "tf32",
    atype: str = "f32",
) -> Value:
    """PTX 'cvt'.  Float to float, or to an integral value of the type."""
    values = _value(a, atype)
    if ftz:
        values = np.where(np.abs(values) < 2.0**-126, np.copysign(0.0, values), values)
    if irnd:
        values = _INTEGRAL[irnd](values)
    if sat:
        values = np.where(np.isnan(values), 0, np.clip(values, 0, 1)) + 0.0
    code = _code(values, dtype, rnd, satfinite, relu)
    if ftz and dtype == "f32":
        code = np.where(code & 0x7F800000, code, code & np.uint32(0x80000000))
    nan = np.isnan(values)
    if nan.any() and not (irnd or sat or relu or satfinite):
        kept = _nan_code(a, dtype, atype, rnd, ftz)
        code = code if kept is None else np.where(nan, kept, code)
    return code


def _nan_code(a: Value, dtype: str, atype: str, rnd: str | None, ftz: bool) -> Value | None:
    """What NaNs become in the conversions that do not make them canonical."""
    if (dtype, atype) == ("f32", "bf16"):
        return a.astype(np.uint32) << np.uint32(16)
    if dtype == "tf32":
        return a.view(np.uint32) & np.uint32(0xFFFFE000) if rnd == "rna" else None
    if "f64" not in (dtype, atype) or atype == "bf16":
        return None
    if ftz:
        return np.full(a.shape, 0x7FFFFFFFE0000000, np.uint64)
    # The sign and the upper bits of the fraction stay; the quiet bit is set.
    bits, (exponent, fraction) = a.view(WORD[bits_of(atype)]).astype(np.uint64), _FIELDS[atype]
    to_exponent, to_fraction = _FIELDS[dtype]
    sign = bits >> np.uint64(exponent + fraction) << np.uint64(to_exponent + to_fraction)
    payload = bits << np.uint64(64 - fraction) >> np.uint64(64 - to_fraction)
    quiet = ((1 << to_exponent + 1) - 1) << to_fraction - 1
    return (sign | payload | np.uint64(quiet)).astype(WORD[bits_of(dtype)])


_FIELDS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}  # bits of exponent and fraction


@lanes(
    "cvt.rnd{.relu}{.satfinite}.dtype.f32 d, a, b",
    {"d": "dtype", "a": "f32", "b": "f32"},
    rnd="rn rz",
    dtype="f16x2 bf16x2",
)
def to_half_pair(a: Value, b: Value, *, rnd: str, relu: bool, satfinite: bool, dtype: str) -> Value:
    """PTX 'cvt'.  Two f32 to a pair, a in the upper half."""
    pairs = np.empty((2, max(a.size, b.size)), np.float32)
    pairs[0], pairs[1] = a, b
    plain = rnd == "rn" and not relu and not satfinite
    if plain and dtype == "bf16x2":
        return numerics.f32_to_bf16_pair(pairs)
    code = numerics.f32_to_f16(pairs) if plain else _code(pairs.astype(np.float64), dtype[:-2], rnd, satfinite, relu)
    high, low = code.astype(np.uint32)
    return high << np.uint32(16) | low


def _pack8(high: Value, low: Value, bits: int = 8) -> Value:
    """Two codes in one word, the first in the upper `bits`."""
    return high << bits | low


def _halves(a: Value, kind: str) -> tuple[Value, Value]:
    """The upper and the lower number of a packed pair, as doubles."""
    if kind in ("f16x2", "bf16x2"):
        values = numerics.decode(numerics.FORMATS[kind[:-2]], np.ascontiguousarray(a).view(np.uint16)).reshape(-1, 2)
        return values[:, 1], values[:, 0]
    bits = 4 if kind == "e2m1x2" else 8
    code = a.astype(np.uint32)
    upper, lower = code >> bits & (1 << bits) - 1, code & (1 << bits) - 1
    if kind == "s2f6x2":
        return upper.astype(np.int8) / 64.0, lower.astype(np.int8) / 64.0
    if kind == "ue8m0x2":
        return numerics.decode_ue8m0(upper), numerics.decode_ue8m0(lower)
    form = numerics.FORMATS[kind[:-2]]
    return numerics.decode(form, upper), numerics.decode(form, lower)


def _pair(upper: Value, lower: Value, kind: str, satfinite: bool = False, relu: bool = False) -> Value:
    """Doubles to a pair of f16 or bf16."""
    high, low = (_code(x, kind[:-2], "rn", satfinite, relu).astype(np.uint32) for x in (upper, lower))
    return high << np.uint32(16) | low


def _scales(scale: Value | None) -> tuple[Value, Value]:
    if scale is None:
        return 1.0, 1.0
    return _halves(scale, "ue8m0x2")


@lanes("cvt.rn.satfinite{.relu}.dtype.f32 d, a, b", {"d": "dtype", "a": "f32", "b": "f32"}, dtype=f"{PACKED8} e2m1x2")
def to_small_pair(a: Value, b: Value, *, relu: bool, dtype: str) -> Value:
    """PTX 'cvt'.  Two f32 to a pair of FP8, FP6 or FP4, a in the upper half."""
    form = numerics.FORMATS[dtype[:-2]]
    high, low = (numerics.encode(form, x, "rn", True, relu) for x in np.broadcast_arrays(a, b))
    return _pack8(high, low, 4 if dtype == "e2m1x2" else 8)


@lanes(
    "cvt.rn.satfinite{.relu}.dtype.atype d, a",
    {"d": "dtype", "a": "atype"},
    dtype=f"{PACKED8} e2m1x2",
    atype="f16x2 bf16x2",
)
def small_from_half(a: Value, *, relu: bool, dtype: str, atype: str) -> Value:
    """PTX 'cvt'.  A pair of halves to a pair of FP8, FP6 or FP4."""
    form = numerics.FORMATS[dtype[:-2]]
    high, low = (numerics.encode(form, x, "rn", True, relu) for x in _halves(a, atype))
    return _pack8(high, low, 4 if dtype == "e2m1x2" else 8)


@lanes("cvt.rn{.relu}.f16x2.atype d, a", {"d": "b32", "a": "atype"}, atype=f"{PACKED8} e2m1x2")
def half_from_small(a: Value, *, relu: bool, atype: str) -> Value:
    """PTX 'cvt'.  A pair of FP8, FP6 or FP4 to a pair of f16, exactly."""
    return _pair(*_halves(a, atype), "f16x2", relu=relu)


@lanes(
    "cvt.rn{.relu}{.satfinite}{.scaled::n2::ue8m0}.bf16x2.atype d, a{, scale}",
    {"d": "b32", "a": "atype", "scale": "b16"},
    atype=f"{PACKED8} e2m1x2 s2f6x2",
)
@lanes(
    "cvt.rn{.satfinite}{.relu}{.scaled::n2::ue8m0}.bf16x2.atype d, a{, scale}",
    {"d": "b32", "a": "atype", "scale": "b16"},
    atype="s2f6x2",
)
def bf16_from_small(a: Value, scale: Value = None, *, relu: bool, satfinite: bool, atype: str) -> Value:
    """PTX 'cvt'.  A pair of small numbers to bf16, times two ue8m0 scales."""
    upper, lower = _halves(a, atype)
    scale_upper, scale_lower = _scales(scale)
    return _pair(upper * scale_upper, lower * scale_lower, "bf16x2", satfinite, relu)


@lanes("cvt.rn.bf16x2.ue8m0x2 d, a", {"d": "b32", "a": "ue8m0x2"})
def bf16_from_scales(a: Value) -> Value:
    """PTX 'cvt'.  Two ue8m0 scales to bf16."""
    return _pair(*_halves(a, "ue8m0x2"), "bf16x2")


@lanes("cvt.rnd{.satfinite}.ue8m0x2.f32 d, a, b", {"d": "ue8m0x2", "a": "f32", "b": "f32"}, rnd="rz rp")
def scales_from_f32(a: Value, b: Value, *, rnd: str, satfinite: bool) -> Value:
    """PTX 'cvt'.  Two f32 to ue8m0 scales, a in the upper half."""
    upper, lower = (numerics.encode_ue8m0(x, rnd, satfinite) for x in np.broadcast_arrays(a, b))
    return _pack8(upper, lower)


@lanes("cvt.rnd{.satfinite}.ue8m0x2.bf16x2 d, a", {"d": "ue8m0x2", "a": "bf16x2"}, rnd="rz rp")
def scales_from_bf16(a: Value, *, rnd: str, satfinite: bool) -> Value:
    """PTX 'cvt'.  Two bf16 to ue8m0 scales."""
    upper, lower = (numerics.encode_ue8m0(x, rnd, satfinite) for x in _halves(a, "bf16x2"))
    return _pack8(upper, lower)


@lanes(
    "cvt.rn.satfinite{.relu}{.scaled::n2::ue8m0}.s2f6x2.f32 d, a, b{, scale}",
    {"d": "s2f6x2", "a": "f32", "b": "f32", "scale": "b16"},
)
def s2f6_from_f32(a: Value, b: Value, scale: Value = None, *, relu: bool) -> Value:
    """PTX 'cvt'.  Two f32, over two scales, to s2f6."""
    upper, lower = np.broadcast_arrays(a, b)
    return _s2f6(upper.astype(np.float64), lower.astype(np.float64), scale, relu)


@lanes(
    "cvt.rn.satfinite{.relu}{.scaled::n2::ue8m0}.s2f6x2.bf16x2 d, a{, scale}",
    {"d": "s2f6x2", "a": "bf16x2", "scale": "b16"},
)
def s2f6_from_bf16(a: Value, scale: Value = None, *, relu: bool) -> Value:
    """PTX 'cvt'.  Two bf16, over two scales, to s2f6."""
    return _s2f6(*_halves(a, "bf16x2"), scale, relu)


def _s2f6(upper: Value, lower: Value, scale: Value | None, relu: bool) -> Value:
    """s2f6 is a signed fixed-point number with two integer and six fraction bits."""
    codes = []
    for x, s in zip((upper, lower), _scales(scale), strict=True):
        steps = np.clip(np.rint(np.where(np.isnan(x), 0, x / s) * 64), 0 if relu else -128, 127)
        codes.append(steps.astype(np.int64) & 0xFF)
    return _pack8(*codes)
