"""mma.sync: every form's fragments, and its numbers against exact fractions rounded by the published models."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from lane_kernel import missing_forms
from mma_kernel import Form, run, text

import ptxemu
from ptxemu import numerics as nx
from ptxemu.isa import mma as isa

SELECT = (", r12, {0, 0}, r13, {0, 0}", ", {r12}, {0, 0}, {r13}, {0, 0}")
PLAIN = [
    Form(f"mma.sync.aligned.{shape}.row.col.{types}", shape, types)
    for shape, listed in isa.PLAIN.items()
    for types in listed.split()
]
NARROW = [
    Form(f"mma.sync.aligned.{order}.f32.{a}.{b}.f32", "m16n8k32", f"f32.{a}.{b}.f32")
    for (a, b), order in zip(
        itertools.product(isa.NARROW, isa.NARROW),
        itertools.cycle(["kind::f8f6f4.m16n8k32.row.col", "m16n8k32.row.col.kind::f8f6f4"]),
    )
]
NARROW.append(Form("mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.f16.e2m1.e5m2.f16", "m16n8k32", "f16.e2m1.e5m2.f16"))
INTEGER = [
    Form(f"mma.sync.aligned.{shape}.row.col.satfinite.{types}", shape, types)
    for shape, listed in isa.INTEGERS.items()
    for types in listed.split()
]


def scaled(kind: str, size: str, types: str, stype: str, first: bool) -> Form:
    shape = "m16n8k32" if kind == "mxf8f6f4" else "m16n8k64"
    vector = f"kind::{kind}.block_scale{size}"
    order = f"{vector}.{shape}.row.col" if first else f"{shape}.row.col.{vector}"
    return Form(f"mma.sync.aligned.{order}.{types}.{stype}", shape, types, 8 if kind == "mxf8f6f4" else 4)


FP4 = "f32.e2m1.e2m1.f32"
SCALED = [(scaled("mxf4", size, FP4, "ue8m0", first), 2) for size in ("", ".scale_vec::2X") for first in (True, False)]
SCALED += [(scaled("mxf4nvf4", ".scale_vec::2X", FP4, "ue8m0", first), 2) for first in (True, False)]
SCALED += [(scaled("mxf4nvf4", ".scale_vec::4X", FP4, "ue4m3", first), 4) for first in (True, False)]
SCALED += [
    (scaled("mxf8f6f4", size, f"f32.{a}.{b}.f32", "ue8m0", first), 1)
    for (a, b), size, first in zip(
        itertools.product(isa.NARROW, isa.NARROW),
        itertools.cycle(["", ".scale_vec::1X"]),
        itertools.cycle([True, True, False]),
    )
]


# Values and codes


def in_container(kind: str, codes: np.ndarray) -> np.ndarray:
    """Codes as the bytes of f8f6f4 kinds hold them, with noise in the padding."""
    noise = np.random.default_rng(5).integers(0, 256, codes.shape)
    if kind == "e2m1":
        return codes << 2 | noise & 0xC3
    return codes | noise & 0xC0 if kind in ("e3m2", "e2m3") else codes


def values(kind: str, codes: np.ndarray) -> np.ndarray:
    if kind == "tf32":
        return nx.decode(nx.TF32, codes.astype(np.uint32) & 0xFFFFE000)
    return nx.decode(nx.FORMATS[kind], codes)


def random_codes(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> np.ndarray:
    """Finite codes of any magnitude, mostly near each other, so that alignment cuts bits off."""
    form = nx.FORMATS[kind]
    if kind == "f32":
        numbers = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 8, shape)
        return numbers.astype(np.float32).view(np.uint32).astype(np.int64)
    if kind == "f16":
        return rng.integers(0, 0x5000, shape) | rng.integers(0, 2, shape) << 15
    if kind in ("bf16", "tf32"):
        numbers = rng.standard_normal(shape) * 2.0 ** rng.integers(-14, 4, shape)
        bits = numbers.astype(np.float32).view(np.uint32).astype(np.int64)
        return bits >> 16 if kind == "bf16" else bits  # the lower bits of tf32 are to be ignored
    return rng.integers(0, form.max_code * 5 // 8 + 1, shape) | rng.integers(0, 2, shape) * form.sign_bit


# The model, with exact fractions.  It is slow: of each result a few elements are compared with it, all with float64.


def sample(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Elements of every row and of every column."""
    return [(i, (3 * i + i // 8) % shape[1]) for i in range(shape[0])]


def agrees(got: np.ndarray, want: dict[tuple[int, int], float], a: Any, b: Any, c: Any) -> None:
    """a, b, c: values, scales multiplied in."""
    assert {place: got[place] for place in want} == want
    bound = np.abs(a) @ np.abs(b) + np.abs(c)
    slack = 2.0**-8 if got.dtype == np.float16 else 2.0**-19
    assert (np.abs(got - (a @ b + c)) <= slack * bound).all()


def exponent(x: Fraction, smallest: int) -> int:
    """floor(log2 |x|), at least `smallest`; -126 of zero."""
    if x == 0:
        return -126
    found = abs(x.numerator).bit_length() - x.denominator.bit_length()
    found -= abs(x) < Fraction(2) ** found
    return max(found, smallest)


def truncated(x: Fraction, unit: int) -> Fraction:
    """Toward zero, to a multiple of 2^unit."""
    steps = abs(x) / Fraction(2) ** unit
    return (1 if x >= 0 else -1) * (steps.numerator // steps.denominator) * Fraction(2) ** unit


def fused(terms: list[tuple[Fraction, int]], bits: int, f16: bool) -> float:
    """Terms with their exponents, aligned, cut off and summed; the sum cut to f32, or rounded to f16."""
    top = max(power for _, power in terms)
    total = sum((truncated(x, top - bits) for x, _ in terms), Fraction(0))
    if f16:
        with np.errstate(over="ignore"):
            return float(np.float16(float(total)))
    return float(truncated(total, exponent(total, -126) - 23))


def products(a: np.ndarray, b: np.ndarray, kinds: tuple[str, str], scale: int = 0) -> list[tuple[Fraction, int]]:
    """Of a row and a column: each product, with the sum of its factors' exponents."""
    least = [nx.FORMATS[kind].min_exponent for kind in kinds]
    found = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        left, right = Fraction(x), Fraction(y)
        power = exponent(left, least[0]) + exponent(right, least[1]) + scale
        found.append((left * right * Fraction(2) ** scale, power))
    return found


def model(form: Form, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> dict[tuple[int, int], float]:
    """D of values: one fused sum an element."""
    out, kind_a, kind_b, _ = form.types.split(".")
    result = {}
    for i, j in sample(c.shape):
        terms = [(Fraction(c[i, j]), exponent(Fraction(c[i, j]), -14 if out == "f16" else -126))]
        result[i, j] = fused(terms + products(a[i], b[:, j], (kind_a, kind_b)), 25, out == "f16")
    return result


def by_halves(form: Form, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> dict[tuple[int, int], float]:
    """FP8 of chips without QMMA: two f16 MMAs and an addition."""
    f16 = form.types.startswith("f16")
    k = np.arange(a.shape[1])
    result = {}
    for i, j in sample(c.shape):
        sums = 0.0
        for part in (k % 4 < 2, k % 4 >= 2):
            terms = [(Fraction(sums), exponent(Fraction(sums), -14 if f16 else -126))]
            sums = fused(terms + products(a[i, part], b[part, j], ("f16", "f16")), 25, f16)
        kind = np.float16 if f16 else np.float32
        with np.errstate(over="ignore"):
            result[i, j] = float(kind(sums) + kind(c[i, j]))
    return result


def number(form: Form, codes: np.ndarray) -> np.ndarray:
    return codes.astype(np.uint16).view(np.float16) if form.bits(0) == 16 else codes.view(np.float32)


def matrices(form: Form, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    m, n, k = form.sizes
    _, kind_a, kind_b, kind_c = form.types.split(".")
    shapes = ((kind_a, (m, k)), (kind_b, (k, n)), (kind_c, (m, n)))
    a, b, c = (random_codes(rng, kind, shape) for kind, shape in shapes)
    return a, b, c


@pytest.mark.parametrize("form", PLAIN, ids=lambda form: form.opcode[17:])
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a", "sm_120a"])
def test_plain_forms(form: Form, target: str) -> None:
    a, b, c = matrices(form, 1)
    kinds = form.types.split(".")
    operands = values(kinds[1], a), values(kinds[2], b), values(kinds[3], c)
    emulated = kinds[1] in isa.FP8 and target != "sm_120a"
    want = by_halves(form, *operands) if emulated else model(form, *operands)
    agrees(number(form, run(form, target, a, b, c)), want, *operands)


@pytest.mark.parametrize("form", NARROW, ids=lambda form: form.types)
def test_narrow_floats(form: Form) -> None:
    a, b, c = matrices(form, 2)
    kinds = form.types.split(".")
    operands = values(kinds[1], a), values(kinds[2], b), values(kinds[3], c)
    got = run(form, "sm_121a", in_container(kinds[1], a), in_container(kinds[2], b), c)
    agrees(number(form, got), model(form, *operands), *operands)


def scale_words(codes: np.ndarray, quads: list[list[int]], byte: int) -> np.ndarray:
    """A word a lane: the scales of row (or column) r in bytes from `byte` on of the lanes quads[r]; noise elsewhere."""
    words = np.random.default_rng(6).integers(0, 256, (32, 4)).astype(np.uint8)
    for row, lanes in enumerate(quads):
        words[lanes, byte : byte + codes.shape[1]] = codes[row]
    return words.view(np.uint32)[:, 0]


def run_scaled(
    form: Form, a: Any, b: Any, c: Any, sfa: np.ndarray, sfb: np.ndarray, ids: tuple[int, int, int, int]
) -> np.ndarray:
    byte_a, thread_a, byte_b, thread_b = ids
    of_a = scale_words(sfa, [[4 * (r % 8) + 2 * thread_a + r // 8] for r in range(16)], byte_a)
    of_b = scale_words(sfb, [[4 * r + thread_b] for r in range(8)], byte_b)
    words = ("{r12}", "{r13}") if byte_a else ("r12", "r13")
    extra = f", {words[0]}, {{{byte_a}, {thread_a}}}, {words[1]}, {{{byte_b}, {thread_b}}}"
    return run(form, "sm_120a", a, b, c, np.stack([of_a, of_b], axis=1), extra)


def scaled_model(form: Form, a: Any, b: Any, c: Any, sfa: Any, sfb: Any) -> dict[tuple[int, int], float]:
    """Groups of 16 (FP4), or single products, with their scales' exponents."""
    _, kind_a, kind_b, _ = form.types.split(".")
    result = {}
    k = a.shape[1]
    for i, j in sample(c.shape):
        terms = [(Fraction(c[i, j]), exponent(Fraction(c[i, j]), -126))]
        if k == 32:
            power = exponent(Fraction(sfa[i, 0]), -127) + exponent(Fraction(sfb[j, 0]), -127)
            terms += products(a[i], b[:, j], (kind_a, kind_b), power)
        else:
            block = k // sfa.shape[1]
            least = -127 if "ue8m0" in form.opcode else -6
            for first in range(0, k, 16):
                part = slice(first, first + 16)
                scale = Fraction(sfa[i, first // block]), Fraction(sfb[j, first // block])
                dot = Fraction(float(a[i, part] @ b[part, j]))
                terms.append((dot * scale[0] * scale[1], sum(exponent(s, least) for s in scale)))
        result[i, j] = fused(terms, 25 if k == 32 else 35, False)
    return result


@pytest.mark.parametrize(("form", "count"), SCALED, ids=lambda value: getattr(value, "opcode", "")[17:])
def test_block_scales(form: Form, count: int) -> None:
    rng = np.random.default_rng(3)
    kinds = form.types.split(".")
    a, b, c = matrices(form, 3)
    e8m0 = form.opcode.endswith("ue8m0")
    low, high = (115, 135) if e8m0 else (0, 0x7F)
    sfa, sfb = rng.integers(low, high, (16, count)), rng.integers(low, high, (8, count))
    decode = nx.decode_ue8m0 if e8m0 else nx.decode_ue4m3
    scale_a, scale_b = decode(sfa), decode(sfb)
    values_a, values_b, values_c = values(kinds[1], a), values(kinds[2], b), values("f32", c)
    want = scaled_model(form, values_a, values_b, values_c, scale_a, scale_b)
    if form.small == 8:
        a, b = in_container(kinds[1], a), in_container(kinds[2], b)
    ids = (4 - count, 1, 0, 3)
    got = run_scaled(form, a, b, c, sfa.astype(np.uint8), sfb.astype(np.uint8), ids).view(np.float32)
    block = form.sizes[2] // count
    agrees(got, want, values_a * scale_a.repeat(block, 1), values_b * scale_b.repeat(block, 1).T, values_c)


@pytest.mark.parametrize("seed", range(4))
def test_an_nvfp4_instruction_is_the_exact_sum_cut_to_f32(seed: int) -> None:
    """Where scales are near each other nothing is lost before the end."""
    form = SCALED[-(len(isa.NARROW) ** 2) - 1][0]
    assert form.opcode.endswith("scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3")
    rng = np.random.default_rng(seed)
    a, b, c = matrices(form, seed)
    c = (rng.standard_normal(c.shape) * 100).astype(np.float32).view(np.uint32).astype(np.int64)
    sfa, sfb = rng.integers(0x30, 0x40, (16, 4)), rng.integers(0x30, 0x40, (8, 4))
    left = values("e2m1", a) * nx.decode_ue4m3(sfa).repeat(16, axis=1)
    right = values("e2m1", b) * nx.decode_ue4m3(sfb).repeat(16, axis=1).T
    exact = left @ right + values("f32", c)
    want = [float(truncated(Fraction(x), exponent(Fraction(x), -126) - 23)) for x in exact.ravel()]
    got = run_scaled(form, a, b, c, sfa.astype(np.uint8), sfb.astype(np.uint8), (0, 0, 0, 0)).view(np.float32)
    assert got.ravel().tolist() == want


@pytest.mark.parametrize("ids", [*itertools.product((0, 2), (0, 1), (0, 2), (0, 1, 2, 3))])
def test_selectors(ids: tuple[int, int, int, int]) -> None:
    form = scaled("mxf4", "", FP4, "ue8m0", True)
    ones = np.full((16, 64), 2), np.full((64, 8), 2)
    sfa = np.arange(32).reshape(16, 2) % 7 + 120
    sfb = np.arange(16).reshape(8, 2) % 5 + 125
    got = run_scaled(form, *ones, np.zeros((16, 8), int), sfa.astype(np.uint8), sfb.astype(np.uint8), ids)
    want = 32 * 2.0 ** (sfa - 127.0) @ (2.0 ** (sfb - 127.0)).T
    assert got.view(np.float32).tolist() == want.tolist()


@pytest.mark.parametrize(
    ("size", "ids", "wrong", "allowed"),
    [
        ("", "{%, 0}, r13, {0, 0}", 1, "0, 2"),
        ("", "{0, %}, r13, {0, 0}", 2, "0, 1"),
        ("", "{0, 0}, r13, {0, %}", 4, "0, 1, 2, 3"),
        (".scale_vec::4X", "{0, 0}, r13, {%, 0}", 2, "0"),
    ],
)
def test_selectors_that_mean_nothing(size: str, ids: str, wrong: int, allowed: str) -> None:
    """Constants are refused as the kernel is decoded, registers as it runs."""
    form = scaled("mxf4nvf4", size, FP4, "ue4m3", True) if size else scaled("mxf4", "", FP4, "ue8m0", True)
    zeros = np.zeros((16, 64), int), np.zeros((64, 8), int), np.zeros((16, 8), int)
    with pytest.raises(ptxemu.ParseError, match=f"the constant {wrong} where one of {allowed} is expected"):
        run(form, "sm_120a", *zeros, np.zeros((32, 2)), f", r12, {ids.replace('%', str(wrong))}")
    held = np.zeros((32, 2), np.uint32)
    held[:, 1] = wrong  # in h0
    ids = ids.replace("r13", "r12").replace("%", "h0")
    with pytest.raises(ptxemu.Error, match=rf"id-[ab] is \[{wrong}\], allowed is one of \[{allowed}\]"):
        run(form, "sm_120a", *zeros, held, f", r12, {ids}")


def test_four_scales_of_powers_of_two_are_refused() -> None:
    form = scaled("mxf4nvf4", ".scale_vec::4X", FP4, "ue8m0", True)
    zeros = np.zeros((16, 64), int), np.zeros((64, 8), int), np.zeros((16, 8), int)
    with pytest.raises(ptxemu.UnknownInstruction):
        run(form, "sm_120a", *zeros, np.zeros((32, 2)), ", r12, {0, 0}, r13, {0, 0}")


def test_scales_that_are_nan() -> None:
    form = scaled("mxf4nvf4", ".scale_vec::4X", FP4, "ue4m3", True)
    a, b, c = matrices(form, 9)
    sfa, sfb = np.full((16, 4), 0x38, np.uint8), np.full((8, 4), 0x38, np.uint8)
    sfa[3, 2], sfb[5, 1] = 0x7F, 0xFF
    got = run_scaled(form, a, b, c, sfa, sfb, (0, 0, 0, 0))
    nan = got == 0x7FFFFFFF
    assert nan[3].all()
    assert nan[:, 5].all()
    assert nan.sum() == 16 + 8 - 1


@pytest.mark.parametrize("form", INTEGER, ids=lambda form: form.opcode[17:])
@pytest.mark.parametrize("saturate", [False, True])
def test_integers(form: Form, saturate: bool) -> None:
    rng = np.random.default_rng(4)
    form = form if saturate else Form(form.opcode.replace(".satfinite", ""), form.shape, form.types)
    m, n, k = form.sizes
    _, kind_a, kind_b, _ = form.types.split(".")
    a, b = (
        rng.integers(-(1 << int(kind[1]) - 1), 1 << int(kind[1]) - 1, shape)
        if kind[0] == "s"
        else rng.integers(0, 1 << int(kind[1]), shape)
        for kind, shape in ((kind_a, (m, k)), (kind_b, (k, n)))
    )
    c = rng.choice([-(2**31), 2**31 - 1, 5, -7], (m, n))
    total = a @ b + c
    want = total.clip(-(2**31), 2**31 - 1) if saturate else (total + 2**31) % 2**32 - 2**31
    assert run(form, "sm_90a", a, b, c).view(np.int32).tolist() == want.tolist()


@pytest.mark.parametrize(("value", "kind"), [(np.inf, "inf"), (np.nan, "nan")])
@pytest.mark.parametrize("form", [PLAIN[0], PLAIN[8], PLAIN[13]], ids=lambda form: form.opcode[17:])
def test_infinities_and_nan(form: Form, value: float, kind: str) -> None:
    f16 = form.bits(0) == 16
    a = np.zeros(form.sizes[::2], int)
    b = np.zeros(form.sizes[:0:-1], int)
    c = np.zeros(form.sizes[:2], int)
    c[2, 3] = int(np.float16(value).view(np.uint16)) if f16 else int(np.float32(value).view(np.uint32))
    got = run(form, "sm_90a", a, b, c)
    nan, infinity = (0x7FFF, 0x7C00) if f16 else (0x7FFFFFFF, 0x7F800000)
    assert got[2, 3] == (infinity if kind == "inf" else nan)
    assert got.astype(bool).sum() == 1


def test_several_together_are_each_alone() -> None:
    """Twelve in a row, of which some depend on each other, mixed with arithmetic on their results."""
    form = Form("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "m16n8k16", "f32.bf16.bf16.f32")
    rng = np.random.default_rng(8)
    memory = np.zeros((32, 16), np.uint32)
    a, b, c = matrices(form, 8)
    for first, which, codes in ((0, "a", a), (4, "b", b), (8, "c", c)):
        words = form.packed(which, codes)
        memory[:, first : first + words.shape[1]] = words
    body = []
    for i in range(12):
        d = 20 + 4 * (i % 3)
        source = 8 if i < 3 else d
        a_at, b_at = rng.integers(0, 2) * 2, 4
        vectors = [
            "{" + ", ".join(f"r{x + y}" for y in range(n)) + "}" for x, n in ((d, 4), (a_at, 4), (b_at, 2), (source, 4))
        ]
        body.append(f"{form.opcode} {', '.join(vectors)};")
        if i == 5:
            body.append("add.rn.f32 r20, r20, r24;")
    whole = text(form, "sm_90a").replace(
        f"{form.opcode} {{r20, r21, r22, r23}}, {{r0, r1, r2, r3}}, {{r4, r5}}, {{r8, r9, r10, r11}};", "@@"
    )
    together, apart = np.zeros((32, 4), np.uint32), np.zeros((32, 4), np.uint32)
    ptxemu.Device("sm_90a").launch(whole.replace("@@", "\n".join(body)), args=[memory, together])
    alone = "\n".join(f"{line} bar.warp.sync 0xffffffff;" for line in body)
    ptxemu.Device("sm_90a").launch(whole.replace("@@", alone), args=[memory, apart])
    assert together.any()
    assert together.tolist() == apart.tolist()


def test_vectors_of_the_wrong_length() -> None:
    form = PLAIN[0]
    with pytest.raises(ptxemu.ParseError, match="a vector of 3 where one of 2 is expected"):
        ptxemu.Device("sm_90a").launch(text(form, "sm_90a").replace("{r0, r1}", "{r0, r1, r2}", 1), args=[])


def test_they_are_counted() -> None:
    report = ptxemu.Device("sm_90a").launch(
        text(PLAIN[4], "sm_90a", times=3), args=[np.zeros((32, 16), np.uint32), np.zeros((32, 4), np.uint32)]
    )
    assert report.counters["mma"] == {"mma.sync tf32 16x8x8": 3}


def test_every_form_has_a_case() -> None:
    cases = [text(form, "sm_120a") for form in (*PLAIN, *NARROW, *INTEGER)]
    cases += [text(form, "sm_120a", select) for form, _ in SCALED for select in SELECT]
    assert missing_forms(["mma"], cases) == []


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a", "sm_120a"])
@pytest.mark.parametrize("out", ["f32", "f16"])
def test_the_kind_of_fp8_changes_nothing(out: str, target: str) -> None:
    """Of both spellings the assembler makes the same code on every chip."""
    types = f"{out}.e4m3.e5m2.{out}"
    form = Form(f"mma.sync.aligned.m16n8k32.row.col.{types}", "m16n8k32", types)
    kind = Form(f"mma.sync.aligned.kind::f8f6f4.m16n8k32.row.col.{types}", "m16n8k32", types)
    matrices_of = matrices(form, 3)
    np.testing.assert_array_equal(run(kind, target, *matrices_of), run(form, target, *matrices_of))
