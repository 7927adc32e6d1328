"""`blockscale compile --gpu h200 --shapes FILE --quantize bf16 --expand`: fill a store, for here or another machine."""

import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from blockscale import expansion, families, heuristics, plan
from blockscale.cli.terminal import AsJson, output, plain_table, print_json, progress, refusals
from blockscale.config import Config
from blockscale.problem import NVFP4, Problem, Target, target_named
from blockscale.quantize import device
from blockscale.store import Artefact, Store, default_store, key_of, origin

Dtype = Literal["bf16", "fp16", "fp32"]
Method = Literal["rtn", "four_over_six", "mse"]
Before = Literal["swiglu", "rms_norm"]


@dataclass(frozen=True)
class Kernel:
    """One artefact, and the shapes that take it, none for the quantiser's; `seconds` to compile it, 0 if the store had
    it; `linked`: whether it runs where the compiler is not installed."""

    key: str
    config: str
    out_dtype: str
    shapes: list[tuple[int, int, int]]
    bytes: int
    seconds: float
    linked: bool


def compile_shapes(
    gpu: Annotated[str, typer.Option(help="The GPU to compile for, such as b200.")],
    shapes: Annotated[
        Path | None, typer.Option(help="For products: a file with M N K on every line; # begins a comment.")
    ] = None,
    sms: Annotated[int | None, typer.Option(help="Multiprocessors of the GPU, if only a part of it is used.")] = None,
    out_dtype: Annotated[Dtype, typer.Option(help="Dtype of the results.")] = "bf16",
    quantize: Annotated[Dtype | None, typer.Option(help="The kernels of `quantize` too, for x of this dtype.")] = None,
    method: Annotated[Method, typer.Option(help="Of --quantize.")] = "rtn",
    before: Annotated[Before | None, typer.Option(help="What x goes through before --quantize.")] = None,
    expand: Annotated[
        bool, typer.Option("--expand", help="Hopper: what expands weights and NVFP4 activations, and their products.")
    ] = False,
    store: Annotated[Path | None, typer.Option(help="The directory to fill; the user's store by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compile the kernels that products of these shapes take, invariant ones included, or that `quantize` does, for
    every layout. No GPU is needed.

    Sent to a machine with the GPU, the store serves it without the compiler: name it there in BLOCKSCALE_CACHE.
    """
    kept = default_store() if store is None else Store(store)
    with refusals(as_json):
        target = target_named(gpu)
        if sms is not None:
            if not 1 <= sms <= target.sms:
                raise ValueError(f"--sms: {sms}, expected 1 to {target.sms}")
            target = replace(target, sms=sms)
        if shapes is None and quantize is None and not expand:
            raise ValueError("--shapes, --quantize, --expand: none given, expected one of them or more")
        if expand and target.backend != "sm90":
            raise ValueError(f"--expand: {gpu} multiplies NVFP4 as it is, expected a GPU of sm_90a")
        problems = [] if shapes is None else read(shapes, out_dtype, target)
        variants = [] if quantize is None else device.variants(quantize, method, before)
        kept.check_writable()
        kernels = compile_all(problems, target, kept, expand) + compile_quantiser(variants, target, kept)
        if expand:
            kernels += compile_expansion(target, kept)
    if as_json:
        print_json({"gpu": target.name, "store": str(kept.root), "kernels": [asdict(kernel) for kernel in kernels]})
    else:
        show(kernels, target, kept)


def read(path: Path, out_dtype: str, target: Target) -> list[Problem]:
    """The problems of a file, each once, in order.

    Raises:
        ValueError: naming file and line.
    """
    found: dict[Problem, None] = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file in UTF-8: {error}") from None
    for number, line in enumerate(lines, 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        sizes = re.split(r"[\s,x]+", text)
        if len(sizes) != 3 or not all(re.fullmatch(r"[0-9]{1,10}", size) for size in sizes):
            raise ValueError(f"{path}, line {number}: {line.strip()!r}, expected three integers M N K")
        m, n, k = map(int, sizes)
        try:
            found[families.usual(m, n, k, target, out_dtype)] = None
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not found:
        raise ValueError(f"{path}: no shapes in it, expected lines of M N K")
    return list(found)


def compile_all(problems: list[Problem], target: Target, kept: Store, ahead: bool = False) -> list[Kernel]:
    """The artefacts that the heuristics' choices for `problems` need, each once; with `ahead` also those that read
    weights early, which are for activations that are expanded."""
    wanted: dict[str, tuple[Config, list[Problem]]] = {}
    for asked in [variant for problem in problems for variant in (problem, replace(problem, invariant=True))]:
        chosen = heuristics.choose(asked, target).config
        for config in (chosen, replace(chosen, ahead=chosen.pdl)) if ahead else (chosen,):
            wanted.setdefault(str(families.code(config, target)), (config, []))[1].append(asked)
    kernels = []
    with progress(f"compiling for {target.arch}", len(wanted)) as advance:
        for config, group in wanted.values():
            was_there = kept.get(key_of(origin(target, config, group[0]))) is not None
            start = time.perf_counter()
            artefact = plan.artefact(group[0], target, config, kept)
            shapes = list(dict.fromkeys((problem.m, problem.n, problem.k) for problem in group))
            kernels.append(_kernel(artefact, str(config), group[0].out_dtype, shapes, was_there, start))
            advance()
    return kernels


def compile_quantiser(variants: list[device.Variant], target: Target, kept: Store) -> list[Kernel]:
    kernels = []
    with progress(f"compiling for {target.arch}", len(variants)) as advance:
        for variant in variants:
            was_there = kept.get(key_of(device.origin(target, variant))) is not None
            start = time.perf_counter()
            artefact = device.artefact(target, variant, kept)
            kernels.append(_kernel(artefact, str(variant), NVFP4, [], was_there, start))
            advance()
    return kernels


def compile_expansion(target: Target, kept: Store) -> list[Kernel]:
    kernels = []
    variants = expansion.variants()
    with progress(f"compiling for {target.arch}", len(variants)) as advance:
        for variant in variants:
            was_there = kept.get(key_of(expansion.origin(target, variant))) is not None
            start = time.perf_counter()
            artefact = expansion.artefact(target, variant, kept)
            kernels.append(_kernel(artefact, str(variant), variant.dtype, [], was_there, start))
            advance()
    return kernels


def _kernel(
    artefact: Artefact, config: str, out_dtype: str, shapes: list[tuple[int, int, int]], was_there: bool, start: float
) -> Kernel:
    """`start`: of asking for it, of `time.perf_counter`."""
    seconds = 0.0 if was_there else time.perf_counter() - start
    size = sum(path.stat().st_size for path in artefact.parts.values())
    return Kernel(artefact.key, config, out_dtype, shapes, size, round(seconds, 2), "library" in artefact.parts)


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
    if not all(kernel.linked for kernel in kernels):
        typer.echo(
            "blockscale: there is no C compiler to link them; machines without CuTe DSL cannot run them", err=True
        )
