"""Races over shared memory, of one CTA and of a cluster, and between the generic and the async proxy."""

from __future__ import annotations

import pytest
from programs import INIT, RUNS, Pair, check, findings, wait

STORE = "st.shared.u32 [r4], r0;\n"
LOAD = "ld.shared.u32 r6, [r5];\n st.global.u32 [d3], r6;\n"
BULK_STORE = """
    @first cp.async.bulk.global.shared::cta.bulk_group [d1], [r2], 256;
    @first cp.async.bulk.commit_group;
"""
READ = "@first cp.async.bulk.wait_group.read 0;\n"
DONE = "@first cp.async.bulk.wait_group 0;\n"
BULK_LOAD = """
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [bar], 256;
    @first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [r2], [d0], 256, [r3];
"""
FENCE = "fence.proxy.async.shared::cta;\n"
SYNC = "bar.sync 0;\n"
CLUSTER_SYNC = "barrier.cluster.arrive;\n barrier.cluster.wait;\n"
TO_PEER = "mapa.shared::cluster.u32 r7, r4, 1;\n @leader st.shared::cluster.u32 [r7], r0;\n"
FROM_PEER = "@leader bra END;\n ld.shared.u32 r6, [r4];\n st.global.u32 [d3], r6;\nEND:\n"
ARRIVE = "@first mbarrier.arrive.{sem}shared::cta.b64 _, [bar];\n"
REMOTE_ARRIVE = f"""
    barrier.cluster.arrive.relaxed;
    barrier.cluster.wait;
    mapa.shared::cluster.u32 r7, r3, 1;
    and.pred q, first, leader;
    @q mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r7];
    {CLUSTER_SYNC}
"""

