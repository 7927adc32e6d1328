"""Rings of slots that one role fills and another empties, each slot guarded by two mbarriers."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute
from cutlass.experimental import primitives as ptx


@dataclass(frozen=True)
class Ring:
    full: object
    empty: object
    slots: int


class Place:
    """A role's place in a ring: the slot it is at and the parity that it waits for."""

    def __init__(self, slots, index, parity):
        self.slots, self.index, self.parity = slots, index, parity

    @staticmethod
    def first(slots, parity):
        return Place(slots, Int32(0), Int32(parity))

    def next(self):
        index = self.index + 1
        wraps = index == self.slots
        return Place(self.slots, cutlass.select_(wraps, Int32(0), index), self.parity ^ Int32(wraps))

    def __extract_mlir_values__(self):
        return [self.index.ir_value(), self.parity.ir_value()]

    def __new_from_mlir_values__(self, values):
        return Place(self.slots, Int32(values[0]), Int32(values[1]))

@cute.jit
def wait(barrier, parity):
    while not ptx.mbarrier_try_wait_parity(barrier, parity):
        pass
