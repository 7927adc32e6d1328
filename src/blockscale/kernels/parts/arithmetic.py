"""What becomes of sums on their way out: act(alpha x sum + bias), fp32."""

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Float64, Int32, Int64, cute

INFINITE = 0x7F800000  # as fp32
ONE = 0x3F800000
VECTOR_BYTES = 16


@dataclass(frozen=True)
class Alpha:
    """What sums are multiplied by: fp32 numbers in global memory and an fp64 one by value."""

    pointers: tuple[cute.Pointer, ...]
    value: Float64

    def load(self) -> tuple[Float32, Float32]:
        """(x, power): the product is x * power; power is 1 where the product is a normal fp32, else a power of two near
        its square root.

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
        half = Int32(cutlass.select_((exponent >= -126) & (exponent < 127), Int32(0), half))
        inverse = (Int64(1023 - half) << 52).bitcast(Float64)
        x = Float32(product * inverse).bitcast(Int32)
        beyond = (exponent < 1024) & ((x & 0x7FFFFFFF) == INFINITE)
        x = x - Int32(beyond)  # the largest fp32 of its sign
        return x.bitcast(Float32), (half + 127 << 23).bitcast(Float32)


@dataclass(frozen=True)
class Bias:
    """(count,) fp32, fp16 or bf16 in global memory, one number a column of the output."""

    pointer: cute.Pointer
    count: Int32

    @cute.jit
    def columns(self, first, number):
        """Those of `number` columns, a multiple of 8, from `first` on, as fp32; 0 beyond the last."""
        values = [Float32(0.0)] * number
        aligned = (self.pointer + first).toint() % VECTOR_BYTES == 0
        if aligned & (first + number <= self.count):
            values = self._vectors(first, number)
        else:
            values = [self.column(first + i) for i in range(number)]
        return values

    def _vectors(self, first: Int32, number: int) -> list[Float32]:
        start = (self.pointer + first).toint()
        vectors = cute.make_ptr(self.pointer.dtype, start, cute.AddressSpace.gmem, assumed_align=VECTOR_BYTES)
        loaded = cute.make_tensor(vectors, cute.make_layout(number)).load()
        return [Float32(loaded[i]) for i in range(number)]

    @cute.jit
    def column(self, at):
        """That of one column; 0 beyond the last."""
        value = Float32(0.0)
        if at < self.count:
            value = Float32((self.pointer + at).load())
        return value


@cute.jit
def scaled(sums, alpha, bias):
    """alpha x sum + bias for an even number of sums, two at a time (PTX: the .f32x2 of mul and fma, which sm_100
    brought). The second of alpha's factors is rarely needed, and is rounded together with a bias."""
    x, power = alpha
    values = [y for i in range(0, len(sums), 2) for y in _pair("mul", sums[i : i + 2], x)]
    if cutlass.const_expr(bias is not None):
        values = [y for i in range(0, len(sums), 2) for y in _pair("fma", values[i : i + 2], power, bias[i : i + 2])]
    elif cute.arch.make_warp_uniform(power.bitcast(Int32)) != ONE:
        values = [y for i in range(0, len(sums), 2) for y in _pair("mul", values[i : i + 2], power)]
    return values


def _pair(operation: str, pair: list[Float32], factor: Float32, bias: list[Float32] | None = None) -> list[Float32]:
    given = [*pair, factor, *(bias or ())]
    addend = "" if bias is None else ", bias"
    return cute.arch.inline_ptx(
        "{\n.reg .b64 y, factor, bias;\n"
        "mov.b64 y, {{$r0}, {$r1}};\nmov.b64 factor, {{$r2}, {$r2}};\n"
        + ("" if bias is None else "mov.b64 bias, {{$r3}, {$r4}};\n")
        + f"{operation}.rn.f32x2 y, y, factor{addend};\n"
        "mov.b64 {{$w0}, {$w1}}, y;\n}",
        write_only_types=[Float32] * 2,
        read_only_args=[value.bitcast(Int32) for value in given],
    )
