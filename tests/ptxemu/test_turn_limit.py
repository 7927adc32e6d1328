"""`max_turns`: a launch that goes on and on, with effects all the time, is given up."""

from __future__ import annotations

import numpy as np
import pytest

import ptxemu

TEXT = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out, .param .u32 count)
{
    .reg .pred p;
    .reg .b32 i, n;
    .reg .b64 d;
    ld.param.u64 d, [out];
    ld.param.u32 n, [count];
    mov.u32 i, 0;
AGAIN:
    add.u32 i, i, 1;
    st.global.u32 [d], i;
    setp.ne.u32 p, i, n;
    @p bra AGAIN;
    ret;
}
"""


def test_a_kernel_without_end_is_given_up() -> None:
    device = ptxemu.Device(max_turns=500)
    with pytest.raises(ptxemu.TurnLimit, match="max_turns=500"):
        device.launch(TEXT, args=[np.zeros(1, np.uint32), 0])


def test_a_long_one_ends_within_the_limit() -> None:
    out = np.zeros(1, np.uint32)
    ptxemu.Device(max_turns=500).launch(TEXT, args=[out, 9999])
    assert out[0] == 9999


@pytest.mark.parametrize("turns", [0, -1, "many"])
def test_a_limit_that_is_none(turns: object) -> None:
    with pytest.raises(ptxemu.LaunchError, match="max_turns"):
        ptxemu.Device(max_turns=turns)
