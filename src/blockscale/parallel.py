"""Layers with NVFP4 weights over several processes: parallel styles for `torch.distributed.tensor.parallel`.

    parallelize_module(model, mesh, {"up": ColumnParallel(), "down": RowParallel(), "experts": ExpertParallel()})

replaces, in place, each named layer's weight by this rank's shard of it. Shards share the weight's global scale and lie
on block boundaries, so their values are those of the whole. Collectives are torch's; activations between the layers are
plain local tensors or DTensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from blockscale.api import gemm
from blockscale.formats.layouts import ATOMS, BLOCK, LINEAR, blocks, round_up
from blockscale.nn import Experts, GroupedLinear, Linear
from blockscale.nn.frozen import computed_in
from blockscale.ops import needs_gradient
from blockscale.quantize import global_scale_for, quantize
from blockscale.tensor import NVFP4Tensor


def shard_size(size: int, shards: int, *, name: str, block: int = BLOCK, pad: bool = False) -> int:
    """The size of each shard of a dimension `size` cut into `shards` on multiples of `block`.

    Without `pad` the cut must come out even; with it, the last shards hold zeros.

    Raises:
        ValueError: it does not come out even; names the dimension, the size and the remainder.
    """
    even = -(-size // shards)
    if pad:
        return round_up(even, block)
    if size % shards:
        raise ValueError(f"{name}: {size} in {shards} shards leaves {size % shards}; expected a multiple, or pad=True")
    if even % block:
        raise ValueError(
            f"{name}: {size} in {shards} shards of {even}, and {even} mod {block} = {even % block}: "
            f"a shard would cut a block of {block}; expected a multiple of {block * shards}, or pad=True"
        )
    return even


def take(weight: NVFP4Tensor, rows: slice, columns: slice) -> NVFP4Tensor:
    """weight[rows, columns] of a matrix, with zeros where that reaches beyond it."""
    n, k = weight.shape
    shape = rows.stop - rows.start, columns.stop - columns.start
    inside = slice(rows.start, min(rows.stop, n)), slice(columns.start, min(columns.stop, k))
    codes = weight.codes.new_zeros(shape[0], blocks(shape[1]) * BLOCK // 2)
    scales = weight.codes.new_zeros(shape[0], blocks(shape[1]))
    if all(part.start < part.stop for part in inside):
        part = weight.with_layout(LINEAR)[inside]
        codes[: part.shape[0], : part.codes.shape[1]] = part.codes
        scales[: part.shape[0], : part.scales.shape[1]] = part.scales.view(torch.uint8)
    laid = NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), weight.global_scale, LINEAR, torch.Size(shape))
    return laid.with_layout(ATOMS)


@dataclass(frozen=True)
class Layouts:
    """How a sharded layer's input comes and its output goes, and among whom."""

    mesh: DeviceMesh
    input: Placement
    output: Placement
    local: bool

    def local_input(self, x: Tensor, wanted: Placement) -> Tensor:
        """This rank's part of `x`. A replicated input's gradients are the sum over the ranks."""
        if not isinstance(x, DTensor):
            if self.input == wanted and not needs_gradient(x):
                return x
            x = DTensor.from_local(x, self.mesh, (self.input,), run_check=False)
        placed = x.redistribute(placements=(wanted,))
        local: Tensor = placed.to_local(grad_placements=(Partial(),) if wanted == Replicate() else None)
        return local

    def output_of(self, y: Tensor, now: Placement) -> Tensor:
        if self.output == now and self.local:
            return y
        placed = DTensor.from_local(y, self.mesh, (now,), run_check=False).redistribute(placements=(self.output,))
        return placed.to_local() if self.local else placed


class ColumnLinear(Linear):
    """This rank's rows of a weight: x replicated -> y cut along its last dimension."""

    layouts: Layouts
    whole: int  # out_features of all ranks, without padding

    def forward(self, x: Tensor) -> Tensor:
        y = self.layouts.output_of(super().forward(self.layouts.local_input(x, Replicate())), Shard(-1))
        return y if self.layouts.output == Shard(-1) else y[..., : self.whole]


