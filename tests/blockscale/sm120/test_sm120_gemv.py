"""A row by a matrix, as GPU MODE's NVFP4 GEMV competition has it: its shapes, an eighth of the sizes, by the choice."""

import pytest
import torch
from operands import every_code_and_scale

import blockscale as bs
from blockscale import reference

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

# Rows of the matrix, k, matrices: of gpu-mode/reference-kernels, nvfp4_gemv/task.yml; the rest runs with the proof.
SHAPES = ((256, 7168, 1), (384, 7168, 2), (512, 512, 2), (7168, 2048, 1))


def operand(rows, k, batch, seed):
    t = every_code_and_scale(rows * batch, k, layout="linear", seed=seed)
    codes, scales = (x.view(batch, rows, -1) for x in (t.codes, t.scales))
    return bs.NVFP4Tensor.from_parts(codes, scales, t.global_scale, layout="linear").with_layout("128x4")


@pytest.mark.parametrize(("rows", "k", "batch"), SHAPES, ids=str)
def test_a_row_by_a_matrix(rows, k, batch):
    """fp16, as the competition has it; the configuration is that for the whole shape."""
    config = bs.config_for(1, rows, k, gpu="rtx5090")
    assert config.swap
    rows, k = max(rows // 8, 96), max(k // 8, 256)
    a, b = operand(1, k, batch, 0), operand(rows, k, batch, 1)
    with bs.emulated("sm_120a", checks="strict", sms=max(4, config.split)) as gpu:
        y = bs.gemm(a, b, alpha=1e-3, out_dtype=torch.float16, config=config)
    assert gpu.findings == []
    x, w = reference.values(a), reference.values(b).mT
    expected = 1e-3 * (x @ w)
    slack = 1e-3 * reference.tensor_core_tolerance(k) * (x.abs() @ w.abs())
    info = torch.finfo(torch.float16)
    reference.check(y, expected, info.eps / 2 * (expected.abs() + slack) + info.smallest_normal * info.eps + slack)
