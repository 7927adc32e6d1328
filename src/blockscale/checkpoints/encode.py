"""What is to be written: for each weight or other tensor the names, dtypes and shapes, and how to get the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockscale import threads
from blockscale.checkpoints.checkpoint import Checkpoint
from blockscale.checkpoints.config import BLOCKSCALE, COMPRESSED_TENSORS, MODELOPT, STATIC, WEIGHT_ONLY
from blockscale.checkpoints.files import DTYPES, F4, Entry
from blockscale.checkpoints.layers import DIVISOR, NOT_APPLIED, ROLES, Layer, stem_of
from blockscale.checkpoints.selection import looks_linear
from blockscale.checkpoints.writer import Spec
from blockscale.formats import layouts
from blockscale.formats.layouts import ATOMS, BLOCK, FRAGMENT, GROUPED, LINEAR, ROW_ALIGN, round_up
from blockscale.tensor import NVFP4Tensor

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_INPUT_ROLES = (ROLES[MODELOPT][3], ROLES[COMPRESSED_TENSORS][3])


@dataclass(frozen=True)
class Unit:
    """Tensors that are made together: those of one weight, or one other tensor.

    Attributes:
        specs: their names, dtypes and shapes.
        make: gives them in that order; called once, as they are written.
        activations: for an NVFP4 weight, by module, what its activations are to be.
        geometry: for our own format, the name of the codes -> logical shape and layout.
        plain_linear: the module of a linear layer that stays in floating point, "" otherwise.
    """

    specs: tuple[Spec, ...]
    make: Callable[[], Sequence[Tensor]]
    activations: Mapping[str, str] = field(default_factory=dict)
    geometry: Mapping[str, Any] = field(default_factory=dict)
    plain_linear: str = ""


@dataclass(frozen=True)
class Weight:
    """An NVFP4 weight to be written. `scales` is the shape of its global scales; `load` gives the tensor with any
    global scale, the multipliers of that shape, and the divisors if there are any. `transposed` is that of `Layer`."""

    name: str
    shape: tuple[int, ...]
    layout: str
    scales: tuple[int, ...]
    has_divisor: bool
    activations: str
    transposed: bool
    load: Callable[[], tuple[NVFP4Tensor, Tensor, Tensor | None]]


def weight_unit(weight: Weight, convention: str) -> Unit:
    """Raises ValueError for a weight that the convention has no place for."""
    if weight.layout == GROUPED:
        raise ValueError(f"{weight.name}: layout {GROUPED!r} is not stored; use .with_layout('128x4')")
    if weight.layout == FRAGMENT:  # an order for one kind of GPU, and no business of a file's
        weight = replace(weight, layout=ATOMS)
    stem = stem_of(weight.name)
    module = {stem[:-1]: weight.activations}
    if convention == BLOCKSCALE:
        return _own_unit(weight, stem, module)
    *lead, rows, k = weight.shape
    if k % BLOCK:
        raise ValueError(f"{weight.name}: K = {k}; {convention} stores multiples of {BLOCK}, {BLOCKSCALE!r} any K")
    if weight.name.endswith("]"):
        raise ValueError(f"{weight.name}: a part of a weight; save the checkpoint it comes from, or to {BLOCKSCALE!r}")
    if convention == COMPRESSED_TENSORS and (lead or weight.scales):
        raise ValueError(f"{weight.name}: {convention} stores matrices with one global scale, not {weight.shape}")
    _, scales_role, global_role, _ = ROLES[convention]
    turn = weight.transposed and convention == MODELOPT
    specs = (
        Spec(codes_name(stem, convention), "U8", _turned((*lead, rows, k // 2), turn)),
        Spec(stem + scales_role, "F8_E4M3", _turned((*lead, rows, k // BLOCK), turn)),
        Spec(stem + global_role, "F32", weight.scales or ((1,) if convention == COMPRESSED_TENSORS else ())),
    )

    def make() -> tuple[Tensor, ...]:
        t, multipliers, divisors = weight.load()
        stored = multipliers
        if convention == COMPRESSED_TENSORS:
            stored = _reciprocal(multipliers) if divisors is None else divisors
        t = t.with_layout(LINEAR)
        codes, scales = t.codes[..., : k // 2], t.scales[..., : k // BLOCK]
        return (codes.mT, scales.mT, stored) if turn else (codes, scales, stored)

    return Unit(specs, make, module)


def _turned(shape: tuple[int, ...], turn: bool) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2]) if turn else shape


def codes_name(stem: str, convention: str) -> str:
    """A stack of experts in ModelOpt's convention has the name of the weight itself."""
    role = ROLES[convention][0]
    return stem[:-1] if convention == MODELOPT and stem.endswith("_") else stem + role


