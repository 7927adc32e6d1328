"""Conversions between values and the bit patterns of the GPU's floating-point formats, vectorised.

Source: PTX ISA, "Alternate Floating-Point Data Formats", "Packed Floating-Point Data Types" and
"Data Movement and Conversion Instructions: cvt".

Bits travel as unsigned integers in numpy arrays (or scalars); values travel as float64, which holds every format here
exactly. A format's *code* is its bit pattern; TF32 codes are the 32-bit register pattern whose low 13 bits are zero.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
F64 = npt.NDArray[np.float64]
Array = npt.NDArray[Any]

ROUNDINGS = ("rn", "rna", "rz", "rm", "rp")


@dataclass(frozen=True)
class Format:
    """One sign bit, `exponent_bits`, `mantissa_bits`; subnormals always supported.

    `max_code` is the largest finite magnitude, `inf_code` the infinity (None where there is none), `nan_code` what a
    NaN becomes: the canonical NaN, or, in formats with no NaN, positive MAX_NORM. `shift` is the number of zero bits
    below the code in its register.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    max_code: int
    inf_code: int | None
    nan_code: int
    has_nan: bool = True
    shift: int = 0
    bias: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bias", (1 << (self.exponent_bits - 1)) - 1)

    @property
    def sign_bit(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number, and of every subnormal."""
        return 1 - self.bias


E2M1 = Format("e2m1", 2, 1, 0x7, None, 0x7, has_nan=False)
E2M3 = Format("e2m3", 2, 3, 0x1F, None, 0x1F, has_nan=False)
E3M2 = Format("e3m2", 3, 2, 0x1F, None, 0x1F, has_nan=False)
E4M3 = Format("e4m3", 4, 3, 0x7E, None, 0x7F)
E5M2 = Format("e5m2", 5, 2, 0x7B, 0x7C, 0x7F)
F16 = Format("f16", 5, 10, 0x7BFF, 0x7C00, 0x7FFF)
BF16 = Format("bf16", 8, 7, 0x7F7F, 0x7F80, 0x7FFF)
TF32 = Format("tf32", 8, 10, 0x3FBFF, 0x3FC00, 0x3FFFF, shift=13)
F32 = Format("f32", 8, 23, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF)
FORMATS = {f.name: f for f in (E2M1, E2M3, E3M2, E4M3, E5M2, F16, BF16, TF32, F32)}


def _decode_any(fmt: Format, bits: Array) -> F64:
    code = np.asarray(bits).astype(np.int64) >> fmt.shift
    magnitude = code & (fmt.sign_bit - 1)
    exponent = magnitude >> fmt.mantissa_bits
    mantissa = magnitude & ((1 << fmt.mantissa_bits) - 1)
    significand = np.where(exponent > 0, mantissa + (1 << fmt.mantissa_bits), mantissa).astype(np.float64)
    value = np.ldexp(significand, np.maximum(exponent, 1) - fmt.bias - fmt.mantissa_bits)
    if fmt.has_nan:
        value = np.where(magnitude > fmt.max_code, np.nan, value)
    if fmt.inf_code is not None:
        value = np.where(magnitude == fmt.inf_code, np.inf, value)
    return np.asarray(np.where(code & fmt.sign_bit, -value, value))


_TABLES = {f.name: _decode_any(f, np.arange(2 * f.sign_bit)) for f in FORMATS.values() if f.sign_bit <= 0x80}


def decode(fmt: Format, bits: Any) -> F64:
    """The exact values of codes.

    Args:
        fmt: the format.
        bits: unsigned integers of any shape; bits above the format's width are ignored.

    Returns:
        float64 of the same shape; NaN codes give NaN.
    """
    table = _TABLES.get(fmt.name)
    if table is not None:
        return np.asarray(table[np.asarray(bits) & (2 * fmt.sign_bit - 1)])
    raw = np.asarray(bits)
    with np.errstate(invalid="ignore"):  # widening a signalling NaN
        if fmt is F16:
            return np.asarray(raw.astype(np.uint16).view(np.float16).astype(np.float64))
        word = raw.astype(np.uint32) << np.uint32(16 if fmt is BF16 else 0)
        return np.asarray(word.view(np.float32).astype(np.float64))


def _round_magnitude(scaled: F64, negative: npt.NDArray[np.bool_], rounding: str) -> F64:
    """Round non-negative `scaled` to integers; `negative` tells the sign that rm and rp need."""
    if rounding == "rn":
        return np.rint(scaled)
    if rounding == "rz":
        return np.floor(scaled)
    if rounding == "rna":
        whole = np.floor(scaled)
        return np.asarray(whole + (scaled - whole >= 0.5))
    if rounding == "rm":
        return np.where(negative, np.ceil(scaled), np.floor(scaled))
    if rounding == "rp":
        return np.where(negative, np.floor(scaled), np.ceil(scaled))
    raise ValueError(f"rounding={rounding!r}: allowed are {', '.join(ROUNDINGS)}")


def encode(fmt: Format, values: Any, rounding: str = "rn", satfinite: bool = False, relu: bool = False) -> U32:
    """Convert values to codes with one rounding, as `cvt.<rounding>{.satfinite}{.relu}` does.

    Overflow gives infinity (or the largest finite number where the rounding direction says so), NaN in a format that
    has NaN but no infinity, and MAX_NORM in a format with neither; with `satfinite` always MAX_NORM of the same sign.
    NaN gives `fmt.nan_code`. `relu` turns negative results, -0 included, into +0.

    Args:
        fmt: the destination format.
        values: float64 (or narrower) of any shape.
        rounding: "rn" (ties to even), "rna" (ties away), "rz", "rm" (down), "rp" (up).

    Returns:
        uint32 codes of the same shape, shifted into place for TF32.

    Raises:
        ValueError: unknown rounding.
    """
    x = np.asarray(values)
    single = x
    if x.dtype != np.float32:
        with np.errstate(over="ignore", invalid="ignore"):
            single = x.astype(np.float32)
    plain = rounding == "rn" and not satfinite and not relu
    if plain and fmt is F32:
        return np.asarray(np.where(x != x, np.uint32(F32.nan_code), single.view(np.uint32)))
    if x.dtype == np.float32 or (single == x).all():  # false when there is a NaN, which is right but slower
        if fmt.sign_bit <= 0x80:
            return _narrow_codes(fmt, rounding, satfinite, relu)[_sticky_key(single)].astype(np.uint32)
        if plain and fmt is BF16:
            return f32_to_bf16(single).astype(np.uint32)
        if plain and fmt is F16:
            with np.errstate(over="ignore"):
                return f32_to_f16(single).astype(np.uint32)
    return _encode_any(fmt, np.asarray(x, dtype=np.float64), rounding, satfinite, relu)


def _encode_any(fmt: Format, x: F64, rounding: str, satfinite: bool, relu: bool) -> U32:
    """The conversion as it is defined, for every format and rounding."""
    negative = np.signbit(x)
    nan = np.isnan(x)
    magnitude = np.where(np.isfinite(x), np.abs(x), 0.0)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, fmt.min_exponent)
    exponent = np.where(magnitude == 0.0, fmt.min_exponent, exponent).astype(np.int64)
    steps = _round_magnitude(np.ldexp(magnitude, fmt.mantissa_bits - exponent), negative, rounding)
    # A step count in [2^m, 2^(m+1)] carries into the exponent field by itself; subnormals need no case of their own.
    code = ((exponent - fmt.min_exponent) << fmt.mantissa_bits) + steps.astype(np.int64)
    code = np.where(np.isinf(x) | (code > fmt.max_code), _overflow(fmt, x, negative, rounding, satfinite), code)
    code = np.where(negative, code | fmt.sign_bit, code)
    if relu:
        code = np.where(negative, 0, code)
    code = np.where(nan, fmt.nan_code, code)
    return np.asarray((code << fmt.shift).astype(np.uint32))


def _overflow(fmt: Format, x: F64, negative: npt.NDArray[np.bool_], rounding: str, satfinite: bool) -> Array:
    """The magnitude code of what is too large for `fmt`."""
    if satfinite or not fmt.has_nan:
        return np.full(x.shape, fmt.max_code)
    beyond = fmt.inf_code if fmt.inf_code is not None else fmt.nan_code
    toward_zero = {"rz": np.full(x.shape, True), "rm": ~negative, "rp": negative}.get(rounding, np.full(x.shape, False))
    return np.where(toward_zero & np.isfinite(x), fmt.max_code, beyond)


def _sticky_key(x: npt.NDArray[np.float32]) -> U32:
    """The upper 16 bits of a float32 and whether any bit below them is set: enough to round to 5 mantissa bits."""
    bits = x.view(np.uint32)
    return np.asarray((bits >> np.uint32(16) << np.uint32(1)) | (bits & np.uint32(0xFFFF) != 0))


@lru_cache(maxsize=64)
def _narrow_codes(fmt: Format, rounding: str, satfinite: bool, relu: bool) -> npt.NDArray[np.uint8]:
    """The code of every sticky key, for formats of up to 8 bits."""
    key = np.arange(1 << 17, dtype=np.uint32)
    representative = decode(F32, key >> np.uint32(1) << np.uint32(16) | key & np.uint32(1))
    return _encode_any(fmt, representative, rounding, satfinite, relu).astype(np.uint8)


def f32_to_f16(values: Any) -> npt.NDArray[np.uint16]:
    """`cvt.rn.f16.f32`: float32 of any shape to f16 codes; NaN gives 0x7FFF.

    numpy may warn of overflow, which a launch silences as a whole: to do it here would take half of the time.
    """
    x = np.asarray(values, dtype=np.float32)
    bits = x.astype(np.float16).view(np.uint16)
    return np.asarray(np.where(x != x, np.uint16(0x7FFF), bits))


def f32_to_bf16(values: Any) -> npt.NDArray[np.uint16]:
    """`cvt.rn.bf16.f32`: float32 of any shape to bf16 codes; NaN gives 0x7FFF."""
    rounded = _round_bf16(np.atleast_1d(np.asarray(values, dtype=np.float32))) >> _U32[16]
    return np.asarray(rounded.astype(np.uint16).reshape(np.shape(values)))


def f32_to_bf16_pair(pairs: npt.NDArray[np.float32]) -> U32:
    """`cvt.rn.bf16x2.f32`: float32 (2, n) to words, the first row's codes in the upper half."""
    upper, lower = _round_bf16(pairs)
    upper &= _U32[0xFFFF0000]
    lower >>= _U32[16]
    upper |= lower
    return np.asarray(upper)


def _round_bf16(x: npt.NDArray[np.float32]) -> U32:
    """Words whose upper half is the bf16 code; the lower half is arbitrary."""
    bits = x.view(np.uint32)
    rounded = bits >> _U32[16]
    rounded &= _U32[1]
    rounded += bits  # only a NaN's bits can wrap, and NaN is replaced
    rounded += _U32[0x7FFF]
    nan = x != x
    if nan.any():
        rounded[nan] = 0x7FFFFFFF
    return np.asarray(rounded)


# Made once: numpy's scalars cost as much as an operation.
_U32 = {value: np.uint32(value) for value in (1, 16, 0x7FFF, 0xFFFF0000)}


def decode_ue8m0(bits: Any) -> F64:
    """Scales 2^(code - 127); 0xFF is NaN. There is no zero and no sign."""
    code = np.asarray(bits).astype(np.int64) & 0xFF
    return np.where(code == 0xFF, np.nan, np.ldexp(1.0, code - 127))


def encode_ue8m0(values: Any, rounding: str = "rz", satfinite: bool = False) -> U32:
    """`cvt.rz` or `cvt.rp` to ue8m0: the magnitude's power of two at or below ("rz") or at or above ("rp").

    The sign is dropped; what is below 2^-127 gives code 0; NaN gives 0xFF; too large gives 0xFE with `satfinite`,
    else 0xFF under "rp" and for infinity.

    Raises:
        ValueError: a rounding other than "rz" and "rp".
    """
    if rounding not in ("rz", "rp"):
        raise ValueError(f"rounding={rounding!r}: ue8m0 allows rz and rp")
    x = np.abs(np.asarray(values, dtype=np.float64))
    finite = np.where(np.isfinite(x), x, 1.0)
    mantissa, exponent = np.frexp(finite)
    power = np.where(finite == 0.0, -127, exponent - 1).astype(np.int64)
    if rounding == "rp":
        power = power + (mantissa > 0.5)
    code = np.maximum(power, -127) + 127
    largest = 0xFE if satfinite else 0xFF
    code = np.where(np.isinf(x), largest, np.minimum(code, largest))
    return np.asarray(np.where(np.isnan(x), 0xFF, code).astype(np.uint32))


def decode_ue4m3(bits: Any) -> F64:
    """NVFP4 block scales: E4M3 whose sign bit the hardware ignores, so 0x7F and 0xFF are NaN."""
    return decode(E4M3, np.asarray(bits) & 0x7F)


def unpack_fp4(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(..., n) bytes to (..., 2n) E2M1 codes; the low nibble is the even element."""
    codes = np.empty((*packed.shape, 2), dtype=np.uint8)
    codes[..., 0] = packed & 0xF
    codes[..., 1] = packed >> 4
    return codes.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
