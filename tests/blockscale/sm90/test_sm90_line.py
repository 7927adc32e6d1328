"""From `gemm` to a Hopper kernel, without the GPU: what is chosen, what a kernel is given, what torch does instead."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import blockscale as bs
from blockscale import expansion, families, heuristics
from blockscale.backends import gpu, sm90
from blockscale.config import Config
from blockscale.families.sm90.choice import PRESETS, candidates
from blockscale.families.sm90.constraints import smem
from blockscale.kernels.parts import chains
from blockscale.problem import Problem, target_named

H200 = target_named("h200")
W = Problem(8, 8192, 8192, a="bf16")
WARPS = candidates()[0]
GROUPS = next(config for config in candidates() if config.wgmma)


class Recorder:
    """Stands for the launcher of a GPU: keeps what a kernel would be called with."""

    target = H200
    index = 0

    def __init__(self):
        self.one = torch.ones(())
        self.plans = {}
        self.calls = []

    def load(self, artefact):
        raise AssertionError("not reached")

    def launch(self, function, pointers, sizes, scalars):
        self.calls.append((list(pointers), list(sizes), list(scalars)))


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    monkeypatch.setattr(gpu, "launcher", lambda target, device: made)
    monkeypatch.setattr(gpu.plan, "_function", lambda *arguments: None)
    monkeypatch.setattr(expansion, "_function", lambda *arguments: None)
    monkeypatch.setattr(sm90, "why_not", lambda: None)
    return made


def packed(n=48, k=256):
    return bs.quantize(torch.randn(n, k)).with_layout("fragment")


def run(x, w, out, **options):
    return sm90.prepare(x, w, out, **options)()


def test_every_preset_is_supported_and_every_row_has_one():
    assert all(families.supports(replace(W, k=4096), H200, config) is None for config in candidates())
    assert {preset.config.tile[0] for preset in PRESETS} == {preset.rows for preset in PRESETS}
    for m in (1, 2, 3, 4, 8, 16, 17, 32, 48, 64, 65, 1000, 4096):
        for n in (1, 64, 4096, 28672):
            for dtype in ("bf16", "fp16"):
                problem = Problem(m, n, 4096, a=dtype, out_dtype=dtype)
                choice = heuristics.choose(problem, H200)
                assert families.supports(problem, H200, choice.config) is None
                assert choice.reasons
    assert len(candidates()) == len(set(candidates()))


def test_a_tile_is_the_one_that_keeps_the_multiprocessors_busy():
    """One wave of nearly all where that can be, and CTAs enough for a narrow weight."""
    for n, k, columns in ((4096, 4096, 32), (8192, 8192, 64), (14336, 4096, 112), (28672, 8192, 224)):
        config = heuristics.choose(Problem(1, n, k, a="bf16"), H200).config
        assert (config.tile, config.split) == ((1, columns), 1)
    wide = ((4096, 4096, 64, 2), (8192, 8192, 128, 2), (14336, 4096, 128, 1), (11008, 4096, 192, 2))
    for n, k, columns, split in wide:
        config = heuristics.choose(Problem(64, n, k, a="bf16"), H200).config
        assert (config.tile, config.split, config.wgmma) == ((64, columns), split, True)


RECORD = json.loads((Path(__file__).parents[3] / "benchmarks/records/hopper-errors.json").read_text())["parts"]


def _lost(parts):
    """The largest measured loss of a part's sum over 1,024 k, in units of 2^-20, of no more parts."""
    measured = max(int(m) for m in RECORD if int(m) <= parts)
    return max(error * measured / (int(k) / 1024) for k, error in RECORD[str(measured)].items())


@pytest.mark.parametrize(("a", "more"), [("bf16", 1.0), ("fp16", 1.23)])
def test_chains_keep_the_contract_by_the_losses_measured(a, more):
    """Those in bf16; in fp16 chains of one part lost 54 units at K = 8192 where they lost 44 in bf16."""
    for parts in range(1, 17):
        longest = chains.longest(parts)
        for k in range(128, 60_000, 128):
            if longest is not None or chains.kept(parts, k, a):
                chain = min(k / parts, longest or k)
                assert more * _lost(parts) * chain / 1024 <= 4 + k / 1024


@pytest.mark.parametrize("a", ["bf16", "fp16"])
@pytest.mark.parametrize("k", [64, 1024, 4096, 8192, 14336, 28672, 100_000])
def test_what_is_chosen_keeps_the_contract(k, a):
    for m in (1, 2, 8, 16, 17, 48, 64):
        for n in (64, 4096, 8192, 11008, 14336, 28672):
            config = heuristics.choose(Problem(m, n, k, a=a), H200).config
            parts = config.k_warps * config.split
            assert not config.wgmma or chains.longest(parts) is not None or chains.kept(parts, k, a)


