"""What the proof of a family's kernels runs: configurations pairwise, shapes, data, schedules, the judge of a result.

A row gives every field of `Config` and every property of a product a value, so that any two values of two different
ones meet in some row, where a kernel with both can be built. A row multiplies three shapes, each under every schedule.
What differs between families is a `Sweep`; there is one a file beside this one.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from operands import POISON, every_code_and_scale, quantize_on_cpu, same_bits, small_integers

import blockscale as bs
from blockscale import families, plan, reference, store
from blockscale.config import Config
from blockscale.problem import NVFP4, Problem, Target

SMS = 8  # of an emulated GPU: a cluster of the largest size, and more tiles than CTAs in most products
SCHEDULES = (("eager", 0), ("lazy", 0), ("fifo", 0), ("random", 0), ("random", 1), ("random", 2))
DATA = ("every code and scale", "positive", "integers")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
UNIT = 2.0**-5  # the global scale of NVFP4 results
HINTS = (None, "evict_first", "evict_last")
PRODUCT = {
    "out_dtype": (*DTYPES, NVFP4),
    "bias": (None, "fp32", "fp16", "bf16"),
    "activation": (None, "relu", "gelu", "silu"),
    "alpha": ("none", "float", "tensor"),
}
MOST_SECONDS = {"large": 1.2, "small": 0.4, "batches": 0.6}  # of a product, about; the quickest where none is so quick


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


# Of the first a cluster of any size has several tiles, in both directions where it can; of the second some have one
# row, one column, less than a block or many k tiles; the last are batches. Narrow ones are for tiles that are not
# repeated. Sizes are odd, around a tile, a block or an atom.
LARGE = (
    *(Shape(530, 300, 80), Shape(300, 530, 272), Shape(700, 260, 48), Shape(257, 513, 17), Shape(260, 384, 528)),
    *(Shape(530, 8, 272), Shape(300, 7, 600), Shape(530, 40, 80), Shape(290, 33, 300), Shape(257, 16, 528)),
    *(Shape(8, 530, 272), Shape(5, 300, 600), Shape(40, 530, 80), Shape(33, 290, 300), Shape(16, 257, 528)),
)
SMALL = (
    *(Shape(1, 1, 1), Shape(1, 8, 15), Shape(3, 65, 64), Shape(17, 16, 65), Shape(129, 1, 16), Shape(63, 255, 511)),
    *(Shape(128, 128, 256), Shape(7, 64, 2304), Shape(136, 200, 160), Shape(2, 2, 3000), Shape(33, 40, 129)),
    *(Shape(130, 7, 1024), Shape(6, 130, 1024), Shape(8, 48, 96), Shape(200, 14, 257), Shape(1, 256, 1500)),
)
BATCHES = (
    *(Shape(33, 40, 80, 3, 0), Shape(130, 24, 64, 0, 2), Shape(129, 8, 272, 2, 2), Shape(1, 136, 48, 4, 4)),
    *(Shape(7, 140, 100, 0, 3), Shape(260, 70, 33, 2, 0), Shape(5, 5, 16, 2, 3)),
)

# The shapes on which GPU MODE's NVFP4 GEMM competition tests (gpu-mode/reference-kernels, nvfp4_gemm/task.yml).
GPU_MODE = (
    *(Shape(128, 256, 256), Shape(128, 1536, 7168), Shape(128, 3072, 1536), Shape(256, 7168, 256)),
    *(Shape(256, 7168, 2048), Shape(384, 7168, 2304), Shape(512, 512, 7168), Shape(512, 4096, 512)),
    *(Shape(512, 1536, 7168), Shape(2304, 4608, 7168)),
)
# Those of its NVFP4 GEMV competition, tests and benchmarks (nvfp4_gemv/task.yml): a row by a matrix, or two by two.
GPU_MODE_GEMV = (
    *(Shape(1, 128, 256), Shape(1, 128, 1536), Shape(1, 128, 3072), Shape(1, 256, 7168), Shape(1, 2432, 4608, 2, 2)),
    *(Shape(1, 384, 7168, 2, 2), Shape(1, 512, 512, 2, 2), Shape(1, 512, 4096, 2, 2), Shape(1, 512, 1536, 2, 2)),
    *(Shape(1, 7168, 16384), Shape(1, 4096, 7168), Shape(1, 7168, 2048)),
)


def scaled(shape: Shape) -> Shape:
    """A shape of the competition with as many rows, up to 512, an eighth of the columns and of k."""
    sizes = min(shape.m, 512), max(shape.n // 8, 96), max(shape.k // 8, 256)
    return Shape(*sizes, shape.batch_a, shape.batch_b)


Pair = tuple[tuple[str, object], tuple[str, object]]


@dataclass(frozen=True, eq=False)
class Sweep:
    """What is swept of one family.

    Attributes:
        target: the GPU.
        config: the values of each field of `Config` that the family has, the first that which forbids least.
        count: of the rows.
        seconds: about what a product takes on the emulator, from a row and a shape.
        relaxed: fields that decide whether two values can meet, besides themselves: a kernel with both is looked for
            among all values of these.
        never: the pairs of fields of which some values are refused together. Pairs left out of the rows are so for a
            reason that is known.
        shapes: a pool of each kind, of which a row takes one.
        product: the values of a product's properties.
        sms: multiprocessors of the emulated GPU.
        competition: shapes whose choices run on the same shapes scaled down.
        seed: of a few the one with the fewest rows. sample: of so many rows CI runs one.
    """

    target: Target
    config: Mapping[str, tuple[object, ...]]
    count: int
    seconds: Callable[[Row, Shape], float]
    relaxed: tuple[str, ...] = ("tile",)
    never: frozenset[tuple[str, str]] = frozenset()
    shapes: Mapping[str, tuple[Shape, ...]] = field(
        default_factory=lambda: {"large": LARGE, "small": SMALL, "batches": BATCHES}
    )
    product: Mapping[str, tuple[object, ...]] = field(default_factory=lambda: PRODUCT)
    sms: int = SMS
    competition: tuple[Shape, ...] = GPU_MODE
    seed: int = 4
    sample: int = 12

    def __post_init__(self) -> None:
        family = self.family
        assert set(self.config) == {*family.CODE_FIELDS, *family.CALL_FIELDS}, "every field of a configuration is swept"

    @property
    def family(self) -> families.Family:
        return families.of(self.target)

    @functools.cached_property
    def values(self) -> dict[str, tuple[object, ...]]:
        return {**self.config, **self.product}

    def row(self, values: Mapping[str, object]) -> Row:
        rest = {name: value for name, value in values.items() if name in self.product}
        fields = {name: value for name, value in values.items() if name in self.config}
        return Row(self, Config(**fields), **rest)  # type: ignore[arg-type] # properties of a product

    def contest(self, shape: Shape) -> tuple[str, Row, Shape]:
        """Of a shape of the competition: its case in the record; the heuristics' choice for the whole shape with fp16
        results, as the competition has them; what that is to multiply."""
        row = Row(self, bs.config_for(shape.m, shape.n, shape.k, gpu=self.target.name), "fp16")
        return f"GPU MODE {shape} as {scaled(shape)}: {row}", row, scaled(shape)

    @functools.cached_property
    def possible_pairs(self) -> dict[Pair, dict[str, object]]:
        """The pairs of values that some kernel has both of, each with the first such kernel that was found."""
        found: dict[Pair, dict[str, object]] = {}
        for (one, ones), (other, others) in itertools.combinations(self.values.items(), 2):
            for x, y in itertools.product(ones, others):
                pair = (one, x), (other, y)
                fitting = next((values for values in self._completions(pair) if self.row(values).builds()), None)
                if fitting is not None:
                    found[pair] = fitting
        return found

    def _completions(self, pair: Pair) -> Iterator[dict[str, object]]:
        """The ways to give the other fields values that forbid least."""
        base = {name: values[0] for name, values in self.values.items()} | dict(pair)
        free = {name: self.values[name] for name in self.relaxed if name not in dict(pair)}
        for chosen in itertools.product(*free.values()):
            yield base | dict(zip(free, chosen, strict=True))

    @functools.cached_property
    def rows(self) -> tuple[Row, ...]:
        """Rows that cover every possible pair: around a pair that is still missing, each field in turn takes the value
        that brings the most new pairs while the kernel still builds."""
        draw = random.Random(self.seed)
        missing = dict.fromkeys(sorted(self.possible_pairs, key=repr))
        found: list[Row] = []
        while missing:
            pair = next(iter(missing))
            values = dict(self.possible_pairs[pair])
            order = [name for name in self.values if name not in dict(pair)]
            draw.shuffle(order)
            settled = dict(pair)
            for name in order:
                gains = []
                for value in self.values[name]:
                    if self.row(values | {name: value}).builds():
                        met = sum(self._pair(name, value, *other) in missing for other in settled.items())
                        gains.append((met, draw.random(), value))
                values[name] = max(gains, key=lambda gain: gain[:2])[2]
                settled[name] = values[name]
            row = self.row(values)
            found.append(row)
            for covered in row.pairs():
                missing.pop(covered, None)
        return tuple(found)

    def _pair(self, one: str, x: object, other: str, y: object) -> Pair:
        names = list(self.values)
        return ((one, x), (other, y)) if names.index(one) < names.index(other) else ((other, y), (one, x))


@dataclass(frozen=True)
class Row:
    """One configuration, and what its products have besides operands."""

    sweep: Sweep = field(repr=False)
    config: Config
    out_dtype: str = "bf16"
    bias: str | None = None
    activation: str | None = None
    alpha: str = "float"

    def values(self) -> dict[str, object]:
        return {name: getattr(self.config if name in self.sweep.config else self, name) for name in self.sweep.values}

    def __str__(self) -> str:
        return f"{self.config}; {self.out_dtype}, bias {self.bias}, {self.activation}, alpha {self.alpha}"

    def pairs(self) -> set[Pair]:
        """Any two fields with their values."""
        return set(itertools.combinations(self.values().items(), 2))

    def problem(self, shape: Shape) -> Problem:
        batches = max(shape.batch_a, shape.batch_b, 1), max(shape.batch_a, 1), max(shape.batch_b, 1)
        if batches[1] not in (1, batches[0]) or batches[2] not in (1, batches[0]):
            batches = 1, 1, 1  # both broadcast: matrix by matrix
        epilogue = {"out_dtype": self.out_dtype, "bias": self.bias, "activation": self.activation}
        return Problem(shape.m, shape.n, shape.k, *batches, **epilogue)

    @property
    def sms(self) -> int:
        """Multiprocessors of the emulated GPU: CTAs of a cluster need one each."""
        return max(self.sweep.sms, self.config.split)

    def does(self, shape: Shape) -> bool:
        return families.supports(self.problem(shape), self.sweep.target, self.config) is None

    def builds(self) -> bool:
        """Whether there can be such a kernel, for a problem that one tile covers."""
        return self.does(self.least)

    @property
    def least(self) -> Shape:
        return Shape(1, 1, 64)

    @property
    def quick(self) -> bool:
        """Whether CI has time for it."""
        return self.seconds(Shape(1, 1, 1)) < 0.3

    def seconds(self, shape: Shape) -> float:
        return self.sweep.seconds(self, shape)

    def multiply(self, shape: Shape, data: str, margin: int) -> torch.Tensor:
        return multiply(self, shape, data, margin)

    def shapes(self, number: int) -> list[Shape]:
        """One of each kind that it does in a second or so; which ones turns with the row's number."""
        found = []
        for kind, pool in self.sweep.shapes.items():
            fitting = sorted((shape for shape in pool if self.does(shape)), key=self.seconds)
            quick = [s for s in pool if s in fitting and self.seconds(s) <= MOST_SECONDS[kind]] or fitting[:1]
            found.append(quick[number % len(quick)])
        return found if self.seconds(found[0]) < 3 else found[:1]  # wide clusters with many instructions

    def code(self) -> bytes:
        """What the emulator executes: PTX and host code of its kernels, compiled where the store has them not."""
        problems = [self.problem(self.least)]
        if self.out_dtype == NVFP4:  # whose result is compared with the fp32 one's
            problems.append(replace(problems[0], out_dtype="fp32"))
        found = []
        for problem in problems:
            parts = plan.artefact(problem, self.sweep.target, self.config, store.default_store()).parts
            cubin = parts["cubin"].read_bytes()  # not the same in two runs of the assembler
            found += [parts["ptx"].read_bytes(), parts["object"].read_bytes().replace(cubin, b"")]
        return b"".join(found)


