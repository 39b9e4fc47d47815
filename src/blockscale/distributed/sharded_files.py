"""Tensors in a folder by `torch.distributed.checkpoint`, written and read by all ranks, with a checksum of every file.

Each rank writes its shards and syncs them; DTensors are read on any number of ranks. One process does the same alone.
Writing is not atomic: write to a temporary name, and rename it when all ranks are done.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from .world import World


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], world: World) -> dict[str, int]:
    """Write tensors to a folder that exists, synced; returns the checksum of every file, of all ranks. Collective."""
    with _quiet():
        writer = FileSystemWriter(str(folder), sync_files=True)
        state_dict_saver.save(dict(tensors), storage_writer=writer, no_dist=world.size == 1)
    mine = f"__{world.rank}_*"
    found = world.together(lambda: checksums(folder, mine if world.size > 1 else "*"))
    if world.size > 1:
        found += [world.from_first(lambda: checksums(folder, ".metadata"))]
    return {name: value for each in found for name, value in sorted(each.items())}


def read_tensors(folder: Path, tensors: dict[str, Tensor], world: World) -> None:
    """Fill tensors in place, whatever the number of ranks that wrote them. Collective."""
    with _quiet():
        state_dict_loader.load(tensors, checkpoint_id=str(folder), no_dist=world.size == 1)


def local_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes of tensors on this rank."""
    return sum(each.to_local().nbytes if isinstance(each, DTensor) else each.nbytes for each in tensors.values())


def cause(error: BaseException) -> BaseException:
    """The exception inside torch's CheckpointException, of the first rank that has one."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    return next(iter(failures.values()))[0] if failures else error


def reason(error: BaseException) -> str:
    """Message of the error that torch wrapped with tracebacks: the innermost OSError if there is one."""
    error = cause(error)
    found, inner = str(error) or type(error).__name__, error.__context__
    while inner is not None:
        found, inner = str(inner) if isinstance(inner, OSError) else found, inner.__context__
    return found


def checksums(folder: Path, pattern: str = "*") -> dict[str, int]:
    """CRC-32 of the files of a folder, by name."""
    return {path.name: checksum(path) for path in sorted(folder.glob(pattern)) if path.is_file()}


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            value = zlib.crc32(part, value)
    return value


def _quiet() -> warnings.catch_warnings[Any]:
    """Silences torch's warnings about saving and loading without a process group."""
    return warnings.catch_warnings(action="ignore")
