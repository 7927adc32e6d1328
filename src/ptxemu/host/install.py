"""Runs compiled CuTe DSL functions on a `Device`: the one entrance to this package."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ptxemu.host.bridge import Launch, bridge
from ptxemu.host.cutedsl import redirected
from ptxemu.host.dlpack import on_device
from ptxemu.host.memory import extent, host_bytes, live_extents, merge

if TYPE_CHECKING:
    from ptxemu.device import Device

__all__ = ["Emulator", "installed"]

# What `installed` changes belongs to the whole process, so one thread is inside at a time; it may enter again.
_one_thread = threading.RLock()


class Emulator:
    """What `installed` gives: `device`, a report for every launch, and the PTX of what was compiled or added so far."""

    def __init__(self, device: Device, memory: Iterable[Any] | None) -> None:
        self.device = device
        self.reports: list[Any] = []
        self.ptx: list[str] = []
        self._memory = None if memory is None else [extent(array) for array in memory]

    def add_memory(self, array: Any) -> None:
        """Lets kernels touch this array too.

        Raises:
            HostError: the object's memory cannot be told.
        """
        self._memory = [*(self._memory or ()), extent(array)]

    def add_ptx(self, ptx: str, cubin: bytes | None = None) -> None:
        """Makes PTX known for kernels that were compiled elsewhere; with the cubin the match is exact.

        Raises:
            HostError: the text holds no kernel.
        """
        bridge().add_ptx(ptx, cubin)

    def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Calls a compiled function and raises what the emulator raised, not the error that it became on the way.

        CPU torch tensors, which TVM-FFI would refuse, are passed on as tensors of the emulated device.
        """
        bridge().take_failure()
        try:
            return function(*on_device(arguments), **keywords)
        except Exception as error:
            if failure := bridge().take_failure():
                raise failure from error
            raise

    def load(self, object_file: str | Path, name: str, ptx: str, cubin: bytes | None = None) -> Callable[..., Any]:
        """A function of an object file that `export_to_c` wrote under `--enable-tvm-ffi`.

        It stays valid after the block, to be called inside another one.

        Raises:
            HostError: the object imports something that is not answered here, or the PTX holds no kernel.
        """
        from cutlass.runtime import load_module

        self.add_ptx(ptx, cubin)
        function: Callable[..., Any] = load_module(str(object_file), enable_tvm_ffi=True)[name]
        return function

    def launch(self, launch: Launch) -> None:
        """Runs one kernel to its end; the bridge calls it."""
        extents = live_extents() if self._memory is None else self._memory
        regions = [
            self.device.memory.register(f"host memory {start:#x}", host_bytes(start, size))
            for start, size in merge(extents)
        ]
        try:
            report = self.device.launch(
                launch.ptx,
                kernel=launch.kernel,
                grid=launch.grid,
                block=launch.block,
                cluster=launch.cluster,
                shared=launch.shared,
                args=launch.arguments,
                pdl=launch.pdl,
                preferred_cluster=launch.preferred_cluster,
            )
        finally:
            for region in regions:
                self.device.memory.unregister(region)
        self.reports.append(report)


@contextmanager
def installed(device: Device, memory: Iterable[Any] | None = None) -> Iterator[Emulator]:
    """Inside, functions that CuTe DSL compiles for `device`'s target run on it when they are called, synchronously.

    One thread is inside at a time, the others wait for it to leave; the same thread may enter again.

    Args:
        device: the emulated GPU.
        memory: the arrays that kernels may touch (CPU torch tensors, numpy arrays, pairs of address and bytes);
            None means every CPU torch tensor alive at the launch.

    Raises:
        CompilerMissing: the C library has to be built and there is no C compiler.
        HostError: CuTe DSL is missing or not version 4.8.1; a launch asks for what the emulator does not have.
        ptxemu.Error: what the kernels raise, on leaving the block, in place of the error that it became on the way.
    """
    emulator = Emulator(device, memory)
    with _one_thread, redirected(link := bridge(), device.target, device.sms):
        link.emulators.append(emulator)
        try:
            yield emulator
        except Exception as error:
            failure = link.take_failure()
            if failure is None or failure is error:
                raise
            raise failure from error
        finally:
            link.emulators.remove(emulator)
