"""Runs the suite and writes record.json: `python record.py [--each N] [kernel ...]`, which goes on where it stopped.

What each mutant did is kept under build/mutation, by kernel, PTX and emulator, so that a run that stops loses nothing
and a changed emulator starts anew.  Survivors run once more with strict checks, where findings that the kernel gives as
it is do not count, and with a fault in the place of the changed line, which tells whether it is reached at all.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from cases import OWN, Setup
from mutants import OPERATORS, Mutant
from ptx_lines import read
from suite import Kernel, identity, sample

import ptxemu
from ptxemu.testing import RUNS

HERE = Path(__file__).parent
RECORD = HERE / "record.json"
PROGRESS = HERE.parents[2] / "build" / "mutation"
ALL = 1 << 30
ORDER = (*OWN, "nvidia-1cta", "nvidia-multicast", "nvidia-clc", "blockscale-sm100")
FAULT = "{{ .reg .b64 nowhere; mov.b64 nowhere, 0; {guard}st.global.b32 [nowhere], 0; }}"


def setups() -> dict[str, Callable[[], Setup]]:
    """Every case that can be made here: some need the compiler of CuTe DSL."""
    found = dict(OWN)
    with contextlib.suppress(ImportError):
        from nvidia_cases import NVIDIA

        found |= NVIDIA
    with contextlib.suppress(ImportError):
        from blockscale_cases import BLOCKSCALE

        found |= BLOCKSCALE
    return found


def run(name: str, setup: Setup, each: int = ALL) -> dict[str, Any]:
    """A kernel's part of the record, of up to `each` mutants an operator, drawn by seed 0."""
    kernel = Kernel(setup)
    done = _Progress(name, setup)
    known = kernel.strict("", None, RUNS)
    counts: dict[str, list[int]] = {operator: [0, 0] for operator in OPERATORS}
    how: dict[str, int] = {}
    survivors = []
    for text, mutant in sample(kernel, 0, each):
        key = identity(text, mutant)
        if key not in done.results:
            result = kernel.run(text, mutant)
            entry: dict[str, Any] = {"caught": result.caught, "schedule": result.schedule}
            if not result.caught:
                entry["survivor"] = survivor(kernel, text, mutant, known)
            done.add(key, entry)
        entry = done.results[key]
        counts[mutant.operator][0] += bool(entry["caught"])
        counts[mutant.operator][1] += 1
        how[entry["caught"]] = how.get(entry["caught"], 0) + 1
        if not entry["caught"]:
            survivors.append(entry["survivor"])
    how.pop("", None)
    return {
        "ptx": setup.digest,
        "mutants": len(kernel.mutants),
        "counts": {operator: count for operator, count in counts.items() if count[1]},
        "how": dict(sorted(how.items(), key=lambda item: -item[1])),
        "survivors": survivors,
    }


def survivor(kernel: Kernel, text: str, mutant: Mutant, known: set[tuple[str, int]]) -> dict[str, Any]:
    """A survivor's entry.  known: what strict checks find in the kernel as it is."""
    new = sorted(kernel.strict(text, mutant) - known)
    return {
        "text": text,
        "line": mutant.line,
        "operator": mutant.operator,
        "change": mutant.change,
        "before": mutant.before,
        "strict": f"{new[0][0]} at line {new[0][1]}" if new else "",
        "reached": _reached(kernel, text, mutant),
    }


def _reached(kernel: Kernel, text: str, mutant: Mutant) -> bool:
    """Whether a thread carries out the changed instruction.  A changed guard counts as reached."""
    if mutant.operator == "change_predicate":
        return True
    guard = read(kernel.setup.texts[text])[mutant.line].guard
    new = FAULT.format(guard=f"@{guard} " if guard else "")
    fault = Mutant("", mutant.line, "", "", ((mutant.line, new),))
    return bool(kernel.run(text, fault, "none").caught)


class _Progress:
    """What has been run before of one kernel, with this emulator."""

    def __init__(self, name: str, setup: Setup) -> None:
        digest = hashlib.sha256()
        for part in (*setup.texts.values(), *(path.read_text() for path in sorted(_sources(name)))):
            digest.update(part.encode())
        PROGRESS.mkdir(parents=True, exist_ok=True)
        self.path = PROGRESS / f"{name}-{digest.hexdigest()[:12]}.jsonl"
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        self.results: dict[str, dict[str, Any]] = dict(json.loads(line) for line in lines)

    def add(self, key: str, entry: dict[str, Any]) -> None:
        self.results[key] = entry
        with self.path.open("a") as file:
            file.write(json.dumps([key, entry]) + "\n")


def _sources(name: str) -> Iterator[Path]:
    """What a result depends on besides the PTX: the emulator, and how kernels are launched and changed."""
    yield from Path(ptxemu.__file__).parent.rglob("*.py")
    yield from (HERE / f"{module}.py" for module in ("mutants", "ptx_lines", "suite", _module(name)))


def _module(name: str) -> str:
    """Where a case is written."""
    family = name.partition("-")[0]
    return f"{family}_cases" if family in ("nvidia", "blockscale") else "cases"


def versions() -> dict[str, str]:
    installed = {d.name: d.version for d in importlib.metadata.distributions() if d.name.startswith("nvidia-cutlass")}
    return {"python": platform.python_version(), "numpy": np.__version__, **dict(sorted(installed.items()))}


def write(parts: dict[str, Any]) -> None:
    """Puts the parts into the record; kernels that did not run keep theirs."""
    known = json.loads(RECORD.read_text())["kernels"] if RECORD.exists() else {}
    known |= parts
    record = {
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "schedules": [f"{schedule}-{seed}" for schedule, seed in RUNS],
        "kernels": {name: known[name] for name in ORDER if name in known},
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    known = setups()
    parser = argparse.ArgumentParser(description="Runs mutants and writes record.json.")
    parser.add_argument("--each", type=int, default=ALL, help="mutants an operator and kernel, drawn by seed 0")
    parser.add_argument("kernels", nargs="*", default=[*known], choices=[*known, []])
    given = parser.parse_args()
    for name in given.kernels:
        part = run(name, known[name](), given.each)
        write({name: part})
        caught, total = (sum(count[i] for count in part["counts"].values()) for i in (0, 1))
        print(f"{name}: {caught} of {total} caught, {len(part['survivors'])} survive", flush=True)


if __name__ == "__main__":
    main()
