"""Write the checkpoints in tests/blockscale/fixtures with the libraries whose format they have, from random weights.

The libraries' pins clash, so each has an environment of its own:

    python -m venv A && A/bin/pip install torch==2.13.0 'transformers<5.18' accelerate nvidia-modelopt==0.47.0
    python -m venv B && B/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
    A/bin/python tools/write_checkpoint_fixtures.py modelopt
    B/bin/python tools/write_checkpoint_fixtures.py llmcompressor

Beside each checkpoint lies NAME.values.safetensors, the weights as the library itself dequantises them to bf16, with
the versions in its metadata. The models: "llama" (dense), "moe" (a mixture of experts, one matrix each) and "stack"
(experts in one tensor, which ModelOpt stores transposed).
"""

import argparse
import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "blockscale" / "fixtures"
VOCABULARY = 32
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2}
MODELS = {
    "llama": ("Llama", {}),
    "moe": ("Qwen3Moe", dict(moe_intermediate_size=32, num_experts=4, **EXPERTS)),
    "stack": ("GptOss", dict(num_local_experts=4, **EXPERTS, intermediate_size=32)),
}


def model_of(kind: str) -> torch.nn.Module:
    """Weights normal with a deviation of their own each, one block of 16 zeros in the first row."""
    family, options = MODELS[kind]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16).eval()
    model.config.architectures = [type(model).__name__]
    generator = torch.Generator().manual_seed(20261130)
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.ndim >= 2:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * (0.01 + 0.007 * i))
        if name.endswith("proj.weight"):
            parameter.data[0, :16] = 0
    return model


def tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(1))


def by_modelopt(kind: str, folder: Path) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    model = mtq.quantize(model_of(kind), mtq.NVFP4_DEFAULT_CFG, lambda m: m(tokens()))
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=folder)


def values_by_modelopt(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    values = {}
    for name in parts:
        if not name.endswith("weight_scale_2"):
            continue
        stem = name.removesuffix("weight_scale_2")
        weight = stem + "weight" if stem.endswith(".") else stem[:-1]
        codes, scales = parts[weight], parts[stem + "weight_scale"]
        if codes.ndim == 3:
            codes, scales = codes.mT.contiguous(), scales.mT.contiguous()
        shape = (*codes.shape[:-1], 2 * codes.shape[-1])
        packed = NVFP4QTensor(shape, torch.bfloat16, codes)
        values[weight] = packed.dequantize(scale=scales, double_scale=parts[name], block_sizes={-1: 16})
    return values


def by_llmcompressor(kind: str, scheme: str, folder: Path) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from tokenizers import Tokenizer, models

    with tempfile.TemporaryDirectory() as original:
        model_of(kind).save_pretrained(original)
        model = transformers.AutoModelForCausalLM.from_pretrained(original)
        words = Tokenizer(models.WordLevel({str(i): i for i in range(VOCABULARY)}, unk_token="0"))
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0")
        rows = tokens().tolist()
        oneshot(
            model=model,
            dataset=Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}),
            recipe=QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head", "re:.*mlp.gate$"]),
            num_calibration_samples=len(rows),
            max_seq_length=len(rows[0]),
            processor=tokenizer,
        )
        model.save_pretrained(folder, save_compressed=True, max_shard_size="20KB")


def values_by_compressed_tensors(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4A16

    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)
    values = {}
    for name in parts:
        if name.endswith("weight_packed"):
            stem = name.removesuffix("weight_packed")
            mine = {key.removeprefix(stem): parts[key] for key in parts if key.startswith(stem)}
            values[stem + "weight"] = compressor.decompress(mine, scheme)["weight"]
    return values


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=["modelopt", "llmcompressor"])
    library = parser.parse_args().library
    if library == "modelopt":
        jobs = {f"modelopt-{kind}": lambda folder, kind=kind: by_modelopt(kind, folder) for kind in MODELS}
        values, packages = values_by_modelopt, ["nvidia-modelopt", "transformers", "torch"]
    else:
        kinds = [("llama", "NVFP4"), ("llama", "NVFP4A16"), ("moe", "NVFP4")]
        jobs = {
            f"llmcompressor-{kind}-{scheme}": lambda folder, job=(kind, scheme): by_llmcompressor(*job, folder)
            for kind, scheme in kinds
        }
        values, packages = (
            values_by_compressed_tensors,
            ["llmcompressor", "compressed-tensors", "transformers", "torch"],
        )
    for name, write in jobs.items():
        folder = FIXTURES / name
        shutil.rmtree(folder, ignore_errors=True)
        write(folder)
        dequantised = {key: t.bfloat16().contiguous() for key, t in values(tensors_of(folder)).items()}
        versions = {package: version(package) for package in packages}
        save_file(dequantised, FIXTURES / f"{name}.values.safetensors", versions)
        print(name, versions)


if __name__ == "__main__":
    main()
