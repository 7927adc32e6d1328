"""PTX 'cvt': integers against exact arithmetic, small floats exhaustively against ml_dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from lane_kernel import (
    BITS,
    FLOATS,
    HEADER,
    Case,
    case,
    check,
    decode_number,
    execute,
    missing_forms,
    samples,
    to_float,
)

from ptxemu.isa.engine import decode
from ptxemu.isa.types import bits_of, compose
from ptxemu.machine.lanes import WORD
from ptxemu.text import Instruction, parse

INTEGERS = ("u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64")
ROUNDINGS = ("rn", "rz", "rm", "rp")
INTEGRAL: dict[str, Callable[[Any], int]] = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def limits(kind: str) -> tuple[int, int]:
    bits = BITS[kind]
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def clamp(x: int, kind: str) -> int:
    low, high = limits(kind)
    return min(max(x, low), high)


def to_integer(rounding: str, kind: str, source: str) -> Callable[[float], int]:
    def convert(x: float) -> int:
        if math.isnan(x):
            return 1 << BITS[kind] - 1 if source == "f64" or BITS[kind] == 64 else 0
        if math.isinf(x):
            return limits(kind)[x > 0]
        return clamp(INTEGRAL[rounding](Fraction(x)), kind)

    return convert


def from_number(kind: str, rounding: str) -> Callable[[Any], Any]:
    return lambda x: decode_number(kind, to_float(x, kind, rounding))


def integral(rounding: str) -> Callable[[float], Any]:
    return lambda x: math.copysign(INTEGRAL[rounding](Fraction(x)), x) if math.isfinite(x) else x


def unit(x: float) -> float:
    return 0.0 if math.isnan(x) or x == 0 else min(max(x, 0.0), 1.0)


def integer_cases() -> Iterator[Case]:
    for to in INTEGERS:
        for source in INTEGERS:
            yield case(f"cvt.{to}.{source} d, a", to, source, lambda a: a)
        yield case(f"cvt.sat.{to}.s64 d, a", to, "s64", lambda a, t=to: clamp(a, t))
        yield case(f"cvt.sat.{to}.u32 d, a", to, "u32", lambda a, t=to: clamp(a, t))
        for kind in FLOATS:
            yield case(f"cvt.rzi.{to}.{kind} d, a", to, kind, to_integer("rzi", to, kind))
            yield case(f"cvt.rn.{kind}.{to} d, a", kind, to, from_number(kind, "rn"))
    for rounding in INTEGRAL:
        yield case(f"cvt.{rounding}.s32.f32 d, a", "s32", "f32", to_integer(rounding, "s32", "f32"))
    for rounding in ROUNDINGS:
        yield case(f"cvt.{rounding}.f32.s32 d, a", "f32", "s32", from_number("f32", rounding))
        for source in ("u64", "s64"):
            yield case(f"cvt.{rounding}.f32.{source} d, a", "f32", source, from_number("f32", rounding))
            yield case(f"cvt.{rounding}.f64.{source} d, a", "f64", source, from_number("f64", rounding))


def float_cases() -> Iterator[Case]:
    for to in FLOATS:
        for source in FLOATS:
            if BITS[source] < BITS[to]:
                yield case(f"cvt.{to}.{source} d, a", to, source, lambda a: a)
            elif BITS[source] > BITS[to]:
                for rounding in ROUNDINGS:
                    yield case(f"cvt.{rounding}.{to}.{source} d, a", to, source, from_number(to, rounding))
    for rounding in INTEGRAL:
        yield case(f"cvt.{rounding}.f32.f32 d, a", "f32", "f32", integral(rounding))
    yield case("cvt.sat.f32.f32 d, a", "f32", "f32", unit)
    for kind in ("f16", "bf16"):
        top = decode_number(kind, {"f16": 0x7BFF, "bf16": 0x7F7F}[kind])
        relu = lambda a, k=kind: a if math.isnan(a) else from_number(k, "rn")(a) if a > 0 else 0.0  # noqa: E731
        yield case(f"cvt.rn.relu.{kind}.f32 d, a", kind, "f32", relu)
        finite = lambda a, k=kind, t=top: a if math.isnan(a) else from_number(k, "rz")(min(max(a, -t), t))  # noqa: E731
        yield case(f"cvt.rz.satfinite.{kind}.f32 d, a", kind, "f32", finite)
        for rounding in ("rn", "rz"):
            half = lambda a, b, k=kind, r=rounding: to_float(a, k, r) << 16 | to_float(b, k, r)  # noqa: E731
            yield case(f"cvt.{rounding}.{kind}x2.f32 d, a, b", "b32", "f32 f32", half)


CASES = [*integer_cases(), *float_cases()]


@pytest.mark.parametrize("each", CASES, ids=str)
def test_form(each: Case) -> None:
    columns = samples(each.sources, seed=len(each.instruction))
    if each.result == "b32":  # NaNs inside a pair are compared in the exhaustive tests
        columns = [[x if (x >> 23 & 255) != 255 else 0x3F800000 for x in column] for column in columns]
    check(each, columns)


def vector(instruction: str, registers: str, result_bits: int) -> Callable[..., np.ndarray]:
    """The instruction's function of arrays of any length.  registers: declarations of d, a, b."""
    text = f"{HEADER}.visible .entry k() {{ {registers} {instruction}; }}"
    item = next(i for i in parse(text).entries["k"].body if isinstance(i, Instruction))
    found = decode(item)
    types = [
        (str(found.type_of(name)), bits_of(str(found.type_of(name))))
        for name, o in zip(found.form.sources, found.sources, strict=True)
        if o
    ]
    widths = [(name, max(bits, 16)) for name, bits in types]
    made = compose(found.function, widths, (str(found.type_of(found.result_names[0])), result_bits))[1]

    def run(*arrays: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            return made(*(a.astype(WORD[w]) for a, (_, w) in zip(arrays, widths, strict=True)))

    return run


SMALL = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m3": 7.5, "e3m2": 28.0, "e2m1": 6.0}
ALL16 = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)


