"""CPU tensors in the form that a function compiled with TVM-FFI takes: it insists on a CUDA device."""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["OnDevice", "on_device"]

CUDA = 2  # kDLCUDA
DEVICE_TYPE_OFFSET = 8  # DLTensor begins with the data pointer, then the device's type

_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class OnDevice:
    """A CPU array whose DLPack form says CUDA device 0; the memory stays where it is."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, 0

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self.array.__dlpack__()
        managed = _pointer_of(capsule, b"dltensor")
        ctypes.c_int32.from_address(managed + DEVICE_TYPE_OFFSET).value = CUDA
        return capsule


def on_device(argument: Any) -> Any:
    """The argument with every CPU torch tensor in it wrapped, tuples and lists searched; other things as they are."""
    if isinstance(argument, (tuple, list)):
        return type(argument)(on_device(item) for item in argument)
    if hasattr(argument, "untyped_storage") and argument.device.type == "cpu":
        return OnDevice(argument)
    return argument
