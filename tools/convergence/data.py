"""Text of the runs: Python's standard library as bytes, split by file, identified by its hash.

Every machine has it, and it has structure at every length. Other Python versions have other text: only runs with the
same hash are compared.
"""

from __future__ import annotations

import functools
import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# one file in ten is never trained on
HELD_OUT = 10


@dataclass(frozen=True, eq=False)
class Text:
    """Bytes to train on and bytes to validate on, uint8 [n]; hash: of names and contents."""

    train: Tensor
    held_out: Tensor
    hash: str


@functools.cache
def standard_library() -> Text:
    """All top-level modules of the standard library, sorted by name."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    digest = hashlib.sha256()
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for place, file in enumerate(files):
        content = file.read_bytes()
        digest.update(file.name.encode() + b"\0" + content)
        parts[place % HELD_OUT == 0].append(content)
    train, held_out = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return Text(train, held_out, digest.hexdigest()[:16])


def batch(text: Tensor, count: int, length: int, seed: int) -> Tensor:
    """Sequences, int64 [count, length + 1]: a function of the seed alone, so that runs are paired and resumable."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length - 1, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(length + 1)].long()
