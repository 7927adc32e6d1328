"""The main job: the encoder is the real one, the numbers in its tables are right, and misses are reported."""

import importlib.metadata
import importlib.util
import json
import math
import sys
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import blockscale
from blockscale.cli.app import app
from blockscale.demo import emulation, job, layers, minilm, moe
from blockscale.demo.emulation import EmulatedLayer
from blockscale.demo.sentences import PARAPHRASES, SENTENCES
from blockscale.demo.similarity import REQUIRED, Requirement, Similarity
from blockscale.quantize import METHODS

needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(minilm.PACKAGE) is None or importlib.util.find_spec("tokenizers") is None,
    reason=f"the weights ({minilm.INSTALL_WEIGHTS}) or the extra 'demo' are not installed",
)


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["demo", *arguments])


def no_progress(description: str, total: int):
    return nullcontext(lambda: None)


@pytest.fixture(scope="module")
def model():
    return minilm.MiniLM.load(minilm.model_folder())


@pytest.fixture(scope="module")
def report():
    return job.run(no_progress)


def tokens(*sentences: str) -> list[torch.Tensor]:
    tokenizer = minilm.load_tokenizer(minilm.model_folder())
    return [torch.tensor(tokenizer.encode(sentence).ids) for sentence in sentences]


# the encoder


@needs_weights
def test_the_weights_package_is_located_but_not_imported():
    assert (minilm.model_folder() / "model.safetensors").stat().st_size > 90_000_000
    assert minilm.PACKAGE not in sys.modules


@needs_weights
def test_the_fp32_encoder_is_the_published_one(model):
    """The expected values were computed with BertModel of the transformers library."""
    sentence = "Why is the sky blue?"
    (ids,) = tokens(sentence)
    assert ids.tolist() == [101, 2339, 2003, 1996, 3712, 2630, 1029, 102]
    (embedding,) = model.embed([ids], model.fp32_linear)
    expected = [0.010077, -0.001739, 0.05018, 0.047025, 0.054925, 0.008695, 0.10546, -0.025911]
    torch.testing.assert_close(embedding[:8], torch.tensor(expected), rtol=0, atol=2e-6)
    assert embedding.norm().item() == pytest.approx(1, abs=1e-6)


@needs_weights
def test_a_sentence_is_embedded_alike_alone_and_among_others(model):
    ids = tokens("He sold the boat.", SENTENCES[-1], "Why is the sky blue?")
    together = model.embed(ids, model.fp32_linear)
    alone = torch.cat([model.embed([one], model.fp32_linear) for one in ids])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


@needs_weights
def test_sentences_that_mean_the_same_are_close(model):
    embedded = model.embed(tokens(*(s for pair in PARAPHRASES for s in pair)), model.fp32_linear)
    similar = embedded @ embedded.T
    for i in range(0, len(embedded), 2):
        others = [j for j in range(len(embedded)) if j not in (i, i + 1)]
        assert similar[i, i + 1] > 0.6
        assert similar[i, others].max() < 0.3


@needs_weights
def test_only_real_tokens_reach_the_36_linear_layers(model):
    seen = []

    def linear(layer, x, activation):
        seen.append((layer, tuple(x.shape)))
        return model.fp32_linear(layer, x, activation)

    model.embed(tokens("He sold the boat.", "Why is the sky blue?"), linear)
    assert [layer for layer, _ in seen] == minilm.linear_layers()
    assert len(set(minilm.linear_layers())) == 36
    assert {shape for _, shape in seen} == {(7 + 8, 384), (7 + 8, 1536)}
    matrices = {name for name, t in model.parameters.items() if t.ndim == 2 and "embeddings" not in name}
    assert matrices == {f"{layer}.weight" for layer in [*minilm.linear_layers(), job.POOLER]}


# the job


