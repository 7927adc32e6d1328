"""PTX 'ld', 'st', 'atom', 'red', 'prefetch', 'createpolicy', 'ldmatrix', 'stmatrix', and the memories behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from lane_kernel import BITS, HEADER, missing_forms

import ptxemu
from ptxemu.machine.lanes import FULL
from ptxemu.machine.memory import GlobalMemory

KERNELS: list[str] = []  # every kernel that the tests below run, for the completeness test at the end


def launch(body: str, *args: Any, shared: str = "", local: str = "", **options: Any) -> ptxemu.Report:
    """Runs a kernel with parameters p0, p1, ... (64 bits each) and registers r0-9, s0-9 (16 bits), d0-9, p, q."""
    names = ", ".join(f".param .u64 p{i}" for i in range(len(args)))
    text = f"""{HEADER}{shared}
    .visible .entry k({names}) {{
        .reg .b16 s<10>;
        .reg .b32 r<20>;
        .reg .b64 d<20>;
        .reg .b128 x, y;
        .reg .pred p, q;
        {local}
        mov.u32 r0, %tid.x;
        {body}
        ret;
    }}"""
    KERNELS.append(text)
    return ptxemu.Device("sm_100a").launch(text, args=list(args), **options)


def lane_address(parameter: int, size: int, to: str = "d1") -> str:
    return f"ld.param.u64 {to}, [p{parameter}];\n mad.wide.u32 {to}, r0, {size}, {to};\n"


INTEGERS = [f"{sign}{bits}" for sign in "bus" for bits in (8, 16, 32, 64)]


@pytest.mark.parametrize("kind", [*INTEGERS, "f32", "f64"])
@pytest.mark.parametrize("space", ["global", "shared", "local", "generic"])
def test_scalar_load_and_store(kind: str, space: str) -> None:
    bits = BITS[kind]
    size = bits // 8
    register = {8: "s1", 16: "s1", 32: "r1", 64: "d3"}[bits]
    source = np.random.default_rng(0).integers(0, 256, 32 * size, np.uint8)
    result = np.zeros_like(source)
    middle = ""
    if space in ("shared", "local"):
        where = "d5" if space == "local" else "r2"
        address = "mov.u64 d5, room;" if space == "local" else f"mov.u32 r2, room;\n mad.lo.u32 r2, r0, {size}, r2;"
        middle = f"{address}\n st.{space}.{kind} [{where}], {register};\n mov.b32 r1, 0;\n mov.b64 d3, 0;\n"
        middle += f"ld.{space}.{kind} {register}, [{where}];"
    at = "" if space == "generic" else ".global"
    body = f"{lane_address(0, size)} {lane_address(1, size, 'd2')} ld{at}.{kind} {register}, [d1];\n{middle}"
    declare = {"shared": ".shared .align 16 .b8 room[512];", "local": ""}.get(space, "")
    local = ".local .align 8 .b8 room[8];" if space == "local" else ""
    launch(f"{body}\n st{at}.{kind} [d2], {register};", source, result, shared=declare, local=local)
    assert (result == source).all()


@pytest.mark.parametrize("sign", ["u", "s"])
def test_narrow_loads_extend(sign: str) -> None:
    source = np.arange(120, 152, dtype=np.uint8)
    result = np.zeros(32, np.int32)
    launch(
        f"{lane_address(0, 1)} {lane_address(1, 4, 'd2')} ld.global.{sign}8 r1, [d1];\n st.global.b32 [d2], r1;",
        source,
        result,
    )
    assert result.tolist() == source.astype(np.int8 if sign == "s" else np.uint8).astype(np.int32).tolist()


@pytest.mark.parametrize(
    ("vec", "kind"),
    [("v2", "b8"), ("v4", "b16"), ("v2", "b32"), ("v4", "f32"), ("v8", "b32"), ("v2", "b64"), ("v4", "b64")],
)
def test_vectors(vec: str, kind: str) -> None:
    count, bits = int(vec[1:]), BITS[kind]
    prefix = {8: "s", 16: "s", 32: "r", 64: "d"}[bits]
    names = ", ".join(f"{prefix}{i + 4 if prefix != 's' else i}" for i in range(count))
    size = count * bits // 8
    source = np.random.default_rng(1).integers(0, 256, 32 * size, np.uint8)
    result, again = np.zeros_like(source), np.zeros_like(source)
    room = f".shared .align 32 .b8 room[{32 * size}];"
    body = f"""{lane_address(0, size)} {lane_address(1, size, "d2")} {lane_address(2, size, "d3")}
        ld.global.{vec}.{kind} {{{names}}}, [d1];
        mov.u32 r1, room;
        mad.lo.u32 r1, r0, {size}, r1;
        st.shared.{vec}.{kind} [r1], {{{names}}};
        st.global.{vec}.{kind} [d2], {{{names}}};
        ld.shared.{vec}.{kind} {{{names}}}, [r1];
        st.global.{vec}.{kind} [d3], {{{names}}};"""
    launch(body, source, result, again, shared=room)
    assert (result == source).all()
    assert (again == source).all()


def test_stores_cut_off_and_take_negative_constants() -> None:
    result = np.zeros(4, np.uint64)
    body = """ld.param.u64 d1, [p0];
        mov.u64 d2, 0x123456789;
        st.global.u32 [d1], d2;
        st.global.u32 [d1+8], -1;
        st.global.v2.b16 [d1+16], {-2, 3};
        st.global.f32 [d1+24], 0f3F800000;"""
    launch(body, result, block=(1,))
    assert result.tolist() == [0x23456789, 0xFFFFFFFF, 0x3FFFE, 0x3F800000]


def test_vectors_of_one_register() -> None:
    source, result = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    body = f"""{lane_address(0, 4)} {lane_address(1, 4, "d2")}
        setp.lt.u32 p, r0, 8;
        mov.u32 r1, 9;
        @p ld.global.b32 {{ r1 }}, [ d1 + 0 ];
        ldu.global.v2.u32 {{r2, r3}}, [d3];
        st.global.b32 [ d2 + 0 ], {{ r1 }};"""
    body = body.replace("ldu", "mov.u64 d3, d1;\n and.b64 d3, d3, -8;\n ldu")
    launch(body, source, result)
    assert result.tolist() == [*range(8), *[9] * 24]


def test_128_bits() -> None:
    source = np.arange(64, dtype=np.uint64)
    result = np.zeros_like(source)
    addresses = lane_address(0, 16) + lane_address(1, 16, "d2")
    body = "ld.global.b128 x, [d1];\n mov.b128 y, x;\n st.global.b128 [d2], y;"
    launch(addresses + body, source, result)
    assert (result == source).all()


def test_qualifiers() -> None:
    source, result = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    body = f"""{lane_address(0, 4)} {lane_address(1, 4, "d2")}
        createpolicy.fractional.L2::evict_first.b64 d3, 1.0;
        createpolicy.fractional.L2::evict_last.L2::evict_unchanged.b64 d3, 0.5;
        createpolicy.range.L2::evict_last.L2::evict_first.b64 d3, [d1], 64, 128;
        createpolicy.cvt.L2.b64 d3, d3;
        prefetch.global.L2 [d1];
        prefetchu.L1 [d1];
        applypriority.global.L2::evict_normal [d1], 128;
        ld.global.nc.L1::no_allocate.L2::cache_hint.L2::256B.u32 r1, [d1], d3;
        ld.volatile.global.u32 r2, [d1];
        ld.acquire.gpu.global.u32 r3, [d1];
        ld.relaxed.sys.global.u32 r4, [d1];
        ldu.global.u32 r5, [d1];
        add.u32 r1, r1, r2;
        add.u32 r1, r1, r3;
        add.u32 r1, r1, r4;
        add.u32 r1, r1, r5;
        st.release.gpu.global.u32 [d2], r1;
        st.volatile.global.u32 [d2], r1;
        st.global.L1::no_allocate.L2::cache_hint.u32 [d2], r1, d3;
        st.global.cs.u32 [d2], r1;"""
    launch(body, source, result)
    assert (result == 5 * source).all()


def test_guarded_lanes_keep_their_registers() -> None:
    source, result = np.arange(32, dtype=np.uint32), np.zeros(32, np.uint32)
    body = f"""{lane_address(0, 4)} {lane_address(1, 4, "d2")}
        mov.u32 r1, 100;
        setp.lt.u32 p, r0, 5;
        @p ld.global.u32 r1, [d1];
        @!p mov.u64 d2, d2;
        st.global.u32 [d2], r1;"""
    launch(body, source, result)
    assert result.tolist() == [0, 1, 2, 3, 4] + [100] * 27


def test_lanes_outside_the_mask_never_fault() -> None:
    source, result = np.arange(4, dtype=np.uint32), np.zeros(4, np.uint32)
    body = f"""{lane_address(0, 4)} {lane_address(1, 4, "d2")}
        setp.lt.u32 p, r0, 4;
        @p ld.global.u32 r1, [d1];
        @p st.global.u32 [d2], r1;"""
    launch(body, source, result)
    assert result.tolist() == [0, 1, 2, 3]


def test_bytes_of_an_allocation_below_the_first_lanes() -> None:
    """Their offset from the first lane's allocation is negative, which must not index it from its end."""
    both, memory = np.arange(128, dtype=np.uint8), GlobalMemory()
    memory.register("above", both[64:])
    memory.register("below", both[:64])
    offsets = np.array([64 + i if i < 16 else i for i in range(32)], np.uint64)
    address = offsets + np.uint64(both.ctypes.data)
    (found,) = memory.load(address, 1, 1, FULL)
    assert found.tolist() == offsets.tolist()
    memory.store(address, [found + np.uint8(100)], 1, FULL)
    changed = {*offsets.tolist()}
    assert both.tolist() == [i + 100 if i in changed else i for i in range(128)]


