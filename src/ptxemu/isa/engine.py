"""The instruction table: decorators that read the manual's syntax, and the look-up that decodes an instruction.

A form is one line of the manual's syntax with the function that carries it out:

    @lanes("add{.sat}.type d, a, b", type="u16 u32 u64 s16 s32 s64")
    def add(a, b): ...

In the opcode, `.name` is a choice when a keyword argument of that name lists its values, and literal text otherwise;
`{...}` is optional.  In the operands, `{, x}` is optional, `[a, b]` is an address with two parts, `<a>` a vector,
`<+a>` one that is read and written, and `d|p` two results.
Where the type of an operand is "u16 in 0 2", a constant in its place has to be one of these ("imm in 0 2": it has to be
a constant), in a vector each of its constants one of those between `|`.
Operands that the function does not take are its results when they come first, and ignored further back.  A choice, or
an optional literal, reaches the function when it has a keyword-only parameter of that name (`::` becomes `_`).
A parameter with a default need not be in the syntax.

Four decorators, by what the function needs:

- `lanes`: pure arithmetic.  Gets and returns numbers of the operand's type, one uniform value or an array of 32 lanes.
- `warp`: needs the warp; called once for the lanes of a mask: `f(w, m, *operands)`.  May be a generator that yields
  `Wait`s: the warp stays at the instruction until each is over.
- `matrix`: arithmetic of the registers of a whole warp: `f(w, *operands)` for several equal instructions, each operand
  and the result (instructions, registers, 32) uint32.
- `thread`: as `warp`, but the operands are plain ints: called once when they are uniform, otherwise lane by lane.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from ptxemu.errors import ParseError, UnknownInstruction
from ptxemu.isa.fit import Filled, misfit
from ptxemu.text.module import Address, Instruction, Operand, Pair, Vector

__all__ = ["Decoded", "Form", "Modifiers", "Value", "decode", "flow", "forms", "lanes", "matrix", "thread", "warp"]

Value = Any  # a uniform int, or a numpy array of 32 lanes; predicates are an int with a bit a lane
F = TypeVar("F", bound=Callable[..., Any])
Modifiers = Mapping[str, str | bool | None]
Lengths = Callable[[Modifiers], Mapping[str, int]]

_TOKEN = re.compile(r"\{|\}|\.[A-Za-z0-9_:]+")
# Operand names that mean the same wherever the syntax has them.
_USUAL = {"p": "pred", "cf": "pred", "carry": "pred", "membermask": "b32", "policy": "b64", "r": "b32"}
_USUAL |= dict.fromkeys(("count", "size", "columns", "offset"), "u32")
_FORMS: dict[str, list[Form]] = {}  # by base opcode


@dataclass(frozen=True)
class Slot:
    """One operand position: the names it binds, and whether it is bracketed (`[a, b]`) or a pair (`d|p`).

    updated: the function takes it and gives it back.
    """

    names: tuple[str, ...]
    shape: str  # "plain", "address", "pair" or "vector"
    updated: bool = False


@dataclass(frozen=True)
class Form:
    """One entry of the table."""

    syntax: str
    kind: str  # "lanes", "matrix", "warp", "thread" or "flow"
    function: Callable[..., Any]
    pattern: re.Pattern[str]
    variants: tuple[tuple[Slot, ...], ...]  # the operand lists that the optional parts allow
    sources: tuple[str, ...]  # the function's operands
    options: tuple[str, ...]  # its keyword-only parameters
    operand_types: Mapping[str, str]
    choices: Mapping[str, tuple[str, ...]]
    takes_ints: bool  # a lane-wise function that takes ints among its arrays
    converge: str | None  # "aligned": all lanes of the warp; otherwise the operand that names the lanes
    lengths: Lengths | None = None  # of vectors, by the modifiers

    @property
    def opcode(self) -> str:
        return re.split(r"[.{ ]", self.syntax, maxsplit=1)[0]

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.function) or "").replace("\n", " ")

    def type_of(self, operand: str, modifiers: Mapping[str, str | bool | None]) -> str | None:
        """The PTX type of the named operand under these modifiers; None when the form gives it none."""
        spec = self.operand_types.get(operand, "type").partition(" in ")[0]
        found = modifiers.get(spec, spec)
        return None if found == "type" or found is None else str(found)

    def constants(self, operand: str) -> tuple[tuple[int, ...], ...]:
        """The constants that the named operand may be, or each element of a vector; empty: any."""
        values = self.operand_types.get(operand, "").partition(" in ")[2]
        return tuple(tuple(map(int, each.split())) for each in values.split("|")) if values else ()

    @property
    def blocking(self) -> bool:
        return inspect.isgeneratorfunction(self.function)


@dataclass(frozen=True)
class Decoded:
    """An instruction bound to its form.

    sources: an operand, or None where an optional one is absent, for each of the form's `sources`.
    results: the operands to write, in order.  types: the type of each operand by name, where the form gives one.
    """

    instruction: Instruction
    form: Form
    modifiers: Mapping[str, str | bool | None]
    sources: tuple[Operand | None, ...]
    results: tuple[Operand | None, ...]
    result_names: tuple[str, ...]

    @property
    def function(self) -> Callable[..., Any]:
        """The form's function with its modifiers bound."""
        options = {name: self.modifiers.get(name, self.parts) for name in self.form.options}
        return functools.partial(self.form.function, **options) if options else self.form.function

    @property
    def converge(self) -> str | None:
        """Which lanes have to be there: "aligned", all of the warp; or the operand that names them; None: any."""
        return "aligned" if ".aligned" in self.instruction.opcode else self.form.converge

    @property
    def parts(self) -> int:
        """The number of elements of the vector operand; what a function's `parts` parameter gets."""
        vectors = [o for o in (*self.results, *self.sources) if isinstance(o, Vector)]
        return len(vectors[0].items) if vectors else 1

    @property
    def updated(self) -> tuple[Operand | None, ...]:
        """The operands that are sources and results both."""
        return tuple(o for n, o in zip(self.form.sources, self.sources, strict=False) if n in self.result_names)

    def type_of(self, operand: str) -> str | None:
        """The PTX type of the named operand: what the form says, by default its `.type`; None when it has none."""
        return self.form.type_of(operand, self.modifiers)


