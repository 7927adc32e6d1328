"""Hazards of compiled kernels that running their PTX does not show, since they lie in what the compiler makes of it.

    python tools/sass_hazards.py [--all] KERNEL...

KERNEL is a cubin, a listing that `cuobjdump -sass` wrote (*.sass), or a directory, such as a store of compiled kernels,
whose cubins are all read. A line for each kernel says what is wrong in it, and the exit code is 1 if anything is. Needs
`cuobjdump` of CUDA 13.1 or later on the path (on PyPI as nvidia-cuda-cuobjdump), but for listings.

Two things are looked for, along all branches. *Sums*: a warpgroup's tensor-core instruction (GMMA) runs on after it
is issued, and until a WARPGROUP.DEPBAR has waited for its group its accumulators must be neither read nor written and
its operands in registers not written. *Slots*: an LDS reads shared memory some time after it is issued, and until an
instruction waits for its scoreboard no SYNCS.ARRIVE may tell a producer that the memory is free to be filled again.

Which memory an LDS reads is not followed, but which ring it is of: that of the barrier that the warp waited for last
(SYNCS.PHASECHK), by the offset in its address. Who fills a ring waits at an offset and announces bytes at another, and
so tells which full and empty barriers belong together. Loads of other rings than the one given back do not count, nor
do those after a wait for the warp's own copies (LDGSTS, DEPBAR); where no filler is seen, all do. `--all` counts every
load, for listings whose offsets say nothing. What is found may still be innocent: a load of another slot of the ring.
A fence is taken to wait for the loads before it, and a CALL to leave alone what runs; BRX, a branch to an address in a
register, is not followed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?(\S+?)(?:\s+([^;]*?))?\s*;\s*/\* 0x[0-9a-f]{16} \*/")
CONTROL = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/\s*$")
GMMA = re.compile(r"[A-Z]GMMA\.64x(\d+)x\d+\.(\w+)")
REGISTER = re.compile(r"\bR(\d+)(\.64)?\b")
PREDICATE = re.compile(r"U?P[T\d]")
WITHOUT_RESULT = re.compile(r"[A-Z]*SETP|FCHK|BAR|NANOSLEEP|WARPSYNC|RET|BRX|JMX")  # first operand: read, if a register
# Arrivals that announce bytes to come (the register after the barrier is their number) free nothing.
ANNOUNCED = re.compile(r"SYNCS\.ARRIVE\.TRANS64")
ARRIVAL = re.compile(r"SYNCS\.ARRIVE\.\S*A1T0")
OWN_COPIES = -1  # in place of a barrier's offset
ALL = 0b111111  # scoreboards
OPEN, MOST = -1, 8  # groups committed after a GMMA's: its own is not yet; no wait leaves more than seven running

Running = dict[int, int]  # instructions that may still run: groups committed since, or the scoreboard


@dataclass(frozen=True)
class Instruction:
    address: int
    guard: str | None
    opcode: str
    operands: tuple[str, ...]
    scoreboard: int  # counts until the results are there; 7: none does
    waits: int  # a bit for each scoreboard that has to be zero before

    def __str__(self) -> str:
        return f"{self.opcode} at {self.address:#x}"

    @property
    def target(self) -> int | None:
        found = re.search(r"\b0x([0-9a-f]+)$", self.operands[-1]) if self.operands else None
        return int(found[1], 16) if found and re.match(r"BRA|CALL", self.opcode) else None


def kernels(listing: str) -> Iterator[tuple[str, list[Instruction]]]:
    """(name, instructions) of each function in what `cuobjdump -sass` writes."""
    for part in re.split(r"Function : ", listing)[1:]:
        lines = part.splitlines()
        yield lines[0].strip(), list(instructions(lines))


def instructions(lines: list[str]) -> Iterator[Instruction]:
    """Of an instruction's 128 bits the upper 64 stand on the line after it, six bits of waits above two numbers."""
    for first, second in pairwise(lines):
        if (text := LINE.match(first)) and (control := CONTROL.match(second)):
            address, guard, opcode, operands = text.groups(default="")
            bits = int(control[1], 16)
            listed = tuple(x.strip() for x in operands.split(",")) if operands else ()
            yield Instruction(int(address, 16), guard or None, opcode, listed, bits >> 46 & 7, bits >> 52 & 63)


