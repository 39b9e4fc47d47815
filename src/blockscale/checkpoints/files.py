"""Safetensors folders: a checked table of all tensors, lazy reads, and a writer of shards.

Opening reads headers alone. Everything that a damaged or hostile folder could be wrong about is checked there, and an
error names the file and, where there is one, the tensor. Data is read tensor by tensor, so a file may be larger than
memory. Nothing is executed: no pickle, no code, no pattern of a config.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..errors import CheckpointError, MissingPackageError, message, refuse

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# dtypes by the name that headers have for them
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "U16": torch.uint16,
    "I32": torch.int32, "U32": torch.uint32, "I64": torch.int64, "U64": torch.uint64, "F16": torch.float16,
    "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LARGEST_HEADER = 100_000_000  # bytes, of JSON files, too
_MOST_DIMS, _MOST_VALUES, _LONGEST_NAME = 8, 2**60, 255
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_FIX = "download or write the file again"


class Stored(NamedTuple):
    """A tensor of a file, as its header has it.  dtype: the header's name of it.  start: its first byte."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of a tensor; a byte holds two values of F4."""
        values = math.prod(self.shape)
        return values // 2 if self.dtype == "F4" else values * DTYPES[self.dtype].itemsize


def damaged(what: str, rule: str, fix: str = _FIX) -> NoReturn:
    """Raise the error of a checkpoint that is not what it says."""
    refuse(what, rule, fix, error=CheckpointError)


class TensorFiles(Mapping[str, Tensor]):
    """Tensors of a folder of safetensors files by their stored name, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.stored = folder, dict[str, Stored]()
        listed = _index(folder)
        for path in _shards(folder, listed):
            for name, found in _header(path).items():
                if name in self.stored:
                    rule = "a tensor is stored once"
                    damaged(f"{path} and {self.stored[name].file} both have {name!r}", rule)
                if listed is not None and listed.get(name) != path.name:
                    where = f"there in {listed[name]}" if name in listed else "not there"
                    damaged(f"{path} has {name!r}, which {INDEX} has {where}", "an index names the file of each tensor")
                self.stored[name] = found
        missing = [name for name in listed or () if name not in self.stored]
        if missing:
            assert listed is not None
            path = folder / listed[missing[0]]
            what = f"{path} has no {missing[0]!r}, which {INDEX} has there ({len(missing)} tensors are missing)"
            damaged(what, "an index names the file of each tensor")

    def __getitem__(self, name: str) -> Tensor:
        """A copy of a tensor on the CPU."""
        of = self.stored[name]
        try:
            data = read_bytes(of.file, of.start, of.nbytes)
        except (OSError, MemoryError) as error:
            what = f"{of.file}: {name!r} of {of.nbytes:,} bytes could not be read: {error or 'not enough memory'}"
            raise CheckpointError(message(what, rule="a tensor is read whole", fix=_FIX)) from error
        if not of.nbytes:
            return torch.empty(of.shape, dtype=DTYPES[of.dtype])
        shape = (*of.shape[:-1], of.shape[-1] // 2) if of.dtype == "F4" else of.shape
        return data.view(DTYPES[of.dtype]).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def read_bytes(path: Path, start: int, size: int) -> Tensor:
    """Some bytes of a file, uint8 [size]. The file is not mapped: maps of files larger than memory may be refused."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    found = bytearray(size)
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        done, rest = 0, memoryview(found)
        while done < size:
            count = file.readinto(rest[done:])  # pyright: ignore[reportAttributeAccessIssue]
            if not count:
                raise OSError(f"the file ends at byte {start + done:,}")
            done += count
    return torch.frombuffer(found, dtype=torch.uint8)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; CheckpointError unless it is one."""
    try:
        size, text = path.stat().st_size, b""
        if size <= _LARGEST_HEADER:
            text = path.read_bytes()
    except OSError as error:
        damaged(f"{path}: {error}", "it holds a JSON object")
    if size > _LARGEST_HEADER:
        damaged(f"{path} has {size:,} bytes", f"it has at most {_LARGEST_HEADER:,}")
    return _object(text, str(path))


def _object(text: bytes, where: str) -> dict[str, Any]:
    """A JSON object in which no name stands twice.  where: the text is, for errors."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict[str, Any]()
        for name, value in pairs:
            if name in found:
                damaged(f"{where} has {name!r} twice", "a name stands once")
            found[name] = value
        return found

    try:
        found = json.loads(text, object_pairs_hook=once)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        damaged(f"{where} is no JSON: {error}", "it is a JSON object")
    if not isinstance(found, dict):
        damaged(f"{where} is a {type(found).__name__}", "it is a JSON object")
    return found


