"""The quantiser against the scalar reference, bit for bit, and the faults that quantisers are known for."""

import numpy as np
import pytest
import torch
from operands import POISON, bits, same_bits, same_tensor

import blockscale as bs
from blockscale import reference
from blockscale.formats import packing
from blockscale.quantize import METHODS

SMALLEST_NORMAL = 2.0**-126


def _codes(q):
    return packing.unpack(q.codes)[..., : q.shape[-1]]


def _bytes(q):
    return q.with_layout("linear").scales.view(torch.uint8)


def _wild(rows, k, scale=1.0, seed=0):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=random) * torch.exp(3 * torch.randn(rows, k, generator=random)) * scale
    return x.clamp(-3e38, 3e38)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e30, 1e-38, 1e-44])
@pytest.mark.parametrize("global_scale", [None, 0.01])
def test_bits_equal_the_scalar_reference(method, scale, global_scale):
    x = _wild(9, 100, scale)
    x[3] = 0
    x[4, 16:32] = 0
    x[5, 7] = -0.0
    codes, scales, unit = reference.quantize(x, method, global_scale)
    q = bs.quantize(x, method=method, global_scale=global_scale, layout="linear")
    assert q.global_scale.numpy() == unit
    assert np.array_equal(_bytes(q)[:, : scales.shape[1]].numpy(), scales)
    assert np.array_equal(_codes(q).numpy(), codes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS)
def test_half_precision_input_is_its_fp32_value(dtype, method):
    x = torch.randn(7, 80).to(dtype)
    assert same_tensor(bs.quantize(x, method=method), bs.quantize(x.float(), method=method))


