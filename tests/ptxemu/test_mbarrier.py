"""PTX 9.7.13.15 'mbarrier': a case for each form."""

from __future__ import annotations

from pathlib import Path

import pytest
from sync_kernel import INIT, SCHEDULES, STORE, missing_cases, run, wait

import ptxemu


@pytest.mark.parametrize("form", ["mbarrier.init.b64", "mbarrier.init.shared.b64", "mbarrier.init.shared::cta.b64"])
def test_init_and_inval(form: str) -> None:
    address = "mov.u32 r2, bar;\n cvt.u64.u32 d2, r2;\n cvta.shared.u64 d2, d2;\n mov.b32 r3, 1;"
    where = "d2" if form == "mbarrier.init.b64" else "bar"
    once = f"{form} [{where}], r3;\n {form.replace('init', 'inval')} [{where}];\n"
    last = "mbarrier.init.shared.b64 [bar], 7;"
    out = run(f"{address} setp.eq.u32 q, r0, 0;\n @!q bra END;\n {once} {last}\n st.global.u32 [d1], r3;\n END:")
    assert out[0] == 1


def test_init_over_a_live_barrier() -> None:
    twice = "mbarrier.init.shared.b64 [bar], 4;\n mbarrier.init.shared.b64 [bar], 5;"
    with pytest.raises(ptxemu.MemoryFault, match="over a live barrier"):
        run(twice, block=1)


@pytest.mark.parametrize("count", [0, 1 << 20])
def test_init_count(count: int) -> None:
    with pytest.raises(ptxemu.MemoryFault, match=f"count {count}, allowed are 1 to 1048575"):
        run(f"mbarrier.init.shared.b64 [bar], {count};", block=1)


def test_an_operation_without_init() -> None:
    with pytest.raises(ptxemu.MemoryFault, match="no mbarrier was initialised"):
        run("mbarrier.arrive.shared.b64 _, [bar];", block=1)
    with pytest.raises(ptxemu.MemoryFault, match="no mbarrier was initialised"):
        run("mbarrier.init.shared.b64 [bar], 1;\n mbarrier.inval.shared.b64 [bar];\n mbarrier.inval.shared.b64 [bar];")


def test_a_misaligned_barrier() -> None:
    with pytest.raises(ptxemu.MemoryFault, match="not a multiple of 8"):
        run("mbarrier.init.shared.b64 [bar+4], 1;", block=1)


ARRIVALS = [
    "mbarrier.arrive{0}.b64 d2, [bar]",
    "mbarrier.arrive{0}.b64 d2, [bar], 1",
    "mbarrier.arrive.release.cta{0}.b64 d2, [bar]",
    "mbarrier.arrive.relaxed.cluster{0}.b64 d2, [bar]",
    "mbarrier.arrive_drop{0}.b64 d2, [bar]",
    "mbarrier.arrive_drop.release.cluster{0}.b64 d2, [bar], 1",
]


@pytest.mark.parametrize("space", [".shared", ".shared::cta", ".shared::cluster"])
@pytest.mark.parametrize("form", ARRIVALS)
def test_arrive(form: str, space: str) -> None:
    """32 arrivals complete phase 0; the state's phase is the one before."""
    arrive = form.format(space)
    out = run(INIT + f"{arrive};\n mbarrier.test_wait.shared.b64 p, [bar], d2;\n" + STORE)
    assert out.tolist() == [1] * 32


