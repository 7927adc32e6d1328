"""NVFP4 GEMM for sm_120a: out = act(alpha x unit_a x unit_b x (a x scales of a) @ (b x scales of b)^T + bias).

unit_a and unit_b are the operands' global scales. The same for sm_121a. Tensor cores here are fed from registers, by
every warp for itself (PTX: mma.sync), and sums stay in registers. Rings and slots are explained in parts/ring.py, boxes
in parts/tma.py, the order of tiles in parts/schedule.py; which lane has what, in parts/warptile.py and docs/sm120.md.

Roles. Every role walks the CTA's tiles in the same order, and for each of them its k tiles of 128 or 256:

    role      warps           does
    multiply  0 to 7          codes and scales from shared memory to registers, products, results to global memory;
                              fewer where a tile is too small for eight
    load      after these     brings codes and scales of a and b from global to shared memory (TMA)
    schedule  after that one  with schedule "clc" alone: asks for the CTA's next tile (cluster launch control)

With one accumulator the warps that multiply share a tile. With two they are two groups of four, which have every
second tile each, and while one stores its results the other multiplies.

Rings. A slot has two barriers; what completes a phase of each:

    ring     slots   full                                         empty
    ab       stages  1 arrival (load) and the bytes of its boxes  1 arrival of each warp of a group (multiply)
    answers  2       1 arrival (schedule) and 16 bytes            1 arrival of each warp: it has read the answer

Where CTAs share a tile, parts/exchange.py has two barriers more and a buffer of sums.

`turns` are two barriers more, for two groups: a group arrives at the other's, a warp an arrival, when it has read all
operands of its tile, and waits at its own before the first of the next one. So a slot's barrier is never waited for
a lap too early, when its parity would say the same.

Timeline of a CTA with two tiles, a and b, of four k tiles each; three stages, one accumulator, then two:

    load      a0 a1 a2 a3 b0 b1 b2 .  .  b3
    multiply  .  a0 a1 a2 a3 -a -a -a b0 b1 b2 b3 -b -b -b

    load      a0 a1 a2 a3 b0 b1 b2 b3
    group 0   .  a0 a1 a2 a3 -a -a -a
    group 1   .  .  .  .  .  b0 b1 b2 b3 -b -b -b

Registers. The four schedulers of a multiprocessor have 16,384 each, so that with 9 or 10 warps a thread may have 168.
That is enough for 64 sums and what multiplies them. For more, the load warp is one of four, which give up all but 24
registers, and the eight that multiply take 240 (PTX: setmaxnreg).

Shared memory, from its first byte, M x N the tile and K' the bytes of a row in a stage, 64 or 128:

    1024                      barriers of the rings, answers
    parts                     where CTAs share a tile, sums: of 16 rows of each warp at a time
    stages x M x K'           codes of a, rows swizzled by their length
    stages x N x K'           codes of b
    stages x steps x 512      scales of a: for each step of k = 64 an atom, of each 128 rows that a tile touches
    stages x the same         scales of b; of narrow tiles the first lines of an atom, 16 bytes a column

Scales of rows beyond m and n may be anything: they meet sums that are not stored.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float64, Int32, Int64, Uint32, cute
from cutlass.cute.nvgpu import cpasync

from blockscale.kernels.parts import tma, warpmemory
from blockscale.kernels.parts.arithmetic import Alpha
from blockscale.kernels.parts.blockmma import Lane
from blockscale.kernels.parts.exchange import Exchange
from blockscale.kernels.parts.geometry import ATOM_ROWS
from blockscale.kernels.parts.grid import Memory
from blockscale.kernels.parts.ring import Ring, Slot
from blockscale.kernels.parts.schedule import Tiles
from blockscale.kernels.parts.store import Output
from blockscale.kernels.parts.warpresults import DTYPES, Results
from blockscale.kernels.parts.warptile import MOST_SUMS_BESIDE, WarpTile

WARP = 32
GROUP = 4  # warps that give and take registers together
SMEM_BYTES = 101_376
# Registers of a thread: 65,536 for 12 warps are 168 each, for 8 of them 240 where the other 4 have 24.
FEW_REGISTERS, MANY_REGISTERS = 24, 240


@dataclass(frozen=True)
class Context:
    """What the roles share."""

    warp: Int32
    geometry: WarpTile
    ab: Ring
    tiles: Tiles
    k_first: Int32  # of the CTA's part of k, in k tiles
    k_tiles: Int32
    batches: tuple[Int32, Int32]  # matrices of a and of b: as many as of the output, or one for all
    smem: Any
    memory: Memory
    exchange: Exchange | None  # of sums, with the CTAs that share its tiles


class Sm120Gemm:
    """The kernel of one configuration that `supports` passes; calling it launches it, compiling needs no GPU.

    Args:
        tile: (rows, columns) of a tile. chunk: elements of k in a stage. See `WarpTile` for both.
        stages: slots of operands in shared memory; None means as many as fit.
        accumulators: 2: two groups of warps have tiles of their own, which one multiplies while the other stores.
        schedule: "static" or "clc", see parts/schedule.py.
        raster: "m" or "n": the dimension along which consecutive tiles lie.
        group: tiles in a band across it.
        pdl: the kernel may start while the one before it in the stream still runs.
        l2_a, l2_b, l2_scales: "evict_first", "evict_last" or None: what L2 is told about operands.
        swap: the kernel's rows are those of b, and its columns those of a; the output is the same.
        split: CTAs of a cluster that share a tile, with a part of k each; their sums are added in order of rank.
        out_dtype: "fp16", "bf16", "fp32", or "nvfp4" with a given global scale.
        bias: None or something true. activation: None, "relu", "gelu" or "silu".
        smem: bytes of dynamic shared memory that a CTA may have.
    """

    def __init__(
        self,
        tile,
        *,
        chunk=None,
        stages=None,
        accumulators=1,
        schedule="static",
        raster="m",
        group=1,
        pdl=False,
        l2_a=None,
        l2_b=None,
        l2_scales=None,
        swap=False,
        split=1,
        out_dtype="bf16",
        bias=None,
        activation=None,
        smem=SMEM_BYTES,
    ):
        self.geometry = WarpTile(tile, stages, accumulators, chunk or 128, smem, split)
        self.requests, self.raster, self.group = schedule == "clc", raster, group
        self.pdl, self.swap = pdl, swap
        self.policies = tuple(tma.POLICIES[hint] for hint in (l2_a, l2_b, l2_scales))
        self.out_dtype, self.bias, self.activation = out_dtype, bias, activation
        self.load_warp = self.geometry.consumers
        self.moves = self.geometry.sums > MOST_SUMS_BESIDE
        self.warps = self.load_warp + (GROUP if self.moves else 2 if self.requests else 1)

    def __repr__(self):
        """Also in the kernel's name."""
        g = self.geometry
        return f"Sm120Gemm_{g.rows}x{g.columns}x{g.tile_k}_{g.slots}_{g.groups}_{self.raster}_{self.out_dtype}"

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        sfa: cute.Pointer,
        sfb: cute.Pointer,
        out: cute.Pointer,
        unit_a: cute.Pointer,
        unit_b: cute.Pointer,
        alpha: cute.Pointer,
        bias: cute.Pointer,
        sf_out: cute.Pointer,
        unit_out: cute.Pointer,
        factor: Float64,
        m: Int32,
        n: Int32,
        k: Int32,
        ld_out: Int64,
        batch: Int32,
        batch_a: Int32,
        batch_b: Int32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        """Launches out = act(unit_a x unit_b x alpha x factor x a @ b^T + bias) for every matrix of a batch.

        The arguments are those of `sm100.Sm100Gemm`.
        """
        g = self.geometry
        k = cute.assume(k, 64)
        size = m, n
        if cutlass.const_expr(self.swap):
            a, b, sfa, sfb, m, n, batch_a, batch_b = b, a, sfb, sfa, n, m, batch_b, batch_a
        blocks_m, blocks_n = cute.ceil_div(m, g.rows), cute.ceil_div(n, g.columns)
        blocks = blocks_m * blocks_n * batch
        if cutlass.const_expr(not self.requests):
            blocks = cutlass.min(blocks, cutlass.max(ctas // g.split, 1))
        self.kernel(
            warpmemory.maps(g, (a, b), (sfa, sfb), (m, n), k, (batch_a, batch_b)),
            out,
            ld_out,
            (unit_a, unit_b, alpha),
            factor,
            (bias, sf_out, unit_out),
            size,
            k,
            (blocks_m, blocks_n, batch),
            (batch_a, batch_b),
        ).launch(
            grid=[blocks * g.split, 1, 1],
            block=[WARP * self.warps, 1, 1],
            cluster=[g.split, 1, 1] if g.split > 1 else None,
            smem=g.smem_bytes,
            min_blocks_per_mp=1,
            use_pdl=self.pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        maps: tuple[cpasync.TmaInfo, cpasync.TmaInfo, cpasync.TmaInfo, cpasync.TmaInfo],
        out: cute.Pointer,
        ld_out: Int64,
        factors: tuple[cute.Pointer, cute.Pointer, cute.Pointer],
        factor: Float64,
        beside: tuple[cute.Pointer, cute.Pointer, cute.Pointer],
        size: tuple[Int32, Int32],
        k: Int32,
        blocks: tuple[Int32, Int32, Int32],
        batches: tuple[Int32, Int32],
    ):
        g = self.geometry
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = warpmemory.shared_memory(g, self.requests)
        k_first, k_tiles = warpmemory.part(g, cute.ceil_div(k, g.tile_k))
        context = Context(
            warp=warp,
            geometry=g,
            ab=warpmemory.operand_ring(g, smem),
            tiles=warpmemory.tiles(g, smem, (*blocks, self.raster, self.group, (1, 1)), self.requests),
            k_first=k_first,
            k_tiles=k_tiles,
            batches=batches,
            smem=smem,
            memory=Memory(
                self.pdl,
                [info.atom for info in maps],
                operands=warpmemory.operands(g, smem, maps, self.policies),
                alpha=Alpha(factors, factor),
                output=Output(out, DTYPES[self.out_dtype], *size, ld_out),
                bias=beside[0],
                scales=beside[1],
                unit=beside[2],
            ),
            exchange=warpmemory.exchange(g, smem),
        )
        self.prepare(context)
        if warp < self.load_warp:
            self.multiply(context)
        else:
            self.serve(context)
        if cutlass.const_expr(g.split > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()  # nobody leaves while another reads its sums
        for ring in (context.ab, *context.tiles.rings):
            ring.check()

    @cute.jit
    def prepare(self, c):
        """Barriers, before any role starts."""
        if c.warp == self.load_warp:
            for map in c.memory.descriptors:
                cpasync.prefetch_descriptor(map)
            with cute.arch.elect_one():
                for ring in (c.ab, *c.tiles.rings):
                    ring.initialise()
                for i in range(2):
                    cute.arch.mbarrier_init(c.smem.turns.data_ptr() + i, c.geometry.group_warps)
                if cutlass.const_expr(c.exchange is not None):
                    c.exchange.initialise(c.smem.parts_ready.data_ptr())
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(c.geometry.split > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def corners(self, c, work):
        """Where boxes begin in a, b, scales of a, scales of b, as a function of the k tile."""
        g, (batch_a, batch_b) = c.geometry, c.batches
        row, column, matrix = c.tiles.at(work)
        of_a, of_b = cutlass.min(matrix, batch_a - 1), cutlass.min(matrix, batch_b - 1)
        return lambda k_tile: (
            (row * g.rows, (c.k_first + k_tile) * g.code_bytes, of_a),
            (column * g.columns, (c.k_first + k_tile) * g.code_bytes, of_b),
            (0, (c.k_first + k_tile) * g.steps, row * g.rows // ATOM_ROWS, of_a),
            (0, (c.k_first + k_tile) * g.steps, column * g.columns // ATOM_ROWS, of_b),
        )

    @cute.jit
    def serve(self, c):
        """What the warps do that do not multiply."""
        if cutlass.const_expr(self.moves):
            cute.arch.setmaxregister_decrease(FEW_REGISTERS)
        if c.warp == self.load_warp:
            self.load(c)
        if c.warp == self.load_warp + 1:
            self.schedule(c)

    @cute.jit
    def load(self, c):
        """Fills slots with the boxes of a k tile, for one tile after the other."""
        ab, tiles, k_tiles = c.ab, c.tiles, c.k_tiles
        operands = c.memory.after_grids_before().operands
        slot = ab.producer()
        work = tiles.first()
        while work.valid:
            corners = self.corners(c, work)
            for k_tile in cutlass.range(k_tiles, unroll=1):
                ab.wait_empty(slot)
                cute.arch.fence_view_async_shared()  # the reads of its operands before copies, by the async proxy
                ab.expect_copies(slot)
                for operand, corner in zip(operands, corners(k_tile), strict=True):
                    operand.fetch(corner, slot, ab)
                slot = slot.next()
            work = tiles.after(work)
        c.memory.let_next_grid_start()
        ab.drain(slot)

    @cute.jit
    def multiply(self, c):
        """Tile after tile, or every second one where there are two groups."""
        g, ab, tiles, k_tiles, smem = c.geometry, c.ab, c.tiles, c.k_tiles, c.smem
        if cutlass.const_expr(self.moves):
            cute.arch.setmaxregister_increase(MANY_REGISTERS)
        group, warp = c.warp // g.group_warps, c.warp % g.group_warps
        turns = smem.turns.data_ptr()
        quantised = self.out_dtype == "nvfp4"
        memory = c.memory.after_grids_before()
        results = Results.of(g, memory, self.swap, self.activation, bool(self.bias), quantised)
        rSums = cute.make_rmem_tensor(g.sums, Int32)  # fp32 as words
        slot = ab.consumer()
        work = tiles.first(g.group_warps)
        # At first it is the turn of group 0; where there is one, of the rounds in which sums are added, even.
        parity = 1 - group if cutlass.const_expr(g.groups == 2) else Int32(0)
        if cutlass.const_expr(g.groups == 2):
            work = self.pass_over(tiles, work, group == 1)
            slot = skip(slot, k_tiles * group)
        while work.valid:
            at = tiles.at(work)
            lane = Lane.of(g, smem, warp, at[0], at[1])
            rSums.fill(0)
            if cutlass.const_expr(g.groups == 2):
                cute.arch.mbarrier_wait(turns + group, parity)
                parity = parity ^ 1
            for _ in cutlass.range(k_tiles, unroll=1):
                ab.wait_full(slot)
                lane.multiply(g, slot.index, rSums)
                ab.arrive_empty(slot, range(g.group_warps))
                slot = slot.next()
            if cutlass.const_expr(g.groups == 2):
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(turns + (1 - group))
                slot = skip(slot, k_tiles)
            if cutlass.const_expr(c.exchange is None):
                results.leave(rSums, warp, at)
            else:
                parity = results.leave_together(c.exchange, rSums, parity, warp, at)
            work = tiles.after(work)
            if cutlass.const_expr(g.groups == 2):
                work = self.pass_over(tiles, work, work.valid)

    @cute.jit
    def pass_over(self, tiles, work, condition):
        """The work after this one, which is the other group's, if so."""
        if condition:
            work = tiles.after(work)
        return work

    @cute.jit
    def schedule(self, c):
        """Where tiles are requested, asks for the CTA's next one while the one before is computed, till the end."""
        tiles = c.tiles
        if cutlass.const_expr(self.requests):
            slot = tiles.ring.producer()
            work = tiles.first()
            while work.valid:
                tiles.request(slot)
                slot = slot.next()
                work = tiles.after(work)


def skip(slot: Slot, count: Int32) -> Slot:
    """So many slots on."""
    at = Uint32(slot.index + count)
    laps = at // slot.slots
    return Slot(slot.slots, Int32(at - laps * slot.slots), slot.parity ^ Int32(laps & 1), slot.first)
