"""Single accesses of a warp to shared memory, for comparing how many wavefronts they take with a profiler's count."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from comparison.program import HEADER, Launch, Program

TEXT = """.visible .entry k(.param .u64 p_out, .param .u32 p_stride, .param .u32 p_group, .param .u32 p_across)
{{
    .shared .align 1024 .b8 room[16384];
    .reg .b32 r<16>;
    .reg .b64 out;
    mov.u32 r0, %tid.x;
    ld.param.u64 out, [p_out];
    ld.param.u32 r1, [p_stride];
    ld.param.u32 r2, [p_group];
    ld.param.u32 r3, [p_across];
    rem.u32 r4, r0, r2;
    div.u32 r5, r0, r2;
    mul.lo.u32 r4, r4, r1;
    mad.lo.u32 r4, r5, r3, r4;
    mov.u32 r5, room;
    add.u32 r4, r4, r5;
    mov.u32 r8, r0; mov.u32 r9, r0; mov.u32 r10, r0; mov.u32 r11, r0;
    {access}
    xor.b32 r8, r8, r9; xor.b32 r10, r10, r11; xor.b32 r8, r8, r10;
    mad.wide.u32 out, r0, 4, out;
    st.global.b32 [out], r8;
    ret;
}}
"""
ACCESSES = {
    "st 4": "st.shared.b32 [r4], r8;",
    "st 8": "st.shared.v2.b32 [r4], {r8, r9};",
    "st 16": "st.shared.v4.b32 [r4], {r8, r9, r10, r11};",
    "ld 4": "ld.volatile.shared.b32 r8, [r4];",
    "ld 8": "ld.volatile.shared.v2.b32 {r8, r9}, [r4];",
    "ld 16": "ld.volatile.shared.v4.b32 {r8, r9, r10, r11}, [r4];",
    "ldmatrix x4": "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {r8, r9, r10, r11}, [r4];",
    "stmatrix x4": "stmatrix.sync.aligned.m8n8.x4.shared.b16 [r4], {r8, r9, r10, r11};",
}
# Byte strides between lanes, lanes in a group, bytes between groups.
PATTERNS = (
    (4, 32, 0),
    (8, 32, 0),
    (16, 32, 0),
    (32, 32, 0),
    (128, 32, 0),
    (0, 32, 0),
    (144, 32, 0),
    (64, 8, 16),
    (16, 8, 256),
)


def programs() -> Iterator[Program]:
    for name, access in ACCESSES.items():
        width = int(name.split()[-1]) if name[-1].isdigit() and "x" not in name else 16
        for stride, group, across in PATTERNS:
            if stride % width or across % width:
                continue
            args = ("out", np.uint32(stride), np.uint32(group), np.uint32(across))
            text = HEADER + TEXT.format(access=access)
            out = {"out": np.zeros(32, np.uint32)}
            yield Program(f"{name}, {stride} {group} {across}", text, lambda out=out: out, (Launch(args),))
