"""What the configuration files say of each layer: ModelOpt's, compressed-tensors' and our own.

What a layer is follows from its tensors; the configuration is held against them. A configuration of some other method
says nothing here.
"""

from __future__ import annotations

import fnmatch
import importlib
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockscale.checkpoints.errors import CheckpointError
from blockscale.checkpoints.source import CONFIG, MODELOPT_CONFIG, Source

BLOCKSCALE = "blockscale"
COMPRESSED_TENSORS = "compressed-tensors"
MODELOPT = "modelopt"
STATIC = "static"  # NVFP4 activations under a stored global scale
DYNAMIC = "dynamic"  # NVFP4 activations under a global scale of their own
WEIGHT_ONLY = "weight-only"
_REGEX = "re:"
_parser = importlib.import_module("re._parser" if sys.version_info >= (3, 11) else "sre_parse")
_MOST_STEPS = 10**7  # of a backtracking match, for a pattern and a name

Matches = Callable[[str], bool]


@dataclass(frozen=True)
class Scheme:
    """What a configuration says of a layer that it wants quantised.

    Attributes:
        algorithm: in the configuration's words.
        nvfp4: whether that means NVFP4 weights.
        group_size: elements that share a block scale; None where it does not say.
        activations: STATIC, DYNAMIC or WEIGHT_ONLY.
    """

    algorithm: str
    nvfp4: bool
    group_size: int | None
    activations: str


@dataclass(frozen=True)
class QuantConfig:
    """`method` is None where no configuration speaks; `notes` is what contradicts itself between the files."""

    method: str | None
    ignored: Matches
    groups: tuple[tuple[Matches, Scheme], ...]
    notes: tuple[str, ...] = ()

    def scheme(self, module: str) -> Scheme | None:
        """What a layer, named without its ".weight", is to be; None: left as it is, or nothing is said."""
        if self.ignored(module):
            return None
        return next((scheme for matches, scheme in self.groups if matches(module)), None)


def read_config(source: Source) -> QuantConfig:
    """The quantisation configuration of a checkpoint. Raises CheckpointError where it is malformed."""
    ours, theirs = source.config.get("quantization_config"), source.modelopt_config.get("quantization")
    found = []
    if ours is not None:
        reader = _Reader(Path(source.path) / CONFIG)
        found.append(reader.quantization_config(reader.mapping(ours, "quantization_config")))
    if theirs is not None:
        reader = _Reader(Path(source.path) / MODELOPT_CONFIG)
        found.append(reader.modelopt(reader.mapping(theirs, "quantization")))
    said = [config for config in found if config is not None]
    if not said:
        return QuantConfig(None, lambda module: False, ())
    if len(said) == 2 and (words := [_algorithms(config) for config in said])[0] != words[1]:
        note = f"{CONFIG} says {', '.join(words[0])}, but {MODELOPT_CONFIG} says {', '.join(words[1])}"
        return QuantConfig(said[0].method, said[0].ignored, said[0].groups, (note,))
    return said[0]


def _algorithms(config: QuantConfig) -> list[str]:
    return sorted({scheme.algorithm for _, scheme in config.groups}) or ["nothing"]


