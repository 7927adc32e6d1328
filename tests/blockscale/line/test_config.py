"""What a GPU's kernels can do is said in one place, with reasons; what is chosen is supported, with reasons too."""

from dataclasses import fields, replace

import pytest
import torch

import blockscale as bs
from blockscale import families, heuristics, problem
from blockscale.config import Config, Reason
from blockscale.families import supports
from blockscale.families.sm100 import CALL_FIELDS, CODE_FIELDS
from blockscale.families.sm100.constraints import ALLOWED, RANGES, geometry, tile_count
from blockscale.kernels.parts.geometry import widths
from blockscale.problem import Problem, target_named

B200 = target_named("b200")
PRODUCT = Problem(128, 256, 512)


@pytest.mark.parametrize(
    ("change", "argument", "message"),
    [
        ({"a": "bf16"}, "a", "bf16: the sm100 kernels multiply NVFP4 by NVFP4"),
        ({"m": 2**31}, "m", "2147483648, at most 2147482624"),
        ({"k": 2**31 - 63}, "k", "at most 2147482624"),
    ],
)
def test_problems_that_are_refused(change, argument, message):
    reason = supports(replace(PRODUCT, **change), B200, Config())
    assert reason.argument == argument
    assert message in reason.message
    with pytest.raises(heuristics.Unsupported, match=f"^{argument}: "):
        heuristics.choose(replace(PRODUCT, **change), B200)


@pytest.mark.parametrize(
    ("change", "argument", "message"),
    [
        ({"tile": (64, 128)}, "tile", "64 rows, expected 128 or 256"),
        ({"tile": (128, 100)}, "tile", "100 columns, expected a multiple of 8 from 8 to 256 beside 128 rows"),
        ({"tile": (256, 24)}, "tile", "24 columns, expected a multiple of 16 from 16 to 256 beside 256 rows"),
        ({"tile": (128, 0)}, "tile", "0 columns"),
        ({"tile": (128, 264)}, "tile", "264 columns"),
        ({"tile": (128, 40)}, "tile", "40 columns, no multiple of 32, have to cover all n = 256"),
        ({"tile": (128, 40), "swap": True}, "tile", "have to cover all m = 128"),
        ({"stages": 0}, "stages", "0, expected None or 1 to 6 beside 1 x 128x128 of sums"),
        ({"stages": 7}, "stages", "7, expected None or 1 to 6"),
        ({"stages": 6, "store": "tma"}, "stages", "6, expected None or 1 to 5"),
        ({"accumulators": 3}, "accumulators", "expected 1 or 2"),
        ({"raster": "k"}, "raster", "expected 'm' or 'n'"),
        ({"schedule": "dynamic"}, "schedule", "expected 'static' or 'clc'"),
        ({"l2_a": "evict"}, "l2_a", "expected None or 'evict_first' or 'evict_last'"),
        ({"store": "stmatrix"}, "store", "expected 'direct' or 'tma' or 'tma_rows'"),
        ({"release": "never"}, "release", "expected 'late' or 'early'"),
        ({"store_slots": 3}, "store_slots", "expected 1 or 2"),
        ({"group": 0}, "group", "expected 1 to 1024"),
        ({"prefetch": 17}, "prefetch", "expected 0 to 16"),
        ({"read": 12}, "read", "expected a multiple of 8 from 8 to 128"),
        ({"ctas": 0}, "ctas", "expected None or 1 to 65535"),
        ({"ctas": 2**16}, "ctas", "expected None or 1 to 65535"),
        ({"ctas": 4, "schedule": "clc"}, "ctas", "expected None: with schedule 'clc'"),
        ({"persist_mb": -1}, "persist_mb", "expected 0 to "),
        ({"cluster": (3, 1)}, "cluster", "expected sides of 1, 2, 4, and 8 CTAs at most"),
        ({"cluster": (4, 4)}, "cluster", "8 CTAs at most"),
        ({"cluster": (1, 2), "tile": (256, 64)}, "cluster", "expected an even first side"),
        ({"cluster": (4, 1), "tile": (128, 72)}, "cluster", "72 columns cannot be cut"),
        ({"store_slots": 1}, "store_slots", "1, expected 2 beside store 'direct'"),
        ({"l2_out": "evict_last", "read": 8}, "l2_out", "stores of 32 bytes, and 8 columns at a time are no whole"),
        ({"l2_out": "evict_last", "swap": True}, "l2_out", "'evict_last', expected None beside swap"),
        ({"cluster": (1, 2), "fallback_cluster": (2, 1)}, "fallback_cluster", "expected sides that divide"),
        ({"fallback_cluster": (1, 1)}, "fallback_cluster", "expected sides that divide those of cluster, None"),
        ({"swap": True, "store": "tma"}, "swap", "expected False beside store 'tma'"),
    ],
)
def test_configurations_that_are_refused(change, argument, message):
    config = replace(Config(), **change)
    reason = supports(PRODUCT, B200, config)
    assert reason.argument == f"config.{argument}"
    assert message in reason.message
    with pytest.raises(heuristics.Unsupported, match=f"^config.{argument}: "):
        heuristics.check(PRODUCT, B200, config)


