"""What a GPU's kernels can do is said in one place, with reasons; what is chosen is supported, with reasons too."""

from dataclasses import fields, replace

import pytest

import blockscale as bs
from blockscale import families, heuristics, problem
from blockscale.config import Config, Reason
from blockscale.families import supports
from blockscale.families.sm100.choice import CHOICES
from blockscale.families.sm100.constraints import geometry, tile_count
from blockscale.kernels.parts.geometry import WIDTHS
from blockscale.problem import Problem, target_named

B200 = target_named("b200")
PRODUCT = Problem(128, 256, 512)


@pytest.mark.parametrize(
    ("change", "argument", "message"),
    [
        ({"a": "bf16"}, "a", "bf16: the sm100 kernels multiply NVFP4 by NVFP4"),
        ({"bias": "fp32"}, "bias", "the sm100 kernels of this version add none"),
        ({"activation": "silu"}, "activation", "'silu'"),
        ({"out_dtype": "nvfp4"}, "out", "NVFP4: the sm100 kernels of this version write none"),
        ({"m": 2**31}, "m", "2147483648, at most 2147483136"),
        ({"k": 2**31 - 63}, "k", "at most 2147483136"),
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
        ({"tile": (64, 128)}, "config.tile", "64 rows, expected 128"),
        ({"tile": (128, 100)}, "config.tile", "100 columns, expected a multiple of 8 from 8 to 256"),
        ({"tile": (128, 0)}, "config.tile", "0 columns"),
        ({"tile": (128, 264)}, "config.tile", "264 columns"),
        ({"tile": (128, 40)}, "config.tile", "40 columns, no multiple of 32, have to cover all n = 256"),
        ({"stages": 0}, "config.stages", "0, expected None or 1 to 6 beside 1 x 128x128 of sums"),
        ({"stages": 7}, "config.stages", "7, expected None or 1 to 6"),
        (
            {"tile": (128, 192), "accumulators": 2, "stages": 3},
            "config.stages",
            "3, expected None or 1 to 2 beside 2 x",
        ),
        (
            {"tile": (128, 256), "accumulators": 2},
            "config.tile",
            "2 x 128x256 of sums and one stage of operands do not",
        ),
        ({"accumulators": 3}, "config.accumulators", "expected 1 or 2"),
        ({"raster": "k"}, "config.raster", "expected one of 'm', 'n'"),
        ({"ctas": 0}, "config.ctas", "expected None or 1 to 65535"),
        ({"ctas": 2**16}, "config.ctas", "expected None or 1 to 65535"),
        ({"persist_mb": -1}, "config.persist_mb", "expected at least 0"),
    ],
)
def test_configurations_that_are_refused(change, argument, message):
    config = replace(Config(), **change)
    reason = supports(PRODUCT, B200, config)
    assert reason.argument == argument
    assert message in reason.message
    with pytest.raises(heuristics.Unsupported, match=f"^{argument}: "):
        heuristics.check(PRODUCT, B200, config)


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


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("accumulators", [1, 2])
def test_as_many_stages_as_fit_is_never_refused_where_one_is(columns, accumulators):
    config = Config((128, columns), accumulators=accumulators)
    product = replace(PRODUCT, n=columns)
    assert supports(product, B200, config) == supports(product, B200, replace(config, stages=1))
    assert (supports(product, B200, config) is None) == (accumulators == 1 or columns <= 232)


@pytest.mark.parametrize("n", [1, 8, 63, 64, 65, 200, 256, 257, 4096])
@pytest.mark.parametrize("m", [1, 128, 129, 100_000])
def test_the_choice_is_supported(m, n):
    asked = Problem(m, n, 512)
    chosen = heuristics.choose(asked, B200)
    assert replace(chosen.config, raster="m") in CHOICES
    assert supports(asked, B200, chosen.config) is None
    assert len(chosen.reasons) >= 3


def test_choices_that_follow_from_counting():
    def tile(m, n):
        return heuristics.choose(Problem(m, n, 512), B200).config.tile[1]

    assert tile(1, 8) == tile(128, 64) == 64  # the narrowest that holds it
    assert tile(128, 4096) == 64  # one wave whatever the width: narrow tiles use more multiprocessors
    assert tile(512, 4096) == 128  # one wave from here on
    assert tile(128, 256 * 148) == 256  # one wave of the widest, against four of the narrowest
    assert heuristics.choose(Problem(1024, 65536, 512), B200).config.raster == "m"
    assert heuristics.choose(Problem(65536, 1024, 512), B200).config.raster == "n"


