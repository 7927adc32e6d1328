"""The end of a product whose sums lie in registers as wgmma leaves them: finished, turned, stored.

A warp has 16 rows of b and tokens in groups of 8. Of each group a lane 4g + t has tokens 2t and 2t + 1 of row g, then
of row g + 8 (PTX: wgmma, matrix D). Results lie with the tokens as rows: so each warp puts its own, in their type, into
shared memory, where those of a token follow one another, and threads write vectors from there.
"""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute

from blockscale.formats.fragment import ROWS
from blockscale.kernels.parts import async_copies
from blockscale.kernels.parts.activation import ACTIVATIONS
from blockscale.kernels.parts.hopper_memory import VECTOR_BYTES
from blockscale.kernels.parts.sums import Finish

GROUP_ROWS, THREADS = 64, 128  # of a warpgroup


@dataclass(frozen=True)
class Exchange:
    """How two CTAs that have sums of the same tile add them: each gets the other's of its half of the tokens.

    Args:
        address: of shared memory for half of a thread's sums for each of `threads`.
        rank: of this CTA in the cluster.
        barrier: where the bytes report to that this CTA gets.
    """

    address: Int32
    threads: int
    rank: Int32
    barrier: Int32

    def give(self, rSums, thread: Int32) -> None:
        """The sums that the other CTA finishes, to its memory."""
        half = cute.size(rSums) // 2
        there = async_copies.peer(self.address, 1 - self.rank) + thread * VECTOR_BYTES
        barrier = async_copies.peer(self.barrier, 1 - self.rank)
        for i in range(0, half, 4):
            other = [cutlass.select_(self.rank == 0, rSums[half + i + j], rSums[i + j]) for j in range(4)]
            async_copies.send_fp32x4(there + i // 4 * self.threads * VECTOR_BYTES, *other, barrier)

    def take(self, rSums, thread: Int32) -> None:
        """The sums that this CTA finishes, which are then the first half; once all have come."""
        half = cute.size(rSums) // 2
        here = self.address + thread * VECTOR_BYTES
        for i in range(0, half, 4):
            for j, other in enumerate(async_copies.load_fp32x4(here + i // 4 * self.threads * VECTOR_BYTES)):
                rSums[i + j] = cutlass.select_(self.rank == 0, rSums[i + j], rSums[half + i + j]) + other


@dataclass(frozen=True)
class TileResults:
    """tokens x 64 results of a warpgroup in shared memory at `address`, on their way out.

    Vectors of 16 bytes of a token change places, by the token's last three bits, so that a warp meets no bank twice.
    """

    address: Int32
    tokens: int
    finish: Finish

    @property
    def size(self) -> int:
        return self.finish.dtype.width // 8

    def place(self, token: Int32, vector: Int32) -> Int32:
        """Where a vector of a token is."""
        return self.address + token * (GROUP_ROWS * self.size) + (vector ^ token % 8) * VECTOR_BYTES

    @cute.jit
    def stage(self, rSums, token, warp, lane, column):
        """A warp's sums from a token on, finished; the warpgroup's first row is the result's `column`."""
        x, power = self.finish.alpha
        offsets = [Float32(0.0)] * 2
        if cutlass.const_expr(self.finish.bias is not None):
            first = column + warp * ROWS + lane // 4
            offsets = [self.finish.bias.column(first + 8 * upper) for upper in range(2)]
        activation = ACTIVATIONS[self.finish.activation]
        for group in cutlass.range_constexpr(0, self.tokens // 8, 2):
            values = []
            for i in cutlass.range_constexpr(8):
                y = rSums[token // 2 + 4 * group + i] * x * power
                if cutlass.const_expr(self.finish.bias is not None):
                    y = y + offsets[i // 2 % 2]
                values.append(activation(y))
            if cutlass.const_expr(self.size == 2):
                self._turn(values, 8 * group, warp, lane)
            else:
                self._spread(values, 8 * group, warp, lane)

    def _turn(self, values, token: int, warp, lane) -> None:
        """Two groups of tokens as four matrices of 8 x 8, transposed on the way (PTX: stmatrix)."""
        matrix, row = lane // 8, lane % 8
        pairs = [async_copies.packed(values[i], values[i + 1], self.finish.dtype) for i in range(0, 8, 2)]
        place = self.place(matrix // 2 * 8 + row, warp * 2 + matrix % 2)
        async_copies.store_matrices_turned(place + token * (GROUP_ROWS * self.size), pairs)

    def _spread(self, values, token: int, warp, lane) -> None:
        for i, value in enumerate(values):
            place = self.place(lane % 4 * 2 + i % 2, warp * 4 + lane // 16 + i // 2 % 2 * 2) + lane // 4 % 4 * 4
            async_copies.store_fp32(place + (token + i // 4 * 8) * (GROUP_ROWS * self.size), value)

    @cute.jit
    def write(self, corner, thread):
        """All results, by the threads of the warpgroup; (token, column) of the first are `corner`."""
        out, size = self.finish, self.size
        elements = VECTOR_BYTES // size
        width = GROUP_ROWS // elements
        aligned = (out.pointer.toint() | out.ld * size) % VECTOR_BYTES == 0
        for i in cutlass.range(thread, self.tokens * width, THREADS, unroll=4):
            token, vector = i // width, i % width
            source = self.place(token, vector)
            at_token, at_column = corner[0] + token, corner[1] + vector * elements
            target = out.pointer + (Int64(at_token) * out.ld + at_column)
            if at_token < out.tokens:
                if aligned & (at_column + elements <= out.n):
                    async_copies.store_16(target.toint(), async_copies.load_16(source))
                else:
                    pointer = cute.make_ptr(out.dtype, source, cute.AddressSpace.smem)
                    for j in cutlass.range_constexpr(elements):
                        if at_column + j < out.n:
                            (target + j).store((pointer + j).load())
