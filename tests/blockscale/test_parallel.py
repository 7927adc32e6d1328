"""Several processes (Gloo) against one: the contract for each layer, gradients, and where a weight may be cut."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from operands import same_bits
from parallel_job import HIDDEN, TOKENS, K, experts, operands, pair, run_experts, run_pair

import blockscale as bs
from blockscale import reference
from blockscale.parallel import shard_size, take

LIMIT = 120  # seconds


@pytest.fixture(scope="module", params=[1, 2, 4])
def results(request, tmp_path_factory):
    """For each rank what `parallel_job` found."""
    folder = tmp_path_factory.mktemp(f"ranks{request.param}")
    paths = os.pathsep.join(p for p in (str(Path(bs.__file__).parents[1]), os.environ.get("PYTHONPATH")) if p)
    script = Path(__file__).with_name("parallel_job.py")
    environment = {**os.environ, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-W", "ignore", script, str(request.param), folder]
    subprocess.run(command, check=True, timeout=LIMIT, env=environment)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


def _check_layer(layer, x, y):
    """Whether y meets the contract for what the layer's operands are."""
    a = x if layer.activations is None else bs.quantize(x)
    bias = layer.bias.detach()
    exact = reference.gemm(a, layer.weight, bias=bias)
    reference.check(y, exact, reference.tolerance(a, layer.weight, exact, bias=bias, out_dtype=y.dtype))


@pytest.mark.parametrize("activations", [None, "dynamic"])
@pytest.mark.parametrize("name", HIDDEN)
def test_a_column_and_a_row_layer_meet_the_contract(results, name, activations):
    x, *_ = operands()
    model = pair(HIDDEN[name], activations)
    of_ranks = [found[name, activations] for found in results]
    h = torch.cat([found[0] for found in of_ranks], dim=-1)
    assert not h[..., HIDDEN[name] :].any()
    h = h[..., : HIDDEN[name]]
    first = torch.nn.functional.gelu(model[0](x)).detach()
    torch.testing.assert_close(h, first, rtol=1e-6, atol=1e-6)
    for _, y, *_ in of_ranks:
        _check_layer(model[2], h, y)
        assert same_bits(y, of_ranks[0][1])
    _, _, of_x, of_bias = run_pair(model, x)
    together = torch.cat([found[3] for found in of_ranks])
    torch.testing.assert_close(together[: HIDDEN[name]], of_bias, rtol=1e-4, atol=1e-4)
    for found in of_ranks:
        torch.testing.assert_close(found[2], of_x, rtol=1e-4, atol=1e-4)


def test_gathered_and_distributed_results_are_the_same(results):
    x, *_ = operands()
    expected = run_pair(pair(HIDDEN["even"], None), x)
    for found in results:
        for mine, theirs in zip(found["gathered"][:3], expected[:3], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found["one row"], expected[1][0, 0], rtol=1e-5, atol=1e-5)
        assert found["refused"] == "x: K = 48, expected 640"
        torch.testing.assert_close(found["distributed"], expected[1], rtol=1e-5, atol=1e-5)


def test_experts_of_several_ranks(results):
    _, tokens, (weights, index) = operands()
    expected = run_experts(experts(), tokens, weights, index)
    for part, theirs in enumerate(expected):
        mine = torch.cat([found["experts"][part] for found in results])
        assert mine.shape[0] == TOKENS
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_where_a_weight_may_be_cut():
    with pytest.raises(ValueError, match="in_features: 1856 in 8 shards of 232, and 232 mod 16 = 8"):
        shard_size(1856, 8, name="in_features")
    with pytest.raises(ValueError, match="in_features: 100 in 8 shards leaves 4"):
        shard_size(100, 8, name="in_features")
    assert shard_size(1856, 8, name="in_features", pad=True) == 240
    assert shard_size(640, 4, name="in_features") == 160


@pytest.mark.parametrize(("k", "ranks"), [(1856, 8), (640, 4), (80, 8)])  # the last has ranks with nothing but zeros
def test_shards_sum_to_the_whole(k, ranks):
    w, x = bs.quantize(torch.randn(24, k)), torch.rand(5, k)
    size = shard_size(k, ranks, name="in_features", pad=True)
    padded = torch.nn.functional.pad(x, (0, size * ranks - k))
    total = torch.zeros(5, 24)
    for rank in range(ranks):
        columns = slice(rank * size, (rank + 1) * size)
        part = take(w, slice(0, 24), columns)
        kept = max(0, min(columns.stop, k) - columns.start)
        assert torch.equal(part.dequantize()[:, :kept], w.dequantize()[:, columns])
        assert not part.dequantize()[:, kept:].any()
        total += bs.gemm(padded[:, columns], part, out_dtype=torch.float32)
    exact = reference.gemm(x, w)
    reference.check(total, exact, reference.tolerance(x, w, exact, out_dtype=torch.float32))
    assert K % 16 == 0
