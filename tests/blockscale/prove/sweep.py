"""What the proof of a kernel runs: configurations pairwise, shapes, data, schedules, and the judge of a result.

The full proof is ROWS x SHAPES x SCHEDULES. A row gives every field of `Config`, the dtype of results and the form of
alpha a value, so that any two values of two different fields meet in some row, where a kernel with both can be built.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import dataclass, fields

import torch
from operands import POISON, every_code_and_scale, small_integers

import blockscale as bs
from blockscale import reference
from blockscale.config import Config
from blockscale.families import supports
from blockscale.problem import Problem, target_named

B200 = target_named("b200")
SCHEDULES = (("eager", 0), ("lazy", 0), ("fifo", 0), ("random", 0), ("random", 1), ("random", 2))
DATA = ("every code and scale", "positive", "integers")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

VALUES = {
    "tile": tuple((128, n) for n in (8, 24, 32, 40, 64, 96, 128, 136, 160, 192, 224, 248, 256)),
    "stages": (None, 1, 2, 3, 4),
    "accumulators": (1, 2),
    "raster": ("m", "n"),
    "ctas": (None, 1, 2, 3),
    "persist_mb": (0, 8),
    "out_dtype": tuple(DTYPES),
    "alpha": ("none", "float", "tensor"),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a product; `batch_a` and `batch_b` matrices, 0 for operands without a batch dimension."""

    m: int
    n: int
    k: int
    batch_a: int = 0
    batch_b: int = 0

    def __str__(self) -> str:
        batch = f"-{self.batch_a}x{self.batch_b}" if self.batch_a or self.batch_b else ""
        return f"{self.m}x{self.n}x{self.k}{batch}"


# One row, odd sizes, around a tile and an atom, one tile, many tiles, K below a block, around a block and a stage, and
# more K than the longest ring holds.
SHAPES = (
    *(Shape(1, 1, 1), Shape(1, 8, 15), Shape(1, 64, 16), Shape(2, 3, 48), Shape(3, 65, 64), Shape(5, 7, 100)),
    *(Shape(8, 8, 256), Shape(15, 33, 17), Shape(16, 129, 63), Shape(17, 16, 65), Shape(31, 100, 127)),
    *(Shape(32, 32, 128), Shape(33, 40, 129), Shape(63, 1, 255), Shape(64, 64, 257), Shape(65, 128, 272)),
    *(Shape(96, 96, 320), Shape(100, 24, 400), Shape(63, 255, 511), Shape(128, 64, 64), Shape(128, 128, 256)),
    *(Shape(40, 192, 512), Shape(64, 256, 768), Shape(129, 1, 16), Shape(129, 257, 48), Shape(130, 70, 200)),
    *(Shape(60, 200, 1000), Shape(192, 72, 64), Shape(255, 31, 1024), Shape(256, 128, 256), Shape(257, 129, 96)),
    *(Shape(300, 17, 2304), Shape(1, 256, 4096), Shape(7, 64, 3000), Shape(128, 8, 2560), Shape(384, 24, 80)),
    *(Shape(511, 24, 33), Shape(20, 600, 112), Shape(136, 200, 160), Shape(1, 1000, 64), Shape(512, 16, 16)),
    *(Shape(17, 512, 1), Shape(2, 2, 5120)),
    *(Shape(33, 40, 80, 3, 0), Shape(130, 24, 64, 0, 2), Shape(129, 8, 272, 2, 2), Shape(1, 136, 48, 4, 4)),
)

# The shapes on which GPU MODE's NVFP4 GEMM competition tests (gpu-mode/reference-kernels, nvfp4_gemm/task.yml).
GPU_MODE = (
    *(Shape(128, 256, 256), Shape(128, 1536, 7168), Shape(128, 3072, 1536), Shape(256, 7168, 256)),
    *(Shape(256, 7168, 2048), Shape(384, 7168, 2304), Shape(512, 512, 7168), Shape(512, 4096, 512)),
    *(Shape(512, 1536, 7168), Shape(2304, 4608, 7168)),
)


@dataclass(frozen=True)
class Row:
    """One configuration, one dtype of results, one form of alpha."""

    config: Config
    out_dtype: str
    alpha: str

    @classmethod
    def of(cls, values: dict[str, object]) -> Row:
        own = {f.name for f in fields(Config)}
        rest = {name: value for name, value in values.items() if name not in own}
        return cls(Config(**{name: value for name, value in values.items() if name in own}), **rest)

    def values(self) -> dict[str, object]:
        return {name: getattr(self.config, name, None) if name in CONFIG else getattr(self, name) for name in VALUES}

    def __str__(self) -> str:
        return f"{self.config}, {self.out_dtype}, alpha {self.alpha}"

    def builds(self) -> bool:
        """Whether there can be such a kernel, for a problem that one tile covers."""
        return supports(Problem(1, 1, 64, out_dtype=self.out_dtype), B200, self.config) is None


CONFIG = {f.name for f in fields(Config)}
Pair = tuple[tuple[str, object], tuple[str, object]]


def pairs(row: Row) -> set[Pair]:
    """Any two fields with their values."""
    return set(itertools.combinations(row.values().items(), 2))


