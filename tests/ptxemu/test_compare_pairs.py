"""Comparisons with two results or of packed halves, lop3 with a predicate, pairs of 16-bit integers, dp2a and mul24."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from lane_kernel import Case, case, check, decode_number, encode, missing_forms, samples
from test_compare_move import COMBINE, FLOAT, INTEGERS, ORDER

Holds = Callable[[Any, Any], bool]


def both(instruction: str, sources: str, first: Callable[..., Any], second: Callable[..., Any]) -> Iterator[Case]:
    """An instruction whose result is written `p|q`: a case for each of the two."""
    for pair, want in (("d|q", first), ("q|d", second)):
        yield case(f".reg .pred q; {instruction.replace('p|q', pair)}", "pred", sources, want)
    if ".s32" in instruction:
        yield case(instruction.replace("p|q", "_|d"), "pred", sources, second)


def halves(f: Callable[[Any, Any], Any], kind: str, result: str) -> Callable[[int, int], int]:
    """A function of both halves of two registers."""

    def apply(a: int, b: int) -> int:
        found = 0
        for at in (0, 16):
            x, y = (decode_number(kind, v >> at & 0xFFFF) for v in (a, b))
            found |= encode(result, f(x, y)) << at
        return found

    return apply


def pair_cases() -> Iterator[Case]:
    for t in INTEGERS:
        for name in ("eq", "ne") if t[0] == "b" else ORDER:
            f = ORDER[name]
            yield from both(f"setp.{name}.{t} p|q, a, b", f"{t} {t}", f, lambda a, b, f=f: not f(a, b))
        yield from both(f"setp.eq.{t} p|q, a, 7", t, lambda a: a == 7, lambda a: a != 7)
    yield from both("setp.gt.s32 p|q, a, -1", "s32", lambda a: a > -1, lambda a: a <= -1)
    for name, f in FLOAT.items():
        for t in ("bf16", "f32"):
            yield from both(f"setp.{name}.{t} p|q, a, b", f"{t} {t}", f, lambda a, b, f=f: not f(a, b))
        for t in ("f16", "bf16"):
            first, second = (
                lambda a, b, f=f, t=t, at=at: f(*(decode_number(t, x >> at & 0xFFFF) for x in (a, b))) for at in (0, 16)
            )
            yield from both(f"setp.{name}.{t}x2 p|q, a, b", "b32 b32", first, second)
            yield case(f"set.{name}.{t}x2.{t}x2 d, a, b", "b32", "b32 b32", halves(f, t, t))
        yield case(f"set.{name}.f32.f32 d, a, b", "f32", "f32 f32", f)
    for name, g in COMBINE.items():
        yield from both(
            f"setp.lt.{name}.s32 p|q, a, b, c", "s32 s32 pred",
            lambda a, b, c, g=g: g(a < b, c), lambda a, b, c, g=g: g(not a < b, c),
        )  # fmt: skip
        yield from both(
            f"setp.lt.{name}.f32 p|q, a, b, !c", "f32 f32 pred",
            lambda a, b, c, g=g: g(a < b, not c), lambda a, b, c, g=g: g(not a < b, not c),
        )  # fmt: skip
        low, high = (
            lambda a, b, c, g=g, at=at: g(
                decode_number("f16", a >> at & 0xFFFF) < decode_number("f16", b >> at & 0xFFFF), c
            )
            for at in (0, 16)
        )
        yield from both(f"setp.lt.{name}.f16x2 p|q, a, b, c", "b32 b32 pred", low, high)
    for name, f in ORDER.items():
        yield case(f"set.{name}.f32.s32 d, a, b", "f32", "s32 s32", f)
    for bits in (32, 64):
        yield case(
            f"slct.f{bits}.s32 d, a, b, c", f"b{bits}", f"b{bits} b{bits} s32", lambda a, b, c: a if c >= 0 else b
        )


def table_of(table: int) -> Callable[[int, int, int], int]:
    def apply(a: int, b: int, c: int) -> int:
        bits = [table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1 for i in range(32)]
        return sum(bit << i for i, bit in enumerate(bits))

    return apply


def lop3_cases() -> Iterator[Case]:
    for table in (0x00, 0x80, 0xEA, 0xFF, 0x96):
        f = table_of(table)
        for name, g in COMBINE.items():
            text = f".reg .b32 t; lop3.{name}.b32 t|d, a, b, c, {table}, e"
            yield case(text, "pred", "b32 b32 b32 pred", lambda a, b, c, e, f=f, g=g: g(f(a, b, c) != 0, e))
            yield case(f"lop3.{name}.b32 d|_, a, b, c, {table}, e", "b32", "b32 b32 b32 pred",
                       lambda a, b, c, e, f=f: f(a, b, c))  # fmt: skip


def integer_cases() -> Iterator[Case]:
    for t in ("u16", "s16"):
        yield case(f"add.{t}x2 d, a, b", "b32", "b32 b32", halves(operator.add, t, t))
        yield case(f"min.{t}x2 d, a, b", "b32", "b32 b32", halves(min, t, t))
        yield case(f"max.{t}x2 d, a, b", "b32", "b32 b32", halves(max, t, t))
    yield case("min.relu.s16x2 d, a, b", "b32", "b32 b32", halves(lambda x, y: max(min(x, y), 0), "s16", "s16"))
    yield case("max.relu.s16x2 d, a, b", "b32", "b32 b32", halves(lambda x, y: max(x, y, 0), "s16", "s16"))
    for half, shift in (("lo", 0), ("hi", 16)):
        for t in ("u32", "s32"):
            f = lambda a, b, t=t, s=shift: part(a, 0, 24, t) * part(b, 0, 24, t) >> s  # noqa: E731
            yield case(f"mul24.{half}.{t} d, a, b", t, f"{t} {t}", f)
            yield case(f"mad24.{half}.{t} d, a, b, c", t, f"{t} {t} {t}", lambda a, b, c, f=f: f(a, b) + c)
            for u in ("u32", "s32"):
                yield case(
                    f"dp2a.{half}.{t}.{u} d, a, b, c", "u32", "u32 u32 u32",
                    lambda a, b, c, t=t, u=u, s=shift: c + sum(
                        part(a, 16 * i, 16, t) * part(b, s + 8 * i, 8, u) for i in range(2)
                    ),
                )  # fmt: skip


def part(value: int, at: int, bits: int, kind: str) -> int:
    found = value >> at & (1 << bits) - 1
    return found - (1 << bits) if kind[0] == "s" and found >> bits - 1 else found


CASES = [*pair_cases(), *lop3_cases(), *integer_cases()]


@pytest.mark.parametrize("each", CASES, ids=str)
def test_form(each: Case) -> None:
    check(each, samples(each.sources, seed=len(each.instruction)))


def test_every_form_has_a_case() -> None:
    assert missing_forms(("compare_pairs", "integer_parts"), CASES) == []
