"""Looking through a whole checkpoint: every layer's shape, format and scales, and every problem, fatal or not."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.checkpoints.checkpoint import LOW_FIRST, Checkpoint
from blockscale.checkpoints.errors import CheckpointError
from blockscale.checkpoints.layers import Layer, Problem
from blockscale.checkpoints.save import Progress, silent
from blockscale.formats import e4m3
from blockscale.formats.layouts import LINEAR


@dataclass(frozen=True)
class LayerFacts:
    """An NVFP4 weight. Ranges are (least, largest): of the block scales, 0 of empty blocks apart; of the global scales,
    as multipliers; of the input's. None where there is none, or where it cannot be read."""

    name: str
    shape: tuple[int, ...]
    format: str
    activations: str
    parts: int
    block_scales: tuple[float, float] | None
    global_scale: tuple[float, float] | None
    input_scale: tuple[float, float] | None


@dataclass(frozen=True)
class TensorFacts:
    """Any other tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Inspection:
    path: str
    configured: str | None
    files: int
    layers: tuple[LayerFacts, ...]
    tensors: tuple[TensorFacts, ...]
    problems: tuple[Problem, ...]

    @property
    def sound(self) -> bool:
        """Whether everything can be loaded."""
        return not any(problem.fatal for problem in self.problems)


def inspect_checkpoint(
    path: str | os.PathLike[str],
    *,
    scale_layout: str = LINEAR,
    first_nibble: str = LOW_FIRST,
    progress: Progress = silent,
) -> Inspection:
    """Read every NVFP4 weight and say what it is. Raises CheckpointError only where the files themselves are broken."""
    checkpoint = Checkpoint(path, scale_layout=scale_layout, first_nibble=first_nibble)
    facts, problems = [], list(checkpoint.problems)
    with progress(len(checkpoint.layers)) as advance:
        for layer in checkpoint.layers.values():
            made, found = _facts(checkpoint, layer)
            facts.append(made)
            problems += found
            advance()
    others = tuple(TensorFacts(entry.name, entry.shape, entry.dtype) for entry in checkpoint.plain.values())
    configured, files = checkpoint.config.method, len(checkpoint.source.files)
    return Inspection(os.fspath(path), configured, files, tuple(facts), others, tuple(problems))


def _facts(checkpoint: Checkpoint, layer: Layer) -> tuple[LayerFacts, list[Problem]]:
    problems: list[Problem] = []
    scales: list[float] = []
    units: list[float] = []

    def note(error: Exception | str, fatal: bool) -> None:
        problems.append(Problem(layer.name, str(error), fatal, layer.codes.file.path))

    for part in layer.parts:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                t = checkpoint.weight(layer.name + part.suffix)
        except CheckpointError as error:
            note(error, True)
            continue
        for warning in caught:
            note(str(warning.message), False)
        units.append(float(t.global_scale))
        scales += _scale_range(t.linear_scales())
    inputs = None
    try:
        given = checkpoint.input_scale(layer.name)
        inputs = None if given is None else (float(given.min()), float(given.max()))
    except CheckpointError as error:
        note(error, True)
    made = LayerFacts(
        name=layer.name,
        shape=layer.shape,
        format=layer.convention,
        activations=layer.activations,
        parts=len(layer.parts),
        block_scales=(min(scales), max(scales)) if scales else None,
        global_scale=(min(units), max(units)) if units else None,
        input_scale=inputs,
    )
    return made, problems


def _scale_range(scales: Tensor) -> Iterator[float]:
    """Least and largest of the block scales that are not 0; nothing where all are."""
    codes = scales.view(torch.uint8)
    if codes.numel() and bool(codes.any()):
        least = codes.masked_fill(codes == 0, e4m3.LARGEST_CODE).min()
        yield from e4m3.decode(torch.stack([least, codes.max()]).view(torch.float8_e4m3fn)).tolist()
