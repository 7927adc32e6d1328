"""NVFP4 GEMM for sm_100a: out = alpha x (a x scales of a) @ (b x scales of b)^T, in tiles of 128 x N by one CTA each.

Roles, one warp each but for the epilogue; every role walks the same tiles in the same order:

    role      warps  does
    epilogue  0-3    sums from tensor memory, times alpha, cast, to global memory; warp w has lanes 32w to 32w + 31
    mma       4      scales from shared to tensor memory, multiplies, frees the slots; owns the tensor memory
    load      5      codes and scales of a and b from global to shared memory, by TMA

Rings, with what completes a phase of a slot's barriers:

    ring  slots             filled by                                  emptied by
    ab    stages            load: 1 arrival, and the bytes of 4 boxes  mma: 1 commit, its reads are over
    acc   accumulators      mma: 1 commit, the sums are final          epilogue: 1 arrival a warp, its loads are over

Timeline of one CTA, two tiles of four k tiles each, three stages, one accumulator:

    load      0 1 2 . 3 0 1 2 3
    mma         0 1 2 . 3 | . . 0 1 2 3 |
    epilogue              | store . . . | store

The load warp runs ahead into the next tile as far as there are slots; with two accumulators mma does too.

Shared memory of a CTA, from its first byte:

    barriers of both rings, address of tensor memory          1024 bytes
    codes of a, stages x 128 rows x 128 bytes, swizzled       16384 bytes a stage
    codes of b, stages x N rows x 128 bytes, swizzled         128 N
    scales of a, stages x 4 atoms, one a step of k = 64       2048
    scales of b, stages x atoms of rows x 4 atoms             2048 each 128 rows that a tile touches

Tensor memory, columns of 128 lanes x 32 bits:

    sums, accumulators x N columns                            lane = row of the tile
    scales, stages x 4 steps x 4 columns of a                 lane = row % 32, column = row / 32, byte = block of 16
    next to each stage's of a: 4 steps x 4 columns of b       as those of a, for each atom of rows

Scales have a place in tensor memory for every stage: they are overwritten only when the slot's barrier says that the
multiplications which read them are over. A tile of b that begins within an atom (N = 64: every second one) takes its
scales from later columns. Whatever the scales of rows beyond M or N hold reaches only sums that are not stored.
"""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Float64, Int16, Int32, Int64, Uint8, cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from blockscale.kernels.parts import tensorcore as tc
from blockscale.kernels.parts.epilogue import Output, split
from blockscale.kernels.parts.geometry import ATOM_COLUMNS, ATOM_ROWS, STEPS, TILE_K, TILE_M, Geometry
from blockscale.kernels.parts.ring import Ring
from blockscale.kernels.parts.schedule import RASTERS, Tiles
from blockscale.kernels.parts.tma import CODE_BYTES, Operand, code_layout, code_map, scale_box, scale_layout, scale_map

WARP = 32
EPILOGUE = (0, 1, 2, 3)
MMA = 4
LOAD = 5
THREADS = WARP * (len(EPILOGUE) + 2)
DTYPES = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16, "fp32": cutlass.Float32}


@dataclass(frozen=True)
class Context:
    """What the roles share."""

    ab: Ring
    acc: Ring
    tiles: Tiles
    k_tiles: Int32
    operands: tuple[Operand, ...]  # a, b, scales of a, scales of b
    batches: tuple[Int32, Int32]  # matrices of a and of b: as many as of the output, or one for all
    smem: Any
    tmem: Int32
    out: Output
    factors: tuple[cute.Pointer, ...]
    factor: Float32


