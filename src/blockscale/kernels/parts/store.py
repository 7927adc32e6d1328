"""How results leave the registers: as words of 32 bits, from a thread that has a row of the kernel's tile.

Each way of storing is a class whose objects serve one tile. `pack` makes words of fp32 numbers of consecutive columns,
`store` brings them to the output.
"""

from dataclasses import dataclass

import cutlass
from cutlass import BFloat16, Boolean, Float16, Float32, Int32, Int64, Uint16, cute
from cutlass.cute.nvgpu import cpasync

from blockscale.kernels.parts import quantise
from blockscale.kernels.parts.geometry import ATOM_BYTES
from blockscale.kernels.parts.staging import ROWS
from blockscale.kernels.parts.tma import POLICIES

Words = list[Int32]

VECTORS = (32, 16)  # bytes of a store, widest first
TMA_ALIGNMENT = 16  # of rows in global memory
PAIRS = {Float16: "f16x2", BFloat16: "bf16x2"}


def pack(values: list[Float32], dtype: type[cutlass.Numeric]) -> Words:
    """Rounded to nearest even; the first of two halves is the low one."""
    if dtype is Float32:
        return [value.bitcast(Int32) for value in values]
    return [
        cute.arch.inline_ptx(
            f"cvt.rn.{PAIRS[dtype]}.f32 {{$w0}}, {{$r1}}, {{$r0}};",
            write_only_types=[Int32],
            read_only_args=[value.bitcast(Int32) for value in values[i : i + 2]],
        )
        for i in range(0, len(values), 2)
    ]


def vector(space: str, address: Int32 | Int64, words: Words) -> None:
    """One store of 8, 16 or (global memory) 32 bytes; PTX: st, whose .v8 sm_100 brought."""
    values = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
    cute.arch.inline_ptx(f"st.{space}.v{len(words)}.b32 [{{$r0}}], {{{values}}};", read_only_args=[address, *words])


