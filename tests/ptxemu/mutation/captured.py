"""Launches that host code makes: taken once, then repeated with changed kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from cases import Setup, registered

import ptxemu
from ptxemu.host import Emulator, installed
from ptxemu.host.bridge import Launch
from ptxemu.text import Module


def captured(
    call: Callable[[Emulator], None],
    memory: Sequence[npt.NDArray[Any]],
    wrong: Callable[[], str | None],
    sms: int = 148,
) -> Setup:
    """The one launch that `call` makes inside `ptxemu.host.installed`.

    memory: what the kernel may touch; it is as now at every launch.  wrong: says what is wrong in it afterwards.
    """
    launches: list[Launch] = []
    with installed(ptxemu.Device("sm_100a", sms=sms), memory) as emulator:
        emulator.launch = launches.append  # type: ignore[method-assign]
        call(emulator)
    (launch,) = launches
    given = [np.array(array) for array in memory]

    def run(modules: Sequence[Module], device: ptxemu.Device) -> str | None:
        for array, copy in zip(memory, given, strict=True):
            array[...] = copy
        device.sms = sms
        with registered(device, *memory):
            device.launch(
                modules[0],
                kernel=launch.kernel,
                grid=launch.grid,
                block=launch.block,
                cluster=launch.cluster,
                shared=launch.shared,
                args=launch.arguments,
                pdl=launch.pdl,
                preferred_cluster=launch.preferred_cluster,
            )
        return wrong()

    return Setup({"kernel": launch.ptx}, run)
