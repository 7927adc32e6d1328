"""Bulk and tensor copies, their groups, and tensormap.replace: a case for each form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bulk_kernel import DUMP, FILL, ROOM, WAIT, Array, aligned, launch
from sync_kernel import SCHEDULES

import ptxemu
from ptxemu import MemoryFault, TensorMap
from ptxemu.errors import LaunchError
from ptxemu.isa.engine import forms
from ptxemu.machine import swizzle as sw
from ptxemu.machine import tma
from ptxemu.machine.tensormap import InvalidTensorMap

DIMS, BOX = (64, 6, 5, 4, 3), (16, 3, 2, 2, 2)  # elements of u32
START = (56, 1, -1, 3, 0)  # out of bounds at the end of dimensions 0 and 3 and at the start of dimension 2
EXPECT = "@q mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], {bytes};\n"


def tensor(source: Array, rank: int, **more: Any) -> TensorMap:
    strides = tuple(int(4 * np.prod(DIMS[: i + 1])) for i in range(rank - 1))
    return TensorMap(source.ctypes.data, "u32", DIMS[:rank], strides, BOX[:rank], **more)


def box_of(m: TensorMap, at: tuple[int, ...], source: Array) -> Array:
    def window(address: int, size: int, write: bool, touched: Any) -> Array:
        start = address - source.ctypes.data
        return source[start : start + size]

    return tma.read_box(m, at, window).reshape(-1)


def coords(at: tuple[int, ...]) -> str:
    return "{" + ", ".join(map(str, at)) + "}"


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dst", ["shared::cta", "shared::cluster"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tensor_load(rank: int, dst: str, schedule: str) -> None:
    source, out = aligned(4 * 64 * 6 * 5 * 4 * 3, 1), aligned(ROOM)
    m, at = tensor(source, rank), START[:rank]
    size = m.box_bytes
    opcode = f"cp.async.bulk.tensor.{rank}d.{dst}.global{'.tile' if rank % 2 else ''}.mbarrier::complete_tx::bytes"
    body = EXPECT.format(bytes=size) + f"@q {opcode} [r2], [d2, {coords(at)}], [r3];" + WAIT + DUMP
    launch(body, source, out, m, schedule=schedule)
    np.testing.assert_array_equal(out[:size], box_of(m, at, source))
    assert (out[size:] == 0xFF).all()


def test_tensor_load_through_the_swizzle_with_a_cache_policy() -> None:
    source, out = aligned(128 * 64, 1), aligned(ROOM)
    m = TensorMap(source.ctypes.data, "u8", (128, 64), (128,), (128, 32), swizzle=sw.B128)
    opcode = "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
    body = EXPECT.format(bytes=4096) + f"mov.b64 d5, 0;\n@q {opcode} [r2+1024], [d2, {{0, 5}}], [r3], d5;" + WAIT + DUMP
    launch(body, source, out, m)
    for row, column in ((0, 0), (3, 77), (9, 16), (31, 127)):
        assert out[sw.address(sw.B128, 1024 + 128 * row + column)] == source[128 * (5 + row) + column]


def test_padded_elements_take_16_bytes_and_count_as_packed() -> None:
    source, out = aligned(1024, 1), aligned(ROOM)
    m = TensorMap(source.ctypes.data, "b4x16_p64", (256, 4), (128,), (128, 2))
    opcode = "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes"
    launch(EXPECT.format(bytes=128) + f"@q {opcode} [r2], [d2, {{128, 1}}], [r3];" + WAIT + DUMP, source, out, m)
    packed = source[:512].reshape(4, 2, 8, 8)[1:3, 1]
    np.testing.assert_array_equal(out[:256].reshape(2, 8, 16)[:, :, :8], packed)


def test_tensor_load_waits_for_its_bytes() -> None:
    """Without expect_tx the phase completes on the arrival alone, and a late copy is not seen."""
    source, out = aligned(1024, 1), aligned(ROOM)
    m = TensorMap(source.ctypes.data, "u8", (256,), (), (128,))
    copy = "@q cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes [r2], [d2, {0}], [r3];"
    body = copy + "@q mbarrier.arrive.shared::cta.b64 _, [bar];\n bar.sync 0;" + DUMP
    launch(body, source, out, m, schedule="lazy")
    assert (out == 0xFF).all()


def test_tensor_load_to_another_cta() -> None:
    """The mbarrier lies in the CTA that the copy writes."""
    source, out = aligned(1024, 1), aligned(2 * ROOM)
    m = TensorMap(source.ctypes.data, "u8", (256,), (), (128,))
    body = f"""
    mapa.shared::cluster.u32 r5, r2, 1;
    mapa.shared::cluster.u32 r6, r3, 1;
    and.pred p, q, leader;
    @p cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [r5], [d2, {{64}}], [r6];
    @leader bra END;
    {EXPECT.format(bytes=128)} {WAIT} {DUMP}
    END:
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    launch(body, source, out, m, cluster=2)
    np.testing.assert_array_equal(out[ROOM : ROOM + 128], source[64:192])
    assert not out[:ROOM].any()


