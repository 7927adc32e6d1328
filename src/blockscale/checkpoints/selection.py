"""Which tensors are the weights of linear layers that can be quantised, as far as names, shapes and biases tell."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from blockscale.checkpoints.config import Matches, any_of, wildcard

_EMBEDDINGS = ("wte", "wpe", "shared", "relative_attention_bias")
_CONV1D = ("c_attn", "c_proj", "c_fc", "q_attn")  # GPT-2's layers, which hold the transpose of what Linear holds
_CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")


class Shaped(Protocol):
    """What is asked of an entry of a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def looks_linear(name: str, dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is the weight of a linear layer, or of a stack of experts, in floating point, as far as a file
    can tell."""
    module, _, role = name.rpartition(".")
    last = module.rpartition(".")[2]
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", last)
    embeds = last in _EMBEDDINGS or any(re.match(r"emb(s|d|ed.*)?$", word.lower()) for word in words)
    linear = (role == "weight" and len(shape) == 2) or (role != "weight" and len(shape) == 3 and "expert" in module)
    return linear and dtype in ("BF16", "F16", "F32") and not embeds


def stored_transposed(entries: Mapping[str, Shaped], model: Mapping[str, Any]) -> set[str]:
    """The names of the matrices that are stored (K, N), inputs first.

    A bias has N elements, which tells where N and K differ. Of GPT-2's layers all are transposed if one is, or if
    config.json, `model`, names such a model.
    """
    found, named = set(), set()
    for name, entry in entries.items():
        module, _, role = name.rpartition(".")
        if role != "weight" or len(entry.shape) != 2:
            continue
        rows, columns = entry.shape
        bias = entries.get(f"{module}.bias")
        last = module.rpartition(".")[2]
        if last in _CONV1D:
            named.add(name)
        beyond = rows != columns and bias is not None and bias.shape == (columns,)
        if beyond or (last == "c_attn" and bias is None and columns == 3 * rows):
            found.add(name)
    if found & named or model.get("model_type") in _CONV1D_MODELS:
        return found | named
    return found


def exclusion(exclude: Sequence[str]) -> Matches:
    """One predicate for all patterns. Raises TypeError for a string in place of a sequence, or what is no string."""
    if isinstance(exclude, (str, bytes)):
        raise TypeError(f"exclude: {exclude!r}, expected a sequence of patterns, as [{exclude!r}]")
    for pattern in exclude:
        if not isinstance(pattern, str):
            raise TypeError(f"exclude: {pattern!r}, expected strings")
    return any_of([wildcard(pattern) for pattern in exclude])


def warn_of_idle(patterns: Sequence[str], modules: Sequence[str], usual: Sequence[str]) -> None:
    """A warning for patterns that match no module, `usual` ones apart: most often a misspelt name."""
    idle = [p for p in patterns if p not in usual and not any(map(wildcard(p), modules))]
    if idle:
        warnings.warn(f"exclude: {', '.join(map(repr, idle))} matches no linear layer", stacklevel=3)
