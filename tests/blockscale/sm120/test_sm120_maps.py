"""The maps of docs/sm120.md: held to what the block-scaled instruction takes from which lane, and to each other."""

import itertools

import numpy as np
import pytest

import ptxemu
from blockscale.kernels.parts.warptile import (
    GROUP_WARPS,
    TILE_COLUMNS,
    TILE_K,
    TILE_ROWS,
    WARPS,
    WarpTile,
    place,
    scale_place,
    turn,
)

SMEM = 101_376
OCTETS = (1, 2, 4)
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


def test_scales_that_a_lane_loads_are_those_of_its_rows_and_columns():
    """Rows: blocks 0 and 1 of a span have octets 0, 1 and 2, 3. Columns: instruction j has octet j."""
    for octets, octet, c in itertools.product(OCTETS, range(4), range(8)):
        if octet < octets:
            assert scale_place(octet, c, octets) == place(octet, c, octets)


@pytest.mark.parametrize("octets", OCTETS)
def test_a_span_is_covered_once(octets):
    every = [place(octet, c, octets) for octet in range(octets) for c in range(8)]
    assert sorted(every) == list(range(8 * octets))
    assert sorted(scale_place(t, g, octets) for t in range(4) for g in range(8)) == list(range(32))


@pytest.mark.parametrize("octets", OCTETS)
def test_sums_of_a_thread_lie_side_by_side(octets):
    """Lane 4g + t has columns 2t and 2t + 1 of each instruction: pair j ^ turn of 2 x octets columns from its first."""
    for t, j in itertools.product(range(4), range(octets)):
        first = 2 * octets * t + 2 * (j ^ turn(t, octets))
        assert [place(j, 2 * t + i, octets) for i in range(2)] == [first, first + 1]


@pytest.mark.parametrize("octets", OCTETS)
def test_banks(octets):
    """Eight rows of an octet differ modulo 8, as the swizzle wants, and so do the 8 lanes of a pass over scales."""
    for octet in range(octets):
        assert {place(octet, c, octets) % 8 for c in range(8)} == set(range(8))
    for first in range(0, 32, 8):
        assert {scale_place(lane % 4, lane // 4, octets) % 8 for lane in range(first, first + 8)} == set(range(8))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("tile", [(rows, columns) for rows in TILE_ROWS for columns in TILE_COLUMNS])
def test_warps_share_every_tile(tile, groups):
    for tile_k in TILE_K:
        sizes = WarpTile(tile, None, groups, tile_k, SMEM)
        down, across = sizes.warps
        assert down * across <= WARPS // groups
        assert sizes.row_blocks * down * 16 == tile[0]
        assert sizes.spans * across * 8 * sizes.per_span == tile[1]
        assert sizes.sums * 32 * down * across == tile[0] * tile[1]
        assert sizes.smem_bytes <= SMEM
        assert sizes.consumers in (GROUP_WARPS, WARPS)
