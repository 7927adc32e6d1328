"""The epilogue of a grouped product: as `Epilogue`, with a factor and a bias for each group, and no row beyond it."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Float64, Int32, Int64, cute

from blockscale.kernels.parts import store, tensorcore
from blockscale.kernels.parts.activation import ACTIVATIONS, GATES
from blockscale.kernels.parts.arithmetic import Alpha, Bias, scaled
from blockscale.kernels.parts.epilogue import Epilogue, Tile, Way
from blockscale.kernels.parts.geometry import ATOM_BYTES, ATOM_ROWS, CTA_ROWS, STEP_K
from blockscale.kernels.parts.group_order import GRANULE
from blockscale.kernels.parts.groups import ADDRESSES, COLUMNS, SIZES
from blockscale.kernels.parts.staging import ROWS
from blockscale.kernels.parts.store import Direct, Output, Quantised, Swapped, Words

QUANTISED_GATES = 32  # columns at a time where a gate's result is quantised: 64 take more registers than there are


class GroupEpilogue(Epilogue):
    """Of one configuration: results go straight to global memory.

    Args:
        tile_n: columns of the result, or with `swap` rows of it, that a tile is for.
        apart: with a gate, how many columns of sums on those are that it multiplies; otherwise of no use.
        read: a multiple of 16.
        activation: one more, "swiglu" or "geglu". The others are as for `Epilogue`.
    """

    def __init__(self, tile_n, out_dtype, *, apart=0, read=32, swap=False, bias=None, activation=None):
        super().__init__(tile_n, out_dtype, read=read, swap=swap, bias=bias, activation=activation)
        self.apart = apart
        if out_dtype != "nvfp4":
            self.columns = min(read, tile_n)
        elif apart:
            self.columns = QUANTISED_GATES

    @cute.jit
    def run(self, c, warps):
        """Tile after tile; a thread has a row of it, and takes `columns` at a time, then 16 at a time what is left.

        c.memory has result (`Results` or `ListedResults`), and for NVFP4 scales, atoms of rows by groups, and unit,
        the global scale.
        """
        acc, groups, memory = c.acc, c.groups, c.memory.after_grids_before()
        way = self.way(c, memory)
        lanes = c.warp * ROWS
        sums, turn = acc.consumer(), Int32(0)
        index = c.first
        while index < groups.total:
            work = c.work(index)
            tile = self.tile_at(way, c, memory.result, work.place)
            acc.wait_full(sums)
            tensorcore.after_sync()
            address = c.accumulator(sums) + (lanes << 16)
            self.leave(c, tile, address, work.columns, turn)
            self.release(acc, sums, warps)
            sums, turn = sums.next(), turn ^ 1
            index = index + c.stride

    @cute.jit
    def leave(self, c, tile, address, columns, turn):
        """Columns of a tile, `self.columns` at a time. turn: 0 and 1, tile by tile."""
        whole = columns // self.columns
        for i in cutlass.range(whole, unroll=1):
            tile.through(address, i * self.columns, 0)
        if cutlass.const_expr(self.out_dtype != "nvfp4" and self.columns > GRANULE):
            rest = tile.by(GRANULE)
            for i in cutlass.range((columns - whole * self.columns) // GRANULE, unroll=1):
                rest.through(address, whole * self.columns + i * GRANULE, 0)

    def way(self, c: Any, memory: Any) -> Way:
        """What is the same for all tiles, and in the place of what is not, anything."""
        one, no = Float32(1.0), Boolean(False)
        unit = memory.unit.load() if self.out_dtype == "nvfp4" else None
        return Way(self, c.warp, memory.result.output, None, memory.scales, unit, None, (one, one), no, no)

    def tile_at(self, way: Way, c: Any, result: Any, place: Any) -> "GroupTile":
        """This warp's part of a tile."""
        output = result.of(place)
        wide, narrow = (output.aligned(nbytes) for nbytes in store.VECTORS)
        way = replace(way, output=output, alpha=result.alpha(place).load(), wide=wide, narrow=narrow)
        block = place.row * c.geometry.ctas + c.cluster.half
        row = block * CTA_ROWS + c.warp * ROWS + cute.arch.lane_idx()  # of the group, or a column of the output
        column = place.column * self.tile_n
        biases: list[Any] = [None, None]
        if self.bias:
            biases = [result.bias(place, output.n * i) for i in range(1 + bool(self.apart))]
        if self.swap:
            first = place.first + column
            target = GroupSwapped(output, first, row, output.address(Int32(0), first, row))
            biases = [bias and bias.column(row) for bias in biases]
        elif self.out_dtype == "nvfp4":
            target = self._quantised(way, c.groups, place, block, row, column)
        else:
            row = place.first + row
            target = Direct(output, row, column, output.address(Int32(0), row, column), wide, narrow)
        return GroupTile(way, target, column, biases[0], biases[-1])

    def _quantised(self, way: Way, groups: Any, place: Any, block: Int32, row: Int32, column: Int32) -> Quantised:
        """Rows beyond a mask keep their scales: beside rows that count, only padding of their atom is made zero."""
        output = way.output
        codes = output.address(Int32(0), place.first + row, column // 2)
        in_atom = row % 32 * 16 + row % ATOM_ROWS // 32 * 4
        atoms = Int64(place.atom + block) * cute.ceil_div(output.n, STEP_K)
        scales = way.scales.toint() + atoms * ATOM_BYTES + in_atom
        some = block * ATOM_ROWS < place.rows
        if groups.order.masked:
            some = some & ((row < place.rows) | (row >= groups.m))
        return Quantised(codes, scales, row < place.rows, some, column, output.n, way.unit, way.wide)


@dataclass(frozen=True)
class GroupTile(Tile):
    """As `Tile`. other: the bias of what a gate multiplies."""

    other: Bias | Float32 | None

    def by(self, columns: int) -> "GroupTile":
        """The same, so many columns at a time."""
        epilogue = copy.copy(self.way.epilogue)
        epilogue.columns = columns
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
class GroupSwapped(Swapped):
    """As `Swapped`; where all of a thread's rows are the group's, none is asked whether it is."""

    @cute.jit
    def store(self, words, column, slot):
        out = self.output
        pitch = out.ld * out.nbytes
        address = self.address + column * pitch
        left = out.m - self.row - column
        each = 4 // out.nbytes
        if self.column < out.n:
            if left >= len(words) * each:
                whole(words, address, pitch, each)
            else:
                out.elements(words, address, pitch, left)
        return slot


def whole(words: Words, address: Int64, pitch: Int64, each: int) -> None:
    """Words, or the low half and the high half of each, `pitch` bytes apart. A loop of Python's: the compiler warns of
    one of its own that has 64 turns."""
    for i, word in enumerate(words):
        _whole(word, [address + (i * each + j) * pitch for j in range(each)])


def _whole(word: Int32, addresses: list[Int64]) -> None:
    if len(addresses) == 1:
        cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[addresses[0], word])
    else:
        cute.arch.inline_ptx(
            "{\n.reg .b16 low, high;\nmov.b32 {low, high}, {$r0};\n"
            "st.global.b16 [{$r1}], low;\nst.global.b16 [{$r2}], high;\n}",
            read_only_args=[word, *addresses],
        )