class RowLinear(Linear):
    """This rank's columns of a weight: x cut along its last dimension -> the sum over ranks. Ranks send fp32 sums; the
    bias comes after them, and a dynamic scale is that of all ranks' columns."""

    layouts: Layouts
    first: int  # of the columns that are here
    whole: int  # in_features of all ranks, without padding

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        dtype = computed_in(x)
        if self.layouts.input == Replicate():
            local = self.layouts.local_input(x, Replicate())
            if local.shape[-1] != self.whole:
                raise ValueError(f"x: K = {local.shape[-1]}, expected {self.whole}")
            missing = max(0, self.first + self.in_features - local.shape[-1])
            local = torch.nn.functional.pad(local, (0, missing)).narrow(-1, self.first, self.in_features)
        else:
            local = self.layouts.local_input(x, Shard(-1))
        part = gemm(self.activate(local.to(dtype)), self.weight, out_dtype=torch.float32, backend=self.backend)
        mesh, output = self.layouts.mesh, self.layouts.output
        if output == Replicate() and self.layouts.local and not needs_gradient(part):
            return self._finish(collectives.all_reduce(part, "sum", mesh.get_group()), dtype)
        total = DTensor.from_local(part, mesh, (Partial(),), run_check=False).redistribute(placements=(output,))
        y = self._finish(total.to_local(), dtype)
        if self.layouts.local:
            return y
        return DTensor.from_local(y, mesh, (output,), run_check=False, shape=total.shape, stride=total.stride())

    def _finish(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return (total if self.bias is None else total + self.bias).to(dtype)

    def activate(self, x: Tensor) -> NVFP4Tensor | Tensor:
        if self.activations != "dynamic":
            return super().activate(x)
        amax = x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        scale = global_scale_for(collectives.all_reduce(amax, "max", self.layouts.mesh.get_group()))
        if needs_gradient(x):
            rounded: Tensor = torch.ops.blockscale.fake_quantize(x, scale)
            return rounded
        return quantize(x, global_scale=scale)


class ColumnParallel(ParallelStyle):
    """Cuts a `Linear` along its outputs: as torch's ColwiseParallel.

    Args:
        input_layouts: how x comes: Replicate(), or Shard(d) to be gathered first.
        output_layouts: Shard(-1), or Replicate() to gather y.
        use_local_output: y as a plain local tensor, or as a DTensor.
        pad: cut on multiples of 16 rows and fill the last ranks up with zeros, so that a `RowParallel(pad=True)` layer
            can follow: with output_layouts=Shard(-1), y then has more than out_features columns, the last ones zero
            before an activation. Otherwise out_features must be a multiple of the number of ranks.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        pad: bool = False,
    ) -> None:
        super().__init__()
        self.input_layouts, self.output_layouts = input_layouts or Replicate(), output_layouts or Shard(-1)
        self.use_local_output, self.pad = use_local_output, pad

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        linear, rank, ranks = _whole_linear(module, device_mesh)
        n, k = linear.shape
        name = "out_features"
        mine = shard_size(n, ranks, name=name, block=BLOCK if self.pad else 1, pad=self.pad)
        rows = slice(rank * mine, (rank + 1) * mine)
        _reshape(linear, take(linear.weight, rows, slice(0, k)))
        if linear.bias is not None:
            bias = linear.bias.detach()[rows]
            bias = torch.nn.functional.pad(bias, (0, mine - len(bias)))
            linear.bias = torch.nn.Parameter(bias.clone(), linear.bias.requires_grad)
        linear.__class__ = ColumnLinear
        sharded: Any = linear
        sharded.whole = n
        sharded.layouts = Layouts(device_mesh, self.input_layouts, self.output_layouts, self.use_local_output)
        return linear


class RowParallel(ParallelStyle):
    """Cuts a `Linear` along its inputs, on multiples of 16: as torch's RowwiseParallel.

    Args:
        input_layouts: how x comes: Shard(-1), or Replicate() for each rank to take its columns.
        output_layouts: Replicate(), or Shard(d) of another dimension than the last.
        use_local_output: y as a plain local tensor, or as a DTensor.
        pad: fill the last ranks up with zeros where in_features cannot be cut into equal parts of whole blocks.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        pad: bool = False,
    ) -> None:
        super().__init__()
        self.input_layouts, self.output_layouts = input_layouts or Shard(-1), output_layouts or Replicate()
        self.use_local_output, self.pad = use_local_output, pad
        if self.output_layouts == Shard(-1) or isinstance(self.output_layouts, Partial):
            raise ValueError(
                f"output_layouts: {self.output_layouts}, expected Replicate() or a Shard of another dimension"
            )

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        linear, rank, ranks = _whole_linear(module, device_mesh)
        n, k = linear.shape
        mine = shard_size(k, ranks, name="in_features", pad=self.pad)
        _reshape(linear, take(linear.weight, slice(0, n), slice(rank * mine, (rank + 1) * mine)))
        linear.__class__ = RowLinear
        sharded: Any = linear
        sharded.first, sharded.whole = rank * mine, k
        sharded.layouts = Layouts(device_mesh, self.input_layouts, self.output_layouts, self.use_local_output)
        return linear


