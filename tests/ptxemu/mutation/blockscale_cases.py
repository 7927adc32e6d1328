"""This project's own sm_100a kernel as a case."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from captured import captured
from cases import Setup

sys.path.insert(0, str(Path(__file__).parents[2] / "blockscale" / "sm100"))
import emulated_kernel as host

from ptxemu.host import Emulator

M, N, K, TILE = 140, 75, 1100, 32


def gemm() -> Setup:
    """Six tiles for two CTAs, five k tiles each, a ring of three stages and two accumulators."""
    a, b = host.operand(M, K, seed=1, positive=True), host.operand(N, K, seed=2, positive=True)
    call = host.Call(ctas=2)
    out = host.aligned(2 * M * N, 0xFF)
    units = host.aligned(12)
    units.view(np.float32)[:] = call.units
    memory = [*a.memory(), *b.memory(), out, units]
    at = [array.ctypes.data for array in memory]
    pointers = (at[0], at[2], at[1], at[3], at[4], at[5], at[5] + 4, at[5] + 8)
    sizes = (M, N, a.codes.shape[2], N, 1, 1, 1)
    function = host.compiled(TILE, "bf16", accumulators=2, stages=3)

    def launch(emulator: Emulator) -> None:
        emulator.call(function, *pointers, call.factor, *sizes, call.ctas, 0)

    def wrong() -> str | None:
        values = out.view(host.DTYPES["bf16"]).reshape(1, M, N)
        return host.mistakes(host.Result(values, out[:0], None), a, b, call, K)

    return captured(launch, memory, wrong)


BLOCKSCALE: dict[str, Callable[[], Setup]] = {"blockscale-sm100": gemm}
