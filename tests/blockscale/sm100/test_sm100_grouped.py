"""The grouped sm_100a kernel as compiled, on the emulator, against float64: forms, tiles, tables, gates, order."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")

from emulated_grouped import (
    Call,
    compiled,
    compiled_list,
    exactly,
    grouped,
    mistakes,
    mistakes_in_list,
    products,
    run,
    run_list,
)
from emulated_kernel import DTYPES, SCHEDULES

from blockscale import families
from blockscale.config import Config
from blockscale.families.sm100.grouped.counts import count
from blockscale.kernels.parts.group_geometry import WIDTHS
from blockscale.problem import GroupedProblem, target_named

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:cutlass")  # about its own helpers

K = 320
SIZES = (33, 0, 1, 70)
PLAIN = {"tile": (128, 64), "accumulators": 2, "order": "longest", "out_dtype": "fp32"}
WIDE = {"tile": (256, 384), "raster": "n", "pdl": True}
TOKENS = {"tile": (256, 128), "swap": False}
PARTS = {"tile": (256, 96), "split": 2, "order": "longest"}


def check(config, groups, call=None, bias=None):
    call, out_dtype = call or Call(), config.get("out_dtype", "bf16")
    result = run(compiled(**config), groups, call, out_dtype, bias)
    assert mistakes(result, groups, call, bias) is None
    return result


@pytest.mark.parametrize("form", ["contiguous", "masked"])
@pytest.mark.parametrize("config", [PLAIN, WIDE, TOKENS], ids=["plain", "wide", "tokens"])
def test_groups_of_every_kind(config, form):
    """Empty ones, one of a row, one that crosses atoms, tails of n and k, fewer CTAs than tiles."""
    groups = grouped((33, 0, 1, 150), 300, K, max_m=170 if form == "masked" else None)
    check({**config, "form": form}, groups, Call(ctas=2, schedule=("random", 4)))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule[0]}{schedule[1]}")
def test_the_same_bits_in_every_order_of_completion(schedule):
    groups = grouped(SIZES, 130, 600, positive=True)
    bias = np.random.default_rng(0).standard_normal((4, 130)).astype(np.float16)
    call = Call(ctas=2, alphas=(1e-3, 2e-3, -3e-3, 4e-3))
    config = {**PLAIN, "bias": "fp16", "stages": 2}
    result = check(config, groups, replace(call, schedule=schedule), bias)
    again = run(compiled(**config), groups, replace(call, ctas=7), "fp32", bias)
    assert (result.rows.view(np.uint8) == again.rows.view(np.uint8)).all()


@pytest.mark.parametrize("k", [40, 600])
def test_two_parts_of_k(k):
    """Of which the second may lie beyond k; tiles of 16 columns, which the first part finishes alone, and of more."""
    groups = grouped((33, 0, 1, 100), 130, k)
    bias = np.random.default_rng(0).standard_normal((4, 130)).astype(np.float32)
    first = check({**PARTS, "bias": "fp32"}, groups, Call(ctas=8, schedule=("random", 4)), bias)
    again = run(compiled(**PARTS, bias="fp32"), groups, Call(ctas=4, schedule=("eager", 0)), "bf16", bias)
    assert (first.rows.view(np.uint8) == again.rows.view(np.uint8)).all()


@pytest.mark.prove
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule[0]}{schedule[1]}")
@pytest.mark.parametrize("config", [WIDE, TOKENS, PARTS], ids=["wide", "tokens", "parts"])
def test_pairs_in_every_order_of_completion(config, schedule):
    groups = grouped((33, 300, 0, 1, 390), 300, 1300)
    check(config, groups, Call(ctas=4, schedule=schedule))


def test_a_group_of_more_rows_than_a_tile():
    """Its second tile begins within an atom of scales, which begins elsewhere than the first group's."""
    check(PLAIN, grouped((3, 230, 129), 40, K), Call(ctas=1))


@pytest.mark.parametrize(
    ("given", "ends", "sizes"),
    [
        ((5, 0, 8, 1), False, (5, 0, 8, 1)),
        ((5, 5, 13, 14), True, (5, 0, 8, 1)),
        ((-3, 7, 2**31 - 1, 4), False, (0, 7, 9, 0)),
        ((2**31 - 1,) * 4, False, (16, 0, 0, 0)),
        ((6, 3, -9, 40), True, (6, 0, 0, 10)),
        ((0, 0, 0, 0), False, (0, 0, 0, 0)),
    ],
    ids=str,
)
def test_sizes_and_ends_as_given_and_what_becomes_of_impossible_ones(given, ends, sizes):
    groups = grouped(sizes, 40, 64, spare=16 - sum(sizes))
    check(PLAIN, groups, Call(given=given, ends=ends, ctas=2))


