"""PTX 'cp.async.bulk.tensor' and 'cp.reduce.async.bulk.tensor': every swizzle, element type, edge and corner.

A load dumps all of the shared memory around its box, a store and a reduction write into a tensor inside a larger array.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from comparison.builder import Kernel, dump, fill, wait
from comparison.program import Arrays, Map, Program, random_bytes

ROOM = 8192
THREADS = 128
DECLARATIONS = f"""
    .shared .align 1024 .b8 room[{ROOM}];
    .shared .align 8 .b64 bar;
"""
PARAMETERS = (
    ".param .align 64 .b8 map[128]",
    ".param .u64 p_data",
    ".param .u32 offset",
    ".param .u32 bytes",
    *(f".param .u32 at{i}" for i in range(5)),
)
FLUSHING = ("tf32", "f32.ftz", "tf32.ftz")  # types of 4 bytes that loads or additions treat in their own way
SIZES = {"u8": 1, "u16": 2, "u32": 4, "s32": 4, "u64": 8, "s64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8}
SPANS = {"none": 64, "32B": 32, "64B": 64, "128B": 128}
REDUCTIONS = {
    "add": ("u32", "s32", "u64", "f16", "bf16", "f32", "f64", "tf32", "f32.ftz", "tf32.ftz"),
    "min": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "max": ("u32", "s32", "u64", "s64", "f16", "bf16"),
    "inc": ("u32",),
    "dec": ("u32",),
    "and": ("u32", "s32", "u64"),
    "or": ("u32", "u64"),
    "xor": ("u32", "u64"),
}


def _start(rank: int) -> Kernel:
    """r100: the box in shared memory; r101..: coordinates; d0: the map; d1: data."""
    kernel = Kernel(THREADS, 1, DECLARATIONS, PARAMETERS)
    kernel("ld.param.u32 r99, [offset]; mov.u32 r100, room; add.u32 r100, r100, r99;")
    kernel("mov.b64 param, map; cvta.param.u64 d0, param; ld.param.u64 d1, [p_data];")
    kernel(*(f"ld.param.u32 r{101 + i}, [at{i}];" for i in range(rank)))
    return kernel


def _coordinates(rank: int) -> str:
    return "{" + ", ".join(f"r{101 + i}" for i in range(rank)) + "}"


def load_kernel(rank: int) -> Kernel:
    kernel = _start(rank)
    kernel("@leader mbarrier.init.shared::cta.b64 [bar], 1;", fill("room", ROOM, THREADS))
    kernel("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta; bar.sync 0;")
    kernel("ld.param.u32 r98, [bytes];", "@!leader bra WAITING;")
    kernel("mbarrier.arrive.expect_tx.shared::cta.b64 d2, [bar], r98;")
    kernel(
        f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        f"[r100], [d0, {_coordinates(rank)}], [bar];"
    )
    kernel("WAITING:", wait("bar", "W"))
    kernel.put("done", 1)
    # a second phase without bytes completes at once if the first one's count came out even
    kernel("bar.sync 0;", "@leader mbarrier.arrive.shared::cta.b64 d2, [bar];", "bar.sync 0;")
    kernel("mbarrier.test_wait.parity.shared::cta.b64 done, [bar], 1;")
    kernel.put("done", 1)
    kernel(dump("room", ROOM, THREADS, "d1"))
    return kernel


def store_kernel(rank: int, opcode: str = "cp.async.bulk.tensor.{}d.global.shared::cta.tile.bulk_group") -> Kernel:
    kernel = _start(rank)
    kernel(fill("room", ROOM, THREADS, "d1"), "fence.proxy.async.shared::cta; bar.sync 0;", "@!leader bra END;")
    kernel(f"{opcode.format(rank)} [d0, {_coordinates(rank)}], [r100];")
    kernel("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;", "END:")
    kernel.put("tid")
    return kernel


def _padded(rows: Sequence[int], size: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Dimensions, byte strides with some room after each row, and the bytes of all."""
    strides = []
    step = rows[0] * size
    for extent in rows[1:]:
        step = -(-step // 16) * 16 + 16 * (seed % 3)
        strides.append(step)
        step *= extent
    return tuple(rows), tuple(strides), -(-step // 16) * 16 + 512


def make(
    name: str,
    kernel: Kernel,
    tensor: Map,
    size: int,
    at: Sequence[int],
    *,
    store: bool,
    offset: int = 0,
    seed: int = 0,
    tx: int | None = None,
    floats: np.dtype[np.generic] | None = None,
) -> Program:
    """tx: the bytes that the load announces, by default the full box's."""

    def arrays() -> Arrays:
        data = random_bytes(seed + 1, ROOM) if store else np.zeros(ROOM, np.uint8)
        tensor_data = random_bytes(seed + 2, size)
        if floats is not None:
            data, tensor_data = (_numbers(x.size, floats, seed + i) for i, x in enumerate((data, tensor_data)))
        return {"tensor": tensor_data, "data": data}

    bytes_ = tensor.at(0).transaction_bytes if tx is None else tx
    numbers = [np.uint32(x & 0xFFFFFFFF) for x in (offset, bytes_, *at, *[0] * (5 - len(at)))]
    inputs = ("data",) if store else ("tensor",)
    return kernel.program(name, arrays, (tensor, "data", *numbers), inputs=inputs)


def _numbers(size: int, kind: np.dtype[np.generic], seed: int) -> np.ndarray:
    """Finite numbers of many sizes, subnormals and zeros among them, as bytes; kind uint16 stands for bf16."""
    generator = np.random.default_rng(seed)
    count = size // kind.itemsize
    bits = generator.integers(0, 1 << 63, count, dtype=np.uint64).astype(f"u{kind.itemsize}")
    exponent, mantissa = {"f2": (5, 10), "f4": (8, 23), "f8": (11, 52), "u2": (8, 7)}[kind.str[1:]]
    field = (bits >> mantissa) & ((1 << exponent) - 1)
    small = generator.integers(0, 4, count) == 0
    near = (1 << exponent - 1) - 8 + (field & 15)
    field = np.where(small, field & 1, np.where(field & 1 == 1, near, np.minimum(field, (1 << exponent) - 2)))
    sign = bits >> (exponent + mantissa) << (exponent + mantissa)
    made = sign | field.astype(bits.dtype) << mantissa | bits & ((1 << mantissa) - 1)
    return np.ascontiguousarray(made.astype(f"u{kind.itemsize}")).view(np.uint8)


def _corners(inner: int, rows: int, dims: tuple[int, ...], size: int) -> dict[str, tuple[int, int]]:
    """Where a box of two dimensions may lie; dimension 0, of 3 * inner - 1, in steps of 16 bytes."""
    return {
        "inside": (inner // 2, 3),
        "before": (-16 // size, -2),
        "past": (3 * inner - inner // 2, dims[1] - rows + 2),
        "corner": (3 * inner - 16 // size, -rows + 1),
        "outside": (3 * inner, 0),
        "far": (-(1 << 20), 1 << 20),
    }


def loads() -> Iterator[Program]:
    kernels = {rank: load_kernel(rank) for rank in range(1, 6)}
    for seed, (swizzle, dtype) in enumerate(itertools.product(SPANS, SIZES)):
        inner, rows = SPANS[swizzle] // SIZES[dtype], 9
        dims, strides, size = _padded((3 * inner - 1, 20), SIZES[dtype], seed)
        tensor = Map("tensor", dtype, dims, strides, (inner, rows), swizzle=swizzle)
        for corner, at in _corners(inner, rows, dims, SIZES[dtype]).items():
            name = f"load {dtype} {swizzle} {corner}"
            yield make(name, kernels[2], tensor, size, at, store=False, seed=seed, offset=1024 * (seed % 3))
    for seed, (swizzle, offset) in enumerate(itertools.product(SPANS, (128, 256, 384, 512, 1024 + 640))):
        dims, strides, size = _padded((SPANS[swizzle] + 16, 24), 1, seed)
        tensor = Map("tensor", "u8", dims, strides, (SPANS[swizzle], 16), swizzle=swizzle)
        name = f"load to {offset} {swizzle}"
        yield make(name, kernels[2], tensor, size, (16, 1), store=False, seed=seed, offset=offset)
    for rank, swizzle in itertools.product(range(1, 6), ("none", "128B")):
        yield from _ranks(kernels[rank], rank, swizzle, store=False)
    yield from _conversions(kernels[2])
    yield from short_rows(kernels[2], store=False)
    for seed, dtype in enumerate(("f16", "bf16", "f32", "f64", *FLUSHING)):
        element = SIZES.get(dtype, 4)
        inner = 64 // element
        dims, strides, size = _padded((inner + 5, 7), element, seed)
        tensor = Map("tensor", dtype, dims, strides, (inner, 5), nan_fill=True)
        yield make(f"load {dtype} NaN fill", kernels[2], tensor, size, (16 // element, 4), store=False, seed=seed)


def _conversions(kernel: Kernel) -> Iterator[Program]:
    """Types that a load rounds, with many numbers halfway between two."""
    for seed, dtype in enumerate(FLUSHING):
        dims, strides, size = _padded((64, 16), 4, seed)
        tensor = Map("tensor", dtype, dims, strides, (32, 8), swizzle="128B")
        program = make(f"load {dtype}", kernel, tensor, size, (16, 4), store=False, seed=seed)

        def arrays(made: Callable[[], Arrays] = program.arrays) -> Arrays:
            found = made()
            words = found["tensor"].view(np.uint32)
            words[:] = np.where(np.arange(words.size) % 3, words & np.uint32(0xFFFFE000) | np.uint32(0x1000), words)
            return found

        yield dataclasses.replace(program, arrays=arrays)


def short_rows(kernel: Kernel, store: bool) -> Iterator[Program]:
    """Rows shorter than the swizzle spans."""
    for seed, (swizzle, inner) in enumerate(((s, n) for s, span in SPANS.items() for n in range(16, span, 16))):
        if swizzle != "none":
            dims, strides, size = _padded((256, 24), 1, seed)
            tensor = Map("tensor", "u8", dims, strides, (inner, 12), swizzle=swizzle)
            name = f"{'store' if store else 'load'} rows of {inner} {swizzle}"
            yield make(name, kernel, tensor, size, (16, 3), store=store, seed=seed, offset=128 * (seed % 5))


def _ranks(kernel: Kernel, rank: int, swizzle: str, store: bool) -> Iterator[Program]:
    """Boxes of every rank with traversal steps, in every corner."""
    inner = SPANS[swizzle] // 4
    extents = (inner + 7, 6, 5, 4, 3)[:rank]
    box = (inner, 4, 3, 2, 2)[:rank]
    all_steps = {(1, 1, 1, 1, 1), (1, 2, 1, 1, 1), (1, 1, 3, 1, 1), (1, 2, 2, 2, 1), (1, 1, 1, 1, 2), (1, 5, 8, 7, 4)}
    for seed, steps in enumerate(sorted({s[:rank] for s in all_steps})):
        dims, strides, size = _padded(extents, 4, seed)
        tensor = Map("tensor", "u32", dims, strides, box, steps, swizzle)
        places = {"inside": (4, 1, 1, 1, 0)[:rank], "past": (inner + 4, 5, 4, 3, 2)[:rank]}
        if not store:
            places |= {"before": (-4, -1, -2, -1, -1)[:rank], "mixed": (inner, -1, 3, -1, 1)[:rank]}
        for where, at in places.items():
            name = f"{'store' if store else 'load'} {rank}d {swizzle} steps {steps} {where}"
            yield make(name, kernel, tensor, size, at, store=store, seed=seed)


def stores() -> Iterator[Program]:
    kernels = {rank: store_kernel(rank) for rank in range(1, 6)}
    for seed, (swizzle, dtype) in enumerate(itertools.product(SPANS, SIZES)):
        inner, rows = SPANS[swizzle] // SIZES[dtype], 9
        dims, strides, size = _padded((3 * inner - 1, 20), SIZES[dtype], seed)
        tensor = Map("tensor", dtype, dims, strides, (inner, rows), swizzle=swizzle)
        for corner in ("inside", "past", "outside"):
            at = _corners(inner, rows, dims, SIZES[dtype])[corner]
            name = f"store {dtype} {swizzle} {corner}"
            yield make(name, kernels[2], tensor, size, at, store=True, seed=seed, offset=1024 * (seed % 3))
    for rank, swizzle in itertools.product(range(1, 6), ("none", "128B")):
        yield from _ranks(kernels[rank], rank, swizzle, store=True)
    yield from short_rows(kernels[2], store=True)
    for seed, steps in enumerate(((2, 1), (3, 2), (8, 1))):
        tensor = Map("tensor", "u32", (40, 20), (160,), (16, 6), steps)
        yield make(f"store steps {steps}", kernels[2], tensor, 3712, (4, 1), store=True, seed=seed)
        yield make(f"load steps {steps}", load_kernel(2), tensor, 3712, (4, 1), store=False, seed=seed)


_NUMBERS = {"f16": "<f2", "bf16": "<u2", "f32": "<f4", "f64": "<f8"} | dict.fromkeys(FLUSHING, "<f4")


def reductions() -> Iterator[Program]:
    for seed, (op, dtype) in enumerate((op, dtype) for op, types in REDUCTIONS.items() for dtype in types):
        kernel = store_kernel(2, f"cp.reduce.async.bulk.tensor.{{}}d.global.shared::cta.{op}.tile.bulk_group")
        element = SIZES.get(dtype, 4)
        inner, rows = 128 // element, 9
        dims, strides, size = _padded((inner + 3, 12), element, seed)
        for swizzle, at in (("none", (16 // element, 2)), ("128B", (32 // element, 7))):
            tensor = Map("tensor", dtype, dims, strides, (inner, rows), swizzle=swizzle)
            kind = np.dtype(_NUMBERS[dtype]) if dtype in _NUMBERS else None
            yield make(f"reduce {op} {dtype} {swizzle}", kernel, tensor, size, at, store=True, seed=seed, floats=kind)


def programs() -> Iterator[Program]:
    yield from loads()
    yield from stores()
    yield from reductions()
