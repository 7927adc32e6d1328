"""Tensor-core arithmetic, bit for bit as published models give it.

Sources: microsoft/MMA-Sim (arXiv 2511.10909), whose models were validated on silicon.

Every instruction is one fused sum: its terms (the accumulator and the products, or the exact sums of 16 products for
FP4) are aligned to the largest exponent among them, truncated toward zero at F bits below it, added exactly, and the
sum is truncated to f32 (rounded to nearest even for f16).  The exponent of a product is the sum of its factors'
exponents, that of a subnormal its format's smallest, that of zero -126.  NaN results are 0x7FFFFFFF (f16: 0x7FFF).

All sums here are exact in float64: terms are multiples of 2^(emax - F) and stay below 2^(emax + 17), F at most 35.

Matrices may come in stacks: "(M, K)" stands for (..., M, K) with the same leading axes for all operands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ptxemu import numerics as nx

F64 = npt.NDArray[np.float64]
F32 = npt.NDArray[np.float32]
I16 = npt.NDArray[np.int16]
Bools = npt.NDArray[np.bool_]
Codes = npt.NDArray[np.unsignedinteger]

FP4_BITS = 35
WIDE_BITS = 25
ZERO_EXPONENT = -126
_NAN = np.uint32(0x7FFFFFFF).view(np.float32)
_GROUP = 16  # FP4 products that are summed exactly before alignment
_CHUNK = 64  # rows of the general path at a time, to stay in the cache

# The C library gives freed blocks back to the system at once until it has seen a large one freed; after that the
# arrays here, a few hundred KB each, are recycled. It halves the time of an MMA.
_large = np.empty(16 << 20, np.uint8)
del _large


def exponents(values: F64, minimum: int) -> I16:
    """floor(log2 |x|), at least `minimum`; -126 for zero; of non-finite values nothing is promised."""
    power = np.frexp(values)[1] - 1
    return np.where(values == 0.0, ZERO_EXPONENT, np.maximum(power, minimum)).astype(np.int16)


@dataclass(frozen=True)
class Scales:
    """Block scales, (rows, blocks): values with NaN replaced by 0, exponents, and the rows that hold a NaN.

    mantissa_bits: of their format. least, largest: bounds of the exponents of the scales that are not zero, and of all.
    """

    values: F64
    exponents: I16
    nan_rows: Bools | None
    mantissa_bits: int
    least: int
    largest: int

    @property
    def blocks(self) -> int:
        return int(self.values.shape[-1])

    def rows(self, part: slice) -> Scales:
        nan = None if self.nan_rows is None else self.nan_rows[part]
        return replace(self, values=self.values[part], exponents=self.exponents[part], nan_rows=nan)


@lru_cache(maxsize=2)
def _scale_tables(e8m0: bool) -> tuple[F64, I16]:
    codes = np.arange(256)
    values = nx.decode_ue8m0(codes) if e8m0 else nx.decode_ue4m3(codes)
    return values, exponents(np.nan_to_num(values), -127 if e8m0 else nx.E4M3.min_exponent)


def decode_scales(codes: npt.NDArray[np.uint8], e8m0: bool) -> Scales:
    """Scale codes (rows, blocks): UE8M0, or UE4M3 whose sign bit is ignored; subnormals are exact."""
    value_table, exponent_table = _scale_tables(e8m0)
    nan_code = 0xFF if e8m0 else 0x7F
    codes = codes & np.uint8(nan_code)
    values, powers = value_table[codes], exponent_table[codes]
    smallest, largest = int(codes.min()), int(codes.max())  # exponents grow with the codes
    nan_rows = None
    if largest == nan_code:
        nan_rows = np.asarray((codes == nan_code).any(axis=-1))
        values = np.nan_to_num(values)
    least = int(exponent_table[smallest])
    if smallest == 0 and not e8m0:
        least = int(powers.min(where=values != 0, initial=1000))
    return Scales(values, powers, nan_rows, 0 if e8m0 else 3, least, int(exponent_table[largest]))


@dataclass(frozen=True)
class Fp4Operand:
    """E2M1 values (rows, K) and their block scales (rows, K / 16 or K / 32)."""

    values: F32
    scales: Scales

    @cached_property
    def scaled(self) -> F64:
        """Values times scales; exact."""
        blocks = self.values.reshape(*self.scales.values.shape, -1)
        return (blocks * self.scales.values[..., None]).reshape(self.values.shape)

    @cached_property
    def scaled_f32(self) -> F32:
        """The same; exact where the scales lie well inside the range of f32."""
        blocks = self.values.reshape(*self.scales.values.shape, -1)
        return (blocks * self.scales.values[..., None].astype(np.float32)).reshape(self.values.shape)

    @cached_property
    def largest_sum(self) -> float:
        """An upper bound of a row's sum of magnitudes."""
        return float(np.abs(self.scaled_f32).sum(axis=-1).max())

    @cached_property
    def largest(self) -> float:
        """The largest magnitude of a scaled value."""
        return float(np.abs(self.scaled_f32).max())

    def rows(self, part: slice) -> Fp4Operand:
        return Fp4Operand(self.values[part], self.scales.rows(part))


