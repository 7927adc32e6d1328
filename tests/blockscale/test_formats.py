"""Every code, every tie, every byte position of the format."""

import ml_dtypes
import numpy as np
import pytest
import torch

from blockscale import reference
from blockscale.formats import blocks, e2m1, e4m3, layouts, packing


def _around(values):
    """Each value with its two fp32 neighbours, and the negatives."""
    v = torch.tensor(values, dtype=torch.float32)
    near = torch.cat([v, torch.nextafter(v, torch.tensor(torch.inf)), torch.nextafter(v, torch.tensor(-torch.inf))])
    return torch.cat([near, -near])


class TestE2M1:
    def test_values_are_those_of_ml_dtypes_and_of_the_definition(self):
        codes = np.arange(16, dtype=np.uint8)
        theirs = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        ours = e2m1.decode(torch.from_numpy(codes)).numpy()
        assert ours.tobytes() == theirs.tobytes()
        assert ours.tobytes() == reference.E2M1.astype(np.float32).tobytes()

    def test_encode_equals_ml_dtypes_on_a_fine_grid_and_around_every_boundary(self):
        x = torch.cat([torch.linspace(-6.5, 6.5, 200_001), _around([0.25, 0.5, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6])])
        x = torch.cat([x, torch.randn(100_000) * torch.exp(torch.randn(100_000) * 8)])
        theirs = x.clamp(-6, 6).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        assert np.array_equal(e2m1.encode(x).numpy(), theirs)

    @pytest.mark.parametrize("value", [1.0, -1.0])
    def test_ties_go_to_the_even_code(self, value):
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) * value
        codes = e2m1.encode(ties)
        assert (codes & 7).tolist() == [0, 2, 2, 4, 4, 6, 6]
        assert e2m1.decode(codes).abs().tolist() == [0, 1, 1, 2, 2, 4, 4]

    def test_sign_survives_zero_and_specials_saturate(self):
        x = torch.tensor([0.0, -0.0, 1e-45, -1e-45, torch.inf, -torch.inf, torch.nan])
        assert e2m1.encode(x).tolist() == [0, 8, 0, 8, 7, 15, 7]

    def test_encode_leaves_its_input_alone(self):
        x = torch.randn(100)
        before = x.clone()
        e2m1.encode(x)
        assert torch.equal(x, before)


class TestE4M3:
    def test_values_are_those_of_ml_dtypes_torch_and_the_definition(self):
        codes = torch.arange(256, dtype=torch.uint8)
        ours = e4m3.decode(codes.view(torch.float8_e4m3fn))
        theirs = codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        np.testing.assert_array_equal(ours.numpy(), theirs)
        np.testing.assert_array_equal(ours.double().numpy(), reference.E4M3)

    def test_encode_at_every_code_tie_and_neighbour(self):
        grid = reference.E4M3[:127]
        ties = (grid[1:] + grid[:-1]) / 2
        v = _around(np.concatenate([grid, ties])).abs()
        v = v[v <= 448]
        ours = e4m3.encode_scale(v).view(torch.uint8).numpy()
        assert np.array_equal(ours, v.numpy().astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
        assert np.array_equal(ours, [reference._nearest(float(x), grid) for x in v])

    def test_overflow_saturates_on_every_version_of_torch(self):
        v = torch.tensor([447.9, 448, 464, 465, 480, 1000, 3e38, torch.inf])
        assert e4m3.encode_scale(v).view(torch.uint8).tolist() == [0x7E] * 8

    def test_step_is_the_distance_to_the_next_value(self):
        v = torch.from_numpy(reference.E4M3[1:127]).float()
        assert torch.equal(e4m3.step(v[:-1]), v[1:] - v[:-1])

    def test_invalid_bytes_are_nan_and_every_set_sign_bit(self):
        bad = e4m3.invalid(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn))
        assert bad.nonzero().flatten().tolist() == list(range(0x7F, 256))


class TestPacking:
    def test_low_nibble_is_the_even_element(self):
        codes = torch.tensor([[1, 7, 0, 0]], dtype=torch.uint8)  # 0.5, 6, 0, 0
        assert packing.pack(codes).tolist() == [[0x71, 0x00]]

    def test_every_byte_round_trips(self):
        packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
        assert torch.equal(packing.pack(packing.unpack(packed)), packed)

    def test_float4_view_shares_memory(self):
        packed = torch.zeros(2, 8, dtype=torch.uint8)
        view = packing.as_float4(packed)
        assert view.dtype == torch.float4_e2m1fn_x2
        assert view.shape == packed.shape
        assert packing.as_bytes(view).data_ptr() == packed.data_ptr()

    def test_odd_number_of_codes_is_refused(self):
        with pytest.raises(ValueError, match="last dimension 3 is odd"):
            packing.pack(torch.zeros(1, 3, dtype=torch.uint8))


