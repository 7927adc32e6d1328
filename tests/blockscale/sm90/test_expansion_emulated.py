"""The dequantiser on the software GPU, and products of NVFP4 activations that begin with it."""

import pytest
import torch
from operands import every_code_and_scale, quantize_on_cpu, same_bits

import blockscale as bs
from blockscale import expansion, reference
from blockscale.backends import matmul, sm90
from blockscale.expansion import Factors, expand, width
from blockscale.kernels.waits import before_the_wait
from blockscale.problem import target_named
from blockscale.store import default_store

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


def expanded(t, dtype, arch="sm_90a", rows=None, **how):
    """The result, poisoned before."""
    *batch, m, k = t.shape
    m = m if rows is None else rows.stop - rows.start
    out = torch.full((*batch, m, width(k)), torch.nan, dtype=dtype)
    with bs.emulated(arch, **how) as gpu:
        expand(gpu, t, out, rows)
    assert gpu.findings == []
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", expansion.LAYOUTS)
def test_every_code_times_every_scale_is_exact(layout, dtype):
    t = every_code_and_scale(49, 328)
    out = expanded(t.with_layout(layout), dtype)
    assert same_bits(out.float() + 0.0, matmul.values(t, torch.float32) + 0.0)  # -0.0 + 0.0 is 0.0


@pytest.mark.parametrize(
    ("layout", "shape"), [("linear", (2, 3, 1, 17)), ("128x4", (2, 131, 72)), ("fragment", (2, 17, 203))]
)
def test_batches_and_odd_sizes(layout, shape):
    t = quantize_on_cpu(torch.randn(shape)).with_layout(layout)
    out = expanded(t, torch.bfloat16)
    assert torch.equal(out[..., : shape[-1]], matmul.values(t, torch.bfloat16))
    assert not out[..., shape[-1] :].any()


@pytest.mark.parametrize(("layout", "start"), [("linear", 3), ("128x4", 128), ("fragment", 32)])
def test_strips_of_rows(layout, start):
    t = every_code_and_scale(start + 30, 64)
    out = expanded(t.with_layout(layout), torch.float16, rows=slice(start, start + 20))
    assert start % expansion.strip_rows(layout) == 0
    assert torch.equal(out, matmul.values(t, torch.float16)[start : start + 20])


@pytest.mark.parametrize("layout", expansion.LAYOUTS)
def test_a_scale_that_is_nan_gives_nan(layout):
    t = every_code_and_scale(16, 64)
    raw = t.with_layout("linear").scales.view(torch.uint8).clone()
    raw[3, 2] = 0x7F
    parts = t.codes, raw.view(torch.float8_e4m3fn)
    bad = bs.NVFP4Tensor.from_parts(*parts, layout="linear", check_values=False).with_layout(layout)
    nan = expanded(bad, torch.bfloat16).isnan()
    assert nan[3, 32:48].all()
    assert nan.sum() == 16


@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_other_architectures_take_the_same_text(arch):
    t = every_code_and_scale(5, 64)
    assert torch.equal(expanded(t, torch.bfloat16, arch), matmul.values(t, torch.bfloat16))


@pytest.mark.parametrize(
    ("unit", "other", "alpha", "factor"),
    [(0.3, 7.0, -1.7, 2.5), (2.0**-126, 2.0**-90, 1.7, 0.1), (1e-40, 3e38, 0.3, 1.0)],
)
def test_factors_are_multiplied_on_the_side(unit, other, alpha, factor):
    numbers = [torch.tensor(x) for x in (unit, other, alpha)]
    total, t = torch.full((2,), torch.nan), every_code_and_scale(3, 64)
    with bs.emulated("sm_90a") as gpu:
        expand(gpu, t, torch.empty(3, 64, dtype=torch.bfloat16), factors=Factors(*numbers, factor, total))
    exact = factor
    for x in numbers:
        exact *= float(x)
    assert abs(float(total[0]) * float(total[1]) - exact) <= 2.0**-24 * abs(exact)


