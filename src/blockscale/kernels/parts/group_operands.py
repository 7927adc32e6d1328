"""Operands of groups on their way to shared memory, and what a CTA of a grouped product holds there.

A box of b is a piece of a few rows: as many are brought as the tile's group has use for. The last one may reach into
rows of the next group: their products are not stored. What a slot then has is known only in the kernel, and so are the
bytes that a barrier waits for.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Int16, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import TensorMapManager, TensorMapUpdateMode

from blockscale.kernels.parts import tma
from blockscale.kernels.parts.cluster import Cluster, Sharers
from blockscale.kernels.parts.geometry import CTA_ROWS, STEPS
from blockscale.kernels.parts.group_geometry import MOST_GROUPS, GroupGeometry
from blockscale.kernels.parts.ring import Ring, Slot
from blockscale.kernels.parts.tma import ATOM, CODE_BYTES, ROWS, Operand

MAP_BYTES = 128  # of a tensor map
ATOMS = 2  # the dimension of scales along which the boxes of a slot lie


def shared_memory(g: GroupGeometry) -> Any:
    """Barriers, the address of tensor memory, the table of groups, sums of another part of k, slots of operands.

    Raises:
        AssertionError: `GroupGeometry` counts otherwise.
    """

    @cute.struct
    class Smem:
        ab_full: cute.struct.MemRange[Int64, g.slots]
        ab_empty: cute.struct.MemRange[Int64, g.slots]
        acc_full: cute.struct.MemRange[Int64, g.accumulator_slots]
        acc_empty: cute.struct.MemRange[Int64, g.accumulator_slots]
        tmem: Int32
        total: Int32
        if g.split > 1:
            parts: cute.struct.MemRange[Int64, 2]
        firsts: cute.struct.Align[cute.struct.MemRange[Int32, MOST_GROUPS], 1024]
        rows: cute.struct.MemRange[Int32, MOST_GROUPS]
        atoms: cute.struct.MemRange[Int32, MOST_GROUPS]
        numbers: cute.struct.MemRange[Int32, MOST_GROUPS]
        tiles: cute.struct.MemRange[Int32, MOST_GROUPS]
        if g.split > 1:
            sums: cute.struct.Align[cute.struct.MemRange[Uint8, g.sums_bytes], 1024]
        a: cute.struct.Align[cute.struct.MemRange[Uint8, g.slots * g.a_bytes], 1024]
        b: cute.struct.Align[cute.struct.MemRange[Uint8, g.slots * g.b_bytes], 1024]
        sfa: cute.struct.Align[cute.struct.MemRange[Int16, g.slots * g.sfa_bytes // 2], 1024]
        sfb: cute.struct.Align[cute.struct.MemRange[Int16, g.slots * g.sfb_bytes // 2], 1024]

    if Smem.size_in_bytes() != g.smem_used:
        raise AssertionError(f"shared memory: {Smem.size_in_bytes()} bytes, not {g.smem_used}")
    return SmemAllocator().allocate(Smem)


class OperandRing(Ring):
    """Slots whose bytes differ from tile to tile."""

    def expect(self, slot: Slot, nbytes: Int32) -> None:
        """The producer's arrival at `full`, which announces so many bytes of copies."""
        self.traced["fills"] += 1
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + slot.index, nbytes)

    def barrier(self, slot: Slot) -> cute.Pointer:
        """Where copies into this CTA's slot report to, as do those of the other CTA of a pair."""
        return self.full + slot.index


def operand_ring(g: GroupGeometry, smem: Any, cluster: Cluster) -> OperandRing:
    """Slots of k tiles, from the load to the mma warp. In a pair the first CTA's barriers count for both."""
    return OperandRing(
        "ab",
        smem.ab_full.data_ptr(),
        smem.ab_empty.data_ptr(),
        g.slots,
        fills=1,
        empties=1,
        group=g.ctas,
        empty_mask=None if cluster.alone else cluster.senders,
    )


@dataclass(frozen=True)
class Run:
    """Boxes of an operand that follow one another.

    Args:
        start: the row of codes, or the atom of rows of scales, of `matrix` at which they begin. count: of them.
        place: the first one's in a slot.
    """

    start: Int32
    matrix: Int32
    count: int | Int32
    place: int


