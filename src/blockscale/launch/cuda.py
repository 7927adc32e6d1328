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

from blockscale.problem import TARGETS, Target, compiled_for, target_of_capability
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
            known = "" if target_of_capability(capability) else f"; this version's kernels are for {compiled_for()}"
            raise ValueError(
                f"backend: {target.backend!r} needs operands on a GPU of compute capability "
                f"{_number(target.capability)} ({target.arch}); {device} has {_number(capability)}{known}"
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
    """The known GPU of `target`'s architecture with as many multiprocessors as this one has; where there is none, as
    for a part of a GPU, `target` with their number and the bytes of L2 that torch says it has."""
    properties = torch.cuda.get_device_properties(device)
    sms = properties.multi_processor_count
    known = next((other for other in TARGETS if (other.arch, other.sms) == (target.arch, sms)), None)
    return known or replace(target, sms=sms, l2=getattr(properties, "L2_cache_size", target.l2))


def _number(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


@functools.cache
def launcher(target: Target, device: torch.device) -> CudaLauncher:
    """The launcher for a GPU, made once; `device` has an index. Raises as `CudaLauncher`."""
    return CudaLauncher(target, device)


def why_not(*targets: Target) -> str | None:
    """None if a GPU of one of these kinds is here and launches can work, otherwise the reason."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            capabilities = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        return f"torch sees no GPU: {error}"
    wanted = dict.fromkeys(target.capability for target in targets)
    if not any(capability in wanted for capability in capabilities):
        needed, found = (" or ".join(map(_number, wanted)), ", ".join(map(_number, capabilities)) or "none")
        unknown = [_number(x) for x in dict.fromkeys(capabilities) if target_of_capability(x) is None]
        more = f"; no kernels of this version are for {' or '.join(unknown)}" if unknown else ""
        return f"it needs a GPU of compute capability {needed}; found: {found}{more}"
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
def persisting_l2(mb: Any) -> Iterator[float]:
    """Inside, `mb` MiB of the current GPU's L2 cache are set aside for data that kernels ask to keep.

    `Config.persist_mb` says how much a configuration wants: one whose `l2_a` is "evict_last" asks L2 to keep a. Neither
    pins anything, and no result depends on it. The value of the `with` says what was set aside, in MiB: what CUDA made
    of `mb`, or 0.0 where there is no GPU, in the emulator too. Launches that were begun inside may end outside.
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
        yield 0.0
        return
    torch.cuda.init()  # type: ignore[no-untyped-call]
    cudart, device = open_cuda(), torch.cuda.current_device()
    before, wanted, made = ctypes.c_size_t(), ctypes.c_size_t(min(int(size * 2**20), _MOST_BYTES)), ctypes.c_size_t()
    _check(cudart, mb, cudart.cudaDeviceGetLimit(ctypes.byref(before), _PERSISTING_L2_SIZE))
    _check(cudart, mb, cudart.cudaDeviceSetLimit(_PERSISTING_L2_SIZE, wanted))
    try:
        _check(cudart, mb, cudart.cudaDeviceGetLimit(ctypes.byref(made), _PERSISTING_L2_SIZE))
        yield made.value / 2**20
    finally:
        with torch.cuda.device(device):  # the block may have made another one current
            _check(cudart, before.value / 2**20, cudart.cudaDeviceSetLimit(_PERSISTING_L2_SIZE, before))


def _check(cudart: Any, mb: Any, status: int) -> None:
    if status:
        cudart.cudaGetErrorString.restype = ctypes.c_char_p
        cudart.cudaGetLastError()  # or torch would report it later, elsewhere
        raise RuntimeError(f"mb: {mb}: CUDA error {status}: {cudart.cudaGetErrorString(status).decode()}")
