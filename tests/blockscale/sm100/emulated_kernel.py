"""Runs the sm_100a kernel itself on the emulator, on raw bytes, and says where its result is wrong.

Operands hold all codes and scales that differ from row to row and block to block; the scales of rows that do not exist
are NaN, the output is NaN before, and what lies around a matrix in the output has to stay NaN.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from cutlass import BFloat16, Float16, Float32, Float64, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_fake_stream, make_ptr

import ptxemu
from blockscale.kernels.sm100 import Sm100Gemm
from blockscale.reference import E2M1, E4M3
from ptxemu.host import installed

SCHEDULES = [("eager", 0), ("lazy", 0), ("fifo", 0), ("random", 1), ("random", 2), ("random", 3)]
BIASES = {"fp16": Float16, "bf16": BFloat16, "fp32": Float32}
DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}
NAN = 0x7F  # an E4M3 NaN
GUARD = 512  # bytes after the output


def aligned(nbytes: int, fill: int = 0) -> np.ndarray:
    raw = np.full(nbytes + 128, fill, np.uint8)
    start = -raw.ctypes.data % 128
    return raw[start : start + nbytes]


@dataclass
class Operand:
    """codes (batch, rows, k padded to 64) 0..15 and scales (batch, rows padded to 128, blocks), unpacked."""

    codes: np.ndarray
    scales: np.ndarray
    rows: int

    def values(self) -> np.ndarray:
        """(batch, rows, k), float64."""
        return E2M1[self.codes] * E4M3[self.scales[:, : self.rows]].repeat(16, axis=2)

    def memory(self) -> tuple[np.ndarray, np.ndarray]:
        """As stored: two codes a byte, scales in atoms of 128 rows x 4 blocks."""
        batch, rows, blocks = self.scales.shape
        atoms = self.scales.reshape(batch, rows // 128, 4, 32, blocks // 4, 4).transpose(0, 1, 4, 3, 2, 5)
        return _stored(self.codes[..., ::2] | self.codes[..., 1::2] << 4), _stored(atoms)


def _stored(values: np.ndarray) -> np.ndarray:
    memory = aligned(values.nbytes)
    memory[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return memory


def operand(rows: int, k: int, *, batch: int = 1, seed: int = 0, positive: bool = False, padding: int = NAN) -> Operand:
    """All codes and all finite scales at random; `padding` is the scale of rows beyond the last."""
    random = np.random.default_rng(seed)
    padded_k, blocks = -(-k // 64) * 64, -(-k // 16)
    codes = np.zeros((batch, rows, padded_k), np.uint8)
    codes[..., :k] = random.integers(0, 8 if positive else 16, (batch, rows, k))
    scales = np.zeros((batch, -(-rows // 128) * 128, padded_k // 16), np.uint8)
    scales[:, rows:] = padding
    scales[:, :rows, :blocks] = random.integers(0, NAN, (batch, rows, blocks))
    return Operand(codes, scales, rows)


def integers(rows: int, k: int, seed: int = 0) -> Operand:
    """Whole numbers up to 48 whose sums over k <= 4096 stay below 2^24."""
    t = operand(rows, k, seed=seed)
    whole = np.array([0, 2, 4, 5, 6, 7, 10, 12, 13, 14, 15], np.uint8)
    powers = np.array([0x38, 0x40, 0x48, 0x50], np.uint8)  # 1, 2, 4, 8
    codes = np.where(np.arange(t.codes.shape[2]) < k, whole[t.codes % len(whole)], 0).astype(np.uint8)
    return replace(t, codes=codes, scales=np.where(t.scales == NAN, t.scales, powers[t.scales % 4]))


@dataclass(frozen=True)
class Call:
    """What a launch is given besides operands; `offset` moves the output off an aligned address, in elements."""

    units: tuple[float, float, float] = (0.5, 2.0, 2.0**-8)
    factor: float = 3.0
    ld: int | None = None
    offset: int = 0
    ctas: int = 2**31 - 1
    schedule: tuple[str, int] = ("lazy", 0)
    sms: int | None = None  # multiprocessors of the device, each of which runs one CTA; None for as many as there are

    @property
    def alpha(self) -> float:
        return float(np.prod(np.array(self.units, np.float32).astype(np.float64))) * self.factor


@dataclass
class Result:
    values: np.ndarray  # (batch, m, n) of the output's dtype
    around: np.ndarray  # bytes that had to stay 0xFF
    report: Any = field(repr=False)


@functools.cache
def compiled(tile_n: int, out_dtype: str = "bf16", options: str = "", rows: int = 128, **config: Any) -> Any:
    """The kernel's host function, to be called inside `ptxemu.host.installed`."""
    return compile_kernel(Sm100Gemm((rows, tile_n), out_dtype=out_dtype, **config), options)


