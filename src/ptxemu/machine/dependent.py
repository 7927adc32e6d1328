"""Dependent launches: a grid that starts while the one before it still runs (PTX 'griddepcontrol').

Launches run one after the other.  For a dependent one, memory goes back to what it was when every CTA of the grid
before had let dependents start; what that grid wrote afterwards comes as one operation of the dependent grid's queue,
when the schedule pleases, and griddepcontrol.wait waits for it.  So a program that does not wait reads old memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.errors import MemoryFault
from ptxemu.machine.memory import GlobalMemory
from ptxemu.machine.queue import Operation, Queue

__all__ = ["Release", "Rest"]


@dataclass(frozen=True)
class _Change:
    """Bytes at `places` (offsets from `base`) that were `before` and became `after`."""

    base: int
    places: NDArray[np.int64]
    before: NDArray[np.uint8]
    after: NDArray[np.uint8]

    def replace(self, memory: GlobalMemory, old: NDArray[np.uint8] | None, new: NDArray[np.uint8]) -> None:
        """Writes `new`, where `old` still stands if that is given; nothing where the memory is no longer registered."""
        try:
            region = memory.find(self.base + int(self.places[0]), self.base + int(self.places[-1]) + 1)
        except MemoryFault:
            return
        places = self.places + (self.base - region.base)
        if old is not None:
            same = region.data[places] == old
            places, new = places[same], new[same]
        region.data[places] = new


@dataclass(frozen=True)
class Rest:
    """What a grid wrote after it had let dependents start."""

    changes: tuple[_Change, ...]

    def begin(self, memory: GlobalMemory, queue: Queue) -> Operation:
        """Takes the writes back; the operation that does them again."""
        for change in self.changes:
            change.replace(memory, change.after, change.before)

        def finish() -> None:
            for change in self.changes:
                change.replace(memory, None, change.after)

        return queue.submit(finish, "the rest of the grid before")


class Release:
    """Which CTAs of a grid let dependents start, by griddepcontrol.launch_dependents or by ending."""

    def __init__(self, memory: GlobalMemory, ctas: int) -> None:
        self.memory = memory
        self.missing = ctas
        self.released: set[Any] = set()
        self.asked = False
        self.snapshot: dict[int, NDArray[np.uint8]] | None = None

    def launch_dependents(self, cta: object) -> None:
        self.asked = True
        self.without(cta)

    def without(self, cta: object, count: int = 1) -> None:
        """The CTA does not hold dependents back any more; `count` when it stands for several that never start."""
        if cta in self.released:
            return
        self.released.add(cta)
        self.missing -= count
        if not self.missing and self.asked:
            self.snapshot = {region.base: region.data.copy() for region in self.memory.regions}

    def rest(self) -> Rest | None:
        """At the grid's end: what it wrote since then; None if dependents could not start before."""
        if self.snapshot is None:
            return None
        changes = []
        for region in self.memory.regions:
            before = self.snapshot.get(region.base)
            if before is not None and before.size == region.data.size:
                places = np.flatnonzero(before != region.data)
                if places.size:
                    changes.append(_Change(region.base, places, before[places], region.data[places]))
        return Rest(tuple(changes))
