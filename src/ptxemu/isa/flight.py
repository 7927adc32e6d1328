"""Registers of wgmma operations in flight: code that looks after them, in kernels that have such operations alone.

PTX 'wgmma.mma_async': accessing the registers of an operation before wgmma.wait_group is undefined.  'wgmma.fence': it
has to come between another access to a register and a wgmma that uses it, and before the first wgmma of a kernel.

Copies of registers, and constants, are no accesses here: compilers leave them between operations, and the assembler
renames registers.  So an accumulator is known by the array that it holds.  A copy that some lanes make and others do
not is one: the register that it leaves holds parts of two.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ptxemu.isa.blocks import Plan
from ptxemu.isa.engine import Decoded
from ptxemu.isa.move import mov
from ptxemu.isa.operands import registers_in
from ptxemu.machine.warpgroup import in_flight, in_use, issued_by
from ptxemu.machine.wgmma import Kind
from ptxemu.text.module import Immediate, Operand, Register, Vector

if TYPE_CHECKING:
    from ptxemu.machine.warp import Warp

__all__ = ["InFlight", "check_operands"]

Touched = dict[str, frozenset[int]]  # the lines at which registers were accessed since the last fence
START = ""  # stands for a register that the kernel's first fence is for
NO_FENCE = "missing wgmma.fence"


class InFlight:
    """What a kernel's code has to tell of its registers.  numbers: of the registers by name."""

    def __init__(self, plans: Sequence[Plan], numbers: Mapping[str, int]) -> None:
        self.numbers = numbers
        mmas = [found for plan in plans for found in plan.body if _is_mma(found)]
        self.accumulators = {name for found in mmas for name in _names(found.results)}
        self.operands = {name for found in mmas for name in _matrices(found)}
        self.scope = {f.__name__: f for f in HOOKS} if mmas else {}
        self.copied = _closure(self.accumulators, _copies(plans, forward=True)) if mmas else set()
        self.lines = _unfenced(plans, _closure(self.operands, _copies(plans, forward=False))) if mmas else {}
        self.sites = frozenset(line for lines in self.lines.values() for line in lines)

    def before(self, group: Sequence[Decoded]) -> list[str]:
        """Lines to come before instructions."""
        return [line for found in group for line in self._before(found)] if self.scope else []

    def after(self, group: Sequence[Decoded]) -> list[str]:
        """Lines to come after them."""
        return [line for found in group for line in self._after(found)] if self.scope else []

    def _before(self, found: Decoded) -> Iterator[str]:
        if _is_mma(found):
            if lines := self.lines.get(found.instruction.line):
                yield f"unfenced(w, {tuple(sorted(lines))})"
            yield f"if w.flying: overwritten(w, {tuple(self.numbers[name] for name in _names(found.results))})"
            return
        if list(_copied(found)):
            yield from self._merged(found)
            return
        if used := [name for name in _names(found.sources) if name in self.copied]:
            yield f"if w.flying: read_early(w, ({''.join(f'r{self.numbers[name]}, ' for name in used)}))"
        if written := [self.numbers[name] for name in _names(found.results) if name in self.operands]:
            yield f"if w.flying: written_early(w, {tuple(written)})"

    def _merged(self, found: Decoded) -> Iterator[str]:
        """Of a copy that a guard lets only some lanes make."""
        guard = found.instruction.guard
        used = [name for name in _names((*found.sources, *found.results)) if name in self.copied]
        if guard is not None and used:
            lanes = f"{'~' if guard.negated else ''}r{self.numbers[guard.name]} & m"
            values = "".join(f"r{self.numbers[name]}, " for name in used)
            yield f"if w.flying and {lanes} not in (0, m): read_early(w, ({values}))"

    def _after(self, found: Decoded) -> Iterator[str]:
        if _is_mma(found):
            of_d = frozenset(self.numbers[name] for name in _names(found.results))
            of_a = frozenset(self.numbers[name] for name in _matrices(found)) - of_d
            yield f"takes_off(w, {of_d!r}, {of_a!r})"
        elif found.instruction.line in self.sites:
            yield f"touches(w, {found.instruction.line})"


def _is_mma(found: Decoded) -> bool:
    return found.form.opcode == "wgmma" and found.instruction.opcode.startswith("wgmma.mma_async")


def _names(operands: Iterable[Operand | None]) -> list[str]:
    return list(dict.fromkeys(r.name for operand in operands for r in registers_in(operand)))


def _matrices(found: Decoded) -> list[str]:
    """The registers of D and A of a wgmma."""
    return _names(operand for operand in found.sources if isinstance(operand, Vector))


def _copied(found: Decoded) -> Iterator[tuple[str, str]]:
    """The registers that an instruction only copies, as (to, from)."""
    if found.form.kind == "copy" or found.form.function is mov:
        for to, source in zip(found.results, found.sources, strict=False):
            if isinstance(to, Register) and isinstance(source, Register) and not source.offset:
                yield to.name, source.name


def _copies(plans: Sequence[Plan], forward: bool) -> dict[str, set[str]]:
    """Where each register is copied to, or from."""
    ways: dict[str, set[str]] = {}
    for to, source in (pair for plan in plans for found in plan.body for pair in _copied(found)):
        ways.setdefault(source if forward else to, set()).add(to if forward else source)
    return ways


