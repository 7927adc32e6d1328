"""NVFP4Tensor, the one operand object."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from blockscale import ops, threads
from blockscale.formats import blocks, e4m3, fragment, layouts, packing
from blockscale.formats.layouts import ATOMS, BLOCK, FRAGMENT, GROUPED, K_ALIGN, LAYOUTS, LINEAR, ROW_ALIGN, round_up
from blockscale.tensor_checks import check_fragment, check_scale_shape, check_shape, full_index, unit_slice

if TYPE_CHECKING:
    from typing_extensions import Self

_FILE_FORMAT = "blockscale.nvfp4"
_FILE_VERSION = "1"
SMALLEST_GLOBAL_SCALE = 2.0**-126  # of a tensor that is quantised
LARGEST_GLOBAL_SCALE = float(torch.finfo(torch.float32).max) / e4m3.MAX  # scale x global scale stays finite
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_kinds: dict[tuple[object, ...], int] = {}
_MOST_KINDS = 16384
_numbers = itertools.count()
KERNEL_ALIGN = 16
_DENSE = torch.contiguous_format
_PIECE = 1 << 18  # elements that dequantize expands at a time


@dataclass(frozen=True, eq=False)
class NVFP4Tensor:
    """A matrix, or a batch of matrices, in NVFP4. Made by `quantize`, `from_parts` or `load`.

    Attributes:
        codes: uint8 (..., M, K_pad/2), two E2M1 codes a byte, low nibble = even k; K_pad = K rounded up to 64. In
            layout "fragment" they hold the scales too, (..., ceil(M/16), ceil(K/128), 1152).
        scales: float8_e4m3fn, one for 16 consecutive k, arranged as `layout` says; (0,) in layout "fragment".
        global_scale: fp32 (), a multiplier: value = code x (scale x global_scale).
        layout: "linear", "128x4", "128x4-grouped" or "fragment" (see `blockscale.formats.layouts`).
        shape: the logical shape (..., M, K). Padding is storage only and never observable.
        group_sizes: int32 (E,) for "128x4-grouped", otherwise None.
        scale_offsets: int32 (E + 1,) for "128x4-grouped": the scale row at which each group starts; otherwise None.
        divisor: fp32 (), what a checkpoint stores in place of the multiplier, so that it is written back bit for bit;
            global_scale is fl(1 / divisor). None for every other tensor.
    """

    codes: Tensor
    scales: Tensor
    global_scale: Tensor
    layout: str
    shape: torch.Size
    group_sizes: Tensor | None = None
    scale_offsets: Tensor | None = None
    divisor: Tensor | None = None

    @classmethod
    def from_parts(
        cls,
        codes: Tensor,
        scales: Tensor,
        global_scale: float | Tensor = 1.0,
        *,
        shape: Sequence[int] | None = None,
        layout: str = "128x4",
        group_sizes: Tensor | None = None,
        check_values: bool | None = None,
        align: int = KERNEL_ALIGN,
    ) -> Self:
        """Wrap existing codes and scales; no copy where K is a multiple of 64 and the bytes are contiguous and aligned.

        In layout "fragment" K has to be one of 128 for that, and M one of 16: padding is cleared.

        Args:
            codes: uint8 or float4_e2m1fn_x2 (..., M, ceil(K/2)) or (..., M, K_pad/2).
            scales: float8_e4m3fn in `layout`; blocks padded to K_pad/16 or, if linear, ceil(K/16) of them.
                The scales of "128x4" may also come flat.
            global_scale: the multiplier, a float or an fp32 tensor of one element.
            shape: logical shape; by default K is twice the last dimension of `codes`. Layout "fragment" needs it.
            group_sizes: int (E,), for "128x4-grouped". int32 is kept and not copied: who changes it changes the tensor,
                and `grouped_gemm` writes into it what it stores here; let each result have its own.
            check_values: look for scales and a global scale that the format does not allow. Default: on the CPU only,
                since a look at a GPU's values makes the host wait. Scales in padding are never looked at.
            align: bytes on whose multiples codes and scales lie, or they are copied. GPU kernels refuse less than 16,
                the CPU takes 2, so that tensors of a mapped file stay where they are.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is allowed.
        """
        for name, value in (("codes", codes), ("scales", scales)):
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                raise TypeError(f"{name}: {type(value).__name__}, expected a dense torch.Tensor")
        if codes.dtype not in (torch.uint8, torch.float4_e2m1fn_x2):
            raise TypeError(f"codes: dtype {codes.dtype}, expected torch.uint8 or torch.float4_e2m1fn_x2")
        if scales.dtype != torch.float8_e4m3fn:
            raise TypeError(
                f"scales: dtype {scales.dtype}, expected torch.float8_e4m3fn (raw bytes: .view(torch.float8_e4m3fn))"
            )
        check_layout(layout)
        codes = packing.as_bytes(codes)
        if codes.ndim < 2:
            raise ValueError(f"codes: shape {tuple(codes.shape)}, expected at least 2 dimensions (..., M, K/2)")
        if layout == FRAGMENT:
            size = check_fragment(codes, scales, shape)
        else:
            size = check_shape(codes, (*codes.shape[:-1], codes.shape[-1] * 2) if shape is None else shape)
        if scales.device != codes.device:
            raise ValueError(f"scales: on {scales.device}, but codes are on {codes.device}")
        groups = _check_groups(group_sizes, layout, size, codes.device)
        scales = check_scale_shape(scales, layout, size, groups)
        unit = as_global_scale(global_scale, codes.device)
        offsets = None if groups is None else layouts.scale_offsets(groups)
        made = cls(codes, scales, unit, layout, size, groups, offsets)._with_clean_columns(align)
        if check_values if check_values is not None else codes.device.type == "cpu":
            made._check_values()
        return made

    @classmethod
    def zeros(
        cls,
        shape: Sequence[int],
        *,
        global_scale: float | Tensor,
        layout: str = "128x4",
        group_sizes: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> Self:
        """A tensor of zeros, for instance as `out` of `gemm`, which quantises its result with this global scale.

        Args:
            shape: (..., M, K), M >= 0 and K >= 1.
            global_scale: the multiplier, a float or an fp32 tensor of one element on `device`.
            layout: "linear", "128x4" or "128x4-grouped".
            group_sizes: int (E,) on `device`, for "128x4-grouped". It is copied: `grouped_gemm` writes into it the
                sizes of what it stores here.

        Raises:
            TypeError, ValueError: naming the argument, what came and what is allowed.
        """
        check_layout(layout)
        if layout == FRAGMENT:
            raise ValueError(f"layout: {layout!r}, expected {LINEAR!r}, {ATOMS!r} or {GROUPED!r}")
        if not isinstance(shape, (tuple, list)) or any(isinstance(n, bool) or not isinstance(n, int) for n in shape):
            raise TypeError(f"shape: {shape!r}, expected a sequence of integers")
        if len(shape) < 2 or min(shape) < 0 or shape[-1] < 1:
            raise ValueError(f"shape: {tuple(shape)}, expected (..., M, K) with M >= 0 and K >= 1")
        columns = layouts.blocks(shape[-1])
        codes = torch.zeros(*shape[:-1], columns * BLOCK // 2, dtype=torch.uint8, device=device)
        groups = _check_groups(group_sizes, layout, torch.Size(shape), codes.device)
        rows = shape[-2] if layout == LINEAR else round_up(shape[-2], ROW_ALIGN)
        if groups is not None:
            groups, rows = groups.clone(), layouts.grouped_rows(shape[-2], len(groups))
        scales = torch.zeros(*shape[:-2], rows, columns, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
        return cls.from_parts(codes, scales, global_scale, shape=shape, layout=layout, group_sizes=groups)

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @functools.cached_property
    def kind(self) -> int:
        """A number for shape, layout, device and strides: that of every tensor which has the same, cheap to look up."""
        strides = self.codes.stride(), self.scales.stride()
        if len(_kinds) >= _MOST_KINDS:
            _kinds.clear()  # numbers are never given twice, so that nothing is mistaken
        return _kinds.setdefault((self.shape, self.layout, self.codes.device, *strides), next(_numbers))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and global scale, padding included."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales, self.global_scale))

    def __repr__(self) -> str:
        groups = "" if self.group_sizes is None else f", groups={len(self.group_sizes)}"
        return f"NVFP4Tensor(shape={tuple(self.shape)}, layout={self.layout!r}{groups}, device={str(self.device)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Scales travel as uint8: pickle cannot restore a float8 tensor (torch 2.13)."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return _restore, (type(self), {**parts, "scales": self.scales.view(torch.uint8), "shape": tuple(self.shape)})

    def linear_scales(self) -> Tensor:
        """float8_e4m3fn (..., M, K_pad/16), row major; `scales` itself when the layout is already linear."""
        *_, rows, k = self.shape
        if self.layout == LINEAR:
            return self.scales
        if self.layout == FRAGMENT:
            return fragment.unpack(self.codes, rows, layouts.blocks(k))[1].view(torch.float8_e4m3fn)
        if self.layout == GROUPED:
            assert self.group_sizes is not None
            return layouts.unswizzle_grouped(self.scales, self.group_sizes, rows, layouts.blocks(k))
        return layouts.unswizzle(self.scales, rows, layouts.blocks(k))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, (..., M, K): fl32(code x fl32(scale x global_scale)), then rounded to `dtype`."""
        if dtype not in FLOAT_DTYPES:
            raise TypeError(f"dtype: {dtype}, expected one of {', '.join(map(str, FLOAT_DTYPES))}")
        if ops.must_trace(self.codes):
            made: Tensor = torch.ops.blockscale.dequantize(*self.operand(), self.shape[-1], dtype)
            return made
        if self.layout == FRAGMENT:
            return self.with_layout(LINEAR).dequantize(dtype)
        *_, k = self.shape
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        codes, flat = self.codes.flatten(0, -2), out.view(-1, k)
        scales = self.linear_scales().flatten(0, -2)
        step = max(1, _PIECE // (2 * codes.shape[-1]))

        def fill(r: int) -> None:
            d = e4m3.decode(scales[r : r + step]) * self.global_scale
            flat[r : r + step] = blocks.expand(codes[r : r + step], d)[:, :k]

        with threads.exact_arithmetic():
            if self.device.type == "cpu":
                threads.map_each(fill, range(0, len(codes), step))
            else:
                list(map(fill, range(0, len(codes), step)))  # another thread would not be on the caller's stream
        return out

    def operand(self) -> ops.Operand:
        """The parts as the operators of torch take them; the logical K goes beside them."""
        scales = self.scales.view(torch.uint8)
        if self.layout == FRAGMENT:
            scales = scales.view(self.shape[-2], 0)
        return ops.Operand(self.codes, scales, self.global_scale, self.group_sizes, self.layout)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Self:
        """The same tensor on another device (itself if it is there already)."""

        def move(t: Tensor | None) -> Any:
            return None if t is None else t.to(device, non_blocking=non_blocking)

        if torch.device(device) == self.device:
            return self
        return replace(
            self,
            codes=move(self.codes),
            scales=move(self.scales),
            global_scale=move(self.global_scale),
            group_sizes=move(self.group_sizes),
            scale_offsets=move(self.scale_offsets),
            divisor=move(self.divisor),
        )

    def with_layout(self, layout: str, group_sizes: Tensor | None = None) -> Self:
        """The same values with the scales in `layout`; itself if nothing changes. `group_sizes` for "128x4-grouped".

        "fragment" is another order of the codes too, made once for a weight that Hopper's kernels are to read.
        """
        check_layout(layout)
        if layout == self.layout and (group_sizes is None or layout != GROUPED):
            if group_sizes is not None:
                raise ValueError(f"group_sizes: only for layout {GROUPED!r}, not {layout!r}")
            return self
        groups = _check_groups(group_sizes, layout, self.shape, self.device)
        if self.layout == FRAGMENT:
            return self._unpacked().with_layout(layout, group_sizes)
        linear = self.linear_scales()
        if layout == FRAGMENT:
            packed = fragment.pack(self.codes, linear.view(torch.uint8))
            none = self.scales.new_empty(0)
            return replace(self, codes=packed, scales=none, layout=layout, group_sizes=None, scale_offsets=None)
        if groups is not None:
            scales = layouts.swizzle_grouped(linear, groups)
        else:
            scales = linear if layout == LINEAR else layouts.swizzle(linear)
        offsets = None if groups is None else layouts.scale_offsets(groups)
        return replace(self, scales=scales, layout=layout, group_sizes=groups, scale_offsets=offsets)

    def _unpacked(self) -> Self:
        """From layout "fragment" to "linear"."""
        codes, scales = fragment.unpack(self.codes, self.shape[-2], layouts.blocks(self.shape[-1]))
        return replace(self, codes=codes, scales=scales.view(torch.float8_e4m3fn), layout=LINEAR)

    def with_divisor(self, divisor: Tensor) -> Self:
        """The same tensor carrying the divisor (fp32, one element) that its global scale is the reciprocal of."""
        divisor = as_global_scale(divisor, self.device)
        with threads.exact_arithmetic():
            fits = self.device.type != "cpu" or torch.equal(divisor.reciprocal(), self.global_scale)
        if not fits:
            raise ValueError(f"divisor: {float(divisor)}, but the global scale is {float(self.global_scale)}")
        return replace(self, divisor=divisor)

    def __getitem__(self, index: Any) -> Self:
        """A part: integers or slices of batch dimensions, slices of rows, slices of K on block boundaries (16).

        Rows of "128x4-grouped" cannot be sliced: take `.with_layout("linear")` first.
        """
        if self.layout == FRAGMENT:
            return self._unpacked()[index].with_layout(FRAGMENT)
        *lead, rows, cols = full_index(index, self.ndim)
        k0, k1 = unit_slice(cols, self.shape[-1], "K")
        r0, r1 = unit_slice(rows, self.shape[-2], "M")
        if k0 % BLOCK or (k1 % BLOCK and k1 != self.shape[-1]) or k1 <= k0:
            raise ValueError(
                f"index: K slice {k0}:{k1} of K = {self.shape[-1]} must be non-empty and lie on multiples of {BLOCK}"
            )
        if self.layout == GROUPED and (r0, r1) != (0, self.shape[-2]):
            raise ValueError(f"index: rows of layout {GROUPED!r} cannot be sliced; use .with_layout('linear') first")
        of_codes = (*lead, slice(r0, r1), slice(k0 // 2, (k1 + 1) // 2))
        of_scales = (*lead, slice(r0, r1), slice(k0 // BLOCK, -(-k1 // BLOCK)))
        codes, scales = self.codes[of_codes], self.linear_scales()[of_scales]
        part = type(self).from_parts(
            codes,
            scales,
            self.global_scale,
            shape=(*codes.shape[:-1], k1 - k0),
            layout=LINEAR,
            check_values=False,
        )
        return replace(part, divisor=self.divisor).with_layout(self.layout, self.group_sizes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: the parts as tensors, layout and logical shape as metadata. Padding is zeroed.

        The file appears under its name only when it is whole.
        """
        from safetensors.torch import save_file

        clean = self.with_layout(LINEAR).with_layout(self.layout, self.group_sizes)
        parts = {"codes": clean.codes, "scales": clean.scales, "global_scale": clean.global_scale}
        if clean.group_sizes is not None:
            parts["group_sizes"] = clean.group_sizes
        if clean.divisor is not None:
            parts["divisor"] = clean.divisor
        metadata = {
            "format": _FILE_FORMAT,
            "version": _FILE_VERSION,
            "layout": self.layout,
            "shape": json.dumps(list(self.shape)),
        }
        target = os.path.realpath(path)
        temporary = f"{target}.{secrets.token_hex(4)}.part"
        with open(temporary, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode  # what this process gives to files; safetensors gives less
        try:
            save_file({name: t.contiguous() for name, t in parts.items()}, temporary, metadata)
            os.chmod(temporary, mode)
            os.replace(temporary, target)
        finally:
            if os.path.exists(temporary):
                os.unlink(temporary)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Self:
        """Read what `save` wrote. Raises ValueError naming the file when it is something else or damaged."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(os.fspath(path), framework="pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        except SafetensorError as error:
            raise ValueError(f"{os.fspath(path)}: not a readable safetensors file: {error}") from error
        if metadata.get("format") != _FILE_FORMAT or metadata.get("version") != _FILE_VERSION:
            raise ValueError(
                f"{os.fspath(path)}: metadata says format {metadata.get('format')!r} version "
                f"{metadata.get('version')!r}, expected {_FILE_FORMAT!r} version {_FILE_VERSION!r}"
            )
        try:
            made = cls.from_parts(
                parts["codes"],
                parts["scales"],
                parts["global_scale"],
                shape=json.loads(metadata["shape"]) or (),
                layout=metadata["layout"],
                group_sizes=parts.get("group_sizes"),
            )
            return made.with_divisor(parts["divisor"]) if "divisor" in parts else made
        except KeyError as error:
            raise ValueError(f"{os.fspath(path)}: has no {error}") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from error

    def _with_clean_columns(self, align: int) -> Self:
        """Storage in normative form: K padded to 64 with zero codes and scales, dense, aligned to `align` bytes.

        Everything downstream relies on it: strides are exactly those of a fresh tensor of the padded shape.
        """
        *_, k = self.shape
        codes, scales = self.codes, self.scales
        if self.layout == FRAGMENT:
            if self.shape[-2] % fragment.ROWS or k % fragment.DEPTH:
                return self._unpacked()._with_clean_columns(align).with_layout(FRAGMENT)
            return self if _is_dense(codes, align) else replace(self, codes=codes.clone(memory_format=_DENSE))
        columns = round_up(k, K_ALIGN) // 2
        if k % K_ALIGN or not _is_dense(codes, align):
            codes = codes.new_zeros(*codes.shape[:-1], columns)
            codes[..., : (k + 1) // 2] = self.codes[..., : (k + 1) // 2]
            if k % 2:
                codes[..., k // 2] &= 0xF
        if k % K_ALIGN:
            linear = replace(self, codes=codes).linear_scales().view(torch.uint8)
            clean = linear.new_zeros(*linear.shape[:-1], layouts.blocks(k))
            clean[..., : -(-k // BLOCK)] = linear[..., : -(-k // BLOCK)]
            made = replace(self, codes=codes, scales=clean.view(torch.float8_e4m3fn), layout=LINEAR)
            return made.with_layout(self.layout, self.group_sizes)
        if not _is_dense(scales, align):
            scales = torch.empty(scales.shape, dtype=scales.dtype, device=scales.device).copy_(scales)
        return replace(self, codes=codes, scales=scales)

    def _check_values(self) -> None:
        unit = float(self.global_scale)
        if not 0 < unit <= LARGEST_GLOBAL_SCALE:
            raise ValueError(f"global_scale: {unit}, expected a positive multiplier up to {LARGEST_GLOBAL_SCALE:.4g}")
        scales = self.linear_scales()
        if e4m3.largest_code(scales) > e4m3.LARGEST_CODE:  # a hundred times as fast as looking at each
            where = tuple(int(i) for i in e4m3.invalid(scales).nonzero()[0])
            byte = int(scales.view(torch.uint8)[where])
            raise ValueError(
                f"scales: byte 0x{byte:02X} at (row, block) index {where}; a scale is finite E4M3 with the sign bit "
                f"clear, 0x00 to 0x{e4m3.LARGEST_CODE:02X}"
            )


def _restore(cls: type[NVFP4Tensor], parts: dict[str, Any]) -> NVFP4Tensor:
    return cls(**{**parts, "scales": parts["scales"].view(torch.float8_e4m3fn), "shape": torch.Size(parts["shape"])})


def _is_dense(t: Tensor, align: int) -> bool:
    """Aligned to `align` bytes, with a fresh tensor's strides also where a dimension of size 1 would hide others."""
    expected = 1
    for size, stride in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return t.data_ptr() % align == 0


def check_layout(layout: str, name: str = "layout") -> None:
    """Raise ValueError unless `layout` is one of the tags."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"{name}: {layout!r}, expected one of {', '.join(map(repr, LAYOUTS))}")


def check_group_sizes(group_sizes: Tensor, rows: int, device: torch.device, name: str = "group_sizes") -> Tensor:
    """`group_sizes` (E,) as int32, checked; where the host sees the values also non-negative and summing to `rows`."""
    if not isinstance(group_sizes, Tensor) or group_sizes.dtype not in (torch.int32, torch.int64):
        got = group_sizes.dtype if isinstance(group_sizes, Tensor) else type(group_sizes).__name__
        raise TypeError(f"{name}: {got}, expected an int32 tensor")
    if group_sizes.ndim != 1:
        raise ValueError(f"{name}: shape {tuple(group_sizes.shape)}, expected (E,)")
    if group_sizes.device != device:
        raise ValueError(f"{name}: on {group_sizes.device}, but the operand is on {device}")
    if device.type == "cpu":
        sizes = group_sizes.tolist()
        for at, size in enumerate(sizes):
            if size < 0:
                raise ValueError(f"{name}: {size} at {at}, expected sizes of at least 0")
        if sum(sizes) != rows:
            raise ValueError(f"{name}: sum {sum(sizes)}, expected the number of rows, {rows}")
    return group_sizes.to(torch.int32)


def _check_groups(group_sizes: Tensor | None, layout: str, size: torch.Size, device: torch.device) -> Tensor | None:
    if layout != GROUPED:
        if group_sizes is not None:
            raise ValueError(f"group_sizes: only for layout {GROUPED!r}, not {layout!r}")
        return None
    if group_sizes is None:
        raise ValueError(f"group_sizes: missing; layout {GROUPED!r} needs them")
    if len(size) != 2:
        raise ValueError(f"shape: {tuple(size)}, expected 2 dimensions for layout {GROUPED!r}")
    return check_group_sizes(group_sizes, size[-2], device)


def as_global_scale(value: Any, device: torch.device) -> Tensor:
    """A global scale as fp32 () on `device`: the memory of a tensor that is given, or a new one."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.dtype != torch.float32:
            raise ValueError(
                f"global_scale: {value.dtype} tensor of shape {tuple(value.shape)}, expected one fp32 element"
            )
        if value.device != device:
            raise ValueError(f"global_scale: on {value.device}, expected {device}")
        return value.detach().reshape(())
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"global_scale: {type(value).__name__}, expected a float or one fp32 element")
    return torch.tensor(as_float(value), dtype=torch.float32, device=device)


def as_float(value: Any) -> float:
    """`value` as a float; an integer beyond every float becomes infinity, for the caller to refuse."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
