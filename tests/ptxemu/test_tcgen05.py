"""The tcgen05 instructions: a case for each form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mma_operands import A_AT, B_AT, E2M1, Cta, idesc, pack, scale_codes, scaled, small, unpadded
from sync_kernel import SCHEDULES
from tensor_kernel import ROOM, WAIT, Array, launch

from ptxemu import Deadlock, Device, MemoryFault, numerics
from ptxemu.isa.engine import forms
from ptxemu.machine import swizzle as sw
from ptxemu.machine.descriptors import InvalidDescriptor, SharedMatrix
from ptxemu.machine.tmem import fragment

SCALES_AT = 0xE400  # two atoms for A's scales, two for B's
SFA, SFB = 300, 308


def names(count: int) -> str:
    return "{" + ", ".join(f"v{i}" for i in range(count)) + "}"


# Loads and stores

FILL_LANES = "\n".join(
    [f"mad.lo.u32 v{i}, r0, 65536, {i};" for i in range(8)]
    + [
        "\n".join(
            [f"tcgen05.st.sync.aligned.32x32b.x8.b32 [r3+{first}], {names(8)};"]
            + [f"add.u32 v{i}, v{i}, 8;" for i in range(8)]
        )
        for first in range(0, 256, 8)
    ]
    + ["tcgen05.wait::st.sync.aligned;"]
)  # word (lane, column) = lane << 16 | column


def store_registers(count: int) -> str:
    """v0.. to out[thread][register]."""
    text = [f"mul.lo.u32 r20, r0, {4 * count};", "cvt.u64.u32 d11, r20;", "add.u64 d11, d1, d11;"]
    return "\n".join(text + [f"st.global.u32 [d11+{4 * i}], v{i};" for i in range(count)])


REPEATS = [1, 2, 4, 8, 16, 32, 64, 128]
SHAPES = [("32x32b", 1, 128), ("16x64b", 1, 128), ("16x128b", 2, 64), ("16x256b", 4, 32)]
LAYOUTS = [(shape, n) for shape, _, most in SHAPES for n in REPEATS if n <= most]


@pytest.mark.parametrize(("shape", "repeat"), LAYOUTS)
def test_load(shape: str, repeat: int) -> None:
    part = fragment(shape, repeat)
    count = part.registers
    out = np.zeros((128, count), np.uint32)
    one = names(count) if (shape, repeat) != ("32x32b", 1) else "v0"
    form = f"tcgen05.ld.sync.aligned.{shape}.x{repeat}.b32 {one}, [r3];\n tcgen05.wait::ld.sync.aligned;"
    launch(FILL_LANES + form + store_registers(count), out=out)
    for warp in range(4):
        expected = (32 * warp + part.lane) << 16 | part.column
        np.testing.assert_array_equal(out[32 * warp : 32 * warp + 32], expected)


@pytest.mark.parametrize("repeat", [1, 4, 128])
def test_load_of_two_halves(repeat: int) -> None:
    out = np.zeros((128, repeat), np.uint32)
    form = f"tcgen05.ld.sync.aligned.16x32bx2.x{repeat}.b32 {names(repeat)}, [r3+8], 64;"
    launch(FILL_LANES + form + store_registers(repeat), out=out)
    t = np.arange(128)[:, None]
    lane, column = t // 32 * 32 + t % 16, 8 + np.arange(repeat)[None, :] + np.where(t % 32 >= 16, 64, 0)
    np.testing.assert_array_equal(out, lane << 16 | column)


def test_load_packs_two_columns() -> None:
    out = np.zeros((128, 4), np.uint32)
    form = f"tcgen05.ld.sync.aligned.32x32b.x4.pack::16b.b32 {names(4)}, [r3+6];"
    launch(FILL_LANES + form + store_registers(4), out=out)
    first = 6 + 2 * np.arange(4)
    np.testing.assert_array_equal(out, np.tile(first | (first + 1) << 16, (128, 1)))


def thread_values(count: int) -> str:
    return "\n".join(f"mad.lo.u32 v{i}, r0, 65536, {i};" for i in range(count))


@pytest.mark.parametrize(("shape", "repeat"), [(s, n) for s, n in LAYOUTS if n in (1, 2, 8)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_store(shape: str, repeat: int, schedule: str) -> None:
    part = fragment(shape, repeat)
    count = part.registers
    one = names(count) if (shape, repeat) != ("32x32b", 1) else "v0"
    form = f"tcgen05.st.sync.aligned.{shape}.x{repeat}.b32 [r3], {one};\n tcgen05.wait::st.sync.aligned;"
    got = launch(thread_values(count) + form, columns=64, schedule=schedule)[0]
    expected = np.full((4, 32, 64), 0xFFFFFFFF, np.uint32)
    for warp in range(4):
        expected[warp][part.lane, part.column] = (32 * warp + np.arange(32))[:, None] << 16 | np.arange(count)
    np.testing.assert_array_equal(got, expected.reshape(128, 64))


def test_store_of_two_halves_and_unpacked() -> None:
    body = f"""
    {thread_values(4)}
    tcgen05.st.sync.aligned.16x32bx2.x4.b32 [r3], 8, {names(4)};
    tcgen05.st.sync.aligned.32x32b.x2.unpack::16b.b32 [r3+16], {names(2)};
    tcgen05.wait::st.sync.aligned;
    """
    got = launch(body, columns=24)[0]
    lane = np.arange(128)
    for r in range(4):
        assert (got[lane % 32 < 16, r] == (lane[lane % 32 < 16] << 16 | r)).all()
        assert (got[lane % 32 < 16, 8 + r] == ((lane[lane % 32 < 16] + 16) << 16 | r)).all()
    np.testing.assert_array_equal(got[:, 16:20], np.stack([0 * lane, lane, 0 * lane + 1, lane], axis=1))


def test_a_store_is_only_sure_after_wait_st() -> None:
    """As late as the rules allow, a load that did not wait sees the old contents."""
    out = np.zeros((128, 1), np.uint32)
    body = f"""
    mov.u32 v0, 7;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [r3], v0;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 v0, [r3];
    {store_registers(1)}
    tcgen05.wait::st.sync.aligned;
    """
    launch(body, out=out, schedule="lazy")
    assert (out == 0xFFFFFFFF).all()
    with pytest.raises(MemoryFault, match=r"is not allocated\n.*tcgen05.st"):  # it comes after the deallocation
        launch(body.replace("tcgen05.wait::st.sync.aligned;", ""), out=out, schedule="lazy")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 v0, [r2];", "warp [123] reaches lanes .*, not 0 to 31"),
        (
            "tcgen05.ld.sync.aligned.16x64b.x1.b32 {v0}, [r3+1310720];",
            "reaches lanes .*, not (20 to 35|52 to 67|84 to 99|116 to 131)",
        ),
        ("tcgen05.ld.sync.aligned.32x32b.x4.b32 {v0, v1}, [r3];", "takes 4 registers, not 2"),
        ("tcgen05.ld.sync.aligned.32x32b.x8.b32 {v0,v1,v2,v3,v4,v5,v6,v7}, [r3+508];", "leave its 128 by 512"),
        ("add.u32 r3, r3, r5;\ntcgen05.ld.sync.aligned.32x32b.x1.b32 v0, [r3];", "different values of the address"),
    ],
)
def test_what_a_load_may_not_do(form: str, message: str) -> None:
    with pytest.raises(MemoryFault, match=message):
        launch(form)


# Allocation

ALLOCATION = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out)
{{
    .shared .align 8 .b32 slot[8];
    .reg .pred p;
    .reg .b32 r<20>;
    .reg .b64 d<4>;
    ld.param.u64 d1, [out];
    mov.u32 r1, %cluster_ctarank;
    mov.u32 r3, slot;
    setp.eq.u32 p, r1, 0;
    {body}
    ret;
}}
"""


