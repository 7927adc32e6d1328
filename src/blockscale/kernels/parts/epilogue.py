"""The epilogue's role: sums from tensor memory to act(alpha x sum + bias) in global memory, in the output's type."""

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from blockscale.kernels.parts import staging, store, tensorcore
from blockscale.kernels.parts.activation import ACTIVATIONS
from blockscale.kernels.parts.arithmetic import Bias, scaled
from blockscale.kernels.parts.geometry import ATOM_BYTES, ATOM_ROWS, CTA_ROWS, STEP_K
from blockscale.kernels.parts.staging import ROWS, WARPS
from blockscale.kernels.parts.store import Boxes, Direct, Output, Quantised, Staged, Swapped, Words

DTYPES = {"fp16": cutlass.Float16, "bf16": cutlass.BFloat16, "fp32": cutlass.Float32, "nvfp4": cutlass.Uint8}


class Epilogue:
    """The epilogue of one configuration.

    Args:
        tile_n: columns of a tile. overlap: columns that two accumulators share.
        out_dtype: "fp16", "bf16", "fp32" or "nvfp4".
        store: "direct": a thread stores vectors of its row. "tma": rows go to swizzled shared memory, and TMA stores
            boxes of them. "tma_rows": the same without the swizzle, and 8 bytes at a time.
        read: the most columns that a thread reads before it waits for them.
        release: "late": an accumulator is free once it is stored. "early": once it is read; results are held in
            registers until then, as far as these go. "preload": so too, and all that is held is read before any of it
            is converted.
        store_slots: boxes of a warp in shared memory, 1 or 2.
        l2_out: None, "evict_first" or "evict_last": what L2 is told of the output.
        swap: the kernel's rows are the output's columns.
        bias: whether there is one. activation: None, "relu", "gelu" or "silu".
        pace: nanoseconds that a warp pauses between fragments of a tile, so that stores come less at a time; not in its
            last tile.
    """

    def __init__(
        self, tile_n, out_dtype, *, store="direct", read=32, release="late", store_slots=2, l2_out=None, swap=False,
        bias=False, activation=None, overlap=0, pace=0,
    ):  # fmt: skip
        self.tile_n, self.out_dtype, self.overlap = tile_n, out_dtype, overlap
        self.dtype, self.bits = DTYPES[out_dtype], staging.BITS[out_dtype]
        self.columns = staging.fragment(tile_n, read, out_dtype)
        self.width = staging.box_bytes(self.columns, out_dtype)
        self.staged, self.swizzled = store != "direct", store == "tma"
        self.early, self.slots, self.l2, self.swap = release != "late", store_slots, l2_out, swap
        self.preload, self.pace = release == "preload", pace
        self.bias, self.activation = bias, activation

    def output(self, pointer: cute.Pointer, m: Int32, n: Int32, ld: Int64) -> Output:
        """(batch, m, n) at `pointer`, rows `ld` elements apart; NVFP4: its codes, rows `ld` bytes apart."""
        return Output(pointer, self.dtype, m, n, ld, self.l2)

    def map(self, output: Output, batch: Int32) -> cpasync.TmaInfo | None:
        """The tensor map of the output, made by the host; None where TMA does not store it."""
        return store.output_map(output, batch, self.width, self.swizzled) if self.staged else None

    def fragments(self) -> tuple[int, int, int]:
        """How many of a tile are (stored as they are read, then held, stored as they are read after the release).

        Of two accumulators that overlap the shared columns come first, and the release with the last of them.
        """
        all_of_them = self.tile_n // self.columns
        first = -(-self.overlap // self.columns) if self.overlap else all_of_them
        held = min(first, staging.most_held(self.activation) // self.columns) if self.early else 0
        return first - held, held, all_of_them - first

    def column(self, index: Int32, turn: Int32) -> Int32:
        """The first column of the `index`-th fragment: the last ones of accumulator 0 are the first ones of 1."""
        if not self.overlap:
            return index * self.columns
        return cutlass.select_(turn == 0, self.tile_n - self.columns - index * self.columns, index * self.columns)

    @cute.jit
    def run(self, c, warps):
        """Tile after tile; a thread has a row of it, and takes `columns` at a time.

        c.memory has alpha (`Alpha`), output (`Output`), map (its tensor map or None), bias, (n,), and for NVFP4 scales,
        atoms of (round_up(m, 128), round_up(n, 64) / 16) a matrix, and unit, the global scale.
        """
        acc, tiles = c.acc, c.tiles
        streamed, held, rest = self.fragments()
        way = Way.of(self, c)
        lanes = c.warp * ROWS
        sums, slot = acc.consumer(), Int32(0)
        work = tiles.first(len(warps))
        while work.valid:
            tile_row, tile_column, matrix = tiles.at(work)
            tile = way.tile(tile_row, tile_column, matrix)
            acc.wait_full(sums)
            tensorcore.after_sync()
            address, turn = c.accumulator(sums) + (lanes << 16), c.turn(sums)
            more = tiles.more(work) if cutlass.const_expr(self.pace > 0) else None
            for i in cutlass.range(streamed, unroll=1):
                self.pause(i, more)
                slot = tile.through(address, self.column(i, turn), slot)
            kept = []
            for i in cutlass.range_constexpr(held):
                values = tile.read(address, self.column(streamed + i, turn))
                if cutlass.const_expr(i == held - 1):
                    self.release(acc, sums, warps)
                if cutlass.const_expr(not self.preload):
                    values = tile.finish(values, self.column(streamed + i, turn))
                kept.append(values)
            if cutlass.const_expr(held == 0):
                self.release(acc, sums, warps)
            for i in cutlass.range_constexpr(held):
                column = self.column(streamed + i, turn)
                words = tile.finish(kept[i], column) if cutlass.const_expr(self.preload) else kept[i]
                self.pause(streamed + i, more)
                slot = tile.store(words, column, slot)
            for i in cutlass.range(rest, unroll=1):
                self.pause(streamed + held + i, more)
                slot = tile.through(address, self.column(streamed + held + i, turn), slot)
            tile.pad()
            sums = sums.next()
            work = tiles.after(work)
        if cutlass.const_expr(self.staged):
            cute.arch.cp_async_bulk_wait_group(0, read=True)  # TMA reads shared memory, which ends with the CTA

    def pause(self, index: int | Int32, more: Boolean | None) -> None:
        """Before the `index`-th fragment of a tile after which there may be `more`."""
        if self.pace:
            self._pause(Int32(index), more)

    @cute.jit
    def _pause(self, index, more):
        if more & (index > 0):
            cute.arch.inline_ptx(f"nanosleep.u32 {self.pace};")

    def release(self, acc, sums, warps):
        """The accumulator, once this warp has read it, or what another one shares of it."""
        tensorcore.before_sync()
        acc.arrive_empty(sums, warps)


@dataclass(frozen=True)
class Way:
    """Where results go, and what is done to them before: what is the same for all tiles of a warp."""

    epilogue: Epilogue
    warp: Int32
    output: Output
    bias: Bias | None
    scales: cute.Pointer
    unit: Float32 | None
    boxes: Boxes | None
    alpha: tuple[Float32, Float32]
    wide: Boolean
    narrow: Boolean

    @staticmethod
    def of(e: Epilogue, c: Any) -> "Way":
        memory = c.memory.after_grids_before()
        output = memory.output
        boxes = None
        if e.staged:
            layout = store.box_layout(e.dtype, e.width, e.swizzled, WARPS * e.slots)
            smem = c.smem.out.get_tensor(layout.outer, swizzle=layout.inner, dtype=e.dtype)
            boxes = Boxes(smem, memory.map, e.width, e.slots, e.swizzled)
        return Way(
            e,
            c.warp,
            output,
            Bias(memory.bias, output.n) if e.bias else None,
            memory.scales,
            memory.unit.load() if e.out_dtype == "nvfp4" else None,
            boxes,
            memory.alpha.load(),
            *(output.aligned(nbytes) for nbytes in store.VECTORS),
        )

    def tile(self, tile_row: Int32, tile_column: Int32, matrix: Int32) -> "Tile":
        e, output, bias = self.epilogue, self.output, self.bias
        warp_row, column = tile_row * CTA_ROWS + self.warp * ROWS, tile_column * e.tile_n
        row = warp_row + cute.arch.lane_idx()
        if e.swap:
            target = Swapped(output, column, row, output.address(matrix, column, row))
            return Tile(self, target, column, bias.column(row) if bias else None)
        if e.out_dtype == "nvfp4":
            return Tile(self, self.quantised(tile_row, row, column, matrix), column, bias)
        target = Direct(output, row, column, output.address(matrix, row, column), self.wide, self.narrow)
        if e.staged:
            target = Staged(target, self.boxes, matrix, warp_row)
        return Tile(self, target, column, bias)

    def quantised(self, tile_row: Int32, row: Int32, column: Int32, matrix: Int32) -> Quantised:
        m, n = self.output.m, self.output.n
        codes = self.output.address(matrix, row, column // 2)
        atoms = Int64(matrix) * cute.ceil_div(m, ATOM_ROWS) + tile_row
        in_atom = row % 32 * 16 + row % ATOM_ROWS // 32 * 4
        scales = self.scales.toint() + atoms * cute.ceil_div(n, STEP_K) * ATOM_BYTES + in_atom
        return Quantised(codes, scales, row < m, tile_row * ATOM_ROWS < m, column, n, self.unit, self.wide)


@dataclass(frozen=True)
class Tile:
    """A warp's part of one tile on its way out. bias: of the columns, of this thread's row, or None."""

    way: Way
    target: Direct | Swapped | Staged | Quantised
    column: Int32
    bias: Bias | Float32 | None

    def read(self, address: Int32, column: Int32) -> tuple[list[Float32], list[Float32] | None]:
        """Sums from `column` on, and the bias of each."""
        columns = self.way.epilogue.columns
        bias = self.bias
        if isinstance(bias, Bias):
            bias = bias.columns(self.column + column, columns)  # on its way while tensor memory is read
        elif bias is not None:
            bias = [bias] * columns
        return tensorcore.load(address + column, columns), bias

    def finish(self, read: tuple[list[Float32], list[Float32] | None], column: Int32) -> Words:
        sums, bias = read
        activation = ACTIVATIONS[self.way.epilogue.activation]
        return self.target.pack([activation(y) for y in scaled(sums, self.way.alpha, bias)], column)

    def store(self, words: Words, column: Int32, slot: Int32) -> Int32:
        return self.target.store(words, column, slot)

    def through(self, address: Int32, column: Int32, slot: Int32) -> Int32:
        return self.store(self.finish(self.read(address, column), column), column, slot)

    def pad(self) -> None:
        e = self.way.epilogue
        if e.out_dtype == "nvfp4" and e.tile_n % 64:
            self.target.pad(e.tile_n)
