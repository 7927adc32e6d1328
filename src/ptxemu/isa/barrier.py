"""PTX 'bar, barrier' and 'bar.warp.sync'."""

from __future__ import annotations

from collections.abc import Generator

from ptxemu.errors import MemoryFault
from ptxemu.isa.engine import Value, warp
from ptxemu.machine.cta import NamedBarrier
from ptxemu.machine.lanes import FULL, LANES, lanes
from ptxemu.machine.signal import Wait
from ptxemu.machine.warp import Warp

WHICH = {"a": "u32", "b": "u32"}
POPC = {"d": "u32", "a": "u32", "c": "pred"}
TEST = {"d": "pred", "a": "u32", "c": "pred"}


def _barrier(w: Warp, m: int, a: Value, b: Value) -> tuple[NamedBarrier, int | None]:
    """The barrier that the operands name, and how many threads it is for."""
    index, count = w.members(a, m), None if b is None else w.members(b, m)
    if index >= len(w.cta.barriers):
        raise MemoryFault(f"barrier {index}: a CTA has {len(w.cta.barriers)}")
    if count is not None and (count == 0 or count % LANES):
        raise MemoryFault(f"barrier {index}: a thread count of {count} is no multiple of {LANES}")
    return w.cta.barriers[index], count


def _arrivals(w: Warp, m: int) -> int:
    """A whole warp counts as 32 threads, however many of them there are."""
    return LANES if m == w.alive else m.bit_count()


@warp("bar{.cta}.sync a{, b}", WHICH, converge="aligned")
@warp("barrier{.cta}.sync{.aligned} a{, b}", WHICH)
def sync(w: Warp, m: int, a: Value, b: Value = None) -> Generator[Wait, None, None]:
    """PTX 'bar, barrier'.  Arrives and waits."""
    barrier, count = _barrier(w, m, a, b)
    yield barrier.wait(barrier.arrive(_arrivals(w, m), count))
    _acquire(w, barrier)


def _acquire(w: Warp, barrier: NamedBarrier) -> None:
    if barrier.sync is not None and w.agent is not None:
        barrier.sync.acquire(w.agent)


@warp("bar{.cta}.arrive a, b", WHICH, converge="aligned")
@warp("barrier{.cta}.arrive{.aligned} a, b", WHICH)
def arrive(w: Warp, m: int, a: Value, b: Value) -> None:
    """PTX 'bar, barrier'.  Arrives and goes on."""
    barrier, count = _barrier(w, m, a, b)
    barrier.arrive(_arrivals(w, m), count)


@warp("bar{.cta}.red.popc.u32 d, a, c", POPC, converge="aligned")
@warp("barrier{.cta}.red.popc{.aligned}.u32 d, a, c", POPC)
@warp("bar{.cta}.red.op.pred d, a, c", TEST, op="and or", converge="aligned")
@warp("barrier{.cta}.red.op{.aligned}.pred d, a, c", TEST, op="and or")
def reduce(w: Warp, m: int, a: Value, c: int, *, op: str = "popc") -> Generator[Wait, None, int]:
    """PTX 'bar, barrier'.  Waits, and reduces a predicate."""
    return (yield from _reduce(w, m, a, None, c, op))


@warp("bar{.cta}.red.popc.u32 d, a, b, c", POPC | WHICH, converge="aligned")
@warp("barrier{.cta}.red.popc{.aligned}.u32 d, a, b, c", POPC | WHICH)
@warp("bar{.cta}.red.op.pred d, a, b, c", TEST | WHICH, op="and or", converge="aligned")
@warp("barrier{.cta}.red.op{.aligned}.pred d, a, b, c", TEST | WHICH, op="and or")
def reduce_some(w: Warp, m: int, a: Value, b: Value, c: int, *, op: str = "popc") -> Generator[Wait, None, int]:
    """PTX 'bar, barrier'.  As above, of b threads."""
    return (yield from _reduce(w, m, a, b, c, op))


def _reduce(w: Warp, m: int, a: Value, b: Value, c: int, op: str) -> Generator[Wait, None, int]:
    barrier, count = _barrier(w, m, a, b)
    barrier.reduced += [bool(c >> lane & 1) for lane in lanes(m)]
    yield barrier.wait(barrier.arrive(_arrivals(w, m), count))
    _acquire(w, barrier)
    result = barrier.result
    if op == "popc":
        return sum(result)
    return FULL if (all(result) if op == "and" else any(result)) else 0


@warp("bar.warp.sync membermask", converge="membermask")
def warp_sync(w: Warp, m: int, membermask: Value) -> None:
    """PTX 'bar.warp.sync'.  The lanes wait for each other."""
