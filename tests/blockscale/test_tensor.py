"""NVFP4Tensor: wrapping, validation, slicing, layouts, files."""

import copy
import json
import os
import pickle

import pytest
import torch
from operands import POISON, every_code_and_scale, same_bits, same_tensor
from safetensors.torch import save_file

import blockscale as bs
from blockscale import reference
from blockscale.formats import layouts, packing

F8 = torch.float8_e4m3fn


def _parts(rows=5, k=64, layout="linear"):
    q = bs.quantize(torch.randn(rows, k), layout=layout)
    return q.codes, q.scales, q.global_scale


class TestFromParts:
    @pytest.mark.parametrize("layout", ["linear", "128x4"])
    @pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
    def test_no_copy_when_aligned(self, layout, batch):
        q = bs.quantize(torch.randn(*batch, 130, 128), layout=layout)
        t = bs.NVFP4Tensor.from_parts(q.codes, q.scales, q.global_scale, layout=layout)
        assert same_tensor(t, q)
        assert t.codes.data_ptr() == q.codes.data_ptr()
        assert t.scales.data_ptr() == q.scales.data_ptr()

    def test_float4_codes_and_flat_scales(self):
        q = bs.quantize(torch.randn(130, 128))
        t = bs.NVFP4Tensor.from_parts(packing.as_float4(q.codes), q.scales.flatten(), q.global_scale)
        assert same_tensor(t, q)

    @pytest.mark.parametrize("k", [1, 15, 16, 17, 31, 48, 63, 65, 100])
    @pytest.mark.parametrize("layout", ["linear", "128x4"])
    def test_unaligned_k_is_copied_and_what_lies_beyond_is_cleaned(self, k, layout):
        q = bs.quantize(torch.randn(7, k), layout=layout)
        linear = q.linear_scales().view(torch.uint8).clone()
        unpacked = packing.unpack(q.codes)
        unpacked[:, k:] = 5
        linear[:, -(-k // 16) :] = POISON
        scales = (layouts.swizzle(linear) if layout == "128x4" else linear).view(F8)
        t = bs.NVFP4Tensor.from_parts(packing.pack(unpacked), scales, q.global_scale, shape=(7, k), layout=layout)
        assert same_tensor(t, q)
        short = packing.pack(torch.nn.functional.pad(unpacked[:, :k], (0, k % 2), value=9))
        t = bs.NVFP4Tensor.from_parts(short, scales, q.global_scale, shape=(7, k), layout=layout)
        assert same_tensor(t, q)

    def test_misaligned_or_strided_bytes_are_copied(self):
        codes, scales, unit = _parts(6, 128)
        shifted = torch.empty(codes.numel() + 1, dtype=torch.uint8)[1:].view(codes.shape).copy_(codes)
        wide = torch.stack((codes, codes), dim=-1)[..., 0]
        for given in (shifted, wide):
            t = bs.NVFP4Tensor.from_parts(given, scales, unit, layout="linear")
            assert t.codes.data_ptr() % 16 == 0
            assert t.codes.is_contiguous()
            assert torch.equal(t.codes, codes)

    def test_a_single_row_of_odd_stride(self):
        q = bs.quantize(torch.randn(1, 64), layout="linear")
        wide = torch.zeros(4, 37, dtype=torch.uint8)
        wide[:1, :32] = q.codes
        t = bs.NVFP4Tensor.from_parts(wide[:1, :32], q.scales, q.global_scale, layout="linear")
        assert torch.equal(t.dequantize(), q.dequantize())

    def test_padding_rows_are_never_looked_at(self):
        q = bs.quantize(torch.randn(5, 512))
        linear = layouts.unswizzle(q.scales, 128, 32).view(torch.uint8)
        for stale in (POISON, 0x7E, 0xFF):
            linear[5:] = stale
            t = bs.NVFP4Tensor.from_parts(q.codes, layouts.swizzle(linear).view(F8), q.global_scale)
            assert torch.equal(t.dequantize(), q.dequantize())

    @pytest.mark.parametrize(("byte", "row", "block"), [(0x80, 3, 1), (0x7F, 0, 0), (0xFF, 4, 3), (0x81, 2, 2)])
    @pytest.mark.parametrize("layout", ["linear", "128x4"])
    def test_bad_scales_are_refused_with_their_coordinate(self, byte, row, block, layout):
        q = bs.quantize(torch.randn(5, 64), layout="linear")
        scales = q.scales.clone()
        scales.view(torch.uint8)[row, block] = byte
        if layout == "128x4":
            scales = layouts.swizzle(scales)
        with pytest.raises(ValueError, match=rf"scales: byte 0x{byte:02X} at \(row, block\) index \({row}, {block}\)"):
            bs.NVFP4Tensor.from_parts(q.codes, scales, layout=layout)
        bs.NVFP4Tensor.from_parts(q.codes, scales, layout=layout, check_values=False)

    @pytest.mark.parametrize("unit", [0.0, -1.0, float("nan"), float("inf")])
    def test_bad_global_scale_is_refused(self, unit):
        codes, scales, _ = _parts()
        with pytest.raises(ValueError, match=r"global_scale: .*, expected a positive multiplier up to 7\.596e\+35"):
            bs.NVFP4Tensor.from_parts(codes, scales, unit, layout="linear")

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"codes": torch.zeros(5, 32)}, TypeError, "codes: dtype torch.float32"),
            ({"codes": torch.zeros(32, dtype=torch.uint8)}, ValueError, r"codes: shape \(32,\)"),
            ({"codes": torch.zeros(5, 0, dtype=torch.uint8)}, ValueError, "shape: K = 0"),
            ({"scales": torch.zeros(5, 4, dtype=torch.uint8)}, TypeError, "scales: dtype torch.uint8"),
            ({"scales": torch.ones(5, 2).to(torch.float8_e8m0fnu)}, TypeError, "scales: dtype torch.float8_e8m0fnu"),
            ({"scales": torch.zeros(5, 8).to(F8)}, ValueError, r"scales: shape \(5, 8\), expected \(5, 4\)"),
            ({"scales": torch.zeros(20).to(F8)}, ValueError, r"scales: shape \(20,\), expected \(5, 4\)"),
            ({"layout": "128x4"}, ValueError, r"scales: shape \(5, 4\), expected \(128, 4\)"),
            ({"layout": "swizzled"}, ValueError, "layout: 'swizzled', expected one of"),
            ({"layout": "128x4-grouped"}, ValueError, "group_sizes: missing"),
            ({"group_sizes": torch.tensor([5])}, ValueError, "group_sizes: only for layout"),
            ({"codes": None}, TypeError, "codes: NoneType, expected a dense torch.Tensor"),
            ({"scales": [1.0]}, TypeError, "scales: list, expected a dense torch.Tensor"),
            ({"global_scale": "1"}, TypeError, "global_scale: str, expected a float"),
            ({"global_scale": True}, TypeError, "global_scale: bool"),
            ({"global_scale": 10**400}, ValueError, "global_scale: inf"),
            ({"shape": 5}, TypeError, "shape: 5, expected a sequence of integers"),
            ({"shape": (5, 64.0)}, TypeError, "shape: .*expected a sequence of integers"),
            ({"layout": ["linear"]}, ValueError, "layout: .*expected one of"),
            ({"shape": (5, 65)}, ValueError, "codes: 32 bytes a row, expected 33 or 64 for K = 65"),
            ({"shape": (6, 64)}, ValueError, r"shape: \(6, 64\) does not match"),
            ({"shape": (5, 0)}, ValueError, "shape: K = 0"),
            ({"global_scale": torch.ones(2)}, ValueError, "global_scale: .*one fp32 element"),
            ({"global_scale": torch.ones((), dtype=torch.float64)}, ValueError, "global_scale"),
            ({"scales": torch.zeros(5, 4, device="meta").to(F8)}, ValueError, "scales: on meta"),
        ],
    )
    def test_what_does_not_fit_is_named(self, change, error, message):
        codes, scales, unit = _parts()
        arguments = {"codes": codes, "scales": scales, "global_scale": unit, "layout": "linear", **change}
        with pytest.raises(error, match=message):
            bs.NVFP4Tensor.from_parts(**arguments)

    def test_equal_sizes_do_not_confuse_layouts(self):
        """For 128 rows both layouts have the same number of bytes; only the tag tells them apart."""
        q = bs.quantize(torch.randn(128, 64))
        wrong = bs.NVFP4Tensor.from_parts(q.codes, q.scales, q.global_scale, layout="linear")
        assert not torch.equal(wrong.dequantize(), q.dequantize())
        assert wrong.with_layout("linear") is wrong


