"""PTX that nvcc writes, with and without line numbers, gives what the CUDA C++ says. Skipped where there is no nvcc."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ptxemu.testing import TestDevice, ptx_device  # noqa: F401 (a fixture)

N = 1000
BLOCK, GRID = (128, 1, 1), (8, 1, 1)


@pytest.fixture(scope="session", params=["plain", "-lineinfo"])
def ptx(request, tmp_path_factory) -> str:
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    path = tmp_path_factory.mktemp("nvcc") / "kernels.ptx"
    options = ["-gencode", "arch=compute_100a,code=compute_100a", "-ptx", "-o", str(path)]
    options += [] if request.param == "plain" else [request.param]
    run = subprocess.run(
        ["nvcc", *options, str(Path(__file__).with_name("nvcc_kernels.cu"))], capture_output=True, text=True
    )
    if run.returncode:
        pytest.skip(f"nvcc cannot compile for compute_100a here: {run.stderr.strip().splitlines()[-1]}")
    return path.read_text()


@pytest.fixture
def x() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(N).astype(np.float32)


def test_saxpy(ptx: str, x: np.ndarray, ptx_device: TestDevice) -> None:  # noqa: F811
    y = x[::-1].copy()
    expected = np.float32(2) * x + y
    ptx_device.launch(ptx, kernel="saxpy", grid=GRID, block=BLOCK, args=[2.0, x, y, N])
    ptx_device.assert_equal(y, expected)  # exact: a product by two does not round


def test_sum_over_a_block(ptx: str, x: np.ndarray, ptx_device: TestDevice) -> None:  # noqa: F811
    out = np.zeros(1, np.float32)
    ptx_device.launch(ptx, kernel="silu_sum", block=(256, 1, 1), args=[x, out, N])
    ptx_device.assert_close(out, [(x / (1 + np.exp(-x.astype(np.float64)))).sum()], 1e-3)


def test_conversion(ptx: str, x: np.ndarray, ptx_device: TestDevice) -> None:  # noqa: F811
    bf16 = (x.view(np.uint32) >> 16).astype(np.uint16)
    y = np.full(N, np.nan, np.float16)
    ptx_device.launch(ptx, kernel="convert", grid=GRID, block=BLOCK, args=[bf16, y, N])
    ptx_device.assert_equal(y, ((bf16.astype(np.uint32) << 16).view(np.float32) * np.float32(1.5)).astype(np.float16))


def test_integers(ptx: str, ptx_device: TestDevice) -> None:  # noqa: F811
    random = np.random.default_rng(1)
    a = random.integers(-(10**6), 10**6, 64).astype(np.int32)
    b = (random.integers(1, 1000, 64) * random.choice([-1, 1], 64)).astype(np.int32)
    q, r, m = np.zeros(64, np.int32), np.zeros(64, np.int32), np.zeros(64, np.int64)
    ptx_device.launch(ptx, kernel="integers", block=(64, 1, 1), args=[a, b, q, r, m, 64])
    quotient = np.trunc(a / b).astype(np.int32)
    cases = [quotient + 1, quotient - 100, quotient * 3, quotient ^ 5]
    products = a.astype(np.int64) * b
    ptx_device.assert_equal(q, np.choose(a & 3, cases))
    ptx_device.assert_equal(r, a - quotient * b)
    ptx_device.assert_equal(m, np.sign(products) * (np.abs(products) // 7))
