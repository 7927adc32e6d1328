"""Shared memory of other CTAs, cluster barriers, asynchronous remote stores, and who is who in a cluster."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from comparison.builder import Kernel, wait
from comparison.program import Launch, Program

CLUSTER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
ROOM = ".shared .align 16 .b8 room[1024]; .shared .align 8 .b64 bar;"
SPECIALS = (
    "cluster_ctarank", "cluster_nctarank", "cluster_ctaid.x", "cluster_ctaid.y", "cluster_ctaid.z", "cluster_nctaid.x",
    "cluster_nctaid.y", "cluster_nctaid.z", "clusterid.x", "clusterid.y", "clusterid.z", "nclusterid.x", "nclusterid.y",
    "nclusterid.z", "ctaid.x", "ctaid.y", "ctaid.z", "nctaid.x", "nctaid.y", "nctaid.z", "tid.x", "tid.y", "tid.z",
    "ntid.x", "ntid.y", "ntid.z", "laneid", "lanemask_eq", "lanemask_lt", "lanemask_le", "lanemask_gt", "lanemask_ge",
    "dynamic_smem_size",
)  # fmt: skip


def registers() -> Iterator[Program]:
    """Special registers in grids, blocks and clusters of three dimensions."""
    for grid, block, cluster in (
        ((4, 2, 3), (8, 2, 2), (2, 1, 1)),
        ((4, 4, 2), (32, 1, 2), (2, 2, 1)),
        ((8, 1, 1), (48, 1, 1), (8, 1, 1)),
        ((3, 2, 2), (5, 3, 2), None),
        ((2, 2, 4), (16, 1, 1), (1, 2, 4)),
    ):
        threads, ctas = int(np.prod(block)), int(np.prod(grid))
        kernel = Kernel(threads, ctas)
        kernel("mov.u32 r100, %ctaid.y; mov.u32 r101, %ctaid.z; mov.u32 r102, %ctaid.x;")
        kernel(f"mad.lo.u32 r100, r101, {grid[1]}, r100; mad.lo.u32 r100, r100, {grid[0]}, r102;")
        kernel("mov.u32 r103, %tid.y; mov.u32 r104, %tid.z; mov.u32 r105, %tid.x;")
        kernel(f"mad.lo.u32 r103, r104, {block[1]}, r103; mad.lo.u32 r103, r103, {block[0]}, r105;")
        kernel(f"mad.lo.u32 r100, r100, {threads}, r103; ld.param.u64 out, [p_out]; mad.wide.u32 out, r100, 8, out;")
        for name in SPECIALS:
            kernel(f"mov.u32 r110, %{name};").put("r110")
        kernel("mov.pred p1, %is_explicit_cluster;").put("p1", 1)
        launch = Launch(("out",), grid, block, cluster)
        yield Program(f"special registers {grid} {block} {cluster}", kernel.text, kernel.out, (launch,))


def shared_memory() -> Iterator[Program]:
    """mapa and its inverse, loads, stores and atomics to every CTA of the cluster."""
    for ctas in (1, 2, 4, 8):
        kernel = Kernel(32, ctas, ROOM)("mov.u32 r100, room; mad.lo.u32 r101, lane, 4, r100;")
        kernel("mad.lo.u32 r102, rank, 1000, lane; st.shared.b32 [r101], r102; mov.u32 r103, 0;")
        kernel("st.shared.b32 [r101 + 256], r103; st.shared.b32 [r101 + 512], r103;", CLUSTER)
        for other in range(ctas):
            kernel(f"mapa.shared::cluster.u32 r104, r101, {other}; ld.shared::cluster.b32 r105, [r104];").put("r105")
            kernel("getctarank.shared::cluster.u32 r106, r104;").put("r106")
            kernel("sub.u32 r107, r104, r101; and.b32 r107, r107, 0xFFFFFF;")
            kernel(f"cvta.shared.u64 d1, room; mapa.u64 d2, d1, {other}; getctarank.u64 r106, d2;").put("r106")
            kernel("isspacep.shared::cta p1, d2;").put("p1", 1)
            kernel("isspacep.shared::cluster p1, d2;").put("p1", 1)
            kernel("mad.wide.u32 d2, lane, 4, d2; ld.b32 r105, [d2];").put("r105")
            kernel("add.u32 r108, rank, 1; atom.shared::cluster.add.u32 r109, [r104 + 256], r108;")
            kernel("red.relaxed.cluster.shared::cluster.or.b32 [r104 + 512], r108;")
        kernel(CLUSTER, "ld.shared.b32 r110, [r101 + 256];").put("r110")
        kernel("ld.shared.b32 r110, [r101 + 512];").put("r110")
        kernel(f"add.u32 r111, rank, 1; rem.u32 r111, r111, {ctas}; mapa.shared::cluster.u32 r104, r101, r111;")
        kernel("mul.lo.u32 r112, r102, 3; st.shared::cluster.b32 [r104 + 128], r112;", CLUSTER)
        kernel("ld.shared.b32 r110, [r101 + 128];").put("r110")
        kernel(CLUSTER)
        yield kernel.program(f"shared memory of {ctas} CTAs", cluster=ctas)


def remote() -> Iterator[Program]:
    """st.async and red.async, whose bytes an mbarrier of the same CTA counts."""
    for seed, (vector, kind, bits) in enumerate(
        (("", "b32", 32), ("", "b64", 64), (".v2", "b32", 32), (".v4", "b32", 32), (".v2", "b64", 64))
    ):
        count = int(vector[2:] or 1)
        size = count * bits // 8
        kernel = _remote(2 + seed % 2, 32 * size)
        names = [f"{'r' if bits == 32 else 'd'}{120 + i if bits == 32 else 20 + i}" for i in range(count)]
        for i, name in enumerate(names):
            kernel(
                f"mad.lo.u32 r119, thread, 77, {i};",
                f"cvt.u64.u32 {name}, r119;" if bits == 64 else f"mov.b32 {name}, r119;",
            )
        value = f"{{{', '.join(names)}}}" if count > 1 else names[0]
        kernel(f"mapa.shared::cluster.u32 r105, r100, r104; mad.lo.u32 r105, lane, {size}, r105;")
        kernel(f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{vector}.{kind} [r105], {value}, [r106];")
        yield _finish(kernel, f"st.async{vector}.{kind}", 2 + seed % 2)
    operations = [
        f"{op}.{k}"
        for op, kinds in (
            ("add", "u32 s32 u64"),
            ("min", "u32 s32"),
            ("max", "u32 s32"),
            ("inc", "u32"),
            ("dec", "u32"),
            ("and", "b32"),
            ("or", "b32"),
            ("xor", "b32"),
        )
        for k in kinds.split()
    ]
    for operation in operations:
        bits = int(operation[-2:])
        kernel = _remote(2, 32 * bits // 8)
        kernel("mad.lo.u32 r119, thread, 0x9E3779B9, 77; cvt.u64.u32 d20, r119; and.b32 r118, lane, 3;")
        shares = operation[:3] not in ("inc", "dec")  # four words for all lanes, where their order does not matter
        kernel("mapa.shared::cluster.u32 r105, r100, r104;")
        kernel(f"mad.lo.u32 r105, {'r118' if shares else 'lane'}, {bits // 8}, r105;")
        kernel(
            f"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{operation} "
            f"[r105], {'r119' if bits == 32 else 'd20'}, [r106];"
        )
        yield _finish(kernel, f"red.async {operation}", 2)


def _remote(ctas: int, size: int) -> Kernel:
    """r100: room, filled; r104: the next CTA; r106: its barrier."""
    kernel = Kernel(32, ctas, ROOM)(
        "mov.u32 r100, room; mad.lo.u32 r101, lane, 4, r100; mad.lo.u32 r102, rank, 0x01234567, lane;"
    )
    kernel(*(f"st.shared.b32 [r101 + {128 * i}], r102;" for i in range(4)))
    kernel("@leader mbarrier.init.shared::cta.b64 [bar], 1;", "fence.mbarrier_init.release.cluster;")
    kernel(CLUSTER, f"@leader mbarrier.arrive.expect_tx.shared::cta.b64 d2, [bar], {size};")
    kernel(f"add.u32 r104, rank, 1; rem.u32 r104, r104, {ctas}; mov.u32 r106, bar;")
    return kernel("mapa.shared::cluster.u32 r106, r106, r104;")


def _finish(kernel: Kernel, name: str, ctas: int) -> Program:
    kernel(wait("bar", "W")).put("done", 1)
    for i in range(4):
        kernel(f"ld.shared.b32 r107, [r101 + {128 * i}];").put("r107")
    kernel(CLUSTER)
    return kernel.program(name, cluster=ctas)


def remote_arrivals() -> Iterator[Program]:
    """Every CTA arrives at every CTA's barrier."""
    for ctas in (2, 4):
        kernel = Kernel(32, ctas, ROOM)(f"@leader mbarrier.init.shared::cta.b64 [bar], {32 * ctas};")
        kernel("fence.mbarrier_init.release.cluster;", CLUSTER)
        for turn in range(3):
            for other in range(ctas):
                kernel(f"mov.u32 r100, bar; mapa.shared::cluster.u32 r100, r100, {other};")
                kernel("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r100];")
            kernel(wait("bar", f"W{turn}", turn & 1)).put("done", 1)
            kernel(CLUSTER)
        yield kernel.program(f"remote arrivals of {ctas}", cluster=ctas)


def programs() -> Iterator[Program]:
    yield from registers()
    yield from shared_memory()
    yield from remote()
    yield from remote_arrivals()
