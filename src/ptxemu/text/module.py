"""What the parser makes of PTX text: modules, functions, instructions and operands.

Names of registers and labels are unique within a function: the parser renames those that a nested scope declares.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = [
    "Address",
    "Function",
    "Immediate",
    "Instruction",
    "Label",
    "Module",
    "Operand",
    "Pair",
    "Register",
    "Sink",
    "Special",
    "Symbol",
    "Variable",
    "Vector",
]


@dataclass(frozen=True)
class Register:
    """A register; `offset` is the constant added to it inside an address, `negated` is the `!` of a predicate."""

    name: str
    offset: int = 0
    negated: bool = False


@dataclass(frozen=True)
class Special:
    """A special register such as `%tid.x`."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A constant.  float_bits 0: an integer, as written; 32 or 64: `value` is the bit pattern of that float."""

    value: int
    float_bits: int = 0

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Symbol:
    """The address of a variable, a parameter or a function, plus a constant."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Label:
    """A place in the code."""

    name: str


@dataclass(frozen=True)
class Vector:
    """`{a, b, ...}`"""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """`a|b`: two results."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Address:
    """`[a]` or `[a, b]`"""

    parts: tuple[Operand, ...]


@dataclass(frozen=True)
class Sink:
    """`_`: a result that nobody wants."""


Operand: TypeAlias = "Register | Special | Immediate | Symbol | Label | Vector | Pair | Address | Sink"


@dataclass(frozen=True)
class Instruction:
    """One instruction: its guard predicate if any, its opcode with all modifiers, and its operands."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    line: int
    text: str


@dataclass(frozen=True)
class Variable:
    """A declared variable or parameter: `size` bytes in `space` at `align`, 0 for one without a size (`[]`).

    external: `.extern` of a module variable that the module does not define.
    """

    name: str
    space: str
    size: int
    align: int
    data: bytes | None = None
    relocations: tuple[tuple[int, Symbol], ...] = ()
    external: bool = False


@dataclass
class Function:
    """An entry or a device function.

    body: instructions and labels in order.  registers: name to bits (1 for a predicate).
    directives: `.reqntid` and its like, each with its numbers.
    locations: PTX line to (source file, source line), from `.loc`: it holds from that line to the next entry.
    targets: the lists that `.branchtargets` names.
    """

    name: str
    is_entry: bool
    parameters: list[Variable]
    returns: list[Variable] = field(default_factory=list)
    body: list[Instruction | Label] = field(default_factory=list)
    registers: dict[str, int] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    locations: dict[int, tuple[str, int]] = field(default_factory=dict)
    targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    is_declaration: bool = False


@dataclass
class Module:
    """A PTX module.  `variables` are those outside functions."""

    version: tuple[int, int]
    target: str
    lines: list[str]
    functions: dict[str, Function] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)

    @property
    def entries(self) -> dict[str, Function]:
        return {name: f for name, f in self.functions.items() if f.is_entry}
