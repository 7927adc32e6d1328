"""Quantising the linear layers of a model directory, one weight at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from blockscale import threads
from blockscale.checkpoints.checkpoint import Checkpoint
from blockscale.checkpoints.config import BLOCKSCALE, COMPRESSED_TENSORS, WEIGHT_ONLY
from blockscale.checkpoints.encode import Unit, Weight, raw_unit, weight_unit
from blockscale.checkpoints.files import Entry
from blockscale.checkpoints.save import (
    SHARD_BYTES,
    Documents,
    Progress,
    check_convention,
    check_shard_bytes,
    companions,
    documents_for,
    silent,
    write_units,
)
from blockscale.checkpoints.selection import exclusion, looks_linear, stored_transposed, warn_of_idle
from blockscale.formats.layouts import ATOMS, BLOCK, LINEAR
from blockscale.quantize import METHODS, quantize
from blockscale.tensor import SMALLEST_GLOBAL_SCALE, NVFP4Tensor

# Heads and routers are small, and what is lost there is seen in every token.
EXCLUDED = ("lm_head", "*.lm_head", "*.gate", "*.router", "*.router.*")
# Layers that inference engines fuse into one product; one global scale for all makes that exact.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
_PIECE = 1 << 20  # elements compared at a time


@dataclass(frozen=True)
class LayerReport:
    """A linear layer: `snr_db` (signal over quantisation error, 10 log10 of the ratio of squares) or, where it was left
    as it is, `reason`."""

    name: str
    shape: tuple[int, ...]
    snr_db: float | None
    reason: str | None


def quantize_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    method: str = "rtn",
    exclude: Sequence[str] = EXCLUDED,
    to: str = COMPRESSED_TENSORS,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = silent,
) -> list[LayerReport]:
    """Quantise the weights (N, K) of linear layers in fp32, bf16 or fp16 to NVFP4, for weight-only products; everything
    else is copied. Holds one weight at a time.

    Args:
        source, target: directories, or single safetensors files.
        method: of `quantize`.
        exclude: shell wildcards over the layers' names (without ".weight") that stay as they are.
        to: "compressed-tensors", "modelopt" or "blockscale".

    Returns:
        A report for each linear layer, in the order of the files.

    Raises:
        TypeError: `exclude` is no sequence of strings.
        ValueError: the model is quantised already, or an argument is none of those allowed.
        CheckpointError: a file is broken, or a weight is not finite; names file and tensor.

    Warns:
        UserWarning: a pattern of `exclude` that is none of EXCLUDED matches no linear layer.
    """
    if method not in METHODS:
        raise ValueError(f"method: {method!r}, expected one of {', '.join(map(repr, METHODS))}")
    check_convention(to)
    check_shard_bytes(shard_bytes)
    excluded = exclusion(exclude)
    checkpoint = Checkpoint(source)
    if checkpoint.layers or checkpoint.problems or "quantization_config" in checkpoint.source.config:
        raise ValueError(f"{os.fspath(source)}: is quantised already")
    turned = stored_transposed(checkpoint.plain, checkpoint.source.config)
    work = _Work(checkpoint, method, to, {})
    units, reports = [], []
    for name, entry in checkpoint.plain.items():
        if not looks_linear(name, entry.dtype, entry.shape):
            units.append(raw_unit(entry))
            continue
        reason = "excluded" if excluded(name.removesuffix(".weight")) else _obstacle(entry, to, name in turned)
        units.append(raw_unit(entry) if reason else work.unit(entry))
        reports.append(LayerReport(name, entry.shape, None, reason))
    warn_of_idle(exclude, [report.name.removesuffix(".weight") for report in reports], EXCLUDED)
    documents: Documents = documents_for(units, to, checkpoint.source.config)
    write_units(units, Path(target), to, documents, companions(Path(source)), shard_bytes, progress)
    return [LayerReport(r.name, r.shape, work.snr.get(r.name), r.reason) for r in reports]


def _obstacle(entry: Entry, to: str, turned: bool) -> str | None:
    if len(entry.shape) != 2:
        return "a stack"
    if turned:
        return "stored (K, N)"
    k = entry.shape[1]
    if k < 1 or (to != BLOCKSCALE and k % BLOCK):
        return f"K = {k} is not a multiple of {BLOCK}"
    return None


@dataclass(frozen=True)
class _Work:
    """What the weights share: the method, and the signal-to-noise ratios found so far, by name."""

    checkpoint: Checkpoint
    method: str
    to: str
    snr: dict[str, float]

    def unit(self, entry: Entry) -> Unit:
        layout = ATOMS if self.to == BLOCKSCALE else LINEAR
        load = partial(self.quantised, entry)
        return weight_unit(Weight(entry.name, entry.shape, layout, (), False, WEIGHT_ONLY, False, load), self.to)

    def quantised(self, entry: Entry) -> tuple[NVFP4Tensor, Tensor, None]:
        weight = entry.tensor()
        amax = max(finite_amax(member) for member in self._fused_with(entry))
        unit = torch.tensor(1.0, dtype=torch.float32, device="cpu")
        if amax:
            with threads.exact_arithmetic():
                unit = (unit * amax / METHODS[self.method].divisor).clamp(min=SMALLEST_GLOBAL_SCALE)
        t = quantize(weight, method=self.method, global_scale=unit, layout=LINEAR)
        self.snr[entry.name] = snr_db(weight, t)
        return t, t.global_scale, None

    def _fused_with(self, entry: Entry) -> list[Entry]:
        """The weights that this one is fused with at inference, itself among them."""
        parent, last, _ = entry.name.rsplit(".", 2) if entry.name.count(".") > 1 else ("", "", "")
        for group in _FUSED:
            if last in group:
                names = [f"{parent}.{member}.weight" for member in group]
                return [self.checkpoint.plain[name] for name in names if name in self.checkpoint.plain]
        return [entry]


def finite_amax(entry: Entry) -> float:
    """The largest magnitude of a floating tensor. Raises CheckpointError for NaN and infinity."""
    t = entry.tensor()
    amax = float(torch.stack(torch.aminmax(t)).abs().amax()) if t.numel() else 0.0
    if not math.isfinite(amax):
        raise entry.error("holds NaN or infinity")
    return amax


def snr_db(weight: Tensor, t: NVFP4Tensor) -> float:
    """Signal-to-noise ratio of a matrix and its quantised form, in decibels; infinite where nothing is lost."""
    signal = noise = 0.0
    step = max(1, _PIECE // weight.shape[1])
    for r in range(0, len(weight), step):
        x = weight[r : r + step].double()
        signal += float(x.square().sum())
        noise += float((x - t[r : r + step].dequantize().double()).square_().sum())
    return 10 * math.log10(signal / noise) if noise else math.inf
