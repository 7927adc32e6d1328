"""Checkpoints that users of other software reported to give garbage, an error too late, or none at all."""

import os
import warnings

import pytest
import torch
from checkpoint_files import F8, compressed_config, compressed_tensors, matrix, modelopt, modelopt_config, write
from operands import same_bits, same_tensor
from safetensors.torch import load_file

import blockscale as bs
from blockscale import reference
from blockscale.checkpoints import CheckpointError
from blockscale.formats import layouts


def close_to_exact(y, a, b):
    exact = reference.gemm(a, b)
    reference.check(y, exact, reference.tolerance(a, b, exact, out_dtype=y.dtype))


def fuse(stem, parts):
    """The rows of several weights in one, their global scales in a vector."""
    fused = {stem + role: torch.cat([torch.atleast_1d(part[role]) for part in parts]) for role in parts[0]}
    return {name: t.contiguous() for name, t in fused.items()}


class TestScaleConventions:
    """The global scale taken for its reciprocal."""

    def both(self, tmp_path):
        t = matrix(amax=2.0)
        assert float(t.global_scale) == pytest.approx(7.4405e-4, rel=1e-5)
        write(tmp_path / "m.safetensors", modelopt("fc.", t))
        write(tmp_path / "c.safetensors", compressed_tensors("fc.", t, 1344.0))
        return t, *(bs.load_checkpoint(tmp_path / f"{name}.safetensors")["fc.weight"] for name in "mc")

    def test_multiplier_and_divisor_give_the_same_bytes_and_products(self, tmp_path):
        t, m, c = self.both(tmp_path)
        assert same_tensor(m, t)
        assert same_tensor(c, t)
        x = torch.randn(5, 64)
        assert same_bits(bs.gemm(x, m), bs.gemm(x, c))
        close_to_exact(bs.gemm(x, c, out_dtype=torch.float32), x, t)

    @pytest.mark.parametrize("convention", ["modelopt", "compressed-tensors"])
    def test_the_reciprocal_in_its_place_warns(self, tmp_path, convention):
        t = matrix(amax=2.0)
        if convention == "modelopt":
            tensors = modelopt("fc.", t) | {"fc.weight_scale_2": torch.tensor(1344.0)}
        else:
            tensors = compressed_tensors("fc.", t, float(t.global_scale))
        checkpoint = bs.load_checkpoint(write(tmp_path / "x.safetensors", tensors))
        with pytest.warns(UserWarning, match=r"fc\.weight_\w+: values reach 3\.61e\+06, .* its reciprocal\?"):
            checkpoint["fc.weight"]

    def test_plausible_scales_do_not_warn(self, tmp_path):
        for amax in (1e-5, 0.02, 2.0, 500.0):
            bs.load_checkpoint(write(tmp_path / "x.safetensors", modelopt("fc.", matrix(amax=amax))))["fc.weight"]
        bs.load_checkpoint(write(tmp_path / "x.safetensors", modelopt("fc.", bs.quantize(torch.zeros(4, 64)))))[
            "fc.weight"
        ]

    def test_the_global_scale_is_not_folded_into_the_block_scales(self, tmp_path):
        scales = torch.linspace(56, 448, 32 * 4).to(F8).view(32, 4)
        codes = torch.randint(0, 256, (32, 32), dtype=torch.uint8)
        parts = {"fc.weight": codes, "fc.weight_scale": scales, "fc.weight_scale_2": torch.tensor(4.65e-5)}
        t = bs.load_checkpoint(write(tmp_path / "x.safetensors", parts))["fc.weight"]
        assert same_bits(t.scales, scales)
        assert float(t.global_scale) == torch.tensor(4.65e-5)
        two_levels = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        values = torch.cat([grid, -grid])[two_levels] * (scales.float() * 4.65e-5).repeat_interleave(16, 1)
        assert torch.equal(t.dequantize(), values)
        x = torch.rand(3, 64)
        close_to_exact(bs.gemm(x, t, out_dtype=torch.float32), x, t)

    def test_an_input_scale_is_the_same_number_in_both(self, tmp_path):
        t = matrix(amax=2.0)
        m = write(tmp_path / "m.safetensors", modelopt("fc.", t, input_scale=1 / 64))
        c = write(tmp_path / "c.safetensors", compressed_tensors("fc.", t, 1344.0, input_divisor=64.0))
        for path in (m, c):
            scale = bs.load_checkpoint(path).input_scale("fc.weight")
            assert scale.shape == ()
            assert float(scale) == 1 / 64

    def test_rescaled_activations_under_a_rescaled_input_scale_give_the_same_product(self, tmp_path):
        w, x = matrix(16, 64), torch.randn(5, 64)
        products = []
        for scale in (1.0, 32.0):
            path = write(tmp_path / f"{scale}.safetensors", modelopt("fc.", w, input_scale=scale / 64))
            checkpoint = bs.load_checkpoint(path)
            a = bs.quantize(x * scale, global_scale=checkpoint.input_scale("fc.weight"))
            products.append(bs.gemm(a, checkpoint["fc.weight"], alpha=1 / scale, out_dtype=torch.float32))
        assert same_bits(*products)
        plain, scaled = bs.quantize(x, global_scale=1 / 64), bs.quantize(x * 37, global_scale=37 / 64)
        assert same_bits(plain.codes, scaled.codes)
        assert same_bits(plain.scales, scaled.scales)

    @pytest.mark.parametrize("role", ["weight_zero_point", "weight_g_idx"])
    def test_what_would_change_the_values_is_refused(self, tmp_path, role):
        tensors = modelopt("fc.", matrix()) | {f"fc.{role}": torch.zeros(4)}
        with pytest.raises(CheckpointError, match=rf"x\.safetensors: fc\.{role}: "):
            bs.load_checkpoint(write(tmp_path / "x.safetensors", tensors))

    @pytest.mark.parametrize("role", ["pre_quant_scale", "svdquant_lora_a"])
    def test_what_belongs_to_the_product_and_is_not_applied_is_reported(self, tmp_path, role):
        path = write(tmp_path / "x.safetensors", modelopt("fc.", matrix()) | {f"fc.{role}": torch.ones(64)})
        with pytest.warns(UserWarning, match=rf"fc\.weight: {role}: .*gemm does not"):
            checkpoint = bs.load_checkpoint(path)
        for tensors in (checkpoint, dict(checkpoint)):
            with pytest.raises(ValueError, match=rf"fc\.{role}: compressed-tensors has no place for it"):
                bs.save_checkpoint(tensors, tmp_path / "y", to="compressed-tensors")


