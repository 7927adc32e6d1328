"""Lane-wise instructions of a block in an order that brings equal ones together, to be run as one.

A numpy call on 32 numbers costs little less than one on 512, so an epilogue's conversions go through it together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from ptxemu.isa.engine import Decoded
from ptxemu.isa.operands import registers_in
from ptxemu.machine.lanes import LANES

__all__ = ["batch", "pure_runs", "run_batch", "run_matrix"]

LEAST = 4  # fewer equal instructions are not worth gathering
MOST = 64  # matrices at a time, so that what is made of them stays in the cache


def pure_runs(body: Sequence[Decoded]) -> list[list[Decoded]]:
    """The body cut into runs of instructions that only compute registers and single other instructions."""
    runs: list[list[Decoded]] = []
    open_run = False
    for found in body:
        pure = found.form.kind in ("lanes", "copy", "matrix") and found.instruction.guard is None
        if pure and open_run:
            runs[-1].append(found)
        else:
            runs.append([found])
        open_run = pure
    return runs


def batch(run: Sequence[Decoded], key: Callable[[Decoded], Hashable]) -> list[list[Decoded]]:
    """A run as groups in an order that keeps every dependence.  `key` is None for what is not to be gathered.

    Instructions of one group have the same key and do not depend on each other.
    """
    levels: dict[int, dict[Hashable, list[Decoded]]] = {}
    written: dict[str, int] = {}
    read: dict[str, int] = {}
    for found in run:
        sources = {r.name for o in found.sources for r in registers_in(o)}
        results = {r.name for o in found.results for r in registers_in(o)}
        before = [written.get(name, -1) for name in sources | results] + [read.get(name, -1) for name in results]
        level = max(before, default=-1) + 1
        written.update(dict.fromkeys(results, level))
        read.update({name: max(level, read.get(name, -1)) for name in sources})
        same = key(found)
        levels.setdefault(level, {}).setdefault(id(found) if same is None else same, []).append(found)
    groups: list[list[Decoded]] = []
    for _, by_key in sorted(levels.items()):
        for group in by_key.values():
            gathered = len(group) >= LEAST or group[0].form.kind == "matrix"
            groups += [group] if gathered else [[found] for found in group]
    if all(len(group) == 1 for group in groups):
        return [[found] for found in run]
    return groups


def run_batch(scalar: Callable[..., int], vector: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The function of several equal instructions, given for each operand the registers of all."""

    def apply(*operands: tuple[Any, ...]) -> list[Any]:
        if any(int in map(type, registers) for registers in operands):
            rows = zip(*operands, strict=True)
            return [(scalar if all(x.__class__ is int for x in row) else vector)(*row) for row in rows]
        return list(vector(*map(np.concatenate, operands)).reshape(-1, LANES))

    return apply


def run_matrix(function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The function of several equal instructions on matrices, given for each operand the registers of all."""

    def apply(w: Any, *operands: tuple[tuple[Any, ...], ...]) -> list[Any]:
        found: list[Any] = []
        for first in range(0, len(operands[0]), MOST):
            found += list(function(w, *(_stack(registers[first : first + MOST]) for registers in operands)))
        return found

    return apply


def _stack(registers: tuple[tuple[Any, ...], ...]) -> Any:
    """Registers of several instructions as (instructions, registers, 32) uint32."""
    flat = [np.full(LANES, r, np.uint32) if r.__class__ is int else r for each in registers for r in each]
    return np.concatenate(flat).astype(np.uint32, copy=False).reshape(len(registers), -1, LANES)