def equal(got: np.ndarray, want: np.ndarray) -> None:
    """Equal numbers with their signs; NaN equals NaN."""
    bad = ~((got == want) & (np.signbit(got) == np.signbit(want)) | (np.isnan(got) & np.isnan(want)))
    assert not bad.any(), f"at {np.flatnonzero(bad)[:4]}: {got[bad][:4]}, not {want[bad][:4]}"


def codes_to_float(kind: str, codes: np.ndarray) -> np.ndarray:
    return codes.astype(np.uint8).view(SMALL[kind]).astype(np.float32)


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("half", ["f16x2", "bf16x2"])
def test_small_to_half_is_exact_for_every_code(kind: str, half: str) -> None:
    bits = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}[kind]
    shift = 4 if kind == "e2m1" else 8
    codes = np.arange(1 << bits, dtype=np.uint16)
    packed = (codes[::-1] << shift) | codes
    got = vector(f"cvt.rn.{half}.{kind}x2 d, a", ".reg .b32 d; .reg .b16 a;", 32)(packed)
    parts = got.view(np.uint16).reshape(-1, 2)
    dtype = np.float16 if half == "f16x2" else ml_dtypes.bfloat16
    equal(parts[:, 0].copy().view(dtype).astype(np.float32), codes_to_float(kind, codes))
    equal(parts[:, 1].copy().view(dtype).astype(np.float32), codes_to_float(kind, codes[::-1]))


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("half", ["f16x2", "bf16x2"])
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_half_to_small_for_every_code(kind: str, half: str, relu: str) -> None:
    dtype = np.float16 if half == "f16x2" else ml_dtypes.bfloat16
    pairs = np.stack([ALL16, ALL16[::-1]], 1).copy().view(np.uint32).reshape(-1)
    result = 16
    got = vector(f"cvt.rn.satfinite{relu}.{kind}x2.{half} d, a", ".reg .b16 d; .reg .b32 a;", result)(pairs)
    with np.errstate(all="ignore"):
        values = ALL16.view(dtype).astype(np.float32)
    check_small(kind, got, values, values[::-1], relu)


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize("relu", ["", ".relu"])
def test_f32_to_small(kind: str, relu: str) -> None:
    generator = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        values = np.concatenate(
            [ALL16.view(np.float16).astype(np.float32), generator.normal(0, 8, 4096).astype(np.float32)]
        )
    got = vector(f"cvt.rn.satfinite{relu}.{kind}x2.f32 d, a, b", ".reg .b16 d; .reg .b32 a, b;", 16)
    check_small(kind, got(values.view(np.uint32), values[::-1].view(np.uint32)), values[::-1], values, relu)


