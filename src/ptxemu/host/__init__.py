"""Stands in for CuTe DSL's runtime library, so that its compiled functions launch on the emulator unchanged.

    with ptxemu.host.installed(ptxemu.Device("sm_100a")):
        function = cute.compile(...)
        function(cpu_tensors)

Nothing of the CUDA runtime or driver is imitated: the compiled host code calls a small library of entry points, and
this package puts its own C library there.
"""

from ptxemu.host.dlpack import on_device
from ptxemu.host.errors import CompilerMissing, HostError
from ptxemu.host.imports import check_imports
from ptxemu.host.install import Emulator, installed

__all__ = ["CompilerMissing", "Emulator", "HostError", "check_imports", "installed", "on_device"]
