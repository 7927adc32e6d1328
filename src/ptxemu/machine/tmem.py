"""Tensor memory: 128 lanes by 512 columns of 32 bits a CTA, its allocator, and the shapes of tcgen05.ld, st and cp.

Source: PTX ISA, "Tensor Memory", "Data Movement Shape", "tcgen05.alloc, tcgen05.dealloc,
tcgen05.relinquish_alloc_permit", "tcgen05.ld", "tcgen05.cp".  An address is lane << 16 | column.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ptxemu.errors import MemoryFault
from ptxemu.machine.signal import Signal, Wait

if TYPE_CHECKING:
    from ptxemu.watch.shadow import Shadow

__all__ = ["COLUMNS", "LANES", "Fragment", "Pair", "TensorMemory", "fragment", "split", "spread"]

Words = npt.NDArray[np.uint32]
Index = npt.NDArray[np.int64]

LANES = 128
COLUMNS = 512
QUARTER = 32  # lanes that one warp of a warpgroup reaches
UNDEFINED = 0xFFFFFFFF  # NaN in every format: what nobody wrote shows


def split(address: int) -> tuple[int, int]:
    """Lane and column of an address."""
    return address >> 16 & 0xFFFF, address & 0xFFFF


class TensorMemory(Signal):
    """The tensor memory of one CTA; as a signal it changes when columns become free."""

    def __init__(self) -> None:
        super().__init__()
        self.data: Words = np.full((LANES, COLUMNS), UNDEFINED, np.uint32)
        self.allocations: dict[int, int] = {}  # first column -> columns
        self.lines: dict[int, int] = {}  # first column -> PTX line of its last allocation
        self.largest = COLUMNS  # what the next allocation may take at most
        self.permit = True
        self.group: int | None = None  # the cta_group that the CTA uses
        self.pair = Pair()  # the even CTA's serves both CTAs of a pair
        self.shadow: Shadow | None = None  # what a watcher remembers of it

    def check_request(self, columns: int) -> None:
        """Raises MemoryFault for an allocation that the rules forbid."""
        if columns not in (32, 64, 128, 256, 512):
            raise MemoryFault(f"tcgen05.alloc of {columns} columns: a power of two from 32 to 512 is needed")
        if not self.permit:
            raise MemoryFault("tcgen05.alloc after tcgen05.relinquish_alloc_permit in the same CTA")
        if columns > self.largest:
            raise MemoryFault(
                f"tcgen05.alloc of {columns} columns after one of {self.largest}: allocations of a CTA may not grow"
            )

    def place(self, columns: int) -> int | None:
        """The first column where an allocation fits, aligned to its size; None when there is no room."""
        for first in range(0, COLUMNS, columns):
            if all(first >= at + size or at >= first + columns for at, size in self.allocations.items()):
                return first
        return None

    def take(self, first: int, columns: int) -> None:
        """Allocates; the contents become undefined, which is NaN here."""
        self.allocations[first] = columns
        self.largest = columns
        if self.shadow is not None:
            self.shadow.reset((slice(None), slice(first, first + columns)))
        self.data[:, first : first + columns] = UNDEFINED

    def release(self, address: int, columns: int) -> None:
        """tcgen05.dealloc; raises MemoryFault unless exactly that was allocated."""
        if self.allocations.get(address) != columns:
            held = ", ".join(f"{size} at {at:#x}" for at, size in self.allocations.items()) or "nothing"
            raise MemoryFault(f"tcgen05.dealloc of {columns} columns at {address:#x}: allocated is {held}")
        del self.allocations[address]
        self.changed()

    def relinquish(self) -> None:
        """tcgen05.relinquish_alloc_permit."""
        self.permit = False

    def block(self, address: int, lanes: int, columns: int) -> Words:
        """A view (lanes, columns) of 32-bit words, to read or to write in place.

        Raises MemoryFault where the block leaves the memory or touches columns that are not allocated.
        """
        lane, column = split(address)
        if lane + lanes > LANES or column + columns > COLUMNS:
            raise MemoryFault(
                f"tensor memory {address:#x}: {lanes} lanes by {columns} columns leave its {LANES} by {COLUMNS}"
            )
        self._check_allocated(address, column, columns)
        return self.data[lane : lane + lanes, column : column + columns]

    def _check_allocated(self, address: int, column: int, columns: int) -> None:
        end = column + columns
        while column < end:
            for first, size in self.allocations.items():
                if first <= column < first + size:
                    column = first + size
                    break
            else:
                raise MemoryFault(f"tensor memory {address:#x}: column {column} is not allocated")


class Pair(Signal):
    """Where the two CTAs of a pair meet for cta_group::2 allocation and deallocation: the first warp waits."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, dict[int, Request]] = {"dealloc": {}, "alloc": {}}  # by side of the pair
        self.done = {"dealloc": 0, "alloc": 0}
        self.address = 0  # what the last allocation gave

    def ask(self, side: int, memory: TensorMemory, what: str, columns: int, address: int = 0) -> Wait:
        """One side asks for "alloc" or "dealloc"; the wait ends when both came and it was done."""
        sides = self.requests[what]
        if side in sides:
            raise MemoryFault(f"tcgen05.{what} with cta_group::2 by a second warp of a CTA, while the first one waits")
        sides[side] = Request(columns, address, memory)
        before = self.done[what]
        self._settle()
        return Wait(
            self,
            lambda: self.done[what] != before,
            lambda: f"tcgen05.{what} of {columns} columns with cta_group::2 (waits for the peer CTA or for room)",
        )

    def _settle(self) -> None:
        """Carries out what both sides asked for, if it is possible now."""
        for what, sides in self.requests.items():
            if len(sides) < 2:
                continue
            mine, theirs = sides[0], sides[1]
            if (mine.columns, mine.address) != (theirs.columns, theirs.address):
                asked = " and ".join(f"{r.columns} columns at {r.address:#x}" for r in (mine, theirs))
                raise MemoryFault(f"tcgen05.{what} with cta_group::2: the CTAs of the pair ask for {asked}")
            if what == "dealloc":
                mine.memory.release(mine.address, mine.columns)
                theirs.memory.release(mine.address, mine.columns)
            else:
                place = mine.memory.place(mine.columns)
                if place is None or theirs.memory.place(mine.columns) != place:
                    continue
                mine.memory.take(place, mine.columns)
                theirs.memory.take(place, mine.columns)
                self.address = place
            sides.clear()
            self.done[what] += 1
        self.changed()