@pytest.mark.parametrize(
    ("change", "argument"), [({"swap": True}, "swap"), ({"store": "tma"}, "store"), ({"tile": (128, 248)}, "tile")]
)
def test_what_nvfp4_results_refuse(change, argument):
    product = replace(PRODUCT, n=248, out_dtype="nvfp4")
    assert supports(product, B200, Config((128, 256))) is None
    assert supports(product, B200, replace(Config((128, 256)), **change)).argument == f"config.{argument}"


def test_a_cluster_of_narrow_tiles_has_one_along_n():
    config = Config((128, 8), cluster=(1, 2))
    assert supports(replace(PRODUCT, n=8), B200, config) == Reason(
        "config.cluster",
        "(1, 2), expected a second side of 1 beside 8 columns: no multiple of 32, they make one tile alone",
    )
    assert supports(replace(PRODUCT, n=9), B200, config).argument == "config.tile"


def test_fields_that_only_some_kernels_heed():
    """Set where they are heeded, refused where they would do nothing."""
    gelu = replace(PRODUCT, activation="gelu")
    assert "at most 64 beside gelu" in supports(gelu, B200, Config((128, 128), read=128)).message
    assert supports(gelu, B200, Config((128, 64), read=128)) is None  # 64 are read
    assert supports(PRODUCT, B200, Config(l2_out="evict_first")) is None
    assert supports(PRODUCT, B200, Config(l2_out="evict_first", read=8, store="tma", store_slots=1)) is None
    quantised = replace(PRODUCT, out_dtype="nvfp4", activation="gelu")
    assert supports(quantised, B200, Config()) is None
    for field, value in (("read", 64), ("l2_out", "evict_first"), ("store_slots", 1)):
        assert supports(quantised, B200, replace(Config(), **{field: value})).argument == f"config.{field}"


def test_what_is_chosen_for_a_row_has_to_serve_all():
    """An invariant choice knows one row and one matrix; here 32-bit numbers of tiles would not do for the whole."""
    batch = 2**20
    huge = Problem(441_611, 1, 64, batch=batch, batch_a=batch, batch_b=batch, invariant=True)
    with pytest.raises(heuristics.Unsupported, match=r"^config\.tile: \d+ tiles of .*, at most 2147418112"):
        heuristics.choose(huge, B200)
    assert heuristics.choose(replace(huge, batch=1, batch_a=1, batch_b=1), B200)


def test_every_field_has_values_that_are_refused_or_is_free():
    refused = {"swap", "tile", "stages", "cluster", "fallback_cluster"}  # above
    assert {*CODE_FIELDS, *CALL_FIELDS} == {*ALLOWED, *RANGES, *refused, "pdl"}


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("tile", [128, 64], "a tuple of two integers"),
        ("tile", (128, True), "a tuple of two integers"),
        ("tile", (128,), "a tuple of two integers"),
        ("stages", 2.0, "an integer"),
        ("accumulators", None, "an integer"),
        ("ctas", "3", "an integer"),
        ("persist_mb", False, "an integer"),
        ("raster", None, "a string"),
        ("l2_a", 1, "a string"),
        ("pdl", 1, "a bool"),
        ("cluster", (1,), "a tuple of two integers"),
    ],
)
def test_fields_of_other_types(field, value, expected):
    with pytest.raises(TypeError, match=f"^{field}: .*, expected {expected}"):
        Config(**{field: value})


def test_a_smaller_gpu_refuses_what_does_not_fit():
    small = replace(B200, smem=101_376)
    assert geometry(Config(), small).slots == 2
    assert supports(PRODUCT, small, Config()) is None
    assert supports(PRODUCT, small, Config(stages=3)) == Reason(
        "config.stages", "3, expected None or 1 to 2 beside 1 x 128x128 of sums"
    )
    tiny = replace(B200, smem=20_000)
    assert supports(PRODUCT, tiny, Config()).argument == "config.tile"
    with pytest.raises(
        heuristics.Unsupported, match=r"^config\.tile: .* 20,000 bytes of shared memory and 512 columns"
    ):
        heuristics.choose(PRODUCT, tiny)


