"""E2M1: 4-bit floating point, codes 0..15 = sign, two exponent bits, one mantissa bit.

Source: OCP Microscaling Formats specification 1.0, section 5.3.3; PTX ISA, "Alternate floating-point data formats".
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX = 6.0
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = MAGNITUDES + tuple(-v for v in MAGNITUDES)

_SIGN = 8
_F32_ONE = 0x3F800000
_F32_EXPONENT = 0x7F800000
_F32_SIX = 0x40C00000
_F32_MANTISSA_BITS = 23


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of `codes` (uint8, each 0..15, any shape), exact in every floating dtype; code 8 gives -0.0."""
    return torch.tensor(VALUES, dtype=dtype, device=codes.device)[codes.long()]


def encode(x: Tensor) -> Tensor:
    """Nearest code (uint8) of each value of `x` (fp32), ties to the even code, saturating at ±6.

    The sign is kept, so -0.0 and small negatives give code 8. NaN gives code 7, as PTX `cvt.rn.satfinite` does.
    """
    bits = x.clone(memory_format=torch.contiguous_format).view(torch.int32)
    return encode_bits(bits, torch.empty_like(bits), torch.empty_like(bits)).to(torch.uint8)


def encode_bits(bits: Tensor, p: Tensor, scratch: Tensor) -> Tensor:
    """`encode` on fp32 bit patterns, for callers that keep tiles in cache: returns `bits`, overwritten with codes.

    For |x| in [P, 2P) with P a power of two, at least 1, the grid step is P/2. Adding P x 2^22, whose unit in the last
    place is exactly that step, makes the fp32 adder round |x| to the grid, ties to even, and leaves the number of steps
    in the low bits of the sum. Code = steps + 2 log2(P).

    Args:
        bits: int32, contiguous; overwritten.
        p, scratch: int32 of the same shape; overwritten.
    """
    torch.bitwise_and(bits, 0x7FFFFFFF, out=scratch)
    scratch.clamp_(max=_F32_SIX)
    torch.bitwise_and(scratch, _F32_EXPONENT, out=p)
    p.clamp_(min=_F32_ONE)  # P
    magic = p.add_(22 << _F32_MANTISSA_BITS)  # P x 2^22
    scratch.view(torch.float32).add_(magic.view(torch.float32))
    scratch.sub_(magic)  # steps
    magic.bitwise_right_shift_(_F32_MANTISSA_BITS).sub_(127 + 22)  # log2 P
    scratch.add_(magic, alpha=2)
    bits.bitwise_right_shift_(31).bitwise_and_(_SIGN)
    return bits.bitwise_or_(scratch)
