"""PTX text to a module, after the manual's chapters 'Syntax' and 'Directives'."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ptxemu.text.lexer import Token, as_float
from ptxemu.text.module import (
    Address,
    Function,
    Immediate,
    Instruction,
    Label,
    Module,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)
from ptxemu.text.reader import MAX_BYTES, Reader

__all__ = ["parse"]

_CARRY = "CC.CF"  # the carry flag as a register, under a name that PTX cannot give
_LINKAGE = {".visible", ".extern", ".weak", ".common", ".alias"}
_SPACES = {".global", ".const", ".shared", ".local", ".param"}
_SIZES = {"pred": 0, "f16x2": 4, "bf16x2": 4, "bf16": 2, "tf32": 4, "b128": 16} | {
    f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64)
}
_MAX_REGISTERS = 1 << 16  # of one `.reg name<n>`
_MAX_ALIGN = 1 << 16
_MAX_LOCAL = 512 << 10  # of a thread's local memory


def parse(text: str) -> Module:
    """Reads PTX.  Raises ParseError, naming the line, for text that is not PTX."""
    return _Parser(text).module()


class _Scope:
    """The names that one `{...}` of a function declares, and the names that they get in the function."""

    def __init__(self, outer: _Scope | None, serial: int, labels: Iterable[str]) -> None:
        self.outer = outer
        self.mark = f"#{serial}" if serial else ""  # for variables, whose names are those of the module
        self.depth: int = 0 if outer is None else outer.depth + 1
        self.suffix = self.mark if self.depth > 2 else ""  # the module, the parameters and the body come first
        self.registers: dict[str, str] = {}
        self.labels = {name: name + self.suffix for name in labels}
        self.variables: dict[str, str] = {}

    def find(self, table: str, name: str) -> str | None:
        scope: _Scope | None = self
        while scope is not None:
            found: str | None = getattr(scope, table).get(name)
            if found is not None:
                return found
            scope = scope.outer
        return None


class _Parser(Reader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.files: dict[int, str] = {}
        self.module_scope = _Scope(None, 0, ())
        self.scope = self.module_scope
        self.scopes = 0

    # Module level

    def module(self) -> Module:
        self.expect(".version")
        major, _, minor = self.next().text.partition(".")
        if not (major.isdigit() and minor.isdigit()):
            raise self.error(".version takes a number such as 9.0", self.tokens[self.position - 1])
        self.expect(".target")
        module = Module((int(major), int(minor)), self.word("a target such as sm_100a"), self.lines)
        while self.accept(","):
            self.next()
        while self.peek().kind != "end":
            self.module_item(module)
        return module

    def module_item(self, module: Module) -> None:
        linkage = []
        while self.peek().text in _LINKAGE:
            linkage.append(self.next().text)
        token = self.peek()
        if token.text in (".entry", ".func"):
            function = self.function(".extern" in linkage)
            known = module.functions.get(function.name)
            if known is None or known.is_declaration:
                module.functions[function.name] = function
            elif not function.is_declaration:
                raise self.error(f"{function.name} is defined twice", token)
        elif token.text in _SPACES:
            self.module_variables(module, ".extern" in linkage)
        elif token.text == ".address_size":
            self.next()
            if (size := self.integer()) != 64:
                raise self.error(f"addresses of {size} bits; 64 are supported", token)
        elif token.text == ".file":
            self.file()
        elif token.text == ".section":
            self.next()
            self.next()
            self.skip_braces()
        elif token.text == ".pragma":
            while self.next().text != ";":
                pass
        else:
            raise self.error("expected a directive or a function")

    def module_variables(self, module: Module, external: bool) -> None:
        """A declaration outside functions; the definition of a variable takes the place of an .extern one."""
        known = {v.name: v for v in module.variables}
        place = self.peek(1)
        outside = {name for name, v in known.items() if v.external}
        shadowed = {name: self.module_scope.variables.pop(name) for name in outside}
        for variable in self.variables():
            if variable.name not in outside:
                module.variables.append(replace(variable, external=external))
            elif variable.space != known[variable.name].space:
                raise self.error(f"{variable.name} is declared in .{known[variable.name].space} before", place)
            elif not external:
                module.variables[module.variables.index(known[variable.name])] = variable
        self.module_scope.variables = shadowed | self.module_scope.variables

    def file(self) -> None:
        self.next()
        index, rest = self.integer(0), self.rest_of_line()
        if rest:
            self.files[index] = rest[0].text.strip('"')

    def skip_braces(self) -> None:
        self.expect("{")
        depth = 1
        while depth:
            token = self.next()
            if token.kind == "end":
                raise self.error("expected `}`")
            depth += (token.text == "{") - (token.text == "}")

    def declare(self, token: Token, name: str = "") -> None:
        """A scope may declare a register or variable once."""
        name = name or token.text
        if name in self.scope.registers or name in self.scope.variables:
            raise self.error(f"{name} is declared twice in one scope", token)

    # Variables

    def variables(self) -> list[Variable]:
        """One declaration with its `;`."""
        found = [self.variable()]
        while self.accept(","):
            raise self.error("one variable a declaration is supported")
        self.expect(";")
        return found

    def variable(self) -> Variable:
        """`.space {.align n} {.ptr ...} .type name{[n]} {= ...}`"""
        space = self.next().text[1:]
        align = size = 0
        count = 1
        while self.peek().kind == "directive":
            kind = self.next().text[1:]
            if kind == "align":
                token = self.peek()
                align = self.integer(1, _MAX_ALIGN)
                if align & (align - 1):
                    raise self.error(f".align {align} is no power of two", token)
            elif kind == "attribute":
                self.expect("(")
                while self.next().text != ")":
                    pass
            elif kind in ("v2", "v4", "v8"):
                count = int(kind[1:])
            elif kind == "ptr":
                while self.peek().text in (".global", ".shared", ".local", ".const", ".generic", ".param", ".align"):
                    if self.next().text == ".align":
                        self.integer()
            elif kind in _SIZES:
                size = _SIZES[kind]
            else:
                raise self.error("expected a type", self.tokens[self.position - 1])
        if not size:
            raise self.error("expected a type")
        place = self.peek()
        name = self.word("a name")
        align = align or size * count
        size *= count
        element = size
        open_ended = False
        while self.accept("["):
            if self.accept("]"):
                open_ended = True
            else:
                size *= self.integer(0)
                self.expect("]")
        most = _MAX_LOCAL if space == "local" else MAX_BYTES
        if size > most:
            raise self.error(f"{name} has {size} bytes, allowed in .{space} are {most}", place)
        data, relocations = self.initializer(element) if self.accept("=") else (None, ())
        if data is not None:
            if open_ended:
                size, open_ended = len(data), False
            if len(data) > size:
                raise self.error(f"{name} has {size} bytes, its initializer {len(data)}", place)
            data = data.ljust(size, b"\0")
        unique = name + self.scope.mark
        self.declare(place)
        self.scope.variables[name] = unique
        return Variable(unique, space, 0 if open_ended else size, align, data, relocations)

    def initializer(self, element: int) -> tuple[bytes, tuple[tuple[int, Symbol], ...]]:
        """The bytes of `= value` or `= {...}`, and the places that hold addresses."""
        data, relocations, depth = bytearray(), [], 0
        while True:
            token = self.peek()
            if token.text == "{":
                depth += 1
                self.next()
            elif token.text in ("}", ","):
                depth -= token.text == "}"
                self.next()
            elif token.kind == "word":
                name = self.next().text
                if name == "generic":
                    self.expect("(")
                    name = self.next().text
                    self.expect(")")
                offset = self.integer() if self.accept("+") else 0
                relocations.append((len(data), Symbol(name, offset)))
                data += bytes(element)
            else:
                data += self.initial(element)
            if depth == 0:
                return bytes(data), tuple(relocations)

    def initial(self, element: int) -> bytes:
        """A number as a variable's element of that many bytes."""
        token = self.peek()
        negative = self.accept("-")
        value, float_bits = self.number()
        if float_bits:
            if element not in (2, 4, 8):
                raise self.error(f"a float for an element of {element} bytes", token)
            try:
                value = as_float(value, float_bits, element) ^ (negative << (8 * element - 1))
            except OverflowError:
                raise self.error(f"a float that does not fit {element} bytes", token) from None
        else:
            value = -value if negative else value
            if not -(1 << 8 * element - 1) <= value < 1 << 8 * element:
                raise self.error(f"{value} does not fit an element of {element} bytes", token)
        return (value & ((1 << 8 * element) - 1)).to_bytes(element, "little")

    # Functions

    def function(self, declared: bool) -> Function:
        is_entry = self.next().text == ".entry"
        self.scope = _Scope(self.module_scope, 0, ())
        returns = self.parameters() if self.at("(") else []
        name = self.word("a function name")
        function = Function(name, is_entry, self.parameters() if self.at("(") else [], returns)
        self.module_scope.variables[name] = name
        function.registers[_CARRY] = 1
        while self.peek().kind == "directive":
            directive = self.next().text
            numbers = []
            while self.peek().kind in ("number", "string"):
                if self.peek().kind == "number":
                    numbers.append(self.number()[0])
                else:
                    self.next()
                self.accept(",")
            function.directives[directive] = tuple(numbers)
            if directive == ".pragma":
                self.expect(";")
        if self.accept(";"):
            function.is_declaration = True
        elif declared:
            raise self.error("an .extern function has no body")
        else:
            self.block(function)
        self.scope = self.module_scope
        return function

    def parameters(self) -> list[Variable]:
        self.expect("(")
        found = []
        while not self.accept(")"):
            if self.at(".reg"):
                raise self.error("parameters in registers are not supported")
            found.append(self.variable())
            self.accept(",")
        return found

    def block(self, function: Function) -> None:
        """`{ ... }` of a function, with a scope of its own."""
        self.expect("{")
        self.scopes += 1
        self.scope = _Scope(self.scope, self.scopes, self.labels_ahead())
        with self.nested():
            while not self.accept("}"):
                self.statement(function)
        assert self.scope.outer is not None
        self.scope = self.scope.outer

    def labels_ahead(self) -> list[str]:
        """Labels that the scope which begins here declares, at its own depth."""
        found: dict[str, None] = {}
        depth, index = 1, self.position
        while depth and index < len(self.tokens):
            token = self.tokens[index]
            depth += (token.text == "{") - (token.text == "}")
            if token.text == ":" and depth == 1 and self.tokens[index - 1].kind == "word":
                label = self.tokens[index - 1]
                if label.text in found:
                    raise self.error(f"the label {label.text} is declared twice in one scope", label)
                found[label.text] = None
            index += 1
        return list(found)

    def statement(self, function: Function) -> None:
        token = self.peek()
        if token.text == "{":
            self.block(function)
        elif token.kind == "word" and self.peek(1).text == ":":
            self.position += 2
            if self.at(".branchtargets"):
                self.branch_targets(function, token.text)
            elif self.at(".callprototype"):
                raise self.error("indirect calls are not supported")
            else:
                function.body.append(Label(self.scope.labels[token.text]))
        elif token.kind == "directive":
            self.local_directive(function)
        elif token.kind == "word" or token.text == "@":
            function.body.append(self.instruction())
        elif not self.accept(";"):
            raise self.error("expected an instruction")

    def branch_targets(self, function: Function, name: str) -> None:
        """`label: .branchtargets a, b;` names the list that brx.idx takes."""
        self.next()
        targets = [self.operand()]
        while self.accept(","):
            targets.append(self.operand())
        self.expect(";")
        function.targets[self.scope.labels[name]] = tuple(t.name for t in targets if isinstance(t, Label))

    def local_directive(self, function: Function) -> None:
        token = self.peek()
        if token.text == ".reg":
            self.registers(function)
        elif token.text in _SPACES:
            function.variables += self.variables()
        elif token.text == ".loc":
            self.next()
            file, line = self.integer(0), self.integer(0)
            self.integer(0)  # the column
            self.rest_of_line()
            function.locations[token.line] = (self.files.get(file, f"file {file}"), line)
        elif token.text == ".file":
            self.file()
        elif token.text == ".pragma":
            while self.next().text != ";":
                pass
        else:
            raise self.error("a directive that is not supported")

    def registers(self, function: Function) -> None:
        """`.reg .type a, b<n>;`"""
        self.next()
        kind = self.next().text[1:]
        if kind in ("v2", "v4"):
            raise self.error("vector registers are not supported")
        if kind not in _SIZES:
            raise self.error("expected a type", self.tokens[self.position - 1])
        bits = 8 * _SIZES[kind] or 1
        while True:
            place = self.peek()
            name = self.word("a register")
            names = [name]
            if self.accept("<"):
                names = [f"{name}{i}" for i in range(self.integer(0, _MAX_REGISTERS))]
                self.expect(">")
            for each in names:
                self.declare(place, each)
                unique = each + self.scope.suffix
                self.scope.registers[each] = unique
                function.registers[unique] = bits
            if not self.accept(","):
                break
        self.expect(";")

    # Instructions

    def instruction(self) -> Instruction:
        start, first = self.position, self.peek()
        guard = None
        if self.accept("@"):
            negated = self.accept("!")
            predicate = self.operand()
            if not isinstance(predicate, Register):
                raise self.error("expected a predicate", first)
            guard = Register(predicate.name, 0, negated)
        opcode = self.word("an opcode")
        operands: list[Operand] = []
        while not self.accept(";"):
            if operands:
                self.expect(",")
            operands.append(self.operand())
        _carry(opcode, operands)
        text = (
            " ".join(t.text for t in self.tokens[start : self.position - 1]) if self.peek(-1).line != first.line else ""
        )
        line = self.tokens[start].line
        return Instruction(opcode, tuple(operands), guard, line, text or self.lines[line - 1].strip().rstrip(";"))

    def operand(self) -> Operand:
        token = self.peek()
        if self.accept("["):
            with self.nested():
                return Address(self.operands("]"))
        if self.accept("{"):
            with self.nested():
                return Vector(self.operands("}"))
        if self.accept("("):
            with self.nested():
                return Vector(self.operands(")"))
        if self.accept("!"):
            with self.nested():
                inner = self.operand()
            if not isinstance(inner, Register):
                raise self.error("expected a predicate", token)
            return Register(inner.name, 0, True)
        if token.text == "-" or token.kind == "number":
            return self.immediate()
        name = self.word("an operand")
        found = self.named(name)
        if self.accept("|"):
            with self.nested():
                return Pair(found, self.operand())
        if self.at("+") or self.at("-"):
            sign = -1 if self.next().text == "-" else 1
            offset = sign * self.integer()
            if isinstance(found, Register):
                return Register(found.name, offset)
            if isinstance(found, Symbol):
                return Symbol(found.name, offset)
            raise self.error("an offset is added to a register or a symbol", token)
        return found

    def operands(self, close: str) -> tuple[Operand, ...]:
        found: list[Operand] = []
        while not self.accept(close):
            if found:
                self.expect(",")
            found.append(self.operand())
        return tuple(found)

    def immediate(self) -> Immediate:
        negative = self.accept("-")
        value, float_bits = self.number()
        if negative:
            value = value ^ (1 << (float_bits - 1)) if float_bits else -value
        return Immediate(value, float_bits)

    def named(self, name: str) -> Operand:
        if name == "_":
            return Sink()
        if register := self.scope.find("registers", name):
            return Register(register)
        if variable := self.scope.find("variables", name):
            return Symbol(variable)
        if name.startswith("%"):
            return Special(name)
        if label := self.scope.find("labels", name):
            return Label(label)
        if name == "WARP_SZ":
            return Immediate(32)
        raise self.error(f"`{name}` is not declared", self.tokens[self.position - 1])


def _carry(opcode: str, operands: list[Operand]) -> None:
    """Makes the carry flag an operand of the instructions that use it."""
    base, *modifiers = opcode.split(".")
    if base in ("addc", "subc", "madc"):
        operands.append(Register(_CARRY))
    if "cc" in modifiers and operands:
        operands[0] = Pair(operands[0], Register(_CARRY))
