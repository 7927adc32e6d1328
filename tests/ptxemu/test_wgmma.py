"""wgmma: every shape and operand form, layouts after the manual, and arithmetic against a rational model."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from test_arithmetic import exponent, fused, toward_zero
from wgmma_kernel import ORIGIN, SIZES, SPANS, Program, fragments, matrix, packed, put, registers

import ptxemu
from ptxemu import numerics as nx

Array = Any
A_BYTES = 8192  # with rows of 128 bytes, of which 32 are used
CODES = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def encode(kind: str, values: Array) -> Array:
    if kind in ("s8", "u8"):
        return values.astype(np.int64).astype(np.uint8)
    return nx.encode(nx.FORMATS[kind], values).astype(CODES[SIZES[kind]])


def run(
    p: Program,
    a: Array,
    b: Array,
    d: Array | None = None,
    swizzle: tuple[str, str] = ("128B", "128B"),
    device: ptxemu.Device | None = None,
) -> Array:
    """D's codes (64, N) of codes a (steps, 64, K), b (steps, N, K) and d (64, N)."""
    a, b = (x[None] if x.ndim == 2 else x for x in (a, b))
    image = np.zeros((1 << 16) - 1024, np.uint8)
    descriptors = np.zeros((p.steps, 2), np.uint64)
    for s in range(p.steps):
        layout_a = packed(swizzle[0], 64, SIZES[p.a], p.a_mn_major)
        layout_b = packed(swizzle[1], p.n, SIZES[p.b], p.b_mn_major)
        if not p.a_in_registers:
            descriptors[s, 0] = put(image, a[s], layout_a, ORIGIN + s * A_BYTES)
        descriptors[s, 1] = put(image, b[s], layout_b, ORIGIN + p.steps * A_BYTES + s * 128 * p.n)
    held = np.stack([fragments(x) for x in a]) if p.a_in_registers else np.zeros(4, np.uint32)
    narrow = p.d == "f16"
    if d is None:
        out = np.full((128, p.registers), 0xFFFFFFFF, np.uint32)
    else:
        out = registers(d.astype(np.uint16 if narrow else np.uint32))
    device = device or ptxemu.Device("sm_90a")
    device.launch(
        p.text, block=(128,), shared=image.size, args=[image, image.size, descriptors, held, out, int(d is not None)]
    )
    return matrix(out, p.n, narrow)


