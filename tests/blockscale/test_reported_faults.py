"""Faults that users of other NVFP4 libraries met, on the CPU and by the emulated B200 kernel: stale padding, layouts
that are confused, groups that leak into one another, epilogues that scale too late."""

import math

import pytest
import torch
from operands import bits, every_code_and_scale, quantize_on_cpu, same_bits

import blockscale as bs
from blockscale import reference
from blockscale.formats import layouts
from blockscale.formats.layouts import round_up


@pytest.fixture(params=["cpu", "sm100"])
def device(request):
    """Where products run; its value is the contract's c as a function of K."""
    if request.param == "cpu":
        yield lambda k: reference.CPU_TOLERANCE
    else:
        pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
        with bs.emulated("sm_100a", sms=8):
            yield reference.tensor_core_tolerance


def check(y, a, b, c, **options):
    exact = reference.gemm(a, b, **options)
    given = {name: value for name, value in options.items() if name != "activation"}
    reference.check(y, exact, reference.tolerance(a, b, exact, out_dtype=y.dtype, c=c(a.shape[-1]), **given))


def stale(t, byte):
    """The same tensor, whose scales of rows that do not exist are `byte`."""
    rows, columns = t.shape[-2], t.scales.shape[-1]
    exists = layouts.swizzle(torch.ones(rows, columns, dtype=torch.uint8)).bool()
    scales = torch.where(exists, t.scales.view(torch.uint8), byte).view(torch.float8_e4m3fn)
    return bs.NVFP4Tensor(t.codes, scales, t.global_scale, t.layout, t.shape)


@pytest.mark.parametrize("byte", [0x7F, 0x7E])
def test_scales_of_padding_rows_are_never_used(device, byte):
    a, b = every_code_and_scale(5, 512), every_code_and_scale(72, 512, seed=1)
    clean = bs.gemm(a, b, out_dtype=torch.float32)
    assert same_bits(bs.gemm(stale(a, byte), stale(b, byte), out_dtype=torch.float32), clean)
    assert not clean.isnan().any()


