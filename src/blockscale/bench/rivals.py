"""What a product is measured against: every way to multiply an activation by an NVFP4 weight that is at hand.

A rival gets the weight as it likes to have it, once a cold copy, before anything is timed.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import blockscale
from blockscale import Config, NVFP4Tensor
from blockscale.bench.timing import Candidate, copies
from blockscale.formats.layouts import FRAGMENT, LINEAR

EXACT = ("ours", "humming")  # those that read NVFP4 and lose nothing but by accumulating
AHEAD = "ours, ahead"
HUMMING = "humming-kernels"
HUMMING_TOLERANCE = 100.0


@dataclass(frozen=True, eq=False)
class Product:
    """x (M, K), bf16 or fp16, times `weight` (N, K), on one GPU; results in the dtype of x."""

    x: Tensor
    weight: NVFP4Tensor

    def results(self, count: int) -> list[Tensor]:
        shape = (count, self.x.shape[0], self.weight.shape[0])
        return list(torch.empty(shape, dtype=self.x.dtype, device=self.x.device))


def ours(product: Product, config: Config | None = None) -> Candidate:
    """`gemm` as a user calls it, by `config` or the library's own choice."""
    weight = product.weight.with_layout(FRAGMENT)
    name = "ours" if config is None else f"ours, {config}"
    return _of_copies(name, product, weight.nbytes, lambda: _cloned(weight), partial(_gemm, product.x, config))


def ahead(product: Product) -> Candidate:
    """The same, with weights read before the kernels ahead in the stream have ended, which is the user's to allow."""
    (m, k), n = product.x.shape, product.weight.shape[0]
    chosen = blockscale.config_for(m, n, k)  # for bf16, and fp16 gets the same
    return replace(ours(product, replace(chosen, ahead=True)), name=AHEAD)


def cublas(product: Product) -> Candidate:
    """torch.matmul by weights that were never quantised further: 16 bits an element."""
    weight = _values(product)
    return _of_copies("cublas", product, weight.nbytes, weight.clone, partial(_matmul, product.x))


def expanded(product: Product) -> Candidate:
    """All weights expanded to 16 bits, then torch.matmul, every time."""
    from blockscale.bench.triton_kernels import expand

    linear = product.weight.with_layout(LINEAR)
    full = torch.empty(product.weight.shape, dtype=product.x.dtype, device=product.x.device)

    def launch(weight: NVFP4Tensor, out: Tensor) -> None:
        expand(weight.codes, weight.scales.view(torch.uint8), full)
        _matmul(product.x, full, out)
        out.mul_(product.weight.global_scale)

    return _of_copies("expand + cublas", product, linear.nbytes, lambda: _cloned(linear), launch)


def humming(product: Product) -> Candidate:
    """The package humming-kernels, by its own heuristics for so many rows. It adds partial sums in the dtype of the
    result, and is held to `HUMMING_TOLERANCE` times what the contract allows."""
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    n, k = product.weight.shape
    linear = product.weight.with_layout(LINEAR)
    how = {"quant_method": "modelopt", "quant_algo": "nvfp4"}
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=how, torch_dtype=product.x.dtype).to(product.x.device)
    parts = {"weight": linear.codes, "weight_scale": linear.scales, "weight_scale_2": linear.global_scale.reshape(1)}
    layer.load_from_tensors(parts)
    layer.transform()
    tuning = json.dumps(get_heuristics_config(layer.humming_config, shape_m=product.x.shape[0]))

    def launch(layer: Any, out: Tensor) -> None:
        layer(product.x, outputs=out, tuning_config=tuning)

    made = _of_copies("humming", product, linear.nbytes, lambda: copy.deepcopy(layer), launch)
    return replace(made, tolerance=HUMMING_TOLERANCE, repeatable=False)


RIVALS: dict[str, Callable[[Product], Candidate]] = {
    "cublas": cublas,
    "expand + cublas": expanded,
    "humming": humming,
}


def why_not(rival: str) -> str | None:
    """None if a rival can be measured here, otherwise what is missing."""
    needs = {"expand + cublas": "triton", "humming": HUMMING}.get(rival)
    if needs is None:
        return None
    try:
        importlib.metadata.version(needs)
    except importlib.metadata.PackageNotFoundError:
        return f"{needs} is not installed"
    return None


def missing(names: Sequence[str]) -> dict[str, str]:
    """Those that cannot be measured here, and why."""
    return {name: reason for name in names if (reason := why_not(name)) is not None}


def _of_copies(
    name: str, product: Product, nbytes: int, make: Callable[[], Any], launch: Callable[[Any, Tensor], None]
) -> Candidate:
    """A candidate whose i-th launch is `launch(i-th copy, i-th result)`."""
    count = copies(nbytes)
    results = product.results(count)
    launches = [partial(launch, make(), result) for result in results]
    return Candidate(name, launches, results, nbytes)


def _gemm(x: Tensor, config: Config | None, weight: NVFP4Tensor, out: Tensor) -> None:
    blockscale.gemm(x, weight, out=out, out_dtype=out.dtype, config=config)


def _matmul(x: Tensor, weight: Tensor, out: Tensor) -> None:
    torch.matmul(x, weight.T, out=out)


def _values(product: Product) -> Tensor:
    """The weight's values in the dtype of x: exact where the global scale is a power of two."""
    return product.weight.dequantize().to(product.x.dtype)


def _cloned(weight: NVFP4Tensor) -> NVFP4Tensor:
    """The same tensor in other memory."""
    return NVFP4Tensor(
        weight.codes.clone(),
        weight.scales.view(torch.uint8).clone().view(torch.float8_e4m3fn),
        weight.global_scale.clone(),
        weight.layout,
        weight.shape,
    )