def test_the_requirement_is_the_promised_one():
    assert {"weight-only": Requirement(0.94, 0.97), "nvfp4": Requirement(0.90, 0.955)} == REQUIRED
    assert len(set(SENTENCES)) == len(SENTENCES) >= 32
    assert min(len(sentence.split()) for sentence in SENTENCES) >= 4


@needs_weights
def test_every_sentence_keeps_its_embedding(report):
    assert {(run.activations, run.method) for run in report.runs} == {
        (kind, method) for kind in ("weight-only", "nvfp4") for method in ("rtn", "four_over_six")
    }
    for run in report.runs:
        required = REQUIRED[run.activations]
        assert len(run.cosines) == len(SENTENCES)
        assert all(required.minimum <= cosine < 0.9999 for cosine in run.cosines), run
        assert math.fsum(run.cosines) / len(run.cosines) >= required.mean, run
    assert report.passed


@needs_weights
def test_quantised_activations_cost_something(report):
    mean = {(run.activations, run.method): run.mean for run in report.runs}
    for method in ("rtn", "four_over_six"):
        assert mean["nvfp4", method] < mean["weight-only", method]


@needs_weights
def test_the_table_has_every_linear_layer(report):
    assert [layer.name for layer in report.layers] == [*minilm.linear_layers(), "pooler.dense"]
    for layer in report.layers:
        n, k = layer.shape
        assert layer.bytes_before == 4 * n * k
        assert layer.bytes_after == n * k // 2 + n * k // 16 + 4
        assert 20 < layer.snr_db["rtn"] < 21
        assert layer.snr_db["rtn"] < layer.snr_db["four_over_six"] < 22
        assert layer.snr_db["rtn"] < layer.snr_db["mse"] < 22


@needs_weights
def test_demo_prints_tables_or_one_document(report, monkeypatch):
    monkeypatch.setattr(job, "run", lambda progress: report)
    text = invoke()
    assert (text.exit_code, text.stderr) == (0, "")
    for part in ("layer.5.output.dense", "384x1536", "331,780", "He sold the boat.", "every requirement met"):
        assert part in text.stdout
    result = invoke("--json")
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    assert document["passed"] is True
    assert len(document["layers"]) == 37
    assert [sentence["text"] for sentence in document["sentences"]] == list(SENTENCES)
    assert document["runs"][0]["cosines"] == list(report.runs[0].cosines)
    assert document["runs"][0]["minimum"] == min(report.runs[0].cosines)


@pytest.mark.parametrize("cosines", [(0.99, 0.939), (0.97, 0.969)], ids=["one sentence", "the mean"])
def test_a_miss_is_exit_code_1_and_a_message(monkeypatch, cosines):
    good, bad = Similarity("rtn", "nvfp4", (0.98, 0.93)), Similarity("four_over_six", "weight-only", cosines)
    layer = layers.Layer("a", (16, 16), 1024, 132, dict.fromkeys(METHODS, 20.0))
    sentences = [job.Sentence("One.", 3), job.Sentence("Two.", 3)]
    report = job.Report([layer], sentences, [good, bad], 1.0, "no compiler")
    monkeypatch.setattr(job, "run", lambda progress: report)
    for arguments in ([], ["--json"]):
        result = invoke(*arguments)
        assert result.exit_code == 1
        assert result.stderr.startswith("blockscale: weight-only with four_over_six: minimum 0.9")
        assert result.stderr.count("\n") == 1
    assert json.loads(result.stdout)["passed"] is False
    assert replace(report, runs=[good]).passed


@needs_weights
def test_a_layer_by_the_kernel_of_a_gpu(report):
    """The emulated kernel and the CPU keep their contracts on a real layer's activations and weight."""
    if isinstance(report.emulated, str):
        pytest.skip(report.emulated)
    m, n, k = report.emulated.sizes
    assert (m, n, k) == (sum(sentence.tokens for sentence in report.sentences), 384, 384)
    assert set(report.emulated.errors) == {"cpu", "sm_100a"}
    assert all(0 < error <= 1 for error in report.emulated.errors.values())
    assert report.emulated.findings == 0
    assert report.emulated.instructions > 10_000


