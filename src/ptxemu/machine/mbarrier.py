"""mbarrier objects: arrivals, transaction bytes and phases."""

from __future__ import annotations

from ptxemu.errors import MemoryFault
from ptxemu.machine.signal import Signal, Wait

__all__ = ["MAX_COUNT", "Mbarrier"]

MAX_COUNT = (1 << 20) - 1


class Mbarrier(Signal):
    """PTX 'Parallel Synchronization and Communication Instructions: mbarrier'.

    expected: arrivals a phase; pending: arrivals still to come; tx: bytes still to come, which may be negative when
    they came before they were announced; phase: number of completed phases.
    """

    __slots__ = ("expected", "name", "pending", "phase", "tx")

    def __init__(self, name: str, count: int) -> None:
        super().__init__()
        if not 1 <= count <= MAX_COUNT:
            raise MemoryFault(f"{name}: mbarrier.init with count {count}, allowed are 1 to {MAX_COUNT}")
        self.name = name
        self.expected = self.pending = count
        self.tx = 0
        self.phase = 0

    def arrive(self, count: int = 1) -> int:
        """Counts arrivals; returns the number of the phase that they belong to."""
        phase = self.phase
        if not 1 <= count <= self.pending:
            raise MemoryFault(f"{self}: {count} arrivals are more than this phase expects")
        self.pending -= count
        self._settle()
        return phase

    def drop(self, count: int = 1) -> int:
        """arrive_drop: arrives, and expects that many fewer from the next phase on."""
        self.expected -= count
        return self.arrive(count)

    def expect_tx(self, amount: int) -> None:
        """Announces bytes of this phase."""
        self._transfer(amount)
        self._settle()  # they may all have come already

    def complete_tx(self, amount: int) -> None:
        """Bytes have arrived."""
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
            self.changed()

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