def allocate(body: str, *, cluster: int = 1, warps: int = 1, schedule: str = "lazy") -> Array:
    out = np.zeros(16, np.uint32)
    device = Device("sm_100a", schedule=schedule)
    shape = {"grid": (cluster, 1, 1), "cluster": (cluster, 1, 1), "block": (32 * warps, 1, 1)}
    device.launch(ALLOCATION.format(body=body), args=[out], **shape)
    return out


def test_allocations_lie_side_by_side_and_are_freed() -> None:
    body = """
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 256;
    tcgen05.alloc.cta_group::1.sync.aligned.b32 [r3+4], 128;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    ld.shared.u32 r4, [slot];
    ld.shared.u32 r5, [slot+4];
    st.global.u32 [d1], r4;
    st.global.u32 [d1+4], r5;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 r4, 256;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 r5, 128;
    """
    generic = body.replace("[r3+4], 128", "[d2], 128")
    setup = "cvt.u64.u32 d2, r3;\n cvta.shared.u64 d2, d2;\n add.u64 d2, d2, 4;"
    assert allocate(setup + generic)[:2].tolist() == [0, 256]


def test_alloc_waits_until_another_warp_frees_columns() -> None:
    body = """
    mov.u32 r6, %tid.x;
    setp.ge.u32 p, r6, 32;
    @p bra SECOND;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 512;
    bar.sync 0;
    ld.shared.u32 r4, [slot];
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 r4, 512;
    bra END;
SECOND:
    bar.sync 0;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot+4], 512;
    mov.u32 r5, 1;
    st.global.u32 [d1], r5;
    ld.shared.u32 r4, [slot+4];
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 r4, 512;
END:
    """
    assert allocate(body, warps=2)[0] == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_waiting_allocations_get_room_one_after_the_other(schedule: str) -> None:
    """Four warps, room for one at a time."""
    body = """
    mov.u32 r6, %tid.x;
    shr.u32 r7, r6, 5;
    mad.lo.u32 r3, r7, 4, r3;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [r3], 512;
    ld.shared.u32 r4, [r3];
    atom.global.add.u32 r5, [d1], 1;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 r4, 512;
    """
    assert allocate(body, warps=4, schedule=schedule)[0] == 128


