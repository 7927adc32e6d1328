"""The sizes of a tile that K = 96 instructions multiply: codes in slots of 256 k, scales in slots of 192.

Pure arithmetic, as in `geometry`.

A row of codes in shared memory has 128 bytes, 256 elements: a swizzle spans no more. An instruction takes 96 elements,
48 bytes, and where these reach the end of a row, it goes on with the same row of another slot, whose address is in its
descriptor. Scales come to tensor memory by atoms of 64 k, so that two instructions, 192 k, need three atoms. All of it
repeats after 768 k: three slots of codes, four of scales, eight instructions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from blockscale.kernels.parts.geometry import ATOM_ROWS, HEADER_BYTES, STEP_K, TILE_K, Geometry

STEP96_K = 96  # elements of k in one tensor-core instruction
STEPS96 = 8  # instructions until codes and scales begin with a slot again
WHOLE_K = STEPS96 * STEP96_K
SCALES_K = 192  # elements of k in a slot of scales
CODE_SLOTS, SCALE_SLOTS = WHOLE_K // TILE_K, WHOLE_K // SCALES_K
FEWEST_STAGES = 2  # an instruction may begin in one slot of codes and end in the next


@dataclass(frozen=True)
class Geometry96(Geometry):
    """As `Geometry`; `stages` are slots of 256 k of codes. Scales have a ring of their own, of as many slots as hold
    the scales of as much k, but for less than 192."""

    ONCE: ClassVar[str] = "no multiple of 32, or 96 or 224"
    SCALE_RING: ClassVar[bool] = True
    SCALE_STEPS: ClassVar[int] = SCALES_K // STEP_K

    @property
    def repeats(self) -> bool:
        """Whether tiles of this width may follow one another: scales of one that begins within an atom must not lie in
        more atoms than the width alone needs, since an instruction takes four columns of an atom to be next to those
        of the next one, and the second half of its k so many atoms on as its width needs."""
        return self.tile_n % 32 == 0 and self.tile_n not in (96, 224)

    def can_tile(self, n: int) -> bool:
        return self.repeats or (n <= self.tile_n and self.shape[1] == 1)

    @property
    def atoms_n(self) -> int:
        return -(-self.tile_n // ATOM_ROWS)

    # Scales of a slot come whole: three atoms along k cannot be cut into two boxes.

    @property
    def sfa_boxes(self) -> int:
        return 1

    @property
    def sfb_boxes(self) -> int:
        return 1

    @property
    def stage_bytes(self) -> int:
        """Of a slot of codes alone."""
        return self.a_bytes + self.b_bytes

    @property
    def most_stages(self) -> int:
        room = self.smem - HEADER_BYTES - self.staging
        stages = max(0, room // self.stage_bytes)
        while stages and self._operands(stages) > room:
            stages -= 1
        return stages if self.scale_slots_that_fit else 0

    @property
    def scale_stages(self) -> int:
        return scale_stages(self.slots)

    @property
    def scale_slots(self) -> int:
        """Sets of scale columns: one a slot of scales, or a power of two, so that the first of the four pairs of
        instructions in k = 768 always has the same."""
        sets = min(self.scale_stages, self.scale_slots_that_fit)
        return sets if sets == self.scale_stages else min(SCALE_SLOTS, 1 << sets.bit_length() - 1)

    @property
    def smem_used(self) -> int:
        return HEADER_BYTES + self.staging + self._operands(self.slots)

    def _operands(self, stages: int) -> int:
        """Bytes of so many slots of codes and of the scales beside them; each array begins at a multiple of 1024."""
        scales = scale_stages(stages)
        return stages * self.stage_bytes + sum(-(-scales * x // 1024) * 1024 for x in (self.sfa_bytes, self.sfb_bytes))


def scale_stages(stages: int) -> int:
    """Slots of scales beside so many of codes."""
    return -(-stages * TILE_K // SCALES_K) - 1
