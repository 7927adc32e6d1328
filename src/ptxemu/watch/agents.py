"""Who acts: a warp, or an asynchronous operation that a warp issued; and what barriers carry from one to another.

Sources in the PTX ISA: "Release and Acquire Patterns" (fences before relaxed operations), "membar / fence" (proxy
fences, fence.mbarrier_init), "Async proxy" (the end of an asynchronous copy is an implicit proxy fence), "Memory
Consistency Model for 5th generation of TensorCore operations" (tcgen05 fences, pipelines, waits).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import numpy as np

from ptxemu.machine.lanes import lanes
from ptxemu.watch.clocks import BEFORE, GLOBAL, INIT, ORDER, SHARED, TENSOR, TENSORMAP, Chains, Clock

if TYPE_CHECKING:
    from ptxemu.machine.mbarrier import Mbarrier
    from ptxemu.machine.warp import Warp

__all__ = ["Agent", "Stream", "Sync", "Together", "WarpAgent"]


class Agent:
    """clock: what it knows; (chain, index): the event that its accesses are; line: of the PTX, 0 to be looked up.

    barrier: the mbarrier that an asynchronous copy signals, whose phase then gives the index.  publishes: what its
    arrivals release.
    """

    __slots__ = ("barrier", "chain", "clock", "index", "line", "publishes", "warp")

    def __init__(self, warp: Warp, clock: Clock, chain: int, index: int, barrier: Mbarrier | None = None) -> None:
        self.warp = warp
        self.clock = clock
        self.chain = chain
        self.index = index
        self.barrier = barrier
        self.publishes: Clock | None = None
        self.line = 0

    def begin(self) -> None:
        """It is about to act."""
        if self.barrier is not None:
            assert self.barrier.sync is not None
            self.index = self.barrier.sync.base + self.barrier.phase + 1

    def release(self, into: Clock, relaxed: bool) -> None:
        """What it publishes goes to whoever acquires `into`.

        PTX 'Asynchronous Operations': complete-tx is ordered after the accesses of its own instruction alone, which the
        phase of the mbarrier stands for, and not after what the issuing thread did before.
        """
        if self.publishes is not None:
            _publish(self.publishes, into)


class Together(Agent):
    """An operation that several warps issue.  began: how far the chain of each was when it did."""

    __slots__ = ("began",)

    def __init__(self, warp: Warp, clock: Clock, chain: int, index: int, began: dict[int, int]) -> None:
        super().__init__(warp, clock, chain, index)
        self.began = began


def _publish(clock: Clock, into: Clock) -> None:
    """What a release carries: of tcgen05 operations, what fence::before_thread_sync put before it alone."""
    into.merge(clock)
    into.known[TENSOR] = 0


class Stream:
    """A chain of a warp's asynchronous operations.  head: the index of the newest one, or of the open group."""

    __slots__ = ("chain", "head", "issued")

    def __init__(self, chain: int, head: int) -> None:
        self.chain = chain
        self.head = head
        self.issued: Clock | None = None  # what the newest operation of a pipe comes after


