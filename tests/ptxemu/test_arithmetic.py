"""Tensor-core arithmetic: hand cases, and a scalar model in exact rational arithmetic written independently."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ptxemu import numerics as nx
from ptxemu.machine import arithmetic as ar

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NAN_BITS = 0x7FFFFFFF


def exponent(x: Fraction, minimum: int) -> int:
    if x == 0:
        return -126
    power = abs(x.numerator).bit_length() - x.denominator.bit_length()
    if abs(x) < Fraction(2) ** power:
        power -= 1
    return max(power, minimum)


def toward_zero(x: Fraction, unit: Fraction) -> Fraction:
    steps = abs(x) / unit
    return (1 if x >= 0 else -1) * Fraction(steps.numerator // steps.denominator) * unit


def fused(terms: list[tuple[Fraction, int]], bits: int) -> Fraction:
    unit = Fraction(2) ** (max(e for _, e in terms) - bits)
    return sum((toward_zero(x, unit) for x, _ in terms), Fraction(0))


def f32_toward_zero(x: Fraction) -> float:
    return float(toward_zero(x, Fraction(2) ** (exponent(x, -126) - 23)))


def scalar_fp4(a: Any, b: Any, sa: Any, sb: Any, c: float, e8m0: bool) -> float:
    least = -127 if e8m0 else -6
    terms = [(Fraction(float(c)), exponent(Fraction(float(c)), -126))]
    per_block = len(a) // len(sa)
    for g in range(0, len(a), 16):
        x, y = Fraction(float(sa[g // per_block])), Fraction(float(sb[g // per_block]))
        dot = sum(Fraction(float(p)) * Fraction(float(q)) for p, q in zip(a[g : g + 16], b[g : g + 16], strict=True))
        terms.append((dot * x * y, exponent(x, least) + exponent(y, least)))
    return f32_toward_zero(fused(terms, 35))


def scalar_wide(a: Any, b: Any, least_a: int, least_b: int, c: float, least_c: int = -126) -> Fraction:
    terms = [(Fraction(float(c)), exponent(Fraction(float(c)), least_c))]
    for p, q in zip(a, b, strict=True):
        x, y = Fraction(float(p)), Fraction(float(q))
        terms.append((x * y, exponent(x, least_a) + exponent(y, least_b)))
    return fused(terms, 25)


def fp4(a: Any, b: Any, sfa: ar.Scales, sfb: ar.Scales, c: Any) -> npt.NDArray[np.float32]:
    return ar.multiply_fp4(ar.Fp4Operand(a.astype(np.float32), sfa), ar.Fp4Operand(b.astype(np.float32), sfb), c)


def fp4_case(seed: int, codes: Any, e8m0: bool = False, blocks: int = 4, magnitude: float = 8.0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    m, n = 6, 5
    return {
        "a": E2M1[rng.integers(0, 16, (m, 64))],
        "b": E2M1[rng.integers(0, 16, (n, 64))],
        "sfa": ar.decode_scales(rng.choice(codes, (m, blocks)).astype(np.uint8), e8m0),
        "sfb": ar.decode_scales(rng.choice(codes, (n, blocks)).astype(np.uint8), e8m0),
        "c": (rng.standard_normal((m, n)) * 2.0 ** rng.uniform(-magnitude, magnitude, (m, n))).astype(np.float32),
    }


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("codes", "magnitude"),
    [
        (np.arange(0x68, 0x7F), 16.0),  # one octave or two: every product fits, one matrix product does
        (np.arange(0, 0x7F), 30.0),  # subnormal and zero scales too: products lose bits to the alignment
        ([0x00, 0x01, 0x7E], 30.0),
        ([0x38], 60.0),  # C far below and far above the products
    ],
)
def test_nvfp4_equals_the_scalar_model(seed: int, codes: Any, magnitude: float) -> None:
    case = fp4_case(seed, codes, magnitude=magnitude)
    got = fp4(**case)
    for i in range(6):
        for j in range(5):
            row, column = case["sfa"].values[i], case["sfb"].values[j]
            assert got[i, j] == scalar_fp4(case["a"][i], case["b"][j], row, column, case["c"][i, j], False)


@pytest.mark.parametrize("blocks", [2, 4])
@pytest.mark.parametrize("codes", [np.arange(120, 134), np.arange(100, 154), np.arange(0, 30), np.arange(0, 255)])
def test_mxfp4_equals_the_scalar_model(blocks: int, codes: Any) -> None:
    case = fp4_case(5, codes, e8m0=True, blocks=blocks)
    got = fp4(**case)
    for i in range(6):
        for j in range(5):
            row, column = case["sfa"].values[i], case["sfb"].values[j]
            expected = Fraction(scalar_fp4(case["a"][i], case["b"][j], row, column, case["c"][i, j], True))
            assert got[i, j] == (float(expected) if abs(expected) < 2**128 else np.copysign(np.inf, float(expected)))


@pytest.mark.parametrize(("left", "right"), [(0, 254), (254, 0), (10, 240), (1, 1)])
def test_scales_at_the_ends_of_the_range_neither_overflow_nor_underflow(left: int, right: int) -> None:
    sfa, sfb = (ar.decode_scales(np.full((1, 2), code, np.uint8), True) for code in (left, right))
    values = np.full((1, 64), 6.0)
    expected = scalar_fp4(values[0], values[0], sfa.values[0], sfb.values[0], 0.0, True)
    assert fp4(values, values, sfa, sfb, None)[0, 0] == expected


def test_ordinary_data_is_one_truncation_of_c_plus_the_exact_dot() -> None:
    """NVFP4 in practice: RZ_fp32(C + exact dot), so a long K drifts toward zero."""
    case = fp4_case(9, np.arange(0x70, 0x7F), magnitude=10)
    dot = (case["a"].reshape(6, 4, 16) * case["sfa"].values[:, :, None]).reshape(6, 64) @ (
        (case["b"].reshape(5, 4, 16) * case["sfb"].values[:, :, None]).reshape(5, 64)
    ).T
    exact = dot + case["c"]
    got = fp4(**case)
    assert (np.abs(got) <= np.abs(exact)).all()
    assert (np.abs(got.astype(np.float64) - exact) < np.spacing(np.abs(got))).all()


def ones(value: float, scale: int, c: float) -> dict[str, Any]:
    scales = ar.decode_scales(np.full((1, 4), scale, np.uint8), False)
    return {
        "a": np.full((1, 64), value),
        "b": np.full((1, 64), 1.0),
        "sfa": scales,
        "sfb": scales,
        "c": np.array([[c]], np.float32),
    }


def test_the_sum_is_truncated_toward_zero_not_rounded() -> None:
    """64 + 2^-18 - ... : what does not fit 24 bits is dropped on either side of zero."""
    for sign in (1.0, -1.0):
        got = fp4(**ones(sign, 0x38, sign * 2.0**24))  # 2^24 + 64 is exact
        assert got[0, 0] == sign * (2.0**24 + 64)
        case = ones(sign, 0x38, sign * 2.0**24)
        case["a"][0, 1:] = 0  # 2^24 + 1 needs 25 bits
        assert fp4(**case)[0, 0] == sign * 2.0**24
    case = ones(1.0, 0x38, -(2.0**24))
    case["a"][0, 2:] = 0
    assert fp4(**case)[0, 0] == -(2.0**24 - 2)


def test_zero_data_with_scales_7e_truncates_c_to_multiples_of_2_to_the_minus_19() -> None:
    for c in (1.0 + 2.0**-23, 2.0**-19 * 1.75, 2.0**-20, -(2.0**-20), -3 * 2.0**-20, 3.0 + 2.0**-20):
        got = fp4(**ones(0.0, 0x7E, c))[0, 0]
        assert got == np.trunc(c * 2.0**19) * 2.0**-19


def test_zero_scales_leave_c_alone() -> None:
    for c in (1.0 + 2.0**-23, 2.0**-149, -(2.0**-140), 3.4028235e38):
        assert fp4(**ones(6.0, 0x00, c))[0, 0] == np.float32(c)


def test_a_small_c_of_the_other_sign_vanishes_before_the_sum() -> None:
    """The alignment truncates C to nothing, so 64 stays 64 although the exact sum lies below it."""
    assert fp4(**ones(1.0, 0x38, -(2.0**-40)))[0, 0] == 64.0
    assert fp4(**ones(1.0, 0x38, -(2.0**-30)))[0, 0] == np.nextafter(np.float32(64), np.float32(0))


def test_every_scale_code_is_exact_subnormals_included_and_its_sign_is_ignored() -> None:
    for code in range(256):
        scale = ar.decode_scales(np.full((1, 4), code, np.uint8), False)
        one = ar.decode_scales(np.full((1, 4), 0x38, np.uint8), False)
        got = fp4(np.full((1, 64), 0.5), np.full((1, 64), 0.5), scale, one, None)
        value = float(nx.decode(nx.E4M3, code & 0x7F))
        if code & 0x7F == 0x7F:
            assert got.view(np.uint32)[0, 0] == NAN_BITS
        else:
            assert got[0, 0] == 16 * value


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_nan_scale_gives_7fffffff_even_with_zero_data(code: int) -> None:
    good = ar.decode_scales(np.full((3, 4), 0x38, np.uint8), False)
    codes = np.full((3, 4), 0x38, np.uint8)
    codes[1, 2] = code
    bad = ar.decode_scales(codes, False)
    zeros = np.zeros((3, 64))
    rows = fp4(zeros, zeros, bad, good, None).view(np.uint32)
    columns = fp4(zeros, zeros, good, bad, np.ones((3, 3), np.float32)).view(np.uint32)
    np.testing.assert_array_equal(rows == NAN_BITS, np.array([[0] * 3, [1] * 3, [0] * 3], bool))
    np.testing.assert_array_equal(columns == NAN_BITS, np.array([[0, 1, 0]] * 3, bool))


def test_nan_in_c_gives_7fffffff_and_infinity_stays() -> None:
    case = ones(1.0, 0x38, 0.0)
    for bits, expected in ((0xFFC00001, NAN_BITS), (0x7F800000, 0x7F800000), (0xFF800000, 0xFF800000)):
        case["c"] = np.array([[bits]], np.uint32).view(np.float32)
        assert fp4(**case).view(np.uint32)[0, 0] == expected


def test_no_c_is_zero() -> None:
    case = fp4_case(3, np.arange(0x60, 0x7F))
    case["c"] = np.zeros_like(case["c"])
    expected = fp4(**case)
    case["c"] = None
    np.testing.assert_array_equal(fp4(**case), expected)


WIDE = {
    "f16": (nx.F16, 16),
    "bf16": (nx.BF16, 16),
    "tf32": (nx.TF32, 8),
    "e4m3": (nx.E4M3, 32),
    "e5m2": (nx.E5M2, 32),
    "e2m3": (nx.E2M3, 32),
}


def wide_codes(fmt: nx.Format, k: int, rows: int, seed: int, spread: float) -> npt.NDArray[np.uint32]:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((rows, k)) * 2.0 ** rng.uniform(-spread, spread, (rows, k))
    values[rng.random((rows, k)) < 0.1] = 0
    return nx.encode(fmt, values, satfinite=True)


@pytest.mark.parametrize("name", list(WIDE))
@pytest.mark.parametrize("spread", [0.5, 6.0])
def test_other_kinds_align_every_product_at_25_bits(name: str, spread: float) -> None:
    fmt, k = WIDE[name]
    a, b = wide_codes(fmt, k, 9, 1, spread), wide_codes(fmt, k, 7, 2, spread)
    c = (np.random.default_rng(3).standard_normal((9, 7)) * 2.0 ** np.arange(-30, 33).reshape(9, 7)).astype(np.float32)
    got = ar.multiply_wide(ar.decode_operand(fmt, a), ar.decode_operand(fmt, b), c)
    va, vb = nx.decode(fmt, a), nx.decode(fmt, b)
    for i in range(9):
        for j in range(7):
            expected = scalar_wide(va[i], vb[j], fmt.min_exponent, fmt.min_exponent, c[i, j])
            assert got[i, j] == f32_toward_zero(expected)


def test_bf16_products_below_the_f32_range_are_truncated_to_subnormals() -> None:
    a = ar.decode_operand(nx.BF16, nx.encode(nx.BF16, np.full((1, 16), 1.5 * 2.0**-75)))
    got = ar.multiply_wide(a, a, None)
    assert got[0, 0] == 16 * float(toward_zero(Fraction(9, 4) / 2**150, Fraction(1, 2**151)))
    assert 0 < got[0, 0] < 2.0**-126


def test_truncation_happens_term_by_term() -> None:
    """16 products of 2^-26 beside a C of 1 are each below the alignment, though their sum is not."""
    tiny, one = nx.encode(nx.F16, np.full((1, 16), 2.0**-13)), np.ones((1, 1), np.float32)
    operand = ar.decode_operand(nx.F16, tiny)
    assert ar.multiply_wide(operand, operand, one)[0, 0] == 1.0
    bigger = ar.decode_operand(nx.F16, nx.encode(nx.F16, np.full((1, 16), 2.0**-12)))
    assert ar.multiply_wide(bigger, bigger, one)[0, 0] == 1.0 + 16 * 2.0**-24
    assert ar.multiply_wide(bigger, operand, one)[0, 0] == 1.0 + 16 * 2.0**-25


def test_f16_accumulators_round_to_nearest_even() -> None:
    a, b = wide_codes(nx.F16, 16, 9, 4, 1.0), wide_codes(nx.F16, 16, 7, 5, 1.0)
    c = np.random.default_rng(6).standard_normal((9, 7)).astype(np.float16).astype(np.float32)
    got = ar.multiply_wide(ar.decode_operand(nx.F16, a), ar.decode_operand(nx.F16, b), c, c_f16=True)
    va, vb = nx.decode(nx.F16, a), nx.decode(nx.F16, b)
    for i in range(9):
        for j in range(7):
            exact = scalar_wide(va[i], vb[j], -14, -14, c[i, j], -14)
            assert got[i, j] == nx.decode(nx.F16, nx.encode(nx.F16, float(exact)))


def test_mxf8_scales_shift_the_exponents_and_nan_scales_are_nan() -> None:
    a, b = wide_codes(nx.E4M3, 32, 6, 7, 3.0), wide_codes(nx.E5M2, 32, 5, 8, 3.0)
    codes = np.array([[120], [127], [130], [1], [254], [255]], np.uint8)
    sfa, sfb = ar.decode_scales(codes, True), ar.decode_scales(codes[:5], True)
    c = np.random.default_rng(9).standard_normal((6, 5)).astype(np.float32)
    got = ar.multiply_wide(
        ar.decode_operand(nx.E4M3, a).scaled(sfa), ar.decode_operand(nx.E5M2, b, negate=True).scaled(sfb), c
    )
    va, vb = nx.decode(nx.E4M3, a), -nx.decode(nx.E5M2, b)
    for i in range(5):
        for j in range(5):
            ea, eb = int(codes[i, 0]) - 127, int(codes[j, 0]) - 127
            scale_a, scale_b = Fraction(2) ** ea, Fraction(2) ** eb
            terms = [(Fraction(float(c[i, j])), exponent(Fraction(float(c[i, j])), -126))]
            for p, q in zip(va[i], vb[j], strict=True):
                x, y = Fraction(float(p)), Fraction(float(q))
                terms.append((x * y * scale_a * scale_b, exponent(x, -6) + exponent(y, -14) + ea + eb))
            expected = fused(terms, 25)
            if abs(expected) >= 2**128:
                assert got[i, j] == np.copysign(np.inf, float(expected))
            else:
                assert got[i, j] == f32_toward_zero(expected)
    assert (got[5].view(np.uint32) == NAN_BITS).all()


@pytest.mark.parametrize(
    ("a", "b", "c", "bits"),
    [
        (np.inf, 1.0, 0.0, 0x7F800000),
        (-np.inf, 1.0, 5.0, 0xFF800000),
        (np.inf, 0.0, 0.0, NAN_BITS),
        (np.inf, 1.0, -np.inf, NAN_BITS),
        (np.nan, 0.0, 0.0, NAN_BITS),
        (1.0, 1.0, np.nan, NAN_BITS),
        (1.0, 1.0, -np.inf, 0xFF800000),
    ],
)
def test_non_finite_operands_follow_ieee_and_nan_is_canonical(a: float, b: float, c: float, bits: int) -> None:
    left, right = np.ones((2, 16)), np.ones((2, 16))
    left[0, 3], right[0, 3] = a, b
    acc = np.zeros((2, 2), np.float32)
    acc[0, 0] = c
    codes = [ar.decode_operand(nx.F16, nx.encode(nx.F16, x)) for x in (left, right)]
    got = ar.multiply_wide(codes[0], codes[1], acc)
    assert got[0:1, 0:1].view(np.uint32)[0, 0] == bits
    assert got[1, 1] == 16


def test_tf32_ignores_the_low_13_bits() -> None:
    noisy = np.full((1, 8), 0x3F801FFF, np.uint32)
    operand = ar.decode_operand(nx.TF32, noisy)
    assert ar.multiply_wide(operand, operand, None)[0, 0] == 8.0
