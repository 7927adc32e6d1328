"""Rings of slots between two roles: who waits for whom, and the arithmetic of mbarrier phases, in one place.

A barrier (PTX: mbarrier) counts arrivals, and bytes that copies announce. When a phase has had all of both, it is
complete and the next one begins; a waiting thread names the parity of the phase that it waits for. A commit is an
arrival that the tensor core makes once what it was given so far is done (PTX: tcgen05.commit); it may go to several
CTAs of a cluster.

Waits acquire at the scope of the CTA in clusters too: no thread reads by an ordinary load what a thread of another CTA
wrote. What crosses is brought by copies and by the tensor core, with fences of their own. At the scope of the cluster
every wait would also invalidate L1 (the compiler adds CCTL.IVALL).
"""

import copy
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cutlass_dsl import extract_mlir_values, new_from_mlir_values
from cutlass.experimental import primitives as ptx

GROUPS = {1: ptx.CTAGroup.CTA_1, 2: ptx.CTAGroup.CTA_2}


class Slot:
    """Where a role is in a ring of `slots`: the slot, and the parity, at first `first`, that it waits for there."""

    def __init__(self, slots: int, index: Int32, parity: Int32, first: int) -> None:
        self.slots, self.index, self.parity, self.first = slots, index, parity, first

    def next(self) -> "Slot":
        """The slot after this one; after the last it is the first again, one phase later."""
        if self.slots == 1:
            return Slot(1, self.index, self.parity ^ 1, self.first)
        index = self.index + 1
        wraps = index == self.slots
        return Slot(
            self.slots,
            cutlass.select_(wraps, Int32(0), index),
            cutlass.select_(wraps, self.parity ^ 1, self.parity),
            self.first,
        )

    @property
    def lap(self) -> Int32:
        """0 the first time around the ring, then 1 and 0 in turn."""
        return self.parity ^ self.first

    # A dynamic loop carries the two numbers.
    def __extract_mlir_values__(self) -> list[Any]:
        return [self.index.ir_value(), self.parity.ir_value()]

    def __new_from_mlir_values__(self, values: list[Any]) -> "Slot":
        return Slot(self.slots, Int32(values[0]), Int32(values[1]), self.first)


