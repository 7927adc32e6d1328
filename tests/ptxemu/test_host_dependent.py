"""Two kernels of one CuTe DSL function, the second a dependent launch."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
torch = pytest.importorskip("torch")

import cutlass  # noqa: E402
from cutlass import cute  # noqa: E402
from cutlass.cute.runtime import from_dlpack  # noqa: E402

import ptxemu  # noqa: E402
from ptxemu.host import installed  # noqa: E402


@cute.kernel
def primary(a: cute.Tensor):
    thread, _, _ = cute.arch.thread_idx()
    a[thread] = 1.0
    cute.arch.griddepcontrol_launch_dependents()
    a[thread] = 2.0


@cute.kernel
def dependent(a: cute.Tensor, b: cute.Tensor, waits: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    if cutlass.const_expr(waits):
        cute.arch.griddepcontrol_wait()
    b[thread] = a[thread]


@cute.jit
def both(a: cute.Tensor, b: cute.Tensor, waits: cutlass.Constexpr):
    primary(a).launch(grid=[1, 1, 1], block=[32, 1, 1])
    dependent(a, b, waits).launch(grid=[1, 1, 1], block=[32, 1, 1], use_pdl=True)


@pytest.mark.parametrize(
    ("schedule", "waits", "seen"),
    [("eager", True, 2.0), ("eager", False, 2.0), ("lazy", True, 2.0), ("lazy", False, 1.0), ("random", True, 2.0)],
)
def test_a_missing_wait_shows(schedule: str, waits: bool, seen: float) -> None:
    a, b = torch.zeros(32), torch.zeros(32)
    with installed(ptxemu.Device("sm_100a", schedule=schedule, on_finding="collect"), [a, b]) as emulator:
        both(from_dlpack(a), from_dlpack(b), waits)
    first, second = emulator.reports
    assert first.findings == []
    kinds = {finding.kind for finding in second.findings}
    assert kinds == (set() if waits else {"no griddepcontrol.wait", "read before griddepcontrol.wait"})
    assert a.unique().tolist() == [2.0]
    assert b.unique().tolist() == [seen]
