"""A series of dependent launches: one that starts early may run beside more than the grid before it."""

from __future__ import annotations

import numpy as np
import pytest
from programs import aligned

import ptxemu

TEXT = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry a(.param .u64 x) {{
    .reg .b64 d<2>; ld.param.u64 d0, [x];
    griddepcontrol.launch_dependents;
    st.global.u32 [d0], 7;
    ret;
}}
.visible .entry b(.param .u64 x) {{
    .reg .b64 d<2>; ld.param.u64 d0, [x];
    {first}
    {second}
    st.global.u32 [d0+64], 8;
    ret;
}}
.visible .entry c(.param .u64 x) {{
    .reg .b64 d<2>; .reg .b32 r<2>; ld.param.u64 d0, [x];
    {wait}
    ld.global.u32 r0, [d0];
    griddepcontrol.wait;
    st.global.u32 [d0+128], r0;
    ret;
}}
"""
WAIT, RELEASE = "griddepcontrol.wait;", "griddepcontrol.launch_dependents;"


def kinds(**parts: str) -> set[str]:
    """Of the findings of the third launch."""
    device = ptxemu.Device("sm_100a", on_finding="collect")
    data = aligned(256)
    device.register(data)
    text = TEXT.format(**({"wait": ""} | parts))
    for kernel in "abc":
        report = device.launch(text, kernel, args=[data.ctypes.data], block=(1, 1, 1), pdl=kernel != "a")
    return {finding.kind for finding in report.findings}


def test_the_grid_before_the_one_before_may_still_run() -> None:
    assert kinds(first=RELEASE, second=WAIT) == {"read before griddepcontrol.wait"}
    assert kinds(first=RELEASE, second=WAIT, wait=WAIT) == set()


def test_a_grid_that_waited_first_ends_the_series() -> None:
    """Dependents start when the middle grid has waited for the first, so that one is complete."""
    assert kinds(first=WAIT, second=RELEASE) == set()


@pytest.mark.parametrize("launches", [12])
def test_a_long_series_is_kept_short(launches: int) -> None:
    device = ptxemu.Device("sm_100a", on_finding="collect")
    data = aligned(256)
    device.register(data)
    text = TEXT.format(first=RELEASE, second=WAIT, wait=WAIT)
    for i in range(launches):
        device.launch(text, "ab"[i > 0], args=[data.ctypes.data], block=(1, 1, 1), pdl=i > 0)
    depth, before = 0, device._before
    while before is not None:
        depth, before = depth + 1, before.older
    assert 1 < depth <= 4
    assert np.all(data[64:68] == (8, 0, 0, 0))
