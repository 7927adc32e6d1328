"""Weights in fragment order on their way to the tensor cores of Hopper: a unit from memory, then 16-bit numbers.

formats/fragment.py says where bits are. A code's bits, put into the lowest two bits of the exponent and the highest of
the mantissa, are a number of the activations' type: 2^-126 (bf16) or 2^-14 (fp16) times its value. Scales are made
2^119 or 2^7 times theirs, so that the product of both, exact in either type, is 2^-7 of the weight; `FACTOR` is what
the sums are multiplied by in the end.

What a multiprocessor has least of here are slots for instructions of the integer unit. Shifts to the left are written
as products, which another unit does; a product by a sum of powers of two puts several fields into place at once.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from blockscale.formats.fragment import CODE_BYTES, DEPTH, UNIT_BYTES
from blockscale.kernels.parts import async_copies

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


CHAIN_K = 4096  # see `chain`
CHAIN_LOSS = {cutlass.BFloat16: 6, cutlass.Float16: 7}
SINGLE = 2  # units that may be one chain


def chain(k: Int32, count: Int32, dtype: Any) -> Int32:
    """Units whose products the tensor core may add to the same sums: chains of equal length, of which `count` units
    are made.

    Of positive sums over 1,024 k in several chains it loses up to 5 x 2^-20 in bf16 and a quarter more in fp16
    (benchmarks/records/hopper-errors.json), where the contract allows 4 and 1 more for each 1,024 k. The worst of all
    are sums that have a single short chain.
    """
    most = (CHAIN_K + k) // (CHAIN_LOSS[dtype] * DEPTH)
    chains = cutlass.max(cute.ceil_div(count, most), cutlass.select_(count > SINGLE, Int32(2), Int32(1)))
    return cute.ceil_div(count, chains)


class Slots:
    """A warp's own slots in shared memory for units of its tile, one more than it has in flight.

    Its lanes copy and read; nobody else waits. A group of copies is a unit. A slot is filled again a turn after it was
    read, when all lanes have read it. Units are taken in a circle, so that not every CTA reads the same activations at
    the same time.

    Args:
        slots: of UNIT_BYTES each. stride: from one unit of the warp to the next.
        first: address of the first slot. read, write: of the slots that are read and filled next.
        units: address of the unit 0 of the circle. count: its length.
        place: of the next unit to ask for. end: of the last one, and 1.
    """

    def __init__(
        self,
        slots: int,
        stride: int,
        first: Int32,
        read: Int32,
        write: Int32,
        units: Int64,
        count: Int32,
        place: Int32,
        end: Int32,
    ) -> None:
        self.slots, self.stride, self.first, self.read, self.write = slots, stride, first, read, write
        self.units, self.count, self.place, self.end = units, count, place, end

    @staticmethod
    def of(slots: int, stride: int, first: Int32, units: Int64, count: Int32, start: Int32, offset: Int32) -> "Slots":
        """Every stride-th unit of a circle that begins at place `start`, from the one `offset` later on."""
        return Slots(slots, stride, first, first, first, units, count, start + offset, start + count)

    def ask(self, lane: Int32) -> "Slots":
        """Asks for the next unit; beyond the last one the group is empty."""
        there = self.place < self.end
        unit = cutlass.select_(self.place >= self.count, self.place - self.count, self.place)
        at = self.units + unit * UNIT_BYTES
        source, target = at + lane * 16, self.write + lane * 16
        async_copies.copy_16(target, source, there)
        async_copies.copy_16(target + CODE_BYTES // 2, source + CODE_BYTES // 2, there)
        part = CODE_BYTES + lane // 4 * 16
        async_copies.copy_16(self.write + part, at + part, there & (lane % 4 == 0))
        async_copies.commit()
        return self._at(self.read, self._next(self.write), self.place + self.stride)

    def take(self, lane: Int32) -> tuple[list[Any], "Slots"]:
        """The lane's 12 words of the next unit, and the slots afterwards, with one more unit asked for."""
        async_copies.wait(self.slots - 2)
        cute.arch.sync_warp()
        asked = self.ask(lane)
        parts = self.read + lane * 16, self.read + lane * 16 + CODE_BYTES // 2, self.read + lane // 4 * 16 + CODE_BYTES
        words = [word for part in parts for word in async_copies.load_16(part)]
        return words, asked._at(self._next(self.read), asked.write, asked.place)

    def _next(self, slot: Int32) -> Int32:
        after = slot + UNIT_BYTES
        return cutlass.select_(after == self.first + self.slots * UNIT_BYTES, self.first, after)

    def _at(self, read: Int32, write: Int32, place: Int32) -> "Slots":
        return Slots(self.slots, self.stride, self.first, read, write, self.units, self.count, place, self.end)

    # A dynamic loop carries the numbers.
    def __extract_mlir_values__(self) -> list[Any]:
        numbers = self.first, self.read, self.write, self.units, self.count, self.place, self.end
        return [number.ir_value() for number in numbers]

    def __new_from_mlir_values__(self, values: list[Any]) -> "Slots":
        first, read, write, units, *rest = values
        return Slots(self.slots, self.stride, Int32(first), Int32(read), Int32(write), Int64(units), *map(Int32, rest))


class Stream:
    """A warp's units of one tile of rows, every stride-th of them, on their way to its registers.

    Args:
        stride: from one unit of the warp to the next.
        codes, scales: addresses of this lane's part of the next unit.
        left: units of the tile from the next one on; none if not positive.
    """

    def __init__(self, stride: int, codes: Int64, scales: Int64, left: Int32) -> None:
        self.stride, self.codes, self.scales, self.left = stride, codes, scales, left

    @staticmethod
    def of(tile: Int64, lane: Int32, first: Int32, units: Int32, stride: int) -> "Stream":
        """From the `first` of the units on, which begin at address `tile`."""
        at = tile + Int64(first) * UNIT_BYTES
        return Stream(stride, at + lane * 16, at + CODE_BYTES + lane // 4 * 16, units - first)

    def load(self, registers: Any) -> "Stream":
        """Asks for the next unit, if there is one: 8 words of codes and 4 of scales."""
        for part, address in enumerate((self.codes, self.codes + CODE_BYTES // 2, self.scales)):
            for i, word in enumerate(async_copies.load_once_16(address, self.left > 0)):
                registers[part * 4 + i] = word
        step = self.stride * UNIT_BYTES
        return Stream(self.stride, self.codes + step, self.scales + step, self.left - self.stride)

    # A dynamic loop carries the numbers.
    def __extract_mlir_values__(self) -> list[Any]:
        return [number.ir_value() for number in (self.codes, self.scales, self.left)]

    def __new_from_mlir_values__(self, values: list[Any]) -> "Stream":
        return Stream(self.stride, Int64(values[0]), Int64(values[1]), Int32(values[2]))


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
