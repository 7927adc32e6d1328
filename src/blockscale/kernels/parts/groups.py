"""The table of a grouped launch: where each group's rows, scales and tiles begin. Every CTA makes it once.

Sizes of groups are numbers in global memory that the host never reads. A launch begins with sums over them, in every
CTA alike; what a tile belongs to is then found by two reads of shared memory and two votes of a warp.

Five numbers a group in shared memory: by its number, `firsts` (its first row of the operand and of the result), `rows`
(how many it has), `atoms` (its first atom of scales); by its place in the order of groups, `numbers` (which group that
is) and `tiles` (its first tile).

Nothing that the numbers in global memory say leads outside of the operands, nor two groups to one row. Sizes count from
0 to the rows that are left; of ends only those count that lie beyond all ends before them; what a group of the masked
form has lies between none and all of its rows.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from blockscale.kernels.parts import group_order
from blockscale.kernels.parts.geometry import ATOM_ROWS
from blockscale.kernels.parts.group_geometry import MOST_GROUPS

WARP = 32
LINE = MOST_GROUPS // WARP  # groups that a lane stands for in the first of the two votes


@dataclass(frozen=True)
class Order:
    """How groups are cut into tiles, and in which order these come: constants of a kernel.

    Args:
        masked: groups are matrices of `m` rows each, of which some count; else they follow one another in m rows.
        tile, swap, raster: as in parts/group_order.py. longest: groups of more rows come first.
        threads: that make the table.
    """

    masked: bool
    tile: tuple[int, int]
    swap: bool
    raster: str
    longest: bool
    threads: int


@dataclass(frozen=True)
class Place:
    """A tile: the group's number, first row, rows and first atom of scales; row and column of the tile in it; columns
    of the group's result, k, and which matrix of b is its own."""

    group: Int32
    first: Int32
    rows: Int32
    atom: Int32
    row: Int32
    column: Int32
    n: Int32
    k: Int32
    matrix: Int32


