"""Writing checkpoints: what came as a checkpoint and keeps its convention is copied byte for byte; everything else is
written a weight at a time."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from blockscale.checkpoints.checkpoint import LOW_FIRST, OWN_FORMAT, OWN_VERSION, Checkpoint
from blockscale.checkpoints.config import BLOCKSCALE, COMPRESSED_TENSORS, MODELOPT
from blockscale.checkpoints.describe import modelopt_config, quantization_config
from blockscale.checkpoints.encode import Unit, checkpoint_units, raw_unit, tensor_units
from blockscale.checkpoints.errors import CheckpointError
from blockscale.checkpoints.files import TensorFile
from blockscale.checkpoints.source import CONFIG, INDEX, MODELOPT_CONFIG, SINGLE, TENSORS, files_of
from blockscale.checkpoints.writer import FileWriter, Publication
from blockscale.formats.layouts import LINEAR
from blockscale.tensor import NVFP4Tensor

CONVENTIONS = (MODELOPT, COMPRESSED_TENSORS, BLOCKSCALE)
SHARD_BYTES = 5_000_000_000
_NOT_COPIED = (TENSORS, INDEX, ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".part")
_PIECE = 16 << 20

Progress = Callable[[int], AbstractContextManager[Callable[[], None]]]
"""Given the number of steps, a block that yields what is called after each."""


Documents = dict[str, Mapping[str, Any]]
"""JSON files by name."""


@contextmanager
def silent(total: int) -> Iterator[Callable[[], None]]:
    yield lambda: None


def save_checkpoint(
    tensors: Mapping[str, NVFP4Tensor | Tensor],
    path: str | os.PathLike[str],
    *,
    to: str | None = None,
    config: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = silent,
) -> None:
    """Write a checkpoint. The old one stays whole until the new one is complete, whatever happens in between.

    Args:
        tensors: names of weights -> NVFP4Tensor, any other names -> Tensor, and perhaps an attribute `activations`,
            modules -> "static", "dynamic" or "weight-only"; or what `load_checkpoint` returned, which
            in its own convention is written back byte for byte, and of which no more than a weight is held at a time.
        path: a file if it ends in ".safetensors", otherwise a directory: tensors, an index if there are several files,
            config.json, and for ModelOpt hf_quant_config.json. From a directory, other small files come along, over
            those of the same names.
        to: "modelopt", "compressed-tensors" or "blockscale". By default the convention that the tensors came with:
            compressed-tensors if any carries a divisor, otherwise modelopt.
        config: the model's configuration, to which "quantization_config" is added; by default that of a checkpoint.
        shard_bytes: a directory gets a new file when one would grow beyond this.

    Raises:
        TypeError, ValueError: an argument is none of those allowed, or the convention has no place for a tensor,
            named; nothing has changed then.
        CheckpointError: a checkpoint that is being rewritten turns out to be broken.
        OSError: the disk refuses.

    Warns:
        UserWarning: a directory's checkpoint goes into a single file, which has no room for its configuration.
    """
    _check_arguments(tensors, config, shard_bytes)
    convention = _convention(tensors, to)
    target = Path(path)
    if isinstance(tensors, Checkpoint):
        for problem in tensors.problems:
            if problem.fatal:
                raise CheckpointError(problem.file, problem.name, problem.text)
        if target.suffix == TENSORS and tensors.source.config:
            text = f"{os.fspath(path)}: a single file; {CONFIG} and what else lies in {tensors.source.path} stay behind"
            warnings.warn(text, stacklevel=2)
        if config is None and _copyable(tensors, convention, target):
            _copy(tensors, target, progress)
            return
        units, documents = _rewritten(tensors, convention, config)
        beside = companions(Path(tensors.source.path))
    else:
        units, beside = list(tensor_units(tensors, convention)), []
        documents = documents_for(units, convention, config or {})
    write_units(units, target, convention, documents, beside, shard_bytes, progress)


def _check_arguments(tensors: Any, config: Any, shard_bytes: Any) -> None:
    """Everything that can be told before a byte is written."""
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors: {type(tensors).__name__}, expected a mapping of names to tensors")
    for name in tensors:
        if not isinstance(name, str):
            raise TypeError(f"tensors: name {name!r}, expected a str")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"tensors: name {name!r}, expected what UTF-8 can encode") from error
    if config is not None:
        if not isinstance(config, Mapping):
            raise TypeError(f"config: {type(config).__name__}, expected a mapping")
        try:
            json.dumps(dict(config))
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"config: {error}; expected what JSON can hold") from error
    check_shard_bytes(shard_bytes)


def check_shard_bytes(shard_bytes: Any) -> None:
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise ValueError(f"shard_bytes: {shard_bytes!r}, expected a positive integer")


def check_convention(to: str) -> None:
    if to not in CONVENTIONS:
        raise ValueError(f"to: {to!r}, expected one of {', '.join(map(repr, CONVENTIONS))}")


def _convention(tensors: Mapping[str, Any], to: str | None) -> str:
    if to is not None:
        check_convention(to)
        return to
    if isinstance(tensors, Checkpoint):
        found = {layer.convention for layer in tensors.layers.values()}
    else:
        values = (tensors[name] for name in tensors)
        found = {MODELOPT if t.divisor is None else COMPRESSED_TENSORS for t in values if isinstance(t, NVFP4Tensor)}
    if len(found) > 1:
        raise ValueError(f"to: missing, and the tensors came with {' and '.join(sorted(found))}")
    return found.pop() if found else MODELOPT


def _same(checkpoint: Checkpoint, convention: str) -> bool:
    """Whether the stored bytes are what is to be written."""
    return (
        all(layer.convention == convention for layer in checkpoint.layers.values())
        and checkpoint.first_nibble == LOW_FIRST
        and checkpoint.scale_layout == LINEAR
        and checkpoint.layout is None
    )


def _rewritten(
    checkpoint: Checkpoint, convention: str, config: Mapping[str, Any] | None
) -> tuple[list[Unit], Documents]:
    """The units of a checkpoint, and the documents beside them: its own where nothing about it changes."""
    base = checkpoint.source.config if config is None else config
    if not _same(checkpoint, convention) or convention == BLOCKSCALE:
        units = list(checkpoint_units(checkpoint, convention))
        return units, documents_for(units, convention, base)
    units = [raw_unit(entry) for entry in checkpoint.source.entries.values()]
    if config is None:
        mine = {CONFIG: checkpoint.source.config, MODELOPT_CONFIG: checkpoint.source.modelopt_config}
        return units, {name: document for name, document in mine.items() if document}
    said = Unit((), lambda: (), {layer.module: layer.activations for layer in checkpoint.layers.values()})
    return units, documents_for([*units, said], convention, config)


def _copyable(checkpoint: Checkpoint, convention: str, target: Path) -> bool:
    """Whether the checkpoint's files can be copied as they are without touching one that is in use."""
    if not _same(checkpoint, convention):
        return False
    if target.suffix == TENSORS:
        return len(checkpoint.source.files) == 1 and not Path(checkpoint.source.path).is_dir()
    return Path(checkpoint.source.path).is_dir() and not (target.exists() and files_of(target))


