"""Blocks of 16 consecutive numbers of a row: from global memory to registers, and what a quantiser asks of them."""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute

from blockscale.kernels.parts import ieee

BLOCK = 16
DTYPES = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16, "fp32": cutlass.Float32}
INFINITE = 0x7F800000  # bits; NaNs are larger
MAGNITUDE = 0x7FFFFFFF
_PAIR = 0x7FFF7FFF

_VECTOR = (
    "{\n.reg .pred there;\nsetp.ne.b32 there, {$r1}, 0;\n"
    "mov.b32 {$w0}, 0;\nmov.b32 {$w1}, 0;\nmov.b32 {$w2}, 0;\nmov.b32 {$w3}, 0;\n"
    "@there ld.global.nc.L2::256B.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];\n}"
)
_WORD = (
    "{\n.reg .pred there;\nsetp.gt.s32 there, {$r1}, 0;\nmov.b32 {$w0}, 0;\n@there ld.global.nc.b32 {$w0}, [{$r0}];\n}"
)
_HALVES = (
    "{\n.reg .pred one, two;\n.reg .b16 low, high;\nsetp.gt.s32 one, {$r1}, 0;\nsetp.gt.s32 two, {$r1}, 1;\n"
    "mov.b16 low, 0;\nmov.b16 high, 0;\n@one ld.global.nc.b16 low, [{$r0}];\n"
    "@two ld.global.nc.b16 high, [{$r0} + 2];\nmov.b32 {$w0}, {low, high};\n}"
)


