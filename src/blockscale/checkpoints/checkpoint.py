"""A checkpoint as a mapping of weights: plain tensors, and `BlockScaled` where codes and scales are stored."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BlockscaleError, CheckpointError, check_name, refuse
from ..formats.tensor import BlockScaled
from .files import ShardWriter, Stored, TensorFiles, damaged, dtype_name, read_json
from .gguf import GgufFile
from .layouts import Entry, Layout, Written, find_layout, get_layout
from .layouts.layout import e8m0_bytes, read_operand
from .layouts.modelopt import QUANT_CONFIG

CONFIG = "config.json"
SHARD_BYTES = 5 << 30


class Checkpoint(Mapping[str, Tensor | BlockScaled]):
    """Weights of a checkpoint by name, read when they are asked for.

    layout: its name.  config: config.json.  entries: what headers say of each weight.  stored: tensors of the files.
    """

    def __init__(
        self,
        path: Path,
        layout: str,
        config: dict[str, Any],
        entries: dict[str, Entry],
        stored: Mapping[str, Stored],
        read: Callable[[str], Tensor],
    ) -> None:
        self.path, self.layout, self.config = path, layout, config
        self.entries, self.stored, self._read = entries, stored, read

    def __getitem__(self, name: str) -> Tensor | BlockScaled:
        entry = self.entries.get(name)
        if entry is None:
            check_name(name, self.entries, "weight")
            raise KeyError(name)
        return self._read(entry.parts["data"]) if entry.format is None else read_operand(entry, self._read, self.stored)

    def get(self, name: str, default: Any = None) -> Any:
        """A weight, or the default if there is none of this name."""
        return self[name] if name in self.entries else default

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def raw(self, name: str) -> dict[str, Tensor]:
        """Tensors of a weight by their stored names, as they are in the files."""
        return {part: self._read(part) for part in self.entries[name].parts.values()}

    def __repr__(self) -> str:
        formats = sorted({entry.format for entry in self.entries.values() if entry.format is not None})
        return f"Checkpoint({str(self.path)!r}, {self.layout}, {len(self)} weights, {', '.join(formats) or 'plain'})"


def open(folder: str | os.PathLike[str], *, layout: str | None = None) -> Checkpoint:
    """A checkpoint of block-scaled weights: a safetensors folder, or a GGUF file. Headers are read and checked; data is
    read weight by weight.

    layout: name of it; found by config.json and the names of tensors if not given.

    >>> import tempfile, blockscale as bs
    >>> folder = tempfile.mkdtemp() + "/model"
    >>> _ = write(folder, {"up.weight": bs.quantize(torch.ones(64, 64), "mxfp4")}.items(), "compressed_tensors")
    >>> open(folder)["up.weight"].shape
    (64, 64)
    """
    path = Path(folder)
    if path.is_file() and path.suffix == ".gguf":
        found = GgufFile(path)
        return Checkpoint(path, "gguf", found.config, found.entries, found.stored, found.read)
    if not path.is_dir():
        rule = "a checkpoint is a folder of safetensors files, or one GGUF file"
        refuse(f"{path} is no folder", rule, "name the folder that holds config.json", error=CheckpointError)
    files = TensorFiles(path)
    config = read_json(path / CONFIG) if (path / CONFIG).is_file() else {}
    about = config.get("quantization_config")
    if about is None:
        config.pop("quantization_config", None)
    if about is not None and not isinstance(about, dict):
        damaged(f"{path / CONFIG} has a quantization_config of type {type(about).__name__}", "it is an object")
    if about is None and (path / QUANT_CONFIG).is_file():
        config["quantization_config"] = {"quant_method": "modelopt"} | _quantization(path / QUANT_CONFIG)
    by = find_layout(config, files.stored, path) if layout is None else get_layout(layout)
    try:
        entries = by.entries(files.stored, config)
    except BlockscaleError as error:  # of a config, which layouts do not know the place of
        if str(path) in str(error):
            raise
        raise CheckpointError(f"{path / CONFIG}: {error}") from error
    return Checkpoint(path, by.name, config, entries, files.stored, files.__getitem__)


def _quantization(path: Path) -> dict[str, Any]:
    found = read_json(path).get("quantization", {})
    return found if isinstance(found, dict) else {}


def write(
    folder: str | os.PathLike[str],
    weights: Iterable[tuple[str, Tensor | BlockScaled]],
    layout: str,
    *,
    config: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write weights to a folder that holds no checkpoint; returns its safetensors files. One weight is in memory at a
    time, beside those of the current shard.

    weights: (name, plain tensor or BlockScaled); blocks run along the last axis.  layout: one of `LAYOUTS`.  config:
    other fields of config.json; its quantization_config is replaced.

    >>> import tempfile, blockscale as bs
    >>> q = bs.quantize(torch.ones(128, 128), "fp8_128x128")
    >>> [path.name for path in write(tempfile.mkdtemp(), [("up.weight", q)], "deepseek")]
    ['model.safetensors']
    """
    with Writer(Path(folder), get_layout(layout), shard_bytes) as writer:
        for name, value in weights:
            writer.add(name, value)
        return writer.finish(config or {})


