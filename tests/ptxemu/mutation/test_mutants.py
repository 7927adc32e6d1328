"""The operators: what each makes of a line, that nothing else changes, and that every mutant is PTX."""

from __future__ import annotations

import pytest
from cases import OWN
from mutants import OPERATORS, mutants
from ptx_lines import read, split

from ptxemu.text import parse

HEADER = """.version 9.0
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 in)
{
    .shared .align 8 .b8 s[64];
    .reg .pred p, q;
    .reg .b16 h;
    .reg .b32 a, b, n, i, x, y;
    .reg .b64 d, e, m;
"""
# Operator, a text with one site or more, and what becomes of its first line.
EXAMPLES = [
    ("drop_fence", "fence.proxy.async.shared::cta;", ""),
    ("drop_fence", "tcgen05.fence::after_thread_sync;", ""),
    ("drop_wait", "mbarrier.try_wait.parity.shared.b64 p, [a], b;", "mov.pred p, -1;"),
    ("drop_wait", "cp.async.bulk.wait_group.read 1;", ""),
    ("drop_barrier", "bar.sync 1, 128;", ""),
    ("drop_arrive", "mbarrier.arrive.shared.b64 d, [a];", ""),
    ("drop_expect_tx", "mbarrier.arrive.expect_tx.shared.b64 d, [a], b;", "mbarrier.arrive.shared.b64 d, [a];"),
    ("drop_commit", "cp.async.bulk.commit_group;", ""),
    ("drop_dealloc", "tcgen05.dealloc.cta_group::1.sync.aligned.b32 a, 64;", ""),
    ("drop_permit", "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;", ""),
    ("drop_pdl_wait", "griddepcontrol.wait;", ""),
    ("flip_parity", "mbarrier.try_wait.parity.shared.b64 p, [a], 1;", "mbarrier.try_wait.parity.shared.b64 p, [a], 0;"),
    (
        "flip_parity",
        "mbarrier.try_wait.parity.shared.b64 p, [a], b;",
        "{ .reg .b32 mutated; xor.b32 mutated, b, 1; mbarrier.try_wait.parity.shared.b64 p, [a], mutated; }",
    ),
    ("change_count", "@p mbarrier.init.shared.b64 [a], 4;", "@p mbarrier.init.shared.b64 [a], 5;"),
    ("change_bytes", "mbarrier.expect_tx.shared.b64 [a], 64;", "mbarrier.expect_tx.shared.b64 [a], 80;"),
    (
        "change_descriptor",
        "tcgen05.cp.cta_group::1.32x128b.warpx4 [a], d;",
        "{ .reg .b64 mutated; add.s64 mutated, d, 2; tcgen05.cp.cta_group::1.32x128b.warpx4 [a], mutated; }",
    ),
    (
        "change_coordinate",
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [d, {0, b}], [a];",
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [d, {1, b}], [a];",
    ),
    ("change_stage", "add.s32 n, i, 1;\nsetp.eq.s32 p, n, 3;\nselp.b32 i, 0, n, p;", "add.s32 n, i, 2;"),
    ("change_barrier", "mbarrier.arrive.shared.b64 d, [a+8];", "mbarrier.arrive.shared.b64 d, [a+16];"),
    ("change_barrier", "bar.sync 1, 128;", "bar.sync 2, 128;"),
    ("change_address", "ld.shared.b32 x, [a+4];", "ld.shared.b32 x, [a+20];"),
    ("change_mask", "mapa.shared::cluster.u32 x, a, 1;", "mapa.shared::cluster.u32 x, a, 0;"),
    ("change_predicate", "@!p bar.sync 0;", "@p bar.sync 0;"),
    ("swap", "st.shared.b32 [a], x;\nbar.sync 0;", ""),
]


@pytest.mark.parametrize(("operator", "text", "changed"), EXAMPLES)
def test_what_an_operator_makes_of_a_line(operator: str, text: str, changed: str) -> None:
    source = f"{HEADER}{text}\nret;\n}}\n"
    first = next(m for m in mutants(source) if m.operator == operator)
    line = len(HEADER.splitlines())
    got, given = first.apply(source).splitlines(), source.splitlines()
    assert got[line] == changed
    if operator != "swap":
        assert got[:line] + got[line + 1 :] == given[:line] + given[line + 1 :]
    parse(first.apply(source))


def test_every_operator_has_an_example() -> None:
    assert {operator for operator, _, _ in EXAMPLES} == set(OPERATORS)


def swaps(*lines: str) -> list[str]:
    source = HEADER + "\n".join(lines) + "\nret;\n}\n"
    return [m.before for m in mutants(source) if m.operator == "swap"]


def test_swapping_keeps_registers_and_control_flow() -> None:
    assert swaps("st.shared.b32 [a], x;", "add.s32 y, y, 1;", "bar.sync 0;") == ["st.shared.b32 [a], x;"]
    assert not swaps("st.shared.b32 [a], x;", "add.s32 x, y, 1;", "bar.sync 0;")  # x would be another
    assert not swaps("ld.shared.b32 x, [a];", "add.s32 y, x, 1;", "bar.sync 0;")
    assert not swaps("st.shared.b32 [a], x;", "L:", "bar.sync 0;")
    assert not swaps("st.shared.b32 [a], x;", "@p bra L;", "bar.sync 0;", "L:")
    assert not swaps("st.shared.b32 [a], x;", "st.shared.b32 [b], x;")
    assert not swaps("mbarrier.init.shared.b64 [a], 1;", "mbarrier.init.shared.b64 [b], 1;")


def test_an_instruction_behind_the_next() -> None:
    source = f"{HEADER}st.shared.b32 [a], x;\nadd.s32 y, y, 1;\n@p bar.sync 0;\nret;\n}}\n"
    swapped = next(m for m in mutants(source) if m.operator == "swap").apply(source).splitlines()
    assert swapped[-5:] == ["", "add.s32 y, y, 1;", "@p bar.sync 0; st.shared.b32 [a], x;", "ret;", "}"]


def test_lines() -> None:
    (line,) = read(
        "    @!%p1 tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r3+4];  // why\nL:\n{\n a; b;\n"
    ).values()
    assert (line.guard, line.operands) == ("!%p1", ("{%r1, %r2}", "[%r3+4]"))
    assert (line.writes, line.reads) == ({"%r1", "%r2"}, {"%r3", "%p1"})
    assert split("[%rd1, {%r1, 0}], [%r2], a") == ("[%rd1, {%r1, 0}]", "[%r2]", "a")


@pytest.mark.parametrize("name", OWN)
def test_every_mutant_is_ptx_and_another_text(name: str) -> None:
    for text in OWN[name]().texts.values():
        found = mutants(text)
        changed = [mutant.apply(text) for mutant in found]
        assert len({*changed, text}) == len(found) + 1
        for mutated in changed:
            parse(mutated)
