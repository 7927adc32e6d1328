"""Reads the two ELF files of a compiled CuTe DSL function: the image that it loads and the host object itself.

The image is a fatbin container around one cubin.  The cubin names the kernels, and its section `.nv.info.<kernel>`
holds for each parameter its place and size (attribute 0x17, KPARAM_INFO), which a launch needs since it passes only
pointers.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from ptxemu.host.errors import HostError

__all__ = ["Image", "KernelInfo", "digest", "import_names", "read_image"]

FATBIN_MAGIC = 0xBA55ED50
ELF_MAGIC = b"\x7fELF"
KPARAM_INFO = 0x17
SIZED_ATTRIBUTE = 0x04  # an attribute with a 16-bit length; the other formats hold their value in that field
NOBITS, SYMTAB = 8, 2


@dataclass(frozen=True)
class KernelInfo:
    """`parameter_sizes` in bytes, in order; `static_shared` in bytes, without what the system keeps."""

    name: str
    parameter_sizes: tuple[int, ...]
    static_shared: int


@dataclass(frozen=True)
class Image:
    """A loaded cubin: `digest` names its bytes, `kernels` by name."""

    digest: str
    kernels: dict[str, KernelInfo]


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    offset: int
    data: bytes
    size: int
    link: int


def digest(cubin: bytes) -> str:
    """The name of a cubin: the SHA-256 of its bytes without trailing zeros, which a container may add."""
    return hashlib.sha256(cubin.rstrip(b"\0")).hexdigest()


def read_image(address: int) -> Image:
    """Reads the image that starts at `address` in this process.

    Raises:
        HostError: it is neither a fatbin with one uncompressed cubin nor a cubin.
    """
    magic, _, header, payload = struct.unpack("<IHHQ", ctypes.string_at(address, 16))
    if magic != FATBIN_MAGIC:
        raise HostError(f"the loaded image starts with {magic:#010x}, not with a fatbin's {FATBIN_MAGIC:#010x}")
    container = ctypes.string_at(address + header, payload)
    entry_header, size = struct.unpack_from("<I", container, 4)[0], struct.unpack_from("<Q", container, 8)[0]
    cubin = container[entry_header : entry_header + size]
    if cubin[:4] != ELF_MAGIC:
        raise HostError("the loaded fatbin's first entry is not an uncompressed cubin")
    return Image(digest(cubin), _kernels(cubin))


def import_names(object_file: bytes) -> dict[str, list[int]]:
    """The names that an ELF object imports, each with the offsets in the file where it stands.

    Raises:
        HostError: the bytes are not a 64-bit ELF file.
    """
    sections = _sections(object_file)
    names: dict[str, list[int]] = {}
    for table in sections:
        if table.kind == SYMTAB:
            strings = sections[table.link]
            for name, _, _, section, _, _ in struct.iter_unpack("<IBBHQQ", table.data):
                if section == 0 and name:
                    names.setdefault(_text(strings.data, name), []).append(strings.offset + name)
    return names


def _kernels(cubin: bytes) -> dict[str, KernelInfo]:
    sections = {section.name: section for section in _sections(cubin)}
    kernels = {}
    for name, section in sections.items():
        if name.startswith(".nv.info."):
            kernel = name.removeprefix(".nv.info.")
            shared = sections.get(f".nv.shared.{kernel}")
            reserved = 1024 if shared and shared.size >= 1024 else 0
            kernels[kernel] = KernelInfo(
                kernel, tuple(_parameter_sizes(section.data)), shared.size - reserved if shared else 0
            )
    return kernels


def _parameter_sizes(info: bytes) -> list[int]:
    """The sizes in the order of the parameters; the record is index, ordinal, offset, and the size above bit 18."""
    sizes = {}
    at = 0
    while at < len(info):
        form, attribute, length = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == SIZED_ATTRIBUTE:
            if attribute == KPARAM_INFO:
                _, ordinal, _, packed = struct.unpack_from("<IHHI", info, at)
                sizes[ordinal] = packed >> 18
            at += length
    return [sizes[ordinal] for ordinal in sorted(sizes)]


def _sections(elf: bytes) -> list[_Section]:
    if elf[:5] != ELF_MAGIC + b"\x02":
        raise HostError("not a 64-bit ELF file")
    headers = list(_section_headers(elf))
    names = headers[struct.unpack_from("<H", elf, 0x3E)[0]]
    table = elf[names[4] : names[4] + names[5]]
    return [
        _Section(_text(table, h[0]), h[1], h[4], b"" if h[1] == NOBITS else elf[h[4] : h[4] + h[5]], h[5], h[6])
        for h in headers
    ]


def _section_headers(elf: bytes) -> Iterator[tuple[int, ...]]:
    start = struct.unpack_from("<Q", elf, 0x28)[0]
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    for index in range(count):
        yield struct.unpack_from("<IIQQQQIIQQ", elf, start + index * size)


def _text(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()
