"""The layout "fragment": weights in the order in which the tensor cores of Hopper take them, scales among the codes.

Rows are padded to 16 and k to 128. A unit holds 16 rows x 128 k in 1,152 bytes, units follow each other along k:

    1024  codes: for each half of k (64), for each of 32 lanes, a word for each of 4 steps of 16 k
     128  scales: for each of 8 rows g, a word for each of 4 pairs of blocks of 16 k

A lane's word is its operand A of an m16n8k16 product (PTX: mma.m16n8k16, wgmma fragments): lane 4g + t has rows g and
g + 8, and of the step's k 2t, 2t + 1, 2t + 8 and 2t + 9. The 8 codes are 4 pairs, in the order of the registers: (g,
low k), (g + 8, low k), (g, high k), (g + 8, high k). The even k of a pair is in the low half of the word, the odd k in
the high half; `FIELDS` says where in its half a code's bits are. They lie so that three pairs become bf16 numbers by a
shift and a mask, and the fourth by a mask, a shift, a product and a mask.

A scale is recoded from E4M3 to 5 bits of exponent and 3 of mantissa, without subnormals: (1 + m / 8) x 2^(e - 22), and
0 for 0. NaN, which no valid tensor has, is e = 31 and m = 7, and NaN for kernels too. Put at bits 4 to 11 of a half, it
is a bf16 number but for the upper bits of its exponent. The low half of a word belongs to row g, the high half to row
g + 8; the scale of the even block is at these bits, that of the odd block is there once the word is turned left by 8.

But for the padding it takes as many bytes as any layout; unpacking gives back every code and every scale. Nothing
here looks at a value or copies from the host, so that both ways can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from blockscale.formats.layouts import BLOCK

ROWS, DEPTH = 16, 128
UNIT_BYTES = ROWS * DEPTH * 9 // 16
CODE_BYTES = ROWS * DEPTH // 2
# For each pair of a word, where bits 3 (sign), 2, 1 (exponent) and 0 (mantissa) of a code are in a half.
FIELDS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (13, 11, 10, 14))
NAN = 0xFF  # of a recoded scale
SCALE_SHIFT = 4
SCALE_TURN = 8
_PIECE = 1 << 23  # codes that are turned at a time: bounds what is held beside operand and result


def shape(batch: Sequence[int], n: int, blocks: int) -> tuple[int, ...]:
    """The shape of the units of (..., n) rows of `blocks` blocks: (..., ceil(n / 16), ceil(blocks / 8), 1152)."""
    return (*batch, -(-n // ROWS), -(-blocks * BLOCK // DEPTH), UNIT_BYTES)


def pack(codes: Tensor, scales: Tensor) -> Tensor:
    """Units of 16 rows x 128 k.

    Args:
        codes: uint8 (..., N, K / 2), K a multiple of 16, the low nibble of a byte is the even k.
        scales: uint8 (..., N, K / 16), E4M3 bytes without a sign.

    Returns:
        uint8 (..., ceil(N / 16), ceil(K / 128), 1152); zeros in what is padded.
    """
    *batch, n, blocks = scales.shape
    out = torch.empty(shape(batch, n, blocks), dtype=torch.uint8, device=codes.device)
    units = out.shape[-2]
    tiles = math.prod(out.shape[:-2])
    flat = out.view(tiles, units, UNIT_BYTES)
    rows, of_rows = (
        functional.pad(t, (0, width - t.shape[-1], 0, -n % ROWS)).view(tiles, ROWS, width)
        for t, width in ((codes, units * DEPTH // 2), (scales, units * DEPTH // BLOCK))
    )
    for piece in _pieces(flat):
        flat[piece, :, :CODE_BYTES] = _code_words(rows[piece]).view(torch.uint8).view(-1, units, CODE_BYTES)
        scale_words = _scale_words(of_rows[piece]).view(torch.uint8)
        flat[piece, :, CODE_BYTES:] = scale_words.view(-1, units, UNIT_BYTES - CODE_BYTES)
    return out


def unpack(packed: Tensor, n: int, blocks: int) -> tuple[Tensor, Tensor]:
    """The codes, uint8 (..., n, 8 x blocks), and the scales, uint8 (..., n, blocks), that `pack` was given."""
    *batch, tiles, units, _ = packed.shape
    flat = packed.reshape(math.prod(packed.shape[:-2]), units, UNIT_BYTES)
    codes = torch.empty(len(flat), ROWS, units * DEPTH // 2, dtype=torch.uint8, device=packed.device)
    scales = torch.empty(len(flat), ROWS, units * DEPTH // BLOCK, dtype=torch.uint8, device=packed.device)
    for piece in _pieces(flat):
        codes[piece] = _codes(flat[piece, :, :CODE_BYTES].contiguous().view(torch.int32))
        scales[piece] = _scales(flat[piece, :, CODE_BYTES:].contiguous().view(torch.int32))
    codes, scales = (t.view(*batch, tiles * ROWS, t.shape[-1]) for t in (codes, scales))
    return codes[..., :n, : BLOCK // 2 * blocks].contiguous(), scales[..., :n, :blocks].contiguous()


def _pieces(flat: Tensor) -> Iterator[slice]:
    """Cuts of the tiles, a few at a time."""
    step = max(1, _PIECE // max(1, flat.shape[1] * ROWS * DEPTH))
    return (slice(start, start + step) for start in range(0, len(flat), step))


def _code_words(rows: Tensor) -> Tensor:
    """int32 words in the order of the units, from uint8 (tiles, 16, K / 2)."""
    tiles, units = len(rows), rows.shape[-1] * 2 // DEPTH
    # tile, upper row, g, unit, half of the unit, step, upper k, t -> tile, unit, half, g, t, step, upper k, upper row
    pairs = rows.view(tiles, 2, 8, units, 2, 4, 2, 4).permute(0, 3, 4, 2, 7, 5, 6, 1)
    words = torch.zeros(pairs.shape[:-2], dtype=torch.int32, device=rows.device)
    every = torch.arange(256, dtype=torch.int32, device=rows.device)
    for pair, fields in enumerate(FIELDS):
        words |= _spread(every, fields)[pairs[..., pair // 2, pair % 2].to(torch.int64)]
    return words


def _spread(byte: Tensor, fields: tuple[int, ...]) -> Tensor:
    """The bits of a pair of codes in a word."""
    word = torch.zeros_like(byte)
    for bit, place in zip((3, 2, 1, 0), fields, strict=True):
        word |= (byte >> bit & 1) << place | (byte >> bit + 4 & 1) << place + 16
    return word


def _codes(words: Tensor) -> Tensor:
    """uint8 (tiles, 16, K / 2), from int32 (tiles, units, 256)."""
    tiles, units, _ = words.shape
    pairs = []
    for fields in FIELDS:
        byte = torch.zeros_like(words)
        for bit, place in zip((3, 2, 1, 0), fields, strict=True):
            byte |= (words >> place & 1) << bit | (words >> place + 16 & 1) << bit + 4
        pairs.append(byte.to(torch.uint8))
    # tile, unit, half, g, t, step, upper k, upper row -> tile, upper row, g, unit, half, step, upper k, t
    stacked = torch.stack(pairs, dim=-1).view(tiles, units, 2, 8, 4, 4, 2, 2).permute(0, 7, 3, 1, 2, 5, 6, 4)
    return stacked.reshape(tiles, ROWS, units * DEPTH // 2)


def _scale_words(scales: Tensor) -> Tensor:
    """int32 words in the order of the units, from uint8 (tiles, 16, K / 16)."""
    tiles, units = len(scales), scales.shape[-1] * BLOCK // DEPTH
    # tile, upper row, g, unit, word, odd block -> tile, unit, g, word, odd block, upper row
    halves = _recode(scales).view(tiles, 2, 8, units, 4, 2).permute(0, 3, 2, 4, 5, 1) << SCALE_SHIFT
    placed = halves[..., 0] | halves[..., 1] << 16
    return (placed[..., 0] | _turn_left(placed[..., 1], 32 - SCALE_TURN)).contiguous()


def _scales(words: Tensor) -> Tensor:
    """uint8 (tiles, 16, K / 16), from int32 (tiles, units, 32)."""
    tiles, units, _ = words.shape
    turned = words.view(tiles, units, 8, 4)
    both = torch.stack((turned, _turn_left(turned, SCALE_TURN)), dim=-1) >> SCALE_SHIFT
    halves = torch.stack((both & 0xFF, both >> 16 & 0xFF), dim=-1)  # tile, unit, g, word, odd block, upper row
    return _restore(halves.permute(0, 5, 2, 1, 3, 4).reshape(tiles, ROWS, units * DEPTH // BLOCK))


def _recode(scales: Tensor) -> Tensor:
    """int32, 5 bits of exponent and 3 of mantissa, from E4M3 bytes; their sign is lost."""
    exponent, mantissa = (scales >> 3 & 15).to(torch.int32), (scales & 7).to(torch.int32)
    leading = (mantissa >= 2).to(torch.int32) + (mantissa >= 4)  # place of a subnormal's leading bit
    normal = exponent + 15 << 3 | mantissa
    subnormal = leading + 13 << 3 | mantissa << 3 - leading & 7
    recoded = torch.where(exponent > 0, normal, torch.where(mantissa > 0, subnormal, 0))
    return torch.where(scales & 127 == 127, NAN, recoded)


def _restore(recoded: Tensor) -> Tensor:
    """E4M3 bytes, uint8, from what `_recode` made of them."""
    exponent, mantissa = (recoded >> 3) - 15, recoded & 7
    subnormal = (mantissa | 8) >> (1 - exponent).clamp(0, 31)
    restored = torch.where(exponent > 0, exponent << 3 | mantissa, subnormal)
    return torch.where(exponent > 15, 127, restored).to(torch.uint8)  # those that are no number of a kernel's


def _turn_left(words: Tensor, bits: int) -> Tensor:
    """int32 words rotated to the left."""
    return words << bits | words >> 32 - bits & (1 << bits) - 1
