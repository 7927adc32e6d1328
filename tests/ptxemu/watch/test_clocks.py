"""Clocks and shadows by themselves: what has to hold for many clusters, chains and readers."""

from __future__ import annotations

import numpy as np
import pytest

import ptxemu
from ptxemu.watch.clocks import CHAIN_BITS, ORDER, Chains, Clock, anywhere, split
from ptxemu.watch.shadow import FULL_CELL, WRITE, Access, Shadow


def test_chains_of_a_large_cluster_are_not_those_of_the_next() -> None:
    chains = Chains(3)
    numbers = [chains.new("warp") for _ in range(5000)]
    clock = Clock(chains)
    clock.fit()[ORDER, numbers[-1]] = 1
    known = clock.lookup_anywhere()
    assert known(ORDER, anywhere(3, numbers[-1])) == 1
    assert known(ORDER, anywhere(4, numbers[-1] & 4095)) == 0
    assert split(anywhere(3, numbers[-1])) == (3, numbers[-1])
    chains.kinds = [""] * (1 << CHAIN_BITS)
    with pytest.raises(ptxemu.LaunchError, match="chains of events"):
        chains.new("warp")


def test_what_clusters_hand_on_is_shared() -> None:
    """A ticket taken by one cluster after the other: each adds one array to what is known, and copies none."""
    flag = Clock(Chains(0))
    for serial in range(1, 200):
        taker = Clock(Chains(serial))
        taker.merge(flag)
        released = Clock(taker.chains)
        released.merge(taker)
        before, flag = flag, flag.copy()
        flag.merge(released)
        assert all(flag.foreign[other] is known for other, known in before.foreign.items())
    assert len(flag.foreign) == 199


def test_many_readers_are_kept() -> None:
    """A writer that waited for all of 100 readers but one is in conflict with that one."""
    chains = Chains(0)
    readers = [chains.new("warp") for _ in range(100)]
    shadow = Shadow((4,), 128, True)
    for reader in readers:
        shadow.record(slice(0, 4), FULL_CELL, Access(reader, 1, 0, True, Clock(chains).lookup()))
    clock = Clock(chains)
    clock.fit()[ORDER, readers] = 1
    clock.known[ORDER, readers[37]] = 0
    (trouble,) = shadow.record(slice(0, 4), FULL_CELL, Access(chains.new("warp"), 1, WRITE, False, clock.lookup()))
    assert [past.chain for past in trouble.conflicts] == [readers[37]]


def test_states_are_used_again() -> None:
    """However many accesses there were, a shadow holds the states that its cells are in."""
    chains = Chains(0)
    warp = chains.new("warp")
    shadow, clock = Shadow((64,), 16, False), Clock(chains)
    masks = np.arange(1, 9, dtype=np.uint16)
    for event in range(1, 400):
        clock.fit()[ORDER, warp] = event
        for where, mask in ((slice(0, 64), FULL_CELL), (np.arange(0, 64, 3), FULL_CELL), (slice(8, 16), masks)):
            access = Access(warp, event, WRITE * (event % 2), False, clock.lookup())
            assert shadow.record(where, mask, access) == []
        if not event % 50:
            shadow.reset(slice(0, 32))
        shadow.forget(slice(2, 4), 0x00FF)
        assert shadow.counts == np.bincount(shadow.ids, minlength=len(shadow.states)).tolist()
    assert len(shadow.states) < 200
