"""NVFP4 from floating point, without tensor cores: the same text for every architecture from sm_90 on.

Two kernels, the first only where the global scale is the tensor's own:

    stage   reads  writes
    amax    x      the largest finite magnitude of all, as an integer: a maximum has no order
    codes   x      codes, scales and the padding of both; the global scale

A CTA of 8 warps takes 8 rows, 512 k at a time; of n CTAs that share rows (`splits`) each takes every n-th 512. A thread
has a block of 16, and asks for its next one before it works on the one it has. It treats all alike, by quotients that
are exact for usual numbers, and remembers the rounds in which its block was none of these: a second pass reads them
again and divides. Blocks come in the order in which their scales lie in memory, so that a warp's are one sector of 32
bytes:

    layout         a warp's blocks
    linear         32 of one row
    128x4 and      4 of each of 8 rows: two neighbours of each 32 of an atom of 128
    128x4-grouped

Before quantising, numbers may go through silu(gate) x up, x being (m, 2 k), gates first; or through an RMS norm, for
which a warp first adds up the squares of a row: lane l those of blocks l, l + 32, ... in order, then lanes in a tree.

Shared memory: 8 words, one a warp.
"""

from dataclasses import dataclass, replace

import cuda.bindings.driver as cuda
import cutlass
from cutlass import Boolean, Float32, Float64, Int32, Int64, cute

from blockscale.formats.layouts import ATOM_BLOCKS, K_ALIGN, ROW_ALIGN, round_up
from blockscale.kernels.parts import async_copies, e2m1, gate, ieee
from blockscale.kernels.parts.blocks import BLOCK, INFINITE, Block, Loader

WARP = 32
WARPS = 8
ROWS = 8  # of a CTA
ATOM_BYTES = ROW_ALIGN * ATOM_BLOCKS
EXACT_UNIT = 0x26800000, 0x57800000  # 2^-50 and 2^48: with such a global scale quotients may be the fast ones
# Quotients between these give a normal block scale that is not too small, so that no number reaches 7 of it.
NORMAL = 0.01563, 455.0
SMALLEST_UNIT = 2.0**-126
LARGEST = float.fromhex("0x1.fffffep127")


@dataclass(frozen=True)
class Place:
    """What a thread works on.

    Attributes:
        row: of x and of the codes, among those of all matrices. there: whether it exists.
        block: the thread's first one of the row. slot: of the CTA's 8 rows.
        scales: offset in bytes of the word of scales that holds block 0; the next word is `step` bytes on.
    """

    row: Int64
    there: Boolean
    block: Int32
    slot: Int32
    scales: Int64
    step: int


