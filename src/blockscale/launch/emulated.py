"""Launches on the software GPU: the same artefact as on silicon, its host code and its PTX, run by `ptxemu`.

The only file that imports it, and only once something is launched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from blockscale.problem import Target, target_named
from blockscale.store import FUNCTION, Artefact

if TYPE_CHECKING:
    from blockscale.plan import Plan
    from ptxemu import Device, Report
    from ptxemu.host import Emulator

Function = Callable[..., Any]
_functions: dict[str, Function] = {}  # by key


class EmulatedLauncher:
    """A software GPU as `emulated` gives it.

    Attributes:
        target: the GPU that it stands for, with its number of multiprocessors.
        reports: a `ptxemu.Report` for each launch, in order: findings, counters, `trace(path)`.
    """

    def __init__(self, target: Target, device: Device) -> None:
        self.target = replace(target, sms=device.sms)
        self.reports: list[Report] = []
        self.one = torch.ones((), dtype=torch.float32, device="cpu")
        self.plans: dict[Any, Plan] = {}
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
        """The artefact's function, to be called inside `launch`; loaded once a process."""
        if artefact.key not in _functions:
            ptx, cubin = artefact.parts["ptx"].read_text(), artefact.parts["cubin"].read_bytes()
            with self._installed([]) as emulator:
                _functions[artefact.key] = emulator.load(artefact.parts["object"], FUNCTION, ptx, cubin)
        return _functions[artefact.key]

    def launch(self, function: Function, pointers: Sequence[int], sizes: Sequence[int], scalars: Sequence[Any]) -> None:
        """Run `function(*pointers, *scalars, stream)` to its end; it may touch `sizes[i]` bytes at `pointers[i]`.

        Raises:
            ptxemu.Error: what the kernel does wrong; a finding too, unless they are collected.
        """
        import ptxemu

        with self._installed(list(zip(pointers, sizes, strict=True))) as emulator:
            try:
                emulator.call(function, *pointers, *scalars, 0)
            except ptxemu.FindingError as error:
                self.reports.append(error.report)
                raise
            self.reports += emulator.reports

    def _installed(self, memory: Sequence[tuple[int, int]]) -> contextlib.AbstractContextManager[Emulator]:
        from ptxemu.host import installed

        return installed(self._device, memory)


_active: ContextVar[EmulatedLauncher | None] = ContextVar("blockscale_emulated", default=None)


def active() -> EmulatedLauncher | None:
    """The emulator of the innermost `emulated` around the caller."""
    return _active.get()


@contextlib.contextmanager
def emulated(
    arch: str,
    *,
    schedule: str = "lazy",
    seed: int = 0,
    checks: str = "all",
    on_finding: str = "raise",
    sms: int | None = None,
) -> Iterator[EmulatedLauncher]:
    """Inside, products of CPU tensors run the real kernel of `arch`, compiled for it, on the software GPU.

    It shows whether a kernel is right, and nothing about its speed. Needs CuTe DSL and a C compiler.

    Args:
        arch: "sm_100a", or the name of a GPU, "b200".
        schedule: when asynchronous operations complete: "eager", "lazy" (as late as the rules allow), "fifo", "random".
        seed: of every order that nothing promises; the same seed gives the same run.
        checks: "all", "strict" or "none". on_finding: "raise", or "collect" to find them in the value's `report`.
        sms: multiprocessors; by default those of the GPU.

    Raises:
        TypeError, ValueError: an argument is not allowed. ptxemu.Error: what a kernel does wrong.
    """
    import ptxemu

    target = target_named(arch, "arch")
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
    token = _active.set(EmulatedLauncher(target, device))
    try:
        current = _active.get()
        assert current is not None
        yield current
    finally:
        _active.reset(token)
