"""Weights of one tile after the other on their way to a warp of Hopper's: pairs of units, through its own slots.

As `weights.Slots`, but that a warp asks for the first pairs of its next tile before the last ones of this tile are
multiplied: memory is never without requests while a CTA ends a tile.
"""

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from blockscale.formats.fragment import CODE_BYTES, UNIT_BYTES
from blockscale.kernels.parts import async_copies
from blockscale.kernels.parts.expert_memory import PAIR
from blockscale.kernels.parts.expert_table import Table, Walk


def pairs(units: Int32) -> Int32:
    """Of the units of a row of b; the last one may have one unit."""
    return cute.ceil_div(units, PAIR)


def start(row: Int32, units: Int32) -> Int32:
    """The pair that a tile of row `row` begins with: not all CTAs are to ask for the same activations at one time."""
    return row % pairs(units)


class PairSlots:
    """A warp's own slots in shared memory for pairs of units, one more than it has in flight.

    Its lanes copy and read; nobody else waits. A group of copies is a unit. A slot is filled again a turn after it was
    read, when all lanes have read it. The pairs of a tile are taken in a circle. Where the last pair has one unit the
    other becomes zeros.

    Args:
        slots: of a pair each. stride: from one pair of the warp to the next.
        table, total: of blocks, and how many there are.
        rows: address of b, tiles of 16 rows of a matrix of it, those of a CTA, and which of these is the warp's.
        units: of a row. offset: the warp's first pair of a tile. lane: of the warp.
        first: address of the first slot. read, write: of those that are read and filled next.
        walk: the tile that is asked for. source: address of the lane's first codes of the warp's rows of it.
        place: in the circle, of the next pair to ask for. end: of the last one, and 1.
    """

    def __init__(self, fixed: Any, read: Int32, write: Int32, walk: Walk, source: Int64, place: Int32, end: Int32):
        self.fixed = fixed
        self.slots, self.stride, self.table, self.total, self.rows, self.units, self.offset, self.first, self.lane = (
            fixed
        )
        self.read, self.write, self.walk, self.source, self.place, self.end = read, write, walk, source, place, end

    @staticmethod
    def of(
        slots: int, stride: int, first: Int32, table: tuple[Table, Int32], rows: Any, units: Int32, offset: Int32,
        walk: Walk, lane: Int32,
    ) -> "PairSlots":  # fmt: skip
        """From the CTA's first tile on."""
        total = Int32(cutlass.select_(offset < pairs(units), table[1], Int32(0)))  # none, if it has no pairs
        fixed = slots, stride, table[0], total, rows, units, offset, first, lane
        return PairSlots(fixed, first, first, walk, Int64(0), Int32(0), Int32(0))._find()

    @cute.jit
    def ask(self):
        """Asks for the next pair; beyond the last tile the groups are empty."""
        there, count = self.walk.block < self.total, pairs(self.units)
        pair = Int32(cutlass.select_(self.place >= count, self.place - count, self.place))
        whole = Int32(cutlass.select_(PAIR * pair + 1 < self.units, 16, 0))
        codes, scales = self.lane * 16, self.lane // 4 * 16 + CODE_BYTES
        source = self.source + pair * (PAIR * UNIT_BYTES)
        for unit in range(PAIR):
            size, begin = Int32(16) if unit == 0 else whole, unit * UNIT_BYTES
            for part in (begin, begin + CODE_BYTES // 2):
                async_copies.copy_16_or_zeros(self.write + codes + part, source + part, size, there)
            mine = there & (self.lane % 4 == 0)
            at = source + (scales - codes)
            async_copies.copy_16_or_zeros(self.write + scales + begin, at + begin, size, mine)
            async_copies.commit()
        asked = self._with(write=self._next(self.write), place=self.place + self.stride)
        if there & (asked.place >= asked.end):
            asked = asked._with(walk=asked.walk.next())._find()
        return asked

    @cute.jit
    def _find(self):
        """Where the tile's weights are."""
        source, place, end = self.source, self.place, self.end
        if self.walk.block < self.total:
            b, tiles, row_warps, own = self.rows
            row = cutlass.min(self.walk.row * row_warps + own, tiles - 1)
            group = self.table.entry(self.walk.block)[0]
            source = b + (Int64(group) * tiles + row) * (self.units * UNIT_BYTES) + self.lane * 16
            begin = start(self.walk.row, self.units)
            place, end = begin + self.offset, begin + pairs(self.units)
        return self._with(source=source, place=place, end=end)

    def take(self) -> tuple[Any, Int32, "PairSlots"]:
        """The lane's 12 words of the next pair's first unit, where its second one is, and the slots afterwards, with
        one more pair asked for."""
        async_copies.wait(PAIR * (self.slots - 1) - 1)
        cute.arch.sync_warp()
        asked = self.ask()
        words = _load(self.read, self.lane)
        return words, self.read + UNIT_BYTES, asked._with(read=asked._next(asked.read))

    def rest(self, second: Int32) -> Any:
        """The lane's 12 words of the unit at `second`."""
        async_copies.wait(PAIR * (self.slots - 1))
        cute.arch.sync_warp()
        return _load(second, self.lane)

    def _next(self, slot: Int32) -> Int32:
        after = slot + PAIR * UNIT_BYTES
        return Int32(cutlass.select_(after == self.first + self.slots * PAIR * UNIT_BYTES, self.first, after))

    def _with(self, **changed: Any) -> "PairSlots":
        names = "read", "write", "walk", "source", "place", "end"
        return PairSlots(self.fixed, **{name: changed.get(name, getattr(self, name)) for name in names})

    # A dynamic loop carries the numbers.
    def __extract_mlir_values__(self) -> list[Any]:
        numbers = self.read, self.write, self.walk.block, self.walk.row, self.source, self.place, self.end
        return [number.ir_value() for number in numbers]

    def __new_from_mlir_values__(self, values: list[Any]) -> "PairSlots":
        read, write, block, row, source, place, end = values
        walk = Walk(self.walk.across, self.walk.step, Int32(block), Int32(row))
        return PairSlots(self.fixed, Int32(read), Int32(write), walk, Int64(source), Int32(place), Int32(end))


def _load(unit: Int32, lane: Int32) -> list[Any]:
    parts = lane * 16, lane * 16 + CODE_BYTES // 2, lane // 4 * 16 + CODE_BYTES
    return [word for part in parts for word in async_copies.load_16(unit + part)]
