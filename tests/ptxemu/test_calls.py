"""Device functions: arguments, results, local memory, branches, nesting, guarded calls, recursion."""

from __future__ import annotations

import numpy as np
import pytest
from lane_kernel import HEADER

import ptxemu

FUNCTIONS = """
.func (.param .b32 value) triangle(.param .b32 n)
{
    .reg .b32 i, sum;
    .reg .pred p;
    ld.param.u32 i, [n];
    mov.u32 sum, 0;
LOOP:
    setp.eq.u32 p, i, 0;
    @p st.param.u32 [value], sum;
    @p ret;
    add.u32 sum, sum, i;
    sub.u32 i, i, 1;
    bra LOOP;
}
.func (.param .align 8 .b8 both[16]) twice(.param .b32 n, .param .b64 scale)
{
    .local .align 8 .b8 room[8];
    .reg .b32 r;
    .reg .b64 d, s;
    ld.param.u32 r, [n];
    {
        .param .b32 a;
        .param .b32 v;
        st.param.b32 [a], r;
        call.uni (v), triangle, (a);
        ld.param.b32 r, [v];
    }
    st.local.u32 [room], r;
    ld.param.u64 s, [scale];
    ld.local.u32 r, [room];
    cvt.u64.u32 d, r;
    st.param.b64 [both], d;
    mul.lo.u64 d, d, s;
    st.param.b64 [both+8], d;
    ret;
}
.func nothing()
{
    ret;
}
"""

KERNEL = """
.visible .entry k(.param .u64 out)
{
    .reg .b32 lane, r;
    .reg .b64 at, x, y;
    .reg .pred p;
    mov.u32 lane, %laneid;
    ld.param.u64 at, [out];
    mad.wide.u32 at, lane, 16, at;
    mov.b64 x, 77;
    mov.b64 y, 78;
    setp.ne.u32 p, lane, 3;
    {
        .param .b32 a;
        .param .b64 b;
        .param .align 8 .b8 v[16];
        st.param.b32 [a+0], lane;
        st.param.b64 [b+0], 10;
        @p call (v), twice, (a, b);
        @p ld.param.v2.b64 {x, y}, [v+0];
    }
    call.uni nothing;
    st.global.v2.b64 [at], {x, y};
    ret;
}
"""


def test_calls() -> None:
    out = np.zeros((32, 2), np.uint64)
    ptxemu.Device("sm_100a").launch(HEADER + FUNCTIONS + KERNEL, args=[out])
    want = [[n * (n + 1) // 2, 10 * n * (n + 1) // 2] for n in range(32)]
    want[3] = [77, 78]
    assert out.tolist() == want


def test_recursion_is_refused() -> None:
    text = ".func f() { call.uni f; ret; } .visible .entry k() { call.uni f; }"
    with pytest.raises(ptxemu.ParseError, match="f calls itself"):
        ptxemu.Device("sm_100a").launch(HEADER + text)


def test_wrong_arguments() -> None:
    text = "\n.visible .entry k() { call.uni triangle; }"
    with pytest.raises(ptxemu.ParseError, match=r"triangle takes 2 .param variables"):
        ptxemu.Device("sm_100a").launch(HEADER + FUNCTIONS + text)


def test_functions_without_a_body() -> None:
    text = ".extern .func g(); .visible .entry k() { call.uni g; }"
    with pytest.raises(ptxemu.UnknownInstruction, match=r"call\.uni g"):
        ptxemu.Device("sm_100a").launch(HEADER + text)
