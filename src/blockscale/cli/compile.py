"""`blockscale compile --gpu b200 --shapes FILE`: fill a store with kernels, for here or for another machine."""

import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from blockscale import heuristics, plan
from blockscale.cli.terminal import AsJson, output, plain_table, print_json, progress, refusals
from blockscale.problem import Problem, Target, target_named
from blockscale.store import Store, default_store, key, origin

Dtype = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class Kernel:
    """One artefact, and the first of the shapes that take it; `seconds` to compile it, 0 if the store had it."""

    key: str
    config: str
    out_dtype: str
    shapes: list[tuple[int, int, int]]
    bytes: int
    seconds: float


def compile_shapes(
    gpu: Annotated[str, typer.Option(help="The GPU to compile for, such as b200.")],
    shapes: Annotated[Path, typer.Option(help="A file with M N K on every line; # begins a comment.")],
    out_dtype: Annotated[Dtype, typer.Option(help="Dtype of the results.")] = "bf16",
    store: Annotated[Path | None, typer.Option(help="The directory to fill; the user's store by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compile the kernels that products of these shapes take. No GPU is needed.

    Sent to a machine with the GPU, the store serves it without the compiler: name it there in BLOCKSCALE_CACHE.
    """
    kept = default_store() if store is None else Store(store)
    with refusals(as_json):
        target = target_named(gpu)
        problems = [Problem(*shape, out_dtype=out_dtype) for shape in read(shapes)]
        kernels = compile_all(problems, target, kept)
    if as_json:
        print_json({"gpu": target.name, "store": str(kept.root), "kernels": [asdict(kernel) for kernel in kernels]})
    else:
        show(kernels, target, kept)


def read(path: Path) -> list[tuple[int, int, int]]:
    """The shapes of a file, each once, in order."""
    found: dict[tuple[int, int, int], None] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        sizes = re.split(r"[\s,x]+", text)
        if len(sizes) != 3 or not all(re.fullmatch(r"[0-9]{1,10}", size) for size in sizes):
            raise ValueError(f"{path}, line {number}: {line.strip()!r}, expected three integers M N K")
        m, n, k = map(int, sizes)
        found[m, n, k] = None
    if not found:
        raise ValueError(f"{path}: no shapes in it, expected lines of M N K")
    return list(found)


def compile_all(problems: list[Problem], target: Target, kept: Store) -> list[Kernel]:
    """The artefacts that the heuristics' choices for `problems` need, each once."""
    wanted: dict[str, list[Problem]] = {}
    for problem in problems:
        code = str(heuristics.choose(problem, target).config.code())
        wanted.setdefault(code, []).append(problem)
    kernels = []
    with progress(f"compiling for {target.arch}", len(wanted)) as advance:
        for group in wanted.values():
            config = heuristics.choose(group[0], target).config
            was_there = kept.get(key(origin(target, config, group[0]))) is not None
            start = time.perf_counter()
            artefact = plan.artefact(group[0], target, config, kept)
            seconds = 0.0 if was_there else time.perf_counter() - start
            size = sum(path.stat().st_size for path in artefact.parts.values())
            shapes = [(problem.m, problem.n, problem.k) for problem in group]
            kernels.append(Kernel(artefact.key, str(config), group[0].out_dtype, shapes, size, round(seconds, 2)))
            advance()
    return kernels


def show(kernels: list[Kernel], target: Target, kept: Store) -> None:
    table = plain_table(f"Kernels for {target.name} ({target.arch}) in {kept.root}")
    for heading in ("kernel", "configuration", "out"):
        table.add_column(heading)
    for heading in ("shapes", "KiB", "compiled in"):
        table.add_column(heading, justify="right")
    for kernel in kernels:
        seconds = f"{kernel.seconds:.1f} s" if kernel.seconds else "was there"
        sizes = (str(len(kernel.shapes)), f"{kernel.bytes / 1024:.0f}")
        table.add_row(kernel.key[:12], Text(kernel.config), kernel.out_dtype, *sizes, seconds)
    output().print(table)