class TestFusedWeights:
    """One global scale taken for all parts, or one part's for the others."""

    def test_separate_gate_and_up_keep_their_own_scales(self, tmp_path):
        gate, up = matrix(seed=1, amax=2688 * 3.85e-5), matrix(seed=2, amax=2688 * 4.83e-5)
        tensors = modelopt("mlp.gate_proj.", gate) | modelopt("mlp.up_proj.", up)
        checkpoint = bs.load_checkpoint(write(tmp_path / "x.safetensors", tensors))
        ratio = float(checkpoint["mlp.up_proj.weight"].global_scale / checkpoint["mlp.gate_proj.weight"].global_scale)
        assert ratio == pytest.approx(4.83 / 3.85, rel=1e-6)
        for name, t in (("gate", gate), ("up", up)):
            assert same_tensor(checkpoint[f"mlp.{name}_proj.weight"], t)

    def test_a_fused_gate_up_with_two_scales(self, tmp_path):
        gate, up = matrix(seed=1, amax=2688 * 3.85e-5), matrix(seed=2, amax=2688 * 4.83e-5)
        parts = [modelopt("", t) for t in (gate, up)]
        fused = fuse("mlp.gate_up_proj.", parts)
        checkpoint = bs.load_checkpoint(write(tmp_path / "x.safetensors", fused))
        names = [f"mlp.gate_up_proj.weight[{rows}]" for rows in ("0:32", "32:64")]
        assert list(checkpoint) == names
        x = torch.randn(3, 64)
        for name, part, t in zip(names, checkpoint.parts("mlp.gate_up_proj.weight"), (gate, up), strict=True):
            assert same_tensor(checkpoint[name], t)
            assert same_bits(bs.gemm(x, part), bs.gemm(x, t))
        with pytest.raises(KeyError, match=r"2 global scales: ask for 'mlp\.gate_up_proj\.weight\[0:32\]'"):
            checkpoint["mlp.gate_up_proj.weight"]

    def test_a_fused_qkv_with_three_divisors_is_cut_as_config_json_says(self, tmp_path):
        divisors = [12343.1, 5334.3, 8001.5]
        sizes = zip((64, 32, 32), divisors, strict=True)
        parts = [matrix(rows, seed=int(d), amax=2688 / d) for rows, d in sizes]
        one = [compressed_tensors("", t, d) for t, d in zip(parts, divisors, strict=True)]
        fused = fuse("attn.qkv_proj.", one)
        folder = write(tmp_path / "model", fused, compressed_config(None))
        with pytest.raises(CheckpointError, match=r"weight_global_scale: shape \(3,\): which of the 128 rows"):
            bs.load_checkpoint(folder)
        model = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        (folder / "config.json").write_text(str(model).replace("'", '"'))
        checkpoint = bs.load_checkpoint(folder)
        assert [name.rpartition("[")[2] for name in checkpoint] == ["0:64]", "64:96]", "96:128]"]
        for part, t, d in zip(checkpoint.parts("attn.qkv_proj.weight"), parts, divisors, strict=True):
            assert same_bits(part.codes, t.codes)
            assert float(part.divisor) == torch.tensor(d)
            assert torch.equal(part.global_scale, 1 / torch.tensor(d))

    def test_one_scalar_applies_to_every_part_of_a_fused_weight(self, tmp_path):
        t = matrix(128, amax=2.0)
        for shape in ((), (1,)):
            tensors = modelopt("attn.qkv_proj.", t, input_scale=0.5)
            tensors["attn.qkv_proj.weight_scale_2"] = t.global_scale.reshape(shape).clone()
            checkpoint = bs.load_checkpoint(write(tmp_path / "x.safetensors", tensors))
            assert same_tensor(checkpoint["attn.qkv_proj.weight"], t)
            assert float(checkpoint.input_scale("attn.qkv_proj.weight")) == 0.5

    @pytest.mark.parametrize("shape", [(8,), (8, 1), (8, 1, 1)])
    def test_a_stack_of_experts_with_a_scale_each(self, tmp_path, shape):
        experts = [matrix(seed=e, amax=0.1 * (e + 1)) for e in range(8)]
        parts = [modelopt("", t) for t in experts]
        stack = {
            "experts.down_proj": torch.stack([p["weight"] for p in parts]),
            "experts.down_proj_weight_scale": torch.stack([p["weight_scale"] for p in parts]),
            "experts.down_proj_weight_scale_2": torch.stack([t.global_scale for t in experts]).view(shape),
        }
        checkpoint = bs.load_checkpoint(write(tmp_path / "x.safetensors", stack))
        assert list(checkpoint) == [f"experts.down_proj[{e}]" for e in range(8)]
        assert all(same_tensor(a, b) for a, b in zip(checkpoint.parts("experts.down_proj"), experts, strict=True))
        x = [torch.randn(3, 64) for _ in experts]
        products = bs.grouped_gemm(x, checkpoint.parts("experts.down_proj"))
        assert all(same_bits(y, bs.gemm(a, b)) for y, a, b in zip(products, x, experts, strict=True))

    def test_gate_and_up_scales_within_every_expert(self, tmp_path):
        stack = {
            "experts.w13": torch.randint(0, 256, (2, 8, 32), dtype=torch.uint8),
            "experts.w13_weight_scale": torch.ones(2, 8, 4).to(F8),
            "experts.w13_weight_scale_2": torch.tensor([[1e-3, 2e-3], [3e-3, 4e-3]]),
        }
        path = write(tmp_path / "x.safetensors", stack)
        checkpoint = bs.load_checkpoint(path)
        assert list(checkpoint) == [f"experts.w13[{e}, {rows}]" for e in (0, 1) for rows in ("0:4", "4:8")]
        third = checkpoint["experts.w13[1, 0:4]"]
        assert float(third.global_scale) == torch.tensor(3e-3)
        assert torch.equal(third.codes, stack["experts.w13"][1, :4])
        turned = {name: t.view(torch.uint8).mT.contiguous().view(t.dtype) for name, t in list(stack.items())[:2]}
        swizzled = torch.stack([layouts.swizzle(s) for s in stack["experts.w13_weight_scale"]])
        for change, options in ((turned, {}), ({"experts.w13_weight_scale": swizzled}, {"scale_layout": "128x4"})):
            other = bs.load_checkpoint(write(tmp_path / "y.safetensors", stack | change), layout="linear", **options)
            assert all(same_tensor(other[name], checkpoint[name]) for name in checkpoint)

    def test_several_scales_survive_our_own_format(self, tmp_path):
        experts = {
            "experts.w": torch.randint(0, 256, (3, 130, 64), dtype=torch.uint8),
            "experts.w_weight_scale": torch.randint(0, 127, (3, 130, 8), dtype=torch.uint8).view(F8),
            "experts.w_weight_scale_2": torch.tensor([1e-3, 2e-3, 3e-3]).view(3, 1, 1),
            "experts.w_input_scale": torch.tensor([0.1, 0.2, 0.3]),
        }
        gate_up = fuse("gate_up_proj.", [modelopt("", matrix(seed=1)), modelopt("", matrix(seed=2))])
        source = write(tmp_path / "x.safetensors", experts | gate_up)
        for layout in ("linear", "128x4"):
            before = bs.load_checkpoint(source, layout=layout)
            bs.save_checkpoint(before, tmp_path / "own", to="blockscale")
            own = bs.load_checkpoint(tmp_path / "own", layout=layout)
            assert set(own) == set(before)
            assert all(same_tensor(own[n], before[n]) for n in own if isinstance(own[n], bs.NVFP4Tensor))
            assert torch.equal(own.input_scale("experts.w"), experts["experts.w_input_scale"])
            with pytest.warns(UserWarning, match="stay behind"):
                bs.save_checkpoint(own, tmp_path / "back.safetensors", to="modelopt")
            back = load_file(tmp_path / "back.safetensors")
            assert all(same_bits(back[name], t) for name, t in (experts | gate_up).items())