class Writer:
    """Writes weights one after the other in a layout; a context that removes its files unless it is finished."""

    def __init__(self, folder: Path, layout: Layout, shard_bytes: int = SHARD_BYTES) -> None:
        self._layout, self._shards, self._done = layout, ShardWriter(folder, shard_bytes), False
        self.written, self._stored = Written(), dict[str, Stored]()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._done:
            self._shards.abandon()

    def add(
        self, name: str, value: Tensor | BlockScaled, stored: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """Store a weight; returns its tensors by stored name.  stored: these, from a checkpoint of the same layout."""
        if isinstance(value, BlockScaled):
            tensors = dict(self._layout.store(name, value) if stored is None else stored)
            if value.format == "fp8_128x128":
                self.written.rules.add("fp32" if e8m0_bytes(value.plain_scale()) is None else "pow2")
        else:
            if value.dtype not in _PLAIN:
                rule = "a plain tensor has values, or integers"
                refuse(f"{name} is {value.dtype}", rule, "pass a BlockScaled with its scales", error=CheckpointError)
            tensors = {name: value}
        self.written.formats[name] = value.format if isinstance(value, BlockScaled) else None
        self.written.shapes[name] = tuple(value.shape)
        self._shards.add(tensors.items())
        for part, each in tensors.items():
            self._stored[part] = Stored(self._shards.folder, dtype_name(each.dtype), tuple(each.shape))
        return tensors

    def finish(self, config: Mapping[str, Any], quantization: Any = None) -> list[Path]:
        """Write what is left, config.json and the index.  quantization: the config of a source that was copied."""
        self.written.is_tied = bool(config.get("tie_word_embeddings"))
        fields, others = dict[str, Any](), dict[str, dict[str, Any]]()
        if quantization is not None:
            fields = {"quantization_config": quantization}
        elif self.written.held:
            fields, others = self._layout.describe(self.written)
        about = (dict(config) if quantization is not None else without_quantization(config)) | fields
        self._check_is_read(about)
        found = self._shards.finish({CONFIG: about} | others)
        self._done = True
        return found

    def _check_is_read(self, config: Mapping[str, Any]) -> None:
        """Raise if a reader would take a weight for another, by its name and those beside it."""
        if not self.written.held:
            return
        found = self._layout.entries(self._stored, config)
        for name, format in self.written.formats.items():
            entry = found.get(name)
            if entry is None or (entry.format, entry.shape) != (format, self.written.shapes[name]):
                read = "not" if entry is None else f"as {entry.format or entry.dtype} {entry.shape}"
                what = f"{name}, {format or 'plain'} {self.written.shapes[name]}, would be read {read}"
                rule = f"the names, dtypes and shapes of {self._layout.name} tell what a weight is"
                refuse(what, rule, "write another layout, or rename it", error=CheckpointError)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what it says of quantization, in nested configs, too."""
    kept = {name: value for name, value in config.items() if name not in ("quantization_config", "compression_config")}
    return {name: without_quantization(value) if isinstance(value, dict) else value for name, value in kept.items()}


# dtypes of plain tensors
_PLAIN = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)  # fmt: skip
