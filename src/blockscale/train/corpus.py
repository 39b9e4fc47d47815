"""Text files of a corpus: sorted, deduplicated by content, split into training and validation by file.

Whether a file is held out depends on its content alone, so copies and renames never leak and adding files moves no
other file. A hash of all contents is stored with every result: only runs with the same hash are compared. Nothing is
downloaded; the default text is the Python source that every machine with this library has.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import DataError, message, refuse

PYTHONS_OWN = ("stdlib", "python")
# bytes at the start of a file that decide whether it may be text
_PROBED = 8192
_SKIPPED = frozenset({"__pycache__", ".git", ".hg", ".svn", "node_modules"})


@dataclass
class Corpus:
    """Files for training and validation, sorted by name.  hash: of all contents and of the split."""

    source: str
    hash: str = ""
    train: list[Path] = field(default_factory=list[Path])
    held_out: list[Path] = field(default_factory=list[Path])
    # share of each file that is training text, if there are too few files to split by file
    split_at: float | None = None
    marks: dict[Path, bytes] = field(default_factory=dict[Path, bytes])


def collect(source: str, held_out: float) -> Corpus:
    """Find the files of a source ("stdlib", "python", a file or a folder) and split them."""
    seen: set[bytes] = set()
    corpus, digest = Corpus(source), hashlib.sha256(f"{held_out}\0".encode())
    for path in _files(source):
        content = _text(path)
        if content is None:
            continue
        mark = hashlib.sha256(content).digest()
        if mark in seen:
            continue
        seen.add(mark)
        digest.update(mark)
        corpus.marks[path] = mark
        is_held_out = int.from_bytes(mark[:4]) < held_out * 2**32
        (corpus.held_out if is_held_out else corpus.train).append(path)
    found = sorted(corpus.train + corpus.held_out)
    if not found:
        rule = "text is a readable, non-empty UTF-8 file without zero bytes"
        fix = "name a folder with text files, a text file, 'stdlib' or 'python'"
        refuse(f"no text in {source!r}", rule, fix, error=DataError)
    if not corpus.train or not corpus.held_out:
        # too few files for both parts: each file is cut instead
        corpus.train, corpus.held_out, corpus.split_at = found, found, 1 - held_out
        if any(_cut(text, corpus.split_at) != round(corpus.split_at * len(text)) for text in map(_text, found) if text):
            digest.update(b"between characters")  # earlier versions cut at any byte and have another hash
    corpus.hash = digest.hexdigest()[:16]
    return corpus


def stamp_of(source: str, tokenizer: Path | None) -> str:
    """Hash of names, sizes and times of the files; no file is read. Python's own files count as constant."""
    digest = hashlib.sha256()
    files = () if source in PYTHONS_OWN else _files(source)
    for path in [*files, *([expanded(tokenizer)] if tokenizer else [])]:
        try:
            found = path.stat()
        except OSError:  # reading the file later raises the error
            continue
        digest.update(f"{path}\0{found.st_size}\0{found.st_mtime_ns}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def expanded(path: str | Path) -> Path:
    """Path with ~ expanded; ~name of an unknown user stays unchanged."""
    return Path(os.path.expanduser(path))


def contents(corpus: Corpus, part: str) -> Iterator[bytes]:
    """The files of one part, "train" or "held_out", as bytes."""
    for path in corpus.train if part == "train" else corpus.held_out:
        text = _text(path)
        if text is None or hashlib.sha256(text).digest() != corpus.marks[path]:
            rule, fix = "a corpus is read twice, with the same contents", "start again when no process writes there"
            refuse(f"{path} changed while it was read", rule, fix, error=DataError)
        if corpus.split_at is None:
            yield text
        else:
            cut = _cut(text, corpus.split_at)
            yield text[:cut] if part == "train" else text[cut:]


def _cut(text: bytes, share: float) -> int:
    """Byte offset at which a file is cut in two, between characters."""
    cut = round(share * len(text))
    while cut < len(text) and text[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def _text(path: Path) -> bytes | None:
    """The content of a text file; None for anything else."""
    try:
        with path.open("rb") as file:
            start = file.read(_PROBED)
            if not start.strip() or b"\0" in start:
                return None
            content = start + file.read()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return None
    except MemoryError:
        what = f"{path} does not fit into memory ({path.stat().st_size / 1e9:,.1f} GB)"
        rule, fix = "text is read file by file", "cut it into smaller files"
        raise DataError(message(what, rule=rule, fix=fix)) from None
    return None if b"\0" in content else content


def _files(source: str) -> Iterator[Path]:
    """All files of a source, sorted by name, so that every machine has the same order."""
    if source in PYTHONS_OWN:
        library = Path(sysconfig.get_path("stdlib"))
        packages = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
        if source == "stdlib":
            yield from sorted(library.glob("*.py"))
            return
        yield from _walk(library, ".py", packages)
        for folder in sorted(packages):
            yield from _walk(folder, ".py", set())
        return
    check_source(source)
    path = expanded(source)
    if path.is_file():
        yield path
    else:
        yield from _walk(path, "", set())


def check_source(source: str) -> None:
    """Raise unless the source exists."""
    path = expanded(source)
    if source not in PYTHONS_OWN and not (path.is_file() or (source.strip() and path.is_dir())):
        rule = "it is stdlib, python, or a file or folder that exists"
        fix = "check the path, or leave it out for Python's standard library"
        refuse(f"data source {source!r}", rule, fix, error=DataError)


def _walk(folder: Path, suffix: str, without: set[Path]) -> Iterator[Path]:
    """Files below a folder, sorted by relative path; folders of `without` are skipped."""
    for path in sorted(folder.rglob(f"*{suffix}"), key=lambda each: each.relative_to(folder).parts):
        inner = path.relative_to(folder).parts[:-1]
        if _SKIPPED.isdisjoint(inner) and without.isdisjoint(path.parents) and path.is_file():
            yield path