def small(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Small integers, and their codes."""
    values = rng.integers(0 if kind == "u8" else -3, 4, shape).astype(np.float64)
    return values, encode(kind, values)


def numbers(p: Program, codes: Array) -> Array:
    if p.d == "s32":
        return codes.view(np.int32).astype(np.float64)
    return nx.decode(nx.F16, codes) if p.d == "f16" else codes.view(np.float32).astype(np.float64)


def check_small(p: Program, swizzle: tuple[str, str] = ("128B", "128B"), seed: int = 0) -> None:
    """Operands of small integers give the exact product, whatever the model."""
    rng = np.random.default_rng(seed)
    a, codes_a = small(rng, p.a, (p.steps, 64, p.k))
    b, codes_b = small(rng, p.b, (p.steps, p.n, p.k))
    c = rng.integers(-50, 50, (64, p.n)).astype(np.float64)
    held = {"f32": c.astype(np.float32).view(np.uint32), "f16": nx.f32_to_f16(c.astype(np.float32))}
    found = run(p, codes_a, codes_b, held.get(p.d, c.astype(np.int64).astype(np.uint32)), swizzle)
    exact = c + p.scale_a * p.scale_b * np.einsum("smk,snk->mn", a, b)
    np.testing.assert_array_equal(numbers(p, found), exact)


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_width(n: int) -> None:
    check_small(Program(n=n, d="f16" if n % 16 else "f32"), seed=n)


FORMS = [
    *[Program(16, t, t, d) for t, d in (("f16", "f16"), ("bf16", "f32"), ("tf32", "f32"))],
    *[Program(16, a, b, d) for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2") for d in ("f16", "f32")],
    *[Program(16, a, b, "s32", satfinite=a == b) for a in ("s8", "u8") for b in ("s8", "u8")],
]


@pytest.mark.parametrize("registers", [False, True], ids=["shared", "registers"])
@pytest.mark.parametrize("p", FORMS, ids=lambda p: f"{p.d}-{p.a}-{p.b}")
def test_every_type(p: Program, registers: bool) -> None:
    check_small(Program(p.n, p.a, p.b, p.d, registers, satfinite=p.satfinite, steps=2))


@pytest.mark.parametrize("b_mn_major", [False, True], ids=["b-k", "b-n"])
@pytest.mark.parametrize("a_mn_major", [False, True], ids=["a-k", "a-m"])
@pytest.mark.parametrize("b_swizzle", SPANS)
@pytest.mark.parametrize("a_swizzle", SPANS)
def test_every_layout(a_swizzle: str, b_swizzle: str, a_mn_major: bool, b_mn_major: bool) -> None:
    p = Program(64, "bf16", "bf16", a_mn_major=a_mn_major, b_mn_major=b_mn_major)
    check_small(p, (a_swizzle, b_swizzle))


@pytest.mark.parametrize("kind", ["e4m3", "tf32", "s8"])
@pytest.mark.parametrize("swizzle", SPANS)
def test_layouts_of_other_sizes(swizzle: str, kind: str) -> None:
    check_small(Program(32, kind, kind, "s32" if kind == "s8" else "f32"), (swizzle, swizzle))


@pytest.mark.parametrize("registers", [False, True], ids=["shared", "registers"])
@pytest.mark.parametrize("signs", [(1, -1), (-1, 1), (-1, -1)])
@pytest.mark.parametrize("kind", ["f16", "bf16", "tf32", "e5m2"])
def test_negated_operands(kind: str, signs: tuple[int, int], registers: bool) -> None:
    check_small(Program(8, kind, kind, "f32", registers, scale_a=signs[0], scale_b=signs[1]))


def test_accumulator_ignored() -> None:
    """Without scale-d the NaN in D's registers does not matter."""
    rng = np.random.default_rng(1)
    a, codes_a = small(rng, "f16", (64, 16))
    b, codes_b = small(rng, "f16", (8, 16))
    np.testing.assert_array_equal(numbers(Program(), run(Program(), codes_a, codes_b)), a @ b.T)


# Arithmetic


def model(p: Program, a: Array, b: Array, c: float) -> float:
    """One element, as the published model has it."""
    bits = 13 if SIZES[p.a] == 1 else 25
    least = [nx.FORMATS[kind].min_exponent for kind in (p.a, p.b)]
    terms = [(Fraction(c), exponent(Fraction(c), -14 if p.d == "f16" else -126))]
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        left, right = Fraction(x), Fraction(y)
        terms.append((left * right, exponent(left, least[0]) + exponent(right, least[1])))
    total = fused(terms, bits)
    if p.d == "f16":
        return float(np.float64(total).astype(np.float16))  # few enough bits for one rounding
    kept = 13 if SIZES[p.a] == 1 else 23
    return float(toward_zero(total, Fraction(2) ** (exponent(total, -126) - kept)))


def spread(rng: np.random.Generator, kind: str, shape: tuple[int, ...], width: float) -> tuple[Array, Array]:
    """Numbers of many exponents, subnormal ones and zeros among them; their codes."""
    fmt = nx.FORMATS[kind]
    values = rng.standard_normal(shape) * 2.0 ** rng.uniform(-width, width, shape)
    codes = nx.encode(fmt, values, satfinite=True).astype(CODES[SIZES[kind]])
    codes[rng.random(shape) < 0.1] = rng.integers(0, 4) << fmt.shift
    return nx.decode(fmt, codes), codes


NUMERIC = [
    (Program(), 4.0),
    (Program(d="f16"), 2.0),
    (Program(a="bf16", b="bf16"), 4.0),
    (Program(a="bf16", b="bf16"), 40.0),
    (Program(a="tf32", b="tf32"), 6.0),
    (Program(a="e4m3", b="e4m3"), 3.0),
    (Program(a="e5m2", b="e4m3"), 5.0),
    (Program(a="e4m3", b="e5m2", d="f16"), 3.0),
]


@pytest.mark.parametrize("registers", [False, True], ids=["shared", "registers"])
@pytest.mark.parametrize(("p", "width"), NUMERIC, ids=lambda x: f"{x.d}-{x.a}-{x.b}" if isinstance(x, Program) else x)
def test_arithmetic_is_the_models(p: Program, width: float, registers: bool) -> None:
    p = Program(p.n, p.a, p.b, p.d, registers)
    rng = np.random.default_rng(int(width) + registers)
    a, codes_a = spread(rng, p.a, (64, p.k), width)
    b, codes_b = spread(rng, p.b, (p.n, p.k), width)
    c = (rng.standard_normal((64, p.n)) * 2.0 ** rng.uniform(-width, width, (64, p.n))).astype(np.float32)
    # Half of them cancel what the products come to, but for a little.
    c[::2] = (-(a[::2] @ b.T) * (1 + 2.0**-9)).astype(np.float32)
    held = nx.f32_to_f16(c.clip(-60000, 60000)) if p.d == "f16" else c.view(np.uint32)
    before = nx.decode(nx.F16, held) if p.d == "f16" else c.astype(np.float64)
    found = numbers(p, run(p, codes_a, codes_b, held))
    for i in range(64):
        for j in range(p.n):
            expected = model(p, a[i], b[j], float(before[i, j]))
            if abs(expected) < (65504 if p.d == "f16" else 2.0**127):
                assert found[i, j] == expected, (i, j)


@pytest.mark.parametrize("d", ["f16", "f32"])
def test_infinities_and_nan(d: str) -> None:
    p = Program(d=d)
    a, b = np.zeros((64, 16), np.uint16), np.full((8, 16), 0x3C00, np.uint16)
    a[0, 3], a[1, 3], a[2, 3], a[3, 3], a[3, 4] = 0x7C00, 0xFC00, 0x7E01, 0x7C00, 0xFC00
    found = run(p, a, b)
    inf, nan = (0x7C00, 0x7FFF) if d == "f16" else (0x7F800000, 0x7FFFFFFF)
    minus = 0xFC00 if d == "f16" else 0xFF800000
    assert [set(row) for row in found[:5].tolist()] == [{inf}, {minus}, {nan}, {nan}, {0}]


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_nan_of_fp8(kind: str) -> None:
    """All bits of the NaN are set, though numbers keep 13 bits of mantissa; infinity less infinity is one."""
    p = Program(a=kind, b=kind)
    a, b = np.zeros((64, 32), np.uint8), encode(kind, np.ones((8, 32)))
    a[0, 3], a[1, 0] = 0x7F, encode(kind, np.ones(1))[0]
    c = np.zeros((64, 8), np.uint32)
    c[1], c[2] = np.array([1.0 + 2.0**-14, -1.0], np.float32).view(np.uint32)[[0]], 0x7F800000
    if kind == "e5m2":
        a[3, 0], a[3, 1], a[4, 0] = 0x7C, 0xFC, 0xFC
    found = run(p, a, b, c)
    two, inf = int(np.float32(2).view(np.uint32)), 0x7F800000
    special = [{0x7FFFFFFF}, {0xFF800000}] if kind == "e5m2" else [{0}, {0}]
    assert [set(row) for row in found[:5].tolist()] == [{0x7FFFFFFF}, {two}, {inf}, *special]


def test_tf32_ignores_the_low_bits() -> None:
    p = Program(a="tf32", b="tf32")
    a = np.full((64, 8), np.float32(1 + 2.0**-10 - 2.0**-12)).view(np.uint32)
    b = np.full((8, 8), np.float32(1)).view(np.uint32)
    assert set(numbers(p, run(p, a, b)).ravel()) == {8.0}


@pytest.mark.parametrize(("satfinite", "expected"), [(False, -(2**31) + 32 * 255 * 127 - 1), (True, 2**31 - 1)])
def test_integers_wrap_or_saturate(satfinite: bool, expected: int) -> None:
    p = Program(a="u8", b="s8", d="s32", satfinite=satfinite)
    a, b = np.full((64, 32), 255, np.uint8), np.full((8, 32), 127, np.uint8)
    found = run(p, a, b, np.full((64, 8), 2**31 - 1, np.uint32))
    assert set(found.view(np.int32).ravel().tolist()) == {expected}


@pytest.mark.parametrize("schedule", ["eager", "lazy", "fifo", "random"])
def test_a_chain_of_steps(schedule: str) -> None:
    """Steps add up in the order of issue: the model is not associative."""
    p, one = Program(steps=4), Program()
    rng = np.random.default_rng(3)
    _, a = spread(rng, "f16", (4, 64, 16), 3.0)
    _, b = spread(rng, "f16", (4, 8, 16), 3.0)
    device = ptxemu.Device("sm_90a", schedule=schedule, seed=5)
    step = np.zeros((64, 8), np.uint32)
    for s in range(4):
        step = run(one, a[s], b[s], step)
    np.testing.assert_array_equal(run(p, a, b, np.zeros((64, 8), np.uint32), device=device), step)


# What is refused

MMA = "    wgmma.mma"  # how its line begins
REFUSED = [
    ("%d0, %d1, %d2", "%d0, %d1", ptxemu.ParseError, "a vector of 3 where one of 4 is expected"),
    ("m64n8k16", "m64n12k16", ptxemu.UnknownInstruction, "m64n12k16"),
    ("m64n8k16", "m64n8k32", ptxemu.UnknownInstruction, "m64n8k32"),
    (", %add, 1, 1", ", %add, 2, 1", ptxemu.ParseError, "the constant 2 where one of 1, -1 is expected"),
    ("1, 1, 0, 0;", "1, 1, 0, 3;", ptxemu.ParseError, "the constant 3 where one of 0, 1 is expected"),
    ("1, 1, 0, 0;", "%w0, 1, 0, 0;", ptxemu.ParseError, "an operand that is no constant"),
    ("wait_group.sync.aligned 0", "wait_group.sync.aligned %w0", ptxemu.ParseError, "an operand that is no constant"),
    ("wait_group.sync.aligned 0", "wait_group.sync.aligned -1", ptxemu.ParseError, "the constant -1 is negative"),
    ("%a0, %b0, %add", "%w0, %b0, %add", ptxemu.ParseError, "a register of 32 bits, where .b64 is expected"),
    (MMA, f"    add.u64 %a0, %a0, %wide;\n{MMA}", ptxemu.MemoryFault, "different values of the desc"),
    (MMA, f"    mov.u64 %a0, 0x8000;\n{MMA}", ptxemu.Error, "bits 14-15, 30-31, 46-48 and 52-61 must"),
    (MMA, f"    or.b64 %a0, %a0, 0x2000000000000;\n{MMA}", ptxemu.Error, "base offset 1; only 0 is mod"),
    (MMA, f"    setp.eq.u32 %add, %thread, 5;\n{MMA}", ptxemu.MemoryFault, "different values of scale-d"),
    ("bar.sync 0;", "bar.sync 0; shr.u32 %w0, %thread, 5; add.u32 %w0, %w0, 1024; cvt.u64.u32 %a0, %w0;",
     ptxemu.MemoryFault, "have to issue one wgmma.mma_async with the same operands"),
    ("bar.sync 0;", "bar.sync 0; setp.gt.u32 %more, %thread, 63; @%more exit;", ptxemu.Deadlock,
     "to which 2 of the 4 warps of the warpgroup have not come"),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "error", "message"), REFUSED)
