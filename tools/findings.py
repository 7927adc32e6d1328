"""Runs the wrong programs of docs/examples/findings and puts what they report into docs/emulator.md.

    python tools/findings.py           # rewrites the part of the page between its two markers
    python tools/findings.py FILE      # prints what one program reports, and that its right twin reports nothing

A program is PTX with comments for this tool.  The first line says what is wrong, `// finding: KIND` or `// error: NAME`
what comes of it.  Each `// launch:` is a launch, of a stream where there are several, with options such as `grid=2
cluster=2 block=64 shared=1024 kernel=name checks=strict schedule=eager args=out:uint32:32,in:uint8:256`.  Arrays of one
name are one array, of zeros; a `?` behind the length makes its contents undefined.  The right twin has the lines that
start with `//+` and lacks those that end in `//-`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ptxemu

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples" / "findings"
PAGE = ROOT / "docs" / "emulator.md"
BEGIN, END = "<!-- findings: written by tools/findings.py -->\n", "<!-- end of findings -->\n"


@dataclass(frozen=True)
class Example:
    """A wrong program.  kind: of its finding, or the name of its error; launches: the options of each."""

    name: str
    title: str
    kind: str
    text: str
    launches: tuple[dict[str, str], ...]

    @property
    def wrong(self) -> str:
        """The program, without the marks."""
        return self.text.replace(" //-", "")

    @property
    def right(self) -> str:
        """Its right twin."""
        kept = [line for line in self.text.splitlines() if not line.endswith("//-")]
        return "\n".join(line.replace("//+ ", "", 1) for line in kept)

    @property
    def schedule(self) -> str:
        return self.launches[0].get("schedule", "lazy")


def read(path: Path) -> Example:
    text = path.read_text()
    title = text.splitlines()[0].removeprefix("// ")
    (kind,) = re.findall(r"^// (?:finding|error): (.*)$", text, re.MULTILINE)
    launches = re.findall(r"^// launch:(.*)$", text, re.MULTILINE)
    options = tuple(dict(item.split("=", 1) for item in launch.split()) for launch in launches)
    return Example(path.stem, title, kind, text, options)


def examples() -> list[Example]:
    """In the order of the page: by the number that names begin with."""
    return [read(path) for path in sorted(EXAMPLES.glob("*.ptx"))]


def run(example: Example, text: str, schedule: str = "lazy", seed: int = 0) -> list[ptxemu.Report]:
    """Launches a text as the example says.  Raises what the launches raise; findings are collected."""
    checks = example.launches[0].get("checks", "all")
    (target,) = re.findall(r"^\.target (\w+)", text, re.MULTILINE)
    device = ptxemu.Device(target, schedule=schedule, seed=seed, checks=checks, on_finding="collect")
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    regions = []
    for launch in example.launches:
        for name, kind, size in (arg.split(":") for arg in launch.get("args", "").split(",") if arg):
            if name not in arrays:
                arrays[name] = aligned(int(size.rstrip("?")), kind)
                regions.append(device.register(arrays[name], name, initialised=not size.endswith("?")))
    with device.stream() as stream:
        for launch in example.launches:
            shapes: dict[str, Any] = {
                key: tuple(map(int, launch[key].split(","))) for key in ("grid", "block", "cluster") if key in launch
            }
            names = [arg.partition(":")[0] for arg in launch.get("args", "").split(",") if arg]
            stream.launch(
                text,
                launch.get("kernel"),
                args=[arrays[name] for name in names],
                shared=int(launch.get("shared", 0)),
                **shapes,
            )
    return stream.reports


def aligned(count: int, kind: str) -> np.ndarray[Any, Any]:
    """Zeros at a 256-byte boundary."""
    dtype = np.dtype(kind)
    raw = np.zeros(count * dtype.itemsize + 256, np.uint8)
    start = -raw.ctypes.data % 256
    return raw[start : start + count * dtype.itemsize].view(dtype)


def reported(example: Example) -> str:
    """What a wrong program reports of its kind, as text that is the same in every run."""
    try:
        reports = run(example, example.wrong, example.schedule)
    except ptxemu.Error as error:
        found = f"ptxemu.{type(error).__name__}: {error}"
    else:
        findings = [finding for report in reports for finding in report.findings]
        found = "\n".join(str(finding) for finding in findings if finding.kind == example.kind)
    return re.sub(r"0x[0-9a-f]{9,}", "0x7f...", found)  # addresses of host memory


def section(example: Example) -> str:
    name = f"{example.name}.ptx"
    return (
        f"**{example.kind}**: {example.title} ([{name}](examples/findings/{name}))\n\n```\n{reported(example)}\n```\n"
    )


def page(before: str) -> str:
    """The page with its part rewritten."""
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + "\n" + "\n".join(section(example) for example in examples()) + "\n" + END + tail


def main() -> None:
    if len(sys.argv) > 1:
        example = read(Path(sys.argv[1]))
        print(reported(example))
        print("right twin:", [str(f) for report in run(example, example.right) for f in report.findings] or "clean")
    else:
        PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