def test_alloc_with_no_room_ever_is_a_deadlock() -> None:
    twice = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 512;\n" * 2
    with pytest.raises(Deadlock, match="waits for room"):
        allocate(twice)


PAIR = """
    tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [slot], 128;
    tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;
    ld.shared.u32 r4, [slot];
    {between}
    tcgen05.dealloc.cta_group::2.sync.aligned.b32 r4, 128;
"""


def test_a_pair_allocates_and_frees_together() -> None:
    allocate(PAIR.format(between=""), cluster=2)
    with pytest.raises(Deadlock, match=r"tcgen05.alloc of 128 columns with cta_group::2 .*peer CTA"):
        allocate("@!p bra END;" + PAIR.format(between="") + "END:", cluster=2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 48;", "power of two"),
        ("tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [slot], 64;", "has no peer"),
        (
            "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 64;",
            "after tcgen05.relinquish",
        ),
        ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 0, 32;", "allocated is nothing"),
        (
            "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 64;\n"
            "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;",
            "after cta_group::1",
        ),
    ],
)
def test_what_allocation_forbids(body: str, message: str) -> None:
    with pytest.raises(MemoryFault, match=message):
        allocate(body)


# Copies and MMAs


def constants(**values: int) -> str:
    return "\n".join(f"mov.b{64 if name[0] == 'd' else 32} {name}, {value};" for name, value in values.items())


COMMIT = "@one tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];"


