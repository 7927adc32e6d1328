"""The dequantiser on a Hopper GPU, and products of NVFP4 activations, graphs and allocations included."""

import pytest
import torch
from operands import every_code_and_scale, same_bits
from weight_only import check, weight

import blockscale as bs
from blockscale import expansion
from blockscale.backends import gpu, matmul, sm90
from blockscale.expansion import expand, width

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


def expanded(t, dtype, rows=None):
    """The result on the GPU, poisoned before."""
    *batch, m, k = t.shape
    m = m if rows is None else rows.stop - rows.start
    out = torch.full((*batch, m, width(k)), torch.nan, dtype=dtype, device="cuda")
    expand(gpu.launcher(sm90.TARGET, out.device), t, out, rows)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", expansion.LAYOUTS)
def test_every_code_times_every_scale(layout, dtype):
    for m, k in ((1, 1), (15, 16), (17, 203), (130, 1000), (300, 4100), (1025, 8192)):
        t = every_code_and_scale(m, k)
        out = expanded(t.with_layout(layout).to("cuda"), dtype).cpu()
        assert same_bits(out[:, :k].float() + 0.0, matmul.values(t, torch.float32) + 0.0)
        assert not out[:, k:].any()


@pytest.mark.parametrize("layout", expansion.LAYOUTS)
def test_batches_and_strips(layout):
    t = bs.quantize(torch.randn(2, 3, 150, 203)).with_layout(layout)
    assert torch.equal(expanded(t.to("cuda"), torch.float16)[..., :203].cpu(), matmul.values(t, torch.float16))
    one = every_code_and_scale(400, 203).with_layout(layout)
    strip = expanded(one.to("cuda"), torch.bfloat16, slice(128, 400)).cpu()
    assert torch.equal(strip[:, :203], matmul.values(one, torch.bfloat16)[128:])


@pytest.mark.parametrize("layout", expansion.LAYOUTS)
def test_a_scale_that_is_nan(layout):
    t = every_code_and_scale(200, 256, "linear").to("cuda")
    t.scales.view(torch.uint8)[123, 7] = 0x7F
    nan = expanded(t.with_layout(layout), torch.bfloat16).isnan()
    assert nan[123, 112:128].all()
    assert nan.sum() == 16


def nvfp4(m, k, layout="128x4", seed=0):
    """Activations, and their values in float64."""
    t = bs.quantize(torch.rand(m, k, generator=torch.Generator().manual_seed(seed)), layout=layout)
    return t.to("cuda"), t.dequantize().double().cuda()


@pytest.mark.parametrize("m", [1, 3, 17, 64, 130, 300])
def test_nvfp4_activations(m):
    w, values = weight(1000, 4100, positive=True)
    for layout in ("128x4", "linear"):
        a, x = nvfp4(m, 4100, layout)
        out = torch.full((m, 1000), torch.nan, device="cuda", dtype=torch.bfloat16)
        for _ in range(2):
            out.fill_(torch.nan)
            check(bs.gemm(a, w, out=out), x, values)


@pytest.mark.parametrize("alpha", [-0.3, torch.tensor(-0.3)])
def test_alpha_bias_and_activation(alpha):
    alpha = alpha.to("cuda") if isinstance(alpha, torch.Tensor) else alpha
    w, values = weight(1000, 2080, unit=1 / 3000)
    a, x = nvfp4(70, 2080)
    bias = torch.randn(1000, device="cuda")
    y = bs.gemm(a, w, alpha=alpha, bias=bias, activation="silu", out_dtype=torch.float32)
    check(y, x, values, alpha=float(alpha), bias=bias, activation="silu")


def test_captured_in_a_graph_and_nothing_allocated():
    w, values = weight(1000, 4096, positive=True)
    a, x = nvfp4(33, 4096)
    out = torch.empty(33, 1000, device="cuda", dtype=torch.bfloat16)
    for _ in range(2):
        bs.gemm(a, w, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    for _ in range(5):
        bs.gemm(a, w, out=out)
    assert torch.cuda.memory_stats()["num_device_alloc"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bs.gemm(a, w, out=out)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        check(out, x, values)


def test_weights_written_just_before():
    """The product reads weights while the dequantiser runs, but not while they are written."""
    w, values = weight(4096, 8192, positive=True)
    other, _ = weight(4096, 8192, positive=True, seed=1)
    a, x = nvfp4(64, 8192)
    out = torch.empty(64, 4096, device="cuda", dtype=torch.bfloat16)
    right = w.codes.clone()
    for _ in range(20):
        w.codes.copy_(other.codes)
        bs.gemm(a, w, out=out)
        w.codes.copy_(right)
        bs.gemm(a, w, out=out)
        check(out, x, values)
