"""Who runs next: warps that can, in a seeded order, and between them the asynchronous queue."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptxemu.machine.queue import Queue
    from ptxemu.machine.warp import Warp

__all__ = ["TURN", "Scheduler"]

TURN = 64  # blocks a warp runs before another one may
SPIN_TURNS = 64  # turns without any effect after which "lazy" completes an asynchronous operation nevertheless
SPIN_LIMIT = 1 << 20  # turns without any effect, and nothing in flight, after which spinning warps count as stuck


class Scheduler:
    """Runs warps until none can go on."""

    def __init__(self, queue: Queue, seed: int, progress: Callable[[], int]) -> None:
        self.queue = queue
        self.random = random.Random(f"warps {seed}")
        self.ready: list[Warp] = []
        self.turns = 0
        self.progress = progress  # a number that grows with every effect on memory, a barrier or the grid

    def run(self) -> None:
        """Returns when no warp is ready and nothing is in flight, or when all that are ready spin for ever."""
        ready, queue, choose = self.ready, self.queue, self.random.random
        spinning, effects = 0, self.progress()
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
                spinning += 1
                self.turns += 1
                if spinning % SPIN_TURNS == 0 and (now := self.progress()) != effects:
                    spinning, effects = 0, now
                elif spinning % SPIN_TURNS == 0 and not queue.stalled() and spinning > SPIN_LIMIT:
                    return
            if not queue.stalled():
                return
