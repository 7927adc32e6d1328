"""How a method chooses block scales: a divisor for the global scale, and candidate scales of which the best is taken.

A candidate is better when its squared error over the block is smaller; the first candidate wins ties.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.formats import e2m1, e4m3


@dataclass(frozen=True)
class Method:
    """
    Attributes:
        divisor: a dynamic global scale is amax / divisor.
        candidates: (block amax, global scale), fp32 -> the scales to try, float8_e4m3fn, of the shape of block amax.
    """

    divisor: float
    candidates: Callable[[Tensor, Tensor], list[Tensor]]


def _fit(block_amax: Tensor, g: Tensor, largest: float) -> Tensor:
    """The scale that puts the block's largest magnitude at `largest` of the E2M1 grid."""
    return e4m3.encode_scale(block_amax / largest / g)


def _rtn(block_amax: Tensor, g: Tensor) -> list[Tensor]:
    return [_fit(block_amax, g, e2m1.MAX)]


def _four_over_six(block_amax: Tensor, g: Tensor) -> list[Tensor]:
    return [_fit(block_amax, g, e2m1.MAX), _fit(block_amax, g, 4.0)]


def _mse(block_amax: Tensor, g: Tensor) -> list[Tensor]:
    nearest = _fit(block_amax, g, e2m1.MAX)
    code = nearest.view(torch.uint8).to(torch.int16)
    return [nearest] + [
        (code + step).clamp(0, e4m3.LARGEST_CODE).to(torch.uint8).view(torch.float8_e4m3fn) for step in (-1, 1)
    ]


METHODS = {
    # Round to nearest: the block's largest magnitude goes to 6.
    "rtn": Method(e4m3.MAX * e2m1.MAX, _rtn),
    # Cook et al., "Four Over Six" (2025): to 6 or to 4, since nothing lies between 4 and 6. 256 x 1.5 = 384 is an E4M3
    # value, so that the tensor's largest block may choose either.
    "four_over_six": Method(256.0 * e2m1.MAX, _four_over_six),
    # The nearest scale or one of its two neighbours: never a larger error than "rtn".
    "mse": Method(e4m3.MAX * e2m1.MAX, _mse),
}
