"""The float64 reference that everything is judged by. Slow, plain, and independent of the code that it judges: numbers
are decoded from their definition, scales are found by the layout's index formula, products are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from blockscale.tensor import NVFP4Tensor

Array = npt.NDArray[np.float64]

CPU_TOLERANCE = 2.0**-20


def tensor_core_tolerance(k: int) -> float:
    """The contract's c for tensor cores, on silicon and emulated: every 64 k a sum is truncated toward zero to fp32,
    so that errors of positive data add up."""
    return (4 + k / 1024) * 2.0**-20


def _minifloat(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """The value of a sign-exponent-mantissa code with subnormals and no special values."""
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


E2M1: Array = np.array([_minifloat(code, 2, 1) for code in range(16)])
E4M3: Array = np.array([math.nan if code & 0x7F == 0x7F else _minifloat(code, 4, 3) for code in range(256)])


def scale_index(t: NVFP4Tensor) -> npt.NDArray[np.int64]:
    """(M, ceil(K/16)): for each row and block, the byte of a matrix's scales that holds its scale."""
    rows, k = t.shape[-2:]
    block = np.arange(-(-k // 16))[None, :]
    columns = -(-k // 64) * 4
    row = np.arange(rows)
    if t.layout == "linear":
        return row[:, None] * columns + block
    if t.group_sizes is not None:
        start, scale_row = 0, []
        for size in t.group_sizes.tolist():
            scale_row.append(start + np.arange(size))
            start += -(-size // 128) * 128
        row = np.concatenate(scale_row) if scale_row else row
    row = row[:, None]
    atom = (row // 128) * (columns // 4) + block // 4
    return atom * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4


def dequantize(t: NVFP4Tensor) -> Tensor:
    """code x scale x global scale, (..., M, K) float64, exact."""
    if t.layout == "fragment":  # judged apart, by its own definition
        t = t.with_layout("linear")
    *batch, rows, k = t.shape
    count = math.prod(batch)
    packed = t.codes.cpu().view(torch.uint8).numpy().reshape(count, rows, t.codes.shape[-1])
    scale_bytes = t.scales.cpu().view(torch.uint8).numpy().reshape(count, math.prod(t.scales.shape[len(batch) :]))
    at = scale_index(t)
    codes = np.stack((packed & 15, packed >> 4), axis=-1).reshape(count, rows, 2 * packed.shape[-1])[..., :k]
    scales = np.repeat(E4M3[scale_bytes[:, at]], 16, axis=-1)[..., :k]
    values = E2M1[codes] * scales * float(t.global_scale)
    return torch.from_numpy(values).reshape(*batch, rows, k)


def quantize(
    x: Tensor, method: str = "rtn", global_scale: float | None = None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8], np.float32]:
    """The normative rule, block by block, for a finite 2-D `x`.

    Returns:
        codes (M, K) 0..15, scale bytes (M, ceil(K/16)), and the global scale.
    """
    f32 = np.float32
    rows = x.detach().cpu().float().numpy()
    if global_scale is None:
        amax = np.abs(rows).max(initial=f32(0))
        unit = f32(1) if amax == 0 else max(amax / f32(1536 if method == "four_over_six" else 2688), f32(2.0**-126))
    else:
        unit = f32(global_scale)
    codes = np.zeros(rows.shape, np.uint8)
    scales = np.zeros((rows.shape[0], -(-rows.shape[1] // 16)), np.uint8)
    for m in range(rows.shape[0]):
        for b in range(scales.shape[1]):
            block = rows[m, 16 * b : 16 * b + 16]
            tried = [(s, *_encode_block(block, s, unit)) for s in _candidates(np.abs(block).max(), unit, method)]
            best = min(tried, key=lambda candidate: candidate[2])  # the first of equals
            scales[m, b], codes[m, 16 * b : 16 * b + 16] = best[0], best[1]
    return codes, scales, unit


def _candidates(amax: np.float32, unit: np.float32, method: str) -> list[int]:
    nearest = _nearest(min(amax / np.float32(6) / unit, 448.0), E4M3[:127])
    if method == "four_over_six":
        return [nearest, _nearest(min(amax / np.float32(4) / unit, 448.0), E4M3[:127])]
    if method == "mse":
        return [nearest, max(nearest - 1, 0), min(nearest + 1, 126)]
    return [nearest]


def _encode_block(block: npt.NDArray[np.float32], scale: int, unit: np.float32) -> tuple[list[int], float]:
    """Codes of a block under one scale, and the squared error."""
    d = np.float32(E4M3[scale]) * unit
    if scale == 0:
        return [0] * len(block), math.fsum(float(v) ** 2 for v in block)
    codes = [_nearest(min(abs(float(v / d)), 6.0), E2M1[:8]) + 8 * int(np.signbit(v)) for v in block]
    restored = [np.float32(E2M1[c]) * d for c in codes]
    return codes, math.fsum((float(v) - float(r)) ** 2 for v, r in zip(block, restored, strict=True))


def _nearest(v: float, grid: Array) -> int:
    """Index of the grid value nearest to `v`, the even one of two equally near."""
    above = int(np.searchsorted(grid, v))
    if above == 0 or grid[above] == v:
        return above
    below = above - 1
    down, up = v - grid[below], grid[above] - v  # exact: both are differences of nearby numbers
    return below if down < up or (down == up and below % 2 == 0) else above


def values(x: NVFP4Tensor | Tensor) -> Tensor:
    """The exact float64 values of an operand: an NVFP4Tensor or a floating tensor."""
    return dequantize(x) if isinstance(x, NVFP4Tensor) else x.detach().cpu().double()


def gemm(
    a: NVFP4Tensor | Tensor,
    b: NVFP4Tensor | Tensor,
    *,
    alpha: float | Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """act(alpha x a @ b^T + bias) in float64: a (..., M, K), b (..., N, K) -> (..., M, N)."""
    y = values(a) @ values(b).mT * (1.0 if alpha is None else float(alpha))
    if bias is not None:
        y = y + bias.detach().cpu().double()
    return activate(y, activation)


def activate(y: Tensor, activation: str | None) -> Tensor:
    """None, "relu", "gelu" (with erf) or "silu" of float64 values."""
    return _ACTIVATIONS[activation](y)


_ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda y: y,
    "relu": lambda y: y.clamp(min=0),
    "gelu": lambda y: y * 0.5 * torch.erfc(-y / math.sqrt(2)),
    "silu": lambda y: y / torch.exp(-y).add(1),
}


def tolerance(
    a: NVFP4Tensor | Tensor,
    b: NVFP4Tensor | Tensor,
    exact: Tensor,
    *,
    alpha: float | Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    c: float = CPU_TOLERANCE,
) -> Tensor:
    """What |y - exact| may be, element by element, float64: rounding of out_dtype + c x sum|a||b| x |alpha|.

    A bias takes part in the fp32 sum and is rounded with it (2^-24 |bias|); an activation's slope is at most 1.13.
    """
    magnitude = values(a).abs() @ values(b).abs().mT * abs(1.0 if alpha is None else float(alpha))
    slack = c * magnitude
    if bias is not None:
        slack = slack + 2.0**-24 * (bias.detach().cpu().double().abs() + exact.abs())
    info = torch.finfo(out_dtype)
    rounding = (info.eps / 2) * (exact.abs() + 1.13 * slack) + info.smallest_normal * info.eps / 2
    return rounding + 1.13 * slack


def check(y: Tensor, exact: Tensor, tolerance: Tensor) -> None:
    """Raise AssertionError naming the first coordinate where |y - exact| > tolerance, or where y is NaN."""
    if y.shape != exact.shape:
        raise AssertionError(f"shape {tuple(y.shape)}, expected {tuple(exact.shape)}")
    error = (y.detach().cpu().double() - exact).abs()
    overflow = torch.finfo(y.dtype).max
    right_overflow = (exact.abs() > overflow) & (y.cpu().double() == exact.sign() * math.inf)
    bad = ~((error <= tolerance) | right_overflow)
    if bool(bad.any()):
        at = tuple(int(i) for i in bad.nonzero()[0])
        raise AssertionError(
            f"{int(bad.sum())} of {bad.numel()} elements are wrong; the first at {at}: got {float(y[at])!r}, "
            f"exact {float(exact[at])!r}, |difference| {float(error[at]):.3e}, allowed {float(tolerance[at]):.3e}"
        )
