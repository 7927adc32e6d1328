"""What memory remembers of accesses to it: of each cell those that a later access may be in conflict with.

A cell is 16 bytes of shared or global memory, or the 32 lanes of one quarter and column of tensor memory; a mask of 16
bits says which parts of it an access touched (a byte each, or two lanes).  A write takes the place of what it overlaps;
a read takes the place of reads that came before it in causality order, since what comes after it comes after those.

Cells with the same past share a state, and an array holds the number of each cell's state: so a copy of many cells that
were written together and read together costs a look at one state, whatever its size.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ptxemu.machine.memory import GRANULE
from ptxemu.watch.clocks import ORDER, Lookup

__all__ = ["FENCED", "FULL_CELL", "GRANULE", "WRITE", "Access", "Past", "Shadow", "Trouble"]

FULL_CELL = 0xFFFF
# The lowest bits of a site: a write; an access that later ones of another proxy, or tcgen05 operations of other
# threads, see through a fence only.
WRITE, FENCED = 1, 2

Where = Any  # an index of the array of cells: a slice, an array of cells, or one of each dimension
Mask = Any  # an int for all cells, or an array (cells,)


class Past(NamedTuple):
    """An access of the past: its event (chain, at), where it came from, and the parts of the cell that are its own."""

    chain: int
    at: int
    site: int
    mask: int


class State(NamedTuple):
    """The past of a cell, and the parts of it that were ever written."""

    past: tuple[Past, ...]
    written: int


@dataclass(slots=True)
class Access:
    """An access that happens now.  (chain, at): its event; site: an id that ends in the bits WRITE and FENCED; needs:
    whether it reads, which asks for what was written.

    known: the clock's index of a row and a chain.  A past access comes before this one if row ORDER knows it, or row
    `also`; if its site has all of the bits `fence_bits`, row `fence` has to know it, too.
    """

    chain: int
    at: int
    site: int
    needs: bool
    known: Lookup
    also: int | None = None
    fence: int | None = None
    fence_bits: int = FENCED


@dataclass(frozen=True)
class Trouble:
    """cell: of the first one with this past; unwritten: a part was never written; conflicts: accesses that the new one
    does not see."""

    cell: int
    unwritten: bool
    conflicts: tuple[Past, ...]


class Shadow:
    """shape: of the array of cells; most: accesses of a cell that are kept, more push out the oldest read.

    written: whether all cells were written before, or the parts of each.
    """

    def __init__(self, shape: tuple[int, ...], most: int, written: bool | NDArray[np.uint16]) -> None:
        self.most = most
        self.states = [State((), 0), State((), FULL_CELL)]  # by number; these two stay
        self.ids = np.full(shape, int(written is True), np.int32)
        if not isinstance(written, bool):
            masks, places = np.unique(written, return_inverse=True)
            self.states += [State((), mask) for mask in masks.tolist()]
            self.ids[...] = places.reshape(shape) + 2
        self.counts = np.bincount(self.ids.ravel(), minlength=len(self.states)).tolist()  # cells in each state
        self.free: list[int] = []  # numbers of states that no cell is in any more

    def _new(self, state: State) -> int:
        """A number for a state."""
        if self.free:
            number = self.free.pop()
            self.states[number] = state
            return number
        self.states.append(state)
        self.counts.append(0)
        return len(self.states) - 1

    def _move(self, cells: int, old: int, new: int) -> None:
        """That many cells have gone from one state to another."""
        self.counts[new] += cells
        self.counts[old] -= cells
        if not self.counts[old] and old > 1:
            self.free.append(old)

    def reset(self, where: Where) -> None:
        """The memory is new there, with undefined contents."""
        for old, cells in enumerate(np.bincount(self.ids[where].ravel()).tolist()):
            if cells and old:
                self._move(cells, old, 0)
        self.ids[where] = 0

    def forget(self, where: Where, mask: Mask) -> None:
        """Parts of cells have no past any more."""
        cells = self.cells(where)
        for cell, part in zip(cells.tolist(), np.broadcast_to(mask, cells.shape).tolist(), strict=True):
            old = self.ids.item(cell)
            past, written = self.states[old]
            left = tuple(before._replace(mask=before.mask & ~part) for before in past if before.mask & ~part)
            self.ids[cell] = new = self._new(State(left, written & ~part))
            self._move(1, old, new)

    def record(self, where: Where, mask: Mask, access: Access) -> list[Trouble]:
        """Adds an access; what is wrong with it."""
        ids = self.ids[where]
        if type(mask) is not int:
            return self._record_masks(where, ids, mask, access)
        first = ids.item(0)
        if ids.tobytes() == first.to_bytes(4, sys.byteorder) * ids.size:  # the quickest way to compare them all
            new, trouble = self._step(first, mask, access, {})
            if new != first:
                self.ids[where] = new
                self._move(ids.size, first, new)
            return [self._trouble(where, 0, *trouble)] if trouble else []
        return self._record_many(where, ids, mask, access)

    def _record_many(self, where: Where, ids: NDArray[np.int32], mask: int, access: Access) -> list[Trouble]:
        """Of cells in different states."""
        counts = np.bincount(ids.ravel())
        after = np.zeros(counts.size, np.int32)
        made: dict[State, int] = {}
        found, moves = [], []
        for state in np.flatnonzero(counts).tolist():
            new, trouble = self._step(state, mask, access, made)
            after[state] = new
            if new != state:
                moves.append((counts.item(state), state, new))
            if trouble:
                found.append(self._trouble(where, int((ids == state).argmax()), *trouble))
        self.ids[where] = after[ids]
        for move in moves:
            self._move(*move)
        return found

    def _record_masks(
        self, where: Where, ids: NDArray[np.int32], mask: NDArray[np.uint16], access: Access
    ) -> list[Trouble]:
        """Of parts of cells, others of each."""
        keys = list(zip(ids.tolist(), mask.tolist(), strict=True))
        made: dict[State, int] = {}
        after: dict[tuple[int, int], int] = {}
        found = []
        for place, key in enumerate(keys):
            if key not in after:
                after[key], trouble = self._step(*key, access, made)
                if trouble:
                    found.append(self._trouble(where, place, *trouble))
        self.ids[where] = [after[key] for key in keys]
        for key in keys:
            if after[key] != key[0]:
                self._move(1, key[0], after[key])
        return found

    def _step(
        self, state: int, mask: int, access: Access, made: dict[State, int]
    ) -> tuple[int, tuple[bool, tuple[Past, ...]] | None]:
        """The state after an access to a part of a cell, and whether that was unwritten and what it does not see."""
        past, written = self.states[state]
        known, also, fence, bits = access.known, access.also, access.fence, access.fence_bits
        write = access.site & WRITE
        kept, hidden = [], []
        for before in past:
            chain, at, site, own = before
            left = own & ~mask
            ordered = at <= known(ORDER, chain) or (also is not None and at <= known(also, chain))
            meets = left != own and (write or site & WRITE)
            if meets and (not ordered or (fence is not None and site & bits == bits and at > known(fence, chain))):
                hidden.append(before)
            if write:
                if left:
                    kept.append(before if left == own else before._replace(mask=left))
            elif left or site & WRITE or not ordered:
                kept.append(before)
        if len(kept) >= self.most:
            del kept[next((i for i, before in enumerate(kept) if not before.site & WRITE), 0)]
        kept.append(Past(access.chain, access.at, access.site, mask))
        after = State(tuple(kept), written | mask if write else written)
        unwritten = access.needs and bool(mask & ~written)
        trouble = (unwritten, tuple(hidden)) if unwritten or hidden else None
        if after == (past, written):
            return state, trouble
        new = made.get(after)
        if new is None:
            new = made[after] = self._new(after)
        return new, trouble

    def _trouble(self, where: Where, place: int, unwritten: bool, conflicts: tuple[Past, ...]) -> Trouble:
        return Trouble(self.cells(where).item(place), unwritten, conflicts)

    def cells(self, where: Where) -> NDArray[np.intp]:
        """The numbers of cells, counted through all dimensions."""
        return np.arange(self.ids.size).reshape(self.ids.shape)[where]

    def past(self, where: Where, mask: Mask) -> Iterator[tuple[int, Past]]:
        """The accesses to parts of cells, each with a cell."""
        cells = self.cells(where).ravel()
        masks = np.broadcast_to(mask, cells.shape)
        for key in np.unique(self.ids.ravel()[cells].astype(np.int64) << 16 | masks).tolist():
            first = int(np.flatnonzero((self.ids.ravel()[cells] == key >> 16) & (masks == key & FULL_CELL))[0])
            for before in self.states[key >> 16].past:
                if before.mask & key:
                    yield int(cells[first]), before

    def written(self) -> NDArray[np.uint16]:
        """The parts of each cell that were written."""
        return np.array([state.written for state in self.states], np.uint16)[self.ids]