class WarpAgent(Agent):
    """A warp.

    fenced: what fences have prepared for relaxed arrivals and stores to release; received: what relaxed waits and loads
    have got, for a fence to acquire.  streams: by (kind, lane); loads: the tcgen05.ld that nothing waited for, by line.
    """

    __slots__ = ("fence_scope", "fenced", "loads", "received", "streams", "strict")

    def __init__(self, warp: Warp, chains: Chains, strict: bool) -> None:
        super().__init__(warp, Clock(chains), chains.new("warp"), 0)
        self.strict = strict
        self.fenced: Clock | None = None
        self.fence_scope = 3  # of the last fence
        self.received: Clock | None = None
        self.streams: dict[tuple[str, Hashable], Stream] = {}
        self.loads: dict[int, int] = {}
        self._tick()

    def _tick(self) -> None:
        """What it does from now on is another event."""
        self.index += 1
        self.clock.fit()[ORDER, self.chain] = self.index

    def release(self, into: Clock, relaxed: bool) -> None:
        source = self.fenced if relaxed else self.clock
        if source is not None:
            _publish(source, into)
        if not relaxed:
            self._tick()

    def acquire(self, clock: Clock, relaxed: bool) -> None:
        if not relaxed:
            self.clock.merge(clock)
            return
        if self.received is None:
            self.received = Clock(self.clock.chains)
        self.received.merge(clock)

    def fence(self, scope: int = 3) -> None:
        """PTX 'membar / fence': fence.acq_rel and stronger ones.  scope: 1 the CTA, 2 the cluster, 3 the device."""
        self.fence_scope = scope
        if self.received is not None:
            self.clock.merge(self.received)
        self.fenced = self.clock.copy()
        self._tick()

    def fence_init(self) -> None:
        """fence.mbarrier_init.release: of what came before, mbarrier.init alone."""
        self._prepare(INIT, self.clock.fit()[ORDER].copy())
        self._tick()

    def fence_proxy(self, shared: bool, in_global: bool) -> None:
        """fence.proxy.async: from here on the async proxy may see all that the warp knows of."""
        known = self.clock.fit()
        for row in (SHARED,) * shared + (GLOBAL,) * in_global:
            np.maximum(known[row], known[ORDER], out=known[row])
        self._tick()

    def fence_tensormap(self) -> None:
        """fence.proxy.tensormap::generic.acquire: tensor maps that were written before may be used."""
        known = self.clock.fit()
        np.maximum(known[TENSORMAP], known[ORDER], out=known[TENSORMAP])

    def before_thread_sync(self) -> None:
        self._prepare(BEFORE, self.clock.fit()[ORDER].copy())

    def after_thread_sync(self) -> None:
        for clock in (self.clock, self.received):
            if clock is not None:
                known = self.clock.fit()
                np.maximum(known[TENSOR], clock.fit()[BEFORE], out=known[TENSOR])

    def _prepare(self, row: int, known: np.ndarray) -> None:
        """Puts something into a row of what releases carry, relaxed ones too."""
        if self.fenced is None:
            self.fenced = Clock(self.clock.chains)
        for clock in (self.clock, self.fenced):
            mine = clock.fit()[row]
            np.maximum(mine, known, out=mine)

    # Streams of asynchronous operations

    def stream(self, kind: str, key: Hashable, head: int = 0) -> Stream:
        found = self.streams.get((kind, key))
        if found is None:
            found = self.streams[kind, key] = Stream(self.clock.chains.new(kind), head)
        return found

    def learn(self, stream: Stream, index: int) -> None:
        """The stream's operations up to `index` are complete, and the warp has waited for that."""
        known = self.clock.fit()
        for row in (ORDER, TENSOR):
            known[row, stream.chain] = max(known[row, stream.chain], index)

    def commit_groups(self, kinds: tuple[str, ...], m: int) -> None:
        """The lanes' open groups are closed."""
        for kind in kinds:
            for lane in lanes(m):
                if (stream := self.streams.get((kind, lane))) is not None:
                    stream.head += 1

    def groups_done(self, kinds: tuple[str, ...], m: int, keep: int) -> None:
        """All but the newest `keep` of the lanes' groups are complete."""
        for kind in kinds:
            for lane in lanes(m):
                if (stream := self.streams.get((kind, lane))) is not None:
                    self.learn(stream, stream.head - 1 - keep)

    def waited_for(self, kind: str) -> None:
        """tcgen05.wait::ld or ::st."""
        stream = self.stream(kind, 0)
        if kind == "tcgen05.ld":
            self.loads.clear()
        self.learn(stream, stream.head)

    def loaded(self, line: int) -> None:
        """Every register of the tcgen05.ld at the line has been used, so that load is complete: PTX 'Register
        dependencies, same thread'.  It orders nothing else, which is why `strict` does not count it."""
        if self.strict or self.loads.pop(line, None) is None:
            return
        stream = self.stream("tcgen05.ld", 0)
        self.learn(stream, min(self.loads.values(), default=stream.head + 1) - 1)

    def new_stream(self, kind: str) -> Stream:
        """One that several warps share."""
        return Stream(self.clock.chains.new(kind), 0)

    def leave(self) -> tuple[int, Clock]:
        """Its chain, and what it knows when it comes to an operation of several warps."""
        before = self.clock.copy()
        self._tick()  # what the warp does from now on does not come before
        return self.chain, before

    # Who its asynchronous operations act as: with what it knows when it issues them.

    def _issue(self, chain: int, index: int, barrier: Mbarrier | None = None) -> Agent:
        agent = Agent(self.warp, self.clock.copy(), chain, index, barrier)
        self._tick()  # what the warp does from now on does not come before
        return agent

    def copying(self, barrier: Mbarrier) -> Agent:
        """A copy that signals an mbarrier."""
        assert barrier.sync is not None
        return self._issue(barrier.sync.chain, 0, barrier)

    def grouped(self, kind: str, lane: int) -> Agent:
        """A copy that belongs to the open group of its kind."""
        stream = self.stream(kind, lane, head=1)
        return self._issue(stream.chain, stream.head)

    def piped(self, kind: str, lane: int, ordered: bool) -> Agent:
        """An operation of a pipe, complete after those before it; ordered: its accesses come after theirs, too, which
        is so by the manual for some pairs, and where `strict` does not ask for more for all."""
        stream = self.stream(kind, lane)
        stream.head += 1
        agent = self._issue(stream.chain, stream.head)
        stream.issued = agent.clock
        if ordered or not self.strict:
            known = agent.clock.fit()
            known[ORDER, stream.chain] = known[TENSOR, stream.chain] = stream.head
        return agent

    def together(self, before: list[tuple[int, Clock]], stream: Stream) -> Together:
        """An operation of several warps, which comes after what all of them knew."""
        stream.head += 1
        began = {chain: int(clock.fit()[ORDER, chain]) for chain, clock in before}
        clock = before[0][1]
        known = clock.fit()
        for _, other in before[1:]:
            np.minimum(known, other.fit(), out=known)
        known[ORDER, stream.chain] = stream.head
        return Together(self.warp, clock, stream.chain, stream.head, began)

    def loading(self, line: int) -> Agent:
        """A tcgen05.ld at a PTX line, which reads at once: it needs no clock of its own."""
        stream = self.stream("tcgen05.ld", 0)
        stream.head += 1
        agent = Agent(self.warp, self.clock, stream.chain, stream.head)
        agent.line = line
        self.loads.setdefault(line, agent.index)
        return agent

    def after_all(self, kind: str, lane: int) -> Agent:
        """The completion of all that was issued of a kind so far, which releases that and what it came after itself;
        with tcgen05.commit, which implies fence::before_thread_sync."""
        stream = self.stream(kind, lane)
        agent = self._issue(stream.chain, stream.head)
        agent.publishes = Clock(self.clock.chains) if stream.issued is None else stream.issued.copy()
        known = agent.publishes.fit()
        known[ORDER, stream.chain] = known[TENSOR, stream.chain] = stream.head
        np.maximum(known[BEFORE], known[ORDER], out=known[BEFORE])
        return agent


