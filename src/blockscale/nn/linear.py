"""A linear layer with a frozen NVFP4 weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockscale.api import gemm
from blockscale.formats.layouts import ATOMS, FRAGMENT, K_ALIGN, round_up
from blockscale.nn.frozen import Frozen, computed_in
from blockscale.ops import scale_shape
from blockscale.quantize import quantize
from blockscale.tensor import FLOAT_DTYPES, LARGEST_GLOBAL_SCALE, NVFP4Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


class Linear(Frozen):
    """y = x @ weight.T + bias with an NVFP4 weight (N, K), for x (..., K) in fp32, bf16 or fp16; y has x's dtype.

    Args:
        in_features, out_features: K and N.
        activations: None for weight-only; "dynamic" quantises x to NVFP4 under a global scale from all of x; "static"
            under `input_scale`, a buffer, so that a row's result does not depend on the rows beside it.
        backend: as for `gemm`.
        device, dtype: of the bias; the weight's buffers go to `device` too. A new layer's weight is zero.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activations: str | None = None,
        backend: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (out_features, in_features)
        of_bias = (out_features,) if bias else None
        super().__init__(shape, (), of_bias, activations=activations, backend=backend, device=device, dtype=dtype)

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        *,
        method: str = "rtn",
        activations: str | None = None,
        input_scale: float | Tensor | None = None,
        backend: str | None = None,
    ) -> Self:
        """The layer with its weight quantised, on the same device; the bias is the same parameter. A layer on "meta"
        gives one of the same sizes there, to be filled from a state dict.

        Args:
            method: of `quantize`.
            input_scale: the activations' global scale, for activations="static".
        """
        if not isinstance(linear, torch.nn.Linear):
            raise TypeError(f"linear: {type(linear).__name__}, expected a torch.nn.Linear")
        weight = linear.weight.detach()
        made = cls._empty(linear.in_features, linear.out_features, activations, backend, weight.device)
        if weight.device.type != "meta":
            made.adopt(quantize(weight.cpu(), method=method).to(weight.device))
        made.bias = linear.bias
        made._take_input_scale(input_scale)
        made.train(linear.training)
        return made

    @classmethod
    def from_weight(
        cls,
        weight: NVFP4Tensor,
        bias: Tensor | None = None,
        *,
        activations: str | None = None,
        input_scale: float | Tensor | None = None,
        backend: str | None = None,
    ) -> Self:
        """A layer around `weight` (N, K), sharing its memory, and `bias` (N,)."""
        if not isinstance(weight, NVFP4Tensor) or weight.ndim != 2:
            raise ValueError(f"weight: {weight!r}, expected an NVFP4Tensor of shape (N, K)")
        n, k = weight.shape
        if bias is not None and (bias.shape != (n,) or bias.dtype not in FLOAT_DTYPES):
            raise ValueError(f"bias: {bias.dtype} of shape {tuple(bias.shape)}, expected ({n},) in fp32, bf16 or fp16")
        made = cls._empty(k, n, activations, backend, "meta")
        made.layout = FRAGMENT if weight.layout == FRAGMENT else ATOMS
        made.adopt(weight)
        made.bias = bias if bias is None or isinstance(bias, torch.nn.Parameter) else torch.nn.Parameter(bias)
        if activations == "static":
            made.input_scale = torch.ones((), dtype=torch.float32, device=weight.device)
        made._take_input_scale(input_scale)
        return made

    @classmethod
    def _empty(cls, k: int, n: int, activations: str | None, backend: str | None, device: Any) -> Self:
        return cls(k, n, False, activations=activations, backend=backend, device=device)

    def _take_input_scale(self, scale: float | Tensor | None) -> None:
        if (scale is None) == (self.activations == "static") and self.codes.device.type != "meta":
            raise ValueError(f"input_scale: {scale!r}, expected one for activations='static' and only then")
        if scale is not None:
            if not 0 < float(scale) <= LARGEST_GLOBAL_SCALE:
                raise ValueError(f"input_scale: {float(scale)}, expected a positive multiplier")
            self.input_scale = torch.full((), float(scale), dtype=torch.float32, device=self.codes.device)

    @property
    def weight(self) -> NVFP4Tensor:
        """The weight (N, K); it shares the buffers' memory."""
        return self.parts(self.global_scale)

    @torch.no_grad()
    def pack(self) -> Self:
        """Keep the weight in layout "fragment", the order of Hopper's kernels, from now on; in place, once. The layer
        takes the same memory (rows count in steps of 16, columns of 128); graphs that were captured do not see it.
        """
        if self.layout != FRAGMENT:
            weight = self.weight.with_layout(FRAGMENT)
            self.layout = FRAGMENT
            self.adopt(weight)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.layout == FRAGMENT:
            common = self.weight.with_layout(ATOMS)
            destination[f"{prefix}codes"] = common.codes
            destination[f"{prefix}scales_128x4"] = common.scales.view(torch.uint8)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        names = f"{prefix}codes", f"{prefix}scales_128x4"
        if self.layout == FRAGMENT and all(isinstance(state_dict.get(name), Tensor) for name in names):
            packed = self._packed(*(state_dict[name] for name in names))
            state_dict = {**state_dict, **dict(zip(names, packed, strict=True))}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _packed(self, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers that a state dict's stand for; those of another size as they are, for torch to refuse."""
        storage = (*self.shape[:-1], round_up(self.shape[-1], K_ALIGN) // 2)
        if codes.shape != storage or scales.shape != scale_shape(self.shape, ATOMS, None):
            return codes, scales
        if not self.codes.is_meta:
            codes, scales = codes.to(self.codes.device), scales.to(self.codes.device)
        parts = codes, scales.view(torch.float8_e4m3fn)
        packed = NVFP4Tensor.from_parts(*parts, shape=self.shape, check_values=False).with_layout(FRAGMENT)
        return packed.codes, packed.scales.view(torch.uint8)

    def forward(self, x: Tensor) -> Tensor:
        dtype = computed_in(x)
        rows = x.to(dtype) if x.ndim > 1 else x.to(dtype).unsqueeze(0)
        y = gemm(self.activate(rows), self.weight, bias=self.bias, out_dtype=dtype, backend=self.backend)
        return y if x.ndim > 1 else y.squeeze(0)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"{self.in_features}, {self.out_features}, bias={bias}, activations={self.activations!r}"


def pack(module: torch.nn.Module) -> None:
    """For `model.apply(bs.nn.pack)`: every `Linear` keeps its weight in the order of Hopper's kernels."""
    if isinstance(module, Linear):
        module.pack()
