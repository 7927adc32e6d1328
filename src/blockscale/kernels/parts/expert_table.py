"""The table of a grouped launch with few rows a group: whose rows each block of tokens has. Every CTA makes it once.

Sizes of groups are numbers in global memory that the host never reads. A group's rows are cut into blocks of `tokens`,
numbered through all groups; every row tile of b is multiplied with every block, row tiles first. An entry of a block
has the group, the first row of a, and how many rows there are.

Nothing that the numbers in global memory say leads outside of the operands, nor two groups to one row. Sizes count from
0 to the rows that are left; of ends only those count that lie beyond all ends before them; what a group of the masked
form has lies between none and all of its rows.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Uint32, cute

from blockscale.kernels.parts import async_copies
from blockscale.kernels.parts.expert_memory import ENTRY_BYTES, MOST_GROUPS

WARP = 32


@dataclass(frozen=True)
class Table:
    """Of `count` groups.

    Args:
        masked: groups are matrices of `m` rows each, of which some count; else they follow one another in m rows.
        tokens: of a block. threads: that make the table.
        smem: has `entries` and `total`. scratch: shared memory that is in use while the table is made.
        ends: not 0 if the numbers in global memory are where groups end.
    """

    masked: bool
    tokens: int
    threads: int
    smem: Any
    scratch: cute.Pointer
    count: Int32
    m: Int32
    ends: Int32

    @cute.jit
    def make(self, given):
        """By all threads of the CTA, from the numbers at `given`; it is there after the next synchronisation."""
        thread, _, _ = cute.arch.thread_idx()
        rows, firsts, blocks = self._scratch()
        for group in cutlass.range(thread, self.count, self.threads, unroll=1):
            (rows + group).store(cutlass.max(Int32(0), cutlass.min((given + group).load(), self.m)))
        cute.arch.sync_threads()
        if thread < WARP:
            self._add_up(rows, firsts, blocks)
        cute.arch.sync_threads()
        entries = self.smem.entries.data_ptr()
        for group in cutlass.range(thread // WARP, self.count, self.threads // WARP, unroll=1):
            first, left, block = (firsts + group).load(), (rows + group).load(), (blocks + group).load()
            for i in cutlass.range(thread % WARP, cute.ceil_div(left, self.tokens), WARP, unroll=1):
                entry = entries + (block + i) * (ENTRY_BYTES // 4)
                done = i * self.tokens
                for j, value in enumerate((group, first + done, cutlass.min(left - done, self.tokens), Int32(0))):
                    (entry + j).store(value)

    def _scratch(self) -> list[cute.Pointer]:
        """Of each group its rows, its first row and its first block."""
        first = cute.recast_ptr(self.scratch, dtype=Int32)
        return [first + i * MOST_GROUPS for i in range(3)]

    @cute.jit
    def _add_up(self, rows, firsts, blocks):
        """By one warp, of which a lane stands for consecutive groups."""
        lane = cute.arch.lane_idx()
        start = lane * cute.ceil_div(self.count, WARP)
        stop = cutlass.min(start + cute.ceil_div(self.count, WARP), self.count)
        own = Uint32(0)
        for group in cutlass.range(start, stop, unroll=4):
            own = self._together(own, Uint32((rows + group).load()))
        before = Uint32(cute.arch.shuffle_sync_up(_scan(own, self._together), 1))
        before = Uint32(cutlass.select_(lane == 0, Uint32(0), before))
        mine = Int32(0)
        for group in cutlass.range(start, stop, unroll=1):
            first, count = group * self.m, (rows + group).load()
            if cutlass.const_expr(not self.masked):
                after = self._together(before, Uint32(count))
                first, count, before = Int32(before), Int32(after - before), after
            (firsts + group).store(first)
            (rows + group).store(count)
            (blocks + group).store(mine)
            mine = mine + cute.ceil_div(count, self.tokens)
        total = _scan(mine, lambda x, y: x + y)
        for group in cutlass.range(start, stop, unroll=4):
            (blocks + group).store((blocks + group).load() + total - mine)
        if lane == WARP - 1:
            self.smem.total.ptr.store(total)

    def _together(self, x: Uint32, y: Uint32) -> Uint32:
        """The end of two runs of groups: the later of two ends, or the sum of two sizes, at most m."""
        return Uint32(cutlass.select_(self.ends != 0, cutlass.max(x, y), cutlass.min(x + y, Uint32(self.m))))

    @property
    def total(self) -> Int32:
        """Blocks of all groups."""
        return self.smem.total.ptr.load()

    def entry(self, block: Int32) -> list[Int32]:
        """The block's group, its first row and its rows."""
        words = async_copies.load_16(self.smem.entries.data_ptr().toint() + block * ENTRY_BYTES)
        return list(words[:3])


class Walk:
    """A CTA's way through the tiles: of G CTAs each takes every G-th, row tiles of a block first.

    Args:
        across: row tiles. step: (blocks, row tiles) from one tile of the CTA to the next.
        block, row: of the tile.
    """

    def __init__(self, across: Int32, step: tuple[Int32, Int32], block: Int32, row: Int32) -> None:
        self.across, self.step, self.block, self.row = across, step, block, row

    @staticmethod
    def of(across: Int32) -> "Walk":
        """From the CTA's first tile on."""
        first, ctas = cute.arch.block_idx()[0], cute.arch.grid_dim()[0]
        return Walk(across, (ctas // across, ctas % across), first // across, first % across)

    def next(self) -> "Walk":
        row = self.row + self.step[1]
        over = row >= self.across
        row = Int32(cutlass.select_(over, row - self.across, row))
        return Walk(self.across, self.step, self.block + self.step[0] + Int32(over), row)

    # A dynamic loop carries the two numbers.
    def __extract_mlir_values__(self) -> list[Any]:
        return [self.block.ir_value(), self.row.ir_value()]

    def __new_from_mlir_values__(self, values: list[Any]) -> "Walk":
        return Walk(self.across, self.step, Int32(values[0]), Int32(values[1]))


def _scan(x: Any, together: Any) -> Any:
    """In each lane of a warp, x of all lanes up to it, put together."""
    lane = cute.arch.lane_idx()
    for distance in (1, 2, 4, 8, 16):
        before = type(x)(cute.arch.shuffle_sync_up(x, distance))
        x = type(x)(cutlass.select_(lane >= distance, together(before, x), x))
    return x
