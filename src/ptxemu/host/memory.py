"""Which host memory a kernel may touch: the arrays that the caller lists, or every torch tensor alive.

A launch passes bare addresses, so the extents have to come from here; an access outside them is a `MemoryFault`.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.host.errors import HostError

__all__ = ["extent", "host_bytes", "live_extents", "merge"]

Extent = tuple[int, int]  # address, bytes


def extent(array: Any) -> Extent:
    """The memory of a CPU torch tensor's elements, of a numpy array, or of a pair (address, bytes).

    Raises:
        HostError: any other object, or a tensor that is not on the CPU.
    """
    if isinstance(array, tuple) and len(array) == 2:
        return int(array[0]), int(array[1])
    if hasattr(array, "untyped_storage"):
        if array.device.type != "cpu":
            raise HostError(f"a tensor on {array.device} is not memory of the emulator; allowed: CPU tensors")
        return _tensor_extent(array)
    if isinstance(array, np.ndarray):
        return _array_extent(array)
    raise HostError(f"cannot tell the memory of a {type(array).__name__}; allowed: torch, numpy, (address, bytes)")


def live_extents() -> list[Extent]:
    """The storage of every CPU torch tensor in this process, empty ones left out."""
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found = []
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu" and thing.layout is torch.strided:
            storage = thing.untyped_storage()
            if storage.nbytes():
                found.append((storage.data_ptr(), storage.nbytes()))
    return found


def merge(extents: Iterable[Extent]) -> list[Extent]:
    """Joins extents that overlap, not those that only touch: one array's end stays an end."""
    joined: list[Extent] = []
    for start, size in sorted(set(extents)):
        if size == 0:
            continue
        if joined and start < joined[-1][0] + joined[-1][1]:
            first, length = joined[-1]
            joined[-1] = first, max(length, start + size - first)
        else:
            joined.append((start, size))
    return joined


def host_bytes(address: int, nbytes: int) -> NDArray[np.uint8]:
    """That memory of this process, without a copy."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _tensor_extent(tensor: Any) -> Extent:
    if tensor.numel() == 0:
        return tensor.data_ptr(), 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (last + 1) * tensor.element_size()


def _array_extent(array: NDArray[Any]) -> Extent:
    if array.size == 0:
        return array.ctypes.data, 0
    spans = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    below = sum(span for span in spans if span < 0)
    return array.ctypes.data + below, sum(map(abs, spans)) + array.itemsize
