"""Codes of 16 magnitudes under one block scale, on every architecture from sm_90 on.

On E2M1's grid the code of a magnitude a is the integer nearest to a line of three pieces: 4 u + 2 v + w with u = a / 2,
v = a / 2 - 1 and w = a / 2 - 2, each kept within 0 to 1; the pieces are the grid's three steps. Ties go to even codes.
The three differences are exact where they count, and adding 3 x 2^22, whose unit in the last place is 1, rounds each
piece with its sum. The inverse is max(c / 2, c - 2, 2 c - 8).
"""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Float64, Int32, cute

from blockscale.kernels.parts import ieee

BLOCK = 16
INTEGERS = 0x4B400000  # 3 x 2^22 as fp32
SUM_OF_INTEGERS = INTEGERS * 0x11111111 & 0xFFFFFFFF
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


def encode(magnitudes: list, scale: Int32, unit: Float32, quotients, compared: bool) -> Encoded:
    """`magnitudes` under the scale of this byte; `quotients` makes of a divisor what divides by it."""
    d = ieee.multiply(scale_value(scale), unit)
    divide = quotients(Float32(cutlass.select_(scale == 0, Float32(1.0), d)))
    integers = [_integer(divide.of(x)) for x in magnitudes]
    words = [_word(integers[i : i + 8]) for i in range(0, BLOCK, 8)]
    error = ieee.tree(lambda i: _square(magnitudes[i], ieee.multiply(_value(integers[i]), d))) if compared else None
    return Encoded(scale, d, words, error)


def _integer(quotient: Float32) -> Float32:
    """The code and 3 x 2^22."""
    return cute.arch.inline_ptx(
        "{\n.reg .f32 u, v, w;\nmul.rn.sat.f32 u, {$r0}, 0f3F000000;\n"
        "fma.rn.sat.f32 v, {$r0}, 0f3F000000, 0fBF800000;\nfma.rn.sat.f32 w, {$r0}, 0f3F000000, 0fC0000000;\n"
        "fma.rn.f32 u, u, 0f40800000, 0f4B400000;\nfma.rn.f32 u, v, 0f40000000, u;\nadd.rn.f32 {$w0}, w, u;\n}",
        write_only_types=[Float32],
        read_only_args=[quotient],
    )


def _value(integer: Float32) -> Float32:
    """The magnitude that a code stands for."""
    return cute.arch.inline_ptx(
        "{\n.reg .f32 a, b, c;\nadd.rn.f32 c, {$r0}, 0fCB400000;\nmul.rn.f32 a, c, 0f3F000000;\n"
        "add.rn.f32 b, c, 0fC0000000;\nfma.rn.f32 c, c, 0f40000000, 0fC1000000;\n"
        "max.f32 a, a, b;\nmax.f32 {$w0}, a, c;\n}",
        write_only_types=[Float32],
        read_only_args=[integer],
    )


def _word(integers: list) -> Int32:
    """Eight codes, the first in the lowest bits."""
    word = ieee.bits(integers[7])
    for integer in reversed(integers[:7]):
        word = word * 16 + ieee.bits(integer)
    return word - Int32(SUM_OF_INTEGERS - 2**32 if SUM_OF_INTEGERS >= 2**31 else SUM_OF_INTEGERS)


@cute.jit
def better(magnitudes, first, second, estimate):
    """Whether `second` restores with a smaller squared error than `first`, in fp64 and in the order of `ieee.tree`.

    With `estimate`, fp32 decides where its error cannot matter: it is at most 2^-20 of a sum.
    """
    smaller, sure = Boolean(False), Boolean(False)
    if cutlass.const_expr(estimate):
        difference = ieee.subtract(first.error, second.error)
        smaller = difference > 0.0
        largest = cute.arch.fmax(first.error, second.error)
        enough = ieee.multiply(largest, Float32(ENOUGH))
        sure = (cute.math.abs(difference) > enough) & (largest > Float32(TINY))
    if not sure:
        smaller = _error64(magnitudes, second) < _error64(magnitudes, first)
    return smaller


def _square(x: Float32, restored: Float32) -> Float32:
    difference = ieee.subtract(x, restored)
    return ieee.multiply(difference, difference)


def _error64(magnitudes: list, encoded: Encoded) -> Float64:
    def square(i: int) -> Float64:
        code = encoded.words[i // 8] >> i % 8 * 4 & 7
        return _square64(magnitudes[i], ieee.multiply(_value(ieee.number(code + INTEGERS)), encoded.d))

    return ieee.tree(square, _add64)


def _square64(x: Float32, y: Float32) -> Float64:
    return cute.arch.inline_ptx(
        "{\n.reg .f64 x, y;\ncvt.f64.f32 x, {$r0};\ncvt.f64.f32 y, {$r1};\nsub.rn.f64 x, x, y;\n"
        "mul.rn.f64 {$w0}, x, x;\n}",
        write_only_types=[Float64],
        read_only_args=[x, y],
    )


def _add64(a: Float64, b: Float64) -> Float64:
    return cute.arch.inline_ptx("add.rn.f64 {$w0}, {$r0}, {$r1};", write_only_types=[Float64], read_only_args=[a, b])