@pytest.mark.parametrize(
    "extras", ["multicast::cluster", "multicast::cluster.L2::cache_hint", "multicast::cluster.cta_group::1"]
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_multicast_writes_and_signals_the_same_offsets_in_each_cta_of_the_mask(extras: str, schedule: str) -> None:
    source, out = aligned(1024, 1), aligned(4 * ROOM)
    m = TensorMap(source.ctypes.data, "u8", (256,), (), (128,))
    policy = ", d5" if "hint" in extras else ""
    body = f"""
    mov.b64 d5, 0;
    mov.b16 h0, 0b1011;
    setp.eq.u32 p, r1, 2;
    @p bra END;
    {EXPECT.format(bytes=128)}
    and.pred p, q, leader;
    @p cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes.{extras}
        [r2], [d2, {{64}}], [r3], h0{policy};
    {WAIT} {DUMP}
    END:
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    launch(body, source, out, m, cluster=4, schedule=schedule)
    for rank in (0, 1, 3):
        np.testing.assert_array_equal(out[rank * ROOM :][:128], source[64:192])
    assert not out[2 * ROOM : 3 * ROOM].any()


PAIR_BARRIER = "and.b32 r6, r3, 0xFEFFFFFF;"


@pytest.mark.parametrize("extras", ["cta_group::2", "cta_group::2.L2::cache_hint", "L2::cache_hint.cta_group::2"])
def test_cta_group_2_signals_the_barrier_of_the_even_cta(extras: str) -> None:
    """Both CTAs load into their own memory; both signal CTA 0."""
    source, out = aligned(1024, 1), aligned(2 * ROOM)
    m = TensorMap(source.ctypes.data, "u8", (256,), (), (128,))
    policy = ", d5" if "hint" in extras else ""
    body = f"""
    mov.b64 d5, 0;
    {PAIR_BARRIER}
    mul.lo.u32 r7, r1, 128;
    @q cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes.{extras}
        [r2], [d2, {{r7}}], [r6]{policy};
    @!leader bra READY;
    {EXPECT.format(bytes=256)} {WAIT}
    READY:
    barrier.cluster.arrive; barrier.cluster.wait;
    {DUMP}
    """
    launch(body, source, out, m, cluster=2)
    np.testing.assert_array_equal(out[:128], source[:128])
    np.testing.assert_array_equal(out[ROOM : ROOM + 128], source[128:256])


@pytest.mark.parametrize(
    "extras", ["multicast::cluster.cta_group::2", "multicast::cluster.L2::cache_hint.cta_group::2"]
)
def test_multicast_with_cta_group_2_signals_once_a_copy_in_each_pair(extras: str) -> None:
    """Destination d signals CTA (d & ~1) | (barrier rank & 1)."""
    source, out = aligned(1024, 1), aligned(4 * ROOM)
    m = TensorMap(source.ctypes.data, "u8", (256,), (), (128,))
    policy = ", d5" if "hint" in extras else ""
    body = f"""
    mov.b64 d5, 0;
    mov.b16 h0, 0xF;
    and.pred p, q, leader;
    @p cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes.{extras}
        [r2], [d2, {{0}}], [r3], h0{policy};
    and.b32 r8, r1, 1;
    setp.eq.u32 p, r8, 1;
    @p bra READY;
    {EXPECT.format(bytes=256)} {WAIT}
    READY:
    barrier.cluster.arrive; barrier.cluster.wait;
    {DUMP}
    """
    launch(body, source, out, m, cluster=4)
    for rank in range(4):
        np.testing.assert_array_equal(out[rank * ROOM :][:128], source[:128])


PUBLISH = "fence.proxy.async.shared::cta;\n bar.sync 0;\n"
FINISH = "cp.async.bulk.commit_group;\n cp.async.bulk.wait_group 0;\n"


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_tensor_store(rank: int, hint: str, schedule: str) -> None:
    source, out = aligned(ROOM, 2), aligned(4 * 64 * 6 * 5 * 4 * 3)
    m, at = tensor(out, rank), (56, 1, 4, 3, 0)[:rank]
    opcode = f"cp.async.bulk.tensor.{rank}d.global.shared::cta{'.tile' if rank > 2 else ''}.bulk_group{hint}"
    body = (
        f"mov.b64 d5, 0;\n{FILL}{PUBLISH}@q {opcode} [d2, {coords(at)}], [r2+1024]{', d5' if hint else ''};\n{FINISH}"
    )
    expected = aligned(out.size)

    def window(address: int, size: int, write: bool, touched: Any) -> Array:
        return expected[address - out.ctypes.data :][:size]

    tma.write_box(m, at, source[1024 : 1024 + m.box_bytes], window)
    launch(body, source, out, m, schedule=schedule)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("op", tma.REDUCTIONS)
def test_tensor_reduce(op: str) -> None:
    source, out = aligned(ROOM, 3), aligned(4 * 64 * 6, 4)
    m = tensor(out, 2)
    before = out.copy()
    opcode = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.tile.bulk_group"
    launch(f"{FILL}{PUBLISH}@q {opcode} [d2, {{0, 0}}], [r2];\n{FINISH}", source, out, m)
    rows = before.reshape(6, 256)[:3, :64].copy()
    rows[:] = tma.combine(op, "u32", rows, source[: m.box_bytes].copy()).reshape(rows.shape)
    before.reshape(6, 256)[:3, :64] = rows
    np.testing.assert_array_equal(out, before)


def test_prefetches_change_nothing() -> None:
    source, out = aligned(1024, 1), aligned(ROOM)
    m = TensorMap(source.ctypes.data, "u8", (256,), (), (128,))
    body = """
    mov.b64 d5, 0;
    prefetch.tensormap [d2];
    prefetch.param.tensormap [d2];
    cp.async.bulk.prefetch.tensor.1d.L2.global.tile [d2, {0}];
    cp.async.bulk.prefetch.tensor.1d.L2.global.L2::cache_hint [d2, {0}], d5;
    cp.async.bulk.prefetch.L2.global [d0], 64;
    cp.async.bulk.prefetch.L2.global.L2::cache_hint [d0], 64, d5;
    """
    launch(body, source, out, m)
    assert not out.any()


@pytest.mark.parametrize("dst", ["shared::cta", "shared::cluster"])
@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
def test_bulk_load(dst: str, hint: str) -> None:
    source, out = aligned(ROOM, 1), aligned(ROOM)
    opcode = f"cp.async.bulk.{dst}.global.mbarrier::complete_tx::bytes{hint}"
    policy = ", d5" if hint else ""
    body = EXPECT.format(bytes=2048) + f"mov.b64 d5, 0;\n@q {opcode} [r2+16], [d0], 2048, [r3]{policy};" + WAIT + DUMP
    launch(body, source, out)
    np.testing.assert_array_equal(out[16:2064], source[:2048])
    assert (out[2064:] == 0xFF).all()


def test_bulk_load_multicast() -> None:
    source, out = aligned(ROOM, 1), aligned(2 * ROOM)
    opcode = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
    body = f"""
    mov.b16 h0, 3;
    mov.b64 d5, 0;
    {EXPECT.format(bytes=256)}
    and.pred p, q, leader;
    @p {opcode} [r2], [d0], 256, [r3], h0, d5;
    {WAIT} {DUMP}
    barrier.cluster.arrive; barrier.cluster.wait;
    """
    launch(body, source, out, cluster=2)
    for rank in (0, 1):
        np.testing.assert_array_equal(out[rank * ROOM :][:256], source[:256])


TO_PEER = """
    {fill} fence.proxy.async.shared::cta;
    barrier.cluster.arrive; barrier.cluster.wait;
    mapa.shared::cluster.u32 r5, r2, 1;
    mapa.shared::cluster.u32 r6, r3, 1;
    and.pred p, q, leader;
    @p {opcode} [r5+1024], [r2], 512, [r6];
    @leader bra END;
    {expect} {wait} {dump}
    END:
    barrier.cluster.arrive; barrier.cluster.wait;
"""


def to_peer(opcode: str) -> tuple[Array, Array]:
    source, out = aligned(ROOM, 1), aligned(2 * ROOM)
    body = TO_PEER.format(fill=FILL, opcode=opcode, expect=EXPECT.format(bytes=512), wait=WAIT, dump=DUMP)
    launch(body, source, out, cluster=2)
    return source, out[ROOM:]


def test_bulk_copy_to_another_ctas_shared_memory() -> None:
    source, out = to_peer("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes")
    np.testing.assert_array_equal(out[1024:1536], source[:512])
    np.testing.assert_array_equal(out[1536:], source[1536:])


@pytest.mark.parametrize(
    ("op", "kind"), [("add", "u32"), ("min", "s32"), ("inc", "u32"), ("xor", "b32"), ("add", "u64")]
)
def test_bulk_reduce_into_another_ctas_shared_memory(op: str, kind: str) -> None:
    source, out = to_peer(f"cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.{op}.{kind}")
    expected = tma.combine(op, kind, source[1024:1536].copy(), source[:512].copy())
    np.testing.assert_array_equal(out[1024:1536], expected)


@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
def test_bulk_store(hint: str) -> None:
    source, out = aligned(ROOM, 1), aligned(ROOM)
    opcode = f"cp.async.bulk.global.shared::cta.bulk_group{hint}"
    body = f"mov.b64 d5, 0;\n{FILL}{PUBLISH}@q {opcode} [d1+32], [r2], 4096{', d5' if hint else ''};\n{FINISH}"
    launch(body, source, out)
    np.testing.assert_array_equal(out[32 : 32 + 4096], source[:4096])
    assert not out[32 + 4096 :].any()


@pytest.mark.parametrize("hint", ["", ".L2::cache_hint"])
def test_bulk_store_of_some_bytes(hint: str) -> None:
    source, out = aligned(ROOM, 1), aligned(ROOM)
    opcode = f"cp.async.bulk.global.shared::cta.bulk_group{hint}.cp_mask"
    body = f"""
    mov.b64 d5, 0;
    mov.b16 h0, 0x8005;
    {FILL}{PUBLISH}@q {opcode} [d1], [r2], 64{", d5" if hint else ""}, h0;
    {FINISH}"""
    launch(body, source, out)
    keep = np.tile(np.isin(np.arange(16), (0, 2, 15)), 4)
    np.testing.assert_array_equal(out[:64], np.where(keep, source[:64], 0))


@pytest.mark.parametrize(
    ("form", "op", "kind"),
    [
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", "add", "f32"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.u64", "add", "u64"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f16", "add", "f16"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16", "add", "bf16"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.max.s64", "max", "s64"),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.or.b64", "or", "b64"),
    ],
)
def test_bulk_reduce(form: str, op: str, kind: str) -> None:
    source, out = aligned(ROOM, 1), aligned(ROOM, 2)
    source[1::2] &= 0x3F  # no NaN or infinity
    out[1::2] &= 0x3F
    with np.errstate(all="ignore"):
        expected = tma.combine(op, kind, out[:512].copy(), source[:512].copy())
    policy = ", d5" if "hint" in form else ""
    launch(f"mov.b64 d5, 0;\n{FILL}{PUBLISH}@q {form} [d1], [r2], 512{policy};\n{FINISH}", source, out)
    np.testing.assert_array_equal(out[:512], expected)


OVERWRITE = """
    @q cp.async.bulk.global.shared::cta.bulk_group [d1], [r2], 16;
    cp.async.bulk.commit_group;
    {wait}
    mov.b32 r9, 7;
    @q st.shared.u32 [r2], r9;
    cp.async.bulk.wait_group 0;
"""


@pytest.mark.parametrize("wait", ["cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group 0;"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_wait_group_read_lets_the_source_be_overwritten(wait: str, schedule: str) -> None:
    source, out = aligned(ROOM, 1), aligned(ROOM)
    launch(FILL + PUBLISH + OVERWRITE.format(wait=wait), source, out, schedule=schedule)
    np.testing.assert_array_equal(out[:16], source[:16])


def test_a_missing_wait_group_shows_as_late_as_possible() -> None:
    source, out = aligned(ROOM, 1), aligned(ROOM)
    launch(FILL + PUBLISH + OVERWRITE.format(wait="cp.async.bulk.wait_group.read 1;"), source, out, schedule="lazy")
    assert out[:4].view(np.uint32)[0] == 7


def test_wait_group_counts_the_newest_groups_that_may_stay_pending() -> None:
    """Of three groups, wait_group 1 completes the first two."""
    source, out = aligned(ROOM, 1), aligned(ROOM)
    store = "@q cp.async.bulk.global.shared::cta.bulk_group [d1+{0}], [r2+{0}], 16;\n cp.async.bulk.commit_group;\n"
    body = f"""
    {FILL}{PUBLISH}
    {"".join(store.format(16 * i) for i in range(3))}
    cp.async.bulk.wait_group 1;
    ld.global.u32 r13, [d1+16];
    st.global.u32 [d1+64], r13;
    ld.global.u32 r13, [d1+32];
    st.global.u32 [d1+68], r13;
    cp.async.bulk.wait_group 0;
    """
    launch(body, source, out, schedule="lazy")
    np.testing.assert_array_equal(out[:48], source[:48])
    assert out[64:68].tobytes() == source[16:20].tobytes()
    assert not out[68:72].any()


@pytest.mark.parametrize("seed", range(6))
def test_groups_keep_their_places_when_stores_complete_out_of_order(seed: int) -> None:
    """wait_group.read 1 after each group: the source of the one before may be overwritten, whatever is done since."""
    source, out = aligned(ROOM, 1), aligned(ROOM)
    step = """
    @q cp.async.bulk.global.shared::cta.bulk_group [d1+{0}], [r2+{0}], 16;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 1;
    mov.b32 r9, 7;
    {1}
    """
    body = FILL + PUBLISH
    for i in range(40):
        body += step.format(16 * i, f"@q st.shared.u32 [r2+{16 * (i - 1)}], r9;" if i else "")
    launch(body + "cp.async.bulk.wait_group 0;", source, out, schedule="random", seed=seed)
    np.testing.assert_array_equal(out[:640], source[:640])


REPLACE = """
    tensormap.replace.tile.global_address{ss}.b1024.b64 [{at}], d0;
    tensormap.replace.tile.rank{ss}.b1024.b32 [{at}], 1;
    tensormap.replace.tile.elemtype{ss}.b1024.b32 [{at}], 0;
    tensormap.replace.tile.interleave_layout{ss}.b1024.b32 [{at}], 0;
    tensormap.replace.tile.swizzle_mode{ss}.b1024.b32 [{at}], 0;
    tensormap.replace.tile.swizzle_atomicity{ss}.b1024.b32 [{at}], 0;
    tensormap.replace.tile.fill_mode{ss}.b1024.b32 [{at}], 0;
    tensormap.replace.tile.global_dim{ss}.b1024.b32 [{at}], 0, 100;
    tensormap.replace.tile.global_dim{ss}.b1024.b32 [{at}], 1, 8;
    tensormap.replace.tile.global_stride{ss}.b1024.b64 [{at}], 0, d6;
    tensormap.replace.tile.box_dim{ss}.b1024.b32 [{at}], 0, 64;
    tensormap.replace.tile.box_dim{ss}.b1024.b32 [{at}], 1, 2;
    tensormap.replace.tile.element_stride{ss}.b1024.b32 [{at}], 0, 1;
    tensormap.replace.tile.element_stride{ss}.b1024.b32 [{at}], 1, 1;
"""


COPY_MAP = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned"


@pytest.mark.parametrize("where", ["global", "shared", "copied", "generic"])
def test_tensormap_replace_then_load(where: str) -> None:
    """A map built field by field, in global memory or in shared memory and copied out, is used by a load."""
    source, out = aligned(1024, 1), aligned(ROOM + 128)
    build = {
        "global": REPLACE.format(ss=".global", at="d7"),
        "generic": REPLACE.format(ss="", at="d7"),
        "copied": REPLACE.format(ss=".shared::cta", at="r8") + f"{COPY_MAP} [d7], [r8], 128;",
        "shared": REPLACE.format(ss=".shared::cta", at="r8")
        + "\n".join(f"ld.shared.u64 d9, [r8+{8 * i}];\n st.global.u64 [d7+{8 * i}], d9;" for i in range(16)),
    }[where]
    clear = "\n".join(f"st.shared.u64 [r8+{8 * i}], d8;" for i in range(16))
    body = f"""
    mov.b64 d6, 112;
    mov.b64 d8, 0;
    mov.b32 r8, copy;
    add.u64 d7, d1, {ROOM};
    {clear}
    {build}
    fence.proxy.tensormap::generic.release.gpu;
    fence.proxy.tensormap::generic.acquire.gpu [d7], 128;
    {EXPECT.format(bytes=128)}
    @q cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [r2], [d7, {{48, 1}}], [r3];
    {WAIT} {DUMP}
    """
    launch(body, source, out)
    rows = source[: 112 * 8].reshape(8, 112)[1:3]
    expected = np.zeros((2, 64), np.uint8)
    expected[:, :52] = rows[:, 48:100]
    np.testing.assert_array_equal(out[:128], expected.reshape(-1))


LOAD = "cp.async.bulk.tensor.1d.shared::cta.global.mbarrier::complete_tx::bytes"


@pytest.mark.parametrize(
    ("instruction", "error", "message"),
    [
        (f"@q {LOAD} [r2+64], [d2, {{0}}], [r3];", MemoryFault, "128-byte alignment"),
        (f"@q {LOAD} [r2], [d2+8, {{0}}], [r3];", InvalidTensorMap, "64-byte alignment"),
        (f"@q {LOAD} [r2], [d2, {{0}}], [r2];", MemoryFault, "no mbarrier was initialised"),
        (f"@q {LOAD.replace('1d', '2d')} [r2], [d2, {{0, 0}}], [r3];", InvalidTensorMap, "tensor map of rank 1"),
        (f"@q {LOAD}.L2::cache_hint [r2], [d2, {{0}}], [r3];", LaunchError, "1 operands are needed"),
        ("mov.b32 r5, 0x1000400;\n@q " + LOAD + " [r5], [d2, {0}], [r3];", MemoryFault, "own shared memory"),
        ("@q cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [d2, {-1}], [r2];", InvalidTensorMap, "below zero"),
        ("@q cp.async.bulk.global.shared::cta.bulk_group [d1], [r2], 24;", MemoryFault, "multiples of 16"),
        ("@q cp.async.bulk.global.shared::cta.bulk_group [d1+8], [r2], 32;", MemoryFault, "multiples of 16"),
        (
            "@q cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [r2], [d0+4], 32, [r3];",
            MemoryFault,
            "multiples",
        ),
        ("cp.async.bulk.prefetch.L2.global [d0], 8192;", MemoryFault, "bytes too long"),
        ("tensormap.replace.tile.rank.global.b1024.b32 [d0+64], 1;", InvalidTensorMap, "128-byte alignment"),
        (f"{COPY_MAP} [d1], [r2], 64;", LaunchError, "of 64 bytes; allowed: 128"),
        (f"{COPY_MAP} [d1+64], [r2], 128;", InvalidTensorMap, "aligned to 128 bytes"),
    ],
)
def test_what_the_rules_forbid_is_one_typed_error(instruction: str, error: type[Exception], message: str) -> None:
    source, out = aligned(1024, 1), aligned(ROOM)
    m = TensorMap(source.ctypes.data, "u8", (256,), (), (128,))
    with pytest.raises(error, match=message):
        launch(instruction + "\n" + FINISH, source, out, m, schedule="eager")


def test_a_multicast_names_ctas_of_the_cluster() -> None:
    source, out = aligned(1024, 1), aligned(ROOM)
    m = TensorMap(source.ctypes.data, "u8", (256,), (), (128,))
    opcode = "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
    with pytest.raises(MemoryFault, match="mask 0x2 in a cluster of 1"):
        launch(f"mov.b16 h0, 2;\n@q {opcode} [r2], [d2, {{0}}], [r3], h0;", source, out, m)


def test_a_copy_that_runs_over_shared_memory_faults() -> None:
    source, out = aligned(1024, 1), aligned(ROOM)
    body = "@q cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [r2+8192], [d0], 1024, [r3];" + WAIT
    with pytest.raises(MemoryFault, match="is outside shared memory"):
        launch(body, source, out, schedule="eager")


def test_unknown_modes_are_unknown_instructions() -> None:
    source, out = aligned(1024, 1), aligned(ROOM)
    opcode = "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
    with pytest.raises(ptxemu.UnknownInstruction, match="gather4"):
        launch(f"@q {opcode} [r2], [d2, {{0, 0, 0, 0, 0}}], [r3];", source, out)


FILLED = {
    "op": "add",
    "kind": "u32",
    "rank": "2",
    "dst": "shared::cta",
    "hint": "",
    "ss": ".global",
    "extras": "cta_group::2",
}


def test_every_form_has_a_case() -> None:
    """By the opcodes in this file, with their parameters filled in."""
    text = re.sub(r"\{'[^}]*\}", "", Path(__file__).read_text())
    for name, value in FILLED.items():
        text = text.replace("{" + name + "}", value)
    opcodes = set(re.findall(r"[a-z]+(?:[._][A-Za-z0-9_:]+)+", text))
    mine = [form for form in forms() if form.function.__module__ in ("ptxemu.isa.bulk", "ptxemu.isa.bulk_groups")]
    assert mine
    assert not [form.syntax for form in mine if not any(form.pattern.fullmatch(opcode) for opcode in opcodes)]
