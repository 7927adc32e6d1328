"""The record of a proof: a JSON file that a proof resumes from and that is committed when it is complete.

An entry counts for the sources that it was made with, of the kernels and of the emulator; others are dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from blockscale import store

ROOT = Path(__file__).parents[3]
PATH = ROOT / "benchmarks" / "records" / "prove-sm100.json"


def sources() -> dict[str, str]:
    """Digests of what writes a kernel's code and of what executes it."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src" / "ptxemu").rglob("*")):
        if path.suffix in (".py", ".c"):
            digest.update(path.read_bytes())
    return {"kernels": store._sources()[:16], "emulator": digest.hexdigest()[:16]}


def load() -> dict[str, dict[str, object]]:
    """The entries made with these sources, by case."""
    if not PATH.exists():
        return {}
    record = json.loads(PATH.read_text())
    return record["cases"] if record["sources"] == sources() else {}


def add(case: str, entry: dict[str, object]) -> None:
    """Put an entry into the file; safe for several processes."""
    with _locked():
        cases = load() | {case: entry}
        totals = {
            name: sum(int(e.get(name, 0)) for e in cases.values()) for name in ("products", "refused", "instructions")
        }
        record = {"sources": sources(), "totals": totals, "cases": dict(sorted(cases.items()))}
        lines = json.dumps(record, indent=1)
        temporary = PATH.with_suffix(".part")
        temporary.write_text(lines + "\n")
        os.replace(temporary, PATH)


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    PATH.parent.mkdir(parents=True, exist_ok=True)
    with open(PATH.with_suffix(".lock"), "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
