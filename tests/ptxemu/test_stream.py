"""`Device.stream`: dependent launches that start as early as they may, and what they do before griddepcontrol.wait.

The programs are those of real defects: a producer that lets its dependents start before it stores, with a consumer one
of whose warps does not wait; and a consumer whose wait was compiled out.
"""

from __future__ import annotations

import numpy as np
import pytest

import ptxemu

SCHEDULES = [("eager", 0), ("lazy", 0), ("fifo", 0), ("random", 0), ("random", 1)]
HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"
ENTRY = HEADER + ".visible .entry {name}(.param .u64 values, .param .u64 scales, .param .u64 out)"
PRODUCER = (
    ENTRY.format(name="producer")
    + """
{{
    .reg .b32 r<5>;
    .reg .b64 d<5>;
    ld.param.u64 d0, [values];
    ld.param.u64 d1, [scales];
    mov.u32 r0, %tid.x;
    mul.wide.u32 d2, r0, 4;
    add.u64 d0, d0, d2;
    add.u64 d1, d1, d2;
    {early}
    st.global.u32 [d0], 5;
    st.global.u32 [d1], 3;
    {late}
    ret;
}}
"""
)
TRIGGER = "griddepcontrol.launch_dependents;"
EARLY = PRODUCER.format(early=TRIGGER, late="")
LATE = PRODUCER.format(early="", late=TRIGGER)
CONSUMER = (
    ENTRY.format(name="consumer")
    + """
{{
    .shared .align 4 .b32 found[64];
    .reg .pred scale;
    .reg .b32 r<9>;
    .reg .b64 d<9>;
    ld.param.u64 d0, [values];
    ld.param.u64 d1, [scales];
    ld.param.u64 d2, [out];
    mov.u32 r0, %tid.x;
    and.b32 r1, r0, 31;
    mul.wide.u32 d3, r1, 4;
    add.u64 d0, d0, d3;
    add.u64 d1, d1, d3;
    add.u64 d2, d2, d3;
    setp.ge.u32 scale, r0, 32;
    mov.u32 r2, found;
    mad.lo.u32 r2, r0, 4, r2;
    @scale bra SCALES;
    {values_wait}
    ld.global.u32 r3, [d0];
    bra JOIN;
SCALES:
    {scales_wait}
    ld.global.u32 r3, [d1];
JOIN:
    st.shared.u32 [r2], r3;
    bar.sync 0;
    @scale bra END;
    ld.shared.u32 r4, [r2+128];
    mul.lo.u32 r3, r3, r4;
    st.global.u32 [d2], r3;
END:
    ret;
}}
"""
)
WAIT = "griddepcontrol.wait;"
BAR = "bar.sync 1;"


def chained(
    producer: str, consumer: str, schedule: tuple[str, int] = ("lazy", 0), checks: str = "all", threads: int = 64
) -> tuple[list[ptxemu.Finding], list[int]]:
    """The consumer's findings and its results: 15 each, if it gets what the producer wrote over 0x7F."""
    device = ptxemu.Device("sm_100a", schedule=schedule[0], seed=schedule[1], checks=checks, on_finding="collect")
    values, scales, out = np.zeros(32, np.uint32), np.full(32, 0x7F, np.uint32), np.zeros(32, np.uint32)
    with device.stream() as stream:
        stream.launch(producer, args=[values, scales, out])
        stream.launch(consumer, block=(threads,), args=[values, scales, out])
    assert stream.reports[0].findings == []
    return stream.reports[1].findings, out.tolist()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("producer", [EARLY, LATE], ids=["early", "late"])
