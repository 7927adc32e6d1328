"""The CPU backend: tiles of the weight are dequantised into cache and go through torch's matmul.

A tile holds code x scale, which is exact (six significand bits); global scales, alpha, bias and activation are applied
to the sums in fp64. What keeps the result contract, for all data:

- NVFP4 x NVFP4: K is cut into leaves of K_LEAF. All products of a leaf are multiples of one unit, so their fp32 sum is
  exact in any order while it stays under 2^24 units; `_leaf_bound` tells when it must. Other leaves, where block scales
  differ widely, are summed in fp64. Leaves are added pairwise, strips of leaves in fp64.
- Weight-only: activations have wide significands, and a sequential fp32 sum of a few hundred positive products can miss
  the contract. Sums are fp64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale import threads
from blockscale.formats import blocks, e2m1, e4m3
from blockscale.formats.layouts import BLOCK
from blockscale.tensor import NVFP4Tensor

N_TILE = 256
K_STRIP = 2048  # an fp32 tile of N_TILE x K_STRIP is 2 MiB, and each thread holds one
K_LEAF = 128
ROW_BYTES = 16 << 20  # of one block of expanded rows of `a`
MAX_ROWS = 4096
_EXACT = 2.0**24  # sums of integers below this are exact in fp32

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
    """out = act(alpha x a @ b^T + bias); the caller has checked the arguments and is within `exact_arithmetic`.

    Args:
        a: (..., M, K). b: (..., N, K). Batch dimensions broadcast.
        out: (..., M, N) fp16, bf16 or fp32, any strides, apart from the inputs; written whole.
        bias: (N,), added after alpha.
        invariant: each row on its own, so that its bits do not depend on the other rows.
    """
    if out.numel() == 0:
        return
    result = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    epilogue = _Epilogue(_unit(a) * _unit(b), alpha, bias, activation)
    batch = None if math.prod(b.shape[:-2]) == 1 else out.shape[:-2]
    targets = result.view(1 if batch is None else math.prod(batch), -1, out.shape[-1])
    problems = list(zip(_matrices(a, batch), _matrices(b, batch), targets, strict=True))
    # Several matrices are shared out among threads whole; the tiles of a single one are, inside _multiply.
    threads.for_each(lambda problem: _multiply(*problem, epilogue, invariant=invariant), problems)
    if result is not out:
        out.copy_(result)


def _multiply(rows: _Matrix, weight: _Matrix, target: Tensor, epilogue: _Epilogue, *, invariant: bool) -> None:
    dtype = torch.float64 if invariant or rows.scales is None else torch.float32
    step = min(MAX_ROWS, max(1, ROW_BYTES // (rows.k * dtype.itemsize)))
    dot = _dot_row_by_row if invariant else _dot
    tiles = [slice(n, n + N_TILE) for n in range(0, len(weight), N_TILE)]
    for r in range(0, len(rows), step):
        block = rows.expand(slice(r, r + step), slice(0, rows.k), dtype)

        def multiply(tile: slice, block: _Tile = block, part: Tensor = target[r : r + step]) -> None:
            part[:, tile] = epilogue(dot(block, weight, tile), tile)

        threads.for_each(multiply, tiles)


def _dot(block: _Tile, weight: _Matrix, tile: slice) -> Tensor:
    """block @ weight[tile].T, (rows, tile) fp64."""
    total: Tensor | None = None
    for k in _strips(weight.k):
        strip = weight.expand(tile, k, block.values.dtype)
        part = block.columns(k)
        if strip.bounds is None or part.bounds is None:
            y = part.values @ strip.values.T
        else:
            exact = (part.bounds * strip.bounds <= _EXACT).tolist()
            y = _pairwise(part.values, strip.values.T, exact).double()
        total = y if total is None else total.add_(y)
    assert total is not None
    return total


def _pairwise(x: Tensor, y: Tensor, exact: list[bool]) -> Tensor:
    """x @ y in fp32, summed pairwise over leaves; `exact` says of each whether fp32 sums inside it are."""
    if len(exact) == 1:
        return x @ y if exact[0] else (x.double() @ y.double()).float()
    half = (len(exact) + 1) // 2
    k = half * K_LEAF
    return _pairwise(x[:, :k], y[:k], exact[:half]).add_(_pairwise(x[:, k:], y[k:], exact[half:]))


def _dot_row_by_row(block: _Tile, weight: _Matrix, tile: slice) -> Tensor:
    """As `_dot`, each row by a matrix-vector product of one fixed shape from one fixed address."""
    total: Tensor | None = None
    for k in _strips(weight.k):
        matrix = weight.expand(tile, k, block.values.dtype).values
        y = block.values.new_empty(len(block.values), len(matrix))
        row, result = y.new_empty(matrix.shape[1]), y.new_empty(len(matrix))
        for i in range(len(y)):
            row.copy_(block.values[i, k])
            y[i] = torch.mv(matrix, row, out=result)
        total = y if total is None else total.add_(y)
    assert total is not None
    return total


def _strips(k: int) -> list[slice]:
    return [slice(start, min(k, start + K_STRIP)) for start in range(0, k, K_STRIP)]


@dataclass(frozen=True)
class _Tile:
    """Expanded values (rows, k), row major; if fp32, with a bound for each leaf of k."""

    values: Tensor
    bounds: Tensor | None

    def columns(self, k: slice) -> _Tile:
        leaves = slice(k.start // K_LEAF, -(-k.stop // K_LEAF))
        return _Tile(self.values[:, k], None if self.bounds is None else self.bounds[leaves])


@dataclass(frozen=True)
class _Matrix:
    """A 2-D operand: packed codes with linear scales, or plain values (then `scales` is None)."""

    data: Tensor
    scales: Tensor | None
    k: int

    def __len__(self) -> int:
        return len(self.data)

    def expand(self, rows: slice, k: slice, dtype: torch.dtype) -> _Tile:
        """Values [rows, k] in `dtype`. Plain values only in fp64."""
        if self.scales is None:
            return _Tile(self.data[rows, k].to(dtype, memory_format=torch.contiguous_format), None)
        columns = slice(k.start // BLOCK, -(-k.stop // BLOCK))
        scales = self.scales[rows, columns]
        packed = self.data[rows, columns.start * BLOCK // 2 : columns.stop * BLOCK // 2]
        values = blocks.expand(packed, e4m3.decode(scales, dtype))
        bounds = _leaf_bound(values, scales) if dtype == torch.float32 else None
        return _Tile(values[:, : k.stop - k.start], bounds)


def _leaf_bound(values: Tensor, scales: Tensor) -> Tensor:
    """For each leaf of k the largest norm / unit over the rows, fp32 (leaves,).

    The unit of a row is the largest power of two of which all its values in the leaf are multiples. By Cauchy and
    Schwarz a sum of |a||b| over the leaf is at most bound(a) x bound(b) x unit(a) x unit(b).
    """
    rows, k = values.shape
    pad = -k % K_LEAF
    norms = torch.nn.functional.pad(values, (0, pad)) if pad else values
    norms = torch.linalg.vector_norm(norms.view(rows, -1, K_LEAF), dim=-1)
    steps = torch.nn.functional.pad(e4m3.step(scales), (0, pad // BLOCK), value=e4m3.MAX)
    units = steps.view(rows, -1, K_LEAF // BLOCK).amin(-1) * (e2m1.MAGNITUDES[1])
    bounds: Tensor = (norms * (1 + 2.0**-16) / units).amax(0)  # more than a rounded norm can fall short
    return bounds


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


def _unit(x: NVFP4Tensor | Tensor) -> float:
    return float(x.global_scale) if isinstance(x, NVFP4Tensor) else 1.0


@dataclass(frozen=True)
class _Epilogue:
    unit: float
    alpha: float
    bias: Tensor | None
    activation: str | None

    def __call__(self, y: Tensor, tile: slice) -> Tensor:
        """act(alpha x unit x y + bias[tile]), overwriting `y` (fp64). Alpha comes last, so that 0 stays 0."""
        y.mul_(self.unit)
        if self.alpha != 1.0:
            y.mul_(self.alpha)
        if self.bias is not None:
            y.add_(self.bias[tile])
        return ACTIVATIONS[self.activation](y)
