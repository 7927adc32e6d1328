"""PTX 9.7.9.25.3 'Non-bulk copy': a case for each form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sync_kernel import SCHEDULES, STORE, missing_cases, run, wait

import ptxemu

COPIES = [
    "cp.async.ca.shared.global [r3], [d3], 4",
    "cp.async.ca.shared::cta.global.L2::128B [r3], [d3], 4",
    "cp.async.ca.shared.global.L2::cache_hint [r3], [d3], 4, d5",
    "cp.async.ca.shared.global [r3], [d3], 4, 4",
]
WHERE = """
    ld.param.u64 d2, [in1];
    mul.wide.u32 d3, r0, 4;
    add.u64 d3, d2, d3;
    mov.u32 r2, room;
    mad.lo.u32 r3, r0, 4, r2;
    mov.b64 d5, 0;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("end", ["cp.async.wait_all;", "cp.async.commit_group;\n cp.async.wait_group 0;"])
@pytest.mark.parametrize("form", COPIES)
def test_cp_async(form: str, end: str, schedule: str) -> None:
    source = np.arange(100, 132, dtype=np.uint32)
    body = f"{WHERE} {form};\n {end}\n ld.shared.u32 r4, [r3];\n st.global.u32 [d1], r4;"
    assert run(body, None, source, schedule=schedule).tolist() == source.tolist()


@pytest.mark.parametrize(("form", "size"), [("ca", 8), ("ca", 16), ("cg", 16)])
def test_cp_async_sizes(form: str, size: int) -> None:
    """A source size below the size leaves zeros behind it."""
    source = np.arange(1, 129, dtype=np.uint32)
    body = f"""
    ld.param.u64 d2, [in1];
    mul.wide.u32 d3, r0, {size};
    add.u64 d3, d2, d3;
    mov.u32 r2, room;
    mad.lo.u32 r3, r0, {size}, r2;
    cp.async.{form}.shared.global.L2::64B [r3], [d3], {size}, {size - 4};
    cp.async.wait_all;
    mad.lo.u32 r3, r0, 4, r2;
    ld.shared.u32 r4, [r3];
    st.global.u32 [d1], r4;
    """
    words = source.reshape(-1, size // 4).copy()
    words[:, -1] = 0
    assert run(body, None, source).tolist() == words.reshape(-1)[:32].tolist()


@pytest.mark.parametrize(
    "body", ["cp.async.ca.shared.global [r3], [d3], 12;", "cp.async.cg.shared.global [r3], [d3], 8;"]
)
def test_cp_async_of_other_sizes(body: str) -> None:
    with pytest.raises(ptxemu.LaunchError, match=r"cp\.async of (12|8) bytes; allowed"):
        run(WHERE + body, None, np.zeros(32, np.uint32))


def test_cp_async_misaligned() -> None:
    with pytest.raises(ptxemu.MemoryFault, match="not aligned to its size"):
        run(WHERE + "cp.async.ca.shared.global [r3], [d3+2], 4;", None, np.zeros(64, np.uint32))


@pytest.mark.parametrize(
    ("form", "size"),
    [
        ("cp.async.ca.shared.global [r3], [d3], 4, p", 4),
        ("cp.async.ca.shared.global.L2::cache_hint [r3], [d3], 4, p, d5", 4),
        ("cp.async.cg.shared.global [r3], [d3], 16, !p", 16),
        ("cp.async.cg.shared.global.L2::cache_hint [r3], [d3], 16, !p, d5", 16),
    ],
)
@pytest.mark.parametrize("ignored", [0, 5, 32])
def test_cp_async_ignores_its_source(form: str, size: int, ignored: int) -> None:
    """The lanes of the predicate get zeros."""
    source = np.arange(1, 129, dtype=np.uint32)
    body = f"""
    {WHERE}
    mul.wide.u32 d3, r0, {size};
    add.u64 d3, d2, d3;
    mad.lo.u32 r3, r0, {size}, r2;
    setp.{"ge" if "!p" in form else "lt"}.u32 p, r0, {ignored};
    {form};
    cp.async.wait_all;
    ld.shared.u32 r4, [r3];
    st.global.u32 [d1], r4;
    """
    want = source[:: size // 4][:32].copy()
    want[:ignored] = 0
    assert run(body, None, source).tolist() == want.tolist()


def test_a_group_that_is_not_waited_for() -> None:
    """With wait_group 1 the newest group is still on the way: late completion shows what a missing wait would read."""
    body = (
        WHERE
        + """
    cp.async.ca.shared.global [r3], [d3], 4;
    cp.async.commit_group;
    cp.async.ca.shared.global [r3+512], [d3], 4;
    cp.async.commit_group;
    cp.async.wait_group 1;
    ld.shared.u32 r4, [r3];
    ld.shared.u32 r5, [r3+512];
    setp.eq.u32 p, r4, r0;
    setp.eq.and.u32 p, r5, 0xffffffff, p;
    """
    )
    assert run(body + STORE, None, np.arange(32, dtype=np.uint32)).tolist() == [1] * 32


@pytest.mark.parametrize("seed", range(20))
def test_groups_that_complete_out_of_order(seed: int) -> None:
    """wait_group 3 covers all groups but the newest three, also when newer ones were complete before."""
    copy = "cp.async.ca.shared.global [r3+{}], [d3], 4;\n cp.async.commit_group;\n"
    body = WHERE + "".join(copy.format(128 * i) + "bar.sync 0;\n" * 40 for i in range(6)) + "cp.async.wait_group 3;\n"
    body += "ld.shared.u32 r4, [r3];\n"
    body += "".join(f"ld.shared.u32 r5, [r3+{128 * i}];\n max.u32 r4, r4, r5;\n" for i in range(1, 3))
    body += "setp.eq.u32 p, r4, r0;\n" + STORE  # memory that nobody wrote holds the largest number
    assert run(body, None, np.arange(32, dtype=np.uint32), schedule="random", seed=seed).tolist() == [1] * 32


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("space", [".shared", ".shared::cta"])
@pytest.mark.parametrize(
    ("form", "count"), [("cp.async.mbarrier.arrive{0}.b64", 32), ("cp.async.mbarrier.arrive.noinc{0}.b64", 64)]
)
def test_cp_async_arrives_at_an_mbarrier(form: str, count: int, space: str, schedule: str) -> None:
    body = f"""
    setp.eq.u32 q, r0, 0;
    @q mbarrier.init.shared.b64 [bar], {count};
    bar.sync 0;
    {WHERE}
    cp.async.ca.shared.global [r3], [d3], 4;
    {form.format(space)} [bar];
    mbarrier.arrive.shared.b64 _, [bar];
    {wait("bar", 0)}
    ld.shared.u32 r4, [r3];
    st.global.u32 [d1], r4;
    """
    source = np.arange(7, 39, dtype=np.uint32)
    assert run(body, None, source, schedule=schedule).tolist() == source.tolist()


def test_every_form_has_a_case() -> None:
    """Each form of this chapter matches an opcode that is written somewhere in this file."""
    assert missing_cases("ptxemu.isa.cp_async", Path(__file__)) == []