@pytest.fixture
def poisoned_memory():
    """New tensors are full of NaN: torch fills them so that reads of memory that was never written show."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(64).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("k", [1, 15, 16, 17, 48, 63, 64, 65, 100, 592, 11008])
@pytest.mark.parametrize("rows", [1, 5, 32, 127, 128, 129])
def test_padding_is_written_with_zeros(rows, k, poisoned_memory):
    q = bs.quantize(torch.ones(rows, k))
    codes = packing.unpack(q.codes)
    assert q.codes.shape == (rows, -(-k // 64) * 32)
    assert q.scales.shape == (-(-rows // 128) * 128, -(-k // 64) * 4)
    assert (codes[:, :k] == 7).all()
    assert not codes[:, k:].any()
    everything = bs.formats.layouts.unswizzle(q.scales, *q.scales.shape).view(torch.uint8)
    assert (everything[:rows, : -(-k // 16)] == 0x7E).all()
    assert not everything[rows:].any()
    assert not everything[:, -(-k // 16) :].any()


def test_bits_do_not_depend_on_batch_strides_or_threads():
    big = torch.randn(6, 40, 200)
    whole = bs.quantize(big, global_scale=0.01, layout="linear")
    for i in range(6):
        assert same_bits(whole[i].codes, bs.quantize(big[i], global_scale=0.01, layout="linear").codes)
    wide = torch.randn(40, 400)
    views = [wide[:, :200], wide[:, 200:], wide.t()[:40, :40].t(), wide[::2], wide[:, ::2], wide[:1].expand(40, 400)]
    views += [big.transpose(0, 1), big[:, ::3], big.permute(2, 0, 1), big[0][:, None].expand(40, 3, 200)]
    for method in METHODS:
        for view in views:
            assert same_tensor(bs.quantize(view, method=method), bs.quantize(view.contiguous(), method=method))
    large = torch.randn(700, 1024)
    one = bs.quantize(large, method="mse")
    torch.set_num_threads(2)
    assert same_tensor(one, bs.quantize(large, method="mse"))


@pytest.mark.parametrize("method", METHODS)
def test_wide_rows_are_cut_into_pieces(method):
    x = torch.randn(3, (1 << 18) + 100)
    whole = bs.quantize(x, method=method, layout="linear")
    k = 1 << 17
    for columns in (slice(0, k), slice(k, 2 * k), slice(2 * k, None)):
        part = bs.quantize(x[:, columns], method=method, global_scale=whole.global_scale, layout="linear")
        assert same_tensor(part, whole[:, columns])


def test_a_block_depends_on_its_own_values_alone():
    x = torch.randn(20, 160)
    for method in METHODS:
        whole = bs.quantize(x, method=method, global_scale=0.004, layout="linear")
        part = bs.quantize(x[3:11, 32:112], method=method, global_scale=0.004, layout="linear")
        assert same_bits(_codes(whole)[3:11, 32:112], _codes(part))
        assert same_bits(_bytes(whole)[3:11, 2:7], _bytes(part)[:, :5])


def test_input_is_left_alone():
    x = torch.tensor([[1.0, float("inf"), float("nan"), -2.0]])
    before = bits(x).clone()
    bs.quantize(x, nonfinite="saturate")
    assert torch.equal(bits(x), before)


class TestGlobalScale:
    def test_dynamic_is_amax_over_2688_by_ieee_division(self):
        x = torch.tensor([[0.1, -7.3, 2.0]])
        assert bs.quantize(x).global_scale.numpy() == np.float32(7.3) / np.float32(2688)
        assert bs.quantize(x, method="four_over_six").global_scale.numpy() == np.float32(7.3) / np.float32(1536)

    def test_all_zero_gives_one_and_tiny_gives_the_smallest_normal(self):
        assert bs.quantize(torch.zeros(2, 16)).global_scale == 1
        assert bs.quantize(torch.full((1, 16), 1e-44)).global_scale == SMALLEST_NORMAL

    def test_the_largest_finite_number_stays_finite(self):
        x = torch.full((1, 16), torch.finfo(torch.float32).max)
        for method in METHODS:
            assert torch.isfinite(bs.quantize(x, method=method).dequantize()).all()

    def test_given_as_float_or_tensor_and_values_beyond_it_saturate(self):
        x = torch.full((1, 16), 8.0)
        q = bs.quantize(x, global_scale=1 / 2688)
        assert same_tensor(q, bs.quantize(x, global_scale=torch.tensor(1 / 2688)))
        assert _bytes(q)[0, 0] == 0x7E
        torch.testing.assert_close(q.dequantize(), torch.full((1, 16), 1.0))

    @pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 2.0**-127, 1e39])
    def test_what_cannot_divide_is_refused(self, bad):
        with pytest.raises(ValueError, match=r"global_scale: .*, expected a multiplier from 2\^-126 to 7\.596e\+35"):
            bs.quantize(torch.ones(1, 16), global_scale=bad)

    def test_wrong_tensor_is_refused(self):
        for bad in (torch.ones(2), torch.ones((), dtype=torch.float64)):
            with pytest.raises(ValueError, match=r"global_scale: .*one fp32 element"):
                bs.quantize(torch.ones(1, 16), global_scale=bad)


class TestKnownFaults:
    def test_zero_block_is_exactly_zero_with_no_nan_scale(self):
        x = torch.full((4, 64), 0.5)
        x[1] = 0
        x[2, 16:32] = 0
        for method in METHODS:
            q = bs.quantize(x, method=method)
            assert not (q.scales.view(torch.uint8) >= POISON).any()
            assert torch.equal(q.dequantize()[1], torch.zeros(64))
            assert torch.equal(q.dequantize()[2, 16:32], torch.zeros(16))

    def test_tiny_blocks_vanish_or_take_the_smallest_scale(self):
        x = torch.zeros(3, 16)
        x[0], x[1, 0], x[2, 0] = 1.0, 2.0e-6, 3.0e-6
        q = bs.quantize(x, layout="linear")
        assert _bytes(q)[:, 0].tolist() == [0x7E, 0x00, 0x01]
        assert not q.codes[1].any()
        restored = q.dequantize()
        assert torch.isfinite(restored).all()
        assert restored[2, 0] > 0

    def test_vanished_block_has_no_signed_zero_codes(self):
        x = torch.full((2, 16), -1e-9)
        x[0] = -1.0
        assert not bs.quantize(x).codes[1].any()

    def test_sign_of_zero_and_of_tiny_values_is_kept(self):
        x = torch.tensor([[-0.0, 0.0, -1e-6, 1e-6] + [1.0] * 12])
        assert _codes(bs.quantize(x))[0, :4].tolist() == [8, 0, 8, 0]

    def test_quotient_is_divided_not_multiplied_by_a_reciprocal(self):
        """Scale byte 0x07: the quotient is a hair under the midpoint of codes 3 and 4; a reciprocal lands on it."""
        d = np.float32(reference.E4M3[7])
        v = np.float32(0.02392577938735485)
        assert float(v / d) < 1.75 <= float(v * (np.float32(1) / d))
        codes = torch.from_numpy(np.array([v / d])).float()
        assert bs.formats.e2m1.encode(codes).item() == 3
        x = torch.zeros(1, 16)
        x[0, 0], x[0, 1] = float(v), float(6 * d)
        q = bs.quantize(x, global_scale=1.0, layout="linear")
        assert _bytes(q)[0, 0] == 7
        assert _codes(q)[0, 0] == 3

    def test_ties_of_scale_one(self):
        x = torch.tensor(
            [[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6]]
        )
        q = bs.quantize(x, global_scale=1.0)
        assert q.dequantize()[0].tolist() == [0, 1, 1, 2, 2, 4, 4, 6, -0.0, -1, -1, -2, -2, -4, -4, -6]

    def test_requantising_gives_the_same_bits(self):
        """For fp32, the same global scale, and block scales of at least 2^-6."""
        x = torch.randn(64, 256) * torch.exp(torch.randn(64, 16).repeat_interleave(16, dim=1))
        for seed_scale in (1.0, 3e-5, 7e7):
            q = bs.quantize(x * seed_scale, layout="linear")
            scales = _bytes(q)
            assert (scales >= 0x08).all()  # 2^-6
            again = bs.quantize(q.dequantize(), global_scale=q.global_scale, layout="linear")
            assert same_tensor(q, again)

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("unit", [1.0, 3e-5, 7e7])
    def test_requantising_every_scale_of_at_least_2_to_the_minus_6(self, method, unit):
        scales = torch.arange(0x08, 0x7F, dtype=torch.uint8)[:, None]
        codes = torch.randint(0, 256, (len(scales), 32), dtype=torch.uint8)
        codes[:, ::8] = 0x07  # each block reaches the largest code, or a smaller scale would do
        q = bs.NVFP4Tensor.from_parts(codes, scales.repeat(1, 4).view(torch.float8_e4m3fn), unit, layout="linear")
        again = bs.quantize(q.dequantize(), method=method, global_scale=q.global_scale, layout="linear")
        assert same_tensor(q, again)

    def test_mse_is_never_worse_than_rtn_and_four_over_six_never_worse_than_its_own_six(self):
        x = _wild(64, 256)

        def block_error(q):
            return (x.double() - q.dequantize().double()).square().view(64, 16, 16).sum(-1)

        rtn, mse = block_error(bs.quantize(x)), block_error(bs.quantize(x, method="mse"))
        assert (mse <= rtn).all()
        assert (mse < rtn).any()
        unit = x.abs().amax() / 1536
        six = block_error(bs.quantize(x, global_scale=unit))
        four_over_six = block_error(bs.quantize(x, method="four_over_six"))
        assert (four_over_six <= six).all()
        assert (four_over_six < six).any()


def test_rows_that_are_masked_out_leave_no_trace():
    """Eight experts with 64 slots and one real row each; what lies in the other slots must not matter."""
    x = torch.zeros(8, 64, 96)
    x[:, 0] = torch.randn(8, 96)
    expected = bs.quantize(x, global_scale=0.002, layout="linear")
    for garbage in (float("nan"), float("inf"), 1e30):
        x[:, 1:] = garbage
        q = bs.quantize(x, global_scale=0.002, layout="linear", nonfinite="saturate")
        assert torch.equal(q.codes[:, 0], expected.codes[:, 0])
        assert torch.equal(_bytes(q)[:, 0], _bytes(expected)[:, 0])


class TestNonFinite:
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_error_names_the_first_coordinate(self, bad, dtype):
        x = torch.zeros(3, 5, 40, dtype=dtype)
        x[2, 4, 39] = x[1, 3, 17] = bad
        with pytest.raises(ValueError, match=rf"x: {bad} at \(1, 3, 17\)"):
            bs.quantize(x)
        with pytest.raises(ValueError, match=rf"x: {bad} at \(17, 1, 3\)"):
            bs.quantize(x.permute(2, 0, 1))
        with pytest.raises(ValueError, match=rf"x: {bad} at"):
            bs.quantize(x, global_scale=1.0)

    @pytest.mark.parametrize("method", METHODS)
    def test_saturate_leaves_other_blocks_alone(self, method):
        x = torch.randn(4, 64)
        clean = x.clone()
        x[1, 20:23] = torch.tensor([float("nan"), float("inf"), float("-inf")])
        clean[1, 20:23] = 0
        q = bs.quantize(x, method=method, nonfinite="saturate", layout="linear")
        r = bs.quantize(clean, method=method, layout="linear")
        assert same_bits(q.global_scale, r.global_scale)
        other = torch.ones(4, 64, dtype=torch.bool)
        other[1, 16:32] = False
        assert torch.equal(_codes(q)[other], _codes(r)[other])
        limit = 2688 * float(q.global_scale)
        restored = q.dequantize()[1, 20:23]
        assert restored[0] == 0
        torch.testing.assert_close(restored[1:], torch.tensor([limit, -limit]))

    def test_nothing_finite_at_all(self):
        q = bs.quantize(torch.full((2, 20), float("inf")), nonfinite="saturate")
        assert q.global_scale == 1
        assert (q.dequantize() == 2688).all()
        assert (bs.quantize(torch.full((2, 20), float("nan")), nonfinite="saturate").dequantize() == 0).all()


class TestGroups:
    @pytest.mark.parametrize("sizes", [[128, 128], [1, 255], [127, 1, 129], [0, 5, 0, 3, 0], [16], [144], [0, 0]])
    def test_grouped_holds_the_bits_of_linear(self, sizes):
        x = torch.randn(sum(sizes), 80)
        grouped = bs.quantize(x, layout="128x4-grouped", group_sizes=torch.tensor(sizes, dtype=torch.int32))
        linear = bs.quantize(x, layout="linear")
        assert same_bits(grouped.codes, linear.codes)
        assert same_bits(grouped.linear_scales(), linear.scales)
        assert grouped.scale_offsets.dtype == torch.int32
        assert grouped.scale_offsets[-1] == sum(-(-s // 128) * 128 for s in sizes)

    def test_group_sizes_and_layout_go_together(self):
        x, sizes = torch.ones(4, 16), torch.tensor([4])
        with pytest.raises(ValueError, match="group_sizes: go with layout='128x4-grouped'"):
            bs.quantize(x, group_sizes=sizes)
        with pytest.raises(ValueError, match="group_sizes: go with"):
            bs.quantize(x, layout="128x4-grouped")
        with pytest.raises(ValueError, match="expected 2 dimensions"):
            bs.quantize(x[None], layout="128x4-grouped", group_sizes=sizes)

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ([3], "group_sizes: sum 3, expected the number of rows, 4"),
            ([5, -1], "group_sizes: -1 at 1"),
            ([[4]], r"group_sizes: shape \(1, 1\)"),
        ],
    )
    def test_impossible_sizes_are_refused(self, sizes, message):
        with pytest.raises(ValueError, match=message):
            bs.quantize(torch.ones(4, 16), layout="128x4-grouped", group_sizes=torch.tensor(sizes))
        with pytest.raises(TypeError, match="group_sizes"):
            bs.quantize(torch.ones(4, 16), layout="128x4-grouped", group_sizes=torch.tensor([4.0]))


@pytest.mark.parametrize("shape", [(0, 16), (0, 1), (3, 0, 48), (0, 5, 16)])
def test_empty_rows_keep_their_shape(shape):
    q = bs.quantize(torch.empty(shape))
    assert q.shape == shape
    assert q.codes.shape == (*shape[:-1], -(-shape[-1] // 64) * 32)
    assert q.dequantize().shape == shape
    assert q.global_scale == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": torch.ones(2, 0)}, ValueError, "x: K = 0, expected at least 1"),
        ({"x": torch.ones(16)}, ValueError, r"x: shape \(16,\), expected at least 2"),
        ({"x": torch.ones(2, 16, dtype=torch.float64)}, TypeError, "x: dtype torch.float64"),
        ({"x": torch.ones(2, 16, dtype=torch.int8)}, TypeError, "x: dtype torch.int8"),
        ({"x": [[1.0]]}, TypeError, "x: list, expected a torch.Tensor"),
        ({"x": torch.ones(2, 16, device="meta")}, ValueError, "x: on meta"),
        ({"x": torch.ones(2, 16).to_sparse()}, TypeError, "x: layout torch.sparse_coo"),
        ({"method": ["rtn"]}, ValueError, "method: "),
        ({"global_scale": True}, TypeError, "global_scale: bool"),
        ({"method": "best"}, ValueError, "method: 'best', expected one of 'rtn', 'four_over_six', 'mse'"),
        ({"layout": "8x4"}, ValueError, "layout: '8x4', expected one of"),
        ({"nonfinite": "ignore"}, ValueError, "nonfinite: 'ignore', expected one of"),
        ({"seed": 3}, ValueError, "seed: 3, expected None"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        bs.quantize(**{"x": torch.ones(2, 16), **arguments})


def test_default_device_has_no_say():
    x = torch.randn(5, 100)
    expected = bs.quantize(x)
    with torch.device("meta"):
        assert same_tensor(bs.quantize(x), expected)
        assert bs.quantize(x).dequantize().device.type == "cpu"