def test_chains_that_are_too_long_are_refused():
    four = Config((8, 64), stages=2, pdl=True, wgmma=True, k_warps=4, buffers=8)
    for a, most in (("bf16", 21_760), ("fp16", 7168)):
        heuristics.check(replace(W, k=most, a=a), H200, four)
        with pytest.raises(heuristics.Unsupported, match=r"config\.k_warps: 4 parts of k = \d+ with split: too few"):
            heuristics.check(replace(W, k=most + 128, a=a), H200, four)
    one = replace(four, k_warps=1)
    heuristics.check(replace(W, k=768), H200, one)
    with pytest.raises(heuristics.Unsupported, match=r"config\.k_warps: 1 parts of k = 640 with split: too few"):
        heuristics.check(replace(W, k=640), H200, one)
    with pytest.raises(heuristics.Unsupported, match=r"config\.chunk: 4096, at most 768 for each of 2 warps along k"):
        heuristics.check(W, H200, Config((1, 64), stages=2, k_warps=2, chunk=4096, buffers=2))


def test_shared_memory_is_what_the_kernels_say():
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    for config in candidates():
        kernel = families.of(H200).kernel(W, H200, config)
        assert smem(config) == kernel.smem_bytes


def test_an_invariant_products_configuration_does_not_depend_on_its_rows():
    asked = [heuristics.choose(replace(W, m=m, invariant=True), H200).config for m in (1, 2, 16, 64, 5000)]
    assert len(set(asked)) == 1
    most = 16 * 65_535  # what a grid holds
    assert heuristics.choose(replace(W, m=most, invariant=True), H200).config == asked[0]
    with pytest.raises(heuristics.Unsupported, match=r"config\.tile: 65536 tiles of 16 rows, at most 65535"):
        heuristics.choose(replace(W, m=most + 1, invariant=True), H200)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (replace(W, a="nvfp4"), "a: nvfp4: the sm90 kernels multiply fp16 or bf16 by NVFP4 alone"),
        (replace(W, a="fp32"), "a: fp32: "),
        (replace(W, out_dtype="nvfp4"), "out: an NVFP4Tensor"),
        (replace(W, batch=2, batch_a=2, batch_b=2), "b: 2 matrices: the sm90 kernels multiply by one"),
        (replace(W, m=2**31), "m: 2147483648, at most"),
    ],
)
def test_what_the_kernels_do_not_do(problem, message):
    assert str(families.unsupported(problem, H200)).startswith(message)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(), r"config\.tile: 128 rows, expected one of 1, 2, 4"),
        (replace(WARPS, tile=(8, 24)), r"config\.tile: 24 columns"),
        (replace(WARPS, k_warps=99), r"config\.k_warps: 99: \d+ warps, expected 1 to 31"),
        (replace(WARPS, stages=None), r"config\.stages: None, expected one of 1, 2"),
        (replace(GROUPS, split=3), r"config\.split: 3, expected one of 1, 2"),
        (replace(WARPS, tile=(32, 64)), r"config\.tile: 32 rows, expected one of 1, 2, 4, 8, 16"),
        (replace(WARPS, split=2), r"config\.split: 2, expected 1 without wgmma"),
        (replace(GROUPS, pdl=False, prefetch=0, ahead=True), r"config\.ahead: True, expected False without pdl"),
        (replace(GROUPS, pdl=False, prefetch=1), r"config\.prefetch: 1, expected 0 without pdl"),
        (replace(GROUPS, cluster=(2, 1)), r"config\.cluster: \(2, 1\), expected None with so few rows"),
        (replace(WARPS, cluster=(1, 2)), r"config\.cluster: \(1, 2\), expected None with so few rows"),
        (replace(GROUPS, chunk=128), r"config\.chunk: 128, expected None with wgmma"),
        (
            replace(GROUPS, k_warps=2, tile=(64, 64), buffers=5),
            r"config\.buffers: 5, expected a multiple of k_warps",
        ),
        (replace(WARPS, chunk=100), r"config\.chunk: 100, expected"),
        (
            Config((16, 64), stages=1, k_warps=16, chunk=4096, buffers=4),
            r"config\.k_warps: 16: 64 warps, expected 1 to 31",
        ),
        (Config((16, 16), stages=1, k_warps=16, chunk=4096, buffers=4), r"config\.buffers: 4: .* bytes of shared"),
        (Config((4, 64), stages=1, wgmma=True, buffers=4), r"config\.tile: 4 rows, expected one of 8"),
        (replace(WARPS, accumulators=2), r"config\.accumulators: 2, expected 1: the sm90 kernels do not"),
        (replace(WARPS, ctas=7), r"config\.ctas: 7, expected None"),
    ],
)
def test_configurations_that_are_refused(config, message):
    with pytest.raises(heuristics.Unsupported, match=message):
        heuristics.check(W, H200, config)


def test_fields_of_other_families_are_refused():
    with pytest.raises(heuristics.Unsupported, match=r"config\.k_warps: 4, expected 1: the sm100 kernels do not"):
        heuristics.check(Problem(8, 64, 64), target_named("b200"), Config(k_warps=4))


def test_what_the_public_functions_say():
    config = bs.config_for(8, 8192, 8192, gpu="h200")
    assert config == heuristics.choose(W, H200).config
    assert bs.explain(8, 8192, 8192, gpu="sm_90a").splitlines()[0] == f"8 x 8192 x 8192 on h200 (sm_90a): {config}"


