"""From the tensors of a checkpoint to its NVFP4 layers, by name, dtype and shape; what does not fit is a problem.

A layer's tensors share a stem: "model.layers.0.mlp.up_proj." (a module), or "model.layers.0.mlp.experts.gate_up_proj_"
(a stack of experts that is a parameter of its own). They may lie in different files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from blockscale.checkpoints.config import (
    BLOCKSCALE,
    COMPRESSED_TENSORS,
    DYNAMIC,
    MODELOPT,
    STATIC,
    WEIGHT_ONLY,
    QuantConfig,
)
from blockscale.checkpoints.files import F4, Entry
from blockscale.formats import layouts
from blockscale.formats.layouts import ATOMS, BLOCK, LINEAR

ROLES = {  # what follows the stem: codes, block scales, global scale, input's global scale
    MODELOPT: ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    COMPRESSED_TENSORS: ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
    BLOCKSCALE: ("weight_codes", "weight_scales", "weight_multiplier", "input_scale"),
}
DIVISOR = "weight_divisor"  # in our own files, what a tensor from compressed-tensors came with
PACKED = ("U8", F4)
_NOT_NVFP4 = {  # roles that would change the values
    "weight_zero_point": "NVFP4 has no zero points",
    "weight_g_idx": "columns in another order are not supported",
}
_NOT_APPLIED = {
    "pre_quant_scale": "activations must be multiplied by it first; gemm does not do so",
    "svdquant_lora_a": "a low-rank product must be added to the result; gemm does not do so",
}
NOT_APPLIED = tuple(_NOT_APPLIED)
_ATTENTION = ("num_attention_heads", "num_key_value_heads", "head_dim")

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Part:
    """A range of a weight under one global scale: `index` into the weight, `number` of the scale; `suffix` names it."""

    index: Index
    number: int

    @property
    def experts(self) -> Index:
        """The part of the index that chooses matrices."""
        return tuple(i for i in self.index if not isinstance(i, slice))

    @property
    def rows(self) -> slice | None:
        """The rows of the one matrix that is left, if they are not all of them."""
        return next((i for i in self.index if isinstance(i, slice)), None)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this part of a weight of shape `whole`."""
        for i in self.index:
            whole = (i.stop - i.start, *whole[1:]) if isinstance(i, slice) else whole[1:]
        return whole

    @property
    def suffix(self) -> str:
        words = [f"{i.start}:{i.stop}" if isinstance(i, slice) else str(i) for i in self.index]
        return f"[{', '.join(words)}]" if words else ""


