"""Operands and their slots: constants as predicates and as floats, and what a form refuses."""

from __future__ import annotations

import numpy as np
import pytest
from sync_kernel import STORE, run

ALL = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("vote.sync.ballot.b32 r1, 1, -1;", ALL),
        ("vote.sync.ballot.b32 r1, 0, -1;", 0),
        ("bar.red.popc.u32 r1, 0, 1;", 64),
        ("barrier.red.popc.u32 r1, 0, 64, 1;", 64),
        ("bar.red.popc.u32 r1, 0, 0;", 0),
    ],
)
def test_a_predicate_constant_holds_for_every_lane(body: str, want: int) -> None:
    out = run(body + "st.global.u32 [d1], r1;", np.zeros(64, np.uint32), block=64)
    assert out.tolist() == [want] * 64


@pytest.mark.parametrize(
    ("body", "want"),
    [
        ("vote.sync.all.pred p, 1, -1;", 1),
        ("vote.sync.any.pred p, 0, -1;", 0),
        ("vote.sync.uni.pred p, 1, -1;", 1),
        ("bar.red.and.pred p, 0, 1;", 1),
        ("barrier.red.or.pred p, 0, 64, 0;", 0),
    ],
)
def test_predicates_of_a_predicate_constant(body: str, want: int) -> None:
    assert run(body + STORE, np.zeros(64, np.uint32), block=64).tolist() == [want] * 64
