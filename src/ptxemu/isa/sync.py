"""PTX 9.7.13: fences, cluster barriers, dependent launches and cancelled launches; register budgets and sleep.

Memory here is sequentially consistent, so a fence does nothing to values; it matters to a watcher alone.
"""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import TYPE_CHECKING

import numpy as np

from ptxemu.errors import LaunchError, MemoryFault
from ptxemu.isa.engine import Value, lanes, warp
from ptxemu.isa.mbarrier import barrier_at
from ptxemu.isa.operands import each, per_lane
from ptxemu.machine.lanes import FULL
from ptxemu.machine.lanes import lanes as lanes_of
from ptxemu.machine.memory import RANK_SHIFT
from ptxemu.machine.signal import Wait

if TYPE_CHECKING:
    from ptxemu.machine.grid import Shape
    from ptxemu.machine.mbarrier import Mbarrier
    from ptxemu.machine.warp import Warp

RANK_MASK = 0xFF << RANK_SHIFT
CANCELED = 1 << 63  # in the upper half of a response, over the z index; x and y share the lower half
OBSERVED_FAILURE = "clusterlaunchcontrol: observed failure"


@warp("fence{.sem}.scope", sem="sc acq_rel acquire release", scope="cta cluster gpu sys")
def fence(w: Warp, m: int, *, scope: str) -> None:
    """PTX 'membar / fence'.  Orders this thread's accesses for the threads of the scope."""
    if w.agent is not None:
        w.agent.fence({"cta": 1, "cluster": 2}.get(scope, 3))


@warp("fence.acquire.sync_restrict::shared::cluster.cluster")
def fence_acquire_shared(w: Warp, m: int) -> None:
    """PTX 'membar / fence'.  An acquire for objects in the cluster's shared memory alone."""
    fence(w, m, scope="cluster")


@warp("fence.release.sync_restrict::shared::cta.cluster")
def fence_release_shared(w: Warp, m: int) -> None:
    """PTX 'membar / fence'.  A release for objects in the CTA's shared memory alone."""
    fence(w, m, scope="cluster")


@warp("fence.mbarrier_init.release.cluster")
def fence_mbarrier_init(w: Warp, m: int) -> None:
    """PTX 'membar / fence'.  A release of this thread's mbarrier.init alone."""
    if w.agent is not None:
        w.agent.fence_init()


@warp("fence.proxy.kind", kind="alias async async.global async.shared::cta async.shared::cluster")
def fence_proxy(w: Warp, m: int, *, kind: str) -> None:
    """PTX 'membar / fence'.  Orders accesses through the generic and the named proxy, both ways."""
    if w.agent is not None and kind != "alias":
        w.agent.fence_proxy(shared=kind != "async.global", in_global=kind in ("async", "async.global"))


@warp("fence.proxy.tensormap::generic.release.scope", scope="cta cluster gpu sys")
def fence_tensormap_release(w: Warp, m: int) -> None:
    """PTX 'membar / fence'.  Generic writes of a tensor map come before its use after the matching acquire."""
    fence(w, m, scope="sys")


@warp("fence.proxy.tensormap::generic.acquire.scope [addr], size", scope="cta cluster gpu sys")
def fence_tensormap_acquire(w: Warp, m: int, addr: Value, size: Value) -> None:
    """PTX 'membar / fence'.  The map at addr, 128 bytes, may be used after this."""
    if size != 128:
        raise LaunchError(f"fence.proxy.tensormap::generic.acquire of {size} bytes; allowed: 128")
    for _, at in each(w, m, addr):
        w.memory.find(at, at + 128)
    fence(w, m, scope="sys")
    if w.agent is not None:
        w.agent.fence_tensormap()


@warp("fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster")
def fence_async_acquire(w: Warp, m: int) -> None:
    """PTX 'membar / fence'.  An acquire, for the async proxy, of what was released in the cluster's shared memory."""
    fence(w, m, scope="cluster")
    fence_proxy(w, m, kind="async.shared::cluster")


@warp("fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster")
def fence_async_release(w: Warp, m: int) -> None:
    """PTX 'membar / fence'.  A release, towards the async proxy, of accesses to the CTA's shared memory."""
    fence_proxy(w, m, kind="async.shared::cta")
    fence(w, m, scope="cluster")


