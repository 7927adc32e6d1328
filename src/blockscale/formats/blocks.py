"""From packed codes and one scale per 16 of them to values."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockscale.formats import e2m1
from blockscale.formats.layouts import BLOCK

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


@cache
def _table(dtype: torch.dtype) -> npt.NDArray[np.complex128]:
    """The values of two adjacent bytes of codes in fp32, or of one byte in fp64: 16 bytes, indexed by the packed codes.

    Carried as complex numbers because torch gathers single 16-byte elements twice as fast as rows of four. A numpy
    array, since a cached tensor would belong to whatever mode (inference, fake) was on when it was made.
    """
    codes = 16 // np.dtype(_NUMPY[dtype]).itemsize
    packed = np.arange(16**codes)[:, None] >> (4 * np.arange(codes))
    table: npt.NDArray[np.complex128] = np.array(e2m1.VALUES, _NUMPY[dtype])[packed & 0xF].view(np.complex128)[:, 0]
    return table


def expand(packed: Tensor, scales: Tensor, out: Tensor | None = None) -> Tensor:
    """code x scale for every element, in the dtype of `scales`.

    Args:
        packed: uint8 (R, K/2), rows contiguous and aligned to 2 bytes; K a multiple of 16.
        scales: fp32 or fp64 (R, K/16), any strides.
        out: a 1-D buffer of that dtype with room for R x K elements. Fresh memory costs as much as the work itself.

    Returns:
        (R, K), contiguous, in `out` if given. Exact when the scales are E4M3 values: the product has at most six
        significand bits.
    """
    rows, half = packed.shape
    table = torch.from_numpy(_table(scales.dtype)).to(scales.device)
    if scales.dtype == torch.float32:
        index = packed.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    else:
        index = packed.to(torch.int32)
    if out is None:
        out = torch.empty(rows * half * 2, dtype=scales.dtype, device=scales.device)
    values = out[: rows * half * 2]
    torch.index_select(table, 0, index.view(-1), out=torch.view_as_complex(values.view(torch.float64).view(-1, 2)))
    values.view(rows, half * 2 // BLOCK, BLOCK).mul_(scales.unsqueeze(-1))
    return values.view(rows, half * 2)
