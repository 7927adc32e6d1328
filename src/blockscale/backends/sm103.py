"""The sm_103a backend (B300, GB300): `kernels/sm103.py` and `kernels/sm100.py`, on silicon or on the software GPU."""

from __future__ import annotations

from functools import partial

from blockscale.backends import gpu
from blockscale.problem import target_named

TARGET = target_named("sm_103a")
why_not = partial(gpu.why_not, TARGET)
prepare = partial(gpu.prepare, target=TARGET)