# Two float32 a byte, as one float64: a single item is what numpy looks up fastest.
_FP4_PAIRS = (
    nx.decode(nx.E2M1, nx.unpack_fp4(np.arange(256, dtype=np.uint8)[:, None]))
    .astype(np.float32)
    .view(np.float64)
    .ravel()
)


def decode_fp4(packed: npt.NDArray[np.uint8]) -> F32:
    """Packed E2M1 codes (rows, K / 2) to values (rows, K)."""
    return np.asarray(_FP4_PAIRS[packed].view(np.float32))


def multiply_fp4(a: Fp4Operand, b: Fp4Operand, c: F32 | None) -> F32:
    """One kind::mxf4 or kind::mxf4nvf4 MMA: groups of 16 exact products, each times its two scales, aligned at 35 bits.

    Args:
        a, b: (M, K) and (N, K). c: (M, N), or None for 0.

    Returns:
        (M, N) float32.
    """
    aligned = _Aligned(c, a.scales, b.scales)
    if aligned.products_exact:
        # Every term keeps all its bits, so that one exact matrix product does what the hardware does.
        total = _exact_product(a, b, aligned.unit)
        if c is not None:
            total += aligned.truncated_accumulator()
    else:
        top = aligned.largest_exponents()
        scale = _power_of_two(FP4_BITS - top)
        total = np.zeros(top.shape) if c is None else np.trunc(aligned.accumulator * scale)
        for first in range(0, a.values.shape[-1], _GROUP):
            k = slice(first, first + _GROUP)
            part = a.scaled[..., k] @ _transposed(b.scaled[..., k])
            part *= scale
            total += np.trunc(part, out=part)
        total *= _power_of_two(top - FP4_BITS)
    return aligned.finish(total)


def _exact_product(a: Fp4Operand, b: Fp4Operand, unit: int) -> F64:
    """A B^T of scaled values whose products are multiples of 2^unit.

    In float32 where no partial sum can need more than 24 bits, which ordinary data do not.
    """
    moderate = unit > -40 and max(a.scales.largest, b.scales.largest) < 20
    narrow = a.scales.largest + b.scales.largest - unit < 18  # else the next test is sure to fail
    if moderate and narrow and a.largest_sum * b.largest < 2.0 ** min(24 + unit, 127):
        return np.asarray((a.scaled_f32 @ _transposed(b.scaled_f32)).astype(np.float64))
    return np.asarray(a.scaled @ _transposed(b.scaled))


