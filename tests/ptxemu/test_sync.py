"""Fences, cluster barriers, addresses in a cluster, launch control: a case for each form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sync_kernel import SCHEDULES, missing_cases, run, wait

import ptxemu


@pytest.mark.parametrize(
    ("form", "rank_form"),
    [
        ("mapa.shared::cluster.u32", "getctarank.shared::cluster.u32"),
        ("mapa.shared::cluster.u64", "getctarank.shared::cluster.u64"),
        ("mapa.u64", "getctarank.u64"),
    ],
)
def test_mapa_and_getctarank(form: str, rank_form: str) -> None:
    """Each thread writes its number into the other CTA's shared memory."""
    wide = form.endswith("u64")
    address = "cvt.u64.u32 d2, r3;\n" + ("cvta.shared.u64 d2, d2;\n" if form == "mapa.u64" else "") if wide else ""
    a, b = ("d2", "d3") if wide else ("r3", "r4")
    generic = form == "mapa.u64"
    body = f"""
    mov.u32 r3, room;
    mad.lo.u32 r3, r0, 4, r3;
    {address}
    mov.u32 r2, %cluster_ctarank;
    xor.b32 r2, r2, 1;
    {form} {b}, {a}, r2;
    {rank_form} r6, {b};
    mad.lo.u32 r5, r6, 100, r0;
    st{"" if generic else ".shared::cluster"}.u32 [{b}], r5;
    barrier.cluster.arrive.release;
    barrier.cluster.wait.acquire;
    ld.shared.u32 r5, [r3];
    mov.u32 r2, %cluster_ctarank;
    mad.lo.u32 r2, r2, 32, r0;
    mul.wide.u32 d4, r2, 4;
    add.u64 d4, d0, d4;
    st.global.u32 [d4], r5;
    """
    out = run(body, np.zeros(64, np.uint32), grid=2, cluster=2)
    assert out.tolist() == [*range(32), *range(100, 132)]


def test_mapa_to_a_cta_that_is_not_there() -> None:
    """The address may be computed, not used."""
    body = "mov.u32 r3, room;\n mapa.shared::cluster.u32 r4, r3, r0;\n setp.lt.u32 p, r0, {};\n"
    body += "@p st.shared::cluster.u32 [r4], r0;\n barrier.cluster.arrive;\n barrier.cluster.wait;\n"
    run(body.format(2), grid=2, cluster=2)
    with pytest.raises(ptxemu.MemoryFault, match="names CTA 2 of a cluster of 2"):
        run(body.format(3), grid=2, cluster=2)


FENCES = [
    "fence.cta", "fence.acq_rel.gpu", "fence.sc.sys", "fence.acquire.cluster", "fence.release.cluster",
    "fence.acquire.sync_restrict::shared::cluster.cluster", "fence.release.sync_restrict::shared::cta.cluster",
    "fence.mbarrier_init.release.cluster", "fence.proxy.alias", "fence.proxy.async", "fence.proxy.async.global",
    "fence.proxy.async.shared::cta", "fence.proxy.async.shared::cluster",
    "fence.proxy.tensormap::generic.release.gpu", "fence.proxy.tensormap::generic.acquire.gpu [d0], 128",
    "fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster",
    "fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster",
    "membar.cta", "membar.gl", "membar.sys", "membar.proxy.alias", "membar.proxy.async",
]  # fmt: skip


@pytest.mark.parametrize("form", FENCES)
def test_a_fence_changes_no_value(form: str) -> None:
    body = f"st.global.u32 [d1], r0;\n {form};\n ld.global.u32 r1, [d1];\n add.u32 r1, r1, 1;\n st.global.u32 [d1], r1;"
    assert run(body).tolist() == list(range(1, 33))


def test_the_size_of_a_tensormap_fence() -> None:
    with pytest.raises(ptxemu.LaunchError, match="allowed: 128"):
        run("fence.proxy.tensormap::generic.acquire.gpu [d0], 64;")


def test_the_cluster_barrier_is_used_again_and_again() -> None:
    step = "barrier.cluster.arrive.aligned;\n barrier.cluster.wait.aligned;\n"
    assert run(step * 3 + "st.global.u32 [d1], r0;", grid=4, cluster=4).tolist() == list(range(32))


def test_misuse_of_the_cluster_barrier() -> None:
    with pytest.raises(ptxemu.MemoryFault, match=r"a second barrier\.cluster\.arrive"):
        run("barrier.cluster.arrive;\n barrier.cluster.arrive;", grid=2, cluster=2)
    with pytest.raises(ptxemu.MemoryFault, match=r"barrier\.cluster\.wait without an arrive"):
        run("barrier.cluster.wait;")


