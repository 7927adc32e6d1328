"""What the tensor core does with a slot of a grouped product: instructions as wide as the tile's group needs."""

from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Int32, cute
from cutlass.experimental import primitives as ptx

from blockscale.kernels.parts.geometry import ATOM_COLUMNS, CTA_ROWS, STEPS, TILE_K
from blockscale.kernels.parts.group_geometry import GroupGeometry
from blockscale.kernels.parts.ring import GROUPS
from blockscale.kernels.parts.tensorcore import (
    ATOM_UNITS,
    STEP_UNITS,
    UNIT,
    TensorCore,
    code_descriptor,
    instruction_descriptor,
    scale_descriptor,
    tmem,
)

LINE_UNITS = TILE_K // 2 // UNIT  # of a row of codes
PANEL_UNITS = CTA_ROWS * LINE_UNITS  # of a panel of a


@dataclass(frozen=True)
class GroupCore(TensorCore):
    """As `TensorCore`, which says what orders copies and products; its geometry is a `GroupGeometry`."""

    @staticmethod
    def of(geometry: GroupGeometry, smem: Any, tmem: Int32) -> "GroupCore":
        return GroupCore(
            geometry,
            code_descriptor(smem.a.data_ptr()),
            code_descriptor(smem.b.data_ptr()),
            scale_descriptor(smem.sfa.data_ptr()),
            scale_descriptor(smem.sfb.data_ptr()),
            tmem,
        )

    @cute.jit
    def copy_atoms(self, slot, scales, atoms):
        """The slot's scales to the columns of set `scales`: those of a, and of b so many atoms of rows."""
        g = self.geometry
        columns_a, columns_b = self.scale_columns(scales)
        sfa, sfb = self.sfa + slot * (g.sfa_bytes // UNIT), self.sfb + slot * (g.sfb_bytes // UNIT)
        with cute.arch.elect_one():
            for step in range(g.panels * STEPS):
                self._copy_atom(columns_a + step * ATOM_COLUMNS, sfa + step * ATOM_UNITS)
        for atom in range(g.atoms_n):
            if atom < atoms:
                with cute.arch.elect_one():
                    for step in range(STEPS):
                        column = columns_b + (step * g.atoms_n + atom) * ATOM_COLUMNS
                        self._copy_atom(column, sfb + (atom * STEPS + step) * ATOM_UNITS)

    @cute.jit
    def multiply_part(self, slot, scales, sums, place, part, width, accumulate):
        """Of the accumulator of number `sums`, the columns from `part` on, `width` of them, in every panel.

        Args:
            place: 32 rows of b that lie before the tile in its first atom of scales.
        """
        g = self.geometry
        columns_a, columns_b = self.scale_columns(scales)
        columns_b = columns_b + place + part // 32
        a, b = self.a + slot * (g.a_bytes // UNIT), self.b + slot * (g.b_bytes // UNIT) + part // g.ctas * LINE_UNITS
        first = self.tmem + sums * g.accumulator_stride + part
        with cute.arch.elect_one():
            for panel in range(g.panels):
                for step in range(STEPS):
                    ptx.tcgen05_mma_block_scale(
                        "mxf4nvf4",
                        GROUPS[g.ctas],
                        tmem(first + panel * g.tile_n),
                        a + panel * PANEL_UNITS + step * STEP_UNITS,
                        b + step * STEP_UNITS,
                        instruction_descriptor(g.tile[0], width),
                        accumulate if step == 0 else Boolean(True),
                        tmem(columns_a + (panel * STEPS + step) * ATOM_COLUMNS),
                        tmem(columns_b + step * g.atoms_n * ATOM_COLUMNS),
                        scale_vec_size=ptx.Tcgen05MMAScaleVecSize.BLOCK16,
                    )
