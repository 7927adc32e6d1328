"""What is multiplied (`Problem`) and on what (`Target`): numbers and names, hashable, free of tensors and devices."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

OUT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}  # of an element
NVFP4 = "nvfp4"
OUT_DTYPES = (*OUT_BYTES, NVFP4)
OPERANDS_A = ("nvfp4", "fp16", "bf16", "fp32")
OPERANDS_B = ("nvfp4",)
BIASES = (None, *OUT_BYTES)
ACTIVATIONS = (None, "relu", "gelu", "silu")
SWIGLU = "swiglu"
GATED = {SWIGLU: "silu", "geglu": "gelu"}  # activations that multiply by a gate, and what the gate goes through
FORMS = ("contiguous", "masked", "list")


@dataclass(frozen=True)
class Target:
    """A GPU as the code generator and the heuristics see it.

    Attributes:
        arch: the PTX target, with its suffix: what it names has no guaranteed successor.
        backend: the backend, and the kernel file, that serves it.
        capability: compute capability, (major, minor).
        name: a GPU of this kind, as `--gpu` and `gpu=` take it.
        sms: multiprocessors.
        smem: bytes of dynamic shared memory that a CTA may have.
        l2: bytes of L2 cache.
    """

    arch: str
    backend: str
    capability: tuple[int, int]
    name: str
    sms: int
    smem: int
    l2: int = 0


TARGETS = (
    Target("sm_100a", "sm100", (10, 0), "b200", sms=148, smem=232_448, l2=126 * 2**20),
    Target("sm_103a", "sm103", (10, 3), "b300", sms=148, smem=232_448, l2=126 * 2**20),
    Target("sm_103a", "sm103", (10, 3), "gb300", sms=152, smem=232_448, l2=126 * 2**20),
    Target("sm_90a", "sm90", (9, 0), "h200", sms=132, smem=232_448, l2=50 * 2**20),
    Target("sm_120a", "sm120", (12, 0), "rtxpro6000", sms=188, smem=101_376, l2=128 * 2**20),
    Target("sm_120a", "sm120", (12, 0), "rtx5090", sms=170, smem=101_376, l2=96 * 2**20),
    Target("sm_120a", "sm120", (12, 0), "rtx5080", sms=84, smem=101_376, l2=64 * 2**20),
    Target("sm_121a", "sm120", (12, 1), "gb10", sms=48, smem=101_376, l2=24 * 2**20),
)

# NVIDIA GPUs with FP4 or a planned kernel, known by name so that a refusal can say more than "unknown".
WITHOUT_KERNELS = {
    "sm_107a": "Rubin",
    "sm_110a": "Thor",
}


def target_named(name: str, argument: str = "gpu") -> Target:
    """The target with this GPU name ("b200"), or the first with this architecture ("sm_100a").

    Raises:
        TypeError: `name` is no string. ValueError: no kernels are written for it; the message lists what there is.
    """
    if not isinstance(name, str):
        raise TypeError(f"{argument}: {type(name).__name__}, expected a name such as 'b200'")
    for target in TARGETS:
        if name.lower() in (target.arch, target.name):
            return target
    allowed = ", ".join(f"{target.name!r} ({target.arch})" for target in TARGETS)
    if name.lower() in WITHOUT_KERNELS:
        raise ValueError(
            f"{argument}: {name!r} is {WITHOUT_KERNELS[name.lower()]}, for which this version has no kernels; "
            f"expected {allowed}"
        )
    hint = "; the suffix of an architecture is part of its name" if re.fullmatch(r"sm_\d+", name.lower()) else ""
    raise ValueError(f"{argument}: {name!r}, expected {allowed}{hint}")


def target_of_capability(capability: tuple[int, int]) -> Target | None:
    """The target that runs on a GPU of this compute capability, exactly: kernels for "sm_100a" run on 10.0 alone."""
    return next((target for target in TARGETS if target.capability == capability), None)


def compiled_for() -> str:
    """The compute capabilities that there are kernels for. A GPU of another one, a newer one too, runs none of them."""
    return ", ".join(dict.fromkeys(f"{'.'.join(map(str, t.capability))} ({t.arch})" for t in TARGETS))


@dataclass(frozen=True)
class Problem:
    """One product, or a batch of equal ones: (batch, m, k) x (batch, n, k) -> (batch, m, n).

    Attributes:
        m, n, k: the logical sizes; any m, n >= 1 and k >= 1.
        batch: matrices of the result; batch_a, batch_b: those of the operands, 1 (shared by all) or `batch`.
        a, b: what the operands hold: "nvfp4", or for `a` "fp16", "bf16" or "fp32" (weight-only).
        out_dtype: "fp16", "bf16", "fp32", or "nvfp4": quantised with a global scale that is given.
        bias: the dtype of a bias (n,), "fp16", "bf16" or "fp32", or None. activation: None, "relu", "gelu" or "silu".
        invariant: a row's bits must not depend on the other rows: nothing may be chosen by m.
    """

    m: int
    n: int
    k: int
    batch: int = 1
    batch_a: int = 1
    batch_b: int = 1
    a: str = "nvfp4"
    b: str = "nvfp4"
    out_dtype: str = "bf16"
    bias: str | None = None
    activation: str | None = None
    invariant: bool = False

    ALLOWED: ClassVar[tuple[str | None, ...]] = ACTIVATIONS

    def __post_init__(self) -> None:
        for name in ("m", "n", "k", "batch"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int):
                raise TypeError(f"{name}: {type(size).__name__}, expected an integer")
            if size < 1:
                raise ValueError(f"{name}: {size}, expected at least 1")
        if self.batch_a not in (1, self.batch) or self.batch_b not in (1, self.batch):
            raise ValueError(f"batch_a, batch_b: {self.batch_a}, {self.batch_b}, expected 1 or {self.batch}")
        _check_one_of("a", self.a, OPERANDS_A)
        _check_one_of("b", self.b, OPERANDS_B)
        _check_one_of("out_dtype", self.out_dtype, OUT_DTYPES)
        _check_one_of("bias", self.bias, BIASES)
        _check_one_of("activation", self.activation, self.ALLOWED)


@dataclass(frozen=True)
class GroupedProblem(Problem):
    """One product a group: rows of group e of `a` by matrix e of b (groups, n, k). Where groups begin and end is known
    on the device alone.

    With activation "swiglu" or "geglu" the first n / 2 rows of a matrix of `b` are the gate and the others what it
    multiplies: the result has n / 2 columns, act(gate) x other.

    Attributes:
        m: rows of all groups together ("contiguous"), or places for rows that each group has ("masked").
        form: "contiguous": rows lie sorted by group; "masked": each group has its own matrix of `m` rows, of which the
            first ones count; "list": products of any sizes, of which m, n and k are the largest.
        groups: their number.
        alphas, biases: 1, shared by all, or one a group.
        ends: the table of groups holds where each one ends; otherwise its size.
    """

    form: str = "contiguous"
    groups: int = 1
    alphas: int = 1
    biases: int = 1
    ends: bool = False

    ALLOWED: ClassVar[tuple[str | None, ...]] = (*ACTIVATIONS, *GATED)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_one_of("form", self.form, FORMS)
        if isinstance(self.groups, bool) or not isinstance(self.groups, int):
            raise TypeError(f"groups: {type(self.groups).__name__}, expected an integer")
        if self.groups < 1 or self.alphas not in (1, self.groups) or self.biases not in (1, self.groups):
            counts = f"{self.groups}, {self.alphas}, {self.biases}"
            raise ValueError(f"groups, alphas, biases: {counts}, expected 1 group at least, and 1 or one a group")
        if self.activation in GATED and self.n % 2:
            raise ValueError(f"n: {self.n}, expected an even number beside {self.activation!r}")

    @property
    def columns(self) -> int:
        """Of the result."""
        return self.n // 2 if self.activation in GATED else self.n


def _check_one_of(name: str, value: str | None, allowed: Iterable[str | None]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: {value!r}, expected one of {', '.join(map(repr, allowed))}")
