"""The descriptors of tcgen05: where an operand lies in shared memory, and what an MMA multiplies.

Source: PTX ISA, "Shared memory descriptor", "Canonical Layouts" and "Instruction descriptor".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ptxemu import numerics as nx
from ptxemu.errors import Error
from ptxemu.machine import swizzle as sw

Index = npt.NDArray[np.int64]

_SWIZZLES = {0: sw.NONE, 1: sw.B128_ATOM32, 2: sw.B128, 4: sw.B64, 6: sw.B32}
_PATTERN = 1024  # bytes after which every swizzle pattern repeats


class InvalidDescriptor(Error):
    """A descriptor that no tcgen05 instruction accepts; names the field, its value and what is allowed."""


@dataclass(frozen=True)
class SharedMatrix:
    """An operand in shared memory. All in bytes; `start` is a shared address within the CTA's own window.

    `leading` is a distance, or with `absolute` the shared address where rows go on after their 128-byte chunk ends
    (K of 48 bytes, sm_103a).
    """

    start: int
    leading: int
    stride: int
    swizzle: sw.Swizzle
    absolute: bool = False

    def encode(self) -> int:
        """The 64-bit descriptor."""
        mode = next(code for code, s in _SWIZZLES.items() if s == self.swizzle)
        low = (self.start >> 4 & 0x3FFF) | (self.leading >> 4 & 0x3FFF) << 16
        return low | (self.stride >> 4 & 0x3FFF) << 32 | 1 << 46 | self.absolute << 52 | mode << 61

    @staticmethod
    @lru_cache(maxsize=4096)
    def decode(descriptor: int) -> SharedMatrix:
        """Read a 64-bit descriptor.

        Raises:
            InvalidDescriptor: wrong constant bits, an undefined swizzle, or a base offset other than 0.
        """
        if descriptor >> 46 & 7 != 1 or descriptor >> 53 & 0xFF:
            raise InvalidDescriptor(
                f"shared memory descriptor {descriptor:#018x}: bits 46-48 must be 0b001 and bits 53-60 zero"
            )
        mode = descriptor >> 61
        if mode not in _SWIZZLES:
            raise InvalidDescriptor(
                f"shared memory descriptor {descriptor:#018x}: swizzle mode {mode}, not 0, 1, 2, 4 or 6"
            )
        if base := descriptor >> 49 & 7:
            raise InvalidDescriptor(
                f"shared memory descriptor {descriptor:#018x}: base offset {base}; only 0 is modelled, "
                "start the matrix's swizzle pattern where it repeats"
            )
        absolute = bool(descriptor >> 52 & 1)
        if absolute and mode != 2:
            raise InvalidDescriptor("absolute leading dimension: only with the 128-byte swizzle of 16-byte atoms")
        return SharedMatrix(
            start=(descriptor & 0x3FFF) << 4,
            leading=(descriptor >> 16 & 0x3FFF) << 4,
            stride=(descriptor >> 32 & 0x3FFF) << 4,
            swizzle=_SWIZZLES[mode],
            absolute=absolute,
        )


@dataclass(frozen=True)
class Footprint:
    """The 16-byte granules of an operand.

    `index` counts granules from `low`, which like `size` is in bytes; `low` is relative to the start of the swizzle
    pattern that `start` lies in. K-major: (rows, granules along K). MN-major: (K, granules along M or N).
    """

    index: Index
    low: int
    size: int

    def read(self, window: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Bytes (first axis, second axis x 16) from the `size` bytes at `low`."""
        picked = sw.granules(window)[self.index]
        return picked.view(np.uint8)


@lru_cache(maxsize=512)
def _footprint(m: SharedMatrix, rows: int, depth: int, mn_major: bool) -> Footprint:
    first = m.start // sw.GRANULE
    index = _mn_major(m, first, rows, depth) if mn_major else _k_major(m, first, rows, depth)
    index = sw.apply(m.swizzle, index)
    low = int(index.min())
    size = int(index.max()) - low + 1
    index = index - low
    index.flags.writeable = False
    return Footprint(index, low * sw.GRANULE, size * sw.GRANULE)