class Sm100Gemm:
    """The kernel of one configuration; calling it launches it, compiling it needs no GPU.

    Args:
        tile: (128, N), see `Geometry` for N.
        stages: slots of operands in shared memory; None means as many as fit.
        accumulators: tiles of sums in tensor memory; with 2 the multiplications of a tile overlap the stores of another.
        raster: "m" or "n": the dimension along which consecutive tiles lie.
        out_dtype: "fp16", "bf16" or "fp32".

    Raises:
        ValueError: a configuration that cannot be built.
    """

    def __init__(self, tile, *, stages=None, accumulators=1, raster="m", out_dtype="bf16"):
        if tile[0] != TILE_M:
            raise ValueError(f"tile: {tile}, expected ({TILE_M}, N)")
        if raster not in RASTERS:
            raise ValueError(f"raster: {raster!r}, expected one of {RASTERS}")
        if out_dtype not in DTYPES:
            raise ValueError(f"out_dtype: {out_dtype!r}, expected one of {tuple(DTYPES)}")
        self.geometry = Geometry(tile[1], stages, accumulators)
        self.raster = raster
        self.out_dtype = DTYPES[out_dtype]

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
        factor: Float32,
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
            sfa, sfb: their scales in the 128x4 layout, every matrix padded to 128 rows by itself; padding may hold anything.
            out: (batch, m, n), rows ld_out elements apart, matrices m * ld_out.
            unit_a, unit_b, alpha: fp32, one each. factor: the same, by value.
            m, n: at least 1. k: of the storage, a multiple of 64, zeros in codes and scales beyond the last element.
            batch: matrices of out; batch_a and batch_b are the same or 1.
            ctas: at most so many are launched.
        """
        geometry = self.geometry
        k = cute.assume(k, 64)
        tiles = Tiles(cute.ceil_div(m, TILE_M), cute.ceil_div(n, geometry.tile_n), batch, self.raster)
        self.kernel(
            code_map(a, m, k, batch_a, TILE_M),
            code_map(b, n, k, batch_b, geometry.tile_n),
            scale_map(sfa, m, k, batch_a, 1),
            scale_map(sfb, n, k, batch_b, geometry.atoms_n),
            (unit_a, unit_b, alpha),
            factor,
            out,
            (m, n, k),
            ld_out,
            (tiles.m, tiles.n, batch),
            (batch_a, batch_b),
        ).launch(
            grid=[cutlass.min(tiles.count, ctas), 1, 1],
            block=[THREADS, 1, 1],
            smem=geometry.smem_bytes,
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
        factor: Float32,
        out: cute.Pointer,
        size: tuple[Int32, Int32, Int32],
        ld_out: Int64,
        tiles: tuple[Int32, Int32, Int32],
        batches: tuple[Int32, Int32],
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem, ab, acc, operands = self.allocate((map_a, map_b, map_sfa, map_sfb))
        self.prepare(warp, smem, ab, acc)
        m, n, k = size
        context = Context(
            ab=ab,
            acc=acc,
            tiles=Tiles(*tiles, self.raster),
            k_tiles=cute.ceil_div(k, TILE_K),
            operands=operands,
            batches=batches,
            smem=smem,
            tmem=smem.tmem.ptr.load(),
            out=Output(out, self.out_dtype, m, n, ld_out),
            factors=factors,
            factor=factor,
        )
        if warp == LOAD:
            self.load(context)
        if warp == MMA:
            self.mma(context)
        if warp < MMA:
            self.epilogue(context, warp)
        ab.check()
        acc.check()

    def allocate(self, maps):
        """Shared memory, and what lies in it: the rings and the slots of the operands."""
        g = self.geometry

        @cute.struct
        class Smem:
            ab_full: cute.struct.MemRange[Int64, g.ring]
            ab_empty: cute.struct.MemRange[Int64, g.ring]
            acc_full: cute.struct.MemRange[Int64, g.accumulators]
            acc_empty: cute.struct.MemRange[Int64, g.accumulators]
            tmem: Int32
            a: cute.struct.Align[cute.struct.MemRange[Uint8, g.ring * g.a_bytes], 1024]
            b: cute.struct.Align[cute.struct.MemRange[Uint8, g.ring * g.b_bytes], 1024]
            sfa: cute.struct.Align[cute.struct.MemRange[Int16, g.ring * g.sfa_bytes // 2], 1024]
            sfb: cute.struct.Align[cute.struct.MemRange[Int16, g.ring * g.sfb_bytes // 2], 1024]

        smem = SmemAllocator().allocate(Smem)
        ab = Ring(
            "ab", smem.ab_full.data_ptr(), smem.ab_empty.data_ptr(), g.ring, fills=1, empties=1, copied=g.stage_bytes
        )
        acc = Ring(
            "acc", smem.acc_full.data_ptr(), smem.acc_empty.data_ptr(), g.accumulators, fills=1, empties=len(EPILOGUE)
        )
        a, b = code_layout(TILE_M, g.ring), code_layout(g.tile_n, g.ring)
        map_a, map_b, map_sfa, map_sfb = maps
        operands = (
            Operand(map_a, (TILE_M, CODE_BYTES), smem.a.get_tensor(a.outer, swizzle=a.inner)),
            Operand(map_b, (g.tile_n, CODE_BYTES), smem.b.get_tensor(b.outer, swizzle=b.inner)),
            Operand(map_sfa, scale_box(1), smem.sfa.get_tensor(scale_layout(1, g.ring))),
            Operand(map_sfb, scale_box(g.atoms_n), smem.sfb.get_tensor(scale_layout(g.atoms_n, g.ring))),
        )
        return smem, ab, acc, operands

    @cute.jit
    def prepare(self, warp, smem, ab, acc):
        """Barriers and tensor memory, before any role starts."""
        if warp == LOAD:
            with cute.arch.elect_one():
                ab.initialise()
                acc.initialise()
            cute.arch.mbarrier_init_fence()
        if warp == MMA:
            tc.allocate(smem.tmem.ptr, self.geometry.tmem_allocation)
        tc.before_sync()
        cute.arch.sync_threads()
        tc.after_sync()

    @cute.jit
    def load(self, c):
        """Fills slots with the boxes of each k tile, from a's row of tiles and b's."""
        ab, tiles, k_tiles, (a, b, sfa, sfb), (batch_a, batch_b) = c.ab, c.tiles, c.k_tiles, c.operands, c.batches
        tile_n = self.geometry.tile_n
        slot = ab.producer()
        tile = tiles.first()
        while tiles.has(tile):
            row, column, matrix = tiles.at(tile)
            of_a, of_b = cutlass.min(matrix, batch_a - 1), cutlass.min(matrix, batch_b - 1)
            for k in cutlass.range(k_tiles, unroll=1):
                ab.wait_empty(slot)
                ab.expect(slot)
                a.fetch((row * TILE_M, k * CODE_BYTES, of_a), slot, ab)
                b.fetch((column * tile_n, k * CODE_BYTES, of_b), slot, ab)
                sfa.fetch((0, k * STEPS, row, of_a), slot, ab)
                sfb.fetch((0, k * STEPS, column * tile_n // ATOM_ROWS, of_b), slot, ab)
                slot = slot.next()
            tile = tiles.after(tile)
        ab.drain(slot)

    @cute.jit
    def mma(self, c):
        """Multiplies slot by slot into an accumulator; frees tensor memory when the epilogue is through with it."""
        ab, acc, tiles, k_tiles, base = c.ab, c.acc, c.tiles, c.k_tiles, c.tmem
        multiply_slot = self.multiplier(c.smem, base)
        slot, sums = ab.consumer(), acc.producer()
        tile = tiles.first()
        while tiles.has(tile):
            _, column, _ = tiles.at(tile)
            acc.wait_empty(sums)
            for k in cutlass.range(k_tiles, unroll=1):
                ab.wait_full(slot)
                tc.after_sync()  # also after the epilogue's loads
                multiply_slot(slot.index, sums.index, column, k > 0)
                ab.commit_empty(slot)
                slot = slot.next()
            acc.commit_full(sums)
            sums = sums.next()
            tile = tiles.after(tile)
        acc.drain(sums)
        tc.after_sync()
        tc.free(base, self.geometry.tmem_allocation)

    def multiplier(self, smem, base):
        """A function that issues a slot's copies of scales and its multiplications; addresses are computed once."""
        g = self.geometry
        a, b = tc.codes(smem.a.data_ptr()), tc.codes(smem.b.data_ptr())
        sfa, sfb = tc.scales(smem.sfa.data_ptr()), tc.scales(smem.sfb.data_ptr())
        instruction = tc.instruction(TILE_M, g.tile_n)
        scales = base + g.accumulators * g.tile_n
        step_n = g.atoms_n * ATOM_COLUMNS

        def multiply_slot(slot, sums, column, accumulate):
            begin = (column * g.tile_n % ATOM_ROWS) // 32 if g.tile_n % 32 == 0 else 0  # within the first atom
            tsfa = scales + slot * g.scale_columns
            tsfb = tsfa + g.sfa_columns
            slot_a, slot_b = a + slot * (g.a_bytes // tc.UNIT), b + slot * (g.b_bytes // tc.UNIT)
            slot_sfa, slot_sfb = sfa + slot * (g.sfa_bytes // tc.UNIT), sfb + slot * (g.sfb_bytes // tc.UNIT)
            with cute.arch.elect_one():
                for step in range(STEPS):
                    tc.copy_atom(tsfa + step * ATOM_COLUMNS, slot_sfa + step * tc.ATOM)
                    for atom in range(g.atoms_n):
                        source = slot_sfb + (atom * STEPS + step) * tc.ATOM
                        tc.copy_atom(tsfb + step * step_n + atom * ATOM_COLUMNS, source)
                for step in range(STEPS):
                    tc.multiply(
                        base + sums * g.tile_n,
                        slot_a + step * tc.STEP,
                        slot_b + step * tc.STEP,
                        tsfa + step * ATOM_COLUMNS,
                        tsfb + step * step_n + begin,
                        instruction,
                        accumulate if step == 0 else True,
                    )

        return multiply_slot

    @cute.jit
    def epilogue(self, c, warp):
        """Brings an accumulator to the output; a thread has a row, and takes it a few columns at a time."""
        acc, tiles, out, tmem, tile_n = c.acc, c.tiles, c.out, c.tmem, self.geometry.tile_n
        unit_a, unit_b, alpha = c.factors
        product = Float64(unit_a.load()) * Float64(unit_b.load()) * Float64(alpha.load()) * Float64(c.factor)
        mantissa, power = split(product)
        vectors = out.aligned()
        columns = next(count for count in (32, 16, 8) if tile_n % count == 0)
        lanes = warp * WARP
        sums = acc.consumer()
        tile = tiles.first()
        while tiles.has(tile):
            tile_row, tile_column, matrix = tiles.at(tile)
            row = tile_row * TILE_M + lanes + cute.arch.lane_idx()
            target = out.row(matrix, row)
            acc.wait_full(sums)
            tc.after_sync()
            for part in cutlass.range(tile_n // columns, unroll=1):
                source = tmem + (lanes << 16) + sums.index * tile_n + part * columns
                values = tc.load_columns(source, columns)
                column = tile_column * tile_n + part * columns
                out.store(values * mantissa * power, row, column, target + column, vectors)
            tc.before_sync()
            acc.arrive_empty(sums, len(EPILOGUE))
            sums = sums.next()
            tile = tiles.after(tile)