def test_refused(before: str, after: str, error: type[Exception], message: str) -> None:
    text = Program().text
    assert before in text
    with pytest.raises(error, match=message):
        launch(text.replace(before, after))


def launch(text: str, threads: int = 128, **options: Any) -> ptxemu.Report:
    image, out = np.zeros(16384, np.uint8), np.zeros((128, 4), np.uint32)
    layout = packed("128B", 64, 2, False)
    descriptors = np.array([[layout.descriptor(ORIGIN), layout.descriptor(ORIGIN + A_BYTES)]], np.uint64)
    device = ptxemu.Device("sm_90a", **options)
    held = np.zeros(4, np.uint32)
    return device.launch(text, block=(threads,), shared=image.size, args=[image, image.size, descriptors, held, out, 1])


def test_half_a_warpgroup() -> None:
    with pytest.raises(ptxemu.MemoryFault, match="needs a warpgroup of 4 warps"):
        launch(Program().text, 64)


def test_counters() -> None:
    report = launch(Program(steps=1).text)
    assert report.counters["mma"] == {"wgmma f16 64x8x16": 1}


# Registers in flight

MOVES = """
    wgmma.commit_group.sync.aligned;
    mov.b32 %f0, %d0;
    setp.ne.u32 %more, %thread, 0;
    @%more bra over;
    bar.warp.sync 1;
over:
    bar.warp.sync 0xffffffff;
    wgmma.wait_group.sync.aligned 0;
    mov.b32 %d0, %f0;
"""


