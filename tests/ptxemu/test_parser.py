"""PTX text to modules: directives, parameters, scopes, operands, and text that is refused."""

from __future__ import annotations

import struct

import pytest

import ptxemu
from ptxemu.text import Instruction, Module, parse
from ptxemu.text.module import Address, Immediate, Label, Pair, Register, Sink, Special, Symbol, Vector

HEADER = ".version 9.4\n.target sm_100a\n.address_size 64\n"


def body(text: str, declare: str = "") -> list[Instruction | Label]:
    registers = ".reg .pred %p<4>; .reg .b16 %rs<4>; .reg .b32 %r<8>; .reg .b64 %rd<8>; .reg .f32 %f<4>;"
    return parse(f"{HEADER}.visible .entry k(.param .u64 p)\n{{ {registers} {declare}\n{text}\n}}").entries["k"].body


def one(text: str, declare: str = "") -> Instruction:
    found = body(text, declare)[0]
    assert isinstance(found, Instruction)
    return found


def test_header() -> None:
    module = parse(".version 9.0 .target sm_100a, debug .address_size 64")
    assert (module.version, module.target, module.functions) == ((9, 0), "sm_100a", {})


def test_comments_do_not_move_lines() -> None:
    text = f"// first\n/* second\n third */ {HEADER}.visible .entry k()\n{{ // here\n /* a\n b */ ret;\n}}"
    assert [i.line for i in parse(text).entries["k"].body if isinstance(i, Instruction)] == [9]


ENTRY = f"""{HEADER}
.file 1 "kernel.py", 1234, 55
.visible .entry main(
    .param .u64 .ptr .global .align 16 main_param_0,
    .param .align 64 .b8 main_param_1[128],
    .param .f32 main_param_2,
    .param .v4 .f32 main_param_3
)
.reqntid 192, 1, 1
.maxntid 256
.minnctapersm 1
.reqnctapercluster 2, 1, 1
.pragma "nounroll";
{{
    .reg .b32 %r<3>;
    .local .align 8 .b8 depot[24];
    .shared .align 8 .b64 bar;
    .loc 1 12 7
    mov.u32 %r1, 1;
    .loc 1 14 3, function_name $L__info_string0, inlined_at 1 60 5
    .pragma "used_bytes_mask 4095";
    ret;
}}
.section .debug_str
{{
$L__info_string0:
.b8 104, 105, 0
}}
"""


def test_entry() -> None:
    function = parse(ENTRY).entries["main"]
    assert [(v.name, v.size, v.align) for v in function.parameters] == [
        ("main_param_0", 8, 8),
        ("main_param_1", 128, 64),
        ("main_param_2", 4, 4),
        ("main_param_3", 16, 16),
    ]
    assert function.directives[".reqntid"] == (192, 1, 1)
    assert function.directives[".maxntid"] == (256,)
    assert function.directives[".reqnctapercluster"] == (2, 1, 1)
    assert [(v.name, v.space, v.size, v.align) for v in function.variables] == [
        ("depot#1", "local", 24, 8),
        ("bar#1", "shared", 8, 8),
    ]
    assert list(function.locations.values()) == [("kernel.py", 12), ("kernel.py", 14)]
    assert function.registers == {"CC.CF": 1, "%r0": 32, "%r1": 32, "%r2": 32}


def test_module_variables() -> None:
    module = parse(
        f"""{HEADER}
        .extern .shared .align 1024 .b8 dynamic[];
        .visible .global .align 4 .u32 table[2][3] = {{{{1, 2, 3}}, {{0x10, -1}}}};
        .const .f32 half = 0f3F000000;
        .global .f64 tenth = 0.1;
        .global .align 8 .u64 places[2] = {{table, table+8}};
        .global .attribute(.managed) .b8 text[] = {{104, 105, 0}};
        """
    )
    found = {v.name: v for v in module.variables}
    assert (found["dynamic"].size, found["dynamic"].align) == (0, 1024)
    assert found["table"].data == struct.pack("<6I", 1, 2, 3, 16, 0xFFFFFFFF, 0)
    assert found["half"].data == struct.pack("<f", 0.5)
    assert found["tenth"].data == struct.pack("<d", 0.1)
    assert found["places"].relocations == ((0, Symbol("table")), (8, Symbol("table", 8)))
    assert (found["text"].size, found["text"].data) == (3, b"hi\0")


def test_guards_and_opcodes() -> None:
    found = one(
        "@!%p1 cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%r1], [%rd1, {%r2, %r3, %r4}], [%r5];"
    )
    assert found.guard == Register("%p1", 0, True)
    assert found.opcode == "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    coordinates = Vector((Register("%r2"), Register("%r3"), Register("%r4")))
    assert found.operands[1] == Address((Register("%rd1"), coordinates))
    assert one("tcgen05.cp.cta_group::2.32x128b.warpx4 [%r1], %rd1;").opcode == "tcgen05.cp.cta_group::2.32x128b.warpx4"