@pytest.mark.parametrize(
    ("shape", "multicast", "rows"),
    [
        ("128x256b", "", [0, 32, 64, 96]),
        ("128x128b", "", [0, 32, 64, 96]),
        ("64x128b", ".warpx2::02_13", [0, 0, 32, 32]),
        ("64x128b", ".warpx2::01_23", [0, 32, 0, 32]),
        ("32x128b", ".warpx4", [0, 0, 0, 0]),
    ],
)
def test_cp(shape: str, multicast: str, rows: list[int]) -> None:
    image = np.random.default_rng(0).integers(0, 256, (1, ROOM), dtype=np.uint8)
    matrix = SharedMatrix(A_AT, 2048, 128, sw.NONE).encode()
    form = f"@one tcgen05.cp.cta_group::1.{shape}{multicast} [r2], d20;"
    got = launch(constants(d20=matrix) + form + COMMIT + WAIT, image)[0]
    words = 8 if "256" in shape else 4
    for quarter, first in enumerate(rows):
        for lane in (0, 7, 8, 31):
            at = (first + lane) // 8 * 128 + (first + lane) % 8 * 16
            granules = [image[0, at : at + 16], image[0, at + 2048 : at + 2064]]
            expected = np.concatenate(granules).view(np.uint32)[:words]
            np.testing.assert_array_equal(got[32 * quarter + lane, :words], expected)


@pytest.mark.parametrize("form", ["tcgen05.shift.cta_group::1.down", "tcgen05.shift.down.cta_group::1"])
def test_shift(form: str) -> None:
    """31 lanes of a quarter move down by one, 8 columns; then a store may fill the first."""
    body = f"""
    {FILL_LANES}
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    add.u32 r20, r2, {32 << 16 | 4};
    @one {form} [r20];
    {COMMIT} {WAIT}
    """
    got = launch(body, columns=16)[0]
    expected = np.arange(128)[:, None] << 16 | np.arange(16)[None, :]
    expected[33:64, 4:12] = expected[32:63, 4:12].copy()
    np.testing.assert_array_equal(got, expected)
    with pytest.raises(MemoryFault, match=r"tcgen05.shift: lane 16, allowed are \(0, 32, 64, 96\)"):
        launch(body.replace(str(32 << 16 | 4), str(16 << 16)))


def put_scales(image: Array, at: int, codes: Array, first: int = 0) -> None:
    """Scale atoms of 512 bytes: (row % 32) * 16 + row / 32 * 4 + block."""
    for row, scales in enumerate(codes):
        start = at - 0x400 + row // 128 * 512 + row % 32 * 16 + row % 128 // 32 * 4 + first
        image[start : start + len(scales)] = scales


def copy_scales(group: int, n: int) -> str:
    """One atom of A's scales, one or two of B's."""
    lines = []
    for i, column in enumerate([SFA, SFB, SFB + 4][: 2 + (n > 128)]):
        matrix = SharedMatrix(SCALES_AT + (0, 1024, 1536)[i], 16, 128, sw.NONE).encode()
        lines += [f"mov.b64 d{21 + i}, {matrix};", f"add.u32 r{30 + i}, r2, {column};"]
        lines.append(f"@one tcgen05.cp.cta_group::{group}.32x128b.warpx4 [r{30 + i}], d{21 + i};")
    return "\n".join(lines)


def image_of(cta: Cta, sfa: Array | None = None, sfb: Array | None = None, first: int = 0) -> Array:
    image = cta.shared[:ROOM].copy()
    for at, codes in ((SCALES_AT, sfa), (SCALES_AT + 1024, sfb)):
        if codes is not None:
            put_scales(image, at, codes, first)
    return image


SCALED_FORMS = [
    "mxf4nvf4.block_scale.block16",
    "mxf4nvf4.block_scale.scale_vec::4X.collector::a::discard",
    "mxf4nvf4.block_scale.block32.collector::a::lastuse",
    "mxf4nvf4.block_scale.scale_vec::2X",
    "mxf4.block_scale",
    "mxf4.block_scale.block32.collector::a::fill",
    "mxf4.block_scale.scale_vec::2X.collector::a::use",
]


