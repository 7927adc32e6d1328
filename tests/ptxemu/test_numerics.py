"""Conversions against ml_dtypes: exhaustive over 8- and 16-bit sources, boundary-rich over f32."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ptxemu import numerics as nx

PEERS = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
}
NARROW = ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2"]


def codes_of(name: str) -> np.ndarray[Any, np.dtype[Any]]:
    fmt = nx.FORMATS[name]
    return np.arange(2 * fmt.sign_bit, dtype=np.uint16 if fmt.sign_bit > 0x80 else np.uint8)


def source_values(source: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Every f16 or bf16 value, or f32 values around every rounding boundary of the narrow formats."""
    if source != "f32":
        return nx.decode(nx.FORMATS[source], codes_of(source))
    rng = np.random.default_rng(0)
    high = np.arange(0, 1 << 16, 1, dtype=np.uint32) << 16
    near = [high + np.uint32(low) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x0FFF, 0x1001)]
    random = rng.integers(0, 1 << 32, 50_000, dtype=np.uint32)
    return nx.decode(nx.F32, np.concatenate([*near, random]))


@pytest.mark.parametrize("name", list(PEERS))
def test_every_code_decodes_to_the_value_ml_dtypes_gives(name: str) -> None:
    codes = codes_of(name)
    with np.errstate(invalid="ignore"):
        expected = codes.view(PEERS[name]).astype(np.float64)
    got = nx.decode(nx.FORMATS[name], codes)
    np.testing.assert_array_equal(got, expected)
    real = ~np.isnan(expected)
    assert np.array_equal(np.signbit(got[real]), np.signbit(expected[real]))


@pytest.mark.parametrize("name", list(nx.FORMATS))
def test_every_finite_code_survives_decode_and_encode(name: str) -> None:
    fmt = nx.FORMATS[name]
    codes = np.arange(0, 2 * fmt.sign_bit, 1 if fmt.sign_bit <= 0x8000 else 8191, dtype=np.uint32) << np.uint32(
        fmt.shift
    )
    values = nx.decode(fmt, codes)
    keep = ~np.isnan(values)
    for rounding in nx.ROUNDINGS:
        np.testing.assert_array_equal(nx.encode(fmt, values[keep], rounding), codes[keep])


@pytest.mark.parametrize("source", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("name", list(PEERS))
def test_rn_agrees_with_ml_dtypes(name: str, source: str) -> None:
    fmt = nx.FORMATS[name]
    values = source_values(source)
    values = values[~np.isnan(values)]
    if fmt.inf_code is None:  # overflow differs by design: tested below
        values = values[np.abs(values) <= nx.decode(fmt, fmt.max_code)]
    with np.errstate(over="ignore"):
        expected = values.astype(np.float32).astype(PEERS[name])
    np.testing.assert_array_equal(
        nx.encode(fmt, values), expected.view(np.uint16 if fmt.sign_bit > 0x80 else np.uint8).astype(np.uint32)
    )


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("source", ["f16", "bf16"])
def test_satfinite_gives_sign_preserved_max_norm(name: str, source: str) -> None:
    """cvt, .satfinite: beyond MAX_NORM the result is MAX_NORM with the sign of the input; infinity too."""
    fmt = nx.FORMATS[name]
    values = source_values(source)
    limit = float(nx.decode(fmt, fmt.max_code))
    big = values[np.abs(values) > limit * 1.25]
    assert big.size
    codes = nx.encode(fmt, big, satfinite=True)
    np.testing.assert_array_equal(codes, np.where(np.signbit(big), fmt.max_code | fmt.sign_bit, fmt.max_code))


@pytest.mark.parametrize("satfinite", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_nan_becomes_canonical_nan_or_positive_max_norm(satfinite: bool, relu: bool) -> None:
    """cvt: NaN stays NaN where the format has one; e2m1, e2m3 and e3m2 give positive MAX_NORM."""
    expected = {"e2m1": 7, "e2m3": 0x1F, "e3m2": 0x1F, "e4m3": 0x7F, "e5m2": 0x7F, "f16": 0x7FFF, "bf16": 0x7FFF}
    for name, code in expected.items():
        for nan in (np.nan, -np.nan):
            assert nx.encode(nx.FORMATS[name], nan, satfinite=satfinite, relu=relu) == code
    assert nx.encode(nx.TF32, np.nan) == 0x7FFFE000
    assert nx.encode(nx.F32, np.nan) == 0x7FFFFFFF


@pytest.mark.parametrize("name", list(PEERS))
def test_relu_clamps_negative_results_to_positive_zero(name: str) -> None:
    fmt = nx.FORMATS[name]
    values = np.array([-0.0, -1e-30, -0.6, -1.0, -3.0, -np.inf, 0.6, 1.0])
    plain = nx.encode(fmt, values)
    np.testing.assert_array_equal(nx.encode(fmt, values, relu=True), np.where(np.signbit(values), 0, plain))


def neighbours(name: str) -> list[Fraction]:
    fmt = nx.FORMATS[name]
    return [Fraction(float(v)) for v in nx.decode(fmt, np.arange(fmt.max_code + 1))]


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "f16"])
def test_directed_roundings_pick_the_right_neighbour(name: str) -> None:
    """rz toward zero, rm down, rp up, rna ties away: against exact rational arithmetic between two codes."""
    fmt = nx.FORMATS[name]
    grid = neighbours(name)
    step = max(1, len(grid) // 200)
    for code in range(0, len(grid) - 1, step):
        low, high = grid[code], grid[code + 1]
        for part in (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4)):
            value = float(low + (high - low) * part)
            for sign, bit in ((1, 0), (-1, fmt.sign_bit)):
                x = sign * value
                assert nx.encode(fmt, x, "rz") == code | bit
                assert nx.encode(fmt, x, "rna") == (code + (part >= Fraction(1, 2))) | bit
                assert nx.encode(fmt, x, "rm") == (code + (sign < 0)) | bit
                assert nx.encode(fmt, x, "rp") == (code + (sign > 0)) | bit


