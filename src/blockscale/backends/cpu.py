"""The CPU backend: tiles of the weight are dequantised into cache and go through torch's matmul.

A tile holds code x scale, which is exact (six significand bits); global scales, alpha, bias and activation are applied
to the sums in fp64. What keeps the result contract, for all data:

- NVFP4 x NVFP4: K is cut into leaves of K_LEAF. All products of a leaf are multiples of one unit, so their fp32 sum is
  exact in any order while it stays under 2^24 units; `_leaf_bounds` tells when it must. Other leaves, where block
  scales differ widely, are summed in fp64. The few leaves of a strip are added in fp32, strips in fp64.
- Weight-only: activations have wide significands, and a sequential fp32 sum of a few hundred positive products can miss
  the contract. Sums are fp64.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockscale import threads
from blockscale.formats import blocks, e2m1, e4m3
from blockscale.formats.layouts import BLOCK, LINEAR
from blockscale.quantize.quantizer import quantize_into
from blockscale.tensor import NVFP4Tensor

N_TILE = 256  # for two threads; narrower for more, so that all their tiles together take the same memory
MIN_TILE = 32
K_STRIP = 4096  # an fp32 tile of N_TILE x K_STRIP is 4 MiB
K_LEAF = 256
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


def prepare(a: NVFP4Tensor | Tensor, b: NVFP4Tensor, out: Tensor | NVFP4Tensor, **options: Any) -> Callable[[], None]:
    """`gemm` with these arguments, to be called when all products of a call are prepared; there is nothing to plan."""
    return partial(gemm, a, b, out, **options)


def gemm(
    a: NVFP4Tensor | Tensor,
    b: NVFP4Tensor,
    out: Tensor | NVFP4Tensor,
    *,
    alpha: float | Tensor = 1.0,
    bias: Tensor | None = None,
    activation: str | None = None,
    invariant: bool = False,
    config: None = None,
) -> None:
    """out = act(alpha x a @ b^T + bias); the caller has checked the arguments and is within `exact_arithmetic`.

    Args:
        a: (..., M, K). b: (..., N, K). Batch dimensions broadcast.
        out: (..., M, N) fp16, bf16 or fp32, any strides, apart from the inputs; written whole. Or an NVFP4Tensor, which
            the fp32 result is quantised into.
        bias: (N,), added after alpha.
        invariant: each row on its own, so that its bits do not depend on the other rows.
        config: None; there are no configurations.
    """
    if isinstance(out, NVFP4Tensor):
        y = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        gemm(a, b, y, alpha=alpha, bias=bias, activation=activation, invariant=invariant)
        quantize_into(y, out)
        return
    if out.numel() == 0:
        return
    result = out if out.is_contiguous() else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    epilogue = _Epilogue(_unit(a) * _unit(b), float(alpha), bias, activation)
    batch = None if math.prod(b.shape[:-2]) == 1 else out.shape[:-2]
    targets = result.view(1 if batch is None else math.prod(batch), -1, out.shape[-1])
    problems = list(zip(_matrices(a, batch), _matrices(b, batch), targets, strict=True))

    def multiply(problem: tuple[_Matrix, _Matrix, Tensor]) -> None:
        _multiply(*problem, epilogue, invariant=invariant)

    if len(problems) >= torch.get_num_threads():
        threads.map_each(multiply, problems)  # whole matrices are shared out
    else:
        for problem in problems:
            multiply(problem)  # and here the tiles of each
    if result is not out:
        out.copy_(result)


def _multiply(rows: _Matrix, weight: _Matrix, target: Tensor, epilogue: _Epilogue, *, invariant: bool) -> None:
    dtype = torch.float64 if invariant or rows.scales is None else torch.float32
    step = min(MAX_ROWS, max(1, ROW_BYTES // (rows.k * dtype.itemsize)))
    product = _product_row_by_row if invariant else _product
    columns = max(MIN_TILE, 2 * N_TILE // max(2, torch.get_num_threads()))
    scratch: dict[int, _Scratch] = {}
    for r in _cuts(len(rows), step):
        # Each leaf of the rows lies by itself: matmul packs it again for every tile, and long row strides slow that.
        expand = partial(rows.expand, r, dtype=dtype)
        block = threads.map_each(expand, _cuts(rows.k, K_LEAF))

        def multiply(tile: slice, block: list[_Tile] = block, part: Tensor = target[r]) -> None:
            mine = threading.get_ident()
            if mine not in scratch:
                scratch[mine] = _Scratch(min(step, len(rows)), columns, dtype)
            part[:, tile] = epilogue(_dot(block, weight, tile, product, scratch[mine]), tile)

        threads.map_each(multiply, _cuts(len(weight), columns))


class _Scratch:
    """A thread's buffers for one call. Memory that is new for every tile would cost as much as half the arithmetic."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        self.weight = torch.empty(columns * K_STRIP, dtype=dtype, device="cpu")
        self.part, self.strip = torch.empty(2, rows * columns, dtype=dtype, device="cpu")
        self.total = torch.empty(rows * columns, dtype=torch.float64, device="cpu")


