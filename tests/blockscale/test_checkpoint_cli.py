"""`blockscale inspect`, `convert` and `quantize`."""

import json
import math
import shutil

import pytest
import torch
from checkpoint_files import FIXTURES, matrix, modelopt, modelopt_config, write
from operands import same_bits
from safetensors.torch import load_file, save_file
from test_cli import assert_refused, invoke

import blockscale as bs
from blockscale.checkpoints import CheckpointError, quantize_checkpoint

STACK = "model.layers.0.mlp.experts.gate_up_proj"


class TestInspect:
    def test_a_table_and_the_same_in_json(self):
        folder = str(FIXTURES / "modelopt-stack")
        result = invoke("inspect", folder)
        assert result.exit_code == 0, result.output
        assert result.stderr == ""
        assert "1 file, configured by modelopt" in result.stdout
        row = next(line for line in result.stdout.splitlines() if line.startswith(STACK))
        assert row.split()[1:7] == ["4", "x", "64", "x", "64", "modelopt"]
        found = json.loads(invoke("inspect", folder, "--json").stdout)
        assert found["sound"] is True
        assert found["problems"] == []
        layer = next(layer for layer in found["layers"] if layer["name"] == STACK)
        t = bs.load_checkpoint(folder)[STACK]
        scales = t.scales.float()[t.scales.view(torch.uint8) > 0]
        assert layer["shape"] == [4, 64, 64]
        assert layer["format"] == "modelopt"
        assert layer["activations"] == "static"
        assert layer["block_scales"] == [float(scales.min()), float(scales.max())]
        assert layer["global_scale"] == [float(t.global_scale)] * 2
        dtypes = {tensor["name"]: tensor["dtype"] for tensor in found["tensors"]}
        assert dtypes["lm_head.weight"] == "BF16"

    def test_every_problem_is_shown_and_the_rest_too(self, tmp_path):
        tensors = (
            modelopt("good.", matrix(), 1.0) | modelopt("bad.", matrix(), 1.0) | modelopt("worse.", matrix(), -1.0)
        )
        tensors |= modelopt("odd.", matrix(), 1.0) | {"odd.weight_scale_2": torch.tensor(1344.0)}
        tensors["bad.weight_scale"].view(torch.uint8)[0, 0] = 0x80
        del tensors["worse.weight_scale"]
        tensors["plain.weight"] = torch.zeros(16, 16).bfloat16()
        folder = write(tmp_path / "m", tensors, modelopt_config())
        result = invoke("inspect", str(folder))
        assert result.exit_code == 1
        assert result.stderr == "blockscale: the checkpoint cannot be loaded as it is\n"
        for line in (
            "broken: worse.weight: worse.weight_scale is missing",
            "scales: byte 0x80 at (row, block) index (0, 0)",
            "note: odd.weight: ",
            "note: plain.weight: left in BF16, though the configuration says NVFP4",
        ):
            assert line in " ".join(result.stdout.split())
        found = json.loads(invoke("inspect", str(folder), "--json").stdout)
        assert found["sound"] is False
        assert {layer["name"]: layer["block_scales"] is None for layer in found["layers"]} == {
            "good.weight": False,
            "bad.weight": True,
            "odd.weight": False,
        }
        assert [problem["name"] for problem in found["problems"] if problem["fatal"]] == ["worse.weight", "bad.weight"]

    def test_what_is_no_checkpoint(self, tmp_path):
        (tmp_path / "x.safetensors").write_bytes(b"nothing")
        assert_refused(invoke("inspect", str(tmp_path / "x.safetensors")), "x.safetensors", "not a sound")
        assert_refused(invoke("inspect", str(tmp_path / "gone")), "No such file")


