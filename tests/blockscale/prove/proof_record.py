"""The records of the proofs: a JSON file a family that its proof resumes from and that is committed.

An entry counts for the code that it was made with: it holds a digest of the PTX and the host code that ran, and one of
the emulator. `python tests/blockscale/prove/proof_record.py` compiles every kernel (a few minutes), drops the entries
of code that is no more, and writes what is left into docs/architecture.md; a test holds that to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import sweep_sm100
import sweep_sm100_grouped
import sweep_sm103
import sweep_sm103_grouped
import sweep_sm120
from sweep import Row, Sweep

ROOT = Path(__file__).parents[3]
DOCUMENT = ROOT / "docs" / "architecture.md"
SWEEPS: dict[str, Sweep] = {
    "sm100": sweep_sm100.SWEEP,
    "sm100-grouped": sweep_sm100_grouped.SWEEP,
    "sm103": sweep_sm103.SWEEP,
    "sm103-grouped": sweep_sm103_grouped.SWEEP,
    "sm120": sweep_sm120.SWEEP,
}
Entry = dict[str, Any]


def path(family: str) -> Path:
    return ROOT / "benchmarks" / "records" / f"prove-{family}.json"


def code(row: Row) -> str:
    """A digest of what the emulator executes for a row."""
    return hashlib.sha256(row.code()).hexdigest()[:16]


@functools.cache
def emulator() -> str:
    """A digest of what executes it."""
    digest = hashlib.sha256()
    for file in sorted((ROOT / "src" / "ptxemu").rglob("*")):
        if file.suffix in (".py", ".c"):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def row_case(number: int, row: Row) -> str:
    return f"row {number:02d}: {row}"


def cases(family: str) -> Iterator[tuple[str, Row]]:
    """Every case of a family's proof."""
    yield from ((row_case(number, row), row) for number, row in enumerate(SWEEPS[family].rows))
    yield from (SWEEPS[family].contest(shape)[:2] for shape in SWEEPS[family].competition)


def load(family: str) -> dict[str, Entry]:
    """The entries by case, whatever code they are of."""
    return json.loads(path(family).read_text())["cases"] if path(family).exists() else {}


def holds(family: str, case: str, row: Row) -> bool:
    """Whether the case was proven with the code of now."""
    entry = load(family).get(case)
    return entry is not None and entry["code"] == code(row)


def add(family: str, case: str, row: Row, entry: Entry) -> None:
    """Put an entry into the file; safe for several processes."""
    with _locked(family):
        _write(family, load(family) | {case: {**entry, "code": code(row), "emulator": emulator()}})


def prune(family: str) -> None:
    """Drop what is not of the code of now."""
    kept = {case for case, row in cases(family) if holds(family, case, row)}
    with _locked(family):
        _write(family, {case: entry for case, entry in load(family).items() if case in kept})


def _write(family: str, entries: dict[str, Entry]) -> None:
    totals = {name: sum(int(e[name]) for e in entries.values()) for name in ("products", "instructions", "findings")}
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(entries.items())]
    temporary = path(family).with_suffix(".part")
    temporary.write_text(f'{{"totals": {json.dumps(totals)},\n "cases": {{\n  ' + ",\n  ".join(lines) + "\n }\n}\n")
    os.replace(temporary, path(family))


def told(family: str) -> str:
    """The sentence of DOCUMENT about a record, on a line of its own."""
    entries = load(family)
    done = sum(name.startswith("row") for name in entries)
    products, findings = (sum(int(entry[name]) for entry in entries.values()) for name in ("products", "findings"))
    return (
        f"Record of {family}: {done} of {SWEEPS[family].count} rows, {len(entries) - done} of the competition's "
        f'shapes; {products} products with `checks="all"`, {findings} findings.'
    )


def tell(document: str, families: Iterable[str] = tuple(SWEEPS)) -> str:
    """The document with those sentences."""
    for family in families:
        sentence = told(family)
        document, count = re.subn(rf"^Record of {family}: .*$", sentence, document, flags=re.MULTILINE)
        assert count == 1, f"{count} lines in {DOCUMENT} begin with 'Record of {family}: '"
    return document


@contextlib.contextmanager
def _locked(family: str) -> Iterator[None]:
    path(family).parent.mkdir(parents=True, exist_ok=True)
    with open(path(family).with_suffix(".lock"), "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    for each in SWEEPS:
        prune(each)
        print(told(each))
    DOCUMENT.write_text(tell(DOCUMENT.read_text()))