Product = Callable[[Tensor, Tensor, Tensor], object]
"""(x, y, out): out = x @ y."""


def _dot(block: list[_Tile], weight: _Matrix, tile: slice, product: Product, scratch: _Scratch) -> Tensor:
    """block @ weight[tile].T, (rows, tile) fp64, in `scratch`."""
    shape = len(block[0].values), tile.stop - tile.start
    part, strip, total = (b[: math.prod(shape)].view(shape) for b in (scratch.part, scratch.strip, scratch.total))
    for k in _cuts(weight.k, K_STRIP):
        weights = weight.expand(tile, k, part.dtype, scratch.weight)
        leaves = _cuts(k.stop - k.start, K_LEAF)
        mine = block[k.start // K_LEAF :][: len(leaves)]
        for leaf, x, bound in zip(leaves, mine, weights.bounds, strict=True):
            y = weights.values[:, leaf].T
            out = part if leaf.start else strip
            if x.bounds[0] * bound <= _EXACT:
                product(x.values, y, out)
            else:
                out.copy_(x.values.double() @ y.double())
            if leaf.start:
                strip.add_(part)
        total = total.add_(strip) if k.start else total.copy_(strip)
    return total


def _product(x: Tensor, y: Tensor, out: Tensor) -> None:
    torch.mm(x, y, out=out)


def _product_row_by_row(x: Tensor, y: Tensor, out: Tensor) -> None:
    """As `_product`, each row by a matrix-vector product of one fixed shape from one fixed address."""
    matrix = y.T
    row, result = x.new_empty(x.shape[1]), x.new_empty(len(matrix))
    for i in range(len(x)):
        row.copy_(x[i])
        out[i] = torch.mv(matrix, row, out=result)


def _cuts(size: int, step: int) -> list[slice]:
    return [slice(start, min(size, start + step)) for start in range(0, size, step)]


@dataclass(frozen=True)
class _Tile:
    """Expanded values (rows, k), row major, and for each leaf of k a bound; 0 in fp64, which needs none."""

    values: Tensor
    bounds: list[float]


@dataclass(frozen=True)
class _Matrix:
    """A 2-D operand: packed codes with linear scales, or plain values (then `scales` is None)."""

    data: Tensor
    scales: Tensor | None
    k: int

    def __len__(self) -> int:
        return len(self.data)

    def expand(self, rows: slice, k: slice, dtype: torch.dtype, out: Tensor | None = None) -> _Tile:
        """Values [rows, k] in `dtype`, with k.start on a leaf, in the buffer `out` if given. Plain values in fp64."""
        if self.scales is None:
            return _without_bounds(self.data[rows, k].to(dtype, memory_format=torch.contiguous_format))
        columns = slice(k.start // BLOCK, -(-k.stop // BLOCK))
        scales = self.scales[rows, columns]
        packed = self.data[rows, columns.start * BLOCK // 2 : columns.stop * BLOCK // 2]
        values = blocks.expand(packed, e4m3.decode(scales, dtype), out)
        if dtype == torch.float64:
            return _without_bounds(values[:, : k.stop - k.start])
        return _Tile(values[:, : k.stop - k.start], _leaf_bounds(values, scales).tolist())


def _without_bounds(values: Tensor) -> _Tile:
    return _Tile(values, [0.0] * -(-values.shape[1] // K_LEAF))


def _leaf_bounds(values: Tensor, scales: Tensor) -> Tensor:
    """For each leaf of k the largest norm / unit over the rows, fp32 (leaves,).

    The unit of a row is the largest power of two of which all its values in the leaf are multiples. By Cauchy and
    Schwarz a sum of |a||b| over the leaf is at most bound(a) x bound(b) x unit(a) x unit(b).
    """
    rows, k = values.shape
    pad = -k % K_LEAF
    norms = torch.nn.functional.pad(values, (0, pad)) if pad else values
    norms = torch.linalg.vector_norm(norms.view(rows, -1, K_LEAF), dim=-1)
    below = scales.view(torch.uint8) - 1  # wraps, so that 0, which bounds nothing, becomes the largest
    below = torch.nn.functional.pad(below, (0, pad // BLOCK), value=255) if pad else below
    smallest = (below.view(rows, -1, K_LEAF // BLOCK).amin(-1) + 1).view(torch.float8_e4m3fn)
    units = e4m3.step(e4m3.decode(smallest)) * e2m1.MAGNITUDES[1]
    bounds: Tensor = (norms * (1 + 2.0**-16) / units).amax(0)  # more than a rounded norm can fall short
    return bounds


def _matrices(x: NVFP4Tensor | Tensor, batch: torch.Size | None) -> list[_Matrix]:
    """One matrix for each index of `batch`, broadcast to it; or, if None, a single one that holds all rows."""
    if isinstance(x, NVFP4Tensor):
        x = x.with_layout(LINEAR)
        data, scales = x.codes, x.scales
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
