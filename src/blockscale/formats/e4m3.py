"""E4M3 (the finite variant, "e4m3fn"): 8-bit floating point, used for NVFP4's block scales with the sign bit clear.

Source: OCP 8-bit Floating Point Specification 1.0, table 1; PTX ISA, "Alternate floating-point data formats" (ue4m3).
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MAX = 448.0
SMALLEST = 2.0**-9
MANTISSA_BITS = 3
LARGEST_CODE = 0x7E


def encode_scale(v: Tensor) -> Tensor:
    """Nearest E4M3 (float8_e4m3fn) of each value of `v` (fp32, >= 0), ties to even, saturating at 448.

    Clamped before the conversion, because torch's own overflow behaviour differs between versions and devices.
    """
    return v.clamp(max=MAX).to(torch.float8_e4m3fn)


def decode(scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of `scales` (float8_e4m3fn), exact in bf16, fp16, fp32 and fp64.

    Gathered on the CPU, where casting is slower; a GPU would have to wait for the table.
    """
    if scales.is_cuda:
        return scales.to(dtype)
    table = torch.from_numpy(_values()).to(dtype=dtype, device=scales.device)
    return torch.index_select(table, 0, scales.view(torch.uint8).reshape(-1).to(torch.int32)).view(scales.shape)


def value(code: int) -> float:
    """The value of one code."""
    return float(_values()[code])


@cache
def _values() -> npt.NDArray[np.float32]:
    """(256,): every code's value. Not a tensor, which would belong to whatever mode was on when it was made."""
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float().numpy()


def step(v: Tensor) -> Tensor:
    """The power of two between neighbouring E4M3 values at each of `v` (fp32 E4M3 values, > 0), fp32."""
    power = v.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)  # 2^floor(log2 v)
    return power.mul(2.0**-MANTISSA_BITS).clamp(min=SMALLEST)


def invalid(scales: Tensor) -> Tensor:
    """True where a byte is no NVFP4 scale: the sign bit set (0x80 included) or NaN (0x7F)."""
    return scales.view(torch.uint8) > LARGEST_CODE


def largest_code(scales: Tensor) -> int:
    """The largest byte of `scales`, 0 where there are none; for valid scales that of the largest scale.

    By numpy on the CPU: one thread needs 0.1 ms for 4 MiB, while torch's threads wait for each other on a busy machine.
    """
    codes = scales.view(torch.uint8)
    if not codes.numel():
        return 0
    return int(codes.numpy().max() if codes.device.type == "cpu" else codes.amax())
