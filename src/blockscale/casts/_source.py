"""What a cast kernel reads, and by which tiles: properties of tensors and plans, worked out on the host once per shape.

docs/design/casts.md has the figures behind the tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..formats.cast_spec import CastPlan
from ..formats.layout import round_up


class Source(NamedTuple):
    """What is cast, and from what: `name` as in `_kernels.py`, x [..., rows, ...] and its companions, and the columns
    of the result."""

    name: str
    x: Tensor
    columns: int
    y: Tensor | None = None
    z: Tensor | None = None
    indices: Tensor | None = None
    eps: float = 0.0

    @property
    def matrices(self) -> Tensor:
        return self.x.reshape(self.x.shape[:-2].numel(), self.x.shape[-2], self.x.shape[-1])

    @property
    def rows(self) -> int:
        return self.x.shape[-2] if self.indices is None else self.indices.shape[0]

    @property
    def has_factors(self) -> bool:
        """Whether y is a factor of each row, not a matrix like x."""
        return self.name in ("rmsnorm", "rmsnorm_rows", "weighted")

    @property
    def walked(self) -> int:
        """Columns that programs walk over: a backward of SwiGLU writes two tiles for each that it reads."""
        return self.columns // 2 if self.name == "swiglu_backward" else self.columns

    @property
    def mode(self) -> str:
        """How pairs are loaded: by whole words where every pair lies on one, else value by value."""
        tensors = [self.matrices] if self.y is None or self.has_factors else [self.matrices, self._y()]
        if self.columns % (4 if self.name.startswith("swiglu_backward") else 2):
            return "any"
        return WORDS[self.x.dtype] if all(map(in_pairs, tensors)) else "any"

    @property
    def held(self) -> str:
        """How a tile stays in registers: the mode, except that what is computed in fp32 is kept as values."""
        return "any" if self.mode == "fp32" and self.name != "plain" else self.mode

    def arguments(self) -> tuple[Tensor | None, ...]:
        """x, y, z and indices as kernels take them."""
        y = None if self.y is None else self._y() if self.has_factors else as_words(self._y(), self.mode)
        z = self.z
        if z is not None and z.dtype == self.x.dtype and self.mode in ("bf16", "fp16") and in_pairs(z):
            z = as_words(z, self.mode)
        return as_words(self.matrices, self.mode), y, z, self.indices

    def steps(self) -> tuple[int, ...]:
        """Strides of x and y, in words."""
        divisor = 1 if self.mode == "any" else 2
        y = (0, 0, 0) if self.y is None or self.has_factors else self._y().stride()
        x = self.matrices.stride()
        return x[0] // divisor, x[1] // divisor, x[2], y[0] // divisor, y[1] // divisor, y[2]

    @property
    def in_place(self) -> bool:
        """Whether kernels read the tensors themselves; leading axes that make no single axis are copied."""
        y = None if self.y is None or self.has_factors else self.y
        return self.matrices.data_ptr() == self.x.data_ptr() and (y is None or self._y().data_ptr() == y.data_ptr())

    def _y(self) -> Tensor:
        assert self.y is not None
        return self.y if self.has_factors else self.y.reshape(self.y.shape[:-2].numel(), *self.y.shape[-2:])


def plain(x: Tensor) -> Source:
    """A tensor [..., M, K] as it is."""
    return Source("plain", x, x.shape[-1])


def dense(vector: Tensor | None) -> Tensor | None:
    """What kernels read without a stride: group ends, maxima, weights of a norm, indices."""
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()


WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def in_pairs(x: Tensor) -> bool:
    """Whether every pair of neighbours along the last axis lies on a whole word."""
    even = x.shape[-1] % 2 == 0 and all(step % 2 == 0 for step in x.stride()[:-1])
    return even and x.stride(-1) == 1 and x.data_ptr() % (2 * x.element_size()) == 0


class Tile(NamedTuple):
    """MQ groups of J rows by BK columns, for a program of `warps`; see `_tiles.py`. `registers`: the most a thread may
    take, so that three programs fit on a multiprocessor. down: programs follow each other down the rows, so that what
    they write of a column lies together; otherwise along the columns. narrow: a thread loads two pairs of a row instead
    of four, so that with all J rows of a rotation it holds 64 values and none of them cross threads."""

    J: int
    MQ: int
    BK: int
    warps: int
    registers: int | None = None
    down: bool = False
    narrow: bool = False


def tile_shape(row: CastPlan | None, col: CastPlan | None, *, sm: int, source: Source, whole: bool) -> Tile:
    """The tile for a cast. whole: tiles cover the source exactly, and there are no groups.

    Measured on an H200, see docs/design/casts.md; the ahead-of-time tests hold every choice to zero spills.
    """
    plans = [plan for plan in (row, col) if plan is not None]
    if source.name == "rmsnorm_rows":
        assert row is not None
        width = max(power_of_two(source.columns), 4 * row.spec.block[1])  # four scales lie together in some layouts
        return Tile(1, max(1, 8192 // width), width, max(4, width // 2048))
    light = source.held in ("bf16", "fp16") and all(plan.stream is None and plan.hadamard is None for plan in plans)
    four_bits = any(plan.spec.codes_per_byte == 2 for plan in plans)
    # codes that are made by integers take registers that conversions do not
    converted = sm >= 89 and all(plan.spec.element.name in ("e4m3", "e5m2") for plan in plans)
    measured = sm == 90  # limits of registers are worth what they cost where that was seen
    if col is None:
        assert row is not None
        if row.spec.block[0] == 128:
            return Tile(1, 128, 128, 4 if light else 8)
        # the widest strip that wastes least
        width = min((1024, 512, 256, 128), key=lambda width: (round_up(source.walked, width), -width))
        rows = max(row.spec.block[0], (8 if light else 4) * 1024 // width)
        return Tile(1, rows, width, 4 if light or rows * width <= 8192 else 8)
    if row is None and four_bits and source.held in ("bf16", "fp16") and not light:
        limited = sm == 90 and col.stream is not None and not source.name.startswith("swiglu_backward")
        return Tile(16, 4, 128, 4, 168 if limited else None, down=True, narrow=True)
    if source.name == "swiglu_backward_any":  # three sources, and the addresses of none are known to lie together
        if four_bits:  # eight rows make a word
            return Tile(16, 8, 128, 16)
        return Tile(4, 32, 128, 8 if light and converted else 16)
    if any(plan.stream is not None for plan in plans):  # random words take registers, too
        return Tile(8, 16, 128, 16)
    if row is None:
        if source.held == "any":
            return Tile(8, 16, 128, 16)
        if whole and 128 not in col.spec.block and not four_bits:
            return Tile(16, 16, 64, 4)
        if light and not four_bits:
            return Tile(8, 16, 128, 4 if converted else 8, down=128 in col.spec.block)
        wide = source.held == "fp32" or (col.hadamard is not None and sm >= 100)
        return Tile(16, 8, 128, 8 if wide else 4, down=True)
    if four_bits:
        return Tile(16, 8, 128, 16 if source.held == "any" else 4 if light else 8)
    if not (light and converted):
        return Tile(4, 32, 128, 8 if source.held == "fp32" and not converted and sm < 100 else 16)
    if not whole:
        if source.columns % 8:  # rows start off 16 bytes: an address for each piece of one
            return Tile(4, 32, 128, 8)
        if source.name == "swiglu_backward":  # three sources and two tiles: 168 registers spill hundreds
            return Tile(4, 32, 128, 8, 128) if measured else Tile(4, 32, 128, 16)
        # a third program is worth the few registers that then live in memory, but for fp16, where they are many
        limited = measured and (source.held == "bf16" or source.indices is not None)
        return Tile(8, 16, 128, 4, 168 if limited else None)
    if source.name != "plain" and all(plan.spec.family == "fp8" for plan in plans):
        return Tile(4, 32, 128, 8, 128) if measured else Tile(4, 32, 128, 16)
    if source.name == "swiglu" and all(plan.spec.family == "mx" and not plan.spec.is_2d for plan in plans):
        return Tile(4, 16, 128, 4, 96 if measured else None)
    return Tile(8, 16, 128, 4, 168 if source.name != "swiglu_backward" and sm >= 90 else None)


def power_of_two(n: int) -> int:
    """The power of two at or above n >= 1."""
    return 1 << (n - 1).bit_length()


def as_words(x: Tensor, mode: str) -> Tensor:
    """x as the words that pairs are loaded by."""
    return x if mode == "any" else x.view(torch.int64 if mode == "fp32" else torch.int32)
