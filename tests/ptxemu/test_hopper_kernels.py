"""NVIDIA's sm_90 kernel runs unchanged on the emulator, through its own host code, and matches float64."""

from __future__ import annotations

from typing import Any

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


DAMAGED = [
    ("wgmma.fence.sync.aligned;", "", "missing wgmma.fence"),
    ("wgmma.wait_group.sync.aligned \t1;", "wgmma.wait_group.sync.aligned 2;", "race"),
    ("wgmma.wait_group.sync.aligned \t0;", "", "register of a wgmma in flight"),
    ("wgmma.commit_group.sync.aligned;", "", "register of a wgmma in flight"),
    ("fence.proxy.async.shared::cta;", "", "missing fence.proxy.async"),
    ("fence.mbarrier_init.release.cluster;", "", "mbarrier.init not visible"),
    ("cp.async.bulk.wait_group.read \t3;", "", "bulk store source reused"),
]


@pytest.mark.parametrize(("before", "after", "kind"), DAMAGED, ids=[before for before, _, _ in DAMAGED])
def test_a_damaged_kernel_is_found(before: str, after: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of its fences or waits is left out; k is long enough for every stage to be filled twice."""
    case, problem = Warpgroups(clusters=1), Problem(128, 192, 1280)
    operands = case.operands(problem, seed=1)
    device = ptxemu.Device("sm_90a", on_finding="collect")
    launch = device.launch

    def damaged(ptx: str, **options: Any) -> ptxemu.Report:
        assert before in ptx
        return launch(ptx.replace(before, after), **options)

    monkeypatch.setattr(device, "launch", damaged)
    with installed(device, operands.memory) as emulator:
        case.call(compiled(case), problem, operands)
    assert kind in {finding.kind for finding in emulator.reports[0].findings}


@pytest.mark.prove
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("size", [(256, 256, 256), (160, 96, 224), (544, 320, 1056)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sweep(case: Warpgroups, size: tuple[int, int, int], schedule: str, seed: int) -> None:
    run(case, Problem(*size, 2), ptxemu.Device("sm_90a", schedule=schedule, seed=seed))
