"""B300 on the software GPU as a program meets it: getting started, the presets, and a layer of the demo's."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from operands import every_code_and_scale, same_bits

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import blockscale as bs
from blockscale import reference
from blockscale.families.sm103.presets import PRESETS

ROOT = Path(__file__).parents[3]


def check(a, b, y, **options):
    exact = reference.gemm(a, b, **options)
    c = reference.tensor_core_tolerance(a.shape[-1])
    reference.check(y, exact, reference.tolerance(a, b, exact, out_dtype=y.dtype, c=c, **options))


def test_getting_started():
    """The document's program; packed operands give the same."""
    source = re.search(r"^```python\n(.*?)^```", (ROOT / "docs/sm103.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    scope = {}
    exec(compile(source, "docs/sm103.md", "exec"), scope)
    a, b, c, config, gpu = (scope[name] for name in ("a", "b", "c", "config", "gpu"))
    assert config.mma_k == 96
    assert gpu.findings == []
    check(a, b, c)
    alpha = a.global_scale * b.global_scale
    with bs.emulated("sm_103a", sms=2):
        packed = bs.gemm(
            a.codes, b.codes, a.scales, b.scales, k=scope["k"], alpha=alpha, out_dtype=torch.float16, config=config
        )
    assert same_bits(packed, c)


@pytest.mark.parametrize(("size", "n", "sms"), [(8192, 1100, 32), (16384, 600, 16), (32768, 1100, 16)])
def test_presets_on_small_products(size, n, sms):
    """Several blocks, for one slot or, of different numbers, for two; sizes that are no multiples of anything."""
    m, k = 300, 328
    config = PRESETS[size, size, size].config
    config = replace(config, fixed=config.fixed and (m, n, k))
    a, b = every_code_and_scale(m, k), every_code_and_scale(n, k, seed=1)
    with bs.emulated("gb300", sms=sms, schedule="random", seed=size) as gpu:
        y = bs.gemm(a, b, out_dtype=torch.float16, config=config, alpha=1e-3)
    assert gpu.findings == []
    check(a, b, y, alpha=1e-3)


def test_a_layer_like_the_demos():
    """Tokens by 384 features: fewer columns than K = 96 wants."""
    random = torch.Generator().manual_seed(0)
    x = bs.quantize(torch.randn(200, 384, generator=random))
    weight = bs.quantize(torch.randn(384, 384, generator=random))
    with bs.emulated("sm_103a") as gpu:
        assert bs.config_for(200, 384, 384).mma_k == 64
        y = bs.gemm(x, weight, out_dtype=torch.float32)
    assert gpu.findings == []
    check(x, weight, y)