@functools.lru_cache(maxsize=256)
def operands(shape: Shape, data: str) -> tuple[bs.NVFP4Tensor, bs.NVFP4Tensor, torch.Tensor, torch.Tensor]:
    """a, b, the exact product, and sum |a||b|; scales of rows that are only padding hold NaN."""
    seed = 7 * shape.m + 5 * shape.n + 3 * shape.k
    a = operand(shape.m, shape.k, shape.batch_a, data, seed)
    b = operand(shape.n, shape.k, shape.batch_b, data, seed + 1)
    if shape.batch_a not in (0, shape.batch_b) and shape.batch_b:  # (2, 1) and (3): both broadcast
        a = _unsqueezed(a)
    x, y = reference.values(a), reference.values(b).mT
    return a, b, x @ y, x.abs() @ y.abs()


def _unsqueezed(t: bs.NVFP4Tensor) -> bs.NVFP4Tensor:
    size = torch.Size((t.shape[0], 1, *t.shape[1:]))
    return bs.NVFP4Tensor(t.codes.unsqueeze(1), t.scales.unsqueeze(1), t.global_scale, t.layout, size)


def operand(rows: int, k: int, batch: int, data: str, seed: int) -> bs.NVFP4Tensor:
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


def bias_of(dtype: str | None, n: int) -> torch.Tensor | None:
    """Small integers, exact in every dtype."""
    return None if dtype is None else ((torch.arange(n) * 5) % 17 - 8).to(DTYPES[dtype])