@pytest.mark.parametrize("form", SCALED_FORMS)
@pytest.mark.parametrize("group", [1, 2])
def test_fp4_mma(form: str, group: int) -> None:
    """Twice: first D is replaced, then accumulated."""
    m, n, e8m0 = 128 * group, 160, "block16" not in form and "4X" not in form
    rng, count = np.random.default_rng(0), 2 if e8m0 else 4
    a, b = rng.integers(0, 16, (m, 64)), rng.integers(0, 16, (n, 64))
    if e8m0:
        sfa, sfb = (rng.integers(125, 130, (rows, count)).astype(np.uint8) for rows in (m, n))
    else:
        sfa, sfb = scale_codes(rng, m, count), scale_codes(rng, n, count)
    images = []
    for side in range(group):
        cta = Cta()
        desc_a = cta.write_rows(A_AT, pack(np.split(a, group)[side]))
        desc_b = cta.write_rows(B_AT, pack(np.split(b, group)[side]))
        images.append(image_of(cta, np.split(sfa, group)[side], sfb))
    bits = idesc(m, n, a=1 << 7, b=1 << 10, scale=e8m0 << 23)
    mma = f"tcgen05.mma.cta_group::{group}.kind::{form} [r2], d10, d11, r40, [r30], [r31], accumulate;\n"
    commit = f"""
    mov.b16 h0, {(1 << group) - 1};
    @one tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [bar], h0;
    """
    body = f"""
    {constants(d10=desc_a, d11=desc_b, r40=bits)}
    {copy_scales(group, n)}
    setp.ne.u32 accumulate, r2, r2;
    @one {mma}
    setp.eq.u32 accumulate, r2, r2;
    @one {mma}
    {commit} {WAIT}
    """
    got = launch(body, np.stack(images), columns=n, group=group, cluster=group).view(np.float32)
    expected = 2 * (scaled(E2M1[a], sfa, e8m0) @ scaled(E2M1[b], sfb, e8m0).T)
    np.testing.assert_array_equal(got.reshape(m, n), expected)


@pytest.mark.parametrize(
    "form", ["mxf8f6f4.block_scale", "mxf8f6f4.block_scale.block32", "mxf8f6f4.block_scale.scale_vec::1X"]
)
@pytest.mark.parametrize("group", [1, 2])
def test_fp8_mma(form: str, group: int) -> None:
    m, n, rng, first = 128 * group, 48, np.random.default_rng(1), 3
    a, b = (
        numerics.encode(f, rng.integers(-4, 5, (rows, 32)) / 2) for f, rows in ((numerics.E4M3, m), (numerics.E2M1, n))
    )
    sfa, sfb = (rng.integers(125, 130, (rows, 1)).astype(np.uint8) for rows in (m, n))
    images = []
    for side in range(group):
        cta = Cta()
        desc_a = cta.write_rows(A_AT, unpadded(np.split(a, group)[side], numerics.E4M3))
        desc_b = cta.write_rows(B_AT, unpadded(np.split(b, group)[side], numerics.E2M1))
        images.append(image_of(cta, np.split(sfa, group)[side], sfb, first))
    bits = idesc(m, n, b=5 << 10, scale=1 << 23, sfa=first << 29, sfb=first << 4)
    body = f"""
    {constants(d10=desc_a, d11=desc_b, r40=bits)}
    {copy_scales(group, n)}
    setp.ne.u32 accumulate, r2, r2;
    @one tcgen05.mma.cta_group::{group}.kind::{form} [r2], d10, d11, r40, [r30], [r31], accumulate;
    mov.b16 h0, {(1 << group) - 1};
    @one tcgen05.commit.cta_group::{group}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [bar], h0;
    {WAIT}
    """
    got = launch(body, np.stack(images), columns=n, group=group, cluster=group).view(np.float32)
    left, right = numerics.decode(numerics.E4M3, a), numerics.decode(numerics.E2M1, b)
    np.testing.assert_array_equal(got.reshape(m, n), scaled(left, sfa, True) @ scaled(right, sfb, True).T)


PLAIN = [("f16", 0, 16), ("f16", 1, 16), ("tf32", 2, 8), ("f8f6f4", 0, 32)]


def plain_operands(kind: str, code: int, k: int, m: int, n: int) -> tuple[Array, Array, Array, int, int, int]:
    rng, cta = np.random.default_rng(2), Cta()
    a, a_codes = small(rng, kind, code, (m, k))
    b, b_codes = small(rng, kind, code, (n, k))
    descriptors = cta.write_rows(A_AT, a_codes), cta.write_rows(B_AT, b_codes)
    return a, b, cta.shared[None, :ROOM].copy(), *descriptors, idesc(m, n, d=1 << 4, a=code << 7, b=code << 10)


