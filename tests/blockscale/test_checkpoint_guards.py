"""What is refused, left alone or said aloud: arguments, names, patterns, and layers that only look quantisable."""

import contextlib
import json
import os
import time
import warnings

import pytest
import torch
from checkpoint_files import compressed_config, compressed_tensors, matrix, modelopt, modelopt_config, write
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import blockscale as bs
from blockscale.checkpoints import CheckpointError, load_checkpoint, quantize_checkpoint, save_checkpoint
from blockscale.checkpoints.config import bounded_regex
from blockscale.checkpoints.selection import looks_linear
from blockscale.cli import terminal
from blockscale.cli.app import app


def reasons(folder, tensors, config=None, **options):
    """Of a model of these tensors: each linear layer -> why it was left, None where it is quantised."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {}))
    reports = quantize_checkpoint(folder, folder / "out", **options)
    return {report.name: report.reason for report in reports}


def gpt2(bias=True):
    made = {}
    for name, rows, columns in (("attn.c_attn", 32, 96), ("attn.c_proj", 32, 32), ("mlp.c_fc", 32, 128)):
        made[f"h.0.{name}.weight"] = torch.randn(rows, columns)
        if bias:
            made[f"h.0.{name}.bias"] = torch.randn(columns)
    return made


class TestSelection:
    @pytest.mark.parametrize(("bias", "config"), [(True, {}), (False, {}), (False, {"model_type": "gpt2"})])
    def test_gpt2s_transposed_layers_are_left(self, tmp_path, bias, config):
        tensors = gpt2(bias)
        found = reasons(tmp_path / "m", tensors, config)
        assert set(found.values()) == {"stored (K, N)"}
        assert len(found) == 3
        out = load_file(tmp_path / "m" / "out" / "model.safetensors")
        assert all(torch.equal(out[name], t) for name, t in tensors.items())

    def test_linear_layers_of_the_same_names_are_quantised(self, tmp_path):
        tensors = {"h.0.c_attn.weight": torch.randn(96, 32), "h.0.c_attn.bias": torch.randn(96)}
        assert reasons(tmp_path / "m", tensors) == {"h.0.c_attn.weight": None}

    def test_a_bias_tells_for_any_name(self, tmp_path):
        assert reasons(tmp_path / "m", {"a.weight": torch.randn(32, 64), "a.bias": torch.randn(64)}) == {
            "a.weight": "stored (K, N)"
        }

    @pytest.mark.parametrize("name", ["embed_tokens", "word_embeddings", "tok_emb", "wte", "relative_attention_bias"])
    def test_embeddings(self, name):
        assert not looks_linear(f"m.{name}.weight", "BF16", (64, 64))

    @pytest.mark.parametrize("name", ["member_proj", "assembly", "lm_head", "up_proj"])
    def test_words_that_merely_hold_emb(self, name):
        assert looks_linear(f"m.{name}.weight", "BF16", (64, 64))

    @pytest.mark.parametrize("exclude", ["lm_head", b"lm_head", [1]])
    def test_exclude_is_a_sequence_of_strings(self, tmp_path, exclude):
        with pytest.raises(TypeError, match="exclude: "):
            quantize_checkpoint(tmp_path, tmp_path / "out", exclude=exclude)

    def test_a_pattern_that_matches_nothing_is_named(self, tmp_path):
        with pytest.warns(UserWarning, match=r"exclude: 'lm_haed' matches no linear layer"):
            found = reasons(tmp_path / "m", {"fc.weight": torch.randn(16, 32)}, exclude=["lm_haed", "lm_head"])
        assert found == {"fc.weight": None}


class TestPatterns:
    @pytest.mark.parametrize("pattern", ["(a|aa)+$", "(a+)+$", "(a*)*b", r"(a)\1", "(?:(?:aa|b)c)*", "(?:(?=a+)a)+"])
    def test_repeats_of_repeats_are_refused_as_they_are_read(self, tmp_path, pattern):
        folder = tmp_path / "m"
        tensors = compressed_tensors("a" * 64 + ".", matrix(), 1344.0)
        write(folder, tensors, compressed_config(ignore=["re:" + pattern]))
        start = time.monotonic()
        with pytest.raises(CheckpointError, match=r"config\.json.*not a regular expression that is taken"):
            load_checkpoint(folder)
        assert time.monotonic() - start < 5

    def test_many_repeats_in_a_row_are_refused_for_long_names(self, tmp_path):
        folder = tmp_path / "m"
        tensors = compressed_tensors("a" * 3000 + ".", matrix(), 1344.0)
        write(folder, tensors, compressed_config(ignore=["re:.*a.*a.*a.*b"]))
        with pytest.raises(CheckpointError, match="4 repeats take too long for a name of 3000 characters"):
            load_checkpoint(folder)

    @pytest.mark.parametrize(
        "pattern", [r".*\.layers\.\d+\.(self_attn|mlp)\.", ".*lm_head", r"(?!.*head).*[qkv]_proj$"]
    )
    def test_usual_patterns_are_taken(self, pattern):
        matches = bounded_regex(pattern)
        assert matches("model.layers.3.self_attn.q_proj") is ("lm_head" not in pattern)


class TestWhatIsSaid:
    def test_a_file_cannot_drive_the_terminal(self, tmp_path):
        path = write(tmp_path / "x.safetensors", modelopt("\x1b[2Jevil.", matrix()))
        result = CliRunner().invoke(app, ["inspect", str(path)])
        assert result.exit_code == 0
        assert "\x1b[2J" not in result.output
        assert "\\x1b[2J" in result.output
        assert terminal.printable("a\u202eb\ud800\nc") == "a\\u202eb\\ud800\nc"

    def test_another_methods_configuration_is_noted(self, tmp_path):
        write(tmp_path / "m", modelopt("fc.", matrix(), 0.01), compressed_config())
        with pytest.warns(UserWarning, match=r"stored as modelopt's, though the configuration is compressed-tensors's"):
            load_checkpoint(tmp_path / "m")

    def test_arrangements_do_not_apply_to_our_own_files(self, tmp_path):
        t = matrix()
        save_checkpoint({"fc.weight": t}, tmp_path / "x.safetensors", to="blockscale")
        with pytest.warns(UserWarning, match="first_nibble say nothing of blockscale's own layers"):
            found = load_checkpoint(tmp_path / "x.safetensors", first_nibble="high")
        assert torch.equal(found["fc.weight"].codes, t.codes)

    def test_a_single_file_leaves_the_configuration_behind(self, tmp_path):
        write(tmp_path / "m", modelopt("fc.", matrix(), 0.01), modelopt_config())
        with pytest.warns(UserWarning, match=r"out\.safetensors: a single file; config\.json .* stay behind"):
            save_checkpoint(load_checkpoint(tmp_path / "m"), tmp_path / "out.safetensors", to="compressed-tensors")

    def test_implausible_values_are_said_of_the_callers_line(self, tmp_path):
        tensors = modelopt("fc.", matrix(amax=2.0)) | {"fc.weight_scale_2": torch.tensor(1344.0)}
        checkpoint = load_checkpoint(write(tmp_path / "x.safetensors", tensors))
        for read in (checkpoint.get, checkpoint.weight, checkpoint.__getitem__, checkpoint.parts):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                read("fc.weight")
            assert [os.path.basename(w.filename) for w in caught] == [os.path.basename(__file__)]


class TestArguments:
    @pytest.mark.parametrize(
        ("tensors", "options", "error", "text"),
        [
            ([1, 2], {}, TypeError, "tensors: list"),
            ({1: torch.zeros(1)}, {}, TypeError, "name 1, expected a str"),
            ({"\ud800": torch.zeros(1)}, {}, ValueError, "UTF-8"),
            ({"a": torch.zeros(1, device="meta")}, {}, ValueError, "a: on the meta device"),
            ({"a": torch.zeros(1)}, {"shard_bytes": -5}, ValueError, "shard_bytes: -5"),
            ({"a": torch.zeros(1)}, {"config": "foo"}, TypeError, "config: str"),
            ({"a": torch.zeros(1)}, {"config": {"dtype": torch.float32}}, TypeError, "config: .*JSON"),
        ],
    )
    def test_bad_ones_are_named_and_nothing_is_made(self, tmp_path, tensors, options, error, text):
        with pytest.raises(error, match=text):
            save_checkpoint(tensors, tmp_path / "m", **options)
        assert not list(tmp_path.iterdir())

    def test_a_path_is_a_path(self):
        with pytest.raises(TypeError, match="path: None"):
            load_checkpoint(None)

    def test_companions_replace_those_of_the_same_names(self, tmp_path):
        write(tmp_path / "m", modelopt("fc.", matrix(), 0.01), modelopt_config())
        (tmp_path / "m" / "tokenizer.json").write_text("new")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "tokenizer.json").write_text("old")
        save_checkpoint(load_checkpoint(tmp_path / "m"), tmp_path / "out", to="compressed-tensors")
        assert (tmp_path / "out" / "tokenizer.json").read_text() == "new"


class TestAttentionRows:
    def fused(self, tmp_path, config):
        tensors = modelopt("qkv_proj.", matrix(rows=96))
        tensors["qkv_proj.weight_scale_2"] = torch.full((3,), 1e-3)
        write(tmp_path / "m", tensors)
        (tmp_path / "m" / "config.json").write_text(json.dumps(config))
        return tmp_path / "m"

    def test_text_config_is_read(self, tmp_path):
        inner = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}
        found = bs.load_checkpoint(self.fused(tmp_path, {"text_config": inner}))
        assert list(found) == [f"qkv_proj.weight[{rows}]" for rows in ("0:64", "64:80", "80:96")]

    def test_missing_keys_are_named(self, tmp_path):
        with pytest.raises(CheckpointError, match="does not give them by num_attention_heads, num_key_value_heads"):
            bs.load_checkpoint(self.fused(tmp_path, {"a": 1}))


class TestInterruptions:
    """A process that dies between two renames: tensors are whole, whichever configuration lies beside them."""

    @pytest.mark.parametrize("renames", range(5))
    def test_tensors_are_of_one_checkpoint_after_any_number_of_renames(self, tmp_path, monkeypatch, renames):
        t = {name: matrix(seed=seed) for seed, name in enumerate(("a.weight", "b.weight"))}
        save_checkpoint(t, tmp_path / "m", to="modelopt", shard_bytes=1)
        replace, left = os.replace, [renames]

        def dying(source, target):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            replace(source, target)

        monkeypatch.setattr(os, "replace", dying)
        with contextlib.suppress(KeyboardInterrupt):
            save_checkpoint(t, tmp_path / "m", to="compressed-tensors", shard_bytes=1)
        monkeypatch.undo()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = load_checkpoint(tmp_path / "m")
        assert all(torch.equal(found[name].codes, t[name].codes) for name in t)
        conventions = {layer.convention for layer in found.layers.values()}
        assert len(conventions) == 1
        agree = conventions == {found.config.method}
        assert agree or any("though the configuration is" in str(w.message) for w in caught)
