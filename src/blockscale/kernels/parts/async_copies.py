"""Asynchronous copies from global to shared memory: by a thread for itself, and in bulk (PTX: cp.async, cp.async.bulk).

Addresses are integers: of shared memory 32 bits, of global memory 64.
"""

from typing import Any

from cutlass import BFloat16, Boolean, Float32, Int32, Int64, cute


def copy_16(target: Int32, source: Int64, there: Boolean) -> None:
    """16 bytes, if they are there. Part of the thread's next group."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::256B [{$r0}], [{$r1}], 16;", read_only_args=[target, source], predicate=there
    )


def copy_16_or_zeros(target: Int32, source: Int64, size: Int32, there: Boolean) -> None:
    """As `copy_16`; where `size` is 0 instead of 16 the source is not read and the target becomes zeros."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global.L2::256B [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[target, source, size],
        predicate=there,
    )


def copy_bulk(target: Int32, source: Int64, nbytes: Int32, barrier: Int32) -> None:
    """A multiple of 16 bytes between addresses that are multiples of 16; `barrier` hears of the bytes."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, nbytes, barrier],
    )


def ask_l2(source: Int64, nbytes: Int32) -> None:
    """A multiple of 16 bytes at a multiple of 16 to L2: a hint, which reads nothing as far as the program can tell."""
    cute.arch.inline_ptx("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", read_only_args=[source, nbytes])


def commit() -> None:
    """Closes the thread's group of `copy_16`."""
    cute.arch.cp_async_commit_group()


def wait(groups: int) -> None:
    """Until all but the thread's last `groups` groups are there."""
    cute.arch.cp_async_wait_group(groups)


def clear_16(target: Int32) -> None:
    cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {0, 0, 0, 0};", read_only_args=[target])


def store_fp32(target: Int32, value: Float32) -> None:
    cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[target, value])


def store_fp32x4(target: Int32, x: Float32, y: Float32, z: Float32, w: Float32) -> None:
    cute.arch.inline_ptx("st.shared.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[target, x, y, z, w])


def load_fp32(source: Int32) -> Float32:
    return cute.arch.inline_ptx("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[source])


def load_16(source: Int32) -> Any:
    """Four words."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[source],
    )


def load_once_16(source: Int64, there: Boolean) -> Any:
    """Four words from global memory that nobody reads again; anything, if they are not there."""
    return cute.arch.inline_ptx(
        "ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[source],
        predicate=there,
    )


def load_fp32x4(source: Int32) -> Any:
    return cute.arch.inline_ptx(
        "ld.shared.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[source],
    )


def peer(address: Int32, rank: Int32) -> Int32:
    """Where the CTA of that rank in the cluster has what this CTA has at `address` (shared::cluster)."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, rank]
    )


def send_fp32x4(target: Int32, x: Float32, y: Float32, z: Float32, w: Float32, barrier: Int32) -> None:
    """To an address that `peer` gave, some time; the mbarrier of the same CTA hears of the bytes (PTX: st.async)."""
    cute.arch.inline_ptx(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, "
        "[{$r5}];",
        read_only_args=[target, x, y, z, w, barrier],
    )


def wait_for_peers(barrier: Int32, parity: int) -> None:
    """Until a phase of an mbarrier is complete: then what came from other CTAs of the cluster can be read."""
    cute.arch.inline_ptx(
        "{ .reg .pred complete; AGAIN: "
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [{$r0}], {$r1}; "
        "@!complete bra AGAIN; }",
        read_only_args=[barrier, Int32(parity)],
    )


def packed(low: Float32, high: Float32, dtype: Any) -> Int32:
    """Two numbers as a word of two of `dtype`, 16 bits each."""
    kind = "bf16" if dtype is BFloat16 else "f16"
    return cute.arch.inline_ptx(
        f"cvt.rn.{kind}x2.f32 {{$w0}}, {{$r0}}, {{$r1}};", write_only_types=[Int32], read_only_args=[high, low]
    )


def store_matrices_turned(target: Int32, words: list[Int32]) -> None:
    """Four matrices of 8 x 8 numbers of 16 bits, a word of each a lane, transposed; lane 8i + r gives the address of
    row r of what becomes of matrix i (PTX: stmatrix)."""
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[target, *words],
    )


def store_16(target: Int64, words: Any) -> None:
    """Four words to global memory."""
    cute.arch.inline_ptx("st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[target, *words])


def store_peer_fp32(target: Int32, value: Float32) -> None:
    """To an address that `peer` gave."""
    cute.arch.inline_ptx("st.shared::cluster.f32 [{$r0}], {$r1};", read_only_args=[target, value])
