"""The layouts that docs/sm120.md derives, evaluated: composed as it says, and held to what the instruction takes.

A layout is written as CuTe writes it, shape : strides, the first mode of a nest counting fastest.
"""

import ast
import re
from pathlib import Path

import numpy as np
import pytest

import ptxemu
from blockscale.reference import E2M1, E4M3

DOCUMENT = (Path(__file__).parents[3] / "docs/sm120.md").read_text()
BLOCKS, K, NAN = 4, 64, 0x7F
PTX = """
.version 8.8
.target sm_120a
.address_size 64
.visible .entry product(.param .u64 words, .param .u64 sums)
{
.reg .b32 t, a<4>, b<2>, sa, sb;
.reg .b64 at, out, offset;
.reg .f32 d<4>, zero;
mov.u32 t, %tid.x;
mul.wide.u32 offset, t, 32;
ld.param.u64 at, [words];
add.u64 at, at, offset;
ld.global.v4.b32 {a0, a1, a2, a3}, [at];
ld.global.v4.b32 {b0, b1, sa, sb}, [at+16];
mov.f32 zero, 0f00000000;
mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3
 {d0, d1, d2, d3}, {a0, a1, a2, a3}, {b0, b1}, {zero, zero, zero, zero}, sa, {0, HALF}, sb, {0, LANE};
ld.param.u64 out, [sums];
mul.wide.u32 offset, t, 16;
add.u64 out, out, offset;
st.global.v4.f32 [out], {d0, d1, d2, d3};
ret;
}
"""


def written(name):
    """The layout that the document gives by this name."""
    found = re.findall(rf"^{re.escape(name)} += (\(.*\)) : (\(.*\))$", DOCUMENT, re.MULTILINE)
    assert len(found) == 1, name
    return tuple(map(ast.literal_eval, found[0]))


def size(shape):
    return int(np.prod([size(mode) for mode in shape])) if isinstance(shape, tuple) else shape


def offset(layout, index):
    """Of the element with this number in a mode, or of a coordinate with a number for each mode."""
    shape, strides = layout
    if not isinstance(shape, tuple):
        return index * strides
    if isinstance(index, tuple):
        return sum(offset(mode, i) for mode, i in zip(zip(shape, strides, strict=True), index, strict=True))
    total = 0
    for mode in zip(shape, strides, strict=True):
        total += offset(mode, index % size(mode[0]))
        index //= size(mode[0])
    return total


@pytest.mark.parametrize(("operand", "rows"), [("A", 16), ("B", 8)])
def test_the_composition(operand, rows):
    """Which row and k a value is for, and where its scale lies among those of the tile: every lane, every value."""
    atom, tensor, composed = (written(f"{kind} of {operand}") for kind in ("lanes", "memory", "both"))
    assert [size(mode) for mode in atom[0]] == [32, K]
    assert [size(mode) for mode in composed[0]] == [32, K]
    seen = set()
    for lane in range(32):
        for value in range(K):
            k, row = divmod(offset(atom, (lane, value)), rows)
            assert k == value
            assert offset(tensor, (row, k)) == offset(composed, (lane, value)) == BLOCKS * row + k // 16
            seen.add(row)
    assert seen == set(range(rows))


def lanes(operand, scales, read):
    """A word of scales a lane, from where the layout says; NaN in the lanes that are not read."""
    layout = written(f"both of {operand}")
    words = [[scales.flat[offset(layout, (lane, 16 * block))] for block in range(BLOCKS)] for lane in range(32)]
    kept = np.where(np.isin(np.arange(32) % 4, read)[:, None], words, NAN).astype(np.uint8)
    return np.ascontiguousarray(kept).view(np.uint32)[:, 0]


def registers(codes, operand):
    """Eight codes a register, lane by lane, by the document's table."""
    packed = np.zeros((32, 4 if operand == "A" else 2), np.uint32)
    for lane in range(32):
        g, t = divmod(lane, 4)
        for r in range(packed.shape[1]):
            row, k = (g + 8 * (r % 2), 8 * t + 32 * (r // 2)) if operand == "A" else (g, 8 * t + 32 * r)
            for i in range(8):
                packed[lane, r] |= np.uint32(codes[row, k + i]) << np.uint32(4 * i)
    return packed


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("lane", range(4))
def test_the_instruction_multiplies_by_them(half, lane):
    """Every code, scales of every row and block a different one; products and their sums are exact."""
    draw = np.random.default_rng(4 * half + lane)
    a, b = (draw.integers(0, 16, (rows, K), np.uint8) for rows in (16, 8))
    powers = draw.permutation(np.resize(np.arange(3, 9) * 8, 24 * BLOCKS)).astype(np.uint8).reshape(24, BLOCKS)
    sfa, sfb = powers[:16], powers[16:]  # powers of two
    words = np.zeros((32, 8), np.uint32)
    words[:, :4], words[:, 4:6] = registers(a, "A"), registers(b, "B")
    words[:, 6] = lanes("A", sfa, [2 * half, 2 * half + 1])
    words[:, 7] = lanes("B", sfb, [lane])
    sums = np.zeros((32, 4), np.float32)
    text = PTX.replace("HALF", str(half)).replace("LANE", str(lane))
    ptxemu.Device("sm_120a").launch(text, block=(32, 1, 1), args=[words, sums])
    expected = (E2M1[a] * E4M3[sfa].repeat(16, 1)) @ (E2M1[b] * E4M3[sfb].repeat(16, 1)).T
    for at in range(32):
        g, t = divmod(at, 4)
        for i in range(4):
            assert sums[at, i] == expected[g + 8 * (i // 2), 2 * t + i % 2]


@pytest.mark.parametrize(("operand", "copies"), [("A", 2), ("B", 4)])
def test_copies_of_a_scale_in_a_warp(operand, copies):
    """A mode of stride 0 among the lanes: as many lanes have the same word."""
    layout = written(f"both of {operand}")
    words = [offset(layout, (lane, 0)) for lane in range(32)]
    assert sorted(words) == sorted(list(range(0, 64 if operand == "A" else 32, 4)) * copies)