class TestLayout:
    @pytest.mark.parametrize("k", [16, 100, 592, 3696])
    def test_every_conversion_keeps_the_values(self, k):
        q = bs.quantize(torch.randn(300, k))
        sizes = torch.tensor([0, 129, 0, 171], dtype=torch.int32)
        grouped = q.with_layout("128x4-grouped", sizes)
        linear = grouped.with_layout("linear")
        for t in (grouped, linear, linear.with_layout("128x4"), grouped.with_layout("128x4")):
            assert torch.equal(t.dequantize(), q.dequantize())
        assert same_tensor(grouped.with_layout("128x4"), q)

    def test_converting_twice_changes_nothing(self):
        q = bs.quantize(torch.randn(130, 80))
        assert q.with_layout("128x4") is q
        linear = q.with_layout("linear")
        assert linear.with_layout("linear") is linear

    def test_regrouping(self):
        q = bs.quantize(torch.randn(10, 32), layout="128x4-grouped", group_sizes=torch.tensor([4, 6]))
        again = q.with_layout("128x4-grouped", torch.tensor([1, 9]))
        assert again.scale_offsets.tolist() == [0, 128, 256]
        assert torch.equal(again.dequantize(), q.dequantize())
        assert q.with_layout("128x4-grouped") is q
        with pytest.raises(ValueError, match="group_sizes: only for layout"):
            q.with_layout("linear", torch.tensor([4, 6]))


