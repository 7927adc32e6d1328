"""Our models of other libraries' NVFP4 rules give the libraries' own bits, and agree with us where they should.

The extra `peers` brings torchao and compressed-tensors. ModelOpt also wants `requests`, which it does not declare.
TransformerEngine cannot be imported without CUDA, but its reference quantiser is one file of plain torch, which is
loaded here by itself from an installed `transformer-engine` wheel.
"""

import importlib.util
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from peers import rules
from peers.rules import Quantized
from torch import Tensor

import blockscale

E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1_TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def unpack(packed: Tensor) -> Tensor:
    """(M, K / 2) bytes, even k in the low nibble -> (M, K) codes."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).reshape(packed.shape[0], -1)


def imported(module: str, wanted: str) -> Any:
    """The module, or a skip; what these libraries warn about while they are imported is not our concern."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(module, reason=wanted, exc_type=ImportError)


def library_torchao(x: Tensor, scaled: bool) -> Quantized:
    ao = imported("torchao.prototype.mx_formats.nvfp4_tensor", "needs torchao (extra: peers)")
    global_scale = ao.per_tensor_amax_to_scale(x.abs().max()) if scaled else None
    t = ao.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=global_scale)
    multiplier = torch.tensor(1.0) if global_scale is None else global_scale
    return Quantized(unpack(t.qdata), t.scale.view(torch.uint8), multiplier)


def library_compressed_tensors(x: Tensor) -> Quantized:
    wanted = "needs compressed-tensors (extra: peers)"
    quantization = imported("compressed_tensors.quantization", wanted)
    helpers = imported("compressed_tensors.quantization.utils", wanted)
    compressor = imported("compressed_tensors.compressors.nvfp4", wanted).NVFP4PackedCompressor
    scheme = quantization.preset_name_to_scheme("NVFP4A16", ["Linear"])
    divisor = helpers.generate_gparam(x.min(), x.max())
    scale, _ = helpers.compute_dynamic_scales_and_zp(x, scheme.weights, torch.nn.Module(), divisor)
    state = {"weight": x, "weight_scale": scale, "weight_global_scale": divisor}
    packed = compressor.compress(state, scheme)
    return Quantized(unpack(packed["weight_packed"]), packed["weight_scale"].view(torch.uint8), (1.0 / divisor)[0])


def library_modelopt(x: Tensor) -> Quantized:
    qtensor = imported("modelopt.torch.quantization.qtensor.nvfp4_tensor", "needs nvidia-modelopt and requests")
    t, scale, global_scale = qtensor.NVFP4QTensor.quantize(x, rules.BLOCK)
    return Quantized(unpack(t._quantized_data), scale.view(torch.uint8), global_scale)


@cache
def transformer_engine_reference() -> ModuleType:
    """TransformerEngine's reference quantiser as a module, its package's CUDA half replaced by empty stand-ins."""
    package = importlib.util.find_spec("transformer_engine")
    folder = Path(package.origin).parent if package and package.origin else Path()
    path = folder / "pytorch/custom_recipes/reference_nvfp4.py"
    if not path.exists():
        pytest.skip("needs transformer-engine >= 2.20 (the wheel alone, without its CUDA extras)")
    spec = importlib.util.spec_from_file_location("reference_nvfp4", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    above = ["transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.custom_recipes"]
    stand_ins: dict[str, Any] = {name: MagicMock() for name in above}
    bases = SimpleNamespace(QuantizedTensorStorage=object, Quantizer=object)
    stand_ins["transformer_engine.pytorch.quantized_tensor"] = bases
    with patch.dict(sys.modules, stand_ins):
        spec.loader.exec_module(module)
    return module


def library_transformer_engine(x: Tensor) -> Quantized:
    quantizer = transformer_engine_reference().NVFP4QuantizerRef
    amax = x.abs().max().float().reshape(1)
    packed, scale = quantizer._quantize_blockwise_reference(x, amax, rules.BLOCK, 1, pow_2_scales=False, eps=0.0)
    return Quantized(unpack(packed), scale.view(torch.uint8), amax[0] / 2688)


LIBRARIES: dict[rules.Rule, rules.Rule] = {
    rules.torchao_block: lambda x: library_torchao(x, scaled=False),
    rules.torchao: lambda x: library_torchao(x, scaled=True),
    rules.compressed_tensors: library_compressed_tensors,
    rules.modelopt: library_modelopt,
    rules.transformer_engine: library_transformer_engine,
}
PER_TENSOR = [rule for rule in LIBRARIES if rule is not rules.torchao_block]
EVERY_RULE = pytest.mark.parametrize("rule", LIBRARIES, ids=lambda rule: rule.__name__)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))