@needs_weights
@pytest.mark.parametrize("arch", ["sm_120a", "sm_121a"])
def test_the_layer_by_the_kernels_of_other_gpus(model, arch):
    reason = emulation.why_not()
    if reason is not None:
        pytest.skip(reason)
    layer = emulation.emulate(model, tokens(*SENTENCES[:2]), arch)
    assert layer.passed, layer
    assert layer.sizes[1:] == (384, 384)
    assert set(layer.errors) == {"cpu", arch}
    assert all(0 < error <= 1 for error in layer.errors.values())


@pytest.mark.parametrize("change", [{"findings": 1}, {"errors": {"cpu": 0.1, "sm_100a": math.nan}}])
def test_a_kernel_that_is_wrong_is_a_miss(monkeypatch, change):
    right = EmulatedLayer("a layer", "sm_100a", (1, 2, 3), "tile", 5, 0, {"cpu": 0.1, "sm_100a": 1.0}, 1.0)
    good = Similarity("rtn", "nvfp4", (0.98, 0.97))
    report = job.Report([], [job.Sentence("One.", 3), job.Sentence("Two.", 3)], [good], 1.0, right)
    assert report.passed
    monkeypatch.setattr(job, "run", lambda progress: replace(report, emulated=replace(right, **change)))
    result = invoke()
    assert result.exit_code == 1
    assert result.stderr.startswith("blockscale: a layer on sm_100a: ")


def test_without_a_compiler_the_demo_says_so(monkeypatch):
    good = Similarity("rtn", "nvfp4", (0.98, 0.97))
    sentences = [job.Sentence("One.", 3), job.Sentence("Two.", 3)]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.7.0")  # not the one that kernels are written for
    report = job.Report([], sentences, [good], 1.0, job.emulate_layer(None, [], no_progress))
    monkeypatch.setattr(job, "run", lambda progress: report)
    result = invoke()
    assert result.exit_code == 0
    assert "No kernel was emulated: nvidia-cutlass-dsl is 4.7.0; kernels are compiled with 4.8.1 alone" in result.stdout


def test_an_embedding_of_nan_is_a_miss(monkeypatch):
    run = Similarity("rtn", "nvfp4", (0.98, math.nan))
    report = job.Report([], [job.Sentence("One.", 3), job.Sentence("Two.", 3)], [run], 1.0, "no compiler")
    monkeypatch.setattr(job, "run", lambda progress: report)
    result = invoke("--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["runs"][0]["cosines"] == [0.98, None]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = invoke()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert minilm.INSTALL_WEIGHTS in result.stderr


@needs_weights
def test_a_missing_tokenizer_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    result = invoke()
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "pip install '.[demo]'" in result.stderr


# --weights


def test_snr_is_signal_over_noise():
    assert layers.snr_db(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 3.0]])) == pytest.approx(10 * math.log10(25))
    assert layers.snr_db(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.0]])) is None


