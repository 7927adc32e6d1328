"""Triton's kernels for Hopper run right under every schedule, with no finding but a known one."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")

from triton_kernels import CASES, Matmul, compiled, softmax

import ptxemu

SCHEDULES = [("eager", 0), ("lazy", 0), ("fifo", 0), ("random", 1), ("random", 2), ("random", 3)]


@pytest.fixture(params=SCHEDULES, ids=lambda s: f"{s[0]}-{s[1]}")
def device(request: pytest.FixtureRequest) -> ptxemu.Device:
    schedule, seed = request.param
    return ptxemu.Device("sm_90a", schedule=schedule, seed=seed, on_finding="collect")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matmul(case: Matmul, device: ptxemu.Device) -> None:
    case.run(device)


def test_softmax(device: ptxemu.Device) -> None:
    signature = (("x", "*fp32"), ("y", "*fp32"), ("stride", "i32"), ("n", "i32"), ("WIDTH", "constexpr"))
    kernel = compiled(softmax, signature, (("WIDTH", 512),), 4)
    x = np.random.default_rng(1).standard_normal((3, 500)).astype(np.float32)
    y, nothing = np.zeros_like(x), np.zeros(16, np.uint8)
    args = [x, y, 500, 500, nothing, 0]
    report = device.launch(kernel.asm["ptx"], grid=(3, 1, 1), block=(128,), shared=kernel.metadata.shared, args=args)
    assert not report.findings
    exact = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    np.testing.assert_allclose(y, exact / exact.sum(1, keepdims=True), rtol=1e-5)
