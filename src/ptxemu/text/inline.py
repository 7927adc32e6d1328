"""Calls of device functions, by putting the function's body in place of the call.

A parameter or return variable of the callee becomes the caller's `.param` variable that the call passes, so nothing is
copied; such variables live in local memory.  Registers, labels and variables of the body get names of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ptxemu.errors import ParseError
from ptxemu.text.module import (
    Address,
    Function,
    Instruction,
    Label,
    Module,
    Operand,
    Pair,
    Register,
    Symbol,
    Variable,
    Vector,
)

__all__ = ["inlined"]

_PARAM = re.compile(r"\.param(::func)?")


def inlined(module: Module, function: Function) -> Function:
    """The function without calls; itself when it has none.  Raises ParseError for a recursive call."""
    if not any(isinstance(item, Instruction) and _called(module, item) for item in function.body):
        return function
    work = _Inliner(module, dict(function.registers), list(function.variables), dict(function.targets))
    body = work.body(function, {}, "", (function.name,))
    # The caller's own variables for arguments are local memory too.
    variables = [replace(v, space="local") if v.space == "param" else v for v in work.variables]
    return replace(function, body=body, registers=work.registers, variables=variables, targets=work.targets)


def _called(module: Module, item: Instruction) -> Function | None:
    """The function that an instruction calls, if the module has its body."""
    if item.opcode.partition(".")[0] != "call":
        return None
    names = [o.name for o in item.operands if isinstance(o, Symbol) and o.name in module.functions]
    found = module.functions[names[0]] if names else None
    return None if found is None or found.is_declaration else found


@dataclass
class _Inliner:
    module: Module
    registers: dict[str, int]
    variables: list[Variable]
    targets: dict[str, tuple[str, ...]]
    calls: int = 0
    local: set[str] = field(default_factory=set)  # variables of `.param` space that are not the kernel's parameters

    def body(
        self, function: Function, names: Mapping[str, str], mark: str, stack: tuple[str, ...]
    ) -> list[Instruction | Label]:
        """The function's body with `mark` after its names and with its calls replaced.

        names: the caller's variables by those of the callee's parameters.  stack: the functions that are being called.
        """
        known = {**names, **{v.name: v.name + mark for v in function.variables if v.space in ("param", "local")}}
        self.local |= set(names.values()) | {v.name + mark for v in function.variables if v.space == "param"}
        out: list[Instruction | Label] = []
        for item in function.body:
            if isinstance(item, Label):
                out.append(Label(item.name + mark))
                continue
            moved = self.renamed(item, known, mark)
            callee = _called(self.module, item)
            if callee is not None:
                out += self.call(callee, moved, stack)
            elif mark and item.opcode.partition(".")[0] == "ret":
                out.append(replace(moved, opcode="bra", operands=(Label(f"end{mark}"),)))
            else:
                out.append(moved)
        return out

    def call(self, callee: Function, item: Instruction, stack: tuple[str, ...]) -> list[Instruction | Label]:
        if callee.name in stack:
            raise ParseError(f"line {item.line}: {callee.name} calls itself, which is not supported: {item.text}")
        self.calls += 1
        mark = f"@{self.calls}"
        passed = [o for o in item.operands if isinstance(o, Vector)]
        formal = callee.returns + callee.parameters
        actual = [o for vector in passed for o in vector.items]
        if len(formal) != len(actual) or not all(isinstance(o, Symbol) for o in actual):
            raise ParseError(f"line {item.line}: {callee.name} takes {len(formal)} .param variables: {item.text}")
        names = {v.name: o.name for v, o in zip(formal, actual, strict=True) if isinstance(o, Symbol)}
        self.registers |= {name + mark: bits for name, bits in callee.registers.items()}
        self.variables += [
            replace(v, name=v.name + mark) if v.space in ("param", "local") else v
            for v in callee.variables
            if v.space in ("param", "local") or v not in self.variables
        ]
        self.targets |= {n + mark: tuple(t + mark for t in ts) for n, ts in callee.targets.items()}
        body = self.body(callee, names, mark, (*stack, callee.name))
        end = Label(f"end{mark}")
        if item.guard is None:
            return [*body, end]
        skip = replace(item.guard, negated=not item.guard.negated)
        return [replace(item, opcode="bra", operands=(end,), guard=skip), *body, end]

    def renamed(self, item: Instruction, known: Mapping[str, str], mark: str) -> Instruction:
        operands = tuple(self.operand(o, known, mark) for o in item.operands)
        guard = None if item.guard is None else replace(item.guard, name=item.guard.name + mark)
        opcode = item.opcode
        if any(
            isinstance(part, Symbol) and part.name in self.local
            for o in operands
            if isinstance(o, Address)
            for part in o.parts
        ):
            opcode = _PARAM.sub(".local", opcode, count=1)
        return replace(item, opcode=opcode, operands=operands, guard=guard)

    def operand(self, operand: Operand, known: Mapping[str, str], mark: str) -> Operand:
        if isinstance(operand, Register | Label):
            return replace(operand, name=operand.name + mark)
        if isinstance(operand, Symbol):
            return replace(operand, name=known.get(operand.name, operand.name))
        if isinstance(operand, Vector):
            return Vector(tuple(self.operand(o, known, mark) for o in operand.items))
        if isinstance(operand, Address):
            return Address(tuple(self.operand(o, known, mark) for o in operand.parts))
        if isinstance(operand, Pair):
            return Pair(self.operand(operand.first, known, mark), self.operand(operand.second, known, mark))
        return operand
