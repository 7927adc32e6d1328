"""From packed codes and one scale per 16 of them to values."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockscale.formats import e2m1
from blockscale.formats.layouts import BLOCK

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


@cache
def _four_codes(dtype: torch.dtype) -> npt.NDArray[Any]:
    """(65536, 4): the values of the four codes in two adjacent bytes, indexed by them as one little-endian integer.

    A numpy array, since a cached tensor would belong to whatever mode (inference, fake) was on when it was made.
    """
    pairs = np.arange(1 << 16)[:, None]
    values: npt.NDArray[Any] = np.array(e2m1.VALUES, _NUMPY[dtype])[pairs >> np.array([0, 4, 8, 12]) & 0xF]
    return values


def expand(packed: Tensor, scales: Tensor) -> Tensor:
    """code x scale for every element, in the dtype of `scales`.

    Args:
        packed: uint8 (R, K/2), rows contiguous and aligned to 2 bytes; K a multiple of 16.
        scales: fp32 or fp64 (R, K/16), any strides.

    Returns:
        (R, K), contiguous. Exact when the scales are E4M3 values: the product has at most six significand bits.
    """
    rows, half = packed.shape
    table = torch.from_numpy(_four_codes(scales.dtype)).to(scales.device)
    index = packed.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    values = torch.index_select(table, 0, index.view(-1))
    values = values.view(rows, half * 2 // BLOCK, BLOCK).mul_(scales.unsqueeze(-1))
    return values.view(rows, half * 2)
