"""What each process of a group does. `parallel_job.py RANKS FOLDER` loads torch once and forks; FOLDER gets results."""

import multiprocessing
import sys
from pathlib import Path

import torch
from torch import nn

import blockscale as bs

K, N = 80, 40
HIDDEN = {"even": 640, "padded": 200}  # over 4 ranks: 160, no multiple of 64, and 50, which cuts a block
TOKENS, H = 8, 32


def pair(hidden, activations):
    torch.manual_seed(hidden)
    model = nn.Sequential(nn.Linear(K, hidden), nn.GELU(), nn.Linear(hidden, N))
    bs.nn.quantize_model(model, activations=activations)
    return model


def experts():
    torch.manual_seed(3)
    gate_up, down = (bs.nn.GroupedLinear.from_weights(torch.randn(4, *s)) for s in ((2 * 48, H), (H, 48)))
    return bs.nn.Experts(gate_up, down, nn.functional.silu)


def operands():
    random = torch.Generator().manual_seed(7)
    x = torch.rand(2, 3, K, generator=random)  # positive: signed values would hide a poor sum
    tokens, scores = torch.randn(TOKENS, H, generator=random), torch.rand(TOKENS, 4, generator=random)
    return x, tokens, scores.topk(2)


def run_pair(model, x):
    """h, y and the gradients of x and the first bias."""
    with torch.no_grad():
        h = model[1](model[0](x))
        y = model[2](h)
    x = x.clone().requires_grad_()
    gradients = torch.autograd.grad(model(x).square().sum(), (x, model[0].bias))
    return [h, y, *gradients]


def run_experts(module, tokens, weights, index):
    tokens = tokens.clone().requires_grad_()
    y = module(tokens, index, weights)
    return [y.detach(), torch.autograd.grad(y.square().sum(), tokens)[0]]


def main(rank, ranks, folder):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from blockscale.parallel import ColumnParallel, ExpertParallel, RowParallel

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    x, tokens, (weights, index) = operands()
    found = {}
    for name, hidden in HIDDEN.items():
        for activations in (None, "dynamic"):
            styles = {"0": ColumnParallel(pad=name == "padded"), "2": RowParallel(pad=name == "padded")}
            model = parallelize_module(pair(hidden, activations), mesh, styles)
            found[name, activations] = run_pair(model, x)
    model = pair(HIDDEN["even"], None)
    gathered = ColumnParallel(output_layouts=Replicate(), pad=True)
    model = parallelize_module(model, mesh, {"0": gathered, "2": RowParallel(input_layouts=Replicate())})
    found["gathered"] = run_pair(model, x)
    found["one row"] = model(x[0, 0]).detach()
    try:
        model[2](torch.ones(2, 48))
    except ValueError as error:
        found["refused"] = str(error)
    model = parallelize_module(
        pair(HIDDEN["even"], None),
        mesh,
        {
            "0": ColumnParallel(use_local_output=False),
            "2": RowParallel(output_layouts=Shard(0), use_local_output=False),
        },
    )
    y = model(x)
    assert isinstance(y, DTensor)
    assert y.placements == (Shard(0),)
    found["distributed"] = y.full_tensor().detach()
    module = parallelize_module(experts(), mesh, ExpertParallel())
    mine = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
    found["experts"] = run_experts(module, tokens[mine], weights[mine], index[mine])
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def run_all(ranks, folder):
    import blockscale.parallel  # noqa: F401 (before the fork, once for all)

    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=main, args=(rank, ranks, folder), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return max(abs(process.exitcode) for process in processes)


if __name__ == "__main__":
    sys.exit(run_all(int(sys.argv[1]), Path(sys.argv[2])))
