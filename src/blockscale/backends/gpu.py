"""What the GPU families share: operands in, plan out, launch. A family's own file says which `Target` it is.

`prepare` is the whole line but for the launch. A `Call` is its end with everything decided: for arguments whose every
property was validated before, it looks at addresses and values alone. `known` holds one for each such combination of
properties (`signature`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockscale import arguments, plan
from blockscale.config import Config
from blockscale.entry import alignments
from blockscale.launch import cuda, emulated
from blockscale.plan import Launcher, Plan
from blockscale.problem import NVFP4, OUT_BYTES, Problem, Target
from blockscale.tensor import KERNEL_ALIGN, NVFP4Tensor

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
Result = Tensor | NVFP4Tensor
# What a pointer's name is called in an error.
TITLES = {"a": "a.codes", "b": "b.codes", "sfa": "a.scales", "sfb": "b.scales", "sf_out": "out.scales"}
_MOST_KNOWN = 4096


def why_not(*targets: Target) -> str | None:
    """None if kernels of one of `targets` can run here: on a GPU, or because an emulator of it is active."""
    active = emulated.active()
    if active is not None and active.target.arch in [target.arch for target in targets]:
        return None
    reason = cuda.why_not(*targets)
    return None if reason is None else f"{reason}; `with emulated({targets[0].arch!r})` runs its kernels without one"


def launcher(target: Target, device: torch.device) -> Launcher:
    """What launches on `device`.

    Raises:
        ValueError: neither that GPU nor an emulator of it.
    """
    if device.type == "cuda":
        return cuda.launcher(target, device)
    active = emulated.active()
    if device.type == "cpu" and active is not None and active.target.arch == target.arch:
        return active
    raise ValueError(
        f"backend: {target.backend!r} needs operands on a GPU, not on {device}; "
        f"inside `emulated({target.arch!r})` the CPU's will do"
    )


def prepare(
    a: NVFP4Tensor | Tensor,
    b: NVFP4Tensor,
    out: Result,
    *,
    target: Target,
    alpha: float | Tensor = 1.0,
    bias: Tensor | None = None,
    activation: str | None = None,
    invariant: bool = False,
    config: Config | None = None,
) -> Callable[[], Call | None]:
    """out = act(alpha x a @ b^T + bias), checked and planned but for the launch, which is the returned function; the
    caller has checked the arguments. Scales in another layout than the kernel's, and results of other strides than it
    writes, are copied.

    Returns:
        A function that launches. It returns a `Call` that does the same for operands and a result of the same
        properties, or None where there was a copy.

    Raises:
        Unsupported: `supports` says why. ValueError: operands that are not aligned, or lie on no GPU.
        CompilerMissing, CompileError: the kernel has to be compiled and cannot be.
    """
    device = launcher(target, out.device)
    problem, at_once = problem_of(a, b, out, bias, activation, invariant)
    if math.prod(out.shape) == 0:
        plan.configure(problem, device.target, config)
        return lambda: None
    ld_out = rows_apart(out)
    made = plan.plan(problem, device, config, problem.n if ld_out is None else ld_out)
    layouts = made.family.LAYOUTS
    left = a.with_layout(layouts["a"]) if isinstance(a, NVFP4Tensor) else a.contiguous()
    right = b.with_layout(layouts["b"])
    for name, operand in (("a", left), ("b", right)):
        if isinstance(operand, NVFP4Tensor):
            check_dense(name, operand)
    row = bias if bias is None or bias.is_contiguous() else bias.contiguous()
    result = _writable(out, ld_out, layouts.get("out"))
    call = Call(made, problem.out_dtype, out.shape)
    pointers, factor, held = call.arguments(left, right, result, alpha, row)

    def launch() -> Call | None:
        if at_once:
            made.run(pointers, factor)
        else:
            for offsets in _matrices(a.shape[:-2], b.shape[:-2], out.shape[:-2], made, problem):
                made.run([pointer + offset for pointer, offset in zip(pointers, offsets, strict=True)], factor)
        if result is not out:
            _copy(result, out)
        del held[:]  # which had to live until here
        same = left is a and right is b and row is bias and result is out
        return call if at_once and same else None

    return launch


def problem_of(
    a: NVFP4Tensor | Tensor,
    b: NVFP4Tensor,
    out: Result,
    bias: Tensor | None = None,
    activation: str | None = None,
    invariant: bool = False,
) -> tuple[Problem, bool]:
    """The problem of one launch, and whether that does the whole batch: one in which both operands broadcast goes
    matrix by matrix. Sizes of 0 count as 1, for what else there is to check."""
    batch, batch_a, batch_b = (max(1, math.prod(x.shape[:-2])) for x in (out, a, b))
    at_once = batch_a in (1, batch) and batch_b in (1, batch)
    batches = (batch, batch_a, batch_b) if at_once else (1, 1, 1)
    m, n = (max(1, size) for size in out.shape[-2:])
    of_a, of_b, of_out = (NVFP4 if isinstance(x, NVFP4Tensor) else DTYPE_NAMES[x.dtype] for x in (a, b, out))
    of_bias = None if bias is None else DTYPE_NAMES[bias.dtype]
    problem = Problem(m, n, a.shape[-1], *batches, of_a, of_b, of_out, of_bias, activation, invariant)
    return problem, at_once


@dataclass(frozen=True, eq=False)
class Call:
    """A plan, called with operands and a result whose shapes, dtypes, layouts, strides and devices fit it."""

    plan: Plan
    out_dtype: str
    shape: torch.Size  # of the result

    @functools.cached_property
    def aligned(self) -> tuple[tuple[int, int], ...]:
        return alignments(self.plan.family.ENTRY, OUT_BYTES.get(self.out_dtype, KERNEL_ALIGN))

    def __call__(
        self,
        a: NVFP4Tensor | Tensor,
        b: NVFP4Tensor,
        out: Result | None,
        alpha: float | Tensor | None,
        bias: Tensor | None,
    ) -> Result:
        """Checks what depends on addresses and values, and launches; makes the result if `out` is None.

        Raises:
            ValueError: an operand is not aligned, `out` overlaps one, or alpha is not finite.
        """
        if out is None:
            out = torch.empty(self.shape, dtype=DTYPES[self.out_dtype], device=b.codes.device)
        pointers, factor, _held = self.arguments(a, b, out, alpha, bias)
        self.plan.run(pointers, factor)
        return out

    def arguments(
        self,
        a: NVFP4Tensor | Tensor,
        b: NVFP4Tensor,
        out: Result,
        alpha: float | Tensor | None,
        bias: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> tuple[list[int], float, list[Tensor]]:
        """The addresses that a launch takes, the factor, and the tensors at the addresses, to be held until it is over.

        `groups` is the table of a grouped product, whose entry has it as its last pointer.
        On the CPU operands that are not aligned are copied: weights of a mapped file lie where the file has them.
        """
        plan, entry = self.plan, self.plan.family.ENTRY
        factor = 1.0
        one = tensor = plan.launcher.one
        if isinstance(alpha, Tensor):
            tensor = alpha
            if alpha.is_cpu:
                for value in alpha.reshape(-1).tolist():
                    arguments.check_alpha(value, b.codes.device)
        elif type(alpha) is float and math.isfinite(alpha):
            factor = alpha
        elif alpha is not None:
            factor = float(arguments.check_alpha(alpha, b.codes.device))
        given = plan.family.tensors(a, b, out, tensor, one if bias is None else bias, one)
        if groups is not None:
            given.append(groups)
        pointers = [t.data_ptr() for t in given]
        for o in entry.outputs:
            start, stop = pointers[o], pointers[o] + plan.sizes[o]
            for i in entry.inputs:
                if pointers[i] < stop and start < pointers[i] + plan.sizes[i]:
                    inputs = {"a": a, "b": b, "alpha": alpha, "bias": bias, "groups": groups}
                    arguments.check_overlap({"out": out}, inputs)
        for i, align in self.aligned:
            if pointers[i] % align:
                given = self._moved(given)
                pointers = [t.data_ptr() for t in given]
                break
        return pointers, factor, given

    def _moved(self, given: list[Tensor]) -> list[Tensor]:
        """The same tensors, copies of those operands that are not aligned and lie on the CPU, or are no NVFP4.

        Raises:
            ValueError: NVFP4 on a GPU, or the result, is not aligned.
        """
        moved, entry = list(given), self.plan.family.ENTRY
        names = list(entry.pointers)
        for i, align in self.aligned:
            at = given[i].data_ptr()
            if at % align:
                if i in entry.outputs or not (given[i].is_cpu or given[i].dtype in DTYPE_NAMES):
                    quantised = names[i] == "out" and self.out_dtype == NVFP4
                    name = "out.codes" if quantised else TITLES.get(names[i], names[i])
                    raise ValueError(f"{name}: at address {at:#x}, expected a multiple of {align} bytes")
                moved[i] = given[i].clone()
        return moved


def _writable(out: Result, ld_out: int | None, layout: str | None) -> Result:
    """`out`, or what a kernel writes in its place: dense, and with scales in the kernel's layout."""
    if isinstance(out, Tensor):
        return out if ld_out is not None else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    if layout is None or out.layout == layout:
        return out
    return NVFP4Tensor.zeros(out.shape, global_scale=out.global_scale, layout=layout, device=out.device)


