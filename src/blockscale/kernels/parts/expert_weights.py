"""Weights of one tile of a group after the other on their way to a warp of Hopper's: see `weights.Slots`."""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from blockscale.formats.fragment import CODE_BYTES, UNIT_BYTES
from blockscale.kernels.parts import async_copies
from blockscale.kernels.parts.groups import Groups, Place
from blockscale.kernels.parts.weights import Slots


class TileSlots(Slots):
    """A warp's slots for units of its rows of the CTA's tiles: after the last unit of a tile it asks for the first of
    the next one. `units`, `place` and `end` are those of the tile that is asked for.

    Args:
        groups, total: the table, and how many tiles there are.
        rows: address of b, tiles of 16 rows of a matrix of it, those of a CTA, and which of these is the warp's.
        offset: the warp's first unit of a tile.
        index: the tile's number.
    """

    def __init__(self, slots: int, stride: int, groups: tuple[Groups, Int32], rows: Any, offset: Int32, numbers: Any):
        self.first, self.read, self.write, self.units, self.count, self.place, self.end, self.index = numbers
        self.slots, self.stride, self.groups, self.rows, self.offset = slots, stride, groups, rows, offset

    @staticmethod
    def of(
        slots: int, stride: int, first: Int32, groups: tuple[Groups, Int32], rows: Any, count: Int32, offset: Int32
    ) -> "TileSlots":
        """From the CTA's first tile on; `count` units have the rows of a tile."""
        none = Int32(cutlass.select_(offset < count, cute.arch.block_idx()[0], groups[1]))
        numbers = first, first, first, Int64(0), count, Int32(0), Int32(0), none - cute.arch.grid_dim()[0]
        return TileSlots(slots, stride, groups, rows, offset, numbers)._next_tile()

    @staticmethod
    def start(place: Place, units: Int32) -> Int32:
        """The unit that a tile begins with: not all CTAs are to ask for the same activations at the same time."""
        return place.row % units

    @cute.jit
    def ask(self, lane):
        """Asks for the next unit; beyond the last tile the group is empty."""
        there = self.index < self.groups[1]
        unit = cutlass.select_(self.place >= self.count, self.place - self.count, self.place)
        at = self.units + unit * UNIT_BYTES
        source, target = at + lane * 16, self.write + lane * 16
        async_copies.copy_16(target, source, there)
        async_copies.copy_16(target + CODE_BYTES // 2, source + CODE_BYTES // 2, there)
        part = CODE_BYTES + lane // 4 * 16
        async_copies.copy_16(self.write + part, at + part, there & (lane % 4 == 0))
        async_copies.commit()
        asked = self._at(self.read, self._next(self.write), self.place + self.stride)
        if there & (asked.place >= asked.end):
            asked = asked._next_tile()
        return asked

    @cute.jit
    def _next_tile(self):
        groups, total = self.groups
        index = self.index + cute.arch.grid_dim()[0]
        units, place, end = self.units, self.place, self.end
        if index < total:
            b, tiles, row_warps, own = self.rows
            tile = groups.at(index)
            row = cutlass.min(tile.row * row_warps + own, tiles - 1)
            units = b + (Int64(tile.group) * tiles + row) * self.count * UNIT_BYTES
            start = TileSlots.start(tile, self.count)
            place, end = start + self.offset, start + self.count
        return self._with(self.first, self.read, self.write, units, self.count, place, end, index)

    def _at(self, read: Int32, write: Int32, place: Int32) -> "TileSlots":
        return self._with(self.first, read, write, self.units, self.count, place, self.end, self.index)

    def _with(self, *numbers: Any) -> "TileSlots":
        return TileSlots(self.slots, self.stride, self.groups, self.rows, self.offset, numbers)

    # A dynamic loop carries the numbers.
    def __extract_mlir_values__(self) -> list[Any]:
        numbers = self.first, self.read, self.write, self.units, self.count, self.place, self.end, self.index
        return [number.ir_value() for number in numbers]

    def __new_from_mlir_values__(self, values: list[Any]) -> "TileSlots":
        first, read, write, units, *rest = values
        return self._with(Int32(first), Int32(read), Int32(write), Int64(units), *map(Int32, rest))
