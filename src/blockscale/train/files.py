"""Locks on run folders, and files and renames synced to disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..errors import CheckpointError, message

try:
    import fcntl
except ImportError:  # no fcntl on this system: folders are not locked
    fcntl = None

LOCK = ".lock"
# (process, thread, folder) of held locks: a thread that holds a lock may take it again
_held: set[tuple[int, int, Path]] = set()


@contextmanager
def folder_lock(folder: Path | None) -> Generator[None]:
    """Context that holds the exclusive, reentrant lock of a folder and creates the folder if needed. The system
    releases the lock when the process and its forked children have ended, however they end."""
    if folder is None or (mine := (os.getpid(), threading.get_ident(), folder.resolve())) in _held:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    except OSError as error:
        raise CheckpointError(
            message(
                f"{folder}: {error.strerror}",
                rule="a run keeps checkpoints and metrics in its folder",
                fix="name a folder that can be written to",
            )
        ) from None
    with file:
        _lock(folder, file)
        _held.add(mine)
        try:
            yield
        finally:
            _held.discard(mine)


def _lock(folder: Path, file: IO[str]) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise CheckpointError(
            message(
                f"{folder} is in use by process {file.read().strip() or 'unknown'}",
                rule="one run at a time writes into a folder",
                fix="wait for it, or name another folder",
            )
        ) from None
    except OSError:  # a file system without locks
        return
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()


def write_synced(path: Path, text: str) -> None:
    """Write a file and sync it to disk."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, which makes a rename inside it durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
