"""A small layer of experts in NVFP4 by the B200's grouped kernel, on the software GPU, beside the CPU backend.

Tokens go to two experts each. Their rows, sorted by expert and quantised once, are multiplied by fused gate and up
weights; SwiGLU and the quantiser come in the same kernel, and what it writes goes into the second product as it is.
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

import blockscale
from blockscale import NVFP4Tensor, reference
from blockscale.formats.layouts import GROUPED, LINEAR

ARCH = "sm_100a"
TOKENS, TOP_K, EXPERTS, HIDDEN, INNER = 24, 2, 8, 192, 128
SEED = 7
_MOST = 2688.0  # what an NVFP4 tensor with a global scale of 1 can hold


@dataclass(frozen=True)
class Layer:
    """Operands of both products: rows sorted by expert, fused gate and up (E, 2 x INNER, HIDDEN), down (E, HIDDEN,
    INNER); and the global scale of what lies between."""

    rows: NVFP4Tensor
    sizes: Tensor
    gate_up: NVFP4Tensor
    down: NVFP4Tensor
    between: Tensor


@dataclass(frozen=True)
class EmulatedExperts:
    """What the kernel made of the layer.

    Attributes:
        rows: of each expert. launches: one for each product, whatever the sizes.
        same_bytes: of those that the first product stored, the share that the CPU backend stored too.
        errors: by backend, the largest error of the second product in units of what its contract allows.
        difference: between both backends' results of the whole layer, relative to the largest.
        snr_db: of the emulated layer, beside the same layer in fp32 with weights and rows not quantised.
    """

    arch: str
    rows: tuple[int, ...]
    configs: tuple[str, str]
    launches: int
    instructions: int
    findings: int
    same_bytes: float
    errors: dict[str, float]
    difference: float
    snr_db: float
    seconds: float

    @property
    def passed(self) -> bool:
        right = self.findings == 0 and self.launches == 2 and all(error <= 1 for error in self.errors.values())
        return right and self.same_bytes > 0.99 and self.difference < 0.02


def emulate() -> EmulatedExperts:
    """The layer, of random numbers, on the CPU and on the emulator."""
    random = torch.Generator().manual_seed(SEED)
    tokens = torch.randn(TOKENS, HIDDEN, generator=random)
    expert = torch.rand(TOKENS, EXPERTS, generator=random).topk(TOP_K).indices.reshape(-1)
    order = expert.argsort(stable=True)
    rows, sizes = tokens[order // TOP_K], torch.bincount(expert, minlength=EXPERTS).to(torch.int32)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=random) / HIDDEN**0.5
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=random) / INNER**0.5
    inner, exact = _in_fp32(rows, sizes, gate_up, down)
    layer = Layer(
        blockscale.quantize(rows, layout=GROUPED, group_sizes=sizes),
        sizes,
        blockscale.quantize(gate_up),
        blockscale.quantize(down),
        inner.abs().amax() / _MOST,
    )
    on_cpu, of_cpu = run(layer)
    start = time.perf_counter()
    with blockscale.emulated(ARCH, on_finding="collect") as gpu:
        on_gpu, of_gpu = run(layer)
    seconds = time.perf_counter() - start
    counts = [report.counters["warp_instructions"] for report in gpu.reports]
    error = (of_gpu.double() - exact.double()).square().sum()
    return EmulatedExperts(
        ARCH,
        tuple(sizes.tolist()),
        tuple(str(plan.config) for plan in gpu.plans.values()),  # type: ignore[arg-type] # two of them
        len(gpu.reports),
        sum(count for count in counts if isinstance(count, int)),
        len(gpu.findings),
        float((on_gpu.codes == on_cpu.codes).float().mean()),
        {
            "cpu": _error(on_cpu, layer, of_cpu, reference.CPU_TOLERANCE),
            ARCH: _error(on_gpu, layer, of_gpu, reference.tensor_core_tolerance(INNER)),
        },
        float((of_gpu - of_cpu).abs().amax() / of_cpu.abs().amax()),
        round(float(10 * torch.log10(exact.double().square().sum() / error)), 2),
        round(seconds, 2),
    )


def run(layer: Layer) -> tuple[NVFP4Tensor, Tensor]:
    """(what lies between the products, the result fp32), by whatever multiplies here."""
    shape = (layer.rows.shape[0], INNER)
    between = NVFP4Tensor.zeros(shape, global_scale=layer.between, layout=GROUPED, group_sizes=layer.sizes)
    blockscale.grouped_gemm(layer.rows, layer.gate_up, activation="swiglu", out=between)
    result = blockscale.grouped_gemm(between, layer.down, out_dtype=torch.float32)
    assert isinstance(result, Tensor)
    return between, result


def _error(between: NVFP4Tensor, layer: Layer, y: Tensor, c: float) -> float:
    """The largest error of the second product, in units of what the contract allows."""
    rows, down, largest, start = between.with_layout(LINEAR), layer.down.with_layout(LINEAR), 0.0, 0
    for e, size in enumerate(layer.sizes.tolist()):
        mine = slice(start, start + size)
        start += size
        if size:
            exact = reference.gemm(rows[mine], down[e])
            allowed = reference.tolerance(rows[mine], down[e], exact, out_dtype=y.dtype, c=c)
            largest = max(largest, float(((y[mine].double() - exact).abs() / allowed).max()))
    return largest


def _in_fp32(rows: Tensor, sizes: Tensor, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """The same without NVFP4: (what lies between, the result)."""
    between, result, start = [], [], 0
    for e, size in enumerate(sizes.tolist()):
        gate, up = (rows[start : start + size] @ gate_up[e].T).chunk(2, dim=-1)
        between.append(torch.nn.functional.silu(gate) * up)
        result.append(between[-1] @ down[e].T)
        start += size
    return torch.cat(between), torch.cat(result)
