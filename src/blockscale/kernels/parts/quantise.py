"""From fp32 to NVFP4 with a given global scale, with the bits of `blockscale.quantize` (docs/format.md).

Every step is IEEE fp32, round to nearest even, subnormals kept; quotients are quotients (div.rn), not products with a
reciprocal, which would round differently.
"""

import cutlass
from cutlass import Float32, Int32, cute

BLOCK = 16
LARGEST = float.fromhex("0x1.fffffep127")


def divide(a: Float32, b: Float32) -> Float32:
    return _asm("div.rn.f32 {$w0}, {$r0}, {$r1};", Float32, a, b)


def sixth(a: Float32) -> Float32:
    return _asm("div.rn.f32 {$w0}, {$r0}, 0f40C00000;", Float32, a)


def finite(x: Float32) -> Float32:
    """0 for NaN, and for an infinity the largest number, which saturates like everything beyond 2688 x unit."""
    bounded = cute.arch.fmin(cute.arch.fmax(x, -LARGEST), LARGEST)
    return Float32(cutlass.select_(x == x, bounded, Float32(0.0)))


def encode(values: list[Float32], unit: Float32) -> tuple[list[Int32], Int32]:
    """Codes, eight a word, and the scales, a byte each from the lowest on, of two or four blocks of 16.

    Args:
        values: 32 or 64. unit: the global scale, at least 2^-126.
    """
    words: list[Int32] = []
    scales = Int32(0)
    for i in range(0, len(values), 2 * BLOCK):
        pair = values[i : i + BLOCK], values[i + BLOCK : i + 2 * BLOCK]
        both, *decoded = _scales(*(divide(sixth(largest(block)), unit) for block in pair))
        scales = scales | both << 16 * (i // (2 * BLOCK))
        for block, s in zip(pair, decoded, strict=True):
            words += _codes(block, s, unit)
    return words, scales


def largest(block: list[Float32]) -> Float32:
    """The largest magnitude of 16: three at a time."""
    amax = _largest(*block[:3])
    for i in range(3, BLOCK, 2):
        amax = _largest(amax, block[i], block[min(i + 1, BLOCK - 1)])
    return amax


def magnitude(a: Float32, b: Float32) -> Float32:
    """The larger of two."""
    return _largest(a, b, b)


def _largest(a: Float32, b: Float32, c: Float32) -> Float32:
    return _asm("max.abs.f32 {$w0}, {$r0}, {$r1}, {$r2};", Float32, a, b, c)


def encode_part(part: list[Float32], amax: Float32, unit: Float32) -> tuple[Int32, Int32]:
    """The codes of 4 numbers of a block, in the low half of a word and again in the high one, and the block's scale.

    Args:
        amax: the largest magnitude of the block. unit: as for `encode`.
    """
    quotient = divide(sixth(amax), unit)
    both, scale, _ = _scales(quotient, quotient)
    return _codes([*part, *part], scale, unit)[0], both & 0xFF


def _scales(low: Float32, high: Float32) -> tuple[Int32, Float32, Float32]:
    """Two numbers as E4M3, two bytes of a word, and the two values that they stand for. At most 448 each."""
    bytes_ = _asm(
        "{\n.reg .b16 pair;\n.reg .f32 low, high;\nmin.f32 low, {$r0}, 0f43E00000;\nmin.f32 high, {$r1}, 0f43E00000;\n"
        "cvt.rn.satfinite.e4m3x2.f32 pair, high, low;\ncvt.u32.u16 {$w0}, pair;\n}",
        Int32,
        low,
        high,
    )
    halves = _asm("{\n.reg .b16 pair;\ncvt.u16.u32 pair, {$r0};\ncvt.rn.f16x2.e4m3x2 {$w0}, pair;\n}", Int32, bytes_)
    values = (
        _asm(
            f"{{\n.reg .b16 low, high;\nmov.b32 {{low, high}}, {{$r0}};\ncvt.f32.f16 {{$w0}}, {half};\n}}",
            Float32,
            halves,
        )
        for half in ("low", "high")
    )
    return bytes_, *values


def _codes(block: list[Float32], scale: Float32, unit: Float32) -> list[Int32]:
    """The block's codes, or those of 8 of its numbers, eight a word; all 0 where the scale is."""
    d = scale * unit
    nothing = scale == 0.0
    words = []
    for i in range(0, len(block), 8):
        quotients = [divide(x, d) for x in block[i : i + 8]]
        word = _asm(
            "{\n.reg .b8 byte<4>;\n"
            + "".join(f"cvt.rn.satfinite.e2m1x2.f32 byte{j}, {{$r{2 * j + 1}}}, {{$r{2 * j}}};\n" for j in range(4))
            + "mov.b32 {$w0}, {byte0, byte1, byte2, byte3};\n}",
            Int32,
            *quotients,
        )
        words.append(Int32(cutlass.select_(nothing, Int32(0), word)))
    return words


def _asm(text: str, kind: type, *arguments: Float32 | Int32):
    return cute.arch.inline_ptx(
        text, write_only_types=[kind], read_only_args=[argument.bitcast(Int32) for argument in arguments]
    )
