"""Writing safetensors files a tensor at a time, and putting finished files in place.

The library writes a file from tensors that are all in memory; here the header comes first, from dtypes and shapes
alone, and then the bytes of each tensor, in any order. The file is the one that the library would write.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

# The library's order of dtypes; it lays tensors by descending dtype, then by name, so that each is aligned.
_BITS = {"BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8}
_BITS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32}
_BITS |= {"F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64}
_ORDER = {dtype: at for at, dtype in enumerate(_BITS)}
_HEADER_ALIGN = 8
_PIECE = 16 << 20  # bytes copied at a time


@dataclass(frozen=True)
class Spec:
    """A tensor to be written: dtype in safetensors' words, shape in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * _BITS[self.dtype] // 8


class FileWriter:
    """A safetensors file in the making; complete once every tensor of `specs` has been written."""

    def __init__(self, path: Path, specs: Sequence[Spec], metadata: Mapping[str, str]) -> None:
        self.path = path
        self._stream = open(path, "xb")  # noqa: SIM115 (closed by close)
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for spec in sorted(specs, key=lambda spec: (-_ORDER[spec.dtype], spec.name)):
            start, end = end, end + spec.nbytes
            header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (start, end)}
            self._places[spec.name] = start, spec.nbytes
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _HEADER_ALIGN)
        self._stream.write(len(text).to_bytes(8, "little") + text)
        self._data = 8 + len(text)
        self._stream.truncate(self._data + end)

    def write(self, name: str, tensor: Tensor) -> None:
        """The bytes of a dense tensor, once for each name."""
        start, nbytes = self._places.pop(name)
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        if len(data) != nbytes:
            raise ValueError(f"{name}: {len(data)} bytes, expected {nbytes}")
        self._stream.seek(self._data + start)
        for piece in torch.split(data, _PIECE):
            self._stream.write(piece.numpy().data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """To the disk. Raises ValueError where a tensor is missing."""
        with self._stream:
            if kind is None:
                self._stream.flush()
                os.fsync(self._stream.fileno())
        if kind is None and self._places:
            raise ValueError(f"{min(self._places)}: was never written to {self.path}")


class Publication:
    """Files that appear under their names together, when the block ends without an error; else nothing changes.

    They are written beside their places first. Tensor files never take a name that is in use, except when one file is
    the whole checkpoint, since one rename replaces it; the index, put in place last, is what makes new ones count.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made_folder = False
        self._staged: dict[str, Path] = {}
        self._obsolete: list[str] = []

    def __enter__(self) -> Self:
        self._made_folder = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def stage(self, name: str) -> Path:
        """Where to write what is to become `name`."""
        path = self.folder / f"{name}.{secrets.token_hex(4)}.part"
        path.parent.mkdir(parents=True, exist_ok=True)
        self._staged[name] = path
        return path

    def stage_json(self, name: str, document: Mapping[str, Any]) -> None:
        with open(self.stage(name), "x", encoding="utf-8") as stream:
            json.dump(document, stream, indent=2)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())

    def remove(self, names: Sequence[str]) -> None:
        """Once the new files are in place, these go, unless they are among them."""
        self._obsolete += names

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                for name, path in self._staged.items():
                    os.replace(path, self.folder / name)
                _sync(self.folder)  # the new names are on the disk before the old files go
                for name in self._obsolete:
                    if name not in self._staged:
                        (self.folder / name).unlink(missing_ok=True)
        finally:
            for path in self._staged.values():
                path.unlink(missing_ok=True)
            if kind is not None and self._made_folder and not any(self.folder.iterdir()):
                self.folder.rmdir()


def _sync(folder: Path) -> None:
    """A directory's entries to the disk, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