@pytest.mark.parametrize(
    ("operand", "want"),
    [
        ("7", Immediate(7)),
        ("-7", Immediate(-7)),
        ("0x10U", Immediate(16)),
        ("017", Immediate(15)),
        ("0b101", Immediate(5)),
        ("0f3F800000", Immediate(0x3F800000, 32)),
        ("0d3FF0000000000000", Immediate(0x3FF0000000000000, 64)),
        ("-1.5", Immediate(0xBFF8000000000000, 64)),
        ("2e1", Immediate(0x4034000000000000, 64)),
        ("WARP_SZ", Immediate(32)),
        ("%tid.x", Special("%tid.x")),
        ("%clock64", Special("%clock64")),
        ("%r3", Register("%r3")),
        ("p", Symbol("p")),
        ("p+4", Symbol("p", 4)),
        ("room", Symbol("room#1")),
        ("_", Sink()),
        ("!%p2", Register("%p2", 0, True)),
        ("%r1|%p1", Pair(Register("%r1"), Register("%p1"))),
        ("_|%p1", Pair(Sink(), Register("%p1"))),
        ("{%r1, 5, _}", Vector((Register("%r1"), Immediate(5), Sink()))),
        ("[%rd1+8]", Address((Register("%rd1", 8),))),
        ("[%rd1+-8]", Address((Register("%rd1", -8),))),
        ("[%rd1-8]", Address((Register("%rd1", -8),))),
        ("[p+2]", Address((Symbol("p", 2),))),
        ("[64]", Address((Immediate(64),))),
        ("HERE", Label("HERE")),
    ],
)
def test_operands(operand: str, want: object) -> None:
    assert one(f"mov.b32 %r1, {operand};\nHERE:", ".shared .b32 room;").operands[1] == want


def test_scopes_rename_what_they_declare() -> None:
    found = body(
        """{ .reg .pred P1; LAB: @P1 bra LAB; }
        { .reg .pred P1; LAB: @P1 bra LAB; { .reg .b32 %r1; mov.b32 %r1, 1; bra LAB; } mov.b32 %r1, 2; }"""
    )
    labels = [item.name for item in found if isinstance(item, Label)]
    instructions = [item for item in found if isinstance(item, Instruction)]
    assert len(set(labels)) == 2
    assert [i.operands[0] for i in instructions if i.opcode == "bra"] == [
        Label(labels[0]),
        Label(labels[1]),
        Label(labels[1]),
    ]
    first, second = (i.guard for i in instructions if i.guard)
    assert first != second
    inner, outer = (i.operands[0] for i in instructions if i.opcode == "mov.b32")
    assert outer == Register("%r1")
    assert inner != outer


def test_branch_targets() -> None:
    function = parse(f"{HEADER}.entry k() {{ .reg .b32 i; T: .branchtargets A, B; brx.idx i, T; A: B: ret; }}").entries[
        "k"
    ]
    assert list(function.targets.values()) == [("A#1", "B#1")] or len(next(iter(function.targets.values()))) == 2


def test_declarations_and_functions() -> None:
    module = parse(
        f"{HEADER}.extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);\n.entry k() {{ ret; }}"
    )
    assert module.functions["vprintf"].is_declaration
    assert list(module.entries) == ["k"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected `.version`"),
        ("hello", "line 1: expected `.version`"),
        (".version 9.0\n.target sm_100a\n.address_size 32", "line 3: addresses of 32 bits"),
        (f"{HEADER}.entry k() {{ mov.u32 %r1, 1; }}", "operand|a result has to be|not declared"),
        (f"{HEADER}.entry k()\n{{ .reg .b32 r;\n mov.u32 r, other; }}", "line 6: `other` is not declared"),
        (f"{HEADER}.entry k()\n{{\n bra", "line 6: expected"),
        (f"{HEADER}.entry k() {{ ret; }}\n.entry k() {{ ret; }}", "line 5: k is defined twice"),
        (f"{HEADER}.entry k()\n{{ .reg .b33 r; }}", "line 5: expected a type"),
        (f"{HEADER}.entry k()\n{{ .reg .b32 r; add.u32 r, r 1; }}", "line 5: expected `,`"),
        (f"{HEADER}.entry k()\n{{ \x01 }}", "line 5: .* begins no PTX token"),
        (f"{HEADER}.bogus 1", "line 4: expected a directive or a function"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(ptxemu.ParseError, match=message):
        ptxemu.Device("sm_100a").launch(text)


def test_unknown_instruction_names_line_text_and_nearest_form() -> None:
    text = f"{HEADER}.entry k()\n{{ .reg .b32 r;\n add.u33 r, r, 1;\n}}"
    with pytest.raises(ptxemu.UnknownInstruction) as caught:
        ptxemu.Device("sm_100a").launch(text)
    assert str(caught.value).startswith("line 6: unknown instruction `add.u33 r, r, 1`; the nearest known form is `add")


def test_unknown_special_register() -> None:
    text = f"{HEADER}.entry k()\n{{ .reg .b32 r;\n mov.u32 r, %envreg3;\n}}"
    with pytest.raises(ptxemu.UnknownInstruction, match="line 6: the special register %envreg3"):
        ptxemu.Device("sm_100a").launch(text)


def test_parsed_modules_are_accepted() -> None:
    module = parse(f"{HEADER}.entry k() {{ ret; }}")
    assert isinstance(module, Module)
    assert ptxemu.Device("sm_100a").launch(module).kernel == "k"