class TestLayouts:
    @pytest.mark.parametrize(
        ("shape", "padded"),
        [((576, 128), (640, 128)), ((1, 1), (128, 4)), ((129, 5), (256, 8)), ((3, 130, 7), (3, 256, 8))],
    )
    def test_swizzle_pads_with_zeros_and_round_trips(self, shape, padded):
        scales = torch.randint(1, 127, shape, dtype=torch.uint8)
        swizzled = layouts.swizzle(scales)
        assert swizzled.shape == padded
        assert torch.equal(layouts.unswizzle(swizzled, *shape[-2:]), scales)
        assert int((swizzled != 0).sum()) == scales.numel()

    def test_atom_byte_order_is_the_normative_formula(self):
        rows, cols = 300, 12
        scales = torch.arange(rows * cols).remainder(251).to(torch.uint8).view(rows, cols)
        flat = layouts.swizzle(scales).flatten()
        for row, block in [(0, 0), (0, 3), (1, 0), (31, 2), (32, 0), (33, 1), (127, 3), (128, 0), (299, 11), (200, 4)]:
            atom = (row // 128) * (cols // 4) + block // 4
            byte = atom * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4
            assert flat[byte] == scales[row, block], (row, block)

    def test_float8_keeps_its_dtype(self):
        scales = torch.ones(5, 5).to(torch.float8_e4m3fn)
        assert layouts.swizzle(scales).dtype == torch.float8_e4m3fn
        assert layouts.unswizzle(layouts.swizzle(scales), 5, 5).dtype == torch.float8_e4m3fn

    @pytest.mark.parametrize("sizes", [[128, 128], [1, 255], [127, 1, 129], [0, 5, 0, 3, 0], [0], [1], [300, 0, 1]])
    def test_grouped_starts_each_group_on_128_rows(self, sizes):
        rows, cols = sum(sizes), 8
        scales = torch.randint(1, 127, (rows, cols), dtype=torch.uint8)
        grouped = layouts.swizzle_grouped(scales, torch.tensor(sizes))
        assert grouped.shape == (layouts.grouped_rows(rows, len(sizes)), cols)
        starts = layouts.scale_offsets(torch.tensor(sizes)).tolist()
        linear = layouts.unswizzle(grouped, grouped.shape[0], cols)
        first = 0
        for size, start in zip(sizes, starts, strict=False):
            assert start % 128 == 0
            assert torch.equal(linear[start : start + size], scales[first : first + size])
            first += size
        assert int((grouped != 0).sum()) == scales.numel()
        assert torch.equal(layouts.unswizzle_grouped(grouped, torch.tensor(sizes), rows, cols), scales)

    def test_grouped_rows_is_the_least_bound_that_serves_every_split(self):
        def most_atoms(rows, groups):
            if groups == 1:
                return -(-rows // 128)
            return max(
                -(-first // 128) + most_atoms(rows - first, groups - 1) for first in {0, 1, rows} if first <= rows
            )

        for rows in (0, 1, 2, 3, 127, 128, 129, 130, 257, 300):
            for groups in (1, 2, 3, 5):
                assert layouts.grouped_rows(rows, groups) == 128 * most_atoms(rows, groups), (rows, groups)

    def test_result_is_on_the_inputs_device_whatever_the_default(self):
        scales = torch.randint(1, 127, (130, 7), dtype=torch.uint8)
        sizes = torch.tensor([100, 30])
        expected, grouped = layouts.swizzle(scales), layouts.swizzle_grouped(scales, sizes)
        with torch.device("meta"):
            assert torch.equal(layouts.swizzle(scales), expected)
            assert torch.equal(layouts.unswizzle(expected, 130, 7), scales)
            assert torch.equal(layouts.swizzle_grouped(scales, sizes), grouped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_expand_is_exact_for_every_code_and_scale(dtype):
    packed = torch.arange(256, dtype=torch.uint8).repeat(127, 1)
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    values = blocks.expand(packed, scales[:, None].expand(127, 32))
    codes = packing.unpack(packed).numpy()
    expected = reference.E2M1[codes] * reference.E4M3[:127, None]
    assert values.dtype == dtype
    np.testing.assert_array_equal(values.double().numpy(), expected)
