"""Operands on their way from global to shared memory: tensor maps, boxes, and where a box lands.

A box is what one copy brings: so many elements in each dimension of a tensor, wherever it begins (PTX: tensor copies).
A tensor map sees codes as bytes, since the tensor core takes them packed, and a scale atom as 256 elements of 16 bits,
since a box has at most 256 elements in a dimension. What lies outside of a tensor arrives as zeros, which add nothing.
"""

import math
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int16, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import cpasync, tcgen05

from blockscale.kernels.parts.cluster import Sharers
from blockscale.kernels.parts.geometry import ATOM_BYTES, ATOM_ROWS, CTA_ROWS, STEP_K, TILE_K, Geometry
from blockscale.kernels.parts.ring import Ring, Slot

CODE_BYTES = TILE_K // 2  # of a row in a stage
ATOM = ATOM_BYTES // 2  # elements of 16 bits

Box = tuple[int, ...]
ROWS, STEP = 0, 1  # dimensions of codes and of scales along which the boxes of a slot lie

# What L2 does with the lines that a copy touches: descriptors that createpolicy.fractional makes for all of them.
POLICIES = {None: None, "evict_first": 0x12F0000000000000, "evict_last": 0x14F0000000000000}


def boxes(g: Geometry) -> tuple[Box, Box, Box, Box]:
    """Of codes of a and b: (rows, bytes of k). Of their scales: (elements of an atom, steps of k, atoms of rows)."""
    return (
        (CTA_ROWS // g.a_boxes, CODE_BYTES),
        (g.b_rows // g.b_boxes, CODE_BYTES),
        (ATOM, g.SCALE_STEPS // g.sfa_boxes, 1),
        (ATOM, g.SCALE_STEPS // g.sfb_boxes, g.atoms_n),
    )


def code_layout(box: Box, boxes: int) -> cute.ComposedLayout:
    """(box, boxes) of codes in shared memory: rows of 128 bytes, swizzled by 128 bytes."""
    atom = tcgen05.make_smem_layout_atom(tcgen05.SmemLayoutAtomKind.K_SW128, Uint8)
    return cute.tile_to_shape(atom, (*box, boxes), order=(0, 1, 2))


def scale_layout(box: Box, boxes: int) -> cute.Layout:
    """(box, boxes) of scales in shared memory, compact."""
    return cute.make_layout((*box, boxes))


def maps(
    g: Geometry,
    codes: tuple[cute.Pointer, cute.Pointer],
    scales: tuple[cute.Pointer, cute.Pointer],
    rows: tuple[Int32, Int32],
    k: Int32,
    batches: tuple[Int32, Int32],
) -> tuple[cpasync.TmaInfo, ...]:
    """The tensor maps of a, b, scales of a, scales of b, made by the host; each pair of arguments is of (a, b)."""
    box_a, box_b, box_sfa, box_sfb = boxes(g)
    (m, n), (batch_a, batch_b) = rows, batches
    return (
        code_map(codes[0], m, k, batch_a, box_a, copy_operation(g.pair, g.a_boxes > 1)),
        code_map(codes[1], n, k, batch_b, box_b, copy_operation(g.pair, g.b_boxes > 1)),
        scale_map(scales[0], m, k, batch_a, box_sfa, copy_operation(g.pair, g.shape[1] > 1)),
        scale_map(scales[1], n, k, batch_b, box_sfb, copy_operation(g.pair, g.shape[0] > 1)),
    )


def code_map(codes: cute.Pointer, rows: Int32, k: Int32, batch: Int32, box: Box, copy: Any) -> cpasync.TmaInfo:
    """The tensor map of codes, seen as (rows, bytes of k, batch)."""
    smem = cute.select(code_layout(box, 1), mode=[0, 1])
    return cpasync.make_tiled_tma_atom(copy, code_tensor(codes, rows, k, batch), smem, box)


def code_tensor(codes: cute.Pointer, rows: Int32, k: Int32, batch: Int32) -> cute.Tensor:
    """(rows, bytes of k, batch) of codes."""
    row = k // 2
    layout = cute.make_layout((rows, row, batch), stride=(row, 1, Int64(rows) * row))
    return cute.make_tensor(cute.recast_ptr(codes, dtype=Uint8), layout)


def scale_map(scales: cute.Pointer, rows: Int32, k: Int32, batch: Int32, box: Box, copy: Any) -> cpasync.TmaInfo:
    """The tensor map of scales in the 128x4 layout, seen as (elements of an atom, steps of k, atoms of rows, batch)."""
    return cpasync.make_tiled_tma_atom(copy, scale_tensor(scales, rows, k, batch), cute.make_layout(box), box)


def scale_tensor(scales: cute.Pointer, rows: Int32, k: Int32, batch: Int32) -> cute.Tensor:
    """(elements of an atom, steps of k, atoms of rows, batch) of scales."""
    across, down = k // STEP_K, cute.ceil_div(rows, ATOM_ROWS)
    row = Int64(across) * ATOM
    layout = cute.make_layout((ATOM, across, down, batch), stride=(1, ATOM, row, row * down))
    return cute.make_tensor(cute.recast_ptr(scales, dtype=Int16), layout)


def copy_operation(pair: bool, shared: bool) -> Any:
    """Bytes are announced to the barrier of the CTA that issues for a pair; `shared`: copies go to several CTAs."""
    group = tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE
    return (cpasync.CopyBulkTensorTileG2SMulticastOp if shared else cpasync.CopyBulkTensorTileG2SOp)(group)


@dataclass(frozen=True)
class Operand:
    """A tensor map, the box that one copy brings, and the slots of shared memory that boxes go to.

    A slot is cut into as many boxes as there are CTAs in a cluster that need the same; each of these fetches one, or
    in a smaller cluster several, and what it fetches arrives in all of them.

    Args:
        smem: (box, boxes of all slots).
        boxes: of a slot. along: the dimension of the tensor along which they follow one another.
        sharers: who fetches for one another in this cluster.
        policy: what L2 is told about the lines, one of `POLICIES`.
    """

    map: cpasync.TmaInfo
    box: Box
    smem: cute.Tensor
    boxes: int
    along: int
    sharers: Sharers
    policy: int | None

    @cute.jit
    def fetch(self, corner: tuple[Int32, ...], slot: Slot, ring: Ring, turn: Int32 | None = None) -> None:
        """Starts the copies of this CTA's boxes of what begins at `corner`, in the tensor's coordinates."""
        boxes = self.boxes // self.sharers.count
        nbytes = self.boxes * math.prod(self.box) * self.smem.element_type.width // 8
        barrier = ring.copy_barrier(slot, nbytes)
        if cutlass.const_expr(isinstance(boxes, int) and boxes == 1):
            self._fetch(corner, self.sharers.rank, slot, barrier)
        else:
            for box in cutlass.range(boxes, unroll=1):
                self._fetch(corner, self.sharers.rank * boxes + box, slot, barrier)

    def _options(self):
        """What else a copy is given."""
        return {}

    def _fetch(self, corner, box, slot, barrier) -> None:
        target, source = self._partition(corner, box)
        mask = self.sharers.mask
        options = self._options() | ({} if mask is None else {"mcast_mask": Int16(mask)})
        if self.policy is not None:
            options["cache_policy"] = Int64(self.policy)
        cute.copy(self.map.atom, source, target[None, slot.index * self.boxes + box], tma_bar_ptr=barrier, **options)

    @cute.jit
    def prefetch(self, corner: tuple[Int32, ...], turn: Int32 | None = None) -> None:
        """Asks L2 for this CTA's boxes of what begins at `corner`."""
        boxes = self.boxes // self.sharers.count
        for box in cutlass.range(boxes, unroll=1):
            _, source = self._partition(corner, self.sharers.rank * boxes + box)
            cute.prefetch(self.map.atom, source)

    def _partition(self, corner, box):
        corner = tuple(at + box * self.box[i] if i == self.along else at for i, at in enumerate(corner))
        shape = self.box + (1,) * (len(corner) - len(self.box))
        gBox = cute.local_tile(cute.domain_offset(corner, self.map.tma_tensor), shape, (0,) * len(corner))
        return cpasync.tma_partition(
            self.map.atom,
            0,
            cute.make_layout(1),
            cute.group_modes(self.smem, 0, len(self.box)),
            cute.group_modes(gBox, 0, len(corner)),
        )


@dataclass(frozen=True)
class OperandInTurn(Operand):
    """An operand whose slots are not cut: of the CTAs that need the same each fetches a whole slot in its turn."""

    @cute.jit
    def fetch(self, corner: tuple[Int32, ...], slot: Slot, ring: Ring, turn: Int32 | None = None) -> None:
        """Starts the copy of what begins at `corner`, if this CTA has the turn of this number."""
        barrier = ring.copy_barrier(slot, math.prod(self.box) * self.smem.element_type.width // 8)
        if self._has(turn):
            self._fetch(corner, Int32(0), slot, barrier)

    @cute.jit
    def prefetch(self, corner: tuple[Int32, ...], turn: Int32 | None = None) -> None:
        """Asks L2 for what begins at `corner`, if this CTA has the turn."""
        _, source = self._partition(corner, Int32(0))
        if self._has(turn):
            cute.prefetch(self.map.atom, source)

    def _has(self, turn: Int32) -> Boolean | bool:
        count, rank = self.sharers.count, self.sharers.rank
        alone = isinstance(count, int) and count == 1
        return True if alone else turn & count - 1 == rank  # counts are powers of two
