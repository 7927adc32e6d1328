"""Block-scaled products of a warp, their operands from shared memory (PTX: mma.m16n8k64, ldmatrix; see warptile.py).

Codes lie in rows of 64 or 128 bytes, swizzled by as many, a step of k = 64 in 32 of them: the address of step s is that
of step 0 with bits 5 and 6 exchanged. Scales lie in atoms; 16 bytes of one have a row's scales in four spans.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Uint32, cute

from blockscale.kernels.parts.geometry import ATOM_BYTES
from blockscale.kernels.parts.warptile import COLUMNS, ROWS, SPAN, WarpTile, place, scale_place

SPANS = 4  # of an atom
CHUNK = 16  # bytes of a row of an 8 x 8 matrix of ldmatrix, which the swizzle moves as one
STEP_BYTES = 32
OCTETS = SPAN // COLUMNS

MMA = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"


def multiply(sums: Any, a: Any, b: Any, scales: Any, which: tuple[int, int]) -> Any:
    """sums + (a x scales of a) @ (b x scales of b), 4 fp32 as words.

    which: the half of every quad that has the scales of a, and the lane that has those of b.
    """
    return cute.arch.inline_ptx(
        f"{MMA} {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, {{{{$r0}}, {{$r1}}, {{$r2}}, {{$r3}}}}, {{{{$r4}}, {{$r5}}}}, "
        f"{{{{$r6}}, {{$r7}}, {{$r8}}, {{$r9}}}}, {{$r10}}, {{0, {which[0]}}}, {{$r11}}, {{0, {which[1]}}};",
        write_only_types=[Int32] * 4,
        read_only_args=[*a, *b, *sums, *scales],
    )


def load_matrices(address: Int32, count: int) -> Any:
    """`count` words: of matrix i those at the addresses that lanes 8i to 8i + 7 give."""
    words = ", ".join(f"{{$w{i}}}" for i in range(count))
    target = f"{{{words}}}"
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x{count}.shared.b16 {target}, [{{$r0}}];",
        write_only_types=[Int32] * count,
        read_only_args=[address],
    )


def load_scales(address: Int32) -> Any:
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


@dataclass(frozen=True)
class Lane:
    """Where a lane of a warp reads: addresses in slot 0 of step 0, and which words of scales are the warp's.

    a: of each of the blocks of 16 rows that a span has for the warp, one or both; b: of each pair of instructions.
    word_a, word_b: the first span's place in an atom, among `words_a`, `words_b`.
    """

    a: tuple[Int32, ...]
    b: tuple[Int32, ...]
    sfa: Int32
    sfb: Int32
    word_a: Int32
    word_b: Int32
    words_a: tuple[int, ...]
    words_b: tuple[int, ...]

    @staticmethod
    def of(g: WarpTile, smem: Any, warp: Int32, row: Int32, column: Int32) -> "Lane":
        """warp: in its group. row, column: where the tile begins, in tiles."""
        down, across = g.warps
        u, v = Uint32(warp % down), Uint32(warp // down)
        lane = Uint32(cute.arch.lane_idx())
        base = {name: getattr(smem, name).data_ptr().toint() for name in ("a", "b", "sfa", "sfb")}
        parity = u % 2  # of the warp's blocks; with one row of warps, of the first one
        matrix, c = lane // 8, lane % 8
        octets = [(parity ^ both) * 2 + matrix % 2 for both in range(1 if down > 1 else 2)]
        a = tuple(_address(g, u // 2 * SPAN + place(octet, c, OCTETS), matrix // 2) + base["a"] for octet in octets)
        pairs = [matrix // 2 + 2 * pair if g.per_span > 1 else Uint32(0) for pair in range(max(1, g.per_span // 2))]
        b = tuple(_address(g, v * SPAN + place(octet, c, g.per_span), matrix % 2) + base["b"] for octet in pairs)
        octet_a = lane % 4 ^ 2 * parity
        sfa = base["sfa"] + CHUNK * Int32(scale_place(octet_a, lane // 4, OCTETS))
        atom = Int32(v) // SPANS * (g.steps * ATOM_BYTES)
        sfb = base["sfb"] + CHUNK * Int32(scale_place(lane % 4, lane // 4, g.per_span)) + atom
        first_a, firsts_a = _first(g.rows, row)
        first_b, firsts_b = _first(g.columns, column)
        words_a = tuple(sorted({f + i // 2 for f in firsts_a for i in range(down)}))
        words_b = tuple(sorted({f + i % SPANS for f in firsts_b for i in range(across)}))
        return Lane(a, b, sfa, sfb, first_a + Int32(u) // 2, first_b + Int32(v) % SPANS, words_a, words_b)

    def multiply(self, g: WarpTile, slot: Int32, rSums: Any) -> None:
        """Adds a stage's products."""
        at_a = [a + slot * g.a_bytes for a in self.a]
        at_b = [b + slot * g.b_bytes for b in self.b]
        at_sfa, at_sfb = self.sfa + slot * g.sfa_bytes, self.sfb + slot * g.sfb_bytes
        for step in range(g.steps):
            scales_a = self._scales_a(g, at_sfa + step * ATOM_BYTES)
            scales_b = self._scales_b(g, at_sfb + step * ATOM_BYTES)
            a = [self._load_a(g, at_a, step, x) for x in range(g.row_blocks)]
            b = [self._load_b(g, at_b, step, y) for y in range(g.spans)]
            # Rows innermost: the assembler then moves the fewest sums between registers.
            for y, j, x in itertools.product(range(g.spans), range(g.per_span), range(g.row_blocks)):
                first = g.first_sum(x, y, j)
                sums = [rSums[first + i] for i in range(4)]
                which = x % 2 if g.warps[0] == 1 else 0, j
                sums = multiply(sums, a[x], b[y][2 * j : 2 * j + 2], (scales_a[x], scales_b[y]), which)
                for i in range(4):
                    rSums[first + i] = sums[i]

    def _load_a(self, g: WarpTile, at: list[Int32], step: int, x: int) -> Any:
        down = g.warps[0]
        which, rows = (x % 2, x // 2 * SPAN) if down == 1 else (0, x * down * ROWS)
        return load_matrices((at[which] ^ step * STEP_BYTES) + rows * g.code_bytes, 4)

    def _load_b(self, g: WarpTile, at: list[Int32], step: int, y: int) -> Any:
        """Two words of each instruction of a span."""
        columns = y * g.warps[1] * SPAN
        count = 4 if g.per_span > 1 else 2
        return [w for x in at for w in load_matrices((x ^ step * STEP_BYTES) + columns * g.code_bytes, count)]

    def _scales_a(self, g: WarpTile, address: Int32) -> list[Int32]:
        words, down = load_scales(address), g.warps[0]
        spans = [x // 2 if down == 1 else x * down // 2 for x in range(g.row_blocks)]
        return [_pick(words, self.word_a, self.words_a, span) for span in spans]

    def _scales_b(self, g: WarpTile, address: Int32) -> list[Int32]:
        across = g.warps[1]
        spans = [y * across for y in range(g.spans)]
        atoms = [load_scales(address + i * g.steps * ATOM_BYTES) for i in range(spans[-1] // SPANS + 1)]
        return [_pick(atoms[span // SPANS], self.word_b, self.words_b, span % SPANS) for span in spans]


def _address(g: WarpTile, row: Uint32, half: Uint32) -> Int32:
    """Of 16 bytes of a row of codes, of the first or the second half of step 0, from the first byte of a slot."""
    swizzle = row % 8 if g.code_bytes == 128 else row // 2 % 4
    return Int32(row * g.code_bytes + ((half ^ swizzle) * CHUNK))


def _first(size: int, index: Int32) -> tuple[Int32, tuple[int, ...]]:
    """(place in an atom of a tile's first span, the places there may be): tiles may be parts of an atom."""
    spans = max(1, size // SPAN)
    if spans >= SPANS or size < SPAN:
        return Int32(0), (0,)
    return index * spans % SPANS, tuple(range(0, SPANS, spans))


def _pick(words: Any, first: Int32, firsts: tuple[int, ...], beside: int) -> Int32:
    """words[first + beside], `first` one of `firsts`: by selecting, since registers have no addresses."""
    word = words[firsts[0] + beside]
    for known in firsts[1:]:
        word = Int32(cutlass.select_(first == known, words[known + beside], word))
    return word
