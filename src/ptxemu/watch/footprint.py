"""Which bytes of global memory a part of a grid reads and writes, so that parts can be compared and put together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.machine.lanes import lanes as lanes_of
from ptxemu.machine.memory import GRANULE, GlobalMemory, Order, Region, Space, Touched, Watch
from ptxemu.watch.shadow import FULL_CELL
from ptxemu.watch.watcher import cells_of, span

__all__ = ["Change", "Footprint", "Masks", "conflict"]

Masks = dict[int, NDArray[np.uint16]]  # by a region's base: for each of its granules which bytes


@dataclass(frozen=True)
class Change:
    """What was written to a region: granules, which bytes of each, and what those 16 bytes are now."""

    cells: NDArray[np.int64]
    masks: NDArray[np.uint16]
    data: NDArray[np.uint8]

    def apply(self, region: Region) -> None:
        """Writes the bytes, and notes in `region.written` that they are."""
        if region.written is not None:
            region.written[self.cells] |= self.masks
        whole = self.masks == FULL_CELL
        rows = _rows(region)
        if rows is not None:
            rows[self.cells[whole]] = self.data[whole]
        else:
            whole[:] = False
        rest = ~whole
        places = self.cells[rest, None] * GRANULE + np.arange(GRANULE) - region.base % GRANULE
        chosen = (self.masks[rest, None] >> np.arange(GRANULE, dtype=np.uint16) & np.uint16(1)).astype(bool)
        region.data[places[chosen]] = self.data[rest][chosen]


def _rows(region: Region) -> NDArray[np.uint8] | None:
    """The region's granules (n, 16), where they are whole; its data themselves."""
    if region.base % GRANULE or region.data.size % GRANULE:
        return None
    return region.data.reshape(-1, GRANULE)


class Footprint:
    """Sees every access to global memory, and passes it on to who watched before.

    reads, writes: bytes that were read and written; a byte may be in both.
    """

    def __init__(self, memory: GlobalMemory) -> None:
        self.memory = memory
        self.then: Watch | None = None
        self.reads: Masks = {}
        self.writes: Masks = {}

    def attach(self) -> None:
        """From now on; who watches already goes on."""
        self.then, self.memory.watch = self.memory.watch, self

    def changes(self) -> dict[int, Change]:
        """What was written, by the region's base."""
        found = {}
        for region in self.memory.regions:
            masks = self.writes.get(region.base)
            if masks is None:
                continue
            cells = np.flatnonzero(masks)
            rows = _rows(region)
            if rows is None:
                skipped = region.base % GRANULE
                rows = np.zeros((masks.size, GRANULE), np.uint8)
                rows.reshape(-1)[skipped : skipped + region.data.size] = region.data
            found[region.base] = Change(cells, masks[cells], rows[cells])
        return found

    def view(
        self,
        space: Space,
        region: Region,
        address: int,
        nbytes: int,
        write: bool,
        proxy: str,
        touched: Touched | None,
        order: Order | None,
    ) -> None:
        """As `Watch.view`."""
        start = address - (region.base & -GRANULE)
        where, mask = span(start, nbytes) if touched is None else (touched[0] + start // GRANULE, touched[1])
        self._add(region, where, mask, write)
        if self.then is not None:
            self.then.view(space, region, address, nbytes, write, proxy, touched, order)

    def lanes(
        self, space: Space, address: Any, nbytes: int, mask: int, write: bool, order: Order | None, atomic: bool = False
    ) -> None:
        """As `Watch.lanes`."""
        self._lanes(space, address, nbytes, mask, write)
        if atomic:
            self._lanes(space, address, nbytes, mask, False)
        if self.then is not None:
            self.then.lanes(space, address, nbytes, mask, write, order, atomic)

    def _lanes(self, space: Space, address: Any, nbytes: int, mask: int, write: bool) -> None:
        if type(address) is int:
            region = space.find(address, address + nbytes)
            return self._add(region, *span(address - (region.base & -GRANULE), nbytes), write)
        first = int(address[(mask & -mask).bit_length() - 1])
        region = space.find(first, first + nbytes)
        cells = cells_of(address.tobytes(), address.dtype, region.base, region.end, nbytes, mask)
        if cells is not None:
            return self._add(region, *cells, write)
        for lane in lanes_of(mask):
            self._lanes(space, int(address[lane]), nbytes, 1 << lane, write)

    def _add(self, region: Region, where: Any, mask: Any, write: bool) -> None:
        side = self.writes if write else self.reads
        masks = side.get(region.base)
        if masks is None:
            size = (region.base % GRANULE + region.data.size + GRANULE - 1) // GRANULE
            masks = side[region.base] = np.zeros(size, np.uint16)
        if type(mask) is int and mask == FULL_CELL:
            masks[where] = FULL_CELL
        else:
            masks[where] |= mask


def conflict(parts: list[tuple[Masks, Masks]]) -> bool:
    """Whether of several parts' reads and writes one part writes a byte that another reads or writes."""
    read: Masks = {}
    written: Masks = {}
    for reads, writes in parts:
        if _meet(writes, read) or _meet(writes, written) or _meet(reads, written):
            return True
        for mine, all_of in ((reads, read), (writes, written)):
            for base, masks in mine.items():
                all_of[base] = all_of[base] | masks if base in all_of else masks
    return False


def _meet(one: Masks, other: Masks) -> bool:
    return any(base in other and bool((masks & other[base]).any()) for base, masks in one.items())
