"""Models of transformers, quantised: saved and loaded elsewhere, compiled, generating."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_job import minilm, outputs, tiny_llama, token_ids
from operands import same_bits

import blockscale as bs
from blockscale.demo.minilm import PACKAGE

for package in ("transformers", PACKAGE):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)


@pytest.fixture(scope="module")
def models():
    made = {"llama": tiny_llama(), "minilm": minilm(trained=True)}
    plain = outputs(made)
    reports = {name: bs.nn.quantize_model(model) for name, model in made.items()}
    return made, reports, plain


def test_every_layer_but_the_head_is_quantised_and_outputs_stay_near(models):
    made, reports, plain = models
    assert [len(reports[name].layers) for name in ("llama", "minilm")] == [15, 37]
    left = [layer.name for report in reports.values() for layer in report.layers if layer.reason]
    assert left == ["lm_head"]
    for mine, theirs in zip(outputs(made), plain, strict=True):
        assert torch.nn.functional.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0) > 0.95


def test_saved_and_loaded_in_a_new_process(models, tmp_path):
    made, _, _ = models
    for name, model in made.items():
        bs.save_checkpoint(bs.nn.named_weights(model), tmp_path / name)
    script = Path(__file__).with_name("model_job.py")
    paths = os.pathsep.join(p for p in (str(Path(bs.__file__).parents[1]), os.environ.get("PYTHONPATH")) if p)
    subprocess.run([sys.executable, script, tmp_path], check=True, env={**os.environ, "PYTHONPATH": paths})
    for mine, theirs in zip(torch.load(tmp_path / "outputs.pt"), outputs(made), strict=True):
        assert same_bits(mine, theirs)


def test_compiled_equals_eager(models):
    made, _, _ = models
    compiled = {name: torch.compile(model, fullgraph=True, backend="aot_eager") for name, model in made.items()}
    for mine, theirs in zip(outputs(compiled), outputs(made), strict=True):
        assert same_bits(mine, theirs)


def test_generation_runs_and_goes_its_own_way_step_by_step(models):
    """Greedy tokens with the cache are those that whole forward passes choose."""
    llama = models[0]["llama"]
    ids = token_ids()[1:]  # none of them is the padding
    with torch.no_grad():
        made = llama.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        for length in range(ids.shape[1], made.shape[1]):
            assert made[0, length] == llama(made[:, :length]).logits[0, -1].argmax()


def test_mixture_of_experts():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads)).eval()
    original = model.model.layers[0].mlp.experts
    report = bs.nn.quantize_model(model)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, bs.nn.Experts)
    assert "model.layers.0.mlp.experts" in {layer.name for layer in report.layers if layer.reason is None}
    with torch.no_grad():
        for parameter, grouped in ((original.gate_up_proj, experts.gate_up), (original.down_proj, experts.down)):
            parameter.copy_(torch.stack([weight.dequantize() for weight in grouped.each()]))
        x, scores = torch.randn(9, 32), torch.rand(9, 4)
        weights, index = scores.topk(2)
        torch.testing.assert_close(experts(x, index, weights), original(x, index, weights), rtol=1e-4, atol=1e-6)
        model(token_ids() % 64)