def test_gather_from_two_allocations() -> None:
    one, two, result = np.arange(32, dtype=np.uint32), np.arange(100, 132, dtype=np.uint32), np.zeros(32, np.uint32)
    body = f"""{lane_address(0, 4)} {lane_address(1, 4, "d2")} {lane_address(2, 4, "d3")}
        and.b32 r1, r0, 1;
        setp.eq.u32 p, r1, 1;
        selp.b64 d4, d2, d1, p;
        ld.global.u32 r2, [d4];
        add.u32 r2, r2, 1;
        st.global.u32 [d4], r2;
        st.global.u32 [d3], r2;"""
    launch(body, one, two, result)
    assert result.tolist() == [(101 if i & 1 else 1) + i for i in range(32)]
    assert one.tolist() == [i + (i % 2 == 0) for i in range(32)]
    assert two.tolist() == [100 + i + (i % 2) for i in range(32)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "ld.param.u64 d1, [p0];\n ld.global.u32 r1, [d1+128];",
            r"argument 0, uint32 \(32,\) .*: 0 bytes past its end",
        ),
        ("ld.param.u64 d1, [p0];\n ld.global.u64 d2, [d1+116];", r"not aligned to the 8 bytes"),
        ("ld.param.u64 d1, [p0];\n ld.global.b16 s1, [d1-2];", r"2 bytes before its start|in no allocation"),
        ("mov.u64 d1, 64;\n st.global.u32 [d1], r0;", "global address 0x40, 4 bytes, is in no allocation"),
        ("mov.u32 r1, 0x400;\n ld.shared.u32 r1, [r1+1024];", r"outside shared memory of CTA \(0, 0, 0\)"),
        ("mov.u32 r1, 16;\n ld.shared.u32 r1, [r1];", "shared address 0x10"),
        ("mov.u32 r1, 0x1000400;\n ld.shared::cluster.u32 r1, [r1];", "names CTA 1 of a cluster of 1"),
        ("mov.u64 d1, 64;\n ld.local.u32 r1, [d1];", "local address 0x40"),
        (f"{lane_address(0, 3)} ld.global.u32 r1, [d1];", "lane 1: global address .* is not aligned"),
    ],
)
def test_faults(body: str, message: str) -> None:
    with pytest.raises(ptxemu.MemoryFault, match=message) as caught:
        launch(body, np.zeros(32, np.uint32), shared=".shared .align 16 .b8 room[1024];", local=".local .b32 mine;")
    assert "line " in str(caught.value)
    assert "warp 0 of CTA (0, 0, 0)" in str(caught.value)


