"""The dequantiser on a Hopper GPU, and products of NVFP4 activations, graphs and allocations included."""

import dataclasses

import pytest
import torch
from operands import every_code_and_scale, same_bits
from weight_only import DTYPES, check, weight

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


@pytest.mark.parametrize("layout", expansion.LAYOUTS)
@pytest.mark.parametrize(("a", "out"), [("bf16", "fp32"), ("fp16", "fp32"), ("bf16", "bf16"), ("fp16", "bf16")])
def test_cublas_in_parts_of_k_keeps_the_contract(layout, a, out):
    for m, k in ((1030, 4100), (64, 8192), (2048, 8192)):
        w, values = weight(1000, k, positive=True)
        x = torch.rand(m, k, device="cuda").to(DTYPES[a])
        y = torch.full((m, 1000), torch.nan, dtype=DTYPES[out], device="cuda")
        matmul.product(x, w.with_layout(layout), y, target=sm90.TARGET)
        check(y, x, values)


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize(("out", "bias"), [("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "fp16"), ("fp16", None)])
@pytest.mark.parametrize("strip", [0, 256])
def test_endings_of_what_goes_to_cublas(out, bias, activation, strip):
    w, values = weight(1000, 2080, unit=1 / 3000)
    row = None if bias is None else torch.randn(1000, device="cuda").to(DTYPES[bias])
    alpha = torch.tensor(-0.5, device="cuda")
    ends = {"alpha": alpha, "bias": row, "activation": activation}
    x = torch.randn(300, 2080, device="cuda").bfloat16()
    y = torch.full((300, 1000), torch.nan, dtype=DTYPES[out], device="cuda")
    matmul.product(x, w.with_layout("128x4"), y, target=sm90.TARGET, strip=strip, **ends)
    check(y, x, values, alpha=-0.5, bias=row, activation=activation)


@pytest.mark.parametrize("unit", [2.0**-126, 2.0**60])
def test_global_scales_whose_product_is_no_fp32(unit):
    """Beside an alpha that brings the result back."""
    scale = torch.tensor(unit, device="cuda")
    w, values = weight(300, 512)
    w = dataclasses.replace(w, global_scale=scale)
    a, x = nvfp4(70, 512)
    a = dataclasses.replace(a, global_scale=scale)
    x = matmul.values(a, torch.float32).double()
    values = values * 2.0**6 * unit  # `weight` has a global scale of 2^-6
    alpha = torch.tensor(2.0**120 if unit < 1 else 2.0**-126, device="cuda")
    y = bs.gemm(a, w, alpha=alpha, out_dtype=torch.float32)
    check(y, x * unit, values, alpha=float(alpha))
    matmul.product(a, w.with_layout("128x4"), y.fill_(torch.nan), target=sm90.TARGET, alpha=alpha)
    check(y, x * unit, values, alpha=float(alpha))
