"""Clusters in several processes: result, findings and errors are those of one process."""

from __future__ import annotations

import dataclasses
import gc
import mmap
import os
import signal
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import pytest

import ptxemu
from ptxemu import parallel
from ptxemu.isa.generate import generate
from ptxemu.text import parse

KERNEL = """
.version 8.8
.target sm_100a
.address_size 64
.shared .align 16 .b8 room[64];
.visible .entry k(.param .u64 source, .param .u64 out) {{
    .reg .b16 h<4>;
    .reg .b32 r<8>;
    .reg .b64 d<8>;
    .reg .pred p;
    ld.param.u64 d0, [source];
    ld.param.u64 d1, [out];
    mov.u32 r0, %tid.x;
    mov.u32 r1, %ctaid.x;
    mov.u32 r2, %nctaid.x;
    {body}
}}
"""
# Thread t of CTA c copies byte t * CTAs + c, so that every granule is of all CTAs.
INTERLEAVED = """mad.lo.u32 r3, r0, r2, r1;
    cvt.u64.u32 d2, r3;
    add.u64 d3, d0, d2;
    add.u64 d4, d1, d2;
    ld.global.u8 r4, [d3];
    add.u32 r4, r4, 1;
    st.global.u8 [d4], r4;"""
# Words of a CTA side by side.
BLOCKS = """shl.b32 r3, r1, 5;
    add.u32 r3, r3, r0;
    mad.wide.u32 d3, r3, 4, d0;
    mad.wide.u32 d4, r3, 4, d1;
    ld.global.u32 r4, [d3];
    add.u32 r4, r4, r1;
    st.global.u32 [d4], r4;"""
# CTA c reads what CTA c + 1 writes.
NEIGHBOUR = f"""{BLOCKS}
    add.u64 d5, d4, 128;
    add.u32 r5, r1, 1;
    setp.lt.u32 p, r5, r2;
    @p ld.global.u32 r6, [d5];
    @p st.global.u32 [d4], r6;"""
TICKET = """mul.wide.u32 d2, r1, 4;
    add.u64 d4, d1, d2;
    setp.eq.u32 p, r0, 0;
    @p atom.global.add.u32 r4, [d0], 1;
    @p st.global.u32 [d4], r4;"""
PAST_THE_END = """mul.wide.u32 d2, r1, 256;
    add.u64 d4, d1, d2;
    st.global.u32 [d4], r0;"""


def launch(body: str, processes: int, **options: Any) -> tuple[np.ndarray, Any]:
    """The output of 8 CTAs and the report, or the error."""
    source = np.arange(256, dtype=np.uint32) % 251
    out = np.zeros(256, np.uint32)
    device = ptxemu.Device("sm_100a", processes=processes, on_finding="collect", **options)
    try:
        return out, device.launch(KERNEL.format(body=body), grid=(8,), args=[source, out])
    except ptxemu.Error as error:
        return out, error


