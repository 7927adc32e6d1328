"""Many rows of activations on Hopper: on the software GPU with every check, small shapes, and on silicon."""

from dataclasses import replace

import pytest
import torch
from operands import every_code_and_scale, same_bits, small_integers
from weight_only import DTYPES, EPILOGUES, MANY, MANY_OF, MANY_SIZES, check, weight

import blockscale as bs
from blockscale import heuristics, reference, store
from blockscale.families.sm90 import launch, prefill
from blockscale.problem import Problem, target_named

H200 = target_named("h200")
ON_SILICON = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
SPLIT = bs.Config((96, 64), stages=1, pdl=True, wgmma=True, split=2, buffers=2)
SHARED = bs.Config((96, 64), stages=2, pdl=True, wgmma=True, cluster=(1, 2), buffers=3, ctas=2)
WIDE = bs.Config((192, 128), stages=1, pdl=True, ahead=True, wgmma=True, buffers=2, ctas=1, group=2)


@pytest.fixture
def compiler():
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")


def emulated(x, plain, config, out_dtype, schedule="lazy", **options):
    out = torch.full((x.shape[0], plain.shape[0]), torch.nan, dtype=out_dtype)
    with bs.emulated("sm_90a", schedule=schedule, seed=1) as gpu:
        bs.gemm(x, plain.with_layout("fragment"), out=out, out_dtype=out_dtype, config=config, **options)
    exact = reference.gemm(x, plain, **options)
    of_sums = {k: v for k, v in options.items() if k != "activation"}
    c = reference.tensor_core_tolerance(x.shape[-1])
    reference.check(out, exact, reference.tolerance(x, plain, exact, **of_sums, out_dtype=out_dtype, c=c))
    assert gpu.findings == []


