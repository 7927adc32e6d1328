"""What differs between GPU families: one package each, and everything else asks it through `of(target)`.

A family says which configurations can be built and serve a problem, which to choose and why, what its kernel takes and
what stands behind that. The packages are data and pure functions; only `kernel` needs the compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Protocol

from torch import Tensor

from blockscale.config import Choice, Config, Reason
from blockscale.entry import Entry
from blockscale.families import sm90, sm100, sm103, sm120
from blockscale.problem import NVFP4, GroupedProblem, Problem, Target
from blockscale.tensor import NVFP4Tensor

LARGEST_EXTENT = 2**31 - 1024  # kernels have 32-bit sizes, and add up to a block of tiles to them


class Family(Protocol):
    """What a family's package has.

    Attributes:
        CODE_FIELDS, CALL_FIELDS: the fields of `Config` that decide a kernel's code, and those that are arguments of a
            call. The others have to be left at their defaults.
        ENTRY: what its kernels take.
        KERNEL: the module of the kernel; it and what it imports decide the code.
        ACTIVATION: what a product's `a` usually holds on these GPUs.
        LAYOUTS: the layouts of scales of an NVFP4 "a", "b" and "out".
    """

    CODE_FIELDS: tuple[str, ...]
    CALL_FIELDS: tuple[str, ...]
    ENTRY: Entry
    KERNEL: str
    ACTIVATION: str
    LAYOUTS: Mapping[str, str]

    def unsupported(self, problem: Problem, target: Target) -> Reason | None:
        """Why no configuration does `problem`, or None."""

    def unfit(self, problem: Problem, target: Target, config: Config) -> Reason | None:
        """Why there is no such kernel, or why it does not do `problem`; None where it does."""

    def choose(self, problem: Problem, target: Target) -> Choice | Reason:
        """The configuration to take, or why there is none."""

    def kernel(self, problem: Problem, target: Target, config: Config) -> Any:
        """The kernel, an object whose `__call__` takes `ENTRY`. Imports the compiler."""

    def premature(self, config: Config, early: list[str]) -> list[str]:
        """Of the instructions on global memory that come before the wait, those that may not."""

    def tensors(
        self,
        a: NVFP4Tensor | Tensor,
        b: NVFP4Tensor,
        out: NVFP4Tensor | Tensor,
        alpha: Tensor,
        bias: Tensor,
        unused: Tensor,
    ) -> list[Tensor]:
        """What stands behind each of `ENTRY.pointers`; `unused` where the product has no such thing."""

    def sizes(self, problem: Problem, ld_out: int) -> dict[str, int]:
        """Bytes behind each of `ENTRY.pointers` that a kernel may touch; 0 behind an output that is unused."""

    def values(self, problem: Problem, target: Target, config: Config, ld_out: int) -> dict[str, int]:
        """`ENTRY.values` without the first, the factor, which is the call's."""


_FAMILIES: dict[str, Family] = {"sm100": sm100, "sm103": sm103, "sm90": sm90, "sm120": sm120}
_LISTED: dict[str, Family] = {"sm100": sm100.listed, "sm103": sm100.listed}
_GROUPED: dict[str, Family] = {"sm100": sm100.grouped, "sm103": sm100.grouped, "sm90": sm90.grouped}


def of(target: Target) -> Family:
    """The family of a target."""
    return _FAMILIES[target.backend]


def serving(problem: Problem, target: Target) -> Family:
    """The family of a target, or the part of it whose kernels do grouped products, where `unsupported` passes."""
    if not isinstance(problem, GroupedProblem):
        return of(target)
    return _kernels_for(problem.form)[target.backend]


def _kernels_for(form: str) -> Mapping[str, Family]:
    """Of grouped products of that form, by backend."""
    return _LISTED if form == "list" else _GROUPED


def usual(m: int, n: int, k: int, target: Target, out_dtype: str = "bf16", groups: int | None = None) -> Problem:
    """The product that is meant on these GPUs where only sizes are said; with `groups` m rows of them all.

    Raises:
        ValueError: grouped products have no kernel there.
    """
    activation = of(target).ACTIVATION
    if activation != NVFP4 and out_dtype == "fp16":
        activation = out_dtype
    if groups is not None:
        if target.backend not in _GROUPED:
            raise ValueError(f"groups: {groups}, expected None: {target.backend} multiplies them one after another")
        return GroupedProblem(m, n, k, a=activation, out_dtype=out_dtype, groups=groups)
    return Problem(m, n, k, a=activation, out_dtype=out_dtype)


def supports(problem: Problem, target: Target, config: Config) -> Reason | None:
    """None if `target` can do `problem` by `config`; otherwise the first reason why not. Nothing else decides this."""
    reason = unsupported(problem, target)
    if reason is not None:
        return reason
    family = serving(problem, target)
    return _foreign(config, family, target) or family.unfit(problem, target, config)


def unsupported(problem: Problem, target: Target) -> Reason | None:
    """Why no configuration of `target` does `problem`, or None."""
    for name in ("m", "n", "k", "batch"):
        if getattr(problem, name) > LARGEST_EXTENT:
            return Reason(name, f"{getattr(problem, name)}, at most {LARGEST_EXTENT}")
    if isinstance(problem, GroupedProblem) and target.backend not in _kernels_for(problem.form):
        number = f"{problem.groups} ({problem.form})"
        return Reason("groups", f"{number}, expected none: {target.backend} multiplies such one after another")
    return serving(problem, target).unsupported(problem, target)


def code(config: Config, target: Target, family: Family | None = None) -> dict[str, Any]:
    """The fields of `config` that decide a kernel's code."""
    return {name: getattr(config, name) for name in (family or of(target)).CODE_FIELDS}


def _foreign(config: Config, family: Family, target: Target) -> Reason | None:
    """A field that was set and that these kernels do not have."""
    own = family.CODE_FIELDS + family.CALL_FIELDS
    for field in fields(config):
        if field.name not in own and getattr(config, field.name) != field.default:
            given = f"{getattr(config, field.name)!r}, expected {field.default!r}"
            return Reason(f"config.{field.name}", f"{given}: the {target.backend} kernels do not have it")
    return None