def lanes(
    syntax: str, operands: Mapping[str, str] | str = MappingProxyType({}), *, ints: bool = False, **choices: str
) -> Callable[[F], F]:
    """A lane-wise function of numbers.

    operands: types of operands that are not of the instruction's `.type`: a type, or the name of another choice; one
    string for all of them.  those in `_USUAL` need not be listed.
    choices: for each `.name` of the syntax its allowed values, separated by spaces.
    ints=True: the function is right when only some operands are arrays; otherwise it gets either ints or arrays alone.
    """
    return _entry("lanes", syntax, operands, choices, ints)


def warp(
    syntax: str,
    operands: Mapping[str, str] | str = MappingProxyType({}),
    lengths: Lengths | None = None,
    /,
    **choices: str,
) -> Callable[[F], F]:
    """A function `f(w, m, *operands)` of the warp and the mask of its lanes; `converge=` names a mask of lanes that
    have to arrive first (an `.aligned` form waits for the whole warp by itself).

    lengths: how many elements each vector has, by the modifiers.
    """
    return _entry("warp", syntax, operands, choices, lengths=lengths)


def matrix(syntax: str, operands: Mapping[str, str] | str, lengths: Lengths, /, **choices: str) -> Callable[[F], F]:
    """A function `f(w, *operands)` of stacks of registers, whose operands are vectors of `lengths` or registers."""
    return _entry("matrix", syntax, operands, choices, lengths=lengths)


def thread(syntax: str, operands: Mapping[str, str] | str = MappingProxyType({}), **choices: str) -> Callable[[F], F]:
    """A function `f(w, m, *operands)` of plain ints that one thread issues; `m` has the bit of that lane alone, or all
    active lanes when the operands are uniform."""
    return _entry("thread", syntax, operands, choices)


def flow(syntax: str, operands: Mapping[str, str] | str = MappingProxyType({}), **choices: str) -> Callable[[F], F]:
    """Control flow: `f()` returns the kind of jump, which the code generator knows."""
    return _entry("flow", syntax, operands, choices)


def _entry(
    kind: str,
    syntax: str,
    operands: Mapping[str, str] | str,
    choices: dict[str, str],
    ints: bool = False,
    lengths: Lengths | None = None,
) -> Callable[[F], F]:
    converge = choices.pop("converge", None)
    listed = {name: tuple(values.split()) for name, values in choices.items()}

    def register(function: F) -> F:
        form = _make(kind, syntax, function, operands, listed, ints, converge, lengths)
        _FORMS.setdefault(form.opcode, []).append(form)
        decode_opcode.cache_clear()
        return function

    return register


