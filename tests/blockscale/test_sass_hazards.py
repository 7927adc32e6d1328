"""tools/sass_hazards.py finds both hazards along branches, in listings as cuobjdump writes them, and else nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from sass_hazards import hazards, kernels, main

FIRST = "HGMMA.64x8x16.F32.BF16 R24, R48, gdesc[UR4], RZ, !UPT, gsb0"
SECOND = "HGMMA.64x8x16.F32.BF16 R28, R52, gdesc[UR4], R28, gsb0"
COPY = "IMAD.MOV.U32 R60, RZ, RZ, R27"
ALL_BUT_ONE, ALL = "WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"
FULL = "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R2+URZ+0x50], R3"
FREE = "@P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2+URZ+0x70], RZ"
NONE = 7  # no scoreboard
LOAD = ("LDS.128 R4, [R8+0x200]", 0, 0b000000)  # counted by scoreboard 0
USE = ("IADD3 R9, R4, R5, RZ", NONE, 0b000001)  # waits for scoreboard 0
USE_OTHER = ("IADD3 R9, R10, R5, RZ", NONE, 0b111110)


def listing(*rows):
    """In the syntax of `cuobjdump -sass`. A row: (text, its scoreboard, bits of those waited for), or text."""
    text = '\tcode for sm_90a\n\t\tFunction : small\n\t.headerflags\t@"EF_CUDA_SM90"\n'
    for i, row in enumerate((*rows, "EXIT")):
        instruction, scoreboard, waits = row if isinstance(row, tuple) else (row, NONE, 0)
        control = waits << 52 | 7 << 49 | scoreboard << 46 | 1 << 41
        text += f"        /*{16 * i:04x}*/     {instruction} ;     /* 0x000000ff00007947 */\n"
        text += f"{'':40}/* 0x{control:016x} */\n"
    return text


def found(*rows, every=False):
    ((name, code),) = kernels(listing(*rows))
    assert name == "small"
    assert len(code) == len(rows) + 1
    return hazards(code, every)


def test_a_sum_is_read_across_a_back_edge():
    """In the listing's order nothing runs yet when the wrong one reads; the branch brings what does."""
    read = "IMAD.MOV.U32 R60, RZ, RZ, R31"  # of the second, which is not waited for before the branch
    rest = (FIRST, SECOND, ALL_BUT_ONE, "@P0 BRA 0x0", ALL)
    assert found(ALL, read, *rest) == []
    told = "IMAD.MOV.U32 at 0x0 touches R31 of HGMMA.64x8x16.F32.BF16 at 0x30, which may still run"
    assert found(read, ALL, *rest) == [told]


@pytest.mark.parametrize(
    "touch",
    [
        COPY,
        "@!P2 FADD R27, R60, R61",
        "STS.128 [R8], R24",
        "SHFL.BFLY PT, R60, R24, 0x1, 0x1f",
        "FSETP.GT.AND P0, PT, R24, R60, PT",
        "LDS.128 R48, [R8]",
        "IMAD.WIDE R50, R60, 0x4, R62",
        "HGMMA.64x8x16.F32.BF16 R32, R24, gdesc[UR4], R32",
        "HGMMA.64x8x16.F32.BF16 R48, R36, gdesc[UR4], R48",
    ],
)
def test_registers_of_the_tensor_core(touch):
    assert len(found(FIRST, touch)) == 1
    assert len(found(FIRST, SECOND, touch, ALL)) == 1
    assert len(found(FIRST, ALL_BUT_ONE, touch)) == 1
    assert found(FIRST, SECOND, ALL_BUT_ONE, touch) == []
    assert found(FIRST, ALL, touch) == []


@pytest.mark.parametrize(
    "use",
    [
        "STS.128 [R8], R48",
        "IADD3 R60, R48, R49, RZ",
        "FSETP.GT.AND P0, PT, R48, R60, PT",
        "UIADD3 UR24, UR25, 0x1, URZ",
        "HGMMA.64x8x16.F32.BF16 R24, R48, gdesc[UR6], R24",
        "IMAD.MOV.U32 R28, RZ, RZ, R52",
    ],
)
def test_what_may_be_done_meanwhile(use):
    assert found(FIRST, use) == []


