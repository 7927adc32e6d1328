"""Small kernels for the tests of bulk and tensor copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import ptxemu

Array = npt.NDArray[Any]

ROOM = 8192  # bytes of shared memory at `room`, 1024-byte aligned
TEXT = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 in, .param .u64 out)
{{
    .shared .align 1024 .b8 room[{room}];
    .shared .align 8 .b64 bar;
    .shared .align 128 .b8 copy[128];
    .reg .pred p, q, leader;
    .reg .b16 h<4>;
    .reg .b32 r<20>;
    .reg .b64 d<20>;
    ld.param.u64 d0, [in];
    ld.param.u64 d1, [out];
    mov.u64 d2, map;
    cvta.param.u64 d2, d2;
    mov.u32 r0, %tid.x;
    mov.u32 r1, %cluster_ctarank;
    mov.u32 r2, room;
    mov.u32 r3, bar;
    setp.eq.u32 q, r0, 0;
    setp.eq.u32 leader, r1, 0;
    mul.lo.u32 r4, r1, {room};
    cvt.u64.u32 d3, r4;
    add.u64 d3, d1, d3;
    @q mbarrier.init.shared.b64 [bar], 1;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    {body}
    ret;
}}
"""
WAIT = """
W: mbarrier.try_wait.parity.shared::cta.b64 p, [bar], 0;
    @!p bra W;
"""
# room to this CTA's part of out (DUMP), and from in to room (FILL).
LOOP = """
    mov.u32 r10, r0;
{name}:
    mul.lo.u32 r11, r10, 4;
    add.u32 r12, r2, r11;
    cvt.u64.u32 d10, r11;
    {body}
    add.u32 r10, r10, 32;
    setp.lt.u32 p, r10, {words};
    @p bra {name};
    bar.sync 0;
"""
DUMP = LOOP.format(
    name="D", words=ROOM // 4, body="add.u64 d10, d3, d10;\n ld.shared.u32 r13, [r12];\n st.global.u32 [d10], r13;"
)
FILL = LOOP.format(
    name="F", words=ROOM // 4, body="add.u64 d10, d0, d10;\n ld.global.u32 r13, [d10];\n st.shared.u32 [r12], r13;"
)


def aligned(size: int, seed: int | None = None) -> npt.NDArray[np.uint8]:
    """Bytes at a 128-byte boundary: random, or zeros."""
    raw = np.zeros(size + 128, np.uint8)
    start = -raw.ctypes.data % 128
    data = raw[start : start + size]
    if seed is not None:
        data[:] = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return data


def launch(
    body: str,
    source: Array,
    out: Array,
    tensor_map: Any = None,
    *,
    cluster: int = 1,
    schedule: str = "lazy",
    seed: int = 0,
    checks: str = "none",
) -> None:
    """Runs `body` with d0 = in, d1 = out, d2 = the map's address, d3 = this CTA's part of out, r0 = thread, r1 = rank,
    r2 = room, r3 = bar; q: thread 0, leader: CTA 0."""
    device = ptxemu.Device("sm_100a", schedule=schedule, seed=seed, checks=checks)
    text = TEXT.format(room=ROOM, body=body)
    given = bytes(128) if tensor_map is None else tensor_map
    device.launch(text, grid=(cluster, 1, 1), cluster=(cluster, 1, 1), args=[given, source, out])
