"""Registers that only carry a packed vector from `mov d, {a, b}` to `mov {a, b}, d` become one register an element.

Compilers move accumulators through such registers by the dozen; packing and unpacking them would cost more than the
arithmetic between.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from ptxemu.isa.engine import Decoded, Form
from ptxemu.isa.move import pack_bits, unpack
from ptxemu.isa.operands import registers_in
from ptxemu.text.module import Label, Operand, Register, Vector

__all__ = ["split_pairs"]

# What packing and unpacking become: each result is the operand in its place.
_COPY = Form(
    "mov",
    "copy",
    lambda: None,
    re.compile("mov"),
    ((),),
    (),
    (),
    MappingProxyType({}),
    MappingProxyType({}),
    False,
    None,
)


def split_pairs(code: Sequence[Decoded | Label], widths: dict[str, int]) -> list[Decoded | Label]:
    """The code with such registers split; adds the new registers to `widths`."""
    counts = _split_counts(code)
    parts: dict[str, tuple[Operand, ...]] = {}
    for name, count in counts.items():
        parts[name] = tuple(Register(f"{name}.{i}") for i in range(count))
        widths.update(dict.fromkeys((f"{name}.{i}" for i in range(count)), widths[name] // count))
    return [_rewritten(item, parts) if isinstance(item, Decoded) else item for item in code]


def _split_counts(code: Sequence[Decoded | Label]) -> dict[str, int]:
    """The registers to split, and into how many elements."""
    counts: dict[str, int] = {}
    ruled_out: set[str] = set()
    for found in code:
        if isinstance(found, Label):
            continue
        carried = _carried(found)
        if carried is not None and counts.setdefault(carried, found.parts) != found.parts:
            ruled_out.add(carried)
        for operand in (*found.results, *found.instruction.operands, found.instruction.guard):
            ruled_out |= {r.name for r in registers_in(operand) if r.name != carried}
    return {name: count for name, count in counts.items() if name not in ruled_out}


def _carried(found: Decoded) -> str | None:
    """The register that an unguarded pack writes or an unguarded unpack reads."""
    if found.instruction.guard is not None:
        return None
    operand = {pack_bits: found.results, unpack: found.sources}.get(found.form.function, (None,))[0]
    return operand.name if isinstance(operand, Register) else None


def _rewritten(found: Decoded, parts: dict[str, tuple[Operand, ...]]) -> Decoded:
    elements = parts.get(_carried(found) or "")
    if elements is None:
        return found
    vector = found.results[0] if found.form.function is unpack else found.sources[0]
    assert isinstance(vector, Vector)
    to, source = (vector.items, elements) if found.form.function is unpack else (elements, vector.items)
    return replace(found, form=_COPY, sources=tuple(source), results=tuple(to), result_names=("d",) * len(to))
