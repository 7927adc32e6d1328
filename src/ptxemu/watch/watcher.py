"""Watches a grid: every access to shared, tensor and global memory against those before it, and every barrier.

The machine calls the hooks below; `Grid.watch` is None where nothing is to be checked.  Who acts is `Queue.acting`,
the warp that runs or the asynchronous operation that completes: an operation's accesses are looked at when it
completes, but with what its issuer knew when it issued it, so that the schedule does not decide what is found.

Lanes of one warp are taken to be ordered among themselves, and what one lane has waited for its warp knows.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.machine.lanes import bools
from ptxemu.machine.lanes import lanes as lanes_of
from ptxemu.watch.agents import Agent, Sync, WarpAgent
from ptxemu.watch.clocks import GLOBAL, ORDER, SHARED, TENSOR, TENSORMAP, Chains, Clock, anywhere
from ptxemu.watch.prerequisite import CHAIN, GridBefore
from ptxemu.watch.rules import Place, Rules
from ptxemu.watch.shadow import FENCED, FULL_CELL, GRANULE, WRITE, Access, Shadow

if TYPE_CHECKING:
    from ptxemu.machine.cluster import Cluster
    from ptxemu.machine.cta import Cta
    from ptxemu.machine.grid import Grid
    from ptxemu.machine.memory import Order, Region, Space, Touched
    from ptxemu.machine.warp import Warp
    from ptxemu.watch.findings import Findings

__all__ = ["Watcher", "cells_of", "span"]

BARRIER_BYTES = 8
NEVER = 2**31 - 1  # the index of an event that nobody gets to know of
_FENCES: dict[str, int | None] = {
    "generic": None,
    "tensormap": TENSORMAP,
}  # the row of what a proxy sees; async: by space
MOST = {"shared": 64, "global": 128, "tensor": 64}  # accesses of a cell that are kept
TENSOR_CELLS = 4, 512


@dataclass(frozen=True)
class Flag:
    """What was released at an address: the scope, and by which CTA of which cluster last."""

    clock: Clock
    scope: int
    cluster: int
    rank: int


class Watcher:
    """strict: also what the manual asks and published kernels leave out.  before: the grid that may still run."""

    def __init__(self, findings: Findings, strict: bool, before: GridBefore | None = None) -> None:
        self.strict = strict
        self.before = before
        self.released_early = False
        self.rules = Rules(findings, strict)
        self.flags: dict[tuple[int, int], Flag] = {}  # what stores and atomics released, by cluster (-1: global)
        self.barriers: dict[tuple[int, int], Sync] = {}  # the last mbarrier at each address, by cluster
        self._fence_bits = FENCED if strict else FENCED | WRITE

    def attach(self, grid: Grid) -> None:
        """Called before the grid runs."""
        self.grid = grid
        self.rules.grid = grid
        grid.memory.watch = self
        for region in grid.memory.regions:
            if region.written is not None and region.shadow is not None:
                region.written = region.shadow.written()
            region.shadow = None

    def acting(self) -> Agent | None:
        agent: Agent | None = self.grid.queue.acting
        return agent

    # Beginnings

    def cluster_started(self, cluster: Cluster) -> Chains:
        """The chains of a cluster whose CTAs start now."""
        chains = Chains(self.rules.add_cluster(cluster))
        if self.before is not None:
            chains.new("the grid before")  # gets the number prerequisite.CHAIN
        return chains

    def let_dependents_start(self, warp: Warp) -> None:
        """griddepcontrol.launch_dependents: if the warp has not waited, the grid before may run beside a dependent."""
        if self.before is not None and not _agent(warp).clock.fit()[ORDER, CHAIN]:
            self.released_early = True

    def waited_for_grid_before(self, warp: Warp) -> None:
        """griddepcontrol.wait is over."""
        if self.before is not None:
            _agent(warp).clock.fit()[ORDER, CHAIN] = 1

    def cluster_ended(self, cluster: Cluster) -> None:
        self.rules.ended(cluster)
        serial = cluster.chains.serial
        self.flags = {key: flag for key, flag in self.flags.items() if key[0] != serial}
        self.barriers = {key: sync for key, sync in self.barriers.items() if key[0] != serial}

    def agent(self, warp: Warp) -> WarpAgent:
        return WarpAgent(warp, warp.cluster.chains, self.strict)

    def barrier(self, cluster: Cluster) -> Sync:
        """What a barrier of the cluster carries."""
        return Sync(cluster.chains, self.acting)

    def mbarrier(self, warp: Warp, address: int, line: int) -> Sync:
        """What an mbarrier carries that the warp initialises at a shared address and a PTX line."""
        chains = warp.cluster.chains
        before = self.barriers.get((chains.serial, address))  # one that was there, whose chain goes on
        chain, base = (chains.new("mbarrier"), 0) if before is None else (before.chain, before.base + before.phase + 1)
        sync = Sync(chains, self.acting, chain, self.rules.init_not_visible, base)
        self.barriers[chains.serial, address] = sync
        agent = _agent(warp)
        sync.init, sync.init_line = (agent.chain, agent.index), line
        self._live(warp, address, line)
        return sync

    def _live(self, warp: Warp, address: int, line: int) -> None:
        """An mbarrier lies at a shared address from now on: no access to its bytes may follow.  They are an event that
        never gets known."""
        region = warp.shared.find(address, address + BARRIER_BYTES)
        if region.shadow is None:
            region.shadow = _shadow(region, shared=True)
        where, mask = span(address - region.base, BARRIER_BYTES)
        site = self.rules.site(line, warp, "mbarrier", 0, write=True, fenced=False)
        known = _agent(warp).clock.lookup()
        region.shadow.record(where, mask, Access(warp.cluster.chains.live, NEVER, site, False, known))

    def invalidated(self, warp: Warp, address: int) -> None:
        """mbarrier.inval: its bytes are memory again, with undefined contents."""
        region = warp.shared.find(address, address + BARRIER_BYTES)
        if region.shadow is not None:
            region.shadow.forget(*span(address - region.base, BARRIER_BYTES))

    def undefined_register(self, warp: Warp) -> None:
        """The warp reads a register that nothing has written."""
        self.rules.undefined_register(_agent(warp), self._line(_agent(warp)))

    def initialised_again(self, warp: Warp, sync: Sync, line: int) -> None:
        """mbarrier.init of a barrier that is initialised already, to the same state."""
        agent = _agent(warp)
        if sync.init is not None and agent.clock.lookup()(ORDER, sync.init[0]) < sync.init[1]:
            self.rules.two_inits(agent, line, sync.init_line)

    # Shared and global memory

    def view(
        self,
        space: Space,
        region: Region,
        address: int,
        nbytes: int,
        write: bool,
        proxy: str,
        touched: Touched | None,
        order: Order | None,
    ) -> None:
        """An asynchronous unit, or a warp, reaches bytes from `address` on; `touched`: those 16-byte granules of them
        alone, counted from the first, and which of their bytes."""
        start = address - (region.base & -GRANULE)
        where: Any
        mask: Any
        if touched is None:
            where, mask = span(start, nbytes)
        else:
            where, mask = touched[0] + start // GRANULE, touched[1]
        self._access(space, region, where, mask, write, proxy, order)

    def lanes(
        self, space: Space, address: Any, nbytes: int, mask: int, write: bool, order: Order | None, atomic: bool = False
    ) -> None:
        """The lanes of a warp load or store `nbytes` each at `address`; an atomic does both."""
        if type(address) is int:
            region = space.find(address, address + nbytes)
            where, part = span(address - (region.base & -GRANULE), nbytes)
        else:
            first = int(address[(mask & -mask).bit_length() - 1])
            region = space.find(first, first + nbytes)
            cells = cells_of(address.tobytes(), address.dtype, region.base, region.end, nbytes, mask)
            if cells is None:
                for lane in lanes_of(mask):
                    self.lanes(space, int(address[lane]), nbytes, 1 << lane, write, order, atomic)
                return
            where, part = cells
        if order is not None and (atomic or not write):
            self._acquire(space, address, mask, order)
        self._access(space, region, where, part, write, "generic", order, atomic)
        if write and order is not None:
            self._release(space, address, mask, order, atomic)

    def _access(
        self,
        space: Space,
        region: Region,
        where: Any,
        mask: Any,
        write: bool,
        proxy: str,
        order: Order | None,
        atomic: bool = False,
    ) -> None:
        agent = self.acting()
        if agent is None or region is self.grid.parameters:
            return
        shared = space.name == "shared"
        shadow = region.shadow
        if shadow is None:
            shadow = region.shadow = _shadow(region, shared)
        line = self._line(agent)
        if not shared and self.before is not None and not agent.clock.fit()[ORDER, CHAIN]:
            hit = self.before.conflict(region.base, where, mask, write)
            if hit is not None:
                self.rules.too_early(agent, line, Place(region), write, hit)
            elif self.strict and not write:
                self.rules.before_wait(agent, line, Place(region), _cell_at(where, 0))
        chain = agent.chain if shared else anywhere(agent.clock.chains.serial, agent.chain)
        late = not shared and self.grid.release.asked and agent.warp.cta in self.grid.release.released
        scope = order.scope if order is not None else 0
        site = self.rules.site(line, agent.warp, proxy, scope, write, proxy == "generic", late)
        known = agent.clock.lookup() if shared else agent.clock.lookup_anywhere()
        fence = _FENCES.get(proxy, SHARED if shared else GLOBAL)
        access = Access(chain, agent.index, site, atomic or not write, known, None, fence, self._fence_bits)
        if troubles := shadow.record(where, mask, access):
            self.rules.report(agent, line, site, Place(region), troubles)

    def _line(self, agent: Agent) -> int:
        return agent.line or self.grid.program.ptx_line(sys._getframe(2))

    # Flags: what release stores and atomics publish at an address

    def _flag_keys(self, space: Space, address: Any, mask: int) -> list[tuple[int, int]]:
        agent = self.acting()
        assert agent is not None
        scope = agent.clock.chains.serial if space.name == "shared" else -1
        if type(address) is int:
            return [(scope, address)]
        return [(scope, at) for at in dict.fromkeys(address[bools(mask)].tolist())]

    def _acquire(self, space: Space, address: Any, mask: int, order: Order) -> None:
        agent = self.acting()
        if isinstance(agent, WarpAgent):
            for key in self._flag_keys(space, address, mask):
                flag = self.flags.get(key)
                scope = 0 if flag is None else min(flag.scope, order.scope)
                if flag is not None and self.rules.in_scope(scope, agent, flag.cluster, flag.rank):
                    agent.acquire(flag.clock, relaxed=not order.acquires)

    def _release(self, space: Space, address: Any, mask: int, order: Order, atomic: bool) -> None:
        """A store begins a new release sequence at its address, an atomic goes on with the one there."""
        agent = self.acting()
        if agent is None:
            return
        clock, relaxed = Clock(agent.clock.chains), not order.releases
        released = not relaxed or (isinstance(agent, WarpAgent) and agent.fenced is not None)
        agent.release(clock, relaxed)
        for key in self._flag_keys(space, address, mask):
            if not released:
                if not atomic:
                    self.flags.pop(key, None)
                continue
            scope, published = order.scope, clock
            if relaxed and isinstance(agent, WarpAgent):
                scope = min(scope, agent.fence_scope)
            if atomic and (before := self.flags.get(key)) is not None:
                scope, published = min(scope, before.scope), before.clock.copy()
                published.merge(clock)
            self.flags[key] = Flag(published, scope, agent.clock.chains.serial, agent.warp.cta.rank)

    # Tensor memory

    def tensor(self, cta: Cta, cells: Any, mask: int, write: bool, needs: bool) -> None:
        """A tcgen05 operation reaches cells (quarters, columns) of a CTA; mask: their lanes, two a bit; needs: it needs
        what is there."""
        agent = self.acting()
        if agent is None:
            return
        line = self._line(agent)
        shadow = self._tensor_shadow(cta)
        also, fence = (None, TENSOR) if self.strict else (TENSOR, None)
        site = self.rules.site(line, agent.warp, "tensor", 0, write, fenced=True)
        access = Access(agent.chain, agent.index, site, needs, agent.clock.lookup(), also, fence)
        if troubles := shadow.record(cells, mask, access):
            self.rules.report(agent, line, site, Place(cta=cta), troubles)

    def tensor_freed(self, warp: Warp, first: int, columns: int) -> None:
        """The warp frees columns of its CTA, after which nothing may reach them."""
        agent, shadow, cells = _agent(warp), self._tensor_shadow(warp.cta), (slice(None), slice(first, first + columns))
        line = self._line(agent)
        site = self.rules.site(line, warp, "free", 0, write=True, fenced=False)
        access = Access(agent.chain, agent.index, site, False, agent.clock.lookup(), TENSOR)
        if troubles := shadow.record(cells, FULL_CELL, access):
            self.rules.report(agent, line, site, Place(cta=warp.cta), troubles)

    def _tensor_shadow(self, cta: Cta) -> Shadow:
        shadow: Shadow | None = cta.tmem.shadow
        if shadow is None:
            shadow = cta.tmem.shadow = Shadow(TENSOR_CELLS, MOST["tensor"], False)
        return shadow


def _agent(warp: Warp) -> WarpAgent:
    assert warp.agent is not None
    return warp.agent


def _shadow(region: Region, shared: bool) -> Shadow:
    cells = (region.end - (region.base & -GRANULE) + GRANULE - 1) // GRANULE
    if shared:
        return Shadow((cells,), MOST["shared"], False)
    return Shadow((cells,), MOST["global"], True if region.written is None else region.written)


def _cell_at(where: Any, place: Any) -> int:
    return int(where.start + place if isinstance(where, slice) else where[place])


@functools.lru_cache(maxsize=4096)
def span(start: int, nbytes: int) -> tuple[slice, Any]:
    """The cells of consecutive bytes, and which of their bytes: one mask for all where they are whole."""
    first, end = start // GRANULE, -(-(start + nbytes) // GRANULE)
    where = slice(first, end)
    if start % GRANULE == 0 and nbytes % GRANULE == 0:
        return where, FULL_CELL
    masks = np.full(end - first, FULL_CELL, np.uint16)
    masks[0] &= FULL_CELL << start % GRANULE & FULL_CELL
    if rest := (start + nbytes) % GRANULE:
        masks[-1] &= (1 << rest) - 1
    return where, masks


@functools.lru_cache(maxsize=4096)
def cells_of(
    address: bytes, kind: np.dtype[Any], base: int, end: int, nbytes: int, mask: int
) -> tuple[Any, Any] | None:
    """The cells that lanes touch and which of their bytes; None where not all are in the region base..end-1."""
    at = np.frombuffer(address, kind)[bools(mask)].astype(np.int64)
    if int(at.min()) < base or int(at.max()) + nbytes > end:
        return None
    start = at - (base & -GRANULE)
    if nbytes > GRANULE:  # aligned to its size, so whole cells
        cells = np.unique((start[:, None] // GRANULE + np.arange(nbytes // GRANULE)).ravel())
        return _slice(cells), FULL_CELL
    cells, inverse = np.unique(start // GRANULE, return_inverse=True)
    masks = np.zeros(cells.size, np.uint16)
    np.bitwise_or.at(masks, inverse, (((1 << nbytes) - 1) << start % GRANULE).astype(np.uint16))
    whole = bool((masks == FULL_CELL).all())
    return _slice(cells), FULL_CELL if whole else masks


def _slice(cells: NDArray[np.int64]) -> Any:
    """Consecutive cells as a slice, which is quicker."""
    first, last = int(cells[0]), int(cells[-1])
    return slice(first, last + 1) if last - first + 1 == cells.size else cells
