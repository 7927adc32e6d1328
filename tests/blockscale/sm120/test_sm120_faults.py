"""Faults that users of FP4 on these GPUs met elsewhere: zeros, shapes that trap or are refused, stale padding.

Each is asked of the real kernels on the software GPU. What else was reported (kernels of the wrong chip, instructions
at half rate, GPUs taken for another) is in test_sm120_gpus.py.
"""

import math

import pytest
import torch
from operands import POISON, every_code_and_scale, same_bits, small_integers

import blockscale as bs
from blockscale import reference
from blockscale.config import Config
from blockscale.families import supports
from blockscale.families.sm120.constraints import geometry
from blockscale.kernels.parts.warptile import TILE_COLUMNS, TILE_K, TILE_ROWS
from blockscale.problem import Problem, target_named

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

ARCHES = ("sm_120a", "sm_121a")


@pytest.mark.parametrize("k", [32, 64, 96, 160, 256])
def test_what_is_said_to_be_available_runs(k):
    """Of every k, on both chips, by the choice; the result is exact, and was NaN before."""
    a, values_a = small_integers(4, k)
    b, values_b = small_integers(6, k, 1)
    arch = ARCHES[k // 32 % 2]
    with bs.emulated(arch, checks="strict", sms=2):
        assert bs.available_backends()["sm120"] is None
        out = bs.gemm(a, b, out=torch.full((4, 6), math.nan), out_dtype=torch.float32)
    assert torch.equal(out.long(), values_a @ values_b.T)


@pytest.mark.parametrize("chunk", [128, 256])
def test_k_shorter_than_a_stage(chunk):
    """A row of four scales, 4 bytes, is less than TMA moves; a stage is longer than all of k."""
    a, values_a = small_integers(64, 64)
    b, values_b = small_integers(64, 64, 1)
    with bs.emulated("sm_120a", checks="strict", sms=2):
        out = bs.gemm(a, b, out_dtype=torch.float32, config=Config((64, 64), chunk=chunk))
    assert torch.equal(out.long(), values_a @ values_b.T)


@pytest.mark.parametrize("m", [5, 17])
@pytest.mark.parametrize("fill", [POISON, POISON - 1])
def test_scales_of_rows_that_are_padding_are_never_used(m, fill):
    """NaN or the largest number there: the same bits as with zeros."""
    a, b = every_code_and_scale(m, 128), every_code_and_scale(24, 128, seed=1)
    results = []
    for value in (0, fill):
        for t in (a, b):
            rows = torch.from_numpy(reference.scale_index(t)).flatten()
            padding = torch.ones(t.scales.numel(), dtype=torch.bool)
            padding[rows] = False
            t.scales.view(torch.uint8).view(-1)[padding] = value
        with bs.emulated("sm_121a", checks="strict", sms=2):
            results.append(bs.gemm(a, b))
    assert same_bits(*results)
    assert not results[0].isnan().any()


def test_sums_beyond_fp16_are_scaled_before_they_are_rounded():
    """The largest codes and scales, an alpha that brings 7e10 back to 7e4 x 1e-2."""
    k = 512
    codes = torch.full((2, k // 2), 0x77, dtype=torch.uint8)
    scales = torch.full((2, k // 16), 448.0).to(torch.float8_e4m3fn)
    t = bs.NVFP4Tensor.from_parts(codes, scales, 1.0, layout="linear").with_layout("128x4")
    with bs.emulated("sm_120a", sms=2):
        out = bs.gemm(t, t, alpha=1e-6, out_dtype=torch.float16)
    assert torch.equal(out, torch.full((2, 2), k * (6 * 448.0) ** 2 * 1e-6).half())


@pytest.mark.parametrize("arch", ARCHES)
def test_a_configuration_that_does_not_fit_is_refused_before_anything_is_compiled(arch):
    """Of every tile as many stages as the chip has shared memory for, and not one more; none of more sums than a thread
    has registers for."""
    target = target_named(arch)
    assert target.smem == 101_376
    problem = Problem(1, 1, 64)
    for rows in TILE_ROWS:
        for columns in TILE_COLUMNS:
            for chunk in TILE_K:
                config = Config((rows, columns), chunk=chunk)
                sizes = geometry(config, target)
                assert sizes.smem_bytes <= target.smem
                refused = supports(problem, target, config)
                if refused is not None:
                    assert refused.argument == "config.accumulators"
                    assert rows * columns > 128 * 256
                    continue
                most, more = (
                    Config((rows, columns), chunk=chunk, stages=sizes.most_stages + extra) for extra in (0, 1)
                )
                assert supports(problem, target, most) is None
                assert "config.stages" in str(supports(problem, target, more))


def test_operands_that_nothing_multiplies_are_refused():
    """fp16 activations: by name, never zeros."""
    b = bs.quantize(torch.randn(16, 64))
    with bs.emulated("sm_120a", sms=2), pytest.raises(ValueError, match="multiply NVFP4 by NVFP4 alone"):
        bs.gemm(torch.randn(4, 64).half(), b)
