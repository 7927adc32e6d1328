"""Block-scaled products of a warp, their operands from shared memory (PTX: mma.m16n8k64, ldmatrix; see warptile.py).

Codes lie in rows of 64 or 128 bytes, swizzled by as many, a step of k = 64 in 32 of them: the address of step s is that
of step 0 with bits 5 and 6 flipped by s. Scales lie in lines of 16 bytes, a word for each of four spans; a lane loads
two of the words, or more or fewer.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Uint32, cute

from blockscale.kernels.parts.warptile import LINE_BYTES, SCALE_BYTES, SPAN, SPANS, Side, WarpTile, place

CHUNK = 16  # bytes of a row of an 8 x 8 matrix of ldmatrix, which the swizzle moves as one
STEP_BYTES = 32

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


def load_scales(address: Int32, count: int) -> Any:
    """`count` words, 1, 2 or 4."""
    words = [f"{{$w{i}}}" for i in range(count)]
    vector, target = (f".v{count}", "{" + ", ".join(words) + "}") if count > 1 else ("", words[0])
    loaded = cute.arch.inline_ptx(
        f"ld.shared{vector}.b32 {target}, [{{$r0}}];", write_only_types=[Int32] * count, read_only_args=[address]
    )
    return loaded if count > 1 else (loaded,)


@dataclass(frozen=True)
class Codes:
    """Where a lane reads codes of a warp's blocks of rows, for ldmatrix: in slot 0, of step 0."""

    side: Side
    address: Int32
    row_bytes: int

    @staticmethod
    def of(side: Side, g: WarpTile, base: Int32, warp: Uint32, octet: Uint32, half: Uint32) -> "Codes":
        """octet: of a block, and half: of a step, that the matrix is of whose rows the lane names."""
        row = side.start(warp) + place(octet, Uint32(cute.arch.lane_idx()) % 8, side.octets)
        swizzle = row % 8 if g.code_bytes == 128 else row // 2 % 4
        return Codes(side, base + Int32(row * g.code_bytes + (half ^ swizzle) * CHUNK), g.code_bytes)

    def load(self, step: int, slot: Int32) -> list[Any]:
        """Of each block two words an octet. slot: its first byte, from that of slot 0."""
        at = self.address + slot ^ step * STEP_BYTES
        rows = (self.side.row(block) for block in range(self.side.blocks))
        return [load_matrices(at + row * self.row_bytes, 2 * self.side.octets) for row in rows]


@dataclass(frozen=True)
class Scales:
    """Where a lane reads scales of a warp's blocks, in slot 0.

    odd: where these lie in one of several spans, and a lane needs one word of two: whether it is the second. Or None.
    """

    side: Side
    address: Int32
    steps: int
    odd: Int32 | None

    @staticmethod
    def of(side: Side, g: WarpTile, base: Int32, warp: Uint32, tile: Int32) -> "Scales":
        """tile: its place among the tiles along this side."""
        lane = Uint32(cute.arch.lane_idx())
        span = Uint32(side.first_span(warp, Uint32(tile)))
        line = side.line(warp, lane // 4, lane % 4)
        half = side.half(lane % 4, span)
        atom = span // SPANS * (g.steps * side.step_bytes)
        odd = Int32(span % 2) if side.spans == 1 and side.size >= SPAN else None
        return Scales(side, base + Int32(atom + line * LINE_BYTES + half * (2 * SCALE_BYTES)), g.steps, odd)

    def load(self, step: int, slot: Int32) -> list[tuple[Int32, int]]:
        """Of each block the word and the half of the quad whose it is."""
        side, at = self.side, self.address + slot
        offsets = (
            (atom * self.steps + step) * side.step_bytes + parity * (side.lines // 2) * LINE_BYTES
            for parity, atom in side.loads
        )
        loaded = [load_scales(at + offset, side.words) for offset in offsets]
        if self.odd is not None:
            loaded = [(Int32(cutlass.select_(self.odd == 1, high, low)),) * 2 for low, high in loaded]
        places = (side.word(block) for block in range(side.blocks))
        return [(loaded[load][word], half) for load, word, half in places]


@dataclass(frozen=True)
class Lane:
    """Where a lane of a warp reads its operands of a tile."""

    a: Codes
    b: Codes
    sfa: Scales
    sfb: Scales

    @staticmethod
    def of(g: WarpTile, smem: Any, warp: Int32, row: Int32, column: Int32) -> "Lane":
        """warp: in its group. row, column: where the tile begins, in tiles."""
        u, v = Uint32(warp % g.warps[0]), Uint32(warp // g.warps[0])
        matrix = Uint32(cute.arch.lane_idx()) // 8
        base = {name: getattr(smem, name).data_ptr().toint() for name in ("a", "b", "sfa", "sfb")}
        return Lane(
            Codes.of(g.m, g, base["a"], u, matrix % 2, matrix // 2),
            Codes.of(g.n, g, base["b"], v, matrix // 2 % g.n.octets, matrix % 2),
            Scales.of(g.m, g, base["sfa"], u, row),
            Scales.of(g.n, g, base["sfb"], v, column),
        )

    def multiply(self, g: WarpTile, slot: Int32, rSums: Any) -> None:
        """Adds a stage's products."""
        for step in range(g.steps):
            scales_a = self.sfa.load(step, slot * g.sfa_bytes)
            scales_b = self.sfb.load(step, slot * g.sfb_bytes)
            a, b = self.a.load(step, slot * g.a_bytes), self.b.load(step, slot * g.b_bytes)
            # Rows innermost: the assembler then moves the fewest sums between registers.
            for y, octet, x in itertools.product(range(g.n.blocks), range(g.n.octets), range(g.m.blocks)):
                first = g.first_sum(x, y, octet)
                sums = [rSums[first + i] for i in range(4)]
                (word_a, half_a), (word_b, half_b) = scales_a[x], scales_b[y]
                which = half_a, 2 * half_b + octet
                sums = multiply(sums, a[x], b[y][2 * octet : 2 * octet + 2], (word_a, word_b), which)
                for i in range(4):
                    rSums[first + i] = sums[i]
