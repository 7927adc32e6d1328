"""Between models and checkpoints: the tensors of a quantised model by name, and a checkpoint's tensors into a model."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from blockscale.checkpoints import Checkpoint, load_checkpoint
from blockscale.formats.layouts import ATOMS
from blockscale.nn.frozen import Frozen
from blockscale.nn.grouped import GroupedLinear
from blockscale.nn.linear import Linear
from blockscale.tensor import NVFP4Tensor

_INPUT_SCALES = (".input_scale", ".input_global_scale")


def named_weights(model: torch.nn.Module) -> dict[str, NVFP4Tensor | Tensor]:
    """What `save_checkpoint` takes: the model's state, with an NVFP4Tensor for each quantised weight, named as in the
    unquantised model; those of a group e are "NAME.e.weight"."""
    frozen = {name: module for name, module in model.named_modules() if isinstance(module, Frozen)}
    own = {_join(name, buffer) for name, module in frozen.items() for buffer in module._buffers}
    tensors: dict[str, NVFP4Tensor | Tensor] = {k: v for k, v in model.state_dict().items() if k not in own}
    for name, module in frozen.items():
        if isinstance(module, GroupedLinear):
            tensors |= {_join(name, f"{e}.weight"): weight for e, weight in enumerate(module.each())}
        elif isinstance(module, Linear):
            tensors[_join(name, "weight")] = module.weight
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
        strict: refuse a checkpoint that has more or less than the model.

    Raises:
        ValueError: a name or shape does not fit, naming it; CheckpointError for a broken file.
    """
    checkpoint = load_checkpoint(checkpoint_path, layout=ATOMS)
    plain: dict[str, Tensor] = {}
    for name in checkpoint:
        value = checkpoint[name]
        if isinstance(value, NVFP4Tensor):
            _fill(model, name, value, checkpoint)
        elif not name.endswith(_INPUT_SCALES):
            plain[name] = value
    state = model.state_dict(keep_vars=True)
    tied = {id(state[name]) for name in plain if name in state}
    wanted = [name for name in named_weights(model) if not name.endswith(_INPUT_SCALES)]
    missing = [name for name in wanted if name not in checkpoint and id(state.get(name)) not in tied]
    unexpected = [name for name in plain if name not in state]
    if strict and (missing or unexpected):
        raise ValueError(
            f"{os.fspath(checkpoint_path)}: lacks {', '.join(missing) or 'nothing'}; "
            f"has more than the model: {', '.join(unexpected) or 'nothing'}"
        )
    for name, value in plain.items():
        if name in state:
            _put(model, name, state[name], value)


def _fill(model: torch.nn.Module, name: str, weight: NVFP4Tensor, checkpoint: Checkpoint) -> None:
    """Put one NVFP4 weight where it belongs."""
    owner, _, last = name.rpartition(".")
    module = _submodule(model, owner) if last == "weight" else None
    if type(module) is torch.nn.Linear:
        _check_shape(name, weight, module.weight.shape)
        _replace(model, owner, module, weight, checkpoint.layers[name].activations, checkpoint.input_scale(name))
        return
    if isinstance(module, Linear):
        _check_shape(name, weight, module.shape)
        module.write(weight, (), checkpoint.input_scale(name))
        return
    group, _, index = owner.rpartition(".")
    stack = _submodule(model, group)
    if last == "weight" and isinstance(stack, GroupedLinear) and index.isdecimal() and int(index) < stack.groups:
        _check_shape(name, weight, stack.shape[1:])
        stack.write(weight, (int(index),), None)
        return
    raise ValueError(f"{name}: an NVFP4 weight, but the model has no linear layer of that name")


def _replace(
    model: torch.nn.Module, name: str, old: torch.nn.Linear, weight: NVFP4Tensor, kind: str, scale: Tensor | None
) -> None:
    activations = "static" if scale is not None else "dynamic" if kind == "dynamic" else None
    device = torch.device("cpu") if old.weight.is_meta else old.weight.device
    made = Linear.from_weight(weight.to(device), old.bias, activations=activations, input_scale=scale)
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, made.train(old.training))


def _submodule(model: torch.nn.Module, name: str) -> torch.nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _check_shape(name: str, given: NVFP4Tensor | Tensor, expected: torch.Size) -> None:
    if given.shape != expected:
        raise ValueError(f"{name}: shape {tuple(given.shape)}, but the model has {tuple(expected)}")


def _put(model: torch.nn.Module, name: str, old: Tensor, value: Tensor) -> None:
    """Copy `value` into a parameter or buffer; in the place of one on "meta" it comes itself."""
    _check_shape(name, value, old.shape)
    if not old.is_meta:
        with torch.no_grad():
            old.copy_(value)
        return
    owner, _, last = name.rpartition(".")
    trained = isinstance(old, torch.nn.Parameter)
    setattr(model.get_submodule(owner), last, torch.nn.Parameter(value, old.requires_grad) if trained else value)


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
