"""fp32 arithmetic to the letter: every operation rounded to nearest even, subnormals kept, nothing contracted.

Written out in PTX, since a compiler may make one rounding of a product and a sum, and then bits differ from a CPU's.
"""

from dataclasses import dataclass

import numpy as np
from cutlass import Float32, Int32, cute


def _asm(text: str, kind: type, *arguments):
    return cute.arch.inline_ptx(text, write_only_types=[kind], read_only_args=list(arguments))


def add(a: Float32, b: Float32) -> Float32:
    return _asm("add.rn.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def subtract(a: Float32, b: Float32) -> Float32:
    return _asm("sub.rn.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def multiply(a: Float32, b: Float32) -> Float32:
    return _asm("mul.rn.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def divide(a: Float32, b: Float32) -> Float32:
    return _asm("div.rn.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def root(a: Float32) -> Float32:
    return _asm("sqrt.rn.f32 {$w0}, {$r0};", Float32, a)


def tree(leaf, plus=add, first: int = 0, apart: int = 1, count: int = 16):
    """leaf(0) + ... + leaf(count - 1): those count / 2 apart first, then sums count / 4 apart, until one is left.

    Depth first, so that few are alive at a time.
    """
    if apart == count:
        return leaf(first)
    low = tree(leaf, plus, first, 2 * apart, count)
    return plus(low, tree(leaf, plus, first + apart, 2 * apart, count))


@dataclass(frozen=True)
class Quotients:
    """x / d by division: for every x and d."""

    d: Float32

    def of(self, x: Float32) -> Float32:
        return divide(x, self.d)


@dataclass(frozen=True)
class FastQuotients:
    """x / d, the same number as division rounds it to, by four instructions without a branch.

    With y the nearest number to 1 / d and q within a unit in the last place of x / d, the remainder x - q d is a number
    and q + (x - q d) y, rounded once, is the nearest to x / d (Markstein 1990; Muller et al., Handbook of
    Floating-Point Arithmetic, 4.7). y alone would leave q one and a half units off, hence `rest`, what 1 / d is beyond
    y, to 46 bits. No step may leave the range of normal numbers: d has to lie in 2^-60 to 2^60, x to be at most 2^60
    and the quotient at least 1/8; of less it is right that it is less.
    """

    negative: Float32  # -d
    near: Float32  # y
    rest: Float32

    @staticmethod
    def by(d: Float32) -> "FastQuotients":
        numbers = cute.arch.inline_ptx(
            # Results last: a compiler may give one the register of `d`.
            "{\n.reg .f32 n, y, r;\nneg.f32 n, {$r0};\nrcp.rn.f32 y, {$r0};\nfma.rn.f32 r, n, y, 0f3F800000;\n"
            "mul.rn.f32 {$w2}, r, y;\nmov.f32 {$w1}, y;\nmov.f32 {$w0}, n;\n}",
            write_only_types=[Float32] * 3,
            read_only_args=[d],
        )
        return FastQuotients(*numbers)

    @staticmethod
    def by_constant(d: float) -> "FastQuotients":
        near = np.float32(1 / d)
        rest = np.float32(np.float32(1 - d * float(near)) * near)
        return FastQuotients(Float32(-d), Float32(float(near)), Float32(float(rest)))

    def of(self, x: Float32) -> Float32:
        return _asm(
            "{\n.reg .f32 q, r;\n"
            "mul.rn.f32 q, {$r0}, {$r3};\nfma.rn.f32 q, {$r0}, {$r2}, q;\n"
            "fma.rn.f32 r, q, {$r1}, {$r0};\nfma.rn.f32 {$w0}, r, {$r2}, q;\n}",
            Float32,
            x,
            self.negative,
            self.near,
            self.rest,
        )


@dataclass(frozen=True)
class ShortQuotients:
    """x / d for an x of at most 11 significant bits: not to the last bit, but on the right side of every boundary.

    With y near 1 / d and `rest` = (1 - d y) y + 2^-43 y, x y + x rest is above x / d by a 2^-44th to a 2^-42nd of it
    before it is rounded, so it is rounded to another number than x / d only where the middle between two numbers is in
    between. At the middles next to 1/4, 3/4, ... 5, and next to those between two scales, there is no fp32 number d for
    which it is (tests/blockscale/quantise/test_quantise_quotients.py goes through all of them). d as for
    `FastQuotients`.
    """

    near: Float32  # y
    rest: Float32

    @staticmethod
    def by(d: Float32) -> "ShortQuotients":
        numbers = cute.arch.inline_ptx(
            "{\n.reg .f32 n, y, e, more;\nneg.f32 n, {$r0};\nrcp.approx.ftz.f32 y, {$r0};\n"
            "fma.rn.f32 e, n, y, 0f3F800000;\nmul.rn.f32 more, y, 0f2A000000;\n"
            "fma.rn.f32 {$w1}, e, y, more;\nmov.f32 {$w0}, y;\n}",
            write_only_types=[Float32] * 2,
            read_only_args=[d],
        )
        return ShortQuotients(*numbers)

    @staticmethod
    def by_constant(d: float) -> "ShortQuotients":
        near = np.float32(1 / d)
        return ShortQuotients(Float32(float(near)), Float32(float(np.float32(1 / d - float(near)))))

    def of(self, x: Float32) -> Float32:
        return _asm(
            "{\n.reg .f32 q;\nmul.rn.f32 q, {$r0}, {$r2};\nfma.rn.f32 {$w0}, {$r0}, {$r1}, q;\n}",
            Float32,
            x,
            self.near,
            self.rest,
        )


def bits(x: Float32) -> Int32:
    return x.bitcast(Int32)


def number(x: Int32) -> Float32:
    return x.bitcast(Float32)