@functools.cache
def possible_pairs() -> set[Pair]:
    """The pairs of values that some kernel has both of: what limits them are tile, stages and accumulators."""
    limited = ("tile", "stages", "accumulators")
    free = {name: values for name, values in VALUES.items() if name not in limited}
    base = {name: values[0] for name, values in free.items()}
    found: set[Pair] = set()
    for chosen in itertools.product(*(VALUES[name] for name in limited)):
        row = Row.of(base | dict(zip(limited, chosen, strict=True)))
        if row.builds():
            for name, value in [(name, value) for name, values in free.items() for value in values]:
                found |= pairs(Row.of(row.values() | {name: value}))
    for (one, ones), (other, others) in itertools.combinations(free.items(), 2):
        found |= {((one, x), (other, y)) for x in ones for y in others}
    return found


@functools.cache
def rows() -> tuple[Row, ...]:
    """Rows that cover every possible pair: each the best of some drawn around a pair that is still missing."""
    draw = random.Random(0)
    missing = sorted(possible_pairs(), key=repr)
    found: list[Row] = []
    while missing:
        best, gain = None, 0
        while best is None:
            for _ in range(60):
                values = {name: draw.choice(values) for name, values in VALUES.items()} | dict(missing[0])
                row = Row.of(values)
                if row.builds() and (gains := len(pairs(row).intersection(missing))) > gain:
                    best, gain = row, gains
        found.append(best)
        covered = pairs(best)
        missing = [pair for pair in missing if pair not in covered]
    return tuple(found)


@functools.lru_cache(maxsize=256)
def operands(shape: Shape, data: str) -> tuple[bs.NVFP4Tensor, bs.NVFP4Tensor, torch.Tensor, torch.Tensor]:
    """a, b, the exact product, and sum |a||b|; scales of rows that are only padding hold NaN."""
    seed = 7 * shape.m + 5 * shape.n + 3 * shape.k
    a = _operand(shape.m, shape.k, shape.batch_a, data, seed)
    b = _operand(shape.n, shape.k, shape.batch_b, data, seed + 1)
    x, y = reference.values(a), reference.values(b).mT
    return a, b, x @ y, x.abs() @ y.abs()


def _operand(rows: int, k: int, batch: int, data: str, seed: int) -> bs.NVFP4Tensor:
    if data == "integers":
        t, _ = small_integers(rows * max(batch, 1), k, seed)
    else:
        t = every_code_and_scale(rows * max(batch, 1), k, positive=data == "positive", seed=seed)
    codes, scales = t.codes, t.with_layout("linear").scales
    if batch:
        codes, scales = codes.view(batch, rows, -1), scales.view(batch, rows, -1)
    unit = t.global_scale
    t = bs.NVFP4Tensor.from_parts(codes, scales, unit, shape=(*codes.shape[:-1], k), layout="linear").with_layout(
        "128x4"
    )
    padded = t.scales.view(torch.uint8).clone().view(max(batch, 1), -1)
    real = torch.zeros(padded.shape[1], dtype=torch.bool)
    blocks = -(-k // 64) * 4
    full = bs.NVFP4Tensor(t.codes, t.scales, unit, t.layout, torch.Size((*t.shape[:-1], 16 * blocks)))
    real[torch.from_numpy(reference.scale_index(full)).flatten()] = True  # padding of K is zero, by the format
    padded[:, ~real] = POISON
    scales = padded.view(t.scales.shape).view(torch.float8_e4m3fn)
    return bs.NVFP4Tensor.from_parts(t.codes, scales, unit, shape=t.shape, check_values=False)


def alpha_of(form: str, data: str) -> float | torch.Tensor | None:
    """An alpha of this form; for integers a power of two, so that results stay exact."""
    value = 0.25 if data == "integers" else 3.7e-4
    return {"none": None, "float": value, "tensor": torch.tensor(-value)}[form]


def multiply(row: Row, shape: Shape, data: str, margin: int) -> None:
    """One product into a poisoned result, inside an active emulator; rows lie `margin` elements apart from each other.

    Raises:
        AssertionError: an element is wrong, or something beside the result was written.
    """
    a, b, product, magnitude = operands(shape, data)
    alpha = alpha_of(row.alpha, data)
    dtype = DTYPES[row.out_dtype]
    wide = torch.full((*product.shape[:-1], shape.n + margin), math.nan, dtype=dtype)
    bs.gemm(a, b, out=wide[..., : shape.n], alpha=alpha, out_dtype=dtype, config=row.config)
    judge(wide[..., : shape.n], product, magnitude, alpha, shape.k, exact=data == "integers")
    assert wide[..., shape.n :].isnan().all(), "elements between the rows of the result were written"


def judge(
    y: torch.Tensor, product: torch.Tensor, magnitude: torch.Tensor, alpha: object, k: int, *, exact: bool
) -> None:
    """Raises AssertionError unless the contract is kept; `exact`: unless every bit is right."""
    factor = 1.0 if alpha is None else float(alpha)
    expected = product * factor
    if exact:
        assert torch.equal(y, expected.to(y.dtype)), "an integer result is not exact"
        return
    info = torch.finfo(y.dtype)
    slack = reference.tensor_core_tolerance(k) * magnitude * abs(factor)
    rounding = info.eps / 2 * (expected.abs() + slack) + info.smallest_normal * info.eps / 2
    reference.check(y, expected, rounding + slack)
