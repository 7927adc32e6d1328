"""The sm90 backend's arithmetic, on the CPU; on GPUs see test_pytorch_gpu.py."""

import pytest
import torch
from operands import every_code_and_scale

import blockscale as bs
from blockscale import reference
from blockscale.backends import matmul, sm90


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_code_times_every_scale_is_exact(dtype):
    t = every_code_and_scale(300, 80)
    exact = reference.dequantize(t) / float(t.global_scale)
    torch.testing.assert_close(matmul.values(t, dtype).double(), exact, rtol=1e-15, atol=0)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("batch", [((), ()), ((3,), ()), ((3,), (3,)), ((), (2,))])
def test_contract(dtype, batch, monkeypatch):
    m, n, k = 5, 70, 200
    monkeypatch.setattr(matmul, "STRIP", 32 * k)
    x, b = torch.rand(*batch[0], m, k), bs.quantize(torch.rand(*batch[1], n, k))
    a = bs.quantize(x) if dtype is None else x.to(dtype)
    bias, alpha = torch.randn(n), torch.tensor(0.5)
    y = torch.empty(*torch.broadcast_shapes(*batch), m, n, dtype=torch.float32)
    sm90.gemm(a, b, y, alpha=alpha, bias=bias, activation="silu")
    exact = reference.gemm(a, b, alpha=alpha, bias=bias, activation="silu")
    slack = (4 + k / 1024) * 2.0**-20
    kept = {"alpha": alpha, "bias": bias, "out_dtype": torch.float32, "c": slack}
    reference.check(y, exact, reference.tolerance(a, b, exact, **kept))


def test_only_where_a_gpu_is():
    a = bs.quantize(torch.randn(3, 64))
    if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0):
        assert bs.available_backends()["sm90"] is None
    else:
        with pytest.raises(ValueError, match="backend: 'sm90' cannot run here: "):
            bs.gemm(a, a, backend="sm90")
    with pytest.raises(ValueError, match="invariant: True"):
        sm90.gemm(a, a, torch.empty(3, 3), invariant=True)
