"""PTX chapters 'Floating-Point Instructions' and 'Half Precision Floating-Point Instructions'.

Functions get numpy arrays of the operand's type; packed pairs arrive as twice as many numbers.  bf16 has no numpy
type: it arrives as bits.  Approximate instructions give the correctly rounded result, which the manual allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from ptxemu import numerics
from ptxemu.isa.engine import Value, lanes

RND = "rn rz rm rp"
Binary = Callable[[Any, Any], Any]


# Rounding


def _two_sum(a: Value, b: Value) -> tuple[Value, Value]:
    """The rounded sum of doubles and what the rounding lost; the latter is 0 when the sum is not finite."""
    total = a + b
    back = total - a
    lost = (a - (total - back)) + (b - back)
    return total, np.where(np.isfinite(total), lost, 0.0)


def _odd_sum(a: Value, b: Value) -> Value:
    """a + b in double, rounded to odd, so that a later rounding to fewer bits is that of the exact sum."""
    total, lost = _two_sum(a, b)
    if not lost.any():
        return total
    bits = total.view(np.int64)
    even = (lost != 0) & (bits & 1 == 0)
    away = (lost > 0) == (total > 0)
    return np.where(even, np.where(away, bits + 1, bits - 1), bits).view(np.float64)


def _sum(a: Value, b: Value, rnd: str | None) -> Value:
    """As `_odd_sum`, with the zero of numbers that cancel negative under .rm."""
    total = _odd_sum(a, b)
    if rnd != "rm":
        return total
    return np.where((total == 0) & (np.signbit(a) != np.signbit(b)), -0.0, total)


def _rounded(exact: Value, kind: Any, rnd: str | None) -> Value:
    """A double that stands for an exact value (see `_odd_sum`) as f32 or f16 under a rounding."""
    near = exact.astype(kind)
    if rnd in (None, "rn"):
        return near
    error = np.where(
        np.isfinite(near), exact - near.astype(np.float64), np.where(np.isfinite(exact), -np.sign(near), 0)
    )
    if rnd == "rz":
        move = error * np.sign(near) < 0
        return np.where(move, np.nextafter(near, kind(0)), near)
    direction = kind(-np.inf if rnd == "rm" else np.inf)
    return np.where(error < 0 if rnd == "rm" else error > 0, np.nextafter(near, direction), near)


def _flush(a: Value, ftz: bool) -> Value:
    """Subnormals as zeros of the same sign."""
    if not ftz:
        return a
    return np.where(np.abs(a) < np.finfo(a.dtype).tiny, np.copysign(a.dtype.type(0), a), a)


def _flush_tiny(result: Value, exact: Value, rnd: str | None) -> Value:
    """Zeros for results that would be below the smallest normal number if the exponent had no limit.

    exact: the result before it was rounded, as a double.
    """
    kind, scale = result.dtype.type, 256.0
    tiny = np.abs(_rounded(exact * scale, kind, rnd)) < np.finfo(kind).tiny * kind(scale)
    return np.where(tiny, np.copysign(0.0, exact).astype(kind), result)


def _finish(result: Value, ftz: bool = False, sat: bool = False) -> Value:
    """Flushes, saturates to [0, 1] (NaN to 0, no zero negative), and gives f32 and f16 NaNs the canonical bits."""
    result = _flush(result, ftz)
    if sat:
        result = np.where(np.isnan(result), 0, np.clip(result, 0, 1)).astype(result.dtype) + result.dtype.type(0)
    elif result.dtype == np.float32:
        square = result.dot(result)
        if square != square:
            result = np.where(np.isnan(result), np.uint32(0x7FFFFFFF), result.view(np.uint32)).view(np.float32)
    elif result.dtype == np.float16 and np.isnan(result).any():
        result = np.where(np.isnan(result), np.uint16(0x7FFF), result.view(np.uint16)).view(np.float16)
    return result


def _nan64(result: Value, *operands: Value) -> Value:
    """f64 results whose NaNs are, made quiet, those of the first operand that is one; of none: negative."""
    if result.dtype != np.float64 or not np.isnan(result).any():
        return result
    bits = np.where(np.isnan(result), _INVALID, result.view(np.uint64))
    for operand in reversed(operands):
        bits = np.where(np.isnan(operand) & np.isnan(result), operand.view(np.uint64) | _QUIET, bits)
    return bits.view(np.float64)


_INVALID, _QUIET = np.uint64(0xFFF8 << 48), np.uint64(1 << 51)


def _exact(operation: str, a: Value, b: Value, rnd: str | None = None) -> Value:
    """A sum or product of f32 or f16 as a double for `_rounded`."""
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    return wide_a * wide_b if operation == "mul" else _sum(wide_a, wide_b, rnd)


# add, sub, mul, fma


@lanes("add{.rnd}{.ftz}{.sat}.type d, a, b", rnd=RND, type="f32 f16 f16x2 f32x2")
@lanes("add{.rnd}.type d, a, b", rnd="rn", type="f64")
def add(a: Value, b: Value, *, rnd: str | None, ftz: bool = False, sat: bool = False) -> Value:
    """PTX 'Floating Point Instructions: add'."""
    a, b = _flush(a, ftz), _flush(b, ftz)
    result = a + b if rnd in (None, "rn") else _rounded(_exact("add", a, b, rnd), a.dtype.type, rnd)
    return _finish(_nan64(result, b, a), ftz, sat)


@lanes("sub{.rnd}{.ftz}{.sat}.type d, a, b", rnd=RND, type="f32 f16 f16x2 f32x2")
@lanes("sub{.rnd}.type d, a, b", rnd="rn", type="f64")
def sub(a: Value, b: Value, *, rnd: str | None, ftz: bool = False, sat: bool = False) -> Value:
    """PTX 'Floating Point Instructions: sub'."""
    result = add(a, -b, rnd=rnd, ftz=ftz, sat=sat)
    return _nan64(result, b, a)


@lanes("mul{.rnd}{.ftz}{.sat}.type d, a, b", rnd=RND, type="f32 f16 f16x2 f32x2")
@lanes("mul{.rnd}.type d, a, b", rnd="rn", type="f64")
def mul(a: Value, b: Value, *, rnd: str | None, ftz: bool = False, sat: bool = False) -> Value:
    """PTX 'Floating Point Instructions: mul'."""
    a, b = _flush(a, ftz), _flush(b, ftz)
    exact = _exact("mul", a, b) if ftz or rnd not in (None, "rn") else None
    result = a * b if rnd in (None, "rn") else _rounded(exact, a.dtype.type, rnd)
    result = _flush_tiny(result, exact, rnd) if ftz else _nan64(result, b, a)
    return _finish(result, ftz, sat)


@lanes("fma.rnd{.ftz}{.sat}.type d, a, b, c", rnd=RND, type="f32 f32x2")
@lanes("fma.rnd{.ftz}{.sat}{.relu}.type d, a, b, c", rnd="rn", type="f16 f16x2")
@lanes("mad.rnd{.ftz}{.sat}.type d, a, b, c", rnd=RND, type="f32")
def fma(a: Value, b: Value, c: Value, *, rnd: str, ftz: bool, sat: bool, relu: bool = False) -> Value:
    """PTX 'Floating Point Instructions: fma'.  a * b + c, rounded once."""
    a, b, c = _flush(a, ftz), _flush(b, ftz), _flush(c, ftz)
    product, addend = np.broadcast_arrays(_exact("mul", a, b), c.astype(np.float64))
    exact = _sum(product, addend, rnd)
    result = _rounded(exact, a.dtype.type, rnd)
    result = _finish(_flush_tiny(result, exact, rnd) if ftz else result, ftz, sat)
    return _relu(result) if relu else result


def _relu(result: Value) -> Value:
    return np.where((result > 0) | np.isnan(result), result, result.dtype.type(0))


@lanes("fma.rn.f64 d, a, b, c", "f64")
@lanes("mad.rn.f64 d, a, b, c", "f64")
def fma_f64(a: Value, b: Value, c: Value) -> Value:
    """PTX 'Floating Point Instructions: fma'.  a * b + c in double, rounded once."""
    a, b, c = np.broadcast_arrays(a, b, c)
    return _nan64(np.array([_fma_exact(*each) for each in zip(a, b, c, strict=True)]), b, c, a)


def _fma_exact(a: float, b: float, c: float) -> float:
    if np.isfinite(a) and np.isfinite(b) and not np.isfinite(c):
        return c  # also where a * b is beyond the largest double
    if not all(np.isfinite((a, b, c))):
        return a * b + c
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if not exact:
        return a * b + c  # for the sign of zero
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


# bf16


def _bf16(bits: Value) -> Value:
    """bf16 bits, packed pairs as twice as many, to doubles."""
    return numerics.decode(numerics.BF16, bits.view(np.uint16))


def _to_bf16(values: Value, like: Value, relu: bool = False) -> Value:
    return numerics.encode(numerics.BF16, values, relu=relu).astype(np.uint16).view(like.dtype)


@lanes("add{.rn}.type d, a, b", type="bf16 bf16x2")
def add_bf16(a: Value, b: Value) -> Value:
    """PTX 'Half Precision Floating Point Instructions: add'."""
    return _to_bf16(_odd_sum(*np.broadcast_arrays(_bf16(a), _bf16(b))), a)


@lanes("sub{.rn}.type d, a, b", type="bf16 bf16x2")
def sub_bf16(a: Value, b: Value) -> Value:
    """PTX 'Half Precision Floating Point Instructions: sub'."""
    return _to_bf16(_odd_sum(*np.broadcast_arrays(_bf16(a), -_bf16(b))), a)


@lanes("mul{.rn}.type d, a, b", type="bf16 bf16x2")
def mul_bf16(a: Value, b: Value) -> Value:
    """PTX 'Half Precision Floating Point Instructions: mul'."""
    return _to_bf16(_bf16(a) * _bf16(b), a)


@lanes("fma.rn{.relu}.type d, a, b, c", type="bf16 bf16x2")
def fma_bf16(a: Value, b: Value, c: Value, *, relu: bool) -> Value:
    """PTX 'Half Precision Floating Point Instructions: fma'."""
    return _to_bf16(_odd_sum(*np.broadcast_arrays(_bf16(a) * _bf16(b), _bf16(c))), a, relu)


@lanes("neg.type d, a", type="bf16 bf16x2")
def neg_bf16(a: Value) -> Value:
    """PTX 'Half Precision Floating Point Instructions: neg'."""
    return _signed_bf16(a.view(np.uint16) ^ np.uint16(0x8000), a)


@lanes("abs.type d, a", type="bf16 bf16x2")
def abs_bf16(a: Value) -> Value:
    """PTX 'Half Precision Floating Point Instructions: abs'."""
    return _signed_bf16(a.view(np.uint16) & np.uint16(0x7FFF), a)


def _signed_bf16(bits: Value, like: Value) -> Value:
    """bf16 bits whose sign was changed, with the canonical NaN."""
    return np.where(bits & np.uint16(0x7FFF) > 0x7F80, np.uint16(0x7FFF), bits).view(like.dtype)


@lanes("min{.NaN}{.xorsign.abs}.type d, a, b", type="bf16 bf16x2")
def min_bf16(a: Value, b: Value, *, NaN: bool, xorsign: bool) -> Value:
    """PTX 'Half Precision Floating Point Instructions: min'."""
    return _to_bf16(_min_max(np.fmin, (_bf16(a), _bf16(b)), False, NaN, xorsign), a)


@lanes("max{.NaN}{.xorsign.abs}.type d, a, b", type="bf16 bf16x2")
def max_bf16(a: Value, b: Value, *, NaN: bool, xorsign: bool) -> Value:
    """PTX 'Half Precision Floating Point Instructions: max'."""
    return _to_bf16(_min_max(np.fmax, (_bf16(a), _bf16(b)), False, NaN, xorsign), a)


# Signs, minimum and maximum


@lanes("neg{.ftz}.type d, a", type="f32 f64 f16 f16x2")
def neg(a: Value, *, ftz: bool) -> Value:
    """PTX 'Floating Point Instructions: neg'."""
    return _finish(_nan64(-_flush(a, ftz), a))


@lanes("abs{.ftz}.type d, a", type="f32 f64 f16 f16x2")
def abs_(a: Value, *, ftz: bool) -> Value:
    """PTX 'Floating Point Instructions: abs'."""
    return _finish(_nan64(np.abs(_flush(a, ftz)), a))


@lanes("copysign.type d, a, b", type="f32 f64")
def copysign(a: Value, b: Value) -> Value:
    """PTX 'Floating Point Instructions: copysign'.  b with the sign of a."""
    return np.copysign(b, a)


@lanes("testp.op.type p, a", {"p": "pred"}, op="finite infinite number notanumber normal subnormal", type="f32 f64")
def testp(a: Value, *, op: str) -> Value:
    """PTX 'Floating Point Instructions: testp'.  Whether a is of that kind."""
    size, tiny = np.abs(a), np.finfo(a.dtype).tiny
    kinds = {
        "finite": np.isfinite(a),
        "infinite": np.isinf(a),
        "number": ~np.isnan(a),
        "notanumber": np.isnan(a),
        "normal": np.isfinite(a) & ((size >= tiny) | (size == 0)),
        "subnormal": (size < tiny) & (size > 0),
    }
    return kinds[op]


def _extreme(a: Value, b: Value, pick: Binary, nan: bool) -> Value:
    """fmin or fmax with -0 below +0; a NaN loses, or wins when `nan`."""
    result = pick(a, b)
    zeros = (a == 0) & (b == 0)
    if zeros.any():
        negative = np.signbit(a) | np.signbit(b) if pick is np.fmin else np.signbit(a) & np.signbit(b)
        result = np.where(zeros, np.where(negative, -0.0, 0.0).astype(result.dtype), result)
    return np.where(np.isnan(a) | np.isnan(b), result.dtype.type(np.nan), result) if nan else result


def _min_max(pick: Binary, values: tuple[Value, ...], ftz: bool, nan: bool, xorsign: bool) -> Value:
    first, *others = (_flush(v, ftz) for v in values)
    for other in others:
        if xorsign:
            sign = np.signbit(first) ^ np.signbit(other)
            size = _extreme(np.abs(first), np.abs(other), pick, nan)
            first = np.where(sign, -size, size)
        else:
            first = _nan64(_extreme(first, other, pick, nan), other, first)
    return _finish(first)


@lanes("min{.ftz}{.NaN}{.xorsign.abs}.type d, a, b", type="f32 f16 f16x2")
@lanes("min.type d, a, b", type="f64")
def min_(a: Value, b: Value, *, ftz: bool = False, NaN: bool = False, xorsign: bool = False) -> Value:
    """PTX 'Floating Point Instructions: min'."""
    return _min_max(np.fmin, (a, b), ftz, NaN, xorsign)


@lanes("max{.ftz}{.NaN}{.xorsign.abs}.type d, a, b", type="f32 f16 f16x2")
@lanes("max.type d, a, b", type="f64")
def max_(a: Value, b: Value, *, ftz: bool = False, NaN: bool = False, xorsign: bool = False) -> Value:
    """PTX 'Floating Point Instructions: max'."""
    return _min_max(np.fmax, (a, b), ftz, NaN, xorsign)


@lanes("min{.ftz}{.NaN}{.abs}.f32 d, a, b, c", "f32")
def min3(a: Value, b: Value, c: Value, *, ftz: bool, NaN: bool, abs: bool) -> Value:
    """PTX 'Floating Point Instructions: min'.  Of three; with .abs of their magnitudes."""
    values = tuple(np.abs(v) for v in (a, b, c)) if abs else (a, b, c)
    return _min_max(np.fmin, values, ftz, NaN, False)


@lanes("max{.ftz}{.NaN}{.abs}.f32 d, a, b, c", "f32")
def max3(a: Value, b: Value, c: Value, *, ftz: bool, NaN: bool, abs: bool) -> Value:
    """PTX 'Floating Point Instructions: max'.  Of three; with .abs of their magnitudes."""
    values = tuple(np.abs(v) for v in (a, b, c)) if abs else (a, b, c)
    return _min_max(np.fmax, values, ftz, NaN, False)


# Division, roots and transcendental functions


def _directed(near: Value, residual: Value, rnd: str | None) -> Value:
    """A result rounded to nearest, moved to its neighbour where `residual`, exact minus near, asks for it."""
    kind = near.dtype.type
    if rnd == "rz":
        return np.where(residual * np.sign(near) < 0, np.nextafter(near, kind(0)), near)
    if rnd == "rm":
        return np.where(residual < 0, np.nextafter(near, kind(-np.inf)), near)
    if rnd == "rp":
        return np.where(residual > 0, np.nextafter(near, kind(np.inf)), near)
    return near


def _divide(a: Value, b: Value, rnd: str | None) -> Value:
    near = a / b
    if rnd in (None, "rn"):
        return near
    wide_b = b.astype(np.float64)
    residual = (a.astype(np.float64) - near.astype(np.float64) * wide_b) * np.sign(wide_b)
    return _directed(near, residual, rnd)


@lanes("div.rnd{.ftz}.f32 d, a, b", "f32", rnd=RND)
@lanes("div.rnd.f64 d, a, b", "f64", rnd="rn")
@lanes("div.mode{.ftz}.f32 d, a, b", "f32", mode="approx full")
def div(a: Value, b: Value, *, rnd: str | None = None, ftz: bool = False, mode: str | None = None) -> Value:
    """PTX 'Floating Point Instructions: div'.  .approx gives 0 where b is beyond 2^126."""
    a, b = _flush(a, ftz), _flush(b, ftz)
    result = _divide(a, b, rnd)
    if mode == "approx":
        result = np.where((np.abs(b) > 2.0**126) & np.isfinite(b), a * np.copysign(a.dtype.type(0), b), result)
    if ftz and rnd is not None:
        result = _flush_tiny(result, a.astype(np.float64) / b.astype(np.float64), rnd)
    return _finish(result, ftz)


@lanes("rcp.rnd{.ftz}.f32 d, a", "f32", rnd=RND)
@lanes("rcp.rnd.f64 d, a", "f64", rnd="rn")
@lanes("rcp.approx{.ftz}.f32 d, a", "f32")
def rcp(a: Value, *, rnd: str | None = None, ftz: bool = False) -> Value:
    """PTX 'Floating Point Instructions: rcp'.  1 / a."""
    return _finish(_divide(np.ones_like(a), _flush(a, ftz), rnd), ftz)


def _coarse(result: Value) -> Value:
    """f64 results of which only the upper 32 bits are computed."""
    upper = result.view(np.uint64) & np.uint64(0xFFFFFFFF << 32)
    return np.where(np.isnan(result), np.uint64(0x7FFFFFFF << 32), upper).view(np.float64)


@lanes("rcp.approx.ftz.f64 d, a", "f64")
def rcp_coarse(a: Value) -> Value:
    """PTX 'Floating Point Instructions: rcp'.  1 / a of the upper half of a, to the upper half of d."""
    return _flush(_coarse(1 / _flush(a, True)), True)


@lanes("rsqrt.approx.ftz.f64 d, a", "f64")
def rsqrt_coarse(a: Value) -> Value:
    """PTX 'Floating Point Instructions: rsqrt'.  1 / sqrt(a), to the upper half of d."""
    return _coarse(1 / np.sqrt(_flush(a, True)))


@lanes("sqrt.rnd{.ftz}.f32 d, a", "f32", rnd=RND)
@lanes("sqrt.rnd.f64 d, a", "f64", rnd="rn")
@lanes("sqrt.approx{.ftz}.f32 d, a", "f32")
def sqrt(a: Value, *, rnd: str | None = None, ftz: bool = False) -> Value:
    """PTX 'Floating Point Instructions: sqrt'."""
    a = _flush(a, ftz)
    near = np.sqrt(a)
    if rnd not in (None, "rn"):
        near = _directed(near, a.astype(np.float64) - near.astype(np.float64) ** 2, rnd)
    return _finish(near, ftz)


def _through_double(function: Callable[[Any], Any], a: Value, ftz: bool) -> Value:
    a = _flush(a, ftz)
    return _finish(function(a.astype(np.float64)).astype(a.dtype), ftz)


@lanes("rsqrt.approx{.ftz}.f32 d, a", "f32")
@lanes("rsqrt.approx.f64 d, a", "f64")
def rsqrt(a: Value, *, ftz: bool = False) -> Value:
    """PTX 'Floating Point Instructions: rsqrt'.  1 / sqrt(a)."""
    return _through_double(lambda x: 1 / np.sqrt(x), a, ftz)


@lanes("sin.approx{.ftz}.f32 d, a", "f32")
def sin(a: Value, *, ftz: bool) -> Value:
    """PTX 'Floating Point Instructions: sin'."""
    return _through_double(np.sin, a, ftz)


@lanes("cos.approx{.ftz}.f32 d, a", "f32")
def cos(a: Value, *, ftz: bool) -> Value:
    """PTX 'Floating Point Instructions: cos'."""
    return _through_double(np.cos, a, ftz)


@lanes("lg2.approx{.ftz}.f32 d, a", "f32")
def lg2(a: Value, *, ftz: bool) -> Value:
    """PTX 'Floating Point Instructions: lg2'."""
    return _through_double(np.log2, a, ftz)


@lanes("ex2.approx{.ftz}.type d, a", type="f32 f16 f16x2")
def ex2(a: Value, *, ftz: bool) -> Value:
    """PTX 'Floating Point Instructions: ex2'.  2 to the a."""
    return _through_double(np.exp2, a, ftz)


@lanes("ex2.approx.ftz.type d, a", type="bf16 bf16x2")
def ex2_bf16(a: Value) -> Value:
    """PTX 'Half Precision Floating Point Instructions: ex2'.  2 to the a."""
    return _to_bf16(_flush_f32(np.exp2(_bf16(a))), a)


def _flush_f32(a: Value) -> Value:
    """Doubles below the smallest normal f32 as zeros."""
    return np.where(np.abs(a) < np.finfo(np.float32).tiny, np.copysign(0.0, a), a)


@lanes("tanh.approx.type d, a", type="f32 f16 f16x2")
def tanh(a: Value) -> Value:
    """PTX 'Floating Point Instructions: tanh'."""
    return _through_double(np.tanh, a, False)


@lanes("tanh.approx.type d, a", type="bf16 bf16x2")
def tanh_bf16(a: Value) -> Value:
    """PTX 'Half Precision Floating Point Instructions: tanh'."""
    return _to_bf16(np.tanh(_bf16(a)), a)