def successors(code: list[Instruction]) -> list[list[int]]:
    """Which instructions may come after each."""
    place = {x.address: i for i, x in enumerate(code)}
    after = []
    for i, x in enumerate(code):
        jump = x.opcode.startswith("BRA") and len(x.operands) == 1
        ends = not x.guard and (jump or re.match(r"EXIT|RET", x.opcode))
        following = [] if ends or i + 1 == len(code) else [i + 1]
        if x.target is not None:
            following.append(place[x.target])
        after.append(following)
    return after


def reaching(code: list[Instruction], step: Callable[[int, Running], Running]) -> list[Running]:
    """What may run when each instruction is issued, by what it leaves running; of two ways the smaller number."""
    after = successors(code)
    before: list[Running | None] = [{}, *[None] * (len(code) - 1)]
    todo = [0]
    while todo:
        at = todo.pop()
        left = step(at, before[at] or {})
        for following in after[at]:
            known = before[following]
            both = {**left, **{i: min(number, left.get(i, number)) for i, number in (known or {}).items()}}
            if both != known:
                before[following] = both
                todo.append(following)
    return [running or {} for running in before]


def span(first: str, length: int) -> set[int]:
    """The registers from the one that an operand names on."""
    found = re.fullmatch(r"R(\d+)", first)
    return set(range(int(found[1]), int(found[1]) + length)) if found else set()