@dataclass(frozen=True)
class _Reader:
    """Takes a configuration apart; what has the wrong type is refused by its name."""

    path: Path

    def quantization_config(self, given: dict[str, Any]) -> QuantConfig | None:
        """Of config.json."""
        method = given.get("quant_method")
        ignored = any_of([name_pattern(p, self._compile, of_class=False) for p in self.strings(given, "ignore")])
        if method not in (BLOCKSCALE, COMPRESSED_TENSORS, MODELOPT):
            return None
        if method == MODELOPT:
            if "config_groups" not in given:
                return self.modelopt(given)
            ignored = any_of([wildcard(p) for p in self.strings(given, "ignore")])
        groups = []
        for name, group in self.mapping(given.get("config_groups", {}), "config_groups").items():
            group = self.mapping(group, name)
            targets = [name_pattern(p, self._compile, of_class=True) for p in self.strings(group, "targets")]
            groups.append((any_of(targets), self._group_scheme(group, given, name)))
        return QuantConfig(str(method), ignored, tuple(groups))

    def modelopt(self, given: dict[str, Any]) -> QuantConfig | None:
        """Of hf_quant_config.json, and of a config.json in the same words."""
        algorithm = given.get("quant_algo")
        if algorithm is None:
            return None
        ignored = any_of([wildcard(p) for p in self.strings(given, "exclude_modules")])
        layers = self.mapping(given.get("quantized_layers") or {}, "quantized_layers")
        groups = [
            (wildcard(name), self._modelopt_scheme(self.mapping(layer, name), name)) for name, layer in layers.items()
        ]
        if not layers:
            groups = [(lambda module: True, self._modelopt_scheme(given, "quantization"))]
        return QuantConfig(MODELOPT, ignored, tuple(groups))

    def _modelopt_scheme(self, given: dict[str, Any], name: str) -> Scheme:
        algorithm = str(given.get("quant_algo"))
        activations = WEIGHT_ONLY if "A16" in algorithm else STATIC
        return Scheme(algorithm, "NVFP4" in algorithm, self._group_size(given, name), activations)

    def _group_scheme(self, group: dict[str, Any], given: dict[str, Any], name: str) -> Scheme:
        weights = self.mapping(group.get("weights") or {}, f"{name}.weights")
        size = self._group_size(weights, f"{name}.weights")
        stated = group.get("format") or given.get("format") or given.get("quant_algo")
        algorithm = str(stated or f"{weights.get('num_bits')}-bit {weights.get('type')}")
        inputs = group.get("input_activations")
        activations = WEIGHT_ONLY
        if inputs is not None:
            activations = (
                DYNAMIC if self.mapping(inputs, f"{name}.input_activations").get("dynamic") is True else STATIC
            )
        four_bit = weights.get("num_bits") == 4 and weights.get("type") == "float"
        return Scheme(algorithm, four_bit and "mxfp4" not in algorithm.lower(), size, activations)

    def _group_size(self, given: dict[str, Any], name: str) -> int | None:
        size = given.get("group_size")
        if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
            raise CheckpointError(self.path, None, f"{name}.group_size: {size!r}, expected an integer")
        return size or None

    def mapping(self, value: Any, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise CheckpointError(self.path, None, f"{name}: {type(value).__name__}, expected an object")
        return value

    def strings(self, given: dict[str, Any], name: str) -> Sequence[str]:
        value = given.get(name) or []
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise CheckpointError(self.path, None, f"{name}: expected a list of strings")
        return value

    def _compile(self, pattern: str) -> Matches:
        try:
            found = bounded_regex(pattern)
        except (re.error, ValueError, RecursionError, OverflowError) as error:
            text = f"{pattern!r} is not a regular expression that is taken: {error}"
            raise CheckpointError(self.path, None, text) from error

        def matches(module: str) -> bool:
            try:
                return found(module)
            except ValueError as error:
                raise CheckpointError(self.path, module, str(error)) from error

        return matches


def any_of(patterns: Sequence[Matches]) -> Matches:
    return lambda module: any(matches(module) for matches in patterns)


def wildcard(pattern: str) -> Matches:
    """ModelOpt's patterns: shell wildcards over whole names; a name stands for what lies below it too."""
    return lambda module: fnmatch.fnmatchcase(module, pattern) or module.startswith(pattern + ".")


def name_pattern(pattern: str, compile_regex: Callable[[str], Matches] | None = None, *, of_class: bool) -> Matches:
    """compressed-tensors' patterns: "re:" and a regular expression for the start of a name, a name, or a class.

    Names without a dot that begin with a capital are classes ("Linear"). A file does not tell a layer's class; what a
    class is taken to match is `of_class`.
    """
    if pattern.startswith(_REGEX):
        return (compile_regex or bounded_regex)(pattern[len(_REGEX) :])
    if pattern[:1].isupper() and "." not in pattern:
        return lambda module: of_class
    return lambda module: module == pattern


def bounded_regex(pattern: str) -> Matches:
    """A regular expression for the start of a name that ends soon, whoever wrote it.

    A backtracking match takes exponential time where a repeat holds a repeat or alternatives; those, and references to
    groups, are refused with ValueError. With r repeats in a row a name of n characters takes n^r / r! steps; the
    predicate raises ValueError where that is too many.
    """
    expression = re.compile(pattern)
    repeats = _repeats(_parser.parse(pattern), inside=False)

    def matches(module: str) -> bool:
        if len(module) ** repeats > _MOST_STEPS * math.factorial(repeats):
            raise ValueError(f"{pattern!r}: {repeats} repeats take too long for a name of {len(module)} characters")
        return expression.match(module) is not None

    return matches


def _repeats(tree: Any, inside: bool) -> int:
    """The repeats of more than one character in a parsed pattern; `inside` is whether it is part of one."""
    count = 0
    for operation, argument in tree:
        name = str(operation)
        repeats = name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT") and int(argument[1]) > 1
        if inside and (repeats or name in ("BRANCH", "GROUPREF", "GROUPREF_EXISTS")):
            raise ValueError("a repeat that holds a repeat or alternatives can take forever")
        count += repeats
        if name == "GROUPREF":
            raise ValueError("references to groups are not supported")
        for part in _parts(name, argument):
            count += _repeats(part, inside or repeats)
    return count


def _parts(name: str, argument: Any) -> Sequence[Any]:
    """What a node of a parsed pattern holds."""
    if name == "BRANCH":
        return list(argument[1])
    if name == "GROUPREF_EXISTS":
        return [part for part in argument[1:] if part is not None]
    if name == "ATOMIC_GROUP":
        return [argument]
    held = name in ("SUBPATTERN", "ASSERT", "ASSERT_NOT", "MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
    return [argument[-1]] if held else []
