"""mbarriers step by step; 'bar' and named barriers, with reductions; register budgets."""

from __future__ import annotations

from collections.abc import Iterator

from comparison.builder import Kernel, wait
from comparison.program import Program

BAR = ".shared .align 8 .b64 bar; .shared .align 8 .b64 other;"


def _look(kernel: Kernel) -> None:
    """Both parities as every thread sees them."""
    for parity in (0, 1):
        kernel(f"mbarrier.test_wait.parity.shared::cta.b64 done, [bar], {parity};").put("done", 1)


def _one(name: str, count: int, *steps: str) -> Program:
    """One thread: after each step both parities, and the pending count of the state in d2 where a step sets it."""
    kernel = Kernel(1, 1, BAR)(f"mbarrier.init.shared::cta.b64 [bar], {count};")
    _look(kernel)
    for step in steps:
        kernel(step)
        if " d2," in step:
            kernel("mbarrier.pending_count.b64 r100, d2;").put("r100")
            kernel("mbarrier.test_wait.shared::cta.b64 done, [bar], d2;").put("done", 1)
        _look(kernel)
    kernel("mbarrier.inval.shared::cta.b64 [bar];")
    return kernel.program(name)


ARRIVE = "mbarrier.arrive.shared::cta.b64 d2, [bar];"


def _arrive(count: int) -> str:
    return f"mbarrier.arrive.release.cta.shared::cta.b64 d2, [bar], {count};"


def _expect(size: int) -> str:
    return f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], {size};"


def _complete(size: int) -> str:
    return f"mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [bar], {size};"


def phases() -> Iterator[Program]:
    drop = "mbarrier.arrive_drop.shared::cta.b64 d2, [bar];"
    arrive_expect = "mbarrier.arrive.expect_tx.shared::cta.b64 d2, [bar], {};"
    no_complete = "mbarrier.arrive.noComplete.release.cta.shared::cta.b64 d2, [bar], 1;"
    yield _one("mbarrier arrivals", 3, *[ARRIVE] * 10)
    yield _one("mbarrier counts", 5, _arrive(2), _arrive(3), _arrive(1), _arrive(4), _arrive(5))
    yield _one("mbarrier drops", 4, ARRIVE, drop, ARRIVE, ARRIVE, *[ARRIVE] * 3, drop, ARRIVE, ARRIVE, ARRIVE)
    yield _one("mbarrier no complete", 3, no_complete, no_complete, ARRIVE, no_complete, ARRIVE, ARRIVE)
    yield _one("mbarrier bytes", 1, _expect(64), ARRIVE, _complete(32), _complete(32), ARRIVE)
    yield _one("mbarrier bytes before arrivals", 2, _complete(16), ARRIVE, ARRIVE, _expect(16), ARRIVE, ARRIVE)
    yield _one(
        "mbarrier arrive and expect", 1, arrive_expect.format(48), _complete(48), arrive_expect.format(0), ARRIVE
    )
    yield _one("mbarrier many bytes", 1, _expect((1 << 20) - 1), ARRIVE, _complete((1 << 20) - 2), _complete(1))
    again = "mbarrier.inval.shared::cta.b64 [bar];\nmbarrier.init.shared::cta.b64 [bar], 1;"
    yield _one("mbarrier again", 2, ARRIVE, ARRIVE, again, ARRIVE)
    yield _one("mbarrier of one", 1, *[ARRIVE] * 5)
    yield _one("mbarrier most arrivals", (1 << 20) - 1, _arrive((1 << 20) - 2), ARRIVE, ARRIVE)
    kernel = Kernel(64, 1, BAR)("@leader mbarrier.init.shared::cta.b64 [bar], 64;", "bar.sync 0;")
    for turn in range(5):
        kernel("mbarrier.arrive.shared::cta.b64 d2, [bar];", wait("bar", f"W{turn}", turn & 1)).put("done", 1)
        kernel("bar.sync 0;")
        _look(kernel)
        kernel("bar.sync 0;")
    yield kernel.program("mbarrier of all threads")