@pytest.mark.parametrize("schedule", ["eager", "lazy", "fifo", "random"])
def test_copies_and_branches_keep_what_is_in_flight(schedule: str) -> None:
    """A register that is copied, and lanes that part, before the operation is complete."""
    rng = np.random.default_rng(2)
    a, codes_a = small(rng, "f16", (64, 16))
    b, codes_b = small(rng, "f16", (8, 16))

    class Moved(Program):
        text = Program().text.replace(
            "    wgmma.commit_group.sync.aligned;\n    wgmma.wait_group.sync.aligned 0;\n", MOVES
        )

    found = run(Moved(), codes_a, codes_b, device=ptxemu.Device("sm_90a", schedule=schedule, seed=3))
    np.testing.assert_array_equal(numbers(Program(), found), a @ b.T)


EARLY = "wgmma.commit_group.sync.aligned;\n    add.u32 %f0, %d0, 1;\n"


def test_a_read_before_the_wait_shows_no_result() -> None:
    """The number is not there yet, and the finding does not depend on that."""
    text = Program().text.replace("wgmma.commit_group.sync.aligned;\n", EARLY).replace("[%own + 0], %d0", "[%own], %f0")
    for schedule in ("eager", "lazy"):
        report = launch(text, schedule=schedule, on_finding="collect")
        assert [f.kind for f in report.findings] == ["register of a wgmma in flight"]
    launch(text, checks="none")


