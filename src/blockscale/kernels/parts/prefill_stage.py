"""What the kernel for many tokens has in shared memory, the tiles of its CTAs, and the roles that bring operands.

kernels/sm90_prefill.py says how roles and rings belong together.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int16, Int32, Int64, Uint8, Uint32, cute
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from blockscale.formats.fragment import CODE_BYTES, DEPTH, ROWS, UNIT_BYTES
from blockscale.kernels.parts import async_copies
from blockscale.kernels.parts.hopper_memory import GROUPS_HEAD, exchange_bytes, kept_sums, of_prefill, tile_bytes
from blockscale.kernels.parts.ring import Ring

GROUP, WARP = 4, 32  # warps of a warpgroup, threads of a warp
HALF = DEPTH // 2  # k of a box, 128 bytes of a row


@dataclass(frozen=True)
class Context:
    """What the roles share."""

    warp: Int32
    lane: Int32
    size: tuple[Int32, Int32, Int32]  # m, n, k
    weights: Int64  # where those of the first tile of rows begin
    rank: Int32  # in the cluster
    first: Int32  # unit of the CTA's part of k
    count: Int32  # of units
    cluster: Int32
    clusters: Int32  # of the launch
    tiles: Int32  # that clusters compute
    activations: Ring
    rows: Ring  # of weights
    sums: Ring | None  # of another CTA, where k is split
    map: cpasync.TmaInfo
    smem: Any


def quotient(x: Int32, y: Int32) -> Int32:
    """Of numbers that are not negative, which takes fewer instructions."""
    return Int32(Uint32(x) // Uint32(y))


class Stage:
    """Of one configuration; arguments as those of `Sm90PrefillGemm`."""

    def __init__(self, tokens, row_groups, share, split, buffers, depth, most, group, dtype):
        self.tokens, self.share, self.split, self.buffers, self.depth = tokens, share, split, buffers, depth
        self.most, self.group, self.dtype = most, group, dtype
        self.warps = GROUP * row_groups
        self.rows = ROWS * self.warps
        self.ctas = share * split
        self.kept = kept_sums(tokens)
        self.tile_bytes = tile_bytes(tokens, self.warps, split)
        self.smem_bytes = of_prefill(tokens, self.warps, split, buffers, depth)

    def shared_memory(self):
        @cute.struct
        class Smem:
            full: cute.struct.MemRange[Int64, self.buffers]
            empty: cute.struct.MemRange[Int64, self.buffers]
            rows_full: cute.struct.MemRange[Int64, self.depth]
            rows_empty: cute.struct.MemRange[Int64, self.depth]
            sums: cute.struct.MemRange[Int64, 2]
            alpha: cute.struct.MemRange[Float32, 2]
            body: cute.struct.Align[cute.struct.MemRange[Uint8, self.smem_bytes - GROUPS_HEAD], GROUPS_HEAD]

        if Smem.size_in_bytes() != self.smem_bytes:
            raise AssertionError(f"shared memory: {Smem.size_in_bytes()} bytes, not {self.smem_bytes}")
        return SmemAllocator().allocate(Smem)

    def activation_ring(self, smem):
        full, empty = smem.full.data_ptr(), smem.empty.data_ptr()
        copied, total = self.tokens * HALF * 2, self.warps * self.share
        return Ring("activations", full, empty, self.buffers, fills=1, empties=self.warps, copied=copied, total=total)

    def weight_ring(self, smem):
        full, empty = smem.rows_full.data_ptr(), smem.rows_empty.data_ptr()
        return Ring("weights", full, empty, self.depth, fills=1, empties=self.warps, copied=self.warps * UNIT_BYTES)

    def sum_ring(self, smem):
        if self.split == 1:
            return None
        barriers, copied = smem.sums.data_ptr(), exchange_bytes(self.tokens, self.warps, self.split)
        return Ring("sums", barriers, barriers + 1, 1, fills=1, empties=0, copied=copied, total=1)

    def units(self, c, slot):
        """Where a slot's weights are."""
        first = self.tile_bytes + self.buffers * self.tokens * HALF * 2
        return c.smem.body.data_ptr().toint() + first + slot.index * (self.warps * UNIT_BYTES)

    def boxes(self, count, share=1):
        """(tokens / share, k, count x share boxes) of activations in shared memory."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, (self.tokens // share, HALF, count * share), order=(0, 1, 2))

    def box_tensor(self, c, share=1):
        first = c.smem.body.data_ptr().toint() + self.tile_bytes
        pointer = cute.make_ptr(self.dtype, first, cute.AddressSpace.smem, assumed_align=1024)
        layout = self.boxes(self.buffers, share)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner), layout.outer)

    def tiles(self, m, n, blocks):
        """Of the launch; without turns, of a row of its grid."""
        if self.most is None:
            return blocks // self.ctas
        return cute.ceil_div(n, self.rows * self.share) * cute.ceil_div(m, self.tokens)

    @cute.jit
    def place(self, c, index):
        """Of the tile of this number: the first token, and this CTA's block of rows."""
        m, n, _ = c.size
        _, row, _ = cute.arch.block_idx()
        block = index
        if cutlass.const_expr(self.most is not None):
            along, across = cute.ceil_div(m, self.tokens), cute.ceil_div(n, self.rows * self.share)
            band = quotient(index, self.group * along)
            width = cutlass.min(across - band * self.group, self.group)
            within = index - band * (self.group * along)
            row = quotient(within, width)
            block = band * self.group + within - row * width
        return row * self.tokens, block * self.share + c.rank // self.split

    @cute.jit
    def take(self, c, slot, rUnit):
        """The lane's words of its warp's next unit: 8 of codes, 4 of scales."""
        c.rows.wait_full(slot)
        at = self.units(c, slot) + c.warp * UNIT_BYTES
        parts = at + c.lane * 16, at + c.lane * 16 + CODE_BYTES // 2, at + CODE_BYTES + c.lane // 4 * 16
        for i, part in enumerate(parts):
            for j, word in enumerate(async_copies.load_16(part)):
                rUnit[4 * i + j] = word

    @cute.jit
    def release(self, activations, slot):
        if cutlass.const_expr(self.share > 1):
            activations.arrive_empty_in(slot, range(self.warps), self.share)
        else:
            activations.arrive_empty(slot, range(self.warps))

    @cute.jit
    def fetch(self, c):
        """Halves of units of activations, in the order in which the CTA multiplies them."""
        activations = c.activations
        slot, again = activations.producer(), activations.again()
        index = c.cluster
        while index < c.tiles:
            token, _ = self.place(c, index)
            for unit in cutlass.range(c.count, unroll=1):
                self.fetch_box(c, activations, slot, token, (c.first + unit) * DEPTH)
                slot = slot.next()
                self.fetch_box(c, again, slot, token, (c.first + unit) * DEPTH + HALF)
                slot = slot.next()
            index += c.clusters

    @cute.jit
    def fetch_weights(self, c):
        """Units of weights in the same order, a lane those of a warp."""
        rows, slot = c.rows, c.rows.producer()
        index = c.cluster
        while index < c.tiles:
            _, block = self.place(c, index)
            tile = cutlass.min(block * self.warps + c.lane, cute.ceil_div(c.size[1], ROWS) - 1)
            at = c.weights + Int64(tile) * (cute.ceil_div(c.size[2], DEPTH) * UNIT_BYTES)
            for _ in cutlass.range(c.count, unroll=1):
                rows.wait_empty(slot)
                rows.expect_copies(slot)
                cute.arch.sync_warp()
                barrier = rows.copy_barrier(slot, self.warps * UNIT_BYTES)
                if c.lane < self.warps:
                    target = self.units(c, slot) + c.lane * UNIT_BYTES
                    async_copies.copy_bulk(target, at, Int32(UNIT_BYTES), barrier.toint())
                at += UNIT_BYTES
                slot = slot.next()
            index += c.clusters

    @cute.jit
    def fetch_box(self, c, activations, slot, token, k):
        """This CTA's part of a box of activations, to all that share them."""
        shape = self.tokens // self.share, HALF
        rank = c.rank if cutlass.const_expr(self.share > 1) else 0
        activations.wait_empty(slot)
        activations.expect_copies(slot)
        corner = token + rank * shape[0], k
        gBox = cute.local_tile(cute.domain_offset(corner, c.map.tma_tensor), shape, (0, 0))
        boxes = cute.group_modes(self.box_tensor(c, self.share), 0, 2)
        target, source = cpasync.tma_partition(c.map.atom, 0, cute.make_layout(1), boxes, cute.group_modes(gBox, 0, 2))
        barrier = activations.copy_barrier(slot, self.tokens * HALF * 2)
        options = {}
        if cutlass.const_expr(self.share > 1):
            options["mcast_mask"] = Int16((1 << self.share) - 1)
        cute.copy(c.map.atom, source, target[None, slot.index * self.share + rank], tma_bar_ptr=barrier, **options)
