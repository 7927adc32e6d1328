"""The sizes of an sm_100a tile: what a stage takes of shared memory, what a tile takes of tensor memory.

Pure arithmetic, without the compiler, so that whoever chooses a configuration can ask before anything is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

CTA_ROWS = 128  # of a tile that one CTA has: one lane of tensor memory each
TILE_K = 256  # elements of k in a stage: 128 bytes of codes a row, the width of the swizzle
STEP_K = 64  # elements of k in one tensor-core instruction
STEPS = TILE_K // STEP_K
ATOM_ROWS = 128  # a scale atom: 128 rows x 4 blocks of 16, 512 bytes, in the order the hardware wants
ATOM_BYTES = 512
ATOM_COLUMNS = 4  # of tensor memory: row r of the atom in lane r % 32, column r // 32; a byte a block
SWIZZLE_ROWS = 8  # of codes that the swizzle's pattern spans: boxes of codes are so many rows, or several times that
SMEM_BYTES = 232448  # of dynamic shared memory that a CTA of sm_100a may have
HEADER_BYTES = 1024  # barriers and the address of tensor memory, padded to the alignment of what follows
RESERVED_BYTES = 1024  # of shared memory that each CTA takes beside its own; all of it is one CTA's most and these
TMEM_COLUMNS = 512
ROWS = (128, 256)  # of a tile: those of one CTA, or of a pair
SIDES = (1, 2, 4)  # of a cluster, in CTAs
MOST_CLUSTER = 8  # CTAs of a cluster that every GPU of the architecture takes

Shape = tuple[int, int]


def widths(rows: int) -> range:
    """Columns of a tile of so many rows: what a tensor-core instruction has (PTX: tcgen05, shapes of .mxf4nvf4)."""
    return range(8, 257, 8) if rows == CTA_ROWS else range(16, 257, 16)


@dataclass(frozen=True)
class Geometry:
    """A tile of rows x columns outputs. Nothing is checked here: whether it can be built is for `supports` to say.

    Args:
        tile: (128, N), of one CTA, or (256, N), of a pair of CTAs with 128 rows each; N one of `widths`.
        stages: slots of the ring of operands in shared memory; None means as many as fit.
        accumulators: tiles of fp32 sums in tensor memory, 1 or 2; where two do not fit they overlap.
        smem: bytes of dynamic shared memory that a CTA may have.
        staging: bytes of it that the epilogue takes, a multiple of 1024.
        cluster: CTAs of a cluster along m and n; None means the tile's own, (1, 1) or (2, 1).
    """

    ONCE: ClassVar[str] = "no multiple of 32"  # what widths are that are not repeated
    SCALE_RING: ClassVar[bool] = False  # whether scales have a ring of their own
    SCALE_STEPS: ClassVar[int] = STEPS  # atoms along k of a slot of scales

    tile: Shape
    stages: int | None = None
    accumulators: int = 1
    smem: int = SMEM_BYTES
    staging: int = 0
    cluster: Shape | None = None

    @property
    def tile_n(self) -> int:
        return self.tile[1]

    @property
    def pair(self) -> bool:
        """Whether two CTAs compute a tile, each its 128 rows: the first of them issues the instructions of both."""
        return self.tile[0] > CTA_ROWS

    @property
    def ctas(self) -> int:
        """CTAs of a tile."""
        return self.tile[0] // CTA_ROWS

    @property
    def shape(self) -> Shape:
        """The cluster's."""
        return (self.ctas, 1) if self.cluster is None else self.cluster

    def can_tile(self, n: int) -> bool:
        """Whether n columns can be cut into such tiles.

        Only multiples of 32 are repeated; another width has to cover all of n, since a tile that began within 32 rows
        of an atom would need its scales in other lanes.
        """
        return self.tile_n % 32 == 0 or (n <= self.tile_n and self.shape[1] == 1)

    @property
    def atoms_n(self) -> int:
        """Scale atoms of B that a tile may touch: it begins on any multiple of gcd(tile_n, 128) within one."""
        first = 0 if self.tile_n % 32 else max(j * self.tile_n % ATOM_ROWS for j in range(4))
        return -(-(first + self.tile_n) // ATOM_ROWS)

    # Boxes that a slot of an operand is cut into: one for each CTA of the cluster that needs the same.

    @property
    def a_boxes(self) -> int:
        return self.shape[1]

    @property
    def b_boxes(self) -> int:
        return self.shape[0] // self.ctas

    @property
    def sfa_boxes(self) -> int:
        return self.shape[1]

    @property
    def sfb_boxes(self) -> int:
        return self.shape[0]

    @property
    def b_rows(self) -> int:
        """Rows of B whose codes a CTA holds: all of the tile's columns, or a half of them."""
        return self.tile_n // self.ctas

    @property
    def divides(self) -> bool:
        """Whether B's codes can be cut into boxes."""
        return self.b_rows % (self.b_boxes * SWIZZLE_ROWS) == 0

    # Bytes of a stage in one CTA.

    @property
    def a_bytes(self) -> int:
        return CTA_ROWS * TILE_K // 2

    @property
    def b_bytes(self) -> int:
        return self.b_rows * TILE_K // 2

    @property
    def sfa_bytes(self) -> int:
        return self.SCALE_STEPS * ATOM_BYTES

    @property
    def sfb_bytes(self) -> int:
        return self.SCALE_STEPS * ATOM_BYTES * self.atoms_n

    @property
    def scale_bytes(self) -> int:
        """Of a slot of scales."""
        return self.sfa_bytes + self.sfb_bytes

    @property
    def stage_bytes(self) -> int:
        return self.a_bytes + self.b_bytes + self.sfa_bytes + self.sfb_bytes

    @property
    def most_stages(self) -> int:
        """As many as fit; less than 1 where not even one does."""
        fit = (self.smem - HEADER_BYTES - self.staging) // self.stage_bytes
        return fit if self.scale_slots_that_fit else 0

    @property
    def slots(self) -> int:
        """The stages there are."""
        return self.most_stages if self.stages is None else self.stages

    @property
    def smem_used(self) -> int:
        return HEADER_BYTES + self.staging + self.slots * self.stage_bytes

    @property
    def smem_bytes(self) -> int:
        """Those asked for: of a cluster, so many that a multiprocessor takes no more CTAs than it has columns for.

        A CTA waits for columns that another one has, and CTAs of a cluster wait for one another: two clusters, each
        with columns where the other waits for some, would wait forever.
        """
        if self.shape == (1, 1):
            return self.smem_used
        too_many = TMEM_COLUMNS // self.tmem_allocation + 1
        return max(self.smem_used, (self.smem + RESERVED_BYTES) // too_many)

    @property
    def scale_stages(self) -> int:
        """Slots of scales in shared memory."""
        return self.slots

    # Columns of tensor memory.

    @property
    def sfa_columns(self) -> int:
        return self.SCALE_STEPS * ATOM_COLUMNS

    @property
    def sfb_columns(self) -> int:
        return self.SCALE_STEPS * ATOM_COLUMNS * self.atoms_n

    @property
    def scale_columns(self) -> int:
        """Of a stage's scales."""
        return self.sfa_columns + self.sfb_columns

    @property
    def scale_slots_that_fit(self) -> int:
        """Sets of scale columns beside the sums; sums overlap rather than leave less than two."""
        beside = (TMEM_COLUMNS - self.accumulators * self.tile_n) // self.scale_columns
        return beside if self.accumulators == 1 else max(2, beside)

    @property
    def scale_slots(self) -> int:
        """Sets of scale columns: one a stage, so that a stage's barrier guards them too, or fewer, taken in turn."""
        return min(self.scale_stages, self.scale_slots_that_fit)

    @property
    def overlap(self) -> int:
        """Columns that two accumulators share: the last ones of the first are the first ones of the second."""
        both = 2 * self.tile_n + self.scale_slots * self.scale_columns
        return max(0, both - TMEM_COLUMNS) if self.accumulators == 2 else 0

    @property
    def accumulator_stride(self) -> int:
        """Columns from one accumulator to the next."""
        return self.tile_n - self.overlap

    @property
    def accumulator_columns(self) -> int:
        return self.tile_n + (self.accumulators - 1) * self.accumulator_stride

    @property
    def accumulator_slots(self) -> int:
        """Slots of the ring of sums: two that overlap are one slot, since only one at a time can be whole."""
        return 1 if self.overlap else self.accumulators

    @property
    def tmem_columns(self) -> int:
        """Columns in use."""
        return self.accumulator_columns + self.scale_slots * self.scale_columns

    @property
    def tmem_allocation(self) -> int:
        """The power of two, 32 or more, that is allocated."""
        return max(32, 1 << (self.tmem_columns - 1).bit_length())
