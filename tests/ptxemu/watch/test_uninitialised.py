"""Reads of what nothing has written: shared memory and registers."""

from __future__ import annotations

import pytest
from programs import RUNS, Pair, check, findings

PAIRS = [
    Pair(
        "shared memory",
        "uninitialised read",
        "ld.shared.u32 r6, [r4];",
        "st.shared.u32 [r4], 1;\nld.shared.u32 r6, [r4];",
    ),
    Pair(
        "a byte of shared memory",
        "uninitialised read",
        "@first st.shared.b16 [room], 1;\n@first st.shared.b8 [room+2], 1;\n@first ld.shared.u32 r6, [room];",
        "@first st.shared.b16 [room], 1;\n@first st.shared.b16 [room+2], 1;\n@first ld.shared.u32 r6, [room];",
    ),
    Pair("a register", "uninitialised register", "add.u32 r6, r7, 1;", "mov.u32 r7, 1;\n add.u32 r6, r7, 1;"),
    Pair(
        "a register of some lanes",
        "uninitialised register",
        "setp.lt.u32 p, r0, 40;\n @p mov.u32 r7, 1;\n add.u32 r6, r7, 1;",
        "setp.lt.u32 p, r0, 40;\n @p mov.u32 r7, 1;\n @p add.u32 r6, r7, 1;",
    ),
    Pair(
        "a register that one way does not write",
        "uninitialised register",
        "setp.lt.u32 p, r0, 40;\n @p bra SKIP;\n mov.u32 r7, 1;\n SKIP: add.u32 r6, r7, 1;",
        "setp.lt.u32 p, r0, 40;\n @p bra SKIP;\n mov.u32 r7, 1;\n add.u32 r6, r7, 1;\n SKIP:",
    ),
    Pair("a guard", "uninitialised register", "@q bra END;\n END:", "setp.eq.u32 q, r0, 0;\n @q bra END;\n END:"),
]  # fmt: skip


@pytest.mark.parametrize("run", RUNS[:3], ids=lambda run: f"{run[0]}-{run[1]}")
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pair(pair: Pair, run: tuple[str, int]) -> None:
    check(pair, run)


def test_what_only_some_lanes_read_is_found_at_their_address() -> None:
    (found,) = findings("@first st.shared.v4.u32 [room], {r0, r0, r0, r0};\n ld.shared.u32 r6, [r4];")
    assert found.count == 2  # a warp each
    assert found.address == 0x410