@np.errstate(all="ignore")
def check_small(kind: str, got: np.ndarray, low: np.ndarray, high: np.ndarray, relu: str) -> None:
    shift, mask = (4, 15) if kind == "e2m1" else (8, 255)
    for values, codes in ((low, got & mask), (high, got >> shift & mask)):
        top = LARGEST[kind]
        want = np.clip(values, -top, top).astype(SMALL[kind]).astype(np.float32)
        nan = np.isnan(values)
        if relu:
            want = np.where((want < 0) | np.signbit(want), np.float32(0), want)
        if kind in ("e4m3", "e5m2"):
            want = np.where(nan, np.float32(np.nan), want)
        else:
            want = np.where(nan, np.float32(top), want)  # formats with no NaN: the largest number
        equal(codes_to_float(kind, codes), want)


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_f16_to_bf16_and_back_for_every_code(rounding: str) -> None:
    bf16 = vector(f"cvt.{rounding}.bf16.f16 d, a", ".reg .b16 d, a;", 16)(ALL16)
    for code in (*range(0, 1 << 16, 257), 0x3C01, 0xBC01, 0x7BFF, 0xFBFF, 1, 0x8001):
        number = decode_number("f16", code)
        want = to_float(number, "bf16", rounding)
        assert int(bf16[code]) == want or math.isnan(number)


