"""Operands on their way from global to shared memory: tensor maps, boxes, and where a box lands.

A box is what one copy brings: so many elements in each dimension of a tensor, wherever it begins (PTX: tensor copies).
A tensor map sees codes as bytes, since the tensor core takes them packed, and a scale atom as 256 elements of 16 bits,
since a box has at most 256 elements in a dimension. What lies outside of a tensor arrives as zeros, which add nothing.
"""

import math
from dataclasses import dataclass

from cutlass import Int16, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import cpasync, tcgen05

from blockscale.kernels.parts.geometry import ATOM_BYTES, ATOM_ROWS, STEP_K, STEPS, TILE_K
from blockscale.kernels.parts.ring import Ring, Slot

CODE_BYTES = TILE_K // 2  # of a row in a stage
ATOM = ATOM_BYTES // 2  # elements of 16 bits

Box = tuple[int, ...]


def code_box(rows: int) -> Box:
    return rows, CODE_BYTES


def scale_box(atoms: int) -> Box:
    """(elements of an atom, steps of k, atoms of rows)"""
    return ATOM, STEPS, atoms


def code_layout(rows: int, slots: int) -> cute.ComposedLayout:
    """(box, slots) of codes in shared memory: rows of 128 bytes, swizzled by 128 bytes."""
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, Uint8)
    return cute.tile_to_shape(atom, (*code_box(rows), slots), order=(0, 1, 2))


def scale_layout(atoms: int, slots: int) -> cute.Layout:
    """(box, slots) of scales in shared memory, compact."""
    return cute.make_layout((*scale_box(atoms), slots))


def code_map(codes: cute.Pointer, rows: Int32, k: Int32, batch: Int32, box_rows: int) -> cpasync.TmaInfo:
    """The tensor map of codes, seen as (rows, bytes of k, batch)."""
    row = k // 2
    layout = cute.make_layout((rows, row, batch), stride=(row, 1, Int64(rows) * row))
    tensor = cute.make_tensor(cute.recast_ptr(codes, dtype=Uint8), layout)
    smem = cute.select(code_layout(box_rows, 1), mode=[0, 1])
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, smem, code_box(box_rows))


def scale_map(scales: cute.Pointer, rows: Int32, k: Int32, batch: Int32, box_atoms: int) -> cpasync.TmaInfo:
    """The tensor map of scales in the 128x4 layout, seen as (elements of an atom, steps of k, atoms of rows, batch)."""
    across, down = k // STEP_K, cute.ceil_div(rows, ATOM_ROWS)
    row = Int64(across) * ATOM
    layout = cute.make_layout((ATOM, across, down, batch), stride=(1, ATOM, row, row * down))
    tensor = cute.make_tensor(cute.recast_ptr(scales, dtype=Int16), layout)
    smem = cute.make_layout(scale_box(box_atoms))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, smem, scale_box(box_atoms))


@dataclass(frozen=True)
class Operand:
    """A tensor map, the box that one copy brings, and the slots of shared memory, (box, slots), that boxes go to."""

    map: cpasync.TmaInfo
    box: Box
    smem: cute.Tensor

    def fetch(self, corner: tuple[Int32, ...], slot: Slot, ring: Ring) -> None:
        """Starts the copy of the box at `corner`, in the tensor's coordinates, to a slot of the ring."""
        box = self.box + (1,) * (len(corner) - len(self.box))
        gBox = cute.local_tile(cute.domain_offset(corner, self.map.tma_tensor), box, (0,) * len(corner))
        target, source = cpasync.tma_partition(
            self.map.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(self.smem, 0, len(self.box)),
            cute.group_modes(gBox, 0, len(corner)),
        )
        barrier = ring.copy_barrier(slot, math.prod(self.box) * self.smem.element_type.width // 8)
        cute.copy(self.map.atom, source, target[None, slot.index], tma_bar_ptr=barrier)
