"""What all modules with NVFP4 weights share: buffers that keep their bits, and what becomes of the activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockscale import arguments
from blockscale.backends import NAMES
from blockscale.formats.layouts import ATOMS, K_ALIGN, round_up
from blockscale.ops import needs_gradient, scale_shape
from blockscale.quantize import quantize
from blockscale.tensor import FLOAT_DTYPES, NVFP4Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

ACTIVATIONS = (None, "dynamic", "static")


class Frozen(torch.nn.Module):
    """A module around weights (..., N, K) that are never trained.

    Buffers, all in the state dict; the name of the scales is the tag of their layout:
        codes: uint8 (..., N, K_pad/2).
        scales_128x4: the bytes of the float8_e4m3fn scales in layout "128x4", uint8: a cast of the whole model passes
            them by, and pickle restores them.
        global_scale: fp32, () or one a group.
        input_scale: fp32 (), the activations' global scale, where `activations` is "static".

    In layout "fragment" (`Linear.pack`) `codes` holds the units and `scales_128x4` nothing; the state dict has the
    common order all the same, both ways.

    Casts (`half()`, `to(torch.bfloat16)`) leave them alone; moves, `to_empty` and "meta" work as for any module.
    `load_state_dict` writes into the same memory, so compiled models and CUDA graphs see what was loaded.
    """

    codes: Tensor
    scales_128x4: Tensor
    global_scale: Tensor
    input_scale: Tensor | None
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        shape: tuple[int, ...],
        groups: tuple[int, ...],
        bias: tuple[int, ...] | None,
        *,
        activations: str | None,
        backend: str | None,
        device: Any,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        if activations not in ACTIVATIONS:
            raise ValueError(f"activations: {activations!r}, expected one of {', '.join(map(repr, ACTIVATIONS))}")
        if backend is not None and backend not in NAMES:
            raise ValueError(f"backend: {backend!r}, expected None or one of {', '.join(map(repr, NAMES))}")
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in shape):
            raise ValueError(f"sizes: {shape}, expected positive integers")
        self.shape, self.activations, self.backend = torch.Size(shape), activations, backend
        self.layout = ATOMS
        self.out_features, self.in_features = shape[-2:]
        storage = (*shape[:-1], round_up(shape[-1], K_ALIGN) // 2)
        scales = scale_shape(shape, ATOMS, None)
        self.register_buffer("codes", torch.zeros(storage, dtype=torch.uint8, device=device))
        self.register_buffer("scales_128x4", torch.zeros(scales, dtype=torch.uint8, device=device))
        self.register_buffer("global_scale", torch.ones(groups, dtype=torch.float32, device=device))
        unit = torch.ones((), dtype=torch.float32, device=device) if activations == "static" else None
        self.register_buffer("input_scale", unit)
        zeros = None if bias is None else torch.zeros(bias, dtype=dtype or torch.get_default_dtype(), device=device)
        self.bias = None if zeros is None else torch.nn.Parameter(zeros)

    def adopt(self, weight: NVFP4Tensor, global_scale: Tensor | None = None) -> None:
        """Take the parts of `weight` as they are; `global_scale` instead of its own where each group has one."""
        weight = weight.with_layout(self.layout)
        self.codes, self.scales_128x4 = weight.codes, weight.scales.view(torch.uint8)
        self.global_scale = weight.global_scale if global_scale is None else global_scale

    @torch.no_grad()
    def write(self, weight: NVFP4Tensor, index: tuple[int, ...], input_scale: Tensor | None) -> None:
        """Copy `weight` into the buffers, or into group `index` of them: same memory, other values. Buffers on "meta"
        come to the weight's device first."""
        if self.activations == "static" and input_scale is None:
            raise ValueError("input_scale: missing, but the layer's activations are static")
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.is_meta:
                self._buffers[name] = torch.zeros_like(buffer, device=weight.device)
        weight = weight.with_layout(self.layout)
        self.codes[index].copy_(weight.codes)
        self.scales_128x4[index].copy_(weight.scales.view(torch.uint8))
        self.global_scale[index].copy_(weight.global_scale)
        if self.activations == "static" and self.input_scale is not None and input_scale is not None:
            self.input_scale.copy_(input_scale)

    def parts(self, global_scale: Tensor) -> NVFP4Tensor:
        scales = self.scales_128x4.view(torch.float8_e4m3fn)
        return NVFP4Tensor(self.codes, scales, global_scale, self.layout, self.shape)

    def activate(self, x: Tensor) -> NVFP4Tensor | Tensor:
        """`x` as the product takes it. Where a gradient flows back, the quantised values pass it on unchanged
        (straight through)."""
        if self.activations is None:
            return x
        if needs_gradient(x):
            rounded: Tensor = torch.ops.blockscale.fake_quantize(x, self.input_scale)
            return rounded
        return quantize(x, global_scale=self.input_scale)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            after = self._buffers[name]
            if after is not None and after.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(after.device)
        return self


def computed_in(x: Any) -> torch.dtype:
    """The dtype of a module's result for `x`: under autocast its dtype, as for torch's own layers."""
    if not isinstance(x, Tensor) or x.dtype not in FLOAT_DTYPES:
        allowed = ", ".join(map(str, FLOAT_DTYPES))
        raise TypeError(f"x: {arguments.kind(x)}, expected one of {allowed}")
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
