"""PTX 'Warp-level matrix multiply-accumulate': mma.sync, dense, for floats and integers, with and without block scales.

Equal instructions that do not depend on each other come together: operands are (instructions, registers, 32) arrays.

Numerics: `machine/arithmetic.py`, one instruction one sum of K products at 25 bits, FP4 with scales at 35.  FP8 is an
instruction of its own (QMMA) on sm_12x only.  Elsewhere the assembler makes two f16 MMAs of it, the first, from zero,
of the elements whose k % 4 is 0 or 1, the second of the others on top of that, and an addition of C.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ptxemu import numerics as nx
from ptxemu.errors import Error
from ptxemu.isa.engine import Modifiers, matrix
from ptxemu.machine import arithmetic as ar
from ptxemu.machine import fragments as fr

if TYPE_CHECKING:
    from ptxemu.machine.warp import Warp

Words = npt.NDArray[np.uint32]

_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s32": 32, "s8": 8, "u8": 8, "s4": 4, "u4": 4}
FP8 = ("e4m3", "e5m2")
SELECTORS = {"sa": 1, "ia": 2, "sb": 1, "ib": 2}
NARROW = (*FP8, "e3m2", "e2m3", "e2m1")


def sizes(shape: str) -> tuple[int, int, int]:
    """M, N and K of "m16n8k32"."""
    m, _, rest = shape[1:].partition("n")
    n, _, k = rest.partition("k")
    return int(m), int(n), int(k)


def _lengths(modifiers: Modifiers) -> Mapping[str, int]:
    """The registers of each matrix."""
    m, n, k = sizes(str(modifiers["shape"]))
    d, a, b, c = str(modifiers["types"]).split(".")
    small = 4 if k == 64 and a == "e2m1" else 8  # bits of an element in its container
    bits = [_BITS.get(name, small) for name in (d, a, b, c)]
    elements = (m * n, m * k, n * k, m * n)
    return {name: e * bit // 1024 for name, e, bit in zip("dabc", elements, bits, strict=True)} | SELECTORS


def _pairs(outs: tuple[str, ...], kinds: tuple[str, ...]) -> str:
    """All `.dtype.atype.btype.ctype` with C as D."""
    return " ".join(f"{out}.{a}.{b}.{out}" for out in outs for a in kinds for b in kinds)


HALF = "f32.f16.f16.f32 f16.f16.f16.f16 f32.bf16.bf16.f32"
TF32 = "f32.tf32.tf32.f32"
PLAIN = {
    "m16n8k4": TF32,
    "m16n8k8": f"{HALF} {TF32}",
    "m16n8k16": f"{HALF} {_pairs(('f32', 'f16'), FP8)}",
    "m16n8k32": _pairs(("f32", "f16"), FP8),
}


def plain(w: Warp, a: Words, b: Words, c: Words, *, shape: str, types: str) -> Words:
    """PTX 'Multiply-and-Accumulate Instruction: mma'.  D = A B + C for f16, bf16, tf32 and FP8."""
    out, kind_a, kind_b, _ = types.split(".")
    _count(w, kind_a, shape, len(a))
    return _product(w, a, b, c, kind_a, kind_b, out)


def _product(w: Warp, a: Words, b: Words, c: Words, kind_a: str, kind_b: str, out: str) -> Words:
    """D = A B + C without scales."""
    rows, columns = fr.a_rows(a), fr.b_columns(b)
    if kind_a in FP8 and "mma of narrow floats" not in w.grid.chip.has:
        return _by_halves(rows, columns, c, kind_a, kind_b, out)
    return _accumulate(_decode(kind_a, rows), _decode(kind_b, columns), c, out)


for _shape, _types in PLAIN.items():
    matrix("mma.sync.aligned.shape.row.col.types <d>, <a>, <b>, <c>", "b32", _lengths, shape=_shape, types=_types)(
        plain
    )


@matrix(
    "mma.sync.aligned.kind::f8f6f4.shape.row.col.types <d>, <a>, <b>, <c>",
    "b32",
    _lengths,
    shape="m16n8k32",
    types=_pairs(("f32", "f16"), NARROW),
)
@matrix(
    "mma.sync.aligned.shape.row.col.kind::f8f6f4.types <d>, <a>, <b>, <c>",
    "b32",
    _lengths,
    shape="m16n8k32",
    types=_pairs(("f32", "f16"), NARROW),
)
def narrow(w: Warp, a: Words, b: Words, c: Words, *, shape: str, types: str) -> Words:
    """PTX 'Multiply-and-Accumulate Instruction: mma'.  FP8, FP6 and FP4 elements in a byte each."""
    out, kind_a, kind_b, _ = types.split(".")
    _count(w, "f8f6f4", shape, len(a))
    return _product(w, a, b, c, kind_a, kind_b, out)


# Kind, scales a row, whether the instruction may leave that out, types of the elements and of the scales.
SCALED = (
    ("kind::mxf8f6f4", 1, True, _pairs(("f32",), NARROW), "ue8m0"),
    ("kind::mxf4", 2, True, "f32.e2m1.e2m1.f32", "ue8m0"),
    ("kind::mxf4nvf4", 2, False, "f32.e2m1.e2m1.f32", "ue8m0"),
    ("kind::mxf4nvf4", 4, False, "f32.e2m1.e2m1.f32", "ue4m3"),
)


def scaled(
    w: Warp,
    a: Words,
    b: Words,
    c: Words,
    sa: Words,
    ia: Words,
    sb: Words,
    ib: Words,
    *,
    shape: str,
    kind: str,
    size: str | None,
    types: str,
    stype: str,
) -> Words:
    """PTX 'Block Scaling for mma.sync'.  D = (A scaleA) (B scaleB) + C, with selectors {byte-id, thread-id}."""
    _, kind_a, kind_b, _ = types.split(".")
    _count(w, kind.removeprefix("kind::"), shape, len(a))
    count = int(size[-2]) if size else 1 if kind == "kind::mxf8f6f4" else 2
    left = ar.decode_scales(_scales("a", sa, ia, count), stype == "ue8m0")
    right = ar.decode_scales(_scales("b", sb, ib, count), stype == "ue8m0")
    rows, columns = fr.a_rows(a), fr.b_columns(b)
    if kind == "kind::mxf8f6f4":
        return _accumulate(_decode(kind_a, rows).scaled(left), _decode(kind_b, columns).scaled(right), c, "f32")
    fp4_a = ar.Fp4Operand(ar.decode_fp4(rows.view(np.uint8)), left)
    fp4_b = ar.Fp4Operand(ar.decode_fp4(columns.view(np.uint8)), right)
    return fr.c_registers(ar.multiply_fp4(fp4_a, fp4_b, fr.c_values(c, np.float32)))


ORDERS = ("shape.row.col.kind.block_scale{}.types.stype", "kind.block_scale{}.shape.row.col.types.stype")


def _allowed(which: str, count: int) -> tuple[range, range]:
    """The byte-ids and the thread-ids of A or B with `count` scales a row."""
    return range(0, 4, count), range(2 if which == "a" else 4)


def _constants(which: str, count: int) -> str:
    """A selector's type with the constants that it may be."""
    return "u16 in " + " | ".join(" ".join(map(str, numbers)) for numbers in _allowed(which, count))


