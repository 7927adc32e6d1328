"""Small programs for the tests of findings: each wrong one has a twin that is right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

import ptxemu

RUNS = [("eager", 0), ("lazy", 0), ("fifo", 0), ("random", 1), ("random", 2), ("random", 3)]
TEXT = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry k(.param .align 64 .b8 map[128], .param .u64 in, .param .u64 out)
{{
    .shared .align 1024 .b8 room[8192];
    .shared .align 8 .b64 bar;
    .shared .align 8 .b64 bar2;
    .reg .pred p, q, first, second, leader;
    .reg .b32 r<20>;
    .reg .b64 d<20>;
    ld.param.u64 d0, [in];
    ld.param.u64 d1, [out];
    mov.u64 d2, map;
    cvta.param.u64 d2, d2;
    mov.u32 r0, %tid.x;
    mov.u32 r1, %cluster_ctarank;
    mov.u32 r2, room;
    mov.u32 r3, bar;
    shl.b32 r4, r0, 2;
    add.u32 r4, r4, r2;
    xor.b32 r5, r0, 32;
    shl.b32 r5, r5, 2;
    add.u32 r5, r5, r2;
    mul.wide.u32 d3, r0, 4;
    add.u64 d3, d1, d3;
    setp.eq.u32 first, r0, 0;
    setp.eq.u32 second, r0, 32;
    setp.eq.u32 leader, r1, 0;
    {body}
    ret;
}}
"""
INIT = """
    @first mbarrier.init.shared::cta.b64 [bar], 1;
    @first mbarrier.init.shared::cta.b64 [bar2], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""


def wait(barrier: str = "bar", parity: int = 0, sem: str = "") -> str:
    """Waits for a phase of a barrier; label and barrier have one name."""
    return f"""
W_{barrier}_{parity}: mbarrier.try_wait.parity{sem}.shared::cta.b64 p, [{barrier}], {parity};
    @!p bra W_{barrier}_{parity};
"""


@dataclass(frozen=True)
class Pair:
    """Two bodies of `TEXT` with two warps a CTA.  d0 = in, d1 = out, d2 = the map, d3 = the thread's word of out, r0 =
    thread, r1 = rank in the cluster, r2 = room, r4 = the thread's word of it, r5 = that of the same lane of the other
    warp; first, second: thread 0 of each warp; leader: CTA 0 of the cluster."""

    name: str
    kind: str
    wrong: str
    right: str
    message: str = ""  # what the finding says, a part of it
    grid: int = 1
    cluster: int = 1
    early: bool = False  # the wrong one may read what nobody has written yet

    def __str__(self) -> str:
        return self.name


def aligned(size: int) -> npt.NDArray[np.uint8]:
    """Bytes that count up, at a 128-byte boundary."""
    raw = np.zeros(size + 128, np.uint8)
    data = raw[-raw.ctypes.data % 128 :][:size]
    data[:] = np.arange(size)
    return data


def findings(
    body: str,
    run: tuple[str, int] = ("lazy", 0),
    *,
    grid: int = 1,
    cluster: int = 1,
    checks: str = "all",
    out: Any = None,
    tensor_map: Any = bytes(128),
) -> list[ptxemu.Finding]:
    """What is found in a body of `TEXT`."""
    device = ptxemu.Device("sm_100a", schedule=run[0], seed=run[1], checks=checks, on_finding="collect")
    out = np.zeros(8192, np.uint8) if out is None else out
    report = device.launch(
        TEXT.format(body=body),
        grid=(grid, 1, 1),
        cluster=(cluster, 1, 1),
        block=(64, 1, 1),
        args=[tensor_map, aligned(8192), out],
    )
    return report.findings


def check(pair: Pair, run: tuple[str, int]) -> None:
    """The wrong program has findings of its kind alone, the right one none."""
    found = findings(pair.wrong, run, grid=pair.grid, cluster=pair.cluster)
    kinds = {finding.kind for finding in found}
    assert kinds & set(pair.kind.split(" or ")), found
    assert kinds <= {*pair.kind.split(" or "), *(["uninitialised read"] if pair.early else [])}, found
    assert any(pair.message in f"{finding.message} {finding.other}" for finding in found), found
    for finding in found:
        assert finding.line
        assert finding.text
        assert finding.warp
    assert findings(pair.right, run, grid=pair.grid, cluster=pair.cluster) == []
