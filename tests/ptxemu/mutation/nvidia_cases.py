"""NVIDIA's kernels as cases: compiled and launched by their own host code."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path

from captured import captured
from cases import Setup

sys.path.insert(0, str(Path(__file__).parents[1]))
from nvidia_kernels import BlockScaled, Case, Dense, Problem, compiled, mistakes


def setup(case: Case, problem: Problem, sms: int = 148) -> Setup:
    operands = case.operands(problem, seed=7)
    return captured(
        lambda emulator: case.call(compiled(case), problem, operands),
        operands.memory,
        lambda: mistakes(case, operands, problem),
        sms,
    )


# Five tiles with two k steps each: seven stages, two accumulators and three staging buffers all come round, and the two
# accumulators end unevenly.
ONE_CTA = BlockScaled(tile=(128, 64), clusters=1), Problem(128, 320, 512)
# Two pairs of CTAs a cluster share A and B by multicast.
MULTICAST = BlockScaled(tile=(256, 128), cluster=(2, 2), out="Float16", clusters=1), Problem(256, 1280, 512)
# Clusters cancel others and do their tiles: more tiles than multiprocessors.  A tile takes more k steps than the ring
# has stages, and an odd number, as the loop takes two at a time.
LAUNCH_CONTROL = Dense("BFloat16", "Float32", True, (256, 128), (2, 1)), Problem(256, 384, 576), 2

NVIDIA: dict[str, Callable[[], Setup]] = {
    "nvidia-1cta": functools.partial(setup, *ONE_CTA),
    "nvidia-multicast": functools.partial(setup, *MULTICAST),
    "nvidia-clc": functools.partial(setup, *LAUNCH_CONTROL),
}
