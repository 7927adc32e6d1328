"""The quantiser's kernels on silicon: the same comparison as in test_quantise_emulated.py, with the CPU's bits."""

import math

import pytest
import torch
from quantised import assert_same, boundaries, every_half, random_bits, special, unusual

import blockscale as bs
from blockscale.formats import layouts

pytestmark = pytest.mark.gpu


def on_gpu(value):
    return value.cuda() if isinstance(value, torch.Tensor) else value


def check(x, **options):
    expected = bs.quantize(x, **options)
    found = bs.quantize(x.cuda(), **{name: on_gpu(value) for name, value in options.items()})
    assert found.device.type == "cuda"
    assert_same(found, expected)


@pytest.mark.parametrize("method", ["rtn", "four_over_six", "mse"])
@pytest.mark.parametrize("layout", ["linear", "128x4", "fragment"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_methods_layouts_and_types(dtype, layout, method):
    x = torch.randn(300, 1090, generator=torch.Generator().manual_seed(1)).to(dtype)
    check(x, method=method, layout=layout)
    check(x, method=method, layout=layout, global_scale=0.003)


@pytest.mark.parametrize("method", ["rtn", "four_over_six", "mse"])
@pytest.mark.parametrize("unit", [None, 1.0, 1.2345678, 2.0**-126, 1e35, 2.0**-50, 2.0**50])
def test_random_bits_and_what_is_not_finite(unit, method):
    x = torch.cat((random_bits(4096, 1024), special().repeat(1, 16)))
    check(x, nonfinite="saturate", global_scale=unit, method=method)


@pytest.mark.parametrize("unit", [1.0, 1.2345678, 2.0**-126, 1e35, 2.0**-50, 2.0**50])
def test_every_scale_and_every_boundary_between_codes(unit):
    check(boundaries(unit), global_scale=unit)


@pytest.mark.parametrize("method", ["rtn", "four_over_six", "mse"])
def test_unusual_blocks(method):
    for rows, k in ((300, 2000), (9, 40_000)):
        check(unusual(rows, k).bfloat16(), global_scale=0.01, method=method)
        check(unusual(rows, k), global_scale=0.01, method=method, layout="linear")


def test_more_unusual_blocks_than_a_thread_remembers_one_by_one():
    check(unusual(16, 17_000), norm_weight=torch.ones(17_000), global_scale=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("unit", [None, 1.0, 2.0**-9])
def test_every_number_of_16_bits(dtype, unit):
    check(every_half(dtype), nonfinite="saturate", global_scale=unit)


@pytest.mark.parametrize("m", [1, 5, 32, 127, 128, 129])
@pytest.mark.parametrize("k", [1, 16, 48, 80, 592, 3696, 11008])
def test_padding_is_written_whatever_memory_held(m, k):
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()
    for _ in range(3):
        poison = [torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda") for size in (512, 2**13, 2**17, 2**21)]
        del poison
        check(x)


@pytest.mark.parametrize(("m", "k"), [(1, 64), (5, 64), (129, 80), (128, 11008)])
@pytest.mark.parametrize("layout", ["linear", "128x4"])
def test_nothing_is_written_outside_of_codes_and_scales(m, k, layout, monkeypatch):
    kept = []

    def within(*shape, dtype, device):
        shape = shape if all(isinstance(n, int) for n in shape) else shape[0]
        size = math.prod(shape) * dtype.itemsize
        kept.append((size, torch.full((size + 512,), 0xA5, dtype=torch.uint8, device=device)))
        return kept[-1][1][256 : 256 + size].view(dtype).view(shape)

    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()
    on_cpu, x = bs.quantize(x, layout=layout), x.cuda()
    monkeypatch.setattr(torch, "empty", within)
    found = bs.quantize(x, layout=layout)
    monkeypatch.undo()
    assert_same(found, on_cpu)
    assert len(kept) == 3
    for size, memory in kept:
        assert bool((memory[:256] == 0xA5).all())
        assert bool((memory[256 + size :] == 0xA5).all())


FAULTS = {
    "zero blocks": (torch.tensor([0.5, 0.0, 0.5, 0.0]).repeat_interleave(16).view(2, 32), None),
    "a zero row": (torch.tensor([[1.0], [0.0], [-1.0]]).expand(3, 64), None),
    "tiny blocks": (torch.tensor([1.0, 2e-6, 3e-6, -1e-9]).repeat_interleave(16).view(4, 16), None),
    "ties": (
        torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -6]]),
        1.0,
    ),
    "a quotient and its reciprocal": (torch.tensor([[0.02392577938735485, 6 * 7 / 512] + [0.0] * 14]), 1.0),
    "beyond the global scale": (torch.linspace(-8, 8, 96).view(2, 48), 1 / 2688),
    "signs of zeros": (torch.tensor([[-0.0, 0.0, -1e-6, 1e-6] + [1.0] * 12]), None),
}


@pytest.mark.parametrize("method", ["rtn", "four_over_six", "mse"])
@pytest.mark.parametrize("fault", FAULTS)
def test_numbers_that_were_quantised_wrongly_elsewhere(fault, method):
    x, unit = FAULTS[fault]
    for dtype in (torch.float32, torch.bfloat16):
        check(x.to(dtype), global_scale=unit, method=method)
    assert not bool((bs.quantize(x.cuda(), global_scale=unit).scales.view(torch.uint8) > 0x7E).any())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_rows_beyond_a_mask_change_nothing(value):
    rows = torch.randn(8, 64, 96, generator=torch.Generator().manual_seed(13)).bfloat16().cuda()
    wild = rows.clone()
    wild[:, 1:] = value
    for layout in ("linear", "128x4"):
        clean, found = (bs.quantize(x, global_scale=0.002, layout=layout) for x in (rows, wild))
        assert torch.equal(found.codes[:, 0], clean.codes[:, 0])
        left, right = (t.linear_scales().view(torch.uint8)[:, 0] for t in (found, clean))
        assert torch.equal(left, right)


@pytest.mark.parametrize("padding", [0x7F, 0x7E])
@pytest.mark.parametrize("m", [5, 127])
def test_scales_of_padding_have_no_say_in_values(m, padding):
    q = bs.quantize(torch.randn(m, 512, device="cuda"))
    expected, linear = q.dequantize(), q.with_layout("linear")
    assert_same(linear, bs.quantize(q.dequantize(), global_scale=q.global_scale, layout="linear"))
    rows = layouts.unswizzle(q.scales.view(torch.uint8), 128, 32).clone()
    rows[m:] = padding
    q.scales.view(torch.uint8).copy_(layouts.swizzle(rows))
    assert torch.equal(q.dequantize(), expected)
    assert_same(q.with_layout("linear"), linear)


@pytest.mark.parametrize("shape", [(576, 128), (1, 1), (129, 5), (3, 130, 7)])
def test_scales_are_put_in_order_as_on_the_cpu(shape):
    scales = torch.randint(1, 120, shape, dtype=torch.uint8)
    swizzled = layouts.swizzle(scales.cuda())
    assert swizzled.is_cuda
    assert torch.equal(swizzled.cpu(), layouts.swizzle(scales))
    assert torch.equal(layouts.unswizzle(swizzled, *shape[-2:]).cpu(), scales)


def test_strides():
    x = torch.randn(3, 20, 400, generator=torch.Generator().manual_seed(6)).bfloat16().cuda()
    for view in (x[:, :, 8:208], x[:, :, 1:201], x.mT, x[:, 4:9].transpose(0, 1), x[:1].expand(3, -1, -1), x[:, ::7]):
        assert_same(bs.quantize(view), bs.quantize(view.cpu()))


@pytest.mark.parametrize(
    "sizes", [[0, 5, 130, 1, 0, 30, 4], [170, 0], [0, 0, 2, 1] + [0] * 40, [7] * 300], ids=range(4)
)
def test_groups(sizes):
    x = torch.randn(sum(sizes), 200, generator=torch.Generator().manual_seed(2)).bfloat16()
    check(x, layout="128x4-grouped", group_sizes=torch.tensor(sizes, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_silu_and_rms_norm(dtype):
    x = torch.randn(200, 2208, generator=torch.Generator().manual_seed(3)).mul(4).to(dtype)
    check(x, activation="swiglu")
    check(x, norm_weight=torch.randn(2208, generator=torch.Generator().manual_seed(4)).to(dtype))
    check(x, norm_weight=torch.ones(2208), layout="linear", method="four_over_six")


@pytest.mark.parametrize("unit", [None, 0.01, "tensor"])
def test_captured_in_a_graph(unit):
    """With a dynamic global scale too: nothing waits for the GPU. Replays see new data."""
    x = torch.randn(130, 1024, device="cuda").bfloat16()
    given = torch.tensor(0.02, device="cuda") if unit == "tensor" else unit
    bs.quantize(x, global_scale=given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = bs.quantize(x, global_scale=given)
    for scale in (1.0, 100.0, 1e-3):
        x.copy_(torch.randn(130, 1024) * scale)
        if unit == "tensor":
            given.fill_(scale / 50)
        graph.replay()
        assert_same(q, bs.quantize(x.cpu(), global_scale=given.cpu() if unit == "tensor" else unit))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_nothing_waits_for_the_gpu():
    x = torch.randn(64, 512, device="cuda")
    groups = torch.tensor([60, 4], dtype=torch.int32, device="cuda")
    bs.quantize(x)
    bs.quantize(x, layout="128x4-grouped", group_sizes=groups)
    torch.cuda.set_sync_debug_mode("error")
    try:
        bs.quantize(x)
        bs.quantize(x, global_scale=0.01)
        bs.quantize(x, layout="128x4-grouped", group_sizes=groups)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_device_is_that_of_the_input():
    x = torch.randn(5, 80)
    for default in ("cpu", "meta"):
        with torch.device(default):
            assert_same(bs.quantize(x.cuda()), bs.quantize(x))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own
def test_compiled_is_the_same():
    x = torch.randn(17, 592, device="cuda").bfloat16()

    def steps(x):
        q = bs.quantize(x)
        return q.codes, q.scales.view(torch.uint8), q.global_scale

    for found, expected in zip(torch.compile(steps)(x), steps(x), strict=True):
        assert torch.equal(found, expected)


def test_more_than_32_bits_of_offsets():
    """The last rows of more than 2^31 elements."""
    m, k = 2**15 + 5, 2**16
    if torch.cuda.mem_get_info()[0] < 8 * m * k:
        pytest.skip("not enough memory")
    x = torch.zeros(m, k, dtype=torch.bfloat16, device="cuda")
    x[-3:] = torch.randn(3, k, device="cuda")
    q = bs.quantize(x, global_scale=0.01, layout="linear")
    expected = bs.quantize(x[-3:].cpu(), global_scale=0.01, layout="linear")
    assert torch.equal(q.codes[-3:].cpu(), expected.codes)
    assert torch.equal(q.scales[-3:].view(torch.uint8).cpu(), expected.scales.view(torch.uint8))
    assert not q.codes[:-3].any()
