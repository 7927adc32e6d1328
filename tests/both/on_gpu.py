"""Runs a program on the GPU through the CUDA driver alone: it compiles the PTX itself.

Every array lies between guards; a program that writes outside its arrays fails.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy as np
from comparison import tensor_maps
from comparison.program import Arrays, Launch, Map, Program

GUARD = 1024  # bytes on both sides of an array
_FILL = 0xA5
_CLUSTER, _PDL = 4, 6  # CUlaunchAttributeID
_ERROR_LOG, _ERROR_LOG_SIZE = 5, 6  # CUjit_option
_SHARED_LIMIT = 8  # CUfunction_attribute: most dynamic shared memory
_CLUSTER_LIMIT = 14  # non-portable cluster sizes


class DriverError(RuntimeError):
    """What the driver refuses, by name."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("shape", ctypes.c_uint * 7),  # grid, block, bytes of dynamic shared memory
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


class Gpu:
    """A device and a context of its own."""

    def __init__(self, ordinal: int = 0) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self._functions: dict[tuple[str, str], ctypes.c_void_p] = {}
        self._modules: dict[str, ctypes.c_void_p] = {}
        self.call("cuInit", 0)
        self.device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self.device), ordinal)
        self.context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), self.device)
        self.call("cuCtxSetCurrent", self.context)

    def call(self, name: str, *args: Any) -> None:
        code = getattr(self.cuda, name)(*args)
        if code:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'?').decode()} ({code})")

    def description(self) -> dict[str, str]:
        """The device's name, its compute capability, and the driver's version of CUDA."""
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, 256, self.device)
        version, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        self.call("cuDeviceGetAttribute", ctypes.byref(major), 75, self.device)
        self.call("cuDeviceGetAttribute", ctypes.byref(minor), 76, self.device)
        cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
        return {"gpu": name.value.decode(), "capability": f"{major.value}.{minor.value}", "cuda": cuda}

    def function(self, ptx: str, kernel: str) -> ctypes.c_void_p:
        key = (ptx, kernel)
        if key not in self._functions:
            function = ctypes.c_void_p()
            self.call("cuModuleGetFunction", ctypes.byref(function), self._module(ptx), kernel.encode())
            self.call("cuFuncSetAttribute", function, _CLUSTER_LIMIT, 1)
            self._functions[key] = function
        return self._functions[key]

    def _module(self, ptx: str) -> ctypes.c_void_p:
        if ptx not in self._modules:
            module, log = ctypes.c_void_p(), ctypes.create_string_buffer(8192)
            options = (ctypes.c_int * 2)(_ERROR_LOG, _ERROR_LOG_SIZE)
            values = (ctypes.c_void_p * 2)(ctypes.cast(log, ctypes.c_void_p), 8192)
            try:
                self.call("cuModuleLoadDataEx", ctypes.byref(module), ptx.encode(), 2, options, values)
            except DriverError as error:
                raise DriverError(f"{error}\n{log.value.decode()}") from None
            self._modules[ptx] = module
        return self._modules[ptx]

    def launch(self, ptx: str, launch: Launch, arguments: Sequence[bytes]) -> None:
        function = self.function(ptx, launch.kernel)
        if launch.shared > 48 << 10:
            self.call("cuFuncSetAttribute", function, _SHARED_LIMIT, launch.shared)
        values = [ctypes.create_string_buffer(raw, len(raw)) for raw in arguments]
        buffers = [_aligned(value) for value in values]
        pointers = (ctypes.c_void_p * max(1, len(buffers)))(*(address for address, _ in buffers))
        wanted = [(_CLUSTER, launch.cluster)] if launch.cluster else []
        wanted += [(_PDL, (1,))] if launch.pdl else []
        attributes = (_Attribute * 2)(*(_Attribute(i, b"", (ctypes.c_uint32 * 16)(*value)) for i, value in wanted))
        shape = (ctypes.c_uint * 7)(*launch.grid, *launch.block, launch.shared)
        config = _Config(shape, None, attributes, len(wanted))
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)

    def synchronise(self) -> None:
        self.call("cuCtxSynchronize")


