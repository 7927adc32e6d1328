"""Compiled CuTe DSL functions call the host package: what arrives at the device, and how errors come back."""

from __future__ import annotations

import ctypes
import os
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
torch = pytest.importorskip("torch")
pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")

import cutlass  # noqa: E402
from cutlass import cute  # noqa: E402
from cutlass.base_dsl.env_manager import get_prefix_dsl_libs  # noqa: E402
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor, make_fake_stream  # noqa: E402

import ptxemu.host.cutedsl as cutedsl  # noqa: E402
from ptxemu.host import HostError, installed  # noqa: E402
from ptxemu.host.cubin import import_names  # noqa: E402
from ptxemu.host.dlpack import OnDevice  # noqa: E402
from ptxemu.host.imports import ANSWERED  # noqa: E402
from ptxemu.machine.chip import CHIPS  # noqa: E402
from ptxemu.machine.memory import GlobalMemory  # noqa: E402


class Recorder:
    """A device that keeps what it is asked and does nothing."""

    target = "sm_100a"
    chip = CHIPS["sm_100a"]
    sms = 148

    def __init__(self, error: Exception | None = None) -> None:
        self.memory = GlobalMemory()
        self.error = error
        self.launches: list[types.SimpleNamespace] = []
        self.extents: list[list[tuple[int, int]]] = []

    def launch(self, ptx: str, **asked: Any) -> str:
        self.extents.append([(region.base, region.data.size) for region in self.memory.regions])
        self.launches.append(types.SimpleNamespace(ptx=ptx, **asked))
        if self.error:
            raise self.error
        return f"report {len(self.launches)}"


@cute.kernel
def add_one(a: cute.Tensor, count: cutlass.Int32):
    thread, _, _ = cute.arch.thread_idx()
    if thread < count:
        a[thread] = a[thread] + 1.0


@cute.jit
def launch(a: cute.Tensor, count: cutlass.Int32):
    add_one(a, count).launch(grid=[2, 1, 1], block=[64, 2, 1], cluster=[2, 1, 1])


@cute.jit
def launch_on(a: cute.Tensor, count: cutlass.Int32, stream: Any):
    add_one(a, count).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)


@cute.jit
def launch_with(a: cute.Tensor, options: cutlass.Constexpr):
    add_one(a, 1).launch(grid=[8, 4, 1], block=[64, 1, 1], **options)


def compile_for_ffi() -> Any:
    fake = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),), stride_order=(0,))
    return cute.compile(launch_on, fake, cutlass.Int32(0), make_fake_stream(), options="--enable-tvm-ffi")


def test_a_plain_call() -> None:
    device, a = Recorder(), torch.zeros(128)
    with installed(device, [a]) as emulator:
        function = cute.compile(launch, from_dlpack(a), cutlass.Int32(0))
        function(from_dlpack(a), 100)
    (seen,) = device.launches
    assert f".entry {seen.kernel}(" in seen.ptx
    assert ".target sm_100a" in seen.ptx
    assert (seen.grid, seen.block, seen.cluster, seen.shared) == ((2, 1, 1), (64, 2, 1), (2, 1, 1), 0)
    assert seen.args == [a.data_ptr().to_bytes(8, "little"), (100).to_bytes(4, "little")]
    assert device.extents == [[(a.data_ptr(), 512)]]
    assert device.memory.regions == []  # given back
    assert emulator.reports == ["report 1"]


def test_a_call_without_compile() -> None:
    device, a = Recorder(), torch.zeros(64)
    with installed(device, [a]):
        launch(from_dlpack(a), 3)
        launch(from_dlpack(a), 4)
    assert [seen.args[1] for seen in device.launches] == [(3).to_bytes(4, "little"), (4).to_bytes(4, "little")]


def test_what_a_launch_may_ask_for() -> None:
    device, a = Recorder(), torch.zeros(64)
    with installed(device, [a]):
        launch_with(from_dlpack(a), {"use_pdl": True})
        launch_with(from_dlpack(a), {"cluster": (4, 2, 1), "fallback_cluster": (2, 1, 1), "smem": 4096})
    first, second = device.launches
    assert (first.pdl, first.preferred_cluster, first.shared) == (True, None, 0)
    assert (second.pdl, second.cluster, second.preferred_cluster) == (False, (2, 1, 1), (4, 2, 1))
    assert second.shared == 4096


def test_a_cooperative_launch_is_refused() -> None:
    a = torch.zeros(64)
    with pytest.raises(HostError, match="a cooperative launch is not supported"), installed(Recorder(), [a]):
        launch_with(from_dlpack(a), {"cooperative": True})


def test_a_call_through_tvm_ffi() -> None:
    device, a = Recorder(), torch.zeros(128)
    with installed(device, [a]) as emulator:
        function = compile_for_ffi()
        emulator.call(function, a, 7, 0)
    assert device.launches[0].args[0][:8] == a.data_ptr().to_bytes(8, "little")
    assert device.launches[0].args[1] == (7).to_bytes(4, "little")


