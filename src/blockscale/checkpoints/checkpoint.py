"""A checkpoint as a mapping from names to tensors, each read when it is asked for."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from blockscale import threads
from blockscale.checkpoints.config import BLOCKSCALE, COMPRESSED_TENSORS, QuantConfig, read_config
from blockscale.checkpoints.errors import CheckpointError
from blockscale.checkpoints.files import ALIGN, F4, Entry, TensorFile
from blockscale.checkpoints.layers import Finder, Index, Layer, Part, Problem
from blockscale.checkpoints.selection import looks_linear
from blockscale.checkpoints.source import Source, open_source
from blockscale.formats import e2m1, e4m3
from blockscale.formats.layouts import ATOMS, LINEAR
from blockscale.tensor import LARGEST_GLOBAL_SCALE, NVFP4Tensor

OWN_FORMAT = "blockscale.checkpoint"
OWN_VERSION = "1"
LOW_FIRST, HIGH_FIRST = "low", "high"
USUAL_AMAX = (1e-3, 10.0)  # of weights; 1000 times beyond either is taken for a mistake
_SAMPLE = 1 << 16  # block scales that say what a whole weight's magnitude is like
_SHOWN = 4


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    layout: str | None = None,
    scale_layout: str = LINEAR,
    first_nibble: str = LOW_FIRST,
) -> Checkpoint:
    """Open an NVFP4 checkpoint of ModelOpt, compressed-tensors or Blockscale. Tensors are read when they are asked for.

    Args:
        path: a safetensors file, or a directory with one, or with shards and their index; config.json and
            hf_quant_config.json are held against the tensors.
        layout: "linear" or "128x4": how the tensors carry their block scales; by default as they are stored.
        scale_layout: how the file has the block scales, "linear" or "128x4"; files do not say it.
        first_nibble: which half of a byte holds the even k, "low" or "high". Every known writer has "low".

    Returns:
        A mapping: the weight's name in the unquantised model -> NVFP4Tensor, any other tensor's name -> Tensor. A
        weight with several global scales is one entry for each, named by its index: "experts.gate_up_proj[3]".

    Raises:
        TypeError: `path` is no path.
        OSError: there is nothing to read.
        CheckpointError (a ValueError): a file is broken, or a layer is incomplete or no NVFP4; names file and tensor.
            Values are looked at when a tensor is read, and refused then.

    Warns:
        UserWarning: layers and configuration disagree, for example a layer in bf16 that should be quantised; or, as a
        tensor is read, its values are a thousand times outside of what weights usually are.

    Source: docs/checkpoints.md.
    """
    checkpoint = Checkpoint(path, layout=layout, scale_layout=scale_layout, first_nibble=first_nibble)
    for problem in checkpoint.problems:
        if problem.fatal:
            raise CheckpointError(problem.file, problem.name, problem.text)
    if checkpoint.problems:
        warnings.warn(f"{os.fspath(path)}: {_summary(checkpoint.problems)}", stacklevel=2)
    return checkpoint


class Checkpoint(Mapping[str, NVFP4Tensor | Tensor]):
    """What `load_checkpoint` returns; made directly, it also holds a checkpoint with fatal problems.

    Attributes:
        source: the files.
        layers: the NVFP4 weights by name.
        problems: what is wrong, or should be known.
        plain: the entries of all other tensors; input scales are among them.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        layout: str | None = None,
        scale_layout: str = LINEAR,
        first_nibble: str = LOW_FIRST,
    ) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path: {path!r}, expected a str or os.PathLike")
        for name, value in (("layout", layout), ("scale_layout", scale_layout)):
            if value is not None and value not in (LINEAR, ATOMS):
                raise ValueError(f"{name}: {value!r}, expected {LINEAR!r} or {ATOMS!r}")
        if first_nibble not in (LOW_FIRST, HIGH_FIRST):
            raise ValueError(f"first_nibble: {first_nibble!r}, expected {LOW_FIRST!r} or {HIGH_FIRST!r}")
        self.layout, self.scale_layout, self.first_nibble = layout, scale_layout, first_nibble
        self.source: Source = open_source(path)
        self.config: QuantConfig = read_config(self.source)
        shapes = {name: shape for file in self.source.files for name, shape in _own_shapes(file).items()}
        finder = Finder(self.source.entries, self.config, self.source.config, shapes, scale_layout)
        found, problems = finder.find()
        self.layers: dict[str, Layer] = {}
        for layer in found:
            if layer.name in self.layers:
                raise layer.codes.error(f"stands for {layer.name}, and so does {self.layers[layer.name].codes.name}")
            self.layers[layer.name] = layer
        consumed = {entry.name for layer in found for entry in layer.entries}
        self.plain: dict[str, Entry] = {
            name: entry for name, entry in self.source.entries.items() if name not in consumed
        }
        self.problems = (*problems, *self._problems_of_the_whole())
        self._parts = {name + part.suffix: (layer, part) for name, layer in self.layers.items() for part in layer.parts}
        for name in self._parts.keys() & self.plain.keys():
            raise self.plain[name].error("stands for a weight and for a tensor of its own")

    def __getitem__(self, name: str) -> NVFP4Tensor | Tensor:
        if name in self._parts:
            return self.weight(name)
        if name in self.plain:
            return self.plain[name].tensor()
        if name in self.layers:
            layer = self.layers[name]
            raise KeyError(f"{name!r} has {len(layer.parts)} global scales: ask for {name + layer.parts[0].suffix!r}")
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield from self._parts
        yield from self.plain

    def __len__(self) -> int:
        return len(self._parts) + len(self.plain)

    def __contains__(self, name: object) -> bool:
        return name in self._parts or name in self.plain

    def __repr__(self) -> str:
        return f"Checkpoint({self.source.path!r}, {len(self._parts)} NVFP4 weights, {len(self.plain)} other tensors)"

    def weight(self, name: str) -> NVFP4Tensor:
        """An NVFP4 weight, or one of its parts."""
        return self._weight(*self._parts[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """The logical shape of an NVFP4 weight, or of one of its parts; nothing is read."""
        layer, part = self._parts[name]
        return part.shape(layer.shape)

    def parts(self, name: str) -> list[NVFP4Tensor]:
        """The tensors of a weight, one for each global scale: experts in order, or the parts of fused rows."""
        layer = self.layers[name]
        return [self._weight(layer, part) for part in layer.parts]

    def whole(self, name: str) -> tuple[NVFP4Tensor, Tensor, Tensor | None]:
        """A weight with several global scales in one: the tensor under a global scale of 1, the multipliers in the
        shape that they are stored in, and the divisors if those are stored."""
        layer = self.layers[name]
        scales = [self._global_scale(layer, part) for part in layer.parts]
        shape = layer.global_scale.shape
        units = torch.stack([unit for unit, _ in scales]).view(shape)
        divisors = [divisor for _, divisor in scales if divisor is not None]
        one = torch.ones((), dtype=torch.float32, device="cpu")
        t = self._wrapped(layer, Part((), 0), *self._stored(layer, ()), one)
        return t, units, torch.stack(divisors).view(shape) if divisors else None

    def input_scale(self, name: str) -> Tensor | None:
        """The activations' global scale for a weight, fp32, as a multiplier; None where there is none.

        Quantise with it as `quantize(x, global_scale=...)`. () for most; (E,) where a stack has one an expert.
        """
        layer = self._parts[name][0] if name in self._parts else self.layers[name]
        entry = layer.input_scale
        if entry is None:
            return None
        if entry.dtype != "F32" or not entry.nbytes:
            raise entry.error(f"dtype {entry.dtype}, shape {entry.shape}, expected F32")
        stored = entry.tensor().clone()
        with threads.exact_arithmetic():
            scale = stored.reciprocal() if entry.name.endswith("input_global_scale") else stored
        if not bool(((scale > 0) & torch.isfinite(scale) & torch.isfinite(stored)).all()):
            raise entry.error(f"{stored.flatten()[0].item()}, expected a positive finite number")
        return scale.reshape(()) if scale.numel() == 1 else scale

    def _weight(self, layer: Layer, part: Part) -> NVFP4Tensor:
        whole_rows = part.rows is None or not _rows_lie_together(layer)
        index = part.experts if whole_rows else part.index
        unit, divisor = self._global_scale(layer, part)
        made = self._wrapped(layer, part, *self._stored(layer, index), unit)
        if whole_rows and part.rows is not None:
            made = made[part.rows]
        if divisor is not None:
            try:
                made = made.with_divisor(divisor)
            except ValueError as error:
                raise layer.global_scale.error(str(error)) from error
        self._warn_if_implausible(layer, made)
        return made if self.layout is None else made.with_layout(self.layout)

    def _wrapped(
        self, layer: Layer, part: Part, codes: Tensor, scales: Tensor, shape: tuple[int, ...], unit: Tensor
    ) -> NVFP4Tensor:
        try:
            return NVFP4Tensor.from_parts(
                codes, scales, unit, shape=shape, layout=layer.layout, check_values=True, align=ALIGN
            )
        except (TypeError, ValueError) as error:
            raise layer.scales.error(f"{error}{_of(part)}") from error

    def _stored(self, layer: Layer, index: Index) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Codes and scales of a part as `from_parts` takes them, and its logical shape."""
        found = [entry.at(index) for entry in (layer.codes, layer.scales)]
        columns = [entry.shape[-1] // 2 if entry.dtype == F4 else entry.shape[-1] for entry in found]
        codes, scales = (e.bytes().view(*e.shape[:-1], n) for e, n in zip(found, columns, strict=True))
        if layer.transposed and layer.convention != BLOCKSCALE:
            codes, scales = codes.mT.contiguous(), scales.mT.contiguous()
        if self.first_nibble == HIGH_FIRST and layer.convention != BLOCKSCALE:
            codes = (codes << 4).bitwise_or_(codes >> 4)
        shape = (*codes.shape[:-1], layer.shape[-1])
        return codes, scales.view(torch.float8_e4m3fn), shape

    def _global_scale(self, layer: Layer, part: Part) -> tuple[Tensor, Tensor | None]:
        """The multiplier of a part, and the divisor that is stored in its place; new tensors, fp32 ()."""
        entry = layer.global_scale
        stored = entry.tensor().flatten()[part.number].clone()
        value = float(stored)
        if layer.convention == COMPRESSED_TENSORS:
            with threads.exact_arithmetic():
                unit = stored.reciprocal()
            if not (0 < value < float("inf") and 0 < float(unit) <= LARGEST_GLOBAL_SCALE):
                raise entry.error(f"{value}{_of(part)}, expected a positive finite divisor")
            return unit, stored
        if not 0 < value <= LARGEST_GLOBAL_SCALE:
            limit = f"{LARGEST_GLOBAL_SCALE:.4g}"
            raise entry.error(f"{value}{_of(part)}, expected a positive multiplier up to {limit}")
        if layer.divisor is None:
            return stored, None
        if layer.divisor.dtype != "F32" or layer.divisor.shape != entry.shape:
            found = f"dtype {layer.divisor.dtype}, shape {layer.divisor.shape}"
            raise layer.divisor.error(f"{found}, expected F32, {entry.shape}")
        return stored, layer.divisor.tensor().flatten()[part.number].clone()

    def _warn_if_implausible(self, layer: Layer, t: NVFP4Tensor) -> None:
        low, high = USUAL_AMAX
        scales = t.linear_scales().flatten()
        amax = largest_magnitude(scales[:_SAMPLE], t.global_scale)
        if low / 1e3 <= amax <= high * 1e3:
            return
        amax = largest_magnitude(scales, t.global_scale)
        if amax and not low / 1e3 <= amax <= high * 1e3:
            warnings.warn(
                f"{layer.global_scale.file.path}: {layer.global_scale.name}: values reach {amax:.3g}, where weights "
                f"usually reach {low:g} to {high:g}; is the global scale stored as its reciprocal?",
                stacklevel=_callers_level(),
            )

    def _problems_of_the_whole(self) -> list[Problem]:
        path = self.source.path
        notes = [Problem("", text, False, path) for text in self.config.notes]
        given = (self.scale_layout, self.first_nibble) != (LINEAR, LOW_FIRST)
        if given and any(layer.convention == BLOCKSCALE for layer in self.layers.values()):
            text = f"scale_layout and first_nibble say nothing of {BLOCKSCALE}'s own layers; their files do"
            notes.append(Problem("", text, False, path))
        for entry in self.plain.values():
            linear = looks_linear(entry.name, entry.dtype, entry.shape)
            scheme = self.config.scheme(entry.name.removesuffix(".weight")) if linear else None
            if scheme is not None and scheme.nvfp4:
                text = f"left in {entry.dtype}, though the configuration says {scheme.algorithm}"
                notes.append(Problem(entry.name, text, False, entry.file.path))
        return notes


def _callers_level() -> int:
    """The stacklevel, for a warning of the calling function, of the first frame that is not of this package or of the
    mapping's own methods."""
    inside = (str(Path(__file__).parent), "<frozen _collections_abc>", sys.modules[Mapping.__module__].__file__ or "-")
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level


def _rows_lie_together(layer: Layer) -> bool:
    """Whether some rows of a matrix are a range of the file."""
    return layer.layout == LINEAR and (not layer.transposed or layer.convention == BLOCKSCALE)


def largest_magnitude(scales: Tensor, global_scale: Tensor) -> float:
    """What a code of ±6 stands for under the largest of some block scales: an upper bound of the values."""
    return e4m3.value(e4m3.largest_code(scales)) * e2m1.MAX * float(global_scale)


def _own_shapes(file: TensorFile) -> dict[str, tuple[tuple[int, ...], str, bool]]:
    """Of a file of our own: the name of each weight's codes -> its logical shape, the layout of its scales, and whether
    it came transposed."""
    if file.metadata.get("format") != OWN_FORMAT:
        return {}
    if file.metadata.get("version") != OWN_VERSION:
        found = file.metadata.get("version")
        raise CheckpointError(file.path, None, f"version {found!r} of {OWN_FORMAT}, expected {OWN_VERSION!r}")
    try:
        listed = json.loads(file.metadata.get("layers", ""))
        made = {}
        for name, layer in listed.items():
            shape, layout = layer["shape"], layer["layout"]
            if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"{name}: shape {shape!r}")
            if layout not in (LINEAR, ATOMS):
                raise ValueError(f"{name}: layout {layout!r}")
            made[name] = tuple(shape), layout, layer.get("transposed") is True
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(file.path, None, f"metadata do not list the layers: {error}") from error
    return made


def _of(part: Part) -> str:
    """Where in a stack or a fused weight a value lies, for messages."""
    return f" at {part.suffix}" if part.suffix else ""


def _summary(problems: tuple[Problem, ...]) -> str:
    """One line: each kind of problem once, with the first names it concerns."""
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(problem.text, []).append(problem.name)
    lines = []
    for text, names in kinds.items():
        shown = ", ".join(name for name in names[:_SHOWN] if name)
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        lines.append(f"{shown}{more}: {text}" if shown else text)
    return "; ".join(lines)