def named() -> Iterator[Program]:
    """Barriers with and without counts, arrivals without waiting, and reductions over predicates."""
    declarations = ".shared .align 4 .b32 words[256];"
    kernel = Kernel(128, 1, declarations)("mov.u32 r100, words; mad.lo.u32 r100, tid, 4, r100;")
    kernel("mul.lo.u32 r101, tid, 3; st.shared.b32 [r100], r101;", "bar.sync 0;")
    kernel(
        "xor.b32 r102, tid, 96; mov.u32 r103, words; mad.lo.u32 r103, r102, 4, r103; ld.shared.b32 r104, [r103];"
    ).put("r104")
    kernel("shr.u32 r105, tid, 6; add.u32 r105, r105, 3; setp.lt.u32 p1, tid, 64;")
    kernel("bar.sync 1; st.shared.b32 [r100], r105; bar.sync r105, 64;")
    kernel(
        "xor.b32 r102, tid, 32; mov.u32 r103, words; mad.lo.u32 r103, r102, 4, r103; ld.shared.b32 r104, [r103];"
    ).put("r104")
    kernel("bar.sync 0;")
    yield kernel.program("named barriers")
    kernel = Kernel(128, 1, declarations)(
        "mov.u32 r100, words; mad.lo.u32 r100, tid, 4, r100; setp.lt.u32 p1, tid, 64;"
    )
    kernel(
        "@!p1 bra CONSUME;",
        "mad.lo.u32 r101, tid, 7, 1; st.shared.b32 [r100], r101;",
        "bar.arrive 5, 128;",
        "bra DONE;",
    )
    kernel("CONSUME:", "bar.sync 5, 128;", "ld.shared.b32 r102, [r100 + -256];").put("r102")
    kernel("DONE:", "barrier.sync 0;")
    yield kernel.program("producer and consumer")
    kernel = Kernel(96, 1)
    for i, test in enumerate(("lt.u32 p1, tid, 40", "lt.u32 p1, tid, 96", "gt.u32 p1, tid, 96", "eq.u32 p1, lane, 3")):
        kernel(f"setp.{test};")
        kernel(f"bar.red.popc.u32 r100, {i}, p1;").put("r100")
        kernel(f"bar.red.popc.u32 r100, {i}, !p1;").put("r100")
        kernel(f"bar.red.and.pred p2, {i}, p1;").put("p2", 1)
        kernel(f"bar.red.or.pred p2, {i}, p1;").put("p2", 1)
    kernel("setp.lt.u32 p3, tid, 64; @!p3 bra END;", "setp.lt.u32 p1, tid, 11;")
    kernel("bar.red.popc.u32 r100, 7, 64, p1;").put("r100")
    kernel("barrier.red.popc.aligned.u32 r100, 8, 64, p1;").put("r100")
    kernel("END:")
    yield kernel.program("reductions at barriers")
    kernel = Kernel(32, 1)("and.b32 r100, lane, 1; setp.eq.u32 p1, r100, 0; mov.u32 r101, 0;")
    kernel("@p1 bra EVEN;", "add.u32 r101, r101, 5; bar.warp.sync 0xAAAAAAAA;", "bra JOIN;")
    kernel("EVEN:", "add.u32 r101, r101, 9; bar.warp.sync 0x55555555;", "JOIN:", "bar.warp.sync -1;").put("r101")
    yield kernel.program("warp barriers")


def budgets() -> Iterator[Program]:
    """setmaxnreg: values survive."""
    kernel = Kernel(256, 1)("mad.lo.u32 r100, tid, 17, 3; setp.lt.u32 p1, tid, 128;", "bar.sync 0;")
    kernel("@p1 bra LESS;", "setmaxnreg.inc.sync.aligned.u32 168;", "add.u32 r100, r100, 1;", "bra JOIN;")
    kernel("LESS:", "setmaxnreg.dec.sync.aligned.u32 40;", "add.u32 r100, r100, 2;", "JOIN:", "bar.sync 0;").put("r100")
    program = kernel.program("setmaxnreg")
    text = program.ptx.replace(")\n{", ")\n.maxntid 256\n{", 1)
    yield Program(program.name, text, program.arrays, program.launches)


def programs() -> Iterator[Program]:
    yield from phases()
    yield from named()
    yield from budgets()
