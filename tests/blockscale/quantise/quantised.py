"""What the quantiser's tests share: data, GPUs to emulate, and the comparison with the CPU's bits.

    python tests/blockscale/quantise/quantised.py GPU DIR

fills a store with the kernels of test_quantise_gpu.py and benchmarks/quantize.py where the compiler is, for a machine
that has none: some 90 kernels, 3 s each.
"""

import itertools
import sys
from functools import cache

import numpy as np
import torch

import blockscale as bs
import ptxemu
from blockscale.launch import emulated
from blockscale.launch.emulated import EmulatedLauncher
from blockscale.problem import Target, target_named
from blockscale.quantize import device
from blockscale.store import Store

CAPABILITIES = {"sm_90a": (9, 0), "sm_100a": (10, 0), "sm_103a": (10, 3), "sm_120a": (12, 0), "sm_121a": (12, 1)}


@cache
def gpu(arch, schedule="lazy", seed=0):
    """A software GPU of few multiprocessors, so that CTAs take more than one part of a row. It stays, since it keeps
    the kernels that it has read."""
    target = Target(arch, arch, CAPABILITIES[arch], arch, sms=1, smem=99 * 1024)
    return EmulatedLauncher(target, ptxemu.Device(arch, sms=1, schedule=schedule, seed=seed, checks="strict"))


def by_kernel(launcher, x, **options):
    """`quantize` on the software GPU; no launch has a finding."""
    reports = len(launcher.reports)
    token = emulated._active.set(launcher)
    try:
        found = bs.quantize(x, **options)
    finally:
        emulated._active.reset(token)
    assert len(launcher.reports) > reports or not x.numel()
    assert not launcher.findings
    return found


def assert_same(found, expected):
    """Codes, scales with their padding, global scale and everything that travels along."""
    assert (found.shape, found.layout) == (expected.shape, expected.layout)
    pairs = {"global_scale": (found.global_scale.view(torch.int32), expected.global_scale.view(torch.int32))}
    pairs["scales"] = found.scales.view(torch.uint8), expected.scales.view(torch.uint8)
    pairs["codes"] = found.codes, expected.codes
    if expected.group_sizes is not None:
        pairs["scale_offsets"] = found.scale_offsets, expected.scale_offsets
    for name, (left, right) in pairs.items():
        left, right = left.cpu(), right.cpu()
        assert (left.shape, left.dtype) == (right.shape, right.dtype), name
        wrong = (left != right).nonzero()
        assert not len(wrong), f"{name}: {len(wrong)} differ, the first at {wrong[0].tolist()}"


def random_bits(rows, k, seed=0):
    """fp32 over all bit patterns, NaN and infinity among them."""
    bits = np.random.default_rng(seed).integers(0, 2**32, (rows, k), dtype=np.uint32)
    return torch.from_numpy(bits.view(np.float32))


def every_half(dtype):
    """(64, 1024): every number of a 16-bit type, in an order that mixes magnitudes."""
    order = torch.randperm(65536, generator=torch.Generator().manual_seed(7))
    return (order - 32768).to(torch.int16).view(dtype).view(64, 1024)


def boundaries(unit):
    """(126 x 3, 16) fp32: under the global scale `unit` every scale from 2^-9 to 448, and the numbers at and next to
    every boundary between two codes, with both signs."""
    scales = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    d = scales * torch.tensor(unit)
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = (d[:, None] * edges).view(torch.int32)[:, :, None] + torch.arange(-2, 3, dtype=torch.int32)
    near = near.view(torch.float32).flatten(1)  # 35 of each scale
    near = torch.cat(
        (near, d[:, None] * torch.tensor([[0.0, -0.0, 1e-3, 5.9999995, 0.2499999, 4.9999995, 3.0]])), dim=1
    )
    blocks = near.view(126, 3, 14)
    signs = torch.where(torch.arange(14) % 2 == 0, 1.0, -1.0)
    top = (6 * d)[:, None, None].expand(126, 3, 1)  # which gives the block that scale
    return torch.cat((top, blocks * signs, -top * 0.5), dim=2).reshape(-1, 16)


def special():
    """NaN, infinities, zeros of both signs, subnormals, in blocks of their own and beside numbers."""
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(3))
    x[0, 0], x[0, 1], x[1, 3], x[2, 5] = float("nan"), -float("nan"), float("inf"), -float("inf")
    x[3], x[4], x[6] = 0, -0.0, float("nan")
    x[5] *= 1e-40
    x[7, :16], x[7, 20], x[8, 33] = -float("inf"), 3e38, -1e-45
    return x


def unusual(rows, k):
    """(rows, k): blocks of 1, and every 7th one large, small, zero or beyond what a global scale of 0.01 holds, so that
    a thread of a long row has more of them than it has bits to remember."""
    x = torch.ones(rows, k) + torch.rand(rows, k, generator=torch.Generator().manual_seed(12))
    factors = torch.tensor([1e-9, 1e-5, 1e3, 1e9, 0.0])
    blocks = torch.arange(-(-k // 16))
    factor = torch.where(blocks % 7 == 0, factors[blocks // 7 % 5], torch.ones(()))
    return x * factor.repeat_interleave(16)[:k]


def variants():
    """The kernels that the tests for a GPU and the benchmark take."""
    both = (True, False)
    dtypes, methods, layouts = ("bf16", "fp16", "fp32"), ("rtn", "four_over_six", "mse"), ("linear", "128x4")
    for how in itertools.product(dtypes, methods, layouts, both, (None,), (None,), both):
        yield device.Variant("codes", *how)
    for dtype, vectors in itertools.product(dtypes, both):
        yield device.Variant("amax", dtype, "rtn", "linear", False, None, None, vectors)
    yield device.Variant("codes", "bf16", "rtn", "128x4-grouped", True, None, None, True)
    yield device.Variant("codes", "fp32", "rtn", "128x4-grouped", True, None, None, True)
    for dtype in ("bf16", "fp32"):
        before = [("swiglu", None, "rtn", "128x4"), ("rms_norm", dtype, "rtn", "128x4")]
        before += [("rms_norm", "fp32", "four_over_six", "linear"), ("rms_norm", "fp32", "rtn", "128x4")]
        for name, weight, method, layout in before:
            yield device.Variant("codes", dtype, method, layout, True, name, weight, True)
            yield device.Variant("codes", dtype, method, layout, False, name, weight, True)
            yield device.Variant("amax", dtype, "rtn", "linear", False, name, weight, True)


if __name__ == "__main__":
    for variant in dict.fromkeys(variants()):
        print(device.artefact(target_named(sys.argv[1]), variant, Store(sys.argv[2])).key, variant, flush=True)