def test_scales_for_every_code() -> None:
    codes = np.arange(256, dtype=np.uint16)
    got = vector("cvt.rn.bf16x2.ue8m0x2 d, a", ".reg .b32 d; .reg .b16 a;", 32)(codes << 8 | codes[::-1])
    values = got.view(np.uint16).reshape(-1, 2)
    want = codes.astype(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    equal(values[:, 1].copy().view(ml_dtypes.bfloat16).astype(np.float32), want)
    equal(values[:, 0].copy().view(ml_dtypes.bfloat16).astype(np.float32), want[::-1])


@pytest.mark.parametrize("rounding", ["rz", "rp"])
def test_to_scales(rounding: str) -> None:
    values = np.array([1.0, 1.5, 3.0, 2.0**-130, 0.0, 2.0**127, 3e38, np.inf, np.nan, -4.0], np.float32)
    exact = (
        [127, 127, 128, 0, 0, 254, 254, 254, 255, 129]
        if rounding == "rz"
        else [127, 128, 129, 0, 0, 254, 254, 254, 255, 129]
    )
    from_f32 = vector(f"cvt.{rounding}.satfinite.ue8m0x2.f32 d, a, b", ".reg .b16 d; .reg .b32 a, b;", 16)
    got = from_f32(values.view(np.uint32), np.full(10, 0x3F800000, np.uint32))
    assert (got >> 8).tolist() == exact
    assert set((got & 255).tolist()) == {127}
    pairs = np.stack([np.full(10, 0x3F80, np.uint16), (values.view(np.uint32) >> 16).astype(np.uint16)], 1)
    from_bf16 = vector(f"cvt.{rounding}.satfinite.ue8m0x2.bf16x2 d, a", ".reg .b16 d; .reg .b32 a;", 16)
    assert (from_bf16(pairs.copy().view(np.uint32).reshape(-1)) >> 8).tolist()[:4] == exact[:4]


SCALED = "cvt.rn.satfinite.scaled::n2::ue8m0.bf16x2.s2f6x2 d, a, b"


def test_s2f6_for_every_code() -> None:
    codes = np.arange(256, dtype=np.uint16)
    packed = codes << 8 | codes[::-1]
    scales = np.full(256, 130 << 8 | 126, np.uint16)
    got = vector(SCALED, ".reg .b32 d; .reg .b16 a, b;", 32)(packed, scales).view(np.uint16).reshape(-1, 2)
    numbers = codes.astype(np.uint8).view(np.int8) / 64.0
    equal(got[:, 1].copy().view(ml_dtypes.bfloat16).astype(np.float64), numbers * 8)
    equal(got[:, 0].copy().view(ml_dtypes.bfloat16).astype(np.float64), numbers[::-1] / 2)
    back = vector("cvt.rn.satfinite.s2f6x2.f32 d, a, b", ".reg .b16 d; .reg .b32 a, b;", 16)
    bits = numbers.astype(np.float32).view(np.uint32)
    assert back(bits, bits[::-1]).tolist() == packed.tolist()
    pair = np.stack([bits[::-1] >> 16, bits >> 16], 1).astype(np.uint16).copy().view(np.uint32).reshape(-1)
    assert (
        vector("cvt.rn.satfinite.s2f6x2.bf16x2 d, a", ".reg .b16 d; .reg .b32 a;", 16)(pair).tolist() == packed.tolist()
    )


@pytest.mark.parametrize("rounding", ["rn", "rz", "rna"])
def test_tf32(rounding: str) -> None:
    values = np.array([1.0, 1.0 + 2.0**-11, 1.0 + 2.0**-11 + 2.0**-20, 1.0 + 3 * 2.0**-11, -1.0 - 2.0**-11], np.float32)
    got = vector(f"cvt.{rounding}.tf32.f32 d, a", ".reg .b32 d, a;", 32)(values.view(np.uint32)).view(np.float32)
    step = 2.0**-10
    want = {
        "rn": [1, 1, 1 + step, 1 + 2 * step, -1],
        "rz": [1, 1, 1, 1 + step, -1],
        "rna": [1, 1 + step, 1 + step, 1 + 2 * step, -1 - step],
    }[rounding]
    assert got.tolist() == want


@pytest.mark.parametrize(
    ("rounding", "value", "want"),
    [
        ("rz", 0x155D21CEAAB53983, 0x43B55D21CEAAB539),
        ("rm", 0x155D21CEAAB53983, 0x43B55D21CEAAB539),
        ("rp", 0x155D21CEAAB53983, 0x43B55D21CEAAB53A),
        ("rz", (1 << 64) - ((1 << 53) + 1), 0xC340000000000000),
        ("rm", (1 << 64) - ((1 << 53) + 1), 0xC340000000000001),
        ("rp", (1 << 64) - ((1 << 53) + 1), 0xC340000000000000),
    ],
)
def test_directed_rounding_of_a_64_bit_integer(rounding: str, value: int, want: int) -> None:
    assert execute(f"cvt.{rounding}.f64.s64 d, a", "f64", ("s64", [value] * 32)).tolist() == [want] * 32


def test_every_form_has_a_case() -> None:
    wide, narrow = "b32", "b16"
    more = [Case(f"cvt.rn.satfinite.{k}x2.f32 d, a, b", narrow, (wide, wide), max) for k in SMALL]
    more += [Case(f"cvt.rn.satfinite.{k}x2.f16x2 d, a", narrow, (wide,), max) for k in SMALL]
    more += [Case(f"cvt.rn.f16x2.{k}x2 d, a", wide, (narrow,), max) for k in SMALL]
    more += [Case(f"cvt.rn.bf16x2.{k}x2 d, a", wide, (narrow,), max) for k in SMALL]
    more += [
        Case(SCALED, wide, (narrow, narrow), max),
        Case("cvt.rn.satfinite.relu.scaled::n2::ue8m0.bf16x2.s2f6x2 d, a, b", wide, (narrow, narrow), max),
        Case("cvt.rn.bf16x2.ue8m0x2 d, a", wide, (narrow,), max),
        Case("cvt.rz.satfinite.ue8m0x2.f32 d, a, b", narrow, (wide, wide), max),
        Case("cvt.rz.satfinite.ue8m0x2.bf16x2 d, a", narrow, (wide,), max),
        Case("cvt.rn.satfinite.s2f6x2.f32 d, a, b", narrow, (wide, wide), max),
        Case("cvt.rn.satfinite.s2f6x2.bf16x2 d, a", narrow, (wide,), max),
        Case("cvt.rna.tf32.f32 d, a", wide, (wide,), max),
    ]
    assert missing_forms(["convert"], [*CASES, *more]) == []
