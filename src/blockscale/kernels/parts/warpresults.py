"""Results of the warps that multiply: from registers to act(alpha x sum + bias) in global memory.

A thread has 4 sums side by side of each of its rows and blocks of columns, in an order that depends on its place in its
quad (see warptile.place), a quad all 16; in tiles of 8 columns 2 and 8. They leave as in the epilogue of sm_100a, which
parts/store.py has.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, cute

from blockscale.kernels.parts import quantise, store
from blockscale.kernels.parts.activation import ACTIVATIONS
from blockscale.kernels.parts.arithmetic import Bias, scaled
from blockscale.kernels.parts.geometry import ATOM_BYTES, ATOM_ROWS, STEP_K
from blockscale.kernels.parts.store import Direct, Output, Swapped
from blockscale.kernels.parts.warptile import (
    BLOCK,
    LINE_BYTES,
    LINES,
    SCALE_BYTES,
    SPAN,
    WarpTile,
    place,
    turn,
)

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
    narrow: Boolean
    blocks: "Blocks | None"

    @staticmethod
    def of(g: WarpTile, memory: Any, swap: bool, activation: str | None, bias: bool, quantised: bool) -> "Results":
        output = memory.output
        offsets = Bias(memory.bias, output.n) if bias else None
        blocks = Blocks(output, memory.scales, memory.unit.load()) if quantised else None
        narrow = output.aligned(store.VECTORS[-1])
        return Results(g, output, swap, activation, offsets, memory.alpha.load(), narrow, blocks)

    def leave(self, rSums: Any, warp: Int32, at: tuple[Int32, Int32, Int32]) -> None:
        """All sums of a thread; warp: in its group; at: (row, column, matrix) of the tile."""
        g = self.g
        for x in range(g.m.blocks):
            for y in range(g.n.blocks):
                words = [self._words(rSums, x, y, octet) for octet in range(g.n.octets)]
                self.block([[word.bitcast(Float32) for word in four] for four in words], x, y, warp, at)

    @cute.jit
    def leave_together(self, exchange, rSums, parity, warp, at):
        """Likewise where several CTAs have sums of the tile: each stores the blocks that have its rank, modulo split.

        Returns the parity of the next round.
        """
        g = self.g
        for x in cutlass.range_constexpr(g.m.blocks):
            vectors = [self._words(rSums, x, y, octet) for y in range(g.n.blocks) for octet in range(g.n.octets)]
            exchange.give(vectors, parity)
            for y in cutlass.range_constexpr(g.n.blocks):
                if (x * g.n.blocks + y) % exchange.split == exchange.rank:
                    totals = [exchange.take(y * g.n.octets + octet) for octet in range(g.n.octets)]
                    self.block(totals, x, y, warp, at)
            exchange.taken()
            parity = parity ^ 1
        return parity

    def _words(self, rSums: Any, x: int, y: int, octet: int) -> list[Int32]:
        first = self.g.first_sum(x, y, octet)
        return [rSums[first + i] for i in range(4)]

    def block(self, fours: list[list[Float32]], x: int, y: int, warp: Int32, at: tuple[Int32, Int32, Int32]) -> None:
        """A warp's block x of rows by block y of columns: of each octet a thread's four sums."""
        g = self.g
        lane = Uint32(cute.arch.lane_idx())
        u, v, quad = Uint32(warp % g.warps[0]), Uint32(warp // g.warps[0]), lane % 4
        row = at[0] * g.rows + Int32(g.m.start(u)) + g.m.row(x)
        column = at[1] * g.columns + Int32(g.n.start(v) + quad * (2 * g.n.octets)) + g.n.row(y)
        for half in range(2):
            sums = [four[2 * half + i] for four in fours for i in range(2)]
            line = row + Int32(place(half, lane // 4, g.m.octets))
            self.vector(sums, turn(quad, g.n.octets), line, column, at[2])

    def vector(self, sums: list[Float32], turn: Uint32, row: Int32, column: Int32, matrix: Int32) -> None:
        """Sums of a row of the kernel's tile, side by side from `column` on once their pairs are in order."""
        sums = _in_order(sums, turn)
        out, count = self.output, len(sums)
        if self.swap:
            bias = None if self.bias is None else [self.bias.column(row)] * count
        else:
            bias = None if self.bias is None else self._bias(column, count)
        activation = ACTIVATIONS[self.activation]
        values = [activation(y) for y in scaled(sums, self.alpha, bias)]
        if self.blocks is not None:
            self.blocks.store(values, row, column, matrix)
            return
        target: Any = Direct(out, row, column, out.address(matrix, row, column), Boolean(False), self._narrow(count))
        if self.swap:
            target = Swapped(out, column, row, out.address(matrix, column, row))
        target.store(target.pack(values, Int32(0)), Int32(0), Int32(0))

    def _narrow(self, count: int) -> Boolean:
        return self.narrow if count * self.output.nbytes >= 8 else Boolean(False)

    def _bias(self, column: Int32, count: int) -> list[Float32]:
        return [self.bias.column(column + i) for i in range(count)]


