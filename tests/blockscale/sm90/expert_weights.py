"""Grouped weight-only products of the Hopper tests: operands on the GPU, what they come to, and the kernels they take.

    python tests/blockscale/sm90/expert_weights.py DIR

fills a store with those kernels where the compiler is, for a machine that has none.
"""

import sys
from dataclasses import replace

import torch
from weight_only import UNIT, check

import blockscale as bs
from blockscale import heuristics, plan
from blockscale.families.sm90.grouped.choice import candidates
from blockscale.problem import GroupedProblem, target_named
from blockscale.store import Store

EPILOGUES = [("bf16", "bf16", None, None), ("fp16", "fp16", "fp32", "silu"), ("bf16", "fp32", "bf16", "gelu")]
"""Of activations, results and bias the dtype, and the activation function."""
MEANS = (1, 2, 4, 8, 16, 24, 40, 64)


def experts(count, n, k, positive=False, seed=0):
    """(E, N, K) on the GPU in fragment order, over all codes and all scales but 0; and each one's values in float64."""
    random = torch.Generator("cuda").manual_seed(seed * 1_000_003 + n * 65_537 + k)

    def draw(low, high, columns):
        return torch.randint(low, high, (count, n, columns), dtype=torch.uint8, device="cuda", generator=random)

    codes = draw(0, 256, -(-k // 2))
    if positive:
        codes &= 0x77
    if k % 2:
        codes[..., -1] &= 0xF
    parts = codes, draw(1, 127, -(-k // 16)).view(torch.float8_e4m3fn)
    plain = bs.NVFP4Tensor.from_parts(*parts, 1.0, shape=(count, n, k), layout="linear")
    scaled = replace(plain, global_scale=torch.full((), UNIT, device="cuda"))
    return scaled.with_layout("fragment"), plain.dequantize() * UNIT


def table(sizes):
    return torch.tensor(sizes, dtype=torch.int32, device="cuda")


def check_groups(y, x, values, sizes, alpha=None, bias=None, activation=None):
    """Raises AssertionError unless every group's rows keep the contract."""
    start = 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        if size:
            own = None if bias is None else bias[e]
            factor = 1.0 if alpha is None else float(alpha[e])
            check(y[rows], x[rows], values[e].double(), factor, own, activation)
        start += size


def problems():
    """Every problem whose kernel a test takes, with the configuration that it asks for or None."""
    for form in ("contiguous", "masked"):
        for config in candidates():
            yield GroupedProblem(64, 200, 520, a="bf16", groups=6, form=form), config
        for mean in MEANS:
            rows = mean * (6 if form == "contiguous" else 1)
            for k in (520, 7168):
                yield GroupedProblem(rows, 200, k, a="bf16", groups=6, form=form), None
            for a, out, bias, activation in EPILOGUES:
                of = {"a": a, "out_dtype": out, "bias": bias, "activation": activation}
                yield GroupedProblem(rows, 200, 520, groups=6, form=form, **of), None


def fill(root):
    """Compiles what is not there; how many kernels there are."""
    target, store = target_named("h200"), Store(root)
    made = set()
    for problem, config in problems():
        chosen = config or heuristics.choose(problem, target).config
        made.add(plan.artefact(problem, target, chosen, store).key)
    return len(made)


if __name__ == "__main__":
    print(fill(sys.argv[1]), "kernels")