class TestMissingScales:
    """A parameter left as it was allocated."""

    def test_a_missing_global_scale_is_named(self, tmp_path):
        tensors = modelopt("fc.", matrix())
        del tensors["fc.weight_scale_2"]
        with pytest.raises(CheckpointError, match=r"x\.safetensors: fc\.weight: fc\.weight_scale_2 is missing"):
            bs.load_checkpoint(write(tmp_path / "x.safetensors", tensors))
        tensors = compressed_tensors("fc.", matrix(), 1344.0)
        del tensors["fc.weight_global_scale"]
        with pytest.raises(CheckpointError, match=r"fc\.weight_packed: fc\.weight_global_scale is missing"):
            bs.load_checkpoint(write(tmp_path / "x.safetensors", tensors))

    def test_one_expert_of_eight_is_named(self, tmp_path):
        tensors = {}
        for e in range(8):
            tensors |= modelopt(f"mlp.experts.{e}.down_proj.", matrix(seed=e))
        del tensors["mlp.experts.5.down_proj.weight_scale_2"]
        with pytest.raises(ValueError, match=r"mlp\.experts\.5\.down_proj\.weight_scale_2 is missing"):
            bs.load_checkpoint(write(tmp_path / "x.safetensors", tensors))

    @pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
    @pytest.mark.parametrize("convention", ["modelopt", "compressed-tensors"])
    def test_a_global_scale_that_is_none_is_named(self, tmp_path, value, convention):
        if convention == "modelopt":
            tensors, key = modelopt("fc.", matrix()), "fc.weight_scale_2"
            tensors[key] = torch.tensor(value)
        else:
            tensors, key = compressed_tensors("fc.", matrix(), value), "fc.weight_global_scale"
        checkpoint = bs.load_checkpoint(write(tmp_path / "x.safetensors", tensors))
        with pytest.raises(
            ValueError, match=rf"x\.safetensors: {key.replace('.', '[.]')}: {value}, expected a positive"
        ):
            checkpoint["fc.weight"]

    def test_the_expert_of_a_stack_is_named(self, tmp_path):
        stack = {
            "experts.w": torch.zeros(8, 4, 32, dtype=torch.uint8),
            "experts.w_weight_scale": torch.ones(8, 4, 4).to(F8),
            "experts.w_weight_scale_2": torch.tensor([1.0, 1, 1, 1, 1, 0, 1, 1]),
        }
        checkpoint = bs.load_checkpoint(write(tmp_path / "x.safetensors", stack))
        checkpoint["experts.w[4]"]
        with pytest.raises(ValueError, match=r"experts\.w_weight_scale_2: 0\.0 at \[5\], expected a positive"):
            checkpoint["experts.w[5]"]

    def test_without_input_scale_activations_are_what_the_configuration_says(self, tmp_path):
        tensors = modelopt("fc.", matrix())
        theirs = compressed_tensors("fc.", matrix(), 1344.0)
        for i, (parts, config, expected) in enumerate(
            [
                (tensors, None, "weight-only"),
                (tensors, modelopt_config("W4A16_NVFP4"), "weight-only"),
                (theirs, compressed_config(None), "weight-only"),
                (theirs, compressed_config(True), "dynamic"),
            ]
        ):
            checkpoint = bs.load_checkpoint(write(tmp_path / str(i), parts, config))
            assert checkpoint.layers["fc.weight"].activations == expected
            assert checkpoint.input_scale("fc.weight") is None
            bs.gemm(torch.randn(2, 64).bfloat16(), checkpoint["fc.weight"])
        with pytest.warns(UserWarning, match=r"fc\.weight: no input scale, though the configuration says static"):
            checkpoint = bs.load_checkpoint(write(tmp_path / "static", tensors, modelopt_config()))
        assert checkpoint.layers["fc.weight"].activations == "dynamic"


