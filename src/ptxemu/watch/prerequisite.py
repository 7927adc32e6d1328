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

CHAIN = 2  # of every cluster of a dependent grid: its event 1 is the end of the grid before


@dataclass(frozen=True)
class Hit:
    """An access of the grid before to bytes that the dependent one accesses: where, and by which of its clusters."""

    address: int
    serial: int
    site: Site


class GridBefore:
    """The accesses that a grid which let dependents start has left in the shadows of global memory."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        regions = rules.grid.memory.regions
        self._shadows = [(r.base // GRANULE, r.shadow) for r in regions if r.shadow is not None]

    def conflict(self, base: int, where: Any, mask: Any, write: bool) -> Hit | None:
        """What it did to cells of a region at `base` that the dependent grid reads or writes; reads do not matter to
        reads."""
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
                    return Hit((first + cell) * GRANULE, split(past.chain)[0], self.rules.sites[past.site >> 2])
        return None
