"""Faults by rule: each operator yields every change of its kind that a PTX text allows.

A change keeps the number of lines, so that a line means the same instruction in the text and in its mutants.  Values in
registers change by an instruction put before the one that reads them.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ptx_lines import Line, read, straight

Edit = tuple[int, str]  # a line's number and its new text


@dataclass(frozen=True)
class Mutant:
    """A text with one fault.  line: where; before: the instruction; change: what became of it, in words."""

    operator: str
    line: int
    before: str
    change: str
    edits: tuple[Edit, ...]

    def apply(self, text: str) -> str:
        lines = text.splitlines()
        for number, new in self.edits:
            lines[number - 1] = new
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Source:
    """A text and its instructions."""

    text: str
    lines: dict[int, Line]


Found = Iterator[tuple[Line, str, tuple[Edit, ...]]]  # where, the change in words, the edits
OPERATORS: dict[str, Callable[[Source], Found]] = {}


def mutants(text: str) -> list[Mutant]:
    """Every mutant of a text, operator by operator, each in the order of the lines."""
    source = Source(text, read(text))
    found = []
    for name, operator in OPERATORS.items():
        for line, change, edits in operator(source):
            found.append(Mutant(name, line.number, line.text(), change, edits))
    return found


def _operator(function: Callable[[Source], Found]) -> Callable[[Source], Found]:
    OPERATORS[function.__name__] = function
    return function


def _drops(name: str, pattern: str) -> None:
    """An operator that removes each instruction whose opcode begins so."""

    def drop(source: Source) -> Found:
        for line in _matching(source, pattern):
            yield line, "dropped", ((line.number, ""),)

    OPERATORS[name] = drop


def _matching(source: Source, pattern: str) -> Iterator[Line]:
    return (line for line in source.lines.values() if re.match(pattern, line.opcode))


# Instructions left out

_drops("drop_fence", r"fence\.|membar|tcgen05\.fence")


@_operator
def drop_wait(source: Source) -> Found:
    """A wait that is over at once: nothing in its place, or `true` where it gives a predicate."""
    for line in _matching(source, r"cp\.async\.(bulk\.)?wait|tcgen05\.wait|mbarrier\.(try|test)_wait"):
        new = f"mov.pred {line.operands[0]}, -1;" if line.base == "mbarrier" else ""
        yield line, "dropped", ((line.number, new),)


_drops("drop_barrier", r"bar\.|barrier\.")
_drops("drop_arrive", r"mbarrier\.arrive|cp\.async\.mbarrier\.arrive")


@_operator
def drop_expect_tx(source: Source) -> Found:
    """No bytes are announced; what arrives as well arrives still."""
    for line in _matching(source, r"mbarrier\.expect_tx"):
        yield line, "dropped", ((line.number, ""),)
    for line in _matching(source, r"mbarrier\.arrive(_drop)?\.expect_tx"):
        new = line.text(*line.operands[:2], opcode=line.opcode.replace(".expect_tx", ""))
        yield line, "arrives without expect_tx", ((line.number, new),)


_drops("drop_commit", r"tcgen05\.commit|cp\.async\.(bulk\.)?commit")
_drops("drop_dealloc", r"tcgen05\.dealloc")
_drops("drop_permit", r"tcgen05\.relinquish")
_drops("drop_pdl_wait", r"griddepcontrol\.wait")


# Operands changed


def _changed(line: Line, index: int, how: str, amount: int, bits: int = 32) -> Edit:
    """The line with operand `index` changed by `how` ("add", "xor") of an amount."""
    put = functools.partial(line.replaced, index)
    return line.number, _with_value(line.operands[index], how, amount, bits, put)


def _with_value(value: str, how: str, amount: int, bits: int, put: Callable[[str], str]) -> str:
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)", value):
        number = int(value, 0)
        return put(str(number + amount if how == "add" else number ^ amount))
    kind = "s" if how == "add" else "b"
    return f"{{ .reg .b{bits} mutated; {how}.{kind}{bits} mutated, {value}, {amount}; {put('mutated')} }}"


@_operator
def flip_parity(source: Source) -> Found:
    """The other parity for one wait, or for all that use a register, from where it is set on."""
    registers = set()
    for line in _matching(source, r"mbarrier\.(try|test)_wait\.parity"):
        yield line, "parity ^ 1", (_changed(line, 2, "xor", 1),)
        registers.add(line.operands[2])
    for line in source.lines.values():
        if line.operands and line.operands[0] in registers:
            if re.match(r"mov\.[bu]32", line.opcode) and re.fullmatch(r"[01]", line.operands[1]):
                yield line, "starts with the other parity", (_changed(line, 1, "xor", 1),)
            elif line.opcode == "xor.b32":
                yield line, "keeps its parity", ((line.number, line.text(line.operands[0], line.operands[1], "0")),)


_COUNTS = {
    r"mbarrier\.init": (1, (1, -1)),
    r"bar\.(sync|arrive|red)|barrier\.(sync|arrive)\b": (1, (32, -32)),
    r"mbarrier\.arrive(?!.*expect_tx)": (2, (1,)),
    r"cp\.async\.(bulk\.)?wait_group": (0, (1,)),
    r"tcgen05\.(de)?alloc": (1, (32, -32)),
}


@_operator
def change_count(source: Source) -> Found:
    """Arrivals a barrier expects or gets, threads of a named barrier, groups that a wait leaves, columns."""
    for pattern, (index, amounts) in _COUNTS.items():
        for line in _matching(source, pattern):
            if len(line.operands) > index:
                for amount in amounts:
                    yield line, f"count {amount:+d}", (_changed(line, index, "add", amount),)


_BYTES = {
    r"mbarrier\.(arrive(_drop)?\.)?expect_tx": (-1, (16, -16)),
    r"cp\.(reduce\.)?async\.bulk\.(?!tensor|prefetch|wait|commit)": (2, (16, -16)),
    r"cp\.async\.ca": (2, (-4,)),
}


@_operator
def change_bytes(source: Source) -> Found:
    """Bytes announced to a barrier, and bytes that a copy moves."""
    for pattern, (index, amounts) in _BYTES.items():
        for line in _matching(source, pattern):
            for amount in amounts:
                yield line, f"bytes {amount:+d}", (_changed(line, index % len(line.operands), "add", amount),)


_MATRIX = {
    "start + 32 bytes": ("add", 2),
    "leading offset + 1024 bytes": ("add", 64 << 16),
    "stride offset + 128 bytes": ("add", 8 << 32),
    "another swizzle": ("xor", 6 << 61),
}
_INSTRUCTION = {
    "M": 1 << 27,
    "N": 1 << 17,
    "format of A": 1 << 7,
    "format of B": 1 << 10,
    "negation of A": 1 << 13,
    "negation of B": 1 << 14,
    "major of A": 1 << 15,
    "major of B": 1 << 16,
}
_SCALED = {"scale type": 1 << 23, "scale id of A": 1 << 29, "scale id of B": 1 << 4}


@_operator
def change_descriptor(source: Source) -> Found:
    """Each field of a matrix's and of an MMA's descriptor."""
    for line in _matching(source, r"tcgen05\.(mma|cp)\b"):
        matrices = [1, 2] if line.opcode.startswith("tcgen05.mma") else [1]
        for index in matrices:
            if line.operands[index].startswith("["):
                continue
            for field, (how, amount) in _MATRIX.items():
                yield line, f"{'AB'[index - 1]}: {field}", (_changed(line, index, how, amount, 64),)
        if len(matrices) == 2:
            for field, bit in _INSTRUCTION.items() | (_SCALED.items() if "block_scale" in line.opcode else set()):
                yield line, f"instruction: {field}", (_changed(line, 3, "xor", bit),)


@_operator
def change_coordinate(source: Source) -> Found:
    """Each coordinate of a tensor copy, one further."""
    for line in _matching(source, r"cp\.(reduce\.)?async\.bulk\.tensor"):
        index, given = next((i, o) for i, o in enumerate(line.operands) if "{" in o)
        head, inner = given.split("{")
        coordinates = [c.strip() for c in inner.rstrip("]} ").split(",")]
        for axis, value in enumerate(coordinates):
            parts = ", ".join([*coordinates[:axis], "?", *coordinates[axis + 1 :]])
            put = functools.partial(line.replaced(index, f"{head}{{{parts}}}]").replace, "?")
            yield line, f"coordinate {axis} + 1", ((line.number, _with_value(value, "add", 1, 32, put)),)


@_operator
def change_stage(source: Source) -> Found:
    """Stages of a ring: `add n, i, 1; setp.eq p, n, SIZE; selp i, 0, n, p`, and what is computed from the index."""
    sizes: dict[str, int] = {}
    order = list(source.lines.values())
    for step, wrap, pick in zip(order, order[1:], order[2:], strict=False):
        if not (step.opcode == "add.s32" and step.operands[2] == "1" and re.match(r"setp\.eq\.[bsu]32", wrap.opcode)):
            continue
        if wrap.operands[1] != step.operands[0] or not re.match(r"selp\.[bsu]32", pick.opcode):
            continue
        if pick.operands[1:3] != ("0", step.operands[0]) or not wrap.operands[2].isdigit():
            continue
        sizes[pick.operands[0]] = sizes[step.operands[1]] = int(wrap.operands[2])
        yield step, "advances by 2", (_changed(step, 2, "add", 1),)
        for amount in (1, -1):
            yield wrap, f"stages {amount:+d}", (_changed(wrap, 2, "add", amount),)
    for line in order:
        if re.match(r"shl\.b32|mul\.lo|mad\.lo", line.opcode) and line.operands[1] in sizes:
            index, size = line.operands[1], sizes[line.operands[1]]
            new = (
                f"{{ .reg .b32 next; .reg .pred last; add.s32 next, {index}, 1; setp.eq.b32 last, next, {size}; "
                f"selp.b32 next, 0, next, last; {line.replaced(1, 'next')} }}"
            )
            yield line, "of the next stage", ((line.number, new),)


_BARRIERS = {
    r"mbarrier\.(init|inval|expect_tx|complete_tx)": (0,),
    r"mbarrier\.(arrive|try_wait|test_wait)": (1,),
    r"tcgen05\.commit": (0,),
    r"cp\.async\.mbarrier": (0,),
    r"cp\.(reduce\.)?async\.bulk.*complete_tx::bytes": (-1,),
    r"st\.async|red\.async": (2,),
    r"clusterlaunchcontrol\.try_cancel": (1,),
    r"mapa": (),
}


@_operator
def change_barrier(source: Source) -> Found:
    """The mbarrier after the right one; the named barrier after it."""
    for pattern, places in _BARRIERS.items():
        for line in _matching(source, pattern):
            for place in places:
                index = _last_address(line) if place < 0 else place
                yield line, "the next barrier", ((line.number, line.replaced(index, _moved(line.operands[index], 8))),)
    for line in _matching(source, r"bar\.(sync|arrive|red)|barrier\.(sync|arrive)\b(?!\.)"):
        yield line, "the next barrier", (_changed(line, 0, "add", 1),)


def _last_address(line: Line) -> int:
    return max(i for i, o in enumerate(line.operands) if o.startswith("[") and "{" not in o)


def _moved(address: str, by: int) -> str:
    """`[a]` or `[a+4]` with its constant changed."""
    match = re.fullmatch(r"\[\s*([^+\-\s\]]+)\s*(?:\+\s*(-?\d+))?\s*\]", address)
    assert match, address
    return f"[{match[1]}+{int(match[2] or 0) + by}]"


_ADDRESSES = {
    r"cp\.async\.bulk.*complete_tx::bytes": ((0, 128),),
    r"cp\.async\.bulk.*bulk_group(?!.*wait)": ((-1, 128),),
    r"cp\.async\.c[ag]\.": ((0, 16), (1, 16)),
    r"tcgen05\.(ld|shift)": ((1, 1),),
    r"tcgen05\.(st|cp)": ((0, 1),),
    r"tcgen05\.mma": ((0, 1), (4, 4), (5, 4)),
    r"(st|ld)(\.shared|\.async)": ((-1, 16),),
}


@_operator
def change_address(source: Source) -> Found:
    """Where asynchronous copies, tensor memory and shared memory are read or written."""
    for pattern, places in _ADDRESSES.items():
        for line in _matching(source, pattern):
            for place, by in places:
                index = place
                if place < 0:
                    index = max(i for i, o in enumerate(line.operands) if o.startswith("[") and "{" not in o)
                    index = index if line.base == "cp" else 1 if line.base == "ld" else 0
                if index < len(line.operands) and line.operands[index].startswith("["):
                    new = line.replaced(index, _moved(line.operands[index], by))
                    yield line, f"operand {index}: address {by:+d}", ((line.number, new),)


@_operator
def change_mask(source: Source) -> Found:
    """The CTAs of a multicast, of a remote address or of a signal: another one."""
    for line in _matching(source, r".*multicast::cluster(?!::all)"):
        index = len(line.operands) - 1 - ("cache_hint" in line.opcode and line.base == "cp")
        yield line, "mask ^ 1", (_changed(line, index, "xor", 1, 16),)
    for line in _matching(source, r"mapa"):
        yield line, "CTA ^ 1", (_changed(line, 2, "xor", 1),)


@_operator
def change_predicate(source: Source) -> Found:
    """The guard of an instruction, and the predicate by which an MMA accumulates, negated."""
    for line in source.lines.values():
        if line.guard:
            other = line.guard[1:] if line.guard.startswith("!") else f"!{line.guard}"
            yield line, "guard negated", ((line.number, line.text(guard=other)),)
    for line in _matching(source, r"tcgen05\.mma"):
        last = max(i for i, o in enumerate(line.operands) if re.fullmatch(r"!?%?p\w*|accumulate", o))
        new = f"{{ .reg .pred mutated; not.pred mutated, {line.operands[last]}; {line.replaced(last, 'mutated')} }}"
        yield line, "accumulation negated", ((line.number, new),)


# Instructions swapped

_SYNC = re.compile(
    r"fence|membar|bar\.|barrier\.|mbarrier\.(?!pending)|cp\.async|cp\.reduce|tcgen05\.(?!ld|st\b)|griddepcontrol"
    r"|st\.async|red\.async|clusterlaunchcontrol\.try|atom|red\."
)
_ACCESS = re.compile(r"(ld|st)\.(?!param|const|local)|tcgen05\.(ld|st)\b")


@_operator
def swap(source: Source) -> Found:
    """An instruction put behind the next one with an effect on memory or order, where no register forbids it.

    One of the two synchronises or is asynchronous; two of one opcode, such as two barrier initialisations, stay.
    """
    for run in straight(source.text, source.lines):
        marked = [i for i, line in enumerate(run) if _SYNC.match(line.opcode) or _ACCESS.match(line.opcode)]
        for here, there in itertools.pairwise(marked):
            first, second = run[here], run[there]
            if not (_SYNC.match(first.opcode) or _SYNC.match(second.opcode)) or first.opcode == second.opcode:
                continue
            between = run[here + 1 : there + 1]
            reads = frozenset().union(*(line.reads | line.writes for line in between))
            writes = frozenset().union(*(line.writes for line in between))
            if first.writes & reads or first.reads & writes:
                continue
            edits = ((first.number, ""), (second.number, f"{second.text()} {first.text()}"))
            yield first, f"after `{second.text()}`", edits
