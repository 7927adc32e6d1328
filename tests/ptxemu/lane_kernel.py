"""One instruction in a kernel of one warp: operands from arrays, results to arrays; and exact reference arithmetic."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

import ptxemu
from ptxemu.isa.engine import Form, decode, forms
from ptxemu.text import Instruction, parse

HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"
WORD: dict[int, Any] = {1: np.uint32, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
BITS = {"pred": 1, "f16": 16, "bf16": 16, "f32": 32, "f64": 64}
BITS |= {f"{kind}{bits}": bits for kind in "bus" for bits in (8, 16, 32, 64)}
FLOATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}  # bits of exponent and mantissa
_device = ptxemu.Device("sm_100a")


@dataclass(frozen=True)
class Case:
    """`instruction` in the manual's notation with operands d, a, b, c, e; the types of the result and the sources;
    what it gives for numbers of those types."""

    instruction: str
    result: str
    sources: tuple[str, ...]
    want: Callable[..., Any]

    def __str__(self) -> str:
        return self.instruction


def case(instruction: str, result: str, sources: str, want: Callable[..., Any]) -> Case:
    return Case(instruction, result, tuple(sources.split()), want)


def kernel(instruction: str, result: str, sources: Sequence[str], uniform: int = 0) -> str:
    """A kernel `out, a, b, ...: out[lane] = instruction of a[lane], b[lane], ...`.

    uniform: a bit for each operand that all lanes load from the first element, which makes it a uniform value.
    """
    names = "abce"[: len(sources)]
    text = [HEADER, ".visible .entry k(.param .u64 out"]
    text += [f", .param .u64 p_{name}" for name in names]
    text += [")\n{\n.reg .b32 lane, word;\n.reg .b64 at, base;\nmov.u32 lane, %laneid;\n"]
    for name, kind in zip(("d", *names), (result, *sources), strict=True):
        bits = BITS[kind]
        text.append(f".reg .{'pred' if bits == 1 else f'b{max(bits, 16)}'} {name};\n")
    for index, (name, kind) in enumerate(zip(names, sources, strict=True)):
        bits = BITS[kind]
        text.append(f"ld.param.u64 at, [p_{name}];\n")
        if not uniform >> index & 1:
            text.append(f"mad.wide.u32 at, lane, {WORD[bits]().itemsize}, at;\n")
        if bits == 1:
            text.append(f"ld.global.b32 word, [at];\nsetp.ne.u32 {name}, word, 0;\n")
        else:
            text.append(f"ld.global.b{bits} {name}, [at];\n")
    text.append(f"{instruction};\n")
    bits = BITS[result]
    text.append(f"ld.param.u64 base, [out];\nmad.wide.u32 at, lane, {WORD[bits]().itemsize}, base;\n")
    text.append(
        "selp.b32 word, 1, 0, d;\nst.global.b32 [at], word;\n" if bits == 1 else f"st.global.b{bits} [at], d;\n"
    )
    return "".join([*text, "ret;\n}\n"])


def execute(instruction: str, result: str, *operands: tuple[str, Any], uniform: int = 0) -> np.ndarray:
    """The instruction's result, bits (32,), for operands given as (type, bits of 32 lanes).  uniform: a bit for each
    operand of which all lanes use the first element."""
    out = np.zeros(32, WORD[BITS[result]])
    arrays = [np.array(bits, WORD[BITS[kind]]) for kind, bits in operands]
    text = kernel(instruction, result, [kind for kind, _ in operands], uniform)
    _device.launch(text, args=[out, *arrays])
    return out


def check(each: Case, samples: Sequence[Sequence[int]]) -> None:
    """Compares an instruction with its reference on bit patterns: lane by lane, and each of a few as uniform values.

    samples: for each source 32 bit patterns.
    """
    want = [
        encode(each.result, each.want(*(decode_number(k, x) for k, x in zip(each.sources, row, strict=True))))
        for row in zip(*samples, strict=True)
    ]
    got = execute(each.instruction, each.result, *zip(each.sources, samples, strict=True))
    for lane in range(32):
        shown = [hex(column[lane]) for column in samples]
        assert same(each.result, int(got[lane]), want[lane]), (
            f"{each}, lane {lane}: {shown} gave {got[lane]:#x}, not {want[lane]:#x}"
        )
    every = (1 << len(samples)) - 1
    for lane, uniform in zip(range(0, 32, 5), (every, every, every, *range(1, every)), strict=False):
        once = [[c[lane]] * 32 if uniform >> i & 1 else c for i, c in enumerate(samples)]
        got = execute(each.instruction, each.result, *zip(each.sources, once, strict=True), uniform=uniform)
        rows = zip(*once, strict=True)
        want = [
            encode(each.result, each.want(*(decode_number(k, x) for k, x in zip(each.sources, row, strict=True))))
            for row in rows
        ]
        assert all(same(each.result, int(x), y) for x, y in zip(got, want, strict=True)), (
            f"{each}, uniform {uniform:b}, {once}"
        )


def same(kind: str, got: int, want: int) -> bool:
    """Equal bits; for floats any NaN equals any NaN."""
    if kind in FLOATS and is_nan(kind, want):
        return is_nan(kind, got)
    return got == want


def is_nan(kind: str, bits: int) -> bool:
    exponent, mantissa = FLOATS[kind]
    return (bits >> mantissa) & (1 << exponent) - 1 == (1 << exponent) - 1 and bits & (1 << mantissa) - 1 != 0


def decode_number(kind: str, bits: int) -> Any:
    """Bits as a number: int, bool or float (which holds every type here exactly)."""
    if kind == "pred":
        return bool(bits)
    if kind == "bf16":
        return struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    if kind in FLOATS:
        letter = {16: ("<e", "<H"), 32: ("<f", "<I"), 64: ("<d", "<Q")}[BITS[kind]]
        return struct.unpack(letter[0], struct.pack(letter[1], bits))[0]
    width = BITS[kind]
    return bits - (1 << width) if kind[0] == "s" and bits >> (width - 1) else bits


def encode(kind: str, number: Any) -> int:
    """A number as bits; floats of a wider type are rounded to nearest even."""
    if kind == "pred":
        return int(bool(number))
    if kind in FLOATS:
        return to_float(number, kind)
    return int(number) & (1 << BITS[kind]) - 1


def to_float(number: Any, kind: str, rounding: str = "rn") -> int:
    """An exact number, or a special float, as the bits of a float type under a rounding."""
    exponent_bits, mantissa = FLOATS[kind]
    bias = (1 << exponent_bits - 1) - 1
    infinity = (1 << exponent_bits) - 1 << mantissa
    if isinstance(number, float) and number != number:
        return infinity | 1 << mantissa - 1
    negative = np.signbit(number) if isinstance(number, float) else number < 0
    sign = int(negative) << exponent_bits + mantissa
    if number in (float("inf"), float("-inf")):
        return sign | infinity
    size = abs(Fraction(number))
    if not size:
        return sign
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    exponent = max(exponent, 1 - bias)
    steps, rest = divmod(size / Fraction(2) ** (exponent - mantissa), 1)
    up = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and steps % 2 == 1),
        "rz": False,
        "rm": negative and rest > 0,
        "rp": not negative and rest > 0,
    }[rounding]
    code = (exponent - (1 - bias) << mantissa) + int(steps) + up
    if code >= infinity:
        toward_zero = rounding == "rz" or (rounding == "rm" and not negative) or (rounding == "rp" and negative)
        code = infinity - 1 if toward_zero else infinity
    return sign | code


INTEGER_EDGES = (0, 1, 2, 3, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 100, 255, 256)


def samples(kinds: Sequence[str], seed: int = 0) -> list[list[int]]:
    """32 bit patterns for each type: edges of the type and random ones, in different orders."""
    generator = np.random.default_rng(seed)
    columns = []
    for kind in kinds:
        bits = BITS[kind]
        top = (1 << bits) - 1
        if kind in FLOATS:
            exponent, mantissa = FLOATS[kind]
            infinity = (1 << exponent) - 1 << mantissa
            one = (1 << exponent - 1) - 1 << mantissa
            edges = [
                0,
                1,
                (1 << mantissa) - 1,
                1 << mantissa,
                one,
                one + 1,
                infinity - 1,
                infinity,
                infinity | 1 << mantissa - 1,
            ]
            edges += [x | 1 << bits - 1 for x in edges[:8]]
            near = [one + int(x) for x in generator.integers(-(3 << mantissa), 3 << mantissa, 15)]
            pool = edges + [x | (int(s) << bits - 1) for x, s in zip(near, generator.integers(0, 2, 15), strict=True)]
        elif bits == 1:
            pool = [0, 1] * 16
        else:
            edges = [x & top for x in (*INTEGER_EDGES, top, top - 1, 1 << bits - 1, (1 << bits - 1) - 1)]
            pool = edges + [int(x) & top for x in generator.integers(0, 1 << 63, 32)]
        columns.append([pool[i % len(pool)] for i in generator.permutation(max(len(pool), 32))[:32]])
    return columns


def missing_forms(modules: Sequence[str], cases: Sequence[Case | str]) -> list[str]:
    """The syntax of every form of these chapters that no case decodes to.  A case may also be an instruction's text."""
    seen: set[int] = set()
    for each in cases:
        text = kernel(each.instruction, each.result, each.sources) if isinstance(each, Case) else each
        for function in parse(text).functions.values():
            seen |= {id(decode(item).form) for item in function.body if isinstance(item, Instruction)}
    return [f.syntax for f in forms() if chapter(f) in modules and id(f) not in seen]


def chapter(form: Form) -> str:
    return form.function.__module__.rpartition(".")[2]