def gmma_registers(x: Instruction) -> tuple[set[int], set[int]] | None:
    """(accumulators, operand A) of a GMMA in registers, none if it is another instruction."""
    if not (shape := GMMA.match(x.opcode)):
        return None
    return span(x.operands[0], int(shape[1]) // (4 if shape[2] == "F16" else 2)), span(x.operands[1], 4)


def width(opcode: str) -> int:
    """Registers of what an instruction moves or makes."""
    if ".128" in opcode or opcode.endswith(".M88.4") or re.match(r"HMMA.*F32", opcode):
        return 4
    pair = r".*(\.64\b|\.F64|WIDE|\.M88\.2$)|CS2R(?!\.32)|D(ADD|MUL|FMA)|HMMA"
    return 2 if re.match(pair, opcode) else 1


def registers(x: Instruction) -> tuple[set[int], set[int]]:
    """(written, read) by an instruction that is no GMMA."""
    operands = list(x.operands)
    written: set[int] = set()
    if not WITHOUT_RESULT.match(x.opcode):
        while operands and PREDICATE.fullmatch(operands[0]):
            operands.pop(0)
        if operands and "[" not in operands[0]:
            written = span(operands.pop(0), width(x.opcode))
    read = {int(first) + i for first, pair in REGISTER.findall(", ".join(operands)) for i in range(2 if pair else 1)}
    if x.opcode.startswith("ST"):
        read |= set().union(*(span(operand, width(x.opcode)) for operand in operands))
    return written, read


def sums(code: list[Instruction]) -> Iterator[str]:
    """Registers of a GMMA that are touched while it may run."""
    used = {i: found for i, x in enumerate(code) if (found := gmma_registers(x))}

    def step(at: int, running: Running) -> Running:
        x = code[at]
        if at in used:
            running = {**running, at: OPEN}
            return {i: min(age + 1, MOST) for i, age in running.items()} if "gsb0" in x.operands else running
        if x.opcode.startswith("WARPGROUP.DEPBAR"):
            return {i: age for i, age in running.items() if age < int(x.operands[1], 16)}
        return running

    for at, running in enumerate(reaching(code, step) if used else []):
        written, read = used[at] if at in used else registers(code[at])
        for i in running:
            added, operand = used[i]
            # The tensor core adds to the same registers in the order of the instructions.
            if touched := (written & operand) | (read & added) | (set() if at in used else written & added):
                yield f"{code[at]} touches R{min(touched)} of {code[i]}, which may still run"
                break


def slots(code: list[Instruction], every: bool = False) -> Iterator[str]:
    """Arrivals while an LDS of the ring given back may still read, or any LDS if told so."""
    waits = last_waits(code)
    filled = rings(code, waits)
    given = {offset(x) for x in code if ARRIVAL.match(x.opcode)} & filled.keys()
    others = set().union(*(full for empty, full in filled.items() if empty not in given))

    def step(at: int, running: Running) -> Running:
        x, running = code[at], waited(code[at], running)
        counted = x.opcode.startswith("LDS") and x.scoreboard < 6 and (every or waits[at].keys() != {OWN_COPIES})
        return {**running, at: x.scoreboard} if counted else running

    for x, running in zip(code, reaching(code, step), strict=True):
        if ARRIVAL.match(x.opcode):
            # Another CTA's barrier has no offset: it is of a ring of which this CTA gives itself nothing back.
            full = None if every else filled.get(offset(x), others if ".RED" in x.opcode else None)
            reads = [i for i in waited(x, running) if not full or not waits[i] or full & waits[i].keys()]
            if reads:
                yield f"{x} while {code[min(reads)]} may still read"


def rings(code: list[Instruction], waits: list[Running]) -> dict[int, set[int]]:
    """For the offset of empty barriers those of the full ones, by who waits for the former and announces the latter."""
    filled: dict[int, set[int]] = {}
    for i, x in enumerate(code):
        if ANNOUNCED.fullmatch(x.opcode):
            for empty in waits[i]:
                filled.setdefault(empty, set()).add(offset(x))
    return filled


def last_waits(code: list[Instruction]) -> list[Running]:
    """Offsets of the barriers that a warp may have waited for last when it comes to each instruction."""
    copies = any(x.opcode == "LDGDEPBAR" for x in code)

    def step(at: int, last: Running) -> Running:
        x = code[at]
        if x.opcode.startswith("SYNCS.PHASECHK"):
            return {offset(x): 0}
        return {OWN_COPIES: 0} if copies and x.opcode.startswith("DEPBAR") else last

    return reaching(code, step)


def offset(x: Instruction) -> int:
    """The constant in the address of an instruction's barrier."""
    found = re.search(r"\[[^\]]*?(?:\b0x([0-9a-f]+))?\]", ", ".join(x.operands))
    return int(found[1] or "0", 16) if found else 0


def waited(x: Instruction, running: Running) -> Running:
    """What still runs once an instruction is issued; a fence is after all reads that come before it."""
    zero = ALL if re.match(r"MEMBAR|FENCE", x.opcode) else x.waits
    if x.opcode.startswith("DEPBAR") and x.operands[1] == "0x0":
        zero |= 1 << int(x.operands[0].removeprefix("SB"))
    return {i: scoreboard for i, scoreboard in running.items() if not zero >> scoreboard & 1}


def hazards(code: list[Instruction], every: bool = False) -> list[str]:
    return [*sums(code), *slots(code, every)]


def listings(paths: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    for path in paths:
        if path.is_dir():
            yield from listings(sorted(path.rglob("*.cubin")))
        elif path.suffix == ".sass":
            yield path, path.read_text()
        else:
            run = subprocess.run(["cuobjdump", "-sass", str(path)], capture_output=True, text=True, check=True)
            yield path, run.stdout


def main(arguments: list[str]) -> int:
    wrong = total = 0
    for path, listing in listings(Path(argument) for argument in arguments if argument != "--all"):
        for name, code in kernels(listing):
            found = hazards(code, "--all" in arguments)
            wrong, total = wrong + bool(found), total + 1
            more = f"; and {len(found) - 3} more" * (len(found) > 3)
            print(f"{path.name} {name}: {'; '.join(found[:3]) or 'nothing found'}{more}", flush=True)
    if not total:
        raise SystemExit(
            f"no kernel in {' '.join(arguments) or 'nothing'}; expected cubins, *.sass or their directories"
        )
    print(f"{total} kernels, {wrong} with hazards")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
