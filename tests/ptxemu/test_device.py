"""`Device.launch`: arguments, shapes, targets, reports, determinism, schedules, deadlocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lane_kernel import HEADER

import ptxemu
from ptxemu.testing import RUNS, TestDevice, assert_close, assert_equal, ptx_device

__all__ = ["ptx_device"]  # the fixture

RECORD = f"""{HEADER}
.visible .entry record(.param .u64 out, .param .u32 add)
{{
    .reg .b32 r<8>;
    .reg .b64 d<3>;
    ld.param.u64 d0, [out];
    ld.param.u32 r0, [add];
    mov.u32 r1, %ctaid.x;
    mov.u32 r2, %ntid.x;
    mov.u32 r3, %tid.x;
    mad.lo.u32 r4, r1, r2, r3;
    mad.wide.u32 d1, r4, 4, d0;
    add.u32 r5, r4, r0;
    st.global.u32 [d1], r5;
}}
"""


def test_arrays_are_written_back(ptx_device: TestDevice) -> None:
    out = np.zeros(96, np.uint32)
    report = ptx_device.launch(RECORD, grid=(3,), block=(32,), args=[out, 5])
    ptx_device.assert_equal(out, np.arange(96) + 5)
    assert report.findings == []
    assert report.counters["ctas"] == 3
    assert report.counters["warp_instructions"] == 27
    assert report.counters["instructions"] == {"mov": 9, "ld.param": 6, "mad": 6, "add": 3, "st.global": 3}


def test_arrays_that_are_not_contiguous_or_not_writeable() -> None:
    room = np.zeros((32, 2), np.uint32)
    device = ptxemu.Device("sm_100a")
    device.launch(RECORD, args=[room[:, 0], 1])
    assert room[:, 0].tolist() == list(range(1, 33))
    assert not room[:, 1].any()
    constant = np.zeros(32, np.uint32)
    constant.setflags(write=False)
    with pytest.raises(ptxemu.MemoryFault, match="is read-only"):
        device.launch(RECORD, args=[constant, 1])
    assert not constant.any()


def test_registered_memory_is_used_in_place() -> None:
    device = ptxemu.Device("sm_100a")
    out = np.zeros(32, np.uint32)
    region = device.register(out, "mine")
    device.launch(RECORD, args=[out, 7])
    device.launch(RECORD, args=[np.uint64(out.ctypes.data), 8])
    assert out[0] == 8
    device.memory.unregister(region)
    with pytest.raises(ptxemu.MemoryFault, match="in no allocation"):
        device.launch(RECORD, args=[out.ctypes.data, 8])


NUMBERS = f"""{HEADER}
.visible .entry numbers(.param .u64 out, .param .f32 a, .param .f64 b, .param .s8 c, .param .align 8 .b8 d[12])
{{
    .reg .b64 p, x;
    .reg .b32 y;
    ld.param.u64 p, [out];
    ld.param.b32 y, [a];
    st.global.b32 [p], y;
    ld.param.b64 x, [b];
    st.global.b64 [p+8], x;
    ld.param.s8 y, [c];
    st.global.b32 [p+16], y;
    ld.param.b32 y, [d+8];
    st.global.b32 [p+20], y;
}}
"""


def test_every_kind_of_argument() -> None:
    out = np.zeros(24, np.uint8)
    ptxemu.Device("sm_100a").launch(NUMBERS, args=[out, 1.5, -2.5, -3, bytes(8) + b"\1\2\3\4"])
    assert out[:4].view(np.float32)[0] == 1.5
    assert out[8:16].view(np.float64)[0] == -2.5
    assert out[16:20].view(np.int32)[0] == -3
    assert out[20:].tolist() == [1, 2, 3, 4]


OUT = np.zeros(64, np.uint32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"args": [OUT]}, "has 2 parameters, args has 1"),
        ({"args": [OUT, 1 << 40]}, "does not fit the 4 bytes"),
        ({"args": [OUT, "5"]}, r"args\[1\] is a str"),
        ({"args": [OUT, b"12345"]}, r"args\[1\] has 5 bytes, its parameter 4"),
        ({"args": [OUT, np.float64(1)]}, r"args\[1\] has 8 bytes"),
        ({"kernel": "other"}, "kernel='other': the module has record"),
        ({"grid": (0,)}, "grid="),
        ({"grid": (1, 70000)}, "grid="),
        ({"grid": (1, 1, 1, 1)}, "grid="),
        ({"block": (1025,)}, "block="),
        ({"block": (32, 64)}, "2048 threads"),
        ({"cluster": (2, 1, 1)}, "not a multiple of cluster"),
        ({"cluster": (32, 1, 1)}, "cluster="),
        ({"grid": (8,), "cluster": (2,), "preferred_cluster": (3,)}, "no multiple of cluster"),
        ({"shared": 300_000}, "shared=300000"),
        ({"shared": -1}, "shared=-1"),
    ],
)
def test_launches_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ptxemu.LaunchError, match=message):
        ptxemu.Device("sm_100a").launch(RECORD, **{"args": [OUT, 1], **options})


def test_overlapping_arguments() -> None:
    text = RECORD.replace(".param .u32 add", ".param .u64 other, .param .u32 add")
    with pytest.raises(ptxemu.LaunchError, match="overlaps another argument"):
        ptxemu.Device("sm_100a").launch(text, args=[OUT[:40], OUT[20:], 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "sm_80"}, "target='sm_80': one of sm_90a, sm_100a, sm_103a, sm_120a, sm_121a"),
        ({"schedule": "soon"}, "schedule='soon': one of eager, lazy, fifo, random"),
        ({"checks": "some"}, "checks='some'"),
        ({"on_finding": "warn"}, "on_finding='warn'"),
        ({"sms": 0}, "sms=0"),
    ],
)
def test_devices_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ptxemu.LaunchError, match=message):
        ptxemu.Device(**options)


@pytest.mark.parametrize(
    ("target", "chips"),
    [
        ("sm_80", "90 100 103 120 121"),
        ("sm_90", "90 100 103 120 121"),
        ("sm_90a", "90"),
        ("sm_100", "100 103 120 121"),
        ("sm_100a", "100"),
        ("sm_100f", "100 103"),
        ("sm_103a", "103"),
        ("sm_103f", "103"),
        ("sm_120", "120 121"),
        ("sm_120a", "120"),
        ("sm_120f", "120 121"),
        ("sm_121a", "121"),
        ("sm_121f", "121"),
        ("sm_130", ""),
    ],
)
def test_targets(target: str, chips: str) -> None:
    text = RECORD.replace("sm_100a", target)
    for name in ptxemu.device.CHIPS:
        device = ptxemu.Device(name)
        if name[3:-1] in chips.split():
            device.launch(text, args=[OUT, 1])
        else:
            with pytest.raises(ptxemu.LaunchError, match=f"is for {target}; the device is {name}"):
                device.launch(text, args=[OUT, 1])


@pytest.mark.parametrize(
    ("directive", "options", "message"),
    [
        (".reqntid 64", {}, "the kernel requires"),
        (".maxntid 32", {"block": (64,)}, "the kernel allows 32 threads"),
        (".reqnctapercluster 2", {"grid": (2,), "cluster": (1,)}, "the kernel requires"),
    ],
)
def test_what_a_kernel_declares(directive: str, options: dict[str, Any], message: str) -> None:
    text = RECORD.replace(".param .u32 add)", f".param .u32 add) {directive}")
    with pytest.raises(ptxemu.LaunchError, match=message):
        ptxemu.Device("sm_100a").launch(text, args=[OUT, 1], **options)


# Each CTA takes a ticket and a number that depends on the order in which its warps and CTAs ran.
TICKETS = f"""{HEADER}
.visible .entry tickets(.param .u64 out, .param .u64 counter)
{{
    .reg .b32 r<8>;
    .reg .b64 d<4>;
    .reg .pred p;
    ld.param.u64 d0, [out];
    ld.param.u64 d1, [counter];
    mov.u32 r1, %tid.x;
    mov.u32 r2, %ctaid.x;
    mov.u32 r3, %ntid.x;
    mad.lo.u32 r4, r2, r3, r1;
    mad.wide.u32 d2, r4, 4, d0;
    mov.u32 r6, 0;
LOOP:
    add.u32 r6, r6, 1;
    setp.lt.u32 p, r6, 100;
    @p bra LOOP;
    atom.global.add.u32 r5, [d1], 1;
    st.global.u32 [d2], r5;
}}
"""


def tickets(schedule: str, seed: int) -> list[int]:
    out = np.zeros(512, np.uint32)
    ptxemu.Device("sm_100a", schedule=schedule, seed=seed).launch(
        TICKETS, grid=(4,), block=(128,), args=[out, np.zeros(1, np.uint32)]
    )
    return [int(x) for x in out]


@pytest.mark.parametrize("schedule", ["eager", "lazy", "fifo", "random"])
def test_the_same_seed_is_the_same_run(schedule: str) -> None:
    runs = [tickets(schedule, seed) for seed in (0, 0, 1, 2, 3)]
    assert runs[0] == runs[1]
    assert len({tuple(run) for run in runs}) > 2  # other seeds, other orders
    assert all(sorted(run) == list(range(512)) for run in runs)


def test_more_clusters_than_multiprocessors() -> None:
    out = np.zeros(64 * 32, np.uint32)
    report = ptxemu.Device("sm_100a", sms=4).launch(RECORD, grid=(64,), cluster=(2,), args=[out, 0])
    assert out.tolist() == list(range(64 * 32))
    assert report.counters["clusters"] == 32


def test_two_cluster_shapes_in_one_grid() -> None:
    out = np.zeros(24 * 32, np.uint32)
    text = RECORD.replace("add.u32 r5, r4, r0;", "mov.u32 r5, %cluster_nctarank;")
    seen = set()
    for seed in range(4):
        ptxemu.Device("sm_100a", seed=seed).launch(
            text, grid=(24,), cluster=(2,), preferred_cluster=(4,), args=[out, 0]
        )
        sizes = out.reshape(24, 32)[:, 0]
        assert set(sizes.tolist()) <= {2, 4}
        seen |= set(sizes.tolist())
    assert seen == {2, 4}


DEADLOCK = f"""{HEADER}
.file 1 "kernel.py"
.visible .entry stuck()
{{
    .shared .align 8 .b64 full;
    .reg .pred p;
    .reg .b32 r<3>;
    mov.u32 r0, %tid.x;
    setp.ne.u32 p, r0, 0;
    @p bra WAIT;
    mbarrier.init.shared.b64 [full], 2;
WAIT:
    bar.sync 0;
    .loc 1 42 3
    mbarrier.arrive.expect_tx.shared.b64 _, [full], 128;
AGAIN:
    mbarrier.try_wait.parity.shared.b64 p, [full], 0;
    @!p bra AGAIN;
}}
"""


@pytest.mark.parametrize(("schedule", "seed"), RUNS)
def test_a_deadlock_names_warps_lines_and_barriers(schedule: str, seed: int) -> None:
    text = DEADLOCK.replace("@p bra WAIT", "@p bra WAIT").replace("mbarrier.arrive", "@!p mbarrier.arrive")
    with pytest.raises(ptxemu.Deadlock) as caught:
        ptxemu.Device("sm_100a", schedule=schedule, seed=seed).launch(text, block=(64,))
    report = str(caught.value)
    assert "stuck: no warp can go on (0 asynchronous operations are outstanding" in report
    for warp in (0, 1):
        assert f"warp {warp} of CTA (0, 0, 0), lanes 0xffffffff, line 20: mbarrier.try_wait" in report
    assert "(kernel.py:42)" in report
    assert "phase 0, 1 of 2 arrivals pending, 128 bytes pending" in report


def test_a_warp_that_spins_for_ever_is_a_deadlock() -> None:
    text = RECORD.replace(
        "st.global.u32 [d1], r5;",
        ".reg .pred p;\nL: ld.volatile.global.u32 r6, [d1];\nsetp.ne.u32 p, r6, 9;\n@p bra L;",
    )
    with pytest.raises(ptxemu.Deadlock, match="spins"):
        ptxemu.Device("sm_100a").launch(text, args=[np.zeros(32, np.uint32), 0])


def test_the_report_has_a_timeline(tmp_path: Path) -> None:
    text = RECORD.replace("st.global", "bar.sync 0;\nst.global")
    report = ptxemu.Device("sm_100a").launch(text, block=(64,), args=[np.zeros(64, np.uint32), 0])
    report.trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X"].count("wait: bar.sync 0;") == 1


def test_comparisons_name_the_first_bad_element() -> None:
    want = np.arange(6.0).reshape(2, 3)
    got = want.copy()
    assert_equal(got, want)
    assert_close(got + 0.5, want, 0.5)
    got[1, 1] = 9
    with pytest.raises(pytest.fail.Exception, match=r"1 of 6 elements differ, first \(1, 1\): 9.0, expected 4.0"):
        assert_equal(got, want)
    with pytest.raises(pytest.fail.Exception, match=r"first \(1, 1\)"):
        assert_close(got, want, 1)
    with pytest.raises(pytest.fail.Exception, match="the shape is"):
        assert_equal(got, want[0])


LEAK = f"""{HEADER}
.visible .entry leak()
{{
    .shared .align 4 .b32 place;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], 64;
}}
"""


def test_a_finding_raises_or_is_collected() -> None:
    with pytest.raises(
        ptxemu.FindingError, match=r"tensor-memory leak at line .*: the CTA ended without freeing 64 columns"
    ) as caught:
        ptxemu.Device("sm_100a").launch(LEAK)
    assert len(caught.value.report.findings) == 1
    report = ptxemu.Device("sm_100a", on_finding="collect").launch(LEAK)
    assert [(f.kind, f.warp) for f in report.findings] == [("tensor-memory leak", "warp 0 of CTA (0, 0, 0)")]
    assert "tensor-memory leak" in str(report)
    assert ptxemu.Device("sm_100a", checks="none").launch(LEAK).findings == []
