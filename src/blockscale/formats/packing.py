"""Two 4-bit codes a byte, the low nibble holding the even k."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor) -> Tensor:
    """(..., K) uint8 codes, K even -> (..., K/2) uint8."""
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: last dimension {codes.shape[-1]} is odd; two codes fill a byte")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """(..., K/2) uint8 -> (..., K) uint8 codes."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def as_bytes(packed: Tensor) -> Tensor:
    """The uint8 view of packed codes given as uint8 or float4_e2m1fn_x2 (same shape, no copy)."""
    return packed if packed.dtype == torch.uint8 else packed.view(torch.uint8)


def as_float4(packed: Tensor) -> Tensor:
    """The torch.float4_e2m1fn_x2 view of packed codes (same shape, no copy)."""
    return packed.view(torch.float4_e2m1fn_x2)
