"""What a CTA of sm_120a holds while it runs: shared memory, the rings in it, and where operands come to."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int16, Int32, Int64, Int128, Uint8, cute
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.memory import SmemAllocator

from blockscale.kernels.parts import tma
from blockscale.kernels.parts.cluster import Cluster, Sharers
from blockscale.kernels.parts.exchange import Exchange
from blockscale.kernels.parts.ring import Ring
from blockscale.kernels.parts.schedule import RESPONSE_BYTES, RESPONSE_SLOTS, RequestedTiles, Tiles, Work
from blockscale.kernels.parts.tma import Box, Operand
from blockscale.kernels.parts.warptile import WarpTile

SWIZZLES = {64: tcgen05.SmemLayoutAtomKind.K_SW64, 128: tcgen05.SmemLayoutAtomKind.K_SW128}
ALONE = Sharers(1, 0, None)


def shared_memory(g: WarpTile, requests: bool) -> Any:
    """Barriers, answers to requests, sums for other CTAs, slots of operands.

    Raises:
        AssertionError: `WarpTile` counts otherwise.
    """

    @cute.struct
    class Smem:
        ab_full: cute.struct.MemRange[Int64, g.slots]
        ab_empty: cute.struct.MemRange[Int64, g.slots]
        turns: cute.struct.MemRange[Int64, 2]
        parts_ready: cute.struct.MemRange[Int64, 2]
        if requests:
            answer_full: cute.struct.MemRange[Int64, RESPONSE_SLOTS]
            answer_empty: cute.struct.MemRange[Int64, RESPONSE_SLOTS]
            answers: cute.struct.Align[cute.struct.MemRange[Int128, RESPONSE_SLOTS], RESPONSE_BYTES]
        if g.parts_bytes:
            parts: cute.struct.Align[cute.struct.MemRange[Uint8, g.parts_bytes], 1024]
        a: cute.struct.Align[cute.struct.MemRange[Uint8, g.slots * g.a_bytes], 1024]
        b: cute.struct.Align[cute.struct.MemRange[Uint8, g.slots * g.b_bytes], 512]
        sfa: cute.struct.Align[cute.struct.MemRange[Int16, g.slots * g.sfa_bytes // 2], 512]
        sfb: cute.struct.Align[cute.struct.MemRange[Int16, g.slots * g.sfb_bytes // 2], 512]

    if Smem.size_in_bytes() > g.smem_bytes:
        raise AssertionError(f"shared memory: {Smem.size_in_bytes()} bytes, not {g.smem_bytes}")
    return SmemAllocator().allocate(Smem, byte_alignment=1024)


def operand_ring(g: WarpTile, smem: Any) -> Ring:
    """Slots of k tiles, from the load warp to the warps of one group, which has a tile to itself."""
    full, empty = smem.ab_full.data_ptr(), smem.ab_empty.data_ptr()
    return Ring("ab", full, empty, g.slots, fills=1, empties=g.group_warps, copied=g.stage_bytes)


def answer_ring(g: WarpTile, smem: Any) -> Ring:
    """Answers to requests for tiles: read by every warp, also of tiles of the other group, once each."""
    ways = 1 if g.groups == 1 else 3  # that the role of the warps that multiply has of reading one
    return Ring(
        "answers",
        smem.answer_full.data_ptr(),
        smem.answer_empty.data_ptr(),
        RESPONSE_SLOTS,
        fills=1,
        empties=2 + ways * g.group_warps,
        copied=RESPONSE_BYTES,
        total=2 + g.consumers,
    )


@dataclass(frozen=True)
class SplitTiles(Tiles):
    """The static schedule where `split` CTAs, a cluster, share each tile."""

    split: int

    def after(self, work: Work) -> Work:
        x = work.x + cute.arch.grid_dim()[0]
        return Work(x, work.y, x < self.count * self.split, None, work.warps)

    def at(self, work: Work) -> tuple[Int32, Int32, Int32]:
        return super().at(Work(work.x // self.split, work.y, work.valid))


def tiles(g: WarpTile, smem: Any, order: tuple[Any, ...], requests: bool) -> Tiles:
    """Of `order`, the first arguments of `Tiles`, by the static or the dynamic schedule."""
    if g.split > 1:
        return SplitTiles(*order, g.split)
    if not requests:
        return Tiles(*order)
    cluster = Cluster(1, 1, 0, 0, 1)
    return RequestedTiles(*order, cluster, answer_ring(g, smem), smem.answers.data_ptr())


def exchange(g: WarpTile, smem: Any) -> Exchange | None:
    """Of sums, where CTAs share a tile."""
    if g.split == 1:
        return None
    barriers, buffer = smem.parts_ready.data_ptr().toint(), smem.parts.data_ptr().toint()
    return Exchange(
        barriers, buffer, g.split, g.group_warps, cute.arch.block_idx_in_cluster(), cute.arch.thread_idx()[0]
    )


def part(g: WarpTile, k_tiles: Int32) -> tuple[Int32, Int32]:
    """(the first, how many) of a tile's k tiles that this CTA has."""
    if g.split == 1:
        return Int32(0), k_tiles
    rank = cute.arch.block_idx_in_cluster()
    each, more = k_tiles // g.split, k_tiles % g.split
    return rank * each + cutlass.min(rank, more), each + Int32(rank < more)


