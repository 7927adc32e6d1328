"""Weight-only NVFP4 GEMM for sm_90a, many tokens: warpgroups multiply tiles that keep the tensor cores busy.

A CTA computes 64 x row_groups rows of b by `tokens` rows of a. `split` CTAs of a cluster share k, or `share` CTAs of
one lie along rows of b, need the same activations and fetch them for one another. Roles:

    role      warps            does
    multiply  4 x row_groups   a warpgroup multiplies 64 rows, a warp dequantises 16 of them
    fetch     one more         brings halves of units of activations (TMA), asks L2 for weights, brings alpha

Ring:

    ring         slots    full                              empty
    activations  buffers  1 arrival (fetch), bytes of all   1 arrival a warp of every CTA that shares them
                          boxes of the cluster

Timeline of a warp: each half of a unit (64 k) is dequantised while the tensor core multiplies the half before it, and
the next unit's codes and scales are on their way to registers.

    loads      1        2        3
    registers  0a 0b    1a 1b    2a 2b
    wgmma      .  0a 0b    1a 1b    2a 2b

Tensor cores truncate: a sum of many products loses more than the contract allows. Hence chains of `weights.chain`
units: after each, its sums are added to others in fp32, which live in registers, or for many tokens in shared memory.

Shared memory: barriers and alpha; the other sums, if they live there; activations, `buffers` boxes of tokens x 64 k,
swizzled by 128 bytes. In the end all but the head holds sums, from which results are finished.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Float64, Int16, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.memory import SmemAllocator

from blockscale.formats.fragment import CODE_BYTES, DEPTH, ROWS, UNIT_BYTES
from blockscale.kernels.parts import async_copies, weights
from blockscale.kernels.parts.arithmetic import Alpha, Bias
from blockscale.kernels.parts.hopper_memory import GROUPS_HEAD, of_prefill, second_bytes
from blockscale.kernels.parts.ring import Ring
from blockscale.kernels.parts.sums import Finish
from blockscale.kernels.parts.tile_results import Exchange, TileResults
from blockscale.kernels.sm90 import DTYPES, READY, WARP

GROUP = 4  # warps of a warpgroup
HALF = DEPTH // 2  # k of a box, 128 bytes of a row
STEPS = HALF // 16  # products of half a unit
FINISH, ALPHA = 2, 3  # named barriers of the warps that multiply, and of these and the one that fetches
FETCH_REGISTERS = 24


@dataclass(frozen=True)
class Context:
    """What the roles share."""

    warp: Int32
    lane: Int32
    token: Int32  # the first of the CTA
    first: Int32  # unit of the CTA's part of k
    count: Int32  # of units
    start: Int32  # where in these the CTA begins
    chain: Int32  # units of a chain
    rank: Int32  # in the cluster
    activations: Ring
    map: cpasync.TmaInfo
    smem: Any


class Sm90PrefillGemm:
    """The kernel of one configuration; calling it launches it, compiling needs no GPU.

    Args:
        tokens: rows of a that a CTA takes, a multiple of 16 up to 256.
        row_groups: the multiplying warpgroups.
        share: CTAs along rows of b that share activations, 1 or 2. split: CTAs that share k, 1 or 2. Not both.
        buffers: boxes of 64 k of activations.
        prefetch: units of weights that L2 is asked for ahead of the one that is loaded.
        pdl, ahead, a_dtype, out_dtype, bias, activation: as `Sm90WarpGemm`.
    """

    def __init__(
        self,
        tokens,
        *,
        row_groups,
        share,
        split,
        buffers,
        prefetch=4,
        pdl=False,
        ahead=False,
        a_dtype="bf16",
        out_dtype="bf16",
        bias=None,
        activation=None,
    ):
        self.tokens, self.share, self.split, self.buffers = tokens, share, split, buffers
        self.prefetch, self.pdl, self.ahead = prefetch, pdl, ahead
        self.dtype, self.out_dtype = DTYPES[a_dtype], DTYPES[out_dtype]
        self.bias, self.activation = bias, activation
        self.warps = GROUP * row_groups
        self.threads = WARP * (self.warps + GROUP)
        self.registers = {1: 240, 2: 240, 3: 160, 4: 112}[row_groups]
        self.rows = ROWS * self.warps
        self.ctas = share * split
        self.second = second_bytes(tokens, self.warps)
        self.smem_bytes = of_prefill(tokens, self.warps, buffers, split, self.out_dtype.width // 8)
        self.spread = True

    def __repr__(self):
        """Also in the kernel's name."""
        return (
            f"Sm90PrefillGemm_{self.tokens}x{self.rows}_{self.share}x{self.split}_{self.buffers}_{self.prefetch}_"
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
        box = cute.select(self.boxes(1, self.share), mode=[0, 1])
        shared = cutlass.const_expr(self.share > 1)
        copy = (cpasync.CopyBulkTensorTileG2SMulticastOp if shared else cpasync.CopyBulkTensorTileG2SOp)()
        shape = self.tokens // self.share, HALF
        map_a = cpasync.make_tiled_tma_atom(copy, cute.make_tensor(pointer, rows), box, shape)
        blocks = cute.round_up(cute.ceil_div(n, self.rows), self.share)
        self.kernel(map_a, b, out, bias, (unit, alpha), factor, (m, n, k), ld_out).launch(
            grid=[self.split * blocks, cute.ceil_div(m, self.tokens), 1],
            block=[self.threads, 1, 1],
            cluster=[self.ctas, 1, 1],
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
            if cutlass.const_expr(not self.ahead):
                cute.arch.griddepcontrol_wait()
        m, n, k = size
        thread, _, _ = cute.arch.thread_idx()
        block, token_block, _ = cute.arch.block_idx()
        part, row_block = block % self.split, block // self.split
        warp = cute.arch.make_warp_uniform(thread // WARP)
        smem = self.shared_memory()
        units = cute.ceil_div(k, DEPTH)
        most = cute.ceil_div(units, self.split)
        count = cutlass.max(cutlass.min(units - part * most, most), 0)
        c = Context(
            warp=warp,
            lane=thread % WARP,
            token=token_block * self.tokens,
            first=part * most,
            count=count,
            start=row_block // self.share % cutlass.max(count, 1) if cutlass.const_expr(self.spread) else Int32(0),
            chain=weights.chain(k, count),
            rank=block % self.ctas,
            activations=self.ring(smem),
            map=map_a,
            smem=smem,
        )
        tiles = cute.ceil_div(n, ROWS)
        if warp < self.warps:
            cute.arch.setmaxregister_increase(self.registers)
            tile = cutlass.min(row_block * self.warps + warp, tiles - 1)
            rSums = self.multiply(c, b.toint() + (Int64(tile) * units + c.first) * UNIT_BYTES)
            if cutlass.const_expr(self.ahead):
                cute.arch.griddepcontrol_wait()
            self.store(c, rSums, out, bias, (m, n), ld_out, row_block)
        else:
            cute.arch.setmaxregister_decrease(FETCH_REGISTERS)
            if warp == self.warps:
                cpasync.prefetch_descriptor(map_a.atom)
                with cute.arch.elect_one():
                    c.activations.initialise()
                cute.arch.mbarrier_init_fence()
                self.ready(False)
                if cutlass.const_expr(self.ahead):
                    cute.arch.griddepcontrol_wait()
                tile = cutlass.min(row_block * self.warps + c.lane, tiles - 1)
                self.fetch(c, b.toint() + (Int64(tile) * units + c.first) * UNIT_BYTES)
                for i, value in enumerate(Alpha(factors, factor * weights.FACTOR).load()):
                    async_copies.store_fp32(smem.alpha.data_ptr().toint() + 4 * i, value)
                cute.arch.barrier_arrive(barrier_id=ALPHA, number_of_threads=WARP * (self.warps + 1))
            elif cutlass.const_expr(self.share > 1):
                self.sync_cluster()
            if cutlass.const_expr(self.split > 1):
                self.sync_cluster()
        if cutlass.const_expr(self.ctas > 1):
            cute.arch.cluster_arrive()  # nobody leaves while another reads its sums or arrives at its barriers
            cute.arch.cluster_wait()
        c.activations.check()

    def shared_memory(self):
        @cute.struct
        class Smem:
            full: cute.struct.MemRange[Int64, self.buffers]
            empty: cute.struct.MemRange[Int64, self.buffers]
            alpha: cute.struct.MemRange[Float32, 2]
            body: cute.struct.Align[cute.struct.MemRange[Uint8, self.smem_bytes - GROUPS_HEAD], GROUPS_HEAD]

        if Smem.size_in_bytes() != self.smem_bytes:
            raise AssertionError(f"shared memory: {Smem.size_in_bytes()} bytes, not {self.smem_bytes}")
        return SmemAllocator().allocate(Smem)

    def ring(self, smem):
        full, empty = smem.full.data_ptr(), smem.empty.data_ptr()
        copied, total = self.tokens * HALF * 2, self.warps * self.share
        return Ring("activations", full, empty, self.buffers, fills=1, empties=self.warps, copied=copied, total=total)

    def boxes(self, count, share=1):
        """(tokens / share, k, count x share boxes) of activations in shared memory."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, (self.tokens // share, HALF, count * share), order=(0, 1, 2))

    def box_tensor(self, c, share=1):
        first = c.smem.body.data_ptr().toint() + self.second
        pointer = cute.make_ptr(self.dtype, first, cute.AddressSpace.smem, assumed_align=1024)
        layout = self.boxes(self.buffers, share)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner), layout.outer)

    @cute.jit
    def store(self, c, rSums, out, bias, size, ld_out, row_block):
        """The results of the CTA's sums, by the warps that multiply."""
        (m, n), threads = size, WARP * self.warps
        thread = cute.arch.thread_idx()[0]
        body = c.smem.body.data_ptr().toint()
        token, tokens = c.token, self.tokens // self.split
        cute.arch.barrier(barrier_id=ALPHA, number_of_threads=threads + WARP)  # nobody reads activations any more
        if cutlass.const_expr(self.split > 1):
            exchange = Exchange(body, threads, c.rank)
            exchange.give(rSums, thread)
            self.sync_cluster()
            exchange.take(rSums, thread)
            token += c.rank * tokens
            body += tokens * self.rows * 4
        alpha = c.smem.alpha.data_ptr().toint()
        scale = async_copies.load_fp32(alpha), async_copies.load_fp32(alpha + 4)
        offset = None if cutlass.const_expr(self.bias is None) else Bias(bias, n)
        finish = Finish(out, self.out_dtype, ld_out, m, n, scale, offset, self.activation)
        results = TileResults(body, tokens, self.rows, finish)
        column = row_block * self.rows
        results.stage(rSums, c.warp, c.lane, column + c.warp * ROWS)
        cute.arch.barrier(barrier_id=FINISH, number_of_threads=threads)
        results.write((token, column), thread, threads)

    @cute.jit
    def ready(self, waits: cutlass.Constexpr):
        """The barriers are there, for all who use them."""
        if cutlass.const_expr(self.share > 1):
            self.sync_cluster()
        elif cutlass.const_expr(waits):
            cute.arch.barrier(barrier_id=READY, number_of_threads=WARP * (self.warps + 1))
        else:
            cute.arch.barrier_arrive(barrier_id=READY, number_of_threads=WARP * (self.warps + 1))

    @cute.jit
    def sync_cluster(self):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()

    @cute.jit
    def multiply(self, c, tile):
        """The warpgroup's part of the tile whose units begin at address `tile`; its sums."""
        activations, count = c.activations, c.count
        rNext = cute.make_rmem_tensor(weights.WORDS, Int32)
        self.load(rNext, c, tile, Int32(0))
        shape = 64, self.tokens, 16
        registers, k_major = warpgroup.OperandSource.RMEM, OperandMajorMode.K
        op = warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, registers, k_major, k_major)
        mma = cute.make_tiled_mma(op)
        boxes = self.box_tensor(c)
        sB = mma.make_fragment_B(mma.get_slice(cute.arch.thread_idx()[0] % (GROUP * WARP)).partition_B(boxes))
        rA = [mma.make_fragment_A(mma.partition_shape_A((64, HALF))) for _ in range(2)]
        rWords = [cute.recast_tensor(cute.make_tensor(x.iterator, cute.make_layout(8 * STEPS)), Int32) for x in rA]
        rSums = cute.make_rmem_tensor(mma.partition_shape_C((64, self.tokens)), Float32)
        rFlat = cute.make_tensor(rSums.iterator, cute.make_layout(cute.size(rSums)))
        rSums.fill(0.0)
        others = self.others(c)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        self.ready(True)
        slot, before, again = activations.consumer(), activations.consumer(), activations.again()
        unit = Int32(0)
        while unit < count:
            stop = cutlass.min(unit + c.chain, count)
            while unit < stop:
                words = [rNext[i] for i in range(weights.WORDS)]
                self.load(rNext, c, tile, unit + 1)
                for half in cutlass.range_constexpr(2):
                    self.dequantise(rWords[half], words[4 * half : 4 * half + 4], words[8 + 2 * half : 10 + 2 * half])
                    activations.wait_full(slot)
                    warpgroup.fence()
                    for step in cutlass.range_constexpr(STEPS):
                        cute.gemm(mma, rSums, rA[half][None, None, step], sB[None, None, step, slot.index], rSums)
                    warpgroup.commit_group()
                    warpgroup.wait_group(1)  # the half before this one is multiplied
                    if cutlass.const_expr(half == 1):
                        self.release(again, before)
                    elif unit > 0:
                        self.release(activations, before)
                    before = slot
                    slot = slot.next()
                unit += 1
            warpgroup.wait_group(0)
            if unit < count:
                self.fold(rFlat, others, False)
                rSums.fill(0.0)
        self.fold(rFlat, others, True)
        return rFlat

    @cute.jit
    def release(self, activations, slot):
        if cutlass.const_expr(self.share > 1):
            activations.arrive_empty_in(slot, range(self.warps), self.share)
        else:
            activations.arrive_empty(slot, range(self.warps))

    @cute.jit
    def load(self, registers, c, tile, place):
        """The lane's words of the unit at this place of the circle, if there is one."""
        turned = c.start + place
        unit = cutlass.select_(turned >= c.count, turned - c.count, turned)
        at = tile + unit * UNIT_BYTES
        addresses = at + c.lane * 16, at + c.lane * 16 + CODE_BYTES // 2, at + CODE_BYTES + c.lane // 4 * 16
        for part, address in enumerate(addresses):
            for i, word in enumerate(async_copies.load_once_16(address, place < c.count)):
                registers[part * 4 + i] = word

    @cute.jit
    def dequantise(self, rWords, codes, scales):
        """Half a unit: a lane's words of four steps, and the scales of their blocks, to operands A of four products."""
        for pair in cutlass.range_constexpr(STEPS // 2):
            both = weights.scale_pairs(scales[pair], self.dtype)
            for odd in cutlass.range_constexpr(2):
                step = 2 * pair + odd
                for i, word in enumerate(weights.decode(codes[step], both[odd], self.dtype)):
                    rWords[4 * step + i] = word

    def others(self, c):
        """The other sums, 0 so far: registers, or the address of the thread's vectors in shared memory."""
        if not self.second:
            rOthers = cute.make_rmem_tensor(self.tokens // 2, Float32)
            rOthers.fill(0.0)
            return rOthers
        address = c.smem.body.data_ptr().toint() + cute.arch.thread_idx()[0] * 16
        for i in range(self.tokens // 8):
            async_copies.clear_16(address + i * self.warps * WARP * 16)
        return address

    @cute.jit
    def fold(self, rSums, others, last: cutlass.Constexpr):
        """Adds a chain's sums to the others; after the last chain the other way around."""
        for i in cutlass.range_constexpr(self.tokens // 8):
            if cutlass.const_expr(self.second == 0):
                for j in cutlass.range_constexpr(4 * i, 4 * i + 4):
                    total = rSums[j] + others[j]
                    if cutlass.const_expr(last):
                        rSums[j] = total
                    else:
                        others[j] = total
            else:
                at = others + i * self.warps * WARP * 16
                before = async_copies.load_fp32x4(at)
                total = [rSums[4 * i + j] + before[j] for j in range(4)]
                if cutlass.const_expr(last):
                    for j in cutlass.range_constexpr(4):
                        rSums[4 * i + j] = total[j]
                else:
                    async_copies.store_fp32x4(at, *total)

    @cute.jit
    def fetch(self, c, tile):
        """Halves of units of activations, in the order in which the CTA multiplies them. Lanes of the warp ask L2 for
        the units of a tile of rows each, which begin at address `tile`."""
        activations, count = c.activations, c.count
        slot = activations.producer()
        boxes = self.box_tensor(c, self.share)
        shape = self.tokens // self.share, HALF
        rank = c.rank if cutlass.const_expr(self.share > 1) else 0
        for place in cutlass.range(2 * count, unroll=1):
            self.ask(c, tile, place)
            activations.wait_empty(slot)
            activations.expect_copies(slot)
            unit = c.start + place // 2
            unit = c.first + cutlass.select_(unit >= count, unit - count, unit)
            corner = c.token + rank * shape[0], unit * DEPTH + place % 2 * HALF
            gBox = cute.local_tile(cute.domain_offset(corner, c.map.tma_tensor), shape, (0, 0))
            target, source = cpasync.tma_partition(
                c.map.atom, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 2), cute.group_modes(gBox, 0, 2)
            )
            barrier = activations.copy_barrier(slot, self.tokens * HALF * 2)
            options = {}
            if cutlass.const_expr(self.share > 1):
                options["mcast_mask"] = Int16((1 << self.share) - 1)
            box = target[None, slot.index * self.share + rank]
            cute.copy(c.map.atom, source, box, tma_bar_ptr=barrier, **options)
            slot = slot.next()

    @cute.jit
    def ask(self, c, tile, place):
        """Asks L2 for the unit of weights so many places ahead, once a unit."""
        ahead = place // 2 + self.prefetch
        turned = c.start + ahead
        unit = cutlass.select_(turned >= c.count, turned - c.count, turned)
        if (place % 2 == 0) & (ahead < c.count) & (c.lane < self.warps):
            async_copies.ask_l2(tile + unit * UNIT_BYTES, Int32(UNIT_BYTES))