@pytest.mark.parametrize(("kind", "code", "k"), PLAIN)
@pytest.mark.parametrize("disabled", [True, False])
@pytest.mark.parametrize("collector", ["", ".collector::a::discard"])
def test_plain_mma(kind: str, code: int, k: int, disabled: bool, collector: str) -> None:
    a, b, image, desc_a, desc_b, bits = plain_operands(kind, code, k, 128, 24)
    mask = "{r41, r42, r43, r44}, " if disabled else ""
    body = f"""
    {constants(d10=desc_a, d11=desc_b, r40=bits, r41=1, r42=0, r43=0x80000000, r44=0)}
    setp.ne.u32 accumulate, r2, r2;
    @one tcgen05.mma.cta_group::1.kind::{kind}{collector} [r2], d10, d11, r40, {mask}accumulate;
    {COMMIT} {WAIT}
    """
    got = launch(body, image, columns=24)[0]
    kept = [0, 95] if disabled else []
    assert (got[kept] == 0xFFFFFFFF).all()
    rows = np.setdiff1d(np.arange(128), kept)
    np.testing.assert_array_equal(got[rows].view(np.float32), (a @ b.T)[rows])


def test_plain_mma_of_a_pair() -> None:
    a, b, _, desc_a, desc_b, bits = plain_operands("f16", 0, 16, 256, 32)
    images = []
    for side in range(2):
        cta = Cta()
        for at, values in ((A_AT, a), (B_AT, b)):
            cta.write_rows(at, numerics.encode(numerics.F16, np.split(values, 2)[side]).astype(np.uint16))
        images.append(cta.shared[:ROOM].copy())
    zeros = ", ".join(["r41"] * 7)
    body = f"""
    {constants(d10=desc_a, d11=desc_b, r40=bits, r41=0, r42=2)}
    setp.ne.u32 accumulate, r2, r2;
    @one tcgen05.mma.cta_group::2.kind::f16 [r2], d10, d11, r40, {{{zeros}, r42}}, accumulate;
    mov.b16 h0, 3;
    @one tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [bar], h0;
    {WAIT}
    """
    got = launch(body, np.stack(images), columns=32, group=2, cluster=2).reshape(256, 32)
    assert (got[225] == 0xFFFFFFFF).all()
    rows = np.setdiff1d(np.arange(256), [225])
    np.testing.assert_array_equal(got[rows].view(np.float32), (a @ b.T)[rows])


@pytest.mark.parametrize(("first", "then"), [("!accumulate", "accumulate"), ("0", "1")])
def test_scale_input_d(first: str, then: str) -> None:
    """D = A B + D / 2^scale, with and without a mask of lanes; enable-input-d is a predicate or a constant."""
    a, b, image, desc_a, desc_b, bits = plain_operands("f16", 0, 16, 128, 8)
    body = f"""
    {constants(d10=desc_a, d11=desc_b, r40=bits, r41=0)}
    setp.eq.u32 accumulate, r2, r2;
    @one tcgen05.mma.cta_group::1.kind::f16 [r2], d10, d11, r40, {first};
    @one tcgen05.mma.cta_group::1.kind::f16 [r2], d10, d11, r40, {then}, 2;
    @one tcgen05.mma.cta_group::1.kind::f16 [r2], d10, d11, r40, {{r41, r41, r41, r41}}, {then}, 1;
    {COMMIT} {WAIT}
    """
    np.testing.assert_array_equal(launch(body, image)[0].view(np.float32), a @ b.T * 1.625)


A_WORDS = "\n".join(
    ["mul.lo.u32 r20, r0, 32;", "cvt.u64.u32 d12, r20;", "add.u64 d12, d0, d12;"]
    + [f"ld.global.u32 v{i}, [d12+{4 * i + 0x8000 + 0x4000}];" for i in range(8)]
    + [f"tcgen05.st.sync.aligned.32x32b.x8.b32 [r3+200], {names(8)};", "tcgen05.wait::st.sync.aligned;"]
)  # row r of A, 32 bytes from 0xC000 + 32 r of the image on, to lane r, columns 200 to 207