@warp("membar.level", level="cta gl sys")
def membar(w: Warp, m: int, *, level: str) -> None:
    """PTX 'membar / fence'.  The old name of fence.sc."""
    fence(w, m, scope=level)


@warp("membar.proxy.kind", kind="alias async async.global async.shared::cta async.shared::cluster")
def membar_proxy(w: Warp, m: int, *, kind: str) -> None:
    """PTX 'membar / fence'.  The old name of fence.proxy."""
    fence_proxy(w, m, kind=kind)


@warp("barrier.cluster.arrive{.sem}{.aligned}", sem="release relaxed")
def cluster_arrive(w: Warp, m: int, *, sem: str | None) -> None:
    """PTX 'barrier.cluster'.  The threads arrive and go on; each may once before the barrier completes."""
    barrier = w.cluster.barrier
    generations = w.state.setdefault("barrier.cluster", {})
    for lane in lanes_of(m):
        if generations.get(lane) == barrier.generation:
            raise MemoryFault(f"{w.name}, lane {lane}: a second barrier.cluster.arrive before the barrier completed")
        generations[lane] = barrier.generation
    barrier.arrive(w, m, relaxed=sem == "relaxed")


@warp("barrier.cluster.wait{.acquire}{.aligned}")
def cluster_wait(w: Warp, m: int) -> Generator[Wait, None, None]:
    """PTX 'barrier.cluster'.  Until all threads of the cluster that have not exited have arrived."""
    generations = w.state.get("barrier.cluster", {})
    if missing := [lane for lane in lanes_of(m) if lane not in generations]:
        raise MemoryFault(f"{w.name}, lanes {missing}: barrier.cluster.wait without an arrive")
    for generation in sorted({generations[lane] for lane in lanes_of(m)}):
        yield w.cluster.barrier.wait(generation)
    if w.cluster.barrier.sync is not None and w.agent is not None:
        w.cluster.barrier.sync.acquire(w.agent)


@lanes("mapa{.space}.type d, a, rank", {"rank": "u32"}, space="shared::cluster", type="u32 u64")
def mapa(a: Value, rank: Value) -> Value:
    """PTX 'mapa'.  The address in the CTA of that rank, whose bits a generic address holds in the same place.

    A rank that the cluster does not have gives an address that nothing may use.
    """
    if type(a) is int and type(rank) is int:
        return a & ~RANK_MASK | (rank & 0xFF) << RANK_SHIFT
    kind = a.dtype.type if type(a) is not int else np.uint64 if a >> 32 else np.uint32
    wide = (rank & 0xFF).astype(kind) if type(rank) is not int else kind(rank & 0xFF)
    return a & kind(~RANK_MASK & (1 << 8 * kind().itemsize) - 1) | wide << kind(RANK_SHIFT)


@warp("getctarank{.space}.type d, a", {"d": "u32"}, space="shared::cluster", type="u32 u64")
def getctarank(w: Warp, m: int, a: Value) -> Value:
    """PTX 'getctarank'.  The rank in the cluster of the CTA that holds the address."""
    if type(a) is int:
        return a >> RANK_SHIFT & 0xFF
    return (a >> RANK_SHIFT & 0xFF).astype("u4")


@warp("griddepcontrol.launch_dependents")
def launch_dependents(w: Warp, m: int) -> None:
    """PTX 'griddepcontrol'.  Dependent grids may start once all CTAs have said so or ended; they need not."""
    if w.grid.watch is not None:
        w.grid.watch.let_dependents_start(w)
    w.grid.release.launch_dependents(w.cta)


@warp("griddepcontrol.wait")
def wait_prerequisites(w: Warp, m: int) -> Generator[Wait, None, None]:
    """PTX 'griddepcontrol'.  Until the grids before are complete and what they wrote is there."""
    if w.grid.prerequisite is not None:
        yield w.grid.prerequisite.wait()
    if (watch := w.grid.watch) is not None:
        watch.waited_for_grid_before(w)


