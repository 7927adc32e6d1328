"""PTX text to modules."""

from ptxemu.text.module import Function, Instruction, Module
from ptxemu.text.parser import parse

__all__ = ["Function", "Instruction", "Module", "parse"]
