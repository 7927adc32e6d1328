"""K = 96 instructions of sm_103a: descriptors, and a slot of scales with the two instructions that take it."""

from dataclasses import dataclass
from typing import Any

from cutlass import Boolean, Int32, Int64, Uint32, cute
from cutlass.experimental import primitives as ptx

from blockscale.kernels.parts.geometry import ATOM_COLUMNS, ATOM_ROWS
from blockscale.kernels.parts.geometry96 import STEP96_K, Geometry96
from blockscale.kernels.parts.ring import GROUPS
from blockscale.kernels.parts.tensorcore import (
    ATOM_UNITS,
    SWIZZLE_128B,
    UNIT,
    TensorCore,
    instruction_descriptor,
    scale_descriptor,
    tmem,
)

ROW_UNITS = 128 // UNIT  # of a row of codes in a slot
STEP96_UNITS = STEP96_K // 2 // UNIT
ID = 2  # of scales that begin in the middle of a word: the byte (PTX: scale factor id)


def instruction_descriptor_96(m: int, n: int, second: bool) -> int:
    """m x n x 96; `second` of two that share three atoms of scales, of which it takes the last six blocks of twelve."""
    bits = instruction_descriptor(m, n) | 1 << 31
    bits |= (ID << 4 | ID << 29) if second else 0
    return bits - (1 << 32)  # as a signed integer


def begins(step: int) -> int:
    """In which of three slots the `step`-th instruction of eight begins."""
    return step * STEP96_UNITS // ROW_UNITS


@dataclass(frozen=True)
class TensorCore96(TensorCore):
    """As `TensorCore`; the descriptors of codes are without an address where rows go on."""

    geometry: Geometry96

    @staticmethod
    def of(geometry: Geometry96, smem: Any, tmem: Int32) -> "TensorCore96":
        return TensorCore96(
            geometry,
            code_descriptor(smem.a.data_ptr()),
            code_descriptor(smem.b.data_ptr()),
            scale_descriptor(smem.sfa.data_ptr()),
            scale_descriptor(smem.sfb.data_ptr()),
            tmem,
        )

    def codes(self, slot: Int32, following: Int32) -> tuple[Int64, Int64]:
        """The descriptors of a slot of codes of a and b; rows go on in slot `following`."""
        g = self.geometry
        a = _codes(self.a, g.a_bytes // UNIT, slot, following)
        if g.a_bytes != g.b_bytes:
            return a, _codes(self.b, g.b_bytes // UNIT, slot, following)
        apart = g.slots * g.a_bytes // UNIT  # slots of b come after those of a, and are as large
        return a, a + (apart << 16 | apart)

    def copy_scales(self, slot: Int32, scales: Int32) -> None:
        """As that of `TensorCore`; by the elected thread. Atoms of the same rows are as far apart as the instruction
        has it: by four columns where a tile has rows of one atom, otherwise by eight."""
        g = self.geometry
        columns_a, columns_b = self.scale_columns(scales)
        sfa, sfb = self.sfa + slot * (g.sfa_bytes // UNIT), self.sfb + slot * (g.sfb_bytes // UNIT)
        for step in range(g.SCALE_STEPS):
            self._copy_atom(columns_a + step * ATOM_COLUMNS, sfa + step * ATOM_UNITS)
            for atom in range(g.atoms_n):
                source = sfb + (atom * g.SCALE_STEPS + step) * ATOM_UNITS
                self._copy_atom(columns_b + (step * g.atoms_n + atom) * ATOM_COLUMNS, source)

    def multiply(
        self, step: int, codes: tuple[Int64, Int64], scales: Int32, sums: Int32, tile: Int32, accumulate: Boolean | bool
    ) -> None:
        """The `step`-th instruction of eight, where `codes` describe the slot that it begins in; by the elected thread.
        See `TensorCore`."""
        g, second, start = self.geometry, step % 2, step * STEP96_UNITS % ROW_UNITS
        columns_a, columns_b = self.scale_columns(scales)
        if g.repeats:
            columns_b += tile * g.tile_n % ATOM_ROWS // 32
        half = (ID << 30) - (1 << 32) if second else 0  # in an address too, as a signed integer
        ptx.tcgen05_mma_block_scale(
            "mxf4nvf4",
            GROUPS[g.ctas],
            tmem(self.tmem + sums * g.accumulator_stride),
            codes[0] + start,
            codes[1] + start,
            instruction_descriptor_96(*g.tile, bool(second)),
            accumulate,
            tmem(columns_a + second * ATOM_COLUMNS | half),
            tmem(columns_b + second * g.atoms_n * ATOM_COLUMNS | half),
            scale_vec_size=ptx.Tcgen05MMAScaleVecSize.BLOCK16,
        )


def code_descriptor(codes: cute.Pointer) -> Int64:
    """As in `tensorcore`, for a slot whose rows go on in another one (PTX: absolute leading dimension address)."""
    return Int64(
        ptx.Tcgen05SmemDesc.build(codes.toint(), stride_byte_offset=1024, layout=SWIZZLE_128B, leading_dim_mode=1)
    )


def _codes(first: Int64, units: int, slot: Int32, following: Int32) -> Int64:
    """The descriptor of a slot, slots being so many units apart, from that of the first one."""
    begin = Uint32(first)
    low = begin + Uint32(slot * units) + (begin + Uint32(following * units) << 16)
    return first & ~0xFFFFFFFF | Int64(low)