class TestSlicing:
    @pytest.mark.parametrize("layout", ["linear", "128x4"])
    def test_equals_slicing_the_values(self, layout):
        q = every_code_and_scale(300, 200, layout)
        values = q.dequantize()
        for rows in (slice(None), slice(0, 128), slice(3, 131), slice(128, 300), slice(5, 5), slice(-7, None)):
            for cols in (slice(None), slice(0, 64), slice(16, 48), slice(192, 200), slice(64, None), slice(-8, None)):
                part = q[rows, cols]
                assert part.layout == layout
                assert torch.equal(part.dequantize(), values[rows, cols])
                assert same_tensor(part, bs.NVFP4Tensor.from_parts(
                    part.codes, part.scales, part.global_scale, shape=part.shape, layout=layout))  # fmt: skip

    def test_batches(self):
        q = bs.quantize(torch.randn(4, 3, 20, 48))
        values = q.dequantize()
        assert torch.equal(q[1].dequantize(), values[1])
        assert torch.equal(q[1, 2].dequantize(), values[1, 2])
        assert torch.equal(q[..., 16:32].dequantize(), values[..., 16:32])
        assert torch.equal(q[1:3, :, 5:].dequantize(), values[1:3, :, 5:])
        assert torch.equal(q[-1, ..., :5, :16].dequantize(), values[-1, :, :5, :16])

    def test_a_linear_slice_on_64_shares_memory(self):
        q = bs.quantize(torch.randn(8, 128), layout="linear")
        assert q[2:5].codes.data_ptr() == q.codes.data_ptr() + 2 * 64

    @pytest.mark.parametrize("cols", [slice(8, 32), slice(0, 24), slice(1, None), slice(16, 16)])
    def test_a_cut_block_is_refused(self, cols):
        q = bs.quantize(torch.randn(4, 64))
        with pytest.raises(ValueError, match=r"K slice .* multiples of 16"):
            q[:, cols]

    def test_a_shard_that_cuts_a_block_is_refused_by_name(self):
        """K = 1856 over 8 ranks is 232 a rank, which is 8 modulo 16; K = 640 over 4 is 160, which works."""
        q = bs.quantize(torch.randn(4, 1856))
        with pytest.raises(ValueError, match="K slice 232:464 of K = 1856"):
            q[:, 232:464]
        q = bs.quantize(torch.randn(4, 640))
        shards = [q[:, i : i + 160].dequantize() for i in range(0, 640, 160)]
        assert torch.equal(torch.cat(shards, dim=1), q.dequantize())

    def test_bad_indices(self):
        q = bs.quantize(torch.randn(2, 8, 64))
        with pytest.raises(TypeError, match="dimension M, expected a slice"):
            q[0, 1]
        with pytest.raises(TypeError, match="dimension K, expected a slice of step 1"):
            q[..., ::2]
        with pytest.raises(TypeError, match="list in a batch dimension"):
            q[[0, 1]]
        with pytest.raises(IndexError):
            q[0, :, :, :]
        with pytest.raises(TypeError, match="bool in a batch dimension"):
            q[True]
        with pytest.raises(ValueError, match="step of at least 1"):
            q[::-1]
        grouped = q[0].with_layout("128x4-grouped", torch.tensor([3, 5]))
        with pytest.raises(ValueError, match="cannot be sliced"):
            grouped[2:]
        assert torch.equal(grouped[:, :32].dequantize(), grouped.dequantize()[:, :32])


