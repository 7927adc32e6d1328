"""Damaged checkpoints: each is the fixture of a library with one mutation, made from a number."""

import json
import random
import re
import shutil
import struct
import warnings
from contextlib import suppress
from pathlib import Path

import torch
from checkpoint_files import FIXTURES
from operands import same_bits
from safetensors import SafetensorError, safe_open

import blockscale as bs
from blockscale.checkpoints import CheckpointError
from blockscale.formats import layouts

SOURCES = ("modelopt-llama", "modelopt-stack", "llmcompressor-llama-NVFP4", "own")
DTYPES = ("U8", "F4", "F8_E4M3", "F8_E8M0", "F32", "BF16", "I64", "BOOL", "F6_E2M3", "C64", "FP4", "")
SIZES = (-1, 0, 1, 2, 3, 15, 16, 31, 32, 48, 64, 96, 2**31, 2**63, 2**64, 1.5, None, "64", [], True)
NAMES = ("", "weight", "../x", "__metadata__", "lm_head.weight", "a.weight_scale", "a.weight_packed", "\0", "é" * 500)
WORDS = (
    "NVFP4",
    "FP8",
    "re:(",
    "re:.*",
    "re:(a|a)*$",
    "*",
    "[",
    "Linear",
    "modelopt",
    "compressed-tensors",
    "blockscale",
)
VALUES = (*SIZES, *WORDS, {}, {"a": 1}, [1], ["re:["], [None], float("nan"))


def mutate(number, folder):
    """A checkpoint made from a number in `folder`; what has been done to it."""
    rng = random.Random(number)
    source = rng.choice(SOURCES)
    shutil.rmtree(folder, ignore_errors=True)
    if source == "own":
        of, layout = rng.choice(["modelopt-stack", "llmcompressor-llama-NVFP4"]), rng.choice(["linear", "128x4"])
        bs.save_checkpoint(bs.load_checkpoint(FIXTURES / of, layout=layout), folder, to="blockscale")
    else:
        shutil.copytree(FIXTURES / source, folder)
    tensors = sorted(folder.glob("*.safetensors"))
    documents = [p for p in sorted(folder.glob("*.json")) if p.name != "generation_config.json"]
    kind = rng.choice([damage_bytes, damage_bytes, damage_header, damage_header, damage_header, damage_json])
    if source == "own" and rng.random() < 0.4:
        kind = damage_layers
    path = rng.choice(documents if kind is damage_json else tensors)
    return f"{source} {path.name}: {kind(rng, path)}"


def damage_bytes(rng, path):
    """Bits anywhere, in the header more often than elsewhere; or bytes that are gone, doubled or made up."""
    data = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    way = rng.choice(["bits", "bits", "cut", "gap", "insert", "length"])
    at = rng.randrange(rng.choice([8, header, len(data)]))
    if way == "bits":
        for _ in range(rng.randint(1, 8)):
            data[min(len(data) - 1, at + rng.randrange(64))] ^= 1 << rng.randrange(8)
    elif way == "cut":
        del data[at:]
    elif way == "gap":
        del data[at : at + rng.randint(1, 64)]
    elif way == "insert":
        data[at:at] = rng.randbytes(rng.randint(1, 64))
    else:
        data[:8] = struct.pack("<Q", rng.choice([0, 1, header - 9, header - 7, len(data), 2**32, 2**63, 2**64 - 1]))
    path.write_bytes(data)
    return way


