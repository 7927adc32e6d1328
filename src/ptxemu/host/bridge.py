"""The Python side of runtime.c: what a compiled host function asks of the CUDA runtime, answered by the emulator.

One `Bridge` a process, because compiled code keeps pointers into the C library.  An exception raised in an answer
cannot cross the C frames: it is kept in `failure`, the caller sees an error status, and `Emulator` raises it again.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ptxemu.host.build import runtime_library
from ptxemu.host.cubin import Image, KernelInfo, digest, read_image
from ptxemu.host.errors import HostError
from ptxemu.host.imports import ANSWERED, own_name

if TYPE_CHECKING:
    from ptxemu.host.install import Emulator

__all__ = ["Bridge", "Launch", "bridge"]

SUCCESS, FAILED = 0, 999  # cudaSuccess, cudaErrorUnknown
SHARED_SIZE_BYTES = 1  # CUfunction_attribute
MAX_DYNAMIC_SHARED, NON_PORTABLE_CLUSTER = 8, 14  # cudaFuncAttribute
MAX_SHARED_PER_BLOCK_OPTIN, MULTIPROCESSOR_COUNT = 97, 16  # cudaDeviceAttr
COOPERATIVE, CLUSTER, PROGRAMMATIC_STREAM, PREFERRED_CLUSTER = 2, 4, 6, 11  # cudaLaunchAttributeID
ENTRY = re.compile(r"\.entry\s+([\w$]+)")


_STATUS, _INT, _POINTER = ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p
_INT_OUT, _POINTER_OUT = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_void_p)


class _Answers(ctypes.Structure):
    """`struct answers` of runtime.c; `Bridge` has a method for each field but the last."""

    _fields_ = (
        ("load_library", ctypes.CFUNCTYPE(_STATUS, _POINTER_OUT, _POINTER)),
        ("get_kernel", ctypes.CFUNCTYPE(_STATUS, _POINTER_OUT, _POINTER, ctypes.c_char_p)),
        ("get_attribute", ctypes.CFUNCTYPE(_STATUS, _INT_OUT, _INT, _POINTER)),
        ("set_attribute", ctypes.CFUNCTYPE(_STATUS, _POINTER, _INT, _INT)),
        ("device_attribute", ctypes.CFUNCTYPE(_STATUS, _INT_OUT, _INT)),
        ("launch", ctypes.CFUNCTYPE(_STATUS, _POINTER, _POINTER, ctypes.POINTER(_POINTER))),
        ("message", ctypes.CFUNCTYPE(_POINTER, _STATUS)),
    )


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared", ctypes.c_uint64),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class Launch:
    """One launch as the host code asked for it; `arguments` are the parameters' raw bytes, in order."""

    kernel: str
    ptx: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    preferred_cluster: tuple[int, int, int] | None
    shared: int
    pdl: bool
    arguments: list[bytes]


@dataclass
class _Kernel:
    info: KernelInfo
    image: Image
    attributes: dict[int, int] = field(default_factory=dict)


