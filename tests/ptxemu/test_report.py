"""Reports: the trace for Perfetto, the summary, JSON, and the command line that prints them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import bulk_kernel
import numpy as np
import pytest
from bulk_kernel import WAIT, aligned

import ptxemu
from ptxemu.__main__ import main
from ptxemu.report import summary
from ptxemu.report.trace import unit

COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
ROUND_TRIP = f"""
    @q mbarrier.arrive.expect_tx.shared.b64 d9, [r3], 4096;
    @q {COPY} [r2], [d0], 2048, [r3];
    add.u32 r5, r2, 2048;
    @q {COPY} [r5], [d0], 2048, [r3];
    {WAIT}
    @q cp.async.bulk.global.shared::cta.bulk_group [d3], [r2], 4096;
    @q cp.async.bulk.commit_group;
    @q cp.async.bulk.wait_group 0;
"""


def launched(schedule: str = "lazy") -> ptxemu.Report:
    """A pair of CTAs, each of which copies 4096 bytes in and out."""
    source, out = aligned(4096, seed=1), aligned(2 * bulk_kernel.ROOM)
    text = bulk_kernel.TEXT.format(room=bulk_kernel.ROOM, body=ROUND_TRIP)
    device = ptxemu.Device("sm_100a", schedule=schedule, checks="none")
    report = device.launch(text, grid=(2,), cluster=(2,), args=[bytes(128), source, out])
    assert (out.reshape(2, -1)[:, :2048] == source[:2048]).all()
    return report


def traced(report: ptxemu.Report, path: Path) -> list[dict[str, Any]]:
    report.trace(path / "t.json")
    events: list[dict[str, Any]] = json.loads((path / "t.json").read_text())["traceEvents"]
    return events


@pytest.mark.parametrize("schedule", ["eager", "lazy", "fifo", "random"])
def test_a_trace_has_a_track_a_warp_and_unit(schedule: str, tmp_path: Path) -> None:
    events = traced(launched(schedule), tmp_path)
    named = {(e["pid"], e.get("tid"), e["name"]): e["args"] for e in events if e["ph"] == "M"}
    processes = [args["name"] for (_, _, kind), args in named.items() if kind == "process_name"]
    assert processes == ["CTA (0, 0, 0)", "CTA (1, 0, 0)"]
    for pid in (1, 2):
        tracks = {a["name"] for (p, _, kind), a in named.items() if p == pid and kind == "thread_name"}
        assert {"warp 0: TMA load + TMA store", "TMA load", "TMA store"} <= tracks
    slices = [e for e in events if e["ph"] == "X"]
    loads = [e for e in slices if e["name"] == "cp.async.bulk load"]
    assert len(loads) == 4
    assert {e["args"]["issued by"] for e in loads} == {"warp 0"}
    assert all(COPY in e["args"]["ptx"] and e["args"]["line"] > 0 for e in loads)
    for track in {(e["pid"], e["tid"]) for e in slices}:
        check_nesting([e for e in slices if (e["pid"], e["tid"]) == track])
    assert any(e["name"].startswith("wait: ") for e in slices)


def check_nesting(slices: list[dict[str, Any]]) -> None:
    """Slices of a track lie beside or inside each other, or no viewer draws them."""
    open_ends: list[int] = []
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        while open_ends and open_ends[-1] <= event["ts"]:
            open_ends.pop()
        end = event["ts"] + event["dur"]
        assert not open_ends or end <= open_ends[-1]
        open_ends.append(end)


def test_flows_lead_from_the_issuing_warp_to_the_operation(tmp_path: Path) -> None:
    events = traced(launched("fifo"), tmp_path)
    slices = [e for e in events if e["ph"] == "X"]

    def inside(flow: dict[str, Any]) -> bool:
        mine = [e for e in slices if (e["pid"], e["tid"]) == (flow["pid"], flow["tid"])]
        return any(e["ts"] <= flow["ts"] <= e["ts"] + e["dur"] for e in mine)

    starts, ends = ({e["id"]: e for e in events if e["ph"] == ph} for ph in "sf")
    assert starts.keys() == ends.keys()
    assert len(starts) == sum("issued by" in e["args"] for e in slices)
    assert all(inside(flow) for flow in (*starts.values(), *ends.values()))
    assert {flow["tid"] for flow in starts.values()} == {0}


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("cp.async.bulk.tensor.3d load", "TMA load"),
        ("cp.async.bulk.tensor.3d store (reading its source)", "TMA store"),
        ("cp.reduce.async.bulk", "TMA store"),
        ("cp.async.bulk", "bulk copy"),
        ("cp.async", "cp.async"),
        ("tcgen05.mma.mxf4nvf4", "tensor core"),
        ("tcgen05.commit", "tensor core"),
        ("tcgen05.st", "tensor memory store"),
        ("red.async", "remote store"),
    ],
)
def test_units(what: str, name: str) -> None:
    assert unit(what) == name


def test_json() -> None:
    report = launched()
    found = json.loads(report.json())
    assert found["kernel"] == "k"
    assert found["findings"] == []
    assert found["counters"]["bytes"]["TMA load, shared memory"] == 8192
    assert found["counters"] == json.loads(json.dumps(report.counters))


LEAK = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry leak()
{
    .shared .align 4 .b32 place;
    .reg .b32 r<3>;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [place], 64;
    ld.shared.b32 r0, [place];
}
"""