class Sync:
    """What a barrier carries: `pending` of the current phase, `done` of the complete ones.

    chain: the phases of an mbarrier as events; 0: of another barrier, whose phases are none.  init: the event that its
    mbarrier.init is, at PTX line `init_line`.  base: events of the chain before its phases; phase: complete ones.
    """

    __slots__ = ("acting", "base", "chain", "done", "init", "init_line", "misuse", "pending", "phase")

    def __init__(
        self,
        chains: Chains,
        acting: Callable[[], Agent | None],
        chain: int = 0,
        misuse: Callable[[Sync, Agent, bool], None] | None = None,
        base: int = 0,
    ) -> None:
        self.pending = Clock(chains)
        self.done = Clock(chains)
        self.chain = chain
        self.base = base
        self.phase = 0
        self.acting = acting
        self.init: tuple[int, int] | None = None
        self.init_line = 0
        self.misuse = misuse

    def arrive(self, relaxed: bool = False, async_proxy: bool = False) -> None:
        """Who acts now arrives, or counts bytes that an asynchronous copy has brought."""
        if (agent := self.acting()) is not None:
            self.use(agent, async_proxy)
            agent.release(self.pending, relaxed)

    def flip(self, phase: int) -> None:
        """The current phase is complete, which makes `phase` of them."""
        self.phase = phase
        self.done.merge(self.pending)
        if self.chain:
            self.done.fit()[ORDER, self.chain] = self.base + phase
        self.pending.clear()

    def acquire(self, agent: WarpAgent, relaxed: bool = False) -> None:
        """A wait for a complete phase has ended."""
        self.use(agent, False)
        agent.acquire(self.done, relaxed)

    def use(self, agent: Agent, async_proxy: bool) -> None:
        """Checks that mbarrier.init is visible to who uses the barrier."""
        if self.init is None or self.misuse is None:
            return
        chain, index = self.init
        known = agent.clock.fit()
        seen = SHARED if async_proxy else ORDER
        if max(known[seen, chain], known[INIT, chain]) < index:
            self.misuse(self, agent, async_proxy)
