"""The sm_103a backend (B300, GB300), on silicon or on the software GPU: `kernels/sm103.py` and `kernels/sm100.py`, and
for groups the kernels of B200."""

from __future__ import annotations

from functools import partial

from blockscale.backends import gpu, groups, lists
from blockscale.problem import target_named

TARGET = target_named("sm_103a")
why_not = partial(gpu.why_not, TARGET)
prepare = partial(gpu.prepare, target=TARGET)
prepare_grouped = partial(groups.prepare, target=TARGET)
prepare_list = partial(lists.prepare, target=TARGET)
