"""What the host package reads and builds: the C library, cubins, object files, extents of memory."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ptxemu.host import CompilerMissing, HostError, check_imports
from ptxemu.host.build import NAME, runtime_library
from ptxemu.host.cubin import import_names, read_image
from ptxemu.host.dlpack import CUDA, OnDevice, on_device
from ptxemu.host.imports import ANSWERED, own_name, redirect_imports
from ptxemu.host.memory import extent, live_extents, merge

needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@needs_cc
def test_the_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTXEMU_CACHE", str(tmp_path))
    first = runtime_library()
    assert first.name == NAME
    assert first.is_relative_to(tmp_path)
    built = first.stat().st_mtime_ns
    monkeypatch.setenv("CC", "no-such-compiler")  # not needed any more
    assert runtime_library() == first
    assert first.stat().st_mtime_ns == built
    assert [p.name for p in first.parent.iterdir()] == [NAME]  # nothing half-built is left


def test_a_missing_compiler_has_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTXEMU_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(CompilerMissing, match="'no-such-compiler' is not on the path"):
        runtime_library()


def test_a_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "broken-cc"
    script.write_text("#!/bin/sh\necho the disk is on fire >&2\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("PTXEMU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(script))
    with pytest.raises(CompilerMissing, match="the disk is on fire"):
        runtime_library()
    assert not list((tmp_path / "cache").rglob("*.so"))


@needs_cc
def test_an_unanswered_library_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTXEMU_CACHE", str(tmp_path))
    library = ctypes.CDLL(os.fspath(runtime_library()))
    assert library._emdaLaunchKernelEx(None, None, None) == 3  # cudaErrorInitializationError
    assert library._emdaSetDevice(1) == 101  # cudaErrorInvalidDevice
    device = ctypes.c_int32(-1)
    assert library._emdaGetDevice(ctypes.byref(device)) == 0
    assert device.value == 0


@needs_cc
def test_imports_are_checked(tmp_path: Path) -> None:
    source = tmp_path / "host.c"
    source.write_text(
        "int _cudaGetDevice(int *); int _cudaNew(int); int f(int *x) { return _cudaGetDevice(x) + _cudaNew(1); }"
    )
    subprocess.run(["cc", "-c", "-o", str(tmp_path / "host.o"), str(source)], check=True)
    data = (tmp_path / "host.o").read_bytes()
    assert set(import_names(data)) >= {"_cudaGetDevice", "_cudaNew"}
    with pytest.raises(HostError, match=r"imports \['_cudaNew'\]"):
        check_imports(data)


@needs_cc
def test_imports_are_redirected(tmp_path: Path) -> None:
    source = tmp_path / "host.c"
    source.write_text(
        "int _cudaGetDevice(int *); void *malloc(long); void *f(int *x) { return malloc(_cudaGetDevice(x)); }"
    )
    subprocess.run(["cc", "-c", "-o", str(tmp_path / "host.o"), str(source)], check=True)
    before = (tmp_path / "host.o").read_bytes()
    after = redirect_imports(before)
    assert len(after) == len(before)
    assert set(import_names(before)) - set(import_names(after)) == {"_cudaGetDevice"}
    assert set(import_names(after)) - set(import_names(before)) == {"_emdaGetDevice"}


@needs_cc
def test_every_entry_point_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PTXEMU_CACHE", str(tmp_path))
    library = ctypes.CDLL(os.fspath(runtime_library()))
    for name in ANSWERED:
        assert len(own_name(name)) == len(name)
        assert library[own_name(name)]
        assert not hasattr(library, name)


def test_imports_of_something_else_than_elf() -> None:
    with pytest.raises(HostError, match="not a 64-bit ELF file"):
        check_imports(b"!<arch>\n")


def test_an_image_that_is_no_fatbin() -> None:
    data = ctypes.create_string_buffer(struct.pack("<IHHQ", 0x12345678, 1, 16, 0) + bytes(64))
    with pytest.raises(HostError, match="0x12345678"):
        read_image(ctypes.addressof(data))
    empty = ctypes.create_string_buffer(struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 64) + bytes(64))
    with pytest.raises(HostError, match="not an uncompressed cubin"):
        read_image(ctypes.addressof(empty))


def test_extents() -> None:
    array = np.zeros((4, 6), np.float32)
    assert extent(array) == (array.ctypes.data, 96)
    assert extent(array[:, 2]) == (array.ctypes.data + 8, 3 * 24 + 4)
    assert extent(array[::-1, ::2]) == (array.ctypes.data, 92)
    assert extent(array[:0])[1] == 0
    assert extent((4096, 64)) == (4096, 64)
    with pytest.raises(HostError, match="cannot tell the memory of a dict"):
        extent({})


def test_extents_of_torch() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(4, 6)
    assert extent(tensor[:, 2]) == (tensor.data_ptr() + 8, 3 * 24 + 4)
    assert extent(tensor[:0])[1] == 0
    assert (tensor.data_ptr(), 96) in live_extents()
    with pytest.raises(HostError, match="a tensor on meta"):
        extent(tensor.to("meta"))


def test_extents_that_touch_stay_apart() -> None:
    assert merge([(100, 10), (110, 5), (90, 4), (200, 0)]) == [(90, 4), (100, 10), (110, 5)]
    assert merge([(100, 10), (105, 20), (102, 2), (100, 10)]) == [(100, 25)]


def test_a_cpu_tensor_passes_as_a_device_tensor() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6)
    wrapped, (inner, number) = on_device((tensor, [tensor, 3]))
    assert isinstance(wrapped, OnDevice)
    assert isinstance(inner, OnDevice)
    assert number == 3
    assert wrapped.__dlpack_device__() == (CUDA, 0)
    assert "dltensor" in repr(wrapped.__dlpack__(stream=None))
