"""Measures products: operands, truth, candidates, and as many measurements as a loss takes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from blockscale import NVFP4Tensor, families
from blockscale.backends import target_here
from blockscale.bench import ceilings, rivals
from blockscale.bench.record import AGAIN, Measured, lost
from blockscale.bench.rivals import EXACT, RIVALS, Product
from blockscale.bench.timing import ROUNDS, Candidate, Truth, medians, race, truth
from blockscale.families.sm90.choice import candidates
from blockscale.problem import Problem

SIZES = (4096, 5120, 7168, 8192, 11008, 14336, 28672)
ROWS = (1, 2, 3, 4, 8, 16, 17, 32, 48, 64)
TABLE = ((8192, 8192), (4096, 4096), (28672, 8192), (14336, 4096), (4096, 14336))
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
UNIT = 2.0**-6  # a global scale that leaves every value exact in both dtypes

MANY = ((8192, 8192), (4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192), (11008, 5120))
Shape = tuple[int, int, int]
"""M, N, K."""

SUITES: dict[str, list[Shape]] = {
    "table": [(m, n, k) for n, k in TABLE for m in (1, 4, 8, 16, 32, 64)],
    "grid": [(m, n, k) for n in SIZES for k in SIZES for m in ROWS],
    "prefill": [
        *((m, 8192, 8192) for m in (128, 192, 256, 384, 512, 1000, 1024, 2048, 4096, 8192)),
        *((m, n, k) for n, k in MANY[1:] for m in (128, 256, 512, 1024, 2048)),
    ],
}


@dataclass(frozen=True)
class Asked:
    """What to measure, and how.

    Attributes:
        ahead: race the library's choice with weights read ahead too.
        every_config: race all configurations that can do a product, not the library's choice alone.
    """

    shapes: Sequence[Shape]
    rivals: Sequence[str]
    dtype: str = "bf16"
    ahead: bool = True
    every_config: bool = False
    rounds: int = ROUNDS


def measure(asked: Asked, device: torch.device, advance: Callable[[], None]) -> list[Measured]:
    """Every product in turn; `advance` is called after each.

    Raises:
        Wrong: a result is. ValueError, RuntimeError: a shape cannot be done, or CUDA refuses.
    """
    skipped = rivals.missing(asked.rivals)
    wanted = [name for name in asked.rivals if name not in skipped]
    found = []
    with _exact_reductions():
        for n, k in dict.fromkeys((n, k) for _, n, k in asked.shapes):
            rows = [m for m, *weight in asked.shapes if weight == [n, k]]
            products, truths = _operands(rows, n, k, DTYPES[asked.dtype], device)
            read_us = ceilings.reading(products[0].weight.nbytes, device, asked.rounds)
            for product, right in zip(products, truths, strict=True):
                found.append(_measure(asked, product, right, wanted, read_us, skipped))
                advance()
                torch.cuda.empty_cache()
    return found


def _measure(
    asked: Asked,
    product: Product,
    right: Truth,
    wanted: Sequence[str],
    read_us: float,
    skipped: dict[str, str],
) -> Measured:
    racing = [*_own(asked, product), *(RIVALS[name](product) for name in wanted)]
    (m, k), n = product.x.shape, product.weight.shape[0]
    us: dict[str, list[float]] = {candidate.name: [] for candidate in racing}
    every: dict[str, list[float]] = {candidate.name: [] for candidate in racing}
    while True:
        times = race(racing, right, asked.rounds)
        for name, median in medians(times).items():
            us[name].append(round(median, 3))
            every[name] += times[name]
        quartiles = {name: _quartiles(values) for name, values in every.items()}
        made = Measured(m, n, k, asked.dtype, product.weight.nbytes, us, quartiles, round(read_us, 3), skipped)
        measured = len(us["ours"])
        if measured == AGAIN or (measured == 1 and not lost(made, EXACT[1:])):
            return made


def _own(asked: Asked, product: Product) -> Iterator[Candidate]:
    yield rivals.ours(product)
    if asked.ahead:
        yield rivals.ahead(product)
    if asked.every_config:
        target = target_here(product.x.device)
        assert target is not None
        (m, k), n = product.x.shape, product.weight.shape[0]
        problem = Problem(m, n, k, a=asked.dtype, out_dtype=asked.dtype)
        for config in candidates():
            if families.supports(problem, target, config) is None:
                yield rivals.ours(product, config)


def _operands(
    rows: Sequence[int], n: int, k: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Product], list[Truth]]:
    """Products that share a weight, and what they must come to; normally distributed, the same in every run."""
    random = torch.Generator(device).manual_seed(n * 65_537 + k)
    codes = torch.randint(0, 256, (n, -(-k // 2)), dtype=torch.uint8, device=device, generator=random)
    scales = torch.randint(0x20, 0x50, (n, -(-k // 16)), dtype=torch.uint8, device=device, generator=random)
    parts = codes, scales.view(torch.float8_e4m3fn), UNIT
    weight = NVFP4Tensor.from_parts(*parts, shape=(n, k), layout="linear")
    x = torch.randn(max(rows), k, dtype=torch.float32, device=device, generator=random).to(dtype)
    right = truth(x, weight.dequantize(), dtype)
    products = [Product(x[:m].contiguous(), weight) for m in rows]
    return products, [Truth(right.exact[:m], right.allowed[:m]) for m in rows]


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(values, n=4)
    return round(low, 3), round(high, 3)


@contextmanager
def _exact_reductions() -> Iterator[None]:
    """Inside, cuBLAS sums in fp32 to the end, so that every candidate is held to the same contract."""
    flags = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = [getattr(flags, name) for name in names]
    try:
        for name in names:
            setattr(flags, name, False)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(flags, name, value)
