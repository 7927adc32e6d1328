"""What each chip refuses, and how much shared memory and how many multiprocessors it has."""

import re

import numpy as np
import pytest

import ptxemu
from ptxemu.isa.refusals import NEEDS, check, needed
from ptxemu.machine.chip import CHIPS
from ptxemu.text import parse

TEXT = """
.version 9.0
.target {target}
.address_size 64
.visible .entry k()
{{
    .reg .b16 %h<4>;
    .reg .b32 %r<4>;
    .reg .f32 %f<4>;
    .reg .b64 %d<4>;
    .reg .pred %p;
    {instruction}
    exit;
}}
"""
MANAGED = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
# feature: an instruction that needs it
INSTRUCTIONS = {
    "wgmma": "wgmma.fence.sync.aligned;",
    "tcgen05": "tcgen05.wait::ld.sync.aligned;",
    "CTA pairs": MANAGED + ".cta_group::2 [%r0], [%d0, {%r1, %r2}], [%r3];",
    "TMA multicast": MANAGED + ".multicast::cluster [%r0], [%d0, {%r1, %r2}], [%r3], %h0;",
    "multicast launch control": "clusterlaunchcontrol.try_cancel.async.mbarrier::complete_tx::bytes"
    ".multicast::cluster::all.b128 [%r0], [%r1];",
    "setmaxnreg": "setmaxnreg.dec.sync.aligned.u32 24;",
    "tensormap.replace": "tensormap.replace.tile.rank.global.b1024.b32 [%d0], 1;",
    "swizzle atoms": "tensormap.replace.tile.swizzle_atomicity.global.b1024.b32 [%d0], 1;",
    "launch control": "clusterlaunchcontrol.try_cancel.async.mbarrier::complete_tx::bytes.b128 [%r0], [%r1];",
    "narrow floats": "cvt.rn.satfinite.e2m1x2.f32 %h0, %f0, %f1;",
    "8-bit matrices": "ldmatrix.sync.aligned.m8n16.x1.b8x16.b4x16_p64 {%r0}, [%r1];",
    "256-bit accesses": "ld.global.v4.u64 {%d0, %d1, %d2, %d3}, [%d0];",
    "L2 eviction priorities": "ld.global.L2::evict_last.b32 %r0, [%d0];",
    "packed f32": "add.rn.f32x2 %d0, %d1, %d2;",
    "three-input min and max": "max.f32 %f0, %f1, %f2, %f3;",
    "saturating tf32": "cvt.rn.satfinite.tf32.f32 %r0, %f0;",
    "byte masks": "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%d0], [%r0], 16, %h0;",
    "f32 redux": "redux.sync.max.f32 %f0, %f1, 0xffffffff;",
    "kind::f8f6f4": "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e5m2.f32 {%f0, %f1, %f2, %f3}, "
    "{%r0, %r1, %r2, %r3}, {%r0, %r1}, {%f0, %f1, %f2, %f3};",
    "mma of narrow floats": "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e2m1.e2m1.f32 {%f0, %f1, %f2, %f3}, "
    "{%r0, %r1, %r2, %r3}, {%r0, %r1}, {%f0, %f1, %f2, %f3};",
}
# What no chip lacks, close to what some do.
EVERYWHERE = [
    ("ld.global.v4.u32", 2),
    ("ld.global.v2.b64", 2),
    ("ld.global.L1::evict_last.L2::128B.b32", 2),
    ("max.f32", 3),
    ("cvt.rna.satfinite.tf32.f32", 2),
    ("cvt.rn.satfinite.e4m3x2.f32", 3),
    ("cvt.rn.f16x2.e5m2x2", 2),
    ("cvt.rn.bf16x2.f32", 3),
    ("redux.sync.max.s32", 3),
    ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", 2),
    ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32", 4),
    (MANAGED, 3),
]


def test_every_feature_has_an_instruction() -> None:
    assert set(INSTRUCTIONS) == set(NEEDS)
    assert set(NEEDS) | {"K = 96"} == set().union(*(chip.has for chip in CHIPS.values()))


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize("feature", NEEDS)
def test_a_chip_refuses_what_it_does_not_have(feature: str, target: str) -> None:
    text = TEXT.format(target=target, instruction=INSTRUCTIONS[feature])
    if feature in CHIPS[target].has:
        check(next(iter(parse(text).functions["k"].body)), CHIPS[target], target)
        return
    refused = f"line 12: {target} does not have `{INSTRUCTIONS[feature].rstrip(';')}`: {feature} (on "
    with pytest.raises(ptxemu.UnknownInstruction, match=re.escape(refused)):
        ptxemu.Device(target).launch(text)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_103", "sm_120", "sm_100f", "sm_120f"])
