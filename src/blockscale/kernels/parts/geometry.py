"""The sizes of an sm_100a tile: what a stage takes of shared memory, what a tile takes of tensor memory.

Pure arithmetic, without the compiler, so that whoever chooses a configuration can ask before anything is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_M = 128  # rows of a tile: one lane of tensor memory each
TILE_K = 256  # elements of k in a stage: 128 bytes of codes a row, the width of the swizzle
STEP_K = 64  # elements of k in one tensor-core instruction
STEPS = TILE_K // STEP_K
ATOM_ROWS = 128  # a scale atom: 128 rows x 4 blocks of 16, 512 bytes, in the order the hardware wants
ATOM_BYTES = 512
ATOM_COLUMNS = 4  # of tensor memory: row r of the atom in lane r % 32, column r // 32; a byte a block
SMEM_BYTES = 232448  # of dynamic shared memory that a CTA of sm_100a may have
HEADER_BYTES = 1024  # barriers and the address of tensor memory, padded to the alignment of what follows
TMEM_COLUMNS = 512
WIDTHS = range(8, 257, 8)  # columns of a tile: what a tensor-core instruction of 128 rows has


@dataclass(frozen=True)
class Geometry:
    """A tile of 128 x tile_n outputs. Nothing is checked here: whether it can be built is for `config.supports` to say.

    Args:
        tile_n: one of `WIDTHS`.
        stages: slots of the ring of operands in shared memory; None means as many as fit shared and tensor memory.
        accumulators: tiles of fp32 sums in tensor memory, 1 or 2.
        smem: bytes of dynamic shared memory that a CTA may have.
    """

    tile_n: int
    stages: int | None = None
    accumulators: int = 1
    smem: int = SMEM_BYTES

    def can_tile(self, n: int) -> bool:
        """Whether n columns can be cut into such tiles.

        Only multiples of 32 are repeated; another width has to cover all of n, since a tile that began within 32 rows
        of an atom would need its scales in other lanes.
        """
        return self.tile_n % 32 == 0 or n <= self.tile_n

    @property
    def atoms_n(self) -> int:
        """Scale atoms of B that a tile may touch: it begins on any multiple of gcd(tile_n, 128) within one."""
        first = 0 if self.tile_n % 32 else max(j * self.tile_n % ATOM_ROWS for j in range(4))
        return -(-(first + self.tile_n) // ATOM_ROWS)

    @property
    def a_bytes(self) -> int:
        return TILE_M * TILE_K // 2

    @property
    def b_bytes(self) -> int:
        return self.tile_n * TILE_K // 2

    @property
    def sfa_bytes(self) -> int:
        return STEPS * ATOM_BYTES

    @property
    def sfb_bytes(self) -> int:
        return STEPS * ATOM_BYTES * self.atoms_n

    @property
    def stage_bytes(self) -> int:
        return self.a_bytes + self.b_bytes + self.sfa_bytes + self.sfb_bytes

    @property
    def most_stages(self) -> int:
        """As many as fit both memories; less than 1 where not even one does."""
        shared = (self.smem - HEADER_BYTES) // self.stage_bytes
        tensor = (TMEM_COLUMNS - self.accumulators * self.tile_n) // self.scale_columns
        return min(shared, tensor)

    @property
    def slots(self) -> int:
        """The stages there are."""
        return self.most_stages if self.stages is None else self.stages

    @property
    def smem_bytes(self) -> int:
        return HEADER_BYTES + self.slots * self.stage_bytes

    @property
    def sfa_columns(self) -> int:
        return STEPS * ATOM_COLUMNS

    @property
    def sfb_columns(self) -> int:
        return STEPS * ATOM_COLUMNS * self.atoms_n

    @property
    def scale_columns(self) -> int:
        """Tensor-memory columns of a stage's scales."""
        return self.sfa_columns + self.sfb_columns

    @property
    def tmem_columns(self) -> int:
        """Columns in use. Scales have a place for every stage, so that a stage's barrier guards them too."""
        return self.accumulators * self.tile_n + self.slots * self.scale_columns

    @property
    def tmem_allocation(self) -> int:
        """The power of two, 32 or more, that is allocated."""
        return max(32, 1 << (self.tmem_columns - 1).bit_length())
