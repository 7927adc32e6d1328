"""Approximate instructions, whose last bits the manual leaves open: compared by how far the results lie apart."""

from __future__ import annotations

from collections.abc import Iterator

from comparison.arithmetic import SIZE, _floats
from comparison.lanewise import Group, exhaustive, float_operands, program
from comparison.program import Program


def programs() -> Iterator[Program]:
    names = ("rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2")
    yield _floats("f32", "d, a", "f32", *(f"{n}.approx{f}.f32" for n in names for f in ("", ".ftz")), "tanh.approx.f32")
    yield _floats("div f32", "d, a, b", "f32", *(f"div.{k}{f}.f32" for k in ("approx", "full") for f in ("", ".ftz")))
    halves = ("ex2.approx.f16 d, a", "tanh.approx.f16 d, a")
    yield program("f16", Group(halves, 16, (16,)), lambda: [exhaustive(16)])
    halves = ("ex2.approx.ftz.bf16 d, a", "tanh.approx.bf16 d, a")
    yield program("bf16", Group(halves, 16, (16,)), lambda: [exhaustive(16)])
    doubles = ("rcp.approx.ftz.f64 d, a", "rsqrt.approx.f64 d, a", "rsqrt.approx.ftz.f64 d, a")
    yield program("f64", Group(doubles, 64, (64,)), lambda: float_operands("f64", 1, SIZE, 4))