@pytest.mark.parametrize("feature", NEEDS)
def test_what_ptx_for_a_target_may_use(feature: str, target: str) -> None:
    """As ptxas 13.0 takes them."""
    number = int(target[3:].rstrip("f"))
    plain = {"launch control", "256-bit accesses", "L2 eviction priorities", "packed f32", "byte masks"}
    plain |= {"three-input min and max", "saturating tf32"}
    chip = CHIPS["sm_90a" if number < 100 else f"sm_{number}a"]
    if target.endswith("f"):
        allowed = feature in chip.has
    else:
        allowed = (number >= 100 and feature in plain) or (number >= 90 and feature == "TMA multicast")
    text = TEXT.format(target=target, instruction=INSTRUCTIONS[feature])
    instruction = next(iter(parse(text).functions["k"].body))
    if allowed and feature in chip.has:
        return check(instruction, chip, target)
    without = f"PTX for {target}" if feature in chip.has else chip.name
    with pytest.raises(ptxemu.UnknownInstruction, match=f"line 12: {without} does not have .*: {feature} \\("):
        ptxemu.Device(chip.name).launch(text)


def test_older_chips_have_no_families() -> None:
    with pytest.raises(ptxemu.LaunchError, match="k is for sm_90f; the device is sm_90a"):
        ptxemu.Device("sm_90a").launch(TEXT.format(target="sm_90f", instruction=""))


@pytest.mark.parametrize("access", ["ld{}.v4.b64 V, A", "ld{}.v8.b32 W, A", "st{}.v4.b64 A, V", "st{}.v8.f32 A, W"])
@pytest.mark.parametrize("space", ["", ".global", ".weak.global", ".relaxed.gpu"])
def test_256_bits_in_every_spelling(access: str, space: str) -> None:
    opcode = access.format(space).split()[0]
    assert needed(opcode, 2) == ("256-bit accesses",)


def test_a_chip_without_packed_types_takes_none_into_a_tensor_map() -> None:
    memory, room = np.zeros((8, 128), np.uint8), np.zeros(256, np.uint8)
    place = room[-room.ctypes.data % 128 :][:128]
    place[:] = np.frombuffer(ptxemu.TensorMap.of(memory, (64, 8)).encode(), np.uint8)
    replace = "ld.param.u64 %d0, [map]; tensormap.replace.tile.elemtype.global.b1024.b32 [%d0], {};"
    for target, value in (("sm_90a", 12), ("sm_90a", 13), ("sm_100a", 13)):
        text = TEXT.format(target=target, instruction=replace.format(value)).replace("k()", "k(.param .u64 map)")
        device = ptxemu.Device(target)
        device.register(place)
        if target == "sm_90a" and value == 13:
            with pytest.raises(ptxemu.Error, match="elemtype 13: sm_90a has types 0 to 12"):
                device.launch(text, args=[place.ctypes.data])
        else:
            device.launch(text, args=[place.ctypes.data])


@pytest.mark.parametrize(("opcode", "operands"), EVERYWHERE)
def test_what_every_chip_has(opcode: str, operands: int) -> None:
    assert needed(opcode, operands) == ()


@pytest.mark.parametrize("target", CHIPS)
def test_shared_memory_is_the_chips(target: str) -> None:
    text = TEXT.format(target=target, instruction="")
    most = 101_376 if target.startswith("sm_12") else 232_448
    device = ptxemu.Device(target)
    device.launch(text, shared=most)
    with pytest.raises(ptxemu.LaunchError, match=f"allowed are {most}"):
        device.launch(text, shared=most + 1)


PREFETCH = """
.version 8.8
.target {target}
.address_size 64
.visible .entry k(.param .align 64 .b8 map[128]) {{
    .reg .b64 d<2>;
    .reg .b32 r0;
    mov.b64 d0, map;
    mov.b32 r0, 0;
    cp.async.bulk.prefetch.tensor.2d.L2.global [d0, {{r0, r0}}];
}}
"""


@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.parametrize(("dtype", "swizzle"), [("u8", "128B"), ("b4x16", "none"), ("u8", "128B with 32B atoms")])
def test_tensor_maps_are_what_the_chip_reads(dtype: str, swizzle: str, target: str) -> None:
    memory = np.zeros((8, 128), np.uint8)
    tensor_map = ptxemu.TensorMap.of(memory, (64, 8), dtype=dtype, swizzle=swizzle)
    text = PREFETCH.format(target=target)
    if target == "sm_90a" and (dtype, swizzle) != ("u8", "128B"):
        with pytest.raises(ptxemu.Error, match="sm_90a has no packed types and no 128-byte swizzle of 32-byte atoms"):
            ptxemu.Device(target).launch(text, args=[tensor_map])
    else:
        ptxemu.Device(target).launch(text, args=[tensor_map])


def test_multiprocessors_are_the_chips_unless_given() -> None:
    assert [ptxemu.Device(target).sms for target in CHIPS] == [132, 148, 148, 188, 48]
    assert ptxemu.Device("sm_90a", sms=3).sms == 3
