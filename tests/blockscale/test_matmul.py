"""The matmul backend's arithmetic, on the CPU; on GPUs see test_pytorch_gpu.py."""

import pytest
import torch
from operands import every_code_and_scale

import blockscale as bs
from blockscale import reference
from blockscale.backends import matmul


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_code_times_every_scale_is_exact(dtype):
    t = every_code_and_scale(300, 80)
    exact = reference.dequantize(t) / float(t.global_scale)
    torch.testing.assert_close(matmul.expand(t, dtype).double(), exact, rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("batch", [((), ()), ((3,), ()), ((3,), (3,)), ((), (2,))])
def test_contract(dtype, batch, monkeypatch):
    m, n, k = 5, 70, 200
    monkeypatch.setattr(matmul, "_STRIP", 32 * k)
    x, b = torch.rand(*batch[0], m, k), bs.quantize(torch.rand(*batch[1], n, k))
    a = bs.quantize(x) if dtype is None else x.to(dtype)
    bias, alpha = torch.randn(n), torch.tensor(0.5)
    y = torch.empty(*torch.broadcast_shapes(*batch), m, n, dtype=torch.float32)
    matmul.gemm(a, b, y, alpha=alpha, bias=bias, activation="silu")
    exact = reference.gemm(a, b, alpha=alpha, bias=bias, activation="silu")
    slack = (4 + k / 1024) * 2.0**-20
    kept = {"alpha": alpha, "bias": bias, "out_dtype": torch.float32, "c": slack}
    reference.check(y, exact, reference.tolerance(a, b, exact, **kept))


def test_chosen_by_name_alone_and_only_where_a_gpu_is():
    a = bs.quantize(torch.randn(3, 64))
    if torch.cuda.is_available():
        assert bs.available_backends()["matmul"] is None
    else:
        with pytest.raises(ValueError, match="backend: 'matmul' cannot run here: torch sees no CUDA GPU"):
            bs.gemm(a, a, backend="matmul")
    with pytest.raises(ValueError, match="invariant: True"):
        matmul.gemm(a, a, torch.empty(3, 3), invariant=True)