@pytest.mark.parametrize("m", [1, 5, 127, 129])
@pytest.mark.parametrize("k", [16, 48, 80])
def test_padding_is_written_though_memory_was_used_before(m, k):
    """Blocks of the sizes that follow are filled and freed first."""
    junk = [torch.full((round_up(m, 128), round_up(-(-k // 16), 4)), 0x7F, dtype=torch.uint8) for _ in range(8)]
    del junk
    t = quantize_on_cpu(torch.randn(m, k))
    exists = layouts.swizzle(torch.ones(m, -(-k // 16), dtype=torch.uint8)).bool()
    assert not t.scales.view(torch.uint8)[~exists].any()


@pytest.mark.parametrize("k", [592, 3696])
def test_a_number_of_blocks_that_is_no_multiple_of_four(device, k):
    a, b = quantize_on_cpu(torch.randn(17, k)), quantize_on_cpu(torch.randn(24, k))
    check(bs.gemm(a, b, out_dtype=torch.float32), a, b, device)


@pytest.mark.parametrize(
    ("shape", "padded"), [((576, 128), (640, 128)), ((1, 1), (128, 4)), ((3, 130, 7), (3, 256, 8))]
)
def test_sizes_of_swizzled_scales(shape, padded):
    scales = torch.randint(1, 120, shape, dtype=torch.uint8)
    swizzled = layouts.swizzle(scales)
    assert swizzled.shape == padded
    assert torch.equal(layouts.unswizzle(swizzled, *shape[-2:]), scales)
    assert int(swizzled.count_nonzero()) == scales.numel()


@pytest.mark.parametrize("inner", [96, 160])
def test_gate_and_up_are_split_where_they_end(device, inner):
    """Not at half of the padded size."""
    x = quantize_on_cpu(torch.randn(3, 64))
    gate, up = torch.ones(inner, 64), torch.full((inner, 64), 2.0)
    y = bs.gemm(x, quantize_on_cpu(torch.cat((up, gate))), out_dtype=torch.float32)
    torch.testing.assert_close(y[:, :inner], 2 * y[:, inner:], rtol=1e-5, atol=1e-6)


def test_a_layout_is_not_applied_twice_nor_guessed(device):
    t = every_code_and_scale(128, 64)
    assert t.with_layout("128x4") is t
    linear = t.with_layout("linear")
    b = every_code_and_scale(16, 64, seed=1)
    assert linear.scales.numel() == t.scales.numel()  # so that a size would not tell
    assert same_bits(bs.gemm(linear, b), bs.gemm(t, b))


@pytest.mark.parametrize("m", [1, 5, 32, 127, 128, 129])
def test_nothing_is_written_behind_a_result(device, m):
    a, b = every_code_and_scale(m, 64), every_code_and_scale(40, 64, seed=1)
    memory = torch.full((m * 40 + 512,), math.nan, dtype=torch.bfloat16)
    out = memory[256 : 256 + m * 40].view(m, 40)
    bs.gemm(a, b, out=out)
    assert memory[:256].isnan().all()
    assert memory[256 + m * 40 :].isnan().all()
    check(out, a, b, device)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
def test_rows_beyond_a_mask_change_nothing(value):
    rows = torch.randn(8, 64, 48)
    wild = rows.clone()
    wild[:, 1:] = value
    for e in range(8):
        assert same_bits(quantize_on_cpu(wild[e, :1]).codes, quantize_on_cpu(rows[e, :1]).codes)


def test_a_default_device_changes_nothing():
    t = every_code_and_scale(5, 64, layout="linear")
    with torch.device("meta"):
        swizzled = t.with_layout("128x4")
    assert swizzled.scales.device.type == "cpu"
    assert same_bits(swizzled.scales, t.with_layout("128x4").scales)


@pytest.mark.parametrize("k", [16, 64, 128])
def test_a_row_of_scales_shorter_than_a_copy(device, k):
    a, b = every_code_and_scale(128, k), every_code_and_scale(128, k, seed=1)
    check(bs.gemm(a, b, out_dtype=torch.float32), a, b, device)


GROUPS, N, K = 5, 24, 64


def experts(seed=7):
    return quantize_on_cpu(torch.randn(GROUPS, N, K, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("counts", [(2, 3, 0, 0, 1), (0, 0, 0, 0, 5), (0, 0, 0, 0, 0)])
def test_masked_groups_of_any_size_in_turn(device, counts):
    a, b = quantize_on_cpu(torch.randn(GROUPS, 6, K)), experts()
    out = torch.full((GROUPS, 6, N), 7.0, dtype=torch.bfloat16)
    bs.grouped_gemm(a, b, masked_m=torch.tensor(counts, dtype=torch.int32), out=out)
    for e, count in enumerate(counts):
        assert torch.equal(out[e, count:], torch.full((6 - count, N), 7.0, dtype=torch.bfloat16))
        if count:
            check(out[e, :count], a[e, :count], b[e], device)


def test_one_experts_scale_changes_no_other_expert(device):
    a, b = quantize_on_cpu(torch.randn(GROUPS, 4, K)), experts()
    mask = torch.full((GROUPS,), 4, dtype=torch.int32)
    before = bs.grouped_gemm(a, b, masked_m=mask)
    for byte in (0x38, 0x40):
        scales = b.scales.view(torch.uint8).clone()
        scales[0].fill_(byte)
        changed = bs.NVFP4Tensor(b.codes, scales.view(torch.float8_e4m3fn), b.global_scale, b.layout, b.shape)
        after = bs.grouped_gemm(a, changed, masked_m=mask)
        assert same_bits(after[1:], before[1:])
        assert not torch.equal(after[0], before[0])


@pytest.mark.parametrize(
    "sizes", [(0, 5, 0, 3, 0), (4, 4, 0, 0, 0), (1, 7, 0, 0, 0), (127, 1, 129, 0, 0), (0, 0, 0, 0, 0)]
)
def test_groups_start_where_their_sizes_say(device, sizes):
    """Empty ones too; no two splits of the same total are confused."""
    a, b = quantize_on_cpu(torch.randn(sum(sizes), K), global_scale=0.01), experts()
    y = bs.grouped_gemm(a, b, group_sizes=torch.tensor(sizes, dtype=torch.int32), out_dtype=torch.float32)
    assert y.shape == (sum(sizes), N)
    start = 0
    for e, size in enumerate(sizes):
        if size:
            part = a.with_layout("linear")[start : start + size]
            check(y[start : start + size], part, b[e], device)
        start += size


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_alpha_comes_before_the_cast(device, dtype):
    """The sum is 3e10, far beyond fp16, and the result 3e4."""
    codes = torch.full((2, 2048), 0x77, dtype=torch.uint8)
    scales = torch.full((2, 256), 448.0).to(torch.float8_e4m3fn)
    t = bs.NVFP4Tensor.from_parts(codes, scales, layout="linear")
    y = bs.gemm(t, t, alpha=1e-6, out_dtype=dtype)
    assert y.isfinite().all()
    check(y, t, t, device, alpha=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bias_is_not_scaled(device, dtype):
    a, b = quantize_on_cpu(torch.randn(9, 80)), quantize_on_cpu(torch.randn(24, 80))
    bias = torch.full((24,), 100.0)
    y = bs.gemm(a, b, alpha=0.01, bias=bias, out_dtype=dtype)
    check(y, a, b, device, alpha=0.01, bias=bias)
    assert len(bits(y)) == 9 * 24 * dtype.itemsize