COMMIT, IN_FLIGHT = "    wgmma.commit_group.sync.aligned;\n", "register of a wgmma in flight"
JOINED = "    @%odd bra over;\n    mov.b32 %f0, %d0;\nover:\n    bar.warp.sync -1;\n"
JOINED += "    wgmma.wait_group.sync.aligned 0;\n    mov.b32 %d0, %f0;\n"
ODD = """
    .reg .pred %odd;
    and.b32 %f0, %thread, 1;
    setp.ne.u32 %odd, %f0, 0;
    setp.ge.u32 %more, %thread, 0;
    bar.sync 0;
"""
UNTIDY = [
    ("wgmma.wait_group.sync.aligned 0;", "wgmma.wait_group.sync.aligned 1;",
     {"register of a wgmma in flight", "wgmma not waited for"}),
    ("    wgmma.fence.sync.aligned;\n", "", {"missing wgmma.fence"}),
    (MMA, f"    add.u32 %d0, %d0, 0;\n{MMA}", {"missing wgmma.fence"}),
    (MMA, f"    mov.u32 %d0, 0;\n{MMA}", set()),
    (", %add, 1", ", 1, 1", set()),
    (", %add, 1", ", 0, 1", set()),
    (COMMIT, f"{COMMIT}    @%odd mov.b32 %f0, %d0;\n", {IN_FLIGHT}),
    (COMMIT, f"{COMMIT}    @%odd mov.b32 %d0, %f0;\n", {IN_FLIGHT}),
    (COMMIT, f"{COMMIT}    @%more mov.b32 %f0, %d0;\n", set()),
    (COMMIT, f"{COMMIT}{JOINED}", {IN_FLIGHT}),
    ("    fence.proxy.async.shared::cta;\n", "", {"missing fence.proxy.async"}),
    ("    bar.sync 0;\n", "", {"race", "missing fence.proxy.async"}),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "kinds"), UNTIDY)
@pytest.mark.parametrize("schedule", ["eager", "lazy", "random"])
def test_findings(before: str, after: str, kinds: set[str], schedule: str) -> None:
    text = Program().text
    assert before in text
    text = text.replace(before, after)
    if "%odd" in text or "%more" in after:
        text = text.replace("    bar.sync 0;\n", ODD)
    report = launch(text, schedule=schedule, on_finding="collect")
    assert {f.kind for f in report.findings} <= kinds
    assert bool(report.findings) == bool(kinds)