def test_weights_quantises_every_matrix_and_says_why_it_skips(tmp_path):
    torch.manual_seed(0)
    not_finite = torch.randn(8, 32)
    not_finite[3, 5] = torch.nan
    tensors = {
        "fp32": torch.randn(48, 40),
        "bf16": torch.randn(20, 64, dtype=torch.bfloat16),
        "fp16": torch.randn(20, 16, dtype=torch.float16),
        "fp64": torch.randn(20, 64, dtype=torch.float64),
        "zero": torch.zeros(4, 16),
        "int8": torch.zeros(20, 64, dtype=torch.int8),
        "fp8": torch.zeros(16, 16, dtype=torch.float8_e4m3fn),
        "vector": torch.randn(32),
        "stack": torch.randn(3, 4, 32),
        "narrow": torch.randn(64, 15),
        "empty": torch.zeros(0, 32),
        "nan": not_finite,
    }
    path = tmp_path / "mine.safetensors"
    save_file(tensors, path)
    result = invoke("--weights", str(path), "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    document = json.loads(result.stdout)
    rows = {row["name"]: row for row in document["layers"]}
    assert set(rows) == {"fp32", "bf16", "fp16", "fp64", "zero"}
    for name, row in rows.items():
        assert row["shape"] == list(tensors[name].shape)
        assert row["bytes_before"] == tensors[name].nbytes
    # 48 rows of K = 40: codes padded to 64 a row, scales to 128 rows of 4
    assert rows["fp32"]["bytes_after"] == 48 * 32 + 128 * 4 + 4
    assert rows["zero"]["snr_db"] == {"rtn": None, "four_over_six": None, "mse": None}
    approximate = blockscale.quantize(tensors["bf16"]).dequantize().double()
    noise = (tensors["bf16"].double() - approximate).square().sum()
    expected = 10 * torch.log10(tensors["bf16"].double().square().sum() / noise)
    assert rows["bf16"]["snr_db"]["rtn"] == pytest.approx(expected.item())
    reasons = {row["name"]: row["reason"] for row in document["skipped"]}
    assert "I8" in reasons["int8"]
    assert "F8_E4M3" in reasons["fp8"]
    assert reasons["vector"] == "1-D, not 2-D"
    assert reasons["stack"] == "3-D, not 2-D"
    assert "K = 15" in reasons["narrow"]
    assert "no rows" in reasons["empty"]
    assert "nan" in reasons["nan"]
    assert "(3, 5)" in reasons["nan"]
    text = invoke("--weights", str(path))
    assert text.exit_code == 0
    assert "skipped narrow: K = 15" in text.stdout
    assert "48x40" in text.stdout


def test_weights_with_nothing_to_quantise_is_no_success(tmp_path):
    path = tmp_path / "vectors.safetensors"
    save_file({"bias": torch.randn(32)}, path)
    result = invoke("--weights", str(path))
    assert result.exit_code == 2
    assert result.stdout == "skipped bias: 1-D, not 2-D\n"
    assert result.stderr == f"blockscale: no tensor of {path} can be quantised\n"


@pytest.mark.parametrize("kind", ["missing", "folder", "empty", "text", "truncated"])
def test_weights_of_an_unreadable_file_is_one_line(tmp_path, kind):
    path = tmp_path / "broken.safetensors"
    if kind == "folder":
        path.mkdir()
    elif kind == "truncated":
        save_file({"w": torch.randn(64, 64)}, path)
        path.write_bytes(path.read_bytes()[:-100])
    elif kind != "missing":
        path.write_bytes(b"" if kind == "empty" else b"these are not weights")
    result = invoke("--weights", str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"blockscale: cannot read {path}: ")
    assert result.stderr.count("\n") == 1
    as_json = invoke("--weights", str(path), "--json")
    assert as_json.exit_code == 2
    assert str(path) in json.loads(as_json.stdout)["error"]


def test_a_layer_of_experts_runs_emulated():
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    result = invoke("--moe", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["passed"]
    assert (document["findings"], document["launches"]) == (0, 2)
    assert sum(document["rows"]) == moe.TOKENS * moe.TOP_K
    assert all(0 < error <= 1 for error in document["errors"].values())


def test_a_layer_of_experts_that_misses_is_reported(monkeypatch):
    bad = moe.EmulatedExperts("sm_100a", (1,), ("tile", "tile"), 2, 1, 1, 1.0, {"cpu": 0.1}, 0.0, 12.0, 1.0)
    assert not bad.passed
    monkeypatch.setattr(moe, "emulate", lambda: bad)
    monkeypatch.setattr(emulation, "why_not", lambda: None)
    result = invoke("--moe")
    assert result.exit_code == 1
    assert "1 findings" in result.stderr
    monkeypatch.setattr(emulation, "why_not", lambda: "no compiler")
    result = invoke("--moe")
    assert result.exit_code == 2
    assert "no compiler" in result.stderr
