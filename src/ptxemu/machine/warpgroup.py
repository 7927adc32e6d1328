"""Warpgroups: four warps that issue a wgmma together, and the registers that it fills in the end.

An accumulator register gets its new array when the instruction is issued, full of NaN, and the array gets its contents
when the operation completes: what looks at it too early sees the NaN, what only copies the register keeps it.

Source: PTX ISA, "wgmma.mma_async", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group".  A warpgroup's operations
complete first in, first out; an operation begins when all four warps have come to it, and is complete for all of them.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ptxemu.errors import MemoryFault
from ptxemu.machine.lanes import LANES
from ptxemu.machine.memory import RANK_SHIFT
from ptxemu.machine.signal import Signal, Wait
from ptxemu.machine.wgmma import WARPS, Wgmma, multiply

if TYPE_CHECKING:
    from ptxemu.machine.cta import Cta
    from ptxemu.machine.warp import Warp
    from ptxemu.watch.agents import Stream
    from ptxemu.watch.clocks import Clock

__all__ = ["IN_USE", "Collective", "Issued", "Warpgroup", "in_flight", "in_use", "issued_by", "warpgroup_of"]

IN_USE = "register of a wgmma in flight"

U32 = npt.NDArray[np.uint32]
Registers = tuple[Any, ...] | U32  # a thread's registers, or the array (registers, 32) whose rows they are


class Collective(Signal):
    """One wgmma of a warpgroup, which begins when each of its warps has brought its part.

    line: of the PTX.  d, a: each warp's registers, of D as they were and of A (none where A is in shared memory);
    out: the arrays (registers, 32) that it fills.  index: its event in the warpgroup's chain, for a watcher.
    """

    def __init__(self, op: Wgmma, line: int) -> None:
        super().__init__()
        self.op = op
        self.line = line
        self.done = False
        self.d: dict[int, Registers] = {}
        self.a: dict[int, Registers] = {}
        self.out: dict[int, U32] = {}
        self.before: list[tuple[int, Clock]] = []
        self.index = 0

    def wait(self) -> Wait:
        """Until it is complete."""
        return Wait(self, lambda: self.done, self._what)

    def _what(self) -> str:
        missing = WARPS - len(self.out)
        rest = f", to which {missing} of the {WARPS} warps of the warpgroup have not come" if missing else ""
        return f"wgmma.mma_async of line {self.line}{rest}"


class Warpgroup:
    """Four warps of a CTA, the first of which has an index that is a multiple of four."""

    def __init__(self, cta: Cta, first: int) -> None:
        if (first + WARPS) * LANES > cta.cluster.grid.threads:
            raise MemoryFault(
                f"wgmma needs a warpgroup of {WARPS} warps; warp {first} of CTA {cta.index}, "
                f"of {cta.cluster.grid.threads} threads, starts none"
            )
        self.cta = cta
        self.first = first
        self.begun = 0  # operations that have all their parts
        self.counts = [0] * WARPS  # operations that each warp has come to
        self.waiting: deque[Collective] = deque()  # for the other warps
        self.stream: Stream | None = None  # for a watcher

    def issue(self, w: Warp, op: Wgmma, line: int, d: Registers, a: Registers) -> Collective:
        """A warp comes to an operation.

        Raises MemoryFault: another warp of the group came to one that is not the same.
        """
        place = w.index - self.first
        ahead = self.counts[place] - self.begun
        self.counts[place] += 1
        if ahead == len(self.waiting):
            self.waiting.append(Collective(op, line))
        found = self.waiting[ahead]
        if found.line != line or found.op != op:
            raise MemoryFault(
                f"the warps of a warpgroup have to issue one wgmma.mma_async with the same operands: {w.name} comes to "
                f"that of line {line} with {_operands(op)}, another warp to that of line {found.line} with "
                f"{_operands(found.op)}"
            )
        found.d[place], found.a[place] = d if op.accumulate else (), a
        found.out[place] = np.full((op.kind.registers, LANES), 0xFFFFFFFF, np.uint32)
        if w.agent is not None:
            found.before.append(w.agent.leave())
        if len(found.out) == WARPS:
            self.waiting.popleft()
            self.begun += 1
            self._begin(w, found)
        return found

    def _begin(self, w: Warp, found: Collective) -> None:
        agent = None
        if w.agent is not None:
            if self.stream is None:
                self.stream = w.agent.new_stream("wgmma")
            agent = w.agent.together(found.before, self.stream)
            found.index = agent.index
        self.cta.cluster.grid.counters.mmas[str(found.op.kind)] += 1
        action = functools.partial(self._complete, found)
        w.queue.submit(action, "wgmma.mma_async", stream=("wgmma", self.cta, self.first), agent=agent)

    def _complete(self, found: Collective) -> None:
        op = found.op
        parts = range(WARPS)
        a = np.stack([_rows(found.a[i]) for i in parts]) if op.a is None else None
        c = np.stack([_rows(found.d[i]) for i in parts]) if op.accumulate else None
        result = multiply(op, self._read, a, c)
        for i in parts:
            found.out[i][:] = result[i]
        found.d.clear()
        found.a.clear()
        found.done = True
        found.changed()

    def _read(self, address: int, size: int, granules: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        start = self.cta.rank << RANK_SHIFT | address
        return self.cta.cluster.shared.view(start, size, proxy="tensor", touched=(granules.reshape(-1), 0xFFFF))


def _operands(op: Wgmma) -> str:
    """What has to be the same in all warps and may not be."""
    a = "A in registers" if op.a is None else f"A at {op.a:#018x}"
    return f"{op.kind}, {a}, B at {op.b:#018x}, D {'added' if op.accumulate else 'ignored'}"


def _rows(registers: Registers) -> U32:
    """Registers as (registers, 32)."""
    if isinstance(registers, np.ndarray):
        return registers
    rows = np.empty((len(registers), LANES), np.uint32)
    for i, register in enumerate(registers):
        rows[i] = register
    return rows


class Issued:
    """A warp's wgmma: `open` are not committed, each group is what was committed together.

    touched: lines at which registers that a wgmma uses were accessed since the last wgmma.fence; 0: there was none yet.
    """

    def __init__(self) -> None:
        self.open: list[Collective] = []
        self.groups: list[list[Collective]] = []
        self.touched: set[int] = {0}
        self.registers: dict[Collective, tuple[frozenset[int], frozenset[int]]] = {}  # of D and of A, by number
        self.newest: tuple[U32, list[U32]] | None = None  # the array that the newest one fills, and its rows

    def begun(self, found: Collective, block: U32) -> list[U32]:
        """The warp has issued an operation that fills an array; the rows of that, which its registers get."""
        self.open.append(found)
        rows = list(block)
        self.newest = block, rows
        return rows

    def together(self, registers: tuple[Any, ...]) -> Registers:
        """The registers as one array, where they are just what the newest operation fills."""
        if self.newest is None or len(registers) != len(self.newest[1]):
            return registers
        return self.newest[0] if all(map(operator.is_, registers, self.newest[1])) else registers

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def older(self, keep: int) -> list[Collective]:
        """The members of all groups but the newest `keep`."""
        return [found for group in self.groups[: max(len(self.groups) - keep, 0)] for found in group]

    def waited(self, keep: int) -> None:
        for found in self.older(keep):
            self.registers.pop(found, None)
        del self.groups[: max(len(self.groups) - keep, 0)]


def issued_by(w: Warp) -> Issued:
    """A warp's."""
    issued: Issued = w.state.setdefault("wgmma", Issued())
    return issued


def warpgroup_of(w: Warp) -> Warpgroup:
    """The warpgroup of a warp.  Raises MemoryFault where its CTA has no four warps for it."""
    first = w.index - w.index % WARPS
    found = w.cta.warpgroups.get(first)
    if found is None:
        found = w.cta.warpgroups[first] = Warpgroup(w.cta, first)
    return found


def in_flight(w: Warp, value: Any) -> Collective | None:
    """The operation that has still to fill a register, by what the register holds."""
    return w.flying.get(id(value.base)) if value.__class__ is np.ndarray else None


def in_use(w: Warp, line: int, what: str, found: Collective) -> None:
    """Notes the finding that registers of an operation in flight are accessed at a line."""
    text, _ = w.grid.findings.place(found.line)
    w.grid.findings.add(
        IN_USE,
        f"{what} before a wgmma.wait_group has waited for the operation that uses it",
        line=line,
        warp=w,
        other=f"line {found.line}: `{text}`",
        other_line=found.line,
    )
