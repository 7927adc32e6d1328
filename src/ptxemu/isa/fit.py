"""Whether an instruction's operands are what the slots of a form take: kinds, widths and lengths of vectors.

After the manual's 'Operand Size Exceeding Instruction-Type Size': a register is as wide as its type says, whatever it
was declared to hold; those of ld, st and cvt may be wider.  Constants have to fit the type, signed or unsigned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ptxemu.isa.types import bits_of
from ptxemu.text.module import Immediate, Label, Operand, Register, Symbol, Vector

__all__ = ["CONSTANT", "Filled", "misfit"]

CONSTANT = ("imm", "natural")  # what is no register
_WIDER = re.compile(r"(ld|ldu|st|cvt)\..*")  # instructions whose registers may be wider than the type
_COUNT = re.compile(r"\.(?:v|m8n8\.x)(\d+)\b")  # the elements that an opcode says its vector has
_INTEGER = re.compile(r"[bus]\d+")
_FLOATS = ("f16", "f32", "f64", "b16", "b32", "b64")  # what a float constant may be for


@dataclass(frozen=True)
class Filled:
    """A slot of a form and the operand in it.

    shape: "plain", "address", "pair", "vector", or "part": of an address, but its first.
    kind: the PTX type, where the form gives one ("imm": a constant, "natural": one that is not negative).
    count: its elements, where the form says that.  constants: those allowed, of the operand or of each element.
    """

    shape: str
    kind: str | None
    operand: Operand
    count: int | None = None
    constants: tuple[tuple[int, ...], ...] = ()

    def reason(self) -> str | None:
        """Why a constant is not among those allowed."""
        items = self.operand.items if isinstance(self.operand, Vector) else (self.operand,)
        for item, allowed in zip(items, self.constants, strict=False):
            if isinstance(item, Immediate) and item.value not in allowed:
                return f"the constant {item.value} where one of {', '.join(map(str, allowed))} is expected"
        return None


def misfit(
    opcode: str,
    slots: Iterable[Filled],
    has_vec: bool,
    widths: Mapping[str, int],
) -> str | None:
    """Why the operands do not fit, or None.

    has_vec: the form has a `{.vec}`, so that without one a vector has one element.  widths: bits of each register.
    """
    wider = _WIDER.fullmatch(opcode) is not None
    for slot in slots:
        operand = slot.operand
        if slot.shape == "address":
            reason = _address(operand, widths)
        elif slot.shape == "vector" and isinstance(operand, Vector):
            reason = _vector(opcode, slot.kind, operand, slot.count or _count(opcode, has_vec), wider, widths)
        else:
            reason = _scalar(slot.kind, operand, wider, widths)
        if reason := reason or slot.reason():
            return reason
    return None


def _address(operand: Operand, widths: Mapping[str, int]) -> str | None:
    if isinstance(operand, Register) and widths[operand.name] not in (32, 64):
        return f"{_described(operand, widths)}, is no address, which has 32 or 64 bits"
    return None


def _count(opcode: str, has_vec: bool) -> int | None:
    """The elements that an opcode says its vector has."""
    found = _COUNT.search(opcode)
    return int(found[1]) if found else 1 if has_vec else None


def _vector(
    opcode: str, kind: str | None, operand: Vector, count: int | None, wider: bool, widths: Mapping[str, int]
) -> str | None:
    if count is not None and len(operand.items) != count:
        return f"a vector of {len(operand.items)} where one of {count} is expected"
    if opcode.startswith("mov."):
        bits, rest = divmod(bits_of(kind or "b128"), len(operand.items))
        if rest or bits not in (8, 16, 32, 64):
            return f"{len(operand.items)} elements do not make up {opcode.partition('.')[2]}"
        kind = f"b{bits}"
    reasons = (_scalar(kind, item, wider, widths) for item in operand.items)
    return next((reason for reason in reasons if reason is not None), None)


def _scalar(kind: str | None, operand: Operand, wider: bool, widths: Mapping[str, int]) -> str | None:
    """kind None: any data that is no predicate."""
    if kind in CONSTANT:
        if not isinstance(operand, Immediate) or operand.float_bits:
            return "an operand that is no constant"
        return f"the constant {operand.value} is negative" if kind == "natural" and operand.value < 0 else None
    if isinstance(operand, Register):
        return _register(kind, operand, wider, widths)
    if isinstance(operand, Immediate) and kind is not None:
        return _constant(kind, operand)
    if isinstance(operand, Vector):
        return next((r for r in (_scalar(kind, x, wider, widths) for x in operand.items) if r is not None), None)
    if kind == "pred" and isinstance(operand, Symbol | Label):
        return f"`{operand.name}` is no predicate"
    return None


def _register(kind: str | None, operand: Register, wider: bool, widths: Mapping[str, int]) -> str | None:
    width = widths[operand.name]
    if operand.offset:
        return f"`{operand.name}` plus a constant outside an address"
    if kind == "pred":
        return None if width == 1 else f"{_described(operand, widths)}, is no predicate"
    if width == 1:
        return f"{_described(operand, widths)}, where {f'.{kind}' if kind else 'data'} is expected"
    if operand.negated:
        return f"`!{operand.name}`, where data is expected"
    if kind is None or width == bits_of(kind) or (wider and width > bits_of(kind)):
        return None
    return f"{_described(operand, widths)}, where .{kind} is expected"


def _constant(kind: str, operand: Immediate) -> str | None:
    if operand.float_bits:
        return None if kind in _FLOATS else f"a float constant where .{kind} is expected"
    if not _INTEGER.fullmatch(kind):
        return None
    bits = bits_of(kind)
    if -(1 << bits - 1) <= operand.value < 1 << bits:
        return None
    return f"the constant {operand.value} does not fit .{kind}"


def _described(register: Register, widths: Mapping[str, int]) -> str:
    width = widths[register.name]
    return f"`{register.name}`, a {'predicate' if width == 1 else f'register of {width} bits'}"
