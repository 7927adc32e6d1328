"""The layout "fragment": weights in the order in which the tensor cores of Hopper take them, scales among the codes.

Rows are padded to 16 and k to 128. A unit holds 16 rows x 128 k in 1,152 bytes, units follow each other along k:

    1024  codes: for each half of k (64), for each of 32 lanes, a word for each of 4 steps of 16 k
     128  scales: for each of 8 rows g, a word for each of 4 pairs of blocks of 16 k

A lane's word is its operand A of an m16n8k16 product (PTX: mma.m16n8k16, wgmma fragments): lane 4g + t has rows g and
g + 8, and of the step's k 2t, 2t + 1, 2t + 8 and 2t + 9. The 8 codes are 4 pairs, in the order of the registers: (g, low
k), (g + 8, low k), (g, high k), (g + 8, high k). The even k of a pair is in the low half of the word, the odd k in the
high half; `FIELDS` says where in its half a code's bits are. They lie so that three pairs become bf16 numbers by a
shift and a mask, and the fourth by a mask, a shift, a product and a mask.

A scale is recoded from E4M3 to 5 bits of exponent and 3 of mantissa, without subnormals: (1 + m / 8) x 2^(e - 22), and
0 for 0. Put at bits 4 to 11 of a half, it is a bf16 number but for the upper bits of its exponent. The low half of a
word belongs to row g, the high half to row g + 8; the scale of the even block is at these bits, that of the odd block
is there once the word is turned left by 8.

The same number of bytes as rows and blocks need in any layout; unpacking gives back every code and every scale but
the sign of a negative one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

ROWS, DEPTH = 16, 128
UNIT_BYTES = ROWS * DEPTH * 9 // 16
CODE_BYTES = ROWS * DEPTH // 2
# For each pair of a word, where bits 3 (sign), 2, 1 (exponent) and 0 (mantissa) of a code are in a half.
FIELDS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (13, 11, 10, 14))
SCALE_SHIFT = 4
SCALE_TURN = 8


def pack(codes: Tensor, scales: Tensor) -> Tensor:
    """Units of 16 rows x 128 k.

    Args:
        codes: uint8 (N, K / 2), K a multiple of 16, the low nibble of a byte is the even k.
        scales: uint8 (N, K / 16), E4M3 bytes.

    Returns:
        uint8 (N / 16, K / 128, 1152), both rounded up; zeros in what is padded.
    """
    n, blocks = scales.shape
    tiles, units = -(-n // ROWS), -(-blocks * 16 // DEPTH)
    codes = functional.pad(codes, (0, units * DEPTH // 2 - codes.shape[1], 0, tiles * ROWS - n))
    scales = functional.pad(scales, (0, units * DEPTH // 16 - blocks, 0, tiles * ROWS - n))

    # tile, upper row (h), g, unit, half of the unit, step, upper k (u), t: a byte is a pair of codes
    pairs = codes.view(tiles, 2, 8, units, 2, 4, 2, 4).permute(0, 3, 4, 2, 7, 5, 6, 1).to(torch.int32)
    words = torch.zeros(pairs.shape[:-2], dtype=torch.int32, device=codes.device)
    for pair, fields in enumerate(FIELDS):
        byte = pairs[..., pair // 2, pair % 2]
        for bit, place in zip((3, 2, 1, 0), fields, strict=True):
            words |= (byte >> bit & 1) << place | (byte >> bit + 4 & 1) << place + 16

    table = torch.tensor([_recode(byte) for byte in range(256)], dtype=torch.int32, device=codes.device)
    recoded = table[scales.to(torch.int64)]
    # tile, upper row, g, unit, word, odd block
    halves = recoded.view(tiles, 2, 8, units, 4, 2).permute(0, 3, 2, 4, 5, 1) << SCALE_SHIFT
    placed = halves[..., 0] | halves[..., 1] << 16
    scale_words = placed[..., 0] | _turn_left(placed[..., 1], 32 - SCALE_TURN)
    code_bytes = words.contiguous().view(torch.uint8).view(tiles, units, CODE_BYTES)
    scale_bytes = scale_words.contiguous().view(torch.uint8).view(tiles, units, UNIT_BYTES - CODE_BYTES)
    return torch.cat((code_bytes, scale_bytes), dim=-1)


def unpack(packed: Tensor, n: int, blocks: int) -> tuple[Tensor, Tensor]:
    """The codes, uint8 (n, 8 x blocks), and the scales, uint8 (n, blocks), that `pack` was given."""
    tiles, units, _ = packed.shape
    words = packed[..., :CODE_BYTES].contiguous().view(torch.int32).view(tiles, units, 2, 8, 4, 4)
    pairs = []
    for fields in FIELDS:
        byte = torch.zeros_like(words)
        for bit, place in zip((3, 2, 1, 0), fields, strict=True):
            byte |= (words >> place & 1) << bit | (words >> place + 16 & 1) << bit + 4
        pairs.append(byte)
    # tile, unit, half, g, t, step, upper k, upper row -> tile, upper row, g, unit, half, step, upper k, t
    stacked = torch.stack(pairs, dim=-1).view(tiles, units, 2, 8, 4, 4, 2, 2)
    codes = stacked.permute(0, 7, 3, 1, 2, 5, 6, 4).to(torch.uint8).reshape(tiles * ROWS, units * DEPTH // 2)

    scale_words = packed[..., CODE_BYTES:].contiguous().view(torch.int32).view(tiles, units, 8, 4)
    both = torch.stack((scale_words, _turn_left(scale_words, SCALE_TURN)), dim=-1) >> SCALE_SHIFT
    halves = torch.stack((both & 0xFF, both >> 16 & 0xFF), dim=-1)  # tile, unit, g, word, odd block, upper row
    back = torch.zeros(256, dtype=torch.uint8, device=packed.device)
    for byte in range(128):
        back[_recode(byte)] = byte
    recoded = halves.permute(0, 5, 2, 1, 3, 4).reshape(tiles * ROWS, units * DEPTH // 16)
    return codes[:n, : 8 * blocks].contiguous(), back[recoded.to(torch.int64)][:n, :blocks].contiguous()


def _recode(byte: int) -> int:
    """5 bits of exponent and 3 of mantissa for an E4M3 byte, whose sign is ignored."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    if exponent == 0:
        if mantissa == 0:
            return 0
        leading = mantissa.bit_length() - 1
        exponent, mantissa = leading - 2, (mantissa << 3 - leading) & 7
    return exponent + 15 << 3 | mantissa


def _turn_left(words: Tensor, bits: int) -> Tensor:
    """int32 words rotated to the left."""
    return words << bits | words >> 32 - bits & (1 << bits) - 1
