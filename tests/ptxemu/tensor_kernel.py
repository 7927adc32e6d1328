"""Small kernels for the tests of the tcgen05 instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import ptxemu

Array = npt.NDArray[Any]

ROOM = 1 << 16  # bytes of shared memory at `room`, which starts the CTA's shared memory at 0x400
TEXT = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 in, .param .u64 out)
{{
    .shared .align 1024 .b8 room[{room}];
    .shared .align 8 .b64 bar;
    .shared .align 8 .b64 bar2;
    .shared .align 8 .b32 slot;
    .reg .pred p, q, one, accumulate, leader;
    .reg .b16 h<4>;
    .reg .b32 r<60>;
    .reg .b32 v<129>;
    .reg .b64 d<40>;
    ld.param.u64 d0, [in];
    ld.param.u64 d1, [out];
    mov.u32 r0, %tid.x;
    mov.u32 r1, %cluster_ctarank;
    shr.u32 r4, r0, 5;
    and.b32 r5, r0, 31;
    setp.eq.u32 q, r0, 0;
    setp.eq.u32 leader, r1, 0;
    and.pred one, q, leader;
    mul.lo.u32 r6, r1, {room};
    cvt.u64.u32 d2, r6;
    add.u64 d2, d0, d2;
    mov.u32 r10, r0;
FILL:
    mul.lo.u32 r11, r10, 16;
    cvt.u64.u32 d10, r11;
    add.u64 d10, d2, d10;
    mov.u32 r12, room;
    add.u32 r12, r12, r11;
    ld.global.v4.u32 {{r13, r14, r15, r16}}, [d10];
    st.shared.v4.u32 [r12], {{r13, r14, r15, r16}};
    add.u32 r10, r10, 128;
    setp.lt.u32 p, r10, {granules};
    @p bra FILL;
    @q mbarrier.init.shared.b64 [bar], 1;
    @q mbarrier.init.shared.b64 [bar2], 1;
    fence.mbarrier_init.release.cluster;
    fence.proxy.async.shared::cta;
    setp.eq.u32 p, r4, 0;
    @!p bra ALLOCATED;
    tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [slot], 512;
    tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
ALLOCATED:
    barrier.cluster.arrive;
    barrier.cluster.wait;
    ld.shared.u32 r2, [slot];
    shl.b32 r7, r4, 21;
    add.u32 r3, r2, r7;
    {body}
    tcgen05.fence::before_thread_sync;
    barrier.cluster.arrive;
    barrier.cluster.wait;
    tcgen05.fence::after_thread_sync;
    {dump}
    barrier.cluster.arrive;
    barrier.cluster.wait;
    @!p bra END;
    tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 r2, 512;
END:
    ret;
}}
"""
WAIT = """
W: mbarrier.try_wait.parity.shared::cta.b64 p, [bar], 0;
    @!p bra W;
"""


def dump(columns: int) -> str:
    """The first columns of tensor memory, each warp its quarter, to out[rank, lane, column]."""
    text = [
        "setp.eq.u32 p, r4, 0;",
        "mad.lo.u32 r20, r1, 128, r0;",
        f"mul.lo.u32 r20, r20, {4 * columns};",
        "cvt.u64.u32 d11, r20;",
        "add.u64 d11, d1, d11;",
    ]
    for first in range(0, columns, 8):
        names = ", ".join(f"v{i}" for i in range(8))
        text.append(f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{names}}}, [r3+{first}];")
        text.append("tcgen05.wait::ld.sync.aligned;")
        text += [f"st.global.u32 [d11+{4 * (first + i)}], v{i};" for i in range(8)]
    return "\n".join(text)


def launch(
    body: str,
    image: Array | None = None,
    *,
    columns: int = 8,
    out: Array | None = None,
    group: int = 1,
    cluster: int = 1,
    schedule: str = "lazy",
    seed: int = 0,
    checks: str = "none",
) -> npt.NDArray[np.uint32]:
    """Runs `body` on 128 threads a CTA with `image` (cluster, ROOM) bytes in shared memory from 0x400 on and all of
    tensor memory allocated; returns its first columns, (cluster, 128, columns), or with `out` what the body wrote.

    d1 = out, r0 = thread, r1 = rank, r2 = tensor memory, r3 = the warp's quarter of it, r4 = warp, r5 = lane; q: thread
    0; one: thread 0 of CTA 0.
    """
    given = np.zeros((cluster, ROOM), np.uint8) if image is None else np.ascontiguousarray(image)
    assert given.size == cluster * ROOM
    result = np.zeros((cluster, 128, columns), np.uint32) if out is None else out
    ending = dump(columns) if out is None else "setp.eq.u32 p, r4, 0;"
    text = TEXT.format(room=ROOM, granules=ROOM // 16, body=body, dump=ending, group=group)
    device = ptxemu.Device("sm_100a", schedule=schedule, seed=seed, checks=checks)
    device.launch(text, grid=(cluster, 1, 1), cluster=(cluster, 1, 1), block=(128, 1, 1), args=[given, result])
    return result
