"""Kernels around one mma.sync, and its matrices by the manual's formulas, element by element."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import ptxemu

BITS = {"f16": 16, "bf16": 16, "tf32": 32, "f32": 32, "s32": 32, "s8": 8, "u8": 8, "s4": 4, "u4": 4}
Place = Callable[[int, int, int], tuple[int, int]]  # of element i in lane 4g + t: row and column


def place_a(shape: str, bits: int, rows: int) -> Place:
    """PTX 'Matrix Fragments for mma': A."""
    each = 32 // bits  # elements a register
    if rows == 8:
        return lambda i, g, t: (g, each * t + i)
    return lambda i, g, t: (g + 8 * (i // each % 2), each * t + i % each + 4 * each * (i // each // 2))


def place_b(bits: int) -> Place:
    each = 32 // bits
    return lambda i, g, t: (each * t + i % each + 4 * each * (i // each), g)


def place_c(i: int, g: int, t: int) -> tuple[int, int]:
    return g + 8 * (i // 2), 2 * t + i % 2


@dataclass(frozen=True)
class Form:
    """An instruction: its opcode, its shape and `d.a.b.c` types; small: the bits of a type that BITS does not have."""

    opcode: str
    shape: str
    types: str
    small: int = 8

    @property
    def sizes(self) -> tuple[int, int, int]:
        m, _, rest = self.shape[1:].partition("n")
        n, _, k = rest.partition("k")
        return int(m), int(n), int(k)

    def bits(self, which: int) -> int:
        return BITS.get(self.types.split(".")[which], self.small)

    def registers(self) -> tuple[int, int, int]:
        """Of A, B and C."""
        m, n, k = self.sizes
        sizes = ((m * k, self.bits(1)), (n * k, self.bits(2)), (m * n, self.bits(3)))
        return tuple(elements * bits // 1024 for elements, bits in sizes)  # type: ignore[return-value]

    def packed(self, which: str, codes: Any) -> np.ndarray:
        """A matrix's codes as registers, (32, registers) uint32."""
        bits = self.bits("dabc".index(which))
        m = self.sizes[0]
        place = {"a": place_a(self.shape, bits, m), "b": place_b(bits), "c": place_c}[which]
        words = np.zeros((32, self.registers()["abc".index(which)]), np.uint32)
        each = 32 // bits
        for lane in range(32):
            for i in range(words.shape[1] * each):
                row, column = place(i, lane // 4, lane % 4)
                words[lane, i // each] |= np.uint32((int(codes[row, column]) & (1 << bits) - 1) << i % each * bits)
        return words

    def result(self, words: np.ndarray) -> np.ndarray:
        """D's codes (m, n) of its registers (32, registers)."""
        m, n, _ = self.sizes
        bits = self.bits(0)
        each = 32 // bits
        codes = np.zeros((m, n), np.uint32)
        for lane in range(32):
            for i in range(words.shape[1] * each):
                codes[place_c(i, lane // 4, lane % 4)] = (
                    int(words[lane, i // each]) >> i % each * bits & (1 << bits) - 1
                )
        return codes


def names(first: int, count: int) -> str:
    return "{" + ", ".join(f"r{first + i}" for i in range(count)) + "}"


def text(form: Form, target: str, extra: str = "", times: int = 1) -> str:
    """A kernel that loads A, B, C and two words (scales) a lane, 16 registers in all, multiplies and stores D.

    The low half of the second word is in h0 too.
    """
    a, b, c = form.registers()
    operands = f"{names(0, a)}, {names(4, b)}, {names(8, c)}{extra}"
    rows = "\n".join(f"ld.global.b32 r{i}, [d0+{4 * i}];" for i in range(14))
    stores = "\n".join(f"st.global.b32 [d1+{4 * i}], r{20 + i};" for i in range(c))
    return f"""
    .version 8.8
    .target {target}
    .address_size 64
    .visible .entry k(.param .u64 p0, .param .u64 p1) {{
        .reg .b16 h<4>;
        .reg .b32 r<40>;
        .reg .b64 d<4>;
        ld.param.u64 d0, [p0];
        ld.param.u64 d1, [p1];
        mov.u32 r30, %tid.x;
        mad.wide.u32 d0, r30, 64, d0;
        mad.wide.u32 d1, r30, 16, d1;
        {rows}
        cvt.u16.u32 h0, r13;
        {f"{form.opcode} {names(20, c)}, {operands};" * times}
        {stores}
        ret;
    }}"""


def run(form: Form, target: str, a: Any, b: Any, c: Any, scales: Any = None, extra: str = "") -> np.ndarray:
    """D's codes of one instruction; scales: the two words of each lane, (32, 2)."""
    memory = np.zeros((32, 16), np.uint32)
    for first, which, codes in ((0, "a", a), (4, "b", b), (8, "c", c)):
        words = form.packed(which, codes)
        memory[:, first : first + words.shape[1]] = words
    if scales is not None:
        memory[:, 12:14] = scales
    out = np.zeros((32, 4), np.uint32)
    ptxemu.Device(target).launch(text(form, target, extra), args=[memory, out])
    return form.result(out[:, : form.registers()[2]])