def test_more_rows_than_a_matrix_of_the_masked_form_has():
    groups = grouped((0, 5, 5, 2), 40, 64, max_m=5)
    check({**PLAIN, "form": "masked"}, groups, Call(given=(-1, 5, 90, 2)))


@pytest.mark.parametrize(("order", "ends"), [("longest", [0, 511]), ("given", [101, 410])])
def test_as_many_groups_as_there_may_be(order, ends):
    """512, of which a few have rows: the first and the last one, or none of the first and of the last hundred."""
    sizes = np.zeros(512, int)
    sizes[[ends[0], 131, 132, 255, 256, 400, ends[1]]] = [1, 2, 40, 1, 1, 2, 33]
    groups = grouped(sizes.tolist(), 8, 64)
    check({"tile": (128, 32), "order": order}, groups, Call(ctas=3))


def test_results_do_not_depend_on_other_groups():
    """Neither on their rows, which boxes reach into, nor on their scales, nor on their weights."""
    groups = grouped((17, 40, 9), 40, K)
    want = run(compiled(**PLAIN), groups, Call(ctas=2), "fp32").rows
    for kept in range(3):
        tokens = tuple(
            t if i == kept else replace(t, codes=t.codes ^ 7, scales=np.full_like(t.scales, 0x7E))
            for i, t in enumerate(groups.tokens)
        )
        others = np.arange(3) != kept
        codes, scales = groups.weights.codes.copy(), groups.weights.scales.copy()
        codes[others] ^= 5
        scales[others] = 0x7E
        poisoned = replace(groups, tokens=tokens, weights=replace(groups.weights, codes=codes, scales=scales))
        got = run(compiled(**PLAIN), poisoned, Call(ctas=2), "fp32").rows
        rows = slice(groups.first(kept), groups.first(kept) + groups.sizes[kept])
        assert (got[rows].view(np.uint8) == want[rows].view(np.uint8)).all()


@pytest.mark.parametrize("out_dtype", ["fp16", "bf16"])
def test_rows_apart_and_not_aligned(out_dtype):
    groups = grouped(SIZES, 40, 64)
    check({**TOKENS, "out_dtype": out_dtype}, groups, Call(ld=51, offset=1))
    check({"tile": (128, 32), "out_dtype": out_dtype}, groups, Call(ld=51, offset=1))


@pytest.mark.parametrize(
    "config",
    [
        {"tile": (128, 64)},
        {"tile": (256, 96)},
        {"tile": (128, 256), "swap": False},
        {"tile": (256, 256), "swap": False},
    ],
    ids=lambda config: f"{config['tile'][0]}x{config['tile'][1]}{'' if config.get('swap', True) else 'tokens'}",
)
def test_gates(config):
    """The first half of the weights' rows makes gates for the columns of the other half."""
    groups, call = grouped((33, 0, 1, 70), 512, 128), Call(ctas=4, units=(0.5, 2.0**-6))
    bias = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    function = compiled(**config, activation="swiglu", bias="fp32", out_dtype="fp32")
    result = run(function, groups, call, "fp32", bias, gated=True)
    for group, size in enumerate(groups.sizes):
        sums, _ = exactly(groups, call, group, bias)
        gates, values = sums[:, :256], sums[:, 256:]
        with np.errstate(over="ignore"):
            want = gates / (1 + np.exp(-gates)) * values
        got = result.rows[groups.first(group) : groups.first(group) + size]
        assert (abs(got - want) <= 1e-5 * abs(want) + 2e-6 * abs(sums).max(initial=0) ** 2).all()
    assert (result.around == 0xFF).all()


