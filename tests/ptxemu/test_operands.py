"""Operands and their slots: constants as predicates and as floats, and what a form refuses."""

from __future__ import annotations

import numpy as np
import pytest
from sync_kernel import STORE, run

import ptxemu

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


def test_float_constants_in_a_vector() -> None:
    """Constants of any width become the type of the elements."""
    body = "setp.eq.u32 p, r0, 0;\n @p st.global.v4.f32 [d0], {1.0, 0d4000000000000000, 0f40400000, 4.0};\n"
    body += "mov.b64 d2, {5.0, 0f40c00000};\n @p st.global.b64 [d0+16], d2;\n"
    assert run(body).view(np.float32)[:6].tolist() == [1, 2, 3, 4, 5, 6]


REFUSED = [
    ("selp.b32 r1, 1, 0, r2", r"`r2`, a register of 32 bits, is no predicate"),
    ("vote.sync.ballot.b32 r1, r2, -1", "is no predicate"),
    ("setp.eq.u32 r1, r2, 0", "is no predicate"),
    ("bar.red.and.pred p, 0, r2", "is no predicate"),
    ("@r1 mov.u32 r2, 0", "the guard `r1` is no predicate"),
    ("add.u32 r1, p, 1", r"`p`, a predicate, where \.u32 is expected"),
    ("st.global.u32 [d0], p", r"`p`, a predicate, where \.u32 is expected"),
    ("bar.sync p", r"`p`, a predicate, where \.u32 is expected"),
    ("ld.global.u32 r1, [p]", "is no address"),
    ("add.u32 r1, d2, 1", r"`d2`, a register of 64 bits, where \.u32 is expected"),
    ("add.u64 d1, r2, 1", r"`r2`, a register of 32 bits, where \.u64 is expected"),
    ("mov.b32 d1, r2", r"`d1`, a register of 64 bits, where \.b32 is expected"),
    ("ld.global.u64 r1, [d0]", r"`r1`, a register of 32 bits, where \.u64 is expected"),
    ("cvt.u64.u32 r1, r2", r"`r1`, a register of 32 bits, where \.u64 is expected"),
    ("atom.global.add.u32 d2, [d0], 1", r"`d2`, a register of 64 bits, where \.u32 is expected"),
    ("ld.global.v4.u32 {r1, r2}, [d0]", "a vector of 2 where one of 4 is expected"),
    ("ld.global.u32 {r1, r2}, [d0]", "a vector of 2 where one of 1 is expected"),
    ("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {r1, r2}, [r3]", "a vector of 2 where one of 4 is expected"),
    ("mov.b64 d1, {r1, r2, r3}", "3 elements do not make up"),
    ("mov.b64 d1, {d2, r3}", r"`d2`, a register of 64 bits, where \.b32 is expected"),
    ("add.u32 r1, r2, 4294967296", r"the constant 4294967296 does not fit \.u32"),
    ("add.s32 r1, r2, -2147483649", r"the constant -2147483649 does not fit \.s32"),
    ("add.u32 r1, r2, 1.0", r"a float constant where \.u32 is expected"),
    ("add.u32 r1, r2+4, 1", "`r2` plus a constant outside an address"),
    ("and.b32 r1, !r2, r3", "`!r2`, where data is expected"),
    ("bar.sync d2", r"`d2`, a register of 64 bits, where \.u32 is expected"),
    ("mbarrier.init.shared.b64 [bar], d2", r"`d2`, a register of 64 bits, where \.u32 is expected"),
    ("cvta.shared.u64 d2, r2", r"`r2`, a register of 32 bits, where \.u64 is expected"),
    ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {d1, d2}, [r2]", r"`d1`, a register of 64 bits, where \.b32 is"),
    ("tcgen05.mma.cta_group::1.kind::f16 [r2], d1, d2, r3, r4", "`r4`, a register of 32 bits, is no predicate"),
    ("setp.eq.and.u32 p, r1, r2, r3", "is no predicate"),
]


@pytest.mark.parametrize(("line", "why"), REFUSED)
def test_an_operand_that_does_not_fit(line: str, why: str) -> None:
    with pytest.raises(ptxemu.ParseError, match=rf"line \d+: .*{why}.*: ") as caught:
        run(line + ";")
    assert line in str(caught.value)


@pytest.mark.parametrize(
    "line", ["add.u32 {r1, r2}, r3, r4", "ld.global.v2.u32 r1, [d0]", "st.async.u32 [r1], {r2}, [r3]"]
)
def test_a_vector_where_the_form_has_none(line: str) -> None:
    with pytest.raises(ptxemu.UnknownInstruction):
        run(line + ";")


def test_registers_that_may_differ_from_the_type() -> None:
    """b types take any register of their size; ld, st and cvt wider ones; constants fit signed or unsigned."""
    body = """
    .reg .f32 f; .reg .s64 s;
    mov.b32 f, r0;
    cvt.u32.u16 r1, r0;
    cvt.u16.u32 r1, r1;
    ld.global.u8 d2, [d0];
    st.global.u8 [d0], d2;
    and.b32 r2, r1, -1;
    and.b32 r2, r2, 4294967295;
    mov.b64 s, {r2, f};
    mov.b64 {r3, r4}, s;
    add.u32 r3, r3, r4;
    st.global.u32 [d1], r3;
    """
    assert run(body).tolist() == [2 * lane for lane in range(32)]
