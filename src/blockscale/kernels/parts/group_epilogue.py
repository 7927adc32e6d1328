"""The epilogue of a grouped product: as `Epilogue`, with a factor and a bias for each group, and no row beyond it."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from blockscale.kernels.parts import store, tensorcore
from blockscale.kernels.parts.activation import ACTIVATIONS, GATES
from blockscale.kernels.parts.arithmetic import Alpha, Bias, scaled
from blockscale.kernels.parts.epilogue import Epilogue, Tile, Way
from blockscale.kernels.parts.geometry import ATOM_BYTES, ATOM_ROWS, CTA_ROWS, STEP_K
from blockscale.kernels.parts.group_order import GRANULE
from blockscale.kernels.parts.staging import ROWS
from blockscale.kernels.parts.store import Direct, Quantised, Swapped


class GroupEpilogue(Epilogue):
    """Of one configuration: results go straight to global memory.

    Args:
        columns: of the result, or with `swap` rows of it, that a tile is for.
        apart: with a gate, how many columns of sums on those are that it multiplies; otherwise of no use.
        read: a multiple of 16.
        activation: one more, "swiglu" or "geglu". The others are as for `Epilogue`.
    """

    def __init__(self, columns, out_dtype, *, apart=0, read=32, swap=False, bias=None, activation=None):
        super().__init__(columns, out_dtype, read=read, swap=swap, bias=bias, activation=activation)
        self.apart = apart
        if out_dtype != "nvfp4":
            self.columns = min(read, columns)

    @cute.jit
    def run(self, c, warps):
        """Tile after tile; a thread has a row of it, and takes `columns` at a time, then 16 at a time what is left.

        c.memory has alphas (`Alphas`), output (`Output`), bias (`Biases`), and for NVFP4 scales, atoms of rows by
        groups, and unit, the global scale.
        """
        acc, groups = c.acc, c.groups
        way = self.way(c)
        lanes = c.warp * ROWS
        sums = acc.consumer()
        index = c.first
        while index < groups.total:
            work = c.work(index)
            tile = self.tile_at(way, c, work.place)
            acc.wait_full(sums)
            tensorcore.after_sync()
            address = c.accumulator(sums) + (lanes << 16)
            whole = work.columns // self.columns
            for i in cutlass.range(whole, unroll=1):
                tile.through(address, i * self.columns, 0)
            if cutlass.const_expr(self.out_dtype != "nvfp4" and self.columns > GRANULE):
                rest = tile.by(GRANULE)
                for i in cutlass.range((work.columns - whole * self.columns) // GRANULE, unroll=1):
                    rest.through(address, whole * self.columns + i * GRANULE, 0)
            self.release(acc, sums, warps)
            sums = sums.next()
            index = index + c.stride

    def way(self, c: Any) -> Way:
        """What is the same for all tiles; factor, bias and end of the rows are not yet those of a group."""
        memory = c.memory.after_grids_before()
        one = Float32(1.0)
        unit = memory.unit.load() if self.out_dtype == "nvfp4" else None
        aligned = (memory.output.aligned(nbytes) for nbytes in store.VECTORS)
        return Way(self, c.warp, memory.output, None, memory.scales, unit, None, (one, one), *aligned)

    def tile_at(self, way: Way, c: Any, place: Any) -> "GroupTile":
        """This warp's part of a tile."""
        memory = c.memory.after_grids_before()
        output = replace(way.output, m=place.first + place.rows)
        way = replace(way, output=output, alpha=memory.alphas.of(place.group).load())
        block = place.row * c.geometry.ctas + c.cluster.half
        row = block * CTA_ROWS + c.warp * ROWS + cute.arch.lane_idx()  # of the group, or a column of the output
        column = place.column * self.tile_n
        biases: list[Any] = [None, None]
        if self.bias:
            biases = [memory.bias.of(place.group, output.n * i, output.n) for i in range(1 + bool(self.apart))]
        if self.swap:
            first = place.first + column
            target = Swapped(output, first, row, output.address(Int32(0), first, row))
            biases = [bias and bias.column(row) for bias in biases]
        elif self.out_dtype == "nvfp4":
            target = self._quantised(way, place, block, row, column)
        else:
            row = place.first + row
            target = Direct(output, row, column, output.address(Int32(0), row, column), way.wide, way.narrow)
        return GroupTile(way, target, column, biases[0], biases[-1])

    def _quantised(self, way: Way, place: Any, block: Int32, row: Int32, column: Int32) -> Quantised:
        output = way.output
        codes = output.address(Int32(0), place.first + row, column // 2)
        in_atom = row % 32 * 16 + row % ATOM_ROWS // 32 * 4
        atoms = Int64(place.atom + block) * cute.ceil_div(output.n, STEP_K)
        scales = way.scales.toint() + atoms * ATOM_BYTES + in_atom
        some = block * ATOM_ROWS < place.rows
        return Quantised(codes, scales, row < place.rows, some, column, output.n, way.unit, way.wide)


@dataclass(frozen=True)
class GroupTile(Tile):
    """As `Tile`. other: the bias of what a gate multiplies."""

    other: Bias | Float32 | None

    def by(self, columns: int) -> "GroupTile":
        """The same, so many columns at a time."""
        epilogue = GroupEpilogue.__new__(GroupEpilogue)
        epilogue.__dict__ = {**self.way.epilogue.__dict__, "columns": columns}
        return replace(self, way=replace(self.way, epilogue=epilogue))

    def through(self, address: Int32, column: Int32, slot: Int32) -> Int32:
        e = self.way.epilogue
        if not e.apart:
            return super().through(address, column, slot)
        gate = ACTIVATIONS[GATES[e.activation]]
        second = replace(self, bias=self.other)
        gates, values = (
            scaled(sums, self.way.alpha, bias)
            for sums, bias in (self.read(address, column), second.read(address + e.apart, column))
        )
        words = self.target.pack([gate(x) * y for x, y in zip(gates, values, strict=True)], column)
        return self.store(words, column, slot)


@dataclass(frozen=True)
class Alphas:
    """What sums of a group are multiplied by: as `Alpha`, but for the last pointer, behind which each group, or all of
    them, have a number of their own."""

    alpha: Alpha
    count: Int32

    def of(self, group: Int32) -> Alpha:
        *units, alphas = self.alpha.pointers
        own = alphas + cutlass.select_(self.count > 1, group, Int32(0))
        return replace(self.alpha, pointers=(*units, own))


@dataclass(frozen=True)
class Biases:
    """(count, n) numbers, a row for each group, or one for all of them."""

    pointer: cute.Pointer
    count: Int32
    n: Int32

    def of(self, group: Int32, first: Int32, number: Int32) -> Bias:
        """Of a group, `number` from the `first` on."""
        row = Int64(cutlass.select_(self.count > 1, group, Int32(0))) * self.n
        return Bias(self.pointer + (row + first), number)