class TestNibblesAndFallback:
    """The order of two codes in a byte, and layers that silently ran in bf16."""

    def row(self, path, first_byte):
        codes = torch.zeros(1, 32, dtype=torch.uint8)
        codes[0, 0] = first_byte
        tensors = {
            "fc.weight": codes,
            "fc.weight_scale": torch.ones(1, 4).to(F8),
            "fc.weight_scale_2": torch.tensor(1.0),
        }
        return write(path, tensors)

    def test_the_low_nibble_is_the_first_element(self, tmp_path):
        x = torch.zeros(1, 64)
        x[0, :2] = torch.tensor([0.5, 6])
        assert int(bs.quantize(x, global_scale=1.0).codes[0, 0]) == 0x71
        t = bs.load_checkpoint(self.row(tmp_path / "x.safetensors", 0x71))["fc.weight"]
        assert torch.equal(t.dequantize(), x)

    def test_the_other_order_has_to_be_asked_for(self, tmp_path):
        path = self.row(tmp_path / "x.safetensors", 0x17)
        assert bs.load_checkpoint(path)["fc.weight"].dequantize()[0, :2].tolist() == [6, 0.5]
        swapped = bs.load_checkpoint(path, first_nibble="high")
        assert swapped["fc.weight"].dequantize()[0, :2].tolist() == [0.5, 6]
        bs.save_checkpoint(swapped, tmp_path / "y.safetensors")
        assert int(load_file(tmp_path / "y.safetensors")["fc.weight"][0, 0]) == 0x71
        with pytest.raises(ValueError, match="first_nibble: 'middle', expected 'low' or 'high'"):
            bs.load_checkpoint(path, first_nibble="middle")

    @pytest.mark.parametrize("config", [modelopt_config(), compressed_config(None)])
    def test_a_layer_left_in_bf16_against_the_configuration_is_reported(self, tmp_path, config):
        tensors = {"a.weight": torch.zeros(16, 64).bfloat16(), "model.embed_tokens.weight": torch.zeros(16, 64)}
        path = write(tmp_path / "model", tensors | {"norm.weight": torch.ones(64)}, config)
        with pytest.warns(
            UserWarning, match=r"a\.weight: left in BF16, though the configuration says (nvfp4|NVFP4)"
        ) as said:
            checkpoint = bs.load_checkpoint(path)
        assert "embed" not in str(said[0].message)
        assert [problem.name for problem in checkpoint.problems] == ["a.weight"]
        assert checkpoint["a.weight"].dtype == torch.bfloat16

    def test_a_head_quantised_or_excluded_against_the_configuration_is_reported(self, tmp_path):
        quantised = write(tmp_path / "q", modelopt("lm_head.", matrix(), 1.0), modelopt_config(exclude=["lm_head"]))
        with pytest.warns(UserWarning, match=r"lm_head\.weight: quantised, though the configuration excludes it"):
            checkpoint = bs.load_checkpoint(quantised)
        assert same_tensor(checkpoint["lm_head.weight"], matrix())
        head = {"lm_head.weight": torch.zeros(16, 64).bfloat16()}
        with pytest.warns(UserWarning, match=r"lm_head\.weight: left in BF16"):
            bs.load_checkpoint(write(tmp_path / "p", modelopt("fc.", matrix(), 1.0) | head, modelopt_config()))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            config = compressed_config(ignore=["re:.*head$"])
            tensors = compressed_tensors("fc.", matrix(), 1344.0, 1.0)
            bs.load_checkpoint(write(tmp_path / "r", tensors | head, config))


