"""The sizes of a tile of a grouped product on sm_100a, beside those of `Geometry`.

Pure arithmetic, without the compiler, so that whoever chooses a configuration can ask before anything is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from blockscale.kernels.parts.geometry import ATOM_BYTES, CTA_ROWS, STEPS, TILE_K, TMEM_COLUMNS, Geometry, Shape

MOST_GROUPS = 512  # of a launch
TABLE_BYTES = 5 * 4 * MOST_GROUPS  # of shared memory: five numbers a group, see parts/groups.py
INSTRUCTION_COLUMNS = 256  # the most that one instruction multiplies
WIDTHS = (*range(32, INSTRUCTION_COLUMNS + 1, 32), 384)  # of a tile; the last one takes two instructions
PIECES = (64, 32, 16, 8)  # rows of a box of b


@dataclass(frozen=True)
class GroupGeometry(Geometry):
    """A tile of a group: of b, only so many columns are loaded and multiplied as the group has.

    Args:
        panels: pieces of a of 128 rows that a CTA multiplies by the same piece of b: with 2, those of a gate and those
            of what it is multiplied by.
        split: parts of k that a tile is computed in, 1 or 2, each by a CTA or a pair of its own, all in a cluster.
    """

    staging: int = field(default=0, init=False)
    panels: int = 1
    split: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "staging", TABLE_BYTES + self.sums_bytes)

    @property
    def shape(self) -> Shape:
        """The cluster's: parts of k lie along x too."""
        return self.ctas * self.split, 1

    @property
    def sums_bytes(self) -> int:
        """Room for what the other part hands over: half of a tile's columns, up to whole sixteens, in fp32."""
        return 0 if self.split == 1 else -(-self.tile_n // 32) * 16 * CTA_ROWS * 4

    @property
    def piece(self) -> int:
        """Rows of b that one copy brings to a CTA."""
        return next(rows for rows in PIECES if all(columns // self.ctas % rows == 0 for _, columns in self.parts))

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(first column, columns) that an instruction multiplies."""
        starts = range(0, self.tile_n, INSTRUCTION_COLUMNS)
        return tuple((first, min(INSTRUCTION_COLUMNS, self.tile_n - first)) for first in starts)

    @property
    def pieces(self) -> int:
        """Boxes of b's codes in a slot."""
        return self.b_rows // self.piece

    @property
    def a_bytes(self) -> int:
        return self.panels * CTA_ROWS * TILE_K // 2

    @property
    def sfa_bytes(self) -> int:
        return self.panels * STEPS * ATOM_BYTES

    @property
    def sfa_columns(self) -> int:
        """All steps of the first panel, then those of the second."""
        return self.panels * super().sfa_columns

    @property
    def sum_columns(self) -> int:
        """Of an accumulator: those of each panel."""
        return self.panels * self.tile_n

    @property
    def scale_slots_that_fit(self) -> int:
        return max(0, (TMEM_COLUMNS - self.accumulators * self.sum_columns) // self.scale_columns)

    @property
    def overlap(self) -> int:
        return 0

    @property
    def accumulator_stride(self) -> int:
        return self.sum_columns

    @property
    def accumulator_columns(self) -> int:
        return self.accumulators * self.sum_columns
