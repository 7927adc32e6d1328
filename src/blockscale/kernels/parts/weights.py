"""Weights in fragment order on their way to the tensor cores of Hopper: a unit from memory, then 16-bit numbers.

formats/fragment.py says where bits are. A code's bits, put into the lowest two bits of the exponent and the highest of
the mantissa, are a number of the activations' type: 2^-126 (bf16) or 2^-14 (fp16) times its value. Scales are made
2^119 or 2^7 times theirs, so that the product of both, exact in either type, is 2^-7 of the weight; `FACTOR` is what
the sums are multiplied by in the end.

What a multiprocessor has least of here are slots for instructions of the integer unit. Shifts to the left are written
as products, which another unit does; a product by a sum of powers of two puts several fields into place at once.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from blockscale.formats.fragment import CODE_BYTES, UNIT_BYTES

FACTOR = 128.0
WORDS = 12  # registers that a unit takes of a thread: 8 of codes, 4 of scales
STEPS = 8  # of 16 k in a unit

_CODE = {
    # Fields as in FIELDS. The last pair: exponent, mantissa and sign are 3, 6 and 5 bits from the right of the byte
    # above bit 8; 1, 2^5 and 2^10 times that puts each where it belongs, among bits that the mask takes away.
    cutlass.BFloat16: """
        and.b32 p0, {$r0}, 0x81C081C0;
        mul.lo.u32 p1, {$r0}, 8;
        and.b32 p1, p1, 0x81C081C0;
        mul.lo.u32 p2, {$r0}, 64;
        and.b32 p2, p2, 0x81C081C0;
        and.b32 p3, {$r0}, 0x6C006C00;
        shr.u32 p3, p3, 8;
        mul.lo.u32 p3, p3, 1057;
        and.b32 p3, p3, 0x81C081C0;
    """,
    cutlass.Float16: """
        mul.lo.u32 s0, {$r0}, 8;
        mul.lo.u32 s1, {$r0}, 64;
        mul.lo.u32 s2, {$r0}, 512;
        and.b32 p0, {$r0}, 0x80008000;
        lop3.b32 p0, s0, 0x0E000E00, p0, 0xEA;
        and.b32 p1, s0, 0x80008000;
        lop3.b32 p1, s1, 0x0E000E00, p1, 0xEA;
        and.b32 p2, s1, 0x80008000;
        lop3.b32 p2, s2, 0x0E000E00, p2, 0xEA;
        mul.lo.u32 s0, {$r0}, 4;
        shr.u32 s1, {$r0}, 5;
        and.b32 p3, s0, 0x80008000;
        lop3.b32 p3, s1, 0x02000200, p3, 0xEA;
        lop3.b32 p3, {$r0}, 0x0C000C00, p3, 0xEA;
    """,
}
_TIMES_SCALE = """
        mov.b32 {lo, hi}, {$r1};
        mov.b32 s0, {lo, lo};
        mov.b32 s1, {hi, hi};
        mul.rn.TYPE {$w0}, p0, s0;
        mul.rn.TYPE {$w1}, p1, s1;
        mul.rn.TYPE {$w2}, p2, s0;
        mul.rn.TYPE {$w3}, p3, s1;
"""
PACKED = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}


@dataclass(frozen=True)
class Weights:
    """(ceil(n / 16), ceil(k / 128)) units; a thread reads its part of one."""

    address: Int64  # of this thread's part of the first unit of the warp's tile of rows
    lane: Int32

    @staticmethod
    def of(pointer: cute.Pointer, tile: Int32, units: Int32, lane: Int32) -> "Weights":
        return Weights(pointer.toint() + Int64(tile) * units * UNIT_BYTES, lane)

    def load(self, registers: Any, unit: Int32, there: Boolean) -> None:
        """Fills `registers` (12 of them), if the unit is there."""
        start = self.address + unit * UNIT_BYTES
        codes, scales = start + self.lane * 16, start + (self.lane // 4 * 16)
        for part, address in enumerate((codes, codes + CODE_BYTES // 2, scales + CODE_BYTES)):
            words = cute.arch.inline_ptx(
                "ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
                write_only_types=[Int32] * 4,
                read_only_args=[address],
                predicate=there,
            )
            for i, word in enumerate(words):
                registers[part * 4 + i] = word


def scale_pairs(word: Any, dtype: Any) -> tuple[Any, Any]:
    """Scales of an even block and of the odd block after it: row g in the low half, row g + 8 in the high half."""
    if dtype is cutlass.BFloat16:
        # The exponent's upper bits are ones; that makes 2^97 of a scale of 0, and adding -2^97 changes no other.
        code = """{ .reg .b32 odd, least;
        mov.b32 least, 0xF000F000;
        shf.l.wrap.b32 odd, {$r0}, {$r0}, 8;
        lop3.b32 {$w0}, {$r0}, 0x0FF00FF0, {$r1}, 0xEA;
        lop3.b32 {$w1}, odd, 0x0FF00FF0, {$r1}, 0xEA;
        add.rn.bf16x2 {$w0}, {$w0}, least;
        add.rn.bf16x2 {$w1}, {$w1}, least; }"""
    else:
        code = """{ .reg .b32 odd;
        shf.l.wrap.b32 odd, {$r0}, {$r0}, 8;
        and.b32 {$w0}, {$r0}, 0x0FF00FF0;
        and.b32 odd, odd, 0x0FF00FF0;
        mul.lo.u32 {$w0}, {$w0}, {$r1};
        mul.lo.u32 {$w1}, odd, {$r1}; }"""
    constant = Int32(0x70007000 if dtype is cutlass.BFloat16 else 8)
    return cute.arch.inline_ptx(code, write_only_types=[Int32] * 2, read_only_args=[word, constant])


def decode(word: Any, scales: Any, dtype: Any) -> tuple[Any, ...]:
    """The four registers of operand A, weights x 2^-7, for a lane's word of a step and its block's `scale_pairs`."""
    code = "{ .reg .b32 p0, p1, p2, p3, s0, s1, s2; .reg .b16 lo, hi;" + _CODE[dtype]
    code += _TIMES_SCALE.replace("TYPE", PACKED[dtype]) + "}"
    return cute.arch.inline_ptx(code, write_only_types=[Int32] * 4, read_only_args=[word, scales])
