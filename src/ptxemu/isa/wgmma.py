"""PTX 9.7.15 'Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions': wgmma on Hopper."""

from __future__ import annotations

import functools
import sys
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from ptxemu.errors import LaunchError, MemoryFault
from ptxemu.isa.engine import Value, warp
from ptxemu.isa.flight import check_operands
from ptxemu.machine.lanes import bools, first
from ptxemu.machine.signal import Wait
from ptxemu.machine.warpgroup import issued_by, warpgroup_of
from ptxemu.machine.wgmma import Kind, Wgmma, shared_matrix

if TYPE_CHECKING:
    from ptxemu.machine.warp import Warp

Registers = tuple[Value, ...]


def _shapes(k: int, columns: range | tuple[int, ...] = range(8, 257, 8)) -> str:
    return " ".join(f"m64n{n}k{k}" for n in columns)


@functools.lru_cache(maxsize=1024)
def _kind(shape: str, a: str, b: str, d: str) -> Kind:
    return Kind(int(shape[4:].partition("k")[0]), a, b, d)


def _lengths(modifiers: Mapping[str, str | bool | None]) -> dict[str, int]:
    """Registers of D and of A."""
    n = int(str(modifiers["shape"])[4:].partition("k")[0])
    return {"d": n // 4 if modifiers.get("dtype") == "f16" else n // 2, "a": 4}


TYPES = {"d": "b32", "b": "b64"} | dict.fromkeys(("scale_a", "scale_b", "trans_a", "trans_b"), "imm")
IN_SHARED, IN_REGISTERS = TYPES | {"a": "b64"}, TYPES | {"a": "b32"}


def _only(types: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: types[name] for name in ("d", "a", "b", *names)}


SIGNED = "scale_a", "scale_b"
K16 = _shapes(16)
F16 = "wgmma.mma_async.sync.aligned.shape.dtype.f16.f16"
BF16 = "wgmma.mma_async.sync.aligned.shape.f32.bf16.bf16"


@warp(f"{F16} <+d>, a, b, p, scale_a, scale_b, trans_a, trans_b", IN_SHARED, _lengths, shape=K16, dtype="f16 f32")
def mma_f16(
    w: Warp,
    m: int,
    d: Registers,
    a: Value,
    b: Value,
    p: int,
    scale_a: int,
    scale_b: int,
    trans_a: int,
    trans_b: int,
    *,
    shape: str,
    dtype: str,
) -> list[Value]:
    """PTX 'wgmma.mma_async'.  D = A B + D, or A B where p is false, with A and B in shared memory."""
    kind = _kind(shape, "f16", "f16", dtype)
    return _issue(w, m, kind, d, a, b, p, (scale_a, scale_b), (trans_a, trans_b))


@warp(f"{F16} <+d>, <a>, b, p, scale_a, scale_b, trans_b", _only(IN_REGISTERS, "scale_a", "scale_b", "trans_b"),
      _lengths, shape=K16, dtype="f16 f32")  # fmt: skip
def mma_f16_registers(
    w: Warp,
    m: int,
    d: Registers,
    a: Registers,
    b: Value,
    p: int,
    scale_a: int,
    scale_b: int,
    trans_b: int,
    *,
    shape: str,
    dtype: str,
) -> list[Value]:
    """PTX 'wgmma.mma_async'.  With A in registers."""
    return _issue(w, m, _kind(shape, "f16", "f16", dtype), d, a, b, p, (scale_a, scale_b), (0, trans_b))


@warp(f"{BF16} <+d>, a, b, p, scale_a, scale_b, trans_a, trans_b", IN_SHARED, _lengths, shape=K16)
def mma_bf16(
    w: Warp,
    m: int,
    d: Registers,
    a: Value,
    b: Value,
    p: int,
    scale_a: int,
    scale_b: int,
    trans_a: int,
    trans_b: int,
    *,
    shape: str,
) -> list[Value]:
    """PTX 'wgmma.mma_async'.  As for f16."""
    kind = _kind(shape, "bf16", "bf16", "f32")
    return _issue(w, m, kind, d, a, b, p, (scale_a, scale_b), (trans_a, trans_b))


@warp(
    f"{BF16} <+d>, <a>, b, p, scale_a, scale_b, trans_b",
    _only(IN_REGISTERS, "scale_a", "scale_b", "trans_b"),
    _lengths,
    shape=K16,
)
def mma_bf16_registers(
    w: Warp,
    m: int,
    d: Registers,
    a: Registers,
    b: Value,
    p: int,
    scale_a: int,
    scale_b: int,
    trans_b: int,
    *,
    shape: str,
) -> list[Value]:
    """PTX 'wgmma.mma_async'.  As for f16, with A in registers."""
    return _issue(w, m, _kind(shape, "bf16", "bf16", "f32"), d, a, b, p, (scale_a, scale_b), (0, trans_b))


@warp(
    "wgmma.mma_async.sync.aligned.shape.f32.tf32.tf32 <+d>, a, b, p, scale_a, scale_b",
    _only(IN_SHARED, *SIGNED),
    _lengths,
    shape=_shapes(8),
)
def mma_tf32(
    w: Warp, m: int, d: Registers, a: Value, b: Value, p: int, scale_a: int, scale_b: int, *, shape: str
) -> list[Value]:
    """PTX 'wgmma.mma_async'.  Of f32 numbers whose low 13 bits are ignored; both operands are K-major."""
    return _issue(w, m, _kind(shape, "tf32", "tf32", "f32"), d, a, b, p, (scale_a, scale_b))


@warp(
    "wgmma.mma_async.sync.aligned.shape.f32.tf32.tf32 <+d>, <a>, b, p, scale_a, scale_b",
    _only(IN_REGISTERS, *SIGNED),
    _lengths,
    shape=_shapes(8),
)
def mma_tf32_registers(
    w: Warp, m: int, d: Registers, a: Registers, b: Value, p: int, scale_a: int, scale_b: int, *, shape: str
) -> list[Value]:
    """PTX 'wgmma.mma_async'.  As above, with A in registers."""
    return _issue(w, m, _kind(shape, "tf32", "tf32", "f32"), d, a, b, p, (scale_a, scale_b))


@warp(
    "wgmma.mma_async.sync.aligned.shape.dtype.atype.btype <+d>, a, b, p, scale_a, scale_b",
    _only(IN_SHARED, *SIGNED),
    _lengths,
    shape=_shapes(32),
    dtype="f16 f32",
    atype="e4m3 e5m2",
    btype="e4m3 e5m2",
)
def mma_fp8(
    w: Warp,
    m: int,
    d: Registers,
    a: Value,
    b: Value,
    p: int,
    scale_a: int,
    scale_b: int,
    *,
    shape: str,
    dtype: str,
    atype: str,
    btype: str,
) -> list[Value]:
    """PTX 'wgmma.mma_async'.  Of FP8; both operands are K-major."""
    return _issue(w, m, _kind(shape, atype, btype, dtype), d, a, b, p, (scale_a, scale_b))


@warp(
    "wgmma.mma_async.sync.aligned.shape.dtype.atype.btype <+d>, <a>, b, p, scale_a, scale_b",
    _only(IN_REGISTERS, *SIGNED),
    _lengths,
    shape=_shapes(32),
    dtype="f16 f32",
    atype="e4m3 e5m2",
    btype="e4m3 e5m2",
)
def mma_fp8_registers(
    w: Warp,
    m: int,
    d: Registers,
    a: Registers,
    b: Value,
    p: int,
    scale_a: int,
    scale_b: int,
    *,
    shape: str,
    dtype: str,
    atype: str,
    btype: str,
) -> list[Value]:
    """PTX 'wgmma.mma_async'.  As above, with A in registers."""
    return _issue(w, m, _kind(shape, atype, btype, dtype), d, a, b, p, (scale_a, scale_b))


INTEGER_SHAPES = _shapes(32, (8, 16, 24, 32, *range(48, 257, 16)))


@warp(
    "wgmma.mma_async.sync.aligned.shape{.satfinite}.s32.atype.btype <+d>, a, b, p",
    _only(IN_SHARED),
    _lengths,
    shape=INTEGER_SHAPES,
    atype="s8 u8",
    btype="s8 u8",
)
def mma_integer(
    w: Warp, m: int, d: Registers, a: Value, b: Value, p: int, *, shape: str, satfinite: bool, atype: str, btype: str
) -> list[Value]:
    """PTX 'wgmma.mma_async'.  Of bytes; the s32 accumulator wraps around, or stays at its limits."""
    return _issue(w, m, _kind(shape, atype, btype, "s32"), d, a, b, p, saturate=satfinite)


@warp(
    "wgmma.mma_async.sync.aligned.shape{.satfinite}.s32.atype.btype <+d>, <a>, b, p",
    _only(IN_REGISTERS),
    _lengths,
    shape=INTEGER_SHAPES,
    atype="s8 u8",
    btype="s8 u8",
)
def mma_integer_registers(
    w: Warp,
    m: int,
    d: Registers,
    a: Registers,
    b: Value,
    p: int,
    *,
    shape: str,
    satfinite: bool,
    atype: str,
    btype: str,
) -> list[Value]:
    """PTX 'wgmma.mma_async'.  As above, with A in registers."""
    return _issue(w, m, _kind(shape, atype, btype, "s32"), d, a, b, p, saturate=satfinite)


def _issue(
    w: Warp,
    m: int,
    kind: Kind,
    d: Registers,
    a: Any,
    b: Value,
    p: int,
    scales: tuple[int, int] = (1, 1),
    transposed: tuple[int, int] = (0, 0),
    saturate: bool = False,
) -> list[Value]:
    """The warp's part of an operation; returns the registers that it will fill."""
    if set(scales) - {1, -1}:
        raise LaunchError(f"wgmma.mma_async: imm-scale-a, imm-scale-b are {scales}; allowed: 1 and -1")
    if set(transposed) - {0, 1}:
        raise LaunchError(f"wgmma.mma_async: imm-trans-a, imm-trans-b are {transposed}; allowed: 0 and 1")
    if p & m not in (0, m):
        raise MemoryFault("the threads of a warp give different values of scale-d to a wgmma.mma_async")
    in_registers = type(a) is tuple
    op = Wgmma(
        kind,
        None if in_registers else _uniform(a, m, "the descriptor of A"),
        _uniform(b, m, "the descriptor of B"),
        p & m == m,
        scales[0] < 0,
        scales[1] < 0,
        transposed[0] == 1,
        transposed[1] == 1,
        saturate,
    )
    for descriptor in (op.a, op.b):
        if descriptor is not None:
            shared_matrix(descriptor)
    line = w.grid.program.ptx_line(sys._getframe())
    if w.flying:
        check_operands(w, line, kind, d, a if in_registers else ())
    issued = issued_by(w)
    found = warpgroup_of(w).issue(w, op, line, issued.together(d), a if in_registers else ())
    block = found.out[w.index % 4]
    w.flying[id(block)] = found
    return issued.begun(found, block)


def _uniform(value: Value, m: int, what: str) -> int:
    """The one value of all lanes."""
    if type(value) is int:
        return value
    found = int(value[first(m)])
    if not (value == found)[bools(m)].all():
        raise MemoryFault(f"the threads of a warp give different values of {what} to a wgmma.mma_async")
    return found


@warp("wgmma.fence.sync.aligned")
def fence(w: Warp, m: int) -> None:
    """PTX 'wgmma.fence'.  Accesses to registers before it are complete for every wgmma.mma_async after it."""
    issued_by(w).touched.clear()


@warp("wgmma.commit_group.sync.aligned")
def commit_group(w: Warp, m: int) -> None:
    """PTX 'wgmma.commit_group'.  The warp's open operations become a group, which may be empty."""
    issued_by(w).commit()


@warp("wgmma.wait_group.sync.aligned count", {"count": "imm"})
def wait_group(w: Warp, m: int, count: int) -> Generator[Wait, None, None]:
    """PTX 'wgmma.wait_group'.  Until all but the newest `count` groups are complete."""
    issued = issued_by(w)
    older = issued.older(count)
    for found in older:
        yield found.wait()
    issued.waited(count)
    place = w.index % 4
    for found in older:
        w.flying.pop(id(found.out[place]), None)
    if older and w.agent is not None and (stream := warpgroup_of(w).stream) is not None:
        w.agent.learn(stream, older[-1].index)
