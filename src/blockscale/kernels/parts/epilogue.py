"""From fp32 sums to the output: alpha, the cast, and the store."""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Float64, Int32, Int64, cute

VECTOR_BYTES = 16


def split(product):
    """(mantissa, power): two fp32 factors of an fp64 `product`, the second a power of two near its square root.

    Global scales may be as small as 2^-126: their product, or a sum times one of them, can leave the range of fp32
    although the result is within it. x * mantissa * power does not, and rounds once where the product is an fp32.
    """
    exponent = Int32((product.bitcast(Int64) >> 52) & 0x7FF) - 1023
    half = cutlass.max(cutlass.min(exponent >> 1, Int32(127)), Int32(-126))
    inverse = (Int64(1023 - half) << 52).bitcast(Float64)
    return Float32(product * inverse), ((half + 127) << 23).bitcast(Float32)


@dataclass(frozen=True)
class Output:
    """(batch, m, n) at `pointer`, rows `ld` elements apart; nothing is written beyond m or n."""

    pointer: cute.Pointer
    dtype: type[cutlass.Numeric]
    m: Int32
    n: Int32
    ld: Int64

    def aligned(self):
        """Whether every row begins at an address that vector stores may use."""
        return ((self.pointer.toint() | self.ld * (self.dtype.width // 8)) & (VECTOR_BYTES - 1)) == 0

    def row(self, matrix, row):
        return self.pointer + (Int64(matrix) * self.m + row) * self.ld

    @cute.jit
    def store(self, values, row, column, target, vectors):
        """Casts and stores consecutive elements of a row from `column` on; `target` is where its first one goes."""
        count = cute.size(values.shape)
        rD = cute.make_rmem_tensor(count, self.dtype)
        rD.store(values.to(self.dtype))
        if row < self.m:
            if vectors & (column + count <= self.n):
                gD = cute.make_tensor(target.align(VECTOR_BYTES), cute.make_layout(count))
                cute.autovec_copy(rD, gD)
            else:
                for i in cutlass.range_constexpr(count):
                    if column + i < self.n:
                        (target + i).store(rD[i])
