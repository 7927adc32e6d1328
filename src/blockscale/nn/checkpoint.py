"""Between models and checkpoints: the tensors of a quantised model by name, and a checkpoint's tensors into a model."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from blockscale.checkpoints import Checkpoint, load_checkpoint
from blockscale.checkpoints.config import WEIGHT_ONLY
from blockscale.formats.layouts import ATOMS
from blockscale.nn.frozen import Frozen
from blockscale.nn.grouped import GroupedLinear
from blockscale.nn.linear import Linear
from blockscale.tensor import NVFP4Tensor

_INPUT_SCALES = (".input_scale", ".input_global_scale")


class ModelWeights(dict[str, NVFP4Tensor | Tensor]):
    """Tensors by name; `activations` says of each quantised module "static", "dynamic" or "weight-only"."""

    def __init__(self) -> None:
        super().__init__()
        self.activations: dict[str, str] = {}


def named_weights(model: torch.nn.Module) -> ModelWeights:
    """What `save_checkpoint` takes: the model's state, with an NVFP4Tensor for each quantised weight, named as in the
    unquantised model; those of a group e are "NAME.e.weight". Divisors that a checkpoint brought are not among it."""
    frozen = {name: module for name, module in model.named_modules() if isinstance(module, Frozen)}
    own = {_join(name, buffer) for name, module in frozen.items() for buffer in module._buffers}
    tensors = ModelWeights()
    tensors.update({name: value for name, value in model.state_dict().items() if name not in own})
    for name, module in frozen.items():
        each: dict[str, NVFP4Tensor] = {}
        if isinstance(module, GroupedLinear):
            each = {_join(name, str(e)): weight for e, weight in enumerate(module.each())}
        elif isinstance(module, Linear):
            each = {name: module.weight}
        for owner, weight in each.items():
            tensors[_join(owner, "weight")] = weight
            tensors.activations[owner] = module.activations or WEIGHT_ONLY
        if module.input_scale is not None:
            tensors[_join(name, "input_scale")] = module.input_scale
    return tensors


def load_into(model: torch.nn.Module, checkpoint_path: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Fill a model from an NVFP4 checkpoint whose names are the model's.

    Where the checkpoint has an NVFP4 weight, a torch.nn.Linear gives way to a `Linear`, with the activations that the
    checkpoint says; in a layer that is quantised already the values are written into the same memory, so compiled
    models and CUDA graphs see them. Other tensors are copied into the model's; what is on "meta" gives way to the
    checkpoint's.

    Args:
        checkpoint_path: what `load_checkpoint` opens.
        strict: refuse a checkpoint that has more or less than the model; the experts of other libraries' checkpoints
            count as more, since they are named otherwise.

    Raises:
        ValueError: a name, a shape or the kind of activations does not fit, naming it; nothing has changed then.
        CheckpointError: a file is broken.
    """
    checkpoint = load_checkpoint(checkpoint_path, layout=ATOMS)
    plain = [name for name in checkpoint.plain if not name.endswith(_INPUT_SCALES)]
    quantised = [name for name in checkpoint if name not in checkpoint.plain]
    places = {name: _place(model, name, checkpoint) for name in quantised}
    state = model.state_dict(keep_vars=True)
    tied = {id(state[name]) for name in plain if name in state}
    wanted = [name for name in named_weights(model) if not name.endswith(_INPUT_SCALES)]
    missing = [name for name in wanted if name not in checkpoint and id(state.get(name)) not in tied]
    unexpected = [name for name in plain if name not in state] + [name for name in quantised if places[name] is None]
    if strict and (missing or unexpected):
        raise ValueError(
            f"{os.fspath(checkpoint_path)}: lacks {', '.join(missing) or 'nothing'}; has more than the model's linear "
            f"layers and other tensors: {', '.join(unexpected) or 'nothing'}"
        )
    for name in plain:
        if name in state:
            _check_shape(name, checkpoint.plain[name].shape, state[name].shape)
    for name, place in places.items():
        if place is not None:
            _fill(model, name, place, checkpoint)
    for name in plain:
        if name in state:
            _put(model, name, state[name], checkpoint.plain[name].tensor())


Place = tuple[torch.nn.Linear | Frozen, tuple[int, ...]]
"""The layer that a weight is of, and its group."""


def _place(model: torch.nn.Module, name: str, checkpoint: Checkpoint) -> Place | None:
    """Where an NVFP4 weight belongs, or None. Raises ValueError if the layer there is another kind."""
    owner, _, last = name.rpartition(".")
    module = _submodule(model, owner) if last == "weight" else None
    group, _, number = owner.rpartition(".")
    stack = _submodule(model, group)
    found: Place | None = None
    if type(module) is torch.nn.Linear:
        _check_shape(name, checkpoint.shape(name), module.weight.shape)
        return module, ()
    if isinstance(module, Linear):
        found, shape = (module, ()), module.shape
    elif last == "weight" and isinstance(stack, GroupedLinear) and number.isdecimal() and int(number) < stack.groups:
        found, shape = (stack, (int(number),)), stack.shape[1:]
    if found is None:
        return None
    _check_shape(name, checkpoint.shape(name), shape)
    theirs, mine = checkpoint.layers[name].activations, found[0].activations or WEIGHT_ONLY
    if theirs != mine:
        raise ValueError(f"{name}: activations {theirs} in the checkpoint, but {mine} in the model's layer")
    return found


def _fill(model: torch.nn.Module, name: str, place: Place, checkpoint: Checkpoint) -> None:
    """Put one NVFP4 weight where it belongs."""
    module, group = place
    weight, scale = checkpoint.weight(name), checkpoint.input_scale(name)
    if isinstance(module, Frozen):
        module.write(weight, group, scale)
        return
    kind = checkpoint.layers[name].activations
    device = torch.device("cpu") if module.weight.is_meta else module.weight.device
    made = Linear.from_weight(
        weight.to(device), module.bias, activations=None if kind == WEIGHT_ONLY else kind, input_scale=scale
    ).train(module.training)
    for parent in model.modules():
        for own, child in list(parent._modules.items()):
            if child is module:
                setattr(parent, own, made)


def _submodule(model: torch.nn.Module, name: str) -> torch.nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _check_shape(name: str, given: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(given) != tuple(expected):
        raise ValueError(f"{name}: shape {tuple(given)}, but the model has {tuple(expected)}")


def _put(model: torch.nn.Module, name: str, old: Tensor, value: Tensor) -> None:
    """Copy `value` into a parameter or buffer; in the place of one on "meta" it comes itself."""
    if not old.is_meta:
        with torch.no_grad():
            old.copy_(value)
        return
    owner, _, last = name.rpartition(".")
    trained = isinstance(old, torch.nn.Parameter)
    setattr(model.get_submodule(owner), last, torch.nn.Parameter(value, old.requires_grad) if trained else value)


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
