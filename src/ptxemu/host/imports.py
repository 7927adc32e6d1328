"""What compiled host code imports, and how its imports are led to the C library.

Whatever a process loaded first is found first, CuTe DSL's own library included.  So the C library has names of its own,
`em...` for `cu...`, and an object's imports are renamed before it is loaded.
"""

from __future__ import annotations

from ptxemu.host.cubin import import_names
from ptxemu.host.errors import HostError

__all__ = ["ANSWERED", "check_imports", "own_name", "redirect_imports"]

# Everything that host code compiled by CuTe DSL 4.8.1 may import from its runtime library.
ANSWERED = (
    "_cudaLibraryLoadData",
    "_cudaLibraryGetKernel",
    "_cuKernelGetAttribute",
    "_cudaKernelSetAttributeForDevice",
    "_cudaFuncSetAttribute",
    "_cudaDeviceGetAttribute",
    "_cudaGetDevice",
    "_cudaSetDevice",
    "_cudaLaunchKernelEx",
    "cuda_dialect_init_library_once",
    "cuda_dialect_unload_library_once",
    "CuteDSLRT_TVMFFISetRaisedCudaError",
)
FROM_ELSEWHERE = ("TVMFFI", "_GLOBAL_OFFSET_TABLE_", "mem", "malloc", "free", "printf")


def own_name(name: str) -> str:
    """The C library's name for an entry point; as long as the original."""
    return name.replace("Cu", "Em", 1) if name.startswith("Cu") else name.replace("cu", "em", 1)


def check_imports(object_file: bytes) -> None:
    """Raises HostError if the object is no ELF file or imports what the C library lacks."""
    unknown = {
        name for name in import_names(object_file) if name not in ANSWERED and not name.startswith(FROM_ELSEWHERE)
    }
    if unknown:
        raise HostError(f"the compiled object imports {sorted(unknown)}, which this package does not answer")


def redirect_imports(object_file: bytes) -> bytes:
    """The object with its imports from CuTe DSL's library renamed to those of the C library.

    Raises:
        HostError: as `check_imports`.
    """
    check_imports(object_file)
    data = bytearray(object_file)
    for name, places in import_names(object_file).items():
        if name in ANSWERED:
            for place in places:
                data[place : place + len(name)] = own_name(name).encode()
    return bytes(data)