def boxes(g: WarpTile) -> tuple[Box, Box, Box, Box]:
    """Of codes of a and b: (rows, bytes of k). Of their scales: (elements of an atom, steps of k, atoms of rows)."""
    codes = (g.rows // g.a_boxes, g.code_bytes), (g.columns // g.b_boxes, g.code_bytes)
    scales = ((side.step_bytes // 2, g.steps, side.atoms) for side in (g.m, g.n))
    return *codes, *scales


def code_layout(box: Box, slots: int) -> cute.ComposedLayout:
    """(box, slots) of codes in shared memory, swizzled by the length of a row."""
    atom = tcgen05.make_smem_layout_atom(SWIZZLES[box[1]], Uint8)
    return cute.tile_to_shape(atom, (*box, slots), order=(0, 1, 2))


def code_map(codes: cute.Pointer, rows: Int32, k: Int32, batch: Int32, box: Box) -> cpasync.TmaInfo:
    """The tensor map of codes, seen as (rows, bytes of k, batch)."""
    row = k // 2
    layout = cute.make_layout((rows, row, batch), stride=(row, 1, Int64(rows) * row))
    tensor = cute.make_tensor(cute.recast_ptr(codes, dtype=Uint8), layout)
    smem = cute.select(code_layout(box, 1), mode=[0, 1])
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, smem, box)


def maps(
    g: WarpTile,
    codes: tuple[cute.Pointer, cute.Pointer],
    scales: tuple[cute.Pointer, cute.Pointer],
    rows: tuple[Int32, Int32],
    k: Int32,
    batches: tuple[Int32, Int32],
) -> tuple[cpasync.TmaInfo, ...]:
    """The tensor maps of a, b, scales of a, scales of b, made by the host; each pair of arguments is of (a, b)."""
    box_a, box_b, box_sfa, box_sfb = boxes(g)
    copy = cpasync.CopyBulkTensorTileG2SOp()
    return (
        code_map(codes[0], rows[0], k, batches[0], box_a),
        code_map(codes[1], rows[1], k, batches[1], box_b),
        tma.scale_map(scales[0], rows[0], k, batches[0], box_sfa, copy),
        tma.scale_map(scales[1], rows[1], k, batches[1], box_sfb, copy),
    )


def operands(g: WarpTile, smem: Any, maps: Any, policies: Any) -> tuple[Operand, ...]:
    """a, b, scales of a, scales of b."""
    box_a, box_b, box_sfa, box_sfb = boxes(g)
    a, b = code_layout(box_a, g.slots * g.a_boxes), code_layout(box_b, g.slots * g.b_boxes)
    slots_a, slots_b = (x.get_tensor(y.outer, swizzle=y.inner) for x, y in ((smem.a, a), (smem.b, b)))
    slots_sfa = smem.sfa.get_tensor(tma.scale_layout(box_sfa, g.slots))
    slots_sfb = smem.sfb.get_tensor(tma.scale_layout(box_sfb, g.slots))
    return (
        Operand(maps[0], box_a, slots_a, g.a_boxes, tma.ROWS, ALONE, policies[0]),
        Operand(maps[1], box_b, slots_b, g.b_boxes, tma.ROWS, ALONE, policies[1]),
        Operand(maps[2], box_sfa, slots_sfa, 1, tma.STEP, ALONE, policies[2]),
        Operand(maps[3], box_sfb, slots_sfb, 1, tma.STEP, ALONE, policies[2]),
    )