def test_no_wait_reaches_what_is_not_committed():
    uncommitted = FIRST.removesuffix(", gsb0")
    assert len(found(uncommitted, ALL, COPY)) == 1
    assert found(uncommitted, SECOND, ALL, COPY) == []


def test_a_slot_is_given_back_before_it_is_read():
    assert found(FULL, LOAD, USE, FREE) == []
    assert found(FULL, LOAD, (FREE, NONE, 0b000001)) == []
    assert found(FULL, LOAD, "DEPBAR.LE SB0, 0x0", FREE) == []
    assert found(FULL, LOAD, "FENCE.VIEW.ASYNC.S", FREE) == []
    told = "SYNCS.ARRIVE.TRANS64.A1T0 at 0x30 while LDS.128 at 0x10 may still read"
    for between in ("NOP", "DEPBAR.LE SB0, 0x1", USE_OTHER):
        assert found(FULL, LOAD, between, FREE) == [told]


def test_a_slot_is_waited_for_on_one_way_only():
    other = "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [R2+URZ+0x70], RZ"
    assert len(found(FULL, LOAD, "@P2 BRA 0x40", USE, other)) == 1
    assert found(FULL, LOAD, "@P2 BRA 0x50", USE, "BRA 0x60", USE, other) == []
    assert len(found("BRA 0x30", FREE, "EXIT", FULL, LOAD, "@P2 BRA 0x10", USE)) == 1


def test_an_arrival_that_announces_bytes_frees_nothing():
    assert found(FULL, LOAD, "@P0 SYNCS.ARRIVE.TRANS64 RZ, [UR4], R5") == []


FILLER = ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R6+URZ+0x70], R7", "@P0 SYNCS.ARRIVE.TRANS64 RZ, [R6+URZ+0x50], R5")
OTHER = FULL.replace("0x50", "0x10")


@pytest.mark.parametrize(
    "innocent",
    [
        (*FILLER, OTHER, LOAD, FREE),
        (*FILLER, OTHER, LOAD, FULL, FREE),
        ("LDGDEPBAR", FULL, "DEPBAR.LE SB0, 0x1", LOAD, FREE),
    ],
)
def test_loads_of_another_ring_count_if_told(innocent):
    assert found(*innocent) == []
    assert len(found(*innocent, every=True)) == 1


def test_loads_of_this_ring_and_of_no_known_ring_count():
    assert len(found(*FILLER, FULL, LOAD, OTHER, FREE)) == 1
    assert len(found(*FILLER, FULL, "@P2 BRA 0x50", OTHER, "NOP", LOAD, FREE)) == 1
    assert len(found(OTHER, LOAD, FREE)) == 1


def test_a_ring_of_several_ctas_is_the_one_not_given_back_here():
    far = "SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R24+URZ], RZ"
    more = [row.replace("0x70", "0x30").replace("0x50", "0x10") for row in FILLER]
    assert found(*FILLER, *more, FULL, LOAD, far, USE, FREE) == []
    assert len(found(*FILLER, *more, OTHER, LOAD, far, USE, FREE)) == 1
    assert len(found(FULL, LOAD, far, USE, FREE)) == 1


def test_loads_after_a_barrier_count_beside_copies_of_the_warps_own():
    assert len(found("LDGDEPBAR", "DEPBAR.LE SB0, 0x1", FULL, LOAD, FREE)) == 1
    assert len(found("LDGDEPBAR", FULL, "@P2 BRA 0x40", "DEPBAR.LE SB0, 0x1", LOAD, FREE)) == 1


def test_the_command(tmp_path, capsys):
    right, wrong = tmp_path / "right.sass", tmp_path / "wrong.sass"
    right.write_text(listing(*FILLER, OTHER, LOAD, FREE) + listing(FIRST, ALL, COPY))
    wrong.write_text(listing(*[FIRST, COPY] * 5))
    assert main([str(right)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "right.sass small: nothing found",
        "2 kernels, 0 with hazards",
    ]
    assert main(["--all", str(right)]) == 1
    assert "2 kernels, 1 with hazards" in capsys.readouterr().out
    assert main([str(right), str(wrong)]) == 1
    out = capsys.readouterr().out
    assert "; and 2 more" in out
    assert "3 kernels, 1 with hazards" in out
    with pytest.raises(SystemExit, match="no kernel in"):
        main([str(tmp_path)])
