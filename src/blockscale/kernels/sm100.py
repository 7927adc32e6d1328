"""NVFP4 GEMM for sm_100a: out = alpha x unit_a x unit_b x (a x scales of a) @ (b x scales of b)^T.

unit_a and unit_b are the operands' global scales. A CTA computes tiles of 128 x N, one after the other. Words such as
slot, phase and commit are explained in parts/ring.py, boxes in parts/tma.py, scale atoms in parts/geometry.py; what
the roles call is there, in parts/tensorcore.py and in parts/epilogue.py, best read in this order.

Roles. Every role walks the CTA's tiles in the same order, and for each of them its k tiles of 256:

    role      warps  does
    load      5      brings codes and scales of a and b from global to shared memory (TMA)
    mma       4      copies scales from shared to tensor memory and multiplies (tcgen05); owns tensor memory
    epilogue  0-3    takes sums from tensor memory, times alpha, casts, stores; warp w has rows 32w to 32w + 31

Rings. A slot has two barriers; what completes a phase of each:

    ring  slots         full                                         empty
    ab    stages        1 arrival (load) and the bytes of its boxes  1 commit (mma): its operands have been read
    acc   accumulators  1 commit (mma): the sums are complete        4 arrivals (1 a warp of the epilogue): it has them

Timeline of a CTA with two tiles, a and b, of four k tiles each; three stages, one accumulator:

    load      a0 a1 a2 a3 b0 b1 b2 .  .  b3
    mma       .  a0 a1 a2 a3 .  .  .  b0 b1 b2 b3
    epilogue  .  .  .  .  .  a  a  a  .  .  .  .  b  b  b

The load warp is ahead by as many k tiles as there are stages. With two accumulators the mma warp need not wait for the
epilogue either.

Shared memory, from its first byte:

    1024                      barriers of both rings, the address of tensor memory
    stages x 16384            codes of a: 128 rows of 128 bytes, swizzled by 128 bytes
    stages x N x 128          codes of b: N rows of 128 bytes, swizzled alike
    stages x 2048             scales of a: an atom of 512 bytes for each step of k = 64
    stages x atoms x 2048     scales of b: the same for each atom of 128 rows that a tile touches

Tensor memory, columns of 128 lanes x 32 bits:

    accumulators x N          sums: row r of the tile in lane r
    stages x 16               scales of a: 4 columns a step; row r in column r // 32 of lanes r % 32 + 0, 32, 64 and 96
                              (each group of 32 lanes has a copy), a byte for each of the step's 4 blocks of 16
    stages x atoms x 16       scales of b, next to those of a of their stage: the same, 4 columns an atom, step by step

A stage's scales have columns of their own, so that the barriers of its slot guard them too. Unless N is 128 or 256,
tiles of b may begin within an atom, at a multiple of 32 rows (with N = 64 every second one does): the tensor core is
then given the column, of the same atoms, where their rows begin. Scales of rows beyond m and n may be anything: they
meet sums that are not stored.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float64, Int16, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from blockscale.kernels.parts import tensorcore, tma
from blockscale.kernels.parts.epilogue import Alpha, Output
from blockscale.kernels.parts.geometry import ATOM_ROWS, SMEM_BYTES, STEPS, TILE_K, TILE_M, Geometry
from blockscale.kernels.parts.ring import Ring
from blockscale.kernels.parts.schedule import Tiles
from blockscale.kernels.parts.tensorcore import LANES, TensorCore
from blockscale.kernels.parts.tma import CODE_BYTES, Operand

WARP = 32
EPILOGUE = range(4)  # whole, and from 0 on: warp w of four may load lanes 32w to 32w + 31 of tensor memory
MMA = 4
LOAD = 5
THREADS = WARP * (len(EPILOGUE) + 2)
DTYPES = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16, "fp32": cutlass.Float32}


@dataclass(frozen=True)
class Context:
    """What the roles share."""

    warp: Int32
    ab: Ring
    acc: Ring
    tiles: Tiles
    k_tiles: Int32
    operands: tuple[Operand, ...]  # a, b, scales of a, scales of b
    batches: tuple[Int32, Int32]  # matrices of a and of b: as many as of the output, or one for all
    smem: Any
    tmem: Int32
    alpha: Alpha
    out: Output


class Sm100Gemm:
    """The kernel of one configuration that `config.supports` passes; calling it launches it, compiling needs no GPU.

    Args:
        tile: (128, N), see `Geometry` for N.
        stages: slots of operands in shared memory; None means as many as fit shared and tensor memory.
        accumulators: tiles of sums in tensor memory; with 2 a tile is multiplied while the one before is stored.
        raster: "m" or "n": the dimension along which consecutive tiles lie.
        out_dtype: "fp16", "bf16" or "fp32".
        smem: bytes of dynamic shared memory that a CTA may have.
    """

    def __init__(self, tile, *, stages=None, accumulators=1, raster="m", out_dtype="bf16", smem=SMEM_BYTES):
        self.geometry = Geometry(tile[1], stages, accumulators, smem)
        self.raster = raster
        self.out_dtype = DTYPES[out_dtype]

    def __repr__(self):
        """Also in the kernel's name."""
        g = self.geometry
        return f"Sm100Gemm_{TILE_M}x{g.tile_n}_{g.slots}_{g.accumulators}_{self.raster}_{self.out_dtype.__name__}"

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
        """Launches out = unit_a x unit_b x alpha x factor x a @ b^T for every matrix of a batch.

        Args:
            a, b: codes, (batch_a, m, k / 2) and (batch_b, n, k / 2) bytes, aligned to 16 bytes.
            sfa, sfb: their scales in the 128x4 layout, each matrix padded to 128 rows; what these rows hold is ignored.
            out: (batch, m, n), rows ld_out elements apart, matrices m * ld_out.
            unit_a, unit_b, alpha: fp32, one each. factor: one more, by value.
            m, n: at least 1. k: of the storage, a multiple of 64, zeros in codes and scales beyond the last element.
            batch: matrices of out; batch_a and batch_b are the same or 1.
            ctas: at most so many are launched.
        """
        g = self.geometry
        k = cute.assume(k, 64)
        tiles = Tiles(cute.ceil_div(m, TILE_M), cute.ceil_div(n, g.tile_n), batch, self.raster)
        self.kernel(
            tma.code_map(a, m, k, batch_a, TILE_M),
            tma.code_map(b, n, k, batch_b, g.tile_n),
            tma.scale_map(sfa, m, k, batch_a, 1),
            tma.scale_map(sfb, n, k, batch_b, g.atoms_n),
            (unit_a, unit_b, alpha),
            factor,
            out,
            ld_out,
            (m, n, k),
            (tiles.m, tiles.n, batch),
            (batch_a, batch_b),
        ).launch(
            grid=[cutlass.min(tiles.count, ctas), 1, 1],
            block=[THREADS, 1, 1],
            smem=g.smem_bytes,
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        map_a: cpasync.TmaInfo,
        map_b: cpasync.TmaInfo,
        map_sfa: cpasync.TmaInfo,
        map_sfb: cpasync.TmaInfo,
        factors: tuple[cute.Pointer, cute.Pointer, cute.Pointer],
        factor: Float64,
        out: cute.Pointer,
        ld_out: Int64,
        size: tuple[Int32, Int32, Int32],
        tiles: tuple[Int32, Int32, Int32],
        batches: tuple[Int32, Int32],
    ):
        m, n, k = size
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = self.shared_memory()
        ab, acc = self.rings(smem)
        operands = self.operands(smem, (map_a, map_b, map_sfa, map_sfb))
        self.prepare(warp, smem, ab, acc, operands)
        context = Context(
            warp=warp,
            ab=ab,
            acc=acc,
            tiles=Tiles(*tiles, self.raster),
            k_tiles=cute.ceil_div(k, TILE_K),
            operands=operands,
            batches=batches,
            smem=smem,
            tmem=smem.tmem.ptr.load(),
            alpha=Alpha(factors, factor),
            out=Output(out, self.out_dtype, m, n, ld_out),
        )
        if warp == LOAD:
            self.load(context)
        if warp == MMA:
            self.mma(context)
        if warp < EPILOGUE.stop:
            self.epilogue(context, EPILOGUE)
        ab.check()
        acc.check()

    def shared_memory(self):
        g = self.geometry

        @cute.struct
        class Smem:
            ab_full: cute.struct.MemRange[Int64, g.slots]
            ab_empty: cute.struct.MemRange[Int64, g.slots]
            acc_full: cute.struct.MemRange[Int64, g.accumulators]
            acc_empty: cute.struct.MemRange[Int64, g.accumulators]
            tmem: Int32
            a: cute.struct.Align[cute.struct.MemRange[Uint8, g.slots * g.a_bytes], 1024]
            b: cute.struct.Align[cute.struct.MemRange[Uint8, g.slots * g.b_bytes], 1024]
            sfa: cute.struct.Align[cute.struct.MemRange[Int16, g.slots * g.sfa_bytes // 2], 1024]
            sfb: cute.struct.Align[cute.struct.MemRange[Int16, g.slots * g.sfb_bytes // 2], 1024]

        if Smem.size_in_bytes() != g.smem_bytes:
            raise AssertionError(f"shared memory: {Smem.size_in_bytes()} bytes, not {g.smem_bytes}")
        return SmemAllocator().allocate(Smem)

    def rings(self, smem):
        g = self.geometry
        ab_full, ab_empty = smem.ab_full.data_ptr(), smem.ab_empty.data_ptr()
        acc_full, acc_empty = smem.acc_full.data_ptr(), smem.acc_empty.data_ptr()
        ab = Ring("ab", ab_full, ab_empty, g.slots, fills=1, empties=1, copied=g.stage_bytes)
        acc = Ring("acc", acc_full, acc_empty, g.accumulators, fills=1, empties=len(EPILOGUE))
        return ab, acc

    def operands(self, smem, maps):
        g = self.geometry
        a, b = tma.code_layout(TILE_M, g.slots), tma.code_layout(g.tile_n, g.slots)
        boxes = tma.code_box(TILE_M), tma.code_box(g.tile_n), tma.scale_box(1), tma.scale_box(g.atoms_n)
        slots = (
            smem.a.get_tensor(a.outer, swizzle=a.inner),
            smem.b.get_tensor(b.outer, swizzle=b.inner),
            smem.sfa.get_tensor(tma.scale_layout(1, g.slots)),
            smem.sfb.get_tensor(tma.scale_layout(g.atoms_n, g.slots)),
        )
        return tuple(map(Operand, maps, boxes, slots))

    @cute.jit
    def prepare(self, warp, smem, ab, acc, operands):
        """Barriers and tensor memory, before any role starts."""
        if warp == LOAD:
            for operand in operands:
                cpasync.prefetch_descriptor(operand.map.atom)
            with cute.arch.elect_one():
                ab.initialise()
                acc.initialise()
            cute.arch.mbarrier_init_fence()
        if warp == MMA:
            tensorcore.allocate(smem.tmem.ptr, self.geometry.tmem_allocation)
        tensorcore.before_sync()
        cute.arch.sync_threads()
        tensorcore.after_sync()

    @cute.jit
    def load(self, c):
        """Fills slots with the boxes of a k tile, for one tile after the other."""
        ab, tiles, k_tiles, (a, b, sfa, sfb), (batch_a, batch_b) = c.ab, c.tiles, c.k_tiles, c.operands, c.batches
        tile_n = self.geometry.tile_n
        slot = ab.producer()
        tile = tiles.first()
        while tiles.has(tile):
            row, column, matrix = tiles.at(tile)
            of_a, of_b = cutlass.min(matrix, batch_a - 1), cutlass.min(matrix, batch_b - 1)
            for k_tile in cutlass.range(k_tiles, unroll=1):
                ab.wait_empty(slot)
                ab.expect_copies(slot)
                a.fetch((row * TILE_M, k_tile * CODE_BYTES, of_a), slot, ab)
                b.fetch((column * tile_n, k_tile * CODE_BYTES, of_b), slot, ab)
                sfa.fetch((0, k_tile * STEPS, row, of_a), slot, ab)
                sfb.fetch((0, k_tile * STEPS, column * tile_n // ATOM_ROWS, of_b), slot, ab)
                slot = slot.next()
            tile = tiles.after(tile)
        ab.drain(slot)

    @cute.jit
    def mma(self, c):
        """Multiplies slot after slot into an accumulator; frees tensor memory once the epilogue is done with it."""
        ab, acc, tiles, k_tiles, smem, tmem = c.ab, c.acc, c.tiles, c.k_tiles, c.smem, c.tmem
        core = TensorCore.of(self.geometry, smem, tmem)
        slot, sums = ab.consumer(), acc.producer()
        tile = tiles.first()
        while tiles.has(tile):
            _, column, _ = tiles.at(tile)
            acc.wait_empty(sums)
            for k_tile in cutlass.range(k_tiles, unroll=1):
                ab.wait_full(slot)
                tensorcore.after_sync()  # what read the scales that are overwritten, and the epilogue's loads
                core.copy_scales(slot.index)
                core.multiply(slot.index, sums.index, column, k_tile > 0)
                ab.commit_empty(slot)
                slot = slot.next()
            acc.commit_full(sums)
            sums = sums.next()
            tile = tiles.after(tile)
        acc.drain(sums)
        tensorcore.after_sync()
        tensorcore.free(tmem, self.geometry.tmem_allocation)

    @cute.jit
    def epilogue(self, c, warps):
        """Brings accumulators to the output; a thread has a row of the tile, and takes a few columns at a time."""
        warp, acc, tiles, alpha, out, tmem = c.warp, c.acc, c.tiles, c.alpha, c.out, c.tmem
        tile_n = self.geometry.tile_n
        columns = next(count for count in (32, 16, 8) if tile_n % count == 0)
        lanes = warp * LANES
        x, power = alpha.load()
        aligned = out.aligned()
        sums = acc.consumer()
        tile = tiles.first()
        while tiles.has(tile):
            tile_row, tile_column, matrix = tiles.at(tile)
            row = tile_row * TILE_M + lanes + cute.arch.lane_idx()
            target = out.row(matrix, row)
            acc.wait_full(sums)
            tensorcore.after_sync()
            for part in cutlass.range(tile_n // columns, unroll=1):
                values = tensorcore.load(tmem + (lanes << 16) + sums.index * tile_n + part * columns, columns)
                column = tile_column * tile_n + part * columns
                out.store(values * x * power, row, column, target + column, aligned)
            tensorcore.before_sync()
            acc.arrive_empty(sums, warps)
            sums = sums.next()
            tile = tiles.after(tile)
