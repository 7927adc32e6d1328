"""Runs mutants: whether a fault shows under at least one of the schedules, and how."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cases import Setup
from mutants import Mutant, mutants

import ptxemu
from ptxemu.testing import RUNS
from ptxemu.text import Module, parse

Run = tuple[str, int]  # schedule and seed
MAX_TURNS = 20_000  # of the scheduler; the kernels here need some hundred


class InvalidMutant(Exception):
    """An operator made text that is no PTX, which is a mistake of the operator."""


@dataclass(frozen=True)
class Result:
    """caught: how the fault showed: "finding: KIND", an error's name or "wrong numbers"; empty if it did not.
    schedule: the first one under which it did.  message: its first line."""

    caught: str
    schedule: str = ""
    message: str = ""


class Kernel:
    """A case with its texts parsed, and all their mutants."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.modules = {name: parse(text) for name, text in setup.texts.items()}
        self.mutants = [(name, mutant) for name, text in setup.texts.items() for mutant in mutants(text)]

    def run(self, name: str, mutant: Mutant | None, checks: str = "all", runs: Sequence[Run] = RUNS) -> Result:
        """Runs with one text changed, or as it is, under schedule after schedule until something shows."""
        modules = dict(self.modules)
        if mutant is not None:
            try:
                modules[name] = parse(mutant.apply(self.setup.texts[name]))
            except ptxemu.ParseError as error:
                raise InvalidMutant(f"{mutant}: {error}") from error
        device = ptxemu.Device("sm_100a", checks=checks, max_turns=MAX_TURNS)
        for schedule, seed in runs:
            device.schedule, device.seed = schedule, seed
            result = self._once(list(modules.values()), device)
            if result.caught:
                return result
        return Result("")

    def strict(self, name: str, mutant: Mutant | None, runs: Sequence[Run] = RUNS[1:2]) -> set[tuple[str, int]]:
        """Kinds and lines of what strict checks find; a deadlock or a fault ends a run early."""
        modules = dict(self.modules)
        if mutant is not None:
            modules[name] = parse(mutant.apply(self.setup.texts[name]))
        found: set[tuple[str, int]] = set()
        for schedule, seed in runs:
            device = _Collecting("sm_100a", schedule=schedule, seed=seed, checks="strict", on_finding="collect")
            device.max_turns = MAX_TURNS
            with contextlib.suppress(ptxemu.Error):
                self.setup.run(list(modules.values()), device)
            found |= device.found
        return found

    def _once(self, modules: Sequence[Module], device: ptxemu.Device) -> Result:
        schedule = f"{device.schedule}-{device.seed}"
        try:
            wrong = self.setup.run(modules, device)
        except ptxemu.ParseError as error:
            raise InvalidMutant(str(error)) from error
        except ptxemu.FindingError as error:
            first = error.report.findings[0]
            return Result(f"finding: {first.kind}", schedule, str(first).partition("\n")[0])
        except ptxemu.Error as error:
            return Result(type(error).__name__, schedule, str(error).partition("\n")[0])
        return Result("wrong numbers", schedule, wrong) if wrong else Result("")


class _Collecting(ptxemu.Device):
    """A device that keeps what its launches find."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.found: set[tuple[str, int]] = set()

    def launch(self, *args: Any, **more: Any) -> ptxemu.Report:
        report = super().launch(*args, **more)
        self.found |= {(finding.kind, finding.line) for finding in report.findings}
        return report


def sample(kernel: Kernel, seed: int, each: int) -> list[tuple[str, Mutant]]:
    """Up to `each` mutants of every operator, drawn by the seed, in the order of `kernel.mutants`.

    A larger sample holds the smaller ones of its seed.
    """
    by_operator: dict[str, list[int]] = {}
    for index, (_, mutant) in enumerate(kernel.mutants):
        by_operator.setdefault(mutant.operator, []).append(index)
    chosen: list[int] = []
    for operator, indices in by_operator.items():
        random.Random(f"{operator} {seed}").shuffle(indices)
        chosen += indices[:each]
    return [kernel.mutants[i] for i in sorted(chosen)]


def identity(name: str, mutant: Mutant) -> str:
    return f"{name}:{mutant.line}:{mutant.operator}:{mutant.change}"
