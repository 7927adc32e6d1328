"""What numbers may go through before they are quantised, in fp32 and in steps whose order is part of the result: a
GPU's kernel takes the same ones, so that bits do not depend on the device. The caller is within `exact_arithmetic`."""

from __future__ import annotations

import torch
from torch import Tensor

from blockscale.formats.layouts import BLOCK, round_up
from blockscale.kernels.parts.exponential import INTEGERS, LEAST, LN2_HIGH, LN2_LOW, LOG2_E, MOST, POLYNOMIAL
from blockscale.problem import SWIGLU

_LANES = 32
_INTEGERS_BITS = 0x4B400000


def apply(x: Tensor, activation: str | None, norm_weight: Tensor | None, eps: float) -> Tensor:
    """`x`, or what becomes of it before it is quantised."""
    if activation == SWIGLU:
        return swiglu(x)
    return x if norm_weight is None else rms_norm(x, norm_weight, eps)


def swiglu(x: Tensor) -> Tensor:
    """fp32 (..., K) of (..., 2 K): gate / (1 + e^-gate) x up, gates in the first half; e^ as `exponential` has it."""
    gate, up = x.float().chunk(2, dim=-1)
    return (gate / (_exp(-gate) + 1.0)).mul_(up)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """fp32 (..., K): (x / sqrt(mean of x^2 + eps)) x weight, where a quotient is a product with 1 / sqrt.

    Squares are added in blocks of 16, in a tree; then of 32 sums, the i-th of blocks i, i + 32, ... in order, a tree.
    """
    values = x.float()
    k = values.shape[-1]
    padded = torch.nn.functional.pad(values, (0, round_up(k, BLOCK * _LANES) - k))
    sums = _tree((padded * padded).reshape(*x.shape[:-1], padded.shape[-1] // (BLOCK * _LANES), _LANES, BLOCK))
    total = torch.zeros_like(sums[..., 0, :])
    for i in range(sums.shape[-2]):
        total = total + sums[..., i, :]
    mean = _tree(total) / float(k)
    # Of a double, since torch's fp32 root is not always the nearest; a double's is near enough to round to that.
    root = (mean + torch.tensor(eps, dtype=torch.float32, device=x.device)).double().sqrt().float()
    inverse = 1.0 / root
    return (values * inverse.unsqueeze(-1)) * weight.float()


def _tree(values: Tensor) -> Tensor:
    """The sum over the last dimension, a power of two: the second half is added to the first, until one is left."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values.squeeze(-1)


def _exp(z: Tensor) -> Tensor:
    """`exponential`, fp32."""
    z = z.clamp(LEAST, MOST)
    shifted = z * LOG2_E + INTEGERS
    n = shifted - INTEGERS
    r = (z - n * LN2_HIGH) - n * LN2_LOW
    p = torch.full_like(r, POLYNOMIAL[-1])
    for coefficient in POLYNOMIAL[-2::-1]:
        p = p * r + coefficient
    y = (p * (r * r) + r) + 1.0
    return y * ((shifted.view(torch.int32) - _INTEGERS_BITS + 127) << 23).view(torch.float32)