def test_what_is_told_counts_every_tile():
    """And where CTAs share k, each of them."""
    problem = Problem(48, 8192, 8192, a="bf16", batch=1)
    config = heuristics.choose(problem, H200).config
    assert config.tile == (48, 128)
    text = bs.explain(48, 8192, 8192, gpu="h200")
    assert f": {8192 // 128 * config.split} CTAs for 132 multiprocessors" in text
    text = bs.explain(1, 16, 64, gpu="h200")
    assert "tiles of 1 row of activations" in text
    assert ": 1 CTA for 132 multiprocessors, 1 wave:" in text
    assert not re.search(r"\b1 \w+s\b(?! of 64)", text.replace("1 x 16", "")), text


def test_what_a_kernel_is_given(recorder):
    w = packed()
    x, bias, alpha = torch.randn(5, 256).bfloat16(), torch.randn(48), torch.tensor(0.5)
    out = torch.empty(5, 60, dtype=torch.bfloat16)[:, 3:51]
    call = run(x, w, out, alpha=alpha, bias=bias, activation="relu")
    ((pointers, sizes, scalars),) = recorder.calls
    given = [x, w.codes, out, bias, w.global_scale, alpha]
    assert pointers == [t.data_ptr() for t in given]
    assert sizes == [5 * 256 * 2, 3 * 2 * 1152, (4 * 60 + 48) * 2, 48 * 4, 4, 4]
    assert scalars == [1.0, 5, 48, 256, 256, 60]
    call(x, w, out, 2.0, bias)
    assert recorder.calls[1][0][5] == recorder.one.data_ptr()
    assert recorder.calls[1][2][0] == 2.0


def test_matrices_that_share_a_weight_are_rows_of_one(recorder):
    x, w = torch.randn(2, 3, 5, 256).half(), packed()
    run(x, w, torch.empty(2, 3, 5, 48))
    run(x.transpose(0, 1), w, torch.empty(3, 2, 5, 48))
    assert [call[2][1:] for call in recorder.calls] == [[30, 48, 256, 256, 48]] * 2
    assert recorder.calls[0][0][0] == x.data_ptr() != recorder.calls[1][0][0]


def test_rows_that_do_not_start_at_16_bytes_are_copied(recorder):
    w, whole = packed(48, 200), torch.randn(4, 264).bfloat16()
    odd = packed(48, 203)
    results = [
        run(x, b, torch.empty(4, 48))
        for x, b in ((whole[:, :200], w), (whole[:, 1:201], w), (torch.randn(4, 203).half(), odd))
    ]
    assert all(call[0][0] % 16 == 0 for call in recorder.calls)
    assert recorder.calls[2][2][1:] == [4, 48, 208, 208, 48]
    assert results == [None, None, None]  # no `Call` for what was copied
    x = torch.zeros(4 * 200 + 1, dtype=torch.bfloat16)[1:].view(4, 200)
    call = run(x, w, torch.empty(4, 48))
    assert recorder.calls[3][0][0] % 16 == 0
    call(x, w, torch.empty(4, 48), None, None)
    assert recorder.calls[4][0][0] % 16 == 0


def test_what_goes_to_torchs_matmul(recorder):
    x, w = torch.randn(5, 256).bfloat16(), packed()
    out = torch.empty(5, 48)
    plain = w.with_layout("128x4")
    for a, b in ((x, plain), (x.float(), w), (bs.quantize(x), plain)):
        run(a, b, out)
    stack = bs.quantize(torch.randn(2, 48, 256)).with_layout("fragment")
    run(x, stack, torch.empty(2, 5, 48))
    run(x, w, out, config=Config(expand=16))
    assert recorder.calls == []
    run(x, w, out)
    run(x, w, out, invariant=True)
    run(x, w, out, config=candidates()[-1])
    assert len(recorder.calls) == 3


def test_a_configuration_that_expands_is_nothing_else(recorder):
    x, w, out = torch.randn(5, 256).bfloat16(), packed(), torch.empty(5, 48)
    assert families.supports(W, H200, Config(expand=2048)) is None
    for wrong in (Config(expand=-1), Config(expand=64, pdl=True)):
        assert families.supports(W, H200, wrong).argument == "config.expand"
        with pytest.raises(heuristics.Unsupported, match=r"config\.expand: -?\d+, expected rows of a weight"):
            run(x, w, out, config=wrong)
    with pytest.raises(ValueError, match="invariant: True"):
        run(x, w, out, config=Config(expand=16), invariant=True)


@pytest.mark.parametrize("more", [{"invariant": True}, {"config": candidates()[0]}])
def test_what_torchs_matmul_is_not_asked_for(more, recorder):
    x, w = torch.randn(5, 256).bfloat16(), packed().with_layout("128x4")
    with pytest.raises(ValueError, match="needs fp16, bf16 or NVFP4 activations and one weight in layout 'fragment'"):
        sm90.prepare(x, w, torch.empty(5, 48), **more)


def test_nothing_to_compute(recorder):
    assert run(torch.empty(0, 256).bfloat16(), packed(), torch.empty(0, 48)) is None
    assert recorder.calls == []
