"""Weight-only grouped NVFP4 GEMM for sm_90a, few tokens a group: the kernel of kernels/sm90.py for every group of rows.

One launch for all groups, whose sizes only the device knows. The grid has, beside tiles of rows of b, as many blocks of
tokens as there could be at most; each warp of a CTA finds by sums over the sizes which group's block its own is, and a
CTA beyond the last block ends at once. A group of more rows than a tile has takes several blocks, each of which loads
the group's weights; of empty groups nothing is loaded.

Roles, rings, shared memory: those of kernels/sm90.py.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float64, Int32, Int64, Uint32, cute

from blockscale.formats.fragment import DEPTH, ROWS, UNIT_BYTES
from blockscale.kernels.parts import async_copies, weights
from blockscale.kernels.parts.arithmetic import Alpha, Bias
from blockscale.kernels.parts.ring import Ring
from blockscale.kernels.parts.sums import Finish, finish
from blockscale.kernels.sm90 import ALPHA, READY, WARP, Context, Sm90WarpGemm


class Sm90GroupedGemm(Sm90WarpGemm):
    """The kernel of one configuration; calling it launches it, compiling needs no GPU.

    Args:
        form: "contiguous": groups follow one another in the rows of a. "masked": each has a matrix of its own.
        tokens, ...: as those of `Sm90WarpGemm`.
    """

    def __init__(self, tokens, *, form="contiguous", **options):
        super().__init__(tokens, **options)
        self.masked = form == "masked"

    @cute.jit
    def __call__(
        self, a: cute.Pointer, b: cute.Pointer, out: cute.Pointer, bias: cute.Pointer, unit: cute.Pointer,
        alpha: cute.Pointer, groups: cute.Pointer, factor: Float64, m: Int32, n: Int32, k: Int32, ld_a: Int64,
        ld_out: Int64, experts: Int32, alphas: Int32, biases: Int32, ends: Int32, blocks: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        """Launches the product.

        Args:
            a: (m, k), or (experts, m, k) in the masked form, rows ld_a elements apart, each aligned to 16 bytes; k is a
                multiple of 8.
            b: (experts, ceil(n / 16), ceil(k / 128)) units, aligned to 16 bytes.
            out: (m, n) or (experts, m, n), rows ld_out elements apart. bias: (biases, n), or anything without one.
            unit: fp32. alpha: (alphas,) fp32. factor: one more, by value.
            groups: (experts,) int32: how many rows each group has; with `ends` not 0, where it ends.
            alphas, biases: 1, or `experts`. blocks: of tokens, as many as there can be.
        """
        self.grouped(
            a, b, out, bias, unit, alpha, groups, factor, (m, n, k), (ld_a, ld_out), (experts, alphas, biases, ends)
        ).launch(
            grid=[cute.ceil_div(n, self.rows), blocks, 1],
            block=[self.threads, 1, 1],
            smem=self.smem_bytes,
            min_blocks_per_mp=1,
            use_pdl=self.pdl,
            stream=stream,
        )

    @cute.kernel
    def grouped(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        out: cute.Pointer,
        bias: cute.Pointer,
        unit: cute.Pointer,
        alpha: cute.Pointer,
        groups: cute.Pointer,
        factor: Float64,
        size: tuple[Int32, Int32, Int32],
        pitches: tuple[Int64, Int64],
        counts: tuple[Int32, Int32, Int32, Int32],
    ):
        if cutlass.const_expr(self.pdl):
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
        m, n, k = size
        ld_a, ld_out = pitches
        experts, alphas, biases, ends = counts
        thread, _, _ = cute.arch.thread_idx()
        row_block, token_block, _ = cute.arch.block_idx()
        lane, warp = thread % WARP, cute.arch.make_warp_uniform(thread // WARP)
        expert, token, there = self.place(groups, token_block, m, experts, ends, lane)
        smem = cute.arch.get_dyn_smem(Int64, alignment=128)
        activations = Ring("activations", smem, smem + self.buffers, self.buffers, fills=1, empties=self.warps)
        if there > 0:
            c = Context(warp, lane, cutlass.min(there, self.tokens), k, activations, smem.toint())
            tiles = cute.ceil_div(n, ROWS)
            if warp < self.warps:
                tile = cutlass.min(row_block * self.row_warps + warp % self.row_warps, tiles - 1)
                at = Int64(expert) * tiles + tile
                self.multiply(c, b.toint() + at * cute.ceil_div(k, DEPTH) * UNIT_BYTES)
            else:
                with cute.arch.elect_one():
                    activations.initialise()
                cute.arch.mbarrier_init_fence()
                cute.arch.barrier_arrive(barrier_id=READY, number_of_threads=self.threads)
                self.fetch(c, a.toint() + Int64(token) * ld_a * 2, ld_a)
                own = alpha + cutlass.select_(alphas > 1, expert, Int32(0))
                for i, value in enumerate(Alpha((unit, own), factor * weights.FACTOR).load()):
                    async_copies.store_fp32(c.smem + ALPHA + 4 * i, value)
            cute.arch.sync_threads()
            scale = async_copies.load_fp32(c.smem + ALPHA), async_copies.load_fp32(c.smem + ALPHA + 4)
            own_bias = bias + Int64(cutlass.select_(biases > 1, expert, Int32(0))) * n
            offset = None if cutlass.const_expr(self.bias is None) else Bias(own_bias, n)
            results = Finish(out, self.out_dtype, ld_out, token + c.tokens, n, scale, offset, self.activation)
            corner = token, row_block * self.rows
            finish(self.sums(c.smem), results, corner, thread, Int32(0), self.threads, self.tokens)
        activations.check()

    @cute.jit
    def place(self, groups, block, m, experts, ends, lane):
        """(group, first row, rows from there on) of a block of tokens; no rows if it is beyond the last. By a warp.

        Nothing that the numbers in global memory say leads outside of the operands, nor two groups to one row: sizes
        count from 0 to the rows that are left, ends from the one before to m.
        """
        expert, first, there = Int32(0), Int32(0), Int32(0)
        end, blocks = Uint32(0), Int32(0)
        for start in cutlass.range(0, experts, WARP, unroll=1):
            group = start + lane
            given = Int32(0)
            if group < experts:
                given = cutlass.max(Int32(0), cutlass.min((groups + group).load(), m))
            before, own = group * m, given
            if cutlass.const_expr(not self.masked):
                total = Uint32(given)
                for distance in (1, 2, 4, 8, 16):
                    other = Uint32(cute.arch.shuffle_sync_up(total, distance))
                    total = Uint32(cutlass.select_(lane >= distance, self.together(other, total, m, ends), total))
                total = self.together(end, total, m, ends)
                previous = Uint32(cute.arch.shuffle_sync_up(total, 1))
                before = Int32(Uint32(cutlass.select_(lane == 0, end, previous)))
                own = Int32(total) - before
                end = Uint32(cute.arch.shuffle_sync(total, WARP - 1))
            mine = (own + (self.tokens - 1)) // self.tokens
            last = mine
            for distance in (1, 2, 4, 8, 16):
                other = Int32(cute.arch.shuffle_sync_up(last, distance))
                last = Int32(cutlass.select_(lane >= distance, other + last, last))
            last = last + blocks
            within = (block - (last - mine)) * self.tokens
            hits = cute.arch.vote_ballot_sync((last > block) & (last - mine <= block))
            if hits != 0:
                holder = cute.arch.popc((hits & -hits) - 1)
                expert = Int32(cute.arch.shuffle_sync(group, holder))
                first = Int32(cute.arch.shuffle_sync(before + within, holder))
                there = Int32(cute.arch.shuffle_sync(own - within, holder))
            blocks = Int32(cute.arch.shuffle_sync(last, WARP - 1))
        return tuple(cute.arch.make_warp_uniform(value) for value in (expert, first, there))

    def together(self, x: Uint32, y: Uint32, m: Int32, ends: Int32) -> Uint32:
        """The end of two runs of groups: the later of two ends, or the sum of two sizes, at most m."""
        return Uint32(cutlass.select_(ends != 0, cutlass.max(x, y), cutlass.min(x + y, Uint32(m))))
