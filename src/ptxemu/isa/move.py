"""PTX chapter 'Data Movement and Conversion Instructions': moves, permutations and address spaces."""

from __future__ import annotations

import functools

import numpy as np

from ptxemu.isa.engine import Value, lanes, warp
from ptxemu.isa.lift import lifted, whole
from ptxemu.isa.types import bits_of
from ptxemu.machine.lanes import LANES, WORD, pack
from ptxemu.machine.memory import LOCAL_WINDOW, SHARED_WINDOW
from ptxemu.machine.warp import Warp


@lanes("mov.type d, a", type="pred b16 b32 b64 u16 u32 u64 s16 s32 s64")
@lanes("mov.f32 d, a", "b32")
@lanes("mov.f64 d, a", "b64")
def mov(a: Value) -> Value:
    """PTX 'mov'.  d = a."""
    return a


@warp("mov.b128 <d>, a", "b128")
def unpack_128(w: Warp, m: int, a: Value, *, parts: int) -> list[Value]:
    """PTX 'mov'.  128 bits to the elements of a vector, low ones first."""
    low, high = a or (0, 0)
    return (
        [low, high] if parts == 2 else unpack(w, m, low, type="b64", parts=2) + unpack(w, m, high, type="b64", parts=2)
    )


@warp("mov.b128 d, <a>", "b128")
def pack_128(w: Warp, m: int, a: tuple[Value, ...]) -> Value:
    """PTX 'mov'.  The elements of a vector to 128 bits, low ones first."""
    return a if len(a) == 2 else (pack_bits(w, m, a[:2], type="b64"), pack_bits(w, m, a[2:], type="b64"))


@warp("mov.b128 d, a", "b128")
def mov_b128(w: Warp, m: int, a: Value) -> Value:
    """PTX 'mov'.  d = a, of 128 bits; also packs from or into a vector."""
    return a


@warp("mov.type <d>, a", {"a": "type"}, type="b16 b32 b64")
def unpack(w: Warp, m: int, a: Value, *, type: str, parts: int) -> list[Value]:
    """PTX 'mov'.  A register to the elements of a vector, low ones first."""
    bits = bits_of(type) // parts
    if whole(a):
        return [a >> bits * i & (1 << bits) - 1 for i in range(parts)]
    return list(np.ascontiguousarray(a.view(WORD[bits]).reshape(LANES, parts).T))


@warp("mov.type d, <a>", type="b16 b32 b64")
def pack_bits(w: Warp, m: int, a: tuple[Value, ...], *, type: str) -> Value:
    """PTX 'mov'.  The elements of a vector to a register, low ones first."""
    bits = bits_of(type) // len(a)
    if whole(*a):
        return sum((element & (1 << bits) - 1) << bits * i for i, element in enumerate(a))
    table = np.empty((LANES, len(a)), WORD[bits])
    for i, element in enumerate(a):
        table[:, i] = element
    return table.view(WORD[bits_of(type)]).reshape(LANES)


@lanes("prmt.b32 d, a, b, c", "b32", ints=True)
def prmt(a: Value, b: Value, c: Value) -> Value:
    """PTX 'prmt'.  Four bytes of b:a, chosen by c's nibbles; bit 3 of a
    nibble takes the byte's sign instead."""
    if whole(c) and not whole(a, b):
        table = np.empty((max(np.size(a), np.size(b)), 8), np.uint8)
        for place, word in ((0, a), (4, b)):
            table[:, place : place + 4] = np.full(1, word, np.uint32).view(np.uint8) if whole(word) else _bytes(word)
        picked = np.take(table, _columns(c), axis=1)
        for i in range(4):
            if c >> 4 * i & 8:
                picked[:, i] = (picked[:, i].view(np.int8) >> 7).view(np.uint8)
        return picked.view(np.uint32).reshape(-1)
    return _prmt(a, b, c)


@functools.lru_cache(maxsize=1024)
def _columns(c: int) -> list[int]:
    return [c >> 4 * i & 7 for i in range(4)]


def _bytes(word: Value) -> Value:
    return word.view(np.uint8).reshape(-1, 4)


@lifted
def _prmt(a: int, b: int, c: int) -> int:
    source = b << 32 | a
    result = 0
    for i in range(4):
        choice = c >> 4 * i
        byte = source >> 8 * (choice & 7) & 0xFF
        result |= ((0xFF if byte & 0x80 else 0) if choice & 8 else byte) << 8 * i
    return result


@lanes("prmt.b32.mode d, a, b, c", "b32", mode="f4e b4e rc8 ecl ecr rc16")
def prmt_mode(a: Value, b: Value, c: Value, *, mode: str) -> Value:
    """PTX 'prmt'.  The byte orders that have names; c's low two bits
    choose one."""
    return _prmt_mode(a, b, c, mode=mode)


_ORDERS = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}


@lifted
def _prmt_mode(a: int, b: int, c: int, *, mode: str) -> int:
    return int(_prmt(a, b, _ORDERS[mode][c & 3]))


@warp("cvta.space.u64 d, a", "u64", space="shared shared::cta shared::cluster local")
def cvta(w: Warp, m: int, a: Value, *, space: str) -> Value:
    """PTX 'cvta'.  The generic address of one in a space."""
    window = LOCAL_WINDOW if space == "local" else SHARED_WINDOW
    return a + window if whole(a) else a.astype(np.uint64) + np.uint64(window)


@warp("cvta{.to}.space.u64 d, a", "u64", space="global const param param::entry param::func")
def cvta_same(w: Warp, m: int, a: Value) -> Value:
    """PTX 'cvta'.  Global, constant and parameter addresses are generic."""
    return a


@warp("cvta.to.space.u64 d, a", "u64", space="shared shared::cta shared::cluster local")
def cvta_to(w: Warp, m: int, a: Value) -> Value:
    """PTX 'cvta'.  The address in a space of a generic one."""
    return a & 0xFFFFFFFF if whole(a) else a & np.uint64(0xFFFFFFFF)


@warp(
    "isspacep.space p, a",
    {"a": "b64"},
    space="global const local shared shared::cta shared::cluster param param::entry",
)
def isspacep(w: Warp, m: int, a: Value, *, space: str) -> int:
    """PTX 'isspacep'.  Whether a generic address lies in a space."""
    window = {"local": LOCAL_WINDOW, "shared": SHARED_WINDOW}.get(space.partition("::")[0], 0) >> 56
    address = np.full(LANES, a, np.uint64) if whole(a) else a
    inside = (address >> np.uint64(56)) == window
    if space in ("shared", "shared::cta"):
        inside &= ((address >> np.uint64(24)) & np.uint64(0xFF)) == w.cta.rank
    if space.startswith("param"):
        region = w.grid.parameters
        inside &= (address >= np.uint64(region.base)) & (address < np.uint64(region.end))
    return pack(inside)