@pytest.mark.parametrize(
    ("config", "schedule", "m", "n", "k"),
    [
        (SPLIT, "eager", 67, 17, 264),
        (SPLIT, "random", 97, 20, 136),
        (SHARED, "lazy", 200, 130, 200),
        (SHARED, "fifo", 66, 270, 64),
        (WIDE, "random", 194, 20, 1160),
    ],
)
def test_contract_under_orders_of_completion(compiler, config, schedule, m, n, k):
    x = torch.rand(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()
    emulated(x, every_code_and_scale(n, k, positive=True), config, torch.bfloat16, schedule)


@pytest.mark.parametrize(
    ("config", "bias", "activation", "out_dtype"),
    [(SPLIT, torch.float32, "silu", torch.float32), (WIDE, torch.bfloat16, "relu", torch.float16)],
)
def test_alpha_bias_and_activation_emulated(compiler, config, bias, activation, out_dtype):
    x, row = torch.randn(66, 72).half(), torch.randn(21).to(bias)
    options = {"alpha": 0.01, "bias": row, "activation": activation}
    emulated(x, every_code_and_scale(21, 72), config, out_dtype, **options)


def test_what_can_be_built():
    problem = Problem(300, 200, 776, a="bf16")
    for config in prefill.PRESETS:
        heuristics.check(problem, H200, config)
    for change, words in (
        ({"split": 2, "cluster": (1, 2)}, r"config\.cluster: \(1, 2\), expected None where CTAs share k"),
        ({"tile": (100, 128)}, r"config\.tile: 100 rows, expected one of 96, 128"),
        ({"tile": (128, 192)}, r"config\.tile: 192 columns, expected one of 64, 128"),
        ({"prefetch": 2}, r"config\.prefetch: 2, expected 0 with tiles of 96 rows"),
        ({"split": 2, "ctas": 132}, r"config\.ctas: 132, expected None where CTAs share k"),
        ({"ctas": 1, "cluster": (1, 2)}, r"config\.ctas: 1, expected at least 2"),
        ({"group": 0}, r"config\.group: 0, expected at least 1"),
        ({"tile": (256, 128), "buffers": 4}, r"config\.buffers: 4: 239,616 bytes of shared memory, at most 232,448"),
    ):
        with pytest.raises(heuristics.Unsupported, match=words):
            heuristics.check(problem, H200, replace(SPLIT, **({"split": 1} | change)))


def test_a_kernels_key_depends_on_its_text():
    names = {path.name for path in store._imported(launch.KERNEL)}
    assert {"sm90.py", "sm90_wide.py", "sm90_prefill.py", "prefill_stage.py", "tile_results.py"} <= names


def test_what_is_chosen():
    for m in (65, 128, 300, 8192):
        chosen = heuristics.choose(Problem(m, 8192, 8192, a="bf16"), H200)
        assert chosen.config in prefill.PRESETS
        assert heuristics.choose(Problem(m, 8192, 8192, a="bf16", invariant=True), H200).config.tile[0] == 16


# On silicon


def product(x, w, out_dtype=torch.bfloat16, **options):
    """`gemm` into a poisoned result."""
    out = torch.full((x.shape[0], w.shape[0]), torch.nan, dtype=out_dtype, device="cuda")
    return bs.gemm(x, w, out=out, out_dtype=out_dtype, **options)


def uniform(*shape, dtype=torch.bfloat16):
    return torch.rand(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).to(dtype)


@pytest.mark.parametrize(("n", "k"), MANY_SIZES)
class TestShapes:
    pytestmark = ON_SILICON

    def test_contract_on_positive_data(self, n, k):
        w, values = weight(n, k, positive=True)
        x = uniform(max(MANY), k)
        for m in MANY:
            check(product(x[:m], w), x[:m], values)

    @pytest.mark.parametrize("config", prefill.PRESETS, ids=str)
    def test_every_configuration(self, n, k, config):
        w, values = weight(n, k, positive=True)
        x = uniform(300, k)
        for m in (3, 130, 300):
            out = torch.full((m, n), torch.nan, dtype=torch.bfloat16, device="cuda")
            check(bs.gemm(x[:m], w, out=out, config=config), x[:m], values)


class TestResults:
    pytestmark = ON_SILICON

    @pytest.mark.parametrize(("a", "out", "bias", "activation"), EPILOGUES)
    def test_dtypes_alpha_bias_and_activation(self, a, out, bias, activation):
        w, values = weight(1000, 2080, unit=1 / 3000)
        row = None if bias is None else torch.randn(1000, device="cuda").to(DTYPES[bias])
        for m in MANY_OF:
            x = torch.randn(m, 2080, device="cuda").to(DTYPES[a])
            y = product(x, w, DTYPES[out], alpha=-0.5, bias=row, activation=activation)
            check(y, x, values, -0.5, row, activation)

    @pytest.mark.parametrize("m", [100, 128, 256, 520])
    def test_small_integers_are_exact(self, m):
        b, values = small_integers(200, 2000)
        x = torch.randint(-3, 4, (m, 2000)).to(torch.bfloat16)
        y = product(x.cuda(), b.to("cuda").with_layout("fragment"), torch.float32)
        assert torch.equal(y.cpu().long(), x.long() @ values.T)

    @pytest.mark.parametrize("m", [100, 192, 256, 520])
    def test_the_same_bits_run_after_run(self, m):
        w, values = weight(1000, 4104)
        x = uniform(m, 4104)
        first = product(x, w)
        check(first, x, values)
        for _ in range(50):
            assert same_bits(product(x, w), first)

    @pytest.mark.parametrize("config", prefill.PRESETS, ids=str)
    def test_the_same_bits_when_launches_overlap_and_weights_are_in_l2(self, config):
        w, values = weight(2048, 4096)
        x = uniform(8 * config.tile[0], 4096)
        results = torch.full((50, len(x), 2048), torch.nan, dtype=torch.bfloat16, device="cuda")
        for out in results:
            bs.gemm(x, w, out=out, config=config)
        check(results[0], x, values)
        assert same_bits(results, results[:1].expand_as(results).contiguous())

    def test_rows_of_a_larger_result(self):
        w, values = weight(300, 1000)
        wide = torch.full((140, 305), torch.nan, dtype=torch.bfloat16, device="cuda")
        x = torch.randn(140, 1000, device="cuda").bfloat16()
        bs.gemm(x, w, out=wide[:, 2:302])
        check(wide[:, 2:302], x, values)
        assert wide[:, :2].isnan().all()
        assert wide[:, 302:].isnan().all()
