"""Races over global memory, between CTAs, and what orders them: flags, atomics, fences."""

from __future__ import annotations

import numpy as np
import pytest
from programs import RUNS, Pair, aligned, check, findings

import ptxemu

# CTA 0 writes 64 words and raises the flag behind them; CTA 1 waits for the flag and reads them.
RANK = "mov.u32 r8, %ctaid.x;\n setp.ne.u32 q, r8, 0;\n"
WRITE = "@q bra READER;\n st.global.u32 [d3], r0;\n"
RAISE = "bar.sync 0;\n {fence} @first {op} [d1+256], 1;\n bra END;\n"
AWAIT = """
READER: {op} r9, [d1+256];
    setp.ne.u32 p, r9, 1;
    @p bra READER;
    {fence}
"""
READ = "ld.global.u32 r6, [d3];\n st.global.u32 [d3+512], r6;\n END:"


def exchange(store: str, load: str, fence: str = "") -> str:
    return RANK + WRITE + RAISE.format(op=store, fence=fence) + AWAIT.format(op=load, fence=fence) + READ


GOOD = exchange("st.release.gpu.global.u32", "ld.acquire.gpu.global.u32")
FENCED = exchange("st.relaxed.gpu.global.u32", "ld.relaxed.gpu.global.u32", "fence.acq_rel.gpu;\n")
ADD = "ld.global.u32 r9, [d1];\n add.u32 r9, r9, 1;\n st.global.u32 [d1], r9;"
COPY_OUT = """
    st.global.u32 [d3], r0;
    {fence}
    @first mbarrier.init.shared::cta.b64 [bar], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;
    @first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [r2], [d1], 256, [r3];
W:  mbarrier.try_wait.parity.shared::cta.b64 p, [bar], 0;
    @!p bra W;
"""
BULK = """
    st.shared.u32 [r4], r0;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @first cp.async.bulk.global.shared::cta.bulk_group [d1], [r2], 256;
    @first cp.async.bulk.commit_group;
    @first cp.async.bulk.wait_group{read} 0;
    bar.sync 0;
    ld.global.u32 r6, [d3];
"""
REPLACE = """
    mul.wide.u32 d4, r8, 128;
    add.u64 d4, d1, d4;
    @first tensormap.replace.tile.global_address.global.b1024.b64 [d4], d0;
    @first tensormap.replace.tile.rank.global.b1024.b32 [d4], 0;
    @first tensormap.replace.tile.elemtype.global.b1024.b32 [d4], 0;
    @first tensormap.replace.tile.interleave_layout.global.b1024.b32 [d4], 0;
    @first tensormap.replace.tile.swizzle_mode.global.b1024.b32 [d4], 0;
    @first tensormap.replace.tile.swizzle_atomicity.global.b1024.b32 [d4], 0;
    @first tensormap.replace.tile.fill_mode.global.b1024.b32 [d4], 0;
    @first tensormap.replace.tile.global_dim.global.b1024.b32 [d4], 0, 256;
    @first tensormap.replace.tile.box_dim.global.b1024.b32 [d4], 0, 64;
    @first tensormap.replace.tile.element_stride.global.b1024.b32 [d4], 0, 1;
    {fence}
    @first cp.async.bulk.prefetch.tensor.1d.L2.global [d4, {{0}}];
"""

