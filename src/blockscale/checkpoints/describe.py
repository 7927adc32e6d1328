"""The quantisation configuration that goes with what is written, in the words of each convention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockscale._version import __version__
from blockscale.checkpoints.config import BLOCKSCALE, COMPRESSED_TENSORS, DYNAMIC, STATIC, WEIGHT_ONLY
from blockscale.formats.layouts import BLOCK

_PRODUCER = {"name": "blockscale", "version": __version__}
_ALGORITHM = {STATIC: "NVFP4", DYNAMIC: "NVFP4", WEIGHT_ONLY: "W4A16_NVFP4"}
_PACKED = "nvfp4-pack-quantized"
_NUMBERS = {"num_bits": 4, "type": "float", "group_size": BLOCK}
_ARGUMENTS = {**_NUMBERS, "symmetric": True, "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"}


def quantization_config(convention: str, activations: Mapping[str, str], ignored: Sequence[str]) -> dict[str, Any]:
    """For config.json.

    Args:
        convention: BLOCKSCALE, COMPRESSED_TENSORS or MODELOPT.
        activations: every quantised module -> STATIC, DYNAMIC or WEIGHT_ONLY.
        ignored: the linear layers that are not quantised.
    """
    kinds = sorted(set(activations.values()))
    targets = {kind: ["Linear"] if len(kinds) == 1 else _modules(activations, kind) for kind in kinds}
    groups = {f"group_{i}": _group(convention, kind, targets[kind]) for i, kind in enumerate(kinds)}
    config: dict[str, Any] = {"config_groups": groups, "ignore": list(ignored), "quant_method": convention}
    if convention == BLOCKSCALE:
        return config | {"producer": _PRODUCER}
    if convention == COMPRESSED_TENSORS:
        return config | {"format": _PACKED, "quantization_status": "compressed"}
    return config | {"quant_algo": _algorithm(kinds), "producer": _PRODUCER}


def modelopt_config(activations: Mapping[str, str], ignored: Sequence[str]) -> dict[str, Any]:
    """hf_quant_config.json, which ModelOpt writes beside config.json."""
    kinds = sorted(set(activations.values()))
    said: dict[str, Any] = {"quant_algo": _algorithm(kinds), "kv_cache_quant_algo": None, "group_size": BLOCK}
    if len({_ALGORITHM[kind] for kind in kinds}) > 1:
        layers = {name: {"quant_algo": _ALGORITHM[kind], "group_size": BLOCK} for name, kind in activations.items()}
        said |= {"quantized_layers": layers}
    return {"producer": _PRODUCER, "quantization": said | {"exclude_modules": list(ignored)}}


def _algorithm(kinds: Sequence[str]) -> str:
    algorithms = {_ALGORITHM[kind] for kind in kinds} or {"NVFP4"}
    return algorithms.pop() if len(algorithms) == 1 else "MIXED_PRECISION"


def _modules(activations: Mapping[str, str], kind: str) -> list[str]:
    return [module for module, activation in activations.items() if activation == kind]


def _group(convention: str, kind: str, targets: list[str]) -> dict[str, Any]:
    theirs = convention == COMPRESSED_TENSORS
    numbers: dict[str, Any] = _ARGUMENTS if theirs else _NUMBERS
    static = "local" if theirs else False
    group: dict[str, Any] = {"weights": {**numbers, "dynamic": False}, "targets": targets}
    if theirs:
        group |= {"format": _PACKED, "input_activations": None}
    if kind != WEIGHT_ONLY:
        group["input_activations"] = {**numbers, "dynamic": static if kind == STATIC else True}
    return group
