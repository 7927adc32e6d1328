"""A cluster: CTAs that run together, see each other's shared memory and share a barrier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptxemu.errors import MemoryFault
from ptxemu.machine.cta import Cta
from ptxemu.machine.mbarrier import Mbarrier
from ptxemu.machine.memory import Region, SharedWindow
from ptxemu.machine.signal import Signal, Wait

if TYPE_CHECKING:
    from ptxemu.machine.grid import Grid
    from ptxemu.machine.warp import Warp
    from ptxemu.watch.agents import Sync
    from ptxemu.watch.clocks import Chains

__all__ = ["Cluster", "ClusterBarrier"]


class ClusterBarrier(Signal):
    """PTX 'barrier.cluster': threads of all CTAs arrive; exited threads count as arrived."""

    def __init__(self, threads: int, sync: Sync | None = None) -> None:
        super().__init__()
        self.sync = sync  # what a watcher keeps of it
        self.threads = threads  # that have not exited
        self.arrivals: dict[Warp, int] = {}  # the lanes of each warp that have arrived
        self.generation = 0

    @property
    def arrived(self) -> int:
        return sum(mask.bit_count() for mask in self.arrivals.values())

    def arrive(self, warp: Warp, mask: int, *, relaxed: bool = False) -> int:
        """Returns the generation that the arrival belongs to."""
        generation = self.generation
        if self.arrivals.get(warp, 0) & mask:
            raise MemoryFault(f"{self}: lanes {mask:#010x} of {warp.name} arrive twice")
        self.arrivals[warp] = self.arrivals.get(warp, 0) | mask
        if self.sync is not None:
            self.sync.arrive(relaxed)
        self._settle()
        return generation

    def lanes_ended(self, warp: Warp, mask: int) -> None:
        self.threads -= mask.bit_count()
        if warp in self.arrivals:
            self.arrivals[warp] &= ~mask
        self._settle()

    def _settle(self) -> None:
        if self.arrivals and self.arrived >= self.threads:
            self.arrivals = {}
            self.generation += 1
            if self.sync is not None:
                self.sync.flip(self.generation)
            self.changed()

    def wait(self, generation: int) -> Wait:
        return Wait(self, lambda: self.generation != generation, lambda: str(self))

    def __str__(self) -> str:
        return f"cluster barrier ({self.arrived} of {self.threads} threads arrived)"


class Cluster:
    """index: (x, y, z) among the grid's clusters; shape: in CTAs; ctas by rank; mbarriers by shared address."""

    def __init__(self, grid: Grid, origin: tuple[int, int, int], shape: tuple[int, int, int]) -> None:
        self.grid = grid
        self.origin = origin  # the first CTA's index in the grid
        self.shape = shape
        self.index = tuple(o // s for o, s in zip(origin, shape, strict=True))
        self.mbarriers: dict[int, Mbarrier] = {}
        self.chains: Chains  # of events, where somebody watches
        size_x, size_y, size_z = shape
        ranks = [(x, y, z) for z in range(size_z) for y in range(size_y) for x in range(size_x)]
        watch = grid.watch
        if watch is not None:
            self.chains = watch.cluster_started(self)
        sync = watch.barrier(self) if watch is not None else None
        self.barrier = ClusterBarrier(len(ranks) * grid.threads, sync)
        self.ctas: list[Cta] = [
            Cta(self, (origin[0] + x, origin[1] + y, origin[2] + z), rank) for rank, (x, y, z) in enumerate(ranks)
        ]
        self.shared = SharedWindow([cta.region for cta in self.ctas])
        self.shared.watch = grid.watch
        self.shared.tally = grid.counters.shared
        self.live = len(self.ctas)
        for cta in self.ctas:
            cta.start()

    def cta_ended(self, cta: Cta) -> None:
        self.live -= 1
        if not self.live:
            self.grid.cluster_ended(self)
            return
        # Its shared memory may go to another CTA now, which is why a cluster barrier comes last where peers use it.
        gone = np.empty(0, np.uint8)
        self.shared.regions[cta.rank] = Region(f"CTA {cta.index}, which has ended", cta.region.base, gone, cta)
