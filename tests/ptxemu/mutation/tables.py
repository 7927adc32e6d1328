"""The tables of docs/mutations.md from record.json: `python tables.py` puts them between the marks in the document."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from explanations import explain

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[2] / "docs" / "mutations.md"
RECORD = HERE / "record.json"
_MARKED = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def judged(kernels: dict[str, Any]) -> dict[str, Counter[str]]:
    """Of each kernel: how many mutants were caught, and how many survivors are of each kind."""
    found = {}
    for name, part in kernels.items():
        kinds = Counter(explain(name, part["ptx"], survivor).kind for survivor in part["survivors"])
        kinds["caught"] = sum(caught for caught, _ in part["counts"].values())
        found[name] = kinds
    return found


def rate(kinds: Counter[str], strict: bool = False) -> float:
    """The part that was caught of the faults that change something; strict: by strict checks too."""
    caught = kinds["caught"] + strict * kinds["strict"]
    return caught / (kinds["caught"] + kinds["missed"] + kinds["strict"])


def summary(kernels: dict[str, Any]) -> str:
    rows = [
        "| kernel | mutants | run | caught | equivalent | strict | missed | caught, of effective ones | and strict |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    found = judged(kernels)
    total: Counter[str] = sum(found.values(), Counter())
    made = {name: part["mutants"] for name, part in kernels.items()}
    for name, kinds in [*found.items(), ("all", total)]:
        numbers = [made.get(name, sum(made.values())), kinds.total()]
        cells = [*numbers, *(kinds[kind] for kind in ("caught", "equivalent", "strict", "missed"))]
        rates = [f"{100 * rate(kinds, strict):.1f} %" for strict in (False, True)]
        rows.append(f"| {' | '.join([name, *map(str, cells), *rates])} |")
    return "\n".join(rows) + "\n"


def operators(kernels: dict[str, Any]) -> str:
    """Caught of all, by operator and kernel."""
    names = list(kernels)
    rows = [f"| operator | {' | '.join(names)} | all |", "|---" * (len(names) + 2) + "|"]
    known = {operator: None for part in kernels.values() for operator in part["counts"]}
    for operator in known:
        counts = [part["counts"].get(operator, (0, 0)) for part in kernels.values()]
        both = (sum(c for c, _ in counts), sum(n for _, n in counts))
        cells = [f"{caught}/{n}" if n else "" for caught, n in [*counts, both]]
        rows.append(f"| {operator.replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def ways(kernels: dict[str, Any]) -> str:
    """How the faults showed first."""
    total: Counter[str] = sum((Counter(part["how"]) for part in kernels.values()), Counter())
    rows = ["| shows as | mutants |", "|---|---|"]
    return "\n".join([*rows, *(f"| {how} | {n} |" for how, n in total.most_common())]) + "\n"


def survivors(kernels: dict[str, Any]) -> str:
    """Every survivor, by kernel and by its explanation."""
    parts = []
    for name, part in kernels.items():
        classes: dict[tuple[str, str], list[str]] = {}
        for survivor in part["survivors"]:
            rule = explain(name, part["ptx"], survivor)
            row = f"| {_place(survivor, part)} | {survivor['operator'].replace('_', ' ')} | {_code(survivor)} |"
            classes.setdefault((rule.kind, rule.why), []).append(row)
        parts.append(f"### {name}\n")
        for (kind, why), rows in sorted(classes.items(), key=lambda item: (item[0][0] != "missed", item[0])):
            parts.append(
                f"**{kind}**: {why}\n\n| line | operator | instruction, change |\n|---|---|---|\n"
                + "\n".join(rows)
                + "\n"
            )
    return "\n".join(parts)


def _place(survivor: dict[str, Any], part: dict[str, Any]) -> str:
    several = len({s["text"] for s in part["survivors"]}) > 1
    return f"{survivor['text']} {survivor['line']}" if several else str(survivor["line"])


def _code(survivor: dict[str, Any]) -> str:
    before, change = (_short(survivor[key].replace("|", "\\|")) for key in ("before", "change"))
    return f"`{before}` {change}"


def _short(text: str) -> str:
    return text if len(text) <= 110 else f"{text[:80]} ... {text[-25:]}"


def document(text: str, kernels: dict[str, Any]) -> str:
    """The document with its marked parts made anew."""
    made = {"summary": summary, "operators": operators, "ways": ways, "survivors": survivors}
    return _MARKED.sub(lambda m: f"{m[1]}{made[m[2]](kernels)}{m[3]}", text)


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text(), record()["kernels"]))
