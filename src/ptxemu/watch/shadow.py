"""What memory remembers of accesses to it: of each cell those that a later access may be in conflict with.

A cell is 16 bytes of shared or global memory, or the 32 lanes of one quarter and column of tensor memory; a mask of 16
bits says which parts of it an access touched (a byte each, or two lanes).  A write takes the place of what it overlaps;
a read takes the place of reads that came before it in causality order, since what comes after it comes after those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.machine.memory import GRANULE
from ptxemu.watch.clocks import Lookup

__all__ = ["FENCED", "FULL_CELL", "GRANULE", "WRITE", "Access", "Conflicts", "Shadow"]

FULL_CELL = 0xFFFF
# The lowest bits of a site: a write; an access that later ones of another proxy, or tcgen05 operations of other
# threads, see through a fence only.
WRITE, FENCED = 1, 2

Where = Any  # a slice, or an array of cells
Mask = Any  # an int for all cells, or an array (cells,)


@dataclass
class Access:
    """One access.  event: (chain, index); site: an id that ends in the bits WRITE and FENCED.

    reached: the index known of chains; fenced: the same for accesses whose site has all of the bits `fence_bits`, or
    None where those need nothing more.
    """

    chain: int
    index: int
    site: int
    reached: Lookup
    fenced: Lookup | None = None
    fence_bits: int = FENCED


@dataclass
class Conflicts:
    """Earlier accesses that are in conflict with one: an entry each, of cell, chain, index and site."""

    cells: NDArray[np.intp]
    chains: NDArray[np.int32]
    indices: NDArray[np.int32]
    sites: NDArray[np.int32]


class Shadow:
    """cells: how many; most: accesses of a cell that are kept; more readers push out one of those before.

    written: the parts of each cell that were written, kept up to date; None: all were.
    """

    def __init__(self, cells: int, most: int, written: NDArray[np.uint16] | None) -> None:
        self.cells = cells
        self.most = most
        self.chain = np.zeros((2, cells), np.int32)
        self.index = np.zeros((2, cells), np.int32)
        self.site = np.zeros((2, cells), np.int32)
        self.mask = np.zeros((2, cells), np.uint16)  # 0: a free place
        self.written = written

    def unwritten(self, where: Where, mask: Mask) -> NDArray[np.intp]:
        """Of the cells, those of which a part under the mask was never written, as places in `where`."""
        if self.written is None:
            return _NONE
        missing = ~self.written[where] & np.uint16(mask)
        return np.flatnonzero(missing) if missing.any() else _NONE

    def reset(self, where: Where) -> None:
        """The memory is new there, with undefined contents."""
        if self.written is not None:
            self.written[where] = 0
        self.mask[:, where] = 0

    def record(self, where: Where, mask: Mask, access: Access) -> Conflicts | None:
        """Adds an access; what it is in conflict with."""
        masks, sites, chains = self.mask[:, where], self.site[:, where], self.chain[:, where]
        indices = self.index[:, where]
        part = np.uint16(mask)
        unordered = indices > access.reached(chains)
        if access.fenced is not None:
            bits = access.fence_bits
            unordered |= ((sites & bits) == bits) & (indices > access.fenced(chains))
        write = access.site & WRITE
        conflict = unordered & ((masks & part) != 0)
        if not write:
            conflict &= (sites & WRITE) != 0
        found = self._conflicts(where, conflict) if conflict.any() else None
        if write:
            if self.written is not None:
                self.written[where] |= part
            left = masks & ~part
            self.mask[:, where] = left
            free = left == 0
        else:
            free = (masks & ~part) == 0
            free &= ((sites & WRITE) == 0) & ~unordered | (masks == 0)
        self._place(where, part, free, access)
        return found

    def _place(self, where: Where, part: Any, free: NDArray[np.bool_], access: Access) -> None:
        """Puts the access into the first free place of each cell."""
        first = free[0]
        if first.all():
            self._put(0, where, part, access)
            return
        if (first | free[1]).all() and not first.any():
            self._put(1, where, part, access)
            return
        slot = free.argmax(axis=0)
        full = ~free.any(axis=0)
        if full.any():
            if len(self.mask) < self.most:
                slot[full] = len(self.mask)
                self._deepen()
            else:
                slot[full] = 1 + access.index % (self.most - 1)
        cells = np.arange(self.cells)[where] if isinstance(where, slice) else where
        self._put(slot, cells, part, access)

    def _put(self, slot: Any, cells: Where, part: Any, access: Access) -> None:
        self.chain[slot, cells] = access.chain
        self.index[slot, cells] = access.index
        self.site[slot, cells] = access.site
        self.mask[slot, cells] = part

    def _deepen(self) -> None:
        """Twice as many places a cell."""
        for name in ("chain", "index", "site", "mask"):
            table = getattr(self, name)
            setattr(self, name, np.concatenate([table, np.zeros_like(table)]))

    def _conflicts(self, where: Where, conflict: NDArray[np.bool_]) -> Conflicts:
        slots, places = np.nonzero(conflict)
        cells = (np.arange(self.cells)[where] if isinstance(where, slice) else where)[places]
        return Conflicts(cells, self.chain[slots, cells], self.index[slots, cells], self.site[slots, cells])


_NONE = np.zeros(0, np.intp)
