"""Quantising the layers of a model in place, with a report of what became of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blockscale.checkpoints.config import wildcard
from blockscale.checkpoints.model import EXCLUDED, snr_db
from blockscale.checkpoints.save import Progress
from blockscale.nn.frozen import ACTIVATIONS
from blockscale.nn.grouped import Experts, GroupedLinear
from blockscale.nn.linear import Linear
from blockscale.progress import progress
from blockscale.quantize import METHODS, global_scale_for
from blockscale.tensor import FLOAT_DTYPES

# Classes of transformers whose experts are gated, without biases, the gate's rows first: what `Experts` computes.
EXPERTS = ("MixtralExperts", "Qwen2MoeExperts", "Qwen3MoeExperts")


@dataclass(frozen=True)
class LayerReport:
    """A layer: `snr_db` is signal over quantisation error (10 log10 of the ratio of squares, infinite where nothing is
    lost, None on "meta"); a layer that was left as it is has a `reason`."""

    name: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    snr_db: float | None
    reason: str | None = None


@dataclass(frozen=True)
class ModelReport:
    """What `quantize_model` did; as text, a line a layer and the sum."""

    layers: tuple[LayerReport, ...]

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=0)
        lines = [f"{layer.name:<{width}}  {_outcome(layer)}" for layer in self.layers]
        before, after = (sum(getattr(layer, f"bytes_{when}") for layer in self.layers) for when in ("before", "after"))
        return "\n".join([*lines, f"{len(self.layers)} layers, {before:,} -> {after:,} bytes"])


def _outcome(layer: LayerReport) -> str:
    shape = "x".join(map(str, layer.shape))
    if layer.reason is not None:
        return f"{shape:>14}  left as it is: {layer.reason}"
    snr = "" if layer.snr_db is None else f"  {layer.snr_db:5.1f} dB"
    return f"{shape:>14}  {layer.bytes_before:,} -> {layer.bytes_after:,} bytes{snr}"


_bar: Progress = partial(progress, "quantising")


def quantize_model(
    model: torch.nn.Module,
    *,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = EXCLUDED,
    method: str = "rtn",
    activations: str | None = None,
    calibrate: Callable[[torch.nn.Module], object] | None = None,
    backend: str | None = None,
    progress: Progress = _bar,
) -> ModelReport:
    """Replace every torch.nn.Linear, and the experts of Mixtral and Qwen-MoE models, by layers with NVFP4 weights; in
    place, one layer at a time. A model on "meta" gets the layers without values, to
    be filled by `load_into` or `load_state_dict`.

    Args:
        include, exclude: shell wildcards over the names of modules; a name stands for all below it too. Heads and
            routers are excluded by default.
        method: of `quantize`, for the weights.
        activations: None, "dynamic" or "static", as for `Linear`; experts take "static" as "dynamic".
        calibrate: called with the model, before anything is replaced, to run it on representative inputs; the largest
            magnitude that a layer meets gives its static scale. Implies activations="static".
        backend: of the new layers.
        progress: given the number of layers, a block that yields what is called after each; by default a bar.

    Layers that may do more than multiply (subclasses, hooks) stay as they are, with a reason in the report.

    Raises:
        ValueError, TypeError: naming the argument, or the layer whose weight is not finite; layers before it are
            quantised already.
    """
    if not isinstance(model, torch.nn.Module) or isinstance(model, torch.nn.Linear):
        raise TypeError(
            f"model: {type(model).__name__}, expected a module that holds layers (or use Linear.from_linear)"
        )
    if method not in METHODS:
        raise ValueError(f"method: {method!r}, expected one of {', '.join(map(repr, METHODS))}")
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations: {activations!r}, expected one of {', '.join(map(repr, ACTIVATIONS))}")
    if calibrate is not None:
        if activations == "dynamic":
            raise ValueError("calibrate: given, but activations='dynamic' has no use for it")
        activations = "static"
    chosen = _choose(model, include, exclude)
    layers = {module: name for name, module, reason in chosen if reason is None and type(module) is torch.nn.Linear}
    scales: dict[torch.nn.Module, Tensor] = {}
    if calibrate is not None:
        scales = _input_scales(model, layers, calibrate)
    elif activations == "static" and not all(module.weight.is_meta for module in layers):
        raise ValueError("calibrate: None, but activations='static' needs it")
    reports, made = [], {}
    with progress(len(chosen)) as advance:
        for name, module, reason in chosen:
            report = LayerReport(name, *_described(module), None, reason)
            if reason is None:
                try:
                    made[module] = _quantised(module, method, activations, scales.get(module), backend)
                except ValueError as error:
                    raise ValueError(f"{name}: {error}") from error
                report = _reported(name, module, made[module])
                _replace(model, module, made[module])
            reports.append(report)
            advance()
    return ModelReport(tuple(reports))


def _choose(
    model: torch.nn.Module, include: Sequence[str], exclude: Sequence[str]
) -> list[tuple[str, Any, str | None]]:
    """Every layer there is to quantise: its first name, itself, and the reason why it is left as it is, or None. A
    layer with several names is excluded if any of them is."""
    names: dict[torch.nn.Module, list[str]] = {}
    own: set[torch.nn.Module] = set()  # layers whose owner reads their weight itself
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, torch.nn.Linear) or type(module).__name__ in EXPERTS:
            names.setdefault(module, []).append(name)
        if isinstance(module, (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)):
            own |= {module.linear1, module.linear2}
    every = [name for given in names.values() for name in given]
    included, excluded = (_matching(n, p, every) for n, p in (("include", include), ("exclude", exclude)))
    found: list[tuple[str, Any, str | None]] = []
    for module, given in names.items():
        reason = None
        if not included.intersection(given):
            reason = "not included"
        elif excluded.intersection(given):
            reason = "excluded"
        elif module in own:
            reason = "its TransformerEncoderLayer reads its weight itself"
        found.append((given[0], module, reason or _obstacle(module)))
    return found


def _matching(argument: str, patterns: Sequence[str], names: Sequence[str]) -> set[str]:
    if isinstance(patterns, str):
        raise TypeError(f"{argument}: a string, {patterns!r}; expected a list of patterns")
    found: set[str] = set()
    for pattern in patterns:
        matched = set(filter(wildcard(pattern), names))
        if not matched and pattern not in (*EXCLUDED, "*"):
            raise ValueError(f"{argument}: {pattern!r} matches no layer; there are {', '.join(names) or 'none'}")
        found |= matched
    return found


def _obstacle(module: Any) -> str | None:
    """Why a layer cannot be replaced, or None."""
    kind = type(module).__name__
    if isinstance(module, torch.nn.Linear) and type(module) is not torch.nn.Linear:
        return f"{kind} is a subclass of Linear that may do more"
    if "forward" in vars(module) or any(getattr(module, hooks) for hooks in _HOOKS):
        return "it has hooks or a forward of its own"
    weight = _weights(module)[0]
    if weight.dtype not in FLOAT_DTYPES:
        return f"its weight is {weight.dtype}"
    return None if weight.numel() else "its weight is empty"


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _quantised(
    module: Any, method: str, activations: str | None, input_scale: Tensor | None, backend: str | None
) -> Linear | Experts:
    if type(module) is torch.nn.Linear:
        return Linear.from_linear(
            module, method=method, activations=activations, input_scale=input_scale, backend=backend
        )
    own = None if activations is None else "dynamic"
    gate_up, down = (
        GroupedLinear.from_weights(weight, method=method, activations=own, backend=backend)
        for weight in (module.gate_up_proj, module.down_proj)
    )
    return Experts(gate_up, down, module.act_fn).train(module.training)


def _replace(model: torch.nn.Module, old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Wherever the model has `old`: a shared layer stays shared."""
    for parent in model.modules():
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)


