"""Counters: bank conflicts, sectors, bytes by path, tensor-core operations, instructions by opcode, warp and role."""

from __future__ import annotations

from typing import Any

import bulk_kernel
import numpy as np
import pytest
import tensor_kernel
from bulk_kernel import DUMP, WAIT, aligned

import ptxemu
from ptxemu.isa.names import short
from ptxemu.watch.counters import sectors, wavefronts
from ptxemu.watch.roles import role

FULL = (1 << 32) - 1
LANE = np.arange(32)


def conflicts(addresses: Any, nbytes: int, mask: int = FULL) -> tuple[int, int]:
    array = np.broadcast_to(np.asarray(addresses, np.uint32), 32)
    return wavefronts(array.tobytes(), array.dtype, nbytes, mask)


@pytest.mark.parametrize(
    ("addresses", "nbytes", "expected"),
    [
        (4 * LANE, 4, (1, 1)),
        (4 * LANE[::-1], 4, (1, 1)),
        (0 * LANE, 4, (1, 1)),  # one word for all
        (8 * LANE, 4, (2, 1)),
        (128 * LANE, 4, (32, 1)),
        (132 * LANE, 4, (1, 1)),  # a padded pitch
        (LANE, 1, (1, 1)),
        (2 * LANE, 2, (1, 1)),
        (128 * LANE, 2, (32, 1)),
        (8 * LANE, 8, (2, 2)),  # two half-warps
        (128 * LANE, 8, (32, 2)),
        (16 * LANE, 16, (4, 4)),  # four quarters
        (128 * LANE, 16, (32, 4)),
        (128 * LANE + 16 * (LANE % 8), 16, (4, 4)),  # swizzled
        (128 * (LANE % 2), 4, (2, 1)),
    ],
)
def test_wavefronts(addresses: Any, nbytes: int, expected: tuple[int, int]) -> None:
    assert conflicts(addresses, nbytes) == expected


def test_wavefronts_of_some_lanes() -> None:
    assert conflicts(128 * LANE, 4, 0b111) == (3, 1)
    assert conflicts(128 * LANE, 16, 0xFF) == (8, 1)
    assert conflicts(128 * LANE, 16, 0x0101_0101) == (4, 1)  # one lane of each quarter


def test_sectors() -> None:
    def of(offsets: Any, nbytes: int, mask: int = FULL) -> tuple[int, int]:
        array = np.asarray(offsets, np.uint64)
        return sectors(array.tobytes(), array.dtype, nbytes, mask)

    assert of(4 * LANE, 4) == (4, 4)
    assert of(4 * LANE + 4, 4) == (5, 4)  # across a boundary
    assert of(32 * LANE, 4) == (32, 4)
    assert of(0 * LANE, 4) == (1, 1)
    assert of(32 * LANE, 32) == (32, 32)
    assert of(32 * LANE, 4, 0b11) == (2, 1)


EPILOGUE = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry epilogue()
{{
    .shared .align 1024 .b8 tile[4096];
    .reg .b32 lane, row, at, x<4>, r<9>;
    mov.u32 lane, %tid.x;
    mov.u32 x0, 0;
    mov.u32 x1, 1;
    mov.u32 x2, 2;
    mov.u32 x3, 3;
    and.b32 r0, lane, 7;
    shl.b32 r0, r0, 4;
    mov.u32 row, tile;
    mad.lo.u32 row, lane, 128, row;
    {body}
    ret;
}}
"""


def stores(kind: str) -> str:
    """A tile of 32 rows of 64 bf16 to shared memory, by rows, or by stmatrix four 8 x 8 matrices at a time."""
    name, _, swizzle = kind.partition(" ")
    step, values = {"b32": (4, "x0"), "v2.b32": (8, "{x0, x1}")}.get(name, (16, "{x0, x1, x2, x3}"))
    text = []
    for column in range(0, 128, step):
        if swizzle:
            text.append(f"xor.b32 at, r0, {column}; add.u32 at, at, row;")
        else:
            text.append(f"add.u32 at, row, {column};")
        opcode = "stmatrix.sync.aligned.m8n8.x4.shared.b16" if name == "stmatrix" else f"st.shared.{name}"
        text.append(f"{opcode} [at], {values};")
    return "\n".join(text)


@pytest.mark.parametrize(
    ("kind", "excess"),
    [
        ("b32", 32),
        ("v2.b32", 16),
        ("v4.b32", 8),
        ("v4.b32 swizzled", 1),
        ("stmatrix", 8),
        ("stmatrix swizzled", 1),
    ],
)
def test_the_epilogue_of_a_gemm(kind: str, excess: int) -> None:
    """Rows of 128 bytes: stores of 8 bytes without a swizzle take 16.8 million wavefronts for 8192 x 8192 bf16, where
    1.05 million do; a 128-byte swizzle takes no more than those."""
    report = ptxemu.Device("sm_100a", checks="none").launch(EPILOGUE.format(body=stores(kind)))
    shared = report.counters["shared"]
    warps = 8192 * 8192 // (32 * 64)
    assert shared["bytes"] == 4096
    assert warps * shared["ideal_wavefronts"] == 1_048_576
    assert warps * shared["wavefronts"] == 1_048_576 * excess
    if excess == 16:
        assert warps * shared["wavefronts"] == 16_777_216
    assert sum(t.excess for t in report.traffic) == shared["wavefronts"] - shared["ideal_wavefronts"]


GLOBAL = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 data)
{
    .reg .b64 d<5>;
    .reg .b32 r<5>;
    .shared .align 4 .b32 sum;
    ld.param.u64 d0, [data];
    mov.u32 r0, %tid.x;
    mul.wide.u32 d1, r0, 32;
    add.u64 d1, d0, d1;
    ld.global.u32 r1, [d1];
    mul.wide.u32 d2, r0, 4;
    add.u64 d2, d0, d2;
    st.global.u32 [d2], r1;
    red.global.add.u32 [d2], r1;
    st.shared.u32 [sum], r0;
    atom.shared.add.u32 r2, [sum], 1;
    ret;
}
"""


