"""Checkpoints that ModelOpt and llm-compressor wrote: values, rewriting, conversion, and the way back."""

import filecmp
import importlib.util
import json
import shutil

import pytest
import torch
from checkpoint_files import FIXTURES, matrix
from operands import same_bits, same_tensor
from safetensors import safe_open
from safetensors.torch import load_file

import blockscale as bs

NAMES = sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())
OTHERS = {"modelopt": "compressed-tensors", "compressed-tensors": "modelopt"}
needs_compressed_tensors = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed"
)


def raw(path):
    """Every tensor of a file or directory, as the safetensors library reads it."""
    found = {}
    for file in [path] if path.is_file() else sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    return found


def convention(name):
    return "modelopt" if name.startswith("modelopt") else "compressed-tensors"


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not same_bits(found[name], expected[name])] == []


def test_the_fixtures_are_those_the_documents_name():
    assert NAMES == [
        "llmcompressor-llama-NVFP4",
        "llmcompressor-llama-NVFP4A16",
        "llmcompressor-moe-NVFP4",
        "modelopt-llama",
        "modelopt-moe",
        "modelopt-stack",
    ]


@pytest.mark.parametrize("name", NAMES)
class TestFixtures:
    def test_values_equal_those_of_the_library(self, name):
        checkpoint, values = bs.load_checkpoint(FIXTURES / name), load_file(FIXTURES / f"{name}.values.safetensors")
        assert checkpoint.layers.keys() == values.keys()
        assert not checkpoint.problems
        for weight, expected in values.items():
            assert torch.equal(bs.dequantize(checkpoint[weight], torch.bfloat16), expected), weight

    def test_bytes_equal_those_of_the_file(self, name):
        checkpoint, tensors = bs.load_checkpoint(FIXTURES / name), raw(FIXTURES / name)
        for layer in checkpoint.layers.values():
            t, codes, scales = checkpoint[layer.name], tensors[layer.codes.name], tensors[layer.scales.name]
            if layer.transposed:
                codes, scales = codes.mT, scales.view(torch.uint8).mT
            k = t.shape[-1]
            assert torch.equal(t.codes[..., : k // 2], codes)
            assert torch.equal(t.scales.view(torch.uint8)[..., : k // 16], scales.view(torch.uint8))
            stored = tensors[layer.global_scale.name]
            assert same_bits((t.global_scale if t.divisor is None else t.divisor).reshape(stored.shape), stored)
        for plain in checkpoint.plain:
            assert same_bits(checkpoint[plain], tensors[plain])

    def test_activations_are_as_configured(self, name):
        checkpoint = bs.load_checkpoint(FIXTURES / name)
        kinds = {layer.activations for layer in checkpoint.layers.values()}
        assert kinds == {"weight-only" if name.endswith("A16") else "static"}
        for weight in checkpoint.layers:
            scale = checkpoint.input_scale(weight)
            assert (scale is None) == name.endswith("A16")
            assert scale is None or 1e-7 < float(scale) < 1

    def test_rewriting_copies_every_file(self, name, tmp_path):
        bs.save_checkpoint(bs.load_checkpoint(FIXTURES / name), tmp_path / "copy")
        names = sorted(path.name for path in (FIXTURES / name).iterdir())
        assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == names
        assert filecmp.cmpfiles(FIXTURES / name, tmp_path / "copy", names, shallow=False)[0] == names

    def test_a_plain_dictionary_writes_the_same_tensors(self, name, tmp_path):
        tensors = dict(bs.load_checkpoint(FIXTURES / name))
        bs.save_checkpoint(tensors, tmp_path / "copy.safetensors")
        if name == "modelopt-stack":  # a dictionary does not say that the stack was stored transposed
            found = bs.load_checkpoint(tmp_path / "copy.safetensors")
            assert all(same_tensor(found[w], tensors[w]) for w in found.layers)
        else:
            assert_same_tensors(raw(tmp_path / "copy.safetensors"), raw(FIXTURES / name))
        if name in ("modelopt-llama", "modelopt-moe"):
            assert filecmp.cmp(tmp_path / "copy.safetensors", FIXTURES / name / "model.safetensors", shallow=False)

    def test_a_plain_dictionary_keeps_what_activations_are(self, name, tmp_path):
        """In its own convention and, where that can hold the weights, in the other."""
        source = bs.load_checkpoint(FIXTURES / name)
        for to in (convention(name), *([] if name == "modelopt-stack" else [OTHERS[convention(name)]])):
            bs.save_checkpoint(dict(source), tmp_path / to, to=to)
            found = bs.load_checkpoint(tmp_path / to)
            assert not found.problems
            assert found.layers.keys() == source.layers.keys()
            for weight, layer in source.layers.items():
                assert found.layers[weight].activations == layer.activations
                scales = [checkpoint.input_scale(weight) for checkpoint in (source, found)]
                assert scales == [None, None] or float(scales[1]) == pytest.approx(float(scales[0]), rel=2**-23)

    def test_to_our_own_format_and_back_loses_nothing(self, name, tmp_path):
        bs.save_checkpoint(bs.load_checkpoint(FIXTURES / name, layout="128x4"), tmp_path / "own", to="blockscale")
        own = bs.load_checkpoint(tmp_path / "own")
        assert not own.problems
        assert {layer.layout for layer in own.layers.values()} == {"128x4"}
        bs.save_checkpoint(own, tmp_path / "back", to=convention(name))
        assert_same_tensors(raw(tmp_path / "back"), raw(FIXTURES / name))
        assert not bs.load_checkpoint(tmp_path / "back").problems

    def test_to_the_other_convention_keeps_codes_and_block_scales(self, name, tmp_path):
        source, target = bs.load_checkpoint(FIXTURES / name), OTHERS[convention(name)]
        if name == "modelopt-stack":
            with pytest.raises(ValueError, match=r"experts\.\w+: compressed-tensors stores matrices"):
                bs.save_checkpoint(source, tmp_path / "other", to=target)
            assert not (tmp_path / "other").exists()
            return
        bs.save_checkpoint(source, tmp_path / "other", to=target)
        other = bs.load_checkpoint(tmp_path / "other")
        assert not other.problems
        assert other.layers.keys() == source.layers.keys()
        for weight in source.layers:
            a, b = source[weight], other[weight]
            assert same_bits(a.codes, b.codes)
            assert same_bits(a.scales, b.scales)
            assert float(b.global_scale) == pytest.approx(float(a.global_scale), rel=2**-23)
            assert other.layers[weight].activations == source.layers[weight].activations
            scales = [c.input_scale(weight) for c in (source, other)]
            assert scales == [None, None] or float(scales[1]) == pytest.approx(float(scales[0]), rel=2**-23)

    def test_small_shards_make_an_index(self, name, tmp_path):
        source = bs.load_checkpoint(FIXTURES / name)
        bs.save_checkpoint(source, tmp_path / "m", to=convention(name), config=source.source.config, shard_bytes=9000)
        index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
        files = sorted(path.name for path in (tmp_path / "m").glob("*.safetensors"))
        assert sorted(set(index["weight_map"].values())) == files
        assert len(files) > 2
        assert all(path.stat().st_size < 16000 for path in (tmp_path / "m").glob("*.safetensors"))
        assert_same_tensors(raw(tmp_path / "m"), raw(FIXTURES / name))
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in raw(tmp_path / "m").values())


@needs_compressed_tensors
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", ["modelopt-llama", "modelopt-moe", "llmcompressor-llama-NVFP4A16"])
def test_compressed_tensors_reads_what_we_write(name, tmp_path):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    source = bs.load_checkpoint(FIXTURES / name)
    bs.save_checkpoint(source, tmp_path / "m", to="compressed-tensors", config=source.source.config)
    config = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    parsed = QuantizationConfig.model_validate(config)
    (scheme,) = parsed.config_groups.values()
    assert scheme.weights.group_size == 16
    assert (scheme.input_activations is None) == name.endswith("A16")
    compressor, tensors = BaseCompressor.get_value_from_registry(parsed.format), raw(tmp_path / "m")
    expected = load_file(FIXTURES / f"{name}.values.safetensors")
    for weight, values in expected.items():
        stem = weight.removesuffix("weight")
        mine = {key.removeprefix(stem): t for key, t in tensors.items() if key.startswith(stem)}
        assert set(compressor.compression_param_names(scheme)) <= set(mine) | {"input_global_scale"}
        theirs = compressor.decompress(mine, scheme)["weight"]
        assert torch.equal(theirs, bs.load_checkpoint(tmp_path / "m")[weight].dequantize(torch.bfloat16))
        assert torch.allclose(theirs.float(), values.float(), rtol=2**-7)


@needs_compressed_tensors
@pytest.mark.filterwarnings("default")
def test_compressed_tensors_reads_fresh_tensors(tmp_path):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    t = matrix(48, 96, amax=3.0, method="four_over_six")
    bs.save_checkpoint({"fc.weight": t, "lm_head.weight": torch.ones(4, 96)}, tmp_path / "m", to="compressed-tensors")
    config = QuantizationConfig.model_validate(
        json.loads((tmp_path / "m/config.json").read_text())["quantization_config"]
    )
    assert config.ignore == ["lm_head"]
    tensors = {key.removeprefix("fc."): value for key, value in raw(tmp_path / "m").items() if key.startswith("fc.")}
    (scheme,) = config.config_groups.values()
    theirs = BaseCompressor.get_value_from_registry(config.format).decompress(tensors, scheme)["weight"]
    assert torch.equal(theirs, bs.load_checkpoint(tmp_path / "m")["fc.weight"].dequantize(torch.bfloat16))


def test_codes_of_the_f4_dtype(tmp_path):
    """safetensors has a dtype for packed codes; files that use it read the same, and are rewritten with it."""
    from safetensors.torch import save_file

    tensors = load_file(FIXTURES / "modelopt-llama" / "model.safetensors")
    packed = {name: t.view(torch.float4_e2m1fn_x2) if t.dtype == torch.uint8 else t for name, t in tensors.items()}
    shutil.copytree(FIXTURES / "modelopt-llama", tmp_path / "f4")
    save_file(packed, tmp_path / "f4" / "model.safetensors", {"format": "pt"})
    found, expected = bs.load_checkpoint(tmp_path / "f4"), bs.load_checkpoint(FIXTURES / "modelopt-llama")
    assert list(found.layers) == list(expected.layers)
    assert {layer.codes.dtype for layer in found.layers.values()} == {"F4"}
    assert all(same_tensor(found[weight], expected[weight]) for weight in found.layers)
    bs.save_checkpoint(found, tmp_path / "copy")
    assert filecmp.cmp(tmp_path / "f4" / "model.safetensors", tmp_path / "copy" / "model.safetensors", shallow=False)
    bs.save_checkpoint(found, tmp_path / "again", config={})
    assert filecmp.cmp(tmp_path / "f4" / "model.safetensors", tmp_path / "again" / "model.safetensors", shallow=False)
    bs.save_checkpoint(found, tmp_path / "other", to="compressed-tensors")
    assert {t.dtype for name, t in raw(tmp_path / "other").items() if name.endswith("weight_packed")} == {torch.uint8}