def _aligned(value: Any) -> tuple[int, Any]:
    """The bytes at an address that a tensor map may have, and what keeps them."""
    room = ctypes.create_string_buffer(len(value) + 64)
    address = ctypes.addressof(room) + -ctypes.addressof(room) % 64
    ctypes.memmove(address, value, len(value))
    return address, room


class _Memory:
    """Arrays on the device, each between guards."""

    def __init__(self, gpu: Gpu, arrays: Arrays) -> None:
        self.gpu, self.arrays = gpu, arrays
        self.bases: dict[str, int] = {}
        for name, array in arrays.items():
            pointer = ctypes.c_uint64()
            gpu.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(array.nbytes + 2 * GUARD))
            self.bases[name] = pointer.value
            whole = np.full(array.nbytes + 2 * GUARD, _FILL, np.uint8)
            whole[GUARD : GUARD + array.nbytes] = array.reshape(-1).view(np.uint8)
            gpu.call("cuMemcpyHtoD_v2", pointer, whole.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(whole.nbytes))

    def address(self, name: str) -> int:
        return self.bases[name] + GUARD

    def read(self) -> Arrays:
        found = {}
        for name, array in self.arrays.items():
            whole = np.empty(array.nbytes + 2 * GUARD, np.uint8)
            pointer = ctypes.c_uint64(self.bases[name])
            self.gpu.call(
                "cuMemcpyDtoH_v2", whole.ctypes.data_as(ctypes.c_void_p), pointer, ctypes.c_size_t(whole.nbytes)
            )
            if (whole[:GUARD] != _FILL).any() or (whole[GUARD + array.nbytes :] != _FILL).any():
                raise DriverError(f"array {name}: its guards were written")
            found[name] = whole[GUARD : GUARD + array.nbytes].view(array.dtype).reshape(array.shape).copy()
        return found

    def free(self) -> None:
        for base in self.bases.values():
            self.gpu.call("cuMemFree_v2", ctypes.c_uint64(base))


@functools.cache
def gpu() -> Gpu:
    return Gpu()


def run(program: Program) -> Arrays:
    """The program's arrays after its last launch.

    Raises DriverError: the driver's own errors; an array's guards were written.
    """
    machine = gpu()
    memory = _Memory(machine, program.arrays())
    for launch in program.launches:
        machine.launch(program.ptx, launch, [_argument(arg, memory) for arg in launch.args])
    machine.synchronise()
    found = memory.read()
    memory.free()
    return found


def _argument(arg: Any, memory: _Memory) -> bytes:
    if isinstance(arg, str):
        return struct.pack("<Q", memory.address(arg))
    if isinstance(arg, Map):
        return arg.at(memory.address(arg.array)).encode()
    return np.asarray(arg).tobytes()


# CUtensorMapDataType, CUtensorMapSwizzle and CUtensorMapL2promotion
_TYPES = {
    "u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 8, "bf16": 9, "f32.ftz": 10,
    "tf32": 11, "tf32.ftz": 12,
}  # fmt: skip
_SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}


def encode_tiled(tensor: Map, address: int) -> bytes:
    """The first 64 bytes of a map as cuTensorMapEncodeTiled makes it.  Raises DriverError where it refuses."""
    rank = len(tensor.dims)
    room = ctypes.create_string_buffer(192)
    at = ctypes.addressof(room) + -ctypes.addressof(room) % 64
    gpu().call(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(at),
        _TYPES[tensor.dtype],
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*tensor.dims),
        (ctypes.c_uint64 * rank)(*tensor.strides),
        (ctypes.c_uint32 * rank)(*tensor.box),
        (ctypes.c_uint32 * rank)(*(tensor.steps or (1,) * rank)),
        0,
        _SWIZZLES[tensor.swizzle],
        _PROMOTIONS[tensor.l2_promotion],
        int(tensor.nan_fill),
    )
    return ctypes.string_at(at, 64)


def tensor_map_bytes() -> dict[str, str]:
    """By number: the bytes of each map of tensor_maps.py, as the driver encodes it."""
    return {str(i): encode_tiled(m, tensor_maps.ADDRESS).hex() for i, m in enumerate(tensor_maps.maps())}


def driver_version() -> str:
    """The driver's own version; "unknown" where there is no nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"
