"""Locks on run folders, and files and renames synced to disk."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout  # torch requires it

from ..errors import CheckpointError, message

LOCK = ".lock"


@contextmanager
def folder_lock(folder: Path | None) -> Generator[None]:
    """Context that holds the exclusive lock of a folder and creates the folder if needed. A thread that holds the lock
    may take it again. The system releases it when the process ends, however it ends."""
    if folder is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.resolve() / LOCK, timeout=0, is_singleton=True)
        lock.acquire()
    except Timeout:
        rule, fix = "one run at a time writes into a folder", "wait for it, or name another folder"
        raise CheckpointError(message(f"{folder} is in use by another run", rule=rule, fix=fix)) from None
    except OSError as error:
        rule, fix = "a run keeps checkpoints and metrics in its folder", "name a folder that can be written to"
        raise CheckpointError(message(f"{folder}: {error.strerror}", rule=rule, fix=fix)) from None
    try:
        yield
    finally:
        lock.release()


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
