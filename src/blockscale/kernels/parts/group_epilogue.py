"""The epilogue of a grouped product: as `Epilogue`, with a factor and a bias for each group, and no row beyond it."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from blockscale.kernels.parts import store, tensorcore
from blockscale.kernels.parts.activation import ACTIVATIONS
from blockscale.kernels.parts.arithmetic import Alpha, Bias
from blockscale.kernels.parts.epilogue import Epilogue, Tile, Way
from blockscale.kernels.parts.geometry import ATOM_BYTES, ATOM_ROWS, CTA_ROWS, STEP_K
from blockscale.kernels.parts.group_order import GRANULE
from blockscale.kernels.parts.staging import ROWS
from blockscale.kernels.parts.store import Direct, Quantised, Swapped


class GroupEpilogue(Epilogue):
    """Of one configuration: results go straight to global memory.

    Args:
        as those of `Epilogue`; `read` is a multiple of 16.
    """

    def __init__(self, tile_n, out_dtype, *, read=32, swap=False, bias=None, activation=None):
        super().__init__(tile_n, out_dtype, read=read, swap=swap, bias=bias, activation=activation)
        if out_dtype != "nvfp4":
            self.columns = min(read, tile_n)

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
            tile = self.tile_at(way, c, work)
            acc.wait_full(sums)
            tensorcore.after_sync()
            address = c.accumulator(sums) + (lanes << 16)
            whole = work.width // self.columns
            for i in cutlass.range(whole, unroll=1):
                tile.through(address, i * self.columns, 0)
            if cutlass.const_expr(self.columns % GRANULE == 0 and self.columns > GRANULE):
                rest = replace(tile, way=replace(tile.way, epilogue=self.of_columns(GRANULE)))
                for i in cutlass.range((work.width - whole * self.columns) // GRANULE, unroll=1):
                    rest.through(address, whole * self.columns + i * GRANULE, 0)
            self.release(acc, sums, warps)
            sums = sums.next()
            index = index + c.stride

    def of_columns(self, columns: int) -> "GroupEpilogue":
        """The same, with fragments of so many columns."""
        kept = (self.bias, self.activation)
        other = GroupEpilogue(self.tile_n, self.out_dtype, swap=self.swap, bias=kept[0], activation=kept[1])
        other.columns = columns
        return other

    def way(self, c: Any) -> Way:
        """What is the same for all tiles; the factor and the bias are not yet those of a group."""
        memory = c.memory.after_grids_before()
        one = Float32(1.0)
        unit = memory.unit.load() if self.out_dtype == "nvfp4" else None
        aligned = (memory.output.aligned(nbytes) for nbytes in store.VECTORS)
        return Way(self, c.warp, memory.output, None, memory.scales, unit, None, (one, one), *aligned)

    def tile_at(self, way: Way, c: Any, work: Any) -> Tile:
        """This warp's part of a tile."""
        memory, place = c.memory.after_grids_before(), work.place
        block = place.row * c.geometry.ctas + c.cluster.half
        row = block * CTA_ROWS + c.warp * ROWS + cute.arch.lane_idx()  # of the group, or a column of the output
        column = place.column * self.tile_n
        output = replace(way.output, m=place.first + place.rows)
        bias = memory.bias.of(place.group, output.n) if self.bias else None
        way = replace(way, output=output, alpha=memory.alphas.of(place.group).load())
        if self.swap:
            first = place.first + column
            target = Swapped(output, first, row, output.address(Int32(0), first, row))
            return Tile(way, target, column, bias.column(row) if bias else None)
        if self.out_dtype == "nvfp4":
            target = self._quantised(way, place, block, row, column)
        else:
            row = place.first + row
            target = Direct(output, row, column, output.address(Int32(0), row, column), way.wide, way.narrow)
        return Tile(way, target, column, bias)

    def _quantised(self, way: Way, place: Any, block: Int32, row: Int32, column: Int32) -> Quantised:
        output = way.output
        codes = output.address(Int32(0), place.first + row, column // 2)
        in_atom = row % 32 * 16 + row % ATOM_ROWS // 32 * 4
        atoms = Int64(place.atom + block) * cute.ceil_div(output.n, STEP_K)
        scales = way.scales.toint() + atoms * ATOM_BYTES + in_atom
        some = block * ATOM_ROWS < place.rows
        return Quantised(codes, scales, row < place.rows, some, column, output.n, way.unit, way.wide)


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

    def of(self, group: Int32, n: Int32) -> Bias:
        return Bias(self.pointer + Int64(cutlass.select_(self.count > 1, group, Int32(0))) * n, n)
