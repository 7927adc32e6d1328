"""Who runs next: warps that can, in a seeded order, and between them the asynchronous queue."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from ptxemu.errors import TurnLimit

if TYPE_CHECKING:
    from ptxemu.machine.queue import Queue
    from ptxemu.machine.warp import Group, Warp

__all__ = ["TURN", "Scheduler"]

TURN = 64  # blocks a warp runs before another one may
COLLECT = 1024  # turns between two collections of young garbage; the collector is off meanwhile
PATIENCE = 64  # turns without any effect after which even "lazy" completes an asynchronous operation
SUSPICION = 1024  # turns without any effect after which warps that keep running may be spinning for ever
STATES = 1 << 17  # of a warp without any effect; one that goes through more of them counts as spinning
LEAPS = 40  # of the clock without any effect; each is twice as long as the one before


class Scheduler:
    """Runs warps until none can go on."""

    def __init__(self, queue: Queue, seed: int, progress: Callable[[], int], parked: Callable[[], list[Group]]) -> None:
        self.queue = queue
        self.random = random.Random(f"warps {seed}")
        self.ready: list[Warp] = []
        self.turns = 0
        self.limit = math.inf  # of turns
        self.progress = progress  # a number that grows with every effect on memory, a barrier or the grid
        self.parked = parked  # the groups whose wait may expire
        self.effects = 0
        self.idle = 0  # turns since it last grew, as far as known
        self.seen: dict[Warp, set[int]] = {}
        self.leapt = 0  # blocks that the clock counts though nobody ran them
        self.leaps = 0  # since the last effect
        self.watched = False  # somebody read the clock since the last effect or leap

    def run(self) -> None:
        """Returns when nothing is in flight and no warp is ready or ever gets out of a loop without effect."""
        ready, queue, choose = self.ready, self.queue, self.random.random
        vary = queue.schedule == "random"
        while True:
            while ready:
                index = int(choose() * len(ready))
                warp = ready[index]
                ready[index] = ready[-1]
                ready.pop()
                queue.issuer, queue.acting = warp, warp.agent
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
            if not queue.stalled() and self._stuck():
                return

    def _spinning(self) -> bool:
        """Looks after warps that run without any effect.  True when none of them can ever get out."""
        if self.turns > self.limit:
            raise TurnLimit(f"not at its end after {self.turns} turns of the scheduler; max_turns={self.limit}")
        if not self.turns % COLLECT:
            gc.collect(0)
        if self._progressed() or self.idle < PATIENCE or self.queue.stalled():
            return False
        return self.idle >= SUSPICION and self._stuck()

    def _progressed(self) -> bool:
        now = self.progress()
        if now == self.effects:
            return False
        self.effects, self.idle, self.seen = now, 0, {}
        self.leaps, self.watched = 0, False
        return True

    def clock(self) -> int:
        """Blocks that were run or leapt over.  A loop that waits for it repeats its states, yet it ends."""
        self.watched = True
        return self.turns * TURN + self.leapt

    def _leap(self) -> bool:
        """Time passes for warps that may be waiting for it; False when that did not help."""
        if not self.watched or self.leaps == LEAPS:
            return False
        self.leapt += PATIENCE * TURN << self.leaps
        self.leaps += 1
        self.watched, self.seen = False, {}
        return True

    def _stuck(self) -> bool:
        """Called when warps run without any effect or none is ready.  True when none of them can ever get out; else
        waits that may expire do so."""
        self._progressed()
        # Nothing changes outside a warp, so one that comes back to a state it was in goes round for ever.
        caught = sum(self._caught(warp) for warp in self.ready)
        if caught < len(self.ready):
            return False
        parked = self.parked()
        waiting = dict.fromkeys(group.warp for group in parked if not group.warp.queued)
        caught = sum(self._caught(warp) for warp in waiting)
        if caught == len(waiting) and not self._leap():
            return True
        for group in parked:
            group.expire()
        return False

    def _caught(self, warp: Warp) -> bool:
        """Whether the warp was in its state before, without an effect since then."""
        state, states = warp.fingerprint(), self.seen.setdefault(warp, set())
        if state in states or len(states) > STATES:
            return True
        states.add(state)
        return False