def summaries(report: ptxemu.Report, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """With and without rich."""
    tables = io.StringIO()
    report.summary(tables)
    monkeypatch.setattr(summary.importlib.util, "find_spec", lambda name: None)
    text = io.StringIO()
    report.summary(text)
    return [tables.getvalue(), text.getvalue()]


def test_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    report = ptxemu.Device("sm_100a", on_finding="collect").launch(LEAK)
    for shown in summaries(report, monkeypatch):
        assert "leak: 1 finding; 2 warp instructions of 1 warps in 1 CTAs" in shown
        assert "tensor-memory leak" in shown
        assert "ld.shared.b32 r0, [place];" in shown
        assert "Shared memory: 1 wavefronts, 1 ideal" in shown
        assert "Bytes moved" not in shown


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, trace = tmp_path / "leak.ptx", tmp_path / "t.json"
    path.write_text(LEAK)
    assert main(["exec", str(path)]) == 1
    assert "FindingError: leak: 2 warp instructions" in capsys.readouterr().err
    assert main(["exec", str(path), "--summary", "--trace", str(trace)]) == 1
    shown = capsys.readouterr()
    assert "1 finding" in shown.out
    assert not shown.err
    assert {e["ph"] for e in json.loads(trace.read_text())["traceEvents"]} == {"M", "X"}
    assert main(["exec", str(path), "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)
    assert [f["kind"] for f in report["findings"]] == ["tensor-memory leak"]
    assert main(["exec", str(path), "--json", "--checks", "none"]) == 0
    np.testing.assert_equal(json.loads(capsys.readouterr().out)[0]["findings"], [])


def test_an_error_has_the_report_up_to_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[2] / "docs" / "examples" / "deadlock.ptx"
    with pytest.raises(ptxemu.Deadlock) as caught:
        ptxemu.Device("sm_100a").launch(path.read_text(), block=(1,))
    report = caught.value.report
    assert report is not None
    assert report.counters["instructions"]["mbarrier.arrive"] == 1
    waits = [e["name"] for e in traced(report, tmp_path) if e["ph"] == "X" and e["name"].startswith("wait")]
    assert waits == ["wait: mbarrier.try_wait.parity.shared::cta.b64 done, [full], 0;"] * len(waits)
    assert waits
    assert main(["exec", str(path), "--block", "1", "--summary", "--trace", str(tmp_path / "u.json")]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("Deadlock: forgotten_arrive")
    assert "forgotten_arrive: 0 findings" in shown.out
    assert (tmp_path / "u.json").exists()


def test_lanes_that_wait_apart_have_a_track_of_their_own(tmp_path: Path) -> None:
    text = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry apart()
{
    .shared .align 8 .b64 bars[2];
    .reg .pred first, odd, done;
    .reg .b32 thread, lane, bar;
    mov.u32 thread, %tid.x;
    and.b32 lane, thread, 31;
    setp.eq.u32 first, thread, 32;
    @first mbarrier.init.shared.b64 [bars], 1;
    @first mbarrier.init.shared.b64 [bars+8], 1;
    bar.sync 0;
    setp.ge.u32 first, thread, 32;
    @first bra ARRIVE;
    setp.gt.u32 odd, lane, 15;
    mov.u32 bar, bars;
    @!odd bra WAIT;
    add.u32 bar, bar, 8;
    bra OTHER;
WAIT:
    mbarrier.try_wait.parity.shared.b64 done, [bar], 0;
    @!done bra WAIT;
    bra END;
OTHER:
    mbarrier.try_wait.parity.shared.b64 done, [bar], 0;
    @!done bra OTHER;
    bra END;
ARRIVE:
    setp.ne.u32 first, lane, 0;
    @first bra END;
    mbarrier.arrive.shared.b64 _, [bars];
    nanosleep.u32 100;
    mbarrier.arrive.shared.b64 _, [bars+8];
END:
    ret;
}
"""
    for seed in range(4):
        device = ptxemu.Device("sm_100a", schedule="random", seed=seed)
        slices = [e for e in traced(device.launch(text, block=(64,)), tmp_path) if e["ph"] == "X"]
        for track in {e["tid"] for e in slices}:
            check_nesting([e for e in slices if e["tid"] == track])
