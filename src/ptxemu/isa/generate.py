"""A kernel to Python: one function a basic block, composed of the table's functions.

In a block's function registers are locals: read from the warp's list where the block needs what was there before,
written back where a later block needs what it leaves.  Lane-wise instructions on uniform values call a function of
ints, others one of arrays.  Each line of the generated text knows its PTX line.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from typing import Any

from ptxemu.errors import ParseError
from ptxemu.isa.batches import batch, pure_runs, run_batch, run_matrix
from ptxemu.isa.blocks import Jump, Plan, plan
from ptxemu.isa.engine import Decoded
from ptxemu.isa.fit import CONSTANT
from ptxemu.isa.flight import InFlight
from ptxemu.isa.independent import independent
from ptxemu.isa.move import mov
from ptxemu.isa.names import short
from ptxemu.isa.operands import each_lane, registers_in
from ptxemu.isa.refusals import check
from ptxemu.isa.special import special
from ptxemu.isa.types import bits_of, compose, constant, is_integral, is_signed, scalar_text, widen
from ptxemu.isa.undefined import Undefined
from ptxemu.machine.chip import Chip
from ptxemu.machine.lanes import FULL, WORD, merge
from ptxemu.machine.memory import SHARED_BASE
from ptxemu.machine.program import Block, Program
from ptxemu.text.inline import inlined
from ptxemu.text.module import (
    Function,
    Immediate,
    Instruction,
    Module,
    Operand,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)

__all__ = ["generate"]

_serial = itertools.count()


def generate(module: Module, kernel: str, chip: Chip | None = None) -> Program:
    """Decodes the kernel and makes its program; for a chip, or for all at once.

    Raises UnknownInstruction for what the table does not hold, or the chip or the module's target does not have,
    ParseError for a label or symbol that is not there.
    """
    function = inlined(module, module.functions[kernel])
    if chip is not None:
        for item in function.body:
            if isinstance(item, Instruction):
                check(item, chip, module.target)
    return _Generator(module, function).program()


def _align(offset: int, align: int) -> int:
    return (offset + align - 1) // align * align


class _Generator:
    def __init__(self, module: Module, function: Function) -> None:
        self.module = module
        self.function = function
        registers = dict(function.registers)
        self.plans = plan(function, registers)
        self.names = list(registers)
        self.widths = list(registers.values())
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.undefined = Undefined(self.plans[0].live_in, self.numbers, self.predicate)
        self.flight = InFlight(self.plans, self.numbers)
        self.filename = f"<ptx {function.name} {next(_serial)}>"
        self.text: list[str] = []
        self.lines: list[int] = []  # the PTX line of each line of `text`
        self.line = 0
        self.scope: dict[str, Any] = {
            "merge": merge,
            "widen": widen,
            "add_offset": _add_offset,
            "FULL": FULL,
            **self.flight.scope,
        }
        self.bound: dict[Any, str] = {}  # names in `scope` of what is there already
        self.offsets: dict[str, int] = {}
        self.symbols: dict[str, str] = {}  # the expression for the address of each symbol
        self.parameter_size = self._place(function.parameters, "w.grid.parameters.base")
        static = [v for v in (*module.variables, *function.variables) if v.space == "shared"]
        self.shared_size = self._place([v for v in static if v.size], "w.cta.region.base")
        dynamic = [v for v in static if not v.size]
        self.dynamic_align = max((v.align for v in dynamic), default=16)
        start = _align(SHARED_BASE + self.shared_size, self.dynamic_align) - SHARED_BASE
        for variable in dynamic:
            self.symbols[variable.name] = f"w.cta.region.base + {start}"
        self.local_size = self._place([v for v in function.variables if v.space == "local"], "0")
        for variable in module.variables:
            if variable.space in ("global", "const"):
                self.symbols[variable.name] = f"w.grid.globals[{variable.name!r}].base"

    def _place(self, variables: list[Variable], base: str) -> int:
        """Lays variables out one after the other; returns the bytes they take."""
        offset = 0
        for variable in variables:
            # Shared memory starts at an odd multiple of 1 KB, so larger alignments count from the window's start.
            skew = SHARED_BASE if variable.space == "shared" else 0
            offset = _align(offset + skew, variable.align) - skew
            self.offsets[variable.name] = offset
            self.symbols[variable.name] = f"{base} + {offset}"
            offset += variable.size
        return offset

    def program(self) -> Program:
        plans = self.plans
        blocks = [_block(p) for p in plans]
        for p in plans:
            self.scope[f"B{p.index}"] = blocks[p.index]
            self.block(p)
        exec(compile("\n".join(self.text), self.filename, "exec"), self.scope)
        for block in blocks:
            block.run = self.scope[f"block_{block.index}"]
        function = self.function
        return Program(
            name=function.name,
            target=self.module.target,
            filename=self.filename,
            blocks=blocks,
            widths=self.widths,
            parameters=function.parameters,
            offsets={v.name: self.offsets[v.name] for v in function.parameters},
            parameter_size=self.parameter_size,
            variables=[v for v in self.module.variables if v.space in ("global", "const")],
            shared_size=self.shared_size,
            dynamic_align=self.dynamic_align,
            local_size=self.local_size,
            directives=function.directives,
            independent=independent(function),
            generated_lines=self.lines,
            lines=self.module.lines,
            locations=function.locations,
        )

    # Text

    def emit(self, text: str) -> None:
        self.text.append(text)
        self.lines.append(self.line)

    def emit_all(self, lines: list[str]) -> None:
        for line in lines:
            self.emit(f"    {line}")

    def bind(self, key: Any, prefix: str, make: Callable[[], Any]) -> str:
        """A name in the generated code's scope for an object, the same for the same key."""
        name = self.bound.get(key)
        if name is None:
            name = f"{prefix}{len(self.bound)}"
            self.bound[key] = name
            self.scope[name] = make()
        return name

    def block(self, p: Plan) -> None:
        self.line = p.body[0].instruction.line if p.body else p.jump.line if p.jump else 0
        self.emit(f"def block_{p.index}(w, R, m):")
        used = {r.name for operand in p.operands() for r in registers_in(operand)}
        for index in sorted(self.numbers[name] for name in used):
            if p.live_in >> index & 1:
                self.emit(f"    r{index} = R[{index}]")
        if p.alone is not None:
            return self.blocking(p, p.alone)
        if p.body and p.body[0].converge is not None:
            self.line = p.body[0].instruction.line
            self.converge(p.body[0], p.index)
        loads: dict[int, set[str]] = {}  # the registers that each tcgen05.ld has still to give, by its line
        for run in pure_runs(p.body):
            for group in batch(run, self.batch_key):
                self.line = group[0].instruction.line
                self.emit_all(self.undefined.reads(group))
                self.emit_all(self.flight.before(group))
                if group[0].form.kind == "matrix":
                    self.matrices(group)
                elif len(group) > 1:
                    self.batched(group)
                elif group[0].form.kind == "copy":
                    self.copy(group[0])
                else:
                    self.instruction(group[0])
                self.emit_all(self.undefined.writes(group))
                self.emit_all(self.flight.after(group))
                self.loaded(group, loads)
        if p.jump is not None:
            self.line = p.jump.line
            self.emit_all(self.undefined.guard(p.jump.guard))
        self.flush(p)
        if p.jump is None:
            self.emit(f"    return B{p.index + 1}")
        else:
            self.jump(p, p.jump)

    def loaded(self, group: list[Decoded], loads: dict[int, set[str]]) -> None:
        """Tells the warp when a tcgen05.ld's registers have all been used: that load is complete."""
        touched = {r.name for found in group for o in (*found.sources, *found.results) for r in registers_in(o)}
        for line in [line for line, left in loads.items() if left & touched]:
            loads[line] -= touched
            if not loads[line]:
                del loads[line]
                self.emit(f"    w.loaded({line})")
        for found in group:
            if found.form.opcode == "tcgen05" and ".ld." in found.instruction.opcode:
                loads[found.instruction.line] = {r.name for o in found.results for r in registers_in(o)}

    def flush(self, p: Plan) -> None:
        """Writes back what later blocks read."""
        written = {r.name for found in p.body for operand in found.results for r in registers_in(operand)}
        for name in sorted(written, key=self.numbers.__getitem__):
            index = self.numbers[name]
            if p.live_out >> index & 1:
                self.emit(f"    R[{index}] = r{index}")

    def jump(self, p: Plan, jump: Jump) -> None:
        target = f"B{jump.target}" if jump.kind == "branch" else "None"
        if jump.kind == "indexed":
            table = ", ".join(f"B{t}" for t in jump.targets)
            self.emit(f"    return w.branch_indexed(R, m, {self.value(jump.index, 32)}, ({table},))")
        elif jump.guard is None:
            self.emit(f"    return {target if jump.kind == 'branch' else 'w.exit(m)'}")
        else:
            self.emit(f"    q = {self.predicate(jump.guard)} & m")
            if jump.kind == "branch":
                self.emit(f"    if q == m: return {target}")
                self.emit(f"    if not q: return B{p.index + 1}")
                self.emit_all(["w.divided(m & ~q)"] if jump.whole else [])
                self.emit(f"    return w.split(R, m, q, {target}, B{p.index + 1})")
            else:
                self.emit(f"    if not q: return B{p.index + 1}")
                self.emit("    if q == m: return w.exit(m)")
                self.emit(f"    return w.exit_some(q, B{p.index + 1})")

    # Operands

    def predicate(self, register: Register) -> str:
        name = f"r{self.numbers[register.name]}"
        return f"~{name}" if register.negated else name

    def value(self, operand: Operand | None, bits: int | None = None) -> str:
        """The expression for an operand's value; `bits` is the width that constants are for (None: as written)."""
        if operand is None:
            return "None"
        if isinstance(operand, Register):
            return self.register(operand)
        if isinstance(operand, Immediate):
            if bits is None:
                return repr(operand.value)
            return repr(constant(operand.value, operand.float_bits, bits))
        if isinstance(operand, Special):
            name = self.bind(("special", operand.name), "special", lambda: special(operand.name, self.line))
            return f"{name}(w)"
        if isinstance(operand, Symbol):
            address = self.symbols.get(operand.name)
            if address is None:
                raise ParseError(f"line {self.line}: the address of `{operand.name}` is not known")
            return f"({address} + {operand.offset})" if operand.offset else f"({address})"
        if isinstance(operand, Vector):
            each = [self.value(item, bits) for item in operand.items]
            return f"({', '.join(each)}{',' if len(each) == 1 else ''})"
        raise ParseError(f"line {self.line}: an operand of this kind is not expected here")

    def register(self, register: Register) -> str:
        index = self.numbers[register.name]
        if register.negated:
            return f"(r{index} ^ {FULL})"
        if not register.offset:
            return f"r{index}"
        if register.offset > 0:
            return f"(r{index} + {register.offset})"
        return f"add_offset(r{index}, {register.offset}, {self.widths[index]})"

    def width(self, operand: Operand | None, otherwise: int) -> int:
        """The bits of the register that an operand is, or of the constant in its place."""
        return self.widths[self.numbers[operand.name]] if isinstance(operand, Register) else otherwise

    # Instructions

    def instruction(self, found: Decoded) -> None:
        indent = "    "
        guard = found.instruction.guard
        lane_wise = self.lane_wise(found) if found.form.kind == "lanes" else ""
        if guard is not None and not found.converge:
            self.emit(f"    q = {self.predicate(guard)} & m")
            self.emit("    if q:")
            indent = "        "
        else:
            guard = None
        mask = "m" if guard is None else "q"
        self.assign(found, lane_wise or self.call(found, mask), indent, guarded=guard is not None)

    def converge(self, found: Decoded, block: int) -> None:
        """Code that waits for the lanes that have to run the instruction together."""
        if found.converge == "aligned":
            self.emit(f"    if w.alive != m: return w.hold(B{block}, w.alive)")
        else:
            operand = found.sources[found.form.sources.index(str(found.converge))]
            if isinstance(operand, Immediate) and operand.value & FULL == FULL:
                self.emit(f"    if w.alive & ~m: return w.hold(B{block}, w.alive)")
            else:
                self.emit(f"    n = w.members({self.value(operand, 32)}, m)")
                self.emit(f"    if n & w.alive & ~m: return w.hold(B{block}, n)")

    def composed(self, found: Decoded) -> tuple[str, str, list[str], tuple[tuple[str, int], ...], str]:
        """A lane-wise instruction's scalar and vector function, its operands' values, their types and its result's."""
        result = found.results[0]
        operands = [o for o in found.sources if o is not None]  # optional ones are the last
        types = [(found.type_of(name) or "b32") for name in found.form.sources[: len(operands)]]
        widths = [self.width(o, bits_of(t)) for o, t in zip(operands, types, strict=True)]
        to_type = found.type_of(found.result_names[0]) or "b32"
        to = (to_type, self.width(result, bits_of(to_type)))
        sources = tuple(zip(types, widths, strict=True))
        ints = found.form.takes_ints
        key = (found.form.function, tuple(found.modifiers[o] for o in found.form.options), sources, to)
        scalar = self.bind((key, "S"), "S", lambda: compose(found.function, sources, to, ints)[0])
        vector = self.bind((key, "V"), "V", lambda: compose(found.function, sources, to, ints)[1])
        values = [self.value(o, w) for o, (_, w) in zip(operands, sources, strict=True)]
        return scalar, vector, values, sources, to_type

    def batch_key(self, found: Decoded) -> Hashable:
        """What instructions have in common that may run as one; None: not this one."""
        if found.form.kind == "matrix":
            return found.form.function, tuple(found.modifiers[name] for name in found.form.options)
        if found.form.kind != "lanes" or found.form.function is mov or found.type_of(found.result_names[0]) == "pred":
            return None
        if not all(isinstance(operand, Register) for operand in found.sources):
            return None
        _, vector, _, sources, _ = self.composed(found)
        return None if any(name == "pred" for name, _ in sources) else vector

    def batched(self, group: list[Decoded]) -> None:
        """Equal instructions as one."""
        each = [self.composed(found) for found in group]
        scalar, vector = each[0][:2]
        name = self.bind(("batch", vector), "batch", lambda: run_batch(self.scope[scalar], self.scope[vector]))
        operands = zip(*(values for _, _, values, _, _ in each), strict=True)
        results = ", ".join(f"r{self.numbers[r.name]}" for found in group for r in registers_in(found.results[0]))
        columns = ", ".join("(" + ", ".join(column) + ")" for column in operands)
        self.emit(f"    {results} = {name}({columns})")

    def matrices(self, group: list[Decoded]) -> None:
        """Equal instructions on the registers of the whole warp as one."""
        name = self.bind(("matrix", self.batch_key(group[0])), "matrix", lambda: run_matrix(group[0].function))
        stacks = []
        for operands in zip(*(found.sources for found in group), strict=True):
            each = (self.value(o if isinstance(o, Vector) else Vector((o,)), 32) for o in operands if o is not None)
            stacks.append(f"({', '.join(each)},)")
        results = []
        for found in group:
            items = found.results[0].items if isinstance(found.results[0], Vector) else ()
            results.append(
                f"[{', '.join(f'r{self.numbers[r.name]}' if isinstance(r, Register) else '_' for r in items)}]"
            )
        self.emit(f"    {', '.join(results)}, = {name}(w, {', '.join(stacks)})")

    def copy(self, found: Decoded) -> None:
        """Registers that take the values of others."""
        pairs = [(t, s) for t, s in zip(found.results, found.sources, strict=True) if isinstance(t, Register)]
        if pairs:
            targets = ", ".join(self.register(to) for to, _ in pairs)
            self.emit(f"    {targets} = {', '.join(self.value(s, self.width(to, 32)) for to, s in pairs)}")

    def lane_wise(self, found: Decoded) -> str:
        """The expression of a lane-wise instruction: its scalar function when all operands are uniform."""
        scalar, vector, values, sources, to_type = self.composed(found)
        if found.form.function is mov and self.width(found.results[0], 0) == sources[0][1]:
            return values[0]
        values = [self.local(v) for v in values]
        tests = []
        for value, (name, _), operand in zip(values, sources, found.sources, strict=False):
            if isinstance(operand, Immediate):
                continue
            if name != "pred":
                tests.append(f"{value}.__class__ is int")
            elif to_type != "pred" or any(n != "pred" for n, _ in sources):
                tests.append(f"({value} == FULL or not {value})")
        arguments = ", ".join(values)
        to = (to_type, self.width(found.results[0], bits_of(to_type)))
        text = f"{scalar}({arguments})"
        if is_integral((*sources, to)) and any(name != "pred" for name, _ in (*sources, to)):
            text = f"({scalar_text(self.bound_function(found), values, sources, to)})"  # spares a call
        if not tests:
            return text
        return f"{text} if {' and '.join(dict.fromkeys(tests))} else {vector}({arguments})"

    def local(self, value: str) -> str:
        """A name for an expression, so that it is computed once."""
        if value.isidentifier() or value.isdigit():
            return value
        name = f"v{len(self.text)}"
        self.emit(f"    {name} = {value}")
        return name

    def call(self, found: Decoded, mask: str) -> str:
        """The expression of an instruction that needs the warp."""
        function = self.bound_function(found)
        values = ["w", mask]
        for name, operand in zip(found.form.sources, found.sources, strict=True):
            values.append(self.value(operand, _constant_bits(found, name, operand)))
        return f"{function}({', '.join(values)})"

    def bound_function(self, found: Decoded) -> str:
        options = tuple(found.modifiers[name] for name in found.form.options if name != "parts")
        key = (found.form.function, options, found.parts if "parts" in found.form.options else 0)
        make = (lambda: each_lane(found.function)) if found.form.kind == "thread" else (lambda: found.function)
        return self.bind(key, "F", make)

    def assign(self, found: Decoded, expression: str, indent: str, guarded: bool) -> None:
        """Statements that give an instruction's results to its registers."""
        if not found.results:
            return self.emit(f"{indent}{expression}")
        targets: list[tuple[str, Operand | None]] = []  # (operand name, register) of each value
        shape = []
        for name, operand in zip(found.result_names, found.results, strict=True):
            items = operand.items if isinstance(operand, Vector) else (operand,)
            places = [f"t{len(targets) + i}" for i in range(len(items))]
            shape.append(f"[{', '.join(places)}]" if isinstance(operand, Vector) else places[0])
            targets += [(name, item) for item in items]
        self.emit(f"{indent}{', '.join(shape)} = {expression}")
        for place, (name, operand) in enumerate(targets):
            if not isinstance(operand, Register):
                if not isinstance(operand, Sink):
                    raise ParseError(f"line {self.line}: a result has to be a register: {found.instruction.text}")
                continue
            index = self.numbers[operand.name]
            value = f"t{place}" if found.form.kind == "lanes" else self.fitted(found, name, f"t{place}", index)
            if guarded:
                value = f"{value} if q == m else merge(q, {value}, r{index}, {self.widths[index]})"
            self.emit(f"{indent}r{index} = {value}")

    def fitted(self, found: Decoded, name: str, value: str, index: int) -> str:
        """`value`, widened when the register is wider than the result's type."""
        kind = found.type_of(name)
        width = self.widths[index]
        if kind is None or bits_of(kind) >= width or width not in WORD:
            return value
        return f"widen({value}, {bits_of(kind)}, {width}, {is_signed(kind)})"

    def blocking(self, p: Plan, found: Decoded) -> None:
        """A block for an instruction that may wait: `block_n` begins it, `finish_n` takes its result."""
        self.line = found.instruction.line
        if found.converge is not None:
            self.converge(found, p.index)
        self.emit_all(self.undefined.reads([found]))
        self.emit_all(self.flight.before([found]))
        self.emit(f"    return w.start({self.call(found, 'm')}, finish_{p.index}, B{p.index})")
        self.emit(f"def finish_{p.index}(w, R, m, result):")
        self.assign(found, "result", "    ", guarded=False)
        self.emit_all(self.undefined.writes([found]))
        self.emit_all(self.flight.after([found]))
        self.flush(p)
        self.emit(f"    return B{p.index + 1}")