class Quantise:
    """One of the kernels; calling it launches it, compiling needs no GPU.

    Args:
        stage: "amax" or "codes". dtype: of x, "fp16", "bf16" or "fp32".
        method: "rtn", "four_over_six" or "mse". layout: "linear", "128x4" or "128x4-grouped".
        dynamic: the global scale comes from the first stage's result.
        before: None, "swiglu" or "rms_norm". weight: the dtype of the norm's weight.
        vectors: see `Loader`. ctas: as many have to fit a multiprocessor.
    """

    def __init__(self, stage, dtype, method, layout, dynamic, before, weight, vectors, ctas):
        self.stage, self.method, self.layout, self.dynamic, self.before = stage, method, layout, dynamic, before
        self.x, self.norm = Loader(dtype, vectors), Loader(weight or dtype, vectors)
        self.blocks_at_once = WARPS * ATOM_BLOCKS
        self.ctas = ctas

    def __repr__(self):
        """Also in the kernel's name."""
        parts = self.stage, self.x.dtype, self.method, self.layout.replace("-", "_"), self.before or "plain"
        return "Quantise_" + "_".join(parts)

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,
        weight: cute.Pointer,
        groups: cute.Pointer,
        unit: cute.Pointer,
        codes: cute.Pointer,
        scales: cute.Pointer,
        out_unit: cute.Pointer,
        eps: Float64,
        constant: Float64,
        matrices: Int32,
        m: Int32,
        k: Int32,
        ld: Int64,
        ld_matrix: Int64,
        experts: Int32,
        tiles: Int32,
        splits: Int32,
        stream: cuda.CUstream,
    ):
        """Launches the kernel.

        Args:
            x: (matrices, m, k), rows `ld` and matrices `ld_matrix` numbers apart; 2 k of them with a gate.
            weight: (k,) of the norm. groups: (experts,) int32, rows of each; both anything where there is none.
            unit: fp32, a part of the global scale; dynamic: the bits of the largest magnitude, which the first stage
                raises.
            codes: (matrices, m, k_pad / 2) bytes. scales: bytes in their layout. out_unit: fp32, the global scale.
            eps: of the norm. constant: what the largest magnitude is divided by, or `unit` is multiplied by.
            tiles: of 8 rows of a matrix, those of the padding included. splits: CTAs that share a tile.
        """
        self.kernel(
            x,
            (weight, eps),
            (groups, experts),
            (unit, constant),
            (codes, scales, out_unit),
            (m, k),
            (ld, ld_matrix),
            tiles,
        ).launch(
            grid=[matrices * tiles, splits, 1],
            block=[WARP * WARPS, 1, 1],
            smem=4 * WARPS,
            min_blocks_per_mp=self.ctas,
            preferred_smem_carveout=0,  # L1 holds a line from its first 16 bytes to its last
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        norm: tuple[cute.Pointer, Float64],
        groups: tuple[cute.Pointer, Int32],
        unit: tuple[cute.Pointer, Float64],
        outputs: tuple[cute.Pointer, cute.Pointer, cute.Pointer],
        size: tuple[Int32, Int32],
        strides: tuple[Int64, Int64],
        tiles: Int32,
    ):
        m, k = size
        thread, _, _ = cute.arch.thread_idx()
        cta, split, _ = cute.arch.block_idx()
        _, splits, _ = cute.arch.grid_dim()
        lane, warp = thread % WARP, cute.arch.make_warp_uniform(thread // WARP)
        matrix, tile = cta // tiles, cta % tiles
        words = (k + BLOCK * ATOM_BLOCKS - 1) // (BLOCK * ATOM_BLOCKS)
        smem = cute.arch.get_dyn_smem(Int32, alignment=16).toint()
        place = self.place(matrix, tile, warp, lane, m, words, tiles, groups)
        row = x.toint() + (Int64(matrix) * strides[1] + (place.row - Int64(matrix) * m) * strides[0]) * self.x.bytes
        factor = Float32(1.0)
        if cutlass.const_expr(self.before == "rms_norm"):
            factor = self.factor(x, place, matrix, warp, lane, m, k, words, strides, norm[1], smem)
        blocks = words * ATOM_BLOCKS
        rounds = (blocks - split * self.blocks_at_once + splits * self.blocks_at_once - 1) // (
            splits * self.blocks_at_once
        )
        block = place.block + split * self.blocks_at_once
        step = splits * self.blocks_at_once
        source = row + Int64(block) * (BLOCK * self.x.bytes)
        left = k - block * BLOCK
        if cutlass.const_expr(self.stage == "amax"):
            self.raise_amax(unit[0], source, norm[0], factor, place.there, left, step, rounds, k, warp, lane, smem)
        else:
            g = self.global_scale(unit, outputs[2], thread, cta, split)
            codes = outputs[0].toint() + (place.row * blocks + block) * (BLOCK // 2)
            scales = outputs[1].toint() + place.scales + Int64(block // ATOM_BLOCKS) * place.step + lane % ATOM_BLOCKS
            self.write(g, source, norm[0], factor, place, left, codes, scales, step, rounds, k)

    # Rows.

    @cute.jit
    def place(self, matrix, tile, warp, lane, m, words, tiles, groups):
        """This thread's `Place`."""
        if cutlass.const_expr(self.layout == "linear"):
            local = tile * ROWS + warp
            row = Int64(matrix) * m + local
            return Place(row, local < m, lane, warp, row * words * ATOM_BLOCKS, ATOM_BLOCKS)
        slot = lane // ATOM_BLOCKS
        within = tile % (ROW_ALIGN // ROWS) * 2 + slot // 4 + slot % 4 * 32
        atom = tile // (ROW_ALIGN // ROWS)
        local, end = atom * ROW_ALIGN + within, m
        if cutlass.const_expr(self.layout == "128x4-grouped"):
            first, end = self.group(groups, atom, m, lane)
            local = first + within
        first_atom = (Int64(matrix) * (tiles // (ROW_ALIGN // ROWS)) + atom) * words
        scales = first_atom * ATOM_BYTES + tile % (ROW_ALIGN // ROWS) * WARP + slot * ATOM_BLOCKS
        block = warp * ATOM_BLOCKS + lane % ATOM_BLOCKS
        return Place(Int64(matrix) * m + local, local < end, block, slot, scales, ATOM_BYTES)

    @cute.jit
    def group(self, groups, atom, m, lane):
        """(the row that an atom's first row of scales is of, where rows of its group end); no rows where it has none.

        The warp adds up the sizes, 32 groups at a time."""
        sizes, experts = groups
        atoms, rows = Int32(0), Int32(0)
        first, end = Int32(0), Int32(0)
        for start in cutlass.range(0, experts, WARP, unroll=1):
            size = Int32(0)
            if start + lane < experts:
                size = (sizes + start + lane).load()
            size = cutlass.max(size, Int32(0))
            mine = (size + ROW_ALIGN - 1) // ROW_ALIGN
            atoms_to, rows_to = atoms + _running(mine, lane), rows + _running(size, lane)
            found = (atom >= atoms_to - mine) & (atom < atoms_to)
            begin = Int32(cutlass.select_(found, rows_to - size + (atom - atoms_to + mine) * ROW_ALIGN, Int32(0)))
            first = first + _total(begin)
            end = end + _total(Int32(cutlass.select_(found, rows_to, Int32(0))))
            atoms, rows = _last(atoms_to), _last(rows_to)
        return first, cutlass.min(end, m)

    @cute.jit
    def factor(self, x, place, matrix, warp, lane, m, k, words, strides, eps, smem):
        """1 / sqrt(mean of squares + eps) of the thread's row: warp i reads the CTA's row i."""
        row, there = place.row, place.there
        if cutlass.const_expr(self.layout != "linear"):
            row, there = _of_lane(place, warp * ATOM_BLOCKS)
        address = x.toint() + (Int64(matrix) * strides[1] + (row - Int64(matrix) * m) * strides[0]) * self.x.bytes
        rWords = cute.make_rmem_tensor(self.x.words, Int32)
        total = Float32(0.0)
        end = Int32(cutlass.select_(there, k, Int32(0)))
        for block in cutlass.range(lane, (words * ATOM_BLOCKS + WARP - 1) // WARP * WARP, WARP, unroll=1):
            self.x.load(rWords, address + Int64(block) * (BLOCK * self.x.bytes), end - block * BLOCK)
            values = self.x.values([rWords[i] for i in range(self.x.words)])
            total = ieee.add(total, ieee.tree(lambda i, values=values: ieee.multiply(values[i], values[i])))
        for distance in (16, 8, 4, 2, 1):
            total = ieee.add(total, ieee.number(_other(ieee.bits(total), distance)))
        mean = ieee.divide(total, Float32(k))
        inverse = ieee.divide(Float32(1.0), ieee.root(ieee.add(mean, Float32(eps))))
        if lane == 0:
            async_copies.store_fp32(smem + 4 * warp, inverse)
        cute.arch.sync_threads()
        found = async_copies.load_fp32(smem + 4 * place.slot)
        cute.arch.sync_threads()
        return found

    # Blocks.

    def registers(self):
        """For a block: of x, and of up or of the norm's weight."""
        other = 0 if self.before is None else (self.x if self.before == "swiglu" else self.norm).words
        return cute.make_rmem_tensor(self.x.words + other, Int32)

    def load(self, registers, source, weight, left, k):
        """The block at this address, which is followed by so many numbers of its row, itself included."""
        self.x.load(registers, source, left)
        if self.before is not None:
            more = cute.make_rmem_tensor(self.x.words if self.before == "swiglu" else self.norm.words, Int32)
            if self.before == "swiglu":
                self.x.load(more, source + Int64(k) * self.x.bytes, left)
            else:
                self.norm.load(more, weight.toint() + Int64(k - left) * self.norm.bytes, left)
            for i in range(cute.size(more)):
                registers[self.x.words + i] = more[i]

    def block(self, words, factor):
        """A `Block` from what `load` brought."""
        own, more = words[: self.x.words], words[self.x.words :]
        if self.before is None:
            return self.x.block(own)
        values = self.x.values(own)
        if self.before == "swiglu":
            values = [gate.swiglu(g, up) for g, up in zip(values, self.x.values(more), strict=True)]
        else:
            scaled = [ieee.multiply(value, factor) for value in values]
            values = [ieee.multiply(a, b) for a, b in zip(scaled, self.norm.values(more), strict=True)]
        return Block.of([ieee.bits(value) for value in values])

    # The first stage.

    @cute.jit
    def raise_amax(self, amax, source, weight, factor, there, left, step, rounds, k, warp, lane, smem):
        left = Int32(cutlass.select_(there, left, Int32(0)))
        rWords = self.registers()
        self.load(rWords, source, weight, left, k)
        largest = Int32(0)
        for _ in cutlass.range(rounds, unroll=1):
            words = [rWords[i] for i in range(cute.size(rWords))]
            source += Int64(step * (BLOCK * self.x.bytes))
            self.load(rWords, source, weight, left - step * BLOCK, k)
            if left > 0:
                found = self.block(words, factor)
                mine = found.amax
                if mine >= INFINITE:
                    mine = found.finite_amax()
                largest = cutlass.max(largest, mine)
            left -= step * BLOCK
        largest = _largest(largest)
        if lane == 0:
            async_copies.store_fp32(smem + 4 * warp, ieee.number(largest))
        cute.arch.sync_threads()
        if warp == 0:
            mine = ieee.bits(async_copies.load_fp32(smem + lane % WARPS * 4))
            mine = _largest(mine)
            if lane == 0:
                cute.arch.inline_ptx("red.global.max.u32 [{$r0}], {$r1};", read_only_args=[amax.toint(), mine])

    # The second stage.

    @cute.jit
    def global_scale(self, unit, out, thread, cta, split):
        found, constant = unit[0].load(), Float32(unit[1])
        g = ieee.multiply(found, constant)
        if cutlass.const_expr(self.dynamic):
            g = cute.arch.fmax(ieee.divide(found, constant), Float32(SMALLEST_UNIT))
            g = Float32(cutlass.select_(found == 0.0, Float32(1.0), g))
        if (thread == 0) & (cta == 0) & (split == 0):
            out.store(g)
        return ieee.number(cute.arch.make_warp_uniform(ieee.bits(g)))

    @cute.jit
    def write(self, g, source, weight, factor, place, left, codes, scales, step, rounds, k):
        """Every block as if it were NORMAL; then, from memory again, those that are not or are not sure."""
        fast_unit = (ieee.bits(g) >= EXACT_UNIT[0]) & (ieee.bits(g) <= EXACT_UNIT[1])
        fast = ieee.ShortQuotients if self.before is None and self.x.dtype != "fp32" else ieee.FastQuotients
        sixth, by_unit = fast.by_constant(6.0), fast.by(g)
        nearly = (Float32(cutlass.select_(fast_unit, x, Float32(0.0))) for x in (by_unit.near, by_unit.rest))
        by_unit = replace(by_unit, **dict(zip(("near", "rest"), nearly, strict=True)))  # quotients of 0 are not NORMAL
        steps = BLOCK * self.x.bytes, BLOCK // 2, place.step // ATOM_BLOCKS
        steps = [Int64(step * bytes_) for bytes_ in steps]  # of x, codes and scales
        last = k - round_up(k, K_ALIGN)  # numbers that are left when no block is, padding included
        rest = Int32(0)  # a bit for each round, the last one's lowest; of 33 and more rounds some share a bit
        rWords = self.registers()
        self.load(rWords, source, weight, self.here(place, left), k)
        for _ in cutlass.range(rounds, unroll=1):
            words = [rWords[i] for i in range(cute.size(rWords))]
            source += steps[0]
            self.load(rWords, source, weight, self.here(place, left - step * BLOCK), k)
            rest = _rotated(rest, 1)
            if left > last:
                found = self.block(words, factor)
                quotient = by_unit.of(sixth.of(ieee.number(found.amax)))
                made, sure = self.quantised(found, g, quotient, by_unit, fast.by)
                self.store(place, codes, scales, made)
                if (found.amax != 0) & ~(sure & (quotient >= NORMAL[0]) & (quotient <= NORMAL[1])):
                    rest = rest | 1
            left, codes, scales = left - step * BLOCK, codes + steps[1], scales + steps[2]
        if rest != 0:
            division = ieee.Quotients(g)
            for _ in cutlass.range(rounds, unroll=1):
                source, codes, scales = source - steps[0], codes - steps[1], scales - steps[2]
                left += step * BLOCK
                if rest & 1 != 0:
                    self.load(rWords, source, weight, self.here(place, left), k)
                    limit = ieee.multiply(ieee.multiply(g, Float32(448.0)), Float32(6.0))  # that the scale can hold
                    found = self.block([rWords[i] for i in range(cute.size(rWords))], factor)
                    found = found.finite(cute.arch.fmin(limit, Float32(LARGEST)))
                    quotient = division.of(ieee.divide(ieee.number(found.amax), Float32(6.0)))
                    made, _ = self.quantised(found, g, quotient, division, ieee.Quotients)
                    if left > last:
                        self.store(place, codes, scales, made)
                rest = _rotated(rest, 31)

    def here(self, place, left):
        return Int32(cutlass.select_(place.there, left, Int32(0)))

    def quantised(self, block, g, quotient, by_unit, quotients):
        """((the byte of the scale, two words of codes with their signs), whether that is sure).

        Args:
            quotient: amax / 6 / g, NORMAL unless `quotients` are by division; otherwise what comes out may be anything,
                but zeros where the block is.
        """
        amax = ieee.number(block.amax)
        largest = e2m1.scale_byte(quotient)
        candidates = [largest]
        if self.method == "four_over_six":
            candidates.append(e2m1.scale_byte(by_unit.of(ieee.multiply(amax, Float32(0.25)))))
        elif self.method == "mse":
            candidates += [cutlass.max(largest - 1, Int32(0)), cutlass.min(largest + 1, Int32(0x7E))]
        # The scale below the nearest one takes quotients beyond 7, and fp32 may not hold squares of any number.
        fast = quotients is not ieee.Quotients
        how = quotients, len(candidates) > 1 and fast, fast and self.method != "mse"
        encoded = [e2m1.encode(block.values, s, g, *how) for s in candidates]
        best, sure = encoded[0], Boolean(True)
        for other in encoded[1:]:
            better, known = e2m1.estimated(best, other) if fast else (e2m1.better(block.values, best, other), True)
            best, sure = _chosen(better, other, best), sure & known
        words = [word | signs for word, signs in zip(best.words, block.signs, strict=True)]
        nothing = block.amax == 0 if fast else best.scale == 0
        low, high = (Int32(cutlass.select_(nothing, Int32(0), word)) for word in words)
        return (best.scale, low, high), sure

    @cute.jit
    def store(self, place, codes, scales, made):
        scale, low, high = made
        if place.there:
            cute.arch.inline_ptx("st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[codes, low, high])
        if place.there | (self.layout != "linear"):
            cute.arch.inline_ptx("st.global.b8 [{$r0}], {$r1};", read_only_args=[scales, scale])


def _chosen(which, first, second):
    """`first` where `which`, else `second`: two `e2m1.Encoded`."""
    a, b = (Int32(cutlass.select_(which, x, y)) for x, y in zip(first.words, second.words, strict=True))
    d = Float32(cutlass.select_(which, first.d, second.d))
    compared = first.error is not None
    error = Float32(cutlass.select_(which, first.error, second.error)) if compared else None
    return e2m1.Encoded(Int32(cutlass.select_(which, first.scale, second.scale)), d, [a, b], error)


def _rotated(word: Int32, left: int) -> Int32:
    return cute.arch.inline_ptx(
        f"shf.l.wrap.b32 {{$w0}}, {{$r0}}, {{$r0}}, {left};", write_only_types=[Int32], read_only_args=[word]
    )


def _other(word: Int32, distance: int) -> Int32:
    """That of the lane whose number differs in one bit."""
    return cute.arch.inline_ptx(
        f"shfl.sync.bfly.b32 {{$w0}}, {{$r0}}, {distance}, 31, 0xFFFFFFFF;",
        write_only_types=[Int32],
        read_only_args=[word],
    )


def _of_lane(place: Place, lane: Int32) -> tuple[Int64, Boolean]:
    """The row of another lane, and whether it is there."""
    word = Int32(cutlass.select_(place.there, Int32(place.row), Int32(-1)))
    row = cute.arch.inline_ptx(
        "shfl.sync.idx.b32 {$w0}, {$r0}, {$r1}, 31, 0xFFFFFFFF;",
        write_only_types=[Int32],
        read_only_args=[word, lane],
    )
    return Int64(cutlass.max(row, Int32(0))), row >= 0


def _largest(word: Int32) -> Int32:
    """Of the warp, of words that are not negative."""
    return cute.arch.inline_ptx(
        "redux.sync.max.s32 {$w0}, {$r0}, 0xFFFFFFFF;", write_only_types=[Int32], read_only_args=[word]
    )


def _total(word: Int32) -> Int32:
    return cute.arch.inline_ptx(
        "redux.sync.add.s32 {$w0}, {$r0}, 0xFFFFFFFF;", write_only_types=[Int32], read_only_args=[word]
    )


def _last(word: Int32) -> Int32:
    return cute.arch.inline_ptx(
        "shfl.sync.idx.b32 {$w0}, {$r0}, 31, 31, 0xFFFFFFFF;", write_only_types=[Int32], read_only_args=[word]
    )


def _running(word: Int32, lane: Int32) -> Int32:
    """The sum of this lane's and of those of all lanes before it."""
    for distance in (1, 2, 4, 8, 16):
        before = cute.arch.inline_ptx(
            f"shfl.sync.up.b32 {{$w0}}, {{$r0}}, {distance}, 0, 0xFFFFFFFF;",
            write_only_types=[Int32],
            read_only_args=[word],
        )
        word = word + Int32(cutlass.select_(lane >= distance, before, Int32(0)))
    return word
