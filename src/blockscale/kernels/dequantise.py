"""NVFP4 to bf16 or fp16, without tensor cores: the same text for every architecture from sm_90 on.

Each number is code x scale, exact in either type; global scales are not applied. Their product with alpha and an fp64
number can be made on the side, by the first thread, for the kernel that multiplies by the numbers. As fp32 it takes a
power of two more where it is no normal number (`arithmetic.Alpha`). `factors` says what becomes of that:

    beside    written as a second number
    folded    multiplied with every bf16 number, exact but for numbers beyond the range of bf16; in fp16, which has no
              room, with the first number, which then is no normal one. The second number is 0: cuBLAS's beta

What lies in layout

    linear, 128x4   a lane takes eight codes at a time: a word in, 16 bytes out, a warp's 256 consecutive k of a row
    fragment        a warp takes a unit of 16 rows x 128 k: as the tensor cores of Hopper would have it in registers,
                    from there to shared memory (`stmatrix`), and as rows of 256 bytes to global memory

A warp asks for all that it works on before it begins. CTAs of 8 warps: in the first two layouts rows r and r + 1 of
each 32 of 128, whose scales share a sector of 32 bytes in "128x4"; in the last, units that follow each other along k.

Its launch prepares itself while the kernel ahead of it in the stream ends; it touches nothing, and does not let the
next one start, before that has ended (PTX: griddepcontrol). So whatever the next one reads ahead of its own wait, other
than these results, is as it will stay.

Codes are looked up in tables of a byte a code (PTX: prmt): the upper bytes of the magnitudes 0 to 6, and, where they
are not all 0, the lower ones.

Shared memory: 16 rows of 272 bytes a warp for units, the 16 so that no bank is met twice; nothing otherwise.
"""

import cuda.bindings.driver as cuda
import cutlass
from cutlass import BFloat16, Float16, Float32, Float64, Int32, Int64, cute

from blockscale.formats.fragment import CODE_BYTES, DEPTH, ROWS, UNIT_BYTES
from blockscale.formats.layouts import ATOM_BLOCKS, ATOMS, BLOCK, FRAGMENT, ROW_ALIGN
from blockscale.kernels.parts import async_copies, weights
from blockscale.kernels.parts.arithmetic import Alpha

WARP = 32
WARPS = 8
VECTOR = 8  # numbers that a lane writes at once: 16 bytes
PITCH = DEPTH * 2 + 16  # bytes between rows of a unit in shared memory
ATOM_BYTES = ROW_ALIGN * ATOM_BLOCKS
DTYPES = {"bf16": BFloat16, "fp16": Float16}
MOST_FOLDED = 2.0**100  # what is larger makes all sums infinite already
LARGEST = float.fromhex("0x1.fffffep127")
_FACTOR = {"bf16": 0x43004300, "fp16": 0x58005800}  # twice weights.FACTOR
_TABLES = {  # of the upper and of the lower bytes of 0, 0.5, 1, 1.5 | 2, 3, 4, 6
    "bf16": ((0x3F3F3F00, 0x40404040), (0xC0800000, 0xC0804000)),
    "fp16": ((0x3E3C3800, 0x46444240), None),
}


