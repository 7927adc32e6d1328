"""What is ordered before what: vector clocks over chains of events.

A chain is a series of events of which each comes after the one before: the accesses of a warp between two releases are
one event of the warp's chain; an mbarrier's phases are a chain, and an asynchronous copy that signals the barrier in
phase p is part of its event p + 1; the tcgen05 operations that one thread issues are a chain, and so are its groups of
bulk stores.  An event is (chain, index), and a clock holds for every chain the last index that is known to have
happened.  So "did this happen before?" is one comparison.

Source: PTX ISA, "Memory Consistency Model": base causality order is what ORDER holds; "Proxies" and
"Proxy-preserved base causality order": the other rows hold what is known beyond that.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ptxemu.errors import LaunchError

__all__ = [
    "BEFORE",
    "GLOBAL",
    "INIT",
    "ORDER",
    "SHARED",
    "TENSOR",
    "TENSORMAP",
    "Chains",
    "Clock",
    "Lookup",
    "anywhere",
    "split",
]

Known = NDArray[np.int32]
Lookup = Callable[[int, int], int]  # row and chain to the last index known

# What a clock tells of a chain, a row each: known to be ordered before; of that, what the async proxy may see in shared
# and in global memory, and what the tensormap proxy may; mbarrier.init that fence.mbarrier_init made visible; and what
# of the tcgen05 operations was put before a synchronisation by tcgen05.fence::before_thread_sync, and behind one by
# fence::after_thread_sync.
ORDER, SHARED, GLOBAL, TENSORMAP, INIT, BEFORE, TENSOR = range(7)
ROWS = 7
CHAIN_BITS = 20  # global memory names a chain of any cluster: cluster << CHAIN_BITS | chain


def anywhere(serial: int, chain: int) -> int:
    """The name that global memory has for a chain of a cluster."""
    return serial << CHAIN_BITS | chain


def split(name: int) -> tuple[int, int]:
    """The cluster's serial number and the chain of such a name."""
    return name >> CHAIN_BITS, name & ((1 << CHAIN_BITS) - 1)


class Chains:
    """The chains of one cluster.  serial: the cluster's; kinds: of each chain, 0 is none; live: of its mbarriers."""

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.kinds = [""]
        self.capacity = 64
        self.live = self.new("mbarrier object")

    def new(self, kind: str) -> int:
        """Raises LaunchError: more than the names that there are."""
        if len(self.kinds) >> CHAIN_BITS:
            raise LaunchError(f"checks: more than {1 << CHAIN_BITS} chains of events in a cluster; use checks='none'")
        self.kinds.append(kind)
        while len(self.kinds) > self.capacity:
            self.capacity *= 2
        return len(self.kinds) - 1


class Clock:
    """known (rows, chains): what is known of the own cluster's chains; foreign: of other clusters', by serial.

    The arrays of `foreign` are shared between clocks and never written to.
    """

    __slots__ = ("chains", "foreign", "known")

    def __init__(self, chains: Chains, known: Known | None = None, foreign: dict[int, Known] | None = None) -> None:
        self.chains = chains
        self.known: Known = np.zeros((ROWS, chains.capacity), np.int32) if known is None else known
        self.foreign = foreign or {}

    def copy(self) -> Clock:
        return Clock(self.chains, self.known.copy(), dict(self.foreign))

    def fit(self) -> Known:
        """`known`, with room for every chain that there is."""
        if self.known.shape[1] < self.chains.capacity:
            self.known = _widened(self.known, self.chains.capacity)
        return self.known

    def merge(self, other: Clock) -> None:
        """Learns what `other` knows."""
        if other.chains is self.chains:
            np.maximum(self.fit(), other.fit(), out=self.known)
        else:
            self._learn(other.chains.serial, other.known.copy())
        if other.foreign and not self.foreign and self.chains.serial not in other.foreign:
            self.foreign = dict(other.foreign)
            return
        for serial, known in other.foreign.items():
            self._learn(serial, known)

    def _learn(self, serial: int, known: Known) -> None:
        if serial == self.chains.serial:
            np.maximum(self.fit(), _widened(known, self.chains.capacity), out=self.known)
            return
        before = self.foreign.get(serial)
        if before is known:
            return
        if before is not None:
            size = max(before.shape[1], known.shape[1])
            both = np.maximum(_widened(before, size), _widened(known, size))
            known = before if np.array_equal(both, before) else both
        self.foreign[serial] = known

    def clear(self) -> None:
        self.known[:] = 0
        self.foreign = {}

    def lookup(self) -> Lookup:
        """The index that a row knows of a chain of the own cluster."""
        find: Lookup = self.fit().item
        return find

    def lookup_anywhere(self) -> Lookup:
        """As `lookup`, of a chain of any cluster."""
        known, mine, foreign = self.fit(), self.chains.serial, self.foreign

        def find(row: int, chain: int) -> int:
            cluster, local = split(chain)
            if cluster == mine:
                return int(known.item(row, local))
            theirs = foreign.get(cluster)
            return int(theirs.item(row, local)) if theirs is not None and local < theirs.shape[1] else 0

        return find


def _widened(known: Known, capacity: int) -> Known:
    if known.shape[1] >= capacity:
        return known
    wide = np.zeros((ROWS, capacity), np.int32)
    wide[:, : known.shape[1]] = known
    return wide
