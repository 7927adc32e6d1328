"""Grouped NVFP4 GEMM for sm_100a: out = act(alpha_e x unit_a x unit_b x a @ b[e]^T + bias_e) for each group e of rows.

One launch for all groups, whose sizes only the device knows. The kernel of kernels/sm100.py is best read before: what
is said there of roles, rings, pairs and memory holds here too, and this page says what is different.

Groups. Every CTA begins by making a table of them in its shared memory (parts/groups.py): sums over the sizes give each
group's first row, first atom of scales and first tile. Tiles are numbered through all groups, and CTA i of G takes the
tiles i, i + G, and so on; which group a tile is of, each warp finds by two votes. With order "longest" groups come by
their number of rows, so that what is left for the last round is small.

Rows. With `swap` the kernel's rows are those of b, weights, 128 a CTA, and its columns are a group's rows of a: as many
as the tile has room for, and no more than the group has, rounded up to 16. Only so many are brought, in boxes of a few
rows, and only so many are multiplied: the width of an instruction is a number in a register. A tile of 384 columns
takes two instructions for a tile of weights, which is then brought once for a group of up to 384 rows. Without `swap`
the kernel's rows are those of a, and a tile is 128 rows of one group, of which some may be missing.

Gates. With activation "swiglu" or "geglu" the first half of a matrix of b makes gates for the other half's columns. A
tile then has two panels of weights, one of each half, and two accumulators side by side; without `swap`, its columns
are 128 of one half and the same 128 of the other. Either way a thread of the epilogue has both sums.

A box may reach into rows of the next group, and scales of an atom's missing rows may be anything: products of these are
rows or columns of sums that are not stored.

Parts of k. With `split` a tile is of two CTAs, or two pairs, of one cluster: each multiplies half of the k tiles, and
their epilogues meet (parts/group_parts.py). Behind the end of k there are zeros, so that both have as many.

Timeline of a CTA: as in kernels/sm100.py, but that all warps make the table first.

Shared memory, from its first byte; N' is N, or N / 2 in a pair:

    1024                      barriers of the rings, the address of tensor memory, the number of tiles
    10240                     the table: five numbers for each of 512 groups
    N / 2 x 512               with `split` sums of half of the columns, from the other part of k
    stages x panels x 16384   codes of the kernel's rows: panels of 128 rows of 128 bytes, swizzled by 128 bytes
    stages x N' x 128         codes of its columns: N' rows of 128 bytes, swizzled alike
    stages x panels x 2048    scales of the rows: an atom of 512 bytes for each step of k = 64
    stages x atoms x 2048     scales of the columns: the same for each atom of 128 rows that a tile touches

Tensor memory, columns of 128 lanes x 32 bits: accumulators x panels x N of sums, then as many sets of scales as stages,
or as fit: panels x 16 columns of the rows' scales and atoms x 16 of the columns'.
"""

from dataclasses import dataclass, replace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float64, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from blockscale.kernels.parts import group_operands, storage, tensorcore, tma
from blockscale.kernels.parts.activation import GATES
from blockscale.kernels.parts.arithmetic import Alpha
from blockscale.kernels.parts.cluster import Cluster
from blockscale.kernels.parts.geometry import ATOM_ROWS, SMEM_BYTES, STEP_K
from blockscale.kernels.parts.grid import Memory
from blockscale.kernels.parts.group_core import GroupCore
from blockscale.kernels.parts.group_cut import Cut, Work
from blockscale.kernels.parts.group_epilogue import GroupEpilogue, Results
from blockscale.kernels.parts.group_geometry import GroupGeometry
from blockscale.kernels.parts.group_order import GRANULE
from blockscale.kernels.parts.group_parts import PartCluster, PartEpilogue, Parts
from blockscale.kernels.parts.groups import Groups, Order
from blockscale.kernels.parts.ring import Ring, Slot
from blockscale.kernels.sm100 import Sm100Gemm

WARP = 32
EPILOGUE = range(4)  # whole, and from 0 on: warp w of four may load lanes 32w to 32w + 31 of tensor memory
MMA = 4
LOAD = 5
WARPS = 6