def _closure(names: Iterable[str], ways: Mapping[str, set[str]]) -> set[str]:
    found, pending = set(names), list(names)
    while pending:
        new = ways.get(pending.pop(), set()) - found
        found |= new
        pending += new
    return found


def _unfenced(plans: Sequence[Plan], names: set[str]) -> dict[int, frozenset[int]]:
    """For the line of each wgmma the lines of accesses to its registers that a path leads from without a fence."""
    states: list[Touched | None] = [None] * len(plans)
    states[0] = {START: frozenset({0})}
    found: dict[int, frozenset[int]] = {}
    pending = [0]
    while pending:
        plan = plans[pending.pop()]
        state = dict(states[plan.index] or {})
        for instruction in plan.body:
            _step(state, instruction, names, found)
        for way in plan.successors(len(plans)):
            before = states[way]
            after = state if before is None else _union(before, state)
            if after != before:
                states[way] = dict(after)
                pending.append(way)
    return found


def _union(one: Touched, two: Touched) -> Touched:
    return {name: one.get(name, frozenset()) | two.get(name, frozenset()) for name in {*one, *two}}


def _step(state: Touched, found: Decoded, names: set[str], unfenced: dict[int, frozenset[int]]) -> None:
    """One instruction's effect on what was touched."""
    line = found.instruction.line
    if found.instruction.opcode.startswith("wgmma.fence"):
        state.clear()
    elif _is_mma(found):
        lines = frozenset(x for name in (START, *_matrices(found)) for x in state.get(name, ()))
        unfenced[line] = unfenced.get(line, frozenset()) | lines
        for name in _names(found.results):
            state.pop(name, None)
    elif pairs := list(_copied(found)):
        state |= {to: state.get(source, frozenset()) for to, source in pairs if to in names}
    elif all(isinstance(source, Immediate) for source in found.sources) and found.form.function is mov:
        for name in _names(found.results):
            state.pop(name, None)
    else:
        state |= {name: frozenset({line}) for name in _names((*found.sources, *found.results)) if name in names}


# What generated code calls


def read_early(w: Warp, values: tuple[Any, ...]) -> None:
    """An instruction reads registers while operations are in flight."""
    if w.grid.watch is not None:
        _check(w, _line(w), values, "an accumulator is read")


def written_early(w: Warp, numbers: tuple[int, ...]) -> None:
    """An instruction writes registers while operations are in flight."""
    if w.grid.watch is None:
        return
    for found, (of_d, of_a) in issued_by(w).registers.items():
        if not of_d.isdisjoint(numbers):
            in_use(w, _line(w), "an accumulator is written", found)
        elif not of_a.isdisjoint(numbers):
            in_use(w, _line(w), "a register of A is written", found)


def overwritten(w: Warp, numbers: tuple[int, ...]) -> None:
    """A wgmma fills registers while operations are in flight, which may read A from them."""
    if w.grid.watch is not None:
        for found, (_, of_a) in issued_by(w).registers.items():
            if not of_a.isdisjoint(numbers):
                in_use(w, _line(w), "a register of A is written by another wgmma", found)


def takes_off(w: Warp, of_d: frozenset[int], of_a: frozenset[int]) -> None:
    """The warp has issued an operation with these registers."""
    issued = issued_by(w)
    issued.registers[issued.open[-1]] = of_d, of_a


def touches(w: Warp, line: int) -> None:
    """An instruction accesses registers that a wgmma may use without a fence between."""
    issued_by(w).touched.add(line)


def unfenced(w: Warp, lines: tuple[int, ...]) -> None:
    """A wgmma comes, after accesses at `lines` of which a fence may be missing."""
    seen = issued_by(w).touched.intersection(lines)
    if not seen or w.grid.watch is None:
        return
    other = max(seen)
    if other:
        text, _ = w.grid.findings.place(other)
        message = "registers that this wgmma uses were accessed before it, with no wgmma.fence between"
        words = f"the access at line {other}: `{text}`"
    else:
        message, words = "no wgmma.fence comes before the first wgmma.mma_async", ""
    w.grid.findings.add(NO_FENCE, message, line=_line(w), warp=w, other=words, other_line=other)


HOOKS = (read_early, written_early, overwritten, takes_off, touches, unfenced)


def check_operands(w: Warp, line: int, kind: Kind, d: tuple[Any, ...], a: tuple[Any, ...]) -> None:
    """A wgmma is issued while others are in flight; accumulators may be shared by those of one shape.

    kind: its types and shape; d, a: its registers.
    """
    if w.grid.watch is not None:
        _check(w, line, a, "A is read")
        _check(w, line, d, "a wgmma of another shape uses an accumulator", kind)


def _check(w: Warp, line: int, values: tuple[Any, ...], what: str, kind: Kind | None = None) -> None:
    for value in values:
        if (found := in_flight(w, value)) is not None:
            if kind is None or (found.op.kind.n, found.op.kind.k) != (kind.n, kind.k):
                in_use(w, line, what, found)
            return


def _line(w: Warp) -> int:
    return w.grid.program.ptx_line(sys._getframe(2))