PAIRS = [
    Pair("no flag", "race", RANK + WRITE + "bra END;\n READER:" + READ, GOOD, "", 2),
    Pair("weak flag", "race", exchange("st.global.u32", "ld.global.u32"), GOOD, "", 2),
    Pair(
        "relaxed flag without fences",
        "race",
        exchange("st.relaxed.gpu.global.u32", "ld.relaxed.gpu.global.u32"),
        FENCED,
        "a load is not ordered after a store",
        2,
    ),
    Pair(
        "a flag for the CTA alone",
        "race",
        exchange("st.release.cta.global.u32", "ld.acquire.cta.global.u32"),
        exchange("red.release.gpu.global.add.u32", "ld.acquire.gpu.global.u32"),
        "",
        2,
    ),
    Pair(
        "a fence for the CTA alone",
        "race",
        exchange("st.relaxed.gpu.global.u32", "ld.relaxed.gpu.global.u32", "fence.acq_rel.cta;\n"),
        FENCED,
        "",
        2,
    ),
    Pair(
        "a swap beside a weak load",
        "race",
        "ld.global.u32 r6, [d1];\n atom.global.cas.b32 r7, [d1], 0, 1;",
        "ld.global.u32 r6, [d1];\n atom.global.cas.b32 r7, [d1], 5, 1;",  # fails, and so writes nothing
        "",
        2,
    ),
    Pair("counting", "race", ADD, "red.global.add.u32 [d1], 1;", "", 3),
    Pair("two warps", "race", "st.global.u32 [d1], r0;", "st.global.u32 [d3], r0;"),
    Pair(
        "stored and copied",
        "missing fence.proxy.async",
        COPY_OUT.format(fence="fence.proxy.async.shared::cta;"),
        COPY_OUT.format(fence="fence.proxy.async.global;"),
        "fence.proxy.async for global memory",
    ),
    Pair("a bulk store that is only read", "race", BULK.format(read=".read"), BULK.format(read="")),
    Pair(
        "a tensor map that was changed",
        "missing fence.proxy.tensormap",
        "mov.u32 r8, 0;" + REPLACE.format(fence="fence.acq_rel.gpu;"),
        "mov.u32 r8, 0;"
        + REPLACE.format(
            fence="fence.proxy.tensormap::generic.release.gpu;\nfence.proxy.tensormap::generic.acquire.gpu [d4], 128;"
        ),
    ),
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]}-{run[1]}")
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pair(pair: Pair, run: tuple[str, int]) -> None:
    check(pair, run)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]}-{run[1]}")
def test_bulk_reductions_of_many_ctas_are_no_race(run: tuple[str, int]) -> None:
    """PTX 'cp.reduce.async.bulk': each is relaxed at gpu scope.  Plain bulk stores to one place are a race."""
    body = """
    st.shared.u32 [r4], 1;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @first cp{0}.async.bulk.global.shared::cta.bulk_group{1} [d1], [r2], 256;
    @first cp.async.bulk.commit_group;
    @first cp.async.bulk.wait_group 0;
    """
    assert findings(body.format(".reduce", ".add.u32"), run, grid=4) == []
    assert {f.kind for f in findings(body.format("", ""), run, grid=4)} == {"race"}


def test_clusters_that_run_one_after_the_other_still_race() -> None:
    """Nothing orders two clusters of a grid, also where one has ended before the other begins."""
    device = ptxemu.Device("sm_100a", sms=1, on_finding="collect")
    text = """
    .version 9.0
    .target sm_100a
    .address_size 64
    .visible .entry k(.param .u64 out) { .reg .b64 d<2>; ld.param.u64 d0, [out]; st.global.u32 [d0], 1; ret; }
    """
    report = device.launch(text, grid=(2, 1, 1), args=[np.zeros(4, np.uint32)])
    (found,) = report.findings
    assert found.kind == "race"
    assert "argument 0" in found.allocation
    assert "CTA (0, 0, 0)" in found.warp + found.other
    assert "CTA (1, 0, 0)" in found.warp + found.other


READ_OUT = "ld.global.u32 r6, [d3];\n"


def test_reading_an_uninitialised_array() -> None:
    out = ptxemu.Uninitialised(aligned(8192))
    assert {f.kind for f in findings(READ_OUT, out=out)} == {"uninitialised read"}
    assert findings("st.global.u32 [d3], r0;" + READ_OUT, out=out) == []
    assert findings(READ_OUT) == []
    assert (out.array == 0xFF).sum() >= 8192 - 256


def test_registered_memory_stays_written_from_launch_to_launch() -> None:
    device = ptxemu.Device("sm_100a", on_finding="collect")
    out = aligned(256)
    device.register(out, initialised=False)
    text = """
    .version 9.0
    .target sm_100a
    .address_size 64
    .visible .entry write(.param .u64 out) { .reg .b64 d<2>; ld.param.u64 d0, [out]; st.global.u32 [d0], 1; ret; }
    .visible .entry read(.param .u64 out)
    { .reg .b64 d<2>; .reg .b32 r<2>; ld.param.u64 d0, [out]; ld.global.u32 r0, [d0]; ret; }
    """

    def kinds(kernel: str) -> list[str]:
        return [f.kind for f in device.launch(text, kernel, args=[out.ctypes.data]).findings]

    assert kinds("read") == ["uninitialised read"]
    assert kinds("write") == []
    assert kinds("read") == []
