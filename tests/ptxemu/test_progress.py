"""Waits that may end early, and what counts as a deadlock."""

from __future__ import annotations

import pytest
from sync_kernel import SCHEDULES, run, wait

import ptxemu

BARRIERS = """
    setp.eq.u32 q, r0, 0;
    @q mbarrier.init.shared.b64 [bar], 1;
    @q mbarrier.init.shared.b64 [bar2], 1;
    bar.sync 0;
"""
TRY = "mbarrier.try_wait.parity.shared.b64 p, [{}], 0;\n"
RUNS = [(schedule, seed) for schedule in SCHEDULES for seed in range(4)]


@pytest.mark.parametrize(("schedule", "seed"), RUNS)
def test_two_barriers_polled_in_turn(schedule: str, seed: int) -> None:
    """Warp 1 arrives on the second one only."""
    body = f"""{BARRIERS}
        setp.ge.u32 q, r0, 32;
        @q bra ARRIVE;
    W:  {TRY.format("bar")} @p bra D;
        {TRY.format("bar2")} @!p bra W;
    D:  st.global.u32 [d1], r0;
        bra END;
    ARRIVE:
        setp.eq.u32 q, r0, 32;
        @q mbarrier.arrive.shared.b64 _, [bar2];
    END:"""
    assert run(body, block=64, schedule=schedule, seed=seed).tolist() == list(range(32))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_try_waits_in_a_row_all_fail(schedule: str) -> None:
    store = "selp.u32 r1, 1, 0, p;\n st.global.u32 [d1], r1;"
    assert run(BARRIERS + 4 * TRY.format("bar") + store, schedule=schedule).tolist() == [0] * 32


def test_a_bounded_retry_ends() -> None:
    body = f"""{BARRIERS}
        mov.u32 r1, 0;
    W:  {TRY.format("bar")} @p bra D;
        add.u32 r1, r1, 1;
        setp.lt.u32 q, r1, 100;
        @q bra W;
    D:  st.global.u32 [d1], r1;"""
    assert run(body).tolist() == [100] * 32


def test_an_expired_wait_lets_a_spinning_warp_go_on() -> None:
    """Warp 0 spins on a word that warp 1 writes once its retries are over."""
    body = f"""{BARRIERS}
        setp.ge.u32 q, r0, 32;
        @q bra RETRY;
    S:  ld.volatile.global.u32 r1, [d0+124];
        setp.ne.u32 p, r1, 7;
        @p bra S;
        st.global.u32 [d1], r1;
        bra END;
    RETRY:
        mov.u32 r2, 0;
    W:  {TRY.format("bar")} add.u32 r2, r2, 1;
        setp.lt.u32 q, r2, 5;
        @q bra W;
        mov.u32 r3, 7;
        st.global.u32 [d0+124], r3;
    END:"""
    assert run(body, block=64).tolist() == [7] * 32


@pytest.mark.parametrize(("schedule", "seed"), RUNS)
def test_diverged_lanes_wait_for_each_other(schedule: str, seed: int) -> None:
    """Each half of a warp waits for the other half's arrival; each has a first failure of its own."""
    body = f"""{BARRIERS}
        setp.lt.u32 q, r0, 16;
        @q bra LOW;
        {wait("bar", 0, "H")}
        bra END;
    LOW:
        {wait("bar2", 0, "L")}
    END: st.global.u32 [d1], r0;"""
    with pytest.raises(ptxemu.Deadlock) as caught:
        run(body, schedule=schedule, seed=seed)
    report = str(caught.value)
    assert report.count("waits for parity 0 of mbarrier") == 2
    assert "spins" not in report
    arrive = (
        "setp.eq.u32 q, r0, 32;\n @q mbarrier.arrive.shared.b64 _, [bar];\n @q mbarrier.arrive.shared.b64 _, [bar2];"
    )
    both = body.replace(
        "setp.lt.u32 q, r0, 16", f"{arrive}\n setp.ge.u32 q, r0, 32;\n @q exit;\n setp.lt.u32 q, r0, 16"
    )
    assert run(both, block=64, schedule=schedule, seed=seed).tolist() == list(range(32))


CLOCKS = ["%globaltimer", "%clock64"]


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("delay", [100_000, 10_000_000_000])
def test_a_loop_that_waits_for_time_ends(clock: str, delay: int) -> None:
    body = f"""
        mov.u64 d2, {clock};
        add.u64 d2, d2, {delay};
    W:  mov.u64 d3, {clock};
        setp.lt.u64 p, d3, d2;
        @p bra W;
        st.global.u32 [d1], r0;"""
    assert run(body).tolist() == list(range(32))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_try_wait_loop_with_a_timeout_ends(schedule: str) -> None:
    body = f"""{BARRIERS}
        mov.u64 d2, %globaltimer;
        add.u64 d2, d2, 1000000;
        mov.u32 r1, 1;
    W:  {TRY.format("bar")} @p bra D;
        mov.u64 d3, %globaltimer;
        setp.lt.u64 q, d3, d2;
        @q bra W;
        mov.u32 r1, 2;
    D:  st.global.u32 [d1], r1;"""
    assert run(body, schedule=schedule).tolist() == [2] * 32


def test_reading_the_clock_does_not_hide_a_deadlock() -> None:
    with pytest.raises(ptxemu.Deadlock, match="spins"):
        run("W: mov.u64 d3, %globaltimer;\n setp.eq.u64 p, d3, 0;\n ld.global.u32 r1, [d0];\n bra W;")
