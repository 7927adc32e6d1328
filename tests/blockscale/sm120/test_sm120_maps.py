"""The maps of docs/sm120.md: held to what the block-scaled instruction takes from which lane, and to each other."""

import itertools

import numpy as np
import pytest

import ptxemu
from blockscale.kernels.parts.warptile import (
    BLOCK,
    GROUP_WARPS,
    SPAN,
    SPANS,
    TILE_COLUMNS,
    TILE_K,
    TILE_ROWS,
    WARPS,
    Side,
    WarpTile,
    place,
    turn,
)

SMEM = 101_376
OCTETS = (1, 2)
ONES = 0x22222222  # eight codes of 1.0
ONE, TWO = 0x38383838, 0x40404040  # four scales each
PTX = """
.version 8.8
.target sm_120a
.address_size 64
.visible .entry product(.param .u64 words, .param .u64 sums)
{
.reg .b32 t, one, sa, sb;
.reg .b64 at, out, offset;
.reg .f32 d<4>, zero;
mov.u32 t, %tid.x;
mul.wide.u32 offset, t, 8;
ld.param.u64 at, [words];
add.u64 at, at, offset;
ld.global.v2.b32 {sa, sb}, [at];
mov.b32 one, ONES;
mov.f32 zero, 0f00000000;
mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3
 {d0, d1, d2, d3}, {one, one, one, one}, {one, one}, {zero, zero, zero, zero}, sa, {0, HALF}, sb, {0, LANE};
ld.param.u64 out, [sums];
mul.wide.u32 offset, t, 16;
add.u64 out, out, offset;
st.global.v4.f32 [out], {d0, d1, d2, d3};
ret;
}
"""


def product(scales_a, scales_b, half, lane):
    """(16, 8) sums of ones over k = 64, with a word of scales a lane for each operand."""
    words, sums = np.stack((scales_a, scales_b), axis=1).astype(np.uint32), np.zeros((32, 4), np.float32)
    text = PTX.replace("ONES", str(ONES)).replace("HALF", str(half)).replace("LANE", str(lane))
    ptxemu.Device("sm_120a").launch(text, block=(32, 1, 1), args=[words, sums])
    result = np.zeros((16, 8), np.float32)
    for at, i in itertools.product(range(32), range(4)):
        result[at // 4 + 8 * (i // 2), 2 * (at % 4) + i % 2] = sums[at, i]
    return result


@pytest.mark.parametrize("half", [0, 1])
def test_lanes_that_have_the_scales_of_a(half):
    """Lane 4g + t scales row g if t = 2 x half, row g + 8 if t = 2 x half + 1, and else nothing."""
    plain = np.full(32, ONE)
    for lane in range(32):
        scales = plain.copy()
        scales[lane] = TWO
        doubled = np.argwhere(product(scales, plain, half, 0)[:, 0] == 128).flatten().tolist()
        g, t = divmod(lane, 4)
        assert doubled == ([g + 8 * (t % 2)] if t // 2 == half else [])


@pytest.mark.parametrize("chosen", range(4))
def test_lanes_that_have_the_scales_of_b(chosen):
    """Lane 4g + t scales column g if t is the chosen one, and else nothing."""
    plain = np.full(32, ONE)
    for lane in range(32):
        scales = plain.copy()
        scales[lane] = TWO
        doubled = np.argwhere(product(plain, scales, 0, chosen)[0] == 128).flatten().tolist()
        g, t = divmod(lane, 4)
        assert doubled == ([g] if t == chosen else [])


SIDES = [
    Side(size, warps, whole)
    for size in sorted({*TILE_ROWS, *TILE_COLUMNS})
    for warps in (1, 2, 4, 8)
    for whole in (False, True)
    if size >= warps * BLOCK or warps == 1
]


def loaded(side, warp, tile, load, g, t):
    """The line of an atom, the atom, and the words of the line that lane 4g + t loads, as kernels/parts/blockmma.py."""
    parity, atom = side.loads[load]
    span = side.first_span(warp, tile)
    half = side.half(t, span)
    line = side.line(warp, g, t) + parity * side.lines // 2
    return line, span // SPANS + atom, range(2 * half, 2 * half + side.words)


@pytest.mark.parametrize("side", SIDES, ids=str)
def test_scales_that_a_lane_loads_are_those_of_its_rows_and_columns(side):
    """What an instruction takes from a lane is the word of that row: its span's, in its line."""
    for warp, tile, block, g in itertools.product(range(side.warps), range(4), range(side.blocks), range(8)):
        load, word, quad_half = side.word(block)
        for octet in range(side.octets):
            t = side.octets * quad_half + octet
            line, atom, words = loaded(side, warp, tile, load, g, t)
            row = tile * side.size % 128 * (side.size >= SPAN) + side.start(warp) + side.row(block)
            row += place(octet, g, side.octets)
            has = side.first_span(warp, tile) % 2 if side.spans == 1 and side.size >= SPAN else word
            assert (line, atom, words[has]) == (row % SPAN, row // 128, row % 128 // SPAN)


@pytest.mark.parametrize("octets", OCTETS)
def test_a_block_is_covered_once(octets):
    assert sorted(place(octet, c, octets) for octet in range(octets) for c in range(8)) == list(range(8 * octets))


@pytest.mark.parametrize("octets", OCTETS)
def test_sums_of_a_thread_lie_side_by_side(octets):
    """Lane 4g + t has columns 2t and 2t + 1 of each instruction: pair o ^ turn of 2 x octets columns from its first."""
    for t, octet in itertools.product(range(4), range(octets)):
        first = 2 * octets * t + 2 * (octet ^ turn(t, octets))
        assert [place(octet, 2 * t + i, octets) for i in range(2)] == [first, first + 1]


@pytest.mark.parametrize("octets", OCTETS)
def test_rows_of_codes_lie_in_different_banks(octets):
    """Eight rows of an octet differ modulo 8, as the swizzle wants."""
    for octet in range(octets):
        assert {place(octet, c, octets) % 8 for c in range(8)} == set(range(8))


@pytest.mark.parametrize("side", SIDES, ids=str)
def test_scales_lie_in_different_banks(side):
    """Of the 16 lanes that load 8 bytes at a time, or 8 that load 16, no two want different lines of the same bank."""
    lanes = 32 // side.words
    for warp, load, first in itertools.product(range(side.warps), range(len(side.loads)), range(0, 32, lanes)):
        wanted = {}
        for lane in range(first, first + lanes):
            line, atom, words = loaded(side, warp, 0, load, lane // 4, lane % 4)
            for word in words:
                wanted.setdefault((line % 8, word), set()).add((atom, line))
        assert all(len(lines) == 1 for lines in wanted.values())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("tile", [(rows, columns) for rows in TILE_ROWS for columns in TILE_COLUMNS])
def test_warps_share_every_tile(tile, groups):
    for tile_k in TILE_K:
        sizes = WarpTile(tile, None, groups, tile_k, SMEM)
        down, across = sizes.warps
        assert down * across <= WARPS // groups
        assert sizes.m.blocks * down * 16 == tile[0]
        assert sizes.n.blocks * across * 8 * sizes.n.octets == tile[1]
        assert sizes.sums * 32 * down * across == tile[0] * tile[1]
        assert sizes.smem_bytes <= SMEM
        assert sizes.consumers in (GROUP_WARPS, WARPS)