def _make(
    kind: str,
    syntax: str,
    function: Callable[..., Any],
    operands: Mapping[str, str] | str,
    choices: dict[str, tuple[str, ...]],
    ints: bool,
    converge: str | None,
    lengths: Lengths | None,
) -> Form:
    head, _, tail = syntax.partition(" ")
    parameters = inspect.signature(function).parameters.values()
    keywords = {p.name: p.default is not p.empty for p in parameters if p.kind is p.KEYWORD_ONLY}
    taken = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    if kind in ("warp", "thread"):
        if taken[:2] != ["w", "m"]:
            raise TypeError(f"{syntax}: a {kind} function starts with w, m")
        taken = taken[2:]
    elif kind == "matrix":
        taken = taken[1:]
    pattern, flags = _compile_opcode(head, choices)
    variants = tuple(_operand_lists(tail))
    names = {name for variant in variants for slot in variant for name in slot.names}
    if isinstance(operands, str):
        operands = dict.fromkeys(names, operands)
    optional = {p.name for p in parameters if p.default is not p.empty}
    taken = [name for name in taken if name in names or name not in optional]
    if missing := [name for name in taken if name not in names]:
        raise TypeError(f"{syntax}: {function.__name__} takes {missing}, which the syntax does not name")
    options = tuple(name for name in keywords if name in choices or name in flags or name == "parts")
    if unknown := [name for name, optional in keywords.items() if name not in options and not optional]:
        raise TypeError(f"{syntax}: {function.__name__} takes {unknown}, which the opcode does not name")
    if unknown := [name for name in operands if name not in names]:
        raise TypeError(f"{syntax}: types given for {unknown}, which the syntax does not name")
    operands = {name: kind for name, kind in _USUAL.items() if name in names} | dict(operands)
    if not (function.__doc__ or "").startswith("PTX '"):
        raise TypeError(f"{syntax}: the docstring of {function.__name__} has to begin with its section: PTX '...'")
    return Form(
        syntax, kind, function, pattern, variants, tuple(taken), options, operands, choices, ints, converge, lengths
    )


def _compile_opcode(head: str, choices: Mapping[str, tuple[str, ...]]) -> tuple[re.Pattern[str], set[str]]:
    """A pattern with a group for every choice and for every optional literal; the names of the latter."""
    base = re.split(r"[.{]", head, maxsplit=1)[0]
    out, flags, depth = [re.escape(base)], set(), 0
    rest = head[len(base) :]
    if "".join(_TOKEN.findall(rest)) != rest:
        raise TypeError(f"{head}: not the manual's notation")
    for token in _TOKEN.findall(rest):
        if token == "{":
            depth += 1
            out.append("(?:")
        elif token == "}":
            depth -= 1
            out.append(")?")
        elif (name := token[1:]) in choices:
            values = sorted(choices[name], key=len, reverse=True)
            out.append(rf"\.(?P<{name}>{'|'.join(map(re.escape, values))})")
        elif depth:
            flag = name.replace("::", "_")
            flag = flag if flag.isidentifier() else f"_{flag}"
            flags.add(flag)
            out.append(rf"(?P<{flag}>{re.escape(token)})")
        else:
            out.append(re.escape(token))
    return re.compile("".join(out)), flags


