"""tcgen05.mma and cp on whole CTAs: where operands come from and where results go.

Small integers make every product exact, so that a float64 matrix product is the expected result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from mma_operands import A_AT, B_AT, E2M1, ORIGIN, Cta, idesc, pack, scale_codes, scaled, small, unpadded

from ptxemu import numerics as nx
from ptxemu.errors import MemoryFault
from ptxemu.machine import swizzle as sw
from ptxemu.machine import tensorcore as tc
from ptxemu.machine.descriptors import InvalidDescriptor, MmaDescriptor, SharedMatrix

Array = npt.NDArray[Any]


@pytest.mark.parametrize("n", [8, 64, 120, 192, 256])
@pytest.mark.parametrize("accumulate", [False, True])
def test_nvfp4_one_cta(n: int, accumulate: bool) -> None:
    """Scales: row m at lane m % 32, column m / 32, byte = k block; D: lane = row, column = n."""
    rng, cta = np.random.default_rng(n), Cta()
    a, b = rng.integers(0, 16, (128, 64)), rng.integers(0, 16, (n, 64))
    sfa, sfb = scale_codes(rng, 128, 4), scale_codes(rng, n, 4)
    op = tc.Mma(
        d=32,
        a=cta.write_rows(A_AT, pack(a)),
        b=cta.write_rows(B_AT, pack(b)),
        accumulate=accumulate,
        scale_a=300,
        scale_b=308,
        block=16,
    )
    cta.write_scales(300, sfa)
    cta.write_scales(308, sfb)
    expected = scaled(E2M1[a], sfa) @ scaled(E2M1[b], sfb).T
    if accumulate:
        c = rng.integers(-99, 99, (128, n)).astype(np.float32)
        cta.memory.data[:, 32 : 32 + n] = c.view(np.uint32)
        expected += c
    tc.multiply(MmaDescriptor.decode("mxf4nvf4", idesc(128, n, a=1 << 7, b=1 << 10), 1), [cta.units], op)
    np.testing.assert_array_equal(cta.memory.data[:, 32 : 32 + n].view(np.float32), expected)
    assert (cta.memory.data[:, 32 + n : 300] == 0xFFFFFFFF).all()


@pytest.mark.parametrize(("m", "n"), [(256, 256), (256, 48), (128, 256), (128, 64)])
def test_nvfp4_pair_of_ctas(m: int, n: int) -> None:
    """Each CTA: its rows of A and half of B's; M=256 lane = row; M=128 columns from N/2 on at lanes 64 and up."""
    rng, ctas = np.random.default_rng(m + n), [Cta(), Cta()]
    a, b = rng.integers(0, 16, (m, 64)), rng.integers(0, 16, (n, 64))
    sfa, sfb = scale_codes(rng, m, 4), scale_codes(rng, n, 4)
    for side, cta in enumerate(ctas):
        rows, columns = np.split(a, 2)[side], np.split(b, 2)[side]
        desc_a, desc_b = cta.write_rows(A_AT, pack(rows)), cta.write_rows(B_AT, pack(columns))
        cta.write_scales(400, np.split(sfa, 2)[side])
        if m == 256:
            cta.write_scales(410, sfb)
        else:
            for half, quarters in ((sfb[: n // 2], slice(0, 64)), (sfb[n // 2 :], slice(64, 128))):
                cta.write_scales(430, half)
                cta.memory.data[quarters, 410:414] = cta.memory.data[quarters, 430:434]
    op = tc.Mma(d=0, a=desc_a, b=desc_b, accumulate=False, scale_a=400, scale_b=410, block=16)
    tc.multiply(MmaDescriptor.decode("mxf4nvf4", idesc(m, n, a=1 << 7, b=1 << 10), 2), [c.units for c in ctas], op)
    expected = scaled(E2M1[a], sfa) @ scaled(E2M1[b], sfb).T
    for side, cta in enumerate(ctas):
        part = np.split(expected, 2)[side]
        if m == 256:
            np.testing.assert_array_equal(cta.memory.data[:, :n].view(np.float32), part)
        else:
            got = cta.memory.data[:, : n // 2].view(np.float32)
            np.testing.assert_array_equal(got[:64], part[:, : n // 2])
            np.testing.assert_array_equal(got[64:], part[:, n // 2 :])


@pytest.mark.parametrize("first", [0, 2])
def test_block32_scales_take_two_bytes_at_the_scale_id(first: int) -> None:
    rng, cta = np.random.default_rng(first), Cta()
    a, b = rng.integers(0, 16, (128, 64)), rng.integers(0, 16, (160, 64))
    sfa, sfb = (rng.integers(125, 130, (rows, 2)).astype(np.uint8) for rows in (128, 160))
    cta.write_scales(300, sfa, first)
    cta.write_scales(308, sfb, first)
    desc = (cta.write_rows(A_AT, pack(a)), cta.write_rows(B_AT, pack(b)))
    bits = idesc(128, 160, a=1 << 7, b=1 << 10, scale=1 << 23, sfa=first << 29, sfb=first << 4)
    # The upper two bits of the addresses repeat the id.
    op = tc.Mma(0, *desc, accumulate=False, scale_a=300 | first << 30, scale_b=308 | first << 30, block=32)
    for kind in ("mxf4", "mxf4nvf4"):
        tc.multiply(MmaDescriptor.decode(kind, bits, 1), [cta.units], op)
        expected = scaled(E2M1[a], sfa, True) @ scaled(E2M1[b], sfb, True).T
        np.testing.assert_array_equal(cta.memory.data[:, :160].view(np.float32), expected)


@pytest.mark.parametrize("first", [0, 1, 2, 3])
@pytest.mark.parametrize(("a_type", "b_type"), [(0, 0), (1, 0), (5, 0), (0, 3), (4, 5)])
def test_mxf8f6f4_takes_one_scale_a_row_and_padded_narrow_types(first: int, a_type: int, b_type: int) -> None:
    formats = {0: nx.E4M3, 1: nx.E5M2, 3: nx.E2M3, 4: nx.E3M2, 5: nx.E2M1}
    fa, fb = formats[a_type], formats[b_type]
    rng, cta = np.random.default_rng(first), Cta()
    a, b = (nx.encode(f, rng.integers(-4, 5, (rows, 32)) / 2) for f, rows in ((fa, 128), (fb, 40)))
    sfa, sfb = (rng.integers(126, 129, (rows, 1)).astype(np.uint8) for rows in (128, 40))
    cta.write_scales(300, sfa, first)
    cta.write_scales(308, sfb, first)
    desc = (cta.write_rows(A_AT, unpadded(a, fa)), cta.write_rows(B_AT, unpadded(b, fb)))
    bits = idesc(128, 40, a=a_type << 7, b=b_type << 10, scale=1 << 23, sfa=first << 29, sfb=first << 4)
    op = tc.Mma(0, *desc, accumulate=False, scale_a=300, scale_b=308, block=32)
    tc.multiply(MmaDescriptor.decode("mxf8f6f4", bits, 1), [cta.units], op)
    expected = scaled(nx.decode(fa, a), sfa, True) @ scaled(nx.decode(fb, b), sfb, True).T
    np.testing.assert_array_equal(cta.memory.data[:, :40].view(np.float32), expected)


F16_CASES = [("f16", 0, np.float16), ("f16", 1, np.uint16), ("tf32", 2, np.uint32), ("f8f6f4", 0, np.uint8)]


@pytest.mark.parametrize(("kind", "code", "_dtype"), F16_CASES)
@pytest.mark.parametrize(("m", "group"), [(128, 1), (64, 1), (256, 2), (128, 2)])
def test_unscaled_kinds(kind: str, code: int, _dtype: Any, m: int, group: int) -> None:
    """1-CTA M=64: row m at lane m % 16 + 32 * (m / 16)."""
    rng, ctas = np.random.default_rng(m), [Cta() for _ in range(group)]
    k = {"f16": 16, "tf32": 8, "f8f6f4": 32}[kind]
    a, a_codes = small(rng, kind, code, (m, k))
    b, b_codes = small(rng, kind, code, (32, k))
    for side, cta in enumerate(ctas):
        desc_a = cta.write_rows(A_AT, np.split(a_codes, group)[side])
        desc_b = cta.write_rows(B_AT, np.split(b_codes, group)[side])
    bits = idesc(m, 32, d=1 << 4, a=code << 7, b=code << 10, neg=1 << 13)
    op = tc.Mma(0, desc_a, desc_b, accumulate=False)
    tc.multiply(MmaDescriptor.decode(kind, bits, group), [c.units for c in ctas], op)
    expected = -a @ b.T
    for side, cta in enumerate(ctas):
        part, got = np.split(expected, group)[side], cta.memory.data.view(np.float32)
        if m // group == 128:
            np.testing.assert_array_equal(got[:, :32], part)
        elif group == 2:
            np.testing.assert_array_equal(np.concatenate([got[:64, :16], got[64:, :16]], axis=1), part)
        else:
            row = np.arange(64)
            np.testing.assert_array_equal(got[row % 16 + 32 * (row // 16), :32], part)
            assert np.isnan(got[16:32, :32]).all()


def test_mn_major_operands() -> None:
    """Transpose bits: A and B stored with M and N contiguous, 128-byte swizzle, 64 f16 a row."""
    rng, cta = np.random.default_rng(0), Cta()
    a, b = rng.integers(-6, 7, (128, 16)), rng.integers(-6, 7, (64, 16))
    descriptors = []
    for at, values in ((A_AT, a), (B_AT, b)):
        codes = nx.encode(nx.F16, values).astype(np.uint16).T
        for atom in range(codes.shape[1] // 64):
            rows = np.ascontiguousarray(codes[:, 64 * atom : 64 * atom + 64])
            sw.scatter(sw.B128, cta.shared[at - ORIGIN + 2048 * atom :], at, rows)
        descriptors.append(SharedMatrix(at, 2048, 1024, sw.B128).encode())
    bits = idesc(128, 64, d=1 << 4, ta=1 << 15, tb=1 << 16)
    tc.multiply(MmaDescriptor.decode("f16", bits, 1), [cta.units], tc.Mma(0, *descriptors, accumulate=False))
    np.testing.assert_array_equal(cta.memory.data[:, :64].view(np.float32), a @ b.T)


@pytest.mark.parametrize("m", [128, 64])
def test_a_in_tensor_memory_is_packed_two_f16_a_column(m: int) -> None:
    rng, cta = np.random.default_rng(0), Cta()
    a, b = rng.integers(-6, 7, (m, 16)), rng.integers(-6, 7, (16, 16))
    row = np.arange(m)
    lanes = row if m == 128 else row % 16 + 32 * (row // 16)
    cta.memory.data[lanes, 100:108] = nx.encode(nx.F16, a).astype(np.uint16).view(np.uint32)
    desc = cta.write_rows(B_AT, nx.encode(nx.F16, b).astype(np.uint16))
    op = tc.Mma(0, 100, desc, accumulate=False, a_in_tmem=True)
    tc.multiply(MmaDescriptor.decode("f16", idesc(m, 16, d=1 << 4), 1), [cta.units], op)
    np.testing.assert_array_equal(cta.memory.data[lanes, :16].view(np.float32), a @ b.T)


def f16_operands(cta: Cta, value: float) -> tuple[int, int]:
    ones = nx.encode(nx.F16, np.full((128, 16), value)).astype(np.uint16)
    return cta.write_rows(A_AT, ones), cta.write_rows(B_AT, ones[:16])


def test_disabled_lanes_keep_their_contents() -> None:
    ctas = [Cta(), Cta()]
    for cta in ctas:
        desc = f16_operands(cta, 1.0)
    mask = 1 << 0 | 1 << 77 | 1 << (128 + 5)
    op = tc.Mma(0, *desc, accumulate=False, disabled=mask)
    tc.multiply(MmaDescriptor.decode("f16", idesc(256, 16, d=1 << 4), 2), [c.units for c in ctas], op)
    for side, off in ((0, [0, 77]), (1, [5])):
        kept = np.flatnonzero((ctas[side].memory.data[:, :16] == 0xFFFFFFFF).all(axis=1))
        np.testing.assert_array_equal(kept, off)


def test_f16_accumulators_take_the_low_half_of_a_word() -> None:
    cta = Cta()
    op = tc.Mma(0, *f16_operands(cta, 1.5), accumulate=True)
    cta.memory.data[:, :16] = 0xABCD0000 | int(nx.encode(nx.F16, 4.0))
    tc.multiply(MmaDescriptor.decode("f16", idesc(128, 16), 1), [cta.units], op)
    assert (cta.memory.data[:, :16] == int(nx.encode(nx.F16, 40.0))).all()


def test_scale_input_d_divides_the_accumulator() -> None:
    cta = Cta()
    op = tc.Mma(0, *f16_operands(cta, 1.0), accumulate=True, scale_d=3)
    cta.memory.data[:, :16] = np.float32(24).view(np.uint32)
    tc.multiply(MmaDescriptor.decode("f16", idesc(128, 16, d=1 << 4), 1), [cta.units], op)
    assert (cta.memory.data[:, :16].view(np.float32) == 19.0).all()


def nvfp4_ones(cta: Cta) -> tuple[MmaDescriptor, tc.Mma]:
    codes = np.full((128, 64), 2)
    op = tc.Mma(
        0,
        cta.write_rows(A_AT, pack(codes)),
        cta.write_rows(B_AT, pack(codes)),
        False,
        scale_a=300,
        scale_b=308,
        block=16,
    )
    cta.write_scales(300, np.full((128, 4), 0x38))
    cta.write_scales(308, np.full((128, 4), 0x38))
    return MmaDescriptor.decode("mxf4nvf4", idesc(128, 128, a=1 << 7, b=1 << 10), 1), op


def test_each_quarter_of_lanes_uses_its_own_copy_of_the_scales() -> None:
    """Scale factors are to be duplicated to all 32-lane partitions; a missing copy shows where it is missing."""
    cta = Cta()
    d, op = nvfp4_ones(cta)
    cta.memory.data[32:64, 308:312] = 0x40404040  # scales of B, twice as large
    cta.memory.data[96:128, 303] = 0x40404040
    tc.multiply(d, [cta.units], op)
    got = cta.memory.data[:, :128].view(np.float32)
    for quarter, expected in enumerate((64, 128, 64, 128)):
        assert (got[32 * quarter : 32 * quarter + 32] == expected).all()
    cta.memory.data[64:96, 308:312] = 0xFFFFFFFF
    tc.multiply(d, [cta.units], op)
    assert np.isnan(cta.memory.data[64:96, :128].view(np.float32)).all()


def test_k96_scales_go_on_in_the_next_group_of_columns() -> None:
    """Block b of row r: byte (id + b) % 4 of column r / 32 + (id + b) / 4 * G, G = 4, or 8 for N > 128."""
    rng, ctas = np.random.default_rng(0), [Cta(), Cta()]
    a, b = rng.integers(0, 16, (256, 96)), rng.integers(0, 16, (256, 96))
    for first in (0, 2):
        sfa, sfb = scale_codes(rng, 256, 6), scale_codes(rng, 256, 6)
        for side, cta in enumerate(ctas):
            desc_a = cta.write_rows(A_AT, pack(np.split(a, 2)[side]))
            desc_b = cta.write_rows(B_AT, pack(np.split(b, 2)[side]))
            cta.write_scales(400, np.split(sfa, 2)[side], first)
            cta.write_scales(410, sfb, first, stride=8)
        bits = idesc(256, 256, a=1 << 7, b=1 << 10, k96=1 << 31, sfa=first << 29, sfb=first << 4)
        op = tc.Mma(0, desc_a, desc_b, accumulate=False, scale_a=400, scale_b=410, block=16)
        tc.multiply(MmaDescriptor.decode("mxf4nvf4", bits, 2), [c.units for c in ctas], op)
        expected = scaled(E2M1[a], sfa) @ scaled(E2M1[b], sfb).T
        for side, cta in enumerate(ctas):
            np.testing.assert_array_equal(cta.memory.data[:, :256].view(np.float32), np.split(expected, 2)[side])


def test_cp_32x128b_warpx4_moves_a_scale_atom_to_all_quarters() -> None:
    """A 512-byte atom, 32 rows of 16 bytes: row r to lane r of every quarter, 4 columns; each CTA from its own."""
    ctas = [Cta(), Cta()]
    for side, cta in enumerate(ctas):
        cta.shared[0x800 - ORIGIN : 0xA00 - ORIGIN] = np.random.default_rng(side).integers(0, 256, 512, dtype=np.uint8)
    descriptor = SharedMatrix(0x800, 16, 128, sw.NONE).encode()
    tc.copy("32x128b", "warpx4", [c.units for c in ctas], 300, descriptor)
    for cta in ctas:
        atom = cta.shared[0x800 - ORIGIN : 0xA00 - ORIGIN].view(np.uint32).reshape(32, 4)
        np.testing.assert_array_equal(cta.memory.data[:, 300:304], np.tile(atom, (4, 1)))


@pytest.mark.parametrize("shape", ["128x256b", "128x128b", "64x128b"])
def test_cp_of_k_major_rows(shape: str) -> None:
    cta = Cta()
    rows = np.random.default_rng(0).integers(0, 1 << 32, (128, 32), dtype=np.uint32)
    cta.write_rows(A_AT, rows)
    descriptor = SharedMatrix(A_AT + 64, 16, 1024, sw.B128).encode()
    tc.copy(shape, "warpx2::02_13" if shape == "64x128b" else "", [cta.units], 8, descriptor)
    if shape == "64x128b":
        half = rows[:, 16:20]
        expected = np.concatenate([half[:32], half[:32], half[32:64], half[32:64]])
    else:
        expected = rows[:, 16:24] if shape == "128x256b" else rows[:, 16:20]
    np.testing.assert_array_equal(cta.memory.data[:, 8 : 8 + expected.shape[1]], expected)


def test_a_descriptor_that_a_kind_does_not_take() -> None:
    cta = Cta()
    d, op = nvfp4_ones(cta)
    with pytest.raises(MemoryFault, match=r"of D: lane 16, allowed are \(0,\)"):
        tc.multiply(d, [cta.units], tc.Mma(16 << 16, op.a, op.b, False, scale_a=300, scale_b=308, block=16))
    with pytest.raises(MemoryFault, match="leave its 128 by 512"):
        tc.multiply(d, [cta.units], tc.Mma(400, op.a, op.b, False, scale_a=300, scale_b=308, block=16))
    with pytest.raises(MemoryFault, match="scales of B: lane 4"):
        tc.multiply(d, [cta.units], tc.Mma(0, op.a, op.b, False, scale_a=300, scale_b=4 << 16, block=16))
    bits = idesc(128, 64, a=5 << 7, scale=1 << 23)
    with pytest.raises(InvalidDescriptor, match="not modelled"):
        tc.multiply(
            MmaDescriptor.decode("mxf8f6f4", bits, 1), [cta.units], tc.Mma(0, 0, op.b, False, True, 300, 308, 32)
        )
