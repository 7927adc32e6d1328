"""Gated activations beside kernels that have none: both halves of a product in fp32, multiplied afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from blockscale.problem import GATED
from blockscale.quantize.quantizer import quantize_into
from blockscale.tensor import NVFP4Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
}
Prepare = Callable[..., Callable[[], Any]]


def of(single: Prepare) -> Prepare:
    """A backend's `prepare`, which then takes gated activations too; `out` has half the columns that `b` has rows."""

    def prepare(a: Any, b: NVFP4Tensor, out: Tensor | NVFP4Tensor, *, activation: str | None, **options: Any) -> Any:
        if activation not in GATED:
            return single(a, b, out, activation=activation, **options)
        y = torch.empty((*out.shape[:-1], b.shape[-2]), dtype=torch.float32, device=out.device)
        launch = single(a, b, y, activation=None, **options)

        def run() -> None:
            launch()
            multiply(y, activation, out)

        return run

    return prepare


def multiply(y: Tensor, activation: str, out: Tensor | NVFP4Tensor) -> None:
    """out = act(gate) x up, of y (..., 2 x columns) fp32: first the columns of the gate, then those of up."""
    gate, up = y.chunk(2, dim=-1)
    if y.is_cpu:
        gate, up = gate.double(), up.double()
    result = ACTIVATIONS[GATED[activation]](gate) * up
    if isinstance(out, NVFP4Tensor):
        quantize_into(result.float(), out)
    else:
        out.copy_(result)