def multiply(row: Row, shape: Shape, data: str, margin: int) -> torch.Tensor:
    """One product into a poisoned result, inside an active emulator; rows lie `margin` elements apart from each other.

    Returns:
        The bytes of the result, to be compared with those under another schedule.

    Raises:
        AssertionError: an element is wrong, or something beside the result was written.
    """
    a, b, product, magnitude = operands(shape, data)
    alpha, bias = alpha_of(row.alpha, data), bias_of(row.bias, shape.n)
    options = {"alpha": alpha, "bias": bias, "activation": row.activation, "config": row.config}
    dtype = DTYPES.get(row.out_dtype, torch.float32)
    wide = torch.full((*product.shape[:-1], shape.n + margin), math.nan, dtype=dtype)
    y = wide[..., : shape.n]
    bs.gemm(a, b, out=y, out_dtype=dtype, **options)
    judge(y, product, magnitude, alpha, bias, row.activation, shape.k, exact=data == "integers")
    assert wide[..., shape.n :].isnan().all(), "elements between the rows of the result were written"
    if row.out_dtype != "nvfp4":
        return y.contiguous().view(torch.uint8)
    out = bs.NVFP4Tensor.zeros(product.shape, global_scale=UNIT)
    out.codes.fill_(0xFF)
    out.scales.view(torch.uint8).fill_(POISON)
    bs.gemm(a, b, out=out, **options)
    expected = quantize_on_cpu(y.contiguous(), global_scale=UNIT)
    assert same_bits(out.codes, expected.codes), "codes are not those of quantising the fp32 result"
    assert same_bits(out.scales, expected.scales), "scales are not those of quantising the fp32 result"
    return torch.cat((out.codes.flatten(), out.scales.view(torch.uint8).flatten()))


def judge(
    y: torch.Tensor,
    product: torch.Tensor,
    magnitude: torch.Tensor,
    alpha: object,
    bias: torch.Tensor | None,
    activation: str | None,
    k: int,
    *,
    exact: bool,
) -> None:
    """Raises AssertionError unless the contract is kept; `exact`: unless every bit is right, where none is rounded."""
    factor = 1.0 if alpha is None else float(alpha)
    added = 0.0 if bias is None else bias.double()
    expected = reference.activate(product * factor + added, activation)
    if exact and activation in (None, "relu"):
        assert torch.equal(y, expected.to(y.dtype)), "an integer result is not exact"
        return
    info = torch.finfo(y.dtype)
    slack = reference.tensor_core_tolerance(k) * magnitude * abs(factor)
    if bias is not None:
        slack = slack + 2.0**-24 * (bias.double().abs() + expected.abs())
    slack = 1.13 * slack  # the steepest an activation is
    rounding = info.eps / 2 * (expected.abs() + slack) + info.smallest_normal * info.eps / 2
    reference.check(y, expected, rounding + slack)
