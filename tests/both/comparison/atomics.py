"""PTX 'atom' and 'red' in global and shared memory: old values of words of a thread's own, sums of shared words."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from comparison.builder import Kernel
from comparison.lanewise import WORD, float_operands, integer_operands
from comparison.program import Arrays, Program

THREADS = 128
INTEGERS = {
    "add": "u32 s32 u64", "min": "u32 s32 u64 s64", "max": "u32 s32 u64 s64", "inc": "u32", "dec": "u32",
    "and": "b32 b64", "or": "b32 b64", "xor": "b32 b64", "exch": "b32 b64", "cas": "b16 b32 b64",
}  # fmt: skip
FLOATS = ("add.f32", "add.f64", "add.noftz.f16", "add.noftz.bf16", "add.noftz.f16x2", "add.noftz.bf16x2")
PARAMETERS = (".param .u64 p_in", ".param .u64 p_data")
ROUNDS = 4


def _kernel() -> Kernel:
    """d0: the thread's first operand; d1: its word, 8 bytes apart; r100: its word in shared memory."""
    kernel = Kernel(THREADS, 1, f".shared .align 8 .b8 room[{8 * THREADS * ROUNDS}];", PARAMETERS)
    kernel("ld.param.u64 d0, [p_in]; ld.param.u64 d1, [p_data];")
    return kernel(
        "mad.wide.u32 d0, tid, 8, d0; mad.wide.u32 d1, tid, 8, d1; mov.u32 r100, room; mad.lo.u32 r100, tid, 8, r100;"
    )


def each(operation: str) -> Program:
    """One word a thread: memory and the old values, in global and in shared memory."""
    kind = operation.split(".")[-1]
    bits = {"f16x2": 32, "bf16x2": 32, "f16": 16, "bf16": 16}.get(kind) or int(kind[1:])
    register, value, swap = (f"{'h' if bits == 16 else 'r' if bits == 32 else 'd'}{i}" for i in (10, 11, 12))
    operands = f"{value}, {swap}" if operation.startswith("cas") else value
    stride = 8 * THREADS
    kernel = _kernel()
    for i in range(ROUNDS):
        kernel(
            f"ld.global.b{bits} {value}, [d0 + {stride * i}]; ld.global.b{bits} {swap}, [d0 + {stride * (i + ROUNDS)}];"
        )
        kernel(
            f"ld.global.b{bits} {register}, [d1 + {stride * i}]; st.shared.b{bits} [r100 + {stride * i}], {register};"
        )
        if operation.startswith("cas") and i % 2:
            kernel(f"mov.b{bits} {value}, {register};")
        kernel(f"atom.global.{operation} {register}, [d1 + {stride * i}], {operands};").put(register, bits)
        kernel(f"atom.shared.{operation} {register}, [r100 + {stride * i}], {operands};").put(register, bits)
        if not operation.startswith(("cas", "exch")):
            kernel(f"red.shared.{operation} [r100 + {stride * i}], {value};")
        kernel(f"ld.shared.b{bits} {register}, [r100 + {stride * i}];").put(register, bits)

    def arrays() -> Arrays:
        return {"in": _operands(kind, bits, 2, len(operation)), "data": _operands(kind, bits, 1, len(operation) + 1)}

    return kernel.program(f"atom {operation}", arrays, ("in", "data"), inputs=("in",))


def _operands(kind: str, bits: int, sets: int, seed: int) -> np.ndarray:
    """Operands of 8 bytes each, the type's in the lowest."""
    count = THREADS * ROUNDS * sets
    if "f" in kind:
        per = bits // (16 if "16" in kind else bits)
        numbers = float_operands(kind.removesuffix("x2"), 1 + seed % 2, count * per + 4096, seed)[seed % 2]
        numbers = np.random.default_rng(seed).permutation(numbers)[: count * per].view(WORD[bits])
    else:
        (numbers,) = integer_operands((bits,), count, seed)
    return numbers.astype(np.uint64)


def together() -> Iterator[Program]:
    """All threads of several CTAs on a few words, with operations whose order does not matter."""
    kernel = Kernel(THREADS, 4, ".shared .align 8 .b32 room[16];", PARAMETERS)
    kernel("ld.param.u64 d1, [p_data]; mov.u32 r100, room; and.b32 r101, tid, 7; mad.lo.u32 r102, r101, 4, r100;")
    kernel("setp.lt.u32 p1, tid, 16; mov.u32 r103, 0; mad.lo.u32 r104, tid, 4, r100;")
    kernel(
        "@p1 st.shared.b32 [r104], r103;",
        "bar.sync 0;",
        "mad.wide.u32 d2, r101, 4, d1; mad.lo.u32 r105, thread, 2654435761, 99;",
    )
    for i, operation in enumerate(("add.u32", "max.u32", "min.s32", "xor.b32", "or.b32", "and.b32")):
        kernel(f"red.global.{operation} [d2 + {64 * i}], r105;")
    kernel(
        "red.shared.add.u32 [r102], r105; red.shared.max.s32 [r102 + 32], r105; bar.sync 0; ld.shared.b32 r106, [r102];"
    ).put("r106")
    kernel("ld.shared.b32 r106, [r102 + 32];").put("r106")
    kernel(
        "cvt.rn.f32.u32 r107, thread; red.global.add.f32 [d2 + 512], r107;",
        "cvt.u64.u32 d3, r105; mad.wide.u32 d4, r101, 8, d1;",
    )
    kernel("red.global.add.u64 [d4 + 640], d3;")
    yield kernel.program("many threads on a word", lambda: {"data": np.zeros(1024, np.uint8)}, ("data", "data"))
    kernel = Kernel(32, 1, "", PARAMETERS)("ld.param.u64 d1, [p_data]; mad.wide.u32 d1, tid, 16, d1;")
    kernel(
        "cvt.rn.f32.u32 r110, tid; mul.rn.f32 r111, r110, 0f3F9D70A4;",
        "add.rn.f32 r112, r111, r110; mov.b32 r113, 0x80000001;",
    )
    kernel("red.global.add.v2.f32 [d1], {r110, r111};", "red.global.add.v4.f32 [d1 + 512], {r111, r112, r113, r110};")
    kernel("red.global.add.noftz.v4.f16x2 [d1 + 1024], {r111, r112, r113, r110};")
    yield kernel.program(
        "vectors", lambda: {"data": np.tile(np.arange(1, 257, dtype=np.float32), 2).view(np.uint8)}, ("data", "data")
    )


def programs() -> Iterator[Program]:
    for op, kinds in INTEGERS.items():
        for kind in kinds.split():
            yield each(f"{op}.{kind}")
    for operation in FLOATS:
        yield each(operation)
    yield from together()