def _weights(module: Any) -> list[Tensor]:
    return [module.weight] if isinstance(module, torch.nn.Linear) else [module.gate_up_proj, module.down_proj]


def _described(module: Any) -> tuple[tuple[int, ...], int, int]:
    """Shape of its (first) weight, and bytes before and after, if it is left as it is."""
    weights = _weights(module)
    if torch.nn.parameter.is_lazy(weights[0]):
        return (), 0, 0
    size = sum(weight.nbytes for weight in weights)
    return tuple(weights[0].shape), size, size


def _reported(name: str, module: Any, made: Linear | Experts) -> LayerReport:
    shape, before, _ = _described(module)
    after = sum(buffer.nbytes for buffer in made.buffers())
    return LayerReport(name, shape, before, after, _snr_db(module, made))


def _snr_db(module: Any, made: Linear | Experts) -> float | None:
    if any(weight.is_meta for weight in _weights(module)):
        return None
    if isinstance(made, Linear):
        return snr_db(module.weight.detach().cpu(), made.weight.to("cpu"))
    ratios = [
        snr_db(original.detach().cpu(), one)
        for weights, grouped in zip(_weights(module), (made.gate_up, made.down), strict=True)
        for original, one in zip(weights, grouped.each(), strict=True)
    ]
    return -10 * math.log10(sum(10 ** (-ratio / 10) for ratio in ratios) / len(ratios))


def _input_scales(
    model: torch.nn.Module, layers: dict[Any, str], calibrate: Callable[[torch.nn.Module], object]
) -> dict[torch.nn.Module, Tensor]:
    """A global scale for each layer's input, from the largest magnitude that `calibrate` makes it meet."""
    largest: dict[torch.nn.Module, Tensor] = {}
    with _watching(layers, largest), torch.no_grad():
        calibrate(model)
    unmet = [name for module, name in layers.items() if module not in largest]
    if unmet:
        raise ValueError(f"calibrate: it never ran {', '.join(unmet)}; exclude what is not used")
    return {module: global_scale_for(amax) for module, amax in largest.items()}


@contextmanager
def _watching(layers: dict[Any, str], largest: dict[torch.nn.Module, Tensor]) -> Iterator[None]:
    def look(module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        x = (inputs[0] if inputs else named["input"]).detach()
        amax = x.abs().amax().float() if x.numel() else torch.zeros((), dtype=torch.float32, device=x.device)
        if not torch.isfinite(amax):
            raise ValueError(f"calibrate: {layers[module]} met a value that is not finite")
        largest[module] = torch.maximum(amax, largest.get(module, amax))

    handles = [module.register_forward_pre_hook(look, with_kwargs=True) for module in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
