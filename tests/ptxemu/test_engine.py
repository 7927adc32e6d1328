"""The instruction table's decorators, the asynchronous queue and the scheduler's rules."""

from __future__ import annotations

from typing import Any

import pytest

import ptxemu
from ptxemu.isa.engine import decode, forms, lanes, nearest, warp
from ptxemu.machine.mbarrier import Mbarrier
from ptxemu.machine.queue import Queue
from ptxemu.text import Instruction, parse

HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"


def test_every_form_names_its_section() -> None:
    assert len(forms()) > 250
    for form in forms():
        assert form.summary.startswith("PTX '"), form.syntax


@pytest.mark.parametrize(
    ("syntax", "function", "message"),
    [
        ("tst.type d, a", lambda a, b: a, r"takes \['b'\], which the syntax does not name"),
        ("tst.type d, a", lambda a: a, "the docstring"),
        ("tst{.sat}.type d, a, b", lambda a, b, *, mode: a, r"takes \['mode'\], which the opcode does not name"),
    ],
)
def test_mistakes_in_the_table_are_found_at_import(syntax: str, function: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        lanes(syntax, type="u32")(function)


def test_a_warp_function_takes_the_warp() -> None:
    with pytest.raises(TypeError, match="starts with w, m"):
        warp("tst a")(lambda a: None)


def instruction(text: str) -> Instruction:
    registers = ".reg .pred p, q; .reg .b32 r, s; .reg .b64 a, b;"
    body = parse(f"{HEADER}.entry k() {{ {registers} {text} }}").entries["k"].body
    return next(item for item in body if isinstance(item, Instruction))


def test_modifiers_and_optional_operands() -> None:
    found = decode(instruction("ld.relaxed.gpu.global.L1::no_allocate.L2::cache_hint.v2.b32 {r, s}, [a+8], b;"))
    assert found.modifiers["sem"] == "relaxed"
    assert (found.modifiers["ss"], found.modifiers["vec"], found.modifiers["type"]) == ("global", "v2", "b32")
    assert found.result_names == ("d",)
    plain = decode(instruction("ld.global.b32 r, [a];"))
    assert plain.modifiers["sem"] is None
    assert plain.type_of("d") == "b32"


def test_nearest() -> None:
    assert nearest("mbarrier.try_wait.parity.shard.b64").startswith("mbarrier.try_wait.parity")
    assert nearest("tcgen05.mma.cta_group::3.kind::f16").startswith("tcgen05.mma")


def completions(schedule: str, seed: int = 0) -> tuple[Queue, list[str]]:
    done: list[str] = []
    return Queue(schedule, seed), done


def test_eager_completes_at_once_and_in_order() -> None:
    queue, done = completions("eager")
    first = queue.submit(lambda: done.append("a"), "a")
    assert first.done
    queue.submit(lambda: done.append("b"), "b", stream="s")
    queue.submit(lambda: done.append("c"), "c", stream="s")
    assert done == ["a", "b", "c"]
    assert len(queue) == 0


def test_lazy_completes_only_when_nothing_else_can_go_on() -> None:
    queue, done = completions("lazy")
    queue.submit(lambda: done.append("a"), "a")
    queue.submit(lambda: done.append("b"), "b")
    queue.turn()
    assert done == []
    assert queue.stalled()
    assert done == ["a"]
    assert queue.stalled()
    assert not queue.stalled()


def test_fifo_completes_one_a_turn_in_the_order_of_issue() -> None:
    queue, done = completions("fifo")
    first = queue.submit(lambda: done.append("a"), "a")
    queue.submit(lambda: done.append("after a"), "after", after=[first])
    queue.submit(lambda: done.append("b"), "b")
    for _ in range(3):
        queue.turn()
    assert done == ["a", "after a", "b"]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("schedule", ["eager", "lazy", "fifo", "random"])
def test_streams_and_dependences_hold_under_every_schedule(schedule: str, seed: int) -> None:
    queue, done = completions(schedule, seed)
    start = queue.submit(lambda: done.append("start"), "start")
    for i in range(4):
        queue.submit(lambda i=i: done.append(f"s{i}"), "s", stream="s")
        queue.submit(lambda i=i: done.append(f"x{i}"), "x", after=[start])
    last = queue.last("s")
    while queue.stalled():
        pass
    assert [d for d in done if d[0] == "s" and d != "start"] == ["s0", "s1", "s2", "s3"]
    assert all(done.index("start") < done.index(f"x{i}") for i in range(4))
    assert len(done) == 9
    assert queue.last("s") is None
    assert last is None or last.done


def test_random_orders_differ_by_seed() -> None:
    def order(seed: int) -> list[int]:
        queue, done = Queue("random", seed), []
        for i in range(8):
            queue.submit(lambda i=i: done.append(i), "x")
        while queue.stalled():
            pass
        return done

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) > 2


def test_errors_of_asynchronous_operations_name_them() -> None:
    def fail() -> None:
        raise ptxemu.MemoryFault("nothing there")

    with pytest.raises(ptxemu.MemoryFault, match="nothing there\n  in a copy of line 0"):
        Queue("eager", 0).submit(fail, "a copy")


def test_mbarrier_phases() -> None:
    barrier = Mbarrier("b", 2)
    assert not barrier.passed(0)
    assert barrier.passed(1)  # the phase before the first counts as complete
    barrier.complete_tx(16)  # bytes may come before they are announced
    assert (barrier.tx, barrier.arrive()) == (-16, 0)
    barrier.expect_tx(16)
    assert barrier.arrive() == 0
    assert (barrier.phase, barrier.pending, barrier.passed(0)) == (1, 2, True)
    barrier.drop()
    barrier.arrive()
    assert (barrier.phase, barrier.expected) == (2, 1)
    with pytest.raises(ptxemu.MemoryFault, match="2 arrivals are more than this phase expects"):
        barrier.arrive(2)
    with pytest.raises(ptxemu.MemoryFault, match="transaction count"):
        barrier.expect_tx(1 << 20)
