"""How the lanes of a warp exchange values, and the matrices that they load and store together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from comparison.builder import Kernel, dump, fill
from comparison.program import Arrays, Program, random_bytes

LANES = 32
MASKS = (0xFFFFFFFF, 0x0000FFFF, 0xAAAAAAAA, 0x80000001, 0x00F0F00F)
DATA = (".param .u64 p_in",)


def _kernel() -> Kernel:
    """r100: the lane's word of `in`; r101: another; r102: the word's low 5 bits."""
    kernel = Kernel(LANES, 1, parameters=DATA)
    kernel("ld.param.u64 d0, [p_in]; mad.wide.u32 d0, lane, 4, d0;")
    return kernel("ld.global.b32 r100, [d0]; ld.global.b32 r101, [d0 + 128]; and.b32 r102, r100, 31;")


def _program(kernel: Kernel, name: str, words: Sequence[int] | None = None) -> Program:
    def arrays() -> Arrays:
        data = random_bytes(len(name), 1024)
        if words is not None:
            data[:128] = np.array(words, np.uint32).view(np.uint8)
        return {"in": data}

    return kernel.program(name, arrays, ("in",), inputs=("in",))


def _masked(kernel: Kernel, mask: int, label: str) -> str:
    """Skips what follows in lanes outside the mask, to `label`."""
    kernel(f"mov.u32 r110, 1; shl.b32 r110, r110, lane; and.b32 r110, r110, {mask}; setp.eq.u32 p10, r110, 0;")
    kernel(f"@p10 bra {label};")
    return f"{label}:"


def shuffles() -> Iterator[Program]:
    for mode in ("up", "down", "bfly", "idx"):
        kernel = _kernel()
        for segment, clamp in itertools.product((0, 0x10, 0x18, 0x1C), (0, 15, 31, 7)):
            for amount in (0, 1, 5, 16, 31, 33):
                kernel(f"shfl.sync.{mode}.b32 r103|p1, r100, {amount}, {segment << 8 | clamp}, -1;").put("r103")
                kernel.put("p1", 1)
        kernel(f"shfl.sync.{mode}.b32 r103|p1, r100, r102, 31, -1;").put("r103")
        kernel.put("p1", 1)
        kernel(f"and.b32 r104, r101, 0x1f1f; shfl.sync.{mode}.b32 r103|p1, r100, r102, r104, -1;").put("r103")
        kernel.put("p1", 1)
        yield _program(kernel, f"shfl {mode}")
        kernel = _kernel()
        for i, mask in enumerate(MASKS):
            end = _masked(kernel, mask, f"L{i}")
            amount = mask.bit_length() - 1 if mode == "idx" else 0  # a lane of the mask: from others nothing is defined
            kernel(f"shfl.sync.{mode}.b32 r103, r100, {amount}, {0 if mode == 'up' else 31}, {mask};").put("r103")
            kernel(end)
        yield _program(kernel, f"shfl {mode} of some")


def votes() -> Iterator[Program]:
    for name, words in (("mixed", None), ("all", [1] * 32), ("none", [2] * 32), ("one", [0] * 5 + [1] + [0] * 26)):
        kernel = _kernel()("and.b32 r103, r100, 1; setp.ne.u32 p1, r103, 0;")
        for i, mask in enumerate(MASKS):
            end = _masked(kernel, mask, f"L{i}")
            for mode in ("all", "any", "uni"):
                kernel(f"vote.sync.{mode}.pred p2, p1, {mask};").put("p2", 1)
                kernel(f"vote.sync.{mode}.pred p2, !p1, {mask};").put("p2", 1)
            kernel(f"vote.sync.ballot.b32 r104, p1, {mask};").put("r104")
            kernel("activemask.b32 r104;")
            kernel(f"elect.sync r105|p3, {mask};").put("r105")
            kernel.put("p3", 1)
            kernel(end, "bar.warp.sync -1;")
        yield _program(kernel, f"vote and elect, {name}", words)


def reductions() -> Iterator[Program]:
    for name, words in (("random", None), ("equal", [7] * 32), ("few", [3, 5, 3, 9] * 8)):
        kernel = _kernel()("mov.b64 d1, {r100, r101};")
        for i, mask in enumerate(MASKS):
            end = _masked(kernel, mask, f"L{i}")
            for op in ("add", "min", "max"):
                for kind in ("u32", "s32"):
                    kernel(f"redux.sync.{op}.{kind} r103, r100, {mask};").put("r103")
            for op in ("and", "or", "xor"):
                kernel(f"redux.sync.{op}.b32 r103, r100, {mask};").put("r103")
            kernel(f"match.any.sync.b32 r103, r100, {mask};").put("r103")
            kernel(f"match.any.sync.b64 r103, d1, {mask};").put("r103")
            kernel(f"match.all.sync.b32 r103|p1, r100, {mask};").put("r103")
            kernel.put("p1", 1)
            kernel(f"match.all.sync.b64 r103|p1, d1, {mask};").put("r103")
            kernel.put("p1", 1)
            kernel(end, "bar.warp.sync -1;")
        yield _program(kernel, f"redux and match, {name}", words)


def matrices() -> Iterator[Program]:
    """ldmatrix and stmatrix of all sizes from rows in any order; movmatrix."""
    declarations = ".shared .align 128 .b8 room[2048];"
    for count, trans in itertools.product((1, 2, 4), ("", ".trans")):
        registers = "{" + ", ".join(f"r{110 + i}" for i in range(count)) + "}"
        for seed in range(3):
            kernel = Kernel(LANES, 1, declarations, (".param .u64 p_in", ".param .u64 p_data"))
            kernel("ld.param.u64 d0, [p_in]; ld.param.u64 d1, [p_data];", fill("room", 2048, LANES, "d0"))
            kernel("mov.u32 r100, room;")
            kernel(
                f"mad.lo.u32 r101, lane, {16 * (2 * seed + 1)}, {48 * seed};",
                "and.b32 r101, r101, 2032; add.u32 r101, r101, r100;",
            )
            kernel(f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {registers}, [r101];")
            for i in range(count):
                kernel.put(f"r{110 + i}")
            kernel(f"xor.b32 r101, lane, {5 * seed}; mad.lo.u32 r101, r101, 16, r100; add.u32 r101, r101, 1024;")
            kernel(f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [r101], {registers};", "bar.sync 0;")
            kernel(dump("room", 2048, LANES, "d1"))
            yield kernel.program(
                f"ldmatrix and stmatrix x{count}{trans} {seed}",
                lambda seed=seed: {"in": random_bytes(seed, 2048), "data": np.zeros(2048, np.uint8)},
                ("in", "data"),
                inputs=("in",),
            )
    kernel = _kernel()("movmatrix.sync.aligned.m8n8.trans.b16 r103, r100;")
    kernel.put("r103")
    yield _program(kernel, "movmatrix")


def programs() -> Iterator[Program]:
    yield from shuffles()
    yield from votes()
    yield from reductions()
    yield from matrices()
