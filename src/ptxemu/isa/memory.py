"""PTX chapter 'Data Movement and Conversion Instructions': ld, st, prefetch; and atom, red."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from ptxemu import numerics
from ptxemu.isa.engine import Value, warp
from ptxemu.isa.types import bits_of, is_signed
from ptxemu.machine.lanes import WORD
from ptxemu.machine.memory import Order, strength
from ptxemu.machine.warp import Warp

SPACES = "const global local param param::entry param::func shared shared::cta shared::cluster"
TYPES = "b8 b16 b32 b64 b128 u8 u16 u32 u64 s8 s16 s32 s64 f32 f64"
SCOPES = "cta cluster gpu sys"
L1 = "L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last L1::no_allocate"
L2 = "L2::evict_normal L2::evict_first L2::evict_last"
CACHE = "ca cg cs lu cv wb wt"
PREFETCH = "L2::64B L2::128B L2::256B"
CACHES = {"cop": CACHE, "l1": L1, "l2": L2}


LD = "ld{.sem}{.scope}{.ss}{.nc}{.cop}{.l1}{.l2}{.L2::cache_hint}{.prefetch}"
LOADS = {
    "sem": "weak volatile relaxed acquire mmio.relaxed",
    "scope": SCOPES,
    "ss": SPACES,
    "prefetch": PREFETCH,
    **CACHES,
}


@warp(f"{LD}{{.vec}}.type <d>, [a]{{, policy}}", vec="v2 v4 v8", type=TYPES, **LOADS)
@warp("ldu{.ss}{.vec}.type <d>, [a]", ss="global", vec="v2 v4", type=TYPES)
def ld_vector(
    w: Warp,
    m: int,
    a: Value,
    *,
    ss: str | None,
    type: str,
    parts: int,
    sem: str | None = None,
    scope: str | None = None,
) -> list[Value]:
    """PTX 'ld'.  Consecutive words into a vector, which may be of one register."""
    space, address = w.space(ss or "", a, m)
    order = strength(sem, scope)
    if type == "b128":
        halves = space.load(address, 8, 2 * parts, m, order)
        return [(halves[2 * i], halves[2 * i + 1]) for i in range(parts)]
    return space.load(address, bits_of(type) // 8, parts, m, order)


@warp(f"{LD}.type d, [a]{{, policy}}", type=TYPES, **LOADS)
@warp("ldu{.ss}.type d, [a]", ss="global", type=TYPES)
def ld(
    w: Warp, m: int, a: Value, *, ss: str | None, type: str, sem: str | None = None, scope: str | None = None
) -> Value:
    """PTX 'ld'.  Caches are not modelled, so their hints do nothing."""
    return ld_vector(w, m, a, ss=ss, type=type, parts=1, sem=sem, scope=scope)[0]


ST = "st{.sem}{.scope}{.ss}{.cop}{.l1}{.l2}{.L2::cache_hint}"
STORES = {
    "sem": "weak volatile relaxed release mmio.relaxed",
    "scope": SCOPES,
    "ss": "global local param param::func shared shared::cta shared::cluster",
    **CACHES,
}


@warp(f"{ST}{{.vec}}.type [a], <b>{{, policy}}", vec="v2 v4 v8", type=TYPES, **STORES)
def st_vector(
    w: Warp,
    m: int,
    a: Value,
    b: tuple[Value, ...],
    *,
    ss: str | None,
    type: str,
    sem: str | None = None,
    scope: str | None = None,
) -> None:
    """PTX 'st'.  A vector, which may be of one register, as consecutive words."""
    space, address = w.space(ss or "", a, m)
    order = strength(sem, scope)
    if type == "b128":
        return space.store(address, [half for pair in b for half in pair], 8, m, order)
    bits = bits_of(type)
    space.store(address, [_narrow(value, bits) for value in b], bits // 8, m, order)


@warp(f"{ST}.type [a], b{{, policy}}", type=TYPES, **STORES)
def st(
    w: Warp, m: int, a: Value, b: Value, *, ss: str | None, type: str, sem: str | None = None, scope: str | None = None
) -> None:
    """PTX 'st'.  Caches are not modelled, so their hints do nothing."""
    st_vector(w, m, a, (b,), ss=ss, type=type, sem=sem, scope=scope)


def _narrow(value: Value, bits: int) -> Value:
    if value.__class__ is int:
        return value & (1 << bits) - 1
    return value if value.dtype == WORD[bits] else value.astype(WORD[bits])


@warp("prefetch{.space}.level [a]", space="global local", level="L1 L2 L2::evict_last L2::evict_normal")
@warp("prefetchu.L1 [a]")
@warp("applypriority{.global}.L2::evict_normal [a], size")
def prefetch(w: Warp, m: int) -> None:
    """PTX 'prefetch, prefetchu'.  Caches are not modelled: nothing happens."""


KEEP = L2 + " L2::evict_unchanged"


@warp("createpolicy.fractional.first{.second}.b64 policy{, fraction}", first=KEEP, second=KEEP)
@warp("createpolicy.cvt.L2.b64 policy, fraction")
def createpolicy(w: Warp, m: int, fraction: Value = None) -> int:
    """PTX 'createpolicy'.  Caches are not modelled: a policy is 0."""
    return 0


@warp("createpolicy.range{.global}.first{.second}.b64 policy, [a], primary, total", first=L2, second=KEEP)
def createpolicy_range(w: Warp, m: int, a: Value, primary: Value, total: Value) -> int:
    """PTX 'createpolicy'.  Caches are not modelled: a policy is 0."""
    return 0


# Atomics

Change = Callable[[int, int], int | None]
_FLOATS: dict[str, Any] = {"f32": np.float32, "f64": np.float64, "f16": np.float16, "f16x2": np.float16}


def _number(bits: int, type: str) -> int:
    width = bits_of(type)
    return bits - (1 << width) if is_signed(type) and bits >> (width - 1) else bits


_NAN = {"f32": np.uint32(0x7FFFFFFF), "f16": np.uint16(0x7FFF), "f16x2": np.uint16(0x7FFF)}


def _add(old: int, b: int, type: str, in_global: bool) -> int:
    """A sum in an integer or float type, bits in and out.

    In global memory f32 subnormals become zeros, and an f64 NaN stays as it is, the operand's before the memory's.
    """
    if type in _FLOATS:
        word = WORD[bits_of(type)]
        left, right = (np.array([x], word).view(_FLOATS[type]) for x in (old, b))
        if in_global and type == "f32":
            left, right = _flushed(left), _flushed(right)
        total = left + right
        if in_global and type == "f32":
            total = _flushed(total)
        if type == "f64" and np.isnan(total).any():
            return _nan64(old, b, in_global)
        if type in _NAN:
            return int(np.where(np.isnan(total), _NAN[type], total.view(_NAN[type].dtype)).view(word)[0])
        return int(total.view(word)[0])
    if type.startswith("bf16"):
        word = WORD[bits_of(type)]
        left, right = (numerics.decode(numerics.BF16, np.array([x], word).view(np.uint16)) for x in (old, b))
        return int(numerics.encode(numerics.BF16, left + right).astype(np.uint16).view(word)[0])
    return old + b


def _flushed(a: Value) -> Value:
    return np.where(np.abs(a) < np.finfo(a.dtype).tiny, np.copysign(a.dtype.type(0), a), a)


def _nan64(old: int, b: int, in_global: bool) -> int:
    """The NaN that a sum of f64 gives."""
    nans = [x for x in ((b, old) if in_global else (old, b)) if x & (1 << 63) - 1 > 0x7FF << 52]
    if not nans:
        return 0xFFF8 << 48
    return nans[0] if in_global else nans[0] | 1 << 51


def _float_extreme(old: int, b: int, type: str, least: bool) -> int:
    word = WORD[bits_of(type)]
    if type.startswith("bf16"):
        left, right = (numerics.decode(numerics.BF16, np.array([x], word).view(np.uint16)) for x in (old, b))
        code = numerics.encode(numerics.BF16, (np.fmin if least else np.fmax)(left, right))
        return int(code.astype(np.uint16).view(word)[0])
    left, right = (np.array([x], word).view(_FLOATS[type]) for x in (old, b))
    return int((np.fmin if least else np.fmax)(left, right).view(word)[0])


def combine(op: str, type: str, old: int, b: int, in_global: bool = False) -> int:
    """The new content of memory."""
    if op == "add":
        return _add(old, b, type, in_global)
    if op in ("min", "max"):
        if "f" in type:
            return _float_extreme(old, b, type, op == "min")
        return (min if op == "min" else max)(old, b, key=lambda x: _number(x, type))
    simple: dict[str, Callable[[], int]] = {
        "and": lambda: old & b,
        "or": lambda: old | b,
        "xor": lambda: old ^ b,
        "exch": lambda: b,
        "inc": lambda: 0 if old >= b else old + 1,
        "dec": lambda: b if old == 0 or old > b else old - 1,
    }
    return simple[op]()


def _atomic(w: Warp, m: int, a: Value, ss: str | None, type: str, order: Order | None, change: Change) -> Value:
    """Applies `change` lane by lane; the old values."""
    space, address = w.space(ss or "", a, m)
    bits = bits_of(type)

    def fitting(lane: int, value: int) -> int | None:
        new = change(lane, value)
        return None if new is None else new & (1 << bits) - 1

    return np.array(space.update(address, bits // 8, m, fitting, order), WORD[bits])


def _is_global(w: Warp, m: int, a: Value, ss: str | None) -> bool:
    return ss == "global" or (ss is None and w.space("", a, m)[0] is w.memory)


ATOM_SPACES = "global shared shared::cta shared::cluster"
HALVES = "f16 f16x2 bf16 bf16x2"
# Which operations there are for which types.
GROUPS = (
    ("and or xor", "b32 b64"),
    ("add", "u32 u64 s32 f32 f64"),
    ("inc dec", "u32"),
    ("min max", "u32 u64 s32 s64"),
)
F = TypeVar("F", bound=Callable[..., Any])


def _atomic_forms(opcode: str, operands: str, sem: str) -> Callable[[F], F]:
    """The forms of atom or red."""

    def register(function: F) -> F:
        common = {"sem": sem, "scope": SCOPES, "ss": ATOM_SPACES}
        head = f"{opcode}{{.sem}}{{.scope}}{{.ss}}.op"
        for op, type in GROUPS:
            warp(f"{head}{{.L2::cache_hint}}.type {operands}", {"b": "type"}, op=op, type=type, **common)(function)
            hint = head.replace(".op", ".L2::cache_hint.op")  # which compilers take there, too
            warp(f"{hint}.type {operands}", {"b": "type"}, op=op, type=type, **common)(function)
        halves = f"{head}.noftz{{.L2::cache_hint}}.type {operands}"
        return warp(halves, {"b": "type"}, op="add min max", type=HALVES, **common)(function)

    return register


@_atomic_forms("atom", "d, [a], b{, policy}", "relaxed acquire release acq_rel")
@warp(
    "atom{.sem}{.scope}{.ss}.op{.L2::cache_hint}.type d, [a], b{, policy}",
    {"b": "type"},
    sem="relaxed acquire release acq_rel",
    scope=SCOPES,
    ss=ATOM_SPACES,
    op="exch",
    type="b32 b64",
)
def atom(
    w: Warp, m: int, a: Value, b: Value, *, ss: str | None, op: str, type: str, sem: str | None, scope: str | None
) -> Value:
    """PTX 'atom'.  Returns the old value."""
    order = strength(sem or "relaxed", scope or "gpu")
    far = _is_global(w, m, a, ss)
    return _atomic(w, m, a, ss, type, order, lambda lane, old: combine(op, type, old, w.lane(b, lane), far))


@warp(
    "atom{.sem}{.scope}{.ss}.cas{.L2::cache_hint}.type d, [a], b, c{, policy}",
    {"b": "type", "c": "type"},
    sem="relaxed acquire release acq_rel",
    scope=SCOPES,
    ss=ATOM_SPACES,
    type="b16 b32 b64",
)
def cas(
    w: Warp, m: int, a: Value, b: Value, c: Value, *, ss: str | None, type: str, sem: str | None, scope: str | None
) -> Value:
    """PTX 'atom'.  With .cas: writes c where memory holds b."""
    order = strength(sem or "relaxed", scope or "gpu")
    return _atomic(w, m, a, ss, type, order, lambda lane, old: w.lane(c, lane) if old == w.lane(b, lane) else None)


@_atomic_forms("red", "[a], b{, policy}", "relaxed release")
def red(
    w: Warp, m: int, a: Value, b: Value, *, ss: str | None, op: str, type: str, sem: str | None, scope: str | None
) -> None:
    """PTX 'red'.  As atom, without the old value."""
    far = _is_global(w, m, a, ss)
    _atomic(
        w,
        m,
        a,
        ss,
        type,
        strength(sem or "relaxed", scope or "gpu"),
        lambda lane, old: combine(op, type, old, w.lane(b, lane), far),
    )


@warp(
    "red{.sem}{.scope}{.global}.op{.noftz}{.L2::cache_hint}.vec.type [a], <b>{, policy}",
    sem="relaxed release",
    scope=SCOPES,
    op="add min max",
    vec="v2 v4 v8",
    type=f"f32 {HALVES}",
)
@warp(
    "red{.sem}{.scope}{.global}{.L2::cache_hint}.vec.type.op{.noftz} [a], <b>{, policy}",
    sem="relaxed release",
    scope=SCOPES,
    op="add min max",
    vec="v2 v4 v8",
    type=f"f32 {HALVES}",
)
@warp(
    "red{.sem}{.scope}{.global}{.vec}.op{.noftz}{.L2::cache_hint}.type [a], <b>{, policy}",
    sem="relaxed release",
    scope=SCOPES,
    op="add min max",
    vec="v2 v4 v8",
    type=f"f32 {HALVES}",
)
def red_vector(
    w: Warp, m: int, a: Value, b: tuple[Value, ...], *, op: str, type: str, sem: str | None, scope: str | None
) -> None:
    """PTX 'red'.  Element by element."""
    for i, element in enumerate(b):
        red(w, m, a + i * (bits_of(type) // 8), element, ss="global", op=op, type=type, sem=sem, scope=scope)


@warp(
    "atom{.sem}{.scope}{.global}.op{.noftz}{.L2::cache_hint}.vec.type <d>, [a], <b>{, policy}",
    sem="relaxed acquire release acq_rel",
    scope=SCOPES,
    op="add min max",
    vec="v2 v4 v8",
    type=f"f32 {HALVES}",
)
def atom_vector(
    w: Warp, m: int, a: Value, b: tuple[Value, ...], *, op: str, type: str, sem: str | None, scope: str | None
) -> list[Value]:
    """PTX 'atom'.  Element by element."""
    size = bits_of(type) // 8
    return [
        atom(w, m, a + i * size, element, ss="global", op=op, type=type, sem=sem, scope=scope)
        for i, element in enumerate(b)
    ]
