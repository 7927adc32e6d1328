"""Bad input: each kind gets one typed error that names what came."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import ptxemu
from ptxemu.machine.tensormap import InvalidTensorMap, TensorMap
from ptxemu.text import parse

HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"
EMPTY = f"{HEADER}.entry k() {{ ret; }}"

MODULES = [
    (".global .u32 gv[2] = {1, 2, 3};", "gv has 8 bytes, its initializer 12"),
    (".global .u8 gv[2] = {1, 300};", "300 does not fit an element of 1 bytes"),
    (".global .s8 gv = -129;", "-129 does not fit"),
    (".global .f16 gv = 1e300;", "a float that does not fit 2 bytes"),
    (".global .u8 gv = 1.5;", "a float for an element of 1 bytes"),
    (".global .u8 gv = word2+x;", "expected a number"),
    (".global .b8 gv[-4];", "-4 is not in 0"),
    (".global .align 3 .b8 gv[4];", ".align 3 is no power of two"),
    (".global .align 0 .b8 gv[4];", "0 is not in 1"),
    (".global .b8 gv[99999999999];", "99999999999 is not in 0"),
    (".global .b8 gv[1000000][1000000];", "allowed in .global are 1073741824"),
    (".global .u32 gv;\n.global .u64 gv;", "line 5: gv is declared twice"),
    (".extern .global .u32 gv;\n.const .u32 gv;", "line 5: gv is declared in .global before"),
    (".entry j(.param .u32 a, .param .u64 a) { ret; }", "a is declared twice"),
]
BODIES = [
    (".reg .b32 %r<2000000000>;", "2000000000 is not in 0..65536"),
    (".reg .b32 %r<-1>;", "-1 is not in 0"),
    ("{" * 2000, "more than 100 deep"),
    (".reg .b32 r; mov.u32 r, " + "{" * 2000, "more than 100 deep"),
    (".reg .b32 r; mov.u32 r, " + "[" * 2000, "more than 100 deep"),
    (".reg .b32 r; mov.u32 r, " + "(" * 2000, "more than 100 deep"),
    (".reg .b32 r; mov.u32 r, " + "!" * 2000, "more than 100 deep"),
    (".reg .b32 r; mov.u32 r, " + "r|" * 2000, "more than 100 deep"),
    (".reg .b32 r; mov.u32 r, 089;", "digits that its base does not have, found `089`"),
    (".reg .b32 r; mov.u32 r, 0b2;", "expected `,`|digits"),
    (".reg .b32 r; mov.u32 r, " + "9" * 5000 + ";", "more than 64 bits"),
    (".reg .b32 r; mov.u32 r, 0x10000000000000000;", "more than 64 bits"),
    (".loc 1 -1 1", "-1 is not in 0"),
    (".loc 1", "expected a number"),
    (".shared .b8 v[-1];", "-1 is not in 0"),
    (".local .b8 v[1000000];", "v has 1000000 bytes, allowed in .local are 524288"),
    ("A: A: ret;", "the label A is declared twice"),
    (".reg .b32 r; .reg .b32 r;", "r is declared twice"),
    (".reg .b32 r<4>; .reg .b64 r2;", "r2 is declared twice"),
    (".shared .b32 v; .local .b64 v;", "v is declared twice"),
    (".shared .b32 v; .reg .b64 v;", "v is declared twice"),
]


@pytest.mark.parametrize(("text", "message"), MODULES)
def test_a_bad_module(text: str, message: str) -> None:
    with pytest.raises(ptxemu.ParseError, match=message):
        parse(HEADER + text)


@pytest.mark.parametrize(("text", "message"), BODIES, ids=range(len(BODIES)))
def test_a_bad_body(text: str, message: str) -> None:
    with pytest.raises(ptxemu.ParseError, match=f"line 5: .*{message}"):
        parse(f"{HEADER}.entry k()\n{{ {text} }}")


def test_names_of_other_scopes_are_free() -> None:
    text = ".entry k(.param .u32 a) { .reg .b32 r; A: { .reg .b64 r; .shared .b32 a; A: bra A; } ret; }"
    assert list(parse(HEADER + text).entries) == ["k"]


def test_an_extern_variable_needs_a_definition() -> None:
    extern = ".extern .global .u32 gv;\n"
    entry = ".entry k() { .reg .b32 r; ld.global.u32 r, [gv]; }\n"
    with pytest.raises(ptxemu.LaunchError, match=r"extern \.global gv: nothing defines it"):
        ptxemu.Device().launch(HEADER + extern + entry)
    for definition in (extern + entry + ".global .u32 gv = 5;", ".global .u32 gv = 5;\n" + entry):
        ptxemu.Device().launch(HEADER + definition)


LAUNCHES: list[tuple[dict[str, Any], str]] = [
    ({"grid": 1}, "grid=1: a sequence"),
    ({"grid": None}, "grid=None: a sequence"),
    ({"grid": ("a",)}, r"grid\[0\]='a' is a str"),
    ({"grid": 1.5}, r"grid=1.5: a sequence"),
    ({"grid": (1, 1, 1, 1)}, "three numbers"),
    ({"block": (32.0, 1, 1)}, r"block\[0\]=32.0 is a float"),
    ({"shared": 1.5}, "shared=1.5 is a float; allowed is an int"),
    ({"shared": "8"}, "shared='8' is a str"),
    ({"args": 5}, "args is a int"),
    ({"args": None}, "args is a NoneType"),
    ({"ptx": None}, "ptx is a NoneType; allowed are str and Module"),
    ({"ptx": 5}, "ptx is a int"),
    ({"ptx": b"x"}, "ptx is a bytes"),
]


@pytest.mark.parametrize(("given", "message"), LAUNCHES)
def test_a_bad_launch(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ptxemu.LaunchError, match=message):
        ptxemu.Device().launch(**{"ptx": EMPTY, **given})


def test_numpy_numbers_are_numbers() -> None:
    report = ptxemu.Device(seed=int(np.int64(3))).launch(EMPTY, grid=np.array([2, 1, 1]), block=(np.int32(32),))
    assert report.counters["ctas"] == 2


def test_object_arrays() -> None:
    things = np.array([None, 1], object)
    with pytest.raises(ptxemu.LaunchError, match=r"args\[0\] is an array of object"):
        ptxemu.Device().launch(EMPTY.replace("k()", "k(.param .u64 a)"), args=[things])
    for given in ([1, 2], things):
        with pytest.raises(ptxemu.LaunchError, match="allowed is a numpy array of numbers"):
            ptxemu.Device().register(given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"sms": "4"}, {"sms": 2.5}, {"seed": "a"}, {"seed": None}, {"seed": 1.5}])
def test_a_bad_device(given: dict[str, Any]) -> None:
    with pytest.raises(ptxemu.LaunchError, match="allowed is an int"):
        ptxemu.Device(**given)
    with pytest.raises(ptxemu.LaunchError, match="schedule=3: one of"):
        ptxemu.Device(schedule=3)  # type: ignore[arg-type]


def test_a_bad_tensor_map() -> None:
    with pytest.raises(InvalidTensorMap, match="array is a list"):
        TensorMap.of([1], (1,))  # type: ignore[arg-type]
    with pytest.raises(InvalidTensorMap, match="box='ab'"):
        TensorMap.of(np.zeros((8, 8), np.float32), "ab")  # type: ignore[arg-type]


def test_a_stray_exception_gets_line_and_warp(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("odd")

    monkeypatch.setattr("ptxemu.machine.warp.Warp.branch_indexed", fails)
    text = (
        f"{HEADER}.entry k()\n{{ .reg .b32 r;\n mov.u32 r, 0;\n T: .branchtargets A, B;\n brx.idx r, T;\n A: B: ret; }}"
    )
    with pytest.raises(ptxemu.Error, match=r"ZeroDivisionError: odd\n  at line 8: brx.idx r, T;, warp 0 of") as caught:
        ptxemu.Device().launch(text)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_reader_that_has_seen_enough() -> None:
    command = f"{sys.executable} -m ptxemu isa | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


STORES = [
    "st.global.u32 [d], 1;",
    "cvt.u64.u32 e, t; mad.lo.u64 e, e, 4, d; st.global.u32 [e], 1;",
    "cvt.u64.u32 e, t; mad.lo.u64 e, e, 8, d; st.global.v2.u32 [e], {1, 2};",
    "atom.global.add.u32 t, [d], 1;",
]


@pytest.mark.parametrize("store", STORES)
def test_a_store_into_a_read_only_array(store: str) -> None:
    text = f"""{HEADER}.entry k(.param .u64 a) {{ .reg .b64 d, e; .reg .b32 t;
    ld.param.u64 d, [a]; mov.u32 t, %tid.x;
    ld.global.u32 t, [d]; mov.u32 t, %tid.x;
    {store}
    }}"""
    array = np.zeros(64, np.uint32)
    ptxemu.Device().launch(text, args=[array])
    assert array[0]
    array.flags.writeable = False
    with pytest.raises(ptxemu.MemoryFault, match=r"argument 0, uint32 \(64,\) .* is read-only\n  at line 7"):
        ptxemu.Device().launch(text, args=[array])
    ptxemu.Device().launch(text.replace(store, ""), args=[array])


def test_a_bulk_copy_into_a_read_only_array() -> None:
    text = f"""{HEADER}.entry k(.param .u64 a) {{ .reg .b64 d; .shared .align 16 .b8 v[16];
    ld.param.u64 d, [a];
    cp.async.bulk.global.shared::cta.bulk_group [d], [v], 16;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    }}"""
    array = np.zeros(64, np.uint32)
    array.flags.writeable = False
    with pytest.raises(ptxemu.MemoryFault, match="is read-only"):
        ptxemu.Device().launch(text, args=[array], block=(1,))


@pytest.mark.parametrize(
    "access",
    [
        "ld.shared::cluster.u32 r3, [r2];",
        "st.shared::cluster.u32 [r2], 1;",
        "atom.shared::cluster.add.u32 r3, [r2], 1;",
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r2];",
        "add.u32 r2, r2, r4;\n st.shared::cluster.u32 [r2], 1;",
    ],
)
def test_the_shared_memory_of_a_peer_that_has_ended(access: str) -> None:
    """CTA 1 ends after a first cluster barrier; CTA 0 goes on to use it, without the barrier that has to be last."""
    text = f"""{HEADER}.entry k() {{
    .shared .align 8 .b64 v[32]; .reg .b32 r<8>; .reg .pred p, q;
    mov.u32 r1, v; mov.u32 r4, %tid.x; mul.lo.u32 r4, r4, 4;
    setp.eq.u32 p, r4, 0;
    @p mbarrier.init.shared.b64 [v], 32;
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 r0, %cluster_ctarank; setp.eq.u32 p, r0, 1;
    @p bra END;
    mapa.shared::cluster.u32 r2, r1, 1;
    mov.u32 r5, 20000;
    L: sub.u32 r5, r5, 1; setp.ne.u32 p, r5, 0; @p bra L;
    {access}
    END: barrier.cluster.arrive; barrier.cluster.wait;
    }}"""
    ptxemu.Device(checks="none").launch(text, grid=(2,), cluster=(2,))
    early = text.replace("END: barrier.cluster.arrive; barrier.cluster.wait;", "END:")
    with pytest.raises(ptxemu.MemoryFault, match=r"outside CTA \(1, 0, 0\), which has ended .*\n  at line"):
        ptxemu.Device().launch(early, grid=(2,), cluster=(2,))
