"""Puts kernels together whose threads each write what they saw to a row of `out`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from comparison.program import HEADER, Arrays, Launch, Program

REGISTERS = """
    .reg .pred p<16>;
    .reg .b16 h<32>;
    .reg .b32 r<200>;
    .reg .b64 d<64>;
    .reg .pred leader, done;
    .reg .b32 tid, lane, rank, cta, thread, tries, shared, phase;
    .reg .b64 out, param;
"""
START = """
    mov.u32 tid, %tid.x;
    mov.u32 lane, %laneid;
    mov.u32 cta, %ctaid.x;
    mov.u32 rank, %cluster_ctarank;
    mad.lo.u32 thread, cta, {threads}, tid;
    setp.eq.u32 leader, tid, 0;
    ld.param.u64 out, [p_out];
    mad.wide.u32 out, thread, 8, out;
"""


class Kernel:
    """`k(out, ...)` for `ctas` of `threads`; `tid`, `lane`, `rank` and the predicate `leader` are set.

    declarations: shared variables.  parameters: beyond the first.
    """

    def __init__(
        self, threads: int = 32, ctas: int = 1, declarations: str = "", parameters: Sequence[str] = ()
    ) -> None:
        self.threads, self.ctas = threads, ctas
        self.declarations, self.parameters = declarations, parameters
        self.lines: list[str] = []
        self.slots = 0

    def __call__(self, *lines: str) -> Kernel:
        self.lines += lines
        return self

    def put(self, register: str, bits: int = 32) -> None:
        """Writes a register of every active thread to the next row of `out`, a predicate as 1 or 0."""
        offset = self.slots * self.threads * self.ctas * 8
        if bits == 1:
            self(f"selp.b32 r199, 1, 0, {register};")
            register, bits = "r199", 32
        self(f"st.global.b{bits} [out + {offset}], {register};")
        self.slots += 1

    @property
    def text(self) -> str:
        parameters = ", ".join([".param .u64 p_out", *self.parameters])
        body = "\n    ".join(self.lines)
        start = START.format(threads=self.threads)
        inside = f"{self.declarations}{REGISTERS}{start}    {body}\n    ret;\n"
        return f"{HEADER}.visible .entry k({parameters})\n{{{inside}}}\n"

    def out(self) -> Arrays:
        return {"out": np.full((max(1, self.slots), self.threads * self.ctas), 0xEEEEEEEE, np.uint64)}

    def program(
        self,
        name: str,
        arrays: Callable[[], Arrays] = dict,
        args: Sequence[object] = (),
        *,
        cluster: int = 0,
        inputs: Sequence[str] = (),
    ) -> Program:
        """The kernel as a program; the arrays beyond `out`."""
        shape = (cluster, 1, 1) if cluster else None
        launch = Launch(("out", *args), (self.ctas, 1, 1), (self.threads, 1, 1), shape)
        return Program(name, self.text, lambda: self.out() | arrays(), (launch,), frozenset(inputs))


def wait(barrier: str, label: str, parity: int = 0, tries: int = 2000) -> str:
    """Waits for a phase; gives up after many tries, which a wrong count of bytes would need, with `done` false."""
    return f"""
    mov.u32 tries, 0;
{label}:
    mbarrier.try_wait.parity.shared::cta.b64 done, [{barrier}], {parity};
    @done bra {label}_END;
    add.u32 tries, tries, 1;
    setp.lt.u32 p15, tries, {tries};
    @p15 bra {label};
{label}_END:
"""


def fill(base: str, size: int, threads: int, source: str | None = None, label: str = "FILL") -> str:
    """Shared memory at `base` from global memory at the register `source`, or with 0xCC, by all threads."""
    get = f"add.u64 d62, {source}, d61; ld.global.b32 r190, [d62];" if source else "mov.b32 r190, 0xCCCCCCCC;"
    return _each_word(
        label, size, threads, f"{get} mov.u32 r191, {base}; add.u32 r191, r191, r192; st.shared.b32 [r191], r190;"
    )


def dump(base: str, size: int, threads: int, target: str, label: str = "DUMP") -> str:
    """Shared memory at `base` to global memory at the register `target`, by all threads."""
    put = f"add.u64 d62, {target}, d61; st.global.b32 [d62], r190;"
    return _each_word(
        label, size, threads, f"mov.u32 r191, {base}; add.u32 r191, r191, r192; ld.shared.b32 r190, [r191]; {put}"
    )


def _each_word(label: str, size: int, threads: int, body: str) -> str:
    """r192, d61: the byte offset of a thread's word."""
    return f"""
    mul.lo.u32 r192, tid, 4;
{label}:
    setp.ge.u32 p15, r192, {size};
    @p15 bra {label}_END;
    cvt.u64.u32 d61, r192;
    {body}
    add.u32 r192, r192, {4 * threads};
    bra {label};
{label}_END:
    bar.sync 0;
"""
