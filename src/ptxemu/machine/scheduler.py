"""Who runs next: warps that can, in a seeded order, and between them the asynchronous queue."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptxemu.machine.queue import Queue
    from ptxemu.machine.warp import Warp

__all__ = ["TURN", "Scheduler"]

TURN = 64  # blocks a warp runs before another one may
COLLECT = 1024  # turns between two collections of young garbage; the collector is off meanwhile
PATIENCE = 64  # turns without any effect after which even "lazy" completes an asynchronous operation
SUSPICION = 1024  # turns without any effect after which warps that keep running may be spinning for ever


class Scheduler:
    """Runs warps until none can go on."""

    def __init__(self, queue: Queue, seed: int, progress: Callable[[], int]) -> None:
        self.queue = queue
        self.random = random.Random(f"warps {seed}")
        self.ready: list[Warp] = []
        self.turns = 0
        self.progress = progress  # a number that grows with every effect on memory, a barrier or the grid
        self.effects = 0
        self.idle = 0  # turns since it last grew, as far as known
        self.seen: dict[Warp, set[int]] = {}

    def run(self) -> None:
        """Returns when no warp is ready and nothing is in flight, or when all that are ready spin for ever."""
        ready, queue, choose = self.ready, self.queue, self.random.random
        vary = queue.schedule == "random"
        while True:
            while ready:
                index = int(choose() * len(ready))
                warp = ready[index]
                ready[index] = ready[-1]
                ready.pop()
                if warp.run(1 + int(choose() * TURN) if vary else TURN):
                    ready.append(warp)
                else:
                    warp.queued = False
                if queue.free:
                    queue.turn()
                self.turns += 1
                self.idle += 1
                if not self.turns % PATIENCE and self._spinning():
                    return
            if not queue.stalled():
                return

    def _spinning(self) -> bool:
        """Looks after warps that run without any effect.  True when none of them can ever get out."""
        if not self.turns % COLLECT:
            gc.collect(0)
        now = self.progress()
        if now != self.effects:
            self.effects, self.idle, self.seen = now, 0, {}
            return False
        if self.idle < PATIENCE or self.queue.stalled():
            return False
        if self.idle < SUSPICION:
            return False
        # Nothing changes outside a warp, so one that comes back to a state it was in goes round for ever.
        caught = 0
        for warp in self.ready:
            state, states = warp.fingerprint(), self.seen.setdefault(warp, set())
            caught += state in states
            states.add(state)
        return caught == len(self.ready)
