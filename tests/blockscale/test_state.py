"""Results do not depend on the caller's settings of torch, and leave no trace in them."""

import ast
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from operands import same_bits, same_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import blockscale as bs

SRC = Path(__file__).parents[2] / "src" / "blockscale"


@contextmanager
def _default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@contextmanager
def _deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


STATES = {
    "default dtype float64": lambda: _default_dtype(torch.float64),
    "default dtype float16": lambda: _default_dtype(torch.float16),
    "default device meta": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic algorithms": _deterministic,
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("threads", [1, 2])
def test_same_bits_in_every_state(state, threads):
    x, w = torch.randn(40, 96), torch.randn(700, 96)
    sizes, bias, out = torch.tensor([40]), torch.ones(700), torch.empty(40, 700, dtype=torch.bfloat16)
    torch.set_num_threads(threads)

    def everything():
        q = bs.quantize(w, method="mse")
        return [
            q.codes,
            q.scales,
            q.global_scale,
            q.dequantize(),
            bs.gemm(bs.quantize(x), q, out_dtype=torch.float32),
            bs.gemm(x.bfloat16(), q, bias=bias, activation="gelu"),
            bs.gemm(x, q, invariant=True, out=out).clone(),
            bs.grouped_gemm(x, bs.quantize(w[None]), group_sizes=sizes),
        ]

    try:
        expected = everything()
        with STATES[state]():
            results = everything()
        again = everything()
    finally:
        torch.set_num_threads(1)
    for result, wanted, later in zip(results, expected, again, strict=True):
        assert same_bits(result, wanted)
        assert same_bits(later, wanted)


def test_tables_are_not_poisoned_by_a_fake_run():
    q = bs.quantize(torch.randn(4, 64))
    bs.formats.blocks._table.cache_clear()
    mode = FakeTensorMode()
    fake = bs.NVFP4Tensor(
        *(mode.from_tensor(t) for t in (q.codes, q.scales, q.global_scale)), layout=q.layout, shape=q.shape
    )
    with mode:
        assert fake.dequantize().shape == (4, 64)
    assert torch.isfinite(q.dequantize()).all()


def test_every_new_tensor_names_its_dtype_and_device():
    """What torch makes without a dtype or device follows settings that belong to the caller."""
    names = ("tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "linspace")
    makers = {f"torch.{name}" for name in names}
    wrong = []
    for path in sorted(SRC.rglob("*.py")):
        if {"cli", "demo"} & set(path.parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in makers:
                missing = {"dtype", "device"} - {k.arg for k in node.keywords}
                wrong += [f"{path}:{node.lineno}: {ast.unparse(node)}"] if missing else []
    assert not wrong, "\n".join(wrong)


def test_gradients_are_refused_where_they_would_be_lost():
    w, x = bs.quantize(torch.randn(6, 64)), torch.randn(4, 64)
    out = torch.empty(4, 6, dtype=torch.bfloat16)
    for arguments in (
        {"a": x.clone().requires_grad_()},
        {"bias": torch.ones(6, requires_grad=True)},
        {"alpha": torch.ones((), requires_grad=True)},
    ):
        with pytest.raises(ValueError, match="out: given, but an operand requires grad"):
            bs.gemm(**{"a": x, "b": w, "out": out, **arguments})
        with torch.no_grad():
            bs.gemm(**{"a": x, "b": w, "out": out, **arguments})
    with pytest.raises(ValueError, match="out: requires grad"):
        bs.gemm(x, w, out=out.clone().requires_grad_())
    unit = torch.ones((), requires_grad=True)
    assert not bs.NVFP4Tensor.from_parts(w.codes, w.scales, unit).global_scale.requires_grad
    assert not bs.quantize(torch.nn.Parameter(x), global_scale=unit).global_scale.requires_grad
    assert same_tensor(bs.quantize(torch.nn.Parameter(x)), bs.quantize(x))
