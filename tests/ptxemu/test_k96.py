"""sm_103a: eight K = 96 MMAs over a K tile of 768, with its buffers and scales as kernels lay them out."""

from __future__ import annotations

import numpy as np
import pytest
from mma_operands import E2M1, ORIGIN, Cta, idesc, pack, scale_codes, scaled

import ptxemu
from ptxemu.machine import swizzle as sw
from ptxemu.machine import tensorcore as tc
from ptxemu.machine.descriptors import MmaDescriptor, SharedMatrix

K = 768
BUFFER_K = 256  # elements of a row of 128 bytes
A_AT, SIZE = 0x400, 0x4000  # three buffers of 128 rows
B_AT = A_AT + 3 * SIZE
SCALES_AT = 0x1F000
# Of each MMA: the buffer that it starts in, where in 16-byte units, and the buffer in which rows go on.
STEPS = [(0, 0, 0), (0, 3, 0), (0, 6, 1), (1, 1, 1), (1, 4, 1), (1, 7, 2), (2, 2, 2), (2, 5, 2)]
SFA, SFB = 460, 472


def buffers(cta: Cta, at: int, codes: np.ndarray) -> None:
    """Rows of 768 elements as three buffers of rows of 128 bytes."""
    for i in range(3):
        cta.write_rows(at + i * SIZE, pack(codes[:, i * BUFFER_K : (i + 1) * BUFFER_K]))


def descriptor(at: int, step: tuple[int, int, int]) -> int:
    first, start, following = step
    return SharedMatrix(at + first * SIZE + 16 * start, at + following * SIZE, 1024, sw.B128, absolute=True).encode()


def load_scales(cta: Cta, column: int, codes: np.ndarray) -> None:
    """Twelve blocks of each row, copied as atoms of 128 rows x 4 blocks: [row % 32][row / 32][block]."""
    rows = codes.shape[0]
    groups = -(-rows // 128)
    padded = np.zeros((128 * groups, 12), np.uint8)
    padded[:rows] = codes
    for block in range(3):
        for group in range(groups):
            atom = padded[128 * group : 128 * (group + 1), 4 * block : 4 * block + 4]
            raw = np.ascontiguousarray(atom.reshape(4, 32, 4).transpose(1, 0, 2)).reshape(-1)
            cta.shared[SCALES_AT - ORIGIN : SCALES_AT - ORIGIN + 512] = raw
            source = SharedMatrix(SCALES_AT, 16, 128, sw.NONE).encode()
            tc.copy("32x128b", "warpx4", [cta.units], column + 4 * (block * groups + group), source)


@pytest.mark.parametrize(("m", "n", "group"), [(128, 64, 1), (128, 128, 1), (256, 128, 2), (256, 256, 2)])
def test_a_tile_of_768(m: int, n: int, group: int) -> None:
    rng, ctas = np.random.default_rng(n), [Cta() for _ in range(group)]
    a, b = rng.integers(0, 16, (m, K)), rng.integers(0, 16, (n, K))
    sfa, sfb = scale_codes(rng, m, K // 16), scale_codes(rng, n, K // 16)
    for side, cta in enumerate(ctas):
        buffers(cta, A_AT, np.split(a, group)[side])
        buffers(cta, B_AT, np.split(b, group)[side])
    for i, step in enumerate(STEPS):
        if i % 2 == 0:
            blocks = slice(6 * i, 6 * i + 12)
            for side, cta in enumerate(ctas):
                load_scales(cta, SFA, np.split(sfa, group)[side][:, blocks])
                load_scales(cta, SFB, sfb[:, blocks])
        first, stride_b = 2 * (i % 2), 8 if n > 128 else 4
        bits = idesc(m, n, a=1 << 7, b=1 << 10, k96=1 << 31, sfa=first << 29, sfb=first << 4)
        op = tc.Mma(
            d=0,
            a=descriptor(A_AT, step),
            b=descriptor(B_AT, step),
            accumulate=i > 0,
            scale_a=SFA + 4 * (i % 2) | first << 30,
            scale_b=SFB + stride_b * (i % 2) | first << 30,
            block=16,
        )
        tc.multiply(MmaDescriptor.decode("mxf4nvf4", bits, group), [cta.units for cta in ctas], op)
    expected = scaled(E2M1[a], sfa) @ scaled(E2M1[b], sfb).T
    for side, cta in enumerate(ctas):
        np.testing.assert_array_equal(cta.memory.data[:, :n].view(np.float32), np.split(expected, group)[side])


@pytest.mark.parametrize(
    ("target", "message"), [("sm_100a", "K = 96 is on sm_103a only, not sm_100a"), ("sm_103a", "shared address")]
)
def test_only_sm_103a_has_it(target: str, message: str) -> None:
    bits = idesc(128, 64, a=1 << 7, b=1 << 10, k96=1 << 31)
    text = f"""
    .version 8.8
    .target {target}
    .address_size 64
    .visible .entry k() {{
        .reg .b32 r<4>;
        .reg .b64 d<2>;
        .reg .pred p;
        mov.b32 r0, {bits};
        mov.b64 d0, {1 << 46 | 2 << 61 | 64 << 32};
        setp.eq.u32 p, r0, 0;
        tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [0], d0, d0, r0, [0], [0], p;
    }}"""
    with pytest.raises(ptxemu.Error, match=message):
        ptxemu.Device(target).launch(text)
