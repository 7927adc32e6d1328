"""The sm_100a backend (B200): `kernels/sm100.py`, on silicon or on the software GPU."""

from __future__ import annotations

from functools import partial

from blockscale.backends import gpu, groups, lists
from blockscale.problem import target_named

TARGET = target_named("sm_100a")
why_not = partial(gpu.why_not, TARGET)
prepare = partial(gpu.prepare, target=TARGET)
prepare_grouped = partial(groups.prepare, target=TARGET)
prepare_list = partial(lists.prepare, target=TARGET)
