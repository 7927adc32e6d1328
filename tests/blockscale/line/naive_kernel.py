"""A kernel with the entry of a real one and nothing of its speed: a thread an element, decoded and summed by hand.

It stands in where the line around a kernel is tested, on every architecture that the compiler knows.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Float32, Float64, Int32, Int64, cute

THREADS = 128


@cute.jit
def small_integer(code: Int32):
    """Twice the value of an E2M1 code."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    magnitude = mantissa
    if exponent > 0:
        magnitude = (2 + mantissa) << (exponent - 1)
    if code >= 8:
        magnitude = -magnitude
    return magnitude


@cute.jit
def scale_integer(code: Int32):
    """2^9 times the value of a UE4M3 code."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    value = mantissa
    if exponent > 0:
        value = (8 + mantissa) << (exponent - 1)
    return value


class NaiveGemm:
    def __init__(self, out_dtype):
        self.out = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16, "fp32": cutlass.Float32}[out_dtype]

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
        rows_a, rows_b = (m + 127) // 128 * 128, (n + 127) // 128 * 128
        self.kernel(
            cute.make_tensor(a, cute.make_layout(batch_a * m * (k // 2))),
            cute.make_tensor(b, cute.make_layout(batch_b * n * (k // 2))),
            cute.make_tensor(sfa, cute.make_layout(batch_a * rows_a * (k // 16))),
            cute.make_tensor(sfb, cute.make_layout(batch_b * rows_b * (k // 16))),
            cute.make_tensor(out, cute.make_layout(batch * m * ld_out)),
            [cute.make_tensor(x, cute.make_layout(1)) for x in (unit_a, unit_b, alpha)],
            factor,
            (m, n, k, rows_a, rows_b),
            ld_out,
            (batch_a, batch_b),
        ).launch(grid=[(m * n + THREADS - 1) // THREADS, batch, 1], block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, a, b, sfa, sfb, out, units, factor, sizes, ld_out, batches):
        m, n, k, rows_a, rows_b = sizes
        batch_a, batch_b = batches
        thread, _, _ = cute.arch.thread_idx()
        block, matrix, _ = cute.arch.block_idx()
        at = block * THREADS + thread
        if at < m * n:
            row, column = at // n, at % n
            in_a, in_b = Int32(0), Int32(0)
            if batch_a > 1:
                in_a = matrix
            if batch_b > 1:
                in_b = matrix
            total = Float32(0)
            for k0 in range(k // 16):
                scale_a = scale_integer(Int32(sfa[in_a * rows_a * (k // 16) + scale_byte(row, k0, k)]))
                scale_b = scale_integer(Int32(sfb[in_b * rows_b * (k // 16) + scale_byte(column, k0, k)]))
                part = Int32(0)
                for pair in range(8):
                    x = Int32(a[(in_a * m + row) * (k // 2) + k0 * 8 + pair])
                    y = Int32(b[(in_b * n + column) * (k // 2) + k0 * 8 + pair])
                    part += small_integer(x & 15) * small_integer(y & 15)
                    part += small_integer((x >> 4) & 15) * small_integer((y >> 4) & 15)  # bytes come with a sign
                total += Float32(part) * (Float32(scale_a) * Float32(scale_b))
            total = total * (2.0**-20 * units[0][0] * factor) * (units[1][0] * units[2][0])
            out[(Int64(matrix) * m + row) * ld_out + column] = total.to(self.out)


@cute.jit
def scale_byte(row: Int32, block: Int32, k: Int32):
    """Where the scale of a row and a block of 16 is in layout "128x4"."""
    atom = row // 128 * (k // 64) + block // 4
    return atom * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