def damage_header(rng, path):
    """A field of the header, or the name of a tensor."""
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    name = rng.choice([key for key in header if key != "__metadata__"])
    way = rng.choice(["dtype", "shape", "reshape", "offset", "name", "suffix", "drop", "swap", "metadata"])
    entry = header[name]
    if way == "dtype":
        entry["dtype"] = rng.choice(DTYPES)
    elif way == "shape":
        entry["shape"] = [rng.choice(SIZES) for _ in range(rng.randint(0, 4))]
    elif way == "reshape":
        n = entry["data_offsets"][1] - entry["data_offsets"][0]
        n //= {"F32": 4, "BF16": 2}.get(entry["dtype"], 1)
        d = rng.choice([i for i in range(1, n + 1) if n % i == 0])
        entry["shape"] = rng.choice([[n], [d, n // d], [1, d, n // d], [d, n // d, 1], [0, n], [1] * 40 + [n]])
    elif way == "offset":
        entry["data_offsets"][rng.randrange(2)] += rng.choice([-64, -1, 1, 4, 64, 2**40])
    elif way == "name":
        header[rng.choice(NAMES)] = header.pop(name)
    elif way == "suffix":
        roles = ["weight", "weight_scale", "weight_scale_2", "weight_packed", "weight_global_scale", "input_scale"]
        header[re.sub(r"[^.]*$", rng.choice([*roles, "weight_zero_point", "weight_codes"]), name)] = header.pop(name)
    elif way == "drop":
        del header[name]
    elif way == "swap":
        other = rng.choice([key for key in header if key != "__metadata__"])
        header[name], header[other] = header[other], header[name]
    else:
        header["__metadata__"] = rng.choice(
            [
                {
                    "format": "blockscale.checkpoint",
                    "version": "1",
                    "layers": rng.choice(["{}", "[]", "{", '{"a":{}}']),
                },
                {},
                3,
            ]
        )
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[size:])
    return f"{way} of {name}"


def damage_layers(rng, path):
    """What the metadata of a file of our own say of a layer."""
    data = path.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:size])
    layers = json.loads(header["__metadata__"]["layers"])
    name, way = rng.choice(list(layers)), rng.choice(["shape", "layout", "drop", "transposed", "other"])
    if way == "shape":
        layers[name]["shape"] = [rng.choice(SIZES) for _ in range(rng.randint(0, 4))]
    elif way == "layout":
        layers[name]["layout"] = rng.choice(["linear", "128x4", "128x4-grouped", "x", 3])
    elif way == "drop":
        del layers[name]
    elif way == "transposed":
        layers[name]["transposed"] = rng.choice([True, 3, None])
    else:
        layers[name] = rng.choice([3, [], {}, "x"])
    header["__metadata__"]["layers"] = json.dumps(layers)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[size:])
    return f"layers' {way} of {name}"


def damage_json(rng, path):
    """A value somewhere in a document, or its text."""
    if rng.random() < 0.2:
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        return "a byte"
    document = json.loads(path.read_text())
    spot, key = document, rng.choice(list(document))
    while isinstance(spot[key], (dict, list)) and spot[key] and rng.random() < 0.9:
        spot = spot[key]
        key = rng.choice(list(spot) if isinstance(spot, dict) else range(len(spot)))
    if rng.random() < 0.3:
        del spot[key]
    else:
        spot[key] = rng.choice(VALUES)
    path.write_text(json.dumps(document))
    return f"{key}"


def judge(folder):
    """ "right" or "refused": what becomes of a damaged checkpoint. Anything else raises AssertionError.

    Right means that every tensor has the bytes that the safetensors library reads, and every NVFP4 weight the values
    that follow from them; refused, one CheckpointError that names the file.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            checkpoint = bs.load_checkpoint(folder)
            loaded = dict(checkpoint)
            scales = {name: checkpoint.input_scale(name) for name in checkpoint.layers}
    except CheckpointError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert str(folder) in refusal
        assert "\n" not in refusal
        return "refused"
    assert all(scale is None or bool((scale > 0).all()) for scale in scales.values())
    tensors = raw(folder)
    for name, t in loaded.items():
        if name in checkpoint.plain:
            assert same_bits(t, tensors[name]), name
    for layer in checkpoint.layers.values():
        t, expected = loaded[layer.name], expected_values(layer, tensors)
        assert torch.equal(t.dequantize().nan_to_num(), expected.nan_to_num()), layer.name
    return "right"


def raw(folder):
    """What the safetensors library reads; files that it refuses are none that the index needs."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with suppress(SafetensorError), safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    return tensors


def expected_values(layer, tensors):
    """(..., N, K) from a layer's tensors by the definition of the format."""
    codes = tensors[layer.codes.name].view(torch.uint8)
    scales = tensors[layer.scales.name].view(torch.uint8)
    own = layer.convention == "blockscale"
    if layer.transposed and not own:
        codes, scales = codes.mT, scales.mT
    if layer.layout == "128x4":
        scales = layouts.unswizzle(scales, layer.shape[-2], scales.shape[-1])
    unit = tensors[layer.global_scale.name].float().reshape(())
    unit = 1 / unit if layer.global_scale.name.endswith("weight_global_scale") else unit
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat([grid, -grid])[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
    d = (scales.contiguous().view(torch.float8_e4m3fn).float() * unit).repeat_interleave(16, -1)
    return (values * d[..., : values.shape[-1]])[..., : layer.shape[-1]]
