"""PTX 'wgmma.mma_async' and 'mma.sync' on operands that are hard to add up, and descriptors of every layout.

Shared memory is filled with numbers at random: where an instruction takes its operands from shows in its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from comparison.program import HEADER, Array, Arrays, Launch, Program

FIELDS = {"f16": (5, 10), "bf16": (8, 7), "tf32": (8, 23), "f32": (8, 23), "e4m3": (4, 3), "e5m2": (5, 2)}
STYLES = ("ordinary", "wide", "any", "subnormal", "cancelling")


def numbers(kind: str, style: str, count: int, generator: np.random.Generator) -> Array:
    """Codes of a type.  ordinary: near 1; wide: every finite one; any: NaN and infinity too; subnormal: the smallest;
    cancelling: few magnitudes, far apart, of both signs."""
    if kind in ("s8", "u8", "s32"):
        return generator.integers(0, 1 << 8 * (4 if kind == "s32" else 1), count).astype(
            "<u4" if kind == "s32" else "<u1"
        )
    exponent, mantissa = FIELDS[kind]
    bits = 1 + exponent + mantissa
    code = generator.integers(0, 1 << bits, count, dtype=np.uint64)
    bias, top = (1 << exponent - 1) - 1, (1 << exponent) - 1
    field = code >> np.uint64(mantissa) & np.uint64(top)
    if style == "ordinary":
        field = np.uint64(bias - 2) + (field & np.uint64(3))
    elif style in ("wide", "subnormal"):
        field = field % np.uint64(top) if style == "wide" else field & np.uint64(1)
    elif style == "cancelling":
        span = min(bias - 1, 20)
        field = np.uint64(bias) + (field % np.uint64(3)).astype(np.uint64) * np.uint64(span // 2) - np.uint64(span // 2)
        code = code & ~np.uint64((1 << max(mantissa - 2, 0)) - 1)
    code = code & ~np.uint64(top << mantissa) | field << np.uint64(mantissa)
    return code.astype({8: "<u1", 16: "<u2", 32: "<u4"}[bits])


# wgmma

ROOM = 40960
ORIGIN = 1024  # where a CTA's shared memory begins
MODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
SPANS = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
THREADS = 128
WGMMA = """.visible .entry k(.param .u64 image, .param .u64 fragments, .param .u64 accumulator, .param .u64 descriptors)
{{
    .shared .align 1024 .b8 room[{room}];
    .reg .pred p;
    .reg .b32 r<8>, a<{fragments}>, d<{registers}>;
    .reg .b64 at, own, x, y<{steps}>, z<{steps}>;
    mov.u32 r0, %tid.x;
    shl.b32 r1, r0, 4;
    ld.param.u64 at, [image];
MORE:
    setp.ge.u32 p, r1, {room};
    @p bra FULL;
    cvt.u64.u32 x, r1;
    add.u64 x, at, x;
    ld.global.v4.b32 {{r2, r3, r4, r5}}, [x];
    mov.u32 r6, room;
    add.u32 r6, r6, r1;
    st.shared.v4.b32 [r6], {{r2, r3, r4, r5}};
    add.u32 r1, r1, 2048;
    bra MORE;
FULL:
    ld.param.u64 at, [fragments];
    mad.wide.u32 at, r0, 16, at;
    ld.param.u64 own, [accumulator];
    mad.wide.u32 own, r0, {row}, own;
    ld.param.u64 x, [descriptors];
    {loads}
    fence.proxy.async.shared::cta;
    bar.sync 0;
    wgmma.fence.sync.aligned;
    {instructions}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    {stores}
    ret;
}}
"""


@dataclass(frozen=True)
class Wgmma:
    """A chain of m64 n K instructions; layouts: swizzle, leading and stride offset of A and B."""

    n: int
    a: str
    b: str
    d: str = "f32"
    steps: int = 4
    registers_a: bool = False
    trans_a: bool = False
    trans_b: bool = False
    negate_a: bool = False
    negate_b: bool = False
    layout_a: tuple[str, int, int] = ("128B", 16, 1024)
    layout_b: tuple[str, int, int] = ("128B", 16, 1024)

    @property
    def sixteen(self) -> bool:
        return self.a in ("f16", "bf16")

    @property
    def k(self) -> int:
        return {"f16": 16, "bf16": 16, "tf32": 8}.get(self.a, 32)

    @property
    def count(self) -> int:
        """Registers of the accumulator."""
        return self.n // 4 if self.d == "f16" else self.n // 2

    def text(self) -> str:
        names = ", ".join(f"d{i}" for i in range(self.count))
        constants = [] if self.d == "s32" else [-1 if self.negate_a else 1, -1 if self.negate_b else 1]
        if self.sixteen:
            constants += [int(self.trans_b)] if self.registers_a else [int(self.trans_a), int(self.trans_b)]
        tail = "".join(f", {c}" for c in constants)
        head = f"wgmma.mma_async.sync.aligned.m64n{self.n}k{self.k}.{self.d}.{self.a}.{self.b}"
        loads = [f"ld.global.b32 d{i}, [own + {4 * i}];" for i in range(self.count)]
        instructions = []
        for s in range(self.steps):
            loads.append(f"ld.global.v2.b64 {{y{s}, z{s}}}, [x + {16 * s}];")
            first = f"y{s}"
            if self.registers_a:
                first = "{" + ", ".join(f"a{4 * s + i}" for i in range(4)) + "}"
                loads.append(f"ld.global.v4.b32 {first}, [at + {16 * THREADS * s}];")
            instructions.append(f"{head} {{{names}}}, {first}, z{s}, p{tail};")
        return HEADER + WGMMA.format(
            room=ROOM,
            fragments=4 * self.steps,
            registers=self.count,
            steps=self.steps,
            row=4 * self.count,
            loads="\n    ".join(loads),
            instructions="setp.eq.u32 p, 0, 0;\n    " + "\n    ".join(instructions),
            stores="\n    ".join(f"st.global.b32 [own + {4 * i}], d{i};" for i in range(self.count)),
        )

    def descriptors(self) -> Array:
        found = np.zeros((self.steps, 2), np.uint64)
        for s in range(self.steps):
            for side, (swizzle, leading, stride) in enumerate((self.layout_a, self.layout_b)):
                trans = self.trans_b if side else self.trans_a
                step = 2048 if trans else 32 if SPANS[swizzle] > 32 else 256
                start = ORIGIN + 8192 * side + step * (s % 4)
                found[s, side] = start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | MODES[swizzle] << 62
        return found

    def program(self, name: str, style: str, seed: int) -> Program:
        def arrays() -> Arrays:
            generator = np.random.default_rng(seed)
            image = np.empty(ROOM, np.uint8)
            image[:8192] = numbers(self.a, style, 8192, generator).view(np.uint8)[:8192]
            image[8192:] = numbers(self.b, style, ROOM, generator).view(np.uint8)[: ROOM - 8192]
            fragments = numbers(self.a, style, 16 * THREADS * self.steps, generator).view(np.uint8)[
                : 16 * THREADS * self.steps
            ]
            words = THREADS * self.count
            accumulator = numbers(self.d, style, 2 * words, generator).view(np.uint32)[:words].copy()
            return {"image": image, "fragments": fragments, "out": accumulator, "descriptors": self.descriptors()}

        launch = Launch(("image", "fragments", "out", "descriptors"), (1, 1, 1), (THREADS, 1, 1))
        return Program(name, self.text(), arrays, (launch,), frozenset({"image", "fragments", "descriptors"}))


TYPES = [
    ("f16", "f16", "f32"), ("f16", "f16", "f16"), ("bf16", "bf16", "f32"), ("tf32", "tf32", "f32"),
    ("e4m3", "e4m3", "f32"), ("e5m2", "e5m2", "f32"), ("e4m3", "e5m2", "f32"), ("e4m3", "e4m3", "f16"),
    ("e5m2", "e4m3", "f16"),
]  # fmt: skip
INTEGERS = [("s8", "s8", "s32"), ("u8", "s8", "s32")]


def arithmetic() -> Iterator[Program]:
    """Every type with operands of every style; a single instruction and a long chain."""
    for i, (a, b, d) in enumerate(TYPES):
        for j, style in enumerate(STYLES):
            for steps in (1, 16):
                one = Wgmma(64, a, b, d, steps)
                yield one.program(f"wgmma {a} {b} {d} {style} {steps}", style, 100 * i + 10 * j + steps)
    for i, (a, b, d) in enumerate(INTEGERS):
        yield Wgmma(64, a, b, d).program(f"wgmma {a} {b} {d}", "any", i)


def shapes() -> Iterator[Program]:
    """Widths, A in registers, signs, swizzles and transposed operands."""
    for seed, n in enumerate((8, 16, 24, 96, 136, 192, 248, 256)):
        for a, d in (("f16", "f32"), ("bf16", "f32"), ("e4m3", "f32"), ("f16", "f16")):
            yield Wgmma(n, a, a, d).program(f"wgmma {a} {d} n{n}", "wide", 1000 + seed)
    for seed, (a, b, d) in enumerate(TYPES + INTEGERS):
        one = Wgmma(32, a, b, d, registers_a=True)
        yield one.program(f"wgmma {a} {b} {d} registers", "ordinary", 2000 + seed)
        if d != "s32":
            one = Wgmma(32, a, b, d, negate_a=seed % 2 == 0, negate_b=seed % 3 == 0)
            yield one.program(f"wgmma {a} {b} {d} signs", "ordinary", 2100 + seed)
    layouts = {"none": (128, 256), "32B": (16, 256), "64B": (16, 512), "128B": (16, 1024)}
    for seed, (left, right) in enumerate((x, y) for x in layouts for y in layouts):
        for kind in ("f16", "e4m3", "tf32"):
            one = Wgmma(64, kind, kind, layout_a=(left, *layouts[left]), layout_b=(right, *layouts[right]))
            yield one.program(f"wgmma {kind} {left} {right}", "ordinary", 3000 + seed)
    transposed = {"none": (128, 1024), "32B": (512, 256), "64B": (1024, 512), "128B": (4096, 1024)}
    for seed, (side, swizzle) in enumerate((s, x) for s in ("a", "b", "both") for x in transposed):
        layout = (swizzle, *transposed[swizzle])
        plain = ("128B", 16, 1024)
        trans_a, trans_b = side != "b", side != "a"
        one = Wgmma(
            64, "f16", "f16", trans_a=trans_a, trans_b=trans_b, layout_a=layout if trans_a else plain,
            layout_b=layout if trans_b else plain, steps=2,
        )  # fmt: skip
        yield one.program(f"wgmma transposed {side} {swizzle}", "ordinary", 4000 + seed)


# mma.sync

MMA = """.visible .entry k(.param .u64 p_a, .param .u64 p_b, .param .u64 p_out)
{{
    .reg .b32 r<4>, a<{a}>, b<{b}>, d<{d}>;
    .reg .b64 at, bt, out;
    mov.u32 r0, %tid.x;
    mov.u32 r1, %ctaid.x;
    mad.lo.u32 r0, r1, {threads}, r0;
    ld.param.u64 at, [p_a];
    ld.param.u64 bt, [p_b];
    ld.param.u64 out, [p_out];
    mad.wide.u32 at, r0, {bytes_a}, at;
    mad.wide.u32 bt, r0, {bytes_b}, bt;
    mad.wide.u32 out, r0, {bytes_d}, out;
    {body}
    ret;
}}
"""
CTAS = 4


def _mma(
    shape: str, a: str, b: str, d: str, counts: tuple[int, int, int], style: str, rounds: int, seed: int
) -> Program:
    """counts: registers of A, B and D."""

    def named(letter: str, count: int, start: int = 0) -> str:
        names = ", ".join(f"{letter}{start + i}" for i in range(count))
        return f"{{{names}}}"

    na, nb, nd = counts
    body = [f"ld.global.b32 d{i}, [out + {4 * i}];" for i in range(nd)]
    for i in range(rounds):
        body += [f"ld.global.b32 a{j}, [at + {4 * (na * i + j)}];" for j in range(na)]
        body += [f"ld.global.b32 b{j}, [bt + {4 * (nb * i + j)}];" for j in range(nb)]
        body.append(
            f"mma.sync.aligned.{shape}.row.col.{d}.{a}.{b}.{d} "
            f"{named('d', nd)}, {named('a', na)}, {named('b', nb)}, {named('d', nd)};"
        )
    body += [f"st.global.b32 [out + {4 * i}], d{i};" for i in range(nd)]
    sizes = {"bytes_a": 4 * na * rounds, "bytes_b": 4 * nb * rounds, "bytes_d": 4 * nd}
    text = HEADER + MMA.format(a=na, b=nb, d=nd, threads=THREADS, body="\n    ".join(body), **sizes)

    def arrays() -> Arrays:
        generator = np.random.default_rng(seed)
        total = CTAS * THREADS

        def words(kind: str, count: int) -> Array:
            return numbers(kind, style, 4 * count, generator).view(np.uint8)[: 4 * count].view(np.uint32).copy()

        return {"a": words(a, total * na * rounds), "b": words(b, total * nb * rounds), "out": words(d, total * nd)}

    launch = Launch(("a", "b", "out"), (CTAS, 1, 1), (THREADS, 1, 1))
    return Program(f"mma {shape} {a} {b} {d} {style} {rounds}", text, arrays, (launch,), frozenset({"a", "b"}))


def warp_level() -> Iterator[Program]:
    forms = [
        ("m16n8k8", "f16", "f16", "f32", (2, 1, 4)), ("m16n8k16", "f16", "f16", "f32", (4, 2, 4)),
        ("m16n8k8", "f16", "f16", "f16", (2, 1, 2)), ("m16n8k16", "f16", "f16", "f16", (4, 2, 2)),
        ("m16n8k8", "bf16", "bf16", "f32", (2, 1, 4)), ("m16n8k16", "bf16", "bf16", "f32", (4, 2, 4)),
        ("m16n8k4", "tf32", "tf32", "f32", (2, 1, 4)), ("m16n8k8", "tf32", "tf32", "f32", (4, 2, 4)),
        ("m16n8k32", "e4m3", "e4m3", "f32", (4, 2, 4)), ("m16n8k32", "e5m2", "e4m3", "f32", (4, 2, 4)),
    ]  # fmt: skip
    for i, (shape, a, b, d, counts) in enumerate(forms):
        for j, style in enumerate(STYLES):
            for rounds in (1, 8):
                yield _mma(shape, a, b, d, counts, style, rounds, 5000 + 100 * i + 10 * j + rounds)
    for shape, counts in (("m16n8k16", (2, 1, 4)), ("m16n8k32", (4, 2, 4))):
        for a, b in (("s8", "s8"), ("u8", "s8"), ("u8", "u8")):
            yield _mma(shape, a, b, "s32", counts, "any", 4, 6000)


def programs() -> Iterator[Program]:
    yield from arithmetic()
    yield from shapes()
    yield from warp_level()
