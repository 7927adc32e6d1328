"""Weight-only NVFP4 GEMM for sm_90a: out = activation(alpha x unit x a @ (b x scales)^T + bias).

a is fp16 or bf16; b lies in fragment order (formats/fragment.py); unit is its global scale. A CTA computes 16 x
row_warps rows of b by up to `tokens` rows of a. Its warps stand in a grid: row_warps tiles of 16 rows, and for each of
these k_warps, which take every k_warps-th unit of 128 k and whose sums are added in this order.

Timeline of a warp with 2 units in registers (depth) and k in two chunks of activations in shared memory:

    weights       0 1 . . 2 3 . 4 5 . .        units asked for, global memory to registers
    activations   a b . . . . . . . c . .      chunks asked for, global to shared memory
    product       . . . a0 a1 . b2 b3 . c4     dequantised in registers, mma.sync

The first weights are asked for before anything else: what a CTA waits for in the end is memory. Weights are operand A
(16 rows), activations operand B (8 columns), so that one row of a costs no more than eight.

Shared memory: two chunks of activations, tokens x (chunk + 8) elements each, the 8 so that `ldmatrix` meets no bank
twice; after the last product, sums: k_warps x tokens x rows of the CTA in fp32.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Float64, Int32, Int64, cute

from blockscale.formats.fragment import DEPTH, ROWS
from blockscale.kernels.parts import warpmma, weights
from blockscale.kernels.parts.epilogue import Alpha
from blockscale.kernels.parts.weights import Weights

WARP = 32
DTYPES = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16, "fp32": cutlass.Float32}
SKEW = 8  # elements between rows of activations beyond their own: 16 bytes
PIECE = 8  # elements that are copied at a time: 16 bytes


class Sm90WarpGemm:
    """The kernel of one configuration; calling it launches it, compiling needs no GPU.

    Args:
        tokens: rows of a that a CTA takes: 1, 2, 4 or a multiple of 8.
        row_warps, k_warps: the CTA's warps, along rows of b and along k.
        depth: units of weights that a warp has in flight.
        chunk: k of a chunk of activations, a multiple of 128 x k_warps x depth.
        a_dtype: "fp16" or "bf16". out_dtype: these or "fp32". bias: whether there is one. activation: None or a name.
    """

    def __init__(
        self,
        tokens,
        *,
        row_warps=4,
        k_warps=4,
        depth=4,
        chunk=4096,
        pdl=False,
        a_dtype="bf16",
        out_dtype="bf16",
        bias=False,
        activation=None,
    ):
        self.tokens, self.row_warps, self.k_warps, self.depth, self.chunk = tokens, row_warps, k_warps, depth, chunk
        self.pdl, self.bias, self.activation = pdl, bias, activation
        self.dtype, self.out_dtype = DTYPES[a_dtype], DTYPES[out_dtype]
        self.threads = WARP * row_warps * k_warps
        self.rows = ROWS * row_warps
        self.n_tiles = -(-tokens // 8)
        self.pitch = (chunk + SKEW) * 2  # bytes
        self.buffer_bytes = tokens * self.pitch
        self.sum_pitch = self.rows + 4
        sums = k_warps * self.n_tiles * 8 * self.sum_pitch * 4
        self.smem_bytes = max(2 * self.buffer_bytes, sums)
        if chunk % (DEPTH * k_warps * depth):
            raise AssertionError(f"chunk {chunk} is no multiple of {DEPTH} x {k_warps} x {depth}")

    def __repr__(self):
        """Also in the kernel's name."""
        return (
            f"Sm90WarpGemm_{self.tokens}_{self.row_warps}x{self.k_warps}_{self.depth}_{self.chunk}_"
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
            a: (m, k), rows ld_a elements apart, aligned to their type.
            b: (ceil(n / 16), ceil(k / 128)) units, aligned to 16 bytes.
            out: (m, n), rows ld_out elements apart. bias: (n,) of the type of out, or anything.
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
        m, n, k = size
        thread, _, _ = cute.arch.thread_idx()
        block, token_block, _ = cute.arch.block_idx()
        lane = thread % WARP
        warp = cute.arch.make_warp_uniform(thread // WARP)
        row_warp, k_warp = warp % self.row_warps, warp // self.row_warps
        units = cute.ceil_div(k, DEPTH)
        last_tile = cute.ceil_div(n, ROWS) - 1
        tile = cutlass.min(block * self.row_warps + row_warp, last_tile)
        source = Weights.of(b, tile, units, lane)

        rWeights = [cute.make_rmem_tensor(weights.WORDS, Int32) for _ in range(self.depth)]
        for slot in cutlass.range_constexpr(self.depth):
            unit = slot * self.k_warps + k_warp
            source.load(rWeights[slot], unit, unit < units)

        smem = cute.arch.get_dyn_smem(cutlass.Uint8, alignment=128).toint()
        first_token = token_block * self.tokens
        tokens = cutlass.min(m - first_token, self.tokens)
        origin = a.toint() + Int64(first_token) * ld_a * 2
        if cutlass.const_expr(self.pdl):
            cute.arch.griddepcontrol_wait()
        self.fetch(origin, ld_a, k, tokens, smem, Int32(0), thread)
        self.fetch(origin, ld_a, k, tokens, smem, Int32(1), thread)
        x, power = Alpha(factors, factor * weights.FACTOR).load()

        rows = [cutlass.min(8 * i + lane % 8, tokens - 1) for i in range(self.n_tiles)]
        columns = [smem + row * self.pitch + lane // 8 * 16 for row in rows]
        rSums = cute.make_rmem_tensor(4 * self.n_tiles, Float32)
        rSums.fill(0.0)
        rounds = self.chunk // (DEPTH * self.k_warps * self.depth)
        chunks = cute.ceil_div(k, self.chunk)
        for chunk in cutlass.range(chunks, unroll=1):
            cute.arch.cp_async_wait_group(1)
            cute.arch.sync_threads()
            first = chunk * (self.chunk // DEPTH) + k_warp
            buffer = (chunk & 1) * self.buffer_bytes
            left = units - first
            for turn in cutlass.range(cutlass.min(rounds, cute.ceil_div(left, self.k_warps * self.depth)), unroll=1):
                for slot in cutlass.range_constexpr(self.depth):
                    step = (turn * self.depth + slot) * self.k_warps
                    if step < left:
                        offset = buffer + (step + k_warp) * (DEPTH * 2)
                        self.multiply(rSums, rWeights[slot], [column + offset for column in columns])
                    ahead = first + step + self.depth * self.k_warps
                    source.load(rWeights[slot], ahead, ahead < units)
            cute.arch.sync_threads()
            self.fetch(origin, ld_a, k, tokens, smem, chunk + 2, thread)
        cute.arch.cp_async_wait_group(0)
        if cutlass.const_expr(self.pdl):
            cute.arch.griddepcontrol_launch_dependents()
        self.keep(rSums, smem, row_warp, k_warp, lane)
        cute.arch.sync_threads()
        self.store(out, bias, x, power, smem, (tokens, n), block, first_token, ld_out, thread)

    @cute.jit
    def multiply(self, rSums, rWeights, columns):
        """One unit: eight steps of 16 k, dequantised and multiplied with every group of 8 tokens."""
        for pair in cutlass.range_constexpr(weights.STEPS // 2):
            scales = weights.scale_pairs(rWeights[8 + pair], self.dtype)
            b = [warpmma.load_columns(column + pair * 64) for column in columns]
            for odd in cutlass.range_constexpr(2):
                a = weights.decode(rWeights[2 * pair + odd], scales[odd], self.dtype)
                for i in cutlass.range_constexpr(self.n_tiles):
                    sums = [rSums[4 * i + j] for j in range(4)]
                    sums = warpmma.multiply(sums, a, b[i][2 * odd : 2 * odd + 2], self.dtype)
                    for j in cutlass.range_constexpr(4):
                        rSums[4 * i + j] = sums[j]

    @cute.jit
    def fetch(self, origin, ld_a, k, tokens, smem, chunk, thread):
        """Asks for a chunk of activations, zeros beyond k, and closes the group of copies, which may be empty."""
        start = chunk * self.chunk
        pieces = cutlass.min(cute.ceil_div(k - start, DEPTH) * (DEPTH // PIECE), self.chunk // PIECE)
        buffer = smem + (chunk & 1) * self.buffer_bytes
        aligned = (origin | (ld_a * 2)) % 16 == 0
        if pieces > 0:
            for row in cutlass.range(tokens, unroll=1):
                for piece in cutlass.range(thread, pieces, self.threads, unroll=1):
                    target = buffer + row * self.pitch + piece * 16
                    at = start + piece * PIECE
                    address = origin + (Int64(row) * ld_a + at) * 2
                    left = cutlass.max(cutlass.min(k - at, PIECE), 0)
                    if aligned:
                        cute.arch.inline_ptx(
                            "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
                            read_only_args=[target, cutlass.select_(left > 0, address, origin), left * 2],
                        )
                    else:
                        for i in cutlass.range_constexpr(PIECE):
                            bits = cutlass.Int16(0)
                            if i < left:
                                bits = cute.make_ptr(
                                    cutlass.Int16, address + 2 * i, cute.AddressSpace.gmem, assumed_align=2
                                ).load()
                            cute.arch.inline_ptx("st.shared.b16 [{$r0}], {$r1};", read_only_args=[target + 2 * i, bits])
        cute.arch.cp_async_commit_group()

    @cute.jit
    def keep(self, rSums, smem, row_warp, k_warp, lane):
        """A warp's sums to shared memory: (k_warp, token, row)."""
        for i in cutlass.range_constexpr(self.n_tiles):
            for j in cutlass.range_constexpr(4):
                token = 8 * i + lane % 4 * 2 + j % 2
                row = row_warp * ROWS + lane // 4 + j // 2 * 8
                at = (k_warp * self.n_tiles * 8 + token) * self.sum_pitch + row
                if cutlass.const_expr(self.tokens >= 8) or token < self.tokens:
                    cute.arch.inline_ptx(
                        "st.shared.f32 [{$r0}], {$r1};", read_only_args=[smem + at * 4, rSums[4 * i + j]]
                    )

    @cute.jit
    def store(self, out, bias, x, power, smem, size, block, first_token, ld_out, thread):
        """Adds the k_warps' sums in their order and stores the results; neighbouring threads have neighbouring rows."""
        tokens, n = size
        for at in cutlass.range(thread, tokens * self.rows, self.threads, unroll=1):
            token, row = at // self.rows, at % self.rows
            total = Float32(0)
            for k_warp in cutlass.range_constexpr(self.k_warps):
                place = (k_warp * self.n_tiles * 8 + token) * self.sum_pitch + row
                part = cute.arch.inline_ptx(
                    "ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[smem + place * 4]
                )
                total = part if cutlass.const_expr(k_warp == 0) else total + part
            column = block * self.rows + row
            if column < n:
                result = total * x * power
                (out + (Int64(first_token + token) * ld_out + column)).store(result.to(self.out_dtype))