PAIRS = [
    Pair(
        "read after write", "race", STORE + LOAD, STORE + SYNC + LOAD, "a load is not ordered after a store", early=True
    ),
    Pair(
        "write after read",
        "race",
        STORE + SYNC + LOAD + "st.shared.u32 [r4], r6;",
        STORE + SYNC + LOAD + SYNC + "st.shared.u32 [r4], r6;",
    ),
    Pair(
        "write after write",
        "race",
        "st.shared.u32 [room], r0;" + SYNC,
        "@first st.shared.u32 [room], r0;" + SYNC + "@second st.shared.u32 [room], r0;" + SYNC,
        "a store is not ordered after a store",
    ),
    Pair(
        "a half of the same word",
        "race",
        "@first st.shared.u32 [room], r0;\n @second st.shared.b16 [room+2], 1;",
        "@first st.shared.b16 [room], 1;\n @second st.shared.b16 [room+2], 1;",
    ),
    Pair(
        "arrive and wait",
        "race",
        INIT + STORE + "setp.ge.u32 q, r0, 32;\n @q bra END;\n" + ARRIVE.format(sem="relaxed.cta.") + "END:"
        + wait() + LOAD,
        INIT.replace("[bar], 1", "[bar], 64") + STORE + "mbarrier.arrive.shared::cta.b64 _, [bar];" + wait() + LOAD,
        early=True,
    ),
    Pair(
        "relaxed arrivals need fences",
        "race",
        INIT.replace("[bar], 1", "[bar], 64") + STORE + "mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [bar];"
        + wait(sem=".relaxed.cta") + LOAD,
        INIT.replace("[bar], 1", "[bar], 64") + STORE
        + "fence.acq_rel.cta;\n mbarrier.arrive.relaxed.cta.shared::cta.b64 _, [bar];"
        + wait(sem=".relaxed.cta") + "fence.acq_rel.cta;" + LOAD,
    ),
    Pair(
        "of a peer CTA", "race", TO_PEER + FROM_PEER + CLUSTER_SYNC, TO_PEER + CLUSTER_SYNC + FROM_PEER, "", 2, 2, True
    ),
    Pair(
        "of a peer CTA, relaxed",
        "race",
        TO_PEER + CLUSTER_SYNC.replace("arrive", "arrive.relaxed") + FROM_PEER,
        TO_PEER + "fence.acq_rel.cluster;\n" + CLUSTER_SYNC.replace("arrive", "arrive.relaxed") + FROM_PEER,
        "", 2, 2,
    ),
    Pair(
        "no proxy fence before a bulk store",
        "missing fence.proxy.async",
        STORE + SYNC + BULK_STORE + DONE,
        STORE + FENCE + SYNC + BULK_STORE + DONE,
        "an asynchronous read comes after a store",
    ),
    Pair(
        "a proxy fence for another state space",
        "missing fence.proxy.async",
        STORE + "fence.proxy.async.global;\n" + SYNC + BULK_STORE + DONE,
        STORE + "fence.proxy.async;\n" + SYNC + BULK_STORE + DONE,
    ),
    Pair(
        "a proxy fence before the store",
        "missing fence.proxy.async",
        FENCE + STORE + SYNC + BULK_STORE + DONE,
        STORE + SYNC + FENCE + BULK_STORE + DONE,  # by the thread that issues the copy
    ),
    Pair(
        "a bulk store of what another warp writes",
        "race or bulk store source reused",  # the write came before the copy was issued, or after
        STORE + FENCE + BULK_STORE + DONE + SYNC,
        STORE + FENCE + SYNC + BULK_STORE + DONE,
        early=True,
    ),
    Pair(
        "a bulk store's source overwritten",
        "bulk store source reused",
        STORE + FENCE + SYNC + BULK_STORE + SYNC + STORE + DONE,
        STORE + FENCE + SYNC + BULK_STORE + READ + SYNC + STORE + DONE,
    ),
    Pair(
        "a copy in no group",
        "bulk store source reused",
        STORE + FENCE + SYNC + BULK_STORE.replace("@first cp.async.bulk.commit_group;", "") + READ + SYNC + STORE
        + "@first cp.async.bulk.commit_group;\n" + DONE,
        STORE + FENCE + SYNC + BULK_STORE + READ + SYNC + STORE + DONE,
    ),
    Pair(
        "a load that nobody waited for",
        "race",
        STORE + FENCE + INIT + BULK_LOAD + LOAD + wait(),
        STORE + FENCE + INIT + BULK_LOAD + wait() + LOAD,
    ),
    Pair(
        "a load over what another warp still reads",
        "race",
        STORE + FENCE + INIT + LOAD + BULK_LOAD + wait(),
        STORE + FENCE + INIT + LOAD + SYNC + BULK_LOAD + wait(),
        "an asynchronous write is not ordered after a load",
    ),
    Pair(
        "a load over what was stored",
        "missing fence.proxy.async",
        STORE + INIT + BULK_LOAD + wait(),
        STORE + FENCE + INIT + BULK_LOAD + wait(),
        "an asynchronous write comes after a store",
    ),
    Pair(
        "a store behind the arrival, before the copy",
        "race",
        FENCE + INIT + BULK_LOAD.replace("@first cp", "@first st.shared.u32 [room+512], 7;\n @first cp") + wait()
        + "ld.shared.u32 r6, [room+512];",
        FENCE + INIT + "@first st.shared.u32 [room+512], 7;\n" + BULK_LOAD + wait() + "ld.shared.u32 r6, [room+512];",
    ),
    Pair(
        "two loads to one place",
        "race",
        INIT + BULK_LOAD.replace("tx.shared::cta.b64 _, [bar], 256", "tx.shared::cta.b64 _, [bar], 512")
        + "@first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [r2], [d0], 256, [r3];" + wait(),
        INIT + BULK_LOAD + wait() + SYNC + BULK_LOAD + wait("bar", 1),
        "an asynchronous write is not ordered after an asynchronous write",
    ),
    Pair(
        "cp.async",
        "race",
        "mul.wide.u32 d4, r0, 4;\n add.u64 d4, d0, d4;\n cp.async.ca.shared.global [r4], [d4], 4;\n"
        + "ld.shared.u32 r6, [r4];\n cp.async.wait_all;",
        "mul.wide.u32 d4, r0, 4;\n add.u64 d4, d0, d4;\n cp.async.ca.shared.global [r4], [d4], 4;\n"
        + "cp.async.wait_all;\n ld.shared.u32 r6, [r4];",
        early=True,
    ),
    Pair(
        "an mbarrier of another warp",
        "mbarrier.init not visible",
        "@first mbarrier.init.shared::cta.b64 [bar], 1;\n"
        + "W: mov.u32 r9, 3000;\n L: sub.u32 r9, r9, 1;\n setp.ne.u32 p, r9, 0;\n @p bra L;\n"
        + "@second mbarrier.arrive.shared::cta.b64 _, [bar];\n",
        "@first mbarrier.init.shared::cta.b64 [bar], 1;\n bar.sync 0;\n"
        + "@second mbarrier.arrive.shared::cta.b64 _, [bar];\n",
    ),
    Pair(
        "an mbarrier for the async proxy",
        "mbarrier.init not visible",
        INIT.replace("fence.mbarrier_init.release.cluster;", "") + BULK_LOAD + wait(),
        INIT + BULK_LOAD + wait(),
        "the async proxy uses a barrier",
    ),
    Pair(
        "an mbarrier of a peer CTA",
        "mbarrier.init not visible",
        INIT.replace("fence.mbarrier_init.release.cluster;", "") + REMOTE_ARRIVE,
        INIT + REMOTE_ARRIVE,
        "", 2, 2,
    ),
    Pair(
        "an mbarrier's bytes",
        "access to a live mbarrier",
        INIT + "@first st.shared.b32 [bar+4], 1;\n",
        INIT + "@first mbarrier.inval.shared::cta.b64 [bar];\n @first st.shared.b32 [bar+4], 1;\n",
    ),
    Pair(
        "a copy over an mbarrier",
        "access to a live mbarrier",
        FENCE + INIT + BULK_LOAD.replace("[r2]", "[room+7952]") + wait(),
        FENCE + INIT + BULK_LOAD.replace("[r2]", "[room+7936]") + wait(),
    ),
    Pair(
        "an mbarrier initialised twice",
        "race",
        "@first mbarrier.init.shared::cta.b64 [bar], 1;\n @second mbarrier.init.shared::cta.b64 [bar], 1;\n",
        "@first mbarrier.init.shared::cta.b64 [bar], 1;\n @second mbarrier.init.shared::cta.b64 [bar2], 1;\n",
        "initialises a barrier",
    ),
]  # fmt: skip


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]}-{run[1]}")
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pair(pair: Pair, run: tuple[str, int]) -> None:
    check(pair, run)


def test_what_a_finding_says() -> None:
    found = findings("st.shared.u32 [r5], r0;\n" + STORE + LOAD)[-1]
    assert found.kind == "race"
    assert "CTA (0, 0, 0)" in found.warp
    assert "shared memory of CTA (0, 0, 0)" in found.allocation
    assert found.address is not None
    assert 0x400 <= found.address < 0x500
    assert f"line {found.other_line}: `st.shared.u32 [r4], r0;`" in found.other or found.text in STORE


def test_strict_asks_for_a_fence_between_a_load_and_an_asynchronous_write() -> None:
    """PTX 'Async proxy' asks for it in both directions; published kernels leave it out after loads."""
    body = INIT + BULK_LOAD + wait() + "ld.shared.u32 r6, [r4];\n {} bar.sync 0;" + BULK_LOAD + wait("bar", 1)
    assert findings(body.format("")) == []
    assert {f.kind for f in findings(body.format(""), checks="strict")} == {"missing fence.proxy.async"}
    assert findings(body.format(FENCE), checks="strict") == []


def test_no_checks() -> None:
    assert findings(STORE + LOAD, checks="none") == []