@pytest.mark.parametrize(
    "form",
    [
        "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64",
        "mbarrier.arrive.expect_tx.shared.b64",
        "mbarrier.arrive_drop.expect_tx.relaxed.cluster.shared::cluster.b64",
    ],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_arrive_expect_tx(form: str, schedule: str) -> None:
    """The phase waits for the bytes that all threads announced, and complete_tx brings them."""
    body = (
        INIT
        + f"""
    {form} d2, [bar], 8;
    mbarrier.test_wait.shared.b64 q, [bar], d2;
    mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], 8;
    mbarrier.test_wait.acquire.cta.shared::cta.b64 p, [bar], d2;
    and.pred q, p, q;
    xor.pred p, p, q;
    """
    )
    assert run(body + STORE, schedule=schedule).tolist() == [1] * 32


EXPECTS = [
    "mbarrier.expect_tx{0}.b64",
    "mbarrier.expect_tx.relaxed.cta{0}.b64",
    "mbarrier.expect_tx.relaxed.cluster{0}.b64",
]


@pytest.mark.parametrize("space", [".shared", ".shared::cta", ".shared::cluster"])
@pytest.mark.parametrize("form", EXPECTS)
def test_expect_tx(form: str, space: str) -> None:
    """Bytes may come before they are announced."""
    body = (
        INIT
        + f"""
    {form.replace("expect", "complete").format(space)} [bar], 12;
    {form.format(space)} [bar], 12;
    mbarrier.arrive.shared.b64 d2, [bar];
    mbarrier.test_wait.relaxed.cta.shared.b64 p, [bar], d2;
    """
    )
    assert run(body + STORE).tolist() == [1] * 32


@pytest.mark.parametrize(
    "form",
    [
        "mbarrier.arrive.noComplete.shared.b64",
        "mbarrier.arrive.noComplete.release.cta.shared::cta.b64",
        "mbarrier.arrive_drop.noComplete.shared.b64",
    ],
)
def test_no_complete_and_pending_count(form: str) -> None:
    body = (
        INIT
        + f"""
    setp.lt.u32 q, r0, 31;
    @q {form} d2, [bar], 1;
    mbarrier.pending_count.b64 r1, d2;
    st.global.u32 [d1], r1;
    """
    )
    out = run(body)
    assert out[:31].tolist() == [32] * 31  # the arrivals of one warp are one


def test_no_complete_must_not_complete() -> None:
    with pytest.raises(ptxemu.MemoryFault, match="noComplete completed the phase"):
        run(INIT + "mbarrier.arrive.noComplete.shared.b64 _, [bar], 1;")


def test_drop_lowers_later_phases() -> None:
    """After one thread dropped, 31 arrivals complete phase 1."""
    body = (
        INIT
        + """
    setp.eq.u32 q, r0, 0;
    @q mbarrier.arrive_drop.shared.b64 d2, [bar];
    @!q mbarrier.arrive.shared.b64 d2, [bar];
    mbarrier.test_wait.parity.shared.b64 p, [bar], 0;
    @!q mbarrier.arrive.shared.b64 d2, [bar];
    mbarrier.test_wait.parity.shared.b64 p, [bar], 1;
    """
    )
    assert run(body + STORE).tolist() == [1] * 32


def test_too_many_arrivals() -> None:
    with pytest.raises(ptxemu.MemoryFault, match="more than this phase expects"):
        run("mbarrier.init.shared.b64 [bar], 4;\n mbarrier.arrive.shared.b64 _, [bar], 5;", block=1)


WAITS = [
    "mbarrier.test_wait{0}.b64 p, [bar], d2",
    "mbarrier.test_wait.acquire.cta{0}.b64 p, [bar], d2",
    "mbarrier.test_wait.parity{0}.b64 p, [bar], 0",
    "mbarrier.test_wait.parity.relaxed.cluster{0}.b64 p, [bar], 0",
    "mbarrier.try_wait{0}.b64 p, [bar], d2",
    "mbarrier.try_wait.acquire.cluster{0}.b64 p, [bar], d2, 100",
    "mbarrier.try_wait.parity{0}.b64 p, [bar], 0",
    "mbarrier.try_wait.parity.acquire.cta{0}.b64 p, [bar], 0, 100",
]


@pytest.mark.parametrize("space", [".shared", ".shared::cta"])
@pytest.mark.parametrize("form", WAITS)
def test_wait(form: str, space: str) -> None:
    """False before the phase is complete, true afterwards."""
    body = f"""
    setp.eq.u32 q, r0, 0;
    @q mbarrier.init.shared.b64 [bar], 64;
    bar.sync 0;
    mbarrier.arrive.shared.b64 d2, [bar];
    {form.format(space)};
    selp.u32 r1, 1, 0, p;
    mbarrier.arrive.shared.b64 _, [bar];
    {form.format(space)};
    selp.u32 r2, 2, 0, p;
    or.b32 r1, r1, r2;
    st.global.u32 [d1], r1;
    """
    assert run(body).tolist() == [2] * 32


def test_parity_one_passes_at_the_start() -> None:
    assert run(INIT + "mbarrier.try_wait.parity.shared.b64 p, [bar], 1;\n" + STORE).tolist() == [1] * 32


def test_a_state_too_old_to_wait_for() -> None:
    body = "mbarrier.init.shared.b64 [bar], 1;\n mbarrier.arrive.shared.b64 d2, [bar];\n"
    body += "mbarrier.arrive.shared.b64 _, [bar];\n" * 2 + "mbarrier.test_wait.shared.b64 p, [bar], d2;"
    with pytest.raises(ptxemu.MemoryFault, match="neither the current nor the one before"):
        run(body, block=1)


def test_a_wait_that_never_ends() -> None:
    with pytest.raises(ptxemu.Deadlock, match=r"parity 0 of mbarrier at shared .* 1 of 2 arrivals pending") as caught:
        run("mbarrier.init.shared.b64 [bar], 2;\n mbarrier.arrive.shared.b64 _, [bar];" + wait("bar", 0), block=1)
    assert "mbarrier.try_wait" in str(caught.value)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_arrivals_from_another_cta(schedule: str) -> None:
    """Every thread of CTA 1 arrives at CTA 0's barrier, and CTA 0 waits for them."""
    body = (
        """
    mov.u32 r2, %cluster_ctarank;
    setp.eq.u32 q, r0, 0;
    @q mbarrier.init.shared.b64 [bar], 32;
    fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.acquire.aligned;
    mov.u32 r3, bar;
    mapa.shared::cluster.u32 r4, r3, 0;
    setp.eq.u32 q, r2, 1;
    @q mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r4];
    @q bra OUT;
    """
        + wait("bar", 0)
        + """
    getctarank.shared::cluster.u32 r5, r4;
    add.u32 r5, r5, 5;
    st.global.u32 [d1], r5;
    OUT:
    barrier.cluster.arrive;
    barrier.cluster.wait;
    """
    )
    assert run(body, grid=2, cluster=2, schedule=schedule).tolist() == [5] * 32


def test_a_remote_barrier_takes_no_wait() -> None:
    body = """
    mov.u32 r3, bar;
    mov.u32 r2, %cluster_ctarank;
    xor.b32 r2, r2, 1;
    mapa.shared::cluster.u32 r4, r3, r2;
    mbarrier.test_wait.parity.shared.b64 p, [r4], 1;
    """
    with pytest.raises(ptxemu.MemoryFault, match=r"in CTA [01] of the cluster: this operation is local"):
        run(body, grid=2, cluster=2, block=1)


def test_every_form_has_a_case() -> None:
    """Each form of this chapter matches an opcode that is written somewhere in this file."""
    assert missing_cases("ptxemu.isa.mbarrier", Path(__file__)) == []