class Ring:
    """Slots that a producer fills and a consumer empties; each has an mbarrier `full` and an mbarrier `empty`.

    What completes a phase is declared here, and every arrival that a role traces is noted; `check` compares the two,
    so that a kernel whose counts do not add up is not compiled. In a cluster a role is traced once and run by several
    CTAs: `total` is what their arrivals add up to, the masks and `home` say where arrivals go.

    Args:
        name: for messages.
        full, empty: `slots` mbarriers each, in shared memory.
        fills: arrivals that make a slot full.
        empties: arrivals that make it empty, each traced once; `total` with those of all CTAs, None where there is one.
        copied: bytes that asynchronous copies bring to a slot before it is full, those of both CTAs of a pair.
        group: CTAs that the tensor core's instructions are issued for, 1 or a pair (PTX: .cta_group).
        full_mask, empty_mask: CTAs of the cluster, a bit each, whose barrier a commit arrives at; None is this one's.
        home: rank in the cluster of the CTA whose barrier `arrive_empty` arrives at; None is this one's.
    """

    def __init__(
        self,
        name: str,
        full: cute.Pointer,
        empty: cute.Pointer,
        slots: int,
        *,
        fills: int,
        empties: int,
        copied: int = 0,
        total: int | Int32 | None = None,
        group: int = 1,
        full_mask: int | Int32 | None = None,
        empty_mask: int | Int32 | None = None,
        home: Int32 | None = None,
    ) -> None:
        self.name, self.full, self.empty, self.slots, self.group = name, full, empty, slots, group
        self.total = empties if total is None else total
        self.full_mask, self.empty_mask, self.home = full_mask, empty_mask, home
        self.declared = {"fills": fills, "empties": empties, "copied": copied}
        self.traced = dict.fromkeys(self.declared, 0)
        self.repeats: list[dict[str, int]] = []

    def again(self) -> "Ring":
        """The same ring, for a visit to a slot whose code repeats that of a visit before, as an unrolled loop has it:
        of each kind it has as many arrivals as that, or none."""
        ring = copy.copy(self)
        ring.traced = dict.fromkeys(self.declared, 0)
        self.repeats.append(ring.traced)
        return ring

    def initialise(self) -> None:
        """By one thread, before anyone waits."""
        for index in range(self.slots):
            cute.arch.mbarrier_init(self.full + index, self.declared["fills"])
            cute.arch.mbarrier_init(self.empty + index, self.total)

    def producer(self) -> Slot:
        """A new barrier counts as just out of a phase of parity 1: at first all slots are empty."""
        return Slot(self.slots, Int32(0), Int32(1), 1)

    def consumer(self) -> Slot:
        return Slot(self.slots, Int32(0), Int32(0), 0)

    def behind(self, slots: int) -> Slot:
        """So many slots behind the consumer, to wait until what it had there is empty again; at first, it is."""
        return Slot(self.slots, Int32(self.slots - slots), Int32(1), 1)

    def wait_empty(self, slot: Slot) -> None:
        cute.arch.mbarrier_wait(self.empty + slot.index, slot.parity)

    def wait_full(self, slot: Slot) -> None:
        cute.arch.mbarrier_wait(self.full + slot.index, slot.parity)

    def drain(self, slot: Slot) -> None:
        """The producer waits until every slot is empty: nothing may arrive at a barrier after its CTA has ended."""
        for _ in range(self.slots):
            self.wait_empty(slot)
            slot = slot.next()

    def expect_copies(self, slot: Slot) -> None:
        """The producer's arrival at `full`, which announces the bytes of its copies; these report by themselves."""
        self.traced["fills"] += 1
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + slot.index, self.declared["copied"])

    @cute.jit
    def expect_copies_in(self, slot: Slot, ctas: Int32) -> None:
        """The same arrival at the slot of each of the cluster's `ctas`, for copies that one of them starts for all."""
        self.traced["fills"] += 1
        lane = cute.arch.lane_idx()
        if lane < ctas:
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + slot.index, self.declared["copied"], lane)

    def copy_barrier(self, slot: Slot, nbytes: int) -> cute.Pointer:
        """Where copies of `nbytes` into this CTA's slot report to, as do those of the other CTA of a pair."""
        self.traced["copied"] += nbytes * self.group
        return self.full + slot.index

    def commit_full(self, slot: Slot) -> None:
        """An arrival at `full` once the tensor-core operations that this warp issued so far are complete."""
        self.traced["fills"] += 1
        _commit(self.full + slot.index, self.group, self.full_mask)

    def commit_empty(self, slot: Slot) -> None:
        """An arrival at `empty` once the tensor-core operations that this warp issued so far are complete."""
        self.traced["empties"] += 1
        _commit(self.empty + slot.index, self.group, self.empty_mask)

    def arrive_empty(self, slot: Slot, warps: range) -> None:
        """An arrival at `empty` from each of the `warps` that run the role, once all its lanes have come here."""
        self.traced["empties"] += len(warps)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + slot.index, self.home)

    @cute.jit
    def arrive_empty_in(self, slot: Slot, warps: range, ctas: int) -> None:
        """The same arrivals at the slot of each of the cluster's `ctas`."""
        self.traced["empties"] += len(warps)
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        if lane < ctas:
            cute.arch.mbarrier_arrive(self.empty + slot.index, lane)

    def check(self) -> None:
        """After all roles are traced.

        Raises:
            AssertionError: a phase does not complete with what the roles arrive with.
        """
        if self.traced != self.declared:
            raise AssertionError(f"ring {self.name}: {self.declared} declared, {self.traced} traced")
        for repeat in self.repeats:
            if any(count not in (0, self.declared[kind]) for kind, count in repeat.items()):
                raise AssertionError(f"ring {self.name}: {self.declared} declared, {repeat} traced in a repetition")

    # To the compiler a ring is its barriers and where arrivals go, which no role changes; all copies share the notes.
    def _values(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in ("full", "empty", "full_mask", "empty_mask", "home")}
        return {name: value for name, value in named.items() if value is not None and not isinstance(value, int)}

    def __extract_mlir_values__(self) -> list[Any]:
        return [value for held in self._values().values() for value in extract_mlir_values(held)]

    def __new_from_mlir_values__(self, values: list[Any]) -> "Ring":
        ring = copy.copy(self)
        for (name, held), value in zip(self._values().items(), values, strict=True):
            setattr(ring, name, new_from_mlir_values(held, [value]))
        return ring


def _commit(barrier: cute.Pointer, group: int, mask: int | Int32 | None) -> None:
    with cute.arch.elect_one():
        ptx.tcgen05_commit(barrier, group=GROUPS[group], multicast_mask=mask)
