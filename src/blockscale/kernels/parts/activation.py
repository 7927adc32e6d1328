"""Activations of fp32 numbers, as accurate as the result's contract asks: within 2^-24 of the largest |x| or |y|."""

import math
from collections.abc import Callable

from cutlass import Float32, cute

LOG2_E = 1 / math.log(2)


def relu(x: Float32) -> Float32:
    """NaN stays NaN."""
    return cute.arch.fmax(x, 0.0, nan=True)


def gelu(x: Float32) -> Float32:
    """x P(x), P the normal distribution: relu(x) - |x| P(-|x|), whose second term stays small, so that its error does.

    Infinity times 0 would be NaN, hence the bound: P(-20) is 0 in fp32. P by erfc would keep the relative accuracy of
    the tail, which the difference loses; its registers would spill.
    """
    size = cute.arch.fmin(cute.math.abs(x), 20.0)
    tail = 0.5 - 0.5 * cute.math.erf(size * math.sqrt(0.5))
    return relu(x) - size * tail


def silu(x: Float32) -> Float32:
    """x / (1 + e^-x); where e^-x is infinite, x / infinity is -0, but minus infinity's would be NaN."""
    bounded = cute.arch.fmax(x, -126.0, nan=True)
    return bounded / (1.0 + cute.math.exp2(bounded * -LOG2_E, fastmath=True))


ACTIVATIONS: dict[str | None, Callable[[Float32], Float32]] = {
    None: lambda x: x,
    "relu": relu,
    "gelu": gelu,
    "silu": silu,
}
GATES = {"swiglu": "silu", "geglu": "gelu"}  # what a gate goes through before it multiplies its column