@dataclass(frozen=True)
class Request:
    """What one CTA of a pair asks for; `address` of a deallocation."""

    columns: int
    address: int
    memory: TensorMemory


@dataclass(frozen=True)
class Fragment:
    """Where each register of a tcgen05.ld or st lies: lane and column, relative to the address, (32, registers).

    `lanes` and `columns` are the block that encloses them; `halves`: a register is the halves of two columns.
    """

    lane: Index
    column: Index
    lanes: int
    columns: int
    halves: bool = False

    @property
    def registers(self) -> int:
        return int(self.lane.shape[1])

    @cached_property
    def used(self) -> Index:
        """The columns that it touches."""
        columns = np.unique(self.column)
        return np.union1d(columns, columns + 1) if self.halves else columns

    @cached_property
    def plain(self) -> bool:
        """Whether lane t, column r is simply where register r of thread t lies."""
        return bool((self.lane == np.arange(32)[:, None]).all() and (self.column == np.arange(self.registers)).all())

    def load(self, block: Words) -> Words:
        """(registers, 32): each register of all lanes, from a block of `lanes` by `columns`."""
        if self.plain and block.shape[1] == self.registers:
            return np.ascontiguousarray(block.T)
        return np.ascontiguousarray(block[self.lane.T, self.column.T])

    def store(self, block: Words, values: Words) -> None:
        """Writes (registers, 32) values."""
        block[self.lane.T, self.column.T] = values


_MOST = {"32x32b": 128, "16x64b": 128, "16x32bx2": 128, "16x128b": 64, "16x256b": 32}


@lru_cache(maxsize=256)
def fragment(shape: str, repeat: int, split_offset: int = 0, halves: bool = False) -> Fragment:
    """The fragment of `shape` ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2") repeated along the columns.

    split_offset: columns from the first to the second half of 16x32bx2. halves: pack::16b or unpack::16b of 32x32b,
    where a register holds the low 16 bits of two columns: the fragment then lists the first of the two.
    """
    if repeat > _MOST.get(shape, 0):
        raise MemoryFault(f"tcgen05 shape {shape}.x{repeat}: at most .x{_MOST.get(shape, 0)}")
    t = np.arange(32)[:, None]
    per = {"16x128b": 2, "16x256b": 4}.get(shape, 1)
    r = np.arange(per * repeat)[None, :]
    if shape == "32x32b":
        lane, column = t + 0 * r, (2 if halves else 1) * r + 0 * t
    elif shape == "16x64b":
        lane, column = t // 4 + 8 * (t % 2) + 0 * r, t // 2 % 2 + 2 * r
    elif shape == "16x128b":
        lane, column = t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)
    elif shape == "16x256b":
        lane, column = t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)
    else:
        lane, column = t % 16 + 0 * r, r + np.where(t >= 16, split_offset, 0)
    width = int(column.max()) + (2 if halves else 1)
    return Fragment(lane.astype(np.int64), column.astype(np.int64), int(lane.max()) + 1, width, halves)


# Which 32 of the source rows each quarter of lanes gets, by the multicast of tcgen05.cp.  A pair of warps ("02_13": 0
# with 2 and 1 with 3) gets all 64 rows, its first warp the first half.
_QUARTERS = {"": [0, 1, 2, 3], "warpx4": [0, 0, 0, 0], "warpx2::01_23": [0, 1, 0, 1], "warpx2::02_13": [0, 0, 1, 1]}


def spread(block: Words, rows: Words, multicast: str) -> None:
    """Write the source rows (n, words) of a tcgen05.cp to the 128 lanes of `block`.

    multicast: "" for 128 rows, "warpx4" for 32, "warpx2::02_13" or "warpx2::01_23" for 64.
    """
    block.reshape(4, QUARTER, -1)[:] = rows.reshape(-1, QUARTER, rows.shape[1])[_QUARTERS[multicast]]
