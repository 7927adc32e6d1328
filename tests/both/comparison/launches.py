"""Grids that depend on each other (programmatic dependent launch)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from comparison.program import HEADER, Launch, Program

CTAS, THREADS = 24, 64
SIZE = CTAS * THREADS
# Each grid adds to what the other CTAs of the one before have written.
STEP = """.visible .entry {name}(.param .u64 p_from, .param .u64 p_to)
{{
    .reg .pred p;
    .reg .b32 r<8>;
    .reg .b64 d<4>;
    mov.u32 r0, %tid.x;
    mov.u32 r1, %ctaid.x;
    mad.lo.u32 r2, r1, {threads}, r0;
    {before}
    griddepcontrol.wait;
    {after}
    ld.param.u64 d0, [p_from];
    ld.param.u64 d1, [p_to];
    sub.u32 r3, {last}, r2;
    mad.wide.u32 d0, r3, 4, d0;
    mad.wide.u32 d1, r2, 4, d1;
    ld.global.b32 r4, [d0];
    mad.lo.u32 r4, r4, 3, r2;
    st.global.b32 [d1], r4;
    {end}
    ret;
}}
"""
RELEASE = "griddepcontrol.launch_dependents;"


def _text(before: str, after: str, end: str) -> str:
    return HEADER + STEP.format(name="k", threads=THREADS, last=SIZE - 1, before=before, after=after, end=end)


def programs() -> Iterator[Program]:
    places = {
        "at the beginning": (RELEASE, "", ""),
        "after the wait": ("", RELEASE, ""),
        "at the end": ("", "", RELEASE),
    }
    for where, lines in {**places, "never": ("", "", "")}.items():
        for count in (2, 5):
            names = [f"x{i}" for i in range(count + 1)]
            launches = tuple(
                Launch((names[i], names[i + 1]), (CTAS, 1, 1), (THREADS, 1, 1), pdl=i > 0) for i in range(count)
            )
            yield Program(
                f"{count} grids, released {where}",
                _text(*lines),
                lambda names=names: {n: np.arange(SIZE, dtype=np.uint32) * (n == "x0") for n in names},
                launches,
                frozenset({"x0"}),
            )
