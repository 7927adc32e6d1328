"""A function's instructions as basic blocks: where they begin, where they lead, which registers they need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ptxemu.errors import ParseError
from ptxemu.isa.engine import Decoded, decode
from ptxemu.isa.operands import registers_in
from ptxemu.isa.pairs import split_pairs
from ptxemu.text.module import Function, Instruction, Label, Operand, Register

__all__ = ["Jump", "Plan", "plan"]


@dataclass(frozen=True)
class Jump:
    """How a block ends: to `target` for the lanes of `guard` (all when it is None), to the next block for the others.

    kind: "branch", "exit" or "indexed" (then `targets`, chosen by `index`).  whole: all lanes have to go one way.
    """

    kind: str
    line: int
    guard: Register | None = None
    target: int = -1
    targets: tuple[int, ...] = ()
    index: Operand | None = None
    whole: bool = False


@dataclass
class Plan:
    """A block before it is code."""

    index: int
    body: list[Decoded] = field(default_factory=list)
    jump: Jump | None = None
    live_in: int = 0  # bits by register number
    live_out: int = 0

    @property
    def alone(self) -> Decoded | None:
        """The blocking instruction, when that is what the block is."""
        return self.body[0] if self.body and self.body[0].form.blocking else None

    def operands(self) -> Iterator[Operand | None]:
        """Every operand of its instructions and of its jump."""
        for found in self.body:
            yield from (*found.sources, *found.results, found.instruction.guard)
        if self.jump is not None:
            yield from (self.jump.guard, self.jump.index)

    def successors(self, count: int) -> list[int]:
        following = [self.index + 1] if self.index + 1 < count else []
        if self.jump is None:
            return following
        if self.jump.kind == "indexed":
            return list(self.jump.targets)
        ways = [self.jump.target] if self.jump.kind == "branch" else []
        return ways if self.jump.guard is None else ways + following


def plan(function: Function, widths: dict[str, int]) -> list[Plan]:
    """The function's blocks in order, with what is live, a bit for each register in the order of `widths`.

    widths: the bits of each register; gets those that splitting adds.
    """
    code = split_pairs([_decoded(i, widths) if isinstance(i, Instruction) else i for i in function.body], widths)
    numbers = {name: number for number, name in enumerate(widths)}
    blocks: list[Plan] = [Plan(0)]
    places: dict[str, int] = {}
    pending: list[tuple[Plan, Decoded]] = []

    def fresh() -> Plan:
        """The block that comes next: the last one if it is still empty."""
        if blocks[-1].body or blocks[-1].jump is not None:
            blocks.append(Plan(len(blocks)))
        return blocks[-1]

    for found in code:
        if isinstance(found, Label):
            places[found.name] = fresh().index
            continue
        form, item = found.form, found.instruction
        if form.kind == "flow":
            pending.append((blocks[-1], found))
            blocks[-1].jump = Jump(form.function(), item.line, item.guard)
            fresh()
        elif _together(blocks[-1]) and found.converge == "aligned" and item.guard is None and not form.blocking:
            blocks[-1].body.append(found)
        elif form.blocking or found.converge:
            block = fresh()
            if item.guard is not None:  # the lanes that the guard keeps out pass by
                guard = Register(item.guard.name, 0, not item.guard.negated)
                block.jump = Jump("branch", item.line, guard, block.index + 2, whole=found.converge == "aligned")
                block = fresh()
            block.body.append(found)
            if form.blocking or item.guard is not None:
                blocks.append(Plan(len(blocks)))
        else:
            blocks[-1].body.append(found)
    if fresh().body:
        blocks.append(Plan(len(blocks)))
    lines = [item.line for item in function.body if isinstance(item, Instruction)]
    blocks[-1].jump = Jump("exit", lines[-1] if lines else 0)  # falling off the end
    for block, found in pending:
        block.jump = _resolve(block.jump, found, places, function)
    _live(blocks, numbers)
    return blocks


def _together(block: Plan) -> bool:
    """Whether all lanes of the warp run the block, which begins by waiting for them."""
    return bool(block.body) and block.body[0].converge == "aligned" and block.jump is None


def _decoded(item: Instruction, widths: Mapping[str, int]) -> Decoded:
    if item.guard is not None and widths[item.guard.name] != 1:
        raise ParseError(f"line {item.line}: the guard `{item.guard.name}` is no predicate: {item.text}")
    return decode(item, widths)


def _resolve(jump: Jump | None, found: Decoded, places: Mapping[str, int], function: Function) -> Jump:
    assert jump is not None
    if jump.kind == "exit":
        return jump
    if jump.kind == "indexed":
        index, table = found.instruction.operands
        names = function.targets.get(table.name, ()) if isinstance(table, Label) else ()
        return Jump("indexed", jump.line, jump.guard, -1, tuple(places[name] for name in names), index)
    target = found.instruction.operands[0]
    if not isinstance(target, Label) or target.name not in places:
        raise ParseError(f"line {jump.line}: no such label: {found.instruction.text}")
    return Jump(jump.kind, jump.line, jump.guard, places[target.name])


def _live(blocks: list[Plan], numbers: Mapping[str, int]) -> None:
    """What each block reads before it writes, and what is read after it: the usual backward iteration."""
    reads, writes = [], []
    for block in blocks:
        read = written = 0
        for found in block.body:
            for operand in (*found.sources, found.instruction.guard):
                for register in registers_in(operand):
                    read |= (1 << numbers[register.name]) & ~written
            for operand in found.results:
                for register in registers_in(operand):
                    bit = 1 << numbers[register.name]
                    if found.instruction.guard is not None and not (found.form.blocking or found.converge):
                        read |= bit & ~written  # lanes that the guard keeps out keep their value
                    written |= bit
        if block.jump is not None:
            for operand in (block.jump.guard, block.jump.index):
                for register in registers_in(operand):
                    read |= (1 << numbers[register.name]) & ~written
        reads.append(read)
        writes.append(written)
    ways = [block.successors(len(blocks)) for block in blocks]
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            out = 0
            for way in ways[block.index]:
                out |= blocks[way].live_in
            live = reads[block.index] | (out & ~writes[block.index])
            if live != block.live_in or out != block.live_out:
                block.live_in, block.live_out, changed = live, out, True
