"""Small kernels for the tests of the synchronising instructions."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

import ptxemu
from ptxemu.isa.engine import forms

SCHEDULES = ["eager", "lazy", "fifo", "random"]
HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"
DECLARATIONS = """
    .shared .align 16 .b8 room[1024];
    .shared .align 8 .b64 bar;
    .shared .align 8 .b64 bar2;
    .reg .pred p, q;
    .reg .b32 r<20>;
    .reg .b64 d<20>;
    .reg .b128 x;
    ld.param.u64 d0, [out];
    mov.u32 r0, %tid.x;
    mul.wide.u32 d1, r0, 4;
    add.u64 d1, d0, d1;
"""


def run(
    body: str,
    out: np.ndarray | None = None,
    *more: np.ndarray,
    block: int = 32,
    grid: int = 1,
    cluster: int = 1,
    schedule: str = "lazy",
    seed: int = 0,
    checks: str = "none",
) -> np.ndarray:
    """Runs a kernel whose first parameter is `out` (32 words of 0xFFFFFFFF) and returns it; d0 is its address, d1 the
    thread's word in it, r0 the thread; the others are in1, in2, ..."""
    result = np.full(32, 0xFFFFFFFF, np.uint32) if out is None else out
    names = ["out"] + [f"in{i + 1}" for i in range(len(more))]
    parameters = ", ".join(f".param .u64 {name}" for name in names)
    text = f"{HEADER}.visible .entry k({parameters})\n{{\n{DECLARATIONS}\n{body}\n    ret;\n}}\n"
    device = ptxemu.Device("sm_100a", schedule=schedule, seed=seed, checks=checks)
    device.launch(text, grid=(grid, 1, 1), block=(block, 1, 1), cluster=(cluster, 1, 1), args=[result, *more])
    return result


def wait(barrier: str, parity: int, label: str = "W") -> str:
    return f"""
{label}: mbarrier.try_wait.parity.shared::cta.b64 p, [{barrier}], {parity};
    @!p bra {label};"""


STORE = "selp.u32 r1, 1, 0, p;\n st.global.u32 [d1], r1;"
INIT = "setp.eq.u32 q, r0, 0;\n @q mbarrier.init.shared.b64 [bar], 32;\n bar.sync 0;\n"


def missing_cases(module: str, tests: Path) -> list[str]:
    """The forms of a chapter that match no opcode in the text of its tests; `{0}` there stands for any shared space."""
    text = tests.read_text()
    opcodes: set[str] = set()
    for space in ("", ".shared", ".shared::cta", ".shared::cluster"):
        opcodes |= set(re.findall(r"[a-z]+(?:[._][A-Za-z0-9_:]+)+", text.replace("{0}", space)))
    mine = [form for form in forms() if form.function.__module__ == module]
    assert mine
    return [form.syntax for form in mine if not any(form.pattern.fullmatch(opcode) for opcode in opcodes)]
