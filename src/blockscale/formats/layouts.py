"""Where block scales lie in memory. A layout is a tag that travels with the tensor; it is never guessed from a size.

- "linear": (..., M, K_pad/16), row major.
- "128x4": atoms of 128 rows x 4 blocks, 512 B each; inside an atom the scale of (row, block) is byte
  (row % 32) * 16 + (row // 32) * 4 + block. Atoms run along K first, then along rows. Rows are padded to a multiple of
  128, blocks to a multiple of 4. Source: cuBLAS documentation, "1D block scaling factors layout"; PTX ISA, tcgen05.
- "128x4-grouped": the same atoms, for rows that belong to groups: each group's scale rows start on a multiple of 128.
- "fragment": scales lie among the codes, and both in the order of Hopper's tensor cores (`formats.fragment`).

Every function takes and returns bytes as uint8 or float8_e4m3fn, whichever it was given; padding is written as zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

LINEAR = "linear"
ATOMS = "128x4"
GROUPED = "128x4-grouped"
FRAGMENT = "fragment"
LAYOUTS = (LINEAR, ATOMS, GROUPED, FRAGMENT)

BLOCK = 16
K_ALIGN = 64
ROW_ALIGN = 128
ATOM_BLOCKS = 4


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple


def blocks(k: int) -> int:
    """Number of 16-element blocks that storage holds for K = `k`: that of K padded to a multiple of 64."""
    return round_up(k, K_ALIGN) // BLOCK


def swizzle(scales: Tensor) -> Tensor:
    """Linear (..., R, B) -> "128x4" (..., round_up(R, 128), round_up(B, 4))."""
    *batch, rows, cols = scales.shape
    padded = _pad(scales.view(torch.uint8), round_up(rows, ROW_ALIGN), round_up(cols, ATOM_BLOCKS))
    atoms = padded.view(*batch, padded.shape[-2] // ROW_ALIGN, 4, 32, padded.shape[-1] // ATOM_BLOCKS, ATOM_BLOCKS)
    atoms = atoms.movedim((-4, -3, -2), (-2, -3, -4))  # (row atom, i, r, column atom, b): i and column atom swapped
    return atoms.reshape(padded.shape).view(scales.dtype)


def unswizzle(scales: Tensor, rows: int, cols: int) -> Tensor:
    """ "128x4" (..., round_up(rows, 128), round_up(cols, 4)) -> linear (..., rows, cols), contiguous."""
    *batch, padded_rows, padded_cols = scales.shape
    atoms = scales.view(torch.uint8).reshape(
        *batch, padded_rows // ROW_ALIGN, padded_cols // ATOM_BLOCKS, 32, 4, ATOM_BLOCKS
    )
    linear = atoms.movedim((-2, -3, -4), (-4, -3, -2)).reshape(*batch, padded_rows, padded_cols)
    return linear[..., :rows, :cols].contiguous().view(scales.dtype)


def grouped_rows(rows: int, groups: int) -> int:
    """Scale rows that "128x4-grouped" allocates: enough for every way to split `rows` among `groups`.

    It depends on the two counts alone, so that one buffer serves changing group sizes without asking the device.
    """
    return ROW_ALIGN * (rows if rows <= groups else groups + (rows - groups) // ROW_ALIGN)


def scale_offsets(group_sizes: Tensor) -> Tensor:
    """(E,) group sizes -> (E + 1,) int32: the scale row at which each group starts, and where the last one ends."""
    padded = (group_sizes.long() + (ROW_ALIGN - 1)) // ROW_ALIGN * ROW_ALIGN
    return torch.nn.functional.pad(padded.cumsum(0), (1, 0)).to(torch.int32)


def swizzle_grouped(scales: Tensor, group_sizes: Tensor) -> Tensor:
    """Linear (T, B) -> "128x4-grouped" (grouped_rows(T, E), round_up(B, 4)); `group_sizes` (E,) sums to T."""
    rows, cols = scales.shape
    spread = torch.zeros(grouped_rows(rows, len(group_sizes)), cols, dtype=torch.uint8, device=scales.device)
    spread[_scale_rows(group_sizes, rows)] = scales.view(torch.uint8)
    return swizzle(spread).view(scales.dtype)


def unswizzle_grouped(scales: Tensor, group_sizes: Tensor, rows: int, cols: int) -> Tensor:
    """ "128x4-grouped" -> linear (rows, cols)."""
    linear = unswizzle(scales.view(torch.uint8), scales.shape[-2], cols)
    return linear[_scale_rows(group_sizes, rows)].view(scales.dtype)


def _scale_rows(group_sizes: Tensor, rows: int) -> Tensor:
    """(rows,) int64: the scale row of each compact row, one that is there even if sizes on a GPU do not add up."""
    sizes = group_sizes.long()
    ends, row = sizes.cumsum(0), torch.arange(rows, dtype=torch.int64, device=sizes.device)
    shift = scale_offsets(sizes)[:-1] - (ends - sizes)
    group = torch.searchsorted(ends, row, right=True).clamp_(max=len(sizes) - 1)
    return (row + shift[group]).clamp_(0, grouped_rows(rows, len(sizes)) - 1)


def _pad(x: Tensor, rows: int, cols: int) -> Tensor:
    if x.shape[-2:] == (rows, cols):
        return x
    out = x.new_zeros(*x.shape[:-2], rows, cols)
    out[..., : x.shape[-2], : x.shape[-1]] = x
    return out