@dataclass(frozen=True)
class Blocks:
    """NVFP4 with a given global scale: a quad has a block of 16 of each of its rows, a thread four numbers of it.

    Columns up to the next multiple of 64 are written as zeros, and so are the scales of rows up to the next of 128:
    tiles are as many or more.

    scales: atoms of (round_up(m, 128), round_up(n, 64) / 16) a matrix. unit: the global scale.
    """

    output: Output
    scales: cute.Pointer
    unit: Float32

    @cute.jit
    def store(self, values, row, column, matrix):
        """Four numbers of a row from `column` on."""
        out = self.output
        inside = [
            Float32(cutlass.select_(column + i < out.n, quantise.finite(x), Float32(0.0))) for i, x in enumerate(values)
        ]
        amax = cute.arch.fmax(quantise.magnitude(inside[0], inside[1]), quantise.magnitude(inside[2], inside[3]))
        for distance in (1, 2):
            amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, distance))
        word, scale = quantise.encode_part(inside, amax, self.unit)
        beside = cute.arch.shuffle_sync_bfly(word, 1)
        codes = word & 0xFFFF | beside << 16
        t = cute.arch.lane_idx() % 4
        if column < (out.n + 63 & -64):
            if (row < out.m) & (t % 2 == 0):
                self.at(Int32, out.address(matrix, row, column // 2)).store(codes)
            if (t == 0) & (row < (out.m + ATOM_ROWS - 1 & -ATOM_ROWS)):
                self.at(Uint8, self.scale(row, column, matrix)).store(
                    Uint8(cutlass.select_(row < out.m, scale, Int32(0)))
                )

    def at(self, kind: type[cutlass.Numeric], address: Int64) -> cute.Pointer:
        return cute.make_ptr(kind, address, cute.AddressSpace.gmem, assumed_align=kind.width // 8)

    def scale(self, row: Int32, column: Int32, matrix: Int32) -> Int64:
        """The address of a block's scale."""
        atoms = Int64(matrix) * cute.ceil_div(self.output.m, ATOM_ROWS) + row // ATOM_ROWS
        atom = (atoms * cute.ceil_div(self.output.n, STEP_K) + column // STEP_K) * ATOM_BYTES
        within = row % LINES * LINE_BYTES + row % ATOM_ROWS // SPAN * SCALE_BYTES + column % STEP_K // BLOCK
        return self.scales.toint() + atom + within


def _in_order(sums: list[Float32], turn: Uint32) -> list[Float32]:
    """Pairs, of which the j-th is number j ^ turn, as 0, 1: by exchanging them."""
    if len(sums) == 2:
        return sums
    swaps = turn != 0
    swapped = [*sums[2:], *sums[:2]]
    return [Float32(cutlass.select_(swaps, there, here)) for there, here in zip(swapped, sums, strict=True)]