CHAIN = """
.version 8.0
.target sm_90a
.address_size 64
.visible .entry k()
{{
    .shared .align 128 .b8 matrix[8192];
    .reg .b32 place, d0, d1, d2, d3, a0, a1, a2, a3, zero;
    .reg .b64 descriptor;
    .reg .pred p;
    mov.u32 place, %tid.x;
    mad.lo.u32 place, place, 16, 1024;
    st.shared.v4.b32 [place], {{0, 0, 0, 0}};
    st.shared.v4.b32 [place+2048], {{0, 0, 0, 0}};
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mov.u32 place, matrix;
    cvt.u64.u32 descriptor, place;
    shr.u64 descriptor, descriptor, 4;
    or.b64 descriptor, descriptor, 0x80000;
    mov.b32 a0, 0;
    mov.b32 a1, 0;
    mov.b32 a2, 0;
    mov.b32 a3, 0;
    wgmma.fence.sync.aligned;
    {body}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
}}
"""
D, A = "{d0, d1, d2, d3}", "{a0, a1, a2, a3}"
F16 = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {}, {}, descriptor, {}, 1, 1, 0;"
SHARED = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {}, descriptor, descriptor, {}, 1, 1, 0, 0;"
BF16 = F16.replace("f32.f16.f16", "f32.bf16.bf16")
CHAINS = [
    (F16.format(D, A, 0) + BF16.format(D, A, 1), set()),
    (F16.format(D, A, 0) + F16.replace("f32.f16.f16", "f16.f16.f16").format("{d0, d1}", A, 0), set()),
    (
        F16.format(D, A, 0) + f"wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {D}, {A}, descriptor, 1, 1, 1;",
        {IN_FLIGHT},
    ),
    (
        F16.format(D, A, 0) + F16.replace("{}, {},", "{}, descriptor,").replace("1, 0;", "1, 0, 0;").format(A, 0),
        {IN_FLIGHT},
    ),
    (F16.format(D, A, 0) + F16.format(D, A, 1), set()),
]


@pytest.mark.parametrize(("body", "kinds"), CHAINS)
def test_operations_that_share_registers(body: str, kinds: set[str]) -> None:
    """Those of one shape may share an accumulator, whatever their types; none may fill what another one reads."""
    for schedule in ("eager", "lazy"):
        device = ptxemu.Device("sm_90a", schedule=schedule, on_finding="collect")
        report = device.launch(CHAIN.format(body=body), block=(128,))
        assert {f.kind for f in report.findings} == kinds


@pytest.mark.parametrize("threads", [32, 96, 120, 160])
def test_part_of_a_warpgroup(threads: int) -> None:
    with pytest.raises(
        ptxemu.MemoryFault, match=f"of {threads} threads, starts none|lanes 0xffffff of the warp issue it"
    ):
        ptxemu.Device("sm_90a").launch(CHAIN.format(body=F16.format(D, A, 0)), block=(threads,))


def test_lanes_that_have_ended() -> None:
    leave = "mov.u32 place, %laneid; setp.eq.u32 p, place, 3; @p exit;"
    with pytest.raises(ptxemu.MemoryFault, match="lanes 0xfffffff7 of the warp issue it; all 32 have to"):
        ptxemu.Device("sm_90a").launch(CHAIN.format(body=leave + F16.format(D, A, 0)), block=(128,))


ALIGNED = [
    "wgmma.fence.sync.aligned;",
    "wgmma.commit_group.sync.aligned;",
    "wgmma.wait_group.sync.aligned 0;",
    F16.format(D, A, 0),
    "setmaxnreg.dec.sync.aligned.u32 24;",
    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {d0}, [place];",
    "stmatrix.sync.aligned.m8n8.x1.shared.b16 [place], {a0};",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {d0, d1, d2, d3}, {a0, a1, a2, a3}, {a0, a1}, {a0, a1, a2, a3};",
    "barrier.sync.aligned 0;",
]


@pytest.mark.parametrize("instruction", ALIGNED)
def test_a_guard_that_divides_an_aligned_instruction(instruction: str) -> None:
    lanes = "mov.u32 zero, %laneid; and.b32 zero, zero, 1; setp.{} p, zero, 0; @p {}"
    with pytest.raises(ptxemu.MemoryFault, match="all lanes of a warp or by none: its guard lets 0xaaaaaaaa through"):
        ptxemu.Device("sm_90a").launch(CHAIN.format(body=lanes.format("ne.u32", instruction)), block=(128,))
    for same in ("ge.u32", "lt.u32"):
        ptxemu.Device("sm_90a", checks="none").launch(CHAIN.format(body=lanes.format(same, instruction)), block=(128,))
