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
from blockscale.kernels.parts.hopper_memory import VECTOR_BYTES, result_pitch
from blockscale.kernels.parts.sums import Finish


@dataclass(frozen=True)
class Exchange:
    """How two CTAs that have sums of the same tile add them: each gets the other's of its half of the tokens.

    Args:
        address: of shared memory for half of a thread's sums for each of `threads`.
        rank: of this CTA in the cluster.
    """

    address: Int32
    threads: int
    rank: Int32

    def give(self, rSums, thread: Int32) -> None:
        """The sums that the other CTA finishes."""
        half = cute.size(rSums) // 2
        for i in range(0, half, 4):
            other = [cutlass.select_(self.rank == 0, rSums[half + i + j], rSums[i + j]) for j in range(4)]
            async_copies.store_fp32x4(self._place(i, thread), *other)

    def take(self, rSums, thread: Int32) -> None:
        """The sums that this CTA finishes, which are then the first half."""
        half = cute.size(rSums) // 2
        for i in range(0, half, 4):
            there = async_copies.peer(self._place(i, thread), 1 - self.rank)
            for j, other in enumerate(async_copies.load_peer_fp32x4(there)):
                rSums[i + j] = cutlass.select_(self.rank == 0, rSums[i + j], rSums[half + i + j]) + other

    def _place(self, i: int, thread: Int32) -> Int32:
        return self.address + (i // 4 * self.threads + thread) * VECTOR_BYTES


@dataclass(frozen=True)
class TileResults:
    """tokens x rows results in shared memory at `address`, on their way out."""

    address: Int32
    tokens: int
    rows: int
    finish: Finish

    @property
    def pitch(self) -> int:
        """Bytes from one token's results to the next."""
        return result_pitch(self.rows, self.finish.dtype.width // 8)

    @cute.jit
    def stage(self, rSums, warp, lane, column):
        """A warp's sums, finished; its first row is the result's `column`."""
        x, power = self.finish.alpha
        offsets = [Float32(0.0)] * 2
        if cutlass.const_expr(self.finish.bias is not None):
            offsets = [self.finish.bias.column(column + lane // 4 + 8 * upper) for upper in range(2)]
        activation = ACTIVATIONS[self.finish.activation]
        for group in cutlass.range_constexpr(0, self.tokens // 8, 2):
            values = []
            for i in cutlass.range_constexpr(8):
                y = rSums[4 * group + i] * x * power
                if cutlass.const_expr(self.finish.bias is not None):
                    y = y + offsets[i // 2 % 2]
                values.append(activation(y))
            if cutlass.const_expr(self.finish.dtype.width == 16):
                self._turn(values, 8 * group, warp, lane)
            else:
                self._spread(values, 8 * group, warp, lane)

    def _turn(self, values, token: int, warp, lane) -> None:
        """Two groups of tokens as four matrices of 8 x 8, transposed on the way (PTX: stmatrix)."""
        matrix, row = lane // 8, lane % 8
        place = self.address + (token + matrix // 2 * 8 + row) * self.pitch + (warp * ROWS + matrix % 2 * 8) * 2
        pairs = [async_copies.packed(values[i], values[i + 1], self.finish.dtype) for i in range(0, 8, 2)]
        async_copies.store_matrices_turned(place, pairs)

    def _spread(self, values, token: int, warp, lane) -> None:
        place = self.address + (token + lane % 4 * 2) * self.pitch + (warp * ROWS + lane // 4) * 4
        for i, value in enumerate(values):
            async_copies.store_fp32(place + (i // 4 * 8 + i % 2) * self.pitch + i // 2 % 2 * 32, value)

    @cute.jit
    def write(self, corner, thread, threads: int):
        """All results, by `threads` threads; (token, column) of the first are `corner`."""
        out, size = self.finish, self.finish.dtype.width // 8
        vector = VECTOR_BYTES // size
        width = self.rows // vector
        aligned = (out.pointer.toint() | out.ld * size) % VECTOR_BYTES == 0
        for i in cutlass.range(thread, self.tokens * width, threads, unroll=4):
            token, column = i // width, i % width * vector
            source = self.address + token * self.pitch + column * size
            at_token, at_column = corner[0] + token, corner[1] + column
            target = out.pointer + (Int64(at_token) * out.ld + at_column)
            if at_token < out.tokens:
                if aligned & (at_column + vector <= out.n):
                    async_copies.store_16(target.toint(), async_copies.load_16(source))
                else:
                    pointer = cute.make_ptr(out.dtype, source, cute.AddressSpace.smem)
                    for j in cutlass.range_constexpr(vector):
                        if at_column + j < out.n:
                            (target + j).store((pointer + j).load())
