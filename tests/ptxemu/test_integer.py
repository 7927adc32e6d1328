"""PTX 'Integer Arithmetic Instructions' and 'Logic and Shift Instructions': each form against exact arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lane_kernel import BITS, Case, case, check, missing_forms, samples

ARITHMETIC = ("u16", "u32", "u64", "s16", "s32", "s64")


def limits(kind: str) -> tuple[int, int]:
    bits = BITS[kind]
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def clamp(x: int, kind: str) -> int:
    low, high = limits(kind)
    return min(max(x, low), high)


def quotient(a: int, b: int) -> int:
    if not b:
        return -1
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a: int, b: int) -> int:
    return a - b * quotient(a, b) if b else -1


def byte(x: int, bits: int) -> int:
    """A position or length; for 64 bits silicon takes all of the operand."""
    return x & 255 if bits == 32 else min(x, 255)


def field(a: int, b: int, c: int, kind: str) -> int:
    bits = BITS[kind]
    position, length = byte(b, bits), byte(c, bits)
    sign = (a >> min(position + length - 1, bits - 1)) & 1 if kind[0] == "s" and length else 0
    out = 0
    for i in range(bits):
        inside = i < length and position + i < bits
        out |= ((a >> position + i) & 1 if inside else sign) << i
    return out


def insert(a: int, b: int, c: int, e: int, bits: int) -> int:
    position, length = byte(c, bits), byte(e, bits)
    for i in range(length):
        if position + i < bits:
            b = b & ~(1 << position + i) | (a >> i & 1) << position + i
    return b


def find(a: int, kind: str) -> int:
    if a < 0:
        a = ~a
    return a.bit_length() - 1


def nth(mask: int, base: int, offset: int) -> int:
    base &= 31
    if offset == 0:
        return base if mask >> base & 1 else -1
    step = 1 if offset > 0 else -1
    places = [p for p in (range(base, 32) if step > 0 else range(base, -1, -1)) if mask >> p & 1]
    return places[abs(offset) - 1] if abs(offset) <= len(places) else -1


def signed_bytes(word: int, signed: bool) -> list[int]:
    found = [word >> 8 * i & 255 for i in range(4)]
    return [x - 256 if signed and x > 127 else x for x in found]


def dot(a: int, b: int, c: int, signs: tuple[bool, bool]) -> int:
    return c + sum(x * y for x, y in zip(signed_bytes(a, signs[0]), signed_bytes(b, signs[1]), strict=True))


def extend(a: int, b: int, mode: str, signed: bool) -> int:
    n = b & 31 if mode == "wrap" else min(b, 32)
    x = a & (1 << n) - 1
    return x - (1 << n) if signed and n and x >> n - 1 else x


def mask_of(a: int, b: int, mode: str) -> int:
    a, b = (a & 31, b & 31) if mode == "wrap" else (min(a, 32), min(b, 32))
    return sum(1 << i for i in range(a, min(a + b, 32)))


def integer_cases() -> Iterator[Case]:
    for t in ARITHMETIC:
        bits = BITS[t]
        yield case(f"add.{t} d, a, b", t, f"{t} {t}", lambda a, b: a + b)
        yield case(f"sub.{t} d, a, b", t, f"{t} {t}", lambda a, b: a - b)
        yield case(f"mul.lo.{t} d, a, b", t, f"{t} {t}", lambda a, b: a * b)
        yield case(f"mul.hi.{t} d, a, b", t, f"{t} {t}", lambda a, b, n=bits: a * b >> n)
        yield case(f"mad.lo.{t} d, a, b, c", t, f"{t} {t} {t}", lambda a, b, c: a * b + c)
        yield case(f"mad.hi.{t} d, a, b, c", t, f"{t} {t} {t}", lambda a, b, c, n=bits: (a * b >> n) + c)
        yield case(f"div.{t} d, a, b", t, f"{t} {t}", quotient)
        yield case(f"rem.{t} d, a, b", t, f"{t} {t}", remainder)
        yield case(f"min.{t} d, a, b", t, f"{t} {t}", min)
        yield case(f"max.{t} d, a, b", t, f"{t} {t}", max)
        yield case(f"sad.{t} d, a, b, c", t, f"{t} {t} {t}", lambda a, b, c: c + abs(a - b))
        if bits < 64:
            wide = f"{t[0]}{2 * bits}"
            yield case(f"mul.wide.{t} d, a, b", wide, f"{t} {t}", lambda a, b: a * b)
            yield case(f"mad.wide.{t} d, a, b, c", wide, f"{t} {t} {wide}", lambda a, b, c: a * b + c)
        if t[0] == "s":
            yield case(f"abs.{t} d, a", t, t, abs)
            yield case(f"neg.{t} d, a", t, t, lambda a: -a)
    yield case("add.sat.s32 d, a, b", "s32", "s32 s32", lambda a, b: clamp(a + b, "s32"))
    yield case("sub.sat.s32 d, a, b", "s32", "s32 s32", lambda a, b: clamp(a - b, "s32"))
    yield case("min.relu.s32 d, a, b", "s32", "s32 s32", lambda a, b: max(min(a, b), 0))
    yield case("max.relu.s32 d, a, b", "s32", "s32 s32", lambda a, b: max(a, b, 0))


def bit_cases() -> Iterator[Case]:
    for bits in (32, 64):
        t = f"b{bits}"
        yield case(f"popc.{t} d, a", "u32", t, lambda a: a.bit_count())
        yield case(f"clz.{t} d, a", "u32", t, lambda a, n=bits: n - a.bit_length())
        yield case(f"brev.{t} d, a", t, t, lambda a, n=bits: int(f"{a:0{n}b}"[::-1], 2))
        yield case(f"bfi.{t} d, a, b, c, e", t, f"{t} {t} u32 u32", lambda a, b, c, e, n=bits: insert(a, b, c, e, n))
        for sign in "us":
            t = f"{sign}{bits}"
            yield case(f"bfe.{t} d, a, b, c", t, f"{t} u32 u32", lambda a, b, c, t=t: field(a, b, c, t))
            yield case(f"bfind.{t} d, a", "u32", t, lambda a, t=t: find(a, t))
            shift = lambda a, t=t, n=bits: n - 1 - find(a, t) if find(a, t) >= 0 else -1  # noqa: E731
            yield case(f"bfind.shiftamt.{t} d, a", "u32", t, shift)
    yield case("fns.b32 d, a, b, c", "b32", "b32 b32 s32", nth)
    for mode in ("clamp", "wrap"):
        yield case(f"szext.{mode}.u32 d, a, b", "u32", "u32 u32", lambda a, b, m=mode: extend(a, b, m, False))
        yield case(f"szext.{mode}.s32 d, a, b", "s32", "s32 u32", lambda a, b, m=mode: extend(a, b, m, True))
        yield case(f"bmsk.{mode}.b32 d, a, b", "b32", "u32 u32", lambda a, b, m=mode: mask_of(a, b, m))
    for x in "us":
        for y in "us":
            signs = (x == "s", y == "s")
            yield case(f"dp4a.{x}32.{y}32 d, a, b, c", "s32", "b32 b32 s32", lambda a, b, c, s=signs: dot(a, b, c, s))


def funnel(a: int, b: int, c: int, left: bool, mode: str) -> int:
    n = c & 31 if mode == "wrap" else min(c, 32)
    both = b << 32 | a
    return both << n >> 32 if left else both >> n


def logic_cases() -> Iterator[Case]:
    for t in ("pred", "b16", "b32", "b64"):
        yield case(f"and.{t} d, a, b", t, f"{t} {t}", lambda a, b: a & b)
        yield case(f"or.{t} d, a, b", t, f"{t} {t}", lambda a, b: a | b)
        yield case(f"xor.{t} d, a, b", t, f"{t} {t}", lambda a, b: a ^ b)
        yield case(f"not.{t} d, a", t, t, (lambda a: not a) if t == "pred" else (lambda a: ~a))
        if t == "pred":
            continue
        bits = BITS[t]
        yield case(f"cnot.{t} d, a", t, t, lambda a: a == 0)
        yield case(f"shl.{t} d, a, b", t, f"{t} u32", lambda a, b, n=bits: a << b if b < n else 0)
        yield case(f"shl.{t} d, a, 5", t, t, lambda a: a << 5)
        for s in (f"b{bits}", f"u{bits}", f"s{bits}"):
            right = lambda a, b, n=bits, s=s: a >> b if b < n else (-1 if s[0] == "s" and a < 0 else 0)  # noqa: E731
            yield case(f"shr.{s} d, a, b", s, f"{s} u32", right)
            yield case(f"shr.{s} d, a, 3", s, s, lambda a: a >> 3)
            yield case(f"shr.{s} d, a, 77", s, s, lambda a, s=s: -1 if s[0] == "s" and a < 0 else 0)
    for table in (0x00, 0x3A, 0x96, 0xE8, 0xFF):
        bitwise = lambda a, b, c, t=table: sum(  # noqa: E731
            (t >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32)
        )
        yield case(f"lop3.b32 d, a, b, c, {table:#x}", "b32", "b32 b32 b32", bitwise)
        fixed = lambda a, b, f=bitwise: f(a, b, -252645136 & 0xFFFFFFFF)  # noqa: E731
        yield case(f"lop3.b32 d, a, b, -252645136, {table:#x}", "b32", "b32 b32", fixed)
    for way in "lr":
        for mode in ("clamp", "wrap"):
            shifted = lambda a, b, c, w=way, m=mode: funnel(a, b, c, w == "l", m)  # noqa: E731
            yield case(f"shf.{way}.{mode}.b32 d, a, b, c", "b32", "b32 b32 u32", shifted)


CASES = [*integer_cases(), *bit_cases(), *logic_cases()]


@pytest.mark.parametrize("each", CASES, ids=str)
def test_form(each: Case) -> None:
    columns = samples(each.sources, seed=len(each.instruction))
    if each.instruction.startswith("fns"):
        columns[1] = [x & 31 for x in columns[1]]
    check(each, columns)


def test_every_form_has_a_case() -> None:
    assert missing_forms(["integer", "logic"], CASES) == []