def test_every_role_waits(producer: str, schedule: tuple[str, int]) -> None:
    consumer = CONSUMER.format(values_wait=WAIT, scales_wait=WAIT)
    assert chained(producer, consumer, schedule) == ([], [15] * 32)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_warp_that_loads_scales_does_not_wait(schedule: tuple[str, int]) -> None:
    consumer = CONSUMER.format(values_wait=WAIT, scales_wait="")
    findings, out = chained(EARLY, consumer, schedule)
    (finding,) = findings
    assert finding.kind == "read before griddepcontrol.wait"
    assert finding.text == "ld.global.u32 r3, [d1];"
    assert finding.warp == "warp 1 of CTA (0, 0, 0)"
    assert "stores here after griddepcontrol.launch_dependents" in finding.message
    assert "a store of producer by warp 0 of CTA (0, 0, 0)" in finding.other
    assert "st.global.u32 [d1], 3;" in finding.other
    if schedule[0] == "lazy":
        assert out == [5 * 0x7F] * 32  # a stale scale


def test_stores_before_launch_dependents_are_not_visible_either() -> None:
    """Here they happen to be there, which nothing promises."""
    findings, out = chained(LATE, CONSUMER.format(values_wait=WAIT, scales_wait=""))
    assert [f.kind for f in findings] == ["read before griddepcontrol.wait"]
    assert "which may be missed" not in findings[0].message
    assert out == [15] * 32


def test_a_wait_that_was_compiled_out() -> None:
    findings, _ = chained(EARLY, CONSUMER.format(values_wait="", scales_wait=""))
    assert [f.kind for f in findings] == ["no griddepcontrol.wait"] + 2 * ["read before griddepcontrol.wait"]


def test_a_wait_of_another_warp_counts_after_a_barrier() -> None:
    together = CONSUMER.format(values_wait=WAIT + BAR, scales_wait=BAR)
    assert chained(EARLY, together) == ([], [15] * 32)
    apart = CONSUMER.format(values_wait=WAIT, scales_wait="nanosleep.u32 100;")
    findings, _ = chained(EARLY, apart)
    assert [f.kind for f in findings] == ["read before griddepcontrol.wait"]


def test_overwriting_what_the_grid_before_uses() -> None:
    wrong = EARLY.replace("producer", "second")
    findings, _ = chained(EARLY, wrong.replace(TRIGGER, "").replace("ret;", WAIT + "ret;"), threads=32)
    assert [f.kind for f in findings] == 2 * ["write before griddepcontrol.wait"]
    assert chained(EARLY, wrong.replace(TRIGGER, WAIT), threads=32)[0] == []


def test_memory_that_the_grid_before_leaves_alone_may_be_read_at_once() -> None:
    """Weights are often loaded before the wait; strict mode wants every role's first read behind it."""
    consumer = CONSUMER.format(values_wait=WAIT, scales_wait="").replace("ld.global.u32 r3, [d1]", "mov.u32 r3, 3")
    weights = consumer.replace("@scale bra SCALES;", "ld.global.u32 r7, [d2];\n@scale bra SCALES;")
    assert chained(EARLY, weights)[0] == []
    findings, _ = chained(EARLY, weights, checks="strict")
    assert [f.kind for f in findings] == ["global read before griddepcontrol.wait"]


def test_a_grid_that_does_not_let_dependents_start() -> None:
    consumer = CONSUMER.format(values_wait="", scales_wait="")
    assert chained(PRODUCER.format(early="", late=""), consumer) == ([], [15] * 32)


def test_a_launch_of_the_stream_that_is_not_dependent() -> None:
    device = ptxemu.Device("sm_100a")
    values, scales, out = (np.zeros(32, np.uint32) for _ in range(3))
    with device.stream() as stream:
        stream.launch(EARLY, args=[values, scales, out])
        consumer = CONSUMER.format(values_wait="", scales_wait="")
        stream.launch(consumer, block=(64,), args=[values, scales, out], pdl=False)
        assert len(device.memory.regions) == 3
    assert out.tolist() == [15] * 32
    assert device.memory.regions == []


def test_arrays_have_to_be_contiguous() -> None:
    device = ptxemu.Device("sm_100a")
    with pytest.raises(ptxemu.LaunchError, match="is not contiguous"), device.stream() as stream:
        stream.launch(EARLY, args=[np.zeros((4, 4))[:, 0], np.zeros(4), np.zeros(4)])
    assert device.memory.regions == []
