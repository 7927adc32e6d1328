"""Launches on the software GPU: the same artefact as on silicon, its host code and its PTX, run by `ptxemu`.

The only file that imports it, and only once `emulated` is called. A kernel of the store needs no compiling, but its
host code is loaded through CuTe DSL, so emulation always needs that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, Token
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from blockscale.problem import Target, target_named
from blockscale.store import FUNCTION, Artefact, toolchain

if TYPE_CHECKING:
    from ptxemu import Device, Report
    from ptxemu.host import Emulator

Function = Callable[..., Any]


class EmulatedLauncher:
    """A software GPU as `emulated` gives it.

    Attributes:
        target: the GPU that it stands for, with its number of multiprocessors.
        reports: a `ptxemu.Report` for each launch, in order, failed ones too: findings, counters, `trace(path)`.
    """

    def __init__(self, target: Target, device: Device) -> None:
        self.target = replace(target, sms=device.sms)
        self.reports: list[Report] = []
        self.one = torch.ones((), dtype=torch.float32, device="cpu")
        self.plans: dict[Any, Any] = {}  # plan.py's
        self.known: dict[Any, Any] = {}  # calls whose arguments were validated, see backends/gpu.py
        self._device = device

    @property
    def report(self) -> Report:
        """The report of the last launch.

        Raises:
            RuntimeError: nothing has been launched.
        """
        if not self.reports:
            raise RuntimeError("nothing has been launched on this emulator yet")
        return self.reports[-1]

    @property
    def findings(self) -> list[Any]:
        """The findings of all launches."""
        return [finding for report in self.reports for finding in report.findings]

    def load(self, artefact: Artefact) -> Function:
        """The artefact's function, to be called inside `launch`, of any emulator."""
        ptx, cubin = artefact.parts["ptx"].read_text(), artefact.parts["cubin"].read_bytes()
        with self._installed([]) as emulator:
            return emulator.load(artefact.parts["object"], FUNCTION, ptx, cubin)

    def launch(
        self,
        function: Function,
        pointers: Sequence[int],
        sizes: Sequence[int],
        scalars: Sequence[Any],
        beside: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Run `function(*pointers, *scalars, stream)` to its end; it may touch `sizes[i]` bytes at `pointers[i]`, and
        `beside`, (address, bytes).

        Raises:
            ptxemu.Error: what the kernel does wrong; a finding too, unless they are collected. The launch's report is
                kept, as far as it went.
        """
        import ptxemu

        with self._installed([*zip(pointers, sizes, strict=True), *beside]) as emulator:
            try:
                emulator.call(function, *pointers, *scalars, 0)
            except ptxemu.Error as error:
                if error.report is not None:
                    emulator.reports.append(error.report)
                raise
            finally:
                self.reports += emulator.reports

    @contextlib.contextmanager
    def _installed(self, memory: Sequence[tuple[int, int]]) -> Iterator[Emulator]:
        from ptxemu.host import installed

        with toolchain, installed(self._device, memory) as emulator:
            yield emulator


_active: ContextVar[EmulatedLauncher | None] = ContextVar("blockscale_emulated", default=None)


def active() -> EmulatedLauncher | None:
    """The emulator of the innermost `emulated` around the caller."""
    return _active.get()


class Emulation:
    """What `emulated` gives, for one `with`: the emulator is in effect inside."""

    def __init__(self, launcher: EmulatedLauncher) -> None:
        self._launcher = launcher
        self._token: Token[EmulatedLauncher | None] | None = None

    def __enter__(self) -> EmulatedLauncher:
        if self._token is not None:
            raise RuntimeError("emulated: this one was entered before; call `emulated` again for another block")
        self._token = _active.set(self._launcher)
        return self._launcher

    def __exit__(self, *error: object) -> None:
        assert self._token is not None
        _active.reset(self._token)


def emulated(
    arch: str,
    *,
    schedule: str = "lazy",
    seed: int = 0,
    checks: str = "all",
    on_finding: str = "raise",
    sms: int | None = None,
) -> Emulation:
    """Inside `with emulated(...) as gpu`, products and `quantize` of CPU tensors run the kernels of `arch` on the
    software GPU. What is only prepared is better quantised before the block: a launch takes seconds, and is reported.

    It shows whether a kernel is right, and nothing about its speed. Always needs CuTe DSL, in the version that compiles
    the kernels, TVM-FFI, and a C compiler the first time. It is in effect for this thread: one started inside uses the
    CPU's backend unless it opens its own; launches of all threads take turns.

    Args:
        arch: "sm_100a", or the name of a GPU, "b200".
        schedule: when asynchronous operations complete: "eager", "lazy" (as late as the rules allow), "fifo", "random".
        seed: of every order that nothing promises; the same seed gives the same run.
        checks: "all", "strict" or "none". on_finding: "raise", or "collect": those of all launches
            are then in `gpu.findings`. Every launch has its report in `gpu.reports`; `gpu.report` is that of the last.
        sms: multiprocessors; by default those of the GPU.

    Raises:
        TypeError, ValueError: an argument is not allowed. ptxemu.Error: what a kernel does wrong.
    """
    import ptxemu

    target = target_named(arch, "arch")
    if isinstance(sms, bool):
        raise TypeError("sms: bool, expected None or an integer")
    try:
        device = ptxemu.Device(
            target.arch,
            schedule=schedule,
            seed=seed,
            checks=checks,
            on_finding=on_finding,
            sms=target.sms if sms is None else sms,
        )
    except ptxemu.LaunchError as error:
        raise ValueError(str(error)) from None
    return Emulation(EmulatedLauncher(target, device))