OPERANDS = ("sa, <ia>, sb, <ib>", "<sa>, <ia>, <sb>, <ib>")  # compilers put the scales in braces
for (_kind, _vector, _optional, _types, _stypes), _order, _operands in itertools.product(SCALED, ORDERS, OPERANDS):
    matrix(
        f"mma.sync.aligned.{_order.replace('{}', '{.size}' if _optional else '.size')} <d>, <a>, <b>, <c>, {_operands}",
        dict.fromkeys(("d", "a", "b", "c", "sa", "sb"), "b32")
        | {"ia": _constants("a", _vector), "ib": _constants("b", _vector)},
        _lengths,
        shape="m16n8k32" if _vector == 1 else "m16n8k64",
        kind=_kind,
        size=f"scale_vec::{_vector}X",
        types=_types,
        stype=_stypes,
    )(scaled)


def _scales(which: str, words: Words, ids: Words, count: int) -> npt.NDArray[np.uint8]:
    """The scale codes of A or B, (instructions, rows, count), of the words (instructions, 1, 32) that hold them."""
    return np.ascontiguousarray(words).view(np.uint8).reshape(-1)[_places(which, ids.tobytes(), count)]


@lru_cache(maxsize=256)
def _places(which: str, ids: bytes, count: int) -> npt.NDArray[np.int64]:
    """Where the codes are among the words' bytes; ids: {byte-id, thread-id} of each instruction, (n, 2, 32) uint32.

    Raises Error where a selector means nothing or differs between lanes.
    """
    each = np.frombuffer(ids, np.uint32).reshape(-1, 2, 32).astype(np.int64)
    for place, (name, numbers) in enumerate(zip(("byte", "thread"), _allowed(which, count), strict=True)):
        found = np.unique(each[:, place])
        if not set(found.tolist()) <= set(numbers) or (each != each[..., :1]).any():
            raise Error(
                f"mma.sync: {name}-id-{which} is {found.tolist()}, allowed is one of {list(numbers)} for all lanes"
            )
    return fr.scale_places(16 if which == "a" else 8, each[:, 1, 0], each[:, 0, 0], count)


