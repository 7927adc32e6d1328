"""PTX 9.7.13.15 'mbarrier': barriers in shared memory that count arrivals and bytes.

A barrier lives in `Cluster.mbarriers` under its shared address; its bytes in memory stay unused.  The opaque state that
arrive returns is the phase in the upper and the pending arrivals before it in the lower 32 bits.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import TYPE_CHECKING

from ptxemu.errors import MemoryFault
from ptxemu.isa.engine import Value, warp
from ptxemu.isa.operands import each, per_lane
from ptxemu.machine.lanes import FULL
from ptxemu.machine.mbarrier import MAX_COUNT, Mbarrier
from ptxemu.machine.memory import RANK_SHIFT
from ptxemu.machine.signal import Wait

if TYPE_CHECKING:
    from ptxemu.machine.warp import Warp

__all__ = ["barrier_at"]

LOCAL = "shared shared::cta"
ANY = "shared shared::cta shared::cluster"


def barrier_at(w: Warp, addr: int, space: str | None, *, remote: bool = True) -> Mbarrier:
    """The initialised barrier at an address of `space` (None: generic).

    Raises MemoryFault: none there, not shared memory, or in another CTA where `remote` or the space does not allow it.
    """
    address = _shared_address(w, addr, space)
    if address >> RANK_SHIFT != w.cta.rank:
        if not (remote and space in ("shared::cluster", None)):
            what = f"space .{space}" if remote else "this operation"
            rank = address >> RANK_SHIFT
            raise MemoryFault(f"mbarrier at {address:#x} is in CTA {rank} of the cluster: {what} is local")
        w.shared.find(address, address + 8)  # the CTA may have ended
    return w.mbarrier(address)


def _shared_address(w: Warp, addr: int, space: str | None) -> int:
    found, address = w.space(space or "", addr, FULL)
    if found is not w.shared:
        raise MemoryFault(f"mbarrier address {addr:#x} is not in shared memory")
    if address % 8:
        raise MemoryFault(f"mbarrier address {address:#x} is not a multiple of 8")
    return int(address)


@warp("mbarrier.init{.space}.b64 [addr], count", space=LOCAL)
def init(w: Warp, m: int, addr: Value, count: Value, *, space: str | None) -> None:
    """PTX 'mbarrier.init'.  Phase 0; over a live barrier it is an error unless nothing would change."""
    w.grid.effects += 1
    for _, at, number in each(w, m, addr, count):
        address = _shared_address(w, at, space)
        w.shared.find(address, address + 8)
        if address >> RANK_SHIFT != w.cta.rank:
            raise MemoryFault(f"mbarrier.init at {address:#x}, which belongs to another CTA of the cluster")
        number &= 0xFFFFFFFF
        live = w.cluster.mbarriers.get(address)
        if live is not None and (live.phase or not live.idle or live.expected != number):
            raise MemoryFault(f"mbarrier.init over a live barrier: {live}; mbarrier.inval comes first")
        if w.grid.watch is not None and live is not None and live.sync is not None:
            w.grid.watch.initialised_again(w, live.sync, w.grid.program.ptx_line(sys._getframe()))
        if live is None:
            line = w.grid.program.ptx_line(sys._getframe())
            w.cluster.mbarriers[address] = barrier = Mbarrier(f"at shared {address:#x}", number, line)
            if w.grid.watch is not None:
                barrier.sync = w.grid.watch.mbarrier(w, address, line)


@warp("mbarrier.inval{.space}.b64 [addr]", space=LOCAL)
def inval(w: Warp, m: int, addr: Value, *, space: str | None) -> None:
    """PTX 'mbarrier.inval'.  Ends a barrier, so that its memory may be used for something else."""
    w.grid.effects += 1
    for _, at in each(w, m, addr):
        barrier_at(w, at, space, remote=False)
        address = _shared_address(w, at, space)
        del w.cluster.mbarriers[address]
        if w.grid.watch is not None:
            w.grid.watch.invalidated(w, address)


@warp("mbarrier.expect_tx{.sem.scope}{.space}.b64 [addr], count", sem="relaxed", scope="cta cluster", space=ANY)
def expect_tx(w: Warp, m: int, addr: Value, count: Value, *, space: str | None) -> None:
    """PTX 'mbarrier.expect_tx'.  The current phase waits for that many bytes more, once for each thread."""
    w.grid.effects += 1
    for lanes, at, number in each(w, m, addr, count):
        barrier_at(w, at, space).expect_tx(number * lanes.bit_count())


@warp("mbarrier.complete_tx{.sem.scope}{.space}.b64 [addr], count", sem="relaxed", scope="cta cluster", space=ANY)
def complete_tx(w: Warp, m: int, addr: Value, count: Value, *, space: str | None) -> None:
    """PTX 'mbarrier.complete_tx'.  Says that bytes have come, without any copy."""
    w.grid.effects += 1
    for lanes, at, number in each(w, m, addr, count):
        barrier_at(w, at, space).complete_tx(number * lanes.bit_count(), relaxed=True)


@warp(
    "mbarrier.arrive{.sem.scope}{.space}.b64 state, [addr]{, count}",
    {"state": "b64"},
    sem="release relaxed",
    scope="cta cluster",
    space=ANY,
)
def arrive(w: Warp, m: int, addr: Value, count: Value = None, *, space: str | None, sem: str | None) -> Value:
    """PTX 'mbarrier.arrive'.  Each thread counts `count` arrivals (1) and gets the phase that they belong to."""
    return _arrive(w, m, addr, count, space, sem)


@warp(
    "mbarrier.arrive.expect_tx{.sem.scope}{.space}.b64 state, [addr], count",
    {"state": "b64"},
    sem="release relaxed",
    scope="cta cluster",
    space=ANY,
)
def arrive_expect_tx(w: Warp, m: int, addr: Value, count: Value, *, space: str | None, sem: str | None) -> Value:
    """PTX 'mbarrier.arrive'.  With .expect_tx: announces bytes first, then arrives once."""
    expect_tx(w, m, addr, count, space=space)
    return _arrive(w, m, addr, None, space, sem)


@warp("mbarrier.arrive.noComplete{.release.cta}{.space}.b64 state, [addr], count", {"state": "b64"}, space=LOCAL)
def arrive_no_complete(w: Warp, m: int, addr: Value, count: Value, *, space: str | None) -> Value:
    """PTX 'mbarrier.arrive'.  With .noComplete: an error if it completes the phase."""
    return _arrive(w, m, addr, count, space, may_complete=False)


@warp(
    "mbarrier.arrive_drop{.sem.scope}{.space}.b64 state, [addr]{, count}",
    {"state": "b64"},
    sem="release relaxed",
    scope="cta cluster",
    space=ANY,
)
def arrive_drop(w: Warp, m: int, addr: Value, count: Value = None, *, space: str | None, sem: str | None) -> Value:
    """PTX 'mbarrier.arrive_drop'.  Arrives, and later phases expect that many fewer."""
    return _arrive(w, m, addr, count, space, sem, drop=True)


@warp(
    "mbarrier.arrive_drop.expect_tx{.sem.scope}{.space}.b64 state, [addr], count",
    {"state": "b64"},
    sem="release relaxed",
    scope="cta cluster",
    space=ANY,
)
def arrive_drop_expect_tx(w: Warp, m: int, addr: Value, count: Value, *, space: str | None, sem: str | None) -> Value:
    """PTX 'mbarrier.arrive_drop'.  With .expect_tx: announces bytes first, then arrives once and drops one."""
    expect_tx(w, m, addr, count, space=space)
    return _arrive(w, m, addr, None, space, sem, drop=True)


@warp("mbarrier.arrive_drop.noComplete{.release.cta}{.space}.b64 state, [addr], count", {"state": "b64"}, space=LOCAL)
def arrive_drop_no_complete(w: Warp, m: int, addr: Value, count: Value, *, space: str | None) -> Value:
    """PTX 'mbarrier.arrive_drop'.  With .noComplete: an error if it completes the phase."""
    return _arrive(w, m, addr, count, space, drop=True, may_complete=False)


def _arrive(
    w: Warp,
    m: int,
    addr: Value,
    count: Value,
    space: str | None,
    sem: str | None = None,
    *,
    drop: bool = False,
    may_complete: bool = True,
) -> Value:
    w.grid.effects += 1
    states = []
    for lanes, at, number in each(w, m, addr, 1 if count is None else count):
        barrier = barrier_at(w, at, space)
        if not 1 <= number <= MAX_COUNT:
            raise MemoryFault(f"{barrier}: count {number} of an arrival, allowed are 1 to {MAX_COUNT}")
        before = barrier.phase << 32 | barrier.pending
        arrivals = number * lanes.bit_count()
        relaxed = sem == "relaxed"
        phase = barrier.drop(arrivals, relaxed=relaxed) if drop else barrier.arrive(arrivals, relaxed=relaxed)
        if not may_complete and barrier.phase != phase:
            raise MemoryFault(f"{barrier}: an arrival with .noComplete completed the phase")
        states.append((lanes, before & (1 << 64) - 1))
    return per_lane(states, 64)


@warp("mbarrier.pending_count.b64 count, state", {"count": "u32", "state": "b64"})
def pending_count(w: Warp, m: int, state: Value) -> Value:
    """PTX 'mbarrier.pending_count'.  The pending arrivals before the arrival that returned the state."""
    return per_lane([(lanes, before & 0xFFFFFFFF) for lanes, before in each(w, m, state)], 32)


@warp(
    "mbarrier.test_wait{.sem.scope}{.space}.b64 done, [addr], state",
    {"done": "pred", "state": "b64"},
    sem="acquire relaxed",
    scope="cta cluster",
    space=LOCAL,
)
def test_wait(w: Warp, m: int, addr: Value, state: Value, *, space: str | None, sem: str | None) -> int:
    """PTX 'mbarrier.test_wait'.  Whether the phase of the state is complete."""
    asked = []
    for lanes, at, number in each(w, m, addr, state):
        barrier = barrier_at(w, at, space, remote=False)
        asked.append((lanes, barrier, _parity(barrier, number)))
    return _passed(w, asked, sem)


@warp(
    "mbarrier.test_wait.parity{.sem.scope}{.space}.b64 done, [addr], parity",
    {"done": "pred", "parity": "u32"},
    sem="acquire relaxed",
    scope="cta cluster",
    space=LOCAL,
)
def test_wait_parity(w: Warp, m: int, addr: Value, parity: Value, *, space: str | None, sem: str | None) -> int:
    """PTX 'mbarrier.test_wait'.  With .parity: whether the last phase of that parity is complete."""
    asked = [(lanes, barrier_at(w, at, space, remote=False), number) for lanes, at, number in each(w, m, addr, parity)]
    return _passed(w, asked, sem)


@warp(
    "mbarrier.try_wait{.sem.scope}{.space}.b64 done, [addr], state{, hint}",
    {"done": "pred", "state": "b64", "hint": "u32"},
    sem="acquire relaxed",
    scope="cta cluster",
    space=LOCAL,
)
def try_wait(
    w: Warp, m: int, addr: Value, state: Value, hint: Value = None, *, space: str | None, sem: str | None
) -> Generator[Wait, None, int]:
    """PTX 'mbarrier.try_wait'.  As test_wait, but it may wait; it does so from its second failure in a phase on."""
    asked = []
    for lanes, at, number in each(w, m, addr, state):
        barrier = barrier_at(w, at, space, remote=False)
        asked.append((lanes, barrier, _parity(barrier, number)))
    return (yield from _try(w, asked, sem))


@warp(
    "mbarrier.try_wait.parity{.sem.scope}{.space}.b64 done, [addr], parity{, hint}",
    {"done": "pred", "parity": "u32", "hint": "u32"},
    sem="acquire relaxed",
    scope="cta cluster",
    space=LOCAL,
)
def try_wait_parity(
    w: Warp, m: int, addr: Value, parity: Value, hint: Value = None, *, space: str | None, sem: str | None
) -> Generator[Wait, None, int]:
    """PTX 'mbarrier.try_wait'.  With .parity: waits for the last phase of that parity."""
    asked = []
    for lanes, at, number in each(w, m, addr, parity):
        asked.append((lanes, barrier_at(w, at, space, remote=False), number & 1))
    return (yield from _try(w, asked, sem))


Asked = list[tuple[int, Mbarrier, int]]  # lanes, barrier and parity


def _passed(w: Warp, asked: Asked, sem: str | None) -> int:
    """The lanes whose phase is complete."""
    done = 0
    for lanes, barrier, parity in asked:
        if barrier.passed(parity):
            done |= lanes
            if barrier.sync is not None and w.agent is not None:
                barrier.sync.acquire(w.agent, sem == "relaxed")
    return done


def _try(w: Warp, asked: Asked, sem: str | None) -> Generator[Wait, None, int]:
    """The lanes whose phase is complete.  The first failure returns at once, since a program has to stand a spurious
    one; a second failure of the same lanes in the same phase waits, until no warp can go on without this one."""
    done = _passed(w, asked, sem)
    if done:
        return done
    _, barrier, parity = asked[0]
    failed = ("mbarrier.try_wait", barrier, sum(lanes for lanes, _, _ in asked))
    if w.state.get(failed) != barrier.phase:
        w.state[failed] = barrier.phase
        return 0
    yield barrier.wait(parity)
    return _passed(w, asked, sem)


def _parity(barrier: Mbarrier, state: int) -> int:
    phase = state >> 32
    if not 0 <= (barrier.phase - phase) & 0xFFFFFFFF <= 1:
        raise MemoryFault(f"{barrier}: a wait for phase {phase}, which is neither the current nor the one before")
    return phase & 1
