"""PTX 'cp.async', 'cp.async.bulk' and 'cp.reduce.async.bulk', also to other CTAs of a cluster and to several."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from comparison.builder import Kernel, dump, fill, wait
from comparison.program import Arrays, Map, Program, random_bytes
from comparison.tensor_copies import SIZES, SPANS, _numbers

ROOM = 4096
THREADS = 64
DECLARATIONS = f"""
    .shared .align 1024 .b8 room[{ROOM}];
    .shared .align 8 .b64 bar;
    .shared .align 8 .b64 second;
"""
DATA = (".param .u64 p_in", ".param .u64 p_data")
CLUSTER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"


def _kernel(ctas: int = 1) -> Kernel:
    """d0: in; d1: this CTA's part of data."""
    kernel = Kernel(THREADS, ctas, DECLARATIONS, DATA)
    kernel("ld.param.u64 d0, [p_in]; ld.param.u64 d1, [p_data];")
    return kernel(f"mad.wide.u32 d1, cta, {ROOM}, d1; mov.u32 r100, room;")


def _arrays(ctas: int = 1, seed: int = 0, floats: np.dtype[np.generic] | None = None) -> Arrays:
    source = random_bytes(seed, ROOM * ctas) if floats is None else _numbers(ROOM * ctas, floats, seed)
    data = random_bytes(seed + 1, ROOM * ctas) if floats is None else _numbers(ROOM * ctas, floats, seed + 1)
    return {"in": source, "data": data}


def _program(
    kernel: Kernel, name: str, ctas: int = 1, seed: int = 0, floats: np.dtype[np.generic] | None = None
) -> Program:
    cluster = ctas if ctas > 1 else 0
    return kernel.program(name, lambda: _arrays(ctas, seed, floats), ("in", "data"), cluster=cluster, inputs=("in",))