def _transposed(matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.asarray(matrix.swapaxes(-1, -2))


def _power_of_two(exponent: npt.NDArray[Any]) -> F64:
    """2^exponent as float64, for exponents of normal numbers."""
    return ((exponent.astype(np.int64) + 1023) << 52).view(np.float64)


def _f32_exponents(values: F32, minimum: int) -> I16:
    """As `exponents`, from the bits of finite float32 values."""
    power = (np.ascontiguousarray(values).view(np.int32) >> 23 & 0xFF).astype(np.int16) - np.int16(127)
    if minimum == ZERO_EXPONENT:
        return np.asarray(np.maximum(power, np.int16(ZERO_EXPONENT)))
    return np.asarray(np.where(values == 0, np.int16(ZERO_EXPONENT), np.maximum(power, np.int16(minimum))))


def _by_k(matrix: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(M, K) as K contiguous columns (M,)."""
    return np.ascontiguousarray(np.moveaxis(matrix, -1, 0))


def _largest_sums(a: I16, b: I16, top: I16) -> I16:
    """(M, N): the largest a[m, k] + b[n, k], or `top` where that is larger; `top` is used up."""
    buffer = np.empty_like(top)
    left, right = _by_k(a)[..., :, None], _by_k(b)[..., None, :]
    for k in range(left.shape[0]):
        np.maximum(top, np.add(left[k], right[k], out=buffer), out=top)
    return top


class _Aligned:
    """What the FP4 kinds' alignment depends on: the scales' exponents and the accumulator's.

    accumulator: C with NaN and infinities replaced by 0.  products_exact: no product can lose a bit, neither to the
    alignment nor below the last bit of an f32.
    """

    def __init__(self, c: F32 | None, sfa: Scales, sfb: Scales) -> None:
        self.c, self.sfa, self.sfb = c, sfa, sfb
        self.special: Bools | None = None
        self.accumulator: F32 = np.zeros((1, 1), np.float32) if c is None else c
        peak = _peak(self.accumulator)
        if not np.isfinite(peak):
            self.special = ~np.isfinite(self.accumulator)
            self.accumulator = np.where(self.special, np.float32(0), self.accumulator)
            peak = _peak(self.accumulator)
        largest_c = int(np.frexp(peak)[1]) - 1 if peak else ZERO_EXPONENT
        self.largest_scale = sfa.largest + sfb.largest
        # Every product is a multiple of 2^unit.
        unit = sfa.least + sfb.least - sfa.mantissa_bits - sfb.mantissa_bits - 2 * nx.E2M1.mantissa_bits
        self.unit = unit
        self.products_exact = unit >= max(largest_c, self.largest_scale) - FP4_BITS and unit >= -149

    def truncated_accumulator(self) -> F32:
        """C with the bits gone that lie more than 35 below the largest scale product of their element."""
        c = self.accumulator
        # A C of at least this keeps every bit of its 24-bit significand.
        bound = np.inf if self.largest_scale > 139 else np.ldexp(1.0, self.largest_scale - (FP4_BITS - 23))
        index = np.flatnonzero(np.abs(c) < np.float32(bound))
        if not index.size:
            return c
        values = c.reshape(-1)[index]
        if not values.any():
            return c
        m, n = c.shape[-2:]
        sfa, sfb = (scales.exponents.reshape(-1, scales.blocks) for scales in (self.sfa, self.sfb))
        top = (sfa[index // n] + sfb[index // (m * n) * n + index % n]).max(axis=1)
        top = np.maximum(top, _f32_exponents(values, ZERO_EXPONENT))
        c = np.array(c)
        c.reshape(-1)[index] = np.trunc(values * _power_of_two(FP4_BITS - top)) * _power_of_two(top - FP4_BITS)
        return c

    def largest_exponents(self) -> I16:
        """(M, N): the largest exponent among an element's scale products and accumulator."""
        shape = (*self.sfa.values.shape[:-1], self.sfb.values.shape[-2])
        top = np.broadcast_to(_f32_exponents(self.accumulator, ZERO_EXPONENT), shape).copy()
        return _largest_sums(self.sfa.exponents, self.sfb.exponents, top)

    def finish(self, total: F64) -> F32:
        """Truncate to f32, then put the NaN and infinities in; `total` is used up."""
        result = truncate_to_f32(total, may_underflow=not self.products_exact)
        if self.special is not None and self.c is not None:
            result = np.where(self.special, np.where(np.isnan(self.c), _NAN, self.c), result)
        for rows, index in ((self.sfa.nan_rows, np.s_[..., :, None]), (self.sfb.nan_rows, np.s_[..., None, :])):
            if rows is not None:
                result = np.where(rows[index], _NAN, result)
        return np.asarray(result)


def _peak(c: F32) -> float:
    """The largest magnitude; NaN if there is one."""
    return max(float(c.max()), -float(c.min()))


def truncate_to_f32(values: F64, may_underflow: bool = True) -> F32:
    """Finite float64 to f32 toward zero, beyond the range to infinity; `values` is used up.

    may_underflow: whether subnormal results may need truncation too.
    """
    bits = values.view(np.int64)
    bits &= ~((1 << 29) - 1)
    with np.errstate(over="ignore", under="ignore"):
        result = values.astype(np.float32)
    if may_underflow:
        tiny = (np.abs(result) < np.float32(2.0**-126)) & (values != 0.0)
        if tiny.any():
            result[tiny] = np.trunc(values[tiny] * 2.0**149) * 2.0**-149
    return result


@dataclass(frozen=True)
class Operand:
    """Element values and their exponents, (rows, K), block scales multiplied in.

    For the FP4 kinds the values are float32 without scales, and the exponents unused.
    """

    values: npt.NDArray[Any]
    exponents: I16

    def rows(self, part: slice) -> Operand:
        return Operand(self.values[part], self.exponents[part])

    def scaled(self, scales: Scales) -> Operand:
        """With one UE8M0 scale a row, (rows, 1), multiplied in."""
        values = self.values * scales.values
        if scales.nan_rows is not None:
            values[scales.nan_rows] = np.nan
        return Operand(values, self.exponents + scales.exponents)

    @property
    def moderate(self) -> bool:
        """Whether every non-zero value lies in 2^-48 .. 2^48."""
        magnitude = np.abs(self.values)
        return bool(magnitude.max() < 2.0**48 and magnitude.min(where=magnitude > 0, initial=1.0) >= 2.0**-48)


@lru_cache(maxsize=16)
def _element_tables(name: str) -> tuple[F64, I16]:
    fmt = nx.FORMATS[name]
    values = nx.decode(fmt, np.arange(min(2 * fmt.sign_bit, 1 << 16)))
    return values, exponents(np.where(np.isfinite(values), values, 0.0), fmt.min_exponent)


def decode_operand(fmt: nx.Format, codes: Codes, negate: bool = False) -> Operand:
    """Codes (rows, K) of any format."""
    if fmt is nx.TF32:
        values = nx.decode(fmt, codes & np.uint32(0xFFFFE000))
        powers = exponents(np.where(np.isfinite(values), values, 0.0), fmt.min_exponent)
    else:
        table, table_powers = _element_tables(fmt.name)
        values, powers = table[codes], table_powers[codes]
    return Operand(-values if negate else values, powers)


def multiply_wide(
    a: Operand, b: Operand, c: F32 | None, c_f16: bool = False, *, bits: int = WIDE_BITS, mantissa: int = 23
) -> F32:
    """One MMA of the other kinds (f16, tf32, f8f6f4, mxf8f6f4): every product is a term of its own, aligned at `bits`.

    Args:
        a, b: (M, K) and (N, K). c: (M, N) float32 values, or None for 0. c_f16: the accumulator's type is f16.
        bits: fractional bits that alignment keeps. mantissa: bits of the mantissa of f32 results that are kept.

    Returns:
        (M, N) float32; f16 accumulators are rounded to nearest even and returned as float32 values.
    """
    finite = bool(np.isfinite(a.values).all() and np.isfinite(b.values).all())
    patch = None
    if not finite or (c is not None and not np.isfinite(c).all()):
        patch = _special_results(a, b, c)
        a = Operand(np.where(np.isfinite(a.values), a.values, 0.0), a.exponents)
        b = Operand(np.where(np.isfinite(b.values), b.values, 0.0), b.exponents)
        c = None if c is None else np.where(np.isfinite(c), c, np.float32(0))
    minimum = (nx.F16 if c_f16 else nx.F32).min_exponent
    if a.values.ndim > 2:
        result = _rounded(_wide_sum(a, b, c, minimum, bits), c_f16)
    else:
        result = np.empty((a.values.shape[0], b.values.shape[0]), np.float32)
        for row in range(0, result.shape[0], _CHUNK):
            part = slice(row, row + _CHUNK)
            total = _wide_sum(a.rows(part), b, None if c is None else c[part], minimum, bits)
            result[part] = _rounded(total, c_f16)
    if mantissa < 23 and not c_f16:
        result.view(np.uint32)[:] &= np.uint32(-1 << 23 - mantissa & 0xFFFFFFFF)
    return result if patch is None else np.asarray(np.where(np.isfinite(patch), result, patch))


def _rounded(total: F64, c_f16: bool) -> F32:
    return _round_f16(total) if c_f16 else truncate_to_f32(total)


def _wide_sum(a: Operand, b: Operand, c: F32 | None, minimum: int, bits: int) -> F64:
    """The aligned and truncated terms' exact sum, (M, N)."""
    shape = (*a.values.shape[:-1], b.values.shape[-2])
    top = np.full(shape, ZERO_EXPONENT, np.int16) if c is None else _f32_exponents(c, minimum)
    top = _largest_sums(a.exponents, b.exponents, top)
    scale = _power_of_two(bits - top)
    total = np.zeros(shape) if c is None else np.trunc(c * scale)
    if a.moderate and b.moderate:
        _add_products_f32(a, b, top, total, bits)
    else:
        term = np.empty(shape)
        for k in range(a.values.shape[-1]):
            np.multiply(a.values[..., k, None], b.values[..., None, :, k], out=term)
            np.multiply(term, scale, out=term)
            total += np.trunc(term, out=term)
    total *= _power_of_two(top - bits)
    return total


def _add_products_f32(a: Operand, b: Operand, top: I16, total: F64, bits: int) -> None:
    """Adds the products, in units of 2^(top - bits) and truncated, to `total`, by way of float32 and int32.

    For operands of at most 12 significant bits and moderate exponents: products and their scaling are then exact in
    float32, the cast to int32 truncates, and eight terms below 2^27 fit an int32.  Where top is under -96 every product
    is zero, so that a clipped scale does no harm.
    """
    scale = ((bits - np.maximum(top, np.int16(-96))).astype(np.int32) + 127 << 23).view(np.float32)
    left = _by_k(a.values.astype(np.float32))[..., :, None]
    right = _by_k(b.values.astype(np.float32))[..., None, :]
    term = np.empty(top.shape, np.float32)
    whole, partial = np.empty(top.shape, np.int32), np.empty(top.shape, np.int32)
    depth = left.shape[0]
    for first in range(0, depth, 8):
        partial[:] = 0
        for k in range(first, min(first + 8, depth)):
            np.multiply(left[k], right[k], out=term)
            np.multiply(term, scale, out=term)
            np.copyto(whole, term, casting="unsafe")
            partial += whole
        total += partial


def _special_results(a: Operand, b: Operand, c: F32 | None) -> F32:
    """Where an element is NaN or infinite: that value; anything finite elsewhere."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = a.values @ _transposed(b.values)
        if c is not None:
            total = total + c
    return np.asarray(np.where(np.isnan(total), _NAN, np.where(np.isinf(total), total, 0.0)).astype(np.float32))


def _round_f16(values: F64) -> F32:
    with np.errstate(over="ignore"):
        return np.asarray(values.astype(np.float16).astype(np.float32) + np.float32(0))  # no zero is negative


def to_s32(total: npt.NDArray[np.int64], saturate: bool) -> npt.NDArray[np.int32]:
    """Integer sums as s32, which wrap around or stay at its limits."""
    return (total.clip(-(1 << 31), (1 << 31) - 1) if saturate else total).astype(np.int32)