class TestOtherFormats:
    """MXFP4 that is called NVFP4."""

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
    def test_e8m0_scales_are_refused_by_name(self, tmp_path, dtype):
        tensors = {
            "fc.weight": torch.zeros(16, 32, dtype=torch.uint8),
            "fc.weight_scale": torch.full((16, 2), 127, dtype=torch.uint8).view(dtype),
        }
        for extra in ({}, {"fc.weight_scale_2": torch.tensor(1.0)}):
            path = write(tmp_path / "model", tensors | extra, modelopt_config())
            with pytest.raises(CheckpointError, match=r"fc\.weight_scale: dtype (U8|F8_E8M0): E8M0 scales are MXFP4's"):
                bs.load_checkpoint(path)
        theirs = {"fc.weight_packed": tensors["fc.weight"], "fc.weight_scale": tensors["fc.weight_scale"]}
        with pytest.raises(CheckpointError, match="MXFP4"):
            bs.load_checkpoint(write(tmp_path / "c.safetensors", theirs))

    @pytest.mark.parametrize("config", [modelopt_config(group_size=32), compressed_config(None, group_size=32)])
    def test_a_group_size_of_32_is_refused_by_name(self, tmp_path, config):
        path = write(tmp_path / "model", modelopt("fc.", matrix()), config)
        with pytest.raises(CheckpointError, match=r"fc\.weight: the configuration says group_size 32; NVFP4 has 16"):
            bs.load_checkpoint(path)
        tensors = modelopt("fc.", matrix())
        tensors["fc.weight_scale"] = tensors["fc.weight_scale"][:, ::2].contiguous()
        with pytest.raises(CheckpointError, match=r"one scale for 32 elements is MXFP4's, NVFP4 has one for 16"):
            bs.load_checkpoint(write(tmp_path / "x.safetensors", tensors))

    def test_e8m0_bytes_under_an_e4m3_dtype_are_refused_as_they_are_read(self, tmp_path):
        tensors = modelopt("fc.", matrix())
        tensors["fc.weight_scale"].view(torch.uint8)[3, 2] = 127
        checkpoint = bs.load_checkpoint(write(tmp_path / "x.safetensors", tensors))
        with pytest.raises(CheckpointError, match=r"fc\.weight_scale: scales: byte 0x7F at .* \(3, 2\)"):
            checkpoint["fc.weight"]

    def test_swizzled_scales_are_pointed_out(self, tmp_path):
        t = matrix(130)
        tensors = modelopt("fc.", t) | {"fc.weight_scale": t.with_layout("128x4").scales}
        path = write(tmp_path / "x.safetensors", tensors)
        with pytest.raises(CheckpointError, match=r"fc\.weight_scale: shape \(256, 4\).*fits scale_layout='128x4'"):
            bs.load_checkpoint(path)
        assert same_tensor(bs.load_checkpoint(path, scale_layout="128x4")["fc.weight"], t.with_layout("128x4"))
        assert same_tensor(bs.load_checkpoint(path, scale_layout="128x4", layout="linear")["fc.weight"], t)

    def test_int4_and_fp8_layers_are_plain_tensors(self, tmp_path):
        tensors = {
            "a.weight": torch.zeros(4, 64).to(F8),
            "a.weight_scale": torch.tensor(0.5),
            "b.weight_packed": torch.zeros(4, 8, dtype=torch.int32),
            "b.weight_scale": torch.ones(4, 1).bfloat16(),
        }
        checkpoint = bs.load_checkpoint(write(tmp_path / "x.safetensors", tensors))
        assert set(checkpoint) == set(tensors)
        assert all(same_bits(checkpoint[name], tensors[name]) for name in tensors)


def test_loading_a_then_b_then_a_again(tmp_path):
    """The second load is no different from the first, also into memory that stays where it is."""
    a, b = matrix(seed=1, amax=1.0), matrix(seed=2, amax=3.0)
    path, x = tmp_path / "x.safetensors", torch.randn(4, 64)
    fixed, products = matrix(seed=3), []
    addresses = [part.data_ptr() for part in (fixed.codes, fixed.scales, fixed.global_scale)]
    loaded = []
    for t in (a, b, a):
        write(tmp_path / "new.safetensors", modelopt("fc.", t))
        os.replace(tmp_path / "new.safetensors", path)
        loaded.append(bs.load_checkpoint(path)["fc.weight"])
        assert same_tensor(loaded[-1], t)
        for part in ("codes", "scales", "global_scale"):
            getattr(fixed, part).copy_(getattr(loaded[-1], part))
        products.append(bs.gemm(x, fixed))
        assert same_bits(products[-1], bs.gemm(x, t))
    assert same_tensor(loaded[0], a)
    assert same_tensor(loaded[1], b)
    assert addresses == [part.data_ptr() for part in (fixed.codes, fixed.scales, fixed.global_scale)]
