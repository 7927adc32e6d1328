"""PTX 'Floating-Point Instructions' and 'Half Precision Floating-Point Instructions': each form against fractions."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from lane_kernel import Case, case, check, decode_number, execute, missing_forms, samples, to_float

ROUNDINGS = ("rn", "rz", "rm", "rp")
TINY = {"f32": 2.0**-126, "f16": 2.0**-14}
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
}


class Down(float):
    """A number rounded down: what cancels is -0."""

    def __add__(self, other: float) -> Down:
        total = float(self) + float(other)
        cancels = total == 0 and math.copysign(1, self) != math.copysign(1, other)
        return Down(-0.0 if cancels else total)

    def __sub__(self, other: float) -> Down:
        return self + -float(other)

    def __mul__(self, other: float) -> Down:
        return Down(float(self) * float(other))


def exactly(function: Callable[..., Any], *numbers: float, rounding: str = "rn") -> Any:
    """The function of exact fractions; of floats where one is special or the result is zero, whose sign counts."""
    if all(math.isfinite(x) for x in numbers):
        with contextlib.suppress(ZeroDivisionError):
            if found := function(*map(Fraction, numbers)):
                return found
            if rounding == "rm" and function in (*OPERATIONS.values(), fused):
                return float(function(*map(Down, numbers)))
    if function is fused and [math.isfinite(x) for x in numbers] == [True, True, False]:
        return numbers[2]  # whose infinity outweighs a finite product, however large
    with np.errstate(all="ignore"):
        return float(function(*map(np.float64, numbers)))


def rounded(kind: str, rounding: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with one rounding to the type."""
    return lambda *numbers: decode_number(
        kind, to_float(exactly(function, *numbers, rounding=rounding), kind, rounding)
    )


def flush(kind: str, x: float) -> float:
    return math.copysign(0.0, x) if abs(x) < TINY[kind] else x


