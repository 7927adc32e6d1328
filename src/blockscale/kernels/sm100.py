"""NVFP4 GEMM for sm_100a: out = act(alpha x unit_a x unit_b x (a x scales of a) @ (b x scales of b)^T + bias).

unit_a and unit_b are the operands' global scales. One kernel, of which a configuration makes what it needs: a tile of
128 x N is computed by one CTA, one of 256 x N by a pair. Words such as slot, phase and commit are explained in
parts/ring.py, boxes in parts/tma.py, scale atoms in parts/geometry.py, blocks of tiles in parts/schedule.py; what the
roles call is there, in parts/tensorcore.py and in parts/epilogue.py, best read in this order.

Roles. Every role walks the CTA's tiles in the same order, and for each of them its k tiles of 256:

    role      warps  does
    load      5      brings codes and scales of a and b from global to shared memory (TMA)
    mma       4      copies scales from shared to tensor memory and multiplies (tcgen05); owns tensor memory
    epilogue  0-3    takes sums from tensor memory, finishes and stores them; warp w has rows 32w to 32w + 31
    schedule  6      with schedule "clc" alone, in one CTA of a cluster: asks for its next tile (cluster launch control)

Rings. A slot has two barriers; what completes a phase of each, in a CTA without a cluster:

    ring     slots         full                                         empty
    ab       stages        1 arrival (load) and the bytes of its boxes  1 commit (mma): its operands have been read
    acc      accumulators  1 commit (mma): the sums are complete        4 arrivals (epilogue, 1 a warp): it has them
    answers  2             1 arrival (schedule) and 16 bytes            7 arrivals: each warp has read the answer

Timeline of a CTA with two tiles, a and b, of four k tiles each; three stages, one accumulator:

    load      a0 a1 a2 a3 b0 b1 b2 .  .  b3
    mma       .  a0 a1 a2 a3 .  .  .  b0 b1 b2 b3
    epilogue  .  .  .  .  .  a  a  a  .  .  .  .  b  b  b

The load warp is ahead by as many k tiles as there are stages. With two accumulators the mma warp need not wait:

    mma       .  a0 a1 a2 a3 b0 b1 b2 b3
    epilogue  .  .  .  .  .  a  a  a  .  b  b  b

Two of 256 columns and the scales do not fit. They overlap then: the last columns of one are the first of the other, the
epilogue reads these first and gives them up at once, and only so long does the mma warp wait:

    mma       .  a0 a1 a2 a3 .  b0 b1 b2 b3
    epilogue  .  .  .  .  .  a* a  a  .  .  b* b  b

A pair. Each CTA loads its 128 rows of a and their scales, half of b's rows, and the scales of all of them. The first
CTA's mma warp issues for both, and each tensor core reads the shared memory of both; sums of a CTA's rows are in its
own tensor memory. All bytes of a stage report to the first CTA's `full`, its commits go to both CTAs' `empty` and, for
sums, `full`, and all 8 warps of both epilogues report to its `empty`. The other mma warp has nothing to do.

A cluster of W x H CTAs, W along m, computes a block of W by H tiles of CTAs at a time. CTAs side by side along n need
the same rows of a, those along m the same of b: each fetches a part, a box, and multicast brings it to all of them. A
CTA may fetch for a slot again only when all that it fetches for have read theirs: its `empty` counts a commit of each.
A launch may mix clusters of a larger and a smaller shape. All CTAs of a cluster start and end together.

Shared memory, from its first byte; N' is N, or N / 2 in a pair:

    1024                      barriers of the rings, the address of tensor memory, answers
    staging                   the epilogue's boxes of results, where TMA stores them
    stages x 16384            codes of a: 128 rows of 128 bytes, swizzled by 128 bytes
    stages x N' x 128         codes of b: N' rows of 128 bytes, swizzled alike
    stages x 2048             scales of a: an atom of 512 bytes for each step of k = 64
    stages x atoms x 2048     scales of b: the same for each atom of 128 rows that a tile touches

Tensor memory, columns of 128 lanes x 32 bits:

    accumulators x N          sums: row r of the CTA's rows in lane r; less where two overlap
    sets x 16                 scales of a: 4 columns a step; row r in column r // 32 of lanes r % 32 + 0, 32, 64 and 96
                              (each group of 32 lanes has a copy), a byte for each of the step's 4 blocks of 16
    sets x atoms x 16         scales of b, next to those of a of their set: the same, 4 columns an atom, step by step

A stage's scales have a set of columns of their own, so that the barriers of its slot guard them too; where there are
fewer sets, the mma warp waits until the stage whose set comes next has been multiplied. Unless N is 128 or 256, tiles
of b may begin within an atom, at a multiple of 32 rows (with N = 64 every second one does): the tensor core is then
given the column, of the same atoms, where their rows begin. Scales of rows beyond m and n may be anything: they meet
sums that are not stored.
"""

