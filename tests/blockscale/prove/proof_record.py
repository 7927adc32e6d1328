"""The record of a proof: a JSON file that a proof resumes from and that is committed when it is complete.

An entry counts for the kernels that it was made with; others are dropped. Which emulator ran it is noted in it.
`python tests/blockscale/prove/proof_record.py` writes what it holds into docs/architecture.md;
a test holds that to it.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from blockscale import store
from blockscale.families.sm100 import KERNEL

ROOT = Path(__file__).parents[3]
PATH = ROOT / "benchmarks" / "records" / "prove-sm100.json"
DOCUMENT = ROOT / "docs" / "architecture.md"
PAIRWISE = 84  # rows


def kernels() -> str:
    """A digest of what writes a kernel's code."""
    return store.sources(KERNEL)[:16]


@functools.cache
def emulator() -> str:
    """A digest of what executes it."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "src" / "ptxemu").rglob("*")):
        if path.suffix in (".py", ".c"):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def load() -> dict[str, dict[str, object]]:
    """The entries made with these kernels, by case."""
    if not PATH.exists():
        return {}
    record = json.loads(PATH.read_text())
    return record["cases"] if record["kernels"] == kernels() else {}


def add(case: str, entry: dict[str, object]) -> None:
    """Put an entry into the file; safe for several processes."""
    with _locked():
        cases = load() | {case: entry | {"emulator": emulator()}}
        names = ("products", "instructions", "findings")
        totals = {name: sum(int(e[name]) for e in cases.values()) for name in names}
        by_emulator = collections.Counter(e["emulator"] for e in cases.values())
        summary = {"kernels": kernels(), "cases_by_emulator": by_emulator, "totals": totals}
        lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(cases.items())]
        head = json.dumps(summary, indent=1).removesuffix("\n}")
        temporary = PATH.with_suffix(".part")
        temporary.write_text(head + ',\n "cases": {\n  ' + ",\n  ".join(lines) + "\n }\n}\n")
        os.replace(temporary, PATH)


def told() -> str:
    """The sentence of DOCUMENT about the record, on a line of its own."""
    cases = load()
    done = sum(name.startswith("row") for name in cases)
    if not done:
        return f"Record: none of the {PAIRWISE} rows for the kernels as they are now."
    products, findings = (sum(int(str(entry[name])) for entry in cases.values()) for name in ("products", "findings"))
    return (
        f"Record: {done} of {PAIRWISE} rows, {len(cases) - done} of the competition's shapes; {products} products "
        f'with `checks="all"`, {findings} findings.'
    )


def tell(document: str) -> str:
    """The document with that sentence."""
    changed, count = re.subn(r"^Record: .*$", lambda _: told(), document, flags=re.MULTILINE)
    assert count == 1, f"{count} lines in {DOCUMENT} begin with 'Record: '"
    return changed


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    PATH.parent.mkdir(parents=True, exist_ok=True)
    with open(PATH.with_suffix(".lock"), "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    DOCUMENT.write_text(tell(DOCUMENT.read_text()))
    print(told())
