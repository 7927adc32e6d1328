"""A checkpoint's files: one safetensors file, or a directory with shards, an index and configuration files."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from blockscale.checkpoints.errors import CheckpointError
from blockscale.checkpoints.files import Entry, TensorFile

CONFIG = "config.json"
MODELOPT_CONFIG = "hf_quant_config.json"
TENSORS = ".safetensors"
INDEX = ".safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Source:
    """
    Attributes:
        path: as it was given.
        files: every safetensors file, open.
        entries: every tensor that the checkpoint has, file after file.
        index: the index's file name, None where there is none.
        config, modelopt_config: config.json and hf_quant_config.json, empty where there is none.
    """

    path: str
    files: tuple[TensorFile, ...]
    entries: dict[str, Entry]
    index: str | None
    config: dict[str, Any]
    modelopt_config: dict[str, Any]


def open_source(path: str | os.PathLike[str]) -> Source:
    """Open a safetensors file or a directory of them. Nothing but headers and JSON is read.

    Raises:
        OSError: there is nothing to read at `path`.
        CheckpointError: a file is broken, or contradicts the index; names the file and the tensor.
    """
    place = Path(path)
    if not place.is_dir():
        file = TensorFile(place)
        return Source(os.fspath(path), (file,), file.entries, None, {}, {})
    index = _index_of(place)
    if index is None:
        files = [TensorFile(place / name) for name in _tensor_files(place)]
        entries = _all_entries(files)
    else:
        files, entries = _indexed(place, index)
    documents = [_document(place / name) if (place / name).exists() else {} for name in (CONFIG, MODELOPT_CONFIG)]
    return Source(os.fspath(path), tuple(files), entries, index, *documents)


def files_of(folder: Path) -> list[str]:
    """The names of index and tensor files that a directory's checkpoint consists of now, the index first; no more than
    that is looked at, and of a broken one no more than can be told."""
    if not folder.is_dir():
        return []
    try:
        index = _index_of(folder)
        if index is None:
            return _tensor_files(folder)
        weight_map = _document(folder / index).get("weight_map")
        named = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        return [index, *sorted(name for name in named if isinstance(name, str) and _stays_inside(name))]
    except (CheckpointError, TypeError):
        return []


def _index_of(folder: Path) -> str | None:
    found = sorted(path.name for path in folder.glob("*" + INDEX))
    if len(found) > 1 and "model" + INDEX in found:
        return "model" + INDEX
    if len(found) > 1:
        raise CheckpointError(folder, None, f"has {len(found)} indices, {', '.join(found[:4])}; expected one")
    return found[0] if found else None


def _tensor_files(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.glob("*" + TENSORS))
    if not names:
        raise CheckpointError(folder, None, f"a directory without any {TENSORS} file")
    return [SINGLE] if SINGLE in names else names


def _all_entries(files: list[TensorFile]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for file in files:
        for name, entry in file.entries.items():
            if name in entries:
                raise entry.error(f"stands in {entries[name].file.path} too, and there is no index")
            entries[name] = entry
    return entries


def _indexed(folder: Path, index: str) -> tuple[list[TensorFile], dict[str, Entry]]:
    """The files and tensors that the index names. A file's tensors that it does not name are no part of the model."""
    place = folder / index
    weight_map = _document(place).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(place, None, "has no weight_map from tensors to files")
    named: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _stays_inside(name):
            raise CheckpointError(place, tensor, f"file {name!r} is not the name of a file in this directory")
        named.setdefault(name, []).append(tensor)
    files, entries = [], {}
    for name, tensors in sorted(named.items()):
        if not (folder / name).exists():
            raise CheckpointError(place, tensors[0], f"file {name!r} does not exist")
        files.append(TensorFile(folder / name))
        wanted = set(tensors)
        entries.update({tensor: entry for tensor, entry in files[-1].entries.items() if tensor in wanted})
        if missing := sorted(wanted - files[-1].entries.keys()):
            raise CheckpointError(folder / name, missing[0], f"not in this file, though {index} says so")
    return files, entries


def _stays_inside(name: str) -> bool:
    """Whether a file name from an index can only mean a file below the directory, on every system."""
    posix, windows = PurePosixPath(name), PureWindowsPath(name)
    return (
        bool(posix.parts)
        and not (posix.is_absolute() or windows.is_absolute() or windows.drive or windows.root)
        and ".." not in windows.parts
        and name.isprintable()
        and name.endswith(TENSORS)
    )


def _document(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise CheckpointError(path, None, "not a regular file")
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, None, f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise CheckpointError(path, None, f"a JSON {type(document).__name__}, expected an object")
    return document