class Dequantise:
    """The kernel of a layout and a dtype; calling it launches it, compiling needs no GPU.

    Args:
        layout: "linear", "128x4" or "fragment". dtype: of the result, "bf16" or "fp16".
        depth: words of codes that a lane has in flight in the first two layouts, units of a warp in the last.
        factors: None without them, "beside" or "folded".
    """

    def __init__(self, layout, dtype, depth, factors):
        self.layout, self.dtype, self.depth, self.factors = layout, dtype, depth, factors
        self.folds = factors == "folded" and dtype == "bf16"

    def __repr__(self):
        """Also in the kernel's name."""
        return f"Dequantise_{self.layout}_{self.dtype}_{self.depth}" + (f"_{self.factors}" if self.factors else "")

    @cute.jit
    def __call__(
        self,
        codes: cute.Pointer,
        scales: cute.Pointer,
        out: cute.Pointer,
        unit: cute.Pointer,
        other: cute.Pointer,
        alpha: cute.Pointer,
        total: cute.Pointer,
        factor: Float64,
        matrices: Int32,
        rows: Int32,
        blocks: Int32,
        width: Int32,
        stream: cuda.CUstream,
    ):
        """Launches the kernel.

        Args:
            matrices: at most 65,535.
            codes: (matrices, rows, 8 x blocks) bytes, or units. scales: bytes in their layout; of units anything.
            out: (matrices, rows, width), aligned to 16 bytes. width: a multiple of 8, at most what `blocks` hold.
            unit, other, alpha: fp32, one each. factor: one more, by value. total: fp32 (2,). Without `factors`: any.
        """
        if cutlass.const_expr(self.layout == FRAGMENT):
            tiles, smem = cute.ceil_div(rows, ROWS), WARPS * ROWS * PITCH
            chunks = cute.ceil_div(width, WARPS * self.depth * DEPTH)
        else:
            tiles, smem = cute.ceil_div(rows, ROW_ALIGN) * (ROW_ALIGN // WARPS), 0
            chunks = cute.ceil_div(width, WARP * self.depth * VECTOR)
        self.kernel(codes, scales, out, (unit, other, alpha), factor, total, rows, blocks, width).launch(
            grid=[tiles, chunks, matrices], block=[WARP * WARPS, 1, 1], smem=smem, use_pdl=True, stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        codes: cute.Pointer,
        scales: cute.Pointer,
        out: cute.Pointer,
        given: tuple[cute.Pointer, cute.Pointer, cute.Pointer],
        factor: Float64,
        total: cute.Pointer,
        rows: Int32,
        blocks: Int32,
        width: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        tile, chunk, matrix = cute.arch.block_idx()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        power = Float32(1.0)
        if cutlass.const_expr(self.folds):
            _, power = Alpha(given, factor).load()
            power = cute.arch.fmin(power, Float32(MOST_FOLDED))
        if cutlass.const_expr(self.factors is not None):  # noqa: SIM102 (decided while tracing)
            if (thread == 0) & (tile == 0) & (chunk == 0) & (matrix == 0):
                first, second = self.product(given, factor)
                total.store(first)
                (total + 1).store(second)
        lane, warp = thread % WARP, cute.arch.make_warp_uniform(thread // WARP)
        place = matrix, tile, chunk, lane, warp
        if cutlass.const_expr(self.layout == FRAGMENT):
            self.units(codes.toint(), out.toint(), power, place, rows, width)
        else:
            self.words(codes.toint(), scales.toint(), out.toint(), power, place, rows, blocks, width)

    def product(self, given, factor):
        """What is written of the factors."""
        x, power = Alpha(given, factor).load()
        if self.factors == "beside":
            return x, power
        if not self.folds:
            x = cute.arch.fmax(cute.arch.fmin(x * power, Float32(LARGEST)), Float32(-LARGEST))
        return x, Float32(0.0)

    # Rows.

    @cute.jit
    def words(self, codes, scales, out, power, place, rows, blocks, width):
        """`depth` times 256 numbers of the warp's row."""
        matrix, tile, chunk, lane, warp = place
        local = tile // 16 * ROW_ALIGN + tile % 16 * 2 + warp % 2 + warp // 2 * 32
        row = Int64(matrix) * rows + local
        if cutlass.const_expr(self.layout == ATOMS):
            atom = (Int64(matrix) * cute.ceil_div(rows, ROW_ALIGN) + local // ROW_ALIGN) * (blocks // ATOM_BLOCKS)
            scales += atom * ATOM_BYTES + (tile % 16 * 2 + warp % 2) * 16 + warp // 2 * ATOM_BLOCKS
        else:
            scales += row * blocks
        first = chunk * (WARP * self.depth) + lane
        vectors = cutlass.select_(local < rows, width // VECTOR, 0)
        rCodes = [Int32(0)] * self.depth
        rScales = [Int32(0)] * self.depth
        for i in cutlass.range_constexpr(self.depth):
            vector = first + i * WARP
            there = vector < vectors
            block = vector * VECTOR // BLOCK
            step = block
            if cutlass.const_expr(self.layout == ATOMS):
                step = block // ATOM_BLOCKS * ATOM_BYTES + block % ATOM_BLOCKS
            rCodes[i] = _load_word(codes + row * (blocks * (BLOCK // 2)) + vector * (VECTOR // 2), there)
            rScales[i] = _load_byte(scales + step, there)
        for i in cutlass.range_constexpr(self.depth):
            vector = first + i * WARP
            scale = _scale(rScales[i], self.dtype)
            if cutlass.const_expr(self.folds):
                scale = _product(scale, _twice(power), self.dtype)
            values = [word for half in (0, 1) for word in _values(rCodes[i], half, self.dtype)]
            values = [_product(word, scale, self.dtype) for word in values]
            _store_16(out + (row * width + vector * VECTOR) * 2, values, vector < vectors)

    # Units.

    @cute.jit
    def units(self, codes, out, power, place, rows, width):
        """`depth` units of 16 rows."""
        matrix, tile, chunk, lane, warp = place
        units = cute.ceil_div(width, DEPTH)
        first = chunk * (WARPS * self.depth) + warp
        tile_codes = codes + (Int64(matrix) * cute.ceil_div(rows, ROWS) + tile) * units * UNIT_BYTES
        rWords = [[Int32(0)] * weights.WORDS] * self.depth
        for i in cutlass.range_constexpr(self.depth):
            unit = first + i * WARPS
            at = tile_codes + unit * UNIT_BYTES
            parts = at + lane * 16, at + CODE_BYTES // 2 + lane * 16, at + CODE_BYTES + lane // 4 * 16
            rWords[i] = [word for part in parts for word in async_copies.load_once_16(part, unit < units)]
        smem = cute.arch.get_dyn_smem(Int32, alignment=16).toint() + warp * (ROWS * PITCH)
        factor = _twice(power * weights.FACTOR) if self.folds else Int32(_FACTOR[self.dtype])
        corner = out + (Int64(matrix) * rows + tile * ROWS) * width * 2
        for i in cutlass.range_constexpr(self.depth):
            if first + i * WARPS < units:
                self.unit(rWords[i], smem, lane)
                cute.arch.sync_warp()
                self.write(corner, smem, factor, first + i * WARPS, rows - tile * ROWS, width, lane)
                cute.arch.sync_warp()

    @cute.jit
    def unit(self, words, smem, lane):
        """To shared memory, as 2^-7 of what it is."""
        target = smem + (lane // 8 % 2 * 8 + lane % 8) * PITCH + lane // 16 * 16
        dtype = DTYPES[self.dtype]
        for pair in cutlass.range_constexpr(weights.STEPS // 2):
            scales = weights.scale_pairs(words[weights.STEPS + pair], dtype)
            for odd in cutlass.range_constexpr(2):
                step = 2 * pair + odd
                cute.arch.inline_ptx(
                    "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
                    read_only_args=[target + step * 32, *weights.decode(words[step], scales[odd], dtype)],
                )

    @cute.jit
    def write(self, corner, smem, factor, unit, rows, width, lane):
        """The unit from shared memory to rows of the result, those that are there."""
        row, column = lane // (DEPTH // VECTOR), lane % (DEPTH // VECTOR) * VECTOR
        there = unit * DEPTH + column < width
        target = corner + (Int64(row) * width + unit * DEPTH + column) * 2
        for i in cutlass.range_constexpr(ROWS // 2):
            words = async_copies.load_16(smem + (2 * i + row) * PITCH + column * 2)
            values = [_product(word, factor, self.dtype) for word in words]
            _store_16(target + Int64(2 * i) * width * 2, values, there & (2 * i + row < rows))


def _load_word(address: Int64, there) -> Int32:
    return cute.arch.inline_ptx(
        "{\n.reg .pred there;\nsetp.ne.b32 there, {$r1}, 0;\nmov.b32 {$w0}, 0;\n"
        "@there ld.global.nc.L1::no_allocate.L2::256B.b32 {$w0}, [{$r0}];\n}",
        write_only_types=[Int32],
        read_only_args=[address, Int32(there)],
    )


def _load_byte(address: Int64, there) -> Int32:
    return cute.arch.inline_ptx(
        "{\n.reg .pred there;\nsetp.ne.b32 there, {$r1}, 0;\nmov.b32 {$w0}, 0;\n"
        "@there ld.global.nc.u8 {$w0}, [{$r0}];\n}",
        write_only_types=[Int32],
        read_only_args=[address, Int32(there)],
    )


def _store_16(address: Int64, words: list, there) -> None:
    cute.arch.inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words], predicate=there
    )


def _scale(byte: Int32, dtype: str) -> Int32:
    """Twice the value of an E4M3 byte."""
    code = "{\n.reg .b16 pair, low, high;\n.reg .b32 twice;\n.reg .f32 x;\n"
    code += "prmt.b32 twice, {$r0}, 0, 0x4400;\ncvt.u16.u32 pair, twice;\n"
    if dtype == "fp16":
        code += "cvt.rn.f16x2.e4m3x2 {$w0}, pair;\n}"
    else:
        code += "cvt.rn.f16x2.e4m3x2 twice, pair;\nmov.b32 {low, high}, twice;\ncvt.f32.f16 x, low;\n"
        code += "cvt.rn.bf16x2.f32 {$w0}, x, x;\n}"
    return cute.arch.inline_ptx(code, write_only_types=[Int32], read_only_args=[byte])


def _values(word: Int32, half: int, dtype: str) -> tuple[Int32, Int32]:
    """Four codes of a word, the lower or the upper ones, as two pairs of numbers."""
    (upper, more), lower = _TABLES[dtype]
    shifted = "shr.u32 which, which, 16;\n" if half else ""
    code = (
        "{\n.reg .b32 which, upper, lower, signs, table;\n"
        f"and.b32 which, {{$r0}}, 0x77777777;\n{shifted}"
        f"mov.b32 table, {upper:#x};\nprmt.b32 upper, table, {more:#x}, which;\n"
        f"shl.b32 signs, {{$r0}}, 4;\nprmt.b32 signs, signs, {{$r0}}, {0xFBEA if half else 0xD9C8:#x};\n"
        "lop3.b32 upper, signs, 0x80808080, upper, 0xEA;\n"
    )
    if lower is None:
        code += "prmt.b32 {$w0}, upper, 0, 0x1404;\nprmt.b32 {$w1}, upper, 0, 0x3424;\n}"
    else:
        code += f"mov.b32 table, {lower[0]:#x};\nprmt.b32 lower, table, {lower[1]:#x}, which;\n"
        code += "prmt.b32 {$w0}, lower, upper, 0x5140;\nprmt.b32 {$w1}, lower, upper, 0x7362;\n}"
    return cute.arch.inline_ptx(code, write_only_types=[Int32] * 2, read_only_args=[word])


def _twice(power: Float32) -> Int32:
    """A power of two as a pair of bf16."""
    return (power.bitcast(Int32) >> 16) * 0x10001


def _product(pair: Int32, factors: Int32, dtype: str) -> Int32:
    return cute.arch.inline_ptx(
        "{\n.reg .b32 factors;\nmov.b32 factors, {$r1};\n"  # which may be a constant
        f"mul.rn.{weights.PACKED[DTYPES[dtype]]} {{$w0}}, {{$r0}}, factors;\n}}",
        write_only_types=[Int32],
        read_only_args=[pair, factors],
    )