@pytest.mark.parametrize(("rows", "columns"), [(r, n) for r in (128, 256) for n in widths(r)])
@pytest.mark.parametrize("accumulators", [1, 2])
def test_as_many_stages_as_fit_is_never_refused_where_one_is(rows, columns, accumulators):
    config = Config((rows, columns), accumulators=accumulators)
    product = replace(PRODUCT, n=columns)
    assert supports(product, B200, config) is None
    assert supports(product, B200, replace(config, stages=1)) is None


@pytest.mark.parametrize(
    ("field", "value"), [("a", "fp8"), ("b", "bf16"), ("activation", "tanh"), ("out_dtype", "fp8"), ("activation", [])]
)
def test_a_problem_checks_its_names(field, value):
    with pytest.raises(ValueError, match=f"^{field}: .*, expected one of "):
        replace(PRODUCT, **{field: value})


def test_every_field_is_either_code_or_an_argument_of_the_call():
    kinds = families._FAMILIES, families._GROUPED, families._LISTED
    families_fields = [(family.CODE_FIELDS, family.CALL_FIELDS) for kind in kinds for family in kind.values()]
    assert all(not set(code) & set(call) for code, call in families_fields)
    assert set().union(*(code + call for code, call in families_fields)) == {f.name for f in fields(Config)}
    assert tile_count(Problem(129, 257, 64, batch=3, batch_a=3), Config()) == 3 * 2 * 3
    assert tile_count(Problem(129, 257, 64), Config((256, 128), cluster=(4, 2))) == 4 * 4
    assert tile_count(Problem(129, 257, 64), Config(swap=True)) == 3 * 2
    assert str(Config((128, 64), stages=3, cluster=(1, 2))) == "tile 128x64, stages 3, cluster 1x2"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sm_110a", "'sm_110a' is Thor, for which this version has no kernels; expected 'b200' \\(sm_100a\\)"),
        ("sm_107a", "Rubin"),
        ("sm_100", "the suffix of an architecture is part of its name"),
        ("b100", "'b100', expected 'b200' \\(sm_100a\\), 'b300' \\(sm_103a\\), .*, 'gb10' \\(sm_121a\\)$"),
    ],
)
def test_gpus_without_kernels(name, message):
    for call in (lambda: bs.config_for(1, 1, 1, gpu=name), lambda: bs.emulated(name).__enter__()):
        with pytest.raises(ValueError, match=message):
            call()


def test_what_the_public_functions_say():
    config = bs.config_for(512, 4096, 7168, gpu="b200")
    text = bs.explain(512, 4096, 7168, gpu="sm_100a").splitlines()
    assert text[0] == f"512 x 4096 x 7168 on b200 (sm_100a): {config}"
    assert [line[:2] for line in text[1:3]] == ["1.", "2."]
    with pytest.raises(TypeError, match="gpu: int"):
        bs.explain(1, 1, 1, gpu=100)
    with pytest.raises(ValueError, match="k: 0, expected at least 1"):
        bs.config_for(1, 1, 0, gpu="b200")
    with pytest.raises(TypeError, match="m: float"):
        bs.config_for(1.0, 1, 1, gpu="b200")


def test_the_current_gpu_or_the_emulated_one():
    with bs.emulated("sm_100a", sms=2):
        assert bs.explain(512, 512, 64).splitlines()[0].startswith("512 x 512 x 64 on b200")
        assert " for 1 pair of CTAs make " in bs.explain(512, 512, 64)
    if not problem.TARGETS or not bs.available_backends()["sm100"]:
        return
    with pytest.raises(ValueError, match="no GPU here; name one"):
        bs.config_for(1, 1, 1)


@pytest.mark.parametrize(("mb", "error"), [(-1, ValueError), (float("nan"), ValueError), ("8", TypeError)])
def test_persisting_l2_checks_its_value(mb, error):
    with pytest.raises(error, match=r"^mb: "), bs.persisting_l2(mb):
        pass


def test_persisting_l2_without_a_gpu_does_nothing():
    with bs.persisting_l2(8.5) as made:
        assert made == 0 or torch.cuda.is_available()
        assert bs.available_backends()["cpu"] is None
