"""How a run writes: by itself in its folder, and each file whole or not at all."""

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
except ImportError:  # not on this system: two runs in a folder are then not told apart
    fcntl = None

LOCK = ".lock"
# (process, thread, folder) of those who hold one: whoever asks again within is let in, and nobody else
_owned: set[tuple[int, int, Path]] = set()


@contextmanager
def owned(folder: Path | None) -> Generator[None]:
    """Within it nobody else trains in a folder, which is made where there is none. The system gives the lock back when
    the process ends, however it ends (and those that it forked). A caller may hold it around another that asks."""
    if folder is None or (mine := (os.getpid(), threading.get_ident(), folder.resolve())) in _owned:
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
        _owned.add(mine)
        try:
            yield
        finally:
            _owned.discard(mine)


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
    """A file that is on disk when this returns."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """A rename is safe once the folder it is in is on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
