"""For tests of kernels: a pytest fixture that gives a device, and a comparison that names the first bad element.

pytest_plugins = ["ptxemu.testing"]

def test_add(ptx_device):
    report = ptx_device.launch(PTX, args=[a, b, out])
    ptx_device.assert_equal(out, a + b)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import ArrayLike

from ptxemu.device import Device
from ptxemu.machine.queue import SCHEDULES

__all__ = ["RUNS", "TestDevice", "assert_close", "assert_equal", "ptx_device"]

# The schedules and seeds that the fixture goes through.
RUNS = tuple((schedule, seed) for schedule in SCHEDULES for seed in ((1, 2, 3) if schedule == "random" else (0,)))


def assert_equal(actual: ArrayLike, expected: ArrayLike) -> None:
    """Fails at the first element that differs, naming its coordinates.  NaN equals NaN."""
    got, want = np.asarray(actual), np.asarray(expected)
    same = got == want
    if got.dtype.kind in "fc" and want.dtype.kind in "fc":
        same = same | (np.isnan(got) & np.isnan(want))
    _fail_at_first(got, want, same)


def assert_close(actual: ArrayLike, expected: ArrayLike, tolerance: ArrayLike) -> None:
    """Fails at the first element that is further than `tolerance` (absolute, broadcast) from the expected one."""
    got, want = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    with np.errstate(invalid="ignore"):
        near = (np.abs(got - want) <= tolerance) | (got == want) | (np.isnan(got) & np.isnan(want))
    _fail_at_first(got, want, near)


def _fail_at_first(got: Any, want: Any, good: Any) -> None:
    __tracebackhide__ = True
    if got.shape != want.shape:
        pytest.fail(f"the shape is {got.shape}, expected is {want.shape}")
    bad = np.argwhere(~good)
    if len(bad):
        first = tuple(int(i) for i in bad[0])
        pytest.fail(f"{len(bad)} of {got.size} elements differ, first {first}: {got[first]}, expected {want[first]}")


class TestDevice(Device):
    """A device with the comparisons at hand."""

    __test__ = False  # not a test class, whatever its name
    assert_equal = staticmethod(assert_equal)
    assert_close = staticmethod(assert_close)


@pytest.fixture(params=RUNS, ids=lambda run: f"{run[0]}-{run[1]}")
def ptx_device(request: pytest.FixtureRequest) -> TestDevice:
    """A device for every schedule, "random" with three seeds."""
    schedule, seed = request.param
    return TestDevice(schedule=schedule, seed=seed)