def test_work_is_as_counted():
    """Columns of groups are multiplied in steps of 16, and weights are brought once."""
    sizes, n, k = (19, 32, 0, 20), 256, 256
    groups = grouped(sizes, n, k)
    result = check({"tile": (256, 384), "raster": "n", "out_dtype": "fp16"}, groups, Call(ctas=4))
    problem = GroupedProblem(sum(sizes), n, k, groups=4, out_dtype="fp16")
    counted = count(problem, Config((256, 384), swap=True), sizes, 4)
    shapes = [(*map(int, shape.split()[1].split("x")), times) for shape, times in result.report.counters["mma"].items()]
    assert sum(m * n_ * step * times for m, n_, step, times in shapes) == counted.work * sum(sizes) * n * k
    assert counted.weights == 1
    bytes_ = result.report.counters["bytes"]["TMA load, shared memory"]
    tokens = sum(2 * -(-width // 2 // 64) * 64 * 128 + 2 * 2048 for width in (32, 32, 32))
    assert bytes_ - tokens == 3 * n * (k // 2 + k // 16)


@pytest.mark.parametrize(
    ("config", "schedule"),
    [
        ({"tile": (128, 64), "order": "longest", "accumulators": 2}, ("lazy", 0)),
        ({"tile": (128, 128), "swap": False}, ("random", 1)),
        ({"tile": (256, 384), "raster": "n", "activation": None}, ("random", 2)),
    ],
    ids=str,
)
def test_a_list_of_products_of_different_sizes(config, schedule):
    """Each has operands, sizes, an alpha and a bias of its own, and its maps are made by the launch."""
    call, list_ = Call(ctas=4, schedule=schedule), products([(33, 130, 320), (1, 40, 64), (150, 20, 600)], gap=3)
    bias = [np.random.default_rng(i).standard_normal(p.b.rows).astype(np.float32) for i, p in enumerate(list_)]
    results, reports = run_list(compiled_list(**config, bias="fp32"), list_, call, bias=bias)
    assert mistakes_in_list(results, list_, call, bias) is None
    assert len(reports) == 2


@pytest.mark.parametrize(
    "config",
    [{"tile": (128, 256)}, {"tile": (256, 384), "order": "longest", "read": 64, "out_dtype": "fp32"}, TOKENS, PARTS],
    ids=str,
)
def test_no_group_takes_stack_or_spills(config, capfd):
    """Nor does the compiler warn."""
    compiled(**config, activation="gelu", bias="bf16", options="remarks{ptx}")
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in capfd.readouterr().err


def drawn(seed):
    """A configuration that is supported, a grouped product and a call."""
    draw = np.random.default_rng(seed)

    def one(*values):
        return values[draw.integers(len(values))]

    form, groups = one("contiguous", "masked"), one(1, 3, 5, 8)
    sizes = [int(one(0, 1, 2, draw.integers(3, 40), draw.integers(40, 130), 128, 257)) for _ in range(groups)]
    n, k = int(draw.integers(1, 300)), int(one(1, 64, 80, draw.integers(100, 900)))
    problem = GroupedProblem(max(sum(sizes), 1), n, k, form=form, groups=groups, out_dtype=one("fp16", "bf16", "fp32"))
    while True:
        hints = (None, "evict_first", "evict_last")
        fields = {
            "tile": (one(128, 256), one(*WIDTHS)),
            "stages": one(None, 1, 2, 3),
            "accumulators": one(1, 2),
            "swap": one(False, True),
            "order": one("given", "longest"),
            "raster": one("m", "n"),
            "pdl": one(False, True),
            "split": one(1, 1, 2),
            "l2_a": one(*hints),
            "l2_b": one(*hints),
            "l2_scales": one(*hints),
            "read": one(16, 32, 64, 128),
        }
        if families.supports(problem, target_named("b200"), Config(**fields)) is None:
            break
    config = {**fields, "form": form, "out_dtype": problem.out_dtype, "bias": one(None, "fp32", "fp16")}
    spare = 0 if form == "masked" else int(one(0, 9))
    operands = grouped(sizes, n, k, seed=seed, max_m=max(*sizes, 1) + 1 if form == "masked" else None, spare=spare)
    alphas = tuple(2.0 ** -(i + 1) for i in range(groups)) if one(False, True) else (0.5,)
    ends = form == "contiguous" and one(False, True)
    ld, offset = one(None, n + 3), one(0, 1)
    return config, operands, Call(ctas=int(one(2, 4, 6)), alphas=alphas, ends=ends, ld=ld, offset=offset)


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(48))
def test_drawn_configurations_in_every_order_of_completion(seed):
    config, groups, call = drawn(seed)
    bias = None
    if config["bias"]:
        bias = np.random.default_rng(seed).standard_normal(groups.weights.rows).astype(DTYPES[config["bias"]])
    results = [check(config, groups, replace(call, schedule=schedule), bias) for schedule in SCHEDULES]
    assert all((r.rows.view(np.uint8) == results[0].rows.view(np.uint8)).all() for r in results)
