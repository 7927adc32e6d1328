"""The CPU backend: tiles of the weight are dequantised into cache and go through torch's matmul.

A tile holds code x scale, which is exact (six significand bits); the global scales multiply the sum, so that sums of
small integers stay exact. Along K sums are pairwise over leaves of K_LEAF: a matmul kernel adds one leaf in sequence,
and the error of a long sequential fp32 sum of positive numbers would exceed the result contract. Activations that fp32
sums cannot honour (fp32 significands, bf16 of extreme magnitude) are multiplied in fp64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale import threads
from blockscale.formats import blocks, e4m3
from blockscale.formats.layouts import BLOCK
from blockscale.tensor import NVFP4Tensor

N_TILE = 256
K_STRIP = 2048  # an fp32 tile of N_TILE x K_STRIP is 2 MiB, and each thread holds one
K_LEAF = 256
ROW_BYTES = 16 << 20  # of one block of expanded rows of `a`
_SAFE_BF16 = (2.0**-64, 2.0**64)  # magnitudes whose products with code x scale stay normal in fp32
_F32_NORMAL = (2.0**-126, 2.0**127)

ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda y: y,
    "relu": torch.relu_,
    "gelu": torch.nn.functional.gelu,
    "silu": lambda y: torch.nn.functional.silu(y, inplace=True),
}


def why_not() -> str | None:
    """None: a CPU is always there."""
    return None


def gemm(
    a: NVFP4Tensor | Tensor,
    b: NVFP4Tensor,
    out: Tensor,
    *,
    alpha: float = 1.0,
    bias: Tensor | None = None,
    activation: str | None = None,
    invariant: bool = False,
) -> None:
    """out = act(alpha x a @ b^T + bias); the caller has checked the arguments.

    Args:
        a: (..., M, K). b: (..., N, K). Batch dimensions broadcast.
        out: (..., M, N) fp16, bf16 or fp32, any strides, apart from the inputs; written whole.
        bias: (N,), added in fp32 after alpha.
        invariant: each row on its own in fp64, so that its bits do not depend on the other rows.
    """
    if out.numel() == 0:
        return
    result = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    epilogue = _Epilogue(alpha * _unit(a) * _unit(b), None if bias is None else bias.float(), activation)
    batch = None if b.ndim == 2 else out.shape[:-2]
    targets = result.view(1 if batch is None else math.prod(batch), -1, out.shape[-1])
    problems = list(zip(_matrices(a, batch), _matrices(b, batch), targets, strict=True))
    # Several matrices are shared out among threads whole; the tiles of a single one are, inside _multiply.
    threads.for_each(lambda problem: _multiply(*problem, epilogue, invariant=invariant), problems)
    if result is not out:
        out.copy_(result)


def _multiply(rows: _Matrix, weight: _Matrix, target: Tensor, epilogue: _Epilogue, *, invariant: bool) -> None:
    step = max(1, ROW_BYTES // (rows.k * 4))
    dot = _dot_row_by_row if invariant else _dot
    everything = slice(0, rows.k)
    tiles = [slice(n, n + N_TILE) for n in range(0, len(weight), N_TILE)]
    for r in range(0, len(rows), step):
        block = rows.expand(slice(r, r + step), everything, torch.float64 if invariant else None)

        def multiply(tile: slice, block: Tensor = block, part: Tensor = target[r : r + step]) -> None:
            part[:, tile] = epilogue(dot(block, weight, tile, everything), tile)

        threads.for_each(multiply, tiles)


def _dot(block: Tensor, weight: _Matrix, tile: slice, k: slice) -> Tensor:
    """block[:, k] @ weight[tile, k].T, expanding at most K_STRIP columns of the weight at a time."""
    if k.stop - k.start > K_STRIP:
        left, right = _halves(k, K_STRIP)
        return _dot(block, weight, tile, left).add_(_dot(block, weight, tile, right))
    return _pairwise(block[:, k], weight.expand(tile, k, block.dtype).T)


def _pairwise(x: Tensor, y: Tensor) -> Tensor:
    """x @ y, summed pairwise over leaves of K_LEAF."""
    k = slice(0, x.shape[1])
    if k.stop <= K_LEAF:
        return x @ y
    left, right = _halves(k, K_LEAF)
    return _pairwise(x[:, left], y[left]).add_(_pairwise(x[:, right], y[right]))


def _dot_row_by_row(block: Tensor, weight: _Matrix, tile: slice, k: slice) -> Tensor:
    """As `_dot`, each row by a matrix-vector product of one fixed shape from one fixed address."""
    if k.stop - k.start > K_STRIP:
        left, right = _halves(k, K_STRIP)
        return _dot_row_by_row(block, weight, tile, left).add_(_dot_row_by_row(block, weight, tile, right))
    matrix = weight.expand(tile, k, block.dtype)
    y = block.new_empty(len(block), len(matrix))
    row, result = block.new_empty(matrix.shape[1]), block.new_empty(len(matrix))
    for i in range(len(block)):
        row.copy_(block[i, k])
        y[i] = torch.mv(matrix, row, out=result)
    return y


def _halves(k: slice, unit: int) -> tuple[slice, slice]:
    """A range cut in the middle, the left part a multiple of `unit`."""
    units = -(-(k.stop - k.start) // unit)
    middle = k.start + (units + 1) // 2 * unit
    return slice(k.start, middle), slice(middle, k.stop)


@dataclass(frozen=True)
class _Matrix:
    """A 2-D operand: packed codes with linear scales, or plain values (then `scales` is None)."""

    data: Tensor
    scales: Tensor | None
    k: int

    def __len__(self) -> int:
        return len(self.data)

    def expand(self, rows: slice, k: slice, dtype: torch.dtype | None) -> Tensor:
        """Values [rows, k], fresh and row-major, in `dtype`: by default the one whose sums honour the contract."""
        if self.scales is None:
            values = self.data[rows, k]
            return values.to(dtype or _sum_dtype(values), copy=True, memory_format=torch.contiguous_format)
        columns = slice(k.start // BLOCK, -(-k.stop // BLOCK))
        scales = e4m3.decode(self.scales[rows, columns], dtype or torch.float32)
        packed = self.data[rows, columns.start * BLOCK // 2 : columns.stop * BLOCK // 2]
        return blocks.expand(packed, scales)[:, : k.stop - k.start]


def _matrices(x: NVFP4Tensor | Tensor, batch: torch.Size | None) -> list[_Matrix]:
    """One matrix for each index of `batch`, broadcast to it; or, if None, a single one that holds all rows."""
    if isinstance(x, NVFP4Tensor):
        data, scales = x.codes, x.linear_scales()
    else:
        data, scales = x, None
    if batch is None:
        return [_Matrix(data.flatten(0, -2), None if scales is None else scales.flatten(0, -2), x.shape[-1])]
    data = data.expand(*batch, -1, -1)
    scales = None if scales is None else scales.expand(*batch, -1, -1)
    at = itertools.product(*map(range, batch))
    return [_Matrix(data[i], None if scales is None else scales[i], x.shape[-1]) for i in at]


def _sum_dtype(values: Tensor) -> torch.dtype:
    if values.dtype == torch.float16:
        return torch.float32
    if values.dtype == torch.bfloat16:
        low, high = torch.aminmax(values)
        amax = max(-float(low), float(high))
        if amax == 0 or _SAFE_BF16[0] <= amax <= _SAFE_BF16[1]:
            return torch.float32
    return torch.float64


def _unit(x: NVFP4Tensor | Tensor) -> float:
    return float(x.global_scale) if isinstance(x, NVFP4Tensor) else 1.0


@dataclass(frozen=True)
class _Epilogue:
    factor: float
    bias: Tensor | None
    activation: str | None

    def __call__(self, y: Tensor, tile: slice) -> Tensor:
        """act(factor x y + bias[tile]), overwriting `y`; in fp64 where fp32 cannot hold the factor."""
        low, high = _F32_NORMAL
        if y.dtype == torch.float32 and not (low <= abs(self.factor) <= high or self.factor == 0):
            y = y.double()
        y.mul_(self.factor)
        if self.bias is not None:
            y.add_(self.bias[tile])
        return ACTIVATIONS[self.activation](y)
