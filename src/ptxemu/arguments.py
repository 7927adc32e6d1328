"""A launch's arguments: from Python values to the parameter buffer and to global memory."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxemu.errors import LaunchError
from ptxemu.machine.memory import GlobalMemory, Region
from ptxemu.machine.program import Program
from ptxemu.machine.tensormap import TensorMap
from ptxemu.text.module import Variable

__all__ = ["Arguments", "Uninitialised", "aligned", "integer"]

ALIGN = 256  # what a device allocator gives


@dataclasses.dataclass(frozen=True, eq=False)
class Uninitialised:
    """An array argument whose contents mean nothing yet: it becomes NaN, and reading what the kernel has not written
    before is a finding."""

    array: NDArray[Any]


class Arguments:
    """Inside the `with` block the arrays among the arguments are global memory and `region` is the parameter buffer;
    at its end the arrays are written back."""

    def __init__(self, program: Program, args: Sequence[Any], memory: GlobalMemory) -> None:
        if not isinstance(args, Sequence) or isinstance(args, str | bytes):
            raise LaunchError(f"args is a {type(args).__name__}; allowed is a list or tuple of arguments")
        if len(args) != len(program.parameters):
            raise LaunchError(f"{program.name} has {len(program.parameters)} parameters, args has {len(args)}")
        self.memory = memory
        self.program = program
        self.args = [arg.array if isinstance(arg, Uninitialised) else arg for arg in args]
        self.undefined = [arg.array for arg in args if isinstance(arg, Uninitialised)]
        self.copies: list[tuple[NDArray[Any], Region]] = []
        self.regions: list[Region] = []

    def __enter__(self) -> Arguments:
        try:
            self._place()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for array, region in self.copies:
            if array.flags.writeable:
                array[...] = region.data.view(array.dtype).reshape(array.shape)
        self._remove()

    def _remove(self) -> None:
        for region in self.regions:
            self.memory.unregister(region)
        self.regions = []

    def _place(self) -> None:
        for index, arg in enumerate(self.args):
            if isinstance(arg, np.ndarray):
                if arg.dtype.hasobject:
                    raise LaunchError(f"args[{index}] is an array of {arg.dtype}; allowed are arrays of numbers")
                self._copy(f"argument {index}", arg)
        program = self.program
        buffer = aligned(max(program.parameter_size, 1))
        buffer[:] = 0
        for index, (arg, parameter) in enumerate(zip(self.args, program.parameters, strict=True)):
            raw = self._bytes(index, arg, parameter)
            start = program.offsets[parameter.name]
            buffer[start : start + len(raw)] = np.frombuffer(raw, np.uint8)
        self.region = self.memory.register("the parameters", buffer)
        self.regions.append(self.region)

    def _copy(self, name: str, array: NDArray[Any]) -> None:
        """Puts an array into global memory, unless its memory is there already."""
        if not array.size or any(array is other for other, _ in self.copies) or self._registered(array):
            return
        for other, _ in self.copies:
            if np.may_share_memory(array, other):
                raise LaunchError(f"{name} overlaps another argument; pass one array and offsets into it")
        data = aligned(array.nbytes)
        initialised = all(array is not other for other in self.undefined)
        data[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8) if initialised else 0xFF
        data.flags.writeable = array.flags.writeable  # a store into a read-only array could not be written back
        region = self.memory.register(f"{name}, {array.dtype} {array.shape}", data, initialised=initialised)
        self.regions.append(region)
        self.copies.append((array, region))

    def _registered(self, array: NDArray[Any]) -> bool:
        address = array.ctypes.data
        return array.flags.c_contiguous and any(
            r.base <= address and address + array.nbytes <= r.end for r in self.memory.regions
        )

    def _bytes(self, index: int, arg: Any, parameter: Variable) -> bytes:
        """An argument as the bytes of its parameter."""
        size = parameter.size
        if isinstance(arg, np.ndarray):
            found = next((region.base for other, region in self.copies if other is arg), arg.ctypes.data)
            return self._fitting(index, found.to_bytes(8, "little"), size)
        if isinstance(arg, TensorMap):
            return self._fitting(index, self._rebased(arg).encode(), size)
        if isinstance(arg, bytes | bytearray | memoryview | np.generic):
            return self._fitting(index, arg.tobytes() if isinstance(arg, np.generic) else bytes(arg), size)
        if isinstance(arg, float) and size in (2, 4, 8):
            return np.array([arg], {2: np.float16, 4: np.float32, 8: np.float64}[size]).tobytes()
        if isinstance(arg, int):
            if not -(1 << 8 * size - 1) <= arg < 1 << 8 * size:
                raise LaunchError(f"args[{index}]={arg} does not fit the {size} bytes of its parameter")
            return (arg & (1 << 8 * size) - 1).to_bytes(size, "little")
        raise LaunchError(f"args[{index}] is a {type(arg).__name__}: int, float, bytes, numpy array or TensorMap")

    def _fitting(self, index: int, raw: bytes, size: int) -> bytes:
        if len(raw) != size:
            raise LaunchError(f"args[{index}] has {len(raw)} bytes, its parameter {size}")
        return raw

    def _rebased(self, tensor_map: TensorMap) -> TensorMap:
        """A tensor map of an array among the arguments, moved to where that array is now."""
        for array, region in self.copies:
            start = array.ctypes.data
            if start <= tensor_map.address < start + array.nbytes:
                return dataclasses.replace(tensor_map, address=tensor_map.address - start + region.base)
        return tensor_map


def integer(name: str, value: Any) -> int:
    """The value, where it is an integer of Python or numpy; LaunchError otherwise."""
    try:
        return operator.index(value)
    except TypeError:
        raise LaunchError(f"{name}={value!r} is a {type(value).__name__}; allowed is an int") from None


def aligned(size: int) -> NDArray[np.uint8]:
    """New bytes at an address as aligned as a device allocator's."""
    raw = np.empty(size + ALIGN, np.uint8)
    skip = -raw.ctypes.data % ALIGN
    return raw[skip : skip + size]
