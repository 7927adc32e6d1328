"""Launches on silicon: current stream, the operands' device, nothing allocated, nothing waited for.

An artefact's library (compile.py links it with runtime.c) needs TVM-FFI, libcudart and libcuda and no compiler. All
that varies between GPU families is in the artefact; this file serves every one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch

from blockscale.problem import Target
from blockscale.store import FUNCTION, Artefact

Function = Callable[..., Any]
_PERSISTING_L2_SIZE = 6  # cudaLimit
_MOST_BYTES = 2**63 - 1  # that size_t passes on as they are


class CudaLauncher:
    """One GPU. `target` describes it, with its own number of multiprocessors.

    Raises:
        ValueError: the device is no GPU of that kind.
    """

    def __init__(self, target: Target, device: torch.device) -> None:
        capability = torch.cuda.get_device_capability(device)
        if capability != target.capability:
            found, wanted = (".".join(map(str, x)) for x in (capability, target.capability))
            raise ValueError(
                f"backend: {target.backend!r} needs operands on a GPU of compute capability {wanted} ({target.arch}); "
                f"{device} has {found}"
            )
        self.target = as_it_is(target, device)
        self.device = device
        self.index: int = device.index
        self.one = torch.ones((), dtype=torch.float32, device=device)
        self.plans: dict[Any, Any] = {}  # plan.py's

    def load(self, artefact: Artefact) -> Function:
        """The artefact's function. Loading it once serves every device: kernels are set up on all of them."""
        return load(artefact)

    def launch(
        self,
        function: Function,
        pointers: Sequence[int],
        sizes: Sequence[int],
        scalars: Sequence[Any],
        beside: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Call `function(*pointers, *scalars, stream)`; `sizes` and `beside` are for the emulator."""
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        if torch._C._cuda_getDevice() == self.index:
            function(*pointers, *scalars, stream)
        else:
            with torch.cuda.device(self.index):
                function(*pointers, *scalars, stream)


def as_it_is(target: Target, device: torch.device) -> Target:
    """`target` with the number of multiprocessors that this GPU, or the part of one that it is, has."""
    return replace(target, sms=torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def launcher(target: Target, device: torch.device) -> CudaLauncher:
    """The launcher for a GPU, made once; `device` has an index. Raises as `CudaLauncher`."""
    return CudaLauncher(target, device)


def why_not(target: Target) -> str | None:
    """None if a GPU of this kind is here and launches can work, otherwise the reason."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        return f"torch sees no GPU: {error}"
    if target.capability not in capabilities:
        found = ", ".join(f"{major}.{minor}" for major, minor in capabilities) or "none"
        wanted = ".".join(map(str, target.capability))
        return f"it needs a GPU of compute capability {wanted}; found: {found}"
    if importlib.util.find_spec("tvm_ffi") is None:
        return "apache-tvm-ffi is not installed; it calls the compiled kernels"
    return None


def load(artefact: Artefact) -> Function:
    """The function of an artefact, from its library, or, where that is missing, by CuTe DSL's own loader.

    Raises:
        RuntimeError: TVM-FFI or CUDA's libraries are missing, or the artefact has no library and CuTe DSL is not here.
    """
    try:
        import tvm_ffi
    except ImportError:
        raise RuntimeError("apache-tvm-ffi is not installed; it calls the compiled kernels") from None
    open_cuda()
    if "library" in artefact.parts:
        module: Any = tvm_ffi.load_module(str(artefact.parts["library"]))
    else:
        try:
            from cutlass.runtime import load_module
        except ImportError:
            raise RuntimeError(
                f"kernel {artefact.key} was compiled where there was no C compiler to link it; it needs "
                "nvidia-cutlass-dsl here, or a C compiler there"
            ) from None
        module = load_module(str(artefact.parts["object"]), enable_tvm_ffi=True)
    function: Function = module[FUNCTION]
    return function


@functools.cache
def open_cuda() -> ctypes.CDLL:
    """libcudart and libcuda, those that torch uses, made visible to libraries loaded later. Returns libcudart.

    Raises:
        RuntimeError: there are none.
    """
    if torch.version.cuda is None:
        raise RuntimeError("this torch is built without CUDA")
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(f"libcudart.so.{torch.version.cuda.split('.')[0]}", mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise RuntimeError(f"CUDA's libraries cannot be loaded: {error}") from None


@contextlib.contextmanager
def persisting_l2(mb: Any) -> Iterator[None]:
    """Inside, `mb` MiB of the current GPU's L2 cache are set aside for data that kernels ask to keep.

    What `Config.persist_mb` of a configuration says is how much it was measured with. The kernels of this version ask
    to keep nothing, so it changes nothing for them. Without a GPU the value is checked and nothing else happens.
    Source: CUDA programming guide, "L2 cache set-aside for persisting accesses".

    Raises:
        TypeError, ValueError: `mb` is no finite number of at least 0. RuntimeError: CUDA refuses; names the value.
    """
    if isinstance(mb, bool) or not isinstance(mb, Real):
        raise TypeError(f"mb: {type(mb).__name__}, expected a number of MiB")
    size = float(mb)
    if not (math.isfinite(size) and size >= 0):
        raise ValueError(f"mb: {mb}, expected a finite number of MiB, at least 0")
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.init()  # type: ignore[no-untyped-call]
    cudart, device = open_cuda(), torch.cuda.current_device()
    before, wanted = ctypes.c_size_t(), ctypes.c_size_t(min(int(size * 2**20), _MOST_BYTES))
    _check(cudart, mb, cudart.cudaDeviceGetLimit(ctypes.byref(before), _PERSISTING_L2_SIZE))
    _check(cudart, mb, cudart.cudaDeviceSetLimit(_PERSISTING_L2_SIZE, wanted))
    try:
        yield
    finally:
        with torch.cuda.device(device):  # the block may have made another one current
            _check(cudart, before.value / 2**20, cudart.cudaDeviceSetLimit(_PERSISTING_L2_SIZE, before))


def _check(cudart: Any, mb: Any, status: int) -> None:
    if status:
        cudart.cudaGetErrorString.restype = ctypes.c_char_p
        cudart.cudaGetLastError()  # or torch would report it later, elsewhere
        raise RuntimeError(f"mb: {mb}: CUDA error {status}: {cudart.cudaGetErrorString(status).decode()}")
