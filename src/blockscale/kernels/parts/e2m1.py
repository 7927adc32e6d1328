"""Codes of 16 numbers under one block scale, on every architecture from sm_90 on.

E2M1's grid has steps of 1/2 below 2, of 1 below 4, of 2 from there on: those of an fp32 sum on either side of a power
of two. So |q| + 2^23 - 2 is rounded to the grid as long as |q| is below 4, and |q| + 2^24 - 4 from 2 on, both to even
codes, and either is too large where it is not right: as integers, shifted so that both start at LOWEST, the smaller
one is LOWEST plus the code. That holds below 7. For any magnitude there is the integer nearest to a line of three
pieces: 4 u + 2 v + w with u = a / 2, v = a / 2 - 1 and w = a / 2 - 2, each kept within 0 to 1.

As fp32, a code times 2^22 is 2^-126 times what it stands for, subnormal or not.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Float64, Int32, cute

from blockscale.kernels.parts import ieee

BLOCK = 16
LOWEST = 0x4AFFFFFC  # 2^23 - 2 as fp32
ENOUGH = 2.0**-18  # part of an fp32 sum of squares by which another has to differ to be larger without doubt
TINY = 2.0**-100  # below it such sums have lost their small parts


@dataclass(frozen=True)
class Encoded:
    """A block under one scale.

    Attributes:
        scale: its E4M3 byte. d: its value times the global scale.
        words: codes, eight a word, without signs; anything where the scale is 0.
        error: the sum of squared differences from what is decoded, fp32, or None where nobody asks.
    """

    scale: Int32
    d: Float32
    words: list
    error: Float32 | None


def scale_byte(v: Float32) -> Int32:
    """E4M3 of min(v, 448)."""
    return cute.arch.inline_ptx(
        "{\n.reg .b16 pair;\n.reg .f32 low;\nmin.f32 low, {$r0}, 0f43E00000;\n"
        "cvt.rn.satfinite.e4m3x2.f32 pair, 0f00000000, low;\ncvt.u32.u16 {$w0}, pair;\n}",
        write_only_types=[Int32],
        read_only_args=[v],
    )


def scale_value(byte: Int32) -> Float32:
    return cute.arch.inline_ptx(
        "{\n.reg .b16 pair, low, high;\n.reg .b32 halves;\ncvt.u16.u32 pair, {$r0};\n"
        "cvt.rn.f16x2.e4m3x2 halves, pair;\nmov.b32 {low, high}, halves;\ncvt.f32.f16 {$w0}, low;\n}",
        write_only_types=[Float32],
        read_only_args=[byte],
    )


def encode(values: list, scale: Int32, unit: Float32, quotients, compared: bool, bounded: bool) -> Encoded:
    """`values` under the scale of this byte; `quotients` makes of a divisor what divides by it.

    Args:
        bounded: no quotient reaches 7.
    """
    d = ieee.multiply(scale_value(scale), unit)
    divide = quotients(d if bounded else Float32(cutlass.select_(scale == 0, Float32(1.0), d)))
    code = _code if bounded else _code_of_any
    codes = [code(divide.of(x)) for x in values]
    words = [_word(codes[i : i + 8]) for i in range(0, BLOCK, 8)]
    error = ieee.tree(lambda i: _square(values[i], ieee.multiply(_value(codes[i]), d))) if compared else None
    return Encoded(scale, d, words, error)


def _code(quotient: Float32) -> Int32:
    """LOWEST and the code of a quotient below 7."""
    return cute.arch.inline_ptx(
        "{\n.reg .f32 q, low, high;\n.reg .s32 a, b;\nabs.f32 q, {$r0};\n"
        "add.rn.f32 low, q, 0f4AFFFFFC;\nadd.rn.f32 high, q, 0f4B7FFFFC;\nmov.b32 a, low;\nmov.b32 b, high;\n"
        "add.s32 b, b, -8388606;\nmin.s32 {$w0}, a, b;\n}",
        write_only_types=[Int32],
        read_only_args=[quotient],
    )


def _code_of_any(quotient: Float32) -> Int32:
    """LOWEST and the code of any quotient: rounded pieces, first with 3 x 2^22, whose unit in the last place is 1."""
    return cute.arch.inline_ptx(
        "{\n.reg .f32 q, u, v, w;\n.reg .s32 code;\nabs.f32 q, {$r0};\nmul.rn.sat.f32 u, q, 0f3F000000;\n"
        "fma.rn.sat.f32 v, q, 0f3F000000, 0fBF800000;\nfma.rn.sat.f32 w, q, 0f3F000000, 0fC0000000;\n"
        "fma.rn.f32 u, u, 0f40800000, 0f4B400000;\nfma.rn.f32 u, v, 0f40000000, u;\nadd.rn.f32 u, w, u;\n"
        "mov.b32 code, u;\nadd.s32 {$w0}, code, -4194308;\n}",
        write_only_types=[Int32],
        read_only_args=[quotient],
    )


def _value(code: Int32) -> Float32:
    """The magnitude that a code stands for, given with LOWEST."""
    return ieee.multiply(ieee.number(code * (1 << 22) + (4 << 22)), Float32(2.0**126))


def _word(codes: list) -> Int32:
    """Eight codes, given with LOWEST, the first in the lowest bits."""
    word = codes[7]
    for code in reversed(codes[:7]):
        word = word * 16 + code
    more = LOWEST * 0x11111111 & 0xFFFFFFFF
    return word - Int32(more - 2**32 if more >= 2**31 else more)


def estimated(first: Encoded, second: Encoded) -> tuple[Boolean, Boolean]:
    """(whether `second` restores with a smaller squared error than `first`, whether that is sure), in fp32, whose error
    is at most 2^-20 of a sum."""
    difference = ieee.subtract(first.error, second.error)
    largest = cute.arch.fmax(first.error, second.error)
    enough = ieee.multiply(largest, Float32(ENOUGH))
    return difference > 0.0, (cute.math.abs(difference) > enough) & (largest > Float32(TINY))


def better(values: list, first: Encoded, second: Encoded) -> Boolean:
    """Whether `second` restores with a smaller squared error than `first`, in fp64 and in the order of `ieee.tree`."""
    return _error64(values, second) < _error64(values, first)


def _square(x: Float32, restored: Float32) -> Float32:
    """Of the difference of a number's magnitude from what is restored."""
    difference = ieee.subtract(cute.math.abs(x), restored)
    return ieee.multiply(difference, difference)


def _error64(values: list, encoded: Encoded) -> Float64:
    def square(i: int) -> Float64:
        code = encoded.words[i // 8] >> i % 8 * 4 & 7
        return _square64(values[i], ieee.multiply(_value(code + LOWEST), encoded.d))

    return ieee.tree(square, _add64)


def _square64(x: Float32, y: Float32) -> Float64:
    return cute.arch.inline_ptx(
        "{\n.reg .f32 a;\n.reg .f64 x, y;\nabs.f32 a, {$r0};\ncvt.f64.f32 x, a;\ncvt.f64.f32 y, {$r1};\n"
        "sub.rn.f64 x, x, y;\nmul.rn.f64 {$w0}, x, x;\n}",
        write_only_types=[Float64],
        read_only_args=[x, y],
    )


def _add64(a: Float64, b: Float64) -> Float64:
    return cute.arch.inline_ptx("add.rn.f64 {$w0}, {$r0}, {$r1};", write_only_types=[Float64], read_only_args=[a, b])
