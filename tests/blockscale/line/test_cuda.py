"""The launcher for silicon, over a CUDA whose launches do nothing: loading, arguments, errors."""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import naive_store
import pytest
import torch

import blockscale as bs
from blockscale import backends, plan, store
from blockscale.backends import gpu, sm90
from blockscale.config import Config
from blockscale.families.sm100 import ENTRY
from blockscale.launch import cuda, emulated
from blockscale.problem import Problem, Target, target_named, target_of_capability
from blockscale.store import Artefact

ROOT = Path(__file__).parents[3]
B200 = target_named("b200")
PROBLEM, CONFIG = Problem(1, 256, 64), Config()


@pytest.fixture(scope="session")
def empty(tmp_path_factory):
    """benchmarks/empty_cuda.c, built; loaded by whoever needs it."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    library = tmp_path_factory.mktemp("cuda") / "libempty.so"
    source = ROOT / "benchmarks" / "empty_cuda.c"
    subprocess.run(["cc", "-O2", "-fPIC", "-shared", "-o", library, source], check=True)
    return library


def run(source, *arguments, **environment):
    """A new process in which CuTe DSL cannot be imported, as on a machine that was sent a store."""
    blocked = "import sys; sys.modules['cutlass'] = None\n"
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    variables = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-c", blocked + source, *map(str, arguments)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)


LOAD = """
import ctypes, sys, time
import torch
from blockscale import plan
from blockscale.config import Config
from blockscale.launch import cuda, emulated
from blockscale.problem import Problem, target_named
from blockscale.store import default_store
empty = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
cuda.open_cuda = lambda: empty
number = lambda name: ctypes.c_int.in_dll(empty, name)
number("devices").value = 3
start = time.process_time()
made = plan.artefact(Problem(1, 256, 64), target_named(sys.argv[2]), Config(), default_store())
function = cuda.load(made)
seconds = time.process_time() - start
call = lambda: function(*[4096] * 11, 0.5, 1, 256, 64, 256, 1, 1, 1, 1, 0)
call()
call()
number("fail").value = 1
try:
    call()
except RuntimeError as error:
    print(error)
print(seconds, ctypes.c_long.in_dll(empty, "launches").value, number("libraries").value, number("sets").value)
print(number("forgotten").value)
"""


@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_an_artefact_runs_where_there_is_no_compiler(empty, arch):
    """Loaded from the store within a second; kernels are set up on every device, once; an error of CUDA is named."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    plan.artefact(PROBLEM, target_named(arch), CONFIG, store.default_store())
    process = run(LOAD, empty, arch)
    assert process.returncode == 0, process.stderr
    error, last, forgotten = process.stdout.strip().splitlines()
    assert forgotten == "1"  # by CUDA, or the next to ask for its last error would find this one
    assert "cudaErrorInvalidValue" in error
    seconds, launches, libraries, sets = last.split()
    assert float(seconds) < 1
    assert (int(launches), int(libraries)) == (3, 1)
    assert int(sets) % 3 == 0 < int(sets)  # for each of three devices


def test_a_store_without_the_kernel_and_without_the_compiler(tmp_path):
    process = run(
        "import blockscale as bs, torch\n"
        "a = bs.quantize(torch.randn(4, 64))\n"
        "with bs.emulated('sm_100a'):\n"
        "    try:\n"
        "        bs.gemm(a, a)\n"
        "    except RuntimeError as error:\n"
        "        print(type(error).__name__, error)\n",
        BLOCKSCALE_CACHE=str(tmp_path),
    )
    if "is not installed" in process.stdout:
        assert process.stdout.startswith("CompilerMissing no compiled kernel, and nvidia-cutlass-dsl is not installed")
    else:  # its distribution is here, though it cannot be imported
        assert process.returncode == 1
        assert "cutlass" in process.stderr


def test_an_artefact_without_a_library_and_without_the_compiler(tmp_path, monkeypatch):
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is not installed")
    monkeypatch.setattr(cuda, "open_cuda", lambda: None)
    monkeypatch.setitem(sys.modules, "cutlass", None)
    monkeypatch.setitem(sys.modules, "cutlass.runtime", None)
    with pytest.raises(RuntimeError, match="kernel abc was compiled where there was no C compiler"):
        cuda.load(Artefact("abc", {}, {"object": tmp_path / "x.o"}))