@dataclass(frozen=True)
class Pieces(Operand):
    """An operand of which runs of boxes are brought.

    Args:
        at: the address of a tensor map in global memory that stands for `map`'s own, None for that one.
    """

    at: cute.Pointer | None = None

    def of(self, at: cute.Pointer) -> "Pieces":
        """The same of another tensor, whose map is at that address; by a whole warp."""
        cpasync.fence_tma_desc_acquire(at)
        return replace(self, at=at)

    def _options(self) -> dict[str, Any]:
        if self.at is None:
            return {}
        maps = TensorMapManager(TensorMapUpdateMode.SMEM, MAP_BYTES)
        return {"tma_desc_ptr": maps.get_tensormap_ptr(self.at, cute.AddressSpace.generic)}

    def nbytes(self, runs: list[Run]) -> int | Int32:
        """Of all boxes."""
        return math.prod(self.box) * self.smem.element_type.width // 8 * sum(run.count for run in runs)

    @cute.jit
    def fetch_run(self, run, k_tile, slot, ring):
        """Starts the copies of a k tile."""
        start = run.start - run.place * self.box[self.along]  # of what would be the slot's first box
        corner = (start, k_tile * CODE_BYTES, run.matrix)
        if cutlass.const_expr(self.along == ATOMS):
            corner = (0, k_tile * STEPS, start, run.matrix)
        if cutlass.const_expr(isinstance(run.count, int) and run.count == 1):
            self._fetch(corner, run.place, slot, ring.barrier(slot))
        else:
            for box in cutlass.range(run.count, unroll=1):
                self._fetch(corner, run.place + box, slot, ring.barrier(slot))


def boxes(g: GroupGeometry) -> tuple[tma.Box, tma.Box, tma.Box]:
    """Of codes of a and b, and of scales; see `tma.boxes`."""
    return (CTA_ROWS, CODE_BYTES), (g.piece, CODE_BYTES), (ATOM, STEPS, 1)


def maps(
    g: GroupGeometry,
    codes: tuple[cute.Pointer, cute.Pointer],
    scales: tuple[cute.Pointer, cute.Pointer],
    rows: tuple[Int32, Int32],
    scale_rows: tuple[Int32, Int32],
    k: Int32,
    batches: tuple[Int32, Int32],
) -> Any:
    """The tensor maps of a, b, scales of a, scales of b, made by the host; each pair of arguments is of (a, b).

    rows: of a matrix of codes. scale_rows: of a matrix of scales, before they are rounded up to whole atoms.
    """
    box_a, box_b, box_scales = boxes(g)
    copy = tma.copy_operation(g.pair, False)
    return (
        tma.code_map(codes[0], rows[0], k, batches[0], box_a, copy),
        tma.code_map(codes[1], rows[1], k, batches[1], box_b, copy),
        tma.scale_map(scales[0], scale_rows[0], k, batches[0], box_scales, copy),
        tma.scale_map(scales[1], scale_rows[1], k, batches[1], box_scales, copy),
    )


def operands(g: GroupGeometry, smem: Any, maps: Any, policies: Any) -> tuple[Pieces, ...]:
    """a, b, scales of a, scales of b."""
    box_a, box_b, box_scales = boxes(g)
    a, b = tma.code_layout(box_a, g.slots * g.panels), tma.code_layout(box_b, g.slots * g.pieces)
    slots_a, slots_b = (x.get_tensor(y.outer, swizzle=y.inner) for x, y in ((smem.a, a), (smem.b, b)))
    slots_sfa = smem.sfa.get_tensor(tma.scale_layout(box_scales, g.slots * g.panels))
    slots_sfb = smem.sfb.get_tensor(tma.scale_layout(box_scales, g.slots * g.atoms_n))
    alone = Sharers(1, 0, None)
    return (
        Pieces(maps[0], box_a, slots_a, g.panels, ROWS, alone, policies[0]),
        Pieces(maps[1], box_b, slots_b, g.pieces, ROWS, alone, policies[1]),
        Pieces(maps[2], box_scales, slots_sfa, g.panels, ATOMS, alone, policies[2]),
        Pieces(maps[3], box_scales, slots_sfb, g.atoms_n, ATOMS, alone, policies[2]),
    )
