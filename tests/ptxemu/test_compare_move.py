"""PTX 'Comparison and Selection Instructions' and the moves of 'Data Movement and Conversion Instructions'."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from lane_kernel import BITS, HEADER, Case, case, check, execute, missing_forms, samples

import ptxemu

INTEGERS = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64")
ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
COMBINE: dict[str, Callable[[Any, Any], bool]] = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def unordered(a: float, b: float) -> bool:
    return math.isnan(a) or math.isnan(b)


def float_comparison(name: str) -> Callable[[float, float], bool]:
    if name == "num":
        return lambda a, b: not unordered(a, b)
    if name == "nan":
        return unordered
    plain = ORDER[name[:2]]
    if len(name) == 3:
        return lambda a, b: unordered(a, b) or plain(a, b)
    return lambda a, b: not unordered(a, b) and plain(a, b)


FLOAT = {name: float_comparison(name) for name in ("num", "nan", *ORDER, *(f"{n}u" for n in ORDER))}


def comparison_cases() -> Iterator[Case]:
    for t in INTEGERS:
        for name, holds in ORDER.items():
            if t[0] != "b" or name in ("eq", "ne"):
                yield case(f"setp.{name}.{t} d, a, b", "pred", f"{t} {t}", holds)
        yield case(f"setp.eq.{t} d, a, 7", "pred", t, lambda a: a == 7)
        yield case(f"selp.{t} d, a, b, c", t, f"{t} {t} pred", lambda a, b, c: a if c else b)
        yield case(f"selp.{t} d, 1, 0, a", t, "pred", lambda a: 1 if a else 0)
        yield case(f"slct.{t}.s32 d, a, b, c", t, f"{t} {t} s32", lambda a, b, c: a if c >= 0 else b)
        yield case(f"set.ne.u32.{t} d, a, b", "u32", f"{t} {t}", lambda a, b: -1 if a != b else 0)
    for name, same in UNSIGNED.items():
        yield case(f"setp.{name}.u32 d, a, b", "pred", "u32 u32", ORDER[same])
    for name, combine in COMBINE.items():
        holds = lambda a, b, c, f=combine: f(a < b, c)  # noqa: E731
        yield case(f"setp.lt.{name}.s32 d, a, b, c", "pred", "s32 s32 pred", holds)
        holds = lambda a, b, c, f=combine: f(a < b, not c)  # noqa: E731
        yield case(f"setp.lt.{name}.f32 d, a, b, !c", "pred", "f32 f32 pred", holds)
    for name, holds in FLOAT.items():
        for t in ("f16", "f32", "f64"):
            yield case(f"setp.{name}.{t} d, a, b", "pred", f"{t} {t}", holds)
        yield case(f"set.{name}.u32.f32 d, a, b", "u32", "f32 f32", lambda a, b, f=holds: -1 if f(a, b) else 0)
    for t in ("f32", "f64"):
        yield case(f"selp.{t} d, a, b, c", t, f"{t} {t} pred", lambda a, b, c: a if c else b)


def choose_bytes(a: int, b: int, c: int) -> int:
    source = [x >> 8 * i & 255 for x in (a, b) for i in range(4)]
    out = 0
    for i in range(4):
        nibble = c >> 4 * i & 15
        byte = source[nibble & 7]
        out |= (255 * (byte >> 7) if nibble & 8 else byte) << 8 * i
    return out


MODES = {
    "f4e": lambda i, n: n + i,
    "b4e": lambda i, n: (n - i) & 7,
    "rc8": lambda i, n: n,
    "ecl": lambda i, n: max(i, n),
    "ecr": lambda i, n: min(i, n),
    "rc16": lambda i, n: 2 * (n & 1) + (i & 1),
}


def move_cases() -> Iterator[Case]:
    for t in ("pred", *INTEGERS, "f32", "f64"):
        yield case(f"mov.{t} d, a", t, t, lambda a: a)
    yield case("mov.f32 d, 0f3FC00000", "f32", "b32", lambda a: 1.5)
    yield case("mov.f64 d, 0d3FF8000000000000", "f64", "b32", lambda a: 1.5)
    yield case("mov.f32 d, -2.5", "f32", "b32", lambda a: -2.5)
    yield case("mov.s32 d, -3", "s32", "b32", lambda a: -3)
    yield case("mov.b64 d, {a, b}", "b64", "b32 b32", lambda a, b: b << 32 | a)
    yield case("mov.b32 d, {a, b}", "b32", "b16 b16", lambda a, b: b << 16 | a)
    yield case("mov.b64 d, {a, b, c, e}", "b64", "b16 b16 b16 b16", lambda a, b, c, e: a | b << 16 | c << 32 | e << 48)
    yield case("mov.b64 {_, d}, a", "b32", "b64", lambda a: a >> 32)
    yield case("mov.b64 {d, _}, a", "b32", "b64", lambda a: a)
    yield case("mov.b64 {_, _, d, _}, a", "b16", "b64", lambda a: a >> 32)
    yield case("mov.b32 {_, d}, a", "b16", "b32", lambda a: a >> 16)
    yield case("prmt.b32 d, a, b, c", "b32", "b32 b32 b32", choose_bytes)
    for selector in (0x3210, 0x7654, 0x9D3B, 0x5410):
        yield case(f"prmt.b32 d, a, b, {selector}", "b32", "b32 b32", lambda a, b, c=selector: choose_bytes(a, b, c))
    for mode, index in MODES.items():
        pick = lambda a, b, c, f=index: sum(  # noqa: E731
            ((b << 32 | a) >> 8 * f(i, c & 3) & 255) << 8 * i for i in range(4)
        )
        yield case(f"prmt.b32.{mode} d, a, b, c", "b32", "b32 b32 b32", pick)
    for space, window in (("shared", 1 << 56), ("local", 2 << 56), ("global", 0), ("const", 0), ("param", 0)):
        yield case(f"cvta.{space}.u64 d, a", "u64", "u64", lambda a, w=window: a + w)
        mask = (1 << 32) - 1 if window else (1 << 64) - 1
        yield case(f"cvta.to.{space}.u64 d, a", "u64", "u64", lambda a, m=mask: a & m)


CASES = [*comparison_cases(), *move_cases()]


@pytest.mark.parametrize("each", CASES, ids=str)
def test_form(each: Case) -> None:
    columns = samples(each.sources, seed=len(each.instruction))
    if each.instruction.startswith("cvta.") and ".to." not in each.instruction:
        columns = [[x & 0xFFFFFFFF for x in columns[0]]]
    check(each, columns)


QUADS = """
.visible .entry k(.param .u64 out)
{
    .reg .b128 x, y;
    .reg .b64 lo, hi, at;
    .reg .b32 a, b, c, d, lane;
    ld.param.u64 at, [out];
    mov.u32 lane, %laneid;
    mad.wide.u32 at, lane, 16, at;
    cvt.u64.u32 lo, lane;
    mov.b64 hi, 5;
    mov.b128 x, {lo, hi};
    mov.b128 y, x;
    mov.b128 {a, b, c, d}, y;
    add.u32 d, d, 1;
    mov.b128 x, {a, b, c, d};
    mov.b128 {lo, hi}, x;
    st.global.v2.b64 [at], {lo, hi};
}
"""


def test_moves_of_128_bits() -> None:
    out = np.zeros((32, 2), np.uint64)
    ptxemu.Device("sm_100a").launch(HEADER + QUADS, args=[out])
    assert out[:, 0].tolist() == list(range(32))
    assert set(out[:, 1].tolist()) == {5 + (1 << 32)}


SPACES = {"global": 0x7000, "shared": 1 << 56 | 0x400, "shared::cta": 1 << 56 | 0x400, "local": 2 << 56}


@pytest.mark.parametrize("space", SPACES)
def test_isspacep(space: str) -> None:
    addresses = [SPACES["global"], SPACES["shared"], SPACES["local"], 1 << 56 | 1 << 24 | 0x400] * 8
    got = execute(f"isspacep.{space} d, a", "pred", ("b64", addresses))
    assert got.tolist()[:3] == [space == "global", space.startswith("shared"), space == "local"]
    assert got[3] == 0  # another CTA's shared memory


def test_every_form_has_a_case() -> None:
    extra = [HEADER + QUADS, *(HEADER + one for one in isspacep_kernels())]
    assert missing_forms(["compare", "move"], [*CASES, *extra]) == []


def isspacep_kernels() -> Iterator[str]:
    for space in SPACES:
        yield f".visible .entry k() {{ .reg .pred p; .reg .b64 a; isspacep.{space} p, a; }}"


def test_widths() -> None:
    assert {t: BITS[t] for t in ("pred", "b16", "u64")} == {"pred": 1, "b16": 16, "u64": 64}
