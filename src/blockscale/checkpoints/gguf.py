"""GGUF files (llama.cpp), read only: plain tensors and MXFP4 weights; other quantized types are listed, not read.

A header of version 2 or 3: metadata, then name, shape (innermost first), type and offset of each tensor, then data,
aligned. A block of MXFP4 is 17 bytes: its E8M0 byte, then 16 whose low nibbles are elements 0 to 15 and whose high
nibbles are 16 to 31.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, refuse
from ..formats.layout import round_up
from .files import Stored, damaged, is_shape, read_bytes
from .layouts.layout import Entry

_MXFP4 = 39
# name in safetensors headers and dtype, of types with plain values
_PLAIN = {
    0: ("F32", torch.float32), 1: ("F16", torch.float16), 30: ("BF16", torch.bfloat16), 28: ("F64", torch.float64),
    24: ("I8", torch.int8), 25: ("I16", torch.int16), 26: ("I32", torch.int32), 27: ("I64", torch.int64),
}  # fmt: skip
# bytes of metadata values by type; 8 is a string, 9 an array
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DEEPEST, _MOST_DIMS = 4, 4
SCALE = " scales"  # end of the name of an MXFP4 weight's scales


class GgufFile:
    """Tensors of a GGUF file.  config: its metadata, arrays as their length.  entries: weights by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                damaged(f"{path} has {path.stat().st_size} bytes", "a GGUF file has a header of 24 bytes or more")
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        magic, version = self._take("<4sI")
        if magic != b"GGUF" or version not in (2, 3):
            damaged(f"{path} begins with {magic!r}, version {version}", "GGUF files of version 2 and 3 are read")
        tensors, values = self._take("<QQ")
        self.config = dict[str, Any]()
        for _ in range(values):
            key = self._string()
            if key in self.config:
                damaged(f"{path} has the metadata {key!r} twice", "a key stands once")
            self.config[key] = self._value(*self._take("<I"))
        if self.config.get("split.count", 1) not in (0, 1):
            what, rule = f"{path} is one of {self.config['split.count']} files", "a checkpoint is one GGUF file"
            damaged(what, rule, "merge them with llama.cpp's gguf-split")
        self._types, self._places = dict[str, int](), dict[str, tuple[int, int]]()
        self.stored, self.entries = dict[str, Stored](), dict[str, Entry]()
        found, names = [], set[str]()
        for _ in range(tensors):
            found.append(self._tensor())
            if found[-1][0] in names or found[-1][0].endswith(SCALE):
                damaged(f"{path} has {found[-1][0]!r} twice, or a name of scales", "a tensor is stored once")
            names.add(found[-1][0])
        align = self.config.get("general.alignment", 32)
        if type(align) is not int or align < 1 or align & (align - 1):
            damaged(f"{path} has general.alignment {align!r}", "an alignment is a power of two")
        start = end = round_up(self._at, align)
        for name, shape, kind, offset in sorted(found, key=lambda each: each[3]):
            if offset % align or start + offset < end:
                what = f"{path}: {name!r} lies at offset {offset:,}, after byte {end - start:,}"
                damaged(what, f"tensors do not overlap, and start at multiples of {align}")
            end = start + offset + self._add(name, shape, kind, start + offset)

    def read(self, name: str) -> Tensor:
        """A copy of a tensor, or of the codes or scales of an MXFP4 weight."""
        whole = name.removesuffix(SCALE)
        kind, (start, size) = self._types[whole], self._places[whole]
        data = read_bytes(self.path, start, size)
        shape = self.entries[whole].shape
        if kind in _PLAIN:
            return data.view(_PLAIN[kind][1]).view(shape)
        if kind != _MXFP4:
            what, rule = f"{self.path}: {name!r} has GGML type {kind}", "plain tensors and MXFP4 are read"
            refuse(what, rule, "convert the original checkpoint", error=CheckpointError)
        blocks = data.view(*shape[:-1], shape[-1] // 32, 17)
        if name != whole:
            return blocks[..., 0].contiguous()
        low, high = blocks[..., 1:] & 0xF, blocks[..., 1:] >> 4
        codes = torch.cat((low, high), -1)  # in the order of elements
        return (codes[..., ::2] | codes[..., 1::2] << 4).flatten(-2)

    def _add(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> int:
        """Enter a tensor, once its bytes lie within the file; returns their number."""
        values = math.prod(shape)
        if kind in _PLAIN:
            size = values * _PLAIN[kind][1].itemsize
        elif kind == _MXFP4:
            if len(shape) < 2 or shape[-1] % 32 or not values:
                damaged(f"{self.path}: {name!r} is MXFP4 {shape}", "rows of MXFP4 are whole blocks of 32")
            size = values // 32 * 17
        else:  # its size is not known here
            size = 0
        if start + size > len(self._bytes):
            what = f"{self.path}: {name!r} lies at bytes {start:,} to {start + size:,} of {len(self._bytes):,}"
            damaged(what, "a tensor lies within its file")
        self._types[name], self._places[name] = kind, (start, size)
        if kind == _MXFP4:
            parts = {"data": name, "scale": name + SCALE}
            self.stored[name] = Stored(self.path, "U8", (*shape[:-1], shape[-1] // 2))
            self.stored[name + SCALE] = Stored(self.path, "U8", (*shape[:-1], shape[-1] // 32))
            self.entries[name] = Entry(name, "mxfp4", shape, parts, nbytes=size)
        else:
            dtype = _PLAIN[kind][0] if kind in _PLAIN else f"GGML type {kind}"
            self.stored[name] = Stored(self.path, dtype, shape)
            self.entries[name] = Entry(name, None, shape, {"data": name}, dtype, nbytes=size)
        return size

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape with the innermost axis last, type and offset of the next tensor."""
        name, (dims,) = self._string(), self._take("<I")
        if dims > _MOST_DIMS:
            damaged(f"{self.path}: {name!r} has {dims} dimensions", f"a tensor has at most {_MOST_DIMS}")
        shape = tuple(reversed(self._take(f"<{dims}Q")))
        if not is_shape(list(shape)):
            damaged(f"{self.path}: {name!r} has the shape {shape}", "a tensor lies within its file")
        return name, shape, *self._take("<IQ")  # pyright: ignore[reportReturnType]

    def _take(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(form)
        self._check(size)
        found = struct.unpack_from(form, self._bytes, self._at)
        self._at += size
        return found

    def _check(self, size: int) -> None:
        if size > len(self._bytes) - self._at:
            what = f"{self.path} ends within its header, at byte {len(self._bytes):,}"
            damaged(what, "a GGUF file begins with metadata and the places of its tensors")

    def _string(self) -> str:
        (size,) = self._take("<Q")
        self._check(size)
        found = self._bytes[self._at : self._at + size]
        self._at += size
        try:
            return found.decode()
        except UnicodeDecodeError:
            damaged(f"{self.path} has a name of {size} bytes that is no UTF-8", "names are UTF-8")

    def _value(self, kind: int, depth: int = 0) -> Any:
        """A metadata value; an array as its length."""
        if kind in _SIZES:
            return self._take("<" + _CODES[kind])[0]
        if kind == 8:
            return self._string()
        if kind != 9 or depth >= _DEEPEST:
            damaged(f"{self.path} has metadata of type {kind}", "values are numbers, strings, or arrays of them")
        of, count = self._take("<IQ")
        if of in _SIZES:
            self._check(count * _SIZES[of])
            self._at += count * _SIZES[of]
        else:
            self._check(count)  # each takes a byte or more
            for _ in range(count):
                self._value(of, depth + 1)
        return f"{count} values"
