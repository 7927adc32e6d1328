"""Weight-only NVFP4 GEMM for sm_90a, many tokens: warpgroups multiply tiles that keep the tensor cores busy.

A tile is 64 x row_groups rows of b by `tokens` rows of a. Clusters take tiles in turn, a tile a CTA. `share` CTAs of a
cluster lie along rows of b, need the same activations and fetch them for one another; or `split` CTAs share k. Roles:

    role      warps           does
    multiply  4 x row_groups  a warpgroup multiplies 64 rows, a warp dequantises 16 of them; then its results
    fetch     1               brings halves of units of activations (TMA)
    weights   1               brings units of weights (bulk copies)
    scale     1               brings alpha

Rings:

    ring         slots    full                                        empty
    activations  buffers  1 arrival (fetch), bytes of all boxes of    1 arrival a warp of every CTA that shares them
                          the cluster
    weights      depth    1 arrival (weights), bytes of their units   1 arrival a warp

Timeline of a warp: each half of a unit (64 k) is dequantised while the tensor core multiplies the half before it. While
results leave, activations and weights of the next tile come.

    registers  0a 0b 1a 1b 2a 2b
    wgmma      .  0a 0b 1a 1b 2a 2b

Tensor cores truncate: a sum of many products loses more than the contract allows. Hence chains of `weights.chain`
units: after each, its sums are added to others in fp32, which live in registers as far as there are some, the rest in
shared memory.

Registers: warps that multiply take over those of the warpgroup that fetches (PTX: setmaxnreg); with fewer the compiler
would make them wait for every product.

Shared memory: barriers and alpha; of each warpgroup the other sums that live there, in turn with its results on their
way out; activations, `buffers` boxes of tokens x 64 k, swizzled by 128 bytes; weights. Where CTAs share k, sums and
results take the place of all in the end.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Float64, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from blockscale.formats.fragment import DEPTH, UNIT_BYTES
from blockscale.kernels.parts import async_copies, weights
from blockscale.kernels.parts.arithmetic import Alpha, Bias
from blockscale.kernels.parts.hopper_memory import exchange_bytes
from blockscale.kernels.parts.prefill_stage import GROUP, HALF, WARP, Context, Stage
from blockscale.kernels.parts.sums import Finish
from blockscale.kernels.parts.tile_results import Exchange, TileResults
from blockscale.kernels.sm90 import DTYPES

STEPS = HALF // 16  # products of half a unit
READY, FINISH, ALPHA, OWN = 1, 2, 3, 4
"""Named barriers: of all; of all that multiply; of these and the warp with alpha; of the first warpgroup."""
REGISTERS = {1: None, 2: 240, 3: 160}  # of a thread that multiplies, by the number of warpgroups that do
FETCH_REGISTERS = 24


@dataclass(frozen=True)
class Operands:
    """What a warpgroup multiplies, and its sums."""

    mma: Any
    rA: list[cute.Tensor]  # weights, dequantised, of half a unit each
    rWords: list[cute.Tensor]  # the same, as words
    sB: cute.Tensor
    rSums: cute.Tensor


class Sm90PrefillGemm(Stage):
    """The kernel of one configuration; calling it launches it, compiling needs no GPU.

    Args:
        tokens: rows of a that a CTA takes, a multiple of 16 up to 256.
        row_groups: the multiplying warpgroups.
        share: CTAs along rows of b that share activations, 1 or 2. split: CTAs that share k, 1 or 2. Not both.
        buffers: boxes of 64 k of activations. depth: units of weights of each warp.
        most: CTAs of a launch, where k is not split; None for one a tile.
        group: tiles of a cluster along rows of b that are computed for all of a before the next ones.
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
        depth,
        most=None,
        group=16,
        pdl=False,
        ahead=False,
        a_dtype="bf16",
        out_dtype="bf16",
        bias=None,
        activation=None,
    ):
        super().__init__(tokens, row_groups, share, split, buffers, depth, most, group, DTYPES[a_dtype])
        self.pdl, self.ahead = pdl, ahead
        self.out_dtype, self.bias, self.activation = DTYPES[out_dtype], bias, activation
        self.registers = REGISTERS[row_groups]
        self.threads = WARP * (self.warps + GROUP)

    def __repr__(self):
        """Also in the kernel's name."""
        return (
            f"Sm90PrefillGemm_{self.tokens}x{self.rows}_{self.share}x{self.split}_{self.buffers}_{self.depth}_{self.group}_"
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
        ctas, along = self.ctas * cute.ceil_div(n, self.rows * self.share), cute.ceil_div(m, self.tokens)
        grid = [ctas, along, 1]
        if cutlass.const_expr(self.most is not None):
            grid = [cutlass.min(ctas * along, self.most // self.ctas * self.ctas), 1, 1]
        self.kernel(map_a, b, out, bias, (unit, alpha), factor, (m, n, k), ld_out).launch(
            grid=grid,
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
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        smem = self.shared_memory()
        units = cute.ceil_div(k, DEPTH)
        most, rank = cute.ceil_div(units, self.split), block % self.ctas
        first = rank % self.split * most
        c = Context(
            warp=cute.arch.make_warp_uniform(thread // WARP),
            lane=thread % WARP,
            size=size,
            weights=b.toint() + first * UNIT_BYTES,
            rank=rank,
            first=first,
            count=cutlass.max(cutlass.min(units - first, most), 0),
            cluster=block // self.ctas,
            clusters=blocks // self.ctas,
            tiles=self.tiles(m, n, blocks),
            activations=self.activation_ring(smem),
            rows=self.weight_ring(smem),
            sums=self.sum_ring(smem),
            map=map_a,
            smem=smem,
        )
        if c.warp < self.warps:
            if cutlass.const_expr(self.registers is not None):
                cute.arch.setmaxregister_increase(self.registers)
            self.multiply(c, out, bias, ld_out)
        else:
            if cutlass.const_expr(self.registers is not None):
                cute.arch.setmaxregister_decrease(FETCH_REGISTERS)
            if c.warp == self.warps:
                cpasync.prefetch_descriptor(map_a.atom)
                with cute.arch.elect_one():
                    c.activations.initialise()
                    if cutlass.const_expr(self.split > 1):
                        c.sums.initialise()
                if cutlass.const_expr(self.split > 1):
                    c.sums.expect_copies(c.sums.producer())
                self.arrive()
                if cutlass.const_expr(self.share > 1):
                    cute.arch.cluster_wait()  # others arrive at its barriers, and fill
                if cutlass.const_expr(self.ahead):
                    cute.arch.griddepcontrol_wait()
                self.fetch(c)
                if cutlass.const_expr(self.split > 1):
                    cute.arch.cluster_wait()
            else:
                if c.warp == self.warps + 1:
                    with cute.arch.elect_one():
                        c.rows.initialise()
                self.arrive()
                if c.warp == self.warps + 1:
                    self.fetch_weights(c)
                if c.warp == self.warps + 2:
                    self.scale(c, Alpha(factors, factor * weights.FACTOR))
                if cutlass.const_expr(self.ctas > 1):
                    cute.arch.cluster_wait()
        if cutlass.const_expr(self.ctas > 1):
            cute.arch.cluster_arrive()  # nobody leaves before it and the others have what was sent
            cute.arch.cluster_wait()
        c.activations.check()
        c.rows.check()
        if cutlass.const_expr(self.split > 1):
            c.sums.check()

    @cute.jit
    def arrive(self):
        """A warp that does not multiply has initialised what it does."""
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        if cutlass.const_expr(self.ctas > 1):
            cute.arch.cluster_arrive_relaxed()
        cute.arch.barrier_arrive(barrier_id=READY, number_of_threads=self.threads)

    @cute.jit
    def ready(self):
        """The CTA's barriers are there, and those of others that this warp arrives at."""
        if cutlass.const_expr(self.ctas > 1):
            cute.arch.cluster_arrive_relaxed()
        cute.arch.barrier(barrier_id=READY, number_of_threads=self.threads)
        if cutlass.const_expr(self.share > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def multiply(self, c, out, bias, ld_out):
        """The warpgroup's part of the CTA's tiles, one after the other."""
        activations, count = c.activations, c.count
        chain = weights.chain(c.size[2], count, self.dtype)
        first = cutlass.select_(c.warp < GROUP, chain, chain // 2 + 1)  # one warpgroup multiplies while another folds
        mma = self.tiled_mma()
        boxes = self.box_tensor(c)
        rA = [mma.make_fragment_A(mma.partition_shape_A((64, HALF))) for _ in range(2)]
        o = Operands(
            mma=mma,
            rA=rA,
            rWords=[cute.recast_tensor(cute.make_tensor(x.iterator, cute.make_layout(8 * STEPS)), Int32) for x in rA],
            sB=mma.make_fragment_B(mma.get_slice(cute.arch.thread_idx()[0] % (GROUP * WARP)).partition_B(boxes)),
            rSums=cute.make_rmem_tensor(mma.partition_shape_C((64, self.tokens)), Float32),
        )
        rSums = cute.make_tensor(o.rSums.iterator, cute.make_layout(self.tokens // 2))
        rOthers = cute.make_rmem_tensor(self.kept, Float32)
        self.ready()
        slot, before, rows = activations.consumer(), activations.consumer(), c.rows.consumer()
        rUnit = cute.make_rmem_tensor(weights.WORDS, Int32)
        if count > 0:
            self.take(c, rows, rUnit)
        rings = activations, activations.again()
        last = activations.again()
        index = c.cluster
        while index < c.tiles:
            token, block = self.place(c, index)
            rSums.fill(0.0)
            rOthers.fill(0.0)
            unit, stop, folded = Int32(0), cutlass.min(first, count), Int32(0)
            while unit < count:
                held = Int32(0)
                while unit < stop:
                    for half in cutlass.range_constexpr(2):
                        codes = [rUnit[4 * half + i] for i in range(4)]
                        self.dequantise(o.rWords[half], codes, [rUnit[8 + 2 * half + i] for i in range(2)])
                        activations.wait_full(slot)
                        warpgroup.fence()
                        for step in cutlass.range_constexpr(STEPS):
                            sBox = o.sB[None, None, step, slot.index]
                            cute.gemm(o.mma, o.rSums, o.rA[half][None, None, step], sBox, o.rSums)
                        warpgroup.commit_group()
                        if cutlass.const_expr(half == 1):
                            cute.arch.fence_view_async_shared()  # all its words have been dequantised
                            c.rows.arrive_empty(rows, range(self.warps))
                            rows = rows.next()
                            if (unit + 1 < count) | (index + c.clusters < c.tiles):
                                self.take(c, rows, rUnit)
                        warpgroup.wait_group(1)  # the half before this one is multiplied
                        if cutlass.const_expr(half == 1):  # noqa: SIM114 (known while tracing)
                            self.release(rings[half], before)
                        elif held > 0:
                            self.release(rings[half], before)
                        before = slot
                        slot = slot.next()
                    held = Int32(1)
                    unit += 1
                warpgroup.wait_group(0)
                self.release(last, before)
                if stop < count:
                    self.fold(c, rSums, rOthers, folded > 0)
                    rSums.fill(0.0)
                    folded = Int32(1)
                stop = cutlass.min(stop + chain, count)
            self.total(c, rSums, rOthers, folded > 0)
            self.store(c, rSums, out, bias, ld_out, token, block, index == c.cluster)
            index += c.clusters

    def tiled_mma(self):
        registers, k_major = warpgroup.OperandSource.RMEM, OperandMajorMode.K
        op = warpgroup.MmaF16BF16Op(self.dtype, Float32, (64, self.tokens, 16), registers, k_major, k_major)
        mma = cute.make_tiled_mma(op)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        return mma

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
    def fold(self, c, rSums, rOthers, more):
        """Adds a chain's sums to the others, if there are some in shared memory already."""
        self.add_up(rOthers, rSums)
        if cutlass.const_expr(self.kept < self.tokens // 2):
            if more:
                self.add_shared(c, rSums)
            for i in cutlass.range_constexpr(self.kept, self.tokens // 2, 4):
                async_copies.store_fp32x4(self.shared(c, i), *[rSums[i + j] for j in range(4)])

    @cute.jit
    def total(self, c, rSums, rOthers, more):
        """Adds the others to the last chain's sums, if there are some in shared memory."""
        self.add_up(rSums, rOthers)
        if more:
            self.add_shared(c, rSums)

    def add_up(self, rTotal, rMore):
        """Those that are kept in registers."""
        for i in range(self.kept):
            rTotal[i] = rTotal[i] + rMore[i]

    @cute.jit
    def add_shared(self, c, rSums):
        for i in cutlass.range_constexpr(self.kept, self.tokens // 2, 4):
            for j, other in enumerate(async_copies.load_fp32x4(self.shared(c, i))):
                rSums[i + j] = other + rSums[i + j]

    def shared(self, c, i):
        """Where a thread's other sums from the i-th on are; its warpgroup's lie together."""
        thread = c.warp % GROUP * WARP + c.lane
        vectors = c.smem.body.data_ptr().toint() + c.warp // GROUP * (self.tile_bytes // (self.warps // GROUP))
        return vectors + ((i - self.kept) // 4 * GROUP * WARP + thread) * 16

    @cute.jit
    def store(self, c, rSums, out, bias, ld_out, token, block, first):
        """The results of a tile, by each warpgroup its own."""
        m, n, _ = c.size
        group, tokens = c.warp // GROUP, self.tokens // self.split
        body = c.smem.body.data_ptr().toint()
        address = body + group * (self.tile_bytes // (self.warps // GROUP))
        if first:
            cute.arch.barrier(barrier_id=ALPHA, number_of_threads=WARP * (self.warps + 1))
        if cutlass.const_expr(self.split > 1):  # a CTA has one tile
            thread = cute.arch.thread_idx()[0]
            own = body + self.tile_bytes + self.buffers * self.tokens * HALF * 2 + self.depth * self.warps * UNIT_BYTES
            cute.arch.cluster_wait()  # the other's barrier is there
            barrier = c.sums.copy_barrier(c.sums.producer(), exchange_bytes(self.tokens, self.warps, self.split))
            exchange = Exchange(own, WARP * self.warps, c.rank, barrier.toint())
            exchange.give(rSums, thread)
            cute.arch.barrier(barrier_id=FINISH, number_of_threads=WARP * self.warps)  # nobody reads activations
            async_copies.wait_for_peers(barrier.toint(), 0)
            exchange.take(rSums, thread)
            token += c.rank * tokens
            address = body + group * (tokens * 64 * 2)
        if cutlass.const_expr(self.ahead):
            cute.arch.griddepcontrol_wait()
        alpha = c.smem.alpha.data_ptr().toint()
        scale = async_copies.load_fp32(alpha), async_copies.load_fp32(alpha + 4)
        offset = None if cutlass.const_expr(self.bias is None) else Bias(bias, n)
        finish = Finish(out, self.out_dtype, ld_out, m, n, scale, offset, self.activation)
        column, thread = block * self.rows + group * 64, c.warp % GROUP * WARP + c.lane
        own = {"barrier_id": OWN + group, "number_of_threads": GROUP * WARP}
        step = tokens if self.out_dtype.width == 16 else tokens // 32 * 16  # for which there is room
        for first in cutlass.range_constexpr(0, tokens, step):
            results = TileResults(address, min(step, tokens - first), finish)
            cute.arch.barrier(**own)  # nobody reads what was there before
            results.stage(rSums, first, c.warp % GROUP, c.lane, column)
            cute.arch.barrier(**own)
            results.write((token + first, column), thread)
        cute.arch.barrier(**own)

    @cute.jit
    def scale(self, c, alpha):
        """Alpha to shared memory."""
        if cutlass.const_expr(self.ahead):
            cute.arch.griddepcontrol_wait()
        for i, value in enumerate(alpha.load()):
            async_copies.store_fp32(c.smem.alpha.data_ptr().toint() + 4 * i, value)
        cute.arch.barrier_arrive(barrier_id=ALPHA, number_of_threads=WARP * (self.warps + 1))
