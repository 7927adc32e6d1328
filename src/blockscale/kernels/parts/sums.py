"""The end of a product whose sums are spread over warps: kept in shared memory, added in order, finished, stored."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from blockscale.formats.fragment import ROWS
from blockscale.kernels.parts import async_copies
from blockscale.kernels.parts.activation import ACTIVATIONS
from blockscale.kernels.parts.arithmetic import Bias
from blockscale.kernels.parts.hopper_memory import PITCH

VECTOR = 4  # rows that a thread finishes at a time


@dataclass(frozen=True)
class Sums:
    """In shared memory, of every warp of a CTA, and of each CTA of its cluster alike: tokens x 16 rows in fp32.

    Warps come in the order (part of k, tile of rows). A warp's sums begin `warp_bytes` after those of the one before.

    Args:
        address: of the first warp's sums.
        row_warps, k_warps, ranks: tiles of rows, parts of k in a CTA, CTAs of a cluster, which are parts of k too.
    """

    address: Int32
    warp_bytes: int
    row_warps: int
    k_warps: int
    ranks: int

    def keep(self, rSums: Any, warp: Int32, lane: Int32) -> None:
        """Fragments of 16 rows x 8 tokens: a lane 4g + t has tokens 2t and 2t + 1 of rows g and g + 8."""
        place = self.address + warp * self.warp_bytes + (lane % 4 * 2 * PITCH + lane // 4) * 4
        for i in range(cute.size(rSums) // 4):
            for j in range(4):
                async_copies.store_fp32(place + ((8 * i + j % 2) * PITCH + j // 2 * 8) * 4, rSums[4 * i + j])

    def total(self, token: Int32, row: Int32) -> list[Any]:
        """Of VECTOR rows from `row` on, a multiple of that; parts of k in their order."""
        first = self.address + row // ROWS * self.warp_bytes + (token * PITCH + row % ROWS) * 4
        parts = []
        for rank in range(self.ranks):
            for k_warp in range(self.k_warps):
                source = first + k_warp * self.row_warps * self.warp_bytes
                if self.ranks == 1:
                    parts.append(async_copies.load_fp32x4(source))
                else:
                    parts.append(async_copies.load_peer_fp32x4(source, Int32(rank)))
        sums = list(parts[0])
        for part in parts[1:]:
            sums = [x + y for x, y in zip(sums, part, strict=True)]
        return sums


@dataclass(frozen=True)
class Finish:
    """What becomes of sums: activation(sums x alpha + bias), cast, to where it belongs.

    Args:
        pointer, dtype, ld: out, (m, n), rows ld elements apart.
        tokens, n: from where on nothing is written.
        alpha: as `Alpha.load` gives it.
    """

    pointer: cute.Pointer
    dtype: type[cutlass.Numeric]
    ld: Int64
    tokens: Int32
    n: Int32
    alpha: tuple[Float32, Float32]
    bias: Bias | None
    activation: str | None

    @cute.jit
    def store(self, sums, token, column):
        """VECTOR sums of a token and of the columns from `column` on, a multiple of VECTOR."""
        x, power = self.alpha
        rOut = cute.make_rmem_tensor(VECTOR, Float32)
        for j in cutlass.range_constexpr(VECTOR):
            y = sums[j] * x * power
            if cutlass.const_expr(self.bias is not None):
                y = y + self.bias.column(column + j)
            rOut[j] = ACTIVATIONS[self.activation](y)
        result = rOut.load().to(self.dtype)
        elements = [result[j] for j in range(VECTOR)]
        size = VECTOR * self.dtype.width // 8
        aligned = (self.pointer.toint() | self.ld * (self.dtype.width // 8)) % size == 0
        address = self.pointer + (Int64(token) * self.ld + column)
        if aligned & (column + VECTOR <= self.n):
            vector = cute.make_ptr(self.dtype, address.toint(), cute.AddressSpace.gmem, assumed_align=size)
            cute.make_tensor(vector, cute.make_layout(VECTOR)).store(result)
        else:
            for j in cutlass.range_constexpr(VECTOR):
                if column + j < self.n:
                    (address + j).store(elements[j])


@cute.jit
def finish(sums: Sums, finish: Finish, corner, thread, rank, threads: int, tokens: int):
    """Every thread of the cluster finishes its share of the tokens x rows whose first are at `corner` of the output."""
    width = sums.row_warps * ROWS // VECTOR
    for i in cutlass.range_constexpr(-(-tokens * width // (threads * sums.ranks))):
        at = thread + (i * sums.ranks + rank) * threads
        _finish_vector(sums, finish, corner, at // width, at % width * VECTOR, tokens)


@cute.jit
def _finish_vector(sums, finish, corner, token, row, tokens):
    at_token, at_column = corner[0] + token, corner[1] + row
    if (token < tokens) & (at_token < finish.tokens) & (at_column < finish.n):
        finish.store(sums.total(token, row), at_token, at_column)