@dataclass(frozen=True)
class Results:
    """Where the results of groups go that share one output, and what they are multiplied by and added to.

    Args:
        output: of all of them. alpha: as for `Alpha`, but that its last pointer has `alphas` numbers, one for each
            group or for all of them. bias: (biases, n_bias) numbers, a row for each group, or for all of them.
    """

    output: Output
    factors: Alpha
    alphas: Int32
    biases: cute.Pointer
    bias_rows: Int32
    n_bias: Int32

    def of(self, place: Any) -> Output:
        """The output, which ends where the group does."""
        return replace(self.output, m=place.first + place.rows)

    def alpha(self, place: Any) -> Alpha:
        *units, alphas = self.factors.pointers
        own = alphas + cutlass.select_(self.alphas > 1, place.group, Int32(0))
        return replace(self.factors, pointers=(*units, own))

    def bias(self, place: Any, first: Int32) -> Bias:
        """Of the columns, from the `first` number on."""
        row = Int64(cutlass.select_(self.bias_rows > 1, place.group, Int32(0))) * self.n_bias
        return Bias(self.biases + (row + first), self.output.n)


@dataclass(frozen=True)
class ListedResults:
    """The same for a list of problems, whose addresses are in their table."""

    table: cute.Pointer
    output: Output
    factor: Float64
    bias_dtype: Any

    def of(self, place: Any) -> Output:
        pointer = self._pointer(place, "out", self.output.dtype)
        ld = (self._row(place) + SIZES["ld_out"]).load()
        return replace(self.output, pointer=pointer, m=place.rows, n=place.n, ld=ld)

    def alpha(self, place: Any) -> Alpha:
        names = ("unit_a", "unit_b", "alpha")
        return Alpha(tuple(self._pointer(place, name, Float32) for name in names), self.factor)

    def bias(self, place: Any, first: Int32) -> Bias:
        return Bias(self._pointer(place, "bias", self.bias_dtype) + first, place.n)

    def _row(self, place: Any) -> cute.Pointer:
        return self.table + Int64(place.group) * COLUMNS

    def _pointer(self, place: Any, name: str, dtype: Any) -> cute.Pointer:
        address = (self._row(place) + ADDRESSES[name]).load()
        return cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=dtype.width // 8)
