"""mbarrier objects: arrivals, transaction bytes and phases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptxemu.errors import MemoryFault
from ptxemu.machine.signal import Signal, Wait

if TYPE_CHECKING:
    from ptxemu.watch.agents import Sync

__all__ = ["MAX_COUNT", "Mbarrier"]

MAX_COUNT = (1 << 20) - 1


class Mbarrier(Signal):
    """PTX 'Parallel Synchronization and Communication Instructions: mbarrier'.

    expected: arrivals a phase; pending: arrivals still to come; tx: bytes still to come, which may be negative when
    they came before they were announced; phase: number of completed phases.
    announced, came: bytes of this phase, whose difference is tx.  line: of the PTX, where it was initialised.
    sync: what a watcher keeps of it.
    """

    __slots__ = ("announced", "came", "expected", "line", "name", "pending", "phase", "sync", "tx")

    def __init__(self, name: str, count: int, line: int = 0) -> None:
        super().__init__()
        if not 1 <= count <= MAX_COUNT:
            raise MemoryFault(f"{name}: mbarrier.init with count {count}, allowed are 1 to {MAX_COUNT}")
        self.name = name
        self.expected = self.pending = count
        self.tx = self.announced = self.came = 0
        self.phase = 0
        self.line = line
        self.sync: Sync | None = None

    def arrive(self, count: int = 1, *, relaxed: bool = False) -> int:
        """Counts arrivals; returns the number of the phase that they belong to."""
        phase = self.phase
        if not 1 <= count <= self.pending:
            raise MemoryFault(f"{self}: {count} arrivals are more than this phase expects")
        if self.sync is not None:
            self.sync.arrive(relaxed)
        self.pending -= count
        self._settle()
        return phase

    def drop(self, count: int = 1, *, relaxed: bool = False) -> int:
        """arrive_drop: arrives, and expects that many fewer from the next phase on."""
        self.expected -= count
        return self.arrive(count, relaxed=relaxed)

    def expect_tx(self, amount: int) -> None:
        """Announces bytes of this phase."""
        self.announced += amount
        self._transfer(amount)
        self._settle()  # they may all have come already

    def complete_tx(self, amount: int, *, relaxed: bool = False, async_proxy: bool = True) -> None:
        """Bytes have arrived.  relaxed: a thread says so; else a copy, which releases what it wrote."""
        if self.sync is not None:
            self.sync.arrive(relaxed, async_proxy and not relaxed)
        self.came += amount
        self._transfer(-amount)
        self._settle()

    def _transfer(self, amount: int) -> None:
        self.tx += amount
        if not -MAX_COUNT <= self.tx <= MAX_COUNT:
            raise MemoryFault(f"{self}: the transaction count leaves -(2^20-1)..2^20-1")

    def _settle(self) -> None:
        if not self.pending and not self.tx:
            self.phase += 1
            self.pending = self.expected
            self.announced = self.came = 0
            if self.sync is not None:
                self.sync.flip(self.phase)
            self.changed()

    @property
    def idle(self) -> bool:
        """Whether nothing of its current phase has happened yet."""
        return self.pending == self.expected and not self.tx

    def mismatch(self) -> str:
        """What bytes were announced and what came, where that differs; else nothing."""
        if not self.tx:
            return ""
        more = "more were announced than came" if self.tx > 0 else "more came than were announced"
        return f"transaction bytes of this phase: {self.announced} announced, {self.came} came; {more}"

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is complete: the current phase has the other one."""
        return (self.phase & 1) != (parity & 1)

    def wait(self, parity: int) -> Wait:
        """Until the phase of that parity is complete, or the system-dependent time limit of try_wait is over."""
        return Wait(self, lambda: self.passed(parity), lambda: f"parity {parity & 1} of {self}", may_expire=True)

    def __str__(self) -> str:
        return (
            f"mbarrier {self.name} (phase {self.phase}, {self.pending} of {self.expected} arrivals pending, "
            f"{self.tx} bytes pending)"
        )