from dataclasses import dataclass, replace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float64, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from blockscale.kernels.parts import storage, tensorcore, tma
from blockscale.kernels.parts.arithmetic import Alpha
from blockscale.kernels.parts.cluster import Cluster
from blockscale.kernels.parts.epilogue import Epilogue
from blockscale.kernels.parts.geometry import ATOM_ROWS, CTA_ROWS, SMEM_BYTES, TILE_K, Geometry
from blockscale.kernels.parts.grid import Memory
from blockscale.kernels.parts.ring import Ring, Slot
from blockscale.kernels.parts.schedule import Tiles
from blockscale.kernels.parts.staging import staging_bytes
from blockscale.kernels.parts.tensorcore import TensorCore
from blockscale.kernels.parts.tma import CODE_BYTES

WARP = 32
EPILOGUE = range(4)  # whole, and from 0 on: warp w of four may load lanes 32w to 32w + 31 of tensor memory
MMA = 4
LOAD = 5
SCHEDULE = 6


@dataclass(frozen=True)
class Context:
    """What the roles share."""

    warp: Int32
    geometry: Geometry
    cluster: Cluster
    ab: Ring
    sf: Ring | None  # of scales, where they have a ring of their own
    acc: Ring
    tiles: Tiles
    k: Int32
    k_tiles: Int32
    batches: tuple[Int32, Int32]  # matrices of a and of b: as many as of the output, or one for all
    smem: Any
    tmem: Int32 | None  # the address of tensor memory, once there is some
    memory: Memory

    @property
    def rings(self) -> tuple[Ring, ...]:
        own = () if self.sf is None else (self.sf,)
        return self.ab, *own, self.acc, *self.tiles.rings

    def turn(self, sums: Slot) -> Int32:
        """Which accumulator a slot of `acc` stands for."""
        return sums.lap if self.geometry.overlap else sums.index

    def accumulator(self, sums: Slot) -> Int32:
        """Its address in tensor memory."""
        return self.tmem + self.turn(sums) * self.geometry.accumulator_stride