class TestFiles:
    @pytest.mark.parametrize("layout", ["linear", "128x4", "128x4-grouped"])
    def test_round_trip(self, tmp_path, layout):
        q = every_code_and_scale(130, 100, "linear").with_layout(
            layout, torch.tensor([30, 0, 100]) if layout == "128x4-grouped" else None
        )
        q.save(tmp_path / "t.safetensors")
        loaded = bs.NVFP4Tensor.load(tmp_path / "t.safetensors")
        assert same_tensor(loaded, q)
        assert os.listdir(tmp_path) == ["t.safetensors"]
        if layout == "128x4-grouped":
            assert loaded.scale_offsets.tolist() == q.scale_offsets.tolist()

    def test_stale_padding_is_not_saved(self, tmp_path):
        q = bs.quantize(torch.randn(5, 64))
        linear = layouts.unswizzle(q.scales, 128, 4).view(torch.uint8)
        linear[5:] = 0x33
        stale = bs.NVFP4Tensor.from_parts(q.codes, layouts.swizzle(linear).view(F8), q.global_scale)
        stale.save(tmp_path / "t.safetensors")
        assert same_tensor(bs.NVFP4Tensor.load(tmp_path / "t.safetensors"), q)

    @pytest.mark.skipif(os.name != "posix", reason="permissions and links of POSIX")
    def test_the_file_has_the_usual_mode_and_links_stay_links(self, tmp_path):
        (tmp_path / "link").symlink_to("t.safetensors")
        (tmp_path / "plain").touch()
        bs.quantize(torch.randn(5, 64)).save(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "t.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode

    def test_a_failed_write_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "t.safetensors"
        q = bs.quantize(torch.randn(5, 64))
        q.save(path)
        monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            bs.quantize(torch.randn(5, 64)).save(path)
        assert same_tensor(bs.NVFP4Tensor.load(path), q)
        assert os.listdir(tmp_path) == ["t.safetensors"]

    def test_other_and_broken_files_are_named(self, tmp_path):
        path = tmp_path / "t.safetensors"
        path.write_bytes(b"not a file of ours")
        with pytest.raises(ValueError, match=r"t\.safetensors: not a readable safetensors file"):
            bs.NVFP4Tensor.load(path)
        save_file({"codes": torch.zeros(2)}, path)
        with pytest.raises(ValueError, match="metadata says format None"):
            bs.NVFP4Tensor.load(path)
        bs.quantize(torch.randn(5, 64)).save(path)
        whole = path.read_bytes()
        path.write_bytes(whole[:-7])
        with pytest.raises(ValueError, match="not a readable safetensors file"):
            bs.NVFP4Tensor.load(path)
        for lie in (b"null   ", b"{}     ", b"[5,true", b'"5,64" ', b"[5,-64]"):
            path.write_bytes(whole.replace(b"[5, 64]", lie.replace(b'"', b"'")))
            with pytest.raises(ValueError, match=r"t\.safetensors: "):
                bs.NVFP4Tensor.load(path)
        path.write_bytes(whole.replace(b"[5, 64]", b"[5, 66]"))
        with pytest.raises(ValueError, match=r"t\.safetensors: codes: 32 bytes a row, expected 33 or 64"):
            bs.NVFP4Tensor.load(path)
        metadata = {"format": "blockscale.nvfp4", "version": "1", "layout": "linear", "shape": json.dumps([5, 64])}
        save_file({"codes": torch.zeros(5, 32, dtype=torch.uint8)}, path, metadata)
        with pytest.raises(ValueError, match="has no 'scales'"):
            bs.NVFP4Tensor.load(path)
        with pytest.raises(FileNotFoundError):
            bs.NVFP4Tensor.load(tmp_path / "absent")


class TestDequantize:
    @pytest.mark.parametrize("layout", ["linear", "128x4"])
    def test_equals_the_reference_for_all_codes_and_scales(self, layout):
        t = every_code_and_scale(140, 1000, layout)
        ours = bs.dequantize(t)
        codes = packing.unpack(t.codes)[:, :1000].numpy()
        scales = t.linear_scales().view(torch.uint8).numpy()[:, : -(-1000 // 16)]
        d = reference.E4M3[scales].astype("float32") * t.global_scale.numpy()
        expected = reference.E2M1[codes].astype("float32") * d.repeat(16, axis=1)[:, :1000]
        assert same_bits(ours, torch.from_numpy(expected))
        exact = reference.dequantize(t)
        assert float(((ours - exact).abs() / exact.abs().clamp(min=1e-30)).max()) < 2**-23
        for dtype in (torch.bfloat16, torch.float16):
            assert same_bits(bs.dequantize(t, dtype), ours.to(dtype))

    def test_is_fl_of_code_times_fl_of_scale_times_global(self):
        t = bs.quantize(torch.randn(50, 64), layout="linear")
        d = t.scales.float() * t.global_scale
        codes = packing.unpack(t.codes)
        expected = bs.formats.e2m1.decode(codes) * d.repeat_interleave(16, dim=1)
        assert same_bits(t.dequantize(), expected)

    def test_refuses_other_dtypes_and_objects(self):
        with pytest.raises(TypeError, match=r"dtype: torch\.float64"):
            bs.dequantize(bs.quantize(torch.ones(1, 16)), torch.float64)
        with pytest.raises(TypeError, match="t: Tensor, expected an NVFP4Tensor"):
            bs.dequantize(torch.ones(1, 16))


def test_copies_pickles_and_prints():
    q = bs.quantize(torch.randn(10, 32), layout="128x4-grouped", group_sizes=torch.tensor([4, 6]))
    assert same_tensor(copy.deepcopy(q), q)
    restored = pickle.loads(pickle.dumps(q))
    assert same_tensor(restored, q)
    assert torch.equal(restored.scale_offsets, q.scale_offsets)
    assert repr(q) == "NVFP4Tensor(shape=(10, 32), layout='128x4-grouped', groups=2, device='cpu')"
    assert q.nbytes == 10 * 32 + q.scales.numel() + 4
    assert q.ndim == 2
    assert q.to("cpu") is q
    assert q.to("meta").group_sizes.device.type == "meta"
