"""Weight-only NVFP4 GEMM for sm_90a, few tokens: out = activation(alpha x unit x a @ (b x scales)^T + bias).

a is fp16 or bf16, a row of it is called a token here; b lies in fragment order (formats/fragment.py); unit is its
global scale. A CTA computes 16 x row_warps rows of b by up to `tokens` rows of a. Roles:

    role      warps                 does
    multiply  row_warps x k_warps   a tile of 16 rows each; of its units of 128 k every k_warps-th; then the sums of
                                    the k_warps are added, in their order
    fetch     one more              brings chunks of activations to shared memory, and alpha

Rings:

    ring         slots    full                                     empty
    registers    depth    a unit's loads                           the unit is multiplied, in the same warp
    activations  buffers  1 arrival (fetch), the bytes of its rows 1 arrival a multiplying warp

Timeline with depth 2, k in two chunks, two buffers; each warp of multiply has units 0 to 3:

    multiply  asks for 0 1 | waits for chunk a | 0, asks for 2 | 1, asks for 3 | waits for chunk b | 2 | 3 | sums
    fetch     asks for a b | alpha

A weight is loaded once, straight to registers, becomes a 16-bit number there and operand A (16 rows) of mma.sync.
Activations are operand B (8 columns), so that one token costs as much as eight. Weights are asked for before anything
else: what a CTA waits for is memory.

`pdl`: the launch does not wait for the kernel before it in the stream to end. Until that has ended L2 is asked for
`prefetch` units of weights a warp, which is a hint, and nothing is touched but weights, and these only with `ahead`,
which is for weights that no kernel before it in an unbroken chain of overlapped launches writes, nor the one ahead of
that chain.

The tensor core truncates what it adds (parts/chains.py): after every chunk of activations its sums go to others, which
are added as fp32 numbers.

Shared memory: barriers and alpha; each warp's sums; activations: `buffers` x tokens rows of chunk + 8 elements, the 8
so that `ldmatrix` meets no bank twice.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Float64, Int32, Int64, cute

from blockscale.formats.fragment import DEPTH, ROWS, UNIT_BYTES
from blockscale.kernels.parts import async_copies, warpmma, weights
from blockscale.kernels.parts.arithmetic import Alpha, Bias
from blockscale.kernels.parts.hopper_memory import SKEW, WARPS_HEAD, of_warps, sum_bytes
from blockscale.kernels.parts.ring import Ring, Slot
from blockscale.kernels.parts.sums import Finish, Sums, add_up, finish
from blockscale.kernels.parts.weights import Stream

WARP = 32
DTYPES = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16, "fp32": cutlass.Float32}
ALPHA = WARPS_HEAD - 8  # where it lies in shared memory
READY = 1  # the named barrier behind which barriers in shared memory may be used


def expect_bytes(ring: Ring, slot: Slot, nbytes: Int32) -> None:
    """As `Ring.expect_copies`, for bytes that only the launch knows: the ring declares none."""
    ring.traced["fills"] += 1
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ring.full + slot.index, nbytes)


@dataclass(frozen=True)
class Context:
    """What the roles share."""

    warp: Int32
    lane: Int32
    tokens: Int32  # of this CTA
    k: Int32
    activations: Ring
    smem: Int32


class Sm90WarpGemm:
    """The kernel of one configuration; calling it launches it, compiling needs no GPU.

    Args:
        tokens: rows of a that a CTA takes: 1, 2, 4, 8 or 16.
        row_warps, k_warps: the multiplying warps, along rows of b and along k.
        depth: units of weights that a warp has in flight.
        chunk: k of a chunk of activations, a multiple of 128 x k_warps x depth. buffers: chunks in shared memory.
        pdl, ahead, prefetch: see above.
        a_dtype: "fp16" or "bf16". out_dtype, bias: these or "fp32"; bias may be None. activation: None or its name.
    """

    def __init__(
        self,
        tokens,
        *,
        row_warps,
        k_warps,
        depth,
        chunk,
        buffers,
        pdl=False,
        ahead=False,
        prefetch=0,
        a_dtype="bf16",
        out_dtype="bf16",
        bias=None,
        activation=None,
    ):
        self.tokens, self.row_warps, self.k_warps, self.depth = tokens, row_warps, k_warps, depth
        self.chunk, self.buffers, self.pdl, self.ahead, self.prefetch = chunk, buffers, pdl, ahead, prefetch
        self.dtype, self.out_dtype = DTYPES[a_dtype], DTYPES[out_dtype]
        self.bias, self.activation = bias, activation
        self.warps = row_warps * k_warps
        self.threads = WARP * (self.warps + 1)
        self.rows = ROWS * row_warps
        self.groups = -(-tokens // 8)  # of tokens that a product takes
        self.turns = chunk // (DEPTH * k_warps * depth)
        self.pitch = (chunk + SKEW) * 2  # bytes
        self.first_buffer, self.smem_bytes = of_warps(tokens, self.warps, chunk, buffers)

    def __repr__(self):
        """Also in the kernel's name."""
        return (
            f"Sm90WarpGemm_{self.tokens}_{self.row_warps}x{self.k_warps}_{self.depth}_{self.chunk}x{self.buffers}_"
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
        """Launches the product.

        Args:
            a: (m, k), rows ld_a elements apart, each aligned to 16 bytes; k is a multiple of 8.
            b: (ceil(n / 16), ceil(k / 128)) units, aligned to 16 bytes.
            out: (m, n), rows ld_out elements apart. bias: (n,), or anything without one.
            unit, alpha: fp32, one each. factor: one more, by value.
        """
        self.kernel(a, b, out, bias, (unit, alpha), factor, (m, n, k), ld_a, ld_out).launch(
            grid=[cute.ceil_div(n, self.rows), cute.ceil_div(m, self.tokens), 1],
            block=[self.threads, 1, 1],
            smem=self.smem_bytes,
            min_blocks_per_mp=1,
            use_pdl=self.pdl,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        out: cute.Pointer,
        bias: cute.Pointer,
        factors: tuple[cute.Pointer, cute.Pointer],
        factor: Float64,
        size: tuple[Int32, Int32, Int32],
        ld_a: Int64,
        ld_out: Int64,
    ):
        if cutlass.const_expr(self.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        m, n, k = size
        thread, _, _ = cute.arch.thread_idx()
        row_block, token_block, _ = cute.arch.block_idx()
        lane, warp = thread % WARP, cute.arch.make_warp_uniform(thread // WARP)
        token = token_block * self.tokens
        smem = cute.arch.get_dyn_smem(Int64, alignment=128)
        activations = Ring("activations", smem, smem + self.buffers, self.buffers, fills=1, empties=self.warps)
        c = Context(warp, lane, cutlass.min(m - token, self.tokens), k, activations, smem.toint())
        if warp < self.warps:
            tile = cutlass.min(row_block * self.row_warps + warp % self.row_warps, cute.ceil_div(n, ROWS) - 1)
            rows = b.toint() + Int64(tile) * cute.ceil_div(k, DEPTH) * UNIT_BYTES
            if cutlass.const_expr(self.prefetch > 0):
                self.ask_l2(c, rows)
            if cutlass.const_expr(self.pdl and not self.ahead):
                cute.arch.griddepcontrol_wait()
            self.multiply(c, rows)
        else:
            with cute.arch.elect_one():
                activations.initialise()
            cute.arch.mbarrier_init_fence()
            cute.arch.barrier_arrive(barrier_id=READY, number_of_threads=self.threads)
            if cutlass.const_expr(self.pdl):
                cute.arch.griddepcontrol_wait()
            self.fetch(c, a.toint() + Int64(token) * ld_a * 2, ld_a)
            for i, value in enumerate(Alpha(factors, factor * weights.FACTOR).load()):
                async_copies.store_fp32(c.smem + ALPHA + 4 * i, value)
        cute.arch.sync_threads()
        if cutlass.const_expr(self.ahead):
            cute.arch.griddepcontrol_wait()
        scale = async_copies.load_fp32(c.smem + ALPHA), async_copies.load_fp32(c.smem + ALPHA + 4)
        offset = None if cutlass.const_expr(self.bias is None) else Bias(bias, n)
        results = Finish(out, self.out_dtype, ld_out, m, n, scale, offset, self.activation)
        corner = token, row_block * self.rows
        finish(self.sums(c.smem), results, corner, thread, Int32(0), self.threads, self.tokens)
        activations.check()

    def sums(self, smem):
        return Sums(smem + WARPS_HEAD, sum_bytes(self.tokens), self.row_warps, self.k_warps, 1)

    @cute.jit
    def ask_l2(self, c, rows):
        """The first units of the tile at address `rows` to L2: by one warp for all that share the tile."""
        units = cutlass.min(cute.ceil_div(c.k, DEPTH), self.prefetch * self.k_warps)
        if c.warp < self.row_warps:
            with cute.arch.elect_one():
                async_copies.ask_l2(rows, units * UNIT_BYTES)

    @cute.jit
    def multiply(self, c, rows):
        """The warp's units from address `rows` on, one after the other; then its sums to shared memory."""
        lane, k, activations = c.lane, c.k, c.activations
        k_warp = c.warp // self.row_warps
        stream = Stream.of(rows, lane, k_warp, cute.ceil_div(k, DEPTH), self.k_warps)
        rWeights = [cute.make_rmem_tensor(weights.WORDS, Int32) for _ in range(self.depth)]
        for i in cutlass.range_constexpr(self.depth):
            stream = stream.load(rWeights[i])
        rSums = cute.make_rmem_tensor(4 * self.groups, Float32)
        rTotal = cute.make_rmem_tensor(4 * self.groups, Float32)
        rSums.fill(0.0)
        rTotal.fill(0.0)
        tokens = [cutlass.min(8 * i + lane % 8, c.tokens - 1) for i in range(self.groups)]
        within = c.smem + self.first_buffer + k_warp * (DEPTH * 2) + lane // 8 * 16
        columns = [within + token * self.pitch for token in tokens]
        cute.arch.barrier(barrier_id=READY, number_of_threads=self.threads)
        slot = activations.consumer()
        left = cute.ceil_div(k, DEPTH) - k_warp
        for _ in cutlass.range(cute.ceil_div(k, self.chunk), unroll=1):
            activations.wait_full(slot)
            offset = slot.index * (self.tokens * self.pitch)
            for _ in cutlass.range(self.turns, unroll=1):
                for i in cutlass.range_constexpr(self.depth):
                    if left > 0:
                        self.multiply_unit(rSums, rWeights[i], [column + offset for column in columns])
                    stream = stream.load(rWeights[i])
                    offset += self.k_warps * DEPTH * 2
                    left -= self.k_warps
            activations.arrive_empty(slot, range(self.warps))
            slot = slot.next()
            add_up(rTotal, rSums)
        self.sums(c.smem).keep(rTotal, c.warp, lane)

    @cute.jit
    def multiply_unit(self, rSums, rWeights, columns):
        """Eight steps of 16 k, dequantised and multiplied with every group of 8 tokens."""
        for pair in cutlass.range_constexpr(weights.STEPS // 2):
            scales = weights.scale_pairs(rWeights[8 + pair], self.dtype)
            b = [warpmma.load_columns(column + pair * 64) for column in columns]
            for odd in cutlass.range_constexpr(2):
                a = weights.decode(rWeights[2 * pair + odd], scales[odd], self.dtype)
                for i in cutlass.range_constexpr(self.groups):
                    sums = [rSums[4 * i + j] for j in range(4)]
                    sums = warpmma.multiply(sums, a, b[i][2 * odd : 2 * odd + 2], self.dtype)
                    for j in cutlass.range_constexpr(4):
                        rSums[4 * i + j] = sums[j]

    @cute.jit
    def fetch(self, c, origin, ld_a):
        """Chunks of the rows of a from address `origin` on; zeros beyond k up to the end of the last unit."""
        lane, tokens, k, activations = c.lane, c.tokens, c.k, c.activations
        slot = activations.producer()
        for chunk in cutlass.range(cute.ceil_div(k, self.chunk), unroll=1):
            activations.wait_empty(slot)
            there = cutlass.min(k - chunk * self.chunk, self.chunk)
            missing = (DEPTH - there % DEPTH) % DEPTH // 8
            buffer = c.smem + self.first_buffer + slot.index * (self.tokens * self.pitch)
            for i in cutlass.range(lane, tokens * missing, WARP, unroll=1):
                async_copies.clear_16(buffer + i // missing * self.pitch + (there + i % missing * 8) * 2)
            cute.arch.sync_warp()
            expect_bytes(activations, slot, tokens * there * 2)
            cute.arch.sync_warp()
            if lane < tokens:
                source = origin + (Int64(lane) * ld_a + chunk * self.chunk) * 2
                barrier = activations.copy_barrier(slot, 0)
                async_copies.copy_bulk(buffer + lane * self.pitch, source, there * 2, barrier.toint())
            slot = slot.next()
