"""PTX types as numpy sees them, and the wrappers that give a lane-wise function numbers of its operands' types.

A register holds an unsigned bit pattern: an int, or an array (32,) of the unsigned type of its width.  `compose` makes
of a function of numbers two functions of registers: one for ints alone, one for the rest.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ptxemu.machine.lanes import FULL, LANES, WORD, bools, pack

__all__ = ["bits_of", "compose", "constant", "is_integral", "is_signed", "scalar_text", "widen"]

_FLOATS: dict[str, Any] = {
    "f16": np.float16,
    "f16x2": np.float16,
    "f32": np.float32,
    "f32x2": np.float32,
    "f64": np.float64,
}
_SIGNED: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_INTEGER = re.compile("pred|[bus](8|16|32|64)")
_BITS = {
    "pred": 1,
    "f16": 16,
    "bf16": 16,
    "f16x2": 32,
    "bf16x2": 32,
    "tf32": 32,
    "f32x2": 64,
    "b128": 128,
    "s16x2": 32,
    "u16x2": 32,
} | {f"{kind}{bits}": bits for kind in "busf" for bits in (8, 16, 32, 64)}


def bits_of(name: str) -> int:
    """The width of a PTX type; packed small floats (e4m3x2, e2m1x4, ...) by their elements, 8 bits for up to 8."""
    if name in _BITS:
        return _BITS[name]
    element, _, count = name.partition("x")
    sizes = {"e2m1": 4, "e2m3": 8, "e3m2": 8, "e4m3": 8, "e5m2": 8, "ue8m0": 8, "ue4m3": 8, "s2f6": 8}
    return sizes[element] * int(count or 1)


def is_signed(name: str) -> bool:
    return name[0] == "s" and name[1:].isdigit()


def constant(value: int, float_bits: int, bits: int) -> int:
    """An immediate as the bit pattern of a register of `bits` bits."""
    if bits == 1:
        return FULL if value else 0
    if float_bits and float_bits != bits:
        number = np.array([value], WORD[float_bits]).view(np.float32 if float_bits == 32 else np.float64)
        return int(number.astype({16: np.float16, 32: np.float32, 64: np.float64}[bits]).view(WORD[bits])[0])
    return value & ((1 << bits) - 1)


def widen(value: Any, bits: int, width: int, signed: bool) -> Any:
    """A number of `bits` bits as the content of a register of `width` bits."""
    if type(value) is int:
        value &= (1 << bits) - 1
        if signed and value >> (bits - 1):
            value |= (1 << width) - (1 << bits)
        return value
    if signed:
        return value.astype(_SIGNED[bits], copy=False).astype(_SIGNED[width]).view(WORD[width])
    return value.astype(WORD[bits], copy=False).astype(WORD[width])


def is_integral(types: Iterable[tuple[str, int]]) -> bool:
    """Whether ints alone can stand for operands of these types and widths."""
    return all(_INTEGER.fullmatch(name) for name, _ in types)


def scalar_text(
    function: str, values: Sequence[str], sources: Sequence[tuple[str, int]], result: tuple[str, int]
) -> str:
    """The expression by which integral operands, uniform all, get their result: what `compose` makes a function of."""
    call = f"{function}({', '.join(_scalar_in(v, *source) for v, source in zip(values, sources, strict=True))})"
    return _scalar_out(call, *result)


def compose(
    function: Callable[..., Any], sources: Sequence[tuple[str, int]], result: tuple[str, int], takes_ints: bool = False
) -> tuple[Callable[..., int], Callable[..., Any]]:
    """The two register functions of a lane-wise one.

    sources, result: each operand's PTX type and the width in bits of the register (or constant) that holds it.
    takes_ints: see `lanes`.
    Returns (scalar, vector): `scalar` takes ints, and predicates that are all or none; `vector` takes any mixture.
    """
    if all(name == "pred" for name, _ in sources) and result[0] == "pred":
        return (bitwise := _bitwise(function)), bitwise
    names = [f"a{i}" for i in range(len(sources))]
    scope: dict[str, Any] = {"f": function, "np": np, "bools": bools, "pack": pack, "FULL": FULL, "widen": widen}
    integral = is_integral((*sources, result))
    lift = not takes_ints
    vector = [_vector_in(a, *source, lift, scope) for a, source in zip(names, sources, strict=True)]
    call = f"f({', '.join(vector)})"
    made_vector = eval(f"lambda {', '.join(names)}: {_vector_out(call, *result, scope)}", scope)
    if not integral:
        return _through_arrays(made_vector, sources, result), made_vector
    made_scalar = eval(f"lambda {', '.join(names)}: {scalar_text('f', names, sources, result)}", scope)
    return made_scalar, made_vector


def _bitwise(function: Callable[..., Any]) -> Callable[..., int]:
    return lambda *args: int(function(*args)) & FULL


def _through_arrays(
    vector: Callable[..., Any], sources: Sequence[tuple[str, int]], result: tuple[str, int]
) -> Callable[..., int]:
    """A scalar function that runs the vector one on arrays of one element."""
    kinds = [None if name == "pred" else WORD[width] for name, width in sources]

    def scalar(*args: int) -> int:
        arrays = [a if kind is None else np.array([a], kind) for kind, a in zip(kinds, args, strict=True)]
        found = vector(*arrays)
        if result[0] == "pred":
            return FULL if found else 0
        return int(found if np.ndim(found) == 0 else found[0])

    return scalar


def _scalar_in(a: str, name: str, width: int) -> str:
    bits = bits_of(name)
    if name == "pred":
        return f"{a} != 0"
    if is_signed(name):
        inner = a if bits == width else f"({a} & {(1 << bits) - 1})"
        return f"({inner} ^ {1 << (bits - 1)}) - {1 << (bits - 1)}"
    return a if bits == width else f"{a} & {(1 << bits) - 1}"


def _scalar_out(call: str, name: str, width: int) -> str:
    bits = bits_of(name)
    if name == "pred":
        return f"FULL if {call} else 0"
    if bits < width and is_signed(name):
        return f"widen({call}, {bits}, {width}, True)"
    return f"({call}) & {(1 << bits) - 1}"


def _vector_in(a: str, name: str, width: int, lift: bool, scope: dict[str, Any]) -> str:
    """lift: the function does not take ints among its arrays, so they become arrays of one element."""
    bits = bits_of(name)
    if name == "pred":
        return f"bools({a})"
    scope[f"U{width}"], scope[f"U{bits}"] = WORD[width], WORD[bits]
    kind = _FLOATS.get(name) or (_SIGNED[bits] if is_signed(name) else None)
    narrow = f".astype(U{bits})" if bits != width else ""
    if not lift:
        number = f"({a} & {(1 << bits) - 1})" if narrow else a
        if is_signed(name):
            number = f"(({number} ^ {1 << (bits - 1)}) - {1 << (bits - 1)})"
        elif not narrow:
            return a
        scope[f"K_{name}"] = kind
        view = f".view(K_{name})" if kind is not None else ""
        return f"({number} if {a}.__class__ is int else {a}{narrow}{view})"
    view = ""
    if kind is not None:
        scope[f"K_{name}"] = kind
        view = f".view(K_{name})"
    scope["lift"] = _lift
    lifted = f"lift({LANES if name.endswith('x2') else 1}, {a} & {(1 << bits) - 1}, U{bits})"
    return f"({lifted} if {a}.__class__ is int else {a}{narrow}){view}"


@functools.lru_cache(maxsize=4096)
def _lift(size: int, value: int, word: Any) -> Any:
    """A constant array (do not write to it)."""
    array = np.full(size, value, word)
    array.setflags(write=False)
    return array


def _vector_out(call: str, name: str, width: int, scope: dict[str, Any]) -> str:
    bits = bits_of(name)
    if name == "pred":
        return f"pack({call})"
    scope[f"U{width}"] = WORD[width]
    if name in _FLOATS:
        scope[f"U{bits}"] = WORD[bits]
        out = f"{call}.view(U{bits})"
        return out if bits == width else f"{out}.astype(U{width})"
    if bits < width:
        return f"widen({call}, {bits}, {width}, {is_signed(name)})"
    return f"{call}.astype(U{width}, copy=False)"