def _index(folder: Path) -> dict[str, str] | None:
    """File name of each tensor by the folder's index; None if it has none."""
    path = folder / INDEX
    if not path.is_file():
        return None
    found = read_json(path).get("weight_map")
    if not isinstance(found, dict) or not found:
        damaged(f"{path} has no weight_map", "an index names the file of each tensor")
    for name, file in found.items():
        if not isinstance(file, str) or not is_file_name(file):
            damaged(f"{path} has {name!r} in {file!r}", "an index names files of its own folder")
    return found


def is_file_name(name: str) -> bool:
    """Whether a name is that of a file in a folder: no path.

    >>> is_file_name("model.safetensors"), is_file_name("../model.safetensors"), is_file_name("")
    (True, False, False)
    """
    return 0 < len(name) <= _LONGEST_NAME and name not in (".", "..") and not set(name) & set("/\\\0:")


def _shards(folder: Path, listed: Mapping[str, str] | None) -> list[Path]:
    """Files of a folder that hold its tensors, all of them there."""
    if listed is not None:
        found = [folder / name for name in dict.fromkeys(listed.values())]
    elif (folder / SINGLE).is_file():
        found = [folder / SINGLE]
    else:
        found = sorted(folder.glob("*.safetensors"))
        found = [folder / name for name in _complete([path.name for path in found])] or found
        if not found:
            rule = "a checkpoint is a folder of safetensors files, or one GGUF file"
            damaged(f"{folder} has no safetensors file", rule, "name the folder that holds config.json")
    for path in found:
        if not path.is_file():
            damaged(f"{path} is missing", f"{len(found)} files hold the tensors of this checkpoint")
    return found


def _complete(names: list[str]) -> list[str]:
    """All names of a set of numbered shards, those that are missing too; none if files are not numbered."""
    parts = [match for name in names if (match := _SHARD.fullmatch(name))]
    if len(parts) < len(names) or len({match.group(1, 3) for match in parts}) != 1:
        return []
    return [f"{parts[0][1]}-{at:05d}-of-{parts[0][3]}.safetensors" for at in range(1, int(parts[0][3]) + 1)]


def _header(path: Path) -> dict[str, Stored]:
    """Tensors of a safetensors file, checked against its size."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            damaged(f"{path} of {size:,} bytes has a header of {length:,}", "a header lies within its file")
        header = _object(file.read(length), f"{path}: its header")
    header.pop("__metadata__", None)
    found: dict[str, Stored] = {}
    at = 0
    for name, each in sorted(header.items(), key=_start):
        stored, (start, end) = _entry(path, name, each)
        stored = stored._replace(start=8 + length + start)
        if start != at or end - start != stored.nbytes or end > size - 8 - length:
            what = f"{path}: {name!r} {stored.dtype} {stored.shape} lies at bytes {start:,} to {end:,} of"
            rule = "tensors follow one another without overlap or hole, within their file"
            damaged(f"{what} {size - 8 - length:,}, after {at:,}", rule)
        found[name], at = stored, end
    if at != size - 8 - length:
        damaged(
            f"{path} has {size - 8 - length - at:,} bytes after its last tensor", "a header describes its whole file"
        )
    return found


def _start(item: tuple[str, Any]) -> tuple[int, int]:
    """Order of tensors in a file; what has no offsets comes first, and is refused there."""
    offsets = item[1].get("data_offsets") if isinstance(item[1], dict) else None
    whole = isinstance(offsets, list) and len(offsets) == 2 and all(type(each) is int for each in offsets)
    return (offsets[0], offsets[1]) if whole else (-1, -1)  # pyright: ignore[reportOptionalSubscript]


def _entry(path: Path, name: str, each: Any) -> tuple[Stored, tuple[int, int]]:
    """Dtype, shape and place of a tensor; CheckpointError unless they have the types that they must have."""
    place = _start((name, each)) if _is_text(name) else (-1, -1)
    dtype, shape = (each.get("dtype"), each.get("shape")) if isinstance(each, dict) else (None, None)
    is_known = dtype in DTYPES if isinstance(dtype, str) else False
    if is_known and isinstance(dtype, str) and isinstance(shape, list) and is_shape(shape, dtype) and place[0] >= 0:
        return Stored(path, dtype, tuple(shape)), place
    what = f"{path}: {name!r} is {str(each)[:200]}"
    damaged(what, f"a tensor has a dtype of {', '.join(DTYPES)}, a shape, and two data_offsets")


def is_shape(shape: list[Any], dtype: str = "") -> bool:
    """Whether a list is the shape of a tensor that a machine could hold; whole bytes of F4."""
    if len(shape) > _MOST_DIMS or not all(type(size) is int and 0 <= size <= _MOST_VALUES for size in shape):
        return False
    whole = dtype != "F4" or (bool(shape) and shape[-1] % 2 == 0)
    return whole and math.prod(max(1, size) for size in shape) <= _MOST_VALUES


def _is_text(name: str) -> bool:
    """Whether a name can be written: JSON has halves of characters, too."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError:
        fix = "pip install safetensors"
        raise MissingPackageError(message("no safetensors", rule="it reads and writes weights", fix=fix)) from None
    return safetensors


