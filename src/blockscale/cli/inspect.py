"""`blockscale inspect`: the weights of a checkpoint by kind: format, shape, bytes. Reads headers, not data."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import arguments

if TYPE_CHECKING:
    from ..checkpoints import Checkpoint
    from ..checkpoints.layouts import Entry


class Kind(NamedTuple):
    """Weights that differ in a number of their name alone."""

    name: str
    format: str
    shape: tuple[int, ...]


def run(folder: Path, /, layout: str | None = None, json: bool = False, check: bool = False) -> int:
    """Show what a checkpoint holds: its layout, and the format, shape and bytes of its weights. Numbers in names are
    written as *.

    With --check, also read every weight: scales that are not finite are an error.

    Args:
        folder: Folder of safetensors files, or a GGUF file.
        layout: Layout of the checkpoint, if config.json does not tell.
        json: Print one JSON object for each weight.
        check: Read all weights.
    """
    console = arguments.wide_console()
    with console.status("importing torch ..."):
        from .. import checkpoints

    found = checkpoints.open(folder, layout=layout)
    if check:
        with arguments.progress(console, len(found), "reading") as advance:
            for name in found:
                _ = found[name]
                advance(name)
    if json:
        for name, entry in found.entries.items():
            about = {"name": name, "format": entry.format or entry.dtype, "shape": entry.shape, "bytes": entry.nbytes}
            print(json_module.dumps(about | {"stored": dict(entry.parts)}))
        return 0
    _show(found)
    return 0


def kinds_of(entries: Mapping[str, Entry]) -> dict[Kind, list[Entry]]:
    """Weights by kind, sorted by name."""
    found: dict[Kind, list[Entry]] = {}
    for name, entry in sorted(
        entries.items(), key=lambda item: re.sub(r"\d+", lambda digits: digits[0].zfill(9), item[0])
    ):
        kind = Kind(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), entry.format or entry.dtype, entry.shape)
        found.setdefault(kind, []).append(entry)
    return found


def _show(found: Checkpoint) -> None:
    console = arguments.wide_console()
    files = {stored.file for stored in found.stored.values()}
    size = sum(entry.nbytes for entry in found.entries.values())
    text = f"{found.path}: {found.layout}, {len(found)} weights in {len(files)} files, {_bytes(size)}"
    console.print(text, highlight=False, markup=False)
    made = arguments.table("", ("weight", "count", "format", "shape", "bytes"), ("count", "bytes"))
    for kind, entries in kinds_of(found.entries).items():
        shape = " x ".join(map(str, kind.shape)) or "one value"
        name = kind.name if kind.name.isprintable() else repr(kind.name)
        made.add_row(name, str(len(entries)), kind.format, shape, _bytes(sum(entry.nbytes for entry in entries)))
    console.print(made, markup=False)


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"
