"""Modules, operators and parallel layers on NVIDIA GPUs, by the sm90 backend; NCCL where there are two."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from operands import same_bits
from torch import nn

import blockscale as bs
from blockscale import reference

pytestmark = pytest.mark.gpu
N, K = 384, 592  # 37 blocks a row


def _layer(dtype=torch.bfloat16):
    return bs.nn.Linear.from_linear(nn.Linear(K, N, dtype=dtype), backend="sm90")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 17, 300])
def test_a_layer_meets_the_contract_on_positive_data(dtype, rows):
    layer, x = _layer(dtype).cuda(), torch.rand(rows, K, dtype=dtype, device="cuda")
    with torch.no_grad():
        y = layer(x)
    w, bias = layer.weight.to("cpu"), layer.bias.detach().cpu()
    exact = reference.gemm(x.cpu(), w, bias=bias)
    slack = (4 + K / 1024) * 2.0**-20
    reference.check(y, exact, reference.tolerance(x.cpu(), w, exact, bias=bias, out_dtype=dtype, c=slack))


def test_quantised_on_the_gpu_gives_the_cpus_bits_and_moves():
    linear = nn.Linear(K, N)
    here, there = bs.nn.Linear.from_linear(linear), bs.nn.Linear.from_linear(copy.deepcopy(linear).cuda())
    assert {t.device.type for t in there.state_dict().values()} == {"cuda"}
    back = copy.deepcopy(there).cpu()
    for name, value in here.state_dict().items():
        assert same_bits(back.state_dict()[name], value)
    with torch.device("cuda"):
        assert here.weight.with_layout("linear").scales.device.type == "cpu"
        assert there.weight.with_layout("linear").scales.device.type == "cuda"


@pytest.mark.parametrize("kind", ["float", "tensor"])
def test_captured_in_a_graph_and_replayed_with_new_data(kind):
    """No copy from the host, no look at a value; a second load of the weights is seen by the graph."""
    layers = [_layer().cuda() for _ in range(2)]
    served = copy.deepcopy(layers[0])
    alpha = 0.5 if kind == "float" else torch.tensor(0.5, device="cuda")
    x, out = (torch.randn(9, size, dtype=torch.bfloat16, device="cuda") for size in (K, N))

    def run(layer, into=None):
        how = {"bias": layer.bias.detach(), "activation": "silu", "out": into, "backend": "sm90"}
        return bs.gemm(x, layer.weight, alpha=alpha, **how)

    with torch.no_grad():
        run(served, out)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run(served, out)
        for layer in (layers[0], layers[1], layers[0]):
            served.load_state_dict(layer.state_dict())
            x.normal_()
            if kind == "tensor":
                alpha.uniform_(0.1, 2.0)
            graph.replay()
            assert same_bits(out.cpu(), run(layer).cpu())


def test_compiled_and_differentiated():
    model = nn.Sequential(_layer(), nn.GELU(), bs.nn.Linear.from_linear(nn.Linear(N, 64).bfloat16(), backend="sm90"))
    model.cuda()
    x = torch.randn(5, K, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert same_bits(compiled(x).cpu(), model(x).cpu())
    (mine,) = torch.autograd.grad(model(x).float().square().sum(), x)
    z = nn.functional.linear(x.float(), model[0].weight.to("cpu").dequantize().cuda(), model[0].bias.float())
    y = nn.functional.linear(
        nn.functional.gelu(z), model[2].weight.to("cpu").dequantize().cuda(), model[2].bias.float()
    )
    (theirs,) = torch.autograd.grad(y.square().sum(), x)
    assert (mine - theirs).float().norm() < 0.02 * theirs.float().norm()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_what_one_gives():
    script = Path(__file__).parents[2] / "benchmarks" / "parallel.py"
    paths = os.pathsep.join(p for p in (str(Path(bs.__file__).parents[1]), os.environ.get("PYTHONPATH")) if p)
    command = [sys.executable, script, "--check"]
    run = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