def test_traffic_of_each_instruction() -> None:
    data = aligned(1024).view(np.uint32)
    report = ptxemu.Device("sm_100a", checks="none").launch(GLOBAL, args=[data])
    found = {report.describe(t.line)["ptx"].split()[0]: t for t in report.traffic}
    listed = {name: (t.space, t.kind, t.accesses, t.nbytes, t.units, t.ideal) for name, t in found.items()}
    assert listed == {
        "ld.global.u32": ("global", "load", 1, 128, 32, 4),
        "st.global.u32": ("global", "store", 1, 128, 4, 4),
        "red.global.add.u32": ("global", "atomic", 1, 128, 4, 4),
        "st.shared.u32": ("shared", "store", 1, 128, 1, 1),
        "atom.shared.add.u32": ("shared", "atomic", 1, 128, 1, 1),
    }
    assert report.counters["global"] == {"accesses": 3, "bytes": 384, "sectors": 40, "ideal_sectors": 12}


def test_a_multicast_is_read_once_and_what_lies_outside_is_not_read() -> None:
    source, out = aligned(64 * 64, seed=1), aligned(2 * bulk_kernel.ROOM)
    tensor = ptxemu.TensorMap(address=source.ctypes.data, dtype="u8", dims=(64, 60), strides=(64,), box=(64, 32))
    box = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    body = f"""
        @q mbarrier.arrive.expect_tx.shared.b64 d9, [r3], 2048;
        mov.b16 h0, 3;
        and.pred q, q, leader;
        @q {box}.multicast::cluster [r2], [d2, {{0, 32}}], [r3], h0;
        {WAIT}
        {DUMP}
    """
    report = launch_bulk(body, source, out, tensor)
    assert report.counters["bytes"] == {"TMA load, global memory": 28 * 64, "TMA load, shared memory": 2 * 2048}


def launch_bulk(body: str, source: Any, out: Any, tensor: Any) -> ptxemu.Report:
    text = bulk_kernel.TEXT.format(room=bulk_kernel.ROOM, body=body)
    device = ptxemu.Device("sm_100a", checks="none")
    return device.launch(text, grid=(2,), cluster=(2,), args=[tensor, source, out])


def test_tensor_memory() -> None:
    text = tensor_kernel.TEXT.format(
        room=tensor_kernel.ROOM,
        granules=tensor_kernel.ROOM // 16,
        group=1,
        body="tcgen05.st.sync.aligned.32x32b.x4.b32 [r3], {r0, r1, r2, r3};\ntcgen05.wait::st.sync.aligned;",
        dump=tensor_kernel.dump(8),
    )
    given, out = np.zeros(tensor_kernel.ROOM, np.uint8), np.zeros((128, 8), np.uint32)
    device = ptxemu.Device("sm_100a", checks="none")
    report = device.launch(text, block=(128,), args=[given, out])
    assert report.counters["bytes"]["tensor memory, tcgen05.st"] == 128 * 4 * 4
    assert report.counters["bytes"]["tensor memory, tcgen05.ld"] == 128 * 8 * 4
    assert set(report.counters["instructions_by_warp"]) == {f"warp {i}: epilogue" for i in range(4)}


@pytest.mark.parametrize(
    ("opcode", "name"),
    [
        ("add.sat.s32", "add"),
        ("ld.global.nc.v4.b32", "ld.global"),
        ("tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16", "tcgen05.mma"),
        ("mbarrier.try_wait.parity.acquire.cta.shared::cta.b64", "mbarrier.try_wait"),
        (
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes",
            "cp.async.bulk.tensor.shared::cluster.global",
        ),
        ("cp.async.bulk.wait_group.read", "cp.async.bulk.wait_group"),
        ("fence.proxy.async.shared::cta", "fence.proxy.async"),
    ],
)
def test_short_names(opcode: str, name: str) -> None:
    assert short(opcode) == name


@pytest.mark.parametrize(
    ("opcodes", "name"),
    [
        ("add mov", "compute"),
        ("add tcgen05.mma tcgen05.cp", "MMA"),
        ("cp.async.bulk.tensor.shared::cluster.global", "TMA load"),
        ("tcgen05.ld st.shared cp.async.bulk.tensor.global.shared::cta", "epilogue"),
        ("cp.async.bulk.tensor.global.shared::cta", "TMA store"),
        ("cp.async.bulk.tensor.shared::cta.global tcgen05.mma", "MMA + TMA load"),
    ],
)
def test_roles(opcodes: str, name: str) -> None:
    assert role(opcodes.split()) == name