def with_zero_blocks() -> Tensor:
    x = normal(64, 256)
    x[:, 32:96] = 0
    x[::3, 128:144] = -0.0
    x[5] = 0
    return x


def signed_zeros_and_underflow() -> Tensor:
    """Beside one large value, elements that vanish in the division, of either sign, and zeros of either sign."""
    x = normal(16, 64) * 2.0 ** torch.linspace(-140, 0, 64)
    x[::2, ::5] = -0.0
    return x


def on_grid(elements: Tensor, global_scale: float) -> Tensor:
    """Every E4M3 scale in turn x a row of 16 elements of which the largest is 6: amax is 6 x 448 x global_scale."""
    return (E4M3[1:].unsqueeze(1) * global_scale * elements).reshape(3, -1)


def representable(global_scale: float) -> Tensor:
    """Values that a quantiser need not round, block scales from 2^-6 up."""
    x = on_grid(torch.cat([E2M1, -E2M1[1:], E2M1[:1]]), global_scale)
    return x.reshape(-1, rules.BLOCK)[7:].reshape(7, -1)


def code_ties(global_scale: float) -> Tensor:
    return on_grid(torch.cat([E2M1_TIES, -E2M1_TIES, torch.tensor([6.0, 0.0])]), global_scale)


def scale_ties(global_scale: float) -> Tensor:
    """Block maxima half-way between two neighbouring scales, from below the smallest scale up."""
    half_way = torch.cat([E4M3[:-1] + E4M3[1:], E4M3[-1:] * 2]) / 2
    return half_way.unsqueeze(1) * global_scale * normal(1, rules.BLOCK).sign() * 6.0


def any_exponent() -> Tensor:
    """Uniform exponents over most of fp32's range, so that nearly every block scale underflows."""
    exponents = torch.rand(32, 256, generator=torch.Generator().manual_seed(1)) * 250 - 125
    return normal(32, 256) * 2.0**exponents


CASES: dict[str, Callable[[], Tensor]] = {
    "one block": lambda: normal(1, 16),
    "odd sizes": lambda: normal(3, 48),
    "normal": lambda: normal(256, 1024),
    "weights": lambda: normal(128, 768) * 0.02,
    "outliers": lambda: normal(64, 512) / normal(64, 512).flip(0),
    "zero blocks": with_zero_blocks,
    "all zero": lambda: torch.zeros(4, 32),
    "zeros and underflow": signed_zeros_and_underflow,
    "block scales from 2^-30 to 448": lambda: normal(96, 256) * 2.0 ** torch.linspace(-30, 9, 96).unsqueeze(1),
    "representable": lambda: representable(1.0),
    "code ties": lambda: code_ties(1.0),
    "code ties, small": lambda: code_ties(2.0**-9),
    "scale ties": lambda: scale_ties(1.0),
    "scale ties, large": lambda: scale_ties(2.0**20),
    "any exponent": any_exponent,
    "near the largest": lambda: normal(16, 64).clamp(-1, 1) * 3.38e38,
    "near the smallest normal": lambda: normal(16, 64) * 2.0**-124,
    "subnormal": lambda: normal(16, 64) * 2.0**-130,
    "global scale subnormal": lambda: normal(16, 64) * 2.0**-118,
    "reciprocal overflows": lambda: normal(16, 64) * 2.0**-113,
}


def assert_same(ours: Quantized, theirs: Quantized) -> None:
    """Every bit, but for the codes under a NaN scale, which follow from the payload of a NaN."""
    nan = (theirs.scales & 127 == 127).repeat_interleave(rules.BLOCK, dim=1)
    ours, theirs = (q._replace(codes=q.codes.masked_fill(nan, 0)) for q in (ours, theirs))
    for name, a, b in zip(Quantized._fields, ours, theirs, strict=True):
        a, b = (t if t.dtype == torch.uint8 else t.float().view(torch.int32) for t in (a, b))
        assert a.shape == b.shape, name
        bad = (a != b).nonzero()
        assert not len(bad), f"{name}: {len(bad)} of {a.numel()} differ, first at {bad[0].tolist()}"


