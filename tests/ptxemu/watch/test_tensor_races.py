"""Races over tensor memory: tcgen05 operations of several threads, waits and fences, allocation."""

from __future__ import annotations

import numpy as np
import pytest
from programs import RUNS
from tensor_kernel import ROOM, WAIT, launch

import ptxemu

DESCRIPTOR = 0x400 >> 4 | 128 >> 4 << 16 | 256 >> 4 << 32 | 1 << 46  # 128 rows of 32 bytes in cores of 8 x 16
COPY = f"mov.b64 d20, {DESCRIPTOR};\n @q tcgen05.cp.cta_group::1.128x256b [r2], d20;\n"
COMMIT = "@q tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [bar];\n"
AFTER = "tcgen05.fence::after_thread_sync;\n"
BEFORE = "tcgen05.fence::before_thread_sync;\n"
DONE = COPY + COMMIT + WAIT + AFTER
NAMES = ", ".join(f"v{i}" for i in range(8))
LOAD = f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{NAMES}}}, [r3];\n"
USE = "\n".join(f"add.u32 r21, v{i}, 1;" for i in range(8)) + "\n"
LOADED = "tcgen05.wait::ld.sync.aligned;\n"
STORE = f"tcgen05.st.sync.aligned.32x32b.x8.b32 [r3], {{{', '.join(['r0'] * 8)}}};\n"
STORED = "tcgen05.wait::st.sync.aligned;\n"
SYNC = "bar.sync 0;\n"
LAST = WAIT.replace("W", "V").replace("[bar]", "[bar2]")
OVERWRITE = COPY + COMMIT.replace("[bar]", "[bar2]") + LAST + AFTER

# kind, wrong body, right body.
PAIRS = {
    "read of a copy that nobody waited for": ("race", COPY + LOAD + LOADED + COMMIT + WAIT, DONE + LOAD + LOADED),
    "overwriting what another warp still reads": (
        "race or missing tcgen05.wait::ld",
        DONE + LOAD + LOADED + OVERWRITE,
        DONE + LOAD + LOADED + SYNC + OVERWRITE,
    ),
    "a load that was not waited for": (
        "missing tcgen05.wait::ld",
        DONE + LOAD + SYNC + OVERWRITE + USE,
        DONE + LOAD + LOADED + SYNC + OVERWRITE + USE,
    ),
    "a load whose registers were used after the synchronisation": (
        "missing tcgen05.wait::ld",
        DONE + LOAD + SYNC + USE + OVERWRITE,
        DONE + LOAD + USE + SYNC + OVERWRITE,
    ),
    "a store that was not waited for": (
        "missing tcgen05.wait::st",
        STORE + LOAD + LOADED + STORED,
        STORE + STORED + LOAD + LOADED,
    ),
    "a store under a copy": (
        "missing tcgen05.wait::st",
        STORE + SYNC + DONE + STORED,
        STORE + STORED + SYNC + DONE,
    ),
    "an operand that was stored without a proxy fence": (
        "missing fence.proxy.async",
        "@q st.shared.u32 [room], 7;\n" + SYNC + DONE,
        "@q st.shared.u32 [room], 7;\n fence.proxy.async.shared::cta;\n" + SYNC + DONE,
    ),
    "an operand that is overwritten": (
        "race",
        COPY + "@q st.shared.u32 [room], 7;\n" + COMMIT + WAIT + AFTER,
        COPY + COMMIT + WAIT + AFTER + "@q st.shared.u32 [room], 7;\n",
    ),
    "columns that nothing wrote": (
        "uninitialised read",
        DONE + LOAD.replace("[r3]", "[r3+4]") + LOADED,
        DONE + LOAD + LOADED,
    ),
}


def findings(body: str, run: tuple[str, int] = ("lazy", 0), checks: str = "all") -> list[ptxemu.Finding]:
    """Of a body of `tensor_kernel.launch`; it writes nothing out."""
    out = np.zeros(128, np.uint32)
    try:
        launch(body, np.zeros((1, ROOM), np.uint8), out=out, schedule=run[0], seed=run[1], checks=checks)
    except ptxemu.FindingError as error:
        return error.report.findings
    return []


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]}-{run[1]}")
@pytest.mark.parametrize("name", PAIRS)
def test_pair(name: str, run: tuple[str, int]) -> None:
    kind, wrong, right = PAIRS[name]
    found = findings(wrong, run)
    kinds = {finding.kind for finding in found}
    assert kinds & set(kind.split(" or ")), found
    assert kinds <= {*kind.split(" or "), "uninitialised read"}, found
    assert all(finding.line and finding.text and finding.warp for finding in found)
    assert findings(right, run) == []


@pytest.mark.parametrize(
    ("name", "kind", "body"),
    [
        ("no fence after the wait", "missing tcgen05.fence", COPY + COMMIT + WAIT + LOAD + LOADED),
        ("no fence before the barrier", "missing tcgen05.fence", DONE + LOAD + LOADED + SYNC + AFTER + OVERWRITE),
        (
            "a load that was used but not waited for",
            "missing tcgen05.wait::ld",
            DONE + LOAD + USE + BEFORE + SYNC + AFTER + OVERWRITE,
        ),
        ("a copy after a copy", "race", COPY + DONE),
    ],
)  # fmt: skip
def test_strict(name: str, kind: str, body: str) -> None:
    """What the manual asks and published kernels leave out."""
    assert findings(body) == []
    assert {finding.kind for finding in findings(body, checks="strict")} == {kind}


def test_strict_is_content_with_what_the_manual_says() -> None:
    body = DONE + LOAD + LOADED + USE + BEFORE + SYNC + AFTER + OVERWRITE
    assert findings(body, checks="strict") == []


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]}-{run[1]}")
def test_freeing_what_another_warp_still_reads(run: tuple[str, int]) -> None:
    """Warp 0 frees the columns while the others may still load them."""
    text = DEALLOCATE.format(sync="bar.sync 0;")
    device = ptxemu.Device("sm_100a", schedule=run[0], seed=run[1], on_finding="collect")
    assert device.launch(text, block=(128, 1, 1)).findings == []
    try:
        found = {finding.kind for finding in device.launch(DEALLOCATE.format(sync=""), block=(128, 1, 1)).findings}
    except ptxemu.MemoryFault:  # it was freed before they came
        found = {"race"}
    assert found == {"race"}


DEALLOCATE = """
.version 9.0
.target sm_100a
.address_size 64
.visible .entry k()
{{
    .shared .align 8 .b32 slot;
    .reg .pred p;
    .reg .b32 r<10>;
    mov.u32 r0, %tid.x;
    shr.u32 r4, r0, 5;
    setp.eq.u32 p, r4, 0;
    @!p bra ALLOCATED;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [slot], 32;
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
ALLOCATED:
    bar.sync 0;
    ld.shared.u32 r2, [slot];
    shl.b32 r7, r4, 21;
    add.u32 r3, r2, r7;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [r3], {{r0}};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{r5}}, [r3];
    tcgen05.wait::ld.sync.aligned;
    {sync}
    @!p bra END;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 r2, 32;
END:
    ret;
}}
"""