@pytest.mark.parametrize("layout", ["128x4", "fragment"])
@pytest.mark.parametrize("unit", [0.3, 2.0**-120, 2.0**70])
def test_factors_are_folded(unit, layout):
    number = torch.tensor(unit)
    total, t = torch.full((2,), torch.nan), every_code_and_scale(20, 72)
    out = torch.empty(20, 72, dtype=torch.bfloat16)
    with bs.emulated("sm_90a") as gpu:
        expand(
            gpu, t.with_layout(layout), out, factors=Factors(number, number, torch.tensor(1.0), 1.0, total, folded=True)
        )
    exact = matmul.values(t, torch.float32).double() * float(number) ** 2
    assert total[1] == 0
    assert ((out.double() * float(total[0]) - exact).abs() <= 2.0**-24 * exact.abs()).all()


def test_nothing_is_touched_before_the_wait():
    for variant in expansion.variants():
        if variant.dtype == "bf16":
            kernel = expansion.artefact(target_named("sm_90a"), variant, default_store())
            assert before_the_wait(kernel.parts["ptx"].read_text()) == []


@pytest.mark.parametrize(
    ("m", "layout", "options"),
    [
        (1, "128x4", {}),
        (5, "linear", {"alpha": 0.3, "bias": True, "activation": "silu"}),
        (5, "128x4", {"alpha": torch.tensor(-0.3), "bias": True, "invariant": True}),
    ],
)
def test_nvfp4_activations(m, layout, options):
    n, k = 20, 203
    a, w = quantize_on_cpu(torch.rand(m, k), layout=layout), every_code_and_scale(n, k, positive=True)
    bias = {"bias": torch.randn(n)} if options.get("bias") else {}
    options = {**options, **bias}
    out = torch.full((m, n), torch.nan)
    with bs.emulated("sm_90a") as gpu:
        for _ in range(2):  # the second time by what the first one found out
            out.fill_(torch.nan)
            bs.gemm(a, w.with_layout("fragment"), out=out, out_dtype=torch.float32, **options)
    assert len(gpu.reports) == 4
    assert gpu.findings == []
    options.pop("invariant", None)
    exact = reference.gemm(a, w, **options)
    options.pop("activation", None)
    kept = {"out_dtype": torch.float32, "c": reference.tensor_core_tolerance(k)}
    reference.check(out, exact, reference.tolerance(a, w, exact, **options, **kept))


@pytest.mark.parametrize(("layout", "launches"), [("linear", 4), ("128x4", 2), ("fragment", 3)])
def test_weights_are_expanded_in_strips(layout, launches, monkeypatch):
    n, k = 140, 72
    monkeypatch.setattr(matmul, "STRIP", 64 * k)
    x, w = torch.rand(5, k), every_code_and_scale(n, k, layout, positive=True)
    a = quantize_on_cpu(x) if layout == "linear" else x.half()
    bias, out = torch.randn(n).half(), torch.full((5, n), torch.nan, dtype=torch.float16)
    with bs.emulated("sm_90a") as gpu:
        sm90.gemm(a, w, out, alpha=1e-3, bias=bias, activation="relu")
    assert len(gpu.reports) == launches
    exact = reference.gemm(a, w, alpha=1e-3, bias=bias, activation="relu")
    kept = {"alpha": 1e-3, "bias": bias, "out_dtype": out.dtype, "c": reference.tensor_core_tolerance(k)}
    reference.check(out, exact, reference.tolerance(a, w, exact, **kept))


def test_a_weight_for_each_matrix():
    x, w = torch.rand(2, 5, 72).bfloat16(), quantize_on_cpu(torch.rand(2, 20, 72))
    out = torch.full((2, 20, 5), torch.nan).mT  # which no product can be written to
    with bs.emulated("sm_90a"):
        sm90.gemm(x, w.with_layout("fragment"), out)
    exact = reference.gemm(x, w)
    kept = {"out_dtype": out.dtype, "c": reference.tensor_core_tolerance(72)}
    reference.check(out, exact, reference.tolerance(x, w, exact, **kept))


@pytest.mark.parametrize(("dtype", "k", "parts"), [(torch.bfloat16, 4096, 3), (torch.float16, 8192, 5)])
def test_sums_in_fp32_are_cut_for_the_contract(dtype, k, parts):
    found = matmul._parts(k, dtype)
    assert len(found) == parts
    assert [part.start for part in found] == [0, *(part.stop for part in found[:-1])]
    assert found[-1].stop == k