def _operand_lists(tail: str) -> list[tuple[Slot, ...]]:
    """Every operand list that the notation allows, the longest first."""
    pieces = re.split(r"(\{[^}]*\})", tail)
    optional = [i for i, piece in enumerate(pieces) if piece.startswith("{")]
    lists = []
    for keep in itertools.product((True, False), repeat=len(optional)):
        kept = dict(zip(optional, keep, strict=True))
        text = "".join(p.strip("{}") if i in kept else p for i, p in enumerate(pieces) if kept.get(i, True))
        lists.append(tuple(_slot(part) for part in _split(text)))
    return sorted(lists, key=len, reverse=True)


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets."""
    return [part.strip() for part in re.split(r",(?![^\[]*\])", text) if part.strip()]


def _slot(text: str) -> Slot:
    if text.startswith("["):
        return Slot(tuple(part.strip() for part in text.strip("[]").split(",")), "address")
    if text.startswith("<"):
        return Slot((text.strip("<+>"),), "vector", text.startswith("<+"))
    if "|" in text:
        return Slot(tuple(part.strip() for part in text.split("|")), "pair")
    return Slot((text,), "plain")


@functools.lru_cache(maxsize=4096)
def decode_opcode(opcode: str) -> tuple[tuple[Form, Mapping[str, str | bool | None]], ...]:
    """The forms that an opcode with its modifiers matches, each with its modifiers."""
    found = []
    for form in _FORMS.get(opcode.partition(".")[0], ()):
        if match := form.pattern.fullmatch(opcode):
            groups: dict[str, str | bool | None] = dict(match.groupdict())
            for name, value in match.groupdict().items():
                if name not in form.choices:
                    groups[name] = value is not None
            found.append((form, groups))
    return tuple(found)


def decode(instruction: Instruction, widths: Mapping[str, int] | None = None) -> Decoded:
    """Looks the instruction up in the table.

    widths: the bits of each register, 1 for a predicate, by which operands are checked; None: they are not.
    Raises UnknownInstruction, naming the line, the text and the nearest known form; ParseError, with line and text,
    where a form has these operands but not of these kinds, widths or lengths.
    """
    reasons: list[str] = []
    for form, modifiers in decode_opcode(instruction.opcode):
        for variant in form.variants:
            bound = _bind(variant, instruction.operands)
            if bound is not None and widths is not None:
                slots = _slots(form, modifiers, variant, bound)
                if reason := misfit(instruction.opcode, slots, "vec" in form.choices, widths):
                    reasons.append(reason)
                    continue
            if bound is not None:
                results = _results(variant, form.sources)
                return Decoded(
                    instruction,
                    form,
                    modifiers,
                    tuple(bound.get(name) for name in form.sources),
                    tuple(bound[name] for name in results),
                    results,
                )
    if reasons:
        raise ParseError(f"line {instruction.line}: {reasons[0]}: {instruction.text}")
    raise UnknownInstruction(
        f"line {instruction.line}: unknown instruction `{instruction.text}`; the nearest known form is "
        f"`{nearest(instruction.opcode)}`"
    )


def _slots(
    form: Form, modifiers: Modifiers, variant: tuple[Slot, ...], bound: Mapping[str, Operand]
) -> Iterator[Filled]:
    """The operands with their slots, as `misfit` takes them."""
    lengths = form.lengths(modifiers) if form.lengths is not None else {}
    for slot in variant:
        for place, name in enumerate(slot.names):
            if slot.shape == "address":
                yield Filled("part" if place else "address", None, bound[name])
            else:
                kind, count = form.type_of(name, modifiers), lengths.get(name)
                yield Filled(slot.shape, kind, bound[name], count, form.constants(name))


def _results(variant: tuple[Slot, ...], sources: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the results: what comes before the first operand that the function takes alone, or an address."""
    names: list[str] = []
    for slot in variant:
        if slot.updated:
            names += slot.names
            continue
        if slot.shape == "address" or slot.names[0] in sources:
            break
        names += slot.names
    return tuple(names)


def _bind(variant: tuple[Slot, ...], operands: tuple[Operand, ...]) -> dict[str, Operand] | None:
    """The operand for each name, or None when the operands do not have the variant's shape."""
    if len(variant) != len(operands):
        return None
    bound: dict[str, Operand] = {}
    for slot, operand in zip(variant, operands, strict=True):
        if slot.shape == "address":
            if not isinstance(operand, Address) or len(operand.parts) != len(slot.names):
                return None
            bound.update(zip(slot.names, operand.parts, strict=True))
        elif slot.shape == "pair":
            if not isinstance(operand, Pair):
                return None
            bound.update(zip(slot.names, (operand.first, operand.second), strict=True))
        elif isinstance(operand, Address | Pair) or (slot.shape == "vector") != isinstance(operand, Vector):
            return None
        else:
            bound[slot.names[0]] = operand
    return bound


def nearest(opcode: str) -> str:
    """The syntax of the form whose opcode is most like `opcode`."""
    candidates = {form.syntax.partition(" ")[0]: form.syntax for form in forms()}
    base = opcode.partition(".")[0]
    same = {head: s for head, s in candidates.items() if re.split(r"[.{]", head, maxsplit=1)[0] == base}
    pool = same or candidates
    found = difflib.get_close_matches(opcode, list(pool), n=1, cutoff=0.0)
    return pool[found[0]] if found else "none: the table is empty"


def forms() -> list[Form]:
    """All forms, in the order of the chapters."""
    return [form for group in _FORMS.values() for form in group]