@dataclass(frozen=True)
class Groups:
    """The table of `count` groups, in shared memory `smem`.

    Args:
        m: rows of the operand, or of each matrix in the masked form. n: columns of the result.
        ends: not 0 if the numbers in global memory are where groups end.
    """

    order: Order
    smem: Any
    count: Int32
    m: Int32
    n: Int32
    k: Int32
    ends: Int32

    @cute.jit
    def make(self, given):
        """By all threads of the CTA, from the numbers at `given`; it is there after the next synchronisation."""
        o, numbers = self.order, self.smem.numbers.data_ptr()
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        for group in cutlass.range(thread, self.count, o.threads, unroll=1):
            self._take(given, group)
            if cutlass.const_expr(not o.longest):
                (numbers + group).store(group)
        cute.arch.sync_threads()
        if warp == 0:
            self._place()
        if cutlass.const_expr(o.longest):
            cute.arch.sync_threads()
            for group in cutlass.range(thread, self.count, o.threads, unroll=1):
                (numbers + self._rank(group)).store(group)
            cute.arch.sync_threads()
        if warp == 0:
            cute.arch.sync_warp()
            self._number()

    def _take(self, given: cute.Pointer, group: Int32) -> None:
        """What is given of a group; it may be anything."""
        rows = cutlass.max(Int32(0), cutlass.min((given + group).load(), self.m))
        (self.smem.rows.data_ptr() + group).store(rows)

    @cute.jit
    def _place(self):
        """By one warp: where each group's rows and scales begin."""
        s, lane = self.smem, cute.arch.lane_idx()
        end, atom = Uint32(0), Int32(0)
        for start in cutlass.range(0, self.count, WARP, unroll=1):
            group = start + lane
            there = group < self.count
            given = Int32(0)
            if there:
                given = (s.rows.data_ptr() + group).load()
            if cutlass.const_expr(self.order.masked):
                if there:
                    (s.firsts.data_ptr() + group).store(group * self.m)
                    (s.atoms.data_ptr() + group).store(group * cute.ceil_div(self.m, ATOM_ROWS))
            else:
                total = _scan(Uint32(given), self._together)
                total = self._together(end, total)
                before = cute.arch.shuffle_sync_up(total, 1)
                before = Uint32(cutlass.select_(lane == 0, end, Uint32(before)))
                own = Int32(total) - Int32(before)
                blocks = (own + (ATOM_ROWS - 1)) // ATOM_ROWS
                atoms = _scan(blocks, lambda x, y: x + y) + atom
                if there:
                    (s.firsts.data_ptr() + group).store(Int32(before))
                    (s.rows.data_ptr() + group).store(own)
                    (s.atoms.data_ptr() + group).store(atoms - blocks)
                end = Uint32(cute.arch.shuffle_sync(total, WARP - 1))
                atom = Int32(cute.arch.shuffle_sync(atoms, WARP - 1))

    def _together(self, x: Uint32, y: Uint32) -> Uint32:
        """The end of two runs of groups: the later of two ends, or the sum of two sizes, at most m."""
        return Uint32(cutlass.select_(self.ends != 0, cutlass.max(x, y), cutlass.min(x + y, Uint32(self.m))))

    @cute.jit
    def _rank(self, group):
        """How many groups come before this one: those of more rows, and of as many those before it."""
        rows = self.smem.rows.data_ptr()
        own, rank = (rows + group).load(), Int32(0)
        for other in cutlass.range(self.count, unroll=4):
            its = (rows + other).load()
            rank = rank + Int32((its > own) | ((its == own) & (other < group)))
        return rank

    @cute.jit
    def _number(self):
        """By one warp: the first tile of each group, in their order, and how many tiles there are."""
        s, lane = self.smem, cute.arch.lane_idx()
        tiles = Int32(0)
        for start in cutlass.range(0, self.count, WARP, unroll=1):
            place = start + lane
            there = place < self.count
            own = Int32(0)
            if there:
                group = (s.numbers.data_ptr() + place).load()
                down, across = self._counts((s.rows.data_ptr() + group).load(), self.sizes(group)[0])
                own = down * across
            total = _scan(own, lambda x, y: x + y) + tiles
            if there:
                (s.tiles.data_ptr() + place).store(total - own)
            tiles = Int32(cute.arch.shuffle_sync(total, WARP - 1))
        if lane == 0:
            s.total.ptr.store(tiles)

    @property
    def total(self) -> Int32:
        """Tiles of all groups."""
        return self.smem.total.ptr.load()

    def sizes(self, group: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        """Columns of a group's result, k, its first row and its first atom of scales."""
        return self.n, self.k, (self.smem.firsts.data_ptr() + group).load(), (self.smem.atoms.data_ptr() + group).load()

    def matrix(self, group: Int32) -> Int32:
        """Which of b is the group's."""
        return group

    def _counts(self, rows: Any, n: Any) -> Any:
        return group_order.counts(rows, n, self.order.tile, self.order.swap)

    def at(self, tile: Int32) -> Place:
        """What the `tile`-th tile is, by a whole warp; `tile` is less than `total`.

        The last place in the order whose first tile is not beyond this one: 32 lanes look at every 16th place, then 16
        at those that follow.
        """
        o, s, lane = self.order, self.smem, cute.arch.lane_idx()
        place = self._last(lane * LINE, tile, True) * LINE
        place = place + self._last(place + lane, tile, lane < LINE)
        group = (s.numbers.data_ptr() + place).load()
        rows = (s.rows.data_ptr() + group).load()
        n, k, first, atom = self.sizes(group)
        index = tile - (s.tiles.data_ptr() + place).load()
        row, column = group_order.within(Uint32(index), tuple(map(Uint32, self._counts(rows, n))), o.raster)
        values = group, first, rows, atom, Int32(row), Int32(column), n, k, self.matrix(group)
        return Place(*(cute.arch.make_warp_uniform(value) for value in values))

    def _last(self, place: Int32, tile: Int32, among: Any) -> Int32:
        """Of the places of a warp's lanes, those `among` them, the last whose first tile is not beyond `tile`."""
        inside = place < self.count
        first = (self.smem.tiles.data_ptr() + cutlass.min(place, self.count - 1)).load()
        return cute.arch.popc(cute.arch.vote_ballot_sync(inside & among & (first <= tile))) - 1


COLUMNS = 16  # of a problem's row in the table of a list
ADDRESSES = {name: i for i, name in enumerate(("a", "b", "sfa", "sfb", "out", "unit_a", "unit_b", "alpha", "bias"))}
SIZES = {name: len(ADDRESSES) + i for i, name in enumerate(("m", "n", "k", "ld_out"))}


@dataclass(frozen=True)
class Problems(Groups):
    """A list of products of any sizes, which the host knows. All begin with row 0 of operands of their own, so that in
    the place of what else a group has there are the columns of its result and its k.

    Args:
        m, n, k, ends: of no use. gated: the result has half of n columns.
    """

    gated: bool = False

    @property
    def columns(self) -> cute.Pointer:
        return self.smem.firsts.data_ptr()

    @property
    def depths(self) -> cute.Pointer:
        return self.smem.atoms.data_ptr()

    def _take(self, given: cute.Pointer, group: Int32) -> None:
        row = given + Int64(group) * COLUMNS
        m, n, k = (Int32((row + SIZES[name]).load()) for name in ("m", "n", "k"))
        (self.smem.rows.data_ptr() + group).store(m)
        (self.columns + group).store(n // 2 if self.gated else n)
        (self.depths + group).store(k)

    def _place(self) -> None:
        """Nothing is to be added up."""

    def sizes(self, group: Int32) -> tuple[Int32, Int32, Int32, Int32]:
        return (self.columns + group).load(), (self.depths + group).load(), Int32(0), Int32(0)

    def matrix(self, group: Int32) -> Int32:
        return Int32(0)


def _scan(x: Any, together: Any) -> Any:
    """In each lane of a warp, x of all lanes up to it, put together."""
    lane = cute.arch.lane_idx()
    for distance in (1, 2, 4, 8, 16):
        before = type(x)(cute.arch.shuffle_sync_up(x, distance))
        x = type(x)(cutlass.select_(lane >= distance, together(before, x), x))
    return x