class ShardWriter:
    """Writes tensors to a folder in files of at most `shard_bytes` (a larger tensor has its own), then the index.

    Files have temporary names until `finish`, so a folder that was not finished holds no checkpoint.
    """

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.folder, self._limit = folder, shard_bytes
        self._written: list[list[str]] = []
        self._waiting: dict[str, Tensor] = {}
        self._names: set[str] = set()
        self._bytes = self._total = 0
        self._made: list[Path] = []
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            rule = "a checkpoint is written to a new or empty folder"
            what = "is not empty" if folder.is_dir() else "is a file"
            refuse(f"{folder} {what}", rule, "name another folder", error=CheckpointError)
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Tensors with their stored names. Those of one call lie in one file."""
        fresh = {name: each.detach().to("cpu").contiguous() for name, each in tensors}
        again = self._names & fresh.keys()
        if again:
            what, rule = f"{sorted(again)[0]!r} is written twice", "a tensor is stored once"
            refuse(what, rule, "give each weight a name of its own", error=CheckpointError)
        size = sum(each.nbytes for each in fresh.values())
        if self._waiting and self._bytes + size > self._limit:
            self._flush()
        self._waiting |= fresh
        self._names |= fresh.keys()
        self._bytes += size
        self._total += size

    def finish(self, files: Mapping[str, Any]) -> list[Path]:
        """Name the files, and write JSON files beside them. Returns the paths of the tensors."""
        self._flush()
        count = len(self._written)
        names = [SINGLE] if count == 1 else [f"model-{at + 1:05d}-of-{count:05d}.safetensors" for at in range(count)]
        contents = dict(files)
        if count > 1:
            where = {tensor: name for name, tensors in zip(names, self._written, strict=True) for tensor in tensors}
            contents[INDEX] = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(where.items()))}
        self._made = [self.folder / name for name in (*contents, *names)]
        for name, content in contents.items():
            (self.folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        mode = 0o666 & ~_umask()  # the library's files are their owner's alone
        for at, name in enumerate(names):
            self._temporary(at).chmod(mode)
            os.replace(self._temporary(at), self.folder / name)
        return [self.folder / name for name in names]

    def abandon(self) -> None:
        """Remove what was written, and the folder if it is empty."""
        for at in range(len(self._written) + 1):
            self._temporary(at).unlink(missing_ok=True)
        for path in self._made:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _flush(self) -> None:
        if not self._waiting and self._written:
            return
        _safetensors()
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        tensors = _unshared(self._waiting)
        path = self._temporary(len(self._written))
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:  # raised if the disk is full
            raise OSError(None, str(error), str(path)) from error
        self._written.append(list(self._waiting))
        self._waiting, self._bytes = {}, 0

    def _temporary(self, at: int) -> Path:
        return self.folder / f".model-{at}.safetensors.new"


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    found = os.umask(0o022)
    os.umask(found)
    return found


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that own their storage: the library refuses views and tensors that share one."""
    found, seen = dict[str, Tensor](), set[int]()
    for name, each in tensors.items():
        storage = each.untyped_storage()
        found[name] = each.clone() if storage.data_ptr() in seen or storage.nbytes() != each.nbytes else each
        seen.add(storage.data_ptr())
    return found


def copy_beside(source: Path, target: Path, but: Set[str]) -> list[str]:
    """Copy a folder's small files that belong to a model (tokenizer, generation settings); returns names of those left
    out, such as code.  but: neither copied nor named."""
    left: list[str] = []
    for path in sorted(source.iterdir()):
        if not path.is_file() or path.name.startswith(".") or path.name in but or path.name == INDEX:
            continue
        if path.suffix in (".safetensors", ".gguf"):
            continue
        if path.suffix in (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md"):
            shutil.copyfile(path, target / path.name)
        else:
            left.append(path.name)
    return left


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype in a header."""
    return _NAMES[dtype]