@dataclass(frozen=True)
class Layer:
    """
    Attributes:
        name: of the weight, as the unquantised model has it.
        stem: what its tensors' names begin with.
        convention: MODELOPT, COMPRESSED_TENSORS or BLOCKSCALE.
        codes, scales, global_scale, input_scale, divisor: where they lie; the last two may be missing.
        shape: logical, (N, K) or (E, N, K).
        layout: of the block scales.
        transposed: a stack with codes (E, K/2, N) and scales (E, K/16, N), as ModelOpt writes some models' experts. Our
            own files have them upright, and remember that they came so.
        parts: one for every global scale.
        activations: STATIC (an input scale is stored), DYNAMIC or WEIGHT_ONLY.
    """

    name: str
    stem: str
    convention: str
    codes: Entry
    scales: Entry
    global_scale: Entry
    input_scale: Entry | None
    divisor: Entry | None
    shape: tuple[int, ...]
    layout: str
    transposed: bool
    parts: tuple[Part, ...]
    activations: str

    @property
    def module(self) -> str:
        return self.stem[:-1]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The tensors that the weight itself is made of."""
        found = (self.codes, self.scales, self.global_scale, self.divisor)
        return tuple(entry for entry in found if entry is not None)


@dataclass(frozen=True)
class Problem:
    """`fatal`: the layer cannot be loaded. Otherwise it can, and this should be known."""

    name: str
    text: str
    fatal: bool
    file: str


class _Refused(Exception):
    def __init__(self, entry: Entry, text: str) -> None:
        self.entry, self.text = entry, text


@dataclass(frozen=True)
class Finder:
    """Finds layers among `entries`; `shapes` is what our own files say of theirs, `scale_layout` what the caller says
    of the block scales in all others."""

    entries: Mapping[str, Entry]
    config: QuantConfig
    model: Mapping[str, Any]
    shapes: Mapping[str, tuple[tuple[int, ...], str, bool]]
    scale_layout: str

    def find(self) -> tuple[list[Layer], list[Problem]]:
        layers, problems = [], []
        for stem, convention in self._candidates():
            try:
                layer = self._layer(stem, convention)
            except _Refused as refused:
                problems.append(Problem(refused.entry.name, refused.text, True, refused.entry.file.path))
                continue
            layers.append(layer)
            problems += self._notes(layer)
        return layers, problems

    def _candidates(self) -> Iterator[tuple[str, str]]:
        """(stem, convention) of everything that claims to be NVFP4."""
        seen = set()
        for name, entry in self.entries.items():
            for convention, roles in ROLES.items():
                for role in roles[:3]:
                    stem = name[: len(name) - len(role)]
                    if not name.endswith(role) or stem[-1:] not in (".", "_", "") or stem in seen:
                        continue
                    if self._claims(stem, convention, entry if role == roles[0] else None):
                        seen.add(stem)
                        yield stem, convention

    def _claims(self, stem: str, convention: str, codes: Entry | None) -> bool:
        """Whether tensors of this stem mean NVFP4 in this convention; `codes` where they are what was met."""
        _, scales_role, global_role, _ = ROLES[convention]
        if stem + global_role in self.entries:
            return True
        codes = codes or self._codes(stem, convention)
        if codes is None or codes.dtype not in PACKED:
            return False
        scales = self.entries.get(stem + scales_role)
        scheme = self.config.scheme(stem[:-1])
        stated = scheme is not None and scheme.nvfp4
        return stated or codes.dtype == F4 or (scales is not None and scales.dtype in ("F8_E4M3", "F8_E8M0", "U8"))

    def _codes(self, stem: str, convention: str) -> Entry | None:
        codes = self.entries.get(stem + ROLES[convention][0])
        if codes is None and convention == MODELOPT and stem.endswith("_"):
            return self.entries.get(stem[:-1])
        return codes

    def _layer(self, stem: str, convention: str) -> Layer:
        codes, scales, unit = self._required(stem, convention)
        self._check_configured(stem, codes)
        shape, layout, transposed = self._geometry(convention, codes, scales)
        inputs = (ROLES[convention][3], *(["input_global_scale"] if convention == BLOCKSCALE else []))
        source = next((self.entries[stem + role] for role in inputs if stem + role in self.entries), None)
        scheme = self.config.scheme(stem[:-1])
        without = WEIGHT_ONLY if scheme is None else DYNAMIC if scheme.activations == STATIC else scheme.activations
        return Layer(
            name=codes.name if convention == MODELOPT else _name(stem),
            stem=stem,
            convention=convention,
            codes=codes,
            scales=scales,
            global_scale=unit,
            input_scale=source,
            divisor=self.entries.get(stem + DIVISOR) if convention == BLOCKSCALE else None,
            shape=shape,
            layout=layout,
            transposed=transposed,
            parts=self._parts(unit, shape),
            activations=STATIC if source is not None else without,
        )

    def _required(self, stem: str, convention: str) -> tuple[Entry, Entry, Entry]:
        """Codes, block scales and global scale, all there and of NVFP4's dtypes."""
        codes_role, scales_role, global_role, _ = ROLES[convention]
        codes = self._codes(stem, convention)
        scales, unit = self.entries.get(stem + scales_role), self.entries.get(stem + global_role)
        known = next(entry for entry in (codes, scales, unit) if entry is not None)
        if codes is None:
            raise _Refused(known, f"there is no {stem}{codes_role} that it belongs to")
        if codes.dtype not in PACKED:
            raise _Refused(codes, f"dtype {codes.dtype}, expected packed codes (U8 or F4)")
        if scales is None:
            raise _Refused(codes, f"{stem}{scales_role} is missing")
        if scales.dtype in ("F8_E8M0", "U8"):
            raise _Refused(scales, f"dtype {scales.dtype}: E8M0 scales are MXFP4's; NVFP4 has F8_E4M3")
        if scales.dtype != "F8_E4M3":
            raise _Refused(scales, f"dtype {scales.dtype}, expected F8_E4M3")
        if unit is None:
            raise _Refused(codes, f"{stem}{global_role} is missing")
        if unit.dtype != "F32":
            raise _Refused(unit, f"dtype {unit.dtype}, expected F32")
        return codes, scales, unit

    def _check_configured(self, stem: str, codes: Entry) -> None:
        scheme = self.config.scheme(stem[:-1])
        if scheme is not None and scheme.group_size not in (None, BLOCK):
            raise _Refused(codes, f"the configuration says group_size {scheme.group_size}; NVFP4 has {BLOCK}")
        for role, why in _NOT_NVFP4.items():
            if stem + role in self.entries:
                raise _Refused(self.entries[stem + role], why)

    def _geometry(self, convention: str, codes: Entry, scales: Entry) -> tuple[tuple[int, ...], str, bool]:
        """Logical shape, layout of the scales, and whether they and the codes are transposed."""
        if convention == BLOCKSCALE:
            return self._own_geometry(codes, scales)
        if len(codes.shape) not in (2, 3):
            raise _Refused(codes, f"shape {codes.shape}, expected (N, K/2) or (E, N, K/2)")
        *lead, rows, last = codes.shape
        k = last if codes.dtype == F4 else 2 * last
        if k % 2 or k < 1:
            raise _Refused(codes, f"shape {codes.shape}, expected an even number of columns")
        plain = (*lead, rows, -(-k // BLOCK))
        if self.scale_layout == LINEAR and lead and codes.dtype == "U8" and scales.shape != plain:
            turned = (*lead, rows // 8, last)
            if rows % 8 == 0 and scales.shape == turned:
                return (*lead, last, 2 * rows), LINEAR, True
        expected = {LINEAR: plain, ATOMS: (*lead, layouts.round_up(rows, 128), layouts.blocks(k))}
        if scales.shape != expected[self.scale_layout]:
            raise _Refused(scales, self._wrong_shape(scales.shape, expected, codes.shape))
        return (*lead, rows, k), self.scale_layout, False

    def _own_geometry(self, codes: Entry, scales: Entry) -> tuple[tuple[int, ...], str, bool]:
        """What the metadata say, if the tensors agree."""
        if codes.name not in self.shapes:
            raise _Refused(codes, "the file's metadata do not give its logical shape")
        shape, layout, transposed = self.shapes[codes.name]
        if len(shape) < 2 or shape[-1] < 1 or codes.dtype != "U8" or (transposed and len(shape) != 3):
            raise _Refused(codes, f"{codes.dtype} with the logical shape {shape}, expected U8 and (..., N, K)")
        *lead, rows, k = shape
        padded = rows if layout == LINEAR else layouts.round_up(rows, layouts.ROW_ALIGN)
        for entry, expected in (
            (codes, (*lead, rows, 8 * layouts.blocks(k))),
            (scales, (*lead, padded, layouts.blocks(k))),
        ):
            if entry.shape != expected:
                raise _Refused(entry, f"shape {entry.shape}, expected {expected} for {shape} and layout {layout!r}")
        return shape, layout, transposed

    def _wrong_shape(self, found: tuple[int, ...], expected: dict[str, tuple[int, ...]], codes: tuple[int, ...]) -> str:
        text = f"shape {found}, expected {expected[self.scale_layout]} for codes of shape {codes}"
        other = ATOMS if self.scale_layout == LINEAR else LINEAR
        if found == expected[other]:
            return f"{text}; it fits scale_layout={other!r}"
        columns = expected[LINEAR][-1]
        if found[:-1] == expected[LINEAR][:-1] and found[-1] == -(-columns // 2):
            return f"{text}; one scale for 32 elements is MXFP4's, NVFP4 has one for {BLOCK}"
        return text

    def _parts(self, unit: Entry, shape: tuple[int, ...]) -> tuple[Part, ...]:
        """What each global scale is for. One scale is for everything, whether or not the weight is fused."""
        scales = tuple(n for n in unit.shape if n != 1)
        if not scales and unit.nbytes:
            return (Part((), 0),)
        stack, rows = shape[:-2], shape[-2]
        if stack and scales[: len(stack)] == stack:
            inner = self._row_parts(unit, scales[1:], rows) if len(scales) > 1 else [()]
            indices: list[Index] = [(e, *part) for e in range(stack[0]) for part in inner]
        elif not stack:
            indices = self._row_parts(unit, scales, rows)
        else:
            raise _Refused(
                unit, f"shape {unit.shape}, expected one global scale, or one for each of {stack[0]} experts"
            )
        return tuple(Part(index, number) for number, index in enumerate(indices))

    def _row_parts(self, unit: Entry, scales: tuple[int, ...], rows: int) -> list[Index]:
        """Two scales: gate and up, of equal size. Three: query, key and value, of the sizes that config.json gives."""
        sizes: list[int] = []
        if scales == (2,) and rows % 2 == 0:
            sizes = [rows // 2] * 2
        elif scales == (3,):
            sizes = self._attention_rows()
        if sum(sizes) != rows or not sizes:
            text = f"shape {unit.shape}: which of the {rows} rows each global scale is for is not known"
            if scales == (3,):
                said = f"gives {' + '.join(map(str, sizes))}" if sizes else "does not give them"
                text += f"; config.json {said} by {', '.join(_ATTENTION)} (or hidden_size)"
            raise _Refused(unit, text)
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [(slice(end - size, end),) for end, size in zip(ends, sizes, strict=True)]

    def _attention_rows(self) -> list[int]:
        """Rows of query, key and value, by config.json or its text_config; empty where it does not say."""
        inner = self.model.get("text_config")
        model = {**self.model, **inner} if isinstance(inner, dict) else self.model
        given = [model.get(key) for key in _ATTENTION]
        heads, groups, width = (n if isinstance(n, int) and n > 0 else 0 for n in given)
        hidden = model.get("hidden_size")
        if not width and heads and isinstance(hidden, int):
            width = hidden // heads
        groups = groups or heads
        if not heads or not width:
            return []
        return [heads * width, groups * width, groups * width]

    def _notes(self, layer: Layer) -> Iterator[Problem]:
        def note(text: str) -> Problem:
            return Problem(layer.name, text, False, layer.codes.file.path)

        scheme = self.config.scheme(layer.module)
        if self.config.method not in (None, layer.convention):
            yield note(f"stored as {layer.convention}'s, though the configuration is {self.config.method}'s")
        if self.config.method is not None and scheme is None:
            yield note("quantised, though the configuration excludes it")
        elif scheme is not None and not scheme.nvfp4:
            yield note(f"NVFP4, though the configuration says {scheme.algorithm}")
        if scheme is not None and scheme.activations == STATIC and layer.input_scale is None:
            yield note("no input scale, though the configuration says static; activations need a dynamic one")
        for role, why in _NOT_APPLIED.items():
            if layer.stem + role in self.entries:
                yield note(f"{role}: {why}")


def stem_of(name: str) -> str:
    """What the names of the tensors of the weight `name` begin with."""
    return name.removesuffix("weight") if name == "weight" or name.endswith(".weight") else name + "_"


def _name(stem: str) -> str:
    """The weight of a stem."""
    return stem + "weight" if stem[-1:] in (".", "") else stem[:-1]