def _block(p: Plan) -> Block:
    """A block without its function."""
    lines = [found.instruction.line for found in p.body]
    opcodes = [short(found.instruction.opcode) for found in p.body]
    if p.jump is not None:
        lines.append(p.jump.line)
        opcodes += ["bra"] if p.jump.kind != "exit" else []
    live, index, bits = [], 0, p.live_in
    while bits:
        skip = (bits & -bits).bit_length()
        index += skip
        live.append(index - 1)
        bits >>= skip
    return Block(p.index, tuple(lines), tuple(live), tuple(opcodes))


def _constant_bits(found: Decoded, name: str, operand: Operand | None) -> int | None:
    """The width that an operand's constants are for; None where the form does not say: as written."""
    items = operand.items if isinstance(operand, Vector) else (operand,)
    if name not in found.form.operand_types and not any(isinstance(i, Immediate) and i.float_bits for i in items):
        return None
    kind = found.type_of(name) or "b32"
    if kind in CONSTANT:
        return None
    bits = bits_of(kind)
    return bits // len(items) if found.form.opcode == "mov" else bits


def _add_offset(value: Any, offset: int, width: int) -> Any:
    """A register plus a negative constant."""
    if type(value) is int:
        return value + offset & (1 << width) - 1
    return value + WORD[width](offset & (1 << width) - 1)