def compile_kernel(kernel: Sm100Gemm, options: str = "") -> Any:
    def pointer(dtype: Any, align: int | None = None) -> Any:
        return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=align or dtype.width // 8)

    codes = (pointer(Uint8, 16),) * 4
    units = (pointer(Float32),) * 3
    beside = pointer(BIASES[kernel.epilogue.bias or "fp32"]), pointer(Uint8, 16), pointer(Float32)
    sizes = (Int32(0),) * 3, Int64(0), (Int32(0),) * 4
    pointers = (*codes, pointer(kernel.epilogue.dtype), *units, *beside)
    arguments = (*pointers, Float64(0), *sizes[0], sizes[1], *sizes[2], make_fake_stream())
    with installed(ptxemu.Device("sm_100a"), []):
        return cute.compile(kernel, *arguments, options=f"--gpu-arch sm_100a --enable-tvm-ffi {options}")


def run(
    function: Any, a: Operand, b: Operand, call: Call = Call(), out_dtype: str = "bf16", bias: np.ndarray | None = None
) -> Result:
    dtype = np.dtype(DTYPES[out_dtype])
    batch = max(len(a.codes), len(b.codes))
    ld = b.rows if call.ld is None else call.ld
    used = batch * a.rows * ld * dtype.itemsize
    start = call.offset * dtype.itemsize
    out = aligned(start + used + GUARD, 0xFF)
    report = launch(function, a, b, call, out, start, ld, bias)
    rows = out[start : start + used].view(dtype).reshape(batch, a.rows, ld)
    gaps = np.ascontiguousarray(rows[:, :, b.rows :]).reshape(-1).view(np.uint8)
    around = np.concatenate((out[:start], gaps, out[start + used :]))
    return Result(rows[:, :, : b.rows], around, report)


def run_nvfp4(
    function: Any, a: Operand, b: Operand, unit: float, call: Call = Call(), bias: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, scales, bytes that had to stay 0xFF) as stored, of an output with global scale `unit`."""
    batch, pitch = max(len(a.codes), len(b.codes)), -(-b.rows // 64) * 32
    out = aligned(batch * a.rows * pitch + GUARD, 0xFF)
    scales = aligned(batch * -(-a.rows // 128) * 128 * (pitch // 8) + GUARD, 0xFF)
    launch(function, a, b, call, out, 0, pitch, bias, scales, unit)
    around = np.concatenate((out[-GUARD:], scales[-GUARD:]))
    return out[:-GUARD].reshape(batch, a.rows, pitch), scales[:-GUARD].reshape(batch, -1, pitch // 8), around


def launch(
    function: Any,
    a: Operand,
    b: Operand,
    call: Call,
    out: np.ndarray,
    start: int,
    ld: int,
    bias: np.ndarray | None = None,
    scales: np.ndarray | None = None,
    unit: float = 1.0,
) -> Any:
    """The report. The output begins `start` bytes into `out`."""
    memory = [*a.memory(), *b.memory(), out, _stored(np.array([*call.units, unit], np.float32))]
    memory += [_stored(np.zeros(1, np.float32) if bias is None else bias), aligned(16) if scales is None else scales]
    at = [array.ctypes.data for array in memory]
    schedule, seed = call.schedule
    options = {} if call.sms is None else {"sms": call.sms}
    device = ptxemu.Device("sm_100a", schedule=schedule, seed=seed, checks="strict", **options)  # findings are errors
    with installed(device, memory) as emulator:
        emulator.call(
            function, at[0], at[2], at[1], at[3], at[4] + start, at[5], at[5] + 4, at[5] + 8, at[6], at[7], at[5] + 12,
            call.factor, a.rows, b.rows, a.codes.shape[2], ld, max(len(a.codes), len(b.codes)), len(a.codes),
            len(b.codes), call.ctas, 0,
        )  # fmt: skip
    return emulator.reports[0]


def mistakes(result: Result, a: Operand, b: Operand, call: Call, k: int) -> str | None:
    """None when the result keeps the contract and nothing beside it was written; otherwise what is wrong first."""
    if (result.around != 0xFF).any():
        return f"byte {np.argmax(result.around != 0xFF)} beside the output was written"
    left, right = a.values(), b.values().transpose(0, 2, 1)
    exact = left @ right * call.alpha
    slack = abs(left) @ abs(right) * abs(call.alpha) * (4 + k / 1024) * 2.0**-20
    with np.errstate(over="ignore"):
        low, high = ((exact + sign * slack).astype(result.values.dtype).astype(np.float64) for sign in (-1, 1))
    actual = result.values.astype(np.float64)
    bad = np.argwhere(~((low <= actual) & (actual <= high)))
    if not bad.size:
        return None
    first = tuple(int(i) for i in bad[0])
    return f"{len(bad)} of {actual.size} are wrong, first {first}: {actual[first]}, exactly {exact[first]}"
