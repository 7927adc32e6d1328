"""Weight-only products of the Hopper tests: operands on the GPU, what they come to, and the kernels they take.

    python tests/blockscale/sm90/weight_only.py DIR [PART PARTS]

fills a store with those kernels, or every n-th, where the compiler is, for a machine that has none.
"""

import itertools
import sys
from dataclasses import replace

import torch

import blockscale as bs
from blockscale import expansion, heuristics, plan
from blockscale.bench.run import SUITES
from blockscale.families.sm90.choice import candidates
from blockscale.problem import Problem, target_named
from blockscale.store import Store, key_of, origin

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
ROWS = (1, 2, 3, 4, 8, 16, 17, 32, 48, 64, 130)
EPILOGUES = [
    ("bf16", "bf16", None, None),
    ("fp16", "fp16", None, None),
    ("bf16", "fp32", None, None),
    ("fp16", "bf16", "fp32", "silu"),
    ("bf16", "bf16", "bf16", "gelu"),
    ("bf16", "fp16", "fp16", "relu"),
    ("fp16", "fp32", "fp16", None),
    ("bf16", "bf16", "bf16", None),
]
"""Of activations, results and bias the dtype, and the activation function."""
UNIT = 2.0**-6


def weight(n, k, positive=False, unit=UNIT, seed=0):
    """(N, K) on the GPU in fragment order, over all codes and all scales but 0; and its values, exact, in float64."""
    random = torch.Generator("cuda").manual_seed(seed * 1_000_003 + n * 65_537 + k)

    def draw(low, high, columns):
        return torch.randint(low, high, (n, columns), dtype=torch.uint8, device="cuda", generator=random)

    codes = draw(0, 256, -(-k // 2))
    if positive:
        codes &= 0x77
    if k % 2:
        codes[:, -1] &= 0xF
    parts = codes, draw(1, 127, -(-k // 16)).view(torch.float8_e4m3fn)
    plain = bs.NVFP4Tensor.from_parts(*parts, 1.0, shape=(n, k), layout="linear")
    scaled = replace(plain, global_scale=torch.full((), unit, device="cuda"))
    return scaled.with_layout("fragment"), plain.dequantize().double() * float(scaled.global_scale)


ACTIVATIONS = {
    None: lambda y: y,
    "relu": lambda y: y.clamp(min=0),
    "gelu": lambda y: y * 0.5 * torch.erfc(-y / 2**0.5),
    "silu": lambda y: y * torch.sigmoid(y),
}


def check(y, x, values, alpha=1.0, bias=None, activation=None):
    """Raises AssertionError unless y is act(alpha x values^T + bias) within the contract of tensor cores."""
    x, k = x.double(), x.shape[-1]
    z = alpha * (x @ values.T)
    slack = (4 + k / 1024) * 2.0**-20 * abs(alpha) * (x.abs() @ values.abs().T)
    if bias is not None:
        z = z + bias.double()
        slack = slack + 2.0**-24 * (bias.double().abs() + z.abs())
    exact, slack = ACTIVATIONS[activation](z), 1.13 * slack
    info = torch.finfo(y.dtype)
    allowed = slack + info.eps / 2 * (exact.abs() + slack) + info.smallest_normal * info.eps / 2
    overflow = (exact.abs() > info.max) & (y.double() == exact.sign() * torch.inf)
    bad = ~(((y.double() - exact).abs() <= allowed) | overflow)
    at = tuple(bad.nonzero()[0].tolist()) if bool(bad.any()) else ()
    assert not at, f"{int(bad.sum())} of {bad.numel()} wrong, first {at}: {float(y[at])!r}, exact {float(exact[at])!r}"


SIZES = (4096, 5120, 7168, 8192, 11008, 14336, 28672)
ODD = ((1, 15, 17, 100, 1000), (1, 15, 16, 17, 63, 64, 127, 129, 1000, 4100), (1, 3, 5, 9, 33, 63, 65, 130))
"""Of odd sizes N, K and M."""


MANY = (65, 96, 127, 128, 129, 192, 256, 384, 500, 1000, 1024, 2048)
MANY_SIZES = ((4096, 4096), (8192, 8192), (5120, 14336), (1000, 28672), (200, 776), (33, 63))
MANY_OF = (66, 128, 200, 500)
"""Rows of activations beyond 64, weights for them, and rows for every way to finish a product."""


def problems():
    """Every problem whose kernel a test takes, with the configuration that it asks for or None."""
    for n, k, m in itertools.product(SIZES, SIZES, ROWS):
        yield Problem(m, n, k, a="bf16"), None
    for n, k, m in itertools.product(*ODD):
        yield Problem(m, n, k, a="bf16"), None
    for n, k, m in itertools.product((33, 200, 300, 1000, 4096), (64, 200, 1000, 2000, 4096, 4100), (*ROWS, 5, 9, 40)):
        yield Problem(m, n, k, a="bf16"), None
        yield Problem(m, n, k, a="bf16", out_dtype="fp32"), None
    for (a, out, bias, activation), m in itertools.product(EPILOGUES, ROWS):
        yield Problem(m, 1000, 2080, a=a, out_dtype=out, bias=bias, activation=activation), None
    for (a, out), m in itertools.product((("fp16", "fp16"), ("bf16", "bf16"), ("bf16", "fp32")), ROWS):
        yield Problem(m, 64, 4096, a=a, out_dtype=out), None
        yield Problem(m, 1000, 4100, a=a, out_dtype=out), None
        yield Problem(m, 1000, 4100, a=a, out_dtype=out, invariant=True), None
    for m in ROWS:
        yield Problem(m, 1 << 20, 6144, a="bf16"), None
        yield Problem(m, 1000, 4096, a="bf16", bias="bf16"), None
    for (n, k), m in itertools.product(MANY_SIZES, MANY):
        yield Problem(m, n, k, a="bf16"), None
    for (a, out, bias, activation), m in itertools.product(EPILOGUES, MANY_OF):
        yield Problem(m, 1000, 2080, a=a, out_dtype=out, bias=bias, activation=activation), None
    for m in (100, 128, 140, 192, 256, 520):
        yield Problem(m, 200, 2000, a="bf16", out_dtype="fp32"), None
        yield Problem(m, 1000, 4104, a="bf16"), None
        yield Problem(m, 300, 1000, a="bf16"), None
    for config in candidates():
        yield Problem(64, 8192, 8192, a="bf16"), config
    for m, n, k in SUITES["table"]:
        problem = Problem(m, n, k, a="bf16")
        yield problem, replace(heuristics.choose(problem, target_named("h200")).config, ahead=True)


def expanded_problems():
    """Those of NVFP4 activations, which read weights early."""
    for m in (1, 3, 5, 17, 64, 130, 300):
        yield Problem(m, 1000, 4104, a="bf16")
    yield Problem(5, 300, 200, a="bf16")
    yield Problem(70, 1000, 2080, a="bf16", out_dtype="fp32", bias="fp32", activation="silu")
    yield Problem(33, 1000, 4096, a="bf16")
    yield Problem(64, 4096, 8192, a="bf16")
    yield Problem(70, 300, 512, a="bf16", out_dtype="fp32")


def variants():
    """Of the dequantiser: what products take, and what its own tests do."""
    wanted = expansion.variants()
    plain = (replace(v, factors=None, dtype=dtype) for v in wanted for dtype in ("bf16", "fp16"))
    return dict.fromkeys((*wanted, *plain))


def fill(root, part=0, parts=1):
    """Compiles every parts-th kernel from `part` on."""
    target, store = target_named("h200"), Store(root)
    kernels = {}
    for problem, config in problems():
        chosen = config or heuristics.choose(problem, target).config
        kernels.setdefault(key_of(origin(target, chosen, problem)), (problem, chosen))
    for problem in expanded_problems():
        early = replace(heuristics.choose(problem, target).config, ahead=True)
        kernels.setdefault(key_of(origin(target, early, problem)), (problem, early))
    for problem, config in list(kernels.values())[part::parts]:
        plan.artefact(problem, target, config, store)
    for variant in list(variants())[part::parts]:
        expansion.artefact(target, variant, store)
    return len(kernels)


if __name__ == "__main__":
    print(fill(sys.argv[1], *map(int, sys.argv[2:])), "kernels")