def test_directed_roundings_overflow_to_the_largest_finite_number_or_infinity() -> None:
    for fmt in (nx.F16, nx.BF16, nx.F32, nx.E5M2):
        big = np.array([2.0**129, -(2.0**129)])
        sign = np.array([0, fmt.sign_bit])
        inf, top = np.full(2, fmt.inf_code), np.full(2, fmt.max_code)
        np.testing.assert_array_equal(nx.encode(fmt, big, "rn"), inf | sign)
        np.testing.assert_array_equal(nx.encode(fmt, big, "rz"), top | sign)
        np.testing.assert_array_equal(nx.encode(fmt, big, "rm"), np.array([top[0], inf[1]]) | sign)
        np.testing.assert_array_equal(nx.encode(fmt, big, "rp"), np.array([inf[0], top[1]]) | sign)
        np.testing.assert_array_equal(nx.encode(fmt, [np.inf, -np.inf], "rz"), inf | sign)


def test_f64_to_f32_rounds_once() -> None:
    tie = 1.0 + 2.0**-24
    assert nx.encode(nx.F32, tie) == 0x3F800000
    assert nx.encode(nx.F32, tie + 2.0**-50) == 0x3F800001
    assert nx.encode(nx.F32, tie, "rp") == 0x3F800001
    assert nx.encode(nx.F32, 2.0**-149) == 1
    assert nx.encode(nx.F32, 2.0**-150) == 0


def test_tf32_keeps_ten_mantissa_bits_in_the_upper_bits_of_the_register() -> None:
    assert nx.encode(nx.TF32, 1.0 + 2.0**-10) == 0x3F802000
    assert nx.encode(nx.TF32, 1.0 + 2.0**-11, "rna") == 0x3F802000
    assert nx.encode(nx.TF32, 1.0 + 2.0**-11, "rn") == 0x3F800000
    assert nx.encode(nx.TF32, -(1.0 + 2.0**-11), "rz") == 0xBF800000
    assert nx.encode(nx.TF32, 3.4028e38, satfinite=True) == 0x7F7FE000


@pytest.mark.parametrize("rounding", nx.ROUNDINGS)
@pytest.mark.parametrize("name", [*PEERS, "f32", "tf32"])
def test_float32_sources_take_the_same_rounding(name: str, rounding: str) -> None:
    """By table for narrow formats: NaN included, with and without the modifiers."""
    fmt, values = nx.FORMATS[name], source_values("f32")[::5]
    single = values.astype(np.float32)
    for satfinite in (False, True):
        for relu in (False, True):
            expected = nx._encode_any(fmt, values, rounding, satfinite, relu)
            np.testing.assert_array_equal(nx.encode(fmt, single, rounding, satfinite, relu), expected)
            np.testing.assert_array_equal(nx.encode(fmt, values, rounding, satfinite, relu), expected)
    scalar = nx.encode(fmt, 1.0)
    assert (scalar.shape, scalar) == ((), nx._encode_any(fmt, np.asarray(1.0), "rn", False, False))


@pytest.mark.parametrize("source", ["f16", "bf16", "f32"])
def test_fast_paths_equal_the_general_conversion(source: str) -> None:
    values = source_values(source)
    f32 = nx.encode(nx.F32, values).view(np.float32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(nx.f32_to_f16(f32), nx.encode(nx.F16, values))
    np.testing.assert_array_equal(nx.f32_to_bf16(f32), nx.encode(nx.BF16, values))


def test_every_ue8m0_code_is_a_power_of_two_and_ff_is_nan() -> None:
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(nx.decode_ue8m0(codes), codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64))
    for rounding in ("rz", "rp"):
        np.testing.assert_array_equal(nx.encode_ue8m0(nx.decode_ue8m0(codes), rounding), codes)


def test_ue8m0_rounds_to_the_power_below_or_above_and_drops_the_sign() -> None:
    values = np.array([1.0, 1.5, -1.5, 2.0, 0.0, 2.0**-127, 2.0**-130, 1.9 * 2.0**127, np.inf, np.nan])
    np.testing.assert_array_equal(nx.encode_ue8m0(values, "rz"), [127, 127, 127, 128, 0, 0, 0, 254, 255, 255])
    np.testing.assert_array_equal(nx.encode_ue8m0(values, "rp"), [127, 128, 128, 128, 0, 0, 0, 255, 255, 255])
    np.testing.assert_array_equal(nx.encode_ue8m0(values, "rp", True), [127, 128, 128, 128, 0, 0, 0, 254, 254, 255])
    with pytest.raises(ValueError, match="ue8m0 allows rz and rp"):
        nx.encode_ue8m0(1.0, "rn")


def test_every_ue4m3_code_ignores_the_sign_bit() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = (codes & 0x7F).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(nx.decode_ue4m3(codes), expected)


def test_low_nibble_is_the_even_element() -> None:
    np.testing.assert_array_equal(nx.unpack_fp4(np.array([[0x21, 0xF0]], np.uint8)), [[1, 2, 0, 15]])


def test_unknown_rounding_is_refused() -> None:
    with pytest.raises(ValueError, match="rounding='up'"):
        nx.encode(nx.F16, 1.0, "up")