class Sm100Gemm:
    """The kernel of one configuration that `supports` passes; calling it launches it, compiling needs no GPU.

    Args:
        tile: (128, N) of a CTA, or (256, N) of a pair of CTAs; see `Geometry` for N.
        stages: slots of operands in shared memory; None means as many as fit.
        accumulators: tiles of sums in tensor memory; with 2 a tile is multiplied while the one before is stored.
        cluster: CTAs of a cluster along m and n, None for those of the tile: they fetch operands for one another.
        fallback_cluster: a smaller shape that a launch may use where the other one does not fit; None for none.
        schedule: "static" or "clc", see parts/schedule.py.
        raster: "m" or "n": the dimension along which consecutive tiles lie.
        group: blocks of tiles in a band across it.
        pdl: the kernel may start while the one before it in the stream still runs.
        l2_a, l2_b, l2_scales: "evict_first", "evict_last" or None: what L2 is told about operands.
        prefetch: k tiles of its first tile that a CTA asks L2 for before it loads any.
        swap: the kernel's rows are those of b, and its columns those of a; the output is the same.
        store, read, release, store_slots, l2_out: how results leave, see `Epilogue`.
        out_dtype: "fp16", "bf16", "fp32", or "nvfp4" with a given global scale.
        bias: None or something true. activation: None, "relu", "gelu" or "silu".
        smem: bytes of dynamic shared memory that a CTA may have.
    """

    # What a kernel that is made of this one has otherwise.
    GEOMETRY = Geometry
    ownership = "turns"
    pace = 0
    WARPS = SCHEDULE + 1  # the last of them where tiles are requested alone

    def __init__(
        self,
        tile,
        *,
        stages=None,
        accumulators=1,
        cluster=None,
        fallback_cluster=None,
        schedule="static",
        raster="m",
        group=1,
        pdl=False,
        l2_a=None,
        l2_b=None,
        l2_scales=None,
        prefetch=0,
        swap=False,
        store="direct",
        read=32,
        release="late",
        store_slots=2,
        l2_out=None,
        out_dtype="bf16",
        bias=None,
        activation=None,
        smem=SMEM_BYTES,
    ):
        staging = staging_bytes(store, store_slots, tile[1], read, out_dtype)
        self.geometry = self.GEOMETRY(tile, stages, accumulators, smem, staging, cluster)
        self.fallback_cluster = None if fallback_cluster == self.geometry.shape else fallback_cluster
        self.requests, self.raster, self.group = schedule == "clc", raster, group
        self.pdl, self.prefetch, self.swap = pdl, prefetch, swap
        self.policies = tuple(tma.POLICIES[hint] for hint in (l2_a, l2_b, l2_scales, l2_scales))
        self.epilogue = Epilogue(
            tile[1],
            out_dtype,
            store=store,
            read=read,
            release=release,
            store_slots=store_slots,
            l2_out=l2_out,
            swap=swap,
            bias=bias,
            activation=activation,
            overlap=self.geometry.overlap,
            pace=self.pace,
        )

    def __repr__(self):
        """Also in the kernel's name."""
        g = self.geometry
        return f"Sm100Gemm_{g.tile[0]}x{g.tile_n}_{g.slots}_{g.accumulators}_{self.raster}_{self.epilogue.out_dtype}"

    @cute.jit
    def __call__(
        self, a: cute.Pointer, b: cute.Pointer, sfa: cute.Pointer, sfb: cute.Pointer, out: cute.Pointer,
        unit_a: cute.Pointer, unit_b: cute.Pointer, alpha: cute.Pointer, bias: cute.Pointer, sf_out: cute.Pointer,
        unit_out: cute.Pointer, factor: Float64, m: Int32, n: Int32, k: Int32, ld_out: Int64, batch: Int32,
        batch_a: Int32, batch_b: Int32, ctas: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launches out = act(unit_a x unit_b x alpha x factor x a @ b^T + bias) for every matrix of a batch.

        Args:
            a, b: codes, (batch_a, m, k / 2) and (batch_b, n, k / 2) bytes, aligned to 16 bytes.
            sfa, sfb: their scales in the 128x4 layout, each matrix padded to 128 rows; what these rows hold is ignored.
            out: (batch, m, n), rows ld_out elements apart, matrices m * ld_out.
            unit_a, unit_b, alpha: fp32, one each. factor: one more, by value.
            bias: (n,) fp16, bf16 or fp32, ignored unless the configuration has one.
            sf_out, unit_out: of NVFP4, whose codes `out` has, rows ld_out bytes apart: scales in the 128x4 layout, each
                matrix padded to 128 rows, and the global scale, fp32. Columns are padded to a multiple of 64.
            m, n: at least 1. k: of the storage, a multiple of 64, zeros in codes and scales beyond the last element.
            batch: matrices of out; batch_a and batch_b are the same or 1.
            ctas: at most so many are launched, but for a cluster at least; not heeded where tiles are requested.
        """
        g = self.geometry
        width, height = g.shape
        k = cute.assume(k, 64)
        map_out = self.epilogue.map(self.epilogue.output(out, m, n, ld_out), batch)
        if cutlass.const_expr(self.swap):
            a, b, sfa, sfb, m, n, batch_a, batch_b = b, a, sfb, sfa, n, m, batch_b, batch_a
        blocks_m, blocks_n = cute.ceil_div(m, CTA_ROWS * width), cute.ceil_div(n, g.tile_n * height)
        blocks = blocks_m * blocks_n * batch
        if cutlass.const_expr(not self.requests):
            blocks = cutlass.min(blocks, cutlass.max(ctas // (width * height), 1))
        self.kernel(
            tma.maps(g, (a, b), (sfa, sfb), (m, n), k, (batch_a, batch_b)),
            map_out,
            out,
            ld_out,
            (unit_a, unit_b, alpha),
            factor,
            (bias, sf_out, unit_out),
            (m, n, k),
            (blocks_m, blocks_n, batch),
            (batch_a, batch_b),
        ).launch(
            grid=[blocks * width, height, 1],
            block=[WARP * (self.WARPS if self.requests else self.WARPS - 1), 1, 1],
            cluster=[width, height, 1] if width * height > 1 else None,
            fallback_cluster=None if self.fallback_cluster is None else [*self.fallback_cluster, 1],
            smem=g.smem_bytes,
            min_blocks_per_mp=1,
            use_pdl=self.pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        maps: tuple[cpasync.TmaInfo, cpasync.TmaInfo, cpasync.TmaInfo, cpasync.TmaInfo],
        map_out: cpasync.TmaInfo | None,
        out: cute.Pointer,
        ld_out: Int64,
        factors: tuple[cute.Pointer, cute.Pointer, cute.Pointer],
        factor: Float64,
        beside: tuple[cute.Pointer, cute.Pointer, cute.Pointer],
        size: tuple[Int32, Int32, Int32],
        blocks: tuple[Int32, Int32, Int32],
        batches: tuple[Int32, Int32],
    ):
        (m, n, k), blocks = self.sizes(size, blocks)
        g = self.geometry
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cluster = Cluster.here(g, self.fallback_cluster)
        smem = storage.shared_memory(g, self.requests)
        context = Context(
            warp=warp,
            geometry=g,
            cluster=cluster,
            ab=storage.operand_ring(g, smem, cluster),
            sf=storage.scale_ring(g, smem, cluster),
            acc=storage.sum_ring(g, smem, cluster),
            tiles=storage.tiles(
                g, smem, cluster, (*blocks, self.raster, self.group, g.shape), self.requests, self.ownership == "lines"
            ),
            k=k,
            k_tiles=cute.ceil_div(k, TILE_K),
            batches=batches,
            smem=smem,
            tmem=None,
            memory=Memory(
                self.pdl,
                [info.atom for info in (*maps, map_out) if info is not None],
                operands=storage.operands(g, smem, cluster, maps, self.policies),
                alpha=Alpha(factors, factor),
                output=self.epilogue.output(out, *((n, m) if self.swap else (m, n)), ld_out),
                map=map_out,
                bias=beside[0],
                scales=beside[1],
                unit=beside[2],
            ),
        )
        self.prepare(context)
        context = replace(context, tmem=smem.tmem.ptr.load())
        self.play(context)
        self.finish(context)
        for ring in context.rings:
            ring.check()

    def sizes(self, size, blocks):
        """The kernel's m, n and k, and how many blocks of tiles there are along m, n and the batch."""
        return size, blocks

    @cute.jit
    def prepare(self, c):
        """Barriers and tensor memory, before any role starts, in no CTA of the cluster before all have theirs."""
        g = c.geometry
        if c.warp == LOAD:
            for map in c.memory.descriptors:
                cpasync.prefetch_descriptor(map)
            if cutlass.const_expr(not self.pdl):  # otherwise preparing does not wait for the grids before
                self.ask_ahead(c, c.memory.after_grids_before().operands)
            with cute.arch.elect_one():
                for ring in c.rings:
                    ring.initialise()
            cute.arch.mbarrier_init_fence()
        if c.warp == MMA:
            tensorcore.allocate(c.smem.tmem.ptr, g.tmem_allocation, g.ctas)
        self.synchronise()

    @cute.jit
    def play(self, c):
        """Each warp its role."""
        if c.warp == LOAD:
            self.load(c)
        if (c.warp == MMA) & c.cluster.leader:
            self.mma(c)
        if c.warp < EPILOGUE.stop:
            self.epilogue.run(c, EPILOGUE)
        if (c.warp == SCHEDULE) & c.cluster.first:
            self.schedule(c)

    @cute.jit
    def synchronise(self):
        """All warps of the cluster."""
        tensorcore.before_sync()
        if cutlass.const_expr(self.geometry.shape == (1, 1)):
            cute.arch.sync_threads()
        else:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        tensorcore.after_sync()

    def corners(self, c, work):
        """Where the boxes of this CTA begin in a, b, scales of a, scales of b, as a function of the slot along k."""
        g, (batch_a, batch_b) = c.geometry, c.batches
        row, column, matrix = c.tiles.at(work)
        row_b = column * g.tile_n + c.cluster.half * g.b_rows  # its half, where two CTAs have b between them
        atom_b = column * g.tile_n // ATOM_ROWS
        of_a, of_b = cutlass.min(matrix, batch_a - 1), cutlass.min(matrix, batch_b - 1)
        return lambda k_tile: (
            (row * CTA_ROWS, k_tile * CODE_BYTES, of_a),
            (row_b, k_tile * CODE_BYTES, of_b),
            (0, k_tile * g.SCALE_STEPS, row, of_a),
            (0, k_tile * g.SCALE_STEPS, atom_b, of_b),
        )

    @cute.jit
    def ask_ahead(self, c, operands):
        """Asks L2 for the first k tiles of this CTA's first tile."""
        if cutlass.const_expr(self.prefetch > 0):
            corners = self.corners(c, c.tiles.first())
            for k_tile in cutlass.range(cutlass.min(c.k_tiles, self.prefetch), unroll=1):
                for operand, corner in zip(operands, corners(k_tile), strict=True):
                    operand.prefetch(corner)

    @cute.jit
    def load(self, c):
        """Fills slots with the boxes of a k tile, for one tile after the other."""
        cluster, ab, tiles, k_tiles = c.cluster, c.ab, c.tiles, c.k_tiles
        operands = c.memory.after_grids_before().operands
        if cutlass.const_expr(self.pdl):
            self.ask_ahead(c, operands)
        slot = ab.producer()
        work = tiles.first()
        while work.valid:
            corners = self.corners(c, work)
            for k_tile in cutlass.range(k_tiles, unroll=1):
                ab.wait_empty(slot)
                if cluster.leader:
                    ab.expect_copies(slot)
                for operand, corner in zip(operands, corners(k_tile), strict=True):
                    operand.fetch(corner, slot, ab)
                slot = slot.next()
            work = tiles.after(work)
        c.memory.let_next_grid_start()
        ab.drain(slot)

    @cute.jit
    def mma(self, c):
        """Multiplies slot after slot into an accumulator, of both CTAs where there is a pair."""
        g, ab, acc, tiles, k_tiles = c.geometry, c.ab, c.acc, c.tiles, c.k_tiles
        core = TensorCore.of(g, c.smem, c.tmem)
        slot, sums = ab.consumer(), acc.producer()
        in_turn = g.scale_slots < g.slots  # sets of scales: one is free again when its last slot has been multiplied
        before, scales = ab.behind(g.scale_slots), Slot(g.scale_slots, Int32(0), Int32(0), 0)
        work = tiles.first()
        while work.valid:
            _, column, _ = tiles.at(work)
            acc.wait_empty(sums)
            for k_tile in cutlass.range(k_tiles, unroll=1):
                if cutlass.const_expr(in_turn):
                    ab.wait_empty(before)
                ab.wait_full(slot)
                tensorcore.after_sync()  # what read the scales that are overwritten, and the epilogue's loads
                own = scales.index if cutlass.const_expr(in_turn) else slot.index
                core.copy_scales(slot.index, own)
                core.multiply(slot.index, own, c.turn(sums), column, k_tile > 0)
                ab.commit_empty(slot)
                slot = slot.next()
                if cutlass.const_expr(in_turn):
                    before, scales = before.next(), scales.next()
            acc.commit_full(sums)
            sums = sums.next()
            work = tiles.after(work)

    @cute.jit
    def schedule(self, c):
        """Where tiles are requested, asks for the cluster's next one while the one before is computed, till the end."""
        tiles = c.tiles
        if cutlass.const_expr(self.requests):
            slot = tiles.ring.producer()
            work = tiles.first()
            while work.valid:
                tiles.request(slot)
                slot = slot.next()
                work = tiles.after(work)

    @cute.jit
    def finish(self, c):
        """Frees tensor memory, and ends no CTA to whose barriers or memory another one of its cluster still comes."""
        self.synchronise()
        if c.warp == MMA:
            tensorcore.free(c.tmem, self.geometry.tmem_allocation, self.geometry.ctas)
