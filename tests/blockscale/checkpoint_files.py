"""Checkpoints in the conventions of others, written with the safetensors library alone."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

import blockscale as bs

FIXTURES = Path(__file__).parent / "fixtures"
F8 = torch.float8_e4m3fn


def modelopt(stem, t, input_scale=None):
    """The tensors of a quantised matrix as ModelOpt names them: `stem` ends in a dot, global scales are multipliers."""
    k = t.shape[-1]
    parts = {"weight": t.codes[..., : k // 2], "weight_scale": t.linear_scales()[..., : k // 16]}
    parts["weight_scale_2"] = t.global_scale
    if input_scale is not None:
        parts["input_scale"] = torch.tensor(input_scale)
    return {stem + role: part.contiguous().clone() for role, part in parts.items()}


def compressed_tensors(stem, t, divisor, input_divisor=None):
    """As compressed-tensors names them; global scales are divisors of shape (1,)."""
    k = t.shape[-1]
    parts = {"weight_packed": t.codes[..., : k // 2], "weight_scale": t.linear_scales()[..., : k // 16]}
    parts["weight_global_scale"] = torch.tensor([divisor])
    if input_divisor is not None:
        parts["input_global_scale"] = torch.tensor([input_divisor])
    return {stem + role: part.contiguous().clone() for role, part in parts.items()}


def matrix(rows=32, k=64, seed=0, amax=None, **options):
    """A quantised normal matrix, scaled so that its largest magnitude is `amax`."""
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
    if amax is not None:
        x = (x / x.abs().max()).clamp(-1, 1) * amax
    return bs.quantize(x, layout="linear", **options)


def write(path, tensors, config=None, **documents):
    """A file, or a directory with model.safetensors, config.json and other JSON documents."""
    path = Path(path)
    if path.suffix == ".safetensors":
        save_file(tensors, path)
        return path
    path.mkdir(exist_ok=True, parents=True)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    if config is not None:
        (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    for name, document in documents.items():
        (path / f"{name}.json").write_text(json.dumps(document))
    return path


def modelopt_config(algorithm="NVFP4", group_size=16, exclude=()):
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "group_size": group_size,
        "exclude_modules": [*exclude],
    }


def compressed_config(dynamic="local", group_size=16, ignore=(), **extra):
    numbers = {"num_bits": 4, "type": "float", "group_size": group_size}
    inputs = None if dynamic is None else {**numbers, "dynamic": dynamic}
    group = {"weights": numbers, "input_activations": inputs, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": [*ignore],
        **extra,
    }