def flushing(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *numbers: flush(kind, function(*(flush(kind, x) for x in numbers)))


def saturating(function: Callable[..., Any]) -> Callable[..., Any]:
    def saturate(*numbers: float) -> float:
        x = function(*numbers)
        return 0.0 if math.isnan(x) or x == 0 else min(max(x, 0.0), 1.0)

    return saturate


def fused(a: Any, b: Any, c: Any) -> Any:
    return a * b + c


def arithmetic_cases() -> Iterator[Case]:
    for name, operation in OPERATIONS.items():
        for rounding in ROUNDINGS:
            yield case(f"{name}.{rounding}.f32 d, a, b", "f32", "f32 f32", rounded("f32", rounding, operation))
        near = rounded("f32", "rn", operation)
        yield case(f"{name}.f32 d, a, b", "f32", "f32 f32", near)
        yield case(f"{name}.ftz.f32 d, a, b", "f32", "f32 f32", flushing("f32", near))
        yield case(f"{name}.sat.f32 d, a, b", "f32", "f32 f32", saturating(near))
        yield case(f"{name}.f64 d, a, b", "f64", "f64 f64", rounded("f64", "rn", operation))
        for kind in ("f16", "bf16"):
            yield case(f"{name}.rn.{kind} d, a, b", kind, f"{kind} {kind}", rounded(kind, "rn", operation))
        yield case(f"{name}.rz.f16 d, a, b", "f16", "f16 f16", rounded("f16", "rz", operation))
    for opcode in ("fma", "mad"):
        for rounding in ROUNDINGS:
            yield case(f"{opcode}.{rounding}.f32 d, a, b, c", "f32", "f32 f32 f32", rounded("f32", rounding, fused))
        yield case(f"{opcode}.rn.f64 d, a, b, c", "f64", "f64 f64 f64", rounded("f64", "rn", fused))
    for kind in ("f16", "bf16"):
        near = rounded(kind, "rn", fused)
        yield case(f"fma.rn.{kind} d, a, b, c", kind, f"{kind} {kind} {kind}", near)
        yield case(f"fma.rn.relu.{kind} d, a, b, c", kind, f"{kind} {kind} {kind}", lambda *x, f=near: relu(f(*x)))


def relu(x: float) -> float:
    return x if math.isnan(x) or x > 0 else 0.0


def least(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return min(a, b, key=lambda x: (x, math.copysign(1, x)))


def most(a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return max(a, b, key=lambda x: (x, math.copysign(1, x)))


def loud(pick: Callable[[float, float], float]) -> Callable[[float, float], float]:
    return lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else pick(a, b)


def signed(pick: Callable[[float, float], float]) -> Callable[[float, float], float]:
    return lambda a, b: math.copysign(pick(abs(a), abs(b)), math.copysign(1, a) * math.copysign(1, b))


KINDS = {
    "finite": math.isfinite,
    "infinite": math.isinf,
    "number": lambda x: not math.isnan(x),
    "notanumber": math.isnan,
    "normal": lambda x: math.isfinite(x) and (abs(x) >= TINY["f32"] or x == 0),
    "subnormal": lambda x: 0 < abs(x) < TINY["f32"],
}


def sign_cases() -> Iterator[Case]:
    for kind in ("f32", "f64", "f16", "bf16"):
        yield case(f"neg.{kind} d, a", kind, kind, lambda a: -a)
        yield case(f"abs.{kind} d, a", kind, kind, abs)
        for name, pick in (("min", least), ("max", most)):
            yield case(f"{name}.{kind} d, a, b", kind, f"{kind} {kind}", pick)
            if kind != "f64":
                yield case(f"{name}.NaN.{kind} d, a, b", kind, f"{kind} {kind}", loud(pick))
    for name, pick in (("min", least), ("max", most)):
        yield case(f"{name}.xorsign.abs.f32 d, a, b", "f32", "f32 f32", signed(pick))
        yield case(f"{name}.f32 d, a, b, c", "f32", "f32 f32 f32", lambda a, b, c, p=pick: p(p(a, b), c))
        biggest = lambda a, b, c, p=pick: p(p(abs(a), abs(b)), abs(c))  # noqa: E731
        yield case(f"{name}.abs.f32 d, a, b, c", "f32", "f32 f32 f32", biggest)
    for kind in ("f32", "f64"):
        yield case(f"copysign.{kind} d, a, b", kind, f"{kind} {kind}", lambda a, b: math.copysign(b, a))
    yield from (case(f"testp.{name}.f32 d, a", "pred", "f32", holds) for name, holds in KINDS.items())


def over(a: Any, b: Any) -> Any:
    return a / b


def root(kind: str, rounding: str) -> Callable[[float], float]:
    def sqrt(a: float) -> float:
        if not (math.isfinite(a) and a > 0):
            return a if not a or a == math.inf else math.nan
        x = Fraction(a)
        shift = 700  # the root to so many bits, with a sticky bit for the rest
        whole = math.isqrt((x.numerator << 2 * shift) // x.denominator)
        exact = Fraction(whole, 1 << shift)
        sticky = exact * exact != x
        return decode_number(kind, to_float(exact + Fraction(sticky, 1 << shift + 1), kind, rounding))

    return sqrt


def division_cases() -> Iterator[Case]:
    for rounding in ROUNDINGS:
        yield case(f"div.{rounding}.f32 d, a, b", "f32", "f32 f32", rounded("f32", rounding, over))
        yield case(f"rcp.{rounding}.f32 d, a", "f32", "f32", rounded("f32", rounding, lambda a: over(type(a)(1), a)))
        yield case(f"sqrt.{rounding}.f32 d, a", "f32", "f32", root("f32", rounding))
    yield case("div.rn.f64 d, a, b", "f64", "f64 f64", rounded("f64", "rn", over))
    yield case("rcp.rn.f64 d, a", "f64", "f64", rounded("f64", "rn", lambda a: over(type(a)(1), a)))
    yield case("sqrt.rn.f64 d, a", "f64", "f64", root("f64", "rn"))


CASES = [*arithmetic_cases(), *sign_cases(), *division_cases()]


@pytest.mark.parametrize("each", CASES, ids=str)
def test_form(each: Case) -> None:
    check(each, samples(each.sources, seed=len(each.instruction)))


ONE, MINUS_ONE, ZERO, MINUS_ZERO = 0x3F800000, 0xBF800000, 0, 0x80000000


@pytest.mark.parametrize(
    ("instruction", "operands", "want"),
    [
        ("add.rm.f32 d, a, b", (ONE, MINUS_ONE), MINUS_ZERO),
        ("add.rp.f32 d, a, b", (ONE, MINUS_ONE), ZERO),
        ("add.rm.f32 d, a, b", (ZERO, MINUS_ZERO), MINUS_ZERO),
        ("add.rm.f32 d, a, b", (ZERO, ZERO), ZERO),
        ("sub.rm.f32 d, a, b", (ONE, ONE), MINUS_ZERO),
        ("sub.rz.f32 d, a, b", (ONE, ONE), ZERO),
        ("fma.rm.f32 d, a, b, c", (ONE, ONE, MINUS_ONE), MINUS_ZERO),
        ("fma.rn.f32 d, a, b, c", (ONE, ONE, MINUS_ONE), ZERO),
        ("fma.rm.f32 d, a, b, c", (ZERO, ONE, ZERO), ZERO),
    ],
)
def test_the_sign_of_a_zero(instruction: str, operands: tuple[int, ...], want: int) -> None:
    """Numbers that cancel give -0 when rounding down, +0 otherwise."""
    got = execute(instruction, "f32", *(("f32", [x] * 32) for x in operands))
    assert got.tolist() == [want] * 32


@pytest.mark.parametrize(
    "instruction", ["add.f16 d, a, b", "mul.f16 d, a, b", "fma.rn.f16 d, a, b, b", "max.NaN.f16 d, a, b"]
)
def test_half_precision_nans_are_canonical(instruction: str) -> None:
    got = execute(instruction, "f16", ("f16", [0xFE01] * 32), ("f16", [0x3C00] * 32))
    assert got.tolist() == [0x7FFF] * 32


# Approximate instructions are held to the error that the manual allows them.

APPROXIMATE: list[tuple[str, str, int, Callable[..., float], float]] = [
    ("div.approx.f32 d, a, b", "f32", 2, lambda a, b: a / b, 2.0**-22),
    ("div.full.f32 d, a, b", "f32", 2, lambda a, b: a / b, 2.0**-22),
    ("rcp.approx.f32 d, a", "f32", 1, lambda a: 1 / a, 2.0**-23),
    ("rcp.approx.ftz.f64 d, a", "f64", 1, lambda a: 1 / a, 2.0**-20),
    ("sqrt.approx.f32 d, a", "f32", 1, math.sqrt, 2.0**-23),
    ("rsqrt.approx.f32 d, a", "f32", 1, lambda a: 1 / math.sqrt(a), 2.0**-22),
    ("rsqrt.approx.f64 d, a", "f64", 1, lambda a: 1 / math.sqrt(a), 2.0**-22),
    ("rsqrt.approx.ftz.f64 d, a", "f64", 1, lambda a: 1 / math.sqrt(a), 2.0**-20),
    ("sin.approx.f32 d, a", "f32", 1, math.sin, 2.0**-20),
    ("cos.approx.f32 d, a", "f32", 1, math.cos, 2.0**-20),
    ("lg2.approx.f32 d, a", "f32", 1, math.log2, 2.0**-22),
    ("ex2.approx.f32 d, a", "f32", 1, lambda a: 2.0**a, 2.0**-22),
    ("ex2.approx.ftz.f32 d, a", "f32", 1, lambda a: 2.0**a, 2.0**-22),
    ("ex2.approx.f16 d, a", "f16", 1, lambda a: 2.0**a, 2.0**-9),
    ("ex2.approx.ftz.bf16 d, a", "bf16", 1, lambda a: 2.0**a, 2.0**-7),
    ("tanh.approx.f32 d, a", "f32", 1, math.tanh, 2.0**-11),
    ("tanh.approx.f16 d, a", "f16", 1, math.tanh, 2.0**-10),
    ("tanh.approx.bf16 d, a", "bf16", 1, math.tanh, 2.0**-8),
]


@pytest.mark.parametrize(("instruction", "kind", "operands", "function", "bound"), APPROXIMATE)
def test_approximate(instruction: str, kind: str, operands: int, function: Callable[..., float], bound: float) -> None:
    generator = np.random.default_rng(3)
    columns = [[to_float(float(x), kind) for x in generator.uniform(0.05, 3, 32)] for _ in range(operands)]
    got = execute(instruction, kind, *((kind, column) for column in columns))
    for lane in range(32):
        want = function(*(decode_number(kind, column[lane]) for column in columns))
        found = decode_number(kind, int(got[lane]))
        assert abs(found - want) <= bound * max(abs(want), 1.0), f"lane {lane}: {found}, not {want}"


# Packed forms do to each half what the plain form does.

PACKED = [
    *(f"{op}.{kind} d, a, b" for op in ("add", "sub", "mul", "min", "max") for kind in ("f16x2", "bf16x2")),
    *(f"fma.rn.{kind} d, a, b, c" for kind in ("f16x2", "bf16x2")),
    *(f"{op}.{kind} d, a" for op in ("neg", "abs") for kind in ("f16x2", "bf16x2")),
    *(f"{op} d, a" for op in ("ex2.approx.f16x2", "ex2.approx.ftz.bf16x2", "tanh.approx.f16x2", "tanh.approx.bf16x2")),
    *(f"{op}.rn.f32x2 d, a, b" for op in ("add", "sub", "mul")),
    "fma.rn.f32x2 d, a, b, c",
]


@pytest.mark.parametrize("instruction", PACKED)
@pytest.mark.parametrize("uniform", [0, 1, 7])
def test_packed(instruction: str, uniform: int) -> None:
    kind = next(kind for kind in ("bf16", "f16", "f32") if f".{kind}x2" in instruction)
    bits = {"f16": 16, "bf16": 16, "f32": 32}[kind]
    operands = instruction.count(",")
    high = samples([kind] * operands, seed=1)
    low = samples([kind] * operands, seed=2)
    both = [[h << bits | x for h, x in zip(*pair, strict=True)] for pair in zip(high, low, strict=True)]
    got = execute(instruction, f"b{2 * bits}", *((f"b{2 * bits}", column) for column in both), uniform=uniform)
    plain = instruction.replace(f"{kind}x2", kind)
    for shift, columns in ((bits, high), (0, low)):
        want = execute(plain, kind, *((kind, column) for column in columns), uniform=uniform)
        part = (got >> np.array(shift, got.dtype)).astype(want.dtype)
        numbers = [(decode_number(kind, int(x)), decode_number(kind, int(y))) for x, y in zip(part, want, strict=True)]
        assert all(x == y or (math.isnan(x) and math.isnan(y)) for x, y in numbers)


def test_nan_of_f32_is_canonical() -> None:
    got = execute("add.f32 d, a, b", "f32", ("f32", [0x7F800001] * 32), ("f32", [0x3F800000] * 32))
    assert [hex(x) for x in got] == ["0x7fffffff"] * 32


def test_every_form_has_a_case() -> None:
    texts: list[Case | str] = [*CASES]
    for instruction, kind, operands, *_ in APPROXIMATE:
        texts.append(Case(instruction, kind, (kind,) * operands, max))
    for instruction in PACKED:
        kind = "b64" if "f32x2" in instruction else "b32"
        texts.append(Case(instruction, kind, (kind,) * instruction.count(","), max))
    assert missing_forms(["floating"], texts) == []