def test_a_cluster_barrier_that_nobody_completes() -> None:
    """CTA 1 keeps waiting for a barrier in its shared memory while CTA 0 stands at the cluster barrier."""
    body = "mbarrier.init.shared.b64 [bar], 1;\n mov.u32 r2, %cluster_ctarank;\n setp.eq.u32 q, r2, 0;\n @q bra OUT;"
    body += wait("bar", 0) + "\nOUT: barrier.cluster.arrive;\n barrier.cluster.wait;"
    with pytest.raises(ptxemu.Deadlock, match="cluster barrier"):
        run(body, grid=2, cluster=2, block=1)


def test_small_instructions() -> None:
    body = """
    griddepcontrol.wait;
    setmaxnreg.dec.sync.aligned.u32 64;
    nanosleep.u32 20;
    setmaxnreg.inc.sync.aligned.u32 128;
    griddepcontrol.launch_dependents;
    st.global.u32 [d1], r0;
    """
    assert run(body).tolist() == list(range(32))


@pytest.mark.parametrize("count", [16, 100, 264])
def test_setmaxnreg_of_other_numbers(count: int) -> None:
    with pytest.raises(ptxemu.LaunchError, match=f"setmaxnreg {count}"):
        run(f"setmaxnreg.inc.sync.aligned.u32 {count};")


CANCEL = """
    setp.ne.u32 q, r0, 0;
    @q bra OUT;
    mov.u32 r2, bar;
    mov.u32 r3, room;
    mov.u32 r5, %cluster_ctaid.x;
    mov.u32 r9, %ctaid.x;
    mbarrier.init.shared.b64 [bar], 1;
    mov.b32 r7, 0;
    fence.mbarrier_init.release.cluster;
NEXT:
    mul.wide.u32 d4, r9, 4;
    add.u64 d4, d0, d4;
    atom.global.add.u32 r8, [d4], 1;
    mbarrier.arrive.expect_tx.relaxed.cluster.shared::cta.b64 _, [bar], 16;
    {0} [{1}], [{2}];
AGAIN:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [bar], r7;
    @!p bra AGAIN;
    xor.b32 r7, r7, 1;
    ld.shared.b128 x, [room];
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 p, x;
    @!p bra OUT;
    {3}
    fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster;
    bra NEXT;
OUT:
"""
REQUESTS = [
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128",
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128",
    "clusterlaunchcontrol.try_cancel.async.mbarrier::complete_tx::bytes.b128",
    "clusterlaunchcontrol.try_cancel.async.mbarrier::complete_tx::bytes.multicast::cluster::all.b128",
]
FIRST = [
    "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 r9, x;",
    "clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {r9, r10, r11, _}, x;",
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("form", REQUESTS)
def test_every_cta_is_done_once(form: str, first: str, schedule: str) -> None:
    """More CTAs than multiprocessors: those that run take over those that have not started, each exactly once."""
    generic = "cvt.u64.u32 d6, r3;\n cvta.shared.u64 d6, d6;\n cvt.u64.u32 d7, r2;\n cvta.shared.u64 d7, d7;\n"
    places = ("r3", "r2") if "async.shared" in form else ("d6", "d7")
    body = CANCEL.replace("NEXT:", generic + "NEXT:", 1).format(form, *places, first)
    out = run(body, np.zeros(400, np.uint32), grid=400, schedule=schedule)
    assert out.tolist() == [1] * 400


def test_the_other_coordinates() -> None:
    query = "clusterlaunchcontrol.query_cancel.get_first_ctaid::{}.b32.b128 r9, x;"
    for axis in "yz":
        body = CANCEL.format(REQUESTS[0], "r3", "r2", query.format(axis))
        assert run(body, np.zeros(400, np.uint32), grid=200).sum() == 200


def test_cancel_after_a_failure() -> None:
    body = CANCEL.format(REQUESTS[0], "r3", "r2", FIRST[0]).replace("@!p bra OUT", "@!p mov.u32 r9, 0")
    body = body.replace(FIRST[0], "")
    with pytest.raises(ptxemu.MemoryFault, match="after a request was seen to have failed"):
        run(body, np.zeros(4, np.uint32))


def test_the_index_of_a_request_that_failed() -> None:
    """Is no CTA's; reading it is allowed."""
    body = CANCEL.format(REQUESTS[0], "r3", "r2", "").replace(
        "@!p bra OUT;", FIRST[0] + " st.global.u32 [d0], r9; ret;"
    )
    assert run(body, np.zeros(4, np.uint32))[0] == 0xFFFFFFFF


def test_every_form_has_a_case() -> None:
    """Each form of this chapter matches an opcode that is written somewhere in this file."""
    assert missing_cases("ptxemu.isa.sync", Path(__file__)) == []
