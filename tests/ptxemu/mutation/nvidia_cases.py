"""NVIDIA's kernels as cases: compiled and launched by their own host code once, then launched as that code did."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from cases import Setup, registered

import ptxemu

sys.path.insert(0, str(Path(__file__).parents[1]))
from nvidia_kernels import BlockScaled, Case, Dense, Problem, compiled, mistakes

from ptxemu.host import installed
from ptxemu.host.bridge import Launch
from ptxemu.text import Module


def captured(case: Case, problem: Problem, sms: int = 148) -> Setup:
    """The one launch of a case for a problem."""
    operands = case.operands(problem, seed=7)
    launches: list[Launch] = []
    with installed(ptxemu.Device("sm_100a", sms=sms), operands.memory) as emulator:
        emulator.launch = launches.append  # type: ignore[method-assign]
        case.call(compiled(case), problem, operands)
    (launch,) = launches
    given = [array.copy() for array in operands.memory]

    def run(modules: Sequence[Module], device: ptxemu.Device) -> str | None:
        for array, copy in zip(operands.memory, given, strict=True):
            array[:] = copy
        device.sms = sms
        with registered(device, *operands.memory):
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
        return mistakes(case, operands, problem)

    return Setup({"kernel": launch.ptx}, run)


# Seven stages, two accumulators and three staging buffers all come round: five tiles with four k steps each.
ONE_CTA = functools.partial(captured, BlockScaled(tile=(128, 64), clusters=1), Problem(128, 320, 1024))
# Two pairs of CTAs a cluster share A and B by multicast.
MULTICAST = functools.partial(
    captured, BlockScaled(tile=(256, 128), cluster=(2, 2), out="Float16", clusters=1), Problem(256, 1024, 768)
)
# Clusters cancel others and do their tiles: more tiles than multiprocessors.
LAUNCH_CONTROL = functools.partial(
    captured, Dense("BFloat16", "Float32", True, (256, 128), (2, 1)), Problem(256, 512, 320), 2
)

NVIDIA: dict[str, Callable[[], Setup]] = {
    "nvidia-1cta": ONE_CTA,
    "nvidia-multicast": MULTICAST,
    "nvidia-clc": LAUNCH_CONTROL,
}