def footprint(m: SharedMatrix, rows: int, depth: int, mn_major: bool) -> Footprint:
    """Where an operand's granules lie.

    Args:
        rows: extent in M or N. K-major: rows; MN-major: granules along M or N (16 bytes each).
        depth: extent in K. K-major: granules; MN-major: elements.

    Returns:
        A footprint whose `low` is relative to `m.start` rounded down to 1024 bytes.

    Raises:
        InvalidDescriptor: an absolute leading dimension in an MN-major operand.
    """
    if m.absolute:
        if mn_major:
            raise InvalidDescriptor("absolute leading dimension: only K-major operands have it")
        return _footprint(m, rows, depth, mn_major)
    phase = m.start % _PATTERN
    return _footprint(SharedMatrix(phase, m.leading, m.stride, m.swizzle), rows, depth, mn_major)


def pattern_start(m: SharedMatrix) -> int:
    """The byte that a footprint's `low` counts from."""
    return 0 if m.absolute else m.start & ~(_PATTERN - 1)


def _k_major(m: SharedMatrix, first: int, rows: int, depth: int) -> Index:
    """((8, rows/8), depth) with strides ((row, stride), leading or 1), in granules."""
    r = np.arange(rows, dtype=np.int64)[:, None]
    j = np.arange(depth, dtype=np.int64)[None, :]
    groups = r // 8 * (m.stride // sw.GRANULE)
    if m.swizzle is sw.NONE:
        return first + groups + r % 8 + j * (m.leading // sw.GRANULE)
    row = groups + r % 8 * (m.swizzle.span // sw.GRANULE)
    if not m.absolute:
        return first + row + j
    column = first % 8 + j
    inside = first - first % 8 + row + column
    return np.where(column < 8, inside, m.leading // sw.GRANULE + row + column - 8)


def _mn_major(m: SharedMatrix, first: int, granules: int, depth: int) -> Index:
    """(depth, granules): swizzled ((8, k/8), (span, n)) with strides ((span, stride), (1, leading))."""
    k = np.arange(depth, dtype=np.int64)[:, None]
    g = np.arange(granules, dtype=np.int64)[None, :]
    leading, stride = m.leading // sw.GRANULE, m.stride // sw.GRANULE
    if m.swizzle is sw.NONE:
        return first + g * stride + k % 8 + k // 8 * leading
    span = m.swizzle.span // sw.GRANULE
    return first + g % span + g // span * leading + k % 8 * span + k // 8 * stride


_NARROW = {0: nx.E4M3, 1: nx.E5M2, 3: nx.E2M3, 4: nx.E3M2, 5: nx.E2M1}
_FORMATS: dict[str, dict[int, nx.Format]] = {
    "f16": {0: nx.F16, 1: nx.BF16},
    "tf32": {2: nx.TF32},
    "f8f6f4": _NARROW,
    "mxf8f6f4": _NARROW,
    "mxf4": {1: nx.E2M1},
    "mxf4nvf4": {1: nx.E2M1},
}
_K_BYTES = 32  # of one instruction, whatever the type; K = 96 takes 48


@dataclass(frozen=True)
class MmaDescriptor:
    """An instruction descriptor, decoded for its kind.

    m, n, k: the shape over all CTAs. a, b: element formats. d_f16: f16 accumulator instead of f32. a_mn_major,
    b_mn_major: the operand is M- or N-major. scale_e8m0: UE8M0 scales, else UE4M3 (block-scaled kinds only).
    """

    kind: str
    m: int
    n: int
    k: int
    a: nx.Format
    b: nx.Format
    d_f16: bool = False
    negate_a: bool = False
    negate_b: bool = False
    a_mn_major: bool = False
    b_mn_major: bool = False
    scale_e8m0: bool = False
    a_scale_id: int = 0
    b_scale_id: int = 0

    @property
    def block_scaled(self) -> bool:
        return self.kind.startswith("mx")

    @property
    def packed_fp4(self) -> bool:
        """Two E2M1 elements a byte, with no padding."""
        return self.kind in ("mxf4", "mxf4nvf4")

    @property
    def k_bytes(self) -> int:
        """Bytes of K in shared memory."""
        return 48 if self.k == 96 else _K_BYTES

    @staticmethod
    @lru_cache(maxsize=512)
    def decode(kind: str, bits: int, group: int) -> MmaDescriptor:
        """Read a 32-bit instruction descriptor.

        Args:
            kind: "f16", "tf32", "f8f6f4", "mxf8f6f4", "mxf4" or "mxf4nvf4".
            group: CTAs that take part, 1 or 2.

        Raises:
            InvalidDescriptor: a sparse MMA, an undefined type, or a shape that the kind does not have.
        """
        return _decode(kind, bits, group)


def _decode(kind: str, bits: int, group: int) -> MmaDescriptor:
    where = f"instruction descriptor {bits:#010x} for kind::{kind}"
    if kind not in _FORMATS:
        raise InvalidDescriptor(f"kind::{kind} is not modelled")
    if bits >> 2 & 1:
        raise InvalidDescriptor(f"{where}: sparse MMAs are not modelled")
    formats = _FORMATS[kind]
    fields = {"A": bits >> 7 & 7, "B": bits >> 10 & (3 if kind in ("mxf4", "mxf4nvf4") else 7)}
    for operand, code in fields.items():
        if code not in formats:
            raise InvalidDescriptor(f"{where}: {operand} type {code}, allowed are {sorted(formats)}")
    scaled = kind.startswith("mx")
    packed = kind in ("mxf4", "mxf4nvf4")
    d_type = bits >> 4 & 3
    if not scaled and (d_type > 1 or (kind == "tf32" and d_type != 1)):
        raise InvalidDescriptor(f"{where}: D type {d_type}, allowed are 0 (f16, not for tf32) and 1 (f32)")
    k96 = packed and bool(bits >> 31 & 1)
    found = MmaDescriptor(
        kind=kind,
        m=(bits >> 24 & 31) << 4,
        n=(bits >> 17 & 63) << 3,
        k=96 if k96 else {"f16": 16, "tf32": 8, "f8f6f4": 32, "mxf8f6f4": 32}.get(kind, 64),
        a=formats[fields["A"]],
        b=formats[fields["B"]],
        d_f16=not scaled and d_type == 0,
        negate_a=bool(bits >> 13 & 1),
        negate_b=bool(bits >> 14 & 1),
        a_mn_major=bool(bits >> 15 & 1),
        b_mn_major=bool(bits >> 16 & 1),
        scale_e8m0=scaled and bool(bits >> 23 & 1),
        a_scale_id=bits >> 29 & 3 if scaled else 0,
        b_scale_id=bits >> 4 & 3 if scaled else 0,
    )
    _check_shape(found, group, where)
    _check_types(found, where)
    return found


def _check_shape(d: MmaDescriptor, group: int, where: str) -> None:
    allowed = (128, 256) if group == 2 else (128,) if d.block_scaled else (64, 128)
    step = 16 if group == 2 else 8
    if d.m not in allowed:
        raise InvalidDescriptor(f"{where}: M={d.m} with cta_group::{group}, allowed are {allowed}")
    if not step <= d.n <= 256 or d.n % step:
        raise InvalidDescriptor(
            f"{where}: N={d.n} with cta_group::{group}, allowed are {step} to 256 in steps of {step}"
        )


def _check_types(d: MmaDescriptor, where: str) -> None:
    if d.packed_fp4 and (d.a_mn_major or d.b_mn_major):
        raise InvalidDescriptor(f"{where}: packed FP4 operands are K-major")
    for name, fmt, major in (("A", d.a, d.a_mn_major), ("B", d.b, d.b_mn_major)):
        if major and fmt.name in ("e2m1", "e2m3", "e3m2"):
            raise InvalidDescriptor(f"{where}: MN-major {name} of {fmt.name} is not modelled")
    if d.kind in ("mxf4", "mxf8f6f4") and not d.scale_e8m0:
        raise InvalidDescriptor(f"{where}: scale type 0 (UE4M3), this kind takes UE8M0 only")
    if d.d_f16 and d.kind == "f16" and nx.BF16 in (d.a, d.b):
        raise InvalidDescriptor(f"{where}: an f16 accumulator takes f16 operands only")
