"""A kernel of one CTA that runs wgmma instructions on operands that the host lays out, and where the manual puts those.

The kernel copies an image into shared memory, loads A's fragments where A is in registers, runs its steps one after
the other and stores the accumulator's registers as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
ORIGIN = 1024  # the address of the CTA's shared memory
SPANS = {"none": 16, "32B": 32, "64B": 64, "128B": 128}
MODES = {"none": 0, "128B": 1, "64B": 2, "32B": 3}
SIZES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
THREADS = 128


@dataclass(frozen=True)
class Program:
    """m64 n K instructions.  steps: how many, one after the other.  scale_a, scale_b: 1 or -1."""

    n: int = 8
    a: str = "f16"
    b: str = "f16"
    d: str = "f32"
    a_in_registers: bool = False
    a_mn_major: bool = False
    b_mn_major: bool = False
    scale_a: int = 1
    scale_b: int = 1
    satfinite: bool = False
    steps: int = 1

    @property
    def k(self) -> int:
        return 32 // SIZES[self.a]

    @property
    def registers(self) -> int:
        return self.n // 4 if self.d == "f16" else self.n // 2

    @property
    def instruction(self) -> str:
        saturate = ".satfinite" if self.satfinite else ""
        return f"wgmma.mma_async.sync.aligned.m64n{self.n}k{self.k}{saturate}.{self.d}.{self.a}.{self.b}"

    @property
    def constants(self) -> str:
        """What follows scale-d."""
        if self.d == "s32":
            return ""
        values = [self.scale_a, self.scale_b]
        if SIZES[self.a] == 2:
            values += [self.b_mn_major] if self.a_in_registers else [self.a_mn_major, self.b_mn_major]
        return "".join(f", {int(v)}" for v in values)

    @property
    def text(self) -> str:
        """Parameters: image, its bytes (a multiple of 16), descriptors (steps, 2), fragments (steps, 128, 4), registers
        (128, registers), and whether the first step adds to them."""
        d = ", ".join(f"%d{i}" for i in range(self.registers))
        loads = "\n".join(f"    ld.global.b32 %d{i}, [%own + {4 * i}];" for i in range(self.registers))
        stores = "\n".join(f"    st.global.b32 [%own + {4 * i}], %d{i};" for i in range(self.registers))
        fragments, steps = [], []
        for s in range(self.steps):
            base, a = f"%f{4 * s}", f"%a{s}"
            if self.a_in_registers:
                names = [f"%f{4 * s + i}" for i in range(4)]
                a = f"{{{', '.join(names)}}}"
                base = f"{16 * THREADS * s}"
                fragments.append(f"    ld.global.v4.b32 {a}, [%mine + {base}];")
            fragments.append(f"    ld.global.v2.b64 {{%a{s}, %b{s}}}, [%descriptors + {16 * s}];")
            steps.append(f"    {self.instruction} {{{d}}}, {a}, %b{s}, {'%add' if not s else '%yes'}{self.constants};")
        return _TEXT.format(
            registers=self.registers,
            steps=self.steps,
            fragments=4 * self.steps,
            step_registers=16,
            row=4 * self.registers,
            loads="\n".join([loads, *fragments]),
            instructions="\n".join(steps),
            stores=stores,
        )


_TEXT = """
.version 8.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry k(.param .u64 image, .param .u32 size, .param .u64 descriptors, .param .u64 fragments,
                  .param .u64 out, .param .u32 add)
{{
    .reg .b32 %d<{registers}>;
    .reg .b32 %f<{fragments}>;
    .reg .b64 %a<{steps}>;
    .reg .b64 %b<{steps}>;
    .reg .b32 %thread, %at, %size, %flag, %start, %place;
    .reg .b32 %w<4>;
    .reg .b64 %image, %from, %descriptors, %mine, %own, %wide;
    .reg .pred %more, %add, %yes;
    mov.u32 %thread, %tid.x;
    ld.param.u64 %image, [image];
    ld.param.u32 %size, [size];
    ld.param.u64 %descriptors, [descriptors];
    ld.param.u64 %mine, [fragments];
    ld.param.u64 %own, [out];
    ld.param.u32 %flag, [add];
    setp.ne.u32 %add, %flag, 0;
    setp.eq.u32 %yes, 0, 0;
    mov.u32 %start, memory;
    mul.wide.u32 %wide, %thread, {step_registers};
    add.u64 %mine, %mine, %wide;
    mul.wide.u32 %wide, %thread, {row};
    add.u64 %own, %own, %wide;
    shl.b32 %at, %thread, 4;
more:
    setp.ge.u32 %more, %at, %size;
    @%more bra done;
    cvt.u64.u32 %wide, %at;
    add.u64 %from, %image, %wide;
    ld.global.v4.b32 {{%w0, %w1, %w2, %w3}}, [%from];
    add.u32 %place, %start, %at;
    st.shared.v4.b32 [%place], {{%w0, %w1, %w2, %w3}};
    add.u32 %at, %at, 2048;
    bra more;
done:
{loads}
    fence.proxy.async.shared::cta;
    bar.sync 0;
    wgmma.fence.sync.aligned;
{instructions}
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
{stores}
    exit;
}}
"""


@dataclass(frozen=True)
class Layout:
    """Where an operand lies: the swizzle, and in bytes the two distances of the descriptor."""

    swizzle: str = "128B"
    leading: int = 16
    stride: int = 1024
    mn_major: bool = False

    def place(self, row: int, k: int, size: int, start: int) -> int:
        """The address of an element; `start` is that of the matrix.  PTX 'Shared Memory Matrix Layout'."""
        span = SPANS[self.swizzle]
        if self.mn_major:
            at, line, column = row * size, k % 8, k // 8
            if self.swizzle == "none":
                offset = at // 16 * self.stride + column * self.leading + line * 16 + at % 16
            else:
                offset = at // span * self.leading + column * self.stride + line * span + at % span
        else:
            at = k * size
            offset = row // 8 * self.stride + row % 8 * span
            offset += at // 16 * self.leading + at % 16 if self.swizzle == "none" else at
        address = start + offset
        return address ^ ((address >> 7) % (span // 16)) << 4

    def descriptor(self, start: int) -> int:
        return (start >> 4) | (self.leading >> 4) << 16 | (self.stride >> 4) << 32 | MODES[self.swizzle] << 62


def packed(swizzle: str, rows: int, size: int, mn_major: bool) -> Layout:
    """A layout without gaps."""
    span = SPANS[swizzle]
    if not mn_major:
        return Layout(swizzle, rows * 16 if swizzle == "none" else 16, 128 if swizzle == "none" else 8 * span)
    groups = rows * size // span
    if swizzle == "none":
        return Layout(swizzle, 128 * groups, 128, True)
    return Layout(swizzle, 8 * span, 8 * span * groups, True)


def put(image: Array, codes: Array, layout: Layout, start: int) -> int:
    """Puts the codes (rows, K) of an operand into an image of shared memory; the descriptor."""
    raw = np.ascontiguousarray(codes)[..., None].view(np.uint8)
    for row in range(raw.shape[0]):
        for k in range(raw.shape[1]):
            at = layout.place(row, k, raw.shape[2], start) - ORIGIN
            image[at : at + raw.shape[2]] = raw[row, k]
    return layout.descriptor(start)


def fragments(codes: Array) -> Array:
    """A (64, K) as threads hold it: (128, 4) words.  PTX 'Register Fragments for wgmma.mma_async'."""
    raw = np.ascontiguousarray(codes).view(np.uint8).reshape(64, 32)
    held = np.empty((THREADS, 4), np.uint32)
    for thread in range(THREADS):
        warp, lane = divmod(thread, 32)
        for r in range(4):
            row, at = 16 * warp + lane // 4 + 8 * (r % 2), 16 * (r // 2) + 4 * (lane % 4)
            held[thread, r] = raw[row, at : at + 4].view(np.uint32)[0]
    return held


def registers(matrix: Array) -> Array:
    """An accumulator's codes (64, N) of 16 or 32 bits as threads hold them, (128, registers) words."""
    n = matrix.shape[1]
    narrow = matrix.dtype.itemsize == 2
    held = np.empty((THREADS, n // 2), matrix.dtype)
    for thread in range(THREADS):
        warp, lane = divmod(thread, 32)
        for i in range(n // 2):
            row, column = 16 * warp + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2
            held[thread, i] = matrix[row, column]
    return held.view(np.uint32) if narrow else held


def matrix(held: Array, n: int, narrow: bool) -> Array:
    """The reverse of `registers`: codes (64, N)."""
    kind = np.uint16 if narrow else np.uint32
    where = registers(np.arange(64 * n, dtype=np.uint16 if narrow else np.uint32).reshape(64, n)).view(kind)
    found = np.empty(64 * n, kind)
    found[where.reshape(-1)] = held.view(kind).reshape(-1)
    return found.reshape(64, n)