def asynchronous() -> Iterator[Program]:
    """cp.async of every size, with sources of every size, predicates, groups and barriers."""
    for size, cache in ((4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")):
        kernel = _kernel()(fill("room", ROOM, THREADS))
        kernel(f"mad.lo.u32 r101, tid, 16, r100; mad.wide.u32 d2, tid, {size}, d0;")
        kernel(f"cp.async.{cache}.shared.global [r101], [d2], {size};")
        kernel(
            f"rem.u32 r102, tid, {size + 1}; cp.async.{cache}.shared.global [r101 + 1024], [d2 + 1024], {size}, r102;"
        )
        kernel("and.b32 r103, tid, 3; setp.eq.u32 p1, r103, 1;")
        kernel(f"@!p1 cp.async.{cache}.shared.global.L2::128B [r101 + 2048], [d2 + 2048], {size};")
        kernel(f"cp.async.{cache}.shared.global [r101 + 3072], [d2 + 64], {size}, p1;")
        kernel("cp.async.wait_all;", "bar.sync 0;", dump("room", ROOM, THREADS, "d1"))
        yield _program(kernel, f"cp.async {size} {cache}", seed=size)
    kernel = _kernel()(fill("room", ROOM, THREADS), "mad.lo.u32 r101, tid, 16, r100; mad.wide.u32 d2, tid, 16, d0;")
    for group in range(4):
        kernel(f"cp.async.ca.shared.global [r101 + {1024 * group}], [d2 + {512 * group}], 16; cp.async.commit_group;")
    for left in (3, 2, 1, 0):
        kernel(f"cp.async.wait_group {left}; ld.shared.b32 r110, [r101 + {1024 * (3 - left)}];").put("r110")
    kernel("bar.sync 0;", dump("room", ROOM, THREADS, "d1"))
    yield _program(kernel, "cp.async groups")
    yield from _signals()


def _signals() -> Iterator[Program]:
    """cp.async.mbarrier.arrive with and without .noinc."""
    for noinc, count in ((".noinc", 2 * THREADS), ("", THREADS)):
        kernel = _kernel()(fill("room", ROOM, THREADS))
        kernel(f"@leader mbarrier.init.shared::cta.b64 [bar], {count};", "bar.sync 0;")
        kernel("mad.lo.u32 r101, tid, 16, r100; mad.wide.u32 d2, tid, 16, d0;")
        kernel("cp.async.ca.shared.global [r101], [d2], 16;", f"cp.async.mbarrier.arrive{noinc}.shared.b64 [bar];")
        kernel("mbarrier.arrive.shared::cta.b64 d3, [bar];", wait("bar", "W")).put("done", 1)
        kernel(dump("room", ROOM, THREADS, "d1"))
        yield _program(kernel, f"cp.async.mbarrier.arrive{noinc}")


def bulk() -> Iterator[Program]:
    """Contiguous bytes in and out."""
    for size in (16, 32, 48, 256, 1024, 2064):
        kernel = _kernel()(fill("room", ROOM, THREADS), "@leader mbarrier.init.shared::cta.b64 [bar], 1;")
        kernel(
            "fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta; bar.sync 0;", "@!leader bra WAITING;"
        )
        kernel(f"mbarrier.arrive.expect_tx.shared::cta.b64 d2, [bar], {size};")
        kernel(
            f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [r100 + 32], [d0 + 48], {size}, [bar];"
        )
        kernel("WAITING:", wait("bar", "W")).put("done", 1)
        kernel(dump("room", ROOM, THREADS, "d1"))
        yield _program(kernel, f"bulk load {size}", seed=size)
        kernel = _kernel()(fill("room", ROOM, THREADS, "d0"), "fence.proxy.async.shared::cta; bar.sync 0;")
        kernel("@!leader bra END;", f"cp.async.bulk.global.shared::cta.bulk_group [d1 + 16], [r100 + 64], {size};")
        kernel("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;", "END:").put("tid")
        yield _program(kernel, f"bulk store {size}", seed=size)


REDUCTIONS = {
    "add": "u32 s32 u64 noftz.f16 noftz.bf16 f32 f64",
    "min": "u32 s32 u64 s64 f16 bf16",
    "max": "u32 s32 u64 s64 f16 bf16",
    "inc": "u32",
    "dec": "u32",
    "and": "b32 b64",
    "or": "b32 b64",
    "xor": "b32 b64",
}
IN_CLUSTER = {"add": "u32 s32 u64", "min": "u32 s32", "max": "u32 s32", "inc": "u32", "dec": "u32"}
IN_CLUSTER |= {"and": "b32", "or": "b32", "xor": "b32"}
FLOATS = {"f16": "<f2", "bf16": "<u2", "f32": "<f4", "f64": "<f8"}


def reductions() -> Iterator[Program]:
    for seed, (op, kind) in enumerate((op, kind) for op, kinds in REDUCTIONS.items() for kind in kinds.split()):
        kernel = _kernel()(fill("room", ROOM, THREADS, "d0"), "fence.proxy.async.shared::cta; bar.sync 0;")
        kernel("@!leader bra END;")
        kernel(f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{op}.{kind} [d1 + 32], [r100 + 16], 2048;")
        kernel("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;", "END:").put("tid")
        name = FLOATS.get(kind.split(".")[-1])
        yield _program(kernel, f"bulk reduce {op} {kind}", seed=seed, floats=np.dtype(name) if name else None)


def in_clusters() -> Iterator[Program]:
    """From each CTA to the next one's shared memory, copied or combined."""
    cases = [("cp.async.bulk", "")] + [
        ("cp.reduce.async.bulk", f".{op}.{k}") for op, kinds in IN_CLUSTER.items() for k in kinds.split()
    ]
    for seed, (opcode, suffix) in enumerate(cases):
        ctas = 2 + seed % 3
        kernel = _kernel(ctas)(f"mad.wide.u32 d0, cta, {ROOM}, d0;", fill("room", ROOM, THREADS, "d0"))
        kernel("@leader mbarrier.init.shared::cta.b64 [bar], 1;")
        kernel("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;", CLUSTER, "@!leader bra WAITING;")
        kernel("mbarrier.arrive.expect_tx.shared::cta.b64 d2, [bar], 1024;")
        kernel(f"add.u32 r101, rank, 1; rem.u32 r101, r101, {ctas}; mov.u32 r103, bar;")
        kernel("mapa.shared::cluster.u32 r102, r100, r101; mapa.shared::cluster.u32 r103, r103, r101;")
        kernel(
            f"{opcode}.shared::cluster.shared::cta.mbarrier::complete_tx::bytes{suffix} "
            "[r102 + 2048], [r100 + 512], 1024, [r103];"
        )
        kernel("WAITING:", wait("bar", "W")).put("done", 1)
        kernel(CLUSTER, dump("room", ROOM, THREADS, "d1"))
        yield _program(kernel, f"{opcode}{suffix} in a cluster of {ctas}", ctas, seed)


def multicasts() -> Iterator[Program]:
    """A copy from one CTA to those of a mask; the last CTA issues, all that are meant wait."""
    for seed, (ctas, mask) in enumerate(((2, 3), (2, 1), (4, 0b1010), (4, 15), (8, 0b10110101), (8, 255))):
        kernel = _multicast_start(ctas, mask, 512)
        kernel(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
            "[r100 + 256], [d0 + 64], 512, [bar], h1;"
        )
        yield _program(_multicast_end(kernel), f"bulk multicast {mask:#b} of {ctas}", ctas, seed)
    for swizzle, mask in ((s, m) for s in SPANS for m in (0b0101, 0b1111, 0b1000)):
        kernel = _multicast_start(4, mask, 8 * SPANS[swizzle])
        kernel.parameters = (*kernel.parameters, ".param .align 64 .b8 map[128]")
        kernel("mov.b64 param, map; cvta.param.u64 d5, param; mov.u32 r104, 8; mov.u32 r105, -1;")
        kernel(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
            "[r100], [d5, {r104, r105}], [bar], h1;"
        )
        program = _multicast_end(kernel)
        inner = SPANS[swizzle] // SIZES["u16"]
        tensor = Map("in", "u16", (inner + 8, 16), (2 * inner + 16,), (inner, 8), swizzle=swizzle)
        yield program.program(
            f"tensor multicast {swizzle} {mask:#b}",
            lambda: _arrays(4, 5),
            ("in", "data", tensor),
            cluster=4,
            inputs=("in",),
        )


def _multicast_start(ctas: int, mask: int, size: int) -> Kernel:
    kernel = _kernel(ctas)(fill("room", ROOM, THREADS), "@leader mbarrier.init.shared::cta.b64 [bar], 1;")
    kernel("fence.mbarrier_init.release.cluster; fence.proxy.async.shared::cta;", CLUSTER)
    kernel(f"mov.u32 r101, 1; shl.b32 r101, r101, rank; and.b32 r101, r101, {mask}; setp.ne.u32 p1, r101, 0;")
    kernel(f"mov.b16 h1, {mask}; @!leader bra WAITING;")
    kernel(f"@p1 mbarrier.arrive.expect_tx.shared::cta.b64 d2, [bar], {size};")
    return kernel(f"setp.ne.u32 p2, rank, {ctas - 1};", "@p2 bra WAITING;")


def _multicast_end(kernel: Kernel) -> Kernel:
    kernel("WAITING:", "@!p1 bra NONE;", wait("bar", "W")).put("done", 1)
    return kernel("NONE:", CLUSTER, dump("room", ROOM, THREADS, "d1"))


def programs() -> Iterator[Program]:
    yield from asynchronous()
    yield from bulk()
    yield from reductions()
    yield from in_clusters()
    yield from multicasts()
