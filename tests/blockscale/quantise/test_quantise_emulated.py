"""The quantiser's kernels on software GPUs, strict: the bits of the CPU, compared as in test_quantise_gpu.py."""

import re

import pytest
import torch

import blockscale as bs
from blockscale.problem import target_named
from blockscale.quantize import device

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

from quantised import assert_same, boundaries, by_kernel, every_half, gpu, random_bits, special, unusual


def long(*values):
    return pytest.param(*values, marks=pytest.mark.prove)


SCHEDULES = [  # beside "lazy"
    ("random", 1),
    *(long(*case) for case in [("eager", 0), ("fifo", 0), ("random", 2), ("random", 3)]),
]
ODD = torch.randn(3, 1090, generator=torch.Generator().manual_seed(1))


def check(x, arch="sm_90a", launcher=None, **options):
    found = by_kernel(launcher or gpu(arch), x, **options)
    expected = bs.quantize(x, **options)
    assert_same(found, expected)


@pytest.mark.parametrize("arch", ["sm_90a", *map(long, ("sm_100a", "sm_103a", "sm_120a"))])
def test_dynamic_global_scale(arch):
    check(ODD.bfloat16(), arch)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a", long("sm_100a"), long("sm_103a")])
def test_random_bits_and_what_is_not_finite(arch):
    x = torch.cat((random_bits(20, 64), special()))
    check(x, arch, nonfinite="saturate", global_scale=3.3e-3)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_no_order_of_completion_shows(schedule, seed):
    x = ODD.bfloat16()[:, :1088].contiguous()
    check(x, launcher=gpu("sm_90a", schedule, seed), norm_weight=torch.rand(1088) + 0.5)


UNITS = [1.2345678, 2.0**-126, *map(long, (1.0, 1e35, 2.0**-50, 2.0**50))]


@pytest.mark.parametrize("unit", UNITS)
def test_every_scale_and_every_boundary_between_codes(unit):
    """Within the range of the quotients without division, at its ends, and beyond."""
    x = boundaries(unit)
    found = by_kernel(gpu("sm_90a"), x.view(27, -1), global_scale=unit)
    assert_same(found, bs.quantize(x.view(27, -1), global_scale=unit))
    scales = found.linear_scales().view(torch.uint8).view(27, -1)[:, : 378 // 27]
    assert torch.equal(scales.reshape(126, 3), torch.arange(1, 127, dtype=torch.uint8)[:, None].expand(126, 3))


@pytest.mark.prove
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 1.0), (torch.float16, 2.0**-9)])
def test_every_number_of_16_bits(dtype, unit):
    check(every_half(dtype), nonfinite="saturate", global_scale=unit)


@pytest.mark.prove
def test_random_bits_with_their_own_global_scale():
    check(random_bits(12, 512, seed=4), nonfinite="saturate")


@pytest.mark.prove
@pytest.mark.parametrize("method", ["four_over_six", "mse"])
def test_methods_that_compare_errors(method):
    normal = torch.randn(6, 256, generator=torch.Generator().manual_seed(2))
    exact = bs.quantize(normal, global_scale=2.0**-5).dequantize()  # errors of 0, and equal ones
    tiny = normal * 2.0**-70
    x = torch.cat(
        (normal, exact, torch.full((1, 256), 2.5), torch.zeros(1, 256), random_bits(4, 256), special().repeat(1, 4))
    )
    check(x, method=method, global_scale=2.0**-5, nonfinite="saturate")
    check(tiny, method=method, global_scale=2.0**-72)
    check(normal, method=method)


def test_finite_numbers_beyond_what_the_global_scale_holds_keep_their_errors():
    """Outside the range of the quotients without division: infinities alone become 2688 g, NaN 0, before errors are
    compared."""
    x = torch.rand(4, 160, generator=torch.Generator().manual_seed(11)) * 2688 * 2.0**-60
    x[:, ::16] = 10000 * 2.0**-60
    x[2, 1], x[2, 17], x[3, 33] = float("nan"), float("inf"), -float("inf")
    check(x, method="mse", global_scale=2.0**-60, nonfinite="saturate")


@pytest.mark.prove
def test_more_unusual_blocks_than_a_thread_remembers_one_by_one():
    check(unusual(1, 17_000), norm_weight=torch.ones(17_000), global_scale=0.01, layout="linear")


def test_unusual_blocks():
    check(unusual(9, 200).bfloat16(), global_scale=0.01)


SHAPES = [
    ((3, 5, 33), torch.float16, "linear"),
    ((1, 16), torch.bfloat16, "128x4"),
    ((130, 40), torch.float32, "128x4"),
    ((20, 40), torch.float32, "fragment"),
]


@pytest.mark.parametrize(("shape", "dtype", "layout"), SHAPES, ids=range(len(SHAPES)))
def test_shapes_and_batches(shape, dtype, layout):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    check(x, layout=layout, global_scale=0.01)


def test_strides():
    x = torch.randn(3, 9, 144, generator=torch.Generator().manual_seed(6)).bfloat16()
    for view in (x[:, :, 8:72], x[:, :, 1:65], x[:1].mT, x[:, 4:6].transpose(0, 1), x[:, ::7]):
        check(view, global_scale=0.01)


