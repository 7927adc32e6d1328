"""Control flow, barriers of a CTA, and the instructions by which the lanes of a warp exchange values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lane_kernel import HEADER, execute, missing_forms

import ptxemu

KERNELS: list[str] = []
SCHEDULES = ["eager", "lazy", "fifo", "random"]


def run(
    body: str, *, block: int = 32, words: int = 0, schedule: str = "lazy", seed: int = 0, declare: str = ""
) -> list[int]:
    """Runs a kernel whose threads leave r1 in out[thread]; r0 is the thread, `at` its word's address, `base` out's."""
    text = f"""{HEADER}
    .visible .entry k(.param .u64 out) {{
        .reg .b32 r<20>;
        .reg .b64 d<4>, at, base;
        .reg .pred p, q;
        {declare}
        ld.param.u64 base, [out];
        mov.u32 r0, %tid.x;
        mad.wide.u32 at, r0, 4, base;
        mov.u32 r1, 0;
        {body}
        st.global.u32 [at], r1;
        ret;
    }}"""
    KERNELS.append(text)
    out = np.full(words or block, 0xFFFFFFFF, np.uint32)
    ptxemu.Device("sm_100a", schedule=schedule, seed=seed).launch(text, block=(block,), args=[out])
    return [int(x) for x in out]


def test_loop_with_different_trip_counts() -> None:
    body = """mov.u32 r2, r0;
    LOOP: setp.eq.u32 p, r2, 0;
        @p bra DONE;
        add.u32 r1, r1, r2;
        sub.u32 r2, r2, 1;
        bra.uni LOOP;
    DONE:"""
    assert run(body) == [n * (n + 1) // 2 for n in range(32)]


def test_nested_branches_join_again() -> None:
    body = """and.b32 r2, r0, 1;
        setp.eq.u32 p, r2, 0;
        @p bra EVEN;
        setp.lt.u32 q, r0, 9;
        @q add.u32 r1, r1, 100;
        @!q bra ODD;
        add.u32 r1, r1, 1;
    ODD: add.u32 r1, r1, 10;
        bra JOIN;
    EVEN: mov.u32 r1, 1000;
    JOIN: activemask.b32 r3;
        setp.ne.u32 p, r3, 0xffffffff;
        @p trap;
        add.u32 r1, r1, 1;"""
    want = [1001 if i % 2 == 0 else (112 if i < 9 else 11) for i in range(32)]
    assert run(body) == want


def test_local_labels_and_registers_of_scopes() -> None:
    scope = """{ .reg .pred P1;
        .reg .b32 r5;
        mov.u32 r5, 3;
    A: sub.u32 r5, r5, 1;
        add.u32 r1, r1, 1;
        setp.ne.u32 P1, r5, 0;
        @P1 bra A; }"""
    assert run(f"mov.u32 r5, 40;\n {scope}\n {scope}\n add.u32 r1, r1, r5;") == [46] * 32


def test_early_exit_of_some_lanes() -> None:
    body = (
        "setp.lt.u32 p, r0, 7;\n @p exit;\n mov.u32 r1, 5;\n setp.eq.u32 p, r0, 9;\n @p ret.uni;\n activemask.b32 r1;"
    )
    got = run(body)
    lanes = 0xFFFFFFFF & ~0x7F & ~(1 << 9)
    assert got == [0xFFFFFFFF if i < 7 or i == 9 else lanes for i in range(32)]


def test_indexed_branch() -> None:
    body = """T: .branchtargets A, B, C;
        rem.u32 r2, r0, 3;
        brx.idx r2, T;
    A: mov.u32 r1, 10;
        bra END;
    B: mov.u32 r1, 20;
        bra END;
    C: mov.u32 r1, 30;
    END:"""
    assert run(body) == [10 * (1 + i % 3) for i in range(32)]
    assert (
        run("T: .branchtargets A, B;\n mov.u32 r2, 1;\n brx.idx.uni r2, T;\n A: mov.u32 r1, 1;\n B: add.u32 r1, r1, 2;")
        == [2] * 32
    )
    with pytest.raises(ptxemu.MemoryFault, match="index 2 of a list of 1 targets"):
        run("T: .branchtargets A;\n mov.u32 r2, 2;\n brx.idx r2, T;\n A:")


def test_trap_names_its_place() -> None:
    with pytest.raises(ptxemu.Error, match=r"trap(.|\n)*line 18: T: brkpt"):
        run("setp.eq.u32 p, r0, 3;\n\n @p bra T;\n bra END;\n T: brkpt;\n END:")


def test_a_lane_that_spins_lets_the_others_run() -> None:
    """Lane 0 waits for a word that lane 1 writes later: the lanes of a warp progress independently."""
    body = """setp.ne.u32 p, r0, 0;
        @p bra WRITE;
    SPIN: ld.volatile.global.u32 r1, [base+4];
        setp.ne.u32 p, r1, 77;
        @p bra SPIN;
        bra END;
    WRITE: mov.u32 r1, 77;
        st.global.u32 [at], r1;
    END:"""
    assert run(body) == [77] * 32


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warps_wait_at_a_barrier(schedule: str) -> None:
    body = """mov.u32 r2, room;
        mad.lo.u32 r3, r0, 4, r2;
        st.shared.u32 [r3], r0;
        bar.sync 0;
        xor.b32 r4, r0, 96;
        mad.lo.u32 r3, r4, 4, r2;
        ld.shared.u32 r1, [r3];"""
    for seed in range(3):
        got = run(body, block=128, schedule=schedule, seed=seed, declare=".shared .b32 room[128];")
        assert got == [i ^ 96 for i in range(128)]


@pytest.mark.parametrize("spelling", ["bar", "barrier", "bar.cta", "barrier.cta"])
def test_barriers_of_some_warps(spelling: str) -> None:
    """Warps 0 and 1 produce for warps 2 and 3, which alone wait."""
    aligned = ".aligned" if spelling.startswith("barrier") else ""
    body = f"""mov.u32 r2, room;
        mad.lo.u32 r3, r0, 4, r2;
        setp.ge.u32 p, r0, 64;
        @p bra CONSUME;
        mov.u32 r1, 1;
        st.shared.u32 [r3], r0;
        {spelling}.arrive{aligned} 3, 128;
        bra END;
    CONSUME: {spelling}.sync{aligned} 3, 128;
        ld.shared.u32 r1, [r3+-256];
    END:"""
    assert run(body, block=128, declare=".shared .b32 room[64];") == [1] * 64 + list(range(64))


def test_an_unaligned_barrier_counts_lanes() -> None:
    body = """setp.lt.u32 p, r0, 16;
        @p bra ONE;
        barrier.sync 2, 32;
        mov.u32 r1, 2;
        bra END;
    ONE: barrier.sync 2, 32;
        mov.u32 r1, 1;
    END:"""
    assert run(body) == [1] * 16 + [2] * 16


@pytest.mark.parametrize("spelling", ["bar", "barrier"])
@pytest.mark.parametrize("threads", ["", ", 64"])
def test_barrier_reductions(spelling: str, threads: str) -> None:
    aligned = ".aligned" if spelling == "barrier" else ""
    ask = f"{spelling}.red.{{0}}{aligned}.{{1}} {{2}}, 0{threads}, p;"
    count = ask.format("popc", "u32", "r1")
    assert run(f"setp.lt.u32 p, r0, 40;\n {count}", block=64) == [40] * 64
    for operation, below, want in (("and", 64, 1), ("and", 63, 0), ("or", 1, 1), ("or", 0, 0)):
        body = f"setp.lt.u32 p, r0, {below};\n {ask.format(operation, 'pred', 'q')}\n selp.u32 r1, 1, 0, q;"
        assert run(body, block=64) == [want] * 64


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("bar.sync 16;", "barrier 16: a CTA has 16"),
        ("bar.sync 1, 40;", "a thread count of 40 is no multiple of 32"),
        (
            "setp.lt.u32 p, r0, 32;\n @p bra A;\n bar.sync 1, 64;\n bra E;\n A: bar.sync 1, 96;\n E:",
            "while threads that came before",
        ),
    ],
)
def test_barrier_mistakes(body: str, message: str) -> None:
    with pytest.raises(ptxemu.MemoryFault, match=message):
        run(body, block=64)


def test_warps_that_ended_are_not_waited_for() -> None:
    assert (
        run("setp.ge.u32 p, r0, 32;\n @p exit;\n bar.sync 0;\n mov.u32 r1, 1;", block=96)
        == [1] * 32 + [0xFFFFFFFF] * 64
    )


def test_lanes_join_before_a_warp_barrier() -> None:
    body = """setp.lt.u32 p, r0, 4;
        @!p bra OTHERS;
        st.shared.u32 [room], 7;
    OTHERS: bar.warp.sync 0xffffffff;
        ld.shared.u32 r1, [room];"""
    assert run(body, declare=".shared .b32 room;") == [7] * 32


def test_lanes_that_never_come_are_a_deadlock() -> None:
    body = """setp.lt.u32 p, r0, 4;
        @p bra END;
        bar.warp.sync 0xffffffff;
    END: barrier.sync 0, 32;"""
    with pytest.raises(ptxemu.Deadlock) as caught:
        run(body)
    report = str(caught.value)
    assert "line 16: bar.warp.sync 0xffffffff" in report
    assert "waits for lanes 0x0000000f to join" in report
    assert "barrier 0 of CTA (0, 0, 0) (4 of 32 threads arrived)" in report


# Exchange between lanes

LANES = list(range(32))
DATA = [(7 * i + 3) & 0xFFFFFFFF for i in LANES]


def source_lane(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """PTX 'shfl.sync': the lane to read and whether it is in range."""
    segment, clamp = c >> 8 & 31, c & 31
    bottom, limit = lane & segment, (lane & segment) | (clamp & ~segment)
    j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": bottom | (b & ~segment)}[mode]
    inside = j >= limit if mode == "up" else j <= limit
    return (j if inside else lane), inside


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize(("b", "c"), [(1, 31), (5, 31), (3, 0x1807), (31, 31), (1, 0), (9, 0x1007), (2, 0x1800)])
def test_shfl(mode: str, b: int, c: int) -> None:
    got = execute(f"shfl.sync.{mode}.b32 d, a, {b}, {c:#x}, 0xffffffff", "b32", ("b32", DATA))
    assert got.tolist() == [DATA[source_lane(mode, lane, b, c)[0]] for lane in LANES]
    inside = execute(f"shfl.sync.{mode}.b32 _|d, a, {b}, {c:#x}, 0xffffffff", "pred", ("b32", DATA))
    assert inside.tolist() == [source_lane(mode, lane, b, c)[1] for lane in LANES]
    uniform = execute(f"shfl.sync.{mode}.b32 d, a, {b}, {c:#x}, 0xffffffff", "b32", ("b32", DATA), uniform=1)
    assert uniform.tolist() == [DATA[0]] * 32


def test_shfl_of_lane_dependent_places() -> None:
    places = [(5 * i) % 32 for i in LANES]
    got = execute("shfl.sync.idx.b32 d, a, b, 31, -1", "b32", ("b32", DATA), ("b32", places))
    assert got.tolist() == [DATA[p] for p in places]


@pytest.mark.parametrize("bits", [0, 0xFFFFFFFF, 0x00010000, 0xFFFFFFFE])
def test_vote(bits: int) -> None:
    flags = [bits >> lane & 1 for lane in LANES]
    for mode, want in (("all", all(flags)), ("any", any(flags)), ("uni", len(set(flags)) == 1)):
        assert execute(f"vote.sync.{mode}.pred d, a, -1", "pred", ("pred", flags)).tolist() == [want] * 32
    assert execute("vote.sync.ballot.b32 d, a, -1", "b32", ("pred", flags)).tolist() == [bits] * 32
    assert execute("vote.sync.ballot.b32 d, !a, -1", "b32", ("pred", flags)).tolist() == [bits ^ 0xFFFFFFFF] * 32


@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_match(kind: str) -> None:
    values = [i % 5 for i in LANES]
    got = execute(f"match.any.sync.{kind} d, a, -1", "b32", (kind, values))
    assert got.tolist() == [sum(1 << j for j in LANES if values[j] == v) for v in values]
    assert execute(f"match.all.sync.{kind} d|_, a, -1", "b32", (kind, values)).tolist() == [0] * 32
    assert execute(f"match.all.sync.{kind} _|d, a, -1", "pred", (kind, [4] * 32)).tolist() == [1] * 32
    assert execute(f"match.any.sync.{kind} d, a, -1", "b32", (kind, values), uniform=1).tolist() == [0xFFFFFFFF] * 32


def test_elect() -> None:
    assert execute("elect.sync _|d, -1", "pred").tolist() == [1] + [0] * 31
    body = """setp.lt.u32 p, r0, 5;
        @p bra END;
        elect.sync r1|q, 0xffffffe0;
        selp.u32 r2, 100, 0, q;
        add.u32 r1, r1, r2;
    END:"""
    assert run(body) == [0] * 5 + [105] + [5] * 26


SIGNED = [(i * 37 - 400) & 0xFFFFFFFF for i in LANES]


@pytest.mark.parametrize(
    ("instruction", "want"),
    [
        ("add.u32", sum(SIGNED)),
        ("add.s32", sum(SIGNED)),
        ("min.u32", min(SIGNED)),
        ("max.u32", max(SIGNED)),
        ("min.s32", min(i * 37 - 400 for i in LANES)),
        ("max.s32", max(i * 37 - 400 for i in LANES)),
        ("and.b32", 0),
        ("or.b32", 0xFFFFFFFF),
        ("xor.b32", int(np.bitwise_xor.reduce(np.array(SIGNED, np.uint32)))),
    ],
)
def test_redux(instruction: str, want: int) -> None:
    assert set(execute(f"redux.sync.{instruction} d, a, -1", "b32", ("b32", SIGNED)).tolist()) == {want & 0xFFFFFFFF}


def floats(values: Any) -> list[int]:
    return [int(x) for x in np.array(values, np.float32).view(np.uint32)]


def test_redux_of_floats() -> None:
    values = [float(i) for i in range(-20, 12)]
    nan = [*values[:-1], float("nan")]
    for instruction, data, want in (
        ("min", values, -20.0),
        ("max", values, 11.0),
        ("max.abs", values, 20.0),
        ("max", nan, 10.0),
        ("min.abs", values, 0.0),
    ):
        got = execute(f"redux.sync.{instruction}.f32 d, a, -1", "b32", ("b32", floats(data)))
        assert set(got.tolist()) == set(floats([want]))
    assert set(execute("redux.sync.max.NaN.f32 d, a, -1", "b32", ("b32", floats(nan))).tolist()) == {0x7FFFFFFF}


@pytest.mark.usefixtures("whole_file")
def test_every_form_has_a_case() -> None:
    exchange = "shfl.sync.up.b32 r0, r0, 1, 0, -1; shfl.sync.up.b32 r0|p, r0, 1, 0, -1; vote.sync.all.pred p, p, -1;"
    exchange += "vote.sync.ballot.b32 r0, p, -1; match.any.sync.b32 r0, r0, -1; match.all.sync.b32 r0|p, r0, -1;"
    exchange += "redux.sync.add.u32 r0, r0, -1; redux.sync.and.b32 r0, r0, -1; redux.sync.min.f32 r0, r0, -1; trap;"
    text = f"{HEADER} .visible .entry k() {{ .reg .b32 r<2>; .reg .pred p; {exchange} }}"
    assert missing_forms(["control", "barrier", "collective"], [*KERNELS, text]) == []
