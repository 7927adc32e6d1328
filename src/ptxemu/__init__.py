"""A software GPU that executes PTX."""

from ptxemu.arguments import Uninitialised
from ptxemu.device import Device, FindingError
from ptxemu.errors import Deadlock, Error, LaunchError, MemoryFault, ParseError, TurnLimit, UnknownInstruction
from ptxemu.machine.tensormap import TensorMap
from ptxemu.report import Finding, Report

__all__ = [
    "Deadlock",
    "Device",
    "Error",
    "Finding",
    "FindingError",
    "LaunchError",
    "MemoryFault",
    "ParseError",
    "Report",
    "TensorMap",
    "TurnLimit",
    "Uninitialised",
    "UnknownInstruction",
]