def test_no_tvm_ffi(monkeypatch):
    monkeypatch.setitem(sys.modules, "tvm_ffi", None)
    with pytest.raises(RuntimeError, match="apache-tvm-ffi is not installed"):
        cuda.load(Artefact("abc", {}, {}))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_a_torch_without_cuda():
    assert cuda.why_not(B200) == "this torch is built without CUDA"
    with pytest.raises(RuntimeError, match="built without CUDA"):
        cuda.open_cuda()


class Gpus:
    """What torch says of GPUs that are not here."""

    def __init__(self, monkeypatch, *capabilities):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda at: capabilities[getattr(at, "index", at)])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda at=0: "a GPU")
        part = SimpleNamespace(multi_processor_count=72)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda at=0: part)
        spec = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "tvm_ffi" or spec(name))


@pytest.mark.parametrize("capability", [(8, 0), (11, 0), (12, 2), (13, 0)])
def test_a_gpu_without_kernels_is_refused_by_name(monkeypatch, capability):
    Gpus(monkeypatch, capability)
    number = ".".join(map(str, capability))
    assert target_of_capability(capability) is None
    assert f"needs a GPU of compute capability 10.0; found: {number}" in bs.available_backends()["sm100"]
    message = f"a GPU of compute capability {number}; this version's kernels are compiled for 10.0 \\(sm_100a\\)"
    with pytest.raises(ValueError, match=message):
        backends.pick(None, torch.device("cuda:0"))
    with pytest.raises(ValueError, match="'sm100' cannot run here"):
        backends.pick("sm100", torch.device("cuda:0"))


def test_a_gpu_with_kernels_is_found(monkeypatch):
    Gpus(monkeypatch, (8, 0), (10, 0), (9, 0))
    assert bs.available_backends()["sm100"] is None
    assert backends.pick(None, torch.device("cuda:1")).TARGET == B200
    assert backends.pick(None, torch.device("cuda:2")) is sm90
    assert backends.target_here(torch.device("cpu")) is None
    with pytest.raises(ValueError, match="backend: none for cuda:0"):
        backends.pick(None, torch.device("cuda:0"))
    with pytest.raises(ValueError, match="none for operands on meta"):
        backends.pick(None, torch.device("meta"))


def test_a_gpu_of_another_kind_gets_no_launcher(monkeypatch):
    """One GPU with kernels makes the backend available; that says nothing of operands on the other."""
    Gpus(monkeypatch, (10, 0), (9, 0))
    assert backends.pick("sm100", torch.device("cuda:1")).TARGET == B200
    for launcher in (cuda.CudaLauncher, gpu.launcher):
        with pytest.raises(ValueError, match=r"compute capability 10\.0 \(sm_100a\); cuda:1 has 9\.0"):
            launcher(B200, torch.device("cuda:1"))


