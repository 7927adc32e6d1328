"""Softmax of each row, a CTA a row, in CuTe DSL.  Needs no GPU: `python -m ptxemu run docs/examples/softmax_rows.py`.

One bulk copy brings the row into shared memory and an mbarrier says when its bytes are there.  Every warp reduces its
part with shuffles, and the warps' results meet in shared memory.
"""

import cutlass
import torch
from cutlass import cute
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import from_dlpack
from cutlass.memory import SmemAllocator

ROWS, COLUMNS, WARPS = 6, 1000, 4
THREADS = 32 * WARPS


@cute.kernel
def softmax_rows(x: cute.Tensor, y: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    row, _, _ = cute.arch.block_idx()
    shared = SmemAllocator()
    arrived = shared.allocate_array(cutlass.Int64, 1)
    values = shared.allocate_tensor(cutlass.Float32, cute.make_layout(COLUMNS), byte_alignment=16)
    partial = shared.allocate_tensor(cutlass.Float32, cute.make_layout((WARPS, 2)))

    if thread == 0:
        cute.arch.mbarrier_init(arrived, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, COLUMNS * 4)
        load = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), cutlass.Float32, num_bits_per_copy=COLUMNS * 32)
        cute.copy(load, x[row, None], values, mbar_ptr=arrived)
    cute.arch.sync_threads()
    cute.arch.mbarrier_wait(arrived, 0)

    largest = -cutlass.Float32.inf
    for column in range(thread, COLUMNS, THREADS):
        largest = cute.arch.fmax(largest, values[column])
    largest = reduce_block(largest, partial[None, 0], thread, cute.arch.warp_reduction_max, cute.arch.fmax)

    total = cutlass.Float32(0)
    for column in range(thread, COLUMNS, THREADS):
        total += cute.math.exp(values[column] - largest)
    total = reduce_block(total, partial[None, 1], thread, cute.arch.warp_reduction_sum, lambda a, b: a + b)

    for column in range(thread, COLUMNS, THREADS):
        y[row, column] = cute.math.exp(values[column] - largest) / total


@cute.jit
def reduce_block(value, slots: cute.Tensor, thread, reduce_warp: cutlass.Constexpr, join: cutlass.Constexpr):
    """One number for the block from one a thread."""
    value = reduce_warp(value)
    if thread % 32 == 0:
        slots[thread // 32] = value
    cute.arch.sync_threads()
    value = slots[0]
    for warp in cutlass.range_constexpr(1, WARPS):
        value = join(value, slots[warp])
    return value


@cute.jit
def softmax(x: cute.Tensor, y: cute.Tensor):
    softmax_rows(x, y).launch(grid=[ROWS, 1, 1], block=[THREADS, 1, 1])


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(ROWS, COLUMNS)
    y = torch.empty_like(x)
    softmax(from_dlpack(x, assumed_align=16), from_dlpack(y, assumed_align=16))
    error = (y.double() - x.double().softmax(dim=1)).abs().max().item()
    print(f"softmax of {ROWS} rows of {COLUMNS}: largest error {error:.1e}")
    assert error < 1e-8


if __name__ == "__main__":
    main()