def test_matrices_that_are_evenly_apart_are_not_copied():
    x = torch.randn(3, 20, 64, generator=torch.Generator().manual_seed(6)).bfloat16()
    for view, matrices in ((x, 1), (x[:, 4:9], 3), (x[:, 3:4], 1), (x[:1].expand(3, -1, -1), 3), (x[::2, :, 8:24], 2)):
        rows = device.Rows.of(view)
        assert rows.tensor.data_ptr() == view.data_ptr()
        assert rows.as_one_matrix().matrices == matrices
        check(view, layout="linear")


def test_more_rows_than_kernels_count():
    x = torch.zeros(1, 1).expand(2**30, 2, 1)
    options = {"method": "rtn", "groups": None, "norm_weight": None, "eps": 0.0, "activation": None}
    with pytest.raises(ValueError, match=r"^x: 2147483648 rows, expected fewer than 2\^31"):
        device.quantise(gpu("sm_90a"), x, None, layout="linear", **options)


SIZES = [[0, 5, 130, 1, 0, 30, 4], [0, 0, 2, 1] + [0] * 40, long([170, 0]), long([1] * 9 + [0] * 30)]


@pytest.mark.parametrize("sizes", SIZES, ids=range(len(SIZES)))
def test_groups(sizes):
    rows = sum(sizes)
    x = torch.randn(rows, 80, generator=torch.Generator().manual_seed(rows)).bfloat16()
    groups = torch.tensor(sizes, dtype=torch.int32)
    check(x, layout="128x4-grouped", group_sizes=groups, global_scale=0.01)


def test_sizes_of_groups_that_the_host_did_not_see_touch_nothing_else():
    """What a GPU does with sizes that do not sum to M, or are negative: no row is read or written that is not there."""
    x = torch.randn(40, 64)
    options = {"method": "rtn", "layout": "128x4-grouped", "norm_weight": None, "eps": 0.0, "activation": None}
    for sizes in ([20, 100], [-5, 45], [2**31 - 1, 2**31 - 1], [0, 0]):
        groups = torch.tensor(sizes, dtype=torch.int32)
        device.quantise(gpu("sm_90a"), x, torch.tensor(0.01), groups=groups, **options)
    assert not gpu("sm_90a").findings


@pytest.mark.parametrize(("x_dtype", "layout"), [(torch.bfloat16, "128x4"), long(torch.float32, "linear")])
def test_swiglu(x_dtype, layout):
    x = torch.randn(5, 208, generator=torch.Generator().manual_seed(8)).mul(4).to(x_dtype)
    x[0, :8] = torch.tensor([100.0, -100.0, 88.0, -88.0, 0.0, -0.0, 1e-30, 20.0])
    check(x, activation="swiglu", layout=layout)


@pytest.mark.parametrize("layout", ["linear", long("128x4-grouped")])
def test_rms_norm(layout):
    x = torch.randn(9, 520, generator=torch.Generator().manual_seed(9)).half()
    x[4] = 0
    groups = torch.tensor([4, 0, 5], dtype=torch.int32) if layout == "128x4-grouped" else None
    weight = torch.randn(520, generator=torch.Generator().manual_seed(10)).half()
    check(x, norm_weight=weight, layout=layout, group_sizes=groups, method="four_over_six")
    check(x, norm_weight=weight.float(), eps=0.0, nonfinite="saturate", layout=layout, group_sizes=groups)


def test_what_is_not_finite_is_refused_here_as_on_the_cpu():
    with pytest.raises(ValueError, match=r"^x: nan at \(0, 0\)"):
        by_kernel(gpu("sm_90a"), special())


def test_nothing_to_do():
    for shape in ((0, 64), (0, 3, 64), (3, 0, 64)):
        check(torch.empty(shape))


def test_emulated_and_compiled():
    """The public way in, alone and as an operator of a graph."""
    x = ODD[:4, :64]
    expected = bs.quantize(x)
    with bs.emulated("sm_90a") as active:
        assert_same(bs.quantize(x), expected)
        assert len(active.reports) == 2
        codes, scales, unit = torch.ops.blockscale.quantize(
            x, "rtn", None, None, "128x4", None, "error", None, None, 1e-6
        )
        assert len(active.reports) == 4
    assert torch.equal(codes, expected.codes)
    assert torch.equal(scales, expected.scales.view(torch.uint8))
    assert torch.equal(unit, expected.global_scale)


VARIANTS = [
    device.Variant("amax", "bf16", "rtn", "linear", False, None, None, True),
    device.Variant("codes", "bf16", "rtn", "128x4", True, None, None, True),
    device.Variant("codes", "fp32", "four_over_six", "128x4-grouped", False, "rms_norm", "fp32", False),
    device.Variant("codes", "bf16", "rtn", "128x4", True, "swiglu", None, True),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=range(len(VARIANTS)))
def test_code_rounds_as_ieee_does_and_moves_16_bytes(variant):
    """No instruction that flushes, approximates or may be contracted, but for the reciprocal of short quotients,
    where any is good; no tensor cores."""
    ptx = device.build(target_named("sm_90a"), variant)["ptx"].decode()
    short = variant.stage == "codes" and variant.before is None and variant.dtype != "fp32"
    assert ("rcp.approx.ftz.f32" in ptx) == short
    ptx = ptx.replace("rcp.approx.ftz.f32", "")
    assert not re.findall(r"\.ftz|\.approx|\.full\.f32|\bmma|wgmma|tcgen05", ptx)
    assert not re.findall(r"^\s*(?:add|sub|mul|mad)\.f(?:32|64)", ptx, re.MULTILINE)
    assert ("v4.b32" in ptx) == variant.vectors
    assert ("div.rn.f32" in ptx) == (variant.stage == "codes" or variant.before is not None)
