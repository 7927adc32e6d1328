"""Rings of slots between two roles: who waits for whom, and the arithmetic of mbarrier phases, in one place."""

import copy

import cutlass
from cutlass import Int32, cute
from cutlass.cutlass_dsl import extract_mlir_values, new_from_mlir_values
from cutlass.experimental import primitives as ptx


class Slot:
    """Where a role is in a ring: the slot, and the parity of the phase that it waits for there."""

    def __init__(self, slots, index, parity):
        self.slots, self.index, self.parity = slots, index, parity

    def next(self):
        """The slot after this one; past the last one it is the first again, one phase later."""
        index = self.index + 1
        wraps = index == self.slots
        return Slot(
            self.slots,
            cutlass.select_(wraps, Int32(0), index),
            cutlass.select_(wraps, self.parity ^ 1, self.parity),
        )

    # A dynamic loop carries the two numbers.
    def __extract_mlir_values__(self):
        return [self.index.ir_value(), self.parity.ir_value()]

    def __new_from_mlir_values__(self, values):
        return Slot(self.slots, Int32(values[0]), Int32(values[1]))


class Ring:
    """Slots that a producer fills and a consumer empties; each has an mbarrier `full` and an mbarrier `empty`.

    The arrivals that complete a phase are declared here, and every arrival that a role traces is noted; `check`
    compares the two, so that a ring that would hang does not compile.

    Args:
        name: for messages.
        full, empty: `slots` mbarriers each, in shared memory.
        fills: arrivals that make a slot full.
        empties: arrivals that make it empty.
        copied: bytes that asynchronous copies bring to a slot before it is full.
    """

    def __init__(self, name, full, empty, slots, *, fills, empties, copied=0):
        self.name, self.full, self.empty, self.slots = name, full, empty, slots
        self.declared = {"fills": fills, "empties": empties, "copied": copied}
        self.traced = dict.fromkeys(self.declared, 0)

    def initialise(self):
        """By one thread, before anyone waits."""
        for index in range(self.slots):
            cute.arch.mbarrier_init(self.full + index, self.declared["fills"])
            cute.arch.mbarrier_init(self.empty + index, self.declared["empties"])

    def producer(self):
        """A new barrier counts as just out of the phase of parity 1: all slots are empty at first."""
        return Slot(self.slots, Int32(0), Int32(1))

    def consumer(self):
        return Slot(self.slots, Int32(0), Int32(0))

    def wait_empty(self, slot):
        cute.arch.mbarrier_wait(self.empty + slot.index, slot.parity)

    def wait_full(self, slot):
        cute.arch.mbarrier_wait(self.full + slot.index, slot.parity)

    def drain(self, slot):
        """The producer waits for every slot to be empty: nothing arrives at a barrier once its CTA is gone."""
        for _ in range(self.slots):
            self.wait_empty(slot)
            slot = slot.next()

    def expect(self, slot):
        """Arrives at `full` for the producer and announces the bytes of its copies, which arrive by themselves."""
        self.traced["fills"] += 1
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + slot.index, self.declared["copied"])

    def copy_barrier(self, slot, nbytes):
        """The barrier that a copy of `nbytes` into the slot reports to."""
        self.traced["copied"] += nbytes
        return self.full + slot.index

    def commit_full(self, slot):
        """`full` gets one arrival when the tensor-core operations issued so far are complete."""
        self.traced["fills"] += 1
        self._commit(self.full + slot.index)

    def commit_empty(self, slot):
        """`empty` gets one arrival when the tensor-core operations issued so far are complete."""
        self.traced["empties"] += 1
        self._commit(self.empty + slot.index)

    def _commit(self, barrier):
        with cute.arch.elect_one():
            ptx.tcgen05_commit(barrier, group=ptx.CTAGroup.CTA_1)

    def arrive_empty(self, slot, warps):
        """Each of the role's `warps` arrives at `empty`, once all its lanes have got here."""
        self.traced["empties"] += warps
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + slot.index)

    # To the compiler a ring is its barriers, which no role changes; the notes are shared by all its copies.
    def __extract_mlir_values__(self):
        return [*extract_mlir_values(self.full), *extract_mlir_values(self.empty)]

    def __new_from_mlir_values__(self, values):
        ring = copy.copy(self)
        ring.full, ring.empty = (
            new_from_mlir_values(barriers, [value])
            for barriers, value in zip((self.full, self.empty), values, strict=True)
        )
        return ring

    def check(self):
        """After all roles are traced.

        Raises:
            AssertionError: a barrier's count is not what the roles arrive with.
        """
        if self.traced != self.declared:
            raise AssertionError(f"ring {self.name}: declared {self.declared}, but its roles trace {self.traced}")