def test_what_calls_kernels_is_missing(monkeypatch):
    Gpus(monkeypatch, (10, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cuda.why_not(B200) == "apache-tvm-ffi is not installed; it calls the compiled kernels"


def test_a_configuration_is_for_the_multiprocessors_that_are_there(monkeypatch):
    """As `gemm` chooses it: a part of a GPU has fewer; a GPU that is named is a whole one."""
    Gpus(monkeypatch, (10, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    part = backends.target_here(torch.device("cuda:0"))
    assert part == replace(B200, sms=72) == cuda.as_it_is(B200, torch.device("cuda:0"))
    assert "for 36 pairs of CTAs" in bs.explain(512, 4096, 7168)
    assert "for 74 pairs of CTAs" in bs.explain(512, 4096, 7168, gpu="b200")


class Runtime:
    """libcudart with one limit a GPU, in steps of 64 KiB; refuses more than 100 MiB."""

    def __init__(self, monkeypatch):
        self.current, self.limits = 0, {0: 7 << 20, 1: 9 << 20}
        self.cudaGetErrorString = lambda status: b"invalid argument"
        self.cudaGetLastError = lambda: 1
        monkeypatch.setattr(cuda, "open_cuda", lambda: self)
        for name, value in {"is_available": lambda: True, "init": lambda: None}.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", lambda index: self.switched(index))

    def switched(self, index):
        self.current = index
        return nullcontext()

    def cudaDeviceGetLimit(self, size, limit):
        size._obj.value = self.limits[self.current]
        return 0

    def cudaDeviceSetLimit(self, limit, size):
        if size.value > 100 << 20:
            return 1
        self.limits[self.current] = size.value >> 16 << 16
        return 0


def test_persisting_l2_is_given_back_where_it_was_taken(monkeypatch):
    runtime = Runtime(monkeypatch)
    with bs.persisting_l2(0.53) as made:
        assert made == 0.5
        assert runtime.limits == {0: 1 << 19, 1: 9 << 20}
        runtime.current = 1
    assert runtime.limits == {0: 7 << 20, 1: 9 << 20}


@pytest.mark.parametrize("mb", [101, 1e30])
def test_persisting_l2_names_what_cuda_refuses(monkeypatch, mb):
    Runtime(monkeypatch)
    with (
        pytest.raises(RuntimeError, match=re.escape(f"mb: {mb}: CUDA error 1: invalid argument")),
        bs.persisting_l2(mb),
    ):
        pass


class Recorder(cuda.CudaLauncher):
    def __init__(self, index):
        self.index, self.target = index, B200


@pytest.mark.parametrize("current", [0, 1])
def test_a_launch_takes_the_current_stream_of_the_operands_device(monkeypatch, current):
    asked, entered = [], []

    class Guard:
        def __init__(self, index):
            entered.append(index)

        def __enter__(self):
            pass

        def __exit__(self, *error):
            entered.append("left")

    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7000 + index, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    Recorder(1).launch(lambda *arguments: asked.append(arguments), [16, 32], [1, 2], (0.5, 3))
    assert asked == [(16, 32, 0.5, 3, 7001)]
    assert entered == ([] if current == 1 else [1, "left"])


def test_a_target_is_found_by_its_capability_alone():
    assert target_of_capability((10, 0)) == B200
    assert isinstance(B200, Target)
    assert ctypes.sizeof(ctypes.c_void_p) == 8


class FakeLauncher(Recorder):
    """Stands in for a GPU whose memory is the CPU's; launches are kept."""

    def __init__(self):
        super().__init__(0)
        self.target, self.one = naive_store.HOPPER, torch.ones(())
        self.plans, self.known, self.asked = {}, {}, []

    def load(self, artefact):
        return artefact.key

    def launch(self, function, pointers, sizes, scalars):
        self.asked.append((function, pointers, sizes, scalars))


def test_the_tests_on_silicon_reach_the_naive_kernel(monkeypatch, tmp_path):
    """What test_gpu.py puts in place, up to the launch, with a GPU that is not here."""
    import test_gpu

    monkeypatch.setenv("BLOCKSCALE_CACHE", str(tmp_path))
    parts = {"object": b"o", "library": b"l", "ptx": b"p", "cubin": b"c"}
    store.default_store().put(naive_store.origin("bf16"), parts)
    launcher = FakeLauncher()
    token = emulated._active.set(launcher)
    try:
        test_gpu.use_naive_kernel(monkeypatch.setattr)
        a, b = test_gpu.pair(device="cpu")
        for _ in range(2):
            test_gpu.gemm(a, b, out=torch.empty(37, 25, dtype=torch.bfloat16), alpha=0.25)
    finally:
        emulated._active.reset(token)
    first, second = launcher.asked
    assert first[0] == second[0] == naive_store.key("bf16")
    assert dict(zip(ENTRY.values, first[3], strict=True)) | {"ctas": 0} == {
        "factor": 0.25,
        "m": 37,
        "n": 25,
        "k": 192,
        "ld_out": 25,
        "batch": 1,
        "batch_a": 1,
        "batch_b": 1,
        "ctas": 0,
    }
    assert len(first[1]) == len(first[2]) == len(ENTRY.pointers)
