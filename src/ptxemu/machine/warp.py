"""A warp: groups of lanes that run together, and what instructions see of the machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import numpy as np

from ptxemu.errors import MemoryFault
from ptxemu.machine.lanes import FULL, first, lanes, merge
from ptxemu.machine.memory import SHARED_WINDOW, LocalMemory, Space
from ptxemu.machine.signal import Wait
from ptxemu.machine.span import Span
from ptxemu.machine.warpgroup import in_flight, in_use

if TYPE_CHECKING:
    from ptxemu.machine.cluster import Cluster
    from ptxemu.machine.cta import Cta
    from ptxemu.machine.grid import Grid
    from ptxemu.machine.mbarrier import Mbarrier
    from ptxemu.machine.program import Block
    from ptxemu.machine.warpgroup import Collective
    from ptxemu.watch.agents import Agent

__all__ = ["Group", "Warp"]

Registers = list[Any]
_NEVER = 1 << 60


class Group:
    """Lanes at one place: their registers (which hold for these lanes alone) and the block they run next.

    wait: what they wait for.  steps: the blocking instruction under way, and `finish`, which takes its result.
    needs: lanes that have to join before the group may run its block.
    """

    __slots__ = ("block", "finish", "mask", "needs", "registers", "since", "steps", "wait", "warp")

    def __init__(self, warp: Warp, mask: int, registers: Registers, block: Block) -> None:
        self.warp = warp
        self.mask = mask
        self.registers = registers
        self.block = block
        self.wait: Wait | None = None
        self.steps: Generator[Wait, None, Any] | None = None
        self.finish: Callable[[Warp, Registers, int, Any], Block | None] | None = None
        self.needs = 0
        self.since = 0  # when the wait began

    def release(self) -> None:
        """Its wait is over."""
        self.wait = None
        grid = self.warp.grid
        grid.waits.append(self.waited())
        self.warp.wake()

    def waited(self) -> Span:
        """Its wait, until now."""
        warp, line = self.warp, self.block.lines[0]
        return Span(warp.cta.index, warp.index, "", line, self.since, warp.grid.now(), self.since)

    def expire(self) -> None:
        """Its wait ends before what it waits for has come."""
        assert self.wait is not None
        self.wait.signal.waiting.remove(self)
        self.release()


class Warp:
    """32 lanes of a CTA.

    index: in the CTA; alive: mask of lanes that have not exited; first_thread: linear thread index of lane 0.
    memory, shared, queue, cluster, grid: what the CTA has, at hand.
    """

    def __init__(self, cta: Cta, index: int, mask: int) -> None:
        self.cta = cta
        self.index = index
        self.name = f"warp {index} of CTA {cta.index}"
        self.alive = mask
        self.cluster: Cluster = cta.cluster
        self.grid: Grid = cta.cluster.grid
        self.queue = self.grid.queue
        self.memory = self.grid.memory
        self.shared = self.cluster.shared
        program = self.grid.program
        self.local = LocalMemory(program.local_size)
        self.counts = [0] * len(program.blocks)
        self.specials: dict[str, Any] = {}  # values of special registers that stay the same
        self.defined: dict[int, int] = {}  # lanes that have written a register, of those that `uses` asks for
        self.flying: dict[int, Collective] = {}  # the wgmma in flight, by the id of the array that it will fill
        self.state: dict[Any, Any] = {}  # for instructions that keep something a warp: bulk groups, retries
        self.group = Group(self, mask, [0] * program.register_count, program.blocks[0])
        self.groups = [self.group]
        self.queued = False
        self.rotate = False
        self.started = self.grid.now()
        watch = self.grid.watch
        self.agent = watch.agent(self) if watch is not None else None

    # What instructions use.

    @property
    def line(self) -> int:
        """The PTX line of the blocking instruction under way, or where the running block begins."""
        lines = self.group.block.lines
        return lines[0] if lines else 0

    def space(self, name: str, address: Any, mask: int) -> tuple[Space, Any]:
        """The space that a state space of PTX ("global", "shared", "shared::cta", "shared::cluster", "local", "param",
        "const"; "" is generic) means, and the address in it."""
        if name.startswith("shared"):
            return self.shared, address
        if name == "local":
            return self.local, address
        if name:
            return self.memory, address
        window = (address if type(address) is int else int(address[first(mask)])) >> 56
        if not window:
            return self.memory, address
        return (self.shared if window == SHARED_WINDOW >> 56 else self.local), address & 0xFFFFFFFF

    def lane(self, value: Any, lane: int) -> int:
        """The value of one lane."""
        return value if type(value) is int else int(value[lane])

    def mbarrier(self, address: int) -> Mbarrier:
        """The barrier at a shared address (of any CTA of the cluster); MemoryFault when none was initialised there."""
        found = self.cluster.mbarriers.get(address & 0xFFFFFFFF)
        if found is None:
            raise MemoryFault(f"no mbarrier was initialised at shared {address & 0xFFFFFFFF:#x}")
        return found

    # Who the asynchronous operations act as that the warp issues; None where nobody watches.

    def copying(self, barrier: Mbarrier) -> Agent | None:
        """A copy that signals an mbarrier."""
        return None if self.agent is None else self.agent.copying(barrier)

    def grouped(self, kind: str, m: int) -> Agent | None:
        """A copy that belongs to the open group of the lane that issues it."""
        return None if self.agent is None else self.agent.grouped(kind, first(m))

    def piped(self, kind: str, m: int = 1, *, ordered: bool = True) -> Agent | None:
        """An operation of those that one thread, or the warp, issues and that complete in order; ordered: its accesses
        also come after theirs."""
        return None if self.agent is None else self.agent.piped(kind, first(m), ordered)

    def loading(self) -> Agent | None:
        """A tcgen05.ld."""
        return None if self.agent is None else self.agent.loading(self.grid.program.ptx_line(sys._getframe()))

    def loaded(self, line: int) -> None:
        """Every register of the tcgen05.ld at the line has been used."""
        if self.agent is not None:
            self.agent.loaded(line)

    def uses(self, registers: tuple[int, ...], mask: int) -> None:
        """Lanes read registers that may not have been written yet."""
        watch = self.grid.watch
        if watch is not None and any(mask & ~self.defined.get(register, 0) for register in registers):
            watch.undefined_register(self)

    def defines(self, registers: tuple[int, ...], mask: int) -> None:
        for register in registers:
            self.defined[register] = self.defined.get(register, 0) | mask

    def after_all(self, kind: str, m: int = 1) -> Agent | None:
        """The completion of all that the thread, or the warp, has issued of a kind."""
        return None if self.agent is None else self.agent.after_all(kind, first(m))

    # What generated code uses.

    def split(self, registers: Registers, mask: int, taken: int, there: Block, here: Block) -> Block | None:
        """A branch that the lanes of `taken` take to `there` while the others go on to `here`."""
        taken &= mask
        if taken == mask:
            return there
        if not taken:
            return here
        group = self.group
        other = mask & ~taken
        if taken & (taken - 1):  # the new group is the one of a single lane, whose registers then become ints
            taken, other, there, here = other, taken, here, there
        self.groups.append(Group(self, taken, self._own(registers, there.live, taken), there))
        group.mask = other
        group.block = here
        return None

    def divided(self, mask: int) -> None:
        """Only the lanes of `mask` come to an `.aligned` instruction that has a guard."""
        raise MemoryFault(
            f"an .aligned instruction has to be run by all lanes of a warp or by none: its guard lets {mask:#x} through"
        )

    def life(self) -> Span:
        """Its life, until now."""
        return Span(self.cta.index, self.index, "", 0, self.started, self.grid.now(), self.started)

    def exit(self, mask: int) -> None:
        """The lanes end."""
        self.alive &= ~mask
        self.groups.remove(self.group)
        if not self.alive:
            self.grid.lives.append(self.life())
        self.cta.lanes_ended(self, mask)

    def _own(self, registers: Registers, live: tuple[int, ...], mask: int) -> Registers:
        """A copy of the registers for some of their lanes; for a single lane, arrays become ints, but for those that
        a wgmma has still to fill."""
        copy = registers.copy()
        if mask & (mask - 1) == 0:
            lane, flying = first(mask), self.flying
            for index in live:
                if (value := copy[index]).__class__ is np.ndarray and not (flying and id(value.base) in flying):
                    copy[index] = value.item(lane)
        return copy

    def exit_some(self, ending: int, here: Block) -> None:
        """Some lanes of the group end, the others go on to `here`."""
        self.group.mask &= ~ending
        self.group.block = here
        self.alive &= ~ending
        self.cta.lanes_ended(self, ending)

    def branch_indexed(self, registers: Registers, mask: int, index: Any, targets: tuple[Block, ...]) -> Block | None:
        """A branch to one of `targets`, by lane."""
        ways: dict[int, int] = {}
        for lane in lanes(mask):
            way = self.lane(index, lane)
            if way >= len(targets):
                raise MemoryFault(f"brx.idx: index {way} of a list of {len(targets)} targets")
            ways[way] = ways.get(way, 0) | 1 << lane
        if len(ways) == 1:
            return targets[next(iter(ways))]
        self.groups.remove(self.group)
        for way, part in ways.items():
            self.groups.append(Group(self, part, self._own(registers, targets[way].live, part), targets[way]))
        return None

    def members(self, value: Any, mask: int) -> int:
        """The mask of lanes that an operand names."""
        return self.lane(value, first(mask)) & FULL

    def hold(self, block: Block, needs: int) -> None:
        """The group waits at the start of `block` until the lanes of `needs` that are alive have joined it."""
        self.group.block = block
        self.group.needs = needs

    def start(
        self,
        steps: Generator[Wait, None, Any],
        finish: Callable[[Warp, Registers, int, Any], Block | None],
        block: Block,
    ) -> Block | None:
        """Begins a blocking instruction; `finish` takes its result and returns the next block."""
        group = self.group
        group.block = block
        group.steps = steps
        group.finish = finish
        return self._resume(group)

    def _resume(self, group: Group) -> Block | None:
        """Goes on with a blocking instruction: the next block, or None when it waits."""
        assert group.steps is not None
        assert group.finish is not None
        try:
            wait = next(group.steps)
            while wait.ready():
                wait = next(group.steps)
        except StopIteration as end:
            finish, group.steps, group.finish = group.finish, None, None
            return finish(self, group.registers, group.mask, end.value)
        group.wait = wait
        group.since = self.grid.now()
        wait.signal.waiting.append(group)
        return None

    # What the scheduler uses.

    def wake(self) -> None:
        if not self.queued:
            self.queued = True
            self.grid.scheduler.ready.append(self)

    def fingerprint(self) -> int:
        """A hash of where its groups are and of what their registers hold."""
        groups = []
        for group in self.groups:
            held = (group.registers[index] for index in group.block.live)
            values = tuple(value.tobytes() if isinstance(value, np.ndarray) else value for value in held)
            groups.append((group.block.index, group.mask, group.wait is None, values))
        return hash(tuple(groups))

    def run(self, budget: int) -> bool:
        """Runs up to `budget` blocks; True when it could go on."""
        counts = self.counts
        while True:
            group = self._pick()
            if group is None:
                return False
            self.group = group
            group.needs = 0
            block = group.block
            if group.steps is not None:
                resumed = self._resume(group)
                if resumed is None:
                    continue
                block = resumed
            limit = self._limit(group)
            registers, mask = group.registers, group.mask
            while True:
                counts[block.index] += 1
                following = block.run(self, registers, mask)
                budget -= 1
                if following is None:
                    break
                block = following
                if block.index >= limit:
                    group.block = block
                    break
                if budget <= 0:
                    group.block = block
                    self.rotate = len(self.groups) > 1
                    return True
            if budget <= 0:
                return self._pick() is not None

    def _limit(self, group: Group) -> int:
        """The first block at which the group has to look for others: they may join it, or are to run first."""
        if len(self.groups) == 1:
            return _NEVER
        return min((g.block.index for g in self.groups if g is not group and g.steps is None), default=_NEVER)

    def _pick(self) -> Group | None:
        """The group to run: of those that can, the one furthest back, after joining groups at the same place."""
        groups = self.groups
        if len(groups) == 1:
            only = groups[0]
            return None if only.wait is not None or only.needs & self.alive & ~only.mask else only
        standing = [g.block for g in groups if g.steps is None]
        if len(set(standing)) < len(standing):
            self._join()
        alive = self.alive
        able = [g for g in self.groups if g.wait is None and not (g.needs & alive & ~g.mask and g.steps is None)]
        if len(able) < 2:
            if able:
                self.rotate = False
            return able[0] if able else None
        able.sort(key=lambda g: g.block.index)
        if self.rotate:
            self.rotate = False
            if able[0] is self.group:
                return able[1]
        return able[0]

    def _join(self) -> None:
        """Makes one group of those that are about to run the same block."""
        widths = self.grid.program.widths
        places: dict[int, Group] = {}
        joined = []
        for group in self.groups:
            other = places.get(group.block.index) if group.steps is None else None
            if other is None:
                if group.steps is None:
                    places[group.block.index] = group
                joined.append(group)
                continue
            mine, theirs = group.registers, other.registers
            for index in group.block.live:
                if mine[index] is not theirs[index]:
                    if self.flying:
                        self._joins(group.block, mine[index], theirs[index])
                    theirs[index] = _merged(other, theirs[index], group, mine[index], widths[index])
            other.mask |= group.mask
            other.needs |= group.needs
        self.groups = joined

    def _joins(self, block: Block, *values: Any) -> None:
        """A register that lanes join has two contents; nobody fills what comes of it."""
        for value in values:
            if self.agent is not None and (found := in_flight(self, value)) is not None:
                line = block.lines[0] if block.lines else 0
                return in_use(self, line, "lanes join, of which only some hold an accumulator,", found)
        return None


def _merged(one: Group, first_value: Any, two: Group, second_value: Any, width: int) -> Any:
    """A register of two groups that join.  A lane's int is often what the others' array still holds for it."""
    for group, value, array in ((two, second_value, first_value), (one, first_value, second_value)):
        if type(value) is int and isinstance(array, np.ndarray) and group.mask & (group.mask - 1) == 0:
            if array[first(group.mask)] == value:
                return array
            break
    return merge(one.mask, first_value, second_value, width)