class TestConvert:
    @pytest.mark.parametrize("to", ["modelopt", "compressed-tensors", "blockscale"])
    def test_to_every_convention(self, tmp_path, to):
        source = FIXTURES / "llmcompressor-moe-NVFP4"
        result = invoke("convert", str(source), str(tmp_path / "m"), "--to", to, "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["weights"] == 16
        found, before = bs.load_checkpoint(tmp_path / "m"), bs.load_checkpoint(source)
        assert {layer.convention for layer in found.layers.values()} == {to}
        assert all(same_bits(found[name].codes, before[name].codes) for name in before.layers)
        assert (tmp_path / "m" / "recipe.yaml").read_text() == (source / "recipe.yaml").read_text()

    def test_notes_go_to_standard_error(self, tmp_path):
        folder = write(tmp_path / "m", modelopt("fc.", matrix()), modelopt_config())
        result = invoke("convert", str(folder), str(tmp_path / "x.safetensors"), "--to", "blockscale")
        assert result.exit_code == 0
        assert result.stdout.startswith(str(tmp_path / "x.safetensors"))
        assert result.stderr.startswith("blockscale: note: ")
        assert "fc.weight: no input scale, though the configuration says static" in result.stderr

    def test_refusals(self, tmp_path):
        stack = str(FIXTURES / "modelopt-stack")
        result = invoke("convert", stack, str(tmp_path / "m"), "--to", "compressed-tensors")
        assert_refused(result, "compressed-tensors stores matrices", "experts")
        assert not (tmp_path / "m").exists()
        assert invoke("convert", stack, str(tmp_path / "m"), "--to", "gguf").exit_code == 2
        assert invoke("convert", stack, str(tmp_path / "m")).exit_code == 2


class TestQuantize:
    @pytest.fixture
    def model(self, tmp_path):
        random = torch.Generator().manual_seed(5)

        def weight(rows, k, scale=0.05):
            return (torch.randn(rows, k, generator=random) * scale).bfloat16()

        tensors = {
            f"layers.0.attn.{p}_proj.weight": weight(32, 64, s) for p, s in (("q", 0.1), ("k", 0.2), ("v", 0.05))
        }
        tensors |= {"layers.0.mlp.down_proj.weight": weight(32, 96).half(), "layers.0.mlp.gate.weight": weight(4, 64)}
        tensors |= {"lm_head.weight": weight(16, 64), "embed_tokens.weight": weight(16, 64)}
        tensors |= {
            "odd.weight": weight(8, 40),
            "norm.weight": torch.ones(64),
            "experts.w": weight(32, 64).view(2, 16, 64),
        }
        folder = tmp_path / "model"
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text('{"model_type": "llama"}')
        (folder / "tokenizer.json").write_text("{}")
        (folder / "pytorch_model.bin").write_bytes(b"pickled")
        return folder, tensors

    @pytest.mark.parametrize("to", ["compressed-tensors", "modelopt", "blockscale"])
    @pytest.mark.parametrize("method", ["rtn", "four_over_six", "mse"])
    def test_linear_layers_and_nothing_else(self, model, tmp_path, to, method):
        folder, tensors = model
        result = invoke("quantize", str(folder), str(tmp_path / "q"), "--method", method, "--to", to, "--json")
        assert result.exit_code == 0, result.output
        report = {layer["name"]: layer for layer in json.loads(result.stdout)["layers"]}
        left = {"lm_head.weight", "layers.0.mlp.gate.weight", "experts.w"}
        left |= set() if to == "blockscale" else {"odd.weight"}
        assert {name for name, layer in report.items() if layer["reason"]} == left
        found = bs.load_checkpoint(tmp_path / "q")
        assert not found.problems
        assert set(found) == set(tensors)
        assert set(found.layers) == set(report) - left
        for name, x in tensors.items():
            if name not in found.layers:
                assert same_bits(found[name], x)
                continue
            error = x.double() - found[name].dequantize().double()
            snr = 10 * math.log10(float(x.double().square().sum() / error.square().sum()))
            assert report[name]["snr_db"] == pytest.approx(snr, abs=1e-6)
            assert snr > 19
        config = json.loads((tmp_path / "q" / "config.json").read_text())
        assert config["model_type"] == "llama"
        assert config["quantization_config"]["quant_method"] == to
        assert (tmp_path / "q" / "tokenizer.json").exists()
        assert not (tmp_path / "q" / "pytorch_model.bin").exists()

    def test_layers_that_are_fused_later_share_their_global_scale(self, model, tmp_path):
        folder, tensors = model
        quantize_checkpoint(folder, tmp_path / "q", to="modelopt")
        found = bs.load_checkpoint(tmp_path / "q")
        names = [f"layers.0.attn.{p}_proj.weight" for p in "qkv"]
        amax = max(float(tensors[name].abs().max()) for name in names)
        for name in names:
            expected = bs.quantize(tensors[name], global_scale=torch.tensor(amax) / 2688, layout="linear")
            assert same_bits(found[name].codes, expected.codes)
            assert same_bits(found[name].global_scale, expected.global_scale)
        alone = bs.quantize(tensors["layers.0.mlp.down_proj.weight"])
        assert same_bits(found["layers.0.mlp.down_proj.weight"].global_scale, alone.global_scale)

    def test_the_table_and_what_is_excluded(self, model, tmp_path):
        folder, _ = model
        result = invoke("quantize", str(folder), str(tmp_path / "q"), "--exclude", "layers.*", "--exclude", "odd")
        assert result.exit_code == 0, result.output
        assert "1 of 8 linear layers in NVFP4, rtn, compressed-tensors" in " ".join(result.stdout.split())
        rows = {line.split()[0]: line.split()[-1] for line in result.stdout.splitlines() if "weight" in line}
        assert rows["layers.0.mlp.down_proj.weight"] == "excluded"
        assert float(rows["lm_head.weight"]) > 19

    def test_refusals(self, model, tmp_path):
        folder, tensors = model
        assert_refused(
            invoke("quantize", str(FIXTURES / "modelopt-llama"), str(tmp_path / "q")), "is quantised already"
        )
        bad = tensors["lm_head.weight"].clone()
        bad[3, 5] = math.nan
        save_file(tensors | {"lm_head.weight": bad}, folder / "model.safetensors")
        result = invoke("quantize", str(folder), str(tmp_path / "q"), "--exclude", "nothing")
        assert_refused(result, "model.safetensors: lm_head.weight: holds NaN or infinity")
        assert not (tmp_path / "q").exists()
        with pytest.raises(ValueError, match="method: 'best', expected one of 'rtn', 'four_over_six', 'mse'"):
            quantize_checkpoint(folder, tmp_path / "q", method="best")
        shutil.rmtree(folder)
        folder.mkdir()
        with pytest.raises(CheckpointError, match="without any"):
            quantize_checkpoint(folder, tmp_path / "q")

    def test_a_model_of_zeros_loses_nothing(self, tmp_path):
        save_file({"fc.weight": torch.zeros(8, 64)}, tmp_path / "x.safetensors")
        (report,) = quantize_checkpoint(tmp_path / "x.safetensors", tmp_path / "y.safetensors", to="modelopt")
        assert report.snr_db == math.inf
        assert float(load_file(tmp_path / "y.safetensors")["fc.weight_scale_2"]) == 1
