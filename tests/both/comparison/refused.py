"""What an H200 refuses with an illegal instruction; the emulator raises InvalidTensorMap."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from comparison.program import Map, Program
from comparison.tensor_copies import load_kernel, make, store_kernel

TENSOR = Map("tensor", "u32", (40, 20), (160,), (16, 6))
SIZE = 3712


def programs() -> Iterator[Program]:
    load, store = load_kernel(2), store_kernel(2)
    reduction = "cp.reduce.async.bulk.tensor.{}d.global.shared::cta.%s.tile.bulk_group"
    for at in ((1, 0), (2, 3), (-3, -2), (39, 0)):
        yield make(f"load at {at}", load, TENSOR, SIZE, at, store=False)
    for at in ((2, 0), (0, -1), (-4, 3)):
        yield make(f"store at {at}", store, TENSOR, SIZE, at, store=True)
        yield make(f"reduce at {at}", store_kernel(2, reduction % "add"), TENSOR, SIZE, at, store=True)
    for op, dtype in (("min", "f32"), ("max", "f32.ftz"), ("min", "tf32")):
        tensor = Map("tensor", dtype, TENSOR.dims, TENSOR.strides, TENSOR.box)
        floats = np.dtype("<f4")
        yield make(
            f"reduce {op} {dtype}", store_kernel(2, reduction % op), tensor, SIZE, (0, 0), store=True, floats=floats
        )
    tensor = Map("tensor", "s64", (20, 20), (160,), (8, 6))
    yield make("reduce and s64", store_kernel(2, reduction % "and"), tensor, SIZE, (0, 0), store=True)
