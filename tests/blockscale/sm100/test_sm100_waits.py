"""That a kernel which may start early and does not wait is seen, in its PTX alone."""

from pathlib import Path

import pytest

from blockscale.kernels.waits import before_the_wait

FINDINGS = Path(__file__).parents[3] / "docs/examples/findings"


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