@warp(
    "clusterlaunchcontrol.try_cancel.async{.space}.mbarrier::complete_tx::bytes{.multicast::cluster::all}.b128 "
    "[addr], [mbar]",
    space="shared::cta",
)
def try_cancel(w: Warp, m: int, addr: Value, mbar: Value, *, space: str | None, multicast_cluster_all: bool) -> None:
    """PTX 'clusterlaunchcontrol.try_cancel'.  Asks for a cluster that has not started; 16 bytes answer."""
    if w.state.get(OBSERVED_FAILURE):
        raise MemoryFault(f"{w.name}: clusterlaunchcontrol.try_cancel after a request was seen to have failed")
    for group, at, signal in each(w, m, addr, mbar):
        _, response = w.space(space or "", at, FULL)
        if response % 16:
            raise MemoryFault(f"clusterlaunchcontrol.try_cancel: address {response:#x} is not a multiple of 16")
        barrier_at(w, signal, space, remote=False)
        targets = [cta.rank for cta in w.cluster.ctas] if multicast_cluster_all else [w.cta.rank]
        for _ in lanes_of(group):
            _submit_cancel(w, int(response), signal & 0xFFFFFFFF, targets)


def _submit_cancel(w: Warp, response: int, signal: int, targets: list[int]) -> None:
    answers: list[bytes] = []  # one, which the copy that lands first gets

    def answer(rank: int, barrier: Mbarrier) -> None:
        if not answers:
            answers.append(_encode(w.grid.cancel(w.cluster.shape)).to_bytes(16, "little"))
        place = response & ~RANK_MASK | rank << RANK_SHIFT
        w.shared.view(place, 16, write=True, proxy="async")[:] = memoryview(answers[0])
        barrier.complete_tx(16)

    for rank in targets:
        barrier = w.mbarrier(signal & ~RANK_MASK | rank << RANK_SHIFT)
        action = functools.partial(answer, rank, barrier)
        w.queue.submit(action, "clusterlaunchcontrol.try_cancel", agent=w.copying(barrier))


def _encode(first: Shape | None) -> int:
    return 0 if first is None else first[0] | first[1] << 32 | (first[2] | CANCELED) << 64


@warp("clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, response", {"p": "pred", "response": "b128"})
def is_canceled(w: Warp, m: int, response: Value) -> int:
    """PTX 'clusterlaunchcontrol.query_cancel'.  Whether the request got a cluster."""
    done = sum(group for group, upper in each(w, m, response[1]) if upper & CANCELED)
    if m & ~done:
        w.state[OBSERVED_FAILURE] = True
    return done


@warp(
    "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 <xyz>, response", {"xyz": "b32", "response": "b128"}
)
def first_ctaid(w: Warp, m: int, response: Value) -> list[Value]:
    """PTX 'clusterlaunchcontrol.query_cancel'.  The index of the cluster's first CTA and a number without meaning."""
    return [_first(w, m, response, axis) for axis in "xyz"] + [0]


@warp(
    "clusterlaunchcontrol.query_cancel.which.b32.b128 d, response",
    {"d": "b32", "response": "b128"},
    which="get_first_ctaid::x get_first_ctaid::y get_first_ctaid::z",
)
def first_ctaid_axis(w: Warp, m: int, response: Value, *, which: str) -> Value:
    """PTX 'clusterlaunchcontrol.query_cancel'.  One coordinate of the cluster's first CTA."""
    return _first(w, m, response, which[-1])


def _first(w: Warp, m: int, response: Value, axis: str) -> Value:
    """Of a request that failed, a number that no index has: programs read it and do not use it."""
    lower, upper = response
    words = {"x": lower, "y": _shifted(lower), "z": upper}
    answers = each(w, m, upper, words[axis])
    return per_lane([(g, word & 0x7FFFFFFF if up & CANCELED else 0xFFFFFFFF) for g, up, word in answers], 32)


def _shifted(word: Value) -> Value:
    return word >> 32 if type(word) is int else word >> word.dtype.type(32)


@warp("setmaxnreg.action.sync.aligned.u32 count", "u32", action="inc dec")
def setmaxnreg(w: Warp, m: int, count: Value) -> None:
    """PTX 'setmaxnreg'.  Registers are not limited here: `inc` does not wait until the CTA's pool has them.

    Raises LaunchError for a number that is not allowed.  That all warps of a warpgroup execute it is not checked.
    """
    if count % 8 or not 24 <= count <= 256:
        raise LaunchError(f"setmaxnreg {count}: allowed are multiples of 8 from 24 to 256")


@warp("nanosleep.u32 t", "u32")
def nanosleep(w: Warp, m: int, t: Value) -> None:
    """PTX 'nanosleep'.  Any delay from 0 to 2t is right."""
