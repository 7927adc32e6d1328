"""Results of the warps that multiply: from registers to act(alpha x sum + bias) in global memory.

A thread has 8 sums side by side of each of its rows and spans, or 4 or 2 in narrow tiles, in an order that depends on
its place in its quad (see warptile.place); a quad has whole spans. So vectors leave as in the epilogue of sm_100a,
which parts/store.py has.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Uint32, cute

from blockscale.kernels.parts import store
from blockscale.kernels.parts.activation import ACTIVATIONS
from blockscale.kernels.parts.arithmetic import Bias, scaled
from blockscale.kernels.parts.blockmma import OCTETS
from blockscale.kernels.parts.store import Direct, Output, Swapped
from blockscale.kernels.parts.warptile import SPAN, WarpTile, place, turn

DTYPES = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16, "fp32": cutlass.Float32, "nvfp4": cutlass.Uint8}


@dataclass(frozen=True)
class Results:
    """Where results go, and what is done to them before: what is the same for all tiles of a warp."""

    g: WarpTile
    output: Output
    swap: bool
    activation: str | None
    bias: Bias | None
    alpha: tuple[Float32, Float32]
    wide: Boolean
    narrow: Boolean

    @staticmethod
    def of(g: WarpTile, memory: Any, swap: bool, activation: str | None, bias: bool) -> "Results":
        output = memory.output
        offsets = Bias(memory.bias, output.n) if bias else None
        aligned = (output.aligned(nbytes) for nbytes in store.VECTORS)
        return Results(g, output, swap, activation, offsets, memory.alpha.load(), *aligned)

    def leave(self, rSums: Any, warp: Int32, at: tuple[Int32, Int32, Int32]) -> None:
        """All sums of a thread; warp: in its group; at: (row, column, matrix) of the tile."""
        g = self.g
        down, across = g.warps
        lane = Uint32(cute.arch.lane_idx())
        u, v, quad = Uint32(warp % down), Uint32(warp // down), lane % 4
        row, column = at[0] * g.rows, at[1] * g.columns + Int32(v * SPAN + quad * (2 * g.per_span))
        for x in range(g.row_blocks):
            block = u + down * x
            for half in range(2):
                octet = block % 2 * 2 + half
                first = row + Int32(block // 2 * SPAN + place(octet, lane // 4, OCTETS))
                for y in range(g.spans):
                    sums = [
                        rSums[g.first_sum(x, y, j) + 2 * half + i].bitcast(Float32)
                        for j in range(g.per_span)
                        for i in range(2)
                    ]
                    self.vector(sums, turn(quad, g.per_span), first, column + y * across * SPAN, at[2])

    def vector(self, sums: list[Float32], turn: Uint32, row: Int32, column: Int32, matrix: Int32) -> None:
        """Sums of a row of the kernel's tile, side by side from `column` on once their pairs are in order."""
        sums = _in_order(sums, turn)
        out, count = self.output, len(sums)
        if self.swap:
            target: Any = Swapped(out, column, row, out.address(matrix, column, row))
            bias = None if self.bias is None else [self.bias.column(row)] * count
        else:
            narrow = self.narrow if count * out.nbytes >= 8 else Boolean(False)
            wide = self.wide if count * out.nbytes >= 8 else Boolean(False)
            target = Direct(out, row, column, out.address(matrix, row, column), wide, narrow)
            bias = None if self.bias is None else self._bias(column, count)
        activation = ACTIVATIONS[self.activation]
        words = target.pack([activation(y) for y in scaled(sums, self.alpha, bias)], Int32(0))
        target.store(words, Int32(0), Int32(0))

    def _bias(self, column: Int32, count: int) -> list[Float32]:
        if count == 8:
            return self.bias.columns(column, count)
        return [self.bias.column(column + i) for i in range(count)]


def _in_order(sums: list[Float32], turn: Uint32) -> list[Float32]:
    """Pairs, of which the j-th is number j ^ turn, as 0, 1, ...: by exchanging neighbours, then neighbours of two."""
    pairs = [tuple(sums[i : i + 2]) for i in range(0, len(sums), 2)]
    distance = 1
    while distance < len(pairs):
        swaps = (turn & distance) != 0
        pairs = [
            tuple(
                Float32(cutlass.select_(swaps, there, here))
                for there, here in zip(pairs[i ^ distance], pair, strict=True)
            )
            for i, pair in enumerate(pairs)
        ]
        distance *= 2
    return [y for pair in pairs for y in pair]