@pytest.mark.parametrize("disabled", ["", "{r41, r41, r41, r41}, "])
def test_plain_mma_with_a_in_tensor_memory(disabled: str) -> None:
    a, b, image, _, desc_b, bits = plain_operands("f16", 1, 16, 128, 16)
    codes = numerics.encode(numerics.BF16, a).astype(np.uint16)
    image[0, 0xC000 : 0xC000 + 4096] = codes.view(np.uint8).reshape(-1)
    body = f"""
    {A_WORDS}
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    {constants(d11=desc_b, r40=bits, r41=0)}
    add.u32 r32, r2, 200;
    setp.ne.u32 accumulate, r2, r2;
    @one tcgen05.mma.cta_group::1.kind::f16.collector::a::discard [r2], [r32], d11, r40, {disabled}accumulate;
    {COMMIT} {WAIT}
    """
    np.testing.assert_array_equal(launch(body, image, columns=16)[0].view(np.float32), a @ b.T)


def test_scaled_mma_with_a_in_tensor_memory() -> None:
    rng, cta = np.random.default_rng(0), Cta()
    a, b = rng.integers(0, 16, (128, 64)), rng.integers(0, 16, (16, 64))
    desc_b = cta.write_rows(B_AT, pack(b))
    image = cta.shared[None, :ROOM].copy()
    image[0, 0xC000 : 0xC000 + 4096] = pack(a).reshape(-1)
    scales = SharedMatrix(A_AT, 16, 128, sw.NONE).encode()
    image[0, :512] = 0x38
    body = f"""
    {A_WORDS}
    tcgen05.fence::before_thread_sync;
    bar.sync 0;
    tcgen05.fence::after_thread_sync;
    {constants(d11=desc_b, d20=scales, r40=idesc(128, 16, a=1 << 7, b=1 << 10))}
    add.u32 r32, r2, 200;
    add.u32 r30, r2, 300;
    @one tcgen05.cp.cta_group::1.32x128b.warpx4 [r30], d20;
    setp.ne.u32 accumulate, r2, r2;
    @one tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 [r2], [r32], d11, r40, [r30], [r30], accumulate;
    {COMMIT} {WAIT}
    """
    np.testing.assert_array_equal(launch(body, image, columns=16)[0].view(np.float32), E2M1[a] @ E2M1[b].T)


# Order


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_a_thread_issues_completes_in_order(schedule: str) -> None:
    """cp, mma, then the scales overwritten by another cp, mma: as published kernels do."""
    rng, cta = np.random.default_rng(0), Cta()
    a, b = rng.integers(0, 16, (128, 64)), rng.integers(0, 16, (8, 64))
    desc_a, desc_b = cta.write_rows(A_AT, pack(a)), cta.write_rows(B_AT, pack(b))
    image = cta.shared[None, :ROOM].copy()
    image[0, 0xC000:0xC200], image[0, 0xC200:0xC400] = 0x38, 0x40
    ones, twos = (SharedMatrix(at, 16, 128, sw.NONE).encode() for at in (0xC400, 0xC600))
    mma = "@one tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.block16 "
    body = f"""
    {constants(d10=desc_a, d11=desc_b, d20=ones, d21=twos, r40=idesc(128, 8, a=1 << 7, b=1 << 10))}
    add.u32 r30, r2, 300;
    add.u32 r31, r2, 8;
    setp.ne.u32 accumulate, r2, r2;
    @one tcgen05.cp.cta_group::1.32x128b.warpx4 [r30], d20;
    {mma} [r2], d10, d11, r40, [r30], [r30], accumulate;
    @one tcgen05.cp.cta_group::1.32x128b.warpx4 [r30], d21;
    {mma} [r31], d10, d11, r40, [r30], [r30], accumulate;
    {COMMIT} {WAIT}
    """
    got = launch(body, image, columns=16, schedule=schedule)[0].view(np.float32)
    expected = E2M1[a] @ E2M1[b].T
    np.testing.assert_array_equal(got, np.concatenate([expected, 4 * expected], axis=1))