def _copy(checkpoint: Checkpoint, target: Path, progress: Progress) -> None:
    source = Path(checkpoint.source.path)
    with progress(len(checkpoint.source.files)) as advance:
        if target.suffix == TENSORS:
            with Publication(target.parent) as publication:
                _copy_file(checkpoint.source.files[0], publication.stage(target.name))
                advance()
            return
        with Publication(target) as publication:
            for file in checkpoint.source.files:
                _copy_file(file, publication.stage(os.path.relpath(file.path, source)))
                advance()
            documents = [CONFIG, MODELOPT_CONFIG, *([checkpoint.source.index] if checkpoint.source.index else [])]
            for path in [*companions(source), *(source / name for name in documents)]:
                if path.exists():
                    shutil.copyfile(path, publication.stage(path.name))


def _copy_file(file: TensorFile, target: Path) -> None:
    buffer = bytearray(_PIECE)
    with open(target, "xb") as out:
        for start in range(0, file.size, _PIECE):
            out.write(memoryview(buffer)[: file.read_into(memoryview(buffer), start)])
        out.flush()
        os.fsync(out.fileno())


def companions(folder: Path) -> list[Path]:
    """What lies beside the tensors and goes with the model: tokeniser, generation settings, licence."""
    if not folder.is_dir():
        return []
    taken = (CONFIG, MODELOPT_CONFIG)
    return [p for p in sorted(folder.iterdir()) if p.is_file() and p.name not in taken and _goes_along(p.name)]


def _goes_along(name: str) -> bool:
    return not name.startswith(".") and not name.endswith(_NOT_COPIED)