def counted(report: ptxemu.Report) -> dict[str, Any]:
    return {name: value for name, value in report.counters.items() if name != "seconds"}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each run in several processes stood."""
    found: list[bool] = []
    whole = parallel.run

    def run(grid: Any, processes: int) -> bool:
        found.append(whole(grid, processes))
        return found[-1]

    monkeypatch.setattr(parallel, "run", run)
    return found


@pytest.mark.parametrize("schedule", ["lazy", "random"])
@pytest.mark.parametrize("checks", ["all", "none"])
@pytest.mark.parametrize("body", [INTERLEAVED, BLOCKS], ids=["interleaved", "blocks"])
def test_shares_are_put_together(body: str, checks: str, schedule: str, runs: list[bool]) -> None:
    out, report = launch(body, 1, checks=checks, schedule=schedule)
    assert out.any()
    for processes in (2, 20):
        divided, same = launch(body, processes, checks=checks, schedule=schedule)
        assert divided.tolist() == out.tolist()
        assert counted(same) == counted(report)
        assert same.traffic == report.traffic
        assert [len(spans) for spans in (same.lives, same.operations)] == [8, 0]
        assert {span.cta for span in same.lives} == {span.cta for span in report.lives}
    assert runs == [True] * 2


def test_memory_that_does_not_begin_or_end_with_a_granule(runs: list[bool]) -> None:
    room = np.zeros(300, np.uint8)
    start = -room.ctypes.data % 16 + 4
    source, out = np.arange(256, dtype=np.uint8), room[start : start + 259]
    ptxemu.Device("sm_100a", processes=2).launch(KERNEL.format(body=INTERLEAVED), grid=(8,), args=[source, out])
    assert out.tolist() == [*(source + np.uint8(1)).tolist(), 0, 0, 0]
    assert not room[:start].any()
    assert runs == [True]


def test_a_byte_that_two_read_and_write_makes_it_one_process(runs: list[bool]) -> None:
    out, report = launch(NEIGHBOUR, 1)
    divided, same = launch(NEIGHBOUR, 2)
    assert report.findings
    placeless = [
        [dataclasses.replace(finding, address=0, allocation="") for finding in found.findings]
        for found in (report, same)
    ]
    assert placeless[0] == placeless[1]
    assert divided.tolist() == out.tolist()
    launch(NEIGHBOUR, 8, checks="none")
    assert runs == [False, False]


def test_an_error_is_that_of_one_process(runs: list[bool]) -> None:
    _, error = launch(PAST_THE_END, 1)
    _, same = launch(PAST_THE_END, 2)
    assert isinstance(error, ptxemu.MemoryFault)
    assert type(same) is type(error)
    assert str(same).splitlines()[-1] == str(error).splitlines()[-1]
    assert runs == [False]


def test_a_share_whose_process_dies_is_done_again(monkeypatch: pytest.MonkeyPatch, runs: list[bool]) -> None:
    monkeypatch.setattr(parallel, "_work", lambda grid, part, count: None if part else parallel.os._exit(1))
    out, _ = launch(BLOCKS, 2)
    assert out.tolist() == launch(BLOCKS, 1)[0].tolist()
    assert runs == [False]


MINE_AND_THE_FIRST = """mad.wide.u32 d2, r1, 128, d1;
    mad.wide.u32 d2, r0, 4, d2;
    ld.global.u32 r3, [d2];
    add.u32 r3, r3, 1;
    st.global.u32 [d2], r3;
    ld.global.u32 r4, [d1];"""


@pytest.mark.parametrize("kind", ["file", "anonymous", "system"])
@pytest.mark.parametrize(("body", "stands"), [(MINE_AND_THE_FIRST, False), (BLOCKS, True)], ids=["conflict", "clean"])
def test_memory_that_processes_share(body: str, stands: bool, kind: str, runs: list[bool], tmp_path: Any) -> None:
    memory: Any = mmap.mmap(-1, 1024)
    if kind == "file":
        (tmp_path / "words").write_bytes(bytes(1024))
        out = np.memmap(tmp_path / "words", np.uint32, "r+")
    elif kind == "system":
        memory = shared_memory.SharedMemory(create=True, size=1024)
        out = np.ndarray(256, np.uint32, memory.buf)
    else:
        out = np.frombuffer(memory, np.uint32)
    out[:] = 100
    source = np.full(256, 100, np.uint32)
    device = ptxemu.Device("sm_100a", processes=2, on_finding="collect")
    device.register(out)
    device.launch(KERNEL.format(body=body), grid=(8,), args=[source, out.ctypes.data])
    assert runs == [stands]
    assert out.tolist() == ([100 + i // 32 for i in range(256)] if stands else [101] * 256)
    del out, device
    if kind == "system":
        gc.collect()
        memory.close()
        memory.unlink()


def test_a_fork_that_fails_leaves_one_process(monkeypatch: pytest.MonkeyPatch, runs: list[bool]) -> None:
    fork = os.fork
    children: list[int] = []

    def second_fails() -> int:
        if children:
            raise BlockingIOError(11, "no more processes")
        children.append(fork())
        return children[0]

    monkeypatch.setattr(os, "fork", second_fails)
    before = os.listdir("/proc/self/fd")
    out, _ = launch(BLOCKS, 2)
    assert out.any()
    assert runs == [False]
    assert len(os.listdir("/proc/self/fd")) == len(before)
    with pytest.raises(ChildProcessError):
        os.waitpid(children[0], os.WNOHANG)


def test_children_that_the_system_forgets(runs: list[bool]) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        out, _ = launch(BLOCKS, 2)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert out.any()
    assert runs == []


def test_a_limit_of_turns_is_for_one_process(runs: list[bool]) -> None:
    launch(BLOCKS, 2, max_turns=10_000)
    assert runs == []


def test_clusters_that_meet_in_global_memory_stay_together(runs: list[bool]) -> None:
    source, out = np.zeros(1, np.uint32), np.zeros(8, np.uint32)
    ptxemu.Device("sm_100a", processes=2).launch(KERNEL.format(body=TICKET), grid=(8,), args=[source, out])
    assert sorted(out.tolist()) == list(range(8))
    assert runs == []


@pytest.mark.parametrize(
    ("instruction", "apart"),
    [
        ("st.shared.u32 [room], r0;", True),
        ("atom.shared.add.u32 r3, [room], 1;", True),
        ("ld.relaxed.cta.shared.u32 r3, [room];", True),
        ("fence.acq_rel.gpu;", True),
        ("ld.volatile.global.u32 r3, [d0];", False),
        ("ld.acquire.gpu.global.u32 r3, [d0];", False),
        ("st.release.gpu.global.u32 [d1], r3;", False),
        ("red.global.add.u32 [d1], r3;", False),
        ("atom.add.u32 r3, [d1], 1;", False),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [d1], [room], 16;", False),
        ("griddepcontrol.wait;", False),
        ("clusterlaunchcontrol.try_cancel.async.mbarrier::complete_tx::bytes.b128 [room], [room];", False),
        ("mov.u64 d3, %clock64;", False),
        ("mov.u32 r3, %globaltimer_lo;", False),
    ],
)
def test_which_kernels_can_be_divided(instruction: str, apart: bool) -> None:
    assert generate(parse(KERNEL.format(body=instruction)), "k").independent is apart


def test_what_one_launch_wrote_the_next_may_read() -> None:
    out = np.zeros(256, np.uint32)
    device = ptxemu.Device("sm_100a", processes=2)
    device.register(out, "between", initialised=False)
    source, last = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    text = KERNEL.format(body=BLOCKS)
    device.launch(text, grid=(8,), args=[source, out.ctypes.data])
    device.launch(text, grid=(8,), args=[out.ctypes.data, last])
    assert last.any()


@pytest.mark.parametrize("processes", [0, -1])
def test_a_number_of_processes(processes: int) -> None:
    with pytest.raises(ptxemu.LaunchError, match=f"processes={processes}: at least 1"):
        ptxemu.Device(processes=processes)