def _own_unit(weight: Weight, stem: str, module: Mapping[str, str]) -> Unit:
    *lead, rows, k = weight.shape
    codes, scales, multiplier, _ = (stem + role for role in ROLES[BLOCKSCALE])
    padded = rows if weight.layout == LINEAR else round_up(rows, ROW_ALIGN)
    specs = [
        Spec(codes, "U8", (*lead, rows, BLOCK // 2 * layouts.blocks(k))),
        Spec(scales, "F8_E4M3", (*lead, padded, layouts.blocks(k))),
        Spec(multiplier, "F32", weight.scales),
    ]
    if weight.has_divisor:
        specs.append(Spec(stem + DIVISOR, "F32", weight.scales))

    def make() -> tuple[Tensor, ...]:
        t, multipliers, divisors = weight.load()
        clean = t.with_layout(LINEAR).with_layout(weight.layout)  # padding rows become zero
        return clean.codes, clean.scales, multipliers, *([] if divisors is None else [divisors])

    came = {"transposed": True} if weight.transposed else {}
    return Unit(tuple(specs), make, module, {codes: {"shape": list(weight.shape), "layout": weight.layout, **came}})


def tensor_units(tensors: Mapping[str, NVFP4Tensor | Tensor], convention: str) -> Iterator[Unit]:
    """Units of a mapping. Values are looked up once for their shapes, and again as they are written."""
    stems: dict[str, str] = {}
    for name in tensors:
        if isinstance(tensors[name], NVFP4Tensor):
            stems |= {stem_of(name) + role: stem_of(name) for role in _INPUT_ROLES}
    static = {stems[name] for name in tensors if name in stems}
    for name in tensors:
        value = tensors[name]
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(f"{name}: on the meta device, which holds no values")
        if isinstance(value, NVFP4Tensor):
            said = getattr(tensors, "activations", {}).get(stem_of(name)[:-1], WEIGHT_ONLY)
            kind = STATIC if stem_of(name) in static else said
            has_divisor, load = value.divisor is not None, partial(_look_up_weight, tensors, name)
            weight = Weight(name, tuple(value.shape), value.layout, (), has_divisor, kind, False, load)
            yield weight_unit(weight, convention)
        elif isinstance(value, Tensor) and value.layout == torch.strided:
            _check_place(name, convention)
            spec = _spec(name, value)
            unit = Unit((spec,), partial(_look_up, tensors, name), plain_linear=_linear(spec))
            yield _input_unit(unit, name, stems.get(name), convention)
        else:
            raise TypeError(f"{name}: {type(value).__name__}, expected an NVFP4Tensor or a dense torch.Tensor")


def _look_up(tensors: Mapping[str, Any], name: str) -> tuple[Tensor]:
    return (tensors[name],)


def _look_up_weight(tensors: Mapping[str, Any], name: str) -> tuple[NVFP4Tensor, Tensor, Tensor | None]:
    t = tensors[name]
    return t, t.global_scale, t.divisor


def checkpoint_units(checkpoint: Checkpoint, convention: str) -> Iterator[Unit]:
    """Units of a checkpoint in another convention."""
    stems = {layer.input_scale.name: layer.stem for layer in checkpoint.layers.values() if layer.input_scale}
    for layer in checkpoint.layers.values():
        yield weight_unit(_weight(checkpoint, layer), convention)
    for name, entry in checkpoint.plain.items():
        _check_place(name, convention)
        yield _input_unit(raw_unit(entry), name, stems.get(name), convention)


def _check_place(name: str, convention: str) -> None:
    if convention == COMPRESSED_TENSORS and name.endswith(NOT_APPLIED):
        raise ValueError(f"{name}: {COMPRESSED_TENSORS} has no place for it")


def raw_unit(entry: Entry) -> Unit:
    """A tensor as it is."""
    spec = Spec(entry.name, entry.dtype, entry.shape)
    return Unit((spec,), lambda: (entry.bytes(),), plain_linear=_linear(spec))


def _weight(checkpoint: Checkpoint, layer: Layer) -> Weight:
    """A layer, whole, with all its global scales."""
    alone = len(layer.parts) == 1
    cut = any(part.rows is not None for part in layer.parts)  # rows under several scales are found in linear order only
    layout = LINEAR if cut else checkpoint.layout or layer.layout

    def load() -> tuple[NVFP4Tensor, Tensor, Tensor | None]:
        if not alone:
            return checkpoint.whole(layer.name)
        t = checkpoint.weight(layer.name)
        return t, t.global_scale, t.divisor

    return Weight(
        name=layer.name,
        shape=layer.shape,
        layout=layout,
        scales=() if alone else layer.global_scale.shape,
        has_divisor=layer.convention == COMPRESSED_TENSORS or layer.divisor is not None,
        activations=layer.activations,
        transposed=layer.transposed,
        load=load,
    )


def _input_unit(unit: Unit, name: str, stem: str | None, convention: str) -> Unit:
    """The unit of an input's global scale in the words of the convention; any other unit as it is."""
    role = ROLES[convention][3]
    if stem is None or convention == BLOCKSCALE or name == stem + role:
        return unit
    (spec,) = unit.specs
    shape = spec.shape
    if spec.nbytes == 4:
        shape = (1,) if convention == COMPRESSED_TENSORS else ()
    if spec.dtype != "F32":
        raise ValueError(f"{name}: dtype {spec.dtype}, expected F32")

    def make() -> tuple[Tensor, ...]:
        stored = unit.make()[0].view(torch.float32)
        scale = _reciprocal(stored)
        if not bool(((stored > 0) & (scale > 0) & torch.isfinite(stored) & torch.isfinite(scale)).all()):
            raise ValueError(f"{name}: {stored.flatten()[0].item()}, expected a positive finite number")
        return (scale,)

    return Unit((Spec(stem + role, "F32", shape),), make)


def _reciprocal(x: Tensor) -> Tensor:
    with threads.exact_arithmetic():
        return x.detach().reciprocal()


def _spec(name: str, t: Tensor) -> Spec:
    if t.dtype == torch.float4_e2m1fn_x2 and t.ndim:
        return Spec(name, F4, (*t.shape[:-1], 2 * t.shape[-1]))
    if t.dtype not in _NAMES:
        raise TypeError(f"{name}: dtype {t.dtype}, which safetensors does not have")
    return Spec(name, _NAMES[t.dtype], tuple(t.shape))


def _linear(spec: Spec) -> str:
    return spec.name.removesuffix(".weight") if looks_linear(spec.name, spec.dtype, spec.shape) else ""