def _copy(result: Result, out: Result) -> None:
    if isinstance(out, Tensor):
        assert isinstance(result, Tensor)
        out.copy_(result)
    else:
        assert isinstance(result, NVFP4Tensor)
        out.codes.copy_(result.codes)
        scales = result.with_layout(out.layout).scales
        out.scales.view(torch.uint8).copy_(scales.view(torch.uint8))


def check_dense(name: str, x: NVFP4Tensor) -> None:
    """Raises TypeError or ValueError if parts that were put together by hand are no plain tensors or have gaps."""
    for part, tensor in (("codes", x.codes), ("scales", x.scales)):
        if type(tensor) is not Tensor:
            raise TypeError(f"{name}.{part}: {type(tensor).__name__}, expected a torch.Tensor with memory of its own")
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name}.{part}: strides {tensor.stride()}, expected a contiguous tensor, as from_parts makes"
            )


def rows_apart(out: Result) -> int | None:
    """Elements (bytes of codes) between rows of a result that a kernel can write: rows dense, matrices one after
    another; else None."""
    if isinstance(out, NVFP4Tensor):
        return out.codes.shape[-1]  # which has no gaps
    *batch, m, n = out.shape
    try:
        matrices = out.view(math.prod(batch), m, n)
    except RuntimeError:
        return None
    by_matrix, by_row, by_column = matrices.stride()
    if n > 1 and by_column != 1:
        return None
    if m == 1:
        by_row = by_matrix if len(matrices) > 1 else n
    return by_row if by_row >= n and (len(matrices) == 1 or by_matrix == m * by_row) else None


