"""Weight-only NVFP4 GEMM for sm_90a, many tokens: warpgroups multiply tiles that keep the tensor cores busy.

A tile is 64 x row_groups rows of b by `tokens` rows of a. Clusters take tiles in turn, a tile a CTA. `share` CTAs of a
cluster lie along rows of b, need the same activations and fetch them for one another; or `split` CTAs share k. Roles:

    role      warps           does
    multiply  4 x row_groups  a warpgroup multiplies 64 rows, a warp dequantises 16 of them; then its results
    fetch     1               brings halves of units of activations (TMA), asks L2 for weights
    scale     1               brings alpha

Ring:

    ring         slots    full                              empty
    activations  buffers  1 arrival (fetch), bytes of all   1 arrival a warp of every CTA that shares them
                          boxes of the cluster

Timeline of a warp: each half of a unit (64 k) is dequantised while the tensor core multiplies the half before it, and
codes and scales of the two units behind it are on their way to registers. While results leave, activations and weights
of the next tile come.

    loads         2        3        4
    registers  0a 0b    1a 1b    2a 2b
    wgmma      .  0a 0b    1a 1b    2a 2b

Tensor cores truncate: a sum of many products loses more than the contract allows. Hence chains of `weights.chain`
units: after each, its sums are added to others in fp32, which live in registers, or for many tokens in shared memory.

Registers: warps that multiply take over those of the warpgroup that fetches (PTX: setmaxnreg); with fewer the compiler
would make them wait for every product.

Shared memory: barriers and alpha; of each warpgroup the other sums, if they live there, and its results on their way
out; activations, `buffers` boxes of tokens x 64 k, swizzled by 128 bytes. Where CTAs share k, sums and results take the
place of activations in the end.
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
from blockscale.kernels.parts.hopper_memory import GROUPS_HEAD, of_prefill, second_bytes, tile_bytes
from blockscale.kernels.parts.ring import Ring
from blockscale.kernels.parts.sums import Finish
from blockscale.kernels.parts.tile_results import Exchange, TileResults
from blockscale.kernels.sm90 import DTYPES, READY, WARP

GROUP = 4  # warps of a warpgroup
HALF = DEPTH // 2  # k of a box, 128 bytes of a row
STEPS = HALF // 16  # products of half a unit
UNITS = 2  # of weights, on their way to a warp's registers
FINISH, ALPHA, OWN = 2, 3, 4  # named barriers: of all that multiply, of these and `scale`, of the first warpgroup
REGISTERS = {1: None, 2: 240, 3: 160}  # of a thread that multiplies, by the number of warpgroups that do
FETCH_REGISTERS = 24


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
    map: cpasync.TmaInfo
    smem: Any


@dataclass(frozen=True)
class Operands:
    """What a warpgroup multiplies, and its sums."""

    mma: Any
    rUnits: list[cute.Tensor]  # weights as they come
    rA: list[cute.Tensor]  # dequantised, of half a unit each
    rWords: list[cute.Tensor]  # the same, as words
    sB: cute.Tensor
    rSums: cute.Tensor


class Sm90PrefillGemm:
    """The kernel of one configuration; calling it launches it, compiling needs no GPU.

    Args:
        tokens: rows of a that a CTA takes, a multiple of 16 up to 256.
        row_groups: the multiplying warpgroups.
        share: CTAs along rows of b that share activations, 1 or 2. split: CTAs that share k, 1 or 2. Not both.
        buffers: boxes of 64 k of activations.
        most: CTAs of a launch, where k is not split; None for one a tile.
        group: tiles of a cluster along rows of b that are computed for all of a before the next ones.
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
        most=None,
        group=16,
        prefetch=4,
        pdl=False,
        ahead=False,
        a_dtype="bf16",
        out_dtype="bf16",
        bias=None,
        activation=None,
    ):
        self.tokens, self.share, self.split, self.buffers = tokens, share, split, buffers
        self.most, self.group, self.prefetch, self.pdl, self.ahead = most, group, prefetch, pdl, ahead
        self.dtype, self.out_dtype = DTYPES[a_dtype], DTYPES[out_dtype]
        self.bias, self.activation = bias, activation
        self.registers = REGISTERS[row_groups]
        self.warps = GROUP * row_groups
        self.threads = WARP * (self.warps + GROUP)
        self.rows = ROWS * self.warps
        self.ctas = share * split
        self.second = second_bytes(tokens, self.warps) // row_groups
        shape = tokens, self.warps, split, self.out_dtype.width // 8
        self.tile_bytes, self.smem_bytes = tile_bytes(*shape), of_prefill(*shape, buffers)

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
        ctas = self.ctas * cute.ceil_div(n, self.rows * self.share) * cute.ceil_div(m, self.tokens)
        if cutlass.const_expr(self.most is not None):
            ctas = cutlass.min(ctas, self.most // self.ctas * self.ctas)
        self.kernel(map_a, b, out, bias, (unit, alpha), factor, (m, n, k), ld_out).launch(
            grid=[ctas, 1, 1],
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
            tiles=cute.ceil_div(n, self.rows * self.share) * cute.ceil_div(m, self.tokens),
            activations=self.ring(smem),
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
                cute.arch.mbarrier_init_fence()
                self.ready(False)
                if cutlass.const_expr(self.ahead):
                    cute.arch.griddepcontrol_wait()
                self.fetch(c)
            else:
                if c.warp == self.warps + 1:
                    self.scale(c, Alpha(factors, factor * weights.FACTOR))
                if cutlass.const_expr(self.share > 1):
                    self.sync_cluster()
            if cutlass.const_expr(self.split > 1):
                self.sync_cluster()
        if cutlass.const_expr(self.ctas > 1):
            self.sync_cluster()  # nobody leaves while another reads its sums or arrives at its barriers
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
        first = c.smem.body.data_ptr().toint() + self.tile_bytes
        pointer = cute.make_ptr(self.dtype, first, cute.AddressSpace.smem, assumed_align=1024)
        layout = self.boxes(self.buffers, share)
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner), layout.outer)

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
    def place(self, c, index):
        """Of the tile of this number: the first token, this CTA's block of rows, and where in k it begins: were it the
        same for all, all would ask for the same activations at the same time."""
        m, n, _ = c.size
        along, across = cute.ceil_div(m, self.tokens), cute.ceil_div(n, self.rows * self.share)
        band = index // (self.group * along)
        width = cutlass.min(across - band * self.group, self.group)
        within = index - band * (self.group * along)
        block = band * self.group + within % width
        token = within // width * self.tokens
        return token, block * self.share + c.rank // self.split, block % cutlass.max(c.count, 1)

    @cute.jit
    def units_of(self, c, block, warp):
        """Where the units of a warp's tile of a block of rows begin; the last one's, if there is no such tile."""
        _, n, k = c.size
        tile = cutlass.min(block * self.warps + warp, cute.ceil_div(n, ROWS) - 1)
        return c.weights + Int64(tile) * (cute.ceil_div(k, DEPTH) * UNIT_BYTES)

    @cute.jit
    def multiply(self, c, out, bias, ld_out):
        """The warpgroup's part of the CTA's tiles, one after the other."""
        activations, count = c.activations, c.count
        chain = weights.chain(c.size[2], count, UNITS)
        first = chain
        if cutlass.const_expr(self.second > 0):  # while one warpgroup adds its sums to others, another multiplies
            first = cutlass.select_(c.warp < GROUP, chain, cutlass.max(chain // 4 * 2, UNITS))
        mma = self.tiled_mma()
        boxes = self.box_tensor(c)
        rA = [mma.make_fragment_A(mma.partition_shape_A((64, HALF))) for _ in range(2)]
        o = Operands(
            mma=mma,
            rUnits=[cute.make_rmem_tensor(weights.WORDS, Int32) for _ in range(UNITS)],
            rA=rA,
            rWords=[cute.recast_tensor(cute.make_tensor(x.iterator, cute.make_layout(8 * STEPS)), Int32) for x in rA],
            sB=mma.make_fragment_B(mma.get_slice(cute.arch.thread_idx()[0] % (GROUP * WARP)).partition_B(boxes)),
            rSums=cute.make_rmem_tensor(mma.partition_shape_C((64, self.tokens)), Float32),
        )
        rSums = cute.make_tensor(o.rSums.iterator, cute.make_layout(self.tokens // 2))
        rOthers = cute.make_rmem_tensor(1 if self.second else self.tokens // 2, Float32)
        index = c.cluster
        token, block, start = self.place(c, index)
        units = self.units_of(c, block, c.warp)
        self.load_first(o, c, units, start)
        self.ready(True)
        slot, before = activations.consumer(), activations.consumer()
        rings = [[activations, activations.again()], [activations.again(), activations.again()]]
        last = activations.again()
        while index < c.tiles:
            rSums.fill(0.0)
            if cutlass.const_expr(not self.second):
                rOthers.fill(0.0)
            unit, stop, folded = Int32(0), cutlass.min(first, count), Int32(0)
            while unit < count:
                held = Int32(0)
                while unit < stop:
                    slot, before = self.multiply_unit(c, o, 0, units, start, unit, rings[0], slot, before, held)
                    if unit + 1 < stop:
                        slot, before = self.multiply_unit(c, o, 1, units, start, unit + 1, rings[1], slot, before, held)
                    held = Int32(1)
                    unit += UNITS
                warpgroup.wait_group(0)
                self.release(last, before)
                if stop < count:
                    self.fold(c, rSums, rOthers, folded > 0)
                    rSums.fill(0.0)
                    folded = Int32(1)
                stop = cutlass.min(stop + chain, count)
            self.total(c, rSums, rOthers, folded > 0)
            index += c.clusters
            at_token, at_block = token, block
            token, block, start = self.place(c, index)
            if index < c.tiles:
                units = self.units_of(c, block, c.warp)
                self.load_first(o, c, units, start)
            self.store(c, rSums, out, bias, ld_out, at_token, at_block, index - c.clusters == c.cluster)

    @cute.jit
    def multiply_unit(self, c, o, turn: cutlass.Constexpr, units, start, unit, rings, slot, before, held):
        """A unit whose words are in registers; the one that comes UNITS later takes their place."""
        for half in cutlass.range_constexpr(2):
            rUnit = o.rUnits[turn]
            codes, scales = [rUnit[4 * half + i] for i in range(4)], [rUnit[8 + 2 * half + i] for i in range(2)]
            self.dequantise(o.rWords[half], codes, scales)
            if cutlass.const_expr(half == 1):
                self.load(rUnit, c, units, start, unit + UNITS)
            c.activations.wait_full(slot)
            warpgroup.fence()
            for step in cutlass.range_constexpr(STEPS):
                sBox = o.sB[None, None, step, slot.index]
                cute.gemm(o.mma, o.rSums, o.rA[half][None, None, step], sBox, o.rSums)
            warpgroup.commit_group()
            warpgroup.wait_group(1)  # the half before this one is multiplied
            if cutlass.const_expr(half == 1 or turn > 0):  # noqa: SIM114 (known while tracing)
                self.release(rings[half], before)
            elif held > 0:
                self.release(rings[half], before)
            before = slot
            slot = slot.next()
        return slot, before

    def tiled_mma(self):
        registers, k_major = warpgroup.OperandSource.RMEM, OperandMajorMode.K
        op = warpgroup.MmaF16BF16Op(self.dtype, Float32, (64, self.tokens, 16), registers, k_major, k_major)
        mma = cute.make_tiled_mma(op)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        return mma

    @cute.jit
    def release(self, activations, slot):
        if cutlass.const_expr(self.share > 1):
            activations.arrive_empty_in(slot, range(self.warps), self.share)
        else:
            activations.arrive_empty(slot, range(self.warps))

    @cute.jit
    def load_first(self, o, c, units, start):
        """What a tile begins with."""
        for i in cutlass.range_constexpr(UNITS):
            self.load(o.rUnits[i], c, units, start, Int32(i))

    @cute.jit
    def load(self, registers, c, units, start, place):
        """The lane's words of the unit at this place of the circle that begins at `start`, if there is one."""
        turned = start + place
        unit = cutlass.select_(turned >= c.count, turned - c.count, turned)
        at = units + unit * UNIT_BYTES
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

    @cute.jit
    def fold(self, c, rSums, rOthers, more):
        """Adds a chain's sums to the others, if there are some in shared memory already."""
        if cutlass.const_expr(not self.second):
            for i in cutlass.range_constexpr(self.tokens // 2):
                rOthers[i] = rOthers[i] + rSums[i]
        else:
            if more:
                self.total(c, rSums, rOthers, True)
            for i in cutlass.range_constexpr(self.tokens // 8):
                async_copies.store_fp32x4(self.other(c, i), *[rSums[4 * i + j] for j in range(4)])

    @cute.jit
    def total(self, c, rSums, rOthers, more):
        """Adds the others to the last chain's sums, if there are some in shared memory."""
        if cutlass.const_expr(not self.second):
            for i in cutlass.range_constexpr(self.tokens // 2):
                rSums[i] = rOthers[i] + rSums[i]
        elif more:
            for i in cutlass.range_constexpr(self.tokens // 8):
                for j, other in enumerate(async_copies.load_fp32x4(self.other(c, i))):
                    rSums[4 * i + j] = other + rSums[4 * i + j]

    def other(self, c, i):
        """Where a thread's vectors of other sums are, its warpgroup's together."""
        thread = c.warp % GROUP * WARP + c.lane
        return c.smem.body.data_ptr().toint() + c.warp // GROUP * self.second + (i * GROUP * WARP + thread) * 16

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
            exchange = Exchange(body, WARP * self.warps, c.rank)
            cute.arch.barrier(barrier_id=FINISH, number_of_threads=WARP * self.warps)  # nobody reads activations
            exchange.give(rSums, cute.arch.thread_idx()[0])
            self.sync_cluster()
            exchange.take(rSums, cute.arch.thread_idx()[0])
            token += c.rank * tokens
            address = body + tokens * self.rows * 4 + group * (tokens * 64 * (self.out_dtype.width // 8))
        if cutlass.const_expr(self.ahead):
            cute.arch.griddepcontrol_wait()
        alpha = c.smem.alpha.data_ptr().toint()
        scale = async_copies.load_fp32(alpha), async_copies.load_fp32(alpha + 4)
        offset = None if cutlass.const_expr(self.bias is None) else Bias(bias, n)
        finish = Finish(out, self.out_dtype, ld_out, m, n, scale, offset, self.activation)
        results = TileResults(address, tokens, finish)
        corner = token, block * self.rows + group * 64
        own = {"barrier_id": OWN + group, "number_of_threads": GROUP * WARP}
        cute.arch.barrier(**own)  # nobody reads other sums any more
        results.stage(rSums, c.warp % GROUP, c.lane, corner[1])
        cute.arch.barrier(**own)
        results.write(corner, c.warp % GROUP * WARP + c.lane)
        cute.arch.barrier(**own)

    @cute.jit
    def scale(self, c, alpha):
        """Alpha to shared memory."""
        if cutlass.const_expr(self.ahead):
            cute.arch.griddepcontrol_wait()
        for i, value in enumerate(alpha.load()):
            async_copies.store_fp32(c.smem.alpha.data_ptr().toint() + 4 * i, value)
        cute.arch.barrier_arrive(barrier_id=ALPHA, number_of_threads=WARP * (self.warps + 1))

    @cute.jit
    def fetch(self, c):
        """Halves of units of activations, in the order in which the CTA multiplies them."""
        activations, count = c.activations, c.count
        slot = activations.producer()
        boxes = self.box_tensor(c, self.share)
        shape = self.tokens // self.share, HALF
        rank = c.rank if cutlass.const_expr(self.share > 1) else 0
        index = c.cluster
        self.ask_first(c, index)
        while index < c.tiles:
            token, block, start = self.place(c, index)
            units = self.units_of(c, block, c.lane)
            for place in cutlass.range(2 * count, unroll=1):
                self.ask(c, units, start, place)
                if place == count:
                    self.ask_first(c, index + c.clusters)
                activations.wait_empty(slot)
                activations.expect_copies(slot)
                unit = start + place // 2
                unit = c.first + cutlass.select_(unit >= count, unit - count, unit)
                corner = token + rank * shape[0], unit * DEPTH + place % 2 * HALF
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
            index += c.clusters

    @cute.jit
    def ask(self, c, units, start, place):
        """Asks L2 for the unit of weights so many places ahead, once a unit; a lane for a warp's."""
        ahead = place // 2 + self.prefetch
        turned = start + ahead
        unit = cutlass.select_(turned >= c.count, turned - c.count, turned)
        if (place % 2 == 0) & (ahead < c.count) & (c.lane < self.warps):
            async_copies.ask_l2(units + unit * UNIT_BYTES, Int32(UNIT_BYTES))

    @cute.jit
    def ask_first(self, c, index):
        """Asks L2 for the weights that a tile begins with, if there is such a tile."""
        _, block, start = self.place(c, index)
        number = cutlass.min(c.count - start, self.prefetch)
        if (index < c.tiles) & (number > 0) & (c.lane < self.warps):
            at = self.units_of(c, block, c.lane) + start * UNIT_BYTES
            async_copies.ask_l2(at, number * UNIT_BYTES)
