"""Runs a program on ptxemu."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from comparison.program import Array, Arrays, Launch, Map, Program

import ptxemu
from ptxemu.arguments import aligned
from ptxemu.isa.engine import Decoded, decode
from ptxemu.isa.types import bits_of, compose, constant
from ptxemu.text import Instruction, parse
from ptxemu.text.module import Immediate

TARGET = "sm_90a"


def run(program: Program, *, schedule: str = "lazy", seed: int = 0, checks: str = "all") -> Arrays:
    """The program's arrays after its last launch."""
    device = ptxemu.Device(TARGET, schedule=schedule, seed=seed, checks=checks, sms=132)
    arrays = {name: _placed(array) for name, array in program.arrays().items()}
    for name, array in arrays.items():
        device.register(array, name)
    with device.stream() as stream:
        for launch in program.launches:
            args = [_argument(arg, arrays) for arg in launch.args]
            stream.launch(program.ptx, launch.kernel, args=args, pdl=launch.pdl, **_shapes(launch))
    return arrays


def _placed(array: Any) -> Any:
    """A copy as aligned as the driver's allocations."""
    copy = aligned(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def _argument(arg: Any, arrays: Arrays) -> Any:
    if isinstance(arg, str):
        return arrays[arg]
    return arg.at(arrays[arg.array].ctypes.data) if isinstance(arg, Map) else arg


def _shapes(launch: Launch) -> dict[str, Any]:
    shapes: dict[str, Any] = {"grid": launch.grid, "block": launch.block, "shared": launch.shared}
    return shapes | ({"cluster": launch.cluster} if launch.cluster else {})


def run_lanewise(program: Program) -> Arrays:
    """As `run`, for a program of lane-wise instructions: the functions that the emulator's code calls for 32 lanes get
    whole arrays, which takes a thousandth of the time."""
    assert program.group is not None
    arrays = program.arrays()
    body = parse(program.ptx).entries["k"].body
    texts = set(program.group.instructions)
    found = {i.text.rstrip(";"): decode(i) for i in body if isinstance(i, Instruction) and i.text.rstrip(";") in texts}
    assert len(found) == len(texts)
    operands = {name: arrays[name] for name in program.inputs}
    with np.errstate(all="ignore"):
        for text, decoded in found.items():
            arrays[text][...] = _whole(decoded, operands, program.group.result, max(arrays[text].itemsize * 8, 16))
    return arrays


def _whole(found: Decoded, arrays: Arrays, result: int, width: int) -> Array:
    """An instruction on whole arrays."""
    sources, values = [], []
    for name, operand in zip(found.form.sources, found.sources, strict=True):
        kind = found.type_of(name) or "b32"
        if isinstance(operand, Immediate):
            sources.append((kind, bits_of(kind)))
            values.append(constant(operand.value, operand.float_bits, bits_of(kind)))
        else:
            array = arrays[operand.name]
            register = array.astype(np.uint16) if array.itemsize == 1 else array
            sources.append((kind, register.itemsize * 8))
            values.append(register)
    kind = found.type_of(found.result_names[0]) or "b32"
    if result > 1:
        return compose(found.function, sources, (kind, width), found.form.takes_ints)[1](*values)
    function = compose(found.function, sources, ("pred", 1), found.form.takes_ints)[1]
    words = [function(*(v[i : i + 32] for v in values)) for i in range(0, values[0].size, 32)]
    return np.unpackbits(np.array(words, "<u4").view(np.uint8), bitorder="little")


def first_elements(program: Program, count: int) -> Program:
    """The same lane-wise program for its first `count` elements."""

    def arrays() -> Arrays:
        return {name: array[:count].copy() for name, array in program.arrays().items()}

    (launch,) = program.launches
    ctas = -(-count // launch.block[0])
    less = dataclasses.replace(launch, args=(np.uint32(count), *launch.args[1:]), grid=(ctas, 1, 1))
    return dataclasses.replace(program, arrays=arrays, launches=(less,))
