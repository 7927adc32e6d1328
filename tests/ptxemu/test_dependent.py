"""Dependent launches (PTX 'griddepcontrol'): a grid that starts before the one before it has ended."""

from __future__ import annotations

import numpy as np
import pytest

import ptxemu

HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"
SCHEDULES = ["eager", "lazy", "fifo", "random"]


def kernel(body: str) -> str:
    """A kernel of one thread a CTA: d0 is its word in the first array, d1 in the second."""
    return f"""{HEADER}.visible .entry k(.param .u64 first, .param .u64 second)
{{
    .reg .b32 r<9>;
    .reg .b64 d<9>;
    .reg .pred p;
    ld.param.u64 d0, [first];
    ld.param.u64 d1, [second];
    mov.u32 r0, %ctaid.x;
    mul.wide.u32 d2, r0, 4;
    add.u64 d0, d0, d2;
    add.u64 d1, d1, d2;
    {body}
    ret;
}}
"""


PRIMARY = kernel("st.global.u32 [d0], 1; griddepcontrol.launch_dependents; st.global.u32 [d0], 2;")
CARELESS = kernel("ld.global.u32 r1, [d0]; st.global.u32 [d1], r1; griddepcontrol.wait;")
CAREFUL = kernel("griddepcontrol.wait; ld.global.u32 r1, [d0]; st.global.u32 [d1], r1;")
CTAS = 5


def chain(
    *kernels: str, schedule: str = "lazy", pdl: bool = True, sms: int = 148, ctas: int = CTAS
) -> tuple[list[int], list[int]]:
    device = ptxemu.Device("sm_100a", schedule=schedule, sms=sms, checks="none")
    first, second = np.zeros(ctas, np.uint32), np.zeros(ctas, np.uint32)
    device.register(first)
    device.register(second)
    for index, text in enumerate(kernels):
        device.launch(text, grid=(ctas,), block=(1,), args=[first, second], pdl=pdl and index > 0)
    return first.tolist(), second.tolist()


@pytest.mark.parametrize("sms", [1, 148])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_dependent_that_waits(schedule: str, sms: int) -> None:
    assert chain(PRIMARY, CAREFUL, schedule=schedule, sms=sms) == ([2] * CTAS, [2] * CTAS)


def test_a_dependent_that_does_not_wait_reads_what_was_there() -> None:
    assert chain(PRIMARY, CARELESS, ctas=1) == ([2], [1])
    assert chain(PRIMARY, CARELESS, ctas=1, schedule="eager") == ([2], [2])
    first, second = chain(PRIMARY, CARELESS)  # CTAs are released one after the other, the last one is caught
    assert first == [2] * CTAS
    assert 1 in second


def test_a_launch_that_is_not_dependent_comes_after() -> None:
    assert chain(PRIMARY, CARELESS, pdl=False) == ([2] * CTAS, [2] * CTAS)


def test_without_launch_dependents_it_comes_after() -> None:
    silent = kernel("st.global.u32 [d0], 1; st.global.u32 [d0], 2;")
    assert chain(silent, CARELESS) == ([2] * CTAS, [2] * CTAS)


def test_a_cta_that_ends_without_saying_so_counts_when_it_ends() -> None:
    """CTA 0 says nothing: dependents start once it has ended, and the others may still write."""
    body = "setp.eq.u32 p, r0, 0; @p bra QUIET; st.global.u32 [d0], 1; griddepcontrol.launch_dependents; "
    waiting = "".join("nanosleep.u32 1;\n" for _ in range(300))
    text = kernel(body + waiting + "st.global.u32 [d0], 2; ret; QUIET: st.global.u32 [d0], 3;")
    first, second = chain(text, CARELESS)
    assert first == [3, 2, 2, 2, 2]
    assert second[0] == 3
    assert set(second[1:]) <= {1, 2}


def test_only_the_grid_before_counts() -> None:
    """The third grid finds everything of the first, and of the second what it wrote before it let go."""
    between = kernel(
        "griddepcontrol.wait; st.global.u32 [d1], 7; griddepcontrol.launch_dependents; st.global.u32 [d1], 8;"
    )
    read = "ld.global.u32 r1, [d0]; ld.global.u32 r2, [d1]; mad.lo.u32 r1, r1, 10, r2;"
    last = kernel(f"{read} griddepcontrol.wait; st.global.u32 [d1], r1;")
    assert chain(PRIMARY, between, last, ctas=1) == ([2], [27])


def test_an_error_leaves_the_grid_before_complete() -> None:
    device = ptxemu.Device("sm_100a")
    first, second = np.zeros(CTAS, np.uint32), np.zeros(CTAS, np.uint32)
    device.register(first)
    device.register(second)
    device.launch(PRIMARY, grid=(CTAS,), block=(1,), args=[first, second])
    with pytest.raises(ptxemu.MemoryFault):
        device.launch(kernel("st.global.u32 [d2], r0;"), grid=(CTAS,), block=(1,), args=[first, second], pdl=True)
    assert first.tolist() == [2] * CTAS
