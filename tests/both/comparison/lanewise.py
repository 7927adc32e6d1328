"""Kernels that apply instructions to every element of arrays, an array of results for each instruction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from comparison.program import HEADER, Array, Arrays, Group, Launch, Program

THREADS = 128
WORD: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


def kernel(group: Group) -> str:
    """`k(n, a, b, ..., d0, d1, ...)`: d_i[t] = instruction i of a[t], b[t], ...  Registers of 8 bits are of 16."""
    names = "abc"[: len(group.sources)]
    params = [f".param .u64 p_{name}" for name in names]
    params += [f".param .u64 d_{i}" for i in range(len(group.instructions))]
    text = [HEADER, ".visible .entry k(.param .u32 n, ", ", ".join(params), ")\n{\n"]
    text.append(".reg .pred out, p; .reg .b32 t, size, ctas, word; .reg .b64 at, at_d;\n")
    text.append(f".reg .b{max(group.result, 16)} d;\n" if group.result > 1 else ".reg .pred d;\n")
    text += [f".reg .b{max(bits, 16)} {name};\n" for name, bits in zip(names, group.sources, strict=True)]
    text.append("mov.u32 t, %tid.x; mov.u32 ctas, %ctaid.x; mov.u32 size, %ntid.x; mad.lo.u32 t, ctas, size, t;\n")
    text.append("ld.param.u32 size, [n]; setp.ge.u32 out, t, size; @out bra END;\n")
    for name, bits in zip(names, group.sources, strict=True):
        text.append(
            f"ld.param.u64 at, [p_{name}]; mad.wide.u32 at, t, {bits // 8}, at; ld.global.b{bits} {name}, [at];\n"
        )
    width = max(group.result, 32 if group.result == 1 else 8)
    for i, instruction in enumerate(group.instructions):
        text.append(f"{instruction};\nld.param.u64 at_d, [d_{i}]; mad.wide.u32 at_d, t, {width // 8}, at_d;\n")
        store = f"st.global.b{width} [at_d], d;\n"
        text.append("selp.b32 word, 1, 0, d; st.global.b32 [at_d], word;\n" if group.result == 1 else store)
    return "".join([*text, "END:\nret;\n}\n"])


def program(name: str, group: Group, operands: Callable[[], Sequence[Array]]) -> Program:
    """operands: arrays of bits, one for each source, all of one size."""
    width = WORD[max(group.result, 32 if group.result == 1 else 8)]
    names = tuple("abc"[: len(group.sources)])

    def arrays() -> Arrays:
        made = list(operands())
        found = {n: np.ascontiguousarray(x, WORD[bits]) for n, x, bits in zip(names, made, group.sources, strict=True)}
        return found | {i: np.zeros(made[0].size, width) for i in group.instructions}

    size = len(operands()[0])
    ctas = -(-size // THREADS)
    launch = Launch((np.uint32(size), *names, *group.instructions), (ctas, 1, 1), (THREADS, 1, 1))
    return Program(name, kernel(group), arrays, (launch,), frozenset(names), group)


# Operands


def exhaustive(bits: int) -> Array:
    """Every bit pattern."""
    return np.arange(1 << bits, dtype=np.uint32).astype(WORD[bits])


FORMATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}


def special_floats(kind: str) -> Array:
    """Zeros, subnormals, ones, the largest, infinities, NaNs, halves between numbers; of both signs."""
    exponent, mantissa = FORMATS[kind]
    bits = 1 + exponent + mantissa
    infinity = (1 << exponent) - 1 << mantissa
    one = (1 << exponent - 1) - 1 << mantissa
    step = 1 << mantissa
    top = (one + step * mantissa) | (step - 1)
    found = [0, 1, 2, 3, step // 2, step - 1, step, step + 1, 2 * step, one - step, one - 2, one - 1, one, one + 1]
    found += [one + step // 2, one + step, top, top - 1, infinity - step, infinity - 1, infinity, infinity + 1]
    found += [infinity + step // 2, infinity + step // 2 + 1, infinity + step - 1]
    return np.array([x | sign << bits - 1 for x in found for sign in (0, 1)], WORD[bits])


def float_operands(kind: str, count: int, size: int, seed: int = 0) -> list[Array]:
    """Bits of `count` operands: all special pairs first, then random patterns, then numbers close to each other."""
    exponent, mantissa = FORMATS[kind]
    bits = 1 + exponent + mantissa
    generator = np.random.default_rng(seed)
    special = special_floats(kind)
    grid = np.meshgrid(special, special, indexing="ij")
    pairs = [grid[0].ravel(), grid[1].ravel(), generator.permutation(grid[0].ravel())][:count]
    rest = size - pairs[0].size
    columns = []
    base = generator.integers(0, 1 << bits, rest, dtype=np.uint64)
    for i in range(count):
        wide = generator.integers(0, 1 << bits, rest, dtype=np.uint64)
        near = base ^ generator.integers(0, 1 << mantissa + 2, rest, dtype=np.uint64)
        near ^= generator.integers(0, 2, rest, dtype=np.uint64) << np.uint64(bits - 1)
        columns.append(np.where(np.arange(rest) % 2 == 0, wide, near).astype(WORD[bits]))
        columns[i] = np.concatenate([pairs[i], columns[i]])
    return columns


def integer_operands(bits: Sequence[int], size: int, seed: int = 0) -> list[Array]:
    """Edges of the type against each other, small numbers, random patterns."""
    generator = np.random.default_rng(seed)
    columns = []
    for width in bits:
        edges = np.array([0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 255, 256], np.uint64)
        top = np.uint64((1 << width) - 1)
        edges = np.concatenate([edges, top - edges, np.array([1 << width - 1], np.uint64)]) & top
        random = generator.integers(0, 1 << width, size, dtype=np.uint64)
        random >>= generator.integers(0, width, size, dtype=np.uint64)
        choice = generator.integers(0, 3, size)
        columns.append(np.where(choice == 0, generator.choice(edges, size), random).astype(WORD[width]))
    return columns
