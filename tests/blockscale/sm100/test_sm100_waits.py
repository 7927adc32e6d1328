"""That a kernel which may start early and does not wait is seen, in its PTX alone."""

from pathlib import Path

import pytest

from blockscale.kernels.waits import before_the_wait

FINDINGS = Path(__file__).parents[3] / "docs/examples/findings"
LOAD = "ld.global.b32 %r1, [%rd1];"


def body(*lines):
    return "\n".join([".visible .entry k(.param .u64 p)", "{", *lines, "ret;", "}"])


def test_global_memory_after_the_wait_is_fine():
    assert before_the_wait(body("griddepcontrol.wait;", "ld.global.b32 %r1, [%rd1];")) == []


@pytest.mark.parametrize(
    "line",
    [
        "ld.global.nc.b32 %r1, [%rd1];",
        "@%p1 st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};",
        "red.global.add.f32 [%rd1], %f1;",
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}], [%r3];",
        "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%rd1, {%r1, %r2, %r3}], [%r4];",
    ],
)
def test_every_use_of_global_memory_counts(line):
    assert before_the_wait(body(line, "griddepcontrol.wait;")) == [line]


def test_other_memory_need_not_wait():
    lines = ["ld.param.b64 %rd1, [p];", "st.shared.b32 [%r1], %r2;", "prefetch.tensormap [%rd1];"]
    assert before_the_wait(body(*lines)) == []


def test_each_path_has_to_wait():
    role = "@%p1 bra $L__one;", "griddepcontrol.wait;", "ld.global.b32 %r1, [%rd1];", "bra.uni $L__end;"
    other = "$L__one:", "ld.global.b32 %r2, [%rd1];", "$L__end:"
    assert before_the_wait(body(*role, *other)) == ["ld.global.b32 %r2, [%rd1];"]
    assert before_the_wait(body(*role, "$L__one:", "griddepcontrol.wait;", *other[1:])) == []


def test_a_wait_at_the_end_of_a_loop_is_too_late():
    loop = "$L__loop:", "ld.global.b32 %r1, [%rd1];", "griddepcontrol.wait;", "@%p1 bra $L__loop;"
    assert before_the_wait(body(*loop)) == ["ld.global.b32 %r1, [%rd1];"]


def test_what_cannot_be_followed_is_refused():
    with pytest.raises(ValueError, match="tables"):
        before_the_wait(body("brx.idx %r1, $L__table;"))
    with pytest.raises(ValueError, match="no such label"):
        before_the_wait(body("bra.uni $L__nowhere;"))


@pytest.mark.parametrize("name", ["41_read_before_wait", "42_write_before_wait", "43_no_wait"])
def test_programs_in_which_the_emulator_finds_it(name):
    """Those of docs/emulator.md, each of which has a kernel that does not wait."""
    text = (FINDINGS / f"{name}.ptx").read_text()
    kernels = text.split(".visible .entry")[1:]
    assert any(before_the_wait(kernel) for kernel in kernels)


@pytest.mark.parametrize(
    "line",
    [
        "ld.b32 %r1, [%rd1];",
        "@!%p1 st.v2.b32 [%rd1], {%r1, %r2};",
        "atom.add.u32 %r1, [%rd1], 1;",
        "red.release.gpu.add.u32 [%rd1], 1;",
        "ld.acquire.gpu.b32 %r1, [%rd1];",
        "multimem.red.add.u32 [%rd1], %r1;",
        "call (retval0), vprintf, (param0, param1);",
    ],
)
def test_a_generic_address_may_be_a_global_one(line):
    assert before_the_wait(body(line, "griddepcontrol.wait;")) == [line]


@pytest.mark.parametrize(
    "line",
    [
        "ld.shared::cluster.b32 %r1, [%r2];",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3];",
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.inc.u32 [%r1], %r2, [%r3];",
        "ld.const.b32 %r1, [table];",
        "st.local.b32 [%rd1], %r1;",
        "atom.shared.add.u32 %r1, [%r2], 1;",
        "cp.async.bulk.commit_group;",
        "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r1], %rd1;",
    ],
)
def test_an_instruction_that_names_other_memory_does_not_count(line):
    assert before_the_wait(body(line)) == []


def test_a_wait_under_a_predicate_is_none():
    assert before_the_wait(body("@%p1 griddepcontrol.wait;", LOAD)) == [LOAD]
    assert before_the_wait(body("@%p1 ret;", LOAD)) == [LOAD]
    assert before_the_wait(body("@!%p1 bra $L__on;", "griddepcontrol.wait;", "$L__on:", LOAD)) == [LOAD]


def test_lines_do_not_matter():
    assert before_the_wait(body("{ " + LOAD + " }", "griddepcontrol.wait;")) == [LOAD]
    assert before_the_wait(body("mov.u32 %r1, 0; " + LOAD)) == [LOAD]
    assert before_the_wait(body("$L__1: " + LOAD)) == [LOAD]
    assert before_the_wait(body("{ griddepcontrol.wait; }", LOAD)) == []
    assert before_the_wait(body("mov.u32 %r1, 0; griddepcontrol.wait; " + LOAD)) == []
    assert before_the_wait(body("bra", "$L__1;", LOAD, "$L__1: ret;")) == []


def test_comments_strings_and_places_in_the_source_are_no_code():
    assert before_the_wait(body("// " + LOAD, "/* griddepcontrol.wait; */", '.pragma "griddepcontrol.wait;";')) == []
    assert before_the_wait(body(".loc 1 20 3", "griddepcontrol.wait; // here", ".loc 1 21 3", LOAD)) == []
    assert before_the_wait(body("/* griddepcontrol.wait; */", ".loc 1 20 3", LOAD)) == [LOAD]


def test_labels_belong_to_their_braces():
    """Inline assembly may use a name again and again."""
    loop = "{ .reg .pred p; TRY: mbarrier.try_wait.parity.shared.b64 p, [%r1], 0; @p bra DONE; bra TRY; DONE: }"
    assert before_the_wait(body(loop, "griddepcontrol.wait;", loop, LOAD)) == []
    assert before_the_wait(body(loop, "bra DONE;", "griddepcontrol.wait;", "DONE:", loop, LOAD)) == [LOAD]
    assert before_the_wait(body("{ @%p1 bra END; }", "griddepcontrol.wait;", "END: ret;")) == []
    with pytest.raises(ValueError, match=r"line 4: bra TRY;: there is no such label"):
        before_the_wait(body(loop, "bra TRY;"))


def test_what_is_no_kernel_is_refused():
    with pytest.raises(ValueError, match="no kernel"):
        before_the_wait(".version 9.0")
    with pytest.raises(ValueError, match=r"line 3: .* no statement of PTX"):
        before_the_wait(".entry k()\n{\nld.global.b32 %r1, [%rd1]\n}")
