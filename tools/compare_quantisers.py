"""Print, as markdown, where other libraries' NVFP4 quantisation rules and ours differ, and on what share of blocks.

    python tools/compare_quantisers.py > table.md

The other rules are the models in tests/blockscale/peers/rules.py, which the tests hold to the libraries bit for bit, so
no library is needed here. Takes a minute or two on one core.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import blockscale

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "blockscale"))
from peers import rules
from peers.rules import BLOCK, Quantized

SEED = 20260101
ROUNDING = 2.0**-20  # two roundings of a global scale differ by less, two codes by more


def normal(m: int, k: int, g: torch.Generator) -> Tensor:
    return torch.randn(m, k, generator=g)


def student_t2(m: int, k: int, g: torch.Generator) -> Tensor:
    """Student's t with two degrees of freedom: normal over the root of an exponential of mean 1."""
    return normal(m, k, g) / torch.empty(m, k).exponential_(generator=g).sqrt()


def with_zero_blocks(m: int, k: int, g: torch.Generator) -> Tensor:
    x = normal(m, k, g)
    x.view(-1, BLOCK)[::8] = 0
    return x


DATA: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "normal, fp32": normal,
    "normal, bf16": lambda *size: normal(*size).bfloat16(),
    "normal x 0.02 (as weights are), bf16": lambda *size: (normal(*size) * 0.02).bfloat16(),
    "Student t, 2 degrees of freedom, fp32": student_t2,
    "Cauchy, fp32": lambda m, k, g: torch.empty(m, k).cauchy_(generator=g),
    "normal, every eighth block zero, fp32": with_zero_blocks,
}

WORDS = """\
| rule | global scale g | block scale s before rounding to E4M3 | least s | s of an empty block | E2M1 of | code of -0 |
|---|---|---|---|---|---|---|
| **Blockscale** | `amax / 2688`, at least 2^-126; 1 for zeros | `(block_amax / 6) / g` | 0, then every code is 0 | 0 \
| `x / (s * g)` | 8 |
| torchao, block scales only | 1 | `block_amax / 6` | 2^-6 | 2^-6 | `x * (1 / s)` | 8 |
| torchao, per-tensor scale | `amax / 2688`; zeros become NaN | `(block_amax / 6) / g` | 2^-6 | 2^-6 \
| `x * ((1 / g) / s)` | 8 |
| compressed-tensors | `1 / G` with `G = (1 / amax) * 2688`, both steps in the dtype of x; 1 where G overflows, so for \
zeros | `G * (block_amax / 6)`, the quotient in the dtype of x | 2^-9; what rounds to 0 becomes 0.125 | 0.125 \
| `x / (s / G)` | 0 |
| ModelOpt | `amax / 2688`; zeros become NaN | `block_amax / (6 * g)` | 2^-9 | 1 | `x / (s * g)` | 0 |
| TransformerEngine | `amax / 2688` | `block_amax * (e * (1 / 6))` with `e = 2688 / amax` | 0, then what is not 0 \
keeps a code, mostly 7 or 15 | 0 | `x * (1 / (s * (1 / e)))` | 0 |"""


def share(different: Tensor, block: int = BLOCK) -> str:
    """How many blocks hold a difference, for one flag an element; block=1 takes one flag a block."""
    blocks = different.reshape(-1, block).any(dim=1)
    count = int(blocks.sum())
    percent = 100 * count / blocks.numel()
    if percent >= 0.01:
        return f"{percent:.3g} %"
    return f"{count} block{'' if count == 1 else 's'}" if count else "0"


def snr(x: Tensor, restored: Tensor) -> float:
    signal, noise = x.double(), x.double() - restored
    return float(10 * torch.log10(signal.square().sum() / noise.square().sum()))


def rows(data: str, x: Tensor) -> Iterator[str]:
    t = blockscale.quantize(x, method="rtn", layout="linear")
    codes = torch.stack([t.codes & 15, t.codes >> 4], dim=-1).reshape(x.shape)
    ours = Quantized(codes, t.scales.view(torch.uint8), t.global_scale)
    values = ours.dequantize()
    yield f"| {data} | **Blockscale** | | | | | {snr(x, values):.2f} |"
    for name, rule in rules.PEERS.items():
        theirs = rule(x)
        restored = theirs.dequantize()
        error = (restored - values).abs()
        columns = [
            share(theirs.codes != ours.codes),
            share(theirs.scales != ours.scales, block=1),
            share(error > 0),
            share(error > ROUNDING * torch.maximum(restored.abs(), values.abs())),
            f"{snr(x, restored):.2f}",
        ]
        yield f"| | {name} | {' | '.join(columns)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096, help="a multiple of 64")
    args = parser.parse_args()
    print(WORDS)
    blocks = args.rows * args.columns // BLOCK
    size = f"{args.rows} x {args.columns}"
    print(f"\nShare of the {blocks} blocks of a {size} tensor, seed {SEED}, torch {torch.__version__}:\n")
    print("| data | rule | a code differs | s differs | a value differs | by over 2^-20 of it | SNR, dB |")
    print("|---|---|---|---|---|---|---|")
    for name, make in DATA.items():
        x = make(args.rows, args.columns, torch.Generator().manual_seed(SEED))
        print(*rows(name, x), sep="\n", flush=True)


if __name__ == "__main__":
    main()
