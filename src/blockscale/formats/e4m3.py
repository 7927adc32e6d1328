"""E4M3 (the finite variant, "e4m3fn"): 8-bit floating point, used for NVFP4's block scales with the sign bit clear.

Source: OCP 8-bit Floating Point Specification 1.0, table 1; PTX ISA, "Alternate floating-point data formats" (ue4m3).
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX = 448.0
SMALLEST = 2.0**-9
NAN = 0x7F
LARGEST_CODE = 0x7E


def encode_scale(v: Tensor) -> Tensor:
    """Nearest E4M3 (float8_e4m3fn) of each value of `v` (fp32, >= 0), ties to even, saturating at 448.

    Clamped before the conversion, because torch's own overflow behaviour differs between versions and devices.
    """
    return v.clamp(max=MAX).to(torch.float8_e4m3fn)


def decode(scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of `scales` (float8_e4m3fn), exact in bf16, fp16, fp32 and fp64."""
    return scales.to(dtype)


def step(scales: Tensor) -> Tensor:
    """fp32: the power of two between neighbouring E4M3 values at each of `scales`; 448, no bound, for a scale of 0."""
    code = scales.view(torch.uint8)
    power = torch.ldexp(torch.ones_like(code, dtype=torch.float32), (code >> 3).clamp(min=1).to(torch.int32) - 10)
    return torch.where(code == 0, MAX, power)


def invalid(scales: Tensor) -> Tensor:
    """True where a byte is no NVFP4 scale: the sign bit set (0x80 included) or NaN (0x7F)."""
    return scales.view(torch.uint8) > LARGEST_CODE