@pytest.mark.parametrize(
    ("k", "out_dtype", "chosen", "why"),
    [
        (512, "bf16", Config((128, 192), accumulators=2), "two accumulators: a CTA does 5 tiles"),
        (4096, "bf16", Config((128, 256)), "overlap is given up: two of 256 columns do not fit"),
        (4096, "fp32", Config((128, 192), accumulators=2), "two accumulators"),
    ],
)
def test_width_and_accumulators_are_chosen_together(k, out_dtype, chosen, why):
    """4096 x 4096: with a short k, or large elements to store, overlap is worth more than wider tiles."""
    choice = heuristics.choose(Problem(4096, 4096, k, out_dtype=out_dtype), B200)
    assert choice.config == chosen
    assert why in choice.reasons[1]
    assert all("derived" in reason for reason in choice.reasons)


def test_one_tile_a_cta_has_nothing_to_overlap():
    choice = heuristics.choose(Problem(512, 4096, 7168), B200)
    assert choice.config == Config((128, 128))
    assert "nothing to overlap" in choice.reasons[1]


@pytest.mark.parametrize(
    ("field", "value"), [("a", "fp8"), ("b", "bf16"), ("activation", "tanh"), ("out_dtype", "fp8"), ("activation", [])]
)
def test_a_problem_checks_its_names(field, value):
    with pytest.raises(ValueError, match=f"^{field}: .*, expected one of "):
        replace(PRODUCT, **{field: value})


@pytest.mark.parametrize("m", [1, 128, 5000])
def test_an_invariant_choice_does_not_know_m(m):
    assert (
        heuristics.choose(Problem(m, 4096, 512, invariant=True), B200).config
        == heuristics.choose(Problem(1, 4096, 512, invariant=True), B200).config
    )


@pytest.mark.parametrize("change", [{"batch": 8, "batch_a": 8}, {"m": 4096}])
@pytest.mark.parametrize("sms", [8, 132, 148])
def test_an_invariant_choice_knows_n_k_and_dtypes_alone(change, sms):
    asked = Problem(128, 4096, 512, invariant=True)
    chosen = heuristics.choose(replace(asked, **change), replace(B200, sms=sms))
    assert chosen.config == heuristics.choose(asked, B200).config
    assert chosen.reasons[0].startswith("invariant: ")


def test_what_is_too_large_is_named():
    largest = 2**31 - 512
    with pytest.raises(heuristics.Unsupported, match=rf"config\.tile: .* tiles of 128x256, at most {2**31 - 2**16}"):
        heuristics.choose(Problem(largest, largest, 64), B200)
    assert supports(Problem(largest, 1, 64), B200, Config()) is None


def test_every_field_is_either_code_or_an_argument_of_the_call():
    families_fields = [(family.CODE_FIELDS, family.CALL_FIELDS) for family in families._FAMILIES.values()]
    assert all(not set(code) & set(call) for code, call in families_fields)
    assert set().union(*(code + call for code, call in families_fields)) == {f.name for f in fields(Config)}
    assert tile_count(Problem(129, 257, 64, batch=3, batch_a=3), Config()) == 3 * 2 * 3
    assert str(Config((128, 64), stages=3)) == "tile 128x64, stages 3"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sm_110a", "'sm_110a' is Thor, for which this version has no kernels; expected 'b200' \\(sm_100a\\)"),
        ("sm_103a", "B300"),
        ("sm_100", "the suffix of an architecture is part of its name"),
        ("b100", "'b100', expected 'b200' \\(sm_100a\\), 'h200' \\(sm_90a\\)$"),
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
    assert [line[:2] for line in text[1:]] == ["1.", "2.", "3."]
    with pytest.raises(TypeError, match="gpu: int"):
        bs.explain(1, 1, 1, gpu=100)
    with pytest.raises(ValueError, match="k: 0, expected at least 1"):
        bs.config_for(1, 1, 0, gpu="b200")
    with pytest.raises(TypeError, match="m: float"):
        bs.config_for(1.0, 1, 1, gpu="b200")


def test_the_current_gpu_or_the_emulated_one():
    with bs.emulated("sm_100a", sms=2):
        assert bs.explain(512, 512, 64).splitlines()[0].startswith("512 x 512 x 64 on b200")
        assert "for 2 multiprocessors" in bs.explain(512, 512, 64)
    if not problem.TARGETS or not bs.available_backends()["sm100"]:
        return
    with pytest.raises(ValueError, match="no GPU here; name one"):
        bs.config_for(1, 1, 1)


@pytest.mark.parametrize(("mb", "error"), [(-1, ValueError), (float("nan"), ValueError), ("8", TypeError)])
def test_persisting_l2_checks_its_value(mb, error):
    with pytest.raises(error, match=r"^mb: "), bs.persisting_l2(mb):
        pass


def test_persisting_l2_without_a_gpu_does_nothing():
    with bs.persisting_l2(8.5):
        assert bs.available_backends()["cpu"] is None
