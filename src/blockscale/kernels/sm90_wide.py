"""Weight-only NVFP4 GEMM for sm_90a, more tokens: the product of sm90.py by warpgroups (PTX: wgmma).

A CTA computes 64 x row_groups rows of b by up to `tokens` rows of a, for its part of k: `split` CTAs, a cluster, share
k, and k_groups warpgroups share the part of each. Roles:

    role      warps                      does
    multiply  4 x row_groups x k_groups  a warpgroup takes every k_groups-th unit of k for 64 rows, a warp 16 of them
    fetch     one more                   brings units of activations to shared memory (TMA), and alpha

Rings:

    ring         slots      full                                    empty
    weights      depth + 1  a warp's own copies (cp.async groups)   the same warp has read it
    activations  buffers    1 arrival (fetch), bytes of two boxes   1 arrival a warp of the warpgroup that multiplied it

A slot of activations always serves the same warpgroup along k, which is why `buffers` is a multiple of k_groups: then
nobody waits for a phase while the one before it has not begun. A warpgroup gives a slot back once it has the next one:
`buffers` is twice k_groups at least.

Timeline of a warp: each half of a unit (64 k) is dequantised while the tensor core multiplies the half before it.

    registers  0a 0b 1a 1b 2a 2b
    wgmma      .  0a 0b 1a 1b 2a 2b

Weights are operand A (64 rows) from registers, in the same fragment order that mma.sync takes; activations are operand
B from shared memory. CTAs begin at different places of k, since otherwise all would ask for the same activations at the
same time. In the end each CTA of a cluster finishes its share of the rows: warps write their sums to shared memory
there, their own CTA's or another's, and one barrier of the cluster later everything is local. Few parts of k have a
second set of sums, since what the tensor core loses of a long chain is more than the result contract allows
(parts/chains.py).

`prefetch`, `pdl`, `ahead`: as in sm90.py.

Shared memory: barriers and alpha; weights, (depth + 1) x 1152 bytes a warp, in whose place its sums come later; in a
cluster these have a place of their own; activations, buffers x 2 boxes of tokens x 64 k, swizzled by 128 bytes. All of
it is more than half of a multiprocessor's: two CTAs would share one while another had none.
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
from blockscale.kernels.parts.chains import CHAIN
from blockscale.kernels.parts.hopper_memory import GROUPS_HEAD, group_sums, of_groups, sum_bytes, warp_bytes
from blockscale.kernels.parts.ring import Ring
from blockscale.kernels.parts.sums import Finish, Sums, add_up, finish
from blockscale.kernels.parts.weights import Slots
from blockscale.kernels.sm90 import DTYPES, READY, WARP

GROUP = 4  # warps of a warpgroup
HALF = DEPTH // 2  # k of a box, 128 bytes of a row
STEPS = HALF // 16  # products of half a unit


@dataclass(frozen=True)
class Context:
    """What the roles share."""

    warp: Int32
    lane: Int32
    token: Int32  # the first of the CTA
    first: Int32  # unit of the CTA's part of k
    count: Int32  # of units
    start: Int32  # where in these the CTA begins
    rank: Int32  # of the CTA in its cluster
    activations: Ring
    map: cpasync.TmaInfo
    smem: Any
    boxes: cute.Tensor


class Sm90GroupGemm:
    """The kernel of one configuration; calling it launches it, compiling needs no GPU.

    Args:
        tokens: rows of a that a CTA takes, a multiple of 8 up to 64.
        row_groups, k_groups: the multiplying warpgroups, along rows of b and along k.
        split: CTAs that share k, 1 or 2.
        depth: units of weights that a warp has in flight. buffers: units of activations, a multiple of
            k_groups and at least twice that.
        pdl, ahead, prefetch, a_dtype, out_dtype, bias, activation: as `Sm90WarpGemm`.
    """

    def __init__(
        self,
        tokens,
        *,
        row_groups,
        k_groups,
        split,
        depth,
        buffers,
        pdl=False,
        ahead=False,
        prefetch=0,
        a_dtype="bf16",
        out_dtype="bf16",
        bias=None,
        activation=None,
    ):
        self.tokens, self.k_groups, self.split, self.depth = tokens, k_groups, split, depth
        self.buffers, self.pdl, self.ahead, self.prefetch = buffers, pdl, ahead, prefetch
        self.dtype, self.out_dtype = DTYPES[a_dtype], DTYPES[out_dtype]
        self.bias, self.activation = bias, activation
        self.row_warps = GROUP * row_groups
        self.warps = self.row_warps * k_groups
        self.threads = WARP * (self.warps + 1)
        self.rows = ROWS * self.row_warps
        self.warp_bytes = warp_bytes(tokens, depth, split)
        self.smem_bytes = of_groups(tokens, self.warps, depth, buffers, split)
        self.own_sums = group_sums(tokens, self.warps, split)
        self.chain = CHAIN.get(k_groups * split, 0)

    def __repr__(self):
        """Also in the kernel's name."""
        return (
            f"Sm90GroupGemm_{self.tokens}_{self.row_warps}x{self.k_groups}x{self.split}_{self.depth}_{self.buffers}_"
            f"{self.dtype.__name__}_{self.out_dtype.__name__}"
        )

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        out: cute.Pointer,
        bias: cute.Pointer,
        unit: cute.Pointer,
        alpha: cute.Pointer,
        factor: Float64,
        m: Int32,
        n: Int32,
        k: Int32,
        ld_a: Int64,
        ld_out: Int64,
        stream: cuda.CUstream,
    ):
        """Launches the product; arguments as those of `Sm90WarpGemm`."""
        rows = cute.make_layout((m, k), stride=(cute.assume(ld_a, 8), 1))
        pointer = cute.make_ptr(self.dtype, a.toint(), cute.AddressSpace.gmem, assumed_align=16)
        box = cute.select(self.boxes(1), mode=[0, 1])
        copy = cpasync.CopyBulkTensorTileG2SOp()
        map_a = cpasync.make_tiled_tma_atom(copy, cute.make_tensor(pointer, rows), box, (self.tokens, HALF))
        self.kernel(map_a, b, out, bias, (unit, alpha), factor, (m, n, k), ld_out).launch(
            grid=[self.split * cute.ceil_div(n, self.rows), cute.ceil_div(m, self.tokens), 1],
            block=[self.threads, 1, 1],
            cluster=[self.split, 1, 1],
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
        bias: cute.Pointer,
        factors: tuple[cute.Pointer, cute.Pointer],
        factor: Float64,
        size: tuple[Int32, Int32, Int32],
        ld_out: Int64,
    ):
        if cutlass.const_expr(self.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.split > 1):
            cute.arch.cluster_arrive_relaxed()
        m, n, k = size
        thread, _, _ = cute.arch.thread_idx()
        block, token_block, _ = cute.arch.block_idx()
        rank, row_block = block % self.split, block // self.split
        warp = cute.arch.make_warp_uniform(thread // WARP)
        smem = self.shared_memory()
        units = cute.ceil_div(k, DEPTH)
        share = cute.ceil_div(units, self.split)
        count = cutlass.max(cutlass.min(units - rank * share, share), 0)
        c = Context(
            warp=warp,
            lane=thread % WARP,
            token=token_block * self.tokens,
            first=rank * share,
            count=count,
            start=row_block % cutlass.max(count, 1),
            rank=rank,
            activations=self.ring(smem),
            map=map_a,
            smem=smem,
            boxes=smem.a.get_tensor(self.boxes(2 * self.buffers).outer, swizzle=self.boxes(1).inner),
        )
        if warp < self.warps:
            tile = cutlass.min(row_block * self.row_warps + warp % self.row_warps, cute.ceil_div(n, ROWS) - 1)
            part = b.toint() + (Int64(tile) * units + c.first) * UNIT_BYTES
            if cutlass.const_expr(self.prefetch > 0):
                self.ask_l2(c, part)
            if cutlass.const_expr(self.pdl and not self.ahead):
                cute.arch.griddepcontrol_wait()
            self.multiply(c, part)
        else:
            cpasync.prefetch_descriptor(map_a.atom)
            with cute.arch.elect_one():
                c.activations.initialise()
            cute.arch.mbarrier_init_fence()
            cute.arch.barrier_arrive(barrier_id=READY, number_of_threads=self.threads)
            if cutlass.const_expr(self.pdl):
                cute.arch.griddepcontrol_wait()
            self.fetch(c)
            for i, value in enumerate(Alpha(factors, factor * weights.FACTOR).load()):
                async_copies.store_fp32(smem.alpha.data_ptr().toint() + 4 * i, value)
            if cutlass.const_expr(self.split > 1):
                cute.arch.cluster_wait()
        self.sync_cluster()
        if cutlass.const_expr(self.ahead):
            cute.arch.griddepcontrol_wait()
        alpha = smem.alpha.data_ptr().toint()
        scale = async_copies.load_fp32(alpha), async_copies.load_fp32(alpha + 4)
        offset = None if cutlass.const_expr(self.bias is None) else Bias(bias, n)
        results = Finish(out, self.out_dtype, ld_out, m, n, scale, offset, self.activation)
        corner = c.token, row_block * self.rows
        finish(self.sums(smem), results, corner, thread, rank, self.threads, self.tokens)
        c.activations.check()

    def shared_memory(self):
        @cute.struct
        class Smem:
            full: cute.struct.MemRange[Int64, self.buffers]
            empty: cute.struct.MemRange[Int64, self.buffers]
            alpha: cute.struct.MemRange[Float32, 2]
            weights: cute.struct.Align[
                cute.struct.MemRange[Uint8, self.warps * self.warp_bytes + self.own_sums], GROUPS_HEAD
            ]
            a: cute.struct.Align[cute.struct.MemRange[self.dtype, self.buffers * self.tokens * DEPTH], 1024]

        if Smem.size_in_bytes() > self.smem_bytes:
            raise AssertionError(f"shared memory: {Smem.size_in_bytes()} bytes, not {self.smem_bytes}")
        return SmemAllocator().allocate(Smem)

    def ring(self, smem):
        full, empty = smem.full.data_ptr(), smem.empty.data_ptr()
        copied = self.tokens * DEPTH * 2
        return Ring("activations", full, empty, self.buffers, fills=1, empties=self.row_warps, copied=copied)

    def boxes(self, count):
        """(tokens, k, boxes) of activations in shared memory."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, (self.tokens, HALF, count), order=(0, 1, 2))

    def sums(self, smem):
        first, stride = smem.weights.data_ptr().toint(), self.warp_bytes
        if self.split > 1:
            first, stride = first + self.warps * self.warp_bytes, sum_bytes(self.tokens)
        return Sums(first, stride, self.row_warps, self.k_groups, self.split)

    @cute.jit
    def sync_cluster(self):
        if cutlass.const_expr(self.split > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def ask_l2(self, c, part):
        """The first units of the part of a tile at address `part` to L2: by one warp for all that share the tile."""
        units = cutlass.min(c.count - c.start, self.prefetch * self.k_groups)
        if (c.warp < self.row_warps) & (units > 0):
            with cute.arch.elect_one():
                async_copies.ask_l2(part + c.start * UNIT_BYTES, units * UNIT_BYTES)

    @cute.jit
    def multiply(self, c, tile):
        """The warpgroup's units of the tile whose part begins at address `tile`; then sums to shared memory."""
        lane, warp, activations, count = c.lane, c.warp, c.activations, c.count
        k_group = warp // self.row_warps
        own = c.smem.weights.data_ptr().toint() + warp * self.warp_bytes
        source = Slots.of(self.depth + 1, self.k_groups, own, tile, count, c.start, k_group)
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
        rTotal = cute.make_rmem_tensor(rSums.layout, Float32) if cutlass.const_expr(self.chain > 0) else rSums
        rSums.fill(0.0)
        rTotal.fill(0.0)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        cute.arch.barrier(barrier_id=READY, number_of_threads=self.threads)
        slot, before = self.first_slot(activations, k_group), activations.consumer()
        unit, chain = k_group, Int32(0)
        while unit < count:
            words, source = source.take(lane)
            for half in cutlass.range_constexpr(2):
                self.dequantise(rWords[half], words[4 * half : 4 * half + 4], words[8 + 2 * half : 10 + 2 * half])
                if cutlass.const_expr(half == 0):
                    activations.wait_full(slot)
                    if cutlass.const_expr(self.chain > 0):
                        if chain == self.chain:
                            warpgroup.wait_group(0)
                            add_up(_flat(rTotal), _flat(rSums))
                            chain = Int32(0)
                        chain += 1
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
            for _ in cutlass.range_constexpr(self.k_groups):
                slot = slot.next()
            unit += self.k_groups
        warpgroup.wait_group(0)
        if cutlass.const_expr(self.chain > 0):
            add_up(_flat(rTotal), _flat(rSums))
        async_copies.wait(0)
        cute.arch.sync_warp()
        if cutlass.const_expr(self.split > 1):
            cute.arch.cluster_wait()  # the others are there
        self.sums(c.smem).keep(_flat(rTotal), warp, lane, c.rank)

    @cute.jit
    def first_slot(self, activations, k_group):
        slot = activations.consumer()
        for i in cutlass.range_constexpr(self.k_groups - 1):
            if i < k_group:
                slot = slot.next()
        return slot

    @cute.jit
    def dequantise(self, rWords, codes, scales):
        """Half a unit: a lane's words of four steps, and the scales of their blocks, to operands A of four products."""
        for pair in cutlass.range_constexpr(STEPS // 2):
            both = weights.scale_pairs(scales[pair], self.dtype)
            for odd in cutlass.range_constexpr(2):
                step = 2 * pair + odd
                for i, word in enumerate(weights.decode(codes[step], both[odd], self.dtype)):
                    rWords[4 * step + i] = word

    @cute.jit
    def fetch(self, c):
        """Units of activations, as two boxes each, in the order in which the CTA multiplies them."""
        activations, count = c.activations, c.count
        slot = activations.producer()
        for place in cutlass.range(count, unroll=1):
            activations.wait_empty(slot)
            activations.expect_copies(slot)
            unit = c.start + place
            unit = c.first + cutlass.select_(unit >= count, unit - count, unit)
            for half in cutlass.range_constexpr(2):
                corner = c.token, unit * DEPTH + half * HALF
                gBox = cute.local_tile(cute.domain_offset(corner, c.map.tma_tensor), (self.tokens, HALF), (0, 0))
                target, source = cpasync.tma_partition(
                    c.map.atom, 0, cute.make_layout(1), cute.group_modes(c.boxes, 0, 2), cute.group_modes(gBox, 0, 2)
                )
                barrier = activations.copy_barrier(slot, self.tokens * DEPTH)
                cute.copy(c.map.atom, source, target[None, 2 * slot.index + half], tma_bar_ptr=barrier)
            slot = slot.next()


def _flat(registers):
    """The same registers, one after the other."""
    return cute.make_tensor(registers.iterator, cute.make_layout(cute.size(registers)))
