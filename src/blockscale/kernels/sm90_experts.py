"""Weight-only grouped NVFP4 GEMM for sm_90a, warpgroups: the product of kernels/sm90_wide.py for every group of rows.

One launch for all groups, whose sizes only the device knows. It is persistent: every CTA makes a table of the groups'
blocks of up to `tokens` rows in its shared memory (parts/expert_table.py); tiles, of 64 x row_groups rows of b by a
block and all of k, are numbered through all blocks, and CTA i of G takes the tiles i, i + G and so on. k is shared by
k_groups warpgroups, which take pairs of units, 256 k, in turn. Roles, each of which goes through the tiles by itself:

    role      warps                      does
    multiply  4 x row_groups x k_groups  a warpgroup takes every k_groups-th pair for 64 rows, a warp 16 of them
    fetch     k_groups more              brings pairs of units of activations to shared memory (TMA), a warp for each
                                         part of k
    finish    `finishers` more           adds the sums of the k_groups in their order, alpha, bias, and stores

Rings; there is one of activations for each part of k:

    ring         slots               full                                     empty
    weights      depth + 1           a warp's own copies (cp.async groups)    the same warp has read it
    activations  buffers / k_groups  1 arrival (fetch), bytes of four boxes   1 arrival a warp that multiplied it
    sums         kept                1 arrival a warp of multiply             1 arrival a warp of finish

What a warp asks for of weights goes on with its next tile before the last pair of this one is multiplied, so that
memory is never without requests while a CTA ends a tile; nothing waits for a store. The tensor core's sums of a pair
are added to those before in fp32, since a longer chain would lose too much (docs/hopper.md).

A box may reach into rows of another group: what they come to are sums that are not stored.

Shared memory: barriers; the table; weights, (depth + 1) x 2304 bytes a warp; sums, `kept` times each warp's;
activations, buffers x 4 boxes of tokens x 64 k, swizzled by 128 bytes.
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
from blockscale.kernels.parts.expert_memory import ENTRY_BYTES, MOST_BLOCKS, PAIR, of_experts
from blockscale.kernels.parts.expert_table import Table, Walk
from blockscale.kernels.parts.expert_weights import PairSlots, pairs, start
from blockscale.kernels.parts.hopper_memory import sum_bytes
from blockscale.kernels.parts.ring import Ring, Slot
from blockscale.kernels.parts.sums import Finish, Sums, finish
from blockscale.kernels.sm90 import DTYPES, WARP
from blockscale.kernels.sm90_wide import GROUP, HALF, STEPS, Sm90GroupGemm

BOXES = PAIR * DEPTH // HALF  # of a slot of activations, each of half a unit


@dataclass(frozen=True)
class Context:
    """What the roles share."""

    warp: Int32
    lane: Int32
    k_group: Int32  # of the warp, if it multiplies or fetches
    n: Int32
    units: Int32  # of a row of b
    table: Table
    total: Int32  # blocks
    walk: Walk
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
        depth: pairs of units of weights that a warp has in flight. buffers: pairs of units of activations, a multiple
            of k_groups and at least twice that. kept: tiles of sums. finishers: warps that finish.
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
        self.threads = WARP * (self.warps + k_groups + finishers)
        self.rows = ROWS * self.row_warps
        self.warp_bytes, self.sum_bytes = PAIR * (depth + 1) * UNIT_BYTES, sum_bytes(tokens)
        self.smem_bytes = of_experts(tokens, self.warps, depth, buffers, kept)

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
        fetching = warp - self.warps
        smem = self.shared_memory()
        scratch = smem.weights.data_ptr()
        table = Table(self.masked, self.tokens, self.threads, smem, scratch, experts, m, ends)
        k_group = Int32(cutlass.select_(fetching < 0, warp // self.row_warps, cutlass.min(fetching, self.k_groups - 1)))
        activations, kept = self.rings(smem, k_group)
        if (fetching >= 0) & (fetching < self.k_groups):
            cpasync.prefetch_descriptor(map_a.atom)
            with cute.arch.elect_one():
                activations.initialise()
            cute.arch.mbarrier_init_fence()
        if fetching == 0:
            with cute.arch.elect_one():
                kept.initialise()
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.pdl):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        table.make(given)
        cute.arch.sync_threads()
        c = Context(
            warp=warp,
            lane=thread % WARP,
            k_group=k_group,
            n=n,
            units=cute.ceil_div(k, DEPTH),
            table=table,
            total=table.total,
            walk=Walk.of(cute.ceil_div(n, self.rows)),
            activations=activations,
            kept=kept,
            map=map_a,
            smem=smem,
            boxes=smem.a.get_tensor(self.boxes(BOXES * self.buffers).outer, swizzle=self.boxes(1).inner),
        )
        if fetching < 0:
            self.multiply(c, b.toint())
        elif fetching < self.k_groups:
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
            entries: cute.struct.Align[cute.struct.MemRange[Int32, MOST_BLOCKS * ENTRY_BYTES // 4], 1024]
            weights: cute.struct.MemRange[Uint8, self.warps * self.warp_bytes]
            sums: cute.struct.MemRange[Uint8, self.kept * self.warps * self.sum_bytes]
            a: cute.struct.Align[cute.struct.MemRange[self.dtype, self.buffers * self.tokens * PAIR * DEPTH], 1024]

        if Smem.size_in_bytes() != self.smem_bytes:
            raise AssertionError(f"shared memory: {Smem.size_in_bytes()} bytes, not {self.smem_bytes}")
        return SmemAllocator().allocate(Smem)

    def rings(self, smem, k_group):
        """Of activations, that of a part of k, and of sums."""
        slots = self.buffers // self.k_groups
        full, empty = (x.data_ptr() + k_group * slots for x in (smem.full, smem.empty))
        copied = BOXES * self.tokens * HALF * 2
        activations = Ring("activations", full, empty, slots, fills=1, empties=self.row_warps, copied=copied)
        full, empty = smem.kept_full.data_ptr(), smem.kept_empty.data_ptr()
        return activations, Ring("sums", full, empty, self.kept, fills=self.warps, empties=self.finishers)

    def box(self, c, slot, i):
        """The number of a slot's i-th box."""
        return (c.k_group * (self.buffers // self.k_groups) + slot.index) * BOXES + i

    def sums(self, smem, slot):
        first = smem.sums.data_ptr().toint() + slot.index * (self.warps * self.sum_bytes)
        return Sums(first, self.sum_bytes, self.row_warps, self.k_groups, 1)

    @cute.jit
    def multiply(self, c, b):
        """The warpgroup's pairs of units of one tile after the other; of each its sums to shared memory."""
        lane, warp, activations, kept = c.lane, c.warp, c.activations, c.kept
        slots = c.smem.weights.data_ptr().toint() + warp * self.warp_bytes
        rows = b, cute.ceil_div(c.n, ROWS), self.row_warps, warp % self.row_warps
        table = c.table, c.total
        source = PairSlots.of(self.depth + 1, self.k_groups, slots, table, rows, c.units, c.k_group, c.walk, lane)
        for _ in cutlass.range_constexpr(self.depth):
            source = source.ask()
        shape = 64, self.tokens, 16
        registers, k_major = warpgroup.OperandSource.RMEM, OperandMajorMode.K
        op = warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, registers, k_major, k_major)
        mma, anew = cute.make_tiled_mma(op), cute.make_tiled_mma(op)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        anew.set(warpgroup.Field.ACCUMULATE, False)
        sB = mma.make_fragment_B(mma.get_slice(cute.arch.thread_idx()[0] % (GROUP * WARP)).partition_B(c.boxes))
        rA = [mma.make_fragment_A(mma.partition_shape_A((64, HALF))) for _ in range(2)]
        rWords = [cute.recast_tensor(cute.make_tensor(x.iterator, cute.make_layout(8 * STEPS)), Int32) for x in rA]
        rSums, rTotal = (cute.make_rmem_tensor(mma.partition_shape_C((64, self.tokens)), Float32) for _ in range(2))
        flat, total = (cute.make_tensor(x.iterator, cute.make_layout(cute.size(x))) for x in (rSums, rTotal))
        slot, before, sums = activations.consumer(), activations.consumer(), kept.producer()
        again, count, walk = activations.again(), pairs(c.units), c.walk
        while walk.block < c.total:
            rSums.fill(0.0)
            rTotal.fill(0.0)
            pair = c.k_group
            while pair < count:
                words, second, source = source.take()
                for i in cutlass.range_constexpr(BOXES):
                    if cutlass.const_expr(i == 2):
                        words = source.rest(second)
                    half = i % 2
                    self.dequantise(rWords[half], words[4 * half : 4 * half + 4], words[8 + 2 * half : 10 + 2 * half])
                    if cutlass.const_expr(i == 0):
                        warpgroup.wait_group(0)
                        self.add_up(total, flat)
                        if pair != c.k_group:
                            activations.arrive_empty(before, range(self.row_warps))
                        activations.wait_full(slot)
                    warpgroup.fence()
                    box = self.box(c, slot, i)
                    for step in cutlass.range_constexpr(STEPS):
                        how = anew if cutlass.const_expr(i + step == 0) else mma
                        cute.gemm(how, rSums, rA[half][None, None, step], sB[None, None, step, box], rSums)
                    warpgroup.commit_group()
                    if cutlass.const_expr(i > 0):
                        warpgroup.wait_group(1)  # what the half before this one was multiplied from is free
                before, slot = slot, slot.next()
                pair += self.k_groups
            warpgroup.wait_group(0)
            self.add_up(total, flat)
            if c.k_group < count:
                again.arrive_empty(before, range(self.row_warps))
            kept.wait_empty(sums)
            self.sums(c.smem, sums).keep(total, warp, lane)
            arrive_full(kept, sums, range(self.warps))
            sums, walk = sums.next(), walk.next()
        async_copies.wait(0)

    dequantise, boxes = Sm90GroupGemm.dequantise, Sm90GroupGemm.boxes

    @cute.jit
    def add_up(self, rTotal, rSums):
        """The tensor core's sums to those before, rounded to nearest."""
        for i in cutlass.range_constexpr(cute.size(rSums)):
            rTotal[i] = rTotal[i] + rSums[i]

    @cute.jit
    def fetch(self, c):
        """Pairs of units of activations, in the order in which the warpgroups of a part of k multiply them."""
        activations, count, walk = c.activations, pairs(c.units), c.walk
        slot = activations.producer()
        while walk.block < c.total:
            token, begin = c.table.entry(walk.block)[1], start(walk.row, c.units)
            for place in cutlass.range(c.k_group, count, self.k_groups, unroll=1):
                activations.wait_empty(slot)
                activations.expect_copies(slot)
                pair = begin + place
                pair = Int32(cutlass.select_(pair >= count, pair - count, pair))
                for i in cutlass.range_constexpr(BOXES):
                    self.copy_box(c, slot, i, (token, pair * (PAIR * DEPTH) + i * HALF))
                slot = slot.next()
            walk = walk.next()

    def copy_box(self, c, slot, i, corner):
        gBox = cute.local_tile(cute.domain_offset(corner, c.map.tma_tensor), (self.tokens, HALF), (0, 0))
        target, source = cpasync.tma_partition(
            c.map.atom, 0, cute.make_layout(1), cute.group_modes(c.boxes, 0, 2), cute.group_modes(gBox, 0, 2)
        )
        barrier = c.activations.copy_barrier(slot, self.tokens * HALF * 2)
        cute.copy(c.map.atom, source, target[None, self.box(c, slot, i)], tma_bar_ptr=barrier)

    @cute.jit
    def finish(self, c, out, biases, factors, factor):
        """Sums of one tile after the other to the result."""
        kept, walk, (pointer, ld_out) = c.kept, c.walk, out
        bias, bias_rows = biases
        unit, alpha, alphas = factors
        thread = c.lane + (c.warp - (self.warps + self.k_groups)) * WARP
        slot = kept.consumer()
        while walk.block < c.total:
            group, token, rows = c.table.entry(walk.block)
            own = alpha + cutlass.select_(alphas > 1, group, Int32(0))
            scale = Alpha((unit, own), factor * weights.FACTOR).load()
            own_bias = bias + Int64(cutlass.select_(bias_rows > 1, group, Int32(0))) * c.n
            offset = None if cutlass.const_expr(self.bias is None) else Bias(own_bias, c.n)
            results = Finish(pointer, self.out_dtype, ld_out, token + rows, c.n, scale, offset, self.activation)
            corner = token, walk.row * self.rows
            kept.wait_full(slot)
            finish(self.sums(c.smem, slot), results, corner, thread, Int32(0), self.finishers * WARP, self.tokens)
            kept.arrive_empty(slot, range(self.finishers))
            slot, walk = slot.next(), walk.next()
