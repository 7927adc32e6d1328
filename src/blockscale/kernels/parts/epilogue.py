"""From fp32 sums to the output: alpha, the cast, and the store."""

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Float64, Int32, Int64, cute

INFINITE = 0x7F800000  # as fp32
VECTOR_BYTES = 16  # of a store, where the output allows it


@dataclass(frozen=True)
class Alpha:
    """What sums are multiplied by, before the cast: fp32 numbers in global memory and an fp64 one by value."""

    pointers: tuple[cute.Pointer, ...]
    value: Float64

    def load(self) -> tuple[Float32, Float32]:
        """(x, power): the product is x * power, and power is a power of two near its square root.

        Global scales may be as small as 2^-126: their product, or a sum times one of them, can leave the range of
        fp32 where the result does not. sum * x * power stays within it, and rounds once more than sum * product
        only if that product is no fp32. A product beyond 2^255 makes every sum but zero infinite: x is then the largest
        fp32, since an infinite one would make NaN of a sum of zero.
        """
        product = self.value
        for pointer in self.pointers:
            product = product * Float64(pointer.load())
        exponent = Int32(product.bitcast(Int64) >> 52 & 0x7FF) - 1023
        half = cutlass.max(cutlass.min(exponent >> 1, Int32(127)), Int32(-126))
        inverse = (Int64(1023 - half) << 52).bitcast(Float64)
        x = Float32(product * inverse).bitcast(Int32)
        beyond = (exponent < 1024) & ((x & 0x7FFFFFFF) == INFINITE)
        x = x - Int32(beyond)  # the largest fp32 of its sign
        return x.bitcast(Float32), (half + 127 << 23).bitcast(Float32)


@dataclass(frozen=True)
class Output:
    """(batch, m, n) of a dtype at `pointer`, rows `ld` elements apart; nothing is written beyond m or n."""

    pointer: cute.Pointer
    dtype: type[cutlass.Numeric]
    m: Int32
    n: Int32
    ld: Int64

    def aligned(self) -> Boolean:
        """Whether every row begins at an address that a vector may be stored to."""
        return (self.pointer.toint() | self.ld * (self.dtype.width // 8)) % VECTOR_BYTES == 0

    def row(self, matrix: Int32, row: Int32) -> cute.Pointer:
        return self.pointer + (Int64(matrix) * self.m + row) * self.ld

    @cute.jit
    def store(self, values, row, column, target, aligned):
        """Casts consecutive elements of a row of one matrix and stores those that lie within m and n.

        They go as vectors where rows are aligned and all of them are within n, otherwise one by one.

        Args:
            values: fp32, 8, 16 or 32 of them: a multiple of 16 bytes in every dtype.
            row, column: where in the matrix the first one belongs. target: its address.
            aligned: what `aligned()` says; a multiple of 8 columns on from the start of a row keeps the alignment.
        """
        count = cute.size(values.shape)
        left = self.n - column
        result = values.to(self.dtype)
        elements = [result[i] for i in range(count)]
        if row < self.m:
            if aligned & (count <= left):
                vectors = cute.make_ptr(self.dtype, target.toint(), cute.AddressSpace.gmem, assumed_align=VECTOR_BYTES)
                cute.make_tensor(vectors, cute.make_layout(count)).store(result)
            else:
                for i in cutlass.range_constexpr(count):
                    if i < left:
                        (target + i).store(elements[i])
