"""From packed codes and one scale per 16 of them to values."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from blockscale.formats import e2m1, packing
from blockscale.formats.layouts import BLOCK


@cache
def _four_codes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """(65536, 4): the values of the four codes in two adjacent bytes, indexed by them as one little-endian integer."""
    pairs = torch.arange(1 << 16, dtype=torch.int32, device=device)
    packed = torch.stack((pairs & 0xFF, pairs >> 8), dim=-1).to(torch.uint8)
    return e2m1.decode(packing.unpack(packed), dtype)


def expand(packed: Tensor, scales: Tensor) -> Tensor:
    """code x scale for every element, in the dtype of `scales`.

    Args:
        packed: uint8 (R, K/2), rows contiguous; K a multiple of 16.
        scales: fp32 or fp64 (R, K/16), any strides.

    Returns:
        (R, K), contiguous. Exact when the scales are E4M3 values: the product has at most six significand bits.
    """
    rows, half = packed.shape
    index = packed.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    values = torch.index_select(_four_codes(scales.dtype, scales.device), 0, index.view(-1))
    values = values.view(rows, half * 2 // BLOCK, BLOCK).mul_(scales.unsqueeze(-1))
    return values.view(rows, half * 2)
