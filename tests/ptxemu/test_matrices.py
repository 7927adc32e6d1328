"""ldmatrix and stmatrix of 4-, 6- and 8-bit elements; those of 16 bits are in test_memory.py."""

from __future__ import annotations

import numpy as np
import pytest
from lane_kernel import missing_forms

import ptxemu

LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


def kernel(instruction: str, registers: int, target: str = "sm_120a") -> str:
    """Copies 512 bytes to shared memory, 16 a lane, runs the instruction with that address in r1 and registers from r10
    on, and copies registers and shared memory back."""
    loads = "".join(f"ld.global.b32 r{10 + i}, [d4+{4 * i}];\n" for i in range(registers))
    stores = "".join(f"st.global.b32 [d4+{4 * i}], r{10 + i};\n" for i in range(registers))
    return f"""
    .version 8.8
    .target {target}
    .address_size 64
    .shared .align 16 .b8 room[512];
    .visible .entry k(.param .u64 p0, .param .u64 p1) {{
        .reg .b32 r<20>;
        .reg .b64 d<6>;
        ld.param.u64 d0, [p0];
        ld.param.u64 d1, [p1];
        mov.u32 r0, %tid.x;
        mov.u32 r1, room;
        mad.lo.u32 r1, r0, 16, r1;
        mad.wide.u32 d3, r0, 16, d0;
        mad.wide.u32 d4, r0, 16, d1;
        ld.global.v4.b32 {{r4, r5, r6, r7}}, [d3];
        st.shared.v4.b32 [r1], {{r4, r5, r6, r7}};
        {loads}
        bar.warp.sync 0xffffffff;
        {instruction}
        bar.warp.sync 0xffffffff;
        {stores}
        ld.shared.v4.b32 {{r4, r5, r6, r7}}, [r1];
        st.global.v4.b32 [d3], {{r4, r5, r6, r7}};
    }}"""


def names(count: int) -> str:
    return "{" + ", ".join(f"r{10 + i}" for i in range(count)) + "}"


def packed(elements: np.ndarray, bits: int) -> np.ndarray:
    """Rows (n, 16) of elements as 16 bytes: packed from the lowest bits on, then padding that is not zero."""
    rows = np.full((len(elements), 16), 0xA5, np.uint8)
    each = np.unpackbits(elements.astype(np.uint8)[..., None], axis=2, bitorder="little")[..., :bits]
    rows[:, : 2 * bits] = np.packbits(each.reshape(len(elements), -1), axis=1, bitorder="little")
    return rows


def load(instruction: str, registers: int, rows: np.ndarray, target: str) -> np.ndarray:
    """The bytes of the registers, (32, registers, 4)."""
    memory, out = np.zeros((32, 16), np.uint8), np.zeros((32, 4), np.uint32)
    memory[: len(rows)] = rows
    ptxemu.Device(target).launch(
        kernel(f"{instruction} {names(registers)}, [r1];", registers, target), args=[memory, out]
    )
    return out[:, :registers].copy().view(np.uint8).reshape(32, registers, 4)


SOURCES = {"b4x16_p64": 4, "b6x16_p32": 6}


@pytest.mark.parametrize("target", ["sm_100a", "sm_121a"])
@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("source", SOURCES)
def test_expanding_rows(source: str, num: int, target: str) -> None:
    bits = SOURCES[source]
    elements = np.random.default_rng(num).integers(0, 1 << bits, (8 * num, 16))
    opcode = f"ldmatrix.sync.aligned.m8n16.x{num}.shared.b8x16.{source}"
    found = load(opcode, num, packed(elements, bits), target)
    for i in range(num):
        for byte in range(4):
            assert (found[:, i, byte] == elements[8 * i + G, 4 * T + byte]).all()


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("source", ["", *SOURCES])
def test_transposing_bytes(source: str, num: int) -> None:
    bits = SOURCES.get(source, 8)
    elements = np.random.default_rng(num).integers(0, 1 << bits, (16 * num, 16))
    rows = packed(elements, bits) if source else elements.astype(np.uint8)
    opcode = f"ldmatrix.sync.aligned.m16n16.x{num}.trans.shared{f'.b8x16.{source}' if source else '.b8'}"
    found = load(opcode, 2 * num, rows, "sm_120a")
    for i in range(num):
        for half in range(2):
            for byte in range(4):
                assert (found[:, 2 * i + half, byte] == elements[16 * i + 4 * T + byte, G + 8 * half]).all()


@pytest.mark.parametrize("num", [1, 2, 4])
def test_storing_bytes(num: int) -> None:
    """Each register is a 16 x 8 matrix: bytes 0 and 1 of row g, 2 and 3 of row g + 8, at columns 2t and 2t + 1."""
    matrices = np.random.default_rng(num).integers(0, 256, (num, 16, 8)).astype(np.uint8)
    registers = np.zeros((32, 4, 4), np.uint8)
    for i in range(num):
        for byte in range(4):
            registers[:, i, byte] = matrices[i, G + 8 * (byte // 2), 2 * T + byte % 2]
    memory, out = np.zeros((32, 16), np.uint8), np.ascontiguousarray(registers.reshape(32, 16)).view(np.uint32)
    instruction = f"stmatrix.sync.aligned.m16n8.x{num}.trans.shared.b8 [r1], {names(num)};"
    ptxemu.Device("sm_120a").launch(kernel(instruction, num), args=[memory, out])
    assert (memory[: 8 * num].reshape(num, 8, 16) == matrices.transpose(0, 2, 1)).all()
    assert not memory[8 * num :].any()


def test_vectors_of_the_wrong_length() -> None:
    with pytest.raises(ptxemu.ParseError, match="a vector of 1 where one of 2 is expected"):
        load("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8", 1, np.zeros((16, 16)), "sm_120a")


def test_every_form_has_a_case() -> None:
    instructions = [f"ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.{source} {names(1)}, [r1];" for source in SOURCES]
    instructions += [
        f"ldmatrix.sync.aligned.m16n16.x1.trans.shared.{kind} {names(2)}, [r1];"
        for kind in ("b8", *(f"b8x16.{source}" for source in SOURCES))
    ]
    instructions += [
        f"stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [r1], {names(1)};",
        f"ldmatrix.sync.aligned.m8n8.x1.shared.b16 {names(1)}, [r1];",
        f"stmatrix.sync.aligned.m8n8.x1.shared.b16 [r1], {names(1)};",
        "movmatrix.sync.aligned.m8n8.trans.b16 r10, r10;",
    ]
    assert missing_forms(["matrix"], [kernel(each, 0) for each in instructions]) == []