def _matrices(a: torch.Size, b: torch.Size, out: torch.Size, plan: Plan, problem: Problem) -> Iterator[list[int]]:
    """For each matrix of the result, how far its addresses are from the first one's; `problem` is that of a matrix."""
    of_a, of_b = (np.broadcast_to(np.arange(math.prod(x)).reshape(x), out).ravel().tolist() for x in (a, b))
    steps = dict(zip(plan.family.ENTRY.pointers, plan.sizes, strict=True))
    steps["out"] = problem.m * plan.ld_out * OUT_BYTES.get(problem.out_dtype, 1)
    for i, (x, y) in enumerate(zip(of_a, of_b, strict=True)):
        at = {"a": x, "sfa": x, "b": y, "sfb": y, "out": i, "sf_out": i}
        yield [at.get(name, 0) * step for name, step in steps.items()]


def signature(a: Any, b: Any, out: Any, alpha: Any, bias: Any, options: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Every property of a call's arguments that validation looks at, but for addresses and values; None where the call
    is of another form (raw operands, say)."""
    if type(b) is not NVFP4Tensor:
        return None
    kinds = kind_of(a), kind_of(out), kind_of(bias), factor_kind(alpha)
    if UNKNOWN in kinds:
        return None
    return b.kind, kinds, torch.is_inference_mode_enabled(), options


UNKNOWN = "unknown"


def kind_of(x: Any) -> Any:
    """A tensor's properties, None for None; `UNKNOWN` for what every call has to look at anew."""
    if x is None:
        return None
    if type(x) is NVFP4Tensor:
        return x.kind
    if type(x) is not Tensor or x.requires_grad or x.layout is not torch.strided:
        return UNKNOWN
    return x.shape, x.stride(), x.dtype, x.device, x.is_inference()


def factor_kind(alpha: Any) -> Any:
    """Of an alpha that is a tensor its properties, else its type; `UNKNOWN` as for `kind_of`."""
    if not isinstance(alpha, Tensor):
        return type(alpha)
    if alpha.requires_grad or alpha.layout is not torch.strided:
        return UNKNOWN
    return alpha.dtype, alpha.shape, alpha.stride(), alpha.device


_known: dict[tuple[Any, ...], Any] = {}


def known() -> dict[tuple[Any, ...], Any]:
    """The calls validated before, by signature: the active emulator's, or those of all GPUs."""
    active = emulated.active()
    return _known if active is None else active.known


def find(signature: tuple[Any, ...]) -> Any:
    """The call known by this signature: a `Call`, or that of a list; None if there is none."""
    try:
        return known().get(signature)
    except TypeError:  # something in it has no hash, and no argument that is allowed is like that
        return None


def remember(signature: tuple[Any, ...], call: Any) -> None:
    """Keep `call` for arguments with this signature."""
    calls = known()
    if len(calls) >= _MOST_KNOWN:
        calls.clear()
    calls[signature] = call
