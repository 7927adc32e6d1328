"""Rings of slots between two roles: who waits for whom, and the arithmetic of mbarrier phases, in one place.

A barrier (PTX: mbarrier) counts arrivals, and bytes that copies announce. When a phase has had all of both, it is
complete and the next one begins; a waiting thread names the parity of the phase that it waits for. A commit is an
arrival that the tensor core makes once what it was given so far is done (PTX: tcgen05.commit).
"""

import copy
from typing import Any

import cutlass
from cutlass import Int32, cute
from cutlass.cutlass_dsl import extract_mlir_values, new_from_mlir_values
from cutlass.experimental import primitives as ptx


class Slot:
    """Where a role is in a ring: the slot, and the parity of the phase that it waits for there."""

    def __init__(self, slots: int, index: Int32, parity: Int32) -> None:
        self.slots, self.index, self.parity = slots, index, parity

    def next(self) -> "Slot":
        """The slot after this one; after the last it is the first again, one phase later."""
        index = self.index + 1
        wraps = index == self.slots
        return Slot(
            self.slots,
            cutlass.select_(wraps, Int32(0), index),
            cutlass.select_(wraps, self.parity ^ 1, self.parity),
        )

    # A dynamic loop carries the two numbers.
    def __extract_mlir_values__(self) -> list[Any]:
        return [self.index.ir_value(), self.parity.ir_value()]

    def __new_from_mlir_values__(self, values: list[Any]) -> "Slot":
        return Slot(self.slots, Int32(values[0]), Int32(values[1]))


class Ring:
    """Slots that a producer fills and a consumer empties; each has an mbarrier `full` and an mbarrier `empty`.

    What completes a phase is declared here, and every arrival that a role traces is noted; `check` compares the two,
    so that a kernel whose counts do not add up is not compiled.

    Args:
        name: for messages.
        full, empty: `slots` mbarriers each, in shared memory.
        fills: arrivals that make a slot full.
        empties: arrivals that make it empty.
        copied: bytes that asynchronous copies bring to a slot before it is full.
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
    ) -> None:
        self.name, self.full, self.empty, self.slots = name, full, empty, slots
        self.declared = {"fills": fills, "empties": empties, "copied": copied}
        self.traced = dict.fromkeys(self.declared, 0)

    def initialise(self) -> None:
        """By one thread, before anyone waits."""
        for index in range(self.slots):
            cute.arch.mbarrier_init(self.full + index, self.declared["fills"])
            cute.arch.mbarrier_init(self.empty + index, self.declared["empties"])

    def producer(self) -> Slot:
        """A new barrier counts as just out of a phase of parity 1: at first all slots are empty."""
        return Slot(self.slots, Int32(0), Int32(1))

    def consumer(self) -> Slot:
        return Slot(self.slots, Int32(0), Int32(0))

    def wait_empty(self, slot: Slot) -> None:
        cute.arch.mbarrier_wait(self.empty + slot.index, slot.parity)

    def wait_full(self, slot: Slot) -> None:
        cute.arch.mbarrier_wait(self.full + slot.index, slot.parity)

    def drain(self, slot: Slot) -> None:
        """The producer waits until every slot is empty: nothing may arrive at a barrier after its CTA has ended."""
        for _ in range(self.slots):
            self.wait_empty(slot)
            slot = slot.next()

    def expect_copies(self, slot: Slot, nbytes: Int32 | None = None) -> None:
        """The producer's arrival at `full`, which announces the bytes of its copies; these report by themselves.

        Args:
            nbytes: of all copies to the slot, where only the launch knows them; then 0 are declared.
        """
        self.traced["fills"] += 1
        with cute.arch.elect_one():
            count = self.declared["copied"] if nbytes is None else nbytes
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + slot.index, count)

    def copy_barrier(self, slot: Slot, nbytes: int) -> cute.Pointer:
        """Where a copy of `nbytes` into the slot reports to."""
        self.traced["copied"] += nbytes
        return self.full + slot.index

    def commit_full(self, slot: Slot) -> None:
        """An arrival at `full` once the tensor-core operations that this warp issued so far are complete."""
        self.traced["fills"] += 1
        _commit(self.full + slot.index)

    def commit_empty(self, slot: Slot) -> None:
        """An arrival at `empty` once the tensor-core operations that this warp issued so far are complete."""
        self.traced["empties"] += 1
        _commit(self.empty + slot.index)

    def arrive_empty(self, slot: Slot, warps: range) -> None:
        """An arrival at `empty` from each of the `warps` that run the role, once all its lanes have come here."""
        self.traced["empties"] += len(warps)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + slot.index)

    def check(self) -> None:
        """After all roles are traced.

        Raises:
            AssertionError: a phase does not complete with what the roles arrive with.
        """
        if self.traced != self.declared:
            raise AssertionError(f"ring {self.name}: {self.declared} declared, {self.traced} traced")

    # To the compiler a ring is its barriers, which no role changes; all copies share the notes.
    def __extract_mlir_values__(self) -> list[Any]:
        return [*extract_mlir_values(self.full), *extract_mlir_values(self.empty)]

    def __new_from_mlir_values__(self, values: list[Any]) -> "Ring":
        ring = copy.copy(self)
        ring.full = new_from_mlir_values(self.full, values[:1])
        ring.empty = new_from_mlir_values(self.empty, values[1:])
        return ring


def _commit(barrier: cute.Pointer) -> None:
    with cute.arch.elect_one():
        ptx.tcgen05_commit(barrier, group=ptx.CTAGroup.CTA_1)