@dataclass(frozen=True)
class Loader:
    """Rows of one dtype.

    Attributes:
        vectors: rows begin at multiples of 16 bytes and are as long, so that 16 bytes are there or not; otherwise
            numbers are loaded one by one.
    """

    dtype: str
    vectors: bool

    @property
    def bytes(self) -> int:
        """Of a number."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def words(self) -> int:
        """Registers that a block takes."""
        return BLOCK * self.bytes // 4

    def load(self, rWords, address: Int64, left: Int32) -> None:
        """16 numbers from this address on; 0 for those from the `left`-th on."""
        if self.vectors:
            numbers = 16 // self.bytes
            for i in range(self.words // 4):
                loaded = cute.arch.inline_ptx(
                    _VECTOR,
                    write_only_types=[Int32] * 4,
                    read_only_args=[address + 16 * i, Int32(left > numbers * i)],
                )
                for j, word in enumerate(loaded):
                    rWords[4 * i + j] = word
        else:
            numbers = 4 // self.bytes
            for i in range(self.words):
                rWords[i] = cute.arch.inline_ptx(
                    _WORD if numbers == 1 else _HALVES,
                    write_only_types=[Int32],
                    read_only_args=[address + 4 * i, left - numbers * i],
                )

    def values(self, words: list) -> list:
        """The 16 numbers as fp32."""
        if self.dtype == "fp32":
            return [ieee.number(word) for word in words]
        return [value for word in words for value in self._pair(word)]

    def _pair(self, word: Int32) -> tuple[Float32, Float32]:
        if self.dtype == "bf16":
            return ieee.number(word << 16), ieee.number(word & Int32(-65536))
        return cute.arch.inline_ptx(
            "{\n.reg .b16 low, high;\nmov.b32 {low, high}, {$r0};\n"
            "cvt.f32.f16 {$w0}, low;\ncvt.f32.f16 {$w1}, high;\n}",
            write_only_types=[Float32] * 2,
            read_only_args=[word],
        )

    def block(self, words: list) -> "Block":
        if self.dtype == "fp32":
            return Block.of(words)
        largest = words
        while len(largest) > 1:
            largest = [self._larger(a, b) for a, b in zip(largest[::2], largest[1::2], strict=True)]
        both = largest[0] & Int32(_PAIR)
        amax = ieee.bits(self._pair(cutlass.max(both >> 16, both & 0xFFFF))[0])
        return Block(self.values(words), [_signs_of_pairs(words[i : i + 4]) for i in (0, 4)], amax)

    def _larger(self, a: Int32, b: Int32) -> Int32:
        """Of two pairs the larger magnitudes, whatever their signs; NaN is the largest."""
        kind = "bf16x2" if self.dtype == "bf16" else "f16x2"
        text = f"max.NaN.xorsign.abs.{kind} {{$w0}}, {{$r0}}, {{$r1}};"
        return cute.arch.inline_ptx(text, write_only_types=[Int32], read_only_args=[a, b])


@dataclass(frozen=True)
class Block:
    """
    Attributes:
        values: 16, fp32. signs: two words, each the signs of eight codes.
        amax: bits of the largest magnitude, NaN and infinity included.
    """

    values: list
    signs: list
    amax: Int32

    @staticmethod
    def of(words: list) -> "Block":
        """From the bits of 16 fp32 numbers."""
        amax = words[0] & Int32(MAGNITUDE)
        for word in words[1:]:
            amax = cutlass.max(amax, word & Int32(MAGNITUDE))
        signs = [_signs(words[i : i + 8]) for i in (0, 8)]
        return Block([ieee.number(word) for word in words], signs, amax)

    def finite(self, limit: Float32) -> "Block":
        """Magnitudes, NaN as 0 and infinity as `limit`; finite numbers stay, beyond it too."""
        words = [ieee.bits(x) & Int32(MAGNITUDE) for x in self.values]
        most = ieee.bits(limit)
        bounded = [
            Int32(cutlass.select_(word > INFINITE, Int32(0), Int32(cutlass.select_(word == INFINITE, most, word))))
            for word in words
        ]
        kept = [Int32(cutlass.select_(word > INFINITE, Int32(0), Int32(-1))) for word in words]
        signs = []
        for i, word in enumerate(self.signs):
            for j in range(8):
                place = 8 << 4 * j
                place = Int32(place - 2**32 if place >= 2**31 else place)
                word = word & (kept[8 * i + j] | ~place)
            signs.append(word)
        amax = bounded[0]
        for word in bounded[1:]:
            amax = cutlass.max(amax, word)
        return Block([ieee.number(word) for word in bounded], signs, amax)

    def finite_amax(self) -> Int32:
        """Bits of the largest magnitude, NaN and infinity apart."""
        amax = Int32(0)
        for x in self.values:
            word = ieee.bits(x) & Int32(MAGNITUDE)
            amax = cutlass.max(amax, Int32(cutlass.select_(word >= INFINITE, Int32(0), word)))
        return amax


def _signs(words: list) -> Int32:
    """Of eight fp32 numbers, each where its code has it: the highest bit of four."""
    even, odd = (
        _permute(_permute(w[0], w[2], 0x73), _permute(w[4], w[6], 0x73), 0x5410) for w in (words, words[1:] + words[:1])
    )
    return _placed(even, odd)


def _signs_of_pairs(words: list) -> Int32:
    """Of eight 16-bit numbers in four words."""
    low, high = (_permute(words[i], words[i + 1], 0x7531) for i in (0, 2))
    return _placed(_permute(low, high, 0x6420), _permute(low, high, 0x7531))


def _placed(even: Int32, odd: Int32) -> Int32:
    """From four numbers with even index, their uppermost bytes, and four with odd index."""
    return cute.arch.inline_ptx(
        "{\n.reg .b32 low;\nshr.u32 low, {$r0}, 4;\nand.b32 low, low, 0x08080808;\n"
        "lop3.b32 {$w0}, {$r1}, 0x80808080, low, 0xEA;\n}",
        write_only_types=[Int32],
        read_only_args=[even, odd],
    )


def _permute(a: Int32, b: Int32, places: int) -> Int32:
    return cute.arch.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {places};", write_only_types=[Int32], read_only_args=[a, b]
    )
