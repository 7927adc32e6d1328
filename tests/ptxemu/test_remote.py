"""st.async and red.async: a case for each form."""

from __future__ import annotations

from pathlib import Path

import pytest
from sync_kernel import SCHEDULES, missing_cases, run, wait

import ptxemu

# CTA 0 initialises its memory and barrier, CTA 1 writes there, CTA 0 waits for the bytes and shows the words.
EXCHANGE = """
    mov.u32 r2, %cluster_ctarank;
    mov.u32 r3, room;
    mad.lo.u32 r4, r0, 16, r3;
    mov.b32 r5, {start};
    st.shared.u32 [r4], r5;
    st.shared.u32 [r4+4], 0;
    setp.eq.u32 q, r0, 0;
    @q mbarrier.init.shared.b64 [bar], 1;
    @q mbarrier.expect_tx.shared.b64 [bar], {nbytes};
    @q mbarrier.arrive.shared.b64 _, [bar];
    barrier.cluster.arrive;
    barrier.cluster.wait;
    setp.eq.u32 q, r2, 0;
    @q bra READ;
    mapa.shared::cluster.u32 r6, r4, 0;
    mov.u32 r7, bar;
    mapa.shared::cluster.u32 r8, r7, 0;
    cvt.u64.u32 d2, r6;
    cvta.shared::cluster.u64 d2, d2;
    cvt.u64.u32 d3, r8;
    cvta.shared::cluster.u64 d3, d3;
    add.u32 r9, r0, 100;
    add.u32 r10, r0, 200;
    mov.b64 d4, {{r9, r10}};
    mov.b128 x, {{d4, d4}};
    {body}
    bra OUT;
READ:
    {wait}
    ld.shared.u32 r9, [r4+{show}];
    st.global.u32 [d1], r9;
OUT:
    barrier.cluster.arrive;
    barrier.cluster.wait;
"""
STORES = [
    ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [r6], r9, [r8]", 4, 0, 100),
    ("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u64 [r6], d4, [r8]", 8, 4, 200),
    ("st.async.mbarrier::complete_tx::bytes.v2.s32 [d2], {r9, r10}, [d3]", 8, 4, 200),
    (
        "st.async.cluster.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [r6], {r10, r9, r10, r10}, [r8]",
        16,
        4,
        100,
    ),
    ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b128 [r6], x, [r8]", 16, 12, 200),
]


def exchange(body: str, nbytes: int, show: int, schedule: str, start: int = 0) -> list[int]:
    text = EXCHANGE.format(body=f"{body};", nbytes=32 * nbytes, show=show, start=start, wait=wait("bar", 0))
    return run(text, grid=2, cluster=2, schedule=schedule).tolist()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("form", "nbytes", "show", "base"), STORES)
def test_st_async(form: str, nbytes: int, show: int, base: int, schedule: str) -> None:
    assert exchange(form, nbytes, show, schedule) == [base + i for i in range(32)]


REDUCTIONS = [
    ("add.u32", lambda old, b: old + b),
    ("add.s32", lambda old, b: old + b),
    ("min.s32", min),
    ("max.u32", max),
    ("and.b32", lambda old, b: old & b),
    ("or.b32", lambda old, b: old | b),
    ("xor.b32", lambda old, b: old ^ b),
    ("inc.u32", lambda old, b: 0 if old >= b else old + 1),
    ("dec.u32", lambda old, b: b if old == 0 or old > b else old - 1),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("op", "expected"), REDUCTIONS, ids=lambda x: x if isinstance(x, str) else "")
def test_red_async(op: str, expected: object, schedule: str) -> None:
    form = f"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{op} [r6], r9, [r8]"
    assert callable(expected)
    assert exchange(form, 4, 0, schedule, start=115) == [expected(115, 100 + i) for i in range(32)]


def test_red_async_of_64_bits() -> None:
    form = "red.async.relaxed.cluster.mbarrier::complete_tx::bytes.add.u64 [d2], d4, [d3]"
    assert exchange(form, 8, 4, "lazy", start=5) == [200 + i for i in range(32)]
    assert exchange(form, 8, 0, "lazy", start=5) == [105 + i for i in range(32)]


def test_a_barrier_of_another_cta() -> None:
    with pytest.raises(ptxemu.MemoryFault, match="of another CTA"):
        exchange("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [r6], r9, [r7]", 4, 0, "lazy")


def test_every_form_has_a_case() -> None:
    """Each form of this chapter matches an opcode that is written somewhere in this file."""
    assert missing_cases("ptxemu.isa.remote", Path(__file__)) == []
