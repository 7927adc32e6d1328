"""One layer of the encoder by a GPU's own kernel, on the software GPU, beside the CPU backend."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import blockscale
from blockscale import reference
from blockscale.compile import CompilerMissing, c_compiler, check_compiler
from blockscale.demo.minilm import MiniLM

LAYER = "encoder.layer.0.attention.self.query"
ARCH = "sm_100a"


@dataclass(frozen=True)
class EmulatedLayer:
    """What the kernel made of the layer's product, bias and activation left out.

    Attributes:
        sizes: (M, N, K); M is the number of tokens. config: the kernel's configuration.
        instructions: that the warps executed. findings: that the emulator had of the kernel.
        errors: by backend, the largest error in units of what its contract allows. seconds: on this machine.
    """

    layer: str
    arch: str
    sizes: tuple[int, int, int]
    config: str
    instructions: int
    findings: int
    errors: dict[str, float]
    seconds: float

    @property
    def passed(self) -> bool:
        return self.findings == 0 and all(error <= 1 for error in self.errors.values())


def why_not() -> str | None:
    """Why no kernel can be compiled and emulated here, or None."""
    try:
        check_compiler()
    except CompilerMissing as error:
        return str(error)
    return None if c_compiler() else "there is no C compiler (`cc`, or what CC names), which the emulator needs"


def emulate(model: MiniLM, sentences: Sequence[Tensor], arch: str = ARCH) -> EmulatedLayer:
    """Multiplies the layer's real activations, of all sentences, by its weight: on the CPU and on the emulator of
    `arch`, an architecture or the name of a GPU."""
    seen: dict[str, Tensor] = {}

    def linear(layer: str, x: Tensor, activation: str | None) -> Tensor:
        seen[layer] = x
        return model.fp32_linear(layer, x, activation)

    model.embed(sentences, linear)
    x, weight = blockscale.quantize(seen[LAYER]), blockscale.quantize(model.weight(LAYER))
    exact = reference.gemm(x, weight)
    (m, k), n = x.shape, weight.shape[0]
    on_cpu = blockscale.gemm(x, weight, out_dtype=torch.float32)
    start = time.perf_counter()
    with blockscale.emulated(arch, on_finding="collect") as gpu:
        config = blockscale.config_for(m, n, k)
        emulated = blockscale.gemm(x, weight, out_dtype=torch.float32)
    seconds = time.perf_counter() - start
    limits = {"cpu": reference.CPU_TOLERANCE, arch: reference.tensor_core_tolerance(k)}
    errors = {}
    for name, y in (("cpu", on_cpu), (arch, emulated)):
        allowed = reference.tolerance(x, weight, exact, out_dtype=y.dtype, c=limits[name])
        errors[name] = float(((y.double() - exact).abs() / allowed).max())
    counts = [report.counters["warp_instructions"] for report in gpu.reports]
    instructions = sum(count for count in counts if isinstance(count, int))
    return EmulatedLayer(
        LAYER, arch, (m, n, k), str(config), instructions, len(gpu.findings), errors, round(seconds, 2)
    )
