"""Weight-only grouped NVFP4 GEMM for sm_90a, warpgroups: the product of kernels/sm90_wide.py for every group of rows.

One launch for all groups, whose sizes only the device knows. It is persistent: every CTA makes a table of the groups in
its shared memory (parts/groups.py), tiles are numbered through all groups, and CTA i of G takes the tiles i, i + G and
so on. A tile is 64 x row_groups rows of a group's matrix of b by up to `tokens` of the group's rows of a, over all of
k, which k_groups warpgroups share. Roles, each of which goes through the tiles by itself:

    role      warps                      does
    multiply  4 x row_groups x k_groups  a warpgroup takes every k_groups-th unit of k for 64 rows, a warp 16 of them
    fetch     one more                   brings units of activations to shared memory (TMA)
    finish    `finishers` more           adds the sums of the k_groups in their order, alpha, bias, and stores

Rings:

    ring         slots      full                                    empty
    weights      depth + 1  a warp's own copies (cp.async groups)   the same warp has read it
    activations  buffers    1 arrival (fetch), bytes of two boxes   1 arrival a warp of the warpgroup that multiplied it
    sums         kept       1 arrival a warp of multiply            1 arrival a warp of finish

What a warp asks for of weights goes on with its next tile before its last one is multiplied, so that memory is never
without requests while a CTA ends a tile; nothing waits for a store.

A slot of activations always serves the same warpgroup, as in kernels/sm90_wide.py. A tile therefore takes a multiple of
k_groups slots: those beyond its units become full without bytes, and are given back unread.

A box may reach into rows of another group: what they come to are sums that are not stored.

Shared memory: barriers; the table; weights, (depth + 1) x 1152 bytes a warp; sums, `kept` times each warp's;
activations, buffers x 2 boxes of tokens x 64 k, swizzled by 128 bytes.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Float64, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from blockscale.formats.fragment import DEPTH, ROWS, UNIT_BYTES
from blockscale.kernels.parts import async_copies, weights
from blockscale.kernels.parts.arithmetic import Alpha, Bias
from blockscale.kernels.parts.expert_weights import TileSlots
from blockscale.kernels.parts.group_geometry import MOST_GROUPS
from blockscale.kernels.parts.groups import Groups, Order
from blockscale.kernels.parts.hopper_memory import of_experts, sum_bytes
from blockscale.kernels.parts.ring import Ring, Slot
from blockscale.kernels.parts.sums import Finish, Sums, finish
from blockscale.kernels.sm90 import DTYPES, WARP, expect_bytes
from blockscale.kernels.sm90_wide import GROUP, HALF, STEPS, Sm90GroupGemm


@dataclass(frozen=True)
class Context:
    """What the roles share."""

    warp: Int32
    lane: Int32
    units: Int32  # of a row of b
    groups: Groups
    total: Int32  # tiles of all CTAs
    activations: Ring
    kept: Ring
    map: cpasync.TmaInfo
    smem: Any
    boxes: cute.Tensor


def arrive_full(ring: Ring, slot: Slot, warps: range) -> None:
    """An arrival at `full` from each of the `warps` that run the role, once all its lanes have come here."""
    ring.traced["fills"] += len(warps)
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ring.full + slot.index)


class Sm90ExpertGemm:
    """The kernel of one configuration; calling it launches it, compiling needs no GPU.

    Args:
        tokens: most rows of a group that a tile takes, a multiple of 8 up to 64.
        form: "contiguous": groups follow one another in the rows of a. "masked": each has a matrix of its own.
        row_groups, k_groups: the multiplying warpgroups, along rows of b and along k.
        depth: units of weights that a warp has in flight. buffers: units of activations, a multiple of k_groups and
            at least twice that. kept: tiles of sums. finishers: warps that finish.
        order, raster: of tiles, as `Config`.
        pdl, a_dtype, out_dtype, bias, activation: as `Sm90WarpGemm`.
    """

    def __init__(
        self,
        tokens,
        *,
        form="contiguous",
        row_groups,
        k_groups,
        depth,
        buffers,
        kept=2,
        finishers=2,
        order="given",
        raster="n",
        pdl=False,
        a_dtype="bf16",
        out_dtype="bf16",
        bias=None,
        activation=None,
    ):
        self.tokens, self.k_groups, self.depth, self.buffers = tokens, k_groups, depth, buffers
        self.kept, self.finishers, self.pdl, self.masked = kept, finishers, pdl, form == "masked"
        self.dtype, self.out_dtype = DTYPES[a_dtype], DTYPES[out_dtype]
        self.bias, self.activation = bias, activation
        self.row_warps = GROUP * row_groups
        self.warps = self.row_warps * k_groups
        self.threads = WARP * (self.warps + 1 + finishers)
        self.rows = ROWS * self.row_warps
        self.warp_bytes, self.sum_bytes = (depth + 1) * UNIT_BYTES, sum_bytes(tokens)
        self.smem_bytes = of_experts(tokens, self.warps, depth, buffers, kept)
        self.order = Order(self.masked, (self.rows, tokens), True, raster, order == "longest", self.threads)

    def __repr__(self):
        """Also in the kernel's name."""
        return (
            f"Sm90ExpertGemm_{self.tokens}_{self.row_warps}x{self.k_groups}_{self.depth}_{self.buffers}_{self.kept}_"
            f"{self.dtype.__name__}_{self.out_dtype.__name__}"
        )

    @cute.jit
    def __call__(
        self, a: cute.Pointer, b: cute.Pointer, out: cute.Pointer, bias: cute.Pointer, unit: cute.Pointer,
        alpha: cute.Pointer, groups: cute.Pointer, factor: Float64, m: Int32, n: Int32, k: Int32, ld_a: Int64,
        ld_out: Int64, experts: Int32, alphas: Int32, biases: Int32, ends: Int32, blocks: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launches the product; arguments as those of `Sm90GroupedGemm`. blocks: so many CTAs."""
        total = experts * m if cutlass.const_expr(self.masked) else m
        rows = cute.make_layout((total, k), stride=(cute.assume(ld_a, 8), 1))
        pointer = cute.make_ptr(self.dtype, a.toint(), cute.AddressSpace.gmem, assumed_align=16)
        box = cute.select(self.boxes(1), mode=[0, 1])
        copy = cpasync.CopyBulkTensorTileG2SOp()
        map_a = cpasync.make_tiled_tma_atom(copy, cute.make_tensor(pointer, rows), box, (self.tokens, HALF))
        self.kernel(
            map_a, b, out, (bias, biases), (unit, alpha, alphas), groups, factor, (m, n, k), ld_out, (experts, ends)
        ).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            smem=self.smem_bytes,
            min_blocks_per_mp=1,
            use_pdl=self.pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        map_a: cpasync.TmaInfo,
        b: cute.Pointer,
        out: cute.Pointer,
        biases: tuple[cute.Pointer, Int32],
        factors: tuple[cute.Pointer, cute.Pointer, Int32],
        given: cute.Pointer,
        factor: Float64,
        size: tuple[Int32, Int32, Int32],
        ld_out: Int64,
        counts: tuple[Int32, Int32],
    ):
        m, n, k = size
        experts, ends = counts
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        smem = self.shared_memory()
        groups = Groups(self.order, smem, experts, m, n, k, ends)
        activations, kept = self.rings(smem)
        if warp == self.warps:
            cpasync.prefetch_descriptor(map_a.atom)
            with cute.arch.elect_one():
                activations.initialise()
                kept.initialise()
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.pdl):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        groups.make(given)
        cute.arch.sync_threads()
        c = Context(
            warp=warp,
            lane=thread % WARP,
            units=cute.ceil_div(k, DEPTH),
            groups=groups,
            total=groups.total,
            activations=activations,
            kept=kept,
            map=map_a,
            smem=smem,
            boxes=smem.a.get_tensor(self.boxes(2 * self.buffers).outer, swizzle=self.boxes(1).inner),
        )
        if warp < self.warps:
            self.multiply(c, b.toint(), n)
        elif warp == self.warps:
            self.fetch(c)
        else:
            self.finish(c, (out, ld_out), biases, factors, factor)
        activations.check()
        kept.check()

    def shared_memory(self):
        @cute.struct
        class Smem:
            full: cute.struct.MemRange[Int64, self.buffers]
            empty: cute.struct.MemRange[Int64, self.buffers]
            kept_full: cute.struct.MemRange[Int64, self.kept]
            kept_empty: cute.struct.MemRange[Int64, self.kept]
            total: Int32
            firsts: cute.struct.Align[cute.struct.MemRange[Int32, MOST_GROUPS], 1024]
            rows: cute.struct.MemRange[Int32, MOST_GROUPS]
            atoms: cute.struct.MemRange[Int32, MOST_GROUPS]
            numbers: cute.struct.MemRange[Int32, MOST_GROUPS]
            tiles: cute.struct.MemRange[Int32, MOST_GROUPS]
            weights: cute.struct.MemRange[Uint8, self.warps * self.warp_bytes]
            sums: cute.struct.MemRange[Uint8, self.kept * self.warps * self.sum_bytes]
            a: cute.struct.Align[cute.struct.MemRange[self.dtype, self.buffers * self.tokens * DEPTH], 1024]

        if Smem.size_in_bytes() != self.smem_bytes:
            raise AssertionError(f"shared memory: {Smem.size_in_bytes()} bytes, not {self.smem_bytes}")
        return SmemAllocator().allocate(Smem)

    def rings(self, smem):
        full, empty = smem.full.data_ptr(), smem.empty.data_ptr()
        activations = Ring("activations", full, empty, self.buffers, fills=1, empties=self.row_warps)
        full, empty = smem.kept_full.data_ptr(), smem.kept_empty.data_ptr()
        return activations, Ring("sums", full, empty, self.kept, fills=self.warps, empties=self.finishers)

    def sums(self, smem, slot):
        first = smem.sums.data_ptr().toint() + slot.index * (self.warps * self.sum_bytes)
        return Sums(first, self.sum_bytes, self.row_warps, self.k_groups, 1)

    def turns(self, units):
        """Of a warpgroup in a tile, with those in which it has no unit."""
        return cute.ceil_div(units, self.k_groups)

    @cute.jit
    def multiply(self, c, b, n):
        """The warpgroup's units of one tile after the other; of each its sums to shared memory."""
        lane, warp, activations, kept, units = c.lane, c.warp, c.activations, c.kept, c.units
        k_group = warp // self.row_warps
        own = c.smem.weights.data_ptr().toint() + warp * self.warp_bytes
        rows = b, cute.ceil_div(n, ROWS), self.row_warps, warp % self.row_warps
        source = TileSlots.of(self.depth + 1, self.k_groups, own, (c.groups, c.total), rows, units, k_group)
        for _ in cutlass.range_constexpr(self.depth):
            source = source.ask(lane)
        shape = 64, self.tokens, 16
        registers, k_major = warpgroup.OperandSource.RMEM, OperandMajorMode.K
        op = warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, registers, k_major, k_major)
        mma = cute.make_tiled_mma(op)
        sB = mma.make_fragment_B(mma.get_slice(cute.arch.thread_idx()[0] % (GROUP * WARP)).partition_B(c.boxes))
        rA = [mma.make_fragment_A(mma.partition_shape_A((64, HALF))) for _ in range(2)]
        rWords = [cute.recast_tensor(cute.make_tensor(x.iterator, cute.make_layout(8 * STEPS)), Int32) for x in rA]
        rSums = cute.make_rmem_tensor(mma.partition_shape_C((64, self.tokens)), Float32)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        slot, before, sums = self.first_slot(activations, k_group), activations.consumer(), kept.producer()
        again = activations.again(), activations.again()
        index = cute.arch.block_idx()[0]
        while index < c.total:
            rSums.fill(0.0)
            unit = k_group
            while unit < units:
                words, source = source.take(lane)
                for half in cutlass.range_constexpr(2):
                    self.dequantise(rWords[half], words[4 * half : 4 * half + 4], words[8 + 2 * half : 10 + 2 * half])
                    if cutlass.const_expr(half == 0):
                        activations.wait_full(slot)
                    warpgroup.fence()
                    for step in cutlass.range_constexpr(STEPS):
                        box = 2 * slot.index + half
                        cute.gemm(mma, rSums, rA[half][None, None, step], sB[None, None, step, box], rSums)
                    warpgroup.commit_group()
                    warpgroup.wait_group(1)  # the half before this one is multiplied
                    if cutlass.const_expr(half == 0):  # noqa: SIM102 (decided while tracing)
                        if unit >= self.k_groups:
                            activations.arrive_empty(before, range(self.row_warps))
                before = slot
                slot = self.own_next(slot)
                unit += self.k_groups
            warpgroup.wait_group(0)
            if k_group < units:
                again[0].arrive_empty(before, range(self.row_warps))
            if unit < self.turns(units) * self.k_groups:
                activations.wait_full(slot)
                again[1].arrive_empty(slot, range(self.row_warps))
                slot = self.own_next(slot)
            kept.wait_empty(sums)
            flat = cute.make_tensor(rSums.iterator, cute.make_layout(cute.size(rSums)))
            self.sums(c.smem, sums).keep(flat, warp, lane)
            arrive_full(kept, sums, range(self.warps))
            sums = sums.next()
            index += cute.arch.grid_dim()[0]
        async_copies.wait(0)

    first_slot, dequantise, boxes = Sm90GroupGemm.first_slot, Sm90GroupGemm.dequantise, Sm90GroupGemm.boxes

    def own_next(self, slot):
        """The warpgroup's slot after this one."""
        for _ in range(self.k_groups):
            slot = slot.next()
        return slot

    @cute.jit
    def fetch(self, c):
        """Units of activations, as two boxes each, in the order in which the CTA multiplies them."""
        activations, units = c.activations, c.units
        slot = activations.producer()
        index = cute.arch.block_idx()[0]
        while index < c.total:
            place = c.groups.at(index)
            token, start = place.first + place.column * self.tokens, TileSlots.start(place, units)
            for turn in cutlass.range(self.turns(units) * self.k_groups, unroll=1):
                activations.wait_empty(slot)
                expect_bytes(activations, slot, Int32(cutlass.select_(turn < units, self.tokens * DEPTH * 2, 0)))
                if turn < units:
                    unit = start + turn
                    unit = cutlass.select_(unit >= units, unit - units, unit)
                    for half in cutlass.range_constexpr(2):
                        self.copy_box(c, slot, (token, unit * DEPTH + half * HALF), half)
                slot = slot.next()
            index += cute.arch.grid_dim()[0]

    def copy_box(self, c, slot, corner, half):
        gBox = cute.local_tile(cute.domain_offset(corner, c.map.tma_tensor), (self.tokens, HALF), (0, 0))
        target, source = cpasync.tma_partition(
            c.map.atom, 0, cute.make_layout(1), cute.group_modes(c.boxes, 0, 2), cute.group_modes(gBox, 0, 2)
        )
        barrier = c.activations.copy_barrier(slot, 0)
        cute.copy(c.map.atom, source, target[None, 2 * slot.index + half], tma_bar_ptr=barrier)

    @cute.jit
    def finish(self, c, out, biases, factors, factor):
        """Sums of one tile after the other to the result."""
        kept, (pointer, ld_out) = c.kept, out
        bias, bias_rows = biases
        unit, alpha, alphas = factors
        thread = c.lane + (c.warp - (self.warps + 1)) * WARP
        slot = kept.consumer()
        index = cute.arch.block_idx()[0]
        while index < c.total:
            place = c.groups.at(index)
            own = alpha + cutlass.select_(alphas > 1, place.group, Int32(0))
            scale = Alpha((unit, own), factor * weights.FACTOR).load()
            own_bias = bias + Int64(cutlass.select_(bias_rows > 1, place.group, Int32(0))) * place.n
            offset = None if cutlass.const_expr(self.bias is None) else Bias(own_bias, place.n)
            end = place.first + place.rows
            results = Finish(pointer, self.out_dtype, ld_out, end, place.n, scale, offset, self.activation)
            corner = place.first + place.column * self.tokens, place.row * self.rows
            kept.wait_full(slot)
            finish(self.sums(c.smem, slot), results, corner, thread, Int32(0), self.finishers * WARP, self.tokens)
            kept.arrive_empty(slot, range(self.finishers))
            slot = slot.next()
            index += cute.arch.grid_dim()[0]
