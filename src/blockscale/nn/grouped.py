"""The linear layers of experts, as one grouped product, and a mixture of experts made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockscale.api import grouped_gemm
from blockscale.formats.layouts import ATOMS
from blockscale.nn.frozen import Frozen, computed_in
from blockscale.quantize import quantize
from blockscale.tensor import NVFP4Tensor

if TYPE_CHECKING:
    from typing_extensions import Self


class GroupedLinear(Frozen):
    """One NVFP4 weight (N, K) and one bias (N,) a group: row t of x gives x[t] @ weight[e].T + bias[e], e its group.

    Each group has a global scale of its own. Arguments as for `Linear`; `groups` is E, the number of groups.
    """

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activations: str | None = None,
        backend: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if activations == "static":
            raise ValueError("activations: 'static', expected None or 'dynamic' for groups")
        shape = (groups, out_features, in_features)
        of_bias = (groups, out_features) if bias else None
        super().__init__(
            shape, (groups,), of_bias, activations=activations, backend=backend, device=device, dtype=dtype
        )
        self.groups = groups

    @classmethod
    def from_weights(
        cls,
        weights: Tensor | Sequence[Tensor],
        bias: Tensor | None = None,
        *,
        method: str = "rtn",
        activations: str | None = None,
        backend: str | None = None,
    ) -> Self:
        """Quantises E weights (N, K), each under a global scale of its own; `bias` (E, N). For weights on "meta" the
        layer is there too, to be filled.

        Raises:
            ValueError: the weights are no matrices of one shape, or the bias does not fit.
        """
        shapes = {tuple(weight.shape) for weight in weights}
        if len(shapes) != 1 or len(next(iter(shapes))) != 2:
            raise ValueError(f"weights: shapes {sorted(shapes)}, expected matrices (N, K) of one shape")
        if bias is not None and bias.shape != (len(weights), weights[0].shape[0]):
            raise ValueError(f"bias: shape {tuple(bias.shape)}, expected ({len(weights)}, {weights[0].shape[0]})")
        e, (n, k), device = len(weights), weights[0].shape, weights[0].device
        made = cls(e, k, n, False, activations=activations, backend=backend, device=device)
        if device.type != "meta":
            each = [quantize(weight.detach().cpu(), method=method) for weight in weights]
            made.adopt(stack(each).to(device), torch.stack([q.global_scale for q in each]).to(device))
        made.bias = bias if bias is None or isinstance(bias, torch.nn.Parameter) else torch.nn.Parameter(bias)
        return made

    @property
    def weight(self) -> NVFP4Tensor:
        """The weights (E, N, K) under a global scale of 1; `global_scale` (E,) has what each is multiplied by."""
        return self.parts(self.global_scale.new_ones(()))

    def each(self) -> Iterator[NVFP4Tensor]:
        """The weights (N, K) of the groups in turn, each under its own global scale."""
        for codes, scales, unit in zip(self.codes, self.scales_128x4, self.global_scale, strict=True):
            yield NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), unit, ATOMS, self.shape[1:])

    def forward(
        self,
        x: Tensor,
        group_sizes: Tensor | None = None,
        *,
        group_offsets: Tensor | None = None,
        masked_m: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        """x (T, K) sorted by group -> (T, N), or with `masked_m` x (E, max_m, K) -> (E, max_m, N), or half as many
        columns after a gated activation; see `grouped_gemm`. Rows beyond the mask have no part in a dynamic scale."""
        dtype = computed_in(x)
        if masked_m is not None and self.activations is not None:
            beyond = torch.arange(x.shape[1], dtype=torch.int32, device=x.device) >= masked_m.unsqueeze(1)
            x = torch.where(beyond.unsqueeze(-1), 0.0, x)
        y = grouped_gemm(
            self.activate(x.to(dtype)),
            self.weight,
            group_sizes=group_sizes,
            group_offsets=group_offsets,
            masked_m=masked_m,
            alpha=self.global_scale,
            bias=self.bias,
            activation=activation,
            out_dtype=dtype,
            backend=self.backend,
        )
        assert isinstance(y, Tensor)
        return y

    def extra_repr(self) -> str:
        sizes = f"{self.groups}, {self.in_features}, {self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, activations={self.activations!r}"


def stack(weights: Sequence[NVFP4Tensor]) -> NVFP4Tensor:
    """E matrices of one shape as (E, N, K) under a global scale of 1."""
    laid = [weight.with_layout(ATOMS) for weight in weights]
    codes = torch.stack([weight.codes for weight in laid])
    scales = torch.stack([weight.scales.view(torch.uint8) for weight in laid]).view(torch.float8_e4m3fn)
    one = torch.ones((), dtype=torch.float32, device=codes.device)
    return NVFP4Tensor(codes, scales, one, ATOMS, torch.Size((len(laid), *laid[0].shape)))


class Experts(torch.nn.Module):
    """Gated experts: sum over a token's experts of weight x down(act(gate(x)) x up(x)), without biases.

    Takes what the experts of transformers' Mixtral and Qwen-MoE models take. `gate_up` has the rows of the gate first.
    """

    def __init__(self, gate_up: GroupedLinear, down: GroupedLinear, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_up, self.down, self.act = gate_up, down, act
        self.experts = gate_up.groups

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """x (T, H); each token's experts `top_k_index` and their weights `top_k_weights`, (T, top_k) -> (T, H)."""
        top_k = top_k_index.shape[1]
        expert, order = top_k_index.reshape(-1).sort(stable=True)
        ones = torch.ones_like(expert, dtype=torch.int32)
        sizes = ones.new_zeros(self.experts).scatter_add(0, expert, ones)
        token = order // top_k
        y = self.products(x[token], sizes) * top_k_weights.reshape(-1)[order].unsqueeze(-1)
        return torch.zeros_like(x).index_add(0, token, y.to(x.dtype))

    def products(self, rows: Tensor, sizes: Tensor) -> Tensor:
        """What the experts make of `rows` (R, H), sorted by expert, `sizes` (E,) of them for each."""
        activation = _gated(self.act)
        if activation is None:
            gate, up = self.gate_up(rows, sizes).chunk(2, dim=-1)
            inner = self.act(gate) * up
        else:
            inner = self.gate_up(rows, sizes, activation=activation)
        y: Tensor = self.down(inner, sizes)
        return y


def _gated(act: Callable[[Tensor], Tensor]) -> str | None:
    """What `grouped_gemm` calls act(gate) x up, if it has that."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if isinstance(act, torch.nn.Module) and any(getattr(act, name) for name in hooks):
        return None
    if act is torch.nn.functional.silu or type(act) is torch.nn.SiLU:
        return "swiglu"
    exact = type(act) is torch.nn.GELU and act.approximate == "none"
    return "geglu" if act is torch.nn.functional.gelu or exact else None
