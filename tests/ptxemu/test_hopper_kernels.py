"""NVIDIA's sm_90 kernel runs unchanged on the emulator, through its own host code, and matches float64."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytest.importorskip("cutlass.operators", reason="nvidia-cutlass-operators is not installed")
pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")

from hopper_kernels import CASES, Warpgroups
from nvidia_kernels import Problem, compiled, mistakes

import ptxemu
from ptxemu.host import installed

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:cutlass")  # about its own helpers

SCHEDULES = [("eager", 0), ("lazy", 0), ("fifo", 0), ("random", 1), ("random", 2), ("random", 3)]
# Tiles overhang, a CTA takes several tiles, a batch has two matrices.
SMALL, WIDE = Problem(96, 96, 160, 2), Problem(160, 288, 96)
RUNS = ((CASES[0], SMALL), (CASES[1], WIDE), (CASES[4], SMALL), (CASES[6], SMALL))


def run(case: Warpgroups, problem: Problem, device: ptxemu.Device) -> None:
    operands = case.operands(problem, seed=problem.m + problem.n + problem.k)
    with installed(device, operands.memory) as emulator:
        case.call(compiled(case), problem, operands)
    assert len(emulator.reports) == 1
    assert mistakes(case, operands, problem) is None


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize(("case", "problem"), RUNS, ids=str)
def test_result(case: Warpgroups, problem: Problem, schedule: str, seed: int) -> None:
    run(case, problem, ptxemu.Device("sm_90a", schedule=schedule, seed=seed))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kernel(case: Warpgroups) -> None:
    problem = WIDE if case.tile[1] == 256 else SMALL
    run(case, problem, ptxemu.Device("sm_90a", schedule="random", seed=4))


@pytest.mark.prove
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("size", [(256, 256, 256), (160, 96, 224), (544, 320, 1056)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sweep(case: Warpgroups, size: tuple[int, int, int], schedule: str, seed: int) -> None:
    run(case, Problem(*size, 2), ptxemu.Device("sm_90a", schedule=schedule, seed=seed))