ATOMICS: dict[str, Callable[[int, int], int]] = {
    "and": lambda old, b: old & b,
    "or": lambda old, b: old | b,
    "xor": lambda old, b: old ^ b,
    "exch": lambda old, b: b,
    "add": lambda old, b: old + b,
    "inc": lambda old, b: 0 if old >= b else old + 1,
    "dec": lambda old, b: b if old == 0 or old > b else old - 1,
    "min": min,
    "max": max,
}


ATOMIC_TYPES = {
    **dict.fromkeys(("and", "or", "xor", "exch"), ("b32", "b64")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(("min", "max"), ("u32", "u64", "s32", "s64")),
    "add": ("u32", "u64", "s32"),
}


@pytest.mark.parametrize(("operation", "kind"), [(o, k) for o, kinds in ATOMIC_TYPES.items() for k in kinds])
def test_atomics(operation: str, kind: str) -> None:
    bits = BITS[kind]
    dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{bits // 8}")
    operands = np.random.default_rng(2).integers(-50 if kind[0] == "s" else 0, 50, 32).astype(dtype)
    memory, old = np.array([20], dtype), np.zeros(32, dtype)
    register = "r1" if bits == 32 else "d5"
    body = f"""{lane_address(1, bits // 8)} {lane_address(2, bits // 8, "d2")}
        ld.param.u64 d3, [p0];
        ld.global.b{bits} {register}, [d1];
        atom.global.{operation}.{kind} {register}, [d3], {register};
        st.global.b{bits} [d2], {register};"""
    launch(body, memory, operands, old)
    now = 20
    for lane in range(32):
        assert old[lane] == now
        now = int(np.array(ATOMICS[operation](now, int(operands[lane])), np.int64).astype(dtype))
    assert memory[0] == now


@pytest.mark.parametrize(("operation", "kind"), [("xor", "b64"), ("inc", "u32"), ("max", "s32"), ("add", "u64")])
def test_reductions(operation: str, kind: str) -> None:
    bits = BITS[kind]
    memory = np.array([3], f"u{bits // 8}")
    operand = "r0" if bits == 32 else "d5"
    body = "ld.param.u64 d3, [p0];\n cvt.u64.u32 d5, r0;\n"
    launch(f"{body} red.global.{operation}.{kind} [d3], {operand};", memory)
    now = 3
    for lane in range(32):
        now = ATOMICS[operation](now, lane)
    assert memory[0] == now


@pytest.mark.parametrize(("kind", "dtype"), [("f32", np.float32), ("f64", np.float64)])
def test_float_atomics_and_reductions(kind: str, dtype: Any) -> None:
    memory = np.array([1.5], dtype)
    register = "r1" if kind == "f32" else "d5"
    value = "0f40000000" if kind == "f32" else "0d4000000000000000"
    body = f"ld.param.u64 d3, [p0];\n mov.{kind} {register}, {value};\n"
    launch(
        body + f"atom.global.add.{kind} {register}, [d3], {register};\n red.global.add.{kind} [d3], {value};", memory
    )
    assert memory[0] == 1.5 + 32 * 2 + 32 * 2


@pytest.mark.parametrize("kind", ["f16", "bf16", "f16x2", "bf16x2"])
def test_half_atomics(kind: str) -> None:
    one = 0x3C00 if kind.startswith("f16") else 0x3F80
    memory = np.array([0, 0], np.uint16)
    pair = kind.endswith("x2")
    register, value = ("r1", one << 16 | one) if pair else ("s1", one)
    body = f"""ld.param.u64 d3, [p0];
        mov.b{32 if pair else 16} {register}, {value};
        atom.global.add.noftz.{kind} {register}, [d3], {register};
        mov.b{32 if pair else 16} {register}, {value};
        red.relaxed.gpu.global.add.noftz.{kind} [d3], {register};"""
    launch(body, memory)
    sixty_four = 0x5400 if kind.startswith("f16") else 0x4280
    assert memory.tolist() == [sixty_four, sixty_four if pair else 0]


def test_cas_and_shared_atomics() -> None:
    result = np.zeros(2, np.uint32)
    body = """ld.param.u64 d3, [p0];
        setp.eq.u32 p, r0, 0;
        mov.u32 r3, room;
        @p st.shared.u32 [r3], 0;
        add.u32 r1, r0, 1;
        atom.shared.cas.b32 r2, [r3], r0, r1;
        red.global.add.u32 [d3], 1;
        ld.shared.u32 r2, [r3];
        @p st.global.u32 [d3+4], r2;"""
    launch(body, result, shared=".shared .align 4 .b32 room;")
    assert result.tolist() == [32, 32]  # lane by lane each finds its own number


def test_vector_reductions() -> None:
    memory = np.zeros(4, np.float32)
    body = """ld.param.u64 d3, [p0];
        mov.f32 r1, 1.0;
        mov.f32 r2, 2.0;
        red.global.add.v4.f32 [d3], {r1, r2, r1, r2};
        red.global.v2.add.f32 [d3], {r1, r2};
        red.global.v2.f32.add [d3], {r1, r2};"""
    launch(body, memory)
    assert memory.tolist() == [96, 192, 32, 64]


def test_vector_atomics() -> None:
    """Each lane gets what it found, lane after lane for each element."""
    memory, found = np.zeros(2, np.float32), np.zeros((32, 2), np.float32)
    body = """ld.param.u64 d3, [p0];
        ld.param.u64 d4, [p1];
        mad.wide.u32 d4, r0, 8, d4;
        mov.f32 r1, 1.0;
        mov.f32 r2, 2.0;
        atom.global.add.v2.f32 {r3, r4}, [d3], {r1, r2};
        st.global.v2.f32 [d4], {r3, r4};"""
    launch(body, memory, found)
    assert memory.tolist() == [32, 64]
    assert sorted(found[:, 0].tolist()) == list(range(32))
    assert sorted(found[:, 1].tolist()) == list(range(0, 64, 2))


def test_a_hint_before_the_operation() -> None:
    memory = np.array([5, 5], np.uint32)
    body = """ld.param.u64 d3, [p0];
        createpolicy.fractional.L2::evict_last.b64 d4, 1.0;
        atom.global.L2::cache_hint.add.u32 r1, [d3], 2, d4;
        atom.global.L2::cache_hint.inc.u32 r1, [d3+4], 100, d4;
        atom.global.L2::cache_hint.and.b32 r1, [d3+4], 255, d4;
        atom.global.L2::cache_hint.max.s32 r1, [d3+4], 3, d4;
        red.global.L2::cache_hint.add.u32 [d3], 2, d4;
        red.global.L2::cache_hint.inc.u32 [d3+4], 100, d4;
        red.global.L2::cache_hint.or.b32 [d3+4], 0, d4;
        red.global.L2::cache_hint.min.u32 [d3+4], 99, d4;"""
    launch(body, memory)
    assert memory.tolist() == [5 + 32 * 4, 5 + 64]


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("trans", ["", ".trans"])
def test_matrices(num: int, trans: str) -> None:
    source = np.arange(64 * num, dtype=np.uint16)
    fragments, stored = np.zeros((32, num), np.uint32), np.zeros_like(source)
    names = ", ".join(f"r{10 + i}" for i in range(num))
    body = f"""ld.param.u64 d1, [p0];
        ld.param.u64 d2, [p1];
        ld.param.u64 d3, [p2];
        mov.u32 r1, room;
        mad.lo.u32 r2, r0, 16, r1;
        mad.wide.u32 d4, r0, 16, d1;
        setp.lt.u32 p, r0, {8 * num};
        @p ld.global.v4.b32 {{r4, r5, r6, r7}}, [d4];
        @p st.shared.v4.b32 [r2], {{r4, r5, r6, r7}};
        bar.warp.sync 0xffffffff;
        ldmatrix.sync.aligned.m8n8.x{num}{trans}.shared.b16 {{{names}}}, [r2];
        add.u32 r3, r2, 1024;
        stmatrix.sync.aligned.m8n8.x{num}{trans}.shared.b16 [r3], {{{names}}};
        bar.warp.sync 0xffffffff;
        @p ld.shared.v4.b32 {{r4, r5, r6, r7}}, [r3];
        mad.wide.u32 d5, r0, 16, d3;
        @p st.global.v4.b32 [d5], {{r4, r5, r6, r7}};
        mad.wide.u32 d6, r0, {4 * num}, d2;
        {f"st.global.v{num}.b32 [d6], {{{names}}};" if num > 1 else "st.global.b32 [d6], r10;"}"""
    launch(body, source, fragments, stored, shared=".shared .align 16 .b8 room[2048];")
    matrices = source.reshape(num, 8, 8)
    for lane in range(32):
        for i in range(num):
            row, column = lane // 4, 2 * (lane % 4)
            pair = [matrices[i][column + k, row] if trans else matrices[i][row, column + k] for k in range(2)]
            assert fragments[lane, i] == int(pair[0]) | int(pair[1]) << 16
    assert (stored == source).all()


def test_movmatrix() -> None:
    result = np.zeros(32, np.uint32)
    body = (
        f"{lane_address(0, 4)} shl.b32 r1, r0, 1;\n shl.b32 r2, r0, 17;\n or.b32 r1, r1, r2;\n add.u32 r1, r1, 65536;\n"
    )
    launch(f"{body} movmatrix.sync.aligned.m8n8.trans.b16 r1, r1;\n st.global.u32 [d1], r1;", result)
    matrix = np.arange(64).reshape(8, 8)
    assert result.view(np.uint16).reshape(8, 8).tolist() == matrix.T.tolist()


def test_module_variables() -> None:
    result = np.zeros(4, np.uint64)
    text = f"""{HEADER}
    .global .align 8 .u32 table[4] = {{10, 20, 30}};
    .const .align 4 .f32 factor = 2.5;
    .global .u64 where = table+8;
    .visible .entry k(.param .u64 out) {{
        .reg .b64 d<4>;
        .reg .b32 r<4>;
        ld.param.u64 d0, [out];
        ld.global.u32 r0, [table+4];
        st.global.u32 [d0], r0;
        ld.const.f32 r1, [factor];
        st.global.u32 [d0+8], r1;
        ld.global.u64 d1, [where];
        ld.u32 r2, [d1];
        st.global.u32 [d0+16], r2;
        ld.global.u32 r3, [table+12];
        st.global.u32 [d0+24], r3;
    }}"""
    ptxemu.Device("sm_100a").launch(text, args=[result])
    assert result.tolist() == [20, 0x40200000, 30, 0]


@pytest.mark.usefixtures("whole_file")
def test_every_form_has_a_case() -> None:
    assert missing_forms(["memory"], KERNELS) == []
