"""What the grid before did to global memory, for a dependent grid that may run beside it.

Source: PTX ISA, "griddepcontrol": once every CTA of a grid has issued launch_dependents or ended, dependent grids may
run, which makes nothing visible to them; griddepcontrol.wait does, for the thread that waits and, as any order of
causality, for those that synchronise with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxemu.watch.clocks import split
from ptxemu.watch.shadow import GRANULE, WRITE

if TYPE_CHECKING:
    from ptxemu.watch.rules import Rules, Site

__all__ = ["CHAIN", "GridBefore", "Hit"]

MOST = 4  # grids of a series that a dependent one is compared with
CHAIN = 2  # of every cluster of a dependent grid: its event 1 is the end of the grid before


@dataclass(frozen=True)
class Hit:
    """An access of a grid before to bytes that the dependent one accesses: where, by which of its clusters, and that
    grid's rules."""

    address: int
    serial: int
    site: Site
    rules: Rules


class GridBefore:
    """The accesses that a grid which let dependents start has left in the shadows of global memory.

    older: the grid before it, where that may still run: dependents could start before this grid had waited for it.  Of
    a longer series the last `MOST` are kept.
    """

    def __init__(self, rules: Rules, older: GridBefore | None = None) -> None:
        self.rules = rules
        self.older = older
        series, last = 1, self
        while last.older is not None:
            series += 1
            if series > MOST:
                last.older = None
            else:
                last = last.older
        regions = rules.grid.memory.regions
        self._shadows = [(r.base // GRANULE, r.shadow) for r in regions if r.shadow is not None]

    def conflict(self, base: int, where: Any, mask: Any, write: bool) -> Hit | None:
        """What it, or one before it, did to cells of a region at `base` that the dependent grid reads or writes; reads
        do not matter to reads."""
        cells = np.arange(where.start, where.stop) if isinstance(where, slice) else where
        granules = base // GRANULE + cells
        for first, shadow in self._shadows:
            inside = (granules >= first) & (granules < first + shadow.ids.size)
            if not inside.any():
                continue
            at = granules[inside] - first
            part = np.uint16(mask) if np.ndim(mask) == 0 else mask[inside]
            for cell, past in shadow.past(at, part):
                if write or past.site & WRITE:
                    serial, _ = split(past.chain)
                    return Hit((first + cell) * GRANULE, serial, self.rules.sites[past.site >> 2], self.rules)
        return None if self.older is None else self.older.conflict(base, where, mask, write)
