"""What has to hold in CuTe DSL so that its compiled functions come to the emulator, changed only inside `redirected`.

The names used here are private to CuTe DSL, hence the exact version.  The CUDA runtime and driver are left alone.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ptxemu.host.bridge import Bridge
from ptxemu.host.dlpack import on_device
from ptxemu.host.errors import HostError
from ptxemu.host.imports import redirect_imports

__all__ = ["check_version", "redirected"]

VERSION = "4.8.1"
LIBRARIES = "CUTE_DSL_LIBS"


def check_version() -> None:
    """Raises HostError unless CuTe DSL is installed in the one version whose host code this package knows."""
    try:
        found = importlib.metadata.version("nvidia-cutlass-dsl")
    except importlib.metadata.PackageNotFoundError:
        raise HostError(f"nvidia-cutlass-dsl is not installed; needed: {VERSION}") from None
    if found != VERSION:
        raise HostError(f"nvidia-cutlass-dsl is {found}; allowed: {VERSION}")


@contextmanager
def redirected(bridge: Bridge, target: str, multiprocessors: int) -> Iterator[None]:
    """Inside, CuTe DSL compiles for `target`, links against the bridge's library and hands over the PTX it makes.

    Raises:
        HostError: CuTe DSL is missing or of another version.
    """
    check_version()
    import cutlass.cute.export  # which sets ExternalBinaryModule.load_provider
    from cutlass._mlir._mlir_libs._cutlass_ir import _execution_engine
    from cutlass.base_dsl.compiler import CompileOptions, Compiler
    from cutlass.base_dsl.export import ExternalBinaryModule
    from cutlass.cute.runtime import _Tensor
    from cutlass.cutlass_dsl import cuda_jit_executor, cutlass
    from cutlass.utils import HardwareInfo

    function = cuda_jit_executor.CudaDialectJitCompiledFunction
    with ExitStack() as stack:
        set_for_now = functools.partial(_set_for_now, stack)
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        _set_variable(stack, LIBRARIES, bridge.path)
        for dsl in (cutlass.CuTeDSL._get_dsl(), cutlass.CuteExperimentalDSL._get_dsl()):
            set_for_now(dsl.envar, "shared_libs", bridge.path)
            set_for_now(dsl.envar, "arch", target)
            set_for_now(dsl.envar, "disable_file_caching", True)  # a function from the file cache brings no PTX
        artifacts = _Artifacts(bridge, directory)
        stack.callback(artifacts.restore)
        set_for_now(CompileOptions, "apply_envar_settings", artifacts.keep(CompileOptions.apply_envar_settings))
        compile_module = cutlass.CutlassBaseDSL._compile_or_jit_module
        set_for_now(cutlass.CutlassBaseDSL, "_compile_or_jit_module", artifacts.hand_over(compile_module))
        set_for_now(Compiler, "jit", _define_entry_points(Compiler.jit, bridge))
        engine = _redirect_objects(_execution_engine.BinaryExecutionEngine)
        set_for_now(_execution_engine, "BinaryExecutionEngine", engine)
        set_for_now(ExternalBinaryModule.load_provider, "execution_engine_constructor", engine)
        set_for_now(function, "num_devices", 1)
        set_for_now(function, "_load_cuda_library", _forget_handles(function._load_cuda_library))
        set_for_now(_Tensor, "__init__", _take_for_device(_Tensor.__init__))
        _describe_hardware(set_for_now, HardwareInfo, multiprocessors)
        yield


class _Artifacts:
    """Makes the compiler keep the PTX and the cubin of every compilation, and hands both to the bridge."""

    def __init__(self, bridge: Bridge, directory: str) -> None:
        self.bridge = bridge
        self.directory = directory
        self.changed: list[tuple[Any, Any]] = []  # options, which `cute.compile` calls share, and their values before

    def keep(self, apply: Callable[..., None]) -> Callable[..., None]:
        def apply_and_keep(options: Any, envar: Any, function_name: str) -> None:
            from cutlass.base_dsl.compiler import DumpDir, KeepCUBIN, KeepPTX

            self.restore()
            self._set(options.options[KeepPTX], True)
            self._set(options.options[KeepCUBIN], True)
            if not options.options[DumpDir].value:
                self._set(options.options[DumpDir], self.directory)
            apply(options, envar, function_name)

        return apply_and_keep

    def hand_over(self, compile_module: Callable[..., Any]) -> Callable[..., Any]:
        def compile_and_hand_over(dsl: Any, *arguments: Any, **options: Any) -> Any:
            result = compile_module(dsl, *arguments, **options)
            ptx, cubin = Path(dsl.compile_options.full_ptx_path), Path(dsl.compile_options.full_cubin_path)
            if ptx.exists() and cubin.exists():  # a host function without kernels makes neither
                self.bridge.add_ptx(ptx.read_text(), cubin.read_bytes())
            return result

        return compile_and_hand_over

    def restore(self) -> None:
        while self.changed:
            option, value = self.changed.pop()
            option.value = value

    def _set(self, option: Any, value: Any) -> None:
        self.changed.append((option, option.value))
        option.value = value


def _define_entry_points(jit: Callable[..., Any], bridge: Bridge) -> Callable[..., Any]:
    """A function compiled in this process finds the C library's entry points, whatever else is loaded."""

    def jit_and_define(*arguments: Any, **options: Any) -> Any:
        engine = jit(*arguments, **options)
        for name, address in bridge.entry_points.items():
            engine.raw_register_runtime(name, address)
        return engine

    return jit_and_define


def _redirect_objects(engine: Callable[..., Any]) -> Callable[..., Any]:
    """An object file, which TVM-FFI functions go through, has its imports renamed."""

    def load(object_file: bytes, *arguments: Any) -> Any:
        if not object_file:
            raise HostError("a shared library of compiled functions cannot run here; allowed: the object file")
        return engine(redirect_imports(object_file), *arguments)

    return load


def _forget_handles(load: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """The function would unload its library through the CUDA runtime, which never saw our handle."""

    def load_and_forget(function: Any) -> list[Any]:
        load(function)
        return []

    return load_and_forget


def _take_for_device(init: Callable[..., None]) -> Callable[..., None]:
    """A CPU tensor would be taken for generic memory, for which TMA and bulk copies do not compile."""

    def init_on_device(self: Any, tensor: Any, *arguments: Any, **options: Any) -> None:
        init(self, on_device(tensor), *arguments, **options)

    return init_on_device


def _describe_hardware(set_for_now: Callable[..., None], hardware: type[Any], multiprocessors: int) -> None:
    """`HardwareInfo` asks the driver for what a persistent kernel's grid is made of."""

    def max_active_clusters(_: Any, cluster_size: int, stream: Any = None) -> int:
        return multiprocessors // cluster_size

    set_for_now(hardware, "__init__", lambda self, device_id=0: None)
    set_for_now(hardware, "get_max_active_clusters", max_active_clusters)
    set_for_now(hardware, "get_device_multiprocessor_count", lambda self: multiprocessors)


def _set_for_now(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    if name in vars(owner) or not isinstance(owner, type):
        # A class's own entry as it is, since getattr would bind a descriptor.
        stack.callback(setattr, owner, name, vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name))
    else:
        stack.callback(delattr, owner, name)  # inherited
    setattr(owner, name, value)


def _set_variable(stack: ExitStack, name: str, value: str) -> None:
    before = os.environ.get(name)
    stack.callback(lambda: os.environ.pop(name) if before is None else os.environ.__setitem__(name, before))
    os.environ[name] = value
