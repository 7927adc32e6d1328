"""A CTA: its shared memory, tensor memory, named barriers and warps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptxemu.errors import MemoryFault
from ptxemu.machine.lanes import FULL, LANES
from ptxemu.machine.memory import RANK_SHIFT, SHARED_BASE, Region
from ptxemu.machine.signal import Signal, Wait
from ptxemu.machine.tmem import TensorMemory
from ptxemu.machine.warp import Warp

if TYPE_CHECKING:
    from ptxemu.machine.cluster import Cluster
    from ptxemu.machine.warpgroup import Warpgroup

__all__ = ["Cta", "NamedBarrier"]

BARRIERS = 16


class NamedBarrier(Signal):
    """One of a CTA's 16 barriers (PTX 'Parallel Synchronization: bar, barrier')."""

    __slots__ = ("arrived", "cta", "expected", "generation", "index", "reduced", "result", "sync")

    def __init__(self, cta: Cta, index: int) -> None:
        super().__init__()
        self.cta = cta
        self.index = index
        self.arrived = 0
        self.expected: int | None = None  # threads; None: all of the CTA that have not exited
        self.generation = 0
        watch = cta.cluster.grid.watch
        self.sync = watch.barrier(cta.cluster) if watch is not None else None
        self.reduced: list[bool] = []
        self.result: list[bool] = []  # what the threads of the last complete generation gave to bar.red

    def arrive(self, threads: int, expected: int | None) -> int:
        """`threads` arrive; returns the generation that they belong to."""
        if self.arrived and expected != self.expected:
            raise MemoryFault(
                f"{self}: a thread count of {expected or 'all'}, while threads that came before gave "
                f"{self.expected or 'all'}"
            )
        if self.sync is not None:
            self.sync.arrive()
        generation = self.generation
        self.expected = expected
        self.arrived += threads
        self.settle()
        return generation

    def settle(self) -> None:
        """Opens the barrier when all have arrived."""
        expected = self.cta.live_warps * LANES if self.expected is None else self.expected
        if self.arrived and self.arrived >= expected:
            self.arrived = 0
            self.generation += 1
            if self.sync is not None:
                self.sync.flip(self.generation)
            self.cta.cluster.grid.effects += 1
            self.result, self.reduced = self.reduced, []
            self.changed()

    def wait(self, generation: int) -> Wait:
        return Wait(self, lambda: self.generation != generation, lambda: str(self))

    def __str__(self) -> str:
        expected = self.cta.live_warps * LANES if self.expected is None else self.expected
        return f"barrier {self.index} of CTA {self.cta.index} ({self.arrived} of {expected} threads arrived)"


class Cta(Signal):
    """One CTA.  index: (x, y, z) in the grid; rank: in its cluster.  As a signal it changes when lanes exit."""

    def __init__(self, cluster: Cluster, index: tuple[int, int, int], rank: int) -> None:
        super().__init__()
        self.cluster = cluster
        self.index = index
        self.rank = rank
        grid = cluster.grid
        # NaN in every format, so that what nobody wrote shows.
        data = np.full(grid.shared_bytes, 0xFF, np.uint8)
        self.region = Region(f"shared memory of CTA {index}", (rank << RANK_SHIFT) | SHARED_BASE, data, self)
        self.tmem = TensorMemory()
        self.barriers = [NamedBarrier(self, i) for i in range(BARRIERS)]
        self.warps: list[Warp] = []
        self.warpgroups: dict[int, Warpgroup] = {}  # by the index of the first warp, once they issue a wgmma
        self.live_warps = 0

    def start(self) -> None:
        """Creates the warps, ready to run."""
        threads = self.cluster.grid.threads
        for index in range((threads + LANES - 1) // LANES):
            count = min(LANES, threads - index * LANES)
            self.warps.append(Warp(self, index, FULL >> (LANES - count)))
        self.live_warps = len(self.warps)
        for warp in self.warps:
            warp.wake()

    def lanes_ended(self, warp: Warp, mask: int) -> None:
        """Called by a warp some of whose lanes exited."""
        if not warp.alive:
            self.live_warps -= 1
        for barrier in self.barriers:
            if barrier.arrived:
                barrier.settle()
        self.cluster.barrier.lanes_ended(warp, mask)
        if not self.live_warps:
            if (at_exit := self.cluster.grid.at_exit) is not None:
                at_exit(self, warp)
            self.cluster.cta_ended(self)
        self.changed()