def _whole_linear(module: torch.nn.Module, mesh: DeviceMesh) -> tuple[Linear, int, int]:
    if type(module) is not Linear:
        raise TypeError(f"module: {type(module).__name__}, expected a blockscale.nn.Linear that is not cut yet")
    if mesh.ndim != 1:
        raise ValueError(f"device_mesh: {mesh.ndim} dimensions, expected 1; take the one to cut along")
    return module, mesh.get_local_rank(), mesh.size()


def _reshape(linear: Linear, part: NVFP4Tensor) -> None:
    linear.adopt(part)
    linear.shape = part.shape
    linear.out_features, linear.in_features = part.shape


class ParallelExperts(Experts):
    """The experts of this rank, for the tokens of all ranks: rows go to where their experts are, and back."""

    mesh: DeviceMesh

    def products(self, rows: Tensor, sizes: Tensor) -> Tensor:
        ranks, here = self.mesh.size(), self.gate_up.groups
        group = self.mesh.get_group()
        counts = collectives.all_to_all_single(sizes, None, None, group)
        to_send = sizes.view(ranks, here).sum(1).tolist()
        to_come = counts.view(ranks, here).sum(1).tolist()
        came = collectives.all_to_all_single_autograd(rows, to_come, to_send, group)
        expert = torch.arange(here, dtype=torch.int64, device=rows.device).repeat(ranks).repeat_interleave(counts)
        order = expert.argsort(stable=True)
        made = super().products(came[order], counts.view(ranks, here).sum(0, dtype=torch.int32))
        return collectives.all_to_all_single_autograd(made[order.argsort()], to_send, to_come, group)


class ExpertParallel(ParallelStyle):
    """Gives each rank an equal number of the experts of an `Experts`; each rank brings its own tokens. A dynamic scale
    is that of the rows that meet on a rank."""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if type(module) is not Experts:
            raise TypeError(f"module: {type(module).__name__}, expected a blockscale.nn.Experts that is not cut yet")
        mine = shard_size(module.gate_up.groups, device_mesh.size(), name="experts", block=1)
        first = device_mesh.get_local_rank() * mine
        for grouped in (module.gate_up, module.down):
            _keep_groups(grouped, slice(first, first + mine))
        module.__class__ = ParallelExperts
        sharded: Any = module
        sharded.mesh = device_mesh
        return module


def _keep_groups(grouped: GroupedLinear, kept: slice) -> None:
    for name in ("codes", "scales_128x4", "global_scale"):
        grouped._buffers[name] = getattr(grouped, name)[kept].clone()
    if grouped.bias is not None:
        grouped.bias = torch.nn.Parameter(grouped.bias.detach()[kept].clone(), grouped.bias.requires_grad)
    grouped.groups = kept.stop - kept.start
    grouped.shape = torch.Size((grouped.groups, *grouped.shape[1:]))