def write_units(
    units: Sequence[Unit],
    target: Path,
    convention: str,
    documents: Documents,
    beside: Iterable[Path] = (),
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = silent,
) -> None:
    """Write units to a file or a directory, one after another; a directory also gets the documents, and copies of the
    files `beside`."""
    names = [spec.name for unit in units for spec in unit.specs]
    for name in names:
        if name == "__metadata__":
            raise ValueError(f"{name!r} cannot be the name of a tensor")
    if len(names) != len(set(names)):
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)}: two tensors would have this name")
    with progress(len(units)) as advance:
        if target.suffix == TENSORS:
            with Publication(target.parent) as publication:
                _write_file(publication.stage(target.name), units, convention, advance)
            return
        with Publication(target) as publication:
            publication.remove(files_of(target))
            index = _write_shards(publication, units, convention, shard_bytes, advance)
            for path in beside:
                if path.parent.resolve() != target.resolve():
                    shutil.copyfile(path, publication.stage(path.name))
            publication.remove([MODELOPT_CONFIG])
            for name, document in documents.items():
                publication.stage_json(name, document)
            if index is not None:
                publication.stage_json("model" + INDEX, index)


def _write_file(path: Path, units: Sequence[Unit], convention: str, advance: Callable[[], None]) -> None:
    specs = [spec for unit in units for spec in unit.specs]
    with FileWriter(path, specs, _metadata(units, convention)) as writer:
        for unit in units:
            for spec, tensor in zip(unit.specs, unit.make(), strict=True):
                writer.write(spec.name, tensor)
            advance()


def _metadata(units: Sequence[Unit], convention: str) -> dict[str, str]:
    if convention != BLOCKSCALE:
        return {"format": "pt"}
    layers = {name: geometry for unit in units for name, geometry in unit.geometry.items()}
    return {"format": OWN_FORMAT, "version": OWN_VERSION, "layers": json.dumps(layers, separators=(",", ":"))}


def _write_shards(
    publication: Publication, units: Sequence[Unit], convention: str, shard_bytes: int, advance: Callable[[], None]
) -> dict[str, Any] | None:
    """Write the tensor files of a directory; their index, if there has to be one."""
    shards = _split(units, shard_bytes)
    names = _names(publication.folder, len(shards))
    for name, shard in zip(names, shards, strict=True):
        _write_file(publication.stage(name), shard, convention, advance)
    if names == [SINGLE]:
        return None
    placed = [(spec, name) for name, shard in zip(names, shards, strict=True) for unit in shard for spec in unit.specs]
    weight_map = {spec.name: name for spec, name in sorted(placed, key=lambda pair: pair[0].name)}
    return {"metadata": {"total_size": sum(spec.nbytes for spec, _ in placed)}, "weight_map": weight_map}


def _split(units: Sequence[Unit], shard_bytes: int) -> list[list[Unit]]:
    shards: list[list[Unit]] = [[]]
    size = 0
    for unit in units:
        nbytes = sum(spec.nbytes for spec in unit.specs)
        if size and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(unit)
        size += nbytes
    return shards


def _names(folder: Path, count: int) -> list[str]:
    """Names for the tensor files of a directory; none that is in use, but one file may replace one."""
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}{TENSORS}" for i in range(count)]
    in_use = set(files_of(folder))
    if names == [SINGLE] and not any(name.endswith(INDEX) for name in in_use):
        return names
    if not in_use.intersection(names) and not any((folder / name).exists() for name in names):
        return names
    tag = secrets.token_hex(4)
    return [name.replace("model", f"model-{tag}", 1) for name in names]


def documents_for(units: Sequence[Unit], convention: str, config: Mapping[str, Any]) -> Documents:
    """config.json, and ModelOpt's own file, that go with the units of a model whose configuration is `config`."""
    activations = {module: kind for unit in units for module, kind in unit.activations.items()}
    if not activations:
        return {CONFIG: dict(config)}
    ignored = sorted(unit.plain_linear for unit in units if unit.plain_linear)
    said = quantization_config(convention, activations, ignored)
    before = config.get("quantization_config")
    if isinstance(before, dict) and before.get("kv_cache_scheme"):
        said["kv_cache_scheme"] = before["kv_cache_scheme"]
    documents: Documents = {CONFIG: {**config, "quantization_config": said}}
    if convention == MODELOPT:
        documents[MODELOPT_CONFIG] = modelopt_config(activations, ignored)
    return documents