BYTES, NIBBLES = _pairs(("s32",), ("u8", "s8")), _pairs(("s32",), ("u4", "s4"))
INTEGERS = {
    "m8n8k16": BYTES,
    "m8n8k32": NIBBLES,
    "m16n8k16": BYTES,
    "m16n8k32": f"{BYTES} {NIBBLES}",
    "m16n8k64": NIBBLES,
}


def integers(w: Warp, a: Words, b: Words, c: Words, *, shape: str, types: str, satfinite: bool) -> Words:
    """PTX 'Multiply-and-Accumulate Instruction: mma'.  s8, u8, s4 and u4 with s32 sums, which wrap or saturate."""
    _, kind_a, kind_b, _ = types.split(".")
    _count(w, kind_a, shape, len(a))
    left = _integers(kind_a, fr.a_rows(a, sizes(shape)[0]))
    right = _integers(kind_b, fr.b_columns(b))
    total = (left @ right.swapaxes(-1, -2)).astype(np.int64) + fr.c_values(c, np.int32)
    return fr.c_registers(ar.to_s32(total, satfinite))


for _shape, _types in INTEGERS.items():
    matrix(
        "mma.sync.aligned.shape.row.col{.satfinite}.types <d>, <a>, <b>, <c>",
        "b32",
        _lengths,
        shape=_shape,
        types=_types,
    )(integers)


def _integers(kind: str, words: Words) -> npt.NDArray[np.float64]:
    """Elements as float64, in which sums of products are exact and fast."""
    codes = words.view(np.uint8)
    if kind.endswith("4"):
        codes = nx.unpack_fp4(codes)
        return (((codes ^ 8).astype(np.int8) - 8) if kind == "s4" else codes).astype(np.float64)
    return codes.view(np.int8 if kind == "s8" else np.uint8).astype(np.float64)


def _count(w: Warp, kind: str, shape: str, instructions: int) -> None:
    m, n, k = sizes(shape)
    w.grid.counters.mmas[f"mma.sync {kind} {m}x{n}x{k}"] += instructions


def _decode(kind: str, words: Words) -> ar.Operand:
    """Elements of 16 or 32 bits, or in the bytes that the manual says they have."""
    fmt = nx.FORMATS[kind]
    if kind == "e2m1":
        codes = words.view(np.uint8) >> np.uint8(2) & np.uint8(0xF)
    elif kind in ("e3m2", "e2m3"):
        codes = words.view(np.uint8) & np.uint8(0x3F)
    else:
        codes = words.view({8: np.uint8, 16: np.uint16, 32: np.uint32}[_BITS.get(kind, 8)])
    return ar.decode_operand(fmt, codes)


def _accumulate(a: ar.Operand, b: ar.Operand, c: Words, out: str) -> Words:
    if out == "f16":
        sums = ar.multiply_wide(a, b, fr.c_values(c, np.float16).astype(np.float32), True)
        return fr.c_registers(sums.astype(np.float16))
    return fr.c_registers(ar.multiply_wide(a, b, fr.c_values(c, np.float32)))


@lru_cache(maxsize=2)
def _f16_codes(kind: str) -> npt.NDArray[np.uint16]:
    """FP8 codes to f16, exactly."""
    return nx.f32_to_f16(nx.decode(nx.FORMATS[kind], np.arange(256)))


def _by_halves(rows: Words, columns: Words, c: Words, kind_a: str, kind_b: str, out: str) -> Words:
    """FP8 where the assembler makes two f16 MMAs and an addition of it."""
    a, b = (_f16_codes(kind)[words.view(np.uint8)] for kind, words in ((kind_a, rows), (kind_b, columns)))
    sums: npt.NDArray[np.float32] | None = None
    for half in (slice(0, 2), slice(2, 4)):
        left, right = (ar.decode_operand(nx.F16, _part(codes, half)) for codes in (a, b))
        sums = ar.multiply_wide(left, right, sums, out == "f16")
    assert sums is not None
    kind = np.float16 if out == "f16" else np.float32
    total = fr.c_values(c, kind) + sums.astype(kind)
    total[np.isnan(total)] = np.uint32(0x7FFFFFFF).view(np.float32)
    return fr.c_registers(total)


def _part(codes: npt.NDArray[np.uint16], half: slice) -> npt.NDArray[np.uint16]:
    """Of every four elements along K those of `half`."""
    return codes.reshape(*codes.shape[:2], -1, 4)[..., half].reshape(*codes.shape[:2], -1)
