"""`blockscale gemm M N K`: random operands, timed, and checked against the float64 reference."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import torch
import typer
from torch import Tensor

import blockscale
from blockscale import NVFP4Tensor, reference
from blockscale.cli.terminal import FAILED, AsJson, output, plain_table, print_json, progress, refusals

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
REPEATS = 5
ROWS = 256  # of the result checked at a time: bounds what is held in float64

Method = Literal["rtn", "four_over_six", "mse"]
Dtype = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True)
class Outcome:
    """How long it took (median) and how far the result is from the reference; errors can be NaN or infinite."""

    seconds: float
    gflops: float
    max_error: float
    error_in_tolerances: float

    @property
    def passed(self) -> bool:
        """Whether the result contract is kept."""
        return self.error_in_tolerances <= 1


def gemm(
    m: Annotated[int, typer.Argument(help="Rows of A and of the result.")],
    n: Annotated[int, typer.Argument(help="Rows of B, columns of the result.")],
    k: Annotated[int, typer.Argument(help="Columns of A and of B.")],
    method: Annotated[Method, typer.Option(help="How the operands are quantised.")] = "rtn",
    weight_only: Annotated[bool, typer.Option("--weight-only", help="Leave A unquantised.")] = False,
    out_dtype: Annotated[Dtype, typer.Option(help="Dtype of the result, and of A with --weight-only.")] = "bf16",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the normally distributed operands.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Multiply random NVFP4 operands, A (M, K) by B (N, K) transposed, and check the result."""
    with refusals(as_json):
        a, b = random_operands(m, n, k, method, DTYPES[out_dtype] if weight_only else None, seed)
        outcome = measure(a, b, DTYPES[out_dtype])
    if as_json:
        asked = {"m": m, "n": n, "k": k, "method": method, "weight_only": weight_only}
        print_json(asked | {"out_dtype": out_dtype, "seed": seed} | asdict(outcome) | {"passed": outcome.passed})
    else:
        show(f"{m} x {n} x {k}, {method}, {'weight only, ' * weight_only}{out_dtype}", outcome)
    if not outcome.passed:
        typer.echo("blockscale: the result is further from the reference than the contract allows", err=True)
        raise typer.Exit(FAILED)


def random_operands(
    m: int, n: int, k: int, method: Method, plain: torch.dtype | None, seed: int
) -> tuple[NVFP4Tensor | Tensor, NVFP4Tensor]:
    """a (M, K), left in dtype `plain` if one is given, and b (N, K)."""
    for name, size, least in (("M", m, 0), ("N", n, 0), ("K", k, 1)):
        if size < least:
            raise ValueError(f"{name} = {size}, must be at least {least}")
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(m, k, generator=generator)
    b = torch.randn(n, k, generator=generator)
    return a.to(plain) if plain else blockscale.quantize(a, method=method), blockscale.quantize(b, method=method)


def measure(a: NVFP4Tensor | Tensor, b: NVFP4Tensor, out_dtype: torch.dtype) -> Outcome:
    """Times a x b^T and compares it with the reference, some rows at a time."""
    (m, k), n = a.shape, b.shape[0]
    with progress(f"multiplying {m} x {n} x {k}", 1 + REPEATS + -(-m // ROWS)) as advance:
        y, seconds = timed(lambda: blockscale.gemm(a, b, out_dtype=out_dtype), advance)
        exact_b = reference.values(b)
        worst = torch.zeros(2, dtype=torch.float64)
        for part, exact_a in zip(torch.split(y, ROWS), torch.split(reference.values(a), ROWS), strict=True):
            worst = torch.maximum(worst, errors(part, exact_a, exact_b))
            advance()
    max_error, in_tolerances = worst.tolist()
    return Outcome(seconds, 2 * m * n * k / seconds / 1e9, max_error, in_tolerances)


def timed(call: Callable[[], Tensor], advance: Callable[[], None]) -> tuple[Tensor, float]:
    """The result, and the median seconds of REPEATS calls after a first that warms up."""
    y = call()
    advance()
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
        advance()
    return y, statistics.median(seconds)


def errors(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The largest error of y, absolute and in units of what the contract allows: (2,) float64; NaN if y has one."""
    if y.numel() == 0:
        return torch.zeros(2, dtype=torch.float64)
    exact = reference.gemm(a, b)
    error = (y.double() - exact).abs()
    allowed = reference.tolerance(a, b, exact, out_dtype=y.dtype)
    return torch.stack([error.max(), (error / allowed).max()])


def show(title: str, outcome: Outcome) -> None:
    table = plain_table(title, show_header=False)
    table.add_row("time", f"{outcome.seconds * 1e3:.3f} ms (median of {REPEATS})")
    table.add_row("speed", f"{outcome.gflops:.1f} GFLOP/s")
    table.add_row("largest error", f"{outcome.max_error:.3g}")
    table.add_row("in units of the tolerance", f"{outcome.error_in_tolerances:.3g}")
    table.add_row("result contract", "[green]kept[/]" if outcome.passed else "[red]broken[/]")
    output().print(table)