def test_an_object_from_elsewhere(tmp_path: Path) -> None:
    with installed(Recorder()):
        function = compile_for_ffi()
        function.export_to_c(str(tmp_path / "art.o"), "art")
        ptx, cubin = function.__ptx__, function.__cubin__
    device, a = Recorder(), torch.zeros(16)
    with installed(device, [a]) as emulator:
        loaded = emulator.load(tmp_path / "art.o", "art", ptx, cubin)
        emulator.call(loaded, a, 9, 0)
    with installed(device, [a]) as emulator:  # the function outlives the block
        emulator.call(loaded, a, 10, 0)
    assert [seen.args[1][0] for seen in device.launches] == [9, 10]
    assert {n for n in import_names((tmp_path / "art.o").read_bytes()) if "cuda" in n.lower()} <= set(ANSWERED)


@pytest.mark.parametrize("tvm_ffi", [False, True])
def test_an_error_comes_out_as_itself(tvm_ffi: bool) -> None:
    error, a = KeyError("something in the kernel"), torch.zeros(16)

    def run() -> None:
        with installed(Recorder(error), [a]):
            if tvm_ffi:
                compile_for_ffi()(OnDevice(a), 1, 0)
            else:
                launch(from_dlpack(a), 1)

    with pytest.raises(KeyError, match="something in the kernel") as caught:
        run()
    assert caught.value is error


def test_a_call_raises_at_once() -> None:
    error, a = KeyError("something in the kernel"), torch.zeros(16)
    with installed(Recorder(error), [a]) as emulator:
        function = compile_for_ffi()
        with pytest.raises(KeyError) as caught:
            emulator.call(function, a, 1, 0)
    assert caught.value is error


def test_the_real_library_in_the_same_process() -> None:
    """It is found first under its names, which is why ours has others."""
    real = get_prefix_dsl_libs("CUTE_DSL")
    assert real is not None
    assert hasattr(ctypes.CDLL(real, mode=ctypes.RTLD_GLOBAL), "_cudaLaunchKernelEx")
    device, a = Recorder(), torch.zeros(16)
    with installed(device, [a]) as emulator:
        launch(from_dlpack(a), 5)
        emulator.call(compile_for_ffi(), a, 6, 0)
    assert [seen.args[1][0] for seen in device.launches] == [5, 6]


def test_a_function_compiled_before(tmp_path: Path) -> None:
    """Outside of the block, for a GPU that is not here."""
    fake = make_fake_compact_tensor(cutlass.Float32, (cute.sym_int(),), stride_order=(0,))
    options = f"--gpu-arch sm_100a --enable-tvm-ffi --keep-ptx --keep-cubin --dump-dir {tmp_path}"
    function = cute.compile(launch_on, fake, cutlass.Int32(0), make_fake_stream(), options=options)
    function.export_to_c(str(tmp_path / "art.o"), "art")
    device, a = Recorder(), torch.zeros(16)
    with installed(device, [a]) as emulator:
        loaded = emulator.load(tmp_path / "art.o", "art", function.__ptx__, function.__cubin__)
        emulator.call(loaded, a, 8, 0)
    assert device.launches[0].args[1][0] == 8


def test_an_error_of_the_caller_stays_an_error_of_the_caller() -> None:
    with pytest.raises(ZeroDivisionError), installed(Recorder()):
        _ = 1 // 0


def test_memory_of_every_live_tensor() -> None:
    device, a, b = Recorder(), torch.zeros(128), torch.zeros(4)
    with installed(device):
        launch(from_dlpack(a), 1)
    covered = {address for start, size in device.extents[0] for address in (start, start + size)}
    assert {a.data_ptr(), b.data_ptr()} <= {start for start, _ in device.extents[0]} | covered


def test_no_emulator_is_an_error() -> None:
    a = torch.zeros(16)
    with installed(Recorder(), [a]) as emulator:
        function = cute.compile(launch, from_dlpack(a), cutlass.Int32(0))
        function(from_dlpack(a), 1)
    with pytest.raises(HostError, match="no emulator installed"):
        emulator.call(function, from_dlpack(a), 1)


def test_two_kernels_of_one_name_need_the_cubin() -> None:
    with installed(Recorder()) as emulator:
        with pytest.raises(HostError, match=r"holds no \.entry"):
            emulator.add_ptx(".version 9.0")
        function = compile_for_ffi()
        emulator.add_ptx(function.__ptx__ + "\n// another text", b"another cubin")
        a = torch.zeros(16)
        emulator.call(function, a, 1, 0)  # known exactly by its own cubin
    assert emulator.reports == ["report 1"]


def test_the_environment_is_put_back() -> None:
    dsl = cutlass.cutlass_dsl.CuTeDSL._get_dsl()
    before = os.environ.get("CUTE_DSL_LIBS"), dsl.envar.shared_libs, vars(dsl.envar).get("_arch")
    with installed(Recorder()):
        assert dsl.envar.arch == "sm_100a"
        assert cutlass.utils.HardwareInfo().get_max_active_clusters(4) == 37
    assert before == (os.environ.get("CUTE_DSL_LIBS"), dsl.envar.shared_libs, vars(dsl.envar).get("_arch"))


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutedsl, "VERSION", "4.8.2")
    with pytest.raises(HostError, match=r"nvidia-cutlass-dsl is 4\.8\.1; allowed: 4\.8\.2"), installed(Recorder()):
        pass