def test_a_missing_commit_leaves_the_mma_undone_as_late_as_possible() -> None:
    _, _, image, desc_a, desc_b, bits = plain_operands("f16", 0, 16, 128, 8)
    body = f"""
    {constants(d10=desc_a, d11=desc_b, r40=bits)}
    setp.ne.u32 accumulate, r2, r2;
    @one tcgen05.mma.cta_group::1.kind::f16 [r2], d10, d11, r40, accumulate;
    """
    with pytest.raises(MemoryFault, match=r"is not allocated\n.*tcgen05.mma"):  # it comes after the deallocation
        launch(body, image, schedule="lazy")


def test_commit_arrives_at_once_when_nothing_is_under_way() -> None:
    """With generic and shared addresses."""
    body = """
    mov.u32 r20, bar2;
    cvt.u64.u32 d12, r20;
    cvta.shared.u64 d12, d12;
    @one tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [d12];
    bar.sync 0;
    mbarrier.test_wait.parity.shared::cta.b64 p, [bar2], 0;
    selp.u32 v0, 1, 0, p;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [r3], v0;
    tcgen05.wait::st.sync.aligned;
    """
    assert (launch(body)[0][:, 0] == 1).all()


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("@one tcgen05.mma.cta_group::1.kind::f16 [r2], 0, d11, r40, p;", InvalidDescriptor, "bits 46-48"),
        ("@one tcgen05.mma.cta_group::1.kind::f16 [r2], d10, d11, 0, p;", InvalidDescriptor, "M=0"),
        (
            "@one tcgen05.mma.cta_group::1.kind::mxf4.block_scale.block16 [r2], d10, d11, r40, [r2], [r2], p;",
            InvalidDescriptor,
            "scale size block16",
        ),
        (
            "@one tcgen05.mma.cta_group::1.kind::f16 [r2], d10, d11, r40, {r0, r0}, p;",
            InvalidDescriptor,
            "4 are needed",
        ),
        ("@one tcgen05.mma.cta_group::1.kind::f16 [r2], d10, d11, r40, p, 16;", InvalidDescriptor, "0 to 15"),
        ("@one tcgen05.mma.cta_group::2.kind::f16 [r2], d10, d11, r40, p;", MemoryFault, "after cta_group::1"),
        ("@one tcgen05.cp.cta_group::1.32x128b [r2], d10;", InvalidDescriptor, "allowed are"),
        (
            "mov.u32 r20, room;\n@one tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [r20];",
            MemoryFault,
            "no mbarrier",
        ),
    ],
)
def test_what_the_rules_forbid_is_one_typed_error(body: str, error: type[Exception], message: str) -> None:
    _, _, image, desc_a, desc_b, bits = plain_operands("f16", 0, 16, 128, 8)
    with pytest.raises(error, match=message):
        launch(constants(d10=desc_a, d11=desc_b, r40=bits) + body, image, schedule="eager")


FILLED: dict[str, Any] = {"shape": "16x64b", "repeat": "1", "multicast": ".warpx4", "collector": "", "group": "1"}
FILLED |= {"kind": "f16", "form": "mxf4nvf4.block_scale.block16"}


def test_every_form_has_a_case() -> None:
    """By the opcodes in this file and in the kernel around them, with their parameters filled in."""
    text = "".join((Path(__file__).parent / name).read_text() for name in ("test_tcgen05.py", "tensor_kernel.py"))
    for name, value in FILLED.items():
        text = text.replace("{" + name + "}", value)
    opcodes = set(re.findall(r"[a-z]+[0-9]*(?:[._][A-Za-z0-9_:]+)+", text)) | {"tcgen05.cp.cta_group::1.32x128b.warpx4"}
    mine = [form for form in forms() if form.function.__module__ in ("ptxemu.isa.tcgen05", "ptxemu.isa.tensor_memory")]
    assert mine
    assert not [form.syntax for form in mine if not any(form.pattern.fullmatch(opcode) for opcode in opcodes)]