@dataclass(frozen=True)
class Context:
    """What the roles share."""

    warp: Int32
    geometry: GroupGeometry
    cut: Cut
    cluster: Cluster
    ab: Ring
    acc: Ring
    groups: Groups
    parts: Parts | None
    smem: Any
    tmem: Int32 | None  # the address of tensor memory, once there is some
    memory: Memory

    @property
    def rings(self) -> tuple[Ring, ...]:
        return self.ab, self.acc

    @property
    def first(self) -> Int32:
        """The number of the CTA's, or pair's, first tile."""
        return cute.arch.block_idx()[0] // self.geometry.shape[0]

    @property
    def stride(self) -> Int32:
        """How many tiles are in flight."""
        return cute.arch.grid_dim()[0] // self.geometry.shape[0]

    def work(self, index: Int32) -> Work:
        part = 0 if self.parts is None else self.parts.cluster.part
        return self.cut.work(self.groups.at(index), part)

    def operands(self, memory: Any, work: Work) -> Any:
        """What copies for a tile come from, where the kernel may read memory."""
        return memory.operands

    def accumulator(self, sums: Slot) -> Int32:
        """Its address in tensor memory."""
        return self.tmem + sums.index * self.geometry.accumulator_stride


class Sm100GroupedGemm:
    """The kernel of one configuration that `supports` passes; calling it launches it, compiling needs no GPU.

    Args:
        form: "contiguous": groups follow one another in the rows of a. "masked": each has a matrix of its own.
        tile: (128, N) of a CTA, or (256, N) of a pair of CTAs; N is a multiple of 32 up to 256, or 384.
        stages: slots of operands in shared memory; None means as many as fit.
        accumulators: tiles of sums in tensor memory; with 2 a tile is multiplied while the one before is stored.
        swap: the kernel's rows are those of b, and its columns those of a; the output is the same.
        order: of groups, "given" or "longest" first. raster: "m" or "n": along which a group's consecutive tiles lie.
        pdl: the kernel may start while the one before it in the stream still runs.
        split: parts of k that a tile is computed in, 2 with `swap` alone.
        l2_a, l2_b, l2_scales: "evict_first", "evict_last" or None: what L2 is told about operands.
        read: columns that a thread reads of tensor memory before it waits for them.
        out_dtype: "fp16", "bf16", "fp32", or "nvfp4" with a given global scale.
        bias: None or something true. activation: None, "relu", "gelu", "silu", "swiglu" or "geglu".
        smem: bytes of dynamic shared memory that a CTA may have.
    """

    def __init__(
        self,
        tile,
        *,
        form="contiguous",
        stages=None,
        accumulators=1,
        swap=True,
        order="given",
        raster="m",
        pdl=False,
        split=1,
        l2_a=None,
        l2_b=None,
        l2_scales=None,
        read=32,
        out_dtype="bf16",
        bias=None,
        activation=None,
        smem=SMEM_BYTES,
    ):
        gated = activation in GATES
        self.geometry = GroupGeometry(tile, stages, accumulators, smem, panels=2 if gated and swap else 1, split=split)
        self.cut = Cut(self.geometry, swap, gated, STEP_K if out_dtype == "nvfp4" else GRANULE)
        self.masked, self.pdl, self.swap, self.gated = form == "masked", pdl, swap, gated
        self.policies = tuple(tma.POLICIES[hint] for hint in (l2_a, l2_b, l2_scales))
        self.order = Order(self.masked, self.cut.tile, swap, raster, order == "longest", WARP * WARPS)
        columns = self.cut.tile[1]
        self.epilogue = (GroupEpilogue if split == 1 else PartEpilogue)(
            columns,
            out_dtype,
            apart=columns if gated else 0,
            read=read,
            swap=swap,
            bias=bias,
            activation=activation,
        )

    def __repr__(self):
        """Also in the kernel's name."""
        g = self.geometry
        rows = "b" if self.swap else "a"
        return f"Sm100GroupedGemm_{g.tile[0]}x{g.tile_n}_{g.slots}_{g.accumulators}_{rows}_{self.epilogue.out_dtype}"

    @cute.jit
    def __call__(
        self, a: cute.Pointer, b: cute.Pointer, sfa: cute.Pointer, sfb: cute.Pointer, out: cute.Pointer,
        unit_a: cute.Pointer, unit_b: cute.Pointer, alpha: cute.Pointer, bias: cute.Pointer, sf_out: cute.Pointer,
        unit_out: cute.Pointer, groups: cute.Pointer, factor: Float64, m: Int32, n: Int32, k: Int32, ld_out: Int64,
        experts: Int32, alphas: Int32, biases: Int32, ends: Int32, ctas: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launches out = act(unit_a x unit_b x alpha x factor x a @ b^T + bias) for every group.

        Args:
            a: codes, (m, k / 2) bytes, or (experts, m, k / 2) in the masked form, aligned to 16 bytes.
            b: codes, (experts, n, k / 2) bytes, aligned alike.
            sfa: scales of a in the 128x4-grouped layout; in the masked form 128x4, each matrix padded to 128 rows.
            sfb: scales of b in the 128x4 layout, each matrix padded to 128 rows.
            out: (m, columns) or (experts, m, columns), rows ld_out elements apart, matrices m * ld_out.
            unit_a, unit_b: fp32, one each. alpha: (alphas,) fp32. factor: one more, by value.
            bias: (biases, n) fp16, bf16 or fp32, ignored unless the configuration has one.
            sf_out, unit_out: of NVFP4, whose codes `out` has, rows ld_out bytes apart: scales in the layout of sfa, and
                the global scale, fp32. Columns are padded to a multiple of 64.
            groups: (experts,) int32: how many rows each group has; with `ends` not 0, where it ends.
            m, n: at least 1; the result has n columns, or with a gate n / 2, a multiple of 128.
            k: of the storage, a multiple of 64, zeros in codes and scales beyond the last element.
            experts: groups, 1 to 512. alphas, biases: 1, or as many.
            ctas: so many are launched, but for a pair at least.
        """
        g = self.geometry
        k = cute.assume(k, 64)
        rows, scale_rows = self.rows_of(m, experts)
        tokens, weights = (a, sfa, rows, scale_rows, Int32(1)), (b, sfb, n, n, experts)
        left, right = (weights, tokens) if self.swap else (tokens, weights)
        codes, scales, sizes, scale_sizes, batches = zip(left, right, strict=True)
        self.kernel(
            group_operands.maps(g, codes, scales, sizes, scale_sizes, k, batches),
            out,
            ld_out,
            (unit_a, unit_b, alpha),
            factor,
            (bias, sf_out, unit_out),
            groups,
            (rows, m, n, k),
            (experts, alphas, biases, ends),
        ).launch(
            grid=self.grid(ctas),
            block=[WARP * WARPS, 1, 1],
            cluster=self.cluster,
            smem=g.smem_bytes,
            min_blocks_per_mp=1,
            use_pdl=self.pdl,
            stream=stream,
        )

    @property
    def cluster(self):
        """Its shape; None where CTAs are alone."""
        across, down = self.geometry.shape
        return None if across == 1 else [across, down, 1]

    def grid(self, ctas):
        """Whole clusters, one at least."""
        own, _ = self.geometry.shape
        return [cutlass.max(ctas // own, 1) * own, 1, 1]

    def here(self, smem):
        """Where the CTA is in its cluster, and what it exchanges with the other part of k, if there is one."""
        g = self.geometry
        if g.split == 1:
            return Cluster.here(g, None), None
        cluster = PartCluster.here(g)
        return cluster, Parts.here(g, smem, cluster)

    def rows_of(self, m, experts):
        """Rows of a and of its scales."""
        if self.masked:
            return experts * m, experts * cute.ceil_div(m, ATOM_ROWS) * ATOM_ROWS
        several = cutlass.max(m - experts, Int32(0))  # a group has a first row, and an atom for every 128 more
        return m, (cutlass.min(m, experts) + several // ATOM_ROWS) * ATOM_ROWS

    @cute.kernel
    def kernel(
        self,
        maps: tuple[cpasync.TmaInfo, cpasync.TmaInfo, cpasync.TmaInfo, cpasync.TmaInfo],
        out: cute.Pointer,
        ld_out: Int64,
        factors: tuple[cute.Pointer, cute.Pointer, cute.Pointer],
        factor: Float64,
        beside: tuple[cute.Pointer, cute.Pointer, cute.Pointer],
        groups: cute.Pointer,
        size: tuple[Int32, Int32, Int32, Int32],
        counts: tuple[Int32, Int32, Int32, Int32],
    ):
        rows, m, n, k = size
        experts, alphas, biases, ends = counts
        columns = n // 2 if self.gated else n
        g = self.geometry
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = group_operands.shared_memory(g)
        cluster, parts = self.here(smem)
        context = Context(
            warp=warp,
            geometry=g,
            cut=self.cut,
            cluster=cluster,
            ab=group_operands.operand_ring(g, smem, cluster),
            acc=storage.sum_ring(g, smem, cluster),
            groups=Groups(self.order, smem, experts, m, columns, k, ends),
            parts=parts,
            smem=smem,
            tmem=None,
            memory=Memory(
                self.pdl,
                [info.atom for info in maps],
                operands=group_operands.operands(g, smem, maps, self.policies),
                groups=groups,
                result=Results(
                    self.epilogue.output(out, rows, columns, ld_out),
                    Alpha(factors, factor),
                    alphas,
                    beside[0],
                    biases,
                    n,
                ),
                scales=beside[1],
                unit=beside[2],
            ),
        )
        self.run(context)

    @cute.jit
    def run(self, c):
        """All of the kernel."""
        self.prepare(c)
        c = replace(c, tmem=c.smem.tmem.ptr.load())
        if c.warp == LOAD:
            self.load(c)
        if (c.warp == MMA) & c.cluster.leader:
            self.mma(c)
        if c.warp < EPILOGUE.stop:
            self.epilogue.run(c, EPILOGUE)
        self.finish(c)
        for ring in c.rings:
            ring.check()

    @cute.jit
    def prepare(self, c):
        """Barriers, tensor memory and the table of groups, before any role starts."""
        g = c.geometry
        if c.warp == LOAD:
            for map in c.memory.descriptors:
                cpasync.prefetch_descriptor(map)
            with cute.arch.elect_one():
                for ring in c.rings:
                    ring.initialise()
                if cutlass.const_expr(c.parts is not None):
                    Parts.initialise(c.smem)
            cute.arch.mbarrier_init_fence()
        if c.warp == MMA:
            tensorcore.allocate(c.smem.tmem.ptr, g.tmem_allocation, g.ctas)
        c.groups.make(c.memory.after_grids_before().groups)
        self.synchronise()

    @cute.jit
    def load(self, c):
        """Fills slots with what a k tile takes of both operands, for one tile after the other."""
        g, cut, ab, groups, memory = c.geometry, c.cut, c.ab, c.groups, c.memory.after_grids_before()
        slot = ab.producer()
        index = c.first
        while index < groups.total:
            work = c.work(index)
            runs = cut.runs(work, c.cluster.half)
            pairs = list(zip(c.operands(memory, work), runs, strict=True))
            nbytes = Int32(g.ctas * sum(operand.nbytes(own) for operand, own in pairs))
            for k_tile in cutlass.range(work.k_tiles, unroll=1):
                ab.wait_empty(slot)
                if c.cluster.leader:
                    ab.expect(slot, nbytes)
                for operand, own in pairs:
                    for run in own:
                        operand.fetch_run(run, work.k_tile(k_tile), slot, ab)
                slot = slot.next()
            index = index + c.stride
        c.memory.let_next_grid_start()
        ab.drain(slot)

    @cute.jit
    def mma(self, c):
        """Multiplies slot after slot into an accumulator, of both CTAs where there is a pair."""
        g, cut, ab, acc, groups = c.geometry, c.cut, c.ab, c.acc, c.groups
        core = GroupCore.of(g, c.smem, c.tmem)
        slot, sums = ab.consumer(), acc.producer()
        in_turn = g.scale_slots < g.slots  # sets of scales: one is free again when its last slot has been multiplied
        before, scales = ab.behind(g.scale_slots), Slot(g.scale_slots, Int32(0), Int32(0), 0)
        index = c.first
        while index < groups.total:
            work = c.work(index)
            atoms, place, shares = cut.atoms(work), cut.shift(work) // 32, cut.shares(work)
            acc.wait_empty(sums)
            for k_tile in cutlass.range(work.k_tiles, unroll=1):
                if cutlass.const_expr(in_turn):
                    ab.wait_empty(before)
                ab.wait_full(slot)
                tensorcore.after_sync()  # what read the scales that are overwritten, and the epilogue's loads
                own = scales.index if cutlass.const_expr(in_turn) else slot.index
                core.copy_atoms(slot.index, own, atoms)
                for (first, _), share in zip(g.parts, shares, strict=True):
                    if share > 0:
                        core.multiply_part(slot.index, own, sums.index, place, first, share, k_tile > 0)
                ab.commit_empty(slot)
                slot = slot.next()
                if cutlass.const_expr(in_turn):
                    before, scales = before.next(), scales.next()
            acc.commit_full(sums)
            sums = sums.next()
            index = index + c.stride

    synchronise, finish = Sm100Gemm.synchronise, Sm100Gemm.finish
