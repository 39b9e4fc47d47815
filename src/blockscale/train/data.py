"""Memory-mapped symbols (bytes or tokens), and batches that are a pure function of the seed and the step.

A corpus becomes two files of symbols in the cache: uint8 for bytes, int32 for a tokenizer, a separator after every
file. They are written under a temporary name and renamed, so an interrupted run leaves no partial files, and later runs
with the same text and tokenizer reuse them. All sequences of a step are sampled at once by (seed, step) and split among
its microbatches, so that accumulation sees the same sequences as one large batch, and so does a resumed run.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import env
from ..errors import DataError, message, option, refuse
from .config import DataConfig
from .corpus import Corpus, collect, contents, expanded, stamp_of
from .files import write_synced

VERSION = 1
_NUMBERS = b"by the largest\0"  # part of the cache key: the vocabulary is the largest token id + 1
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_PARTS = ("train", "held_out")


@dataclass(frozen=True, eq=False)
class Symbols:
    """Text as symbols.  train, held_out: [n], memory-mapped.  vocabulary: number of different symbols.
    bytes_per_symbol: of the held-out text, to turn nats per symbol into bits per byte.  hash: of text and tokenizer."""

    train: Tensor
    held_out: Tensor
    vocabulary: int
    bytes_per_symbol: float
    hash: str

    def batch(self, seed: int, step: int, micro: int, batch: int, accumulate: int, sequence: int) -> Tensor:
        """Sequences of a microbatch, int64 [batch, sequence + 1], sampled with replacement."""
        generator = torch.Generator().manual_seed(_mixed(seed, step))
        starts = torch.randint(len(self.train) - sequence, (accumulate, batch), generator=generator)
        return _pieces(self.train, starts[micro], sequence)

    def validation(self, place: int, batches: int, batch: int, sequence: int) -> Tensor:
        """Sequences of a validation batch, int64 [batch, sequence + 1]: the same in every run, evenly spaced."""
        room = len(self.held_out) - sequence - 1
        starts = torch.arange(batches * batch) * room // max(1, batches * batch - 1)
        return _pieces(self.held_out, starts.view(batches, batch)[place], sequence)


def _mixed(seed: int, step: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{step}".encode()).digest()[:7])


def _pieces(text: Tensor, starts: Tensor, sequence: int) -> Tensor:
    return text[starts[:, None] + torch.arange(sequence + 1)].long()


def load(config: DataConfig) -> Symbols:
    """Symbols of a config, from the cache or tokenized now. Reads all of the text once, to hash it."""
    stamp = stamp_of(config.source, config.tokenizer)
    symbols = _prepared(config.source, config.tokenizer, config.held_out, config.cache, stamp)
    for part in _PARTS:
        if len(getattr(symbols, part)) <= config.sequence + 1:
            refuse(
                f"{len(getattr(symbols, part))} symbols to {'train' if part == 'train' else 'validate'} on, "
                f"for sequences of {config.sequence}",
                rule="both parts of the text have to be longer than one sequence",
                fix=f"use more text, or a shorter {option('data.sequence')}",
                error=DataError,
            )
    if not symbols.bytes_per_symbol:
        rule = f"a share of {config.held_out} of every file is for validation"
        fix = f"pass a larger {option('data.held_out')}, such as 0.1"
        refuse("the validation text has only separators", rule, fix, error=DataError)
    return symbols


@functools.lru_cache(maxsize=4)
def _prepared(source: str, tokenizer: Path | None, held_out: float, cache: Path | None, stamp: str) -> Symbols:
    """Cached symbols, shared by the runs of a comparison as long as `stamp` is the same."""
    corpus = collect(source, held_out)
    named = hashlib.sha256(b"bytes" if tokenizer is None else _NUMBERS + _read_tokenizer(tokenizer)).hexdigest()
    key = hashlib.sha256(f"{VERSION}:{corpus.hash}:{named}".encode()).hexdigest()[:16]
    folder = (cache or env.cache_folder("corpora")) / key
    dtype = torch.uint8 if tokenizer is None else torch.int32
    was_there = folder.exists()
    found = _found(folder, dtype)
    if found is None:
        if was_there:  # damaged; a folder that another process has just made is kept
            shutil.rmtree(folder, ignore_errors=True)
        _write(folder, corpus, tokenizer)
        found = _found(folder, dtype)
    assert found is not None
    return found


def _found(folder: Path, dtype: torch.dtype) -> Symbols | None:
    """Symbols of a cache folder; None if it is missing, incomplete or damaged."""
    try:
        about = json.loads((folder / "about.json").read_text())
        train, held_out = (_mapped(folder / f"{part}.bin", int(about["symbols"][part]), dtype) for part in _PARTS)
        return Symbols(train, held_out, int(about["vocabulary"]), float(about["bytes_per_symbol"]), folder.name)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError, LookupError, TypeError):
        return None


def _mapped(path: Path, count: int, dtype: torch.dtype) -> Tensor:
    if path.stat().st_size != count * dtype.itemsize:
        raise ValueError(f"{path} was cut off")
    return torch.from_file(str(path), shared=False, size=count, dtype=dtype) if count else torch.empty(0, dtype=dtype)


def _write(folder: Path, corpus: Corpus, tokenizer: Path | None) -> None:
    """Write a cache folder under a temporary name, then rename it, so that a folder that exists is complete."""
    encode, vocabulary = (None, 256) if tokenizer is None else _encoder(tokenizer)
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    try:
        fresh.mkdir(parents=True, exist_ok=True)
        counts = {part: _encode(fresh / f"{part}.bin", contents(corpus, part), encode) for part in _PARTS}
        symbols, size = counts["held_out"]
        about = {
            "source": corpus.source,
            "text": corpus.hash,
            "files": {"train": len(corpus.train), "held_out": len(corpus.held_out)},
            "symbols": {part: count for part, (count, _) in counts.items()},
            "vocabulary": vocabulary,
            "bytes_per_symbol": size / max(1, symbols),
        }
        write_synced(fresh / "about.json", json.dumps(about, indent=1) + "\n")
        fresh.rename(folder)
    except OSError as error:
        if not (folder / "about.json").exists():  # another process may have been quicker
            what = f"text could not be tokenized into {folder.parent}: {error}"
            rule = "symbols are kept on disk: one byte for each byte of text, or four for each token"
            fix = f"free some space, or name another folder with {option('data.cache')}"
            raise DataError(message(what, rule=rule, fix=fix)) from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _encode(path: Path, texts: Iterable[bytes], encode: Callable[[str], list[int]] | None) -> tuple[int, int]:
    """Write symbols to a file; returns the numbers of symbols and of bytes of text."""
    symbols = size = 0
    with path.open("wb") as file:
        for text in texts:
            size += len(text)
            if encode is None:
                file.write(text + b"\0")
                symbols += len(text) + 1
            else:
                codes = array("i", encode(text.decode()))
                codes.tofile(file)
                symbols += len(codes)
        file.flush()
        os.fsync(file.fileno())
    return symbols, size


def _read_tokenizer(path: Path) -> bytes:
    try:
        return expanded(path).read_bytes()
    except OSError as error:
        rule = "it is a tokenizer.json as Hugging Face writes it"
        fix = "check the path, or leave it out to train on bytes"
        raise DataError(message(f"tokenizer {str(path)!r}: {error.strerror}", rule=rule, fix=fix)) from None


def _encoder(path: Path) -> tuple[Callable[[str], list[int]], int]:
    """Function from text to token ids with a final separator, and the vocabulary size."""
    try:
        from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]
    except ImportError:
        what = f"tokenizer {str(path)!r} without the package tokenizers"
        rule = "a tokenizer.json is read by Hugging Face's package"
        fix = "pip install tokenizers, or leave it out to train on bytes"
        raise DataError(message(what, rule=rule, fix=fix)) from None
    try:
        tokenizer: Any = Tokenizer.from_file(str(expanded(path)))
    except Exception as error:
        rule = "it is a tokenizer.json as Hugging Face writes it"
        fix = "name such a file, or leave it out to train on bytes"
        raise DataError(message(f"tokenizer {str(path)!r}: {error}", rule=rule, fix=fix)) from None
    found = [tokenizer.token_to_id(name) for name in SEPARATORS]
    end = [each for each in found if each is not None][:1]
    most = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)  # ids may have gaps
    return lambda text: [*tokenizer.encode(text, add_special_tokens=False).ids, *end], most + 1