class Bridge:
    """Handles of images and kernels, the PTX known so far, and the emulators in use, the innermost last."""

    def __init__(self) -> None:
        self.path = str(runtime_library())
        self.emulators: list[Emulator] = []
        self.failure: BaseException | None = None
        self._handles: list[Any] = [None]  # a handle is an index; 0 is the null pointer
        self._ptx_of_cubin: dict[str, str] = {}
        self._ptx_of_kernel: dict[str, dict[str, None]] = {}  # the texts that hold a kernel of this name
        self._text = ctypes.create_string_buffer(b"")  # `message` returns its address
        *fields, (last, message) = _Answers._fields_
        self._answers = _Answers(
            **{name: kind(self._guard(getattr(self, name))) for name, kind in fields}, **{last: message(self.message)}
        )
        library = ctypes.CDLL(self.path)
        library.ptxemu_answer(ctypes.byref(self._answers))
        self.entry_points = {name: ctypes.cast(library[own_name(name)], ctypes.c_void_p) for name in ANSWERED}

    def add_ptx(self, ptx: str, cubin: bytes | None = None) -> None:
        """Makes PTX known, by the names of its kernels and, exactly, by the cubin that was made from it.

        Raises:
            HostError: the text holds no kernel.
        """
        names = ENTRY.findall(ptx)
        if not names:
            raise HostError("the PTX holds no .entry")
        for name in names:
            self._ptx_of_kernel.setdefault(name, {})[ptx] = None
        if cubin is not None:
            self._ptx_of_cubin[digest(cubin)] = ptx
        if self.emulators:
            self.emulators[-1].ptx.append(ptx)

    def take_failure(self) -> BaseException | None:
        """The exception that the last answer raised, once."""
        failure, self.failure = self.failure, None
        return failure

    def load_library(self, library: Any, image: int) -> None:
        library[0] = self._new_handle(read_image(image))

    def get_kernel(self, kernel: Any, library: int, name: bytes) -> None:
        image = self._handles[library]
        info = image.kernels.get(name.decode())
        if info is None:
            raise HostError(f"the image holds no kernel {name.decode()!r}; it holds {sorted(image.kernels)}")
        kernel[0] = self._new_handle(_Kernel(info, image))

    def get_attribute(self, value: Any, attribute: int, kernel: int) -> None:
        if attribute != SHARED_SIZE_BYTES:
            raise HostError(f"kernel attribute {attribute} is not known; allowed: {SHARED_SIZE_BYTES}")
        value[0] = self._handles[kernel].info.static_shared

    def set_attribute(self, kernel: int, attribute: int, value: int) -> None:
        if attribute not in (MAX_DYNAMIC_SHARED, NON_PORTABLE_CLUSTER):
            raise HostError(
                f"kernel attribute {attribute} cannot be set; allowed: {MAX_DYNAMIC_SHARED}, {NON_PORTABLE_CLUSTER}"
            )
        self._handles[kernel].attributes[attribute] = value

    def device_attribute(self, value: Any, attribute: int) -> None:
        device = self._emulator().device
        known = {MAX_SHARED_PER_BLOCK_OPTIN: device.chip.shared_bytes, MULTIPROCESSOR_COUNT: device.sms}
        if attribute not in known:
            raise HostError(f"device attribute {attribute} is not known; allowed: {sorted(known)}")
        value[0] = known[attribute]

    def launch(self, config: int, kernel: int, parameters: Any) -> None:
        emulator = self._emulator()
        wanted = _LaunchConfig.from_address(config)
        info = self._handles[kernel].info
        attributes = {a.id: a.value for a in wanted.attributes[: wanted.count]}
        if unknown := set(attributes) - {0, COOPERATIVE, CLUSTER, PROGRAMMATIC_STREAM, PREFERRED_CLUSTER}:
            raise HostError(f"launch attributes {sorted(unknown)} are not known")
        if COOPERATIVE in attributes and attributes[COOPERATIVE][0]:
            raise HostError("a cooperative launch is not supported")
        emulator.launch(
            Launch(
                kernel=info.name,
                ptx=self._find_ptx(self._handles[kernel]),
                grid=_three(wanted.grid),
                block=_three(wanted.block),
                cluster=_three(attributes.get(CLUSTER, (1, 1, 1))),
                preferred_cluster=_three(attributes[PREFERRED_CLUSTER]) if PREFERRED_CLUSTER in attributes else None,
                shared=wanted.shared,
                pdl=bool(attributes.get(PROGRAMMATIC_STREAM, (0,))[0]),
                arguments=[ctypes.string_at(parameters[i], size) for i, size in enumerate(info.parameter_sizes)],
            )
        )

    def message(self, status: int) -> int:
        """What went wrong, for TVM-FFI's error; the text lives until the next call."""
        text = f"{type(self.failure).__name__}: {self.failure}" if self.failure else f"CUDA error {status}"
        self._text = ctypes.create_string_buffer(text.encode())
        return ctypes.addressof(self._text)

    def _emulator(self) -> Emulator:
        if not self.emulators:
            raise HostError("a compiled function was called with no emulator installed; use `with installed(device):`")
        return self.emulators[-1]

    def _find_ptx(self, kernel: _Kernel) -> str:
        if exact := self._ptx_of_cubin.get(kernel.image.digest):
            return exact
        texts = list(self._ptx_of_kernel.get(kernel.info.name, ()))
        if len(texts) != 1:
            reason = "several PTX texts hold it" if texts else "no PTX is known for it"
            raise HostError(
                f"kernel {kernel.info.name!r}: {reason}; compile inside `installed`, or give the PTX "
                "(kept by --keep-ptx) together with the cubin (--keep-cubin)"
            )
        return texts[0]

    def _new_handle(self, thing: Any) -> int:
        self._handles.append(thing)
        return len(self._handles) - 1

    def _guard(self, answer: Callable[..., None]) -> Callable[..., int]:
        def guarded(*arguments: Any) -> int:
            try:
                answer(*arguments)
            except BaseException as failure:
                self.failure = failure
                return FAILED
            return SUCCESS

        return guarded


@functools.cache
def bridge() -> Bridge:
    """This process's bridge; builds the C library on first use.

    Raises:
        CompilerMissing: no C compiler.
    """
    return Bridge()


def _three(values: Any) -> tuple[int, int, int]:
    return int(values[0]), int(values[1]), int(values[2])
