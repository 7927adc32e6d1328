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


def add_up(rTotal: Any, rSums: Any) -> None:
    """The tensor core's sums to their total, rounded to nearest; they go on from zero."""
    for i in range(cute.size(rSums)):
        rTotal[i] = rTotal[i] + rSums[i]
        rSums[i] = Float32(0.0)


@dataclass(frozen=True)
class Sums:
    """In shared memory: of every warp tokens x 16 rows in fp32.

    A CTA finishes its share of the tiles of rows, and has of each the sums of all parts of k. In a cluster it gets the
    other CTAs' from them. Sums come in the order (part of k, tile of the share).

    Args:
        address: of the first sums.
        stride: bytes from one warp's sums to the next.
        row_warps, k_warps, ranks: tiles of rows, parts of k in a CTA, CTAs of a cluster, which are parts of k too.
    """

    address: Int32
    stride: int
    row_warps: int
    k_warps: int
    ranks: int

    @property
    def share(self) -> int:
        """Tiles of rows that a CTA finishes."""
        return self.row_warps // self.ranks

    @cute.jit
    def keep(self, rSums, warp, lane, rank=0):
        """Of this warp of the CTA of that rank, where it belongs; warps come in the order (part of k, tile of rows).

        Fragments of 16 rows x 8 tokens: a lane 4g + t has tokens 2t and 2t + 1 of rows g and g + 8.
        """
        tile = warp % self.row_warps
        part = rank * self.k_warps + warp // self.row_warps
        place = self.address + (part * self.share + tile % self.share) * self.stride
        place += (lane % 4 * 2 * PITCH + lane // 4) * 4
        if cutlass.const_expr(self.ranks == 1):
            self.store(rSums, place, async_copies.store_fp32)
        else:
            home = tile // self.share
            if home == rank:
                self.store(rSums, place, async_copies.store_fp32)
            else:
                self.store(rSums, async_copies.peer(place, home), async_copies.store_peer_fp32)

    def store(self, rSums: Any, place: Int32, store: Any) -> None:
        for i in range(cute.size(rSums) // 4):
            for j in range(4):
                store(place + ((8 * i + j % 2) * PITCH + j // 2 * 8) * 4, rSums[4 * i + j])

    def total(self, token: Int32, row: Int32) -> list[Any]:
        """Of VECTOR rows from `row` of the share on, a multiple of that; parts of k in their order."""
        first = self.address + row // ROWS * self.stride + (token * PITCH + row % ROWS) * 4
        step = self.share * self.stride
        sums = list(async_copies.load_fp32x4(first))
        for part in range(1, self.ranks * self.k_warps):
            added = async_copies.load_fp32x4(first + part * step)
            sums = [x + y for x, y in zip(sums, added, strict=True)]
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
    """Every thread of the CTA finishes some of its share of the tokens x rows whose first are at `corner` of the
    output."""
    width = sums.share * ROWS // VECTOR
    first = corner[0], corner[1] + rank * (sums.share * ROWS)
    for i in cutlass.range_constexpr(-(-tokens * width // threads)):
        at = thread + i * threads
        _finish_vector(sums, finish, first, at // width, at % width * VECTOR, tokens)


@cute.jit
def _finish_vector(sums, finish, corner, token, row, tokens):
    at_token, at_column = corner[0] + token, corner[1] + row
    if (token < tokens) & (at_token < finish.tokens) & (at_column < finish.n):
        finish.store(sums.total(token, row), at_token, at_column)