@EVERY_RULE
@DTYPES
@pytest.mark.parametrize("case", CASES)
def test_the_model_of_a_rule_gives_the_bits_of_its_library(rule: rules.Rule, dtype: torch.dtype, case: str) -> None:
    x = CASES[case]().to(dtype)
    assert_same(rule(x), LIBRARIES[rule](x.clone()))


def ours(x: Tensor) -> Quantized:
    t = blockscale.quantize(x, method="rtn", layout="linear")
    assert t.shape == x.shape
    codes, scales = unpack(t.codes)[:, : x.shape[1]], t.scales.view(torch.uint8)[:, : x.shape[1] // rules.BLOCK]
    return Quantized(codes, scales, t.global_scale)


@DTYPES
@pytest.mark.parametrize("case", CASES)
def test_our_quantiser_gives_the_bits_of_our_rule(dtype: torch.dtype, case: str) -> None:
    x = CASES[case]().to(dtype)
    assert_same(ours(x), rules.blockscale(x))


@DTYPES
@pytest.mark.parametrize("global_scale", [1.0, 2.0**-9, 2.0**20])
@pytest.mark.parametrize("rule", PER_TENSOR, ids=lambda rule: rule.__name__)
def test_every_rule_stores_representable_values_as_we_do(
    rule: rules.Rule, global_scale: float, dtype: torch.dtype
) -> None:
    x = representable(global_scale).to(dtype)
    assert_same(ours(x), rule(x))
    assert torch.equal(ours(x).dequantize(), x.float())


# First code and scale byte of a block that is all +0, all -0, or so small that its scale rounds to 0.
SMALL_BLOCKS: dict[rules.Rule, tuple[tuple[int, int], ...]] = {
    rules.torchao_block: ((0, 0x08), (8, 0x08), (8, 0x08)),
    rules.torchao: ((0, 0x08), (8, 0x08), (8, 0x08)),
    rules.compressed_tensors: ((0, 0x20), (0, 0x20), (8, 0x20)),
    rules.modelopt: ((0, 0x38), (0, 0x38), (12, 0x01)),
    rules.transformer_engine: ((0, 0x00), (0, 0x00), (15, 0x00)),
    rules.blockscale: ((0, 0x00), (0, 0x00), (0, 0x00)),
}


@pytest.mark.parametrize("rule", SMALL_BLOCKS, ids=lambda rule: rule.__name__)
def test_what_each_rule_stores_for_empty_and_vanishing_blocks(rule: rules.Rule) -> None:
    x = torch.zeros(4, rules.BLOCK)
    x[1], x[2], x[3] = -0.0, -(2.0**-8), 2688.0
    q = rule(x)
    stored = tuple(zip(q.codes[:3, 0].tolist(), q.scales[:3, 0].tolist(), strict=True))
    assert stored == SMALL_BLOCKS[rule]


# Scale byte and global scale of a tensor of zeros; 0x7F, of either sign, is NaN.
ALL_ZERO: dict[rules.Rule, tuple[int, float]] = {
    rules.torchao_block: (0x08, 1.0),
    rules.torchao: (0x7F, 0.0),
    rules.compressed_tensors: (0x20, 1.0),
    rules.modelopt: (0x7F, 0.0),
    rules.transformer_engine: (0x00, 0.0),
    rules.blockscale: (0x00, 1.0),
}


@pytest.mark.parametrize("rule", ALL_ZERO, ids=lambda rule: rule.__name__)
def test_what_each_rule_stores_for_a_tensor_of_zeros(rule: rules.Rule) -> None:
    q = rule(torch.zeros(2, 32))
    byte, global_scale = ALL_ZERO[rule]
    nan = byte == 0x7F
    assert ((q.scales & 0x7F if nan else q.scales) == byte).all()
    assert q.global_scale == global_scale
    assert bool(q.dequantize().isnan().all()) is nan