@dataclass(frozen=True)
class Output:
    """(batch, m, n) of a dtype at `pointer`, rows `ld` elements apart; nothing is written beyond m or n.

    l2: what L2 is told of vectors of 32 bytes and of boxes, "evict_first", "evict_last" or None.
    """

    pointer: cute.Pointer
    dtype: type[cutlass.Numeric]
    m: Int32
    n: Int32
    ld: Int64
    l2: str | None = None

    @property
    def nbytes(self) -> int:
        return self.dtype.width // 8

    def aligned(self, nbytes: int) -> Boolean:
        """Whether every row begins at a multiple of so many bytes."""
        return (self.pointer.toint() | self.ld * self.nbytes) % nbytes == 0

    def ends_whole(self) -> Boolean:
        """Whether rows are a multiple of 16 bytes long, to which TMA goes on where a box hangs over their end."""
        return self.n * self.nbytes % TMA_ALIGNMENT == 0

    def address(self, matrix: Int32, row: Int32, column: Int32) -> Int64:
        return self.pointer.toint() + ((Int64(matrix) * self.m + row) * self.ld + column) * self.nbytes

    def vectors(self, words: Words, address: Int64, nbytes: int) -> None:
        """As vectors of so many bytes; of the least where they are no whole number of those, and begin in between."""
        nbytes = nbytes if len(words) * 4 % nbytes == 0 else VECTORS[-1]
        space = f"global.L2::{self.l2}" if self.l2 and nbytes == VECTORS[0] else "global"
        for i in range(0, len(words), nbytes // 4):
            vector(space, address + 4 * i, words[i : i + nbytes // 4])

    def elements(self, words: Words, address: Int64, step: int | Int64, left: Int32) -> None:
        """One by one, the first `left` of them, `step` bytes apart."""
        each = 4 // self.nbytes
        for i, word in enumerate(words):
            first = i * each
            addresses = [address + (first + j) * step for j in range(each)]
            _elements(word, addresses, left - first)


def _elements(word: Int32, addresses: list[Int64], left: Int32) -> None:
    """A word, or the low half and the high half of it, to these addresses; as many as are left."""
    kind, parts = ("b32", ["{$r1}"]) if len(addresses) == 1 else ("b16", ["low", "high"])
    stores = "".join(
        f"setp.gt.s32 inside, {{$r0}}, {j};\n@inside st.global.{kind} [{{$r{2 + j}}}], {part};\n"
        for j, part in enumerate(parts)
    )
    halves = "" if len(parts) == 1 else ".reg .b16 low, high;\nmov.b32 {low, high}, {$r1};\n"
    cute.arch.inline_ptx(
        f"{{\n.reg .pred inside;\n{halves}{stores}}}",
        read_only_args=[left, word, *addresses],
    )


@dataclass(frozen=True)
class Direct:
    """Vectors of a thread's row; where rows are not aligned, or columns end, element by element.

    row, column: of the output, where the thread's part of the tile begins. address: of that element.
    wide, narrow: whether rows begin at multiples of 32 and of 16 bytes.
    """

    output: Output
    row: Int32
    column: Int32
    address: Int64
    wide: Boolean
    narrow: Boolean

    def pack(self, values: list[Float32], column: Int32) -> Words:
        return pack(values, self.output.dtype)

    @cute.jit
    def store(self, words, column, slot):
        out = self.output
        address = self.address + column * out.nbytes
        left = out.n - self.column - column
        whole = left >= len(words) * 4 // out.nbytes
        if self.row < out.m:
            if whole & self.wide:
                out.vectors(words, address, VECTORS[0])
            elif whole & self.narrow:
                out.vectors(words, address, VECTORS[1])
            else:
                out.elements(words, address, out.nbytes, left)
        return slot


@dataclass(frozen=True)
class Swapped:
    """A thread's row of the kernel's tile is a column of the output: the threads of a warp have elements side by side.

    row, column: of the output; the thread's own column, and the row of the first of its elements. address: of that.
    """

    output: Output
    row: Int32
    column: Int32
    address: Int64

    def pack(self, values: list[Float32], column: Int32) -> Words:
        return pack(values, self.output.dtype)

    @cute.jit
    def store(self, words, column, slot):
        out = self.output
        pitch = out.ld * out.nbytes
        address = self.address + column * pitch
        if self.column < out.n:
            out.elements(words, address, pitch, out.m - self.row - column)
        return slot


@dataclass(frozen=True)
class Boxes:
    """Shared memory for boxes of 32 rows x `width` bytes, `slots` for each warp in turn, and the map to store them by.

    With the swizzle, the 16 bytes that eight threads store at a time lie in eight groups of banks. Without, all rows of
    128 bytes begin in the same bank: of the threads that store 8 bytes at a time only one is served at once.
    """

    smem: cute.Tensor
    map: cpasync.TmaInfo
    width: int
    slots: int
    swizzled: bool

    @cute.jit
    def fill(self, words, slot):
        """A thread's row of a box, in shared memory where TMA sees it."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        line = self.smem.iterator.toint() + ((warp * self.slots + slot) * ROWS + lane) * self.width
        step = 4 if cutlass.const_expr(self.swizzled) else 2  # words
        # The swizzle moves 16 bytes by bits 7 and up of their address: those of the row, since slots are aligned.
        moved = (lane * self.width >> 7 & self.width // 16 - 1) << 4 if cutlass.const_expr(self.swizzled) else 0
        cute.arch.cp_async_bulk_wait_group(self.slots - 1, read=True)  # what was in the slot has been read
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(0, len(words), step):
            vector("shared", line + (4 * i ^ moved), words[i : i + step])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()

    def send(self, slot: Int32, corner: tuple[Int32, Int32, Int32], l2: str | None) -> None:
        """Starts the store of a box to `corner`, (row, column, matrix), of the output."""
        shape = (*self.smem.shape[:2], 1)
        gBox = cute.local_tile(cute.domain_offset(corner, self.map.tma_tensor), shape, (0, 0, 0))
        source, target = cpasync.tma_partition(
            self.map.atom, 0, cute.make_layout(1), cute.group_modes(self.smem, 0, 2), cute.group_modes(gBox, 0, 3)
        )
        policy = {"cache_policy": Int64(POLICIES[l2])} if l2 else {}
        cute.copy(self.map.atom, source[None, cute.arch.warp_idx() * self.slots + slot], target, **policy)

    def next(self, slot: Int32) -> Int32:
        return slot ^ 1 if self.slots == 2 else slot


@dataclass(frozen=True)
class Staged:
    """Boxes by TMA, which leaves out what is beyond m and n; `direct` unless rows begin and end at 16 bytes' multiples.

    matrix: of the batch. row: the warp's first one.
    """

    direct: Direct
    boxes: Boxes
    matrix: Int32
    row: Int32

    def pack(self, values: list[Float32], column: Int32) -> Words:
        return self.direct.pack(values, column)

    @cute.jit
    def store(self, words, column, slot):
        out, boxes = self.direct.output, self.boxes
        each = boxes.width // 4
        if self.direct.narrow & out.ends_whole():
            for i in cutlass.range_constexpr(0, len(words), each):
                boxes.fill(words[i : i + each], slot)
                first = self.direct.column + column + i * 4 // out.nbytes
                if (self.row < out.m) & (first < out.n):
                    boxes.send(slot, (self.row, first, self.matrix), out.l2)
                cute.arch.cp_async_bulk_commit_group()
                slot = boxes.next(slot)
        else:
            self.direct.store(words, column, slot)
        return slot


@dataclass(frozen=True)
class Quantised:
    """NVFP4 with a given global scale: the codes of a thread's row, and its bytes of scale atoms.

    Columns up to the next multiple of 64 are written as zeros, and so are the scales of rows up to the next of 128.

    codes: the address of the row's first code in the tile. scales: of its byte in the first atom of its 128 rows.
    column: the tile's first, of n. valid: the row exists; some: a row of its atom does. unit: the global scale.
    wide: whether rows of codes begin at multiples of 32 bytes.
    """

    codes: Int64
    scales: Int64
    valid: Boolean
    some: Boolean
    column: Int32
    n: Int32
    unit: Float32
    wide: Boolean

    def pack(self, values: list[Float32], column: Int32) -> Words:
        """The words of codes, and one of scales."""
        left = self.n - self.column - column
        inside = [Float32(cutlass.select_(i < left, quantise.finite(x), Float32(0.0))) for i, x in enumerate(values)]
        words, scales = quantise.encode(inside, self.unit)
        return [*words, Int32(cutlass.select_(self.valid, scales, Int32(0)))]

    @cute.jit
    def store(self, words, column, slot):
        *codes, scales = words
        address = self.codes + column // 2
        place = self.column + column
        padded = self.n + 63 & -64
        if (self.column < self.n) & (place < padded):
            if self.valid:
                if cutlass.const_expr(len(codes) == 8):
                    if self.wide:
                        vector("global", address, codes)
                    else:
                        vector("global", address, codes[:4])
                        vector("global", address + 16, codes[4:])
                else:
                    vector("global", address, codes)
            if self.some:
                atom = self.scales + (place // 64) * ATOM_BYTES
                if cutlass.const_expr(len(codes) == 8):
                    cute.make_ptr(Int32, atom, cute.AddressSpace.gmem, assumed_align=4).store(scales)
                else:
                    half = cute.make_ptr(Uint16, atom + place % 64 // 16, cute.AddressSpace.gmem, assumed_align=2)
                    half.store(Uint16(scales))
        return slot

    @cute.jit
    def pad(self, columns):
        """After the last of the tile's `columns`, where these are no multiple of 64: zeros in the other half of the
        last 64 columns, if no tile has it."""
        if self.column + columns >= self.n:
            self.store([Int32(0)] * 5, Int32(columns), Int32(0))


def box_layout(dtype: type[cutlass.Numeric], width: int, swizzled: bool, boxes: int) -> cute.ComposedLayout:
    """(32 rows, columns, boxes) in shared memory, rows of `width` bytes."""
    size = dtype.width // 8
    columns = width // size
    bits = (width // 16).bit_length() - 1 if swizzled else 0
    swizzle = cute.make_swizzle(bits, 4, 3)
    layout = cute.make_layout((ROWS, columns, boxes), stride=(columns, 1, ROWS * columns))
    return cute.make_composed_layout(swizzle, 0, layout)


def output_map(output: Output, batch: Int32, width: int, swizzled: bool) -> cpasync.TmaInfo:
    """The tensor map of an output, seen as (m, n, batch), in boxes of 32 x `width` bytes.

    Of use only where rows begin at multiples of 16 bytes.
    """
    layout = cute.make_layout((output.m, output.n, batch), stride=(output.ld, 1, output.ld * output.m))
    tensor = cute.make_tensor(output.pointer, layout)
    smem = cute.select(box_layout(output.dtype, width, swizzled, 1), mode=[0, 1])
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tensor, smem, (ROWS, width // output.nbytes))
