"""PTX 9.7.15 'Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions': wgmma on Hopper."""

from __future__ import annotations

import functools
import sys
from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ptxemu.errors import MemoryFault
from ptxemu.isa.engine import Modifiers, Value, warp
from ptxemu.isa.flight import check_operands
from ptxemu.machine.lanes import FULL, bools, first
from ptxemu.machine.signal import Wait
from ptxemu.machine.warpgroup import issued_by, warpgroup_of
from ptxemu.machine.wgmma import Kind, Wgmma, shared_matrix

if TYPE_CHECKING:
    from ptxemu.machine.warp import Warp

Registers = tuple[Value, ...]


def _shapes(k: int, columns: Iterable[int]) -> str:
    return " ".join(f"m64n{n}k{k}" for n in columns)


@functools.lru_cache(maxsize=1024)
def _kind(shape: str, types: str) -> Kind:
    d, a, b = types.split(".")
    return Kind(int(shape[4:].partition("k")[0]), a, b, d)


def _lengths(modifiers: Modifiers) -> Mapping[str, int]:
    """Registers of D and of A."""
    return {"d": _kind(str(modifiers["shape"]), str(modifiers["types"])).registers, "a": 4}


def mma_async(
    w: Warp,
    m: int,
    d: Registers,
    a: Any,
    b: Value,
    p: int,
    scale_a: int = 1,
    scale_b: int = 1,
    trans_b: int = 0,
    trans_a: int = 0,
    *,
    shape: str,
    types: str,
    satfinite: bool = False,
) -> list[Value]:
    """PTX 'wgmma.mma_async'.  D = A B + D, or A B where p is false, with A in registers or in shared memory, B there.

    tf32 are f32 numbers whose low 13 bits are ignored; s32 sums wrap around, or stay at their limits.
    """
    if m != FULL:
        raise MemoryFault(f"wgmma.mma_async: lanes {m:#x} of the warp issue it; all 32 have to")
    if p & m not in (0, m):
        raise MemoryFault("the threads of a warp give different values of scale-d to a wgmma.mma_async")
    kind = _kind(shape, types)
    in_registers = type(a) is tuple
    op = Wgmma(
        kind,
        None if in_registers else _uniform(a, m, "the descriptor of A"),
        _uniform(b, m, "the descriptor of B"),
        p & m == m,
        scale_a < 0,
        scale_b < 0,
        trans_a == 1,
        trans_b == 1,
        satfinite,
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


SCALES = "scale_a, scale_b"
PLAIN = {"d": "b32", "b": "b64"}
CONSTANTS = dict.fromkeys(("scale_a", "scale_b"), "imm in 1 -1") | dict.fromkeys(("trans_a", "trans_b"), "imm in 0 1")
EVERY_N, INTEGER_N = range(8, 257, 8), (8, 16, 24, 32, *range(48, 257, 16))


def _each(outs: tuple[str, ...], kinds: tuple[str, ...]) -> str:
    """All `.dtype.atype.btype`."""
    return " ".join(f"{d}.{a}.{b}" for d in outs for a in kinds for b in kinds)


# K and all N; the types of D, A and B; the constants behind scale-d with A in shared memory, and with A in registers.
TABLE = (
    (16, EVERY_N, "f32.f16.f16 f16.f16.f16 f32.bf16.bf16", f"{SCALES}, trans_a, trans_b", f"{SCALES}, trans_b"),
    (8, EVERY_N, "f32.tf32.tf32", SCALES, SCALES),
    (32, EVERY_N, _each(("f32", "f16"), ("e4m3", "e5m2")), SCALES, SCALES),
    (32, INTEGER_N, _each(("s32",), ("s8", "u8")), "", ""),
)
for _k, _columns, _types, *_behind in TABLE:
    for (_a, _type), _more in zip((("a", "b64"), ("<a>", "b32")), _behind, strict=True):
        warp(
            f"wgmma.mma_async.sync.aligned.shape{'' if _more else '{.satfinite}'}.types <+d>, {_a}, b, p, {_more}",
            PLAIN | {"a": _type} | {name: CONSTANTS[name] for name in _more.split(", ") if name},
            _lengths,
            shape=_shapes(_k, _columns),
            types=_types,
        )(mma_async)


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


@warp("wgmma.wait_group.sync.aligned count", {"count": "natural"})
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
