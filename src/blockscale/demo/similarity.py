"""How close the embeddings of the quantised encoder are to those in fp32, and how close they must be."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import blockscale
from blockscale import NVFP4Tensor
from blockscale.demo.minilm import Linear, MiniLM

METHODS = ("rtn", "four_over_six")


@dataclass(frozen=True)
class Requirement:
    """Cosine similarity with fp32: the least that any one sentence, and their mean, may have."""

    minimum: float
    mean: float


REQUIRED = {"weight-only": Requirement(0.94, 0.97), "nvfp4": Requirement(0.90, 0.955)}
"""By what the activations are: left as they come ("weight-only") or quantised at every layer ("nvfp4")."""


@dataclass(frozen=True)
class Similarity:
    """One run of the quantised encoder: the cosine of each sentence with its fp32 embedding."""

    method: str
    activations: str
    cosines: Sequence[float]

    @property
    def minimum(self) -> float:
        return min(self.cosines)

    @property
    def mean(self) -> float:
        return sum(self.cosines) / len(self.cosines)

    @property
    def passed(self) -> bool:
        required = REQUIRED[self.activations]
        return self.minimum >= required.minimum and self.mean >= required.mean


def nvfp4_linear(
    model: MiniLM, weights: Mapping[str, NVFP4Tensor], method: str, activations: str, done: Callable[[], None]
) -> Linear:
    """The encoder's linear layer with NVFP4 weights (N, K); calls `done` after every layer."""

    def linear(layer: str, x: Tensor, activation: str | None) -> Tensor:
        a = blockscale.quantize(x, method=method) if activations == "nvfp4" else x
        y: Tensor = blockscale.gemm(
            a, weights[layer], bias=model.bias(layer), activation=activation, out_dtype=torch.float32
        )
        done()
        return y

    return linear


def cosines(x: Tensor, y: Tensor) -> list[float]:
    """Row by row, in float64; x and y are (S, D)."""
    values: list[float] = torch.cosine_similarity(x.double(), y.double(), dim=1).tolist()
    return values
