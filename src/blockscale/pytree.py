"""Where torch looks for the tensors inside of arguments and results (torch.export, torch.func), it finds those of an
NVFP4Tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from blockscale.formats.layouts import FRAGMENT
from blockscale.tensor import NVFP4Tensor

_PARTS = ("codes", "scales", "global_scale", "group_sizes", "scale_offsets", "divisor")


def _flatten(t: NVFP4Tensor) -> tuple[list[Any], tuple[str, int]]:
    tag = f"{t.layout}:{t.shape[-2]}" if t.layout == FRAGMENT else t.layout  # the codes do not show the rows
    return [getattr(t, name) for name in _PARTS], (tag, t.shape[-1])


def _flatten_with_keys(t: NVFP4Tensor) -> tuple[list[tuple[Any, Any]], tuple[str, int]]:
    parts, context = _flatten(t)
    return [(_pytree.GetAttrKey(name), part) for name, part in zip(_PARTS, parts, strict=True)], context


def _unflatten(parts: Iterable[Any], context: tuple[str, int]) -> NVFP4Tensor:
    """All sizes but K are those of the codes, so that they may be dynamic."""
    codes, scales, unit, groups, offsets, divisor = parts
    tag, k = context
    layout, _, rows = tag.partition(":")
    if not isinstance(codes, Tensor):  # a tree of other things
        shape = torch.Size(())
    elif layout == FRAGMENT:
        shape = torch.Size((*codes.shape[:-3], int(rows), k))
    else:
        shape = torch.Size((*codes.shape[:-1], k))
    return NVFP4Tensor(codes, scales, unit, layout, shape, groups, offsets, divisor)


_pytree.register_pytree_node(
    NVFP4Tensor,
    _flatten,
    _unflatten,
    serialized_type_name="blockscale.NVFP4Tensor",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)
