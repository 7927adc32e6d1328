"""Asynchronous copies from global to shared memory: by a thread for itself, and in bulk (PTX: cp.async, cp.async.bulk).

Addresses are integers: of shared memory 32 bits, of global memory 64.
"""

from typing import Any

from cutlass import Boolean, Float32, Int32, Int64, cute


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


def load_peer_fp32x4(source: Int32, rank: Int32) -> Any:
    """What the CTA of that rank in the cluster has where this CTA has `source`."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, {$r0}, {$r1}; "
        "ld.shared::cluster.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [there]; }",
        write_only_types=[Float32] * 4,
        read_only_args=[source, rank],
    )
