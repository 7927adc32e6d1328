"""One safetensors file: its header checked, its tensors mapped or read one at a time.

The safetensors library validates the header (sizes, offsets without holes or overlaps, shapes against bytes); what is
read here are offsets, since the library hands out whole tensors only. A mapping is private to its tensor: pages come
when they are touched and go with the tensor, and writing into it changes neither the file nor a later load. As with
every mapped file, truncating it while a tensor is alive kills the process; replacing it by rename does no harm.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import stat
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockscale.checkpoints.errors import CheckpointError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}
F4 = "F4"  # two elements a byte; the shape in the header counts elements, torch's counts bytes
ALIGN = 2  # bytes: what the CPU asks of codes and scales
_MAP_FROM = 1 << 20  # bytes; a process may have some 65 000 mappings, so small tensors are read


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: dtype and shape as the header has them, and where its bytes lie."""

    file: TensorFile = field(repr=False)
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(self.file.path, self.name, what)

    def at(self, index: Sequence[int | slice]) -> Entry:
        """The entry of a part: integers, then at most one slice, of the leading dimensions."""
        entry = self
        for i in index:
            row, (size, *rest) = entry.nbytes // entry.shape[0], entry.shape
            first, count = (i.start, i.stop - i.start) if isinstance(i, slice) else (i, 1)
            shape = (count, *rest) if isinstance(i, slice) else tuple(rest)
            assert 0 <= first <= first + count <= size
            entry = replace(entry, shape=shape, start=entry.start + first * row, nbytes=count * row)
        return entry

    def bytes(self) -> Tensor:
        """uint8 (nbytes,), aligned as in the file, at least to ALIGN and to the dtype; memory of its own."""
        if self.nbytes < _MAP_FROM or self.start % max(ALIGN, _BYTES.get(self.dtype, 1)):
            return self._read()
        mapped = _map(self.file.stream.fileno(), self.start, self.nbytes) if self.file.holds(self) else None
        return self._read() if mapped is None else mapped

    def tensor(self) -> Tensor:
        """The tensor in torch's dtype; F4 becomes float4_e2m1fn_x2 with half the columns.

        Raises CheckpointError for a dtype that torch does not have.
        """
        shape = self.shape
        if self.dtype == F4:
            if not shape or shape[-1] % 2:
                raise self.error(f"F4 of shape {shape}: two elements fill a byte, so the last dimension must be even")
            return self.bytes().view(*shape[:-1], shape[-1] // 2).view(torch.float4_e2m1fn_x2)
        if self.dtype not in DTYPES:
            raise self.error(f"dtype {self.dtype}, which torch does not have")
        return self.bytes().view(DTYPES[self.dtype]).view(shape)

    def _read(self) -> Tensor:
        out = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        if self.file.read_into(out.numpy().data, self.start) < self.nbytes:
            raise self.error("the file has become shorter since it was opened")
        return out


class TensorFile:
    """An open safetensors file. `entries` lie in the order of their offsets; `metadata` is the header's."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        if not stat.S_ISREG(os.stat(self.path).st_mode):
            raise CheckpointError(self.path, None, "not a regular file")
        self.stream = open(self.path, "rb", buffering=0)  # noqa: SIM115 (open as long as the object lives)
        self._reading = threading.Lock()
        weakref.finalize(self, self.stream.close)
        _validate(self.path)
        size = int.from_bytes(self.stream.read(8), "little")
        header = _parse(self.path, self.stream.read(size))
        self.data_start = 8 + size
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        entries = [self._entry(name, info) for name, info in header.items()]
        self.entries = {entry.name: entry for entry in sorted(entries, key=lambda e: (e.start, e.nbytes, e.name))}

    @property
    def size(self) -> int:
        return os.fstat(self.stream.fileno()).st_size

    def holds(self, entry: Entry) -> bool:
        return entry.start + entry.nbytes <= self.size

    def read_into(self, buffer: memoryview, start: int) -> int:
        """Fill `buffer` with the bytes from `start`; how many there were."""
        done = 0
        with self._reading:
            self.stream.seek(start)
            while done < len(buffer) and (count := self.stream.readinto(buffer[done:])):
                done += count
        return done

    def _entry(self, name: str, info: Any) -> Entry:
        start, stop = info["data_offsets"]
        return Entry(self, name, info["dtype"], tuple(info["shape"]), self.data_start + start, stop - start)


def _validate(path: str) -> None:
    """What the safetensors library makes of the header; its refusal as a CheckpointError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            pass
    except SafetensorError as error:
        raise CheckpointError(path, None, f"not a sound safetensors file: {error}") from error


def _parse(path: str, header: bytes) -> dict[str, Any]:
    """The header of a file that the library has found sound."""
    try:
        parsed: dict[str, Any] = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, None, f"not a sound safetensors file: {error}") from error
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name stands twice in the header")
    return made


def _map(descriptor: int, start: int, nbytes: int) -> Tensor | None:
    """uint8 (nbytes,), a private mapping of a part of a file; None where this system cannot.

    By the C library, since Python's mmap keeps a file descriptor for every mapping, and a model has thousands.
    """
    if _libc is None:
        return None
    lead = start % mmap.ALLOCATIONGRANULARITY
    length = lead + nbytes
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, length, protection, mmap.MAP_PRIVATE, descriptor, start - lead)
    if address == _MAP_FAILED:
        return None
    array: Any = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address + lead))
    weakref.finalize(array, _libc.munmap, address, length).atexit = False
    return torch.from_numpy(array)


def _load_libc() -> Any:
    if os.name != "posix" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = _load_libc()
