"""A plan: one problem on one device, everything decided. Made once, then a dictionary look-up.

[hit] plan | [miss] heuristics -> store.get or compile -> store.put -> launcher.load -> plan
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from blockscale import families, heuristics, store
from blockscale.config import Config
from blockscale.problem import Problem, Target

Function = Callable[..., Any]
MOST_PLANS = 4096  # of a device

_functions: dict[tuple[type, str], Function] = {}  # by kind of launcher and key: a kernel is loaded once


class Launcher(Protocol):
    """A device that runs artefacts: `launch.cuda.CudaLauncher` or `launch.emulated.EmulatedLauncher`."""

    target: Target
    one: Tensor
    """fp32 () 1.0 on the device: the alpha of a product that has none."""
    plans: dict[Any, Plan]
    """Those made for this device so far."""

    def load(self, artefact: store.Artefact) -> Function:
        """The artefact's function."""

    def launch(
        self,
        function: Function,
        pointers: Sequence[int],
        sizes: Sequence[int],
        scalars: Sequence[Any],
        beside: Sequence[tuple[int, int]] = (),
    ) -> None:
        """function(*pointers, *scalars, stream) on the device; the kernel touches `sizes[i]` bytes at `pointers[i]`,
        and what else it finds the addresses of: `beside`, (address, bytes)."""


@dataclass(frozen=True)
class Plan:
    """What a launch needs beside addresses: the loaded kernel, and the values that it is called with.

    Attributes:
        ld_out: elements between rows of the result.
        sizes: bytes behind each of the entry's pointers. values: the entry's, from the second on.
    """

    launcher: Launcher
    family: families.Family
    function: Function
    config: Config
    ld_out: int
    sizes: tuple[int, ...]
    values: tuple[int, ...]

    def run(self, pointers: Sequence[int], factor: float, beside: Sequence[tuple[int, int]] = ()) -> None:
        """Launch with the addresses of the entry's pointers; the result is multiplied by `factor` too. `beside` is what
        lies behind addresses that are in memory themselves."""
        more = (beside,) if beside else ()
        self.launcher.launch(self.function, pointers, self.sizes, (factor, *self.values), *more)


def plan(problem: Problem, launcher: Launcher, config: Config | None, ld_out: int) -> Plan:
    """The plan for `problem` by `config`, or by the heuristics; rows of the result are `ld_out` elements apart.

    Raises: as `make`.
    """
    asked = problem, config, ld_out
    found = launcher.plans.get(asked)
    if found is None:
        found = make(problem, launcher, config, ld_out)
        if len(launcher.plans) >= MOST_PLANS:
            launcher.plans.clear()
        launcher.plans[asked] = found
    return found


def make(problem: Problem, launcher: Launcher, config: Config | None, ld_out: int) -> Plan:
    """A new plan.

    Raises:
        Unsupported: `supports` says why. CompilerMissing, CompileError: it has to be compiled and cannot be.
    """
    target = launcher.target
    config = configure(problem, target, config)
    function = _function(problem, launcher, config)
    family = families.serving(problem, target)
    sizes = family.sizes(problem, ld_out)
    values = family.values(problem, target, config, ld_out)
    _, *rest = family.ENTRY.values  # the factor is the call's
    in_order = tuple(sizes[name] for name in family.ENTRY.pointers), tuple(values[name] for name in rest)
    return Plan(launcher, family, function, config, ld_out, *in_order)


def _function(problem: Problem, launcher: Launcher, config: Config) -> Function:
    """The loaded kernel."""
    return loaded(launcher, *_recipe(problem, launcher.target, config))


def loaded(launcher: Launcher, origin: Mapping[str, Any], build: Callable[[], Mapping[str, bytes]]) -> Function:
    """The function of the kernel that has this origin, from the store, or else as `build` compiles it.

    Raises: as `artefact`.
    """
    known = type(launcher), store.key_of(origin)
    if known not in _functions:
        _functions[known] = launcher.load(stored(origin, build, store.default_store()))
    return _functions[known]


def configure(problem: Problem, target: Target, config: Config | None) -> Config:
    """`config`, if it is supported, or the heuristics' choice.

    Raises:
        Unsupported: `supports` says why.
    """
    if config is None:
        return heuristics.choose(problem, target).config
    heuristics.check(problem, target, config)
    return config


def artefact(problem: Problem, target: Target, config: Config, kept: store.Store) -> store.Artefact:
    """The compiled kernel, from the store or else from the compiler; `supports` has passed.

    Where the store cannot be written, the kernel is kept for this process, with a RuntimeWarning.

    Raises:
        CompilerMissing, CompileError.
    """
    return stored(*_recipe(problem, target, config), kept)


def _recipe(
    problem: Problem, target: Target, config: Config
) -> tuple[Mapping[str, Any], Callable[[], Mapping[str, bytes]]]:
    """A product's kernel: its origin, and what compiles it."""

    def build() -> Mapping[str, bytes]:
        from blockscale.compile import compile_kernel

        return compile_kernel(target, config, problem)

    return store.origin(target, config, problem), build


def stored(origin: Mapping[str, Any], build: Callable[[], Mapping[str, bytes]], kept: store.Store) -> store.Artefact:
    """The artefact of this origin, from the store or else as `build` compiles it. Raises: as `artefact`."""
    key = store.key_of(origin)
    found = _look(key, kept)
    if found is not None:
        return found
    from blockscale.compile import check_compiler

    check_compiler()
    with kept.lock(key):
        found = _look(key, kept)  # another process may have been faster
        return found or _keep(origin, build(), kept)


def _look(key: str, kept: store.Store) -> store.Artefact | None:
    """The artefact, linked if it was compiled where there was no C compiler and here is one."""
    found = kept.get(key) or store.private_store().get(key)
    if found is None or "library" in found.parts:
        return found
    from blockscale.compile import link

    library = link(found.parts["object"])
    if library is None:
        return found
    return _keep(found.origin, {part: path.read_bytes() for part, path in found.parts.items()} | library, kept)


def _keep(origin: Mapping[str, Any], parts: Mapping[str, bytes], kept: store.Store) -> store.Artefact:
    try:
        return kept.put(origin, parts)
    except OSError as error:
        text = f"{kept.root} cannot be written ({error}): a compiled kernel is kept for this process alone"
        warnings.warn(f"{text}; BLOCKSCALE_CACHE names another directory", RuntimeWarning, stacklevel=2)
        return store.private_store().put(origin, parts)
